"""Products with a weight: linear layers, matrices, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.structure.elementwise import shift
from bilevel.structure.respond import Respond, rule


def bilinear(
    mode: Respond,
    function: Any,
    op: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: int,
    out: int | None = None,
    into: int | None = None,
) -> Tensor:
    """An operation ``op(x, weight, bias)``, linear in x and in the weight.

    Args:
        mode: The active mode.
        function: As the network calls it.
        op: The operation.
        x: Its input.
        weight: Its rows are output units, which scale the output, or input units, which scale the input.
        bias: With one entry per output unit.
        axis: Dimension of the units in the input and in the output.
        out: Dimension of the output units in the weight.
        into: Dimension of the input units in the weight.

    Returns:
        Its output.

    Raises:
        NotImplementedError: If the rows lie elsewhere in the weight.
        ValueError: If the input has no dimension of examples.
    """
    x = mode.check(x, function, weight, bias)
    if x.ndim < 2:
        raise ValueError(mode.refusal(mode.name(weight, bias, x), function, "on an input without a dimension of units"))

    def along(factor: Tensor, y: Tensor) -> Tensor:
        sizes = [1] * y.ndim
        sizes[axis] = -1
        return factor.reshape(mode.count, *sizes[1:])

    found = mode.weight(weight) if mode.responds(weight) else None
    rows = [] if found is None else [dim for dim, size in enumerate(found.factor.shape[1:]) if size > 1]
    if rows not in ([], [out], [into]):
        reason = f"with its rows in dimensions {rows} of {tuple(weight.shape)}"
        raise NotImplementedError(mode.refusal(mode.name(weight), function, reason))
    value, tangent = mode.split(x)
    if found is not None and found.grows and rows == [into]:
        # Input units that grow are inputs that grow; the weight then responds no more.
        value, tangent = mode.split(mode.join(value, tangent, along(found.factor, value) * value))
        found = None

    def shifted(response: Tensor | None) -> Tensor | None:
        if bias is None or not mode.responds(bias):
            return response
        change = along(mode.change(bias), value)
        return change if response is None else response + change

    if found is None or not found.grows:
        y = op(value, weight, bias)
        responses = [shifted(None if tangent is None else op(tangent, weight, None))]
        if found is not None and rows == [into]:
            responses.append(op(value * along(found.factor, value), found.template, None))
        elif found is not None:
            responses.append(along(found.factor, y) * op(value, found.template, None))
        return mode.join(y, *responses)
    # A weight that grows needs no product of its own: its response is W x, scaled.
    factor = along(found.factor, value)
    offset = None if bias is None else along(bias.expand(mode.count, -1), value)
    if mode.linearized:
        # In an order that has few tensors of the size of the output alive at once.
        response = shifted(None if tangent is None else op(tangent, weight, None))
        product = op(value, weight, None)
        response = factor * product if response is None else torch.addcmul(response, factor, product)
        return mode.join(product if offset is None else (product + offset).to(product.dtype), response)
    product, offset = op(value, weight, None), shifted(offset)
    y = (1 + factor) * product if offset is None else torch.addcmul(offset, 1 + factor, product)
    return y.to(product.dtype)  # which is that of autocast where it is on


@rule(F.linear)
def linear(mode: Respond, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A row is an output unit."""
    whole = mode.unflatten(input)
    if whole is not None:
        return linear(mode, function, whole, weight, bias).flatten(0, 1)
    return bilinear(mode, function, F.linear, input, weight, bias, axis=-1, out=0, into=1)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def product(mode: Respond, function: Any, input: Tensor, other: Tensor) -> Tensor:
    """A matrix on the right: a row is an input unit, and the input is scaled."""
    if other.ndim != 2 or not mode.responds(other):
        name = mode.name(input, other)
        raise NotImplementedError(mode.refusal(name, function, "as other than a matrix on the right"))
    whole = mode.unflatten(input)
    if whole is not None:
        return product(mode, function, whole, other).flatten(0, 1)

    def op(x: Tensor, w: Tensor, b: None) -> Tensor:
        return x @ w

    return bilinear(mode, function, op, input, other, None, axis=-1, out=1, into=0)


@rule(torch.addmm, Tensor.addmm)
def product_and_shift(mode: Respond, function: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Tensor:
    """A bias, and a matrix on the right."""
    if scales or mode.responds(mat1):
        raise NotImplementedError(
            mode.refusal(mode.name(input, mat1, mat2), function, "with beta, alpha or on the left")
        )
    whole = mode.unflatten(mat1)
    if whole is not None:
        return product_and_shift(mode, function, input, whole, mat2).flatten(0, 1)
    y = product(mode, function, mat1, mat2) if mode.responds(mat2) else mat1 @ mat2
    return shift(mode, function, y, input) if mode.responds(input) else y + input


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
    """A row is the vector of a token. Indices that come from the inputs belong to examples; others choose rows."""
    if not mode.responds(weight) or max_norm is not None or sparse:
        reason = "as other than the table, with max_norm or with sparse gradients"
        raise NotImplementedError(mode.refusal(mode.name(input, weight), function, reason))
    found = mode.weight(weight)
    if len(weight) > 1 and found.factor.shape[2] > 1:
        raise NotImplementedError(mode.refusal(found.name, function, "while its rows are not in dimension 0"))
    numbers = found.factor.expand(-1, len(weight), -1)
    counts = input.shape[:1] == (mode.count,)
    expanded = input.ndim > 1 and input.stride(0) == 0
    ids = input[:1] if expanded else input
    options = (padding_idx, None, norm_type, scale_grad_by_freq)
    vectors = F.embedding(ids, weight, *options)
    template = vectors if found.grows else F.embedding(ids, found.template, *options)
    of_examples = counts and not expanded and mode.origins.from_inputs(input)
    if of_examples:
        mode.check(input, function, weight)
        index = input.reshape(mode.count, -1, 1).expand(-1, -1, numbers.shape[2])
        factor = numbers.gather(1, index).reshape(*input.shape, -1)
    else:
        factor = numbers[:, ids]
    if padding_idx is not None:  # its vector gets no gradient, so neither does its response
        padded = (ids == padding_idx % len(weight))[..., None]
        factor = torch.where(padded, factor.detach(), factor)
    if of_examples:
        return mode.join(vectors, factor * template)
    if expanded:
        vectors = vectors.expand(len(input), *vectors.shape[1:])
    return mode.register(
        vectors,
        weight,
        lambda table: F.embedding(ids, table, *options).expand_as(vectors),
        factor,
        chosen=counts and input.ndim > 1,
    )
