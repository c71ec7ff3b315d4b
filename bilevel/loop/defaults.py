"""What :func:`bilevel.solve` does where it is not told; chosen by ``benchmarks/defaults.py``."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from bilevel.solver import OptimizerFactory

ROUNDS, PASSES = 1000, 10
"""A run has so many rounds, and makes at least so many passes over the training set."""

TRAVEL, SLOWEST, FASTEST = 20.0, 0.003, 0.2
"""The outer learning rate lets λ travel so far in all rounds together, within bounds."""

BETAS = (0.9, 0.99)
"""Of Adam. Hypergradients grow when the weights begin to overfit; with a longer memory, its steps would be too long."""

WARMUP = 0.1
"""The share of the rounds in which λ waits for the weights and their response."""

EVALUATIONS = 200
"""A run makes about so many full validation passes at most."""


class Plan(NamedTuple):
    """The length of a run, and what follows from it.

    Attributes:
        limit: Rounds after which it ends; None if passes over the training set end it.
        rounds: How many it is expected to have, if that is known.
    """

    limit: int | None
    rounds: int | None

    @property
    def warmup(self) -> int:
        """Rounds of the warm-up."""
        return 0 if self.rounds is None else int(WARMUP * self.rounds)

    @property
    def outer_optimizer(self) -> OptimizerFactory:
        """Adam, with a learning rate by which λ can get anywhere in the run, and no faster than needed."""
        rounds = ROUNDS if self.rounds is None else self.rounds
        return partial(torch.optim.Adam, lr=min(FASTEST, max(SLOWEST, TRAVEL / rounds)), betas=BETAS)

    def evaluate_every(self, batches: int | None, per_round: int) -> int | None:
        """Rounds between full validation passes; None stands for one after every pass over the training set.

        Args:
            batches: In a pass over the training set, if that is known.
            per_round: Batches of the training set in a round.

        Returns:
            A number where a pass after every pass would be too many.
        """
        if self.rounds is None or batches is None or self.rounds * per_round <= EVALUATIONS * batches:
            return None
        return math.ceil(self.rounds / EVALUATIONS)


def plan(steps: int | None, epochs: int | None, batches: int | None, per_round: int) -> Plan:
    """How long a run is.

    Args:
        steps: Rounds, if given.
        epochs: Passes over the training set, if given.
        batches: In a pass over the training set, if that is known.
        per_round: Batches of the training set in a round.

    Returns:
        The plan.

    Example:
        >>> plan(None, None, batches=60, per_round=5), plan(None, None, batches=2000, per_round=5)
        (Plan(limit=1000, rounds=1000), Plan(limit=4000, rounds=4000))
        >>> plan(None, 3, batches=60, per_round=5)
        Plan(limit=None, rounds=36)
    """
    if steps is not None:
        return Plan(steps, steps)
    if epochs is not None:
        return Plan(None, None if batches is None else math.ceil(epochs * batches / per_round))
    enough = 0 if batches is None else math.ceil(PASSES * batches / per_round)
    return Plan(max(ROUNDS, enough), max(ROUNDS, enough))
