"""Where the examples of a batch are in an activation: in a dimension of their own, or flattened with something else.

Networks move them. GPT-2 flattens ``(B, T, features)`` to ``(B * T, features)``, Swin cuts images into windows
``(B * windows, ...)``, time-first networks work on ``(T, B, features)``. The shape alone does not tell: T may equal B.
So every operation of a network is followed from its inputs on. What an operation does to the examples is known for
those that move dimensions; all others keep a dimension where it is, or lead to an activation of unknown layout.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.batches import leaves


@final
class Ids:
    """The example of each row, where rows were chosen: the tokens of an expert, or all that are no padding."""

    def __init__(self, ids: Tensor) -> None:
        """Keep the numbers, shape ``(rows,)``."""
        self.ids = ids

    @override
    def __eq__(self, other: object) -> bool:
        """Whether the same examples are in the same order."""
        return isinstance(other, Ids) and torch.equal(self.ids, other.ids)

    @override
    def __hash__(self) -> int:
        """By length."""
        return len(self.ids)


class Layout(NamedTuple):
    """Dimension ``dim`` runs over ``outer * B * inner`` entries, and the examples are in the middle.

    Attributes:
        dim: The dimension.
        outer: How often all examples are repeated in it, as in ``(T * B, features)``.
        inner: How many entries belong to one example, as in ``(B * T, features)``.
        chosen: Instead of both, the example of each entry.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    chosen: Ids | None = None

    @property
    def alone(self) -> bool:
        """Whether the examples have a dimension of their own."""
        return self.outer == self.inner == 1 and self.chosen is None

    def ids(self, count: int, device: torch.device) -> Tensor:
        """The example of each entry."""
        if self.chosen is not None:
            return self.chosen.ids
        examples = torch.arange(count, device=device)
        return examples.repeat_interleave(self.inner).repeat(self.outer)

    def size(self, count: int) -> int:
        """How many entries there are."""
        return self.outer * count * self.inner if self.chosen is None else len(self.chosen.ids)


FIRST = Layout(0)

following: ContextVar[Layouts | None] = ContextVar("following", default=None)
"""Of the network that runs now, if its examples are followed."""


@final
class Layouts:
    """Follows the examples through a network.

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
        sources = [x for x in flat if isinstance(x, Tensor) and self.known(x)]
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
        find = _MOVES.get(name)
        for index, y in enumerate(results):
            if not isinstance(y, Tensor) or any(y is x for x in sources):
                continue
            if find is None:
                apart = name not in _MIXING or self._apart(sources, args, kwargs)
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
        return all(layout is not None and layout.dim not in _dims(x, *given) for x, layout in found)

    def _kept(self, name: str, sources: list[Tensor], flat: list[Any], y: Tensor) -> Layout | None:
        """The layout of what most operations return: entry by entry, or with other sizes behind the examples."""
        found: set[Layout | None] = set()
        broadcasts: bool | None = None
        for x in sources:
            layout = self.of(x)
            if layout is None:
                continue  # a mask perhaps, whose examples were lost
            dim = layout.dim
            if x.shape[: dim + 1] == y.shape[: dim + 1] and (dim == 0 or x.ndim == y.ndim or name in _LONGER):
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


def _reshaped(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    """All numbers in the same order, in another shape."""
    if x.numel() != y.numel():
        return None
    if layout.chosen is not None:
        return _regrouped(count, layout, x, y)
    outer = prod(x.shape[: layout.dim]) * layout.outer
    inner = layout.inner * prod(x.shape[layout.dim + 1 :])
    for dim, size in enumerate(y.shape):
        before, after = prod(y.shape[:dim]), prod(y.shape[dim + 1 :])
        if outer % before == 0 and inner % after == 0 and outer // before * count * (inner // after) == size:
            return Layout(dim, outer // before, inner // after)
    return None


def _regrouped(count: int, layout: Layout, x: Tensor, y: Tensor) -> Layout | None:
    """Rows that were chosen keep their dimension, or are put together again by several of one example."""
    ids, before = layout.ids(count, x.device), prod(x.shape[: layout.dim])
    for dim, size in enumerate(y.shape):
        if prod(y.shape[:dim]) != before or size == 0 or len(ids) % size:
            continue
        groups = ids.view(size, -1)
        if prod(y.shape[dim + 1 :]) == prod(x.shape[layout.dim + 1 :]) * groups.shape[1]:
            return _chosen(dim, groups[:, 0], count) if bool((groups == groups[:, :1]).all()) else None
    return None


def _chosen(dim: int, ids: Tensor, count: int) -> Layout:
    """The layout of rows that were chosen, which may be all rows again."""
    inner = max(len(ids) // count, 1)
    plain = Layout(dim, 1, inner)
    if plain.size(count) == len(ids) and torch.equal(plain.ids(count, ids.device), ids):
        return plain
    return Layout(dim, chosen=Ids(ids))


def _dims(x: Tensor, *dims: int) -> list[int]:
    return [dim % x.ndim for dim in dims]


def _given(args: Any, kwargs: Any, *names: str) -> list[Any]:
    """Arguments by position or by name."""
    return [args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)]


def _transposed(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    values = [*args, *kwargs.values()]
    one, two = _dims(x, *values)
    return layout._replace(dim={one: two, two: one}.get(layout.dim, layout.dim))


def _last_two(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    return _transposed(count, layout, x, y, (-2, -1), {}) if x.ndim > 1 else layout


def _reversed(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    return layout._replace(dim=x.ndim - 1 - layout.dim)


def _permuted(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    values = args or [*kwargs.values()]
    order = values[0] if isinstance(values[0], tuple | list) else values
    return layout._replace(dim=_dims(x, *order).index(layout.dim))


def _moved(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    source, target = _given(args, kwargs, "source", "destination")
    sources, targets = (_dims(x, *(v if isinstance(v, tuple | list) else [v])) for v in (source, target))
    if layout.dim in sources:
        return layout._replace(dim=targets[sources.index(layout.dim)])
    rest = [dim for dim in range(x.ndim) if dim not in sources]
    places = [dim for dim in range(x.ndim) if dim not in targets]
    return layout._replace(dim=places[rest.index(layout.dim)])


def _expanded(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    return layout._replace(dim=layout.dim + y.ndim - x.ndim)


def _parts(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    """Parts along another dimension: a part along that of the examples has fewer of them, and is noted as unknown."""
    return layout


def _without(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    """One entry of a dimension, which is gone then."""
    dim = (args[0] if args else kwargs.get("dim", 0)) % x.ndim
    return None if dim == layout.dim else layout._replace(dim=layout.dim - (dim < layout.dim))


def _indexed(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(not isinstance(part, int | slice | None) and part is not Ellipsis for part in index):
        return _picked(count, layout, x, y, index)
    used = sum(part is not None and part is not Ellipsis for part in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    old = new = 0
    for part in index:
        if part is Ellipsis:
            skip = x.ndim - used
            if old <= layout.dim < old + skip:
                return layout._replace(dim=new + layout.dim - old)
            old, new = old + skip, new + skip
        elif part is None:
            new += 1
        else:
            if old == layout.dim:
                reverses = isinstance(part, slice) and (part.step or 1) != 1
                return layout._replace(dim=new) if isinstance(part, slice) and not reverses else None
            old, new = old + 1, new + isinstance(part, slice)
    return None


def _picked(count: int, layout: Layout, x: Tensor, y: Tensor, index: tuple[Any, ...]) -> Layout | None:
    """Rows that are chosen by a table of numbers or of truth values, in front."""
    first, *rest = index
    if layout.dim or not isinstance(first, Tensor) or first.ndim == 0:
        return None
    if any(isinstance(part, slice) and part != slice(None) for part in rest):
        return None
    ids = layout.ids(count, x.device)
    if first.dtype == torch.bool:
        rows = first.nonzero()[:, 0] if not rest else None
    else:
        rows = (
            first if first.ndim == 1 and all(not isinstance(part, Tensor) or part.ndim <= 1 for part in rest) else None
        )
    return None if rows is None or len(y) != len(rows) else _chosen(0, ids[rows], count)


def _selected(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    """``index_select``."""
    dim, index = _given(args, kwargs, "dim", "index")
    if dim % x.ndim != layout.dim:
        return layout
    return _chosen(layout.dim, layout.ids(count, x.device)[index], count)


def _stacked(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    dim = (args[0] if args else kwargs.get("dim", 0)) % y.ndim
    return layout._replace(dim=layout.dim + (dim <= layout.dim))


def _reduced(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    """Sums, means and norms over some dimensions."""
    dims = kwargs.get("dim", kwargs.get("axis"))
    if dims is None:  # the first argument that may be a dimension; norms have their order before
        dims = next((a for a in args if isinstance(a, tuple | list) or type(a) is int), None)
    if dims is None:
        return layout if x.shape == y.shape else None  # torch.max(x, y), entry by entry
    reduced = set(_dims(x, *(dims if isinstance(dims, tuple | list) else [dims])))
    if layout.dim in reduced:
        return None
    if x.ndim == y.ndim:
        return layout
    return layout._replace(dim=layout.dim - sum(dim < layout.dim for dim in reduced))


def _norm(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    """As sums, after the order of the norm."""
    return _reduced(count, layout, x, y, args[1:], {k: v for k, v in kwargs.items() if k not in ("p", "ord")})


def _attended(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    return layout


def _pairs() -> Iterator[tuple[str, Any]]:
    reshapes = "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel contiguous clone unsafe_view"
    tables = {
        _reshaped: reshapes,
        _transposed: "transpose swapaxes swapdims",
        _last_two: "mT mH adjoint",
        _reversed: "T H t",
        _permuted: "permute",
        _moved: "movedim moveaxis",
        _expanded: "expand expand_as broadcast_to",
        _parts: "chunk split tensor_split narrow split_with_sizes unsafe_chunk unsafe_split cat concat concatenate",
        _without: "select unbind __iter__",
        _indexed: "__getitem__",
        _stacked: "stack",
        _selected: "index_select",
        _reduced: "sum mean amax amin max min std var prod logsumexp argmax argmin any all median nansum var_mean",
        _norm: "norm vector_norm",
        _attended: "multi_head_attention_forward",
    }
    for find, names in tables.items():
        for name in names.split():
            yield name, find


_MOVES = dict(_pairs())
_LONGER = ("embedding", "one_hot")
_MIXING = ("flip", "flipud", "roll", "rot90", "sort", "argsort", "gather", "take_along_dim", "fliplr")
