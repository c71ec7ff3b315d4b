r"""Hyperparameters: natural values outside, one unconstrained vector :math:`\lambda` inside.

A hyperparameter lives unconstrained; :math:`s(\lambda)` is its natural value (appendix ``app:restricted``).
Perturbations :math:`\epsilon \sim \mathcal{N}(0, \sigma^2)` are added to :math:`\lambda`, never to :math:`s(\lambda)`.
"""

from bilevel.hyper.kinds import Hyper, integer, interval, positive, real
from bilevel.hyper.named import Named, suggest
from bilevel.hyper.scale import Scale
from bilevel.hyper.show import LISTED_ENTRIES
from bilevel.hyper.space import Space

__all__ = [
    "LISTED_ENTRIES",
    "Hyper",
    "Named",
    "Scale",
    "Space",
    "integer",
    "interval",
    "positive",
    "real",
    "suggest",
]
