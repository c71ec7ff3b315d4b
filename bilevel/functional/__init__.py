"""What losses and networks are built from: losses, penalties, and dropout and noise whose strength is a tensor.

A hyperparameter is a scalar; or it has one value per example, shape ``(B,)``, where every example has a perturbation of
its own. Everything here takes both, and mixes no example with another.
"""

from bilevel.functional.examples import per_example
from bilevel.functional.losses import cross_entropy, mse_loss, temperature
from bilevel.functional.noise import alpha_dropout, drop_connect, dropout, embedding_dropout, gaussian_noise
from bilevel.functional.penalties import l1, l2

__all__ = [
    "alpha_dropout",
    "cross_entropy",
    "drop_connect",
    "dropout",
    "embedding_dropout",
    "gaussian_noise",
    "l1",
    "l2",
    "mse_loss",
    "per_example",
    "temperature",
]
