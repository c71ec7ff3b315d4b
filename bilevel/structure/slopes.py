"""Products of a step, in forms that spare tensors as large as an activation.

They compute what the formulas beside them say, to the last digit but one; their derivatives can be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from typing_extensions import override

from bilevel.responding import Function

PIECE = 2**16
"""So many numbers stay in the cache of a processor between a product and its sum."""
LARGE, SEVERAL = 2**20, 2
"""So many numbers of a matrix product are written at once, and so many times more are worth the calls."""


def row_products(left: Tensor, right: Tensor) -> Tensor:
    r"""The inner product of each row with its counterpart, :math:`s_r = \sum_c a_{rc} b_{rc}`.

    Args:
        left: Shape ``(rows, columns)``.
        right: The same shape.

    Returns:
        Shape ``(rows,)``. No product as large as a matrix is stored.

    Example:
        >>> row_products(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        tensor([3., 8.])
    """
    if left.device.type != "cpu" or left.element_size() < 4:  # which sums in more than half precision
        return (left.unsqueeze(1) @ right.unsqueeze(2)).flatten()
    rows = max(1, PIECE // max(1, left.shape[1]))  # on a CPU, that product takes three times as long
    return torch.cat([(a * b).sum(1) for a, b in zip(left.split(rows), right.split(rows), strict=True)])


class Parts(Function):
    r"""The factors :math:`\mathbf{U} \delta` of some weights, ``(shift @ factor).split(counts, -1)``.

    With ``slope_only`` they are zero, :math:`\mathbf{U} \delta - \operatorname{stop}(\mathbf{U} \delta)`, and the
    product is spared. The gradient of few hyperparameters is put together from that of each weight, which is smaller
    than the activations. With ``held`` it waits there, and None is returned. The rows of the shift are ``copies`` of
    the first ones, one after the other; the last of them may be cut off.
    """

    @staticmethod
    @override
    def forward(
        shift: Tensor, factor: Tensor, counts: list[int], slope_only: bool, held: Held | None, copies: int
    ) -> tuple[Tensor, ...]:
        if not slope_only:
            if copies > 1:
                product = shift[: distinct(len(shift), copies)] @ factor
                return tuple(part.repeat(copies, 1)[: len(shift)] for part in product.split(counts, dim=-1))
            return tuple((shift @ factor).split(counts, dim=-1))
        zero = factor.new_zeros(())
        return tuple(zero.expand(*shift.shape[:-1], count) for count in counts)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.counts, ctx.held, ctx.copies = inputs[2], *inputs[4:]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        (shift,) = ctx.saved_tensors
        if ctx.held is not None and ctx.held.keeps(cotangents):
            return None, None, None, None, None, None
        rows = shift.reshape(-1, shift.shape[-1])
        like = next(part for part in cotangents if part is not None)
        pairs = zip(cotangents, ctx.counts, strict=True)
        parts = [like.new_zeros(len(rows), count) if part is None else part.reshape(-1, count) for part, count in pairs]
        if ctx.copies > 1:
            rows = rows[: distinct(len(rows), ctx.copies)]
            parts = [_folded(part, len(rows)) for part in parts]
        if rows.shape[1] < len(rows) and len(rows) * sum(ctx.counts) > LARGE:
            return None, torch.cat([rows.T @ part for part in parts], dim=1), None, None, None, None
        return None, _product(rows, torch.cat(parts, dim=1)), None, None, None, None


def distinct(examples: int, copies: int) -> int:
    """How many different rows there are among ``examples``.

    Returns:
        Their number.
    """
    return -(-examples // copies)


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """The product ``rows.T @ matrix``; on a CPU, a large one in pieces, which takes two thirds of the time."""
    hyper, units = rows.shape[1], matrix.shape[1]
    plain = torch.is_grad_enabled() or get_proxy_mode() is not None or matrix.device.type != "cpu"
    if plain or hyper * units < SEVERAL * LARGE:
        return rows.T @ matrix
    product = matrix.new_empty(hyper, units)
    step = max(1, LARGE // units)
    for start in range(0, hyper, step):
        torch.mm(rows[:, start : start + step].T, matrix, out=product[start : start + step])
    return product


def _folded(part: Tensor, rows: int) -> Tensor:
    """The sum of the copies."""
    first: Tensor
    first, *others = part.split(rows)
    for other in others:
        first = first + (other if len(other) == rows else F.pad(other, (0, 0, 0, rows - len(other))))
    return first


class Held:
    r"""What the factors at :math:`\delta` pass back, until those at :math:`-\delta` do as well.

    Both are multiplied by the same :math:`\delta`: one product serves both, and one gradient of :math:`\mathbf{U}` is
    made instead of two.

    Attributes:
        copies: How many examples have the same :math:`\delta`, as in :class:`Parts`.
        parts: The factors at :math:`-\delta`, one for each weight.
    """

    def __init__(self, copies: int = 1) -> None:
        """Wait for the first."""
        self.copies = copies
        self.parts: Sequence[Tensor] = ()
        self._waits = True
        self._cotangents: list[tuple[Any, ...]] = []

    def keeps(self, cotangents: tuple[Any, ...]) -> bool:
        r"""Take what is passed back at :math:`\delta`, unless that comes too late, or is differentiated itself.

        Args:
            cotangents: One for each weight, None where there is none.

        Returns:
            Whether they were taken.
        """
        taken = self._waits and not torch.is_grad_enabled()
        if taken:
            self._cotangents.append(cotangents)
        return taken

    def passed_on(self, value: Tensor) -> Tensor:
        r"""The loss at :math:`-\delta`, which passes what was taken back as well.

        Args:
            value: The loss.

        Returns:
            The same number.
        """
        self._waits = False
        for cotangents in self._cotangents:
            pairs = [(part, c) for part, c in zip(self.parts, cotangents, strict=True) if c is not None]
            if pairs:
                chosen, found = zip(*pairs, strict=True)
                value = _Also.apply(value, found, *chosen)
        return value


class _Also(Function):
    """A value that passes minus some cotangents back to other tensors."""

    @staticmethod
    @override
    def forward(value: Tensor, cotangents: tuple[Tensor, ...], *parts: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.cotangents = inputs[1]

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        (given,) = cotangents
        return given, None, *(-given * part for part in ctx.cotangents)


class Slopes(Function):
    r"""``product * scale + offset + factor * product + change`` where factor and change are zero but for their slopes.

    The sums over all examples, which are the gradients of scale and offset, are made of those of each example, which
    are the gradients of factor and change.
    """

    @staticmethod
    @override
    def forward(
        product: Tensor, scale: Tensor | None, offset: Tensor | None, factor: Tensor, change: Tensor | None
    ) -> Tensor:
        if scale is None:
            return product.view_as(product) if offset is None else (product + offset).to(product.dtype)
        result = product * scale if offset is None else torch.addcmul(offset, product, scale)
        return result.to(product.dtype)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        product, scale, offset, factor, change = inputs
        ctx.offset = None if offset is None else (offset.shape, offset.dtype)
        ctx.change = None if change is None else change.shape
        ctx.save_for_backward(product, scale, factor)

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        product, scale, factor = ctx.saved_tensors
        (given,) = cotangents
        through, needs = given, ctx.needs_input_grad
        if needs[0]:
            through = given if scale is None else given * scale
            if torch.is_grad_enabled():  # the factor is zero, but for its slope
                through = through + given * factor
            through = through.to(product.dtype)
        own = (given * product).sum_to_size(factor.shape)
        of_scale = None if scale is None or not needs[1] else own.sum_to_size(scale.shape).to(scale.dtype)
        change = None if ctx.change is None else given.sum_to_size(ctx.change)
        of_offset = None
        if ctx.offset is not None and needs[2]:
            shape, dtype = ctx.offset
            of_offset = (given if change is None else change).sum_to_size(shape).to(dtype)
        change = None if change is None else change.to(factor.dtype)
        return through, of_scale, of_offset, own.to(factor.dtype), change


class Shifts(Function):
    """``tangent * scale + value * factor + change``, where value and scale are constants; terms may be missing."""

    @staticmethod
    @override
    def forward(
        tangent: Tensor | None, scale: Tensor | None, value: Tensor, factor: Tensor | None, change: Tensor | None
    ) -> Tensor:
        own = tangent if tangent is None or scale is None else tangent * scale
        if factor is not None:
            if own is None:
                own = value * factor
            else:  # a tangent that was scaled belongs to nobody else
                own = torch.addcmul(own, value, factor) if own is tangent else own.addcmul_(value, factor)
        if change is not None:
            own = (
                change.expand_as(value).clone() if own is None else own + change if own is tangent else own.add_(change)
            )
        assert own is not None
        return own.view_as(own) if own is tangent else own

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, scale, value, factor, change = inputs
        ctx.shapes = [None if part is None else part.shape for part in (factor, change)]
        ctx.save_for_backward(scale, value)

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        scale, value = ctx.saved_tensors
        (given,), (factor, change) = cotangents, ctx.shapes
        through = None
        if ctx.needs_input_grad[0]:
            through = given if scale is None else given * scale
        own = None if factor is None else (given * value).sum_to_size(factor)
        return through, None, None, own, None if change is None else given.sum_to_size(change)


class Grown(Function):
    r"""The tangent ``tangent @ W.T + factor * (value @ W.T) + change`` of a layer whose rows grow, and ``value @ W.T``.

    Value and matrix are constants, and so is the second result.
    """

    @staticmethod
    @override
    def forward(
        tangent: Tensor | None, value: Tensor, weight: Tensor, factor: Tensor, change: Tensor | None, together: bool
    ) -> tuple[Tensor, Tensor]:
        response = None
        if together and tangent is not None:  # which is faster for few rows
            response, product = F.linear(torch.cat([tangent, value]), weight).chunk(2)
        else:
            product = F.linear(value, weight)
            response = None if tangent is None else F.linear(tangent, weight)
        if response is None:
            response = factor * product if change is None else torch.addcmul(change, factor, product)
        else:
            response = torch.addcmul(response, factor, product)
            response = response if change is None else response.add_(change)
        return response, product

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, weight, factor, change, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.shapes = factor.shape, None if change is None else change.shape
        ctx.save_for_backward(weight, output[1])

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        weight, product = ctx.saved_tensors
        (given, _), (factor, change) = cotangents, ctx.shapes
        if given is None:
            return None, None, None, None, None, None
        through = given @ weight if ctx.needs_input_grad[0] else None
        own = (given * product).sum_to_size(factor)
        return through, None, None, own, None if change is None else given.sum_to_size(change), None
