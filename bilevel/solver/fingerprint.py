"""What a solver is made of, by the names of the arguments: so that a changed argument is not taken for the old one."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from bilevel.checkpoint.layout import Each, Free, Plain, check_form
from bilevel.hyper import Hyper
from bilevel.regularizers.decay import DecayRate
from bilevel.solver.code import code_of, digest, plain_repr

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver

Fingerprint = dict[str, dict[str, Any]]
"""By argument, and within it by setting: plain types."""

OPTIMIZERS = {
    "weights": "inner_optimizer",
    "response": "inner_optimizer for the response",
    "hyper": "outer_optimizer",
    "scale": "outer_optimizer for the scale",
}
SCHEDULERS = {name: argument.replace("optimizer", "scheduler") for name, argument in OPTIMIZERS.items()}
FIXED = ("method", "hyper", "weights", "dtype")
"""What cannot be taken over: the state of the run has another form then."""

SAME_STATE = ({"Adam", "AdamW"},)
"""Optimizers that remember the same."""

STATE = {"state": Free(), "param_groups": Each(Each(Free()), list)}
"""What is taken over of an optimizer, whatever its class."""

SHAPING = ("amsgrad", "centered", "momentum", "capturable")
"""Settings on which it depends what an optimizer remembers."""


def fingerprint(solver: Solver, seed: int, *, compile: bool) -> Fingerprint:
    """Describe a solver, before its first step.

    Args:
        solver: With its optimizers.
        seed: Of its random streams.
        compile: Whether its steps are compiled.

    Returns:
        The description.
    """
    problem, clip = solver.problem, solver.optimization.clip
    found: Fingerprint = {"method": {"": plain_repr(solver.method)}}
    found["hyper"] = {
        name: f"{entry.low:g} to {entry.high:g}, discrete {entry.discrete}, shared {entry.shared}, "
        f"shape {tuple(entry.init.shape)}{_decayed(entry)}"
        for name, entry in problem.space.hyper.items()
    }
    found["initial hyper"] = {
        name: float(entry.init) if entry.init.numel() == 1 else digest(entry.init)
        for name, entry in problem.space.hyper.items()
    }
    found["weights"] = {name: f"{tuple(value.shape)}" for name, value in problem.params.items()}
    found["dtype"] = {"": str(problem.dtype)}
    found["device"] = {"": problem.device.type}
    found["outer_mode"] = {"": problem.outer_mode}
    found |= {f"{level}_clip": {"": limit} for level, limit in clip.items()}
    found |= {"seed": {"": seed}, "compile": {"": compile}}
    for name, optimizer in solver.optimizers.items():
        own: dict[str, Any] = {"class": type(optimizer).__name__}
        for index, group in enumerate(optimizer.param_groups):
            of = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
            group = group | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})
            own |= {f"{k}{of}": _plain(v) for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}
        found[OPTIMIZERS[name]] = {key: value for key, value in own.items() if value is not NotImplemented}
        scheduler = solver.schedulers.get(name)
        found[SCHEDULERS[name]] = {"class": "none"} if scheduler is None else _of_scheduler(scheduler)
    functions = {"network": problem.module, "initial": problem.user_initial, **problem.user_losses}
    found |= {
        name: {"code": code_of(function), "python": list(sys.version_info[:2])} for name, function in functions.items()
    }
    return found


def _decayed(entry: Hyper) -> str:
    """Which weights decoupled decay is for; no loss tells."""
    if isinstance(entry, DecayRate) and entry.decoupled:
        return f", decays {', '.join(entry.weights)}"
    return ""


def differences(before: Any, now: Fingerprint) -> dict[str, str]:
    """Compare two fingerprints.

    Args:
        before: That of the checkpoint.
        now: That of this call.

    Returns:
        What changed, by argument, in words.

    Raises:
        ValueError: If the first one is no fingerprint.
    """  # noqa: DOC502
    check_form("fingerprint", before, Each(Each(Plain())))
    found = {}
    for name in {**before, **now}:
        old, values = before.get(name, {}), now.get(name, {})
        if old == values:
            continue
        if "code" in values:
            # Code of another version of Python cannot be compared.
            if not _is_version(old.get("python")) or old["python"] == values["python"] or old.keys() != values.keys():
                what = "has other settings, code or frozen weights" if name == "network" else "is another function"
                found[name] = f"{name} {what}" + ("" if name == "network" else ", or reads other values")
            continue
        keys = [key for key in {**old, **values} if old.get(key, NotImplemented) != values.get(key, NotImplemented)]
        key = next(key for key in ("", "class", *keys) if key in keys)
        one, other = (values.get(key, values.get("class", "nothing")) for values in (old, values))
        what = f"{name}: {key}" if key else name
        hashed = any(re.search(r"\b[0-9a-f]{64}\b", f"{value}") for value in (one, other))
        was = "is another one" if hashed else f"was {_show(one)}, this call has {_show(other)}"
        found[name] = f"{what} {was}"
    return found


def _is_version(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(part) is int and part > 0 for part in value)


def taken_over(solver: Solver, state: dict[str, Any], before: Fingerprint, changed: dict[str, str]) -> dict[str, Any]:
    """The state of a checkpoint, with the settings of this solver where they changed.

    Args:
        solver: Fresh.
        state: Of another solver.
        before: The fingerprint of that one.
        changed: From :func:`differences`.

    Returns:
        A state that fits the solver.
    """
    own = solver.state_dict()
    places = {"streams": Free(), "schedulers": Each(Free()), "optimizers": {name: STATE for name in own["optimizers"]}}
    check_form("state", {key: state.get(key) for key in places} if isinstance(state, dict) else state, places)
    state = copy.copy(state)
    state["optimizers"], state["schedulers"] = dict(state["optimizers"]), dict(state["schedulers"])
    if "seed" in changed or "device" in changed:
        state["streams"] = own["streams"]
    for name, mine in own["optimizers"].items():
        argument, schedule = OPTIMIZERS[name], SCHEDULERS[name]
        if argument not in changed and schedule not in changed:
            continue
        kept = state["optimizers"][name]["state"]
        groups = [
            [f"{group.get('params')}" for group in one["param_groups"]] for one in (state["optimizers"][name], mine)
        ]
        fits = groups[0] == groups[1] and _fits(before.get(argument, {}), type(solver.optimizers[name]).__name__, mine)
        if argument in changed and not fits:
            kept = mine["state"]
        state["optimizers"][name] = mine | {"state": kept}
        state["schedulers"].pop(name, None)
        if name in own["schedulers"]:
            state["schedulers"][name] = own["schedulers"][name]
    return state


def _fits(before: dict[str, Any], now: str, own: dict[str, Any]) -> bool:
    old = before.get("class")
    if old != now and not any({old, now} <= family for family in SAME_STATE):
        return False
    group = own["param_groups"][0]
    return now == "SGD" or all(before.get(key, group.get(key)) == group.get(key) for key in SHAPING)


def _of_scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(scheduler).__name__}
    for key, value in vars(scheduler).items():
        parts = value if isinstance(value, list | tuple) else [value]
        if parts and all(isinstance(part, LRScheduler) for part in parts):
            for index, part in enumerate(parts):
                name = f"{type(part).__name__} {index}"
                found |= {f"{name}, {inner}": entry for inner, entry in _of_scheduler(part).items()}
        elif key not in ("optimizer", "base_lrs", "_last_lr") and (entry := _plain(value)) is not NotImplemented:
            found[key] = entry
    return found


def _plain(value: Any) -> Any:
    """A setting that can be compared after it was written and read; NotImplemented for one that cannot."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else digest(value)
    if isinstance(value, list | tuple):
        entries = [_plain(entry) for entry in value]
        return NotImplemented if any(entry is NotImplemented for entry in entries) else entries
    if isinstance(value, dict):
        return _plain([[key, entry] for key, entry in value.items()])
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return code_of(value)
    return value if value is None or isinstance(value, bool | int | float | str) else NotImplemented


def _show(value: Any) -> str:
    text = " ".join(f"{value}".split())
    return text if len(text) <= 120 else f"{text[:117]}..."
