"""Checks that no hypergradient is silently wrong: made on the first batch of each kind, never in a later step.

=================  ================================================================================================
file               what it refuses
=================  ================================================================================================
``kinds``          (decides which batch is of a new kind)
``rows``           row i of a hyperparameter that reaches the loss of another example; a weight used out of sight
``outputs``        a loss without curvature in what the network returns, where predictions are linearised
``smooth``         a loss with kinks, where second derivatives are taken
``dependence``     a hyperparameter on which the gradient of the inner loss does not depend, where it must
=================  ================================================================================================
"""

from bilevel.checks.dependence import check_continuous, check_dependence
from bilevel.checks.kinds import Kinds, isolated, repeatable
from bilevel.checks.outputs import check_outputs
from bilevel.checks.rows import check_linearized, check_rows, takes_own_shape
from bilevel.checks.smooth import check_smooth

__all__ = [
    "Kinds",
    "check_continuous",
    "check_dependence",
    "check_linearized",
    "check_outputs",
    "check_rows",
    "check_smooth",
    "isolated",
    "repeatable",
    "takes_own_shape",
]
