"""How much of the hypergradient is signal: sums for each entry of λ, kept on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from bilevel.checkpoint.layout import Count, Within

DECAY = 0.95
FIRST = 10
"""The outer step from which on the maximum is taken: before, even the sum of noise may be far from zero."""


@final
class Signal:
    r"""The sums and averages of one run.

    Let :math:`g_1` to :math:`g_n` be the hypergradients of the outer steps so far, for one entry of λ.

    * Lately: :math:`\hat m / \sqrt{\hat v\, q}`, with the exponential averages :math:`\hat m` of :math:`g` and
      :math:`\hat v` of :math:`g^2`, both with decay :math:`\beta = 0.95` and corrected for their start at zero, and
      :math:`q = \sum_i w_i^2 = \frac{(1-\beta)(1+\beta^n)}{(1+\beta)(1-\beta^n)}` of their weights :math:`w_i`. It is a
      mean over about :math:`1/q \to 39` steps in units of its standard error.
    * Over the run: :math:`\max_{10 \le k \le n} |\sum_{i \le k} g_i| / \sqrt{\sum_{i \le k} g_i^2}`.

    Independent noise without a preferred sign gives about a standard normal variable in the first, at any one step, and
    the maximum of a random walk in the second. Hypergradients that are all alike give the largest values that there
    are: :math:`\sqrt{39} \approx 6.2`, with their sign, in the first, :math:`\sqrt{n}` in the second.

    Example:
        >>> signal = Signal(torch.zeros(1))
        >>> for _ in range(400):
        ...     signal.add(torch.tensor([-0.5]))
        >>> signal.lately(), signal.largest()
        (tensor([-6.2450]), tensor([20.]))

    Attributes:
        steps: Outer steps so far.
    """

    def __init__(self, vector: Tensor) -> None:
        """Start without a step, for hyperparameters like ``vector``."""
        self.steps = 0
        zeros = torch.zeros_like(vector, dtype=torch.promote_types(vector.dtype, torch.float32), requires_grad=False)
        self._mean, self._square = zeros.clone(), zeros.clone()
        self._total, self._squares, self._peak = zeros.clone(), zeros.clone(), zeros.clone()
        self._largest_square = zeros.clone()

    def add(self, hypergradient: Tensor) -> None:
        """Take in the hypergradient of an outer step; does not wait for the device."""
        self.steps += 1
        g = hypergradient.detach().to(self._mean)
        square = g.square()
        self._mean = torch.lerp(g, self._mean, DECAY)
        self._square = torch.lerp(square, self._square, DECAY)
        self._total = self._total + g
        self._squares = self._squares + square
        self._largest_square = torch.maximum(self._largest_square, square)
        if self.steps >= FIRST:
            self._peak = torch.maximum(self._peak, _ratio(self._total, self._squares).abs())

    def lately(self) -> Tensor:
        """The mean of about the last 39 hypergradients, in units of its standard error; zero where all were zero."""
        if self.steps == 0:
            return self._mean
        left = DECAY**self.steps
        weights = (1 - DECAY) * (1 + left) / ((1 + DECAY) * (1 - left))
        return _ratio(self._mean / (1 - left), self._square / (1 - left) * weights)

    def largest(self) -> Tensor:
        """The largest deviation of the sum from zero; NaN before the tenth step."""
        return self._peak.clone() if self.steps >= FIRST else torch.full_like(self._peak, torch.nan)

    def in_few_steps(self) -> Tensor:
        """Whether the largest hypergradient alone makes a quarter of the sum of squares.

        Noise hardly ever does so. λ that goes to its optimum in a few large steps does; a sum of few steps is not much
        larger than one of them, so there it says nothing about signal.

        Returns:
            A flag for each entry.
        """
        return self._squares < 4 * self._largest_square

    def state_dict(self) -> dict[str, Any]:
        """All sums.

        Returns:
            Plain types and tensors.
        """
        return {
            "steps": self.steps,
            "mean": self._mean,
            "square": self._square,
            "total": self._total,
            "squares": self._squares,
            "peak": self._peak,
            "largest_square": self._largest_square,
        }

    @property
    def form(self) -> dict[str, Any]:
        """Of :meth:`state_dict`."""
        own = self.state_dict()
        squares = ("square", "squares", "peak", "largest_square")
        # The square of a large hypergradient may overflow, which is no fault of the run.
        return {
            name: Within(value, 0.0 if name in squares else -math.inf, finite=False)
            for name, value in own.items()
            if name != "steps"
        } | {"steps": Count()}

    def load_state_dict(self, state: dict[str, Any], to_device: Callable[[Any], Any]) -> None:
        """Go on from :meth:`state_dict`."""
        state = to_device(state)
        self.steps = state["steps"]
        self._mean, self._square = state["mean"], state["square"]
        self._total, self._squares, self._peak = state["total"], state["squares"], state["peak"]
        self._largest_square = state["largest_square"]


def _ratio(value: Tensor, square: Tensor) -> Tensor:
    """``value / sqrt(square)``, zero where the square is."""
    return torch.where(square > 0, value / square.sqrt(), torch.zeros_like(value))
