"""Tune the regularization of a network that is there already.

=================  ================================================================================================
file               what is in it
=================  ================================================================================================
``tune``           :func:`tune`
``unpack``         inputs and targets of a batch, and how the network is called with them
``criteria``       losses of PyTorch, with one value per example
``own_loss``       networks that compute their loss themselves, as those of transformers do
``strengths``      the arguments that say what to tune
``optimizer``      an optimizer of the user's as a factory; does it decay, too?
=================  ================================================================================================
"""

from bilevel.tuning.tune import tune

__all__ = ["tune"]
