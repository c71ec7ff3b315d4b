"""Parameters in groups, their optimizers and schedulers, and clipping: how a gradient becomes an update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

from bilevel.arguments import Parameters, check_clip, make_optimizer, make_scheduler
from bilevel.parallel import divided, is_sharded, whole
from bilevel.response import BestResponse
from bilevel.structure import Dense, Rowwise

HALF = (torch.float16, torch.bfloat16)
OptimizerFactory = Callable[[Parameters], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
Gradients = dict[str, list[Tensor | None]]
"""One gradient per parameter of every group; None where there is no dependence."""

FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers with a kernel that updates a whole weight in one pass on a CPU. Theirs is the same update, to rounding."""

GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
"""Of steps of all optimizers of the program."""

LEVELS = {"weights": "inner", "response": "inner", "hyper": "outer", "scale": "outer"}
"""The groups of parameters, and the level at which each is trained."""


@final
class Optimization:
    """The parameters of a run by group: ``weights``, ``response``, ``hyper``, ``scale``, as far as there are any.

    Attributes:
        params: By group, as the optimizers have them: sharded, if each process keeps a part only.
        whole: By group, as the response has them, in the same order.
        optimizers: By group.
        schedulers: By group.
    """

    def __init__(
        self,
        response: BestResponse,
        vector: nn.Parameter,
        *,
        inner: OptimizerFactory | None,
        outer: OptimizerFactory | None,
        response_optimizer: OptimizerFactory | None,
        inner_scheduler: SchedulerFactory | None,
        outer_scheduler: SchedulerFactory | None,
        inner_clip: float | None,
        outer_clip: float | None,
    ) -> None:
        """Make the optimizers. The arguments are those of :class:`bilevel.Solver`."""
        for_weights = partial(torch.optim.Adam, lr=1e-3) if inner is None else inner
        for_response = for_weights if response_optimizer is None else response_optimizer
        for_hyper = partial(torch.optim.Adam, lr=2e-2, betas=(0.9, 0.99)) if outer is None else outer
        factories: dict[str, tuple[str, OptimizerFactory]] = {
            "weights": ("inner_optimizer", for_weights),
            "response": ("response_optimizer", for_response),
            "hyper": ("outer_optimizer", for_hyper),
            "scale": ("outer_optimizer", for_hyper),
        }
        schedulers = {"inner": inner_scheduler, "outer": outer_scheduler}
        self.clip = {
            "inner": check_clip("inner_clip", inner_clip),
            "outer": check_clip("outer_clip", outer_clip),
        }
        groups, shards = _group(response, vector), response.inner.shards
        self.whole: Mapping[str, list[nn.Parameter]] = groups
        if shards is not None:
            groups = {
                name: Parameters((own, shards.of(param)) for own, param in params.named_parameters())
                for name, params in groups.items()
            }
        self.params: Mapping[str, list[nn.Parameter]] = groups
        self.optimizers: dict[str, Optimizer] = {}
        self.schedulers: dict[str, LRScheduler] = {}
        for name, params in groups.items():
            self.optimizers[name] = make_optimizer(*factories[name], params)
            level = LEVELS[name]
            scheduler = schedulers[level]
            if scheduler is not None:
                self.schedulers[name] = make_scheduler(f"{level}_scheduler", scheduler, self.optimizers[name])
        if response_optimizer is None:
            # The decay of the weights is part of the inner problem; that of a response would pull it towards zero.
            for group in self.optimizers["response"].param_groups if "response" in self.optimizers else []:
                group.update({"weight_decay": 0} if "weight_decay" in group else {})
        # A method that differentiates the update of the weights makes it as it differentiates it.
        self._fusible = {name for name in groups if not (name == "weights" and response.moves_weights)}
        self._fresh = {
            name: copy.deepcopy(optimizer.state_dict()["state"])
            for name, optimizer in self.optimizers.items()
            if LEVELS[name] == "inner"
        }

    def set_gradients(self, gradients: Gradients) -> Tensor:
        """Hand gradients to the parameters, clipped.

        Each parameter gets a tensor of its own, since optimizers may change it in place: autograd may return one tensor
        for two parameters, or an expanded one.

        Args:
            gradients: Of some groups.

        Returns:
            The norm of each group before clipping.
        """
        norms = []
        for name, values in gradients.items():
            limit = self.clip[LEVELS[name]]
            present = [gradient for gradient in values if gradient is not None]
            if any(gradient.dtype in HALF for gradient in present):  # whose squares overflow early
                present = [gradient.float() for gradient in present]
            if any(map(is_sharded, present)) or len({(g.device, g.dtype) for g in present}) != 1:
                length = torch.nn.utils.get_total_norm(present)
            elif len(present) == 1:
                length = torch.linalg.vector_norm(present[0])
            else:  # which is what that does, without its look for devices
                length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(present)))
            norm = whole(length).to(self.params["hyper"][0])
            shrink = None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
            seen: set[int] = set()
            for param, gradient in zip(self.params[name], values, strict=True):
                if gradient is None:
                    param.grad = None
                elif shrink is not None:
                    param.grad = gradient * shrink.to(gradient.dtype)
                else:
                    own = is_sharded(gradient) or (gradient.data_ptr() not in seen and 0 not in gradient.stride())
                    param.grad = gradient if own else gradient.clone()
                    seen.add(gradient.data_ptr())
            norms.append(norm)
        return torch.stack(norms)

    def step(self, names: Iterable[str]) -> None:
        """Update groups along the gradients that they were given.

        Args:
            names: Of the groups.
        """
        for name in names:
            optimizer = self.optimizers[name]
            if name in self._fusible and _may_be_fused(optimizer):
                _fused_step(optimizer)
            else:
                _step(optimizer)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Leave no gradient behind."""
        for params in self.params.values():
            for param in params:
                param.grad = None

    def schedule(self, validation_loss: float | None, *, levels: Container[str]) -> None:
        """Advance the schedulers.

        Args:
            validation_loss: If given, advances those of kind ``ReduceLROnPlateau``, otherwise all others.
            levels: Those of ``"inner"``, of ``"outer"``, or of both.
        """
        for name, scheduler in self.schedulers.items():
            if LEVELS[name] not in levels:
                continue
            if isinstance(scheduler, ReduceLROnPlateau):
                if validation_loss is not None:
                    scheduler.step(validation_loss)
            elif validation_loss is None:
                scheduler.step()

    def restart_inner(self) -> None:
        """Return the inner optimizers to a state without memory; learning rates stay."""
        for name, state in copy.deepcopy(self._fresh).items():
            groups = self.optimizers[name].state_dict()["param_groups"]
            self.optimizers[name].load_state_dict({"state": state, "param_groups": groups})

    def state_dict(self) -> dict[str, Any]:
        """What the optimizers and schedulers remember.

        Returns:
            Live tensors, not copies; where each process keeps a part, whole ones on the host.
        """
        return {
            "optimizers": {name: _whole(optimizer.state_dict()) for name, optimizer in self.optimizers.items()},
            "schedulers": {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(_parts(state["optimizers"][name], optimizer))
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(state["schedulers"][name])


def _group(response: BestResponse, vector: nn.Parameter) -> dict[str, Parameters]:
    groups = {"weights": list(response.inner.weights)}
    scale = [] if response.scale is None else list(response.scale.parameters())
    taken = {id(param) for param in groups["weights"] + scale}
    groups["response"] = [param for param in response.parameters() if id(param) not in taken]
    groups["hyper"] = [vector]
    groups["scale"] = scale
    names = _names(response) | {id(vector): "hyper"}
    return {group: Parameters((names[id(p)], p) for p in params) for group, params in groups.items() if params}


def _may_be_fused(optimizer: Optimizer) -> bool:
    """Whether the user leaves the kernel to PyTorch, and the fused one, which it does not take by itself, fits."""
    return type(optimizer) in FUSED and all(
        group["fused"] is None
        and group["foreach"] is None
        and not (group["differentiable"] or group["capturable"])
        and all(map(_is_plain, group["params"]))
        for group in optimizer.param_groups
    )


def _is_plain(param: Tensor) -> bool:
    """Whether the fused kernel, which reads numbers in the order of the memory, reads those of a parameter rightly."""
    fits = param.device.type == "cpu" and param.dtype in (torch.float32, torch.float64) and param.is_contiguous()
    return fits and not is_sharded(param)


def _fused_step(optimizer: Optimizer) -> None:
    """A step by the fused kernel. The setting is the user's, and is put back."""
    for group in optimizer.param_groups:
        group["fused"] = True
        for param in group["params"]:
            if param.grad is not None and not param.grad.is_contiguous():
                param.grad = param.grad.contiguous()
    try:
        _step(optimizer)
    finally:
        for group in optimizer.param_groups:
            group["fused"] = None


def _step(optimizer: Optimizer) -> None:
    """A step; without the wrappers of PyTorch, which take longer than a small step, if there is nothing for them to do.

    They are for hooks, for the profiler and for differentiable steps. A scheduler puts one on the optimizer itself.
    """
    bare = None if "step" in vars(optimizer) else _bare(type(optimizer).step)
    if bare is None or _is_watched(optimizer) or optimizer.defaults.get("differentiable", True):
        optimizer.step()
        return
    with torch.no_grad():
        bare(optimizer)


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether hooks or the profiler want to know of a step."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *GLOBAL_HOOKS)
    return any(hooks) or torch._C._autograd._profiler_enabled()


@cache
def _bare(step: Callable[..., Any]) -> Callable[[Optimizer], Any] | None:
    """The function inside the wrappers of ``torch.optim``; None if it is wrapped, or made, by somebody else."""
    while True:
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch.optim."):
            return None
        if not hasattr(step, "__wrapped__"):
            return step
        step = step.__wrapped__


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer without parts of tensors."""
    found: dict[str, Any] = pytree.tree_map_only(Tensor, lambda t: whole(t).cpu() if is_sharded(t) else t, state)
    return found


def _parts(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The same the other way round: what has the shape of a sharded parameter is divided as it is."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(is_sharded(param) for param in params):
        return state

    def own(param: nn.Parameter, value: Any) -> Any:
        fits = isinstance(value, Tensor) and is_sharded(param) and value.shape == param.shape and value.ndim > 0
        return divided(value.to(param.device), param) if fits else value

    memory = {at: {key: own(params[at], value) for key, value in kept.items()} for at, kept in state["state"].items()}
    return state | {"state": memory}


def _names(response: BestResponse) -> dict[int, str]:
    """The name of every parameter, by its id: that of the weight to which it belongs, if it belongs to one."""
    names = {id(param): name for name, param in response.named_parameters()}
    names |= {id(weight): name for name, weight in response.inner.params().items()}
    for part in response.modules():
        if isinstance(part, Dense | Rowwise):
            own = part.slopes if isinstance(part, Dense) else part.templates
            names |= {id(param): name for name, param in zip(part.names, own, strict=True)}
    return names


def described(optimizer: Optimizer) -> str:
    """An optimizer in one line.

    Args:
        optimizer: Any.

    Returns:
        Its class, and for each group of parameters those settings that are on.

    Example:
        >>> described(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
        'SGD(lr=0.1, momentum=0.9)'
    """
    groups = []
    for group in optimizer.param_groups:
        own = {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
        own |= {"lr": group["initial_lr"]} if "initial_lr" in group else {}
        on = {name: v for name, v in own.items() if name == "lr" or not _is_off(v)}
        shown = {name: f"{v:.6g}" if isinstance(v, float) else " ".join(f"{v}".split()) for name, v in on.items()}
        groups.append(", ".join(f"{name}={value}" for name, value in shown.items()))
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float) and not value)
