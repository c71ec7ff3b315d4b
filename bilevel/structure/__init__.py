"""How the weights respond to the hyperparameters."""

from bilevel.structure import attention, convolution, elementwise, linear, moves, norms  # which register their rules
from bilevel.structure.by_rows import ByRows
from bilevel.structure.center import at_center
from bilevel.structure.choice import STRUCTURES, Theta, choose, make
from bilevel.structure.dense import Dense
from bilevel.structure.gate import Gate
from bilevel.structure.respond import Respond, respond, rule
from bilevel.structure.rowwise import Rowwise

__all__ = [
    "STRUCTURES",
    "ByRows",
    "Dense",
    "Gate",
    "Respond",
    "Rowwise",
    "Theta",
    "at_center",
    "attention",
    "choose",
    "convolution",
    "elementwise",
    "linear",
    "make",
    "moves",
    "norms",
    "respond",
    "rule",
]
