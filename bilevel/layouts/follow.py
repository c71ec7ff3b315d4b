"""The way of the examples through a network."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor

from bilevel.batches import leaves
from bilevel.layouts.layout import FIRST, Layout
from bilevel.layouts.moved import JOINS, LONGER, MIXING, MOVES, dims_of, joined

following: ContextVar[Layouts | None] = ContextVar("following", default=None)
"""Of the network that runs now, if its examples are followed."""


@final
class Layouts:
    """Follows the examples through a network.

    Attributes:
        count: The number of examples.
        visits: What is to see each operation first, called with the function and its arguments; it returns
            ``NotImplemented`` for what it leaves alone.

    Example:
        >>> x = torch.zeros(3, 3, 2)  # as many examples as times
        >>> layouts = Layouts(3, x)
        >>> y = x.transpose(0, 1)
        >>> layouts.follow(torch.transpose, (x, 0, 1), {}, [x], y)
        >>> layouts.of(x).dim, layouts.of(y).dim
        (0, 1)
    """

    def __init__(self, count: int, inputs: Any = ()) -> None:
        """Start with the inputs of the network, in any nesting: examples first, or else second."""
        self.count = count
        self.visits: Callable[[Any, Any, Any], Any] | None = None
        # A number may be that of a later tensor when the first is gone, so that the tensor itself is compared.
        self._known: dict[int, tuple[weakref.ref[Tensor], Layout | None]] = {}
        for leaf in leaves(inputs):
            if isinstance(leaf, Tensor):
                for dim in range(min(leaf.ndim, 2)):
                    if leaf.shape[dim] == count:
                        self.note(leaf, Layout(dim))
                        break

    def known(self, x: Tensor) -> bool:
        """Whether a tensor comes from the inputs."""
        entry = self._known.get(id(x))
        return entry is not None and entry[0]() is x

    def of(self, x: Tensor) -> Layout | None:
        """Where the examples are.

        Args:
            x: An activation.

        Returns:
            None if that is unknown. A tensor that does not come from the inputs has them first if its shape allows it.
        """
        entry = self._known.get(id(x))
        if entry is not None and entry[0]() is x:
            return entry[1]
        return FIRST if x.shape[:1] == (self.count,) else None

    def where(self, x: Tensor) -> Layout | None:
        """Where the examples of a tensor are that comes from the inputs; None for any other."""
        entry = self._known.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def keep(self, x: Tensor, layout: Layout) -> None:
        """Remember where the examples of a tensor are, of which it is known that the layout fits."""
        self._known[id(x)] = weakref.ref(x), layout

    def note(self, x: Tensor, layout: Layout | None) -> None:
        """Remember where the examples of a tensor are; None for nowhere that is known."""
        if layout is not None and x.shape[layout.dim] != layout.size(self.count):
            layout = None
        self._known[id(x)] = weakref.ref(x), layout

    def follow(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], flat: list[Any], result: Any) -> None:
        """Note where the examples of a result are.

        Args:
            function: The operation.
            args: Its arguments.
            kwargs: And those by name.
            flat: All of these, without their nesting.
            result: What it returned.
        """
        known = self._known
        # Most arguments are unknown, which their numbers tell fastest.
        sources = [x for x in flat if id(x) in known and isinstance(x, Tensor) and self.known(x)]
        if not sources:
            return
        name = getattr(function, "__name__", "")
        if name == "__get__":  # x.T and its relatives
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        if name.startswith("new_"):  # of whatever shape, and without examples
            return
        if name == "__setitem__":
            self._assigned(args[0], args[-1])
            return
        results = result if isinstance(result, tuple | list) else (result,)
        find = MOVES.get(name)
        for index, y in enumerate(results):
            if not isinstance(y, Tensor) or any(y is x for x in sources):
                continue
            if name in JOINS:
                parts = _tensors(args[0] if args else kwargs["tensors"])
                dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
                own = [self.of(x) for x in parts if self.known(x)]
                self.note(y, joined(own, dim % y.ndim, alone=len(own) == len(parts)))
                continue
            if find is None:
                apart = name not in MIXING or self._apart(sources, args, kwargs)
                self.note(y, self._kept(name, sources, flat, y) if apart else None)
                continue
            start = _tensors(args[0] if args else next(iter(kwargs.values())))
            x = next((x for x in start if self.known(x)), None)
            layout = None if x is None else self.of(x)
            if name == "multi_head_attention_forward":
                layout = Layout(1) if index == 0 else FIRST
            elif layout is not None and x is not None:
                try:
                    layout = find(self.count, layout, x, y, args[1:], kwargs)
                except (TypeError, ValueError, IndexError):
                    layout = None
            self.note(y, layout)

    def _assigned(self, x: Any, value: Any) -> None:
        if isinstance(value, Tensor) and isinstance(x, Tensor) and self.known(value) and not self.known(x):
            layout = self.of(value)
            self.note(x, None if layout is None else layout._replace(dim=layout.dim + x.ndim - value.ndim))

    def _apart(self, sources: list[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether what is put in another order, or chosen, lies along other dimensions than the examples."""
        dims = kwargs.get("dims", kwargs.get("dim"))
        if dims is None:
            dims = [a for a in args[1:] if isinstance(a, tuple | list) or type(a) is int][-1:]
            dims = dims[0] if dims else -1
        given = dims if isinstance(dims, tuple | list) else [dims]
        found = [(x, self.of(x)) for x in sources]
        return all(layout is not None and layout.dim not in dims_of(x, *given) for x, layout in found)

    def _kept(self, name: str, sources: list[Tensor], flat: list[Any], y: Tensor) -> Layout | None:
        """The layout of what most operations return: entry by entry, or with other sizes behind the examples."""
        found: set[Layout | None] = set()
        broadcasts: bool | None = None
        for x in sources:
            layout = self.of(x)
            if layout is None:
                continue  # a mask perhaps, whose examples were lost
            dim = layout.dim
            if x.shape[: dim + 1] == y.shape[: dim + 1] and (dim == 0 or x.ndim == y.ndim or name in LONGER):
                if x.ndim == y.ndim:
                    found.add(layout)
                    continue
                kept: Layout | None = layout
            else:
                kept = None
            if broadcasts is None:
                broadcasts = _broadcasts([x.shape for x in flat if isinstance(x, Tensor)], y.shape)
            found.add(layout._replace(dim=dim + y.ndim - x.ndim) if broadcasts else kept)
        # Two places of the examples: the network mixes them, of which the checks tell more.
        found -= {None} if len(found) > 1 else set()
        return next(iter(found)) if len(found) == 1 else FIRST if FIRST in found else None


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, Tensor)]


def _broadcasts(shapes: Sequence[Sequence[int]], shape: Sequence[int]) -> bool:
    try:
        return bool(torch.broadcast_shapes(*shapes) == tuple(shape))
    except RuntimeError:
        return False
