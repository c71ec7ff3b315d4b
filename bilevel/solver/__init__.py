"""The two steps of every method, for people who keep their own loop."""

from bilevel.arguments import Parameters
from bilevel.solver.finite import DivergenceError, NotFiniteWarning
from bilevel.solver.optimization import OptimizerFactory, SchedulerFactory
from bilevel.solver.solver import Solver
from bilevel.solver.steps import OuterStep

__all__ = [
    "DivergenceError",
    "NotFiniteWarning",
    "OptimizerFactory",
    "OuterStep",
    "Parameters",
    "SchedulerFactory",
    "Solver",
]
