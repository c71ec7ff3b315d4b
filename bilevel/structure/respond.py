r"""How an operation passes the response of its weights on, for each example, without a weight for each example.

A weight that responds is :math:`\mathbf{W}_i = \mathbf{W} + f_i \odot_{\text{row}} \mathbf{R}` for example i. An
operation that is linear in it needs one more pass with :math:`\mathbf{R}`, whose output is scaled per example:
:math:`\mathbf{W}_i x_i = \mathbf{W} x_i + f_i \odot \mathbf{R} x_i`. Linearised in the weights, the same holds for
pairs of a value :math:`x` and its tangent :math:`\dot x`, which are the dual numbers of PyTorch's forward mode:

.. math:: (\mathbf{W} x_i,\; \mathbf{W} \dot x_i + f_i \odot \mathbf{R} x_i)

Everything between the weights is left to PyTorch. :class:`Respond` sees every operation of the network; one that takes
a responding weight and has no rule raises, since its response would be lost. The rules are in the files beside this
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from bilevel.autodiff import forward_level, primal_plus_tangent
from bilevel.responding import Rows
from bilevel.rng import Stream

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""The rule of every operation that may take a responding weight: ``rule(mode, function, *args, **kwargs)``."""

READS = (
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
)
"""What may be asked about a responding weight, because it does not depend on its values."""

R = TypeVar("R", bound=Rule)


def rule(*functions: Any) -> Callable[[R], R]:
    """Teach the library how an operation responds.

    Args:
        functions: As a network calls them, such as ``torch.nn.functional.linear``.

    Returns:
        A decorator for a function of the :class:`Respond` mode, the operation and its arguments.
    """

    def register(function: R) -> R:
        RULES.update(dict.fromkeys(functions, function))
        return function

    return register


class Respond(TorchFunctionMode):
    """While active, operations on given weights respond, each example in its own way.

    Attributes:
        count: The number of examples, B.
        linearized: Keep values and responses apart, as dual numbers; a level of forward mode must be active.
        in_doubt: Whether an activation had a second dimension as long as the batch.
        seen: The activations that met responding weights, if asked to watch, and what to say if one is wrong.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        rows: Mapping[str, Rows],
        count: int,
        *,
        linearized: bool,
        watch: bool = False,
    ) -> None:
        """Respond for these weights; those without rows do not."""
        super().__init__()
        self.count, self.linearized, self._watch = count, linearized, watch
        self.in_doubt = False
        self.seen: list[tuple[str, Tensor]] = []
        self._responding = {id(weights[name]): (name, weights[name], entry) for name, entry in rows.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a rule, or the operation itself if no responding weight takes part in it."""
        kwargs = kwargs or {}
        names = [
            self._responding[id(leaf)][0]
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and id(leaf) in self._responding
        ]
        if not names:
            return func(*args, **kwargs)
        if func in READS or getattr(func, "__name__", "") == "__get__":
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor):  # as .shape, not as .T
                return result
        if func not in RULES:
            raise NotImplementedError(self.refusal(names[0], func, "which has no rule"))
        return RULES[func](self, func, *args, **kwargs)

    def rows(self, weight: Tensor | None) -> Rows | None:
        """The response of a weight.

        Returns:
            None if it has none.
        """
        return None if weight is None or id(weight) not in self._responding else self._responding[id(weight)][2]

    def name(self, *weights: Any) -> str:
        """The name of the first of these that responds."""
        return next(self._responding[id(weight)][0] for weight in weights if id(weight) in self._responding)

    def register(self, weight: Tensor, source: Tensor, template: Tensor, factor: Tensor | None = None) -> Tensor:
        """Let a weight that was computed from another one respond as well.

        Args:
            weight: The new weight.
            source: Of which it is a part or a multiple.
            template: Of the new weight.
            factor: Of its rows; those of the source by default.

        Returns:
            The new weight.
        """
        name, _, rows = self._responding[id(source)]
        self._responding[id(weight)] = (name, weight, Rows(rows.factor if factor is None else factor, template))
        return weight

    def split(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The value and the tangent of an activation.

        Returns:
            The activation itself, and None, unless responses are linearised.
        """
        if not self.linearized:
            return x, None
        pair = forward_ad.unpack_dual(x)
        return pair.primal, pair.tangent

    def join(self, value: Tensor, *responses: Tensor | None) -> Tensor:
        """Add responses to a value, or keep them as its tangent.

        Returns:
            An activation.
        """
        total: Tensor | None = None
        for response in responses:
            if response is not None:
                total = response if total is None else total + response
        if total is None:
            return value
        if not self.linearized:
            return value + total
        dual: Tensor = forward_ad.make_dual(value, total.expand_as(value))
        return dual

    def check(self, x: Tensor, func: Any, *weights: Any) -> None:
        """Refuse an activation whose dimension 0 does not count the examples.

        Raises:
            ValueError: If it does not.
        """
        right = x.ndim > 0 and x.shape[0] == self.count and self.rows(x) is None
        self.in_doubt |= x.shape.count(self.count) > 1
        if right and not self._watch:
            return
        reason = f"on an input of shape {tuple(x.shape)}, whose dimension 0 does not count the {self.count} examples"
        refusal = self.refusal(self.name(*weights, x), func, reason)
        if not right:
            raise ValueError(refusal)
        self.seen.append((refusal, x.detach()))

    def check_output(self, output: Any) -> None:
        """Refuse a network that returns a responding weight, of which no operation has made an activation.

        Raises:
            ValueError: If it does.
        """
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and self.rows(leaf) is not None:
                raise ValueError(self.refusal(self.name(leaf), "the network", "which returns it as it is"))

    def refusal(self, name: str, func: Any, reason: str) -> str:
        """What to say about an operation that cannot respond for each example."""
        called = getattr(func, "__name__", str(func))
        return (
            f"the weight {name!r} is used by {called}, {reason}: it cannot respond to a perturbation of its own for "
            f"each example. Pass perturb='batch' to the method, leave the weight out (structure={{{name!r}: 'none'}}), "
            "or teach the library the operation with bilevel.structure.rule."
        )


class Examples:
    """Remembers for which shapes it is certain that dimension 0 of every activation counts the examples.

    A shape is in doubt if another dimension is as long as the batch: the network may have moved the examples there.
    Then row i of an activation must depend on example i of the input alone, which two passes in eval mode show.
    """

    def __init__(self, evaluating: Callable[[], AbstractContextManager[None]]) -> None:
        """Start without knowledge; ``evaluating`` puts the network into eval mode."""
        self._evaluating = evaluating
        self._certain: set[Any] = set()

    def check(self, run: Callable[..., Respond], args: Any, kwargs: Any, count: int) -> None:
        """Refuse a network that puts something else than the examples into dimension 0.

        Args:
            run: The network as a function of its arguments; returns the mode it ran in.
            args: Its arguments.
            kwargs: Likewise.
            count: The number of examples.

        Raises:
            ValueError: If it does.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (count, tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves))
        if key in self._certain:
            return
        swapped = [_swap_first(leaf, count) for leaf in leaves]
        changed_args, changed_kwargs = pytree.tree_unflatten(swapped, spec)
        with torch.no_grad(), self._evaluating(), Stream.current(_device(leaves))():
            before, after = run(*args, **kwargs).seen, run(*changed_args, **changed_kwargs).seen
        for (refusal, x), (_, y) in zip(before, after, strict=True):
            if not torch.allclose(x[1:], y[1:], equal_nan=True):
                raise ValueError(refusal)
        self._certain.add(key)


def respond(
    predict: Callable[..., Any] | None,
    weights: Mapping[str, Tensor],
    rows: Mapping[str, Rows],
    examples: Examples,
    *,
    linearized: bool,
) -> Callable[..., Any] | None:
    """The network whose weights respond, each example in its own way.

    Args:
        predict: The network, called as ``predict(weights, *args, **kwargs)``; or None.
        weights: By name.
        rows: Their responses; a weight without one stays as it is.
        examples: What is known about the place of the examples.
        linearized: Expand predictions to first order in the response.

    Returns:
        A function of the remaining arguments; None without a network.
    """
    if predict is None or not rows:
        return None if predict is None else partial(predict, weights)
    count = len(next(iter(rows.values())).factor)

    def watch(*args: Any, **kwargs: Any) -> Respond:
        mode = Respond(weights, rows, count, linearized=False, watch=True)
        with mode:
            predict(weights, *args, **kwargs)
        return mode

    def responding(*args: Any, **kwargs: Any) -> Any:
        with forward_level() if linearized else nullcontext():
            mode = Respond(weights, rows, count, linearized=linearized)
            with mode:
                output = predict(weights, *args, **kwargs)
            mode.check_output(output)
            if linearized:
                output = primal_plus_tangent(output)
        if mode.in_doubt:
            examples.check(watch, args, kwargs, count)
        return output

    return responding


def _swap_first(leaf: Any, count: int) -> Any:
    """Put another example in the place of the first, one that differs from it if there is one."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != count:
        return leaf
    differs = (leaf != leaf[:1]).reshape(count, -1).any(1)
    return torch.cat([leaf[differs.to(torch.int).argmax()][None], leaf[1:]])


def _device(leaves: list[Any]) -> torch.device:
    return next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
