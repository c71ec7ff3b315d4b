"""The reference that a method is compared with: linear solvers that are tried one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bilevel.linear_solvers import CG, MINRES, Exact, LinearSolver, LinearSolverError, Neumann, Nystrom, Solve
from bilevel.linear_solvers.base import Matvec

SOLVE_STEPS = 1000
ACCURATE = 1e-3  # a residual, or a relative error, that is as good as zero here
RELATIVE_DAMPING = 1e-4
MATRICES = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton matrix"}


@dataclass
class Reference:
    """Linear solvers that are tried in order. One that fails is not tried again.

    Attributes:
        matvec: The product with the matrix.
        solvers: The current solver first, then those to fall back on.
        troubles: Why each earlier solver failed.
    """

    matvec: Matvec
    solvers: list[LinearSolver]
    troubles: list[str] = field(default_factory=list)

    def solve(self, v: Tensor) -> Solve:
        """Solve the system with the first solver that can, or raise the error of the last one."""
        while True:
            solver, *rest = self.solvers
            try:
                found = solver.solve_with_info(self.matvec, v)
                if not rest or float(found.residual) <= ACCURATE:
                    return found
                trouble = f"{type(solver).__name__}: the relative residual is {float(found.residual):.1e}."
            except LinearSolverError as error:
                if not rest:
                    raise
                trouble = str(error)
            self.troubles.append(trouble)
            self.solvers = rest


def default_solvers(
    first: type[Exact] | type[CG], dtype: torch.dtype, smallest: float, largest: float
) -> list[LinearSolver]:
    """The given solver, then MINRES for an indefinite matrix, then damped MINRES for a singular one."""
    damping = RELATIVE_DAMPING * max(abs(smallest), abs(largest))
    if not math.isfinite(damping):
        return [MINRES(max_steps=1)]  # the matrix is not finite: this raises at once
    settings: dict[str, Any] = {"max_steps": SOLVE_STEPS, "rtol": min(max(1e-10, 100 * torch.finfo(dtype).eps), 1e-2)}
    return [
        Exact() if first is Exact else CG(**settings),
        MINRES(**settings),
        MINRES(**settings, damping=damping),
    ]


def name_of(solver: LinearSolver, curvature: str) -> str:
    """Say which solver works on which matrix, and with how much damping."""
    damping = solver.damping if isinstance(solver, Exact | CG | MINRES | Neumann | Nystrom) else 0.0
    damped = f" with damping {damping:.1e}" if damping else ""
    return f"{type(solver).__name__} on the {MATRICES[curvature]}{damped}"
