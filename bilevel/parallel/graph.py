r"""Sums over processes inside a graph that is differentiated, for unrolled steps.

The weights :math:`w` of a step are the same in all processes; each makes a gradient :math:`g_r(w)` of its own, and the
step takes :math:`\sum_r p_r g_r`. A cotangent of that sum, the same everywhere, goes back to :math:`g_r` times
:math:`p_r`; what arrives at w is only a part, and the parts are added up where w *enters* the work of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.parallel.group import Group


def entered(group: Group, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, where the work of one process begins.

    Returns:
        Tensors whose cotangents are added up over all processes, by one all-reduce.
    """
    return [*_Enter.apply(group, *tensors)]  # type: ignore[no-untyped-call]


def mean_with_graph(
    group: Group,
    tensors: Sequence[Tensor | None],
    like: Sequence[Tensor],
    weight: float,
    others: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Tensor]]:
    """As :meth:`Group.mean`, differentiable.

    Args:
        group: The processes.
        tensors: None stands for zero.
        like: With their shapes.
        weight: Of this process.
        others: To be averaged as well, without a derivative.

    Returns:
        The averages of both.
    """
    parts, flags = group.filled(tensors, like)
    found = _Mean.apply(group, weight, len(parts), *parts, flags, *others)  # type: ignore[no-untyped-call]
    means, seen, rest = found[: len(parts)], found[len(parts)], found[len(parts) + 1 :]
    return group.emptied(tensors, means, seen), [*rest]


class _Enter(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @override
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, *ctx.group.add(cotangents)


class _Mean(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, group: Group, weight: float, smooth: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        *means, share = group.weighted(tensors, weight)
        ctx.smooth = smooth
        ctx.save_for_backward(share)
        ctx.mark_non_differentiable(*means[smooth:])
        return tuple(means)

    @staticmethod
    @override
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (share,) = ctx.saved_tensors
        parts = [cotangent * share.to(cotangent.dtype) for cotangent in cotangents[: ctx.smooth]]
        return None, None, None, *parts, *[None] * (len(cotangents) - ctx.smooth)
