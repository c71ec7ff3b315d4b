r"""Weights that a network normalises: weight norm, ``F.normalize(weight)``.

A row :math:`v + f R` has the length :math:`n(f) = \sqrt{\|v\|^2 + 2 f\, v^\top R + f^2 \|R\|^2}`. What becomes of the
row is :math:`(v + f R) / n(f)`, a sum of two rows with one factor each. A row that grows keeps its direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.responding import NoRule
from bilevel.structure.respond import Respond, rule
from bilevel.structure.weights import Term


@rule(F.normalize)
def normalize(
    mode: Respond, function: Any, input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> Tensor:
    """Each row is divided by its length, along dimensions in which the rows do not lie."""
    dims = {place % input.ndim for place in ([dim] if isinstance(dim, int) else dim)}
    if p != 2 or out is not None or dims & set(mode.terms(input).rows) or mode.terms(input).more:
        raise NoRule(mode.refusal(mode.name(input), function, "across its rows, or with another p than 2"))
    return _scaled(mode, input, None, sorted(dims), eps)


@rule(torch._weight_norm)
def weight_norm(mode: Respond, function: Any, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """A direction and a length; both may respond."""
    places = range(v.ndim) if dim == -1 else [place for place in range(v.ndim) if place != dim % v.ndim]
    for part in (v, g):
        if mode.responds(part):
            found = mode.terms(part)
            if found.more or set(found.rows) - (set() if dim == -1 else {dim % v.ndim}):
                # In plain operations, so that the rule of last resort and forward mode know them.
                def plain(v: Tensor, g: Tensor) -> Tensor:
                    return v * (g / v.square().sum(list(places), keepdim=True).sqrt())

                result: Tensor = mode.by_example(plain, v, g)
                return result
    return _scaled(mode, v, g, [*places], 0.0)


def _scaled(mode: Respond, v: Tensor, g: Tensor | None, dims: Sequence[int], eps: float) -> Tensor:
    """The weight ``g v / max(|v|, eps)`` with one length per row, and how it responds."""

    def length(square: Tensor) -> Tensor:
        return square.sqrt() if eps == 0 else square.clamp_min(eps * eps).sqrt()

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(list(dims), keepdim=True)

    square = dot(v, v)
    n = length(square)
    unit = v / n
    result = unit if g is None else unit * g
    size: Tensor | float = 1.0 if g is None else g
    own = mode.terms(v) if mode.responds(v) else None
    lengths = mode.terms(g) if g is not None and mode.responds(g) else None
    source = v if own is not None else g
    assert source is not None
    terms: list[Term] = []
    if mode.linearized:
        if own is not None and not own.grows:
            f, template = own.factor, own.template
            inside = torch.where(square > eps * eps, dot(v, template) / n.square(), 0.0)
            terms.append((f, size * (template - v * inside) / n))
        if lengths is not None:
            terms.append((lengths.factor, unit * lengths.template))
        if not terms:  # a row that grows keeps its direction
            assert own is not None
            terms.append((0 * own.factor, result))
    else:
        change = None if lengths is None else lengths.factor * lengths.template
        sizes = size if change is None else size + change
        if own is None:
            assert change is not None
            terms.append((change, unit))
        elif own.grows:
            grown = 1 + own.factor
            terms.append((sizes * grown / length(grown.square() * square) - size / n, v))
        else:
            f, template = own.factor, own.template
            new = length(square + 2 * f * dot(v, template) + f.square() * dot(template, template))
            terms += [(sizes / new - size / n, v), (sizes * f / new, template)]
    (factor, template), *more = terms
    return mode.register(result, source, template, factor, more=tuple(more))
