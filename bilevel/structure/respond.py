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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from bilevel.dropouts import CALLS
from bilevel.duals import join, unpack
from bilevel.layouts import FIRST, Layout, Layouts
from bilevel.responding import NoExamples, NoRule, Rows
from bilevel.structure.by_example import SMALL, by_example, is_mapped
from bilevel.structure.entries import EITHER, entry_by_entry, visited
from bilevel.structure.origins import Origins
from bilevel.structure.weights import READS, Term, Weight

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""The rule of every operation that may take a responding weight: ``rule(mode, function, *args, **kwargs)``."""

DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""What does not see a response that is kept as a tangent beside a value."""

FLAT = frozenset({Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device})
"""What holds no tensors inside."""

SEQUENCES = frozenset({tuple, list, torch.Size})
"""What most often holds other arguments."""

PROPERTIES = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad"))
"""What any tensor may be asked, and most often is."""

R = TypeVar("R", bound=Rule)


def rule(*functions: Any) -> Callable[[R], R]:
    """Teach the library how an operation responds.

    Args:
        functions: As a network calls them, such as ``torch.nn.functional.linear``.

    Returns:
        A decorator for a function of the :class:`Respond` mode, the operation and its arguments.

    Example:
        >>> @bilevel.structure.rule(torch.ops.mine.project)  # doctest: +SKIP
        ... def project(mode, function, x, weight):
        ...     return bilevel.structure.linear.bilinear(mode, function, function, x, weight, None, axis=-1, out=0)
    """

    def register(function: R) -> R:
        RULES.update(dict.fromkeys(functions, function))
        return function

    return register


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments without their nesting; most often there is little, which is quickly seen."""
    flat: list[Any] = []
    for x in (*args, *kwargs.values()):
        if type(x) in FLAT:
            flat.append(x)
        elif type(x) in SEQUENCES and all(type(y) in FLAT for y in x):
            flat += x
        else:
            return pytree.tree_leaves((args, kwargs))
    return flat


class Respond(TorchFunctionMode):
    """While active, operations on given weights respond, each example in its own way.

    Attributes:
        count: The number of examples, B.
        linearized: Keep values and responses apart, as dual numbers; a level of forward mode must be active.
        slope_only: All factors are zero, and only their slopes count.
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
        slope_only: bool = False,
    ) -> None:
        """Respond for these weights, in a network with these inputs; weights without rows do not respond."""
        super().__init__()
        self.origins, self.layouts = Origins(inputs), Layouts(count, inputs)
        self.count, self.linearized, self.slope_only = count, linearized, slope_only
        self._responding: dict[int, Weight] = {}
        for name, change in rows.items():
            weight = weights[name]
            self._responding[id(weight)] = Weight(name, weight, change.spread(), change.template, ones=change.ones)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a rule, or the operation itself if no responding weight takes part in it."""
        if func in PROPERTIES:
            return func(*args)
        kwargs = kwargs or {}
        if func in EITHER or func in CALLS:
            result = (entry_by_entry if func in EITHER else visited)(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func in READS:
            return func(*args, **kwargs)
        if self.linearized and func in DERIVATIVES:
            raise NoRule(
                "the network computes derivatives itself (torch.autograd.grad inside forward), which delta_stn cannot "
                "linearise with a perturbation for each example: pass perturb='batch' to the method, use "
                "method='centered_stn', or compute them in the loss."
            )
        leaves = _leaves(args, kwargs)
        responding = self._responding
        name = next((responding[id(leaf)].name for leaf in leaves if id(leaf) in responding), None)
        if name is None:
            result = func(*args, **kwargs)
            with DisableTorchFunction():  # what follows is no operation of the network, and needs no mode
                self.origins.follow(func, leaves, result)
                self.layouts.follow(func, args, kwargs, leaves, result)
            return result
        reads = getattr(func, "__name__", "") == "__get__"
        result = func(*args, **kwargs) if reads else None
        if not reads or isinstance(result, Tensor):  # .is_leaf may be read; .T needs a rule
            result = self._ruled(func, args, kwargs, leaves, name)
        with DisableTorchFunction():
            self.layouts.follow(func, args, kwargs, leaves, result)
        return result

    def _ruled(self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any], name: str) -> Any:
        if any(map(is_mapped, leaves)):
            raise NoExamples(self.refusal(name, func, "inside of torch.vmap"))
        try:
            if func not in RULES:
                raise NoRule(self.refusal(name, func, "which has no rule"))
            return RULES[func](self, func, *args, **kwargs)
        except NoRule as refused:
            return by_example(self, func, args, kwargs, refused)

    def by_example(self, func: Callable[..., Any], *args: Any) -> Any:
        """The rule of last resort, for operations that another rule is made of."""
        name = self.name(*pytree.tree_leaves(args))
        return by_example(self, func, args, {}, NoRule(self.refusal(name, func, "which has no rule")))

    def responds(self, x: Any) -> bool:
        """Whether this is a responding weight."""
        return id(x) in self._responding

    def terms(self, weight: Tensor) -> Weight:
        """What is known about a weight that responds, perhaps in several terms."""
        return self._responding[id(weight)]

    def weight(self, weight: Tensor) -> Weight:
        """What is known about a weight that responds; where it has several terms, they are multiplied out."""
        found = self._responding[id(weight)]
        if not found.more:
            return found
        self._check_size(weight, "in several terms")
        return Weight(found.name, weight, found.change(), weight.new_ones(()).expand_as(weight), found.chosen)

    def multiplied_out(self, weight: Tensor, func: Any) -> Tensor:
        """One weight for each example, shape ``(B, *shape)``.

        Args:
            weight: A small one.
            func: The operation that uses it.

        Returns:
            A dual number if responses are linearised.
        """
        self._check_size(weight, func)
        return self.join(weight.expand(self.count, *weight.shape).contiguous(), self.terms(weight).change())

    def _check_size(self, weight: Tensor, func: Any) -> None:
        if weight.numel() > SMALL:
            reason = f"which has no rule for {weight.numel():,} numbers: more than {SMALL:,} are not multiplied out"
            raise NoRule(self.refusal(self.name(weight), func, reason))

    def change(self, weight: Tensor) -> Tensor:
        """The change of a weight for each example, shape ``(B, *weight.shape)``."""
        return self.terms(weight).change()

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
        more: tuple[Term, ...] = (),
    ) -> Tensor:
        """Let a weight that was computed from another one respond as well.

        Args:
            weight: The new weight.
            source: The weight of which it is a part or a multiple.
            template: Of the new weight; or how the new weight was made, if the same makes its template of the old one.
            factor: Of its rows, as in :class:`bilevel.structure.weights.Weight`; those of the source by default.
            chosen: As there.
            more: As there.

        Returns:
            The new weight.
        """
        old = self.terms(source)
        if not isinstance(template, Tensor):
            template = weight if old.grows else template(old.template)
        factor = old.factor if factor is None else factor
        self._responding[id(weight)] = Weight(old.name, weight, factor, template, chosen, more)
        return weight

    def split(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The value and the tangent of an activation.

        Returns:
            The activation itself, and None, unless responses are linearised.
        """
        if not self.linearized:
            return x, None
        return unpack(x)

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
        # In the precision of autocast where it is on.
        return join(value, total) if self.linearized else value + total.to(value.dtype)

    def spread(self, weight: Tensor) -> bool:
        """Whether dimension 0 of a weight has one entry, or the same one for every example, as a class token has."""
        _, _, factor, template, *_ = self.weight(weight)
        same = template.ndim > 0 and factor.shape[1] == 1
        return same and (len(template) == 1 or (len(template) == self.count and template.stride(0) == 0))

    def layout(self, x: Tensor, func: Any, *weights: Any) -> Layout:
        """Where the examples of an activation are.

        Returns:
            Their place.

        Raises:
            NoExamples: If that is unknown.
            NoRule: If it has none, because it does not come from the inputs.
        """
        layout = None if self.responds(x) else self.layouts.of(x)
        if layout is not None:
            return layout
        if self.layouts.known(x):
            raise NoExamples(self._no_examples(x, func, *weights))
        raise NoRule(self._no_examples(x, func, *weights))

    def _no_examples(self, x: Tensor, func: Any, *weights: Any) -> str:
        reason = f"on an input of shape {tuple(x.shape)}, whose dimension 0 does not count the {self.count} examples"
        return self.refusal(self.name(*weights, x), func, reason)

    def front(self, x: Tensor, func: Any, *weights: Any, own: int = 1) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Bring the examples of an activation to dimension 0.

        Args:
            x: An activation, or a weight that was expanded to one entry for each example.
            func: The operation.
            weights: Its weights.
            own: How many of the last dimensions are its own: examples cannot be there.

        Returns:
            Shape ``(B, ...)``, and a function that brings a result back to where the examples were.

        Raises:
            NoExamples: If they are in one of the last dimensions, or it is unknown where they are.
        """
        x = self.activation(x)
        layout = self.layout(x, func, *weights)
        if layout == FIRST:
            return x, lambda y: y
        dim, outer, inner, chosen = layout
        if chosen is not None:
            raise NoExamples(self._no_examples(x, func, *weights))
        if dim >= x.ndim - own:
            reason = f"on an input of shape {tuple(x.shape)}, whose dimension {dim} counts the {self.count} examples"
            raise NoExamples(self.refusal(self.name(*weights, x), func, reason))
        if layout.alone:
            return x.movedim(dim, 0), lambda y: y.movedim(0, dim)

        def back(y: Tensor) -> Tensor:
            return y.movedim(0, dim + 1).flatten(dim, dim + 2)

        return x.unflatten(dim, (outer, self.count, inner)).movedim(dim + 1, 0), back

    def activation(self, x: Tensor) -> Tensor:
        """A weight that was expanded to one entry for each example, as an activation; all else as it is."""
        if not self.responds(x) or len(x) != self.count or not self.spread(x):
            return x
        _, _, factor, template, *_ = self.weight(x)
        return self.join(x.clone(memory_format=torch.contiguous_format), factor[:, 0] * template[0])

    def check(self, x: Tensor, func: Any, *weights: Any) -> Tensor:
        """Refuse an activation whose dimension 0 does not count the examples.

        Args:
            x: An activation, or a weight that was expanded to one entry for each example.
            func: The operation.
            weights: Its weights.

        Returns:
            The activation.

        Raises:
            NoExamples: If dimension 0 counts something else.
        """
        x = self.activation(x)
        if self.responds(x) or self.layouts.of(x) != FIRST:
            raise NoExamples(self._no_examples(x, func, *weights))
        return x

    def placed(self, change: Tensor, layout: Layout, ndim: int) -> Tensor:
        """A change for each example, where the examples of an activation are.

        Args:
            change: Shape ``(B, ...)``; the others are the last dimensions of the activation, without that of the
                examples or with one entry there.
            layout: Of the activation.
            ndim: Its number of dimensions.

        Returns:
            A tensor that broadcasts to the activation.
        """
        sizes = [*change.shape[1:]]
        sizes = [1] * (ndim - len(sizes)) + sizes
        assert sizes[layout.dim] == 1
        change = change.reshape(self.count, *sizes).movedim(0, layout.dim).squeeze(layout.dim + 1)
        if layout.alone:
            return change
        if layout.chosen is not None:
            return change.index_select(layout.dim, layout.chosen.ids)
        shape = [*change.shape]
        middle = change.unsqueeze(layout.dim).unsqueeze(layout.dim + 2)
        shape[layout.dim : layout.dim + 1] = [layout.outer, self.count, layout.inner]
        return middle.expand(shape).flatten(layout.dim, layout.dim + 2)

    def check_output(self, output: Any) -> None:
        """Refuse a network that returns a responding weight as it is.

        Raises:
            NoExamples: If it does.
        """
        for leaf in pytree.tree_leaves(output):
            if self.responds(leaf):
                raise NoExamples(self.refusal(self.name(leaf), "the network", "which returns it as it is"))

    def refusal(self, name: str, func: Any, reason: str) -> str:
        """What to say about an operation that cannot respond for each example."""
        called = getattr(func, "__name__", str(func))
        return (
            f"the weight {name!r} is used by {called}, {reason}: it cannot respond to a perturbation of its own for "
            f"each example. Pass perturb='batch' to the method, leave the weight out (structure={{{name!r}: 'none'}}), "
            "or teach the library the operation with bilevel.structure.rule."
        )
