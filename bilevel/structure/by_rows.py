r"""What responses by rows share: one number per row and hyperparameter, :math:`\mathbf{U}`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from bilevel.responding import Rows
from bilevel.structure.slopes import Held, Parts, row_products

FEW = 4
"""With so many times fewer hyperparameters than examples, two products take less memory than what one waits for."""


class ByRows(nn.Module, ABC):
    r"""A response :math:`(\mathbf{U} \delta) \odot_{\text{row}} \mathbf{R}`, where :math:`\mathbf{R}` is left open.

    A row is an index of dimension 0: an output unit of a linear layer, an output channel of a convolution, an entry of
    a bias; :meth:`count` says otherwise. :math:`\mathbf{U}` starts at zero, so that nothing responds at first.

    Attributes:
        names: Of the weights that respond.
        counts: Their numbers of rows.
        factor: The matrices :math:`\mathbf{U}` of all weights beside each other, transposed.
        ones: Whether the templates of vectors are ones.
    """

    ones = False

    def __init__(
        self, params: Mapping[str, Tensor], size: int, *, max_gigabytes: float = math.inf, numbers: int = 0
    ) -> None:
        """Allocate the factors of ``params`` and ``size`` hyperparameters, which come with ``numbers`` others.

        Raises:
            MemoryError: If they take more than ``max_gigabytes``.
        """
        super().__init__()
        self.names = list(params)
        self.counts = [self.count(weight) for weight in params.values()]
        self.max_gigabytes = max_gigabytes
        like, rows = next(iter(params.values())), sum(self.counts)
        gigabytes = (rows * size + numbers) * like.element_size() / 1e9
        if gigabytes > max_gigabytes:
            weights = sum(weight.numel() for weight in params.values())
            raise MemoryError(
                f"a response of {rows:,} rows of {weights:,} weights to {size:,} hyperparameters takes {gigabytes:.1f} "
                f"GB, and its gradient and optimizer as much again; the limit is {max_gigabytes:g} GB. Use an "
                "implicit or unrolled method, which take any number of hyperparameters, tune fewer of them, let fewer "
                "weights respond (structure={'name': 'none'}), or raise max_gigabytes of the method."
            )
        # One matrix for the rows of all weights, so that one product serves them all. It is transposed, because
        # products with few hyperparameters are many times faster along its rows.
        self.factor = nn.Parameter(torch.zeros(size, rows, dtype=like.dtype, device=like.device))

    def count(self, weight: Tensor) -> int:
        """The number of rows of a weight.

        Args:
            weight: Of any shape.

        Returns:
            The size of dimension 0, or that of dimension 1 if there is only one index in dimension 0.
        """
        return weight.shape[0] if weight.ndim else 1

    @abstractmethod
    def template(self, index: int, weight: Tensor) -> Tensor:
        r"""The matrix :math:`\mathbf{R}` of a weight.

        Args:
            index: Of the weight in ``names``.
            weight: Its present value.

        Returns:
            A tensor of its shape.
        """

    @property
    def factors(self) -> tuple[Tensor, ...]:
        r"""The matrix :math:`\mathbf{U}` of every weight, a view each."""
        parts: tuple[Tensor, ...] = self.factor.T.split(self.counts)
        return parts

    def rows(
        self, shift: Tensor, weights: Mapping[str, Tensor], *, slope_only: bool = False, held: Held | None = None
    ) -> dict[str, Rows]:
        r"""The change of the weights for a shift :math:`\delta` of the hyperparameters, not multiplied out.

        Args:
            shift: Shape ``(h,)``, or ``(B, h)`` with one for each example.
            weights: Their present values, by name.
            slope_only: Return factors of zero, :math:`\mathbf{U} \delta - \operatorname{stop}(\mathbf{U} \delta)`.
            held: Where what is passed back to the factors may wait for what comes back with ``slope_only``; and how
                many examples share a shift.

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
        shift = shift.to(self.factor.dtype)
        scales: tuple[Tensor, ...]
        copies = 1 if held is None else held.copies
        large = len(shift) * self.factor.shape[1] > 2**16 or copies > 1
        if slope_only or (large and shift.ndim > 1 and not shift.requires_grad):
            many = not slope_only and FEW * len(self.factor) >= len(shift)
            scales = Parts.apply(shift, self.factor, self.counts, slope_only, held if many else None, copies)
            if held is not None and slope_only:
                held.parts = scales
        else:
            scales = (shift @ self.factor).split(self.counts, dim=-1)
        return {
            name: Rows(scale, self.template(index, weights[name]), self.ones and weights[name].ndim < 2)
            for index, (name, scale) in enumerate(zip(self.names, scales, strict=True))
        }

    @override
    def forward(self, shift: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r"""The change of the weights, :math:`(\mathbf{U} \delta) \odot_{\text{row}} \mathbf{R}`.

        Args:
            shift: Shape ``(h,)``.
            weights: Their present values, by name.

        Returns:
            One tensor per parameter, of its shape.
        """
        return {name: rows.change() for name, rows in self.rows(shift, weights).items()}

    def transposed(self, cotangents: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        r"""The transposed action on cotangents of the weights, without a product as large as a weight.

        .. math:: \sum_r \mathbf{U}_r\, (\mathbf{C}_r^\top \mathbf{R}_r)

        Args:
            cotangents: Of some of the weights, by name; others are not looked at.
            weights: Their present values, by name.

        Returns:
            Shape ``(h,)``.
        """
        sums = []
        for index, (name, count) in enumerate(zip(self.names, self.counts, strict=True)):
            if name in cotangents:
                c, r = cotangents[name].to(self.factor.dtype), self.template(index, weights[name])
                sums.append(row_products(c.reshape(count, -1), r.reshape(count, -1)))
            else:
                sums.append(self.factor.new_zeros(count))
        return self.factor @ torch.cat(sums)
