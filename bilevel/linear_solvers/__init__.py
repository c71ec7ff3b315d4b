"""Linear solvers, one file each: settings that are called as ``solve(matvec, v, x0=None)``."""

from bilevel.linear_solvers.base import (
    ConvergenceWarning,
    LinearSolver,
    LinearSolverError,
    NotFiniteSystemError,
    Solve,
    relative_residual,
)
from bilevel.linear_solvers.cg import CG
from bilevel.linear_solvers.exact import Exact
from bilevel.linear_solvers.identity import Identity
from bilevel.linear_solvers.minres import MINRES
from bilevel.linear_solvers.neumann import Neumann
from bilevel.linear_solvers.nystrom import Nystrom

__all__ = [
    "CG",
    "MINRES",
    "ConvergenceWarning",
    "Exact",
    "Identity",
    "LinearSolver",
    "LinearSolverError",
    "Neumann",
    "NotFiniteSystemError",
    "Nystrom",
    "Solve",
    "relative_residual",
]
