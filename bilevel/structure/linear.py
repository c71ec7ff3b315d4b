"""Products with a weight: linear layers, matrices, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.structure.respond import Respond, rule


def bilinear(
    mode: Respond, function: Any, op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, axis: int
) -> Tensor:
    """An operation ``op(x, weight, bias)``, linear in x and in the weight, with its rows in an axis of its output."""
    mode.check(x, function, weight, bias)
    value, tangent = mode.split(x)
    y = op(value, weight, bias)
    rows, offsets = mode.rows(weight), mode.rows(bias)
    axis = axis % y.ndim

    def along(factor: Tensor) -> Tensor:
        return factor.reshape([len(factor), *[factor.shape[1] if i == axis else 1 for i in range(1, y.ndim)]])

    return mode.join(
        y,
        None if tangent is None else op(tangent, weight, None),
        None if rows is None else along(rows.factor) * op(value, rows.template, None),
        None if offsets is None else along(offsets.factor * offsets.template),
    )


@rule(F.linear)
def linear(mode: Respond, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A row is an output unit."""
    return bilinear(mode, function, F.linear, input, weight, bias, -1)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def product(mode: Respond, function: Any, input: Tensor, other: Tensor) -> Tensor:
    """A matrix on the right: a row is an input unit, and the input is scaled."""
    if mode.rows(input) is not None or other.ndim != 2:
        name = mode.name(input, other)
        raise NotImplementedError(mode.refusal(name, function, "as other than a matrix on the right"))
    mode.check(input, function, other)
    value, tangent = mode.split(input)
    rows = mode.rows(other)
    assert rows is not None
    factor = rows.factor.reshape(mode.count, *[1] * (value.ndim - 2), -1)
    return mode.join(value @ other, None if tangent is None else tangent @ other, (value * factor) @ rows.template)


@rule(F.embedding)
def embedding(
    mode: Respond,
    function: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """A row is the vector of a token."""
    if max_norm is not None or sparse:
        raise NotImplementedError(mode.refusal(mode.name(weight), function, "with max_norm or sparse gradients"))
    mode.check(input, function, weight)
    rows = mode.rows(weight)
    assert rows is not None
    factor = rows.factor.gather(1, input.reshape(mode.count, -1)).reshape(*input.shape, 1)
    if padding_idx is not None:  # whose vector gets no gradient, and so none of its response
        padded = (input == padding_idx % len(weight))[..., None]
        factor = torch.where(padded, factor.detach(), factor)
    options = (padding_idx, None, norm_type, scale_grad_by_freq)
    return mode.join(F.embedding(input, weight, *options), factor * F.embedding(input, rows.template, *options))
