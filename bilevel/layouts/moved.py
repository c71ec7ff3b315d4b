"""What operations that move dimensions do to the place of the examples."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from bilevel.layouts.layout import Ids, Layout


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


def dims_of(x: Tensor, *dims: int) -> list[int]:
    """Dimensions of a tensor, counted from the front."""
    return [dim % x.ndim for dim in dims]


def _given(args: Any, kwargs: Any, *names: str) -> list[Any]:
    """Arguments by position or by name."""
    return [args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)]


def _transposed(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    values = [*args, *kwargs.values()]
    one, two = dims_of(x, *values)
    return layout._replace(dim={one: two, two: one}.get(layout.dim, layout.dim))


def _last_two(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    return _transposed(count, layout, x, y, (-2, -1), {}) if x.ndim > 1 else layout


def _reversed(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    return layout._replace(dim=x.ndim - 1 - layout.dim)


def _permuted(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    values = args or [*kwargs.values()]
    order = values[0] if isinstance(values[0], tuple | list) else values
    return layout._replace(dim=dims_of(x, *order).index(layout.dim))


def _moved(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    source, target = _given(args, kwargs, "source", "destination")
    sources, targets = (dims_of(x, *(v if isinstance(v, tuple | list) else [v])) for v in (source, target))
    if layout.dim in sources:
        return layout._replace(dim=targets[sources.index(layout.dim)])
    rest = [dim for dim in range(x.ndim) if dim not in sources]
    places = [dim for dim in range(x.ndim) if dim not in targets]
    return layout._replace(dim=places[rest.index(layout.dim)])


def _expanded(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    return layout._replace(dim=layout.dim + y.ndim - x.ndim)


def _parts(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    """Parts along another dimension, or along that of the examples."""
    return _part(count, layout, x, y, layout.dim)


def _part(count: int, layout: Layout, x: Tensor, y: Tensor, dim: int) -> Layout | None:
    """A part of the dimension of the examples holds all of them, if it begins with the first and ends with the last."""
    if y.shape[dim] == x.shape[layout.dim]:
        return layout._replace(dim=dim)
    step = x.stride(layout.dim) * count
    whole = layout.inner == 1 and layout.chosen is None and y.shape[dim] % count == 0 and step > 0
    if not whole or y.shape[dim] == 0 or (y.storage_offset() - x.storage_offset()) % step:
        return None
    return Layout(dim, y.shape[dim] // count)


def _repeated(count: int, layout: Layout, x: Tensor, y: Tensor, args: Any, kwargs: Any) -> Layout | None:
    """All examples again and again."""
    if layout.chosen is not None:
        return None
    dim = layout.dim + y.ndim - x.ndim
    times = y.shape[dim] // x.shape[layout.dim]
    if times > 1 and layout.inner > 1:
        return None
    return layout._replace(dim=dim, outer=layout.outer * times)


def joined(layouts: list[Layout | None], dim: int, *, alone: bool) -> Layout | None:
    """Several tensors along one dimension.

    Args:
        layouts: Of those that come from the inputs.
        dim: Along which they are concatenated.
        alone: Whether there are no others.

    Returns:
        The layout that they share; along the dimension of the examples, these are there once for each tensor.
    """
    known = [layout for layout in layouts if layout is not None]
    if not known or len(known) < len(layouts):
        return None
    if any(part.dim != dim for part in known) or (alone and len(known) == 1):
        return known[0]
    if not alone or any(part.inner > 1 or part.chosen is not None for part in known):
        return None
    return Layout(dim, sum(part.outer for part in known))


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
                steps = isinstance(part, slice) and (part.step or 1) == 1
                return _part(count, layout, x, y, new) if steps else None
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
    if first.ndim > 1 and all(isinstance(part, Tensor) and part.dtype != torch.bool for part in index):
        # As in mask[examples[:, None, None], times[None, None]]: the rows are along one dimension of a grid.
        dim = max(range(first.ndim), key=lambda dim: first.shape[dim])
        if first.numel() != first.shape[dim]:
            return None
        grid = torch.broadcast_shapes(*(part.shape for part in index))
        return _chosen(dim + len(grid) - first.ndim, ids[first.flatten()], count)
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
    reduced = set(dims_of(x, *(dims if isinstance(dims, tuple | list) else [dims])))
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
        _parts: "chunk split tensor_split narrow split_with_sizes unsafe_chunk unsafe_split",
        _repeated: "repeat tile",
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


MOVES = dict(_pairs())
LONGER = ("embedding", "one_hot")
JOINS = ("cat", "concat", "concatenate")
MIXING = ("flip", "flipud", "roll", "rot90", "sort", "argsort", "gather", "take_along_dim", "fliplr")
