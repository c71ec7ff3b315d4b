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
        return tuple(factor.new_zeros(()).expand(*shift.shape[:-1], count) for count in counts)

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
        if rows.shape[1] < len(rows):
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
    """``value + factor * product + change`` where factor and change are zero, and only their slopes count."""

    @staticmethod
    @override
    def forward(value: Tensor, product: Tensor, factor: Tensor, change: Tensor | None) -> Tensor:
        return value.view_as(value)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, product, factor, change = inputs
        ctx.shape = None if change is None else change.shape
        ctx.save_for_backward(product, factor)

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        product, factor = ctx.saved_tensors
        (given,) = cotangents
        # The first is zero as well, but for its slope.
        through = given * factor if torch.is_grad_enabled() and ctx.needs_input_grad[1] else None
        own = (given * product).sum_to_size(factor.shape).to(factor.dtype)
        change = None if ctx.shape is None else given.sum_to_size(ctx.shape).to(factor.dtype)
        return given, through, own, change


class Both(Function):
    """The products of a matrix with a tangent and with a value in one, which is faster for few rows.

    Only the tangent is differentiated; the value and the matrix are constants.
    """

    @staticmethod
    @override
    def forward(tangent: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        first, second = F.linear(torch.cat([tangent, value]), weight).chunk(2)
        return first, second

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        return cotangents[0] @ weight, None, None
