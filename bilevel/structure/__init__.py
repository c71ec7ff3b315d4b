"""How the weights respond to the hyperparameters."""

from bilevel.structure import (  # which register their rules
    attention,
    convolution,
    elementwise,
    linear,
    moves,
    norms,
    norms_of_weights,
    products,
)
from bilevel.structure.by_rows import ByRows
from bilevel.structure.center import at_center
from bilevel.structure.choice import STRUCTURES, Theta, choose, make
from bilevel.structure.dense import Dense
from bilevel.structure.gate import Gate
from bilevel.structure.layers import Layer, Layers
from bilevel.structure.network import respond
from bilevel.structure.respond import Respond, rule
from bilevel.structure.rowwise import Rowwise
from bilevel.structure.slopes import Held, distinct

__all__ = [
    "STRUCTURES",
    "ByRows",
    "Dense",
    "Gate",
    "Held",
    "Layer",
    "Layers",
    "Respond",
    "Rowwise",
    "Theta",
    "at_center",
    "attention",
    "choose",
    "convolution",
    "distinct",
    "elementwise",
    "linear",
    "make",
    "moves",
    "norms",
    "norms_of_weights",
    "products",
    "respond",
    "rule",
]
