"""The two steps of every method, for people who keep their own loop."""

from bilevel.arguments import Parameters
from bilevel.solver.finite import DivergenceError
from bilevel.solver.optimization import OptimizerFactory, SchedulerFactory
from bilevel.solver.solver import OuterStep, Solver

__all__ = ["DivergenceError", "OptimizerFactory", "OuterStep", "Parameters", "SchedulerFactory", "Solver"]
