"""Products with a weight: linear layers, matrices, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunction

from bilevel.layouts import FIRST
from bilevel.responding import NoExamples, NoRule
from bilevel.structure.moves import move
from bilevel.structure.respond import Respond, rule
from bilevel.structure.slopes import Grown, Shifts, Slopes

LARGE, FEW, SEVERAL = 2**14, 512, 64
"""Of fewer numbers, Python takes longer than the processor. Up to so many rows, and from so many output units on, one
product is faster than two with half of the rows each."""


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
        NoRule: If the rows lie elsewhere in the weight.
        NoExamples: If the input has no dimension of examples.
    """  # noqa: DOC502
    with DisableTorchFunction():  # nothing in here is for another mode, and modes take time
        return _bilinear(mode, function, op, x, weight, bias, axis=axis, out=out, into=into)


def _bilinear(
    mode: Respond,
    function: Any,
    op: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: int,
    out: int | None,
    into: int | None,
) -> Tensor:
    if mode.responds(x) and not mode.spread(x):
        raise NoRule(mode.refusal(mode.name(x), function, "in the place of an activation"))
    x = mode.activation(x)
    layout, back = mode.layout(x, function, weight, bias), None
    if axis == -1 and layout.chosen is None:
        x, back = mode.front(x, function, weight, bias)
        layout = FIRST
    elif layout.dim:
        mode.check(x, function, weight, bias)
    if x.ndim < 2:
        raise NoExamples(mode.refusal(mode.name(weight, bias, x), function, "on an input without a dimension of units"))

    def along(factor: Tensor, y: Tensor) -> Tensor:
        sizes = [1] * y.ndim
        sizes[axis] = -1
        factor = factor.reshape(mode.count, *sizes[1:])
        # Rows that were chosen; or one image after the other, several of each example.
        return factor if layout == FIRST else factor[layout.ids(mode.count, factor.device)]

    def result(y: Tensor) -> Tensor:
        return y if back is None else back(y)

    found = mode.terms(weight) if mode.responds(weight) else None
    rows = [] if found is None else found.rows
    if rows not in ([], [out], [into]):
        reason = f"with its rows in dimensions {rows} of {tuple(weight.shape)}"
        raise NoRule(mode.refusal(mode.name(weight), function, reason))
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
        for factor, template in () if found is None else found.terms:
            if rows == [into]:
                responses.append(op(value * along(factor, value), template, None))
            else:
                responses.append(along(factor, y) * op(value, template, None))
        return result(mode.join(y, *responses))
    # A weight that grows needs no product of its own: its response is W x, scaled.
    factor = along(found.factor, value)
    sizes = [-1 if dim == axis % value.ndim else 1 for dim in range(value.ndim)]
    offset = None if bias is None else bias.reshape(sizes)
    if mode.linearized and op is F.linear and _constant(value, tangent, weight, factor):
        response, product = Grown.apply(tangent, value, weight, factor, shifted(None), _together(value, weight))
        return result(mode.join(product if offset is None else product + offset, response))
    if mode.linearized:
        # In an order that has few tensors of the size of the output alive at once.
        response = None if tangent is None else op(tangent, weight, None)
        product = op(value, weight, None)
        if _constant(value, response, product, factor) and not weight.requires_grad:
            response = Shifts.apply(response, None, product, factor, shifted(None))
            return result(mode.join(product if offset is None else product + offset, response))
        response = shifted(response)
        response = factor * product if response is None else torch.addcmul(response, factor, product)
        return result(mode.join(product if offset is None else (product + offset).to(product.dtype), response))
    product = op(value, weight, None)
    if mode.slope_only and product.numel() >= LARGE:
        return result(Slopes.apply(product, None, offset, factor, shifted(None)))
    offset = shifted(offset)
    y = (1 + factor) * product if offset is None else torch.addcmul(offset, 1 + factor, product)
    return result(y.to(product.dtype))  # which is that of autocast where it is on


def _constant(value: Tensor, tangent: Tensor | None, weight: Tensor, factor: Tensor) -> bool:
    """Whether only a tangent and a factor are differentiated, and all are of one kind."""
    alike = value.dtype == weight.dtype == factor.dtype and (tangent is None or tangent.dtype == value.dtype)
    plain = alike and not (value.requires_grad or weight.requires_grad)
    transformed = torch._C._are_functorch_transforms_active()
    return plain and not transformed and not torch.is_autocast_enabled(value.device.type)


def _together(value: Tensor, weight: Tensor) -> bool:
    """Whether two products with a weight are better made as one."""
    return value.numel() <= FEW * value.shape[-1] and len(weight) >= SEVERAL and value.numel() >= LARGE


@rule(F.linear)
def linear(mode: Respond, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A row is an output unit."""
    return bilinear(mode, function, F.linear, input, weight, bias, axis=-1, out=0, into=1)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def product(mode: Respond, function: Any, input: Tensor, other: Tensor) -> Tensor:
    """A matrix on the right: a row is an input unit, and the input is scaled."""
    if other.ndim != 2 or not mode.responds(other):
        name = mode.name(input, other)
        raise NoRule(mode.refusal(name, function, "as other than a matrix on the right"))

    def op(x: Tensor, w: Tensor, b: None) -> Tensor:
        return x @ w

    return bilinear(mode, function, op, input, other, None, axis=-1, out=1, into=0)


@rule(torch.addmm, Tensor.addmm)
def product_and_shift(
    mode: Respond, function: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """A bias, and a matrix on the right."""
    if beta != 1 or alpha != 1 or mode.responds(mat1) or mode.layouts.known(mat2):
        raise NoRule(mode.refusal(mode.name(input, mat1, mat2), function, "with beta, alpha or on the left"))
    if mode.responds(input) and mode.terms(input).terms[0][1].ndim > 1:
        raise NoRule(mode.refusal(mode.name(input), function, "as more than a bias"))

    def op(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return x @ w if b is None else x @ w + b

    if not mode.responds(input):
        y = product(mode, function, mat1, mat2)
        return y + input
    return bilinear(mode, function, op, mat1, mat2, input, axis=-1, out=1, into=0)


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
        raise NoRule(mode.refusal(mode.name(input, weight), function, reason))
    layout = mode.layouts.of(input)
    if layout is not None and layout != FIRST and mode.origins.from_inputs(input):
        ids, back = mode.front(input, function, weight, own=0)
        ids = ids.contiguous()
        mode.origins.note(ids)
        return back(embedding(mode, function, ids, weight, padding_idx, None, norm_type, scale_grad_by_freq))
    found = mode.weight(weight)
    if len(weight) > 1 and found.factor.shape[2] > 1:
        raise NoRule(mode.refusal(found.name, function, "while its rows are not in dimension 0"))
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


@rule(Tensor.__getitem__)
def look_up(mode: Respond, function: Any, input: Tensor, index: Any) -> Any:
    """Rows of a table by their numbers, as in ``table[distances]``; or a view."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    numbers = isinstance(index, Tensor) and index.ndim > 0 and index.dtype in (torch.int64, torch.int32)
    if not mode.responds(input) or not numbers or input.ndim != 2:
        return move(mode, function, input, index)
    return embedding(mode, function, index, input)
