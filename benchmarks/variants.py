"""Variants of Δ-STN that were tried and are not in the library: ``defaults.py`` and ``response.py`` measure them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.problem import Loss, Model, Problem
from bilevel.response.centered import Centered, CenteredResponse
from bilevel.rng import Repeated

Factory = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Thrifty(Centered):
    """Δ-STN with pairs that cost no more than a single perturbed pass.

    Attributes:
        share: Of the examples of a batch that get pairs.
    """

    share: float = 1.0

    def bind(self, problem: Problem) -> ThriftyResponse:
        """A response that starts with zero slopes."""
        return ThriftyResponse(problem, self)


class Linearized(CenteredResponse):
    """The response of Δ-STN, for variants of it that keep a state."""

    pure = False

    def perturbed(self, noise: Tensor, held: Any = None) -> Model:
        """The model with linearised predictions."""
        return self.affine(noise, freeze_weights=True, linearized=True, held=held)


class ThriftyResponse(Linearized):
    """Pairs on some examples."""

    def __init__(self, problem: Problem, settings: Thrifty) -> None:
        """Keep the share."""
        super().__init__(problem, settings)
        self.share = settings.share

    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        """The unperturbed loss for all examples, then a pair for some of them."""
        yield self.problem.inner_loss(self.inner.model(self.inner.params(), update_buffers=True), hyper, batch)
        part = tuple(value[: round(self.share * len(value))] for value in batch)
        noise, again = self.perturbation(part), Repeated(self.problem.device)
        for shift in (noise, -noise):
            with again():
                loss = self.problem.inner_loss(self.perturbed(shift), hyper + shift, part)
            yield Loss(loss.value / 2, loss.aux)


@dataclass(frozen=True, kw_only=True)
class Averaged(Centered):
    """Δ-STN whose hypergradient is taken with a running average of Θ.

    Attributes:
        decay: Of the average, in each inner step.
    """

    decay: float = 0.98

    def bind(self, problem: Problem) -> AveragedResponse:
        """A response that starts with zero slopes."""
        return AveragedResponse(problem, self)


class AveragedResponse(Linearized):
    """Learns Θ, and answers with its average."""

    def __init__(self, problem: Problem, settings: Averaged) -> None:
        """Start the average at Θ."""
        super().__init__(problem, settings)
        self.decay = settings.decay
        self.averages = [part.detach().clone() for part in self.theta.parameters()]

    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        """The terms of Δ-STN; the average takes in Θ as it is before this step."""
        for average, part in zip(self.averages, self.theta.parameters(), strict=True):
            average.lerp_(part.detach(), 1 - self.decay)
        yield from super().inner_loss(hyper, batch)

    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> Model:
        """The model with the average of Θ."""
        learned = self.theta
        self.theta = copy.deepcopy(learned)
        try:
            for part, average in zip(self.theta.parameters(), self.averages, strict=True):
                part.data.copy_(average)
            return super().forward(hyper, train_batch, center)
        finally:
            self.theta = learned


class Twice:
    """Every batch two times, for updates one after the other."""

    def __init__(self, batches: Any) -> None:
        """Keep the batches."""
        self.batches = batches

    def __len__(self) -> int:
        """Twice as many."""
        return 2 * len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """Each and again."""
        return itertools.chain.from_iterable((batch, batch) for batch in self.batches)


def in_turn(make: Factory, turn: int) -> Factory:
    """An optimizer that makes only every second of its steps: the first ones (0) or the second ones (1)."""

    def made(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        optimizer = make(params)
        real, count = optimizer.step, itertools.count()

        def step(*args: Any, **options: Any) -> Any:
            return real(*args, **options) if next(count) % 2 == turn else None

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    return made
