r"""The response of the paper: every row of a weight is scaled by a linear function of the hyperparameters.

Section "Structured Hypernetwork Representation" and, for convolutions, ``append:conv-nn``:

.. math::
    \mathbf{W}(\lambda) &= \mathbf{W} + (\mathbf{U} \delta) \odot_{\text{row}} \mathbf{R} \\
    \mathbf{b}(\lambda) &= \mathbf{b} + (\mathbf{V} \delta) \odot \mathbf{b}_R
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import override

from bilevel.responding import Rows


@final
class Rowwise(nn.Module):
    r"""The matrices :math:`\mathbf{U}` and :math:`\mathbf{R}` of every parameter.

    A row is an index of dimension 0: an output unit of a linear layer, an output channel of a convolution, an entry of
    a bias. A weight with n numbers and r rows takes n + r h numbers in addition to its own.

    :math:`\mathbf{R}` starts at zero, so that nothing responds at first. :math:`\mathbf{U}` starts at normal numbers of
    variance 1/h, which give :math:`\mathbf{R}` a gradient; after one step :math:`\mathbf{U}` has one too. The paper's
    code does it the other way round: a row can then at first only move along its random :math:`\mathbf{R}`.
    ``benchmarks/initialization.py`` compares them.

    Example:
        >>> theta = Rowwise({"w": torch.zeros(3, 4)}, 2)
        >>> theta(torch.ones(2))["w"].shape, sum(p.numel() for p in theta.parameters())
        (torch.Size([3, 4]), 18)
    """

    def __init__(self, params: Mapping[str, Tensor], size: int, *, max_gigabytes: float = math.inf) -> None:
        """Draw the response of ``params`` to ``size`` hyperparameters, unless it exceeds ``max_gigabytes``."""
        super().__init__()
        self.names = list(params)
        self.counts = [weight.shape[0] if weight.ndim else 1 for weight in params.values()]
        self.max_gigabytes = max_gigabytes
        self._check_memory(params, size)
        # One matrix for the rows of all weights, so that one product serves them all. It is transposed, because
        # products with few hyperparameters are many times faster along its rows.
        like = next(iter(params.values()))
        drawn = torch.randn(size, sum(self.counts), dtype=like.dtype, device=like.device)
        self.factor = nn.Parameter(drawn.div_(math.sqrt(size)))
        self.templates = nn.ParameterList([nn.Parameter(torch.zeros_like(weight)) for weight in params.values()])

    @property
    def factors(self) -> tuple[Tensor, ...]:
        r"""The matrix :math:`\mathbf{U}` of every weight, a view each."""
        parts: tuple[Tensor, ...] = self.factor.T.split(self.counts)
        return parts

    def rows(self, shift: Tensor) -> dict[str, Rows]:
        r"""The change of the weights for a shift :math:`\delta` of the hyperparameters, not multiplied out.

        Args:
            shift: Shape ``(h,)``, or ``(B, h)`` with one for each example.

        Returns:
            By name of the weight.

        Raises:
            MemoryError: If they take more memory than allowed.
        """
        gigabytes = shift.numel() // len(self.factor) * sum(self.counts) * self.factor.element_size() / 1e9
        if gigabytes > self.max_gigabytes:
            raise MemoryError(
                f"a perturbation for each of {len(shift):,} examples takes {gigabytes:.1f} GB for the "
                f"{sum(self.counts):,} rows of the weights; the limit is {self.max_gigabytes:g} GB. Give smaller "
                "batches, pass perturb='batch' to the method, or raise its max_gigabytes."
            )
        scales = (shift.to(self.factor.dtype) @ self.factor).split(self.counts, dim=-1)
        return {
            name: Rows(scale, template)
            for name, scale, template in zip(self.names, scales, self.templates, strict=True)
        }

    @override
    def forward(self, shift: Tensor) -> dict[str, Tensor]:
        r"""The change of the weights, :math:`(\mathbf{U} \delta) \odot_{\text{row}} \mathbf{R}`.

        Args:
            shift: Shape ``(h,)``.

        Returns:
            One tensor per parameter, of its shape.
        """
        return {name: rows.change() for name, rows in self.rows(shift).items()}

    def _check_memory(self, params: Mapping[str, Tensor], size: int) -> None:
        """Refuse a response that would not fit, before it is allocated."""
        rows, weights = sum(self.counts), sum(weight.numel() for weight in params.values())
        gigabytes = (rows * size + weights) * next(iter(params.values())).element_size() / 1e9
        if gigabytes > self.max_gigabytes:
            raise MemoryError(
                f"a response of {rows:,} rows of {weights:,} weights to {size:,} hyperparameters takes {gigabytes:.1f} "
                f"GB, and its gradient and optimizer as much again; the limit is {self.max_gigabytes:g} GB. Use an "
                "implicit or unrolled method, which take any number of hyperparameters, tune fewer of them, let fewer "
                "weights respond (structure={'name': 'none'}), or raise max_gigabytes of the method."
            )
