"""How the weights respond to the hyperparameters."""

from bilevel.structure.dense import Dense

__all__ = ["Dense"]
