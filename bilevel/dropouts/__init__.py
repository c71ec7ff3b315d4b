"""Dropout that a network has already: its rates become hyperparameters while the network stays as it is.

=================  ================================================================================================
file               what is in it
=================  ================================================================================================
``calls``          functions of PyTorch that drop, each with a rate that is a tensor
``attention``      attention, whose dropout PyTorch hides in one function
``rules``          layers of the user's own, such as drop path
``places``         where a network drops: the names of these places
``rates``          :func:`dropout_rates`
``intercept``      puts the rates in place while the network runs
=================  ================================================================================================
"""

from bilevel.dropouts.calls import CALLS
from bilevel.dropouts.intercept import Dropouts
from bilevel.dropouts.places import Found, find
from bilevel.dropouts.rates import DropoutRate, dropout_rates
from bilevel.dropouts.rules import dropout_rule

__all__ = ["CALLS", "DropoutRate", "Dropouts", "Found", "dropout_rates", "dropout_rule", "find"]
