r"""The weights at the center, :math:`w_0 + \Theta (\lambda - \lambda_0)` at :math:`\lambda = \lambda_0`.

Their values are those of :math:`w_0`; only their slope in :math:`\lambda` is new. So there is nothing to add up and to
store: an outer step takes the memory of one set of weights less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from bilevel.structure.choice import Theta
from bilevel.structure.dense import Dense


def at_center(theta: Dense | Theta, hyper: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    r"""The weights, with the slope :math:`\Theta` in the hyperparameters.

    Args:
        theta: The response.
        hyper: Shape ``(h,)``; its value plays no part.
        weights: By name.

    Returns:
        One tensor for every weight, that share their memory.

    Example:
        >>> weights = {"w": torch.tensor([1.0, 2.0])}
        >>> theta = Dense(weights, 1, max_gigabytes=1.0)
        >>> theta.slopes[0].data = torch.tensor([[10.0, 100.0]])
        >>> hyper = torch.tensor([5.0], requires_grad=True)
        >>> moved = at_center(theta, hyper, weights)["w"]
        >>> torch.equal(moved, weights["w"]), torch.autograd.grad(moved.sum(), hyper)
        (True, (tensor([110.]),))
    """
    names = [name for name in weights if name in theta.all_names]
    moved = _AtCenter.apply(theta, names, hyper, *(weights[name] for name in names))  # type: ignore[no-untyped-call]
    return {**weights, **dict(zip(names, moved, strict=True))}


class _AtCenter(torch.autograd.Function):
    """The weights themselves, with the slope of the response."""

    @staticmethod
    @override
    def forward(theta: Dense | Theta, names: list[str], hyper: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.theta, ctx.names, hyper, *weights = inputs
        ctx.like = hyper.dtype
        ctx.save_for_backward(*weights)

    @staticmethod
    @override
    @once_differentiable  # the slope of the slope is another matter
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        found = {name: part for name, part in zip(ctx.names, cotangents, strict=True) if part is not None}
        slope = None
        if found and ctx.needs_input_grad[2]:
            weights = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
            slope = ctx.theta.transposed(found, weights).to(ctx.like)
        return None, None, slope, *cotangents
