"""The dense solution, for small problems and as a reference."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.linear_solvers.base import (
    Attempt,
    ConvergenceWarning,
    LinearSolver,
    LinearSolverError,
    Matvec,
    Operator,
    check_count,
    check_number,
    norm,
    not_finite,
    ratio,
)


@final
@dataclass(frozen=True, kw_only=True)
class Exact(LinearSolver):
    r"""Solve :math:`(\mathbf{H} + \mu \mathbf{I}) u = v` for any nonsingular matrix, symmetric or not.

    Column i of the matrix is ``matvec`` of the i-th unit vector: m products and m² numbers. Rows and columns are scaled
    to a largest entry of one, then it is factorized as :math:`\mathbf{P} \mathbf{L} \mathbf{U}`. A pivot at rounding
    level raises :class:`LinearSolverError`.

    Attributes:
        damping: The shift :math:`\mu`.
        max_size: Refuse vectors with more entries.

    Example:
        >>> H = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> Exact()(lambda p: H @ p, torch.tensor([1.0, 2.0]))
        tensor([0.0909, 0.6364])

    References:
        Golub and Van Loan (2013), Matrix computations, chapter 3.
    """

    damping: float = 0.0
    max_size: int = 10_000

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number(self, "damping", self.damping, above=0, or_equal=True)
        check_count(self, "max_size", self.max_size)

    @override
    def _solve(self, matvec: Matvec, v: Tensor, x0: Tensor | None, root: Matvec | None) -> Attempt:
        operator = Operator(matvec, v.dtype, self.damping)
        size = v.numel()
        if size > self.max_size:
            raise ValueError(
                f"Exact: v has {size:,} entries, above max_size={self.max_size:,}: it would take as many products and "
                f"{size**2 * v.element_size() / 1e9:.1f} GB. Use CG, or raise max_size."
            )
        v = v.to(torch.promote_types(v.dtype, torch.float32))
        matrix, zero = _dense(operator, v), ~v.any()
        finite = matrix.isfinite().all() & v.isfinite().all()
        x, singular = _solve_scaled(matrix, v, operator.eps)
        x = torch.where(zero, 0.0, x)
        product = operator.last(x)
        residual = torch.where(zero, 0.0, ratio(norm(v - product), norm(v)))
        gap, length = norm(product - matrix @ x), norm(matrix.flatten()) * norm(x)
        facts = torch.stack([flag.to(v.dtype) for flag in (zero, finite, singular)] + [gap, length, residual])

        def judge(facts: list[float]) -> int:
            if facts[0]:
                return 0
            if not facts[1]:
                raise not_finite("Exact", operator, v) or LinearSolverError("Exact: matvec returned NaN or infinity.")
            if facts[2]:
                raise LinearSolverError(
                    "Exact: the matrix is singular to rounding: some directions have no curvature. Add damping, or use "
                    "MINRES or CG, which leave such directions alone where v has no part in them."
                )
            gap, length, residual = facts[3:]
            if not gap <= operator.eps**0.5 * length:
                raise LinearSolverError(
                    "Exact: matvec is not a fixed linear map: its product with the solution is not the combination of "
                    "its columns. Look for dropout or sampling inside it, or for overflow."
                )
            if residual > operator.eps**0.5:
                warnings.warn(
                    f"Exact: the relative residual is {residual:.1e}: the matrix is badly conditioned for "
                    f"{operator.dtype}; use float64 or add damping.",
                    ConvergenceWarning,
                    stacklevel=3,
                )
            return size

        return Attempt(x, residual, facts, judge)


def _dense(operator: Operator, v: Tensor) -> Tensor:
    matrix = v.new_empty(len(v), len(v))
    for index in range(len(v)):
        unit = torch.zeros_like(v)
        unit[index] = 1.0
        matrix[:, index] = operator(unit)
    return matrix


def _solve_scaled(matrix: Tensor, v: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The solution, and whether the matrix is singular to rounding."""
    rows = matrix.abs().amax(dim=1, keepdim=True)
    columns = (matrix / torch.where(rows > 0, rows, 1.0)).abs().amax(dim=0)
    lu, pivots, _ = torch.linalg.lu_factor_ex(matrix / rows / columns)
    sizes = lu.diagonal().abs()
    singular = ~((rows > 0).all() & (columns > 0).all()) | (sizes.min() <= 10 * len(v) * eps * sizes.max())
    solution: Tensor = torch.linalg.lu_solve(lu, pivots, v[:, None] / rows)[:, 0] / columns
    return solution, singular
