r"""The full linear response: every weight has its own slope in every hyperparameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override


class Dense(nn.Module):
    r"""The matrix :math:`\Theta \in \mathbb{R}^{m \times h}` of ``eq:old-param`` and ``eq:new-param``, initially zero.

    Kept per parameter, shape ``(h, *parameter.shape)``. It costs m × h numbers, and so do its gradient and each moment
    of its optimizer.

    Example:
        >>> theta = Dense({"w": torch.zeros(3)}, 2, max_gigabytes=1.0)
        >>> theta(torch.ones(2), {})
        {'w': tensor([0., 0., 0.], grad_fn=<ViewBackward0>)}
    """

    def __init__(self, params: Mapping[str, Tensor], size: int, *, max_gigabytes: float) -> None:
        """Allocate the response of ``params`` to ``size`` hyperparameters, unless it exceeds ``max_gigabytes``."""
        super().__init__()
        check_memory(params, size, max_gigabytes)
        self.names = list(params)
        self.slopes = nn.ParameterList([
            nn.Parameter(torch.zeros(size, *value.shape, dtype=value.dtype, device=value.device))
            for value in params.values()
        ])

    @override
    def forward(self, shift: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r"""The change of the weights, :math:`\Theta\,(\lambda - \lambda_0)`.

        Args:
            shift: Shape ``(h,)``.
            weights: Not needed; other structures move along them.

        Returns:
            One tensor per parameter, of its shape.
        """
        return {
            name: (shift.to(slope.dtype) @ slope.reshape(len(slope), -1)).view(slope.shape[1:])
            for name, slope in zip(self.names, self.slopes, strict=True)
        }

    @property
    def all_names(self) -> list[str]:
        """Of the weights that respond."""
        return self.names

    def transposed(self, cotangents: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        r"""The transposed action on cotangents of the weights, :math:`\Theta^\top u`.

        Args:
            cotangents: Of some of the weights, by name; others are not looked at.
            weights: Not needed.

        Returns:
            Shape ``(h,)``.
        """
        slopes = dict(zip(self.names, self.slopes, strict=True))
        first: Tensor = self.slopes[0]
        total = first.new_zeros(len(first))
        for name, cotangent in cotangents.items():
            if name in slopes:
                total = total + slopes[name].reshape(len(first), -1) @ cotangent.flatten().to(first.dtype)
        return total


REMEDY = "raise max_gigabytes of the method"


def check_memory(params: Mapping[str, Tensor], size: int, max_gigabytes: float, *, remedy: str = REMEDY) -> None:
    """Refuse a dense response that would not fit, before it is allocated.

    Raises:
        MemoryError: If ``size`` numbers per weight need more than ``max_gigabytes``.
    """
    weights = sum(value.numel() for value in params.values())
    gigabytes = sum(value.numel() * value.element_size() for value in params.values()) * size / 1e9
    if gigabytes > max_gigabytes:
        raise MemoryError(
            f"a dense response of {weights:,} weights to {size:,} hyperparameters takes {gigabytes:.1f} GB, and its "
            f"gradient and optimizer as much again; the limit is {max_gigabytes:g} GB. Tune fewer hyperparameters, "
            f"freeze weights that need not respond (requires_grad_(False)), or {remedy}."
        )
