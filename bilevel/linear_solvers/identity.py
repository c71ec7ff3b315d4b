"""No solve at all: the matrix is taken for a multiple of the identity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.linear_solvers.base import (
    Attempt,
    LinearSolver,
    LinearSolverError,
    Matvec,
    Operator,
    check_number,
    check_system,
    norm,
    not_finite,
    ratio,
)
from bilevel.parallel import all_finite


@final
@dataclass(frozen=True, kw_only=True)
class Identity(LinearSolver):
    r"""Approximate :math:`\mathbf{H}^{-1} v` by :math:`u = \alpha v`: T1-T2, one step of gradient descent.

    An approximation by definition: it promises no residual and never warns. A call does not use ``matvec``; only
    :meth:`~bilevel.LinearSolver.solve_with_info` multiplies, once, for the residual.

    Attributes:
        scale: The factor :math:`\alpha`, in the role of the inner learning rate.

    Example:
        >>> Identity(scale=0.1)(lambda p: 7 * p, torch.tensor([10.0, 20.0]))
        tensor([1., 2.])

    References:
        Luketina, Berglund, Greff and Raiko (2016), Scalable gradient-based tuning of continuous regularization
        hyperparameters.
    """

    divides: ClassVar[bool] = True

    scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number(self, "scale", self.scale, above=0, or_equal=False)

    @override
    def __call__(self, matvec: Matvec, v: Tensor, x0: Tensor | None = None) -> Tensor:
        r"""Multiply by :math:`\alpha`, without a product; a result that is not finite raises."""
        check_system(matvec, v, x0)
        solution = self.scale * v.detach()
        if not all_finite(solution):
            raise LinearSolverError("Identity: v is not finite: look for NaN or overflow in the outer loss.")
        return solution

    @override
    def _solve(self, matvec: Matvec, v: Tensor, x0: Tensor | None, root: Matvec | None) -> Attempt:
        operator = Operator(matvec, v.dtype, 0.0)
        v = v.to(torch.promote_types(v.dtype, torch.float32))
        x = self.scale * v
        residual = ratio(norm(v - operator.last(x)), norm(v))

        def judge(facts: list[float]) -> int:
            if not math.isfinite(facts[0]):
                raise not_finite("Identity", operator, v) or LinearSolverError("Identity: overflow: lower scale.")
            return 0

        return Attempt(x, residual, residual[None], judge)
