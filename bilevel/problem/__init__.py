r"""The bilevel problem as the user states it, and the model that its losses see.

.. math:: \min_\lambda \mathcal{L}_V(\lambda, w^*) \quad\text{s.t.}\quad w^* = \arg\min_w \mathcal{L}_T(\lambda, w)
"""

from bilevel.problem.loss import Loss, LossFunction
from bilevel.problem.model import Model
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variables

__all__ = ["Loss", "LossFunction", "Model", "Problem", "Variables"]
