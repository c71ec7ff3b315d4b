"""Bilevel optimization in PyTorch: write two losses, call :func:`solve`, swap the method by one argument."""

from bilevel import augment, functional, loggers, nn, parallel, plotting, regularizers, report, structure
from bilevel.checkpoint import CheckpointError, CheckpointWarning
from bilevel.diagnostics import Comparison, Diagnose, Diagnosis, diagnose
from bilevel.dropouts import dropout_rates, dropout_rule
from bilevel.functional import l1, l2
from bilevel.history import History
from bilevel.hyper import Hyper, integer, interval, positive, real
from bilevel.linear_solvers import (
    CG,
    MINRES,
    ConvergenceWarning,
    Exact,
    Identity,
    LinearSolver,
    LinearSolverError,
    Neumann,
    Nystrom,
)
from bilevel.loop import Best, Round, Solution, TuningWarning, solve
from bilevel.problem import Loss, Model, Problem
from bilevel.responding import PerturbationWarning
from bilevel.response import (
    KFAC,
    METHODS,
    STN,
    BestResponse,
    CenteredSTN,
    DeltaSTN,
    Diagonal,
    Implicit,
    Method,
    Preconditioner,
    Unrolled,
)
from bilevel.schedule import Schedule
from bilevel.solver import DivergenceError, NotFiniteWarning, OuterStep, Solver
from bilevel.testing import Report, check_method
from bilevel.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "CG",
    "KFAC",
    "METHODS",
    "MINRES",
    "STN",
    "Best",
    "BestResponse",
    "CenteredSTN",
    "CheckpointError",
    "CheckpointWarning",
    "Comparison",
    "ConvergenceWarning",
    "DeltaSTN",
    "Diagnose",
    "Diagnosis",
    "Diagonal",
    "DivergenceError",
    "Exact",
    "History",
    "Hyper",
    "Identity",
    "Implicit",
    "LinearSolver",
    "LinearSolverError",
    "Loss",
    "Method",
    "Model",
    "Neumann",
    "NotFiniteWarning",
    "Nystrom",
    "OuterStep",
    "PerturbationWarning",
    "Preconditioner",
    "Problem",
    "Report",
    "Round",
    "Schedule",
    "Solution",
    "Solver",
    "TuningWarning",
    "Unrolled",
    "augment",
    "check_method",
    "diagnose",
    "dropout_rates",
    "dropout_rule",
    "functional",
    "integer",
    "interval",
    "l1",
    "l2",
    "loggers",
    "nn",
    "parallel",
    "plotting",
    "positive",
    "real",
    "regularizers",
    "report",
    "solve",
    "structure",
    "tune",
]
