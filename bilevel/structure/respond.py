r"""How an operation passes the response of its weights on, for each example, without a weight for each example.

A weight that responds is :math:`\mathbf{W}_i = \mathbf{W} + f_i \odot_{\text{row}} \mathbf{R}` for example i. An
operation that is linear in it needs one more pass with :math:`\mathbf{R}`, whose output is scaled per example:
:math:`\mathbf{W}_i x_i = \mathbf{W} x_i + f_i \odot \mathbf{R} x_i`. Linearised in the weights, the same holds for
pairs of a value :math:`x` and its tangent :math:`\dot x`, which are the dual numbers of PyTorch's forward mode:

.. math:: (\mathbf{W} x_i,\; \mathbf{W} \dot x_i + f_i \odot \mathbf{R} x_i)

Where :math:`\mathbf{R}` is :math:`\mathbf{W}` itself (:mod:`bilevel.structure.gate`), the pass with it is spared.

Everything between the weights is left to PyTorch. :class:`Respond` sees every operation of the network; one that takes
a responding weight and has no rule raises, since its response would be lost. The rules are in the files beside this
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from bilevel.autodiff import forward_level, primal_plus_tangent
from bilevel.responding import Rows
from bilevel.structure.origins import Origins

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

RESHAPES = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}
"""What keeps the numbers of an activation in order, and so those of an example together."""

DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""What does not see a response that is kept as a tangent beside a value."""

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


class Weight(NamedTuple):
    r"""A responding weight, or what a network made of one: a slice, a transpose, a multiple.

    Attributes:
        name: Of the parameter.
        weight: Its value, which all examples share.
        factor: One number per example and row, of shape ``(B, *sizes)``: sizes are those of the weight in dimensions
            along which the rows lie, and one in all others.
        template: :math:`\mathbf{R}`, of the shape of the weight.
        chosen: Whether its entries were looked up in a table by indices that are the same for every example.
    """

    name: str
    weight: Tensor
    factor: Tensor
    template: Tensor
    chosen: bool = False

    @property
    def grows(self) -> bool:
        """Whether the template is the weight itself."""
        return self.template is self.weight


class Respond(TorchFunctionMode):
    """While active, operations on given weights respond, each example in its own way.

    Attributes:
        count: The number of examples, B.
        linearized: Keep values and responses apart, as dual numbers; a level of forward mode must be active.
        origins: Which tensors come from the inputs of the network.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        rows: Mapping[str, Rows],
        count: int,
        inputs: Any = (),
        *,
        linearized: bool,
    ) -> None:
        """Respond for these weights, in a network with these inputs; weights without rows do not respond."""
        super().__init__()
        self.origins = Origins(inputs)
        self._flattened: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.count, self.linearized = count, linearized
        self._responding: dict[int, Weight] = {}
        for name, change in rows.items():
            weight = weights[name]
            self._responding[id(weight)] = Weight(name, weight, change.spread(), change.template)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a rule, or the operation itself if no responding weight takes part in it."""
        kwargs = kwargs or {}
        if self.linearized and func in DERIVATIVES:
            raise NotImplementedError(
                "the network computes derivatives itself (torch.autograd.grad inside forward), which delta_stn cannot "
                "linearise with a perturbation for each example: pass perturb='batch' to the method, use "
                "method='centered_stn', or compute them in the loss."
            )
        leaves = pytree.tree_leaves((args, kwargs))
        names = [self._responding[id(leaf)].name for leaf in leaves if self.responds(leaf)]
        if not names:
            result = func(*args, **kwargs)
            self.origins.follow(func, leaves, result)
            if func in RESHAPES and isinstance(result, Tensor) and args[0].shape[:1] == (self.count,):
                self._flattened[id(result)] = result
            return result
        if func in READS or getattr(func, "__name__", "") == "__get__":
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor):  # .shape may be read; .T needs a rule
                return result
        if func not in RULES:
            raise NotImplementedError(self.refusal(names[0], func, "which has no rule"))
        return RULES[func](self, func, *args, **kwargs)

    def responds(self, x: Any) -> bool:
        """Whether this is a responding weight."""
        return id(x) in self._responding

    def weight(self, weight: Tensor) -> Weight:
        """What is known about a weight that responds."""
        return self._responding[id(weight)]

    def rows(self, weight: Tensor | None, func: Any = "a rule") -> Rows | None:
        """The response of a weight whose rows are the indices of its dimension 0.

        Args:
            weight: Perhaps one that responds.
            func: The operation that uses it.

        Returns:
            One factor per example and row, shape ``(B, rows)``, and the template; None if it does not respond.

        Raises:
            NotImplementedError: If its rows lie elsewhere, as after a transpose.
        """
        if weight is None or not self.responds(weight):
            return None
        name, _, factor, template, _ = self.weight(weight)
        if any(size > 1 for size in factor.shape[2:]):
            raise NotImplementedError(self.refusal(name, func, "while its rows are not in dimension 0"))
        return Rows(factor.reshape(self.count, -1).expand(-1, *template.shape[:1] or (1,)), template)

    def change(self, weight: Tensor) -> Tensor:
        """The change of a weight for each example, shape ``(B, *weight.shape)``."""
        _, _, factor, template, _ = self.weight(weight)
        return factor * template

    def name(self, *weights: Any) -> str:
        """The name of the first of these that responds."""
        return next(self.weight(weight).name for weight in weights if self.responds(weight))

    def register(
        self,
        weight: Tensor,
        source: Tensor,
        template: Tensor | Callable[[Tensor], Tensor],
        factor: Tensor | None = None,
        *,
        chosen: bool = False,
    ) -> Tensor:
        """Let a weight that was computed from another one respond as well.

        Args:
            weight: The new weight.
            source: The weight of which it is a part or a multiple.
            template: Of the new weight; or how the new weight was made, if the same makes its template of the old one.
            factor: Of its rows, as in :class:`bilevel.structure.respond.Weight`; those of the source by default.
            chosen: As there.

        Returns:
            The new weight.
        """
        old = self.weight(source)
        if not isinstance(template, Tensor):
            template = weight if old.grows else template(old.template)
        factor = old.factor if factor is None else factor
        self._responding[id(weight)] = Weight(old.name, weight, factor, template, chosen)
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
        total = total.to(value.dtype)  # which is that of autocast where it is on
        if not self.linearized:
            return value + total
        dual: Tensor = forward_ad.make_dual(value, total.expand_as(value))
        return dual

    def spread(self, weight: Tensor) -> bool:
        """Whether dimension 0 of a weight has one entry, or the same one for every example, as a class token has."""
        _, _, factor, template, _ = self.weight(weight)
        same = template.ndim > 0 and factor.shape[1] == 1
        return same and (len(template) == 1 or (len(template) == self.count and template.stride(0) == 0))

    def unflatten(self, x: Tensor) -> Tensor | None:
        """Give the examples their dimension back, where a network has flattened it together with others.

        Args:
            x: An activation, as in ``linear(x.view(-1, features))``.

        Returns:
            Shape ``(B, ...)``; None if it was not flattened.
        """
        if id(x) not in self._flattened or len(x) == self.count or len(x) % self.count:
            return None
        whole: Tensor = x.unflatten(0, (self.count, -1))
        return whole

    def check(self, x: Tensor, func: Any, *weights: Any) -> Tensor:
        """Refuse an activation whose dimension 0 does not count the examples.

        Args:
            x: An activation, or a weight that was expanded to one entry for each example.
            func: The operation.
            weights: Its weights.

        Returns:
            The activation.

        Raises:
            ValueError: If dimension 0 counts something else.
        """
        name = self.name(*weights, x)
        right = x.ndim > 0 and x.shape[0] == self.count
        if right and self.responds(x) and self.spread(x):
            _, _, factor, template, _ = self.weight(x)
            x = self.join(x.clone(memory_format=torch.contiguous_format), factor[:, 0] * template[0])
        if right and not self.responds(x):
            return x
        reason = f"on an input of shape {tuple(x.shape)}, whose dimension 0 does not count the {self.count} examples"
        raise ValueError(self.refusal(name, func, reason))

    def check_output(self, output: Any) -> None:
        """Refuse a network that returns a responding weight as it is.

        Raises:
            ValueError: If it does.
        """
        for leaf in pytree.tree_leaves(output):
            if self.responds(leaf):
                raise ValueError(self.refusal(self.name(leaf), "the network", "which returns it as it is"))

    def refusal(self, name: str, func: Any, reason: str) -> str:
        """What to say about an operation that cannot respond for each example."""
        called = getattr(func, "__name__", str(func))
        return (
            f"the weight {name!r} is used by {called}, {reason}: it cannot respond to a perturbation of its own for "
            f"each example. Pass perturb='batch' to the method, leave the weight out (structure={{{name!r}: 'none'}}), "
            "or teach the library the operation with bilevel.structure.rule."
        )


def respond(
    predict: Callable[..., Any] | None,
    weights: Mapping[str, Tensor],
    rows: Mapping[str, Rows],
    *,
    linearized: bool,
) -> Callable[..., Any] | None:
    """The network whose weights respond, each example in its own way.

    Args:
        predict: The network, called as ``predict(weights, *args, **kwargs)``; or None.
        weights: By name.
        rows: Their responses; a weight without one stays as it is.
        linearized: Expand predictions to first order in the response.

    Returns:
        A function of the remaining arguments; None without a network.
    """
    if predict is None or not rows:
        return None if predict is None else partial(predict, weights)
    count = len(next(iter(rows.values())).factor)

    def responding(*args: Any, **kwargs: Any) -> Any:
        with forward_level((args, kwargs)) if linearized else nullcontext():
            mode = Respond(weights, rows, count, (args, kwargs), linearized=linearized)
            with mode:
                output = predict(weights, *args, **kwargs)
            mode.check_output(output)
            if linearized:
                output = primal_plus_tangent(output)
        return output

    return responding
