"""The form of what optimizers and schedulers save, made from the optimizers and schedulers themselves."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bilevel.checkpoint.layout import Count, Each, Free, Maybe, Number, Step, Within, check_form, describe, form_of
from bilevel.parallel import whole

MOVING = {
    "_get_lr_called_within_step",
    "_is_initial",
    "_last_lr",
    "_schedulers",
    "_step_count",
    "T_cur",
    "T_i",
    "base_lrs",
    "best",
    "cooldown_counter",
    "last_epoch",
    "lr_lambdas",
    "num_bad_epochs",
}
"""What changes in the schedulers of PyTorch while they are used."""

LARGEST = torch.finfo(torch.float32).max
"""Of a setting of an optimizer; steps convert it to the dtype of the weights."""

NEVER_NEGATIVE = {
    "col_var",
    "exp_avg_sq",
    "exp_inf",
    "max_exp_avg_sq",
    "mu_product",
    "row_var",
    "square_avg",
    "acc_delta",
    "step",
    "step_size",
    "sum",
    "variance",
}
"""What optimizers of PyTorch remember, and take roots of or divide by."""


def of_buffers(own: Mapping[str, Any]) -> dict[str, Any]:
    """The form of parameters and buffers by name; a running variance is never negative.

    Args:
        own: Fresh.

    Returns:
        The form.
    """
    found = {name: value if isinstance(value, Tensor) else form_of(value) for name, value in own.items()}
    return {name: Within(form, 0.0) if name.endswith("running_var") else form for name, form in found.items()}


def of_scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    """The form of the state of a scheduler, which has made no step or any number of them.

    Args:
        scheduler: Fresh.

    Returns:
        The form. Of one that PyTorch knows, the settings have to be the same.
    """
    return _of_scheduler(scheduler.state_dict(), known=_is_of_torch(scheduler))


def _of_scheduler(own: Mapping[str, Any], *, known: bool) -> dict[str, Any]:
    form: dict[str, Any] = {}
    for key, value in own.items():
        if key in ("_last_lr", "base_lrs") and isinstance(value, list):
            form[key] = [
                Number(highest=LARGEST) if isinstance(entry, float | int) else form_of(entry) for entry in value
            ]
        elif key == "_schedulers" and isinstance(value, list):
            form[key] = [_of_scheduler(part, known=known) for part in value if isinstance(part, Mapping)]
        elif key == "last_epoch" and isinstance(own.get("total_steps"), int):
            form[key] = Count(min(value, 0), own["total_steps"])
        elif key == "T_i" and type(value) is int:
            form[key] = Count(value)
        elif key in MOVING or (not known and value is not None):
            form[key] = form_of(value) if known or not isinstance(value, list | tuple | Mapping | str) else Free()
        else:
            form[key] = value if known else Free()
    return form


def check_optimizer(path: str, saved: Any, optimizer: Optimizer, scheduler: Any) -> None:
    """See whether an optimizer could have saved this, with the parameters that it has.

    Args:
        path: Where it is, for the message.
        saved: Of ``state_dict``.
        optimizer: That is to go on.
        scheduler: What the scheduler of this optimizer saved, if there is one.

    Raises:
        ValueError: If it could not.
    """  # noqa: DOC502
    own = optimizer.state_dict()
    check_form(path, saved, {key: Each(Free(), list) if key == "param_groups" else Free() for key in own})
    groups, path_of_groups = saved["param_groups"], f"{path}['param_groups']"
    check_form(path_of_groups, groups, [_of_group(group) for group in own["param_groups"]])
    scheduled = scheduler.get("_last_lr") if isinstance(scheduler, dict) else None
    for index, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        given = isinstance(scheduled, list) and index < len(scheduled) and scheduled[index] == group["lr"]
        # A rate that a scheduler has made, such as a negative one, is not judged by what the user may give.
        _check_range(f"{path_of_groups}[{index}]", group | ({"lr": live["lr"]} if given else {}), live, optimizer)
    if _is_of_torch(optimizer):
        _check_memory(f"{path}['state']", saved["state"], groups, optimizer)


def _of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers may have moved; the rest is as it was."""
    return {key: value if key in ("params", "param_names") else _of_setting(value) for key, value in group.items()}


def _of_setting(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return Number(highest=LARGEST, inf=math.isinf(value))
    if isinstance(value, list | tuple):
        return type(value)(_of_setting(entry) for entry in value)
    return value


def _check_range(path: str, saved: Mapping[str, Any], live: Mapping[str, Any], optimizer: Optimizer) -> None:
    """See whether the class of an optimizer takes these settings."""
    names = inspect.signature(type(optimizer)).parameters.keys() & live.keys() - {"params"}
    param = torch.zeros(1, dtype=live["params"][0].dtype, device=live["params"][0].device, requires_grad=True)
    try:
        type(optimizer)([param], **{name: live[name] for name in names})
    except Exception:  # one that is not made from its settings
        return
    for name in sorted(names):
        try:
            type(optimizer)([param], **{other: (saved if other == name else live)[other] for other in names})
        except Exception as error:
            raise ValueError(f"{path}[{name!r}] is {describe(saved[name])}: {' '.join(f'{error}'.split())}") from error


def _check_memory(path: str, saved: Any, groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """Compare what an optimizer of PyTorch is said to remember with what it remembers after one step."""
    params = [
        (param, group) for group, live in zip(groups, optimizer.param_groups, strict=True) for param in live["params"]
    ]
    if not isinstance(saved, dict) or not all(type(key) is int and 0 <= key < len(params) for key in saved):
        raise ValueError(f"{path} has {describe(saved)}, not the numbers of {len(params)} parameters.")
    known: dict[Any, Any] = {}
    for index, memory in saved.items():
        if isinstance(memory, dict) and not memory:  # as before the first step
            continue
        param, group = params[index]
        key = (param.shape, param.dtype, param.device, id(group))
        if key not in known:
            known[key] = _after_a_step(param, group, optimizer)
        if known[key] is not None:
            check_form(f"{path}[{index}]", memory, known[key])


def _after_a_step(param: Tensor, group: dict[str, Any], optimizer: Optimizer) -> dict[str, Any] | None:
    """What a copy of an optimizer remembers of a parameter; None for one that makes no step with a gradient of zero."""
    zeros = torch.zeros(param.shape, dtype=param.dtype, device=param.device, requires_grad=True)
    if isinstance(optimizer, torch.optim.SGD):  # the momentum may have been there before, or come later
        return {"momentum_buffer": Maybe(zeros.detach().to("meta"))}
    zeros.grad = torch.zeros_like(zeros)
    copy = object.__new__(type(optimizer))
    groups = [group | {"params": [zeros]}]
    known: list[dict[str, Any]] = [{}, optimizer.state.get(param, {})]
    for memory in known:  # the second for those that remember something from the start
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        state[zeros] = {
            name: whole(value).clone() if isinstance(value, Tensor) else value for name, value in memory.items()
        }
        try:
            copy.__setstate__({"defaults": optimizer.defaults, "state": state, "param_groups": groups})
            copy.step()
        except Exception:
            continue
        return {name: _of_memory(name, value) for name, value in state[zeros].items()}
    return None


def _of_memory(name: str, value: Any) -> Any:
    if name == "step":
        return Step()
    if not isinstance(value, Tensor):
        return form_of(value)
    own = value.to("meta")  # shape and dtype, without memory
    return Within(own, 0.0) if value.is_floating_point() and name in NEVER_NEGATIVE else own


def _is_of_torch(value: object) -> bool:
    return type(value).__module__.startswith("torch.")
