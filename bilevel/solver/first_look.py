"""The first look at every kind of batch, and at what the losses read: before a step is made with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from bilevel.batches import to_device
from bilevel.checks import Kinds, repeatable
from bilevel.problem import Problem
from bilevel.response import BestResponse


@final
class FirstLook:
    """Lets a response check the first batch of each kind. In later steps it costs a look at the shapes of the batch."""

    def __init__(self, response: BestResponse) -> None:
        """Look for this response."""
        self._response = response
        self._problem: Problem = response.problem
        self._inner, self._outer = Kinds(), Kinds()

    def inner(self, hyper: Tensor, batch: Any) -> None:
        """Check a batch of the inner loss, if its kind is new.

        Args:
            hyper: Shape ``(h,)``.
            batch: For the inner loss.
        """
        count = self._problem.examples(batch)
        if self._inner.new(batch, count):
            with self._problem.differentiating():
                self._response.check(hyper, batch)
            self._inner.add(batch, count)

    def outer(self, hyper: Tensor, batch: Any) -> None:
        """Check a batch of the outer loss, if its kind is new.

        Args:
            hyper: Shape ``(h,)``.
            batch: For the outer loss.
        """
        count = self._problem.examples(batch)
        if self._outer.new(batch, count):
            with self._problem.differentiating():
                self._response.check_outer(hyper, batch)
            self._outer.add(batch, count)

    def reads(self) -> None:
        """Refuse hyperparameters that neither loss reads, once both were evaluated.

        Raises:
            ValueError: If there is one.
        """
        if self._problem.unread:
            raise ValueError(
                f"neither inner_loss nor outer_loss reads hyper[{self._problem.unread[0]!r}], so that nothing can tune "
                "it and noise would move it: use it in a loss, or leave it out of Problem(hyper=...)."
            )

    def reads_of(self, hyper: Tensor, loader: Iterable[Any] | None) -> None:
        """The same before the outer loss was evaluated: if the inner loss leaves one unread, it is evaluated here.

        Args:
            hyper: Shape ``(h,)``.
            loader: Of the outer loss, of which the first batch is taken.
        """
        if self._problem.unread_by("inner_loss"):
            inner = self._response.inner
            with repeatable(self._problem.device), torch.no_grad():
                batch = None if loader is None else to_device(next(iter(loader), None), self._problem.device)
                self._problem.outer_loss(inner.model(inner.params()), hyper, batch)
        self.reads()
