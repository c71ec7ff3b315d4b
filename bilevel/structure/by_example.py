"""The rule of last resort: any operation, for one example after the other, with small weights multiplied out."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from bilevel.layouts import Layout
from bilevel.responding import NoRule

if TYPE_CHECKING:
    from bilevel.structure.respond import Respond

SMALL = 2**16
"""A weight of at most so many numbers may be multiplied out for each example."""

RANDOM = ("bernoulli", "normal", "multinomial", "rrelu", "poisson")


def by_example(mode: Respond, function: Any, args: Any, kwargs: Any, refused: NoRule) -> Any:
    """Apply an operation to each example with weights of its own, all at once (``torch.vmap``).

    Args:
        mode: The active mode.
        function: The operation.
        args: Of the operation.
        kwargs: Of the operation.
        refused: Why no other rule fits.

    Returns:
        Activations; or weights that respond, if there are no activations among the arguments.

    Raises:
        NoRule: If a weight is too large, or the operation cannot be taken apart.
    """
    name = getattr(function, "__name__", "")
    changes = name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))
    if changes or kwargs.get("out") is not None or name in RANDOM or name.startswith("rand") or "dropout" in name:
        raise refused
    leaves, spec = pytree.tree_flatten((args, kwargs))
    values: list[Tensor] = []
    dims: list[int] = []
    places: list[int] = []
    with_examples = False
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if mode.responds(leaf):
            values.append(mode.multiplied_out(leaf, function))
            dims.append(0)
        elif mode.layouts.known(leaf):
            layout = _simple(mode.layouts.of(leaf), refused)
            values.append(leaf.unflatten(layout.dim, (mode.count, layout.inner)))
            dims.append(layout.dim)
            with_examples = True
        elif leaf.shape[:1] == (mode.count,):
            raise refused  # examples, or something of the same number: nobody knows
        else:
            continue
        places.append(place)

    def one(*tensors: Tensor) -> Any:
        parts = [*leaves]
        for place, value in zip(places, tensors, strict=True):
            parts[place] = value
        own, named = pytree.tree_unflatten(parts, spec)
        return function(*own, **named)

    try:
        plain = function(*args, **kwargs)
        shapes, form = pytree.tree_flatten(plain)
        if not shapes or not all(isinstance(y, Tensor) and y.is_floating_point() for y in shapes):
            raise refused
        if not with_examples:
            results = pytree.tree_leaves(_mapped(one, dims, 0)(*values))
            source = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and mode.responds(leaf))
            made = [_weight(mode, source, *pair) for pair in zip(shapes, results, strict=True)]
            return pytree.tree_unflatten(made, form)
        mode.layouts.follow(function, args, kwargs, leaves, plain)
        layouts = [_simple(mode.layouts.of(y), refused) for y in shapes]
        outs = [layout.dim for layout in layouts]
        results = pytree.tree_leaves(_mapped(one, dims, pytree.tree_unflatten(outs, form))(*values))
    except NoRule:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise refused from error
    joined = [y.flatten(dim, dim + 1) for y, dim in zip(results, outs, strict=True)]
    if [y.shape for y in joined] != [y.shape for y in shapes]:
        raise refused
    return pytree.tree_unflatten(joined, form)


def _simple(layout: Layout | None, refused: NoRule) -> Layout:
    if layout is None or layout.outer > 1 or layout.chosen is not None:
        raise refused
    return layout


def _mapped(one: Any, dims: list[int], outs: Any) -> Any:
    mapped = torch.vmap(one, tuple(dims), outs)

    def quiet(*tensors: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # operations without a batching rule
            return mapped(*tensors)

    return quiet


def _weight(mode: Respond, source: Tensor, plain: Tensor, all_of_them: Tensor) -> Tensor:
    """A weight whose change has no structure."""
    change: Tensor | None
    if mode.linearized:
        change = forward_ad.unpack_dual(all_of_them).tangent
        plain = forward_ad.unpack_dual(plain).primal
        change = torch.zeros_like(all_of_them) if change is None else change
    else:
        change = all_of_them - plain
    return mode.register(plain, source, plain.new_ones(()).expand_as(plain), change)


def is_mapped(x: Any) -> bool:
    """Whether a tensor is one row of another, inside of ``torch.vmap``."""
    while isinstance(x, Tensor) and is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False
