"""The steps of ``torch.optim`` as differentiable functions of weights, gradients and state."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

DIFFERENTIABLE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
"""The optimizers whose steps can be differentiated; the tests compare each with finite differences."""

HOW = ("capturable", "differentiable", "foreach", "fused")
"""Settings that say how to compute a step, not what."""


COUNTERS = ("step", "mu_product")
"""Entries of a state that depend on the number of steps only."""


@final
class DifferentiableOptimizer:
    """An optimizer without weights of its own: :meth:`step` maps old weights and state to new ones.

    It makes the same steps as the optimizer it was made from, with that one's current settings.

    Example:
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> steps = DifferentiableOptimizer(torch.optim.SGD([w], lr=0.1), [w])
        >>> (new,), _ = steps.step([w], [w**2], steps.state())
        >>> torch.autograd.grad(new, w)  # of w - 0.1 w²
        (tensor([0.8000]),)
    """

    def __init__(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
        """Wrap the optimizer of these weights.

        Raises:
            TypeError: If its steps cannot be differentiated.
        """
        if type(optimizer) not in DIFFERENTIABLE:
            names = ", ".join(kind.__name__ for kind in DIFFERENTIABLE)
            raise TypeError(
                f"inner_optimizer made a {type(optimizer).__name__}, through whose steps unrolling cannot "
                f"differentiate. Those of torch.optim that it can: {names}."
            )
        self.optimizer = optimizer
        self._own_hook: RemovableHandle | None = None
        self.check_hooks()
        self.weights = list(weights)
        place = {id(weight): index for index, weight in enumerate(self.weights)}
        self._places = [[place[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        groups = [{"params": group["params"], **self._settings(group)} for group in optimizer.param_groups]
        self._twin = type(optimizer)(groups, differentiable=True, foreach=False)  # type: ignore[call-arg]
        # Unwrapped, because the hooks of the profiler and the compiler take as long as a small step.
        self._step: Callable[[Optimizer], Any] = inspect.unwrap(type(self._twin).step)
        self.fresh = [_copy(entry) for entry in self.state()]  # copies, since plain steps write into the live state

    def check_hooks(self) -> None:
        """Refuse an optimizer with step hooks, which :meth:`step` would leave out.

        Raises:
            TypeError: If it has step hooks.
        """
        hooks = [*self.optimizer._optimizer_step_pre_hooks, *self.optimizer._optimizer_step_post_hooks]
        if any(self._own_hook is None or hook != self._own_hook.id for hook in hooks):
            raise TypeError(
                "inner_optimizer made an optimizer with step hooks, which unrolling cannot differentiate: put what "
                "they do into inner_loss, or use a method that does not unroll."
            )

    def state(self) -> list[dict[str, Any]]:
        """What the optimizer remembers now, one dict per weight.

        Returns:
            The live tensors; :meth:`step` does not change them.
        """
        return [dict(self.optimizer.state.get(weight, {})) for weight in self.weights]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Hand a state back to the optimizer."""
        for weight, entry in zip(self.weights, state, strict=True):
            self.optimizer.state.pop(weight, None)
            if entry:
                # Plain steps write into it, and a compiler may have returned one tensor for several equal ones.
                self.optimizer.state[weight] = _copy(entry)
        # A learning-rate scheduler reads this and warns if no step was made.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def settings(self) -> list[dict[str, Any]]:
        """The current settings as :meth:`step` takes them, one dict per group, with learning rates as tensors.

        Returns:
            New dicts.
        """
        device = self.weights[0].device
        groups = [self._settings(group) for group in self.optimizer.param_groups]
        return [group | {"lr": torch.as_tensor(group["lr"], dtype=torch.float64, device=device)} for group in groups]

    def decayed(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        decays: Sequence[Tensor | None],
        settings: list[dict[str, Any]] | None = None,
    ) -> list[Tensor]:
        r"""Shrink weights before a step, :math:`w \leftarrow (1 - \eta \lambda)\, w`, as AdamW does.

        Args:
            weights: As in :meth:`step`.
            gradients: Likewise; a weight without one stays as it is.
            decays: The strength :math:`\lambda` for each weight, or None.
            settings: As in :meth:`step`; the learning rates :math:`\eta` are in there.

        Returns:
            The weights to make the step from, differentiable in all tensors.
        """
        new = list(weights)
        sources = self.optimizer.param_groups if settings is None else settings
        for places, group in zip(self._places, sources, strict=True):
            for place in places:
                decay = decays[place]
                if decay is not None and gradients[place] is not None:
                    new[place] = new[place] * (1 - group["lr"] * decay).to(new[place].dtype)
        return new

    def decay_plain_steps(self, decays: Callable[[], Sequence[Tensor | None]]) -> None:
        """Let the optimizer itself shrink the weights before each of its steps.

        Args:
            decays: Called at each step, for the strengths that :meth:`decayed` takes.
        """

        @torch.no_grad()
        def shrink(*_: Any) -> None:
            gradients = [weight.grad for weight in self.weights]
            for weight, new in zip(self.weights, self.decayed(self.weights, gradients, decays()), strict=True):
                if new is not weight:
                    weight.copy_(new)

        self._own_hook = self.optimizer.register_step_pre_hook(shrink)

    def step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        state: list[dict[str, Any]],
        settings: list[dict[str, Any]] | None = None,
    ) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Make one step, differentiably in everything that it is given.

        Args:
            weights: Any tensors, in the order given at the start; they are not changed.
            gradients: One per weight; a weight without one stays as it is.
            state: As returned here or by :meth:`state`; it is not changed.
            settings: Those of :meth:`settings`, so that no Python number changes from step to step; None takes the
                current ones as they are.

        Returns:
            The new weights and the new state.
        """
        sources = self.optimizer.param_groups if settings is None else settings
        plain = isinstance(self._twin, torch.optim.SGD) and all(group["momentum"] == 0 for group in sources)
        if plain and settings is None:
            return self._descend(weights, gradients), state
        new = [weight.clone() for weight in weights]
        for weight, gradient in zip(new, gradients, strict=True):
            weight.grad = gradient
        for places, group, source in zip(self._places, self._twin.param_groups, sources, strict=True):
            present = [new[place] for place in places if gradients[place] is not None]
            group.update(self._settings(source), params=present)
        # Copies: optimizers write into their state, but the derivative needs what the step has read.
        self._twin.state = defaultdict(dict, {weight: _copy(entry) for weight, entry in zip(new, state, strict=True)})
        # Plain gradient descent has nothing to mend, and the mending takes time.
        with nullcontext() if settings is None else _Symbolic(), nullcontext() if plain else _Smooth():
            self._step(self._twin)
        after = [dict(self._twin.state[weight]) for weight in new]
        # Anything left here would keep its graph alive.
        self._twin.state = defaultdict(dict)
        for group in self._twin.param_groups:
            group["params"] = []
        for weight in new:
            weight.grad = None
        return new, after

    def _descend(self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Plain gradient descent, in one pass over the weights instead of three."""
        new = list(weights)
        for places, group in zip(self._places, self.optimizer.param_groups, strict=True):
            for place in places:
                weight, gradient = weights[place], gradients[place]
                if gradient is None:
                    continue
                if group["maximize"]:
                    gradient = -gradient
                if group["weight_decay"] != 0:
                    gradient = gradient.add(weight, alpha=group["weight_decay"])
                new[place] = weight.add(gradient, alpha=-float(group["lr"]))
        return new

    @staticmethod
    def _settings(group: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in ("params", *HOW)}


def differentiable_entries(entry: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """The part of an optimizer's state that depends on the past gradients of a weight, such as its momentum.

    Returns:
        Tensors of the shape of the weight, by name.
    """
    return {
        name: value
        for name, value in entry.items()
        if isinstance(value, Tensor) and value.shape == weight.shape and name not in COUNTERS
    }


class _Smooth(TorchFunctionMode):
    """Mends three places in which the differentiable steps of ``torch.optim`` differ from the plain ones.

    The first step of SGD detaches the gradient that becomes its momentum. Adam computes its bias corrections from a
    step counter in single precision. The third is the root of a second moment. It is zero for a weight that had no
    gradient yet, where the root has an infinite slope, and infinity times zero is NaN. The numerator above that root is
    zero as well, so the root adds nothing to the derivative of the quotient; its slope is set to zero.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            return args[0]
        if func is Tensor.__rpow__:
            return args[0].double().__rpow__(args[1])
        if func in (torch.sqrt, Tensor.sqrt, Tensor.sqrt_):
            zero = args[0] == 0
            root = torch.where(zero, 0.0, torch.where(zero, 1.0, args[0]).sqrt())
            return args[0].copy_(root) if func is Tensor.sqrt_ else root
        return func(*args, **(kwargs or {}))


class _Symbolic(TorchFunctionMode):
    """Keeps step counters and learning rates tensors where ``torch.optim`` would make numbers of them."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.item:
            return args[0].double()
        if func in (Tensor.add, Tensor.add_) and isinstance(kwargs.get("alpha"), Tensor):
            return func(args[0], args[1] * kwargs["alpha"])
        if func is Tensor.addcdiv_ and isinstance(kwargs.get("value"), Tensor):
            return args[0].add_(args[1] / args[2] * kwargs["value"])
        return func(*args, **kwargs)


def _copy(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in entry.items()}


def clip(
    gradients: Sequence[Tensor | None], limit: float | None, *, joint: bool = True
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Shorten gradients to a largest joint norm.

    Args:
        gradients: None where there is none.
        limit: The norm; None does not clip.
        joint: Whether to make one number of their norms, at the price of two operations; clipping does so anyway.

    Returns:
        The gradients, and numbers without a graph whose norm is that of the gradients before.
    """
    present = [_wide(gradient) for gradient in gradients if gradient is not None]
    if limit is None:
        with torch.no_grad():
            return list(gradients), [_norm(present)] if joint else [*torch._foreach_norm(present)]
    norm = _norm(present)
    shrink = (limit / (norm + 1e-6)).clamp(max=1.0)
    return [None if gradient is None else gradient * shrink.to(gradient.dtype) for gradient in gradients], [
        norm.detach()
    ]


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    # One by one: a compiler wants to see that, and so do derivatives.
    length: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    return length


def _wide(gradient: Tensor) -> Tensor:
    # Squares overflow early in half precision.
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
