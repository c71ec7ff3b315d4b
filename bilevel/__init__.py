"""Bilevel optimization in PyTorch: write two losses, call :func:`solve`, swap the method by one argument."""

from bilevel import functional
from bilevel.functional import l1, l2
from bilevel.history import History
from bilevel.hyper import Hyper, integer, interval, positive, real
from bilevel.loop import Best, Round, Solution, solve
from bilevel.problem import Loss, Model, Problem
from bilevel.response import METHODS, STN, BestResponse, CenteredSTN, DeltaSTN, Method
from bilevel.solver import DivergenceError, OuterStep, Solver
from bilevel.testing import Report, check_method

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "STN",
    "Best",
    "BestResponse",
    "CenteredSTN",
    "DeltaSTN",
    "DivergenceError",
    "History",
    "Hyper",
    "Loss",
    "Method",
    "Model",
    "OuterStep",
    "Problem",
    "Report",
    "Round",
    "Solution",
    "Solver",
    "check_method",
    "functional",
    "integer",
    "interval",
    "l1",
    "l2",
    "positive",
    "real",
    "solve",
]
