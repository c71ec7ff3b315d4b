r"""Training at fixed hyperparameters, with or without noise: what self-tuning is compared with.

A method like any other to :func:`bilevel.solve`, but its weights have no derivative, so that every round must be part
of the warm-up. With a ``scale`` the hyperparameters are perturbed as self-tuning networks perturb them, and the weights
do not respond: the row "with Gaussian noise" of ``tab:dropout-rate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

import bilevel


@final
@dataclass(frozen=True)
class Fixed(bilevel.Method):
    r"""Plain training.

    Attributes:
        noise: Standard deviation of the perturbation of :math:`\lambda`, drawn for each example.
    """

    noise: float = 0.0

    def bind(self, problem: bilevel.Problem) -> FixedResponse:
        """Create the weights.

        Returns:
            A response that does not respond.
        """
        return FixedResponse(problem, self.noise)


@final
class FixedResponse(bilevel.BestResponse):
    """Weights that are trained at the given hyperparameters."""

    def __init__(self, problem: bilevel.Problem, noise: float) -> None:
        """Start at the weights of the problem."""
        super().__init__(problem)
        self.noise = noise

    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[bilevel.Loss]:
        """The training loss.

        Yields:
            One loss.
        """
        if self.noise:
            # Of a hyperparameter that all examples share, the loss gets the first row.
            shape = (self.problem.examples(batch) or 1, len(hyper))
            hyper = hyper + self.noise * torch.randn(shape, dtype=hyper.dtype, device=hyper.device)
        yield self.problem.inner_loss(self.inner.model(self.inner.params(), update_buffers=True), hyper, batch)

    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> bilevel.Model:
        """The weights as they are."""
        return self.inner.model(self.inner.params())
