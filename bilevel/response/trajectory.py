r"""Steps of training, one after the other, that can be run, pulled back and pushed forward.

A trajectory can be walked back through one graph of all steps, step by step, or by segments whose steps are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from bilevel.autodiff import vjp
from bilevel.compilation import Later, Stage, Staged
from bilevel.interrupts import safe_point
from bilevel.response.step import Cotangent, Made, Point, Step, Tangent
from bilevel.rng import Stream

Pull = Callable[[Cotangent, Tensor], tuple[Cotangent, Tensor]]
"""Maps the cotangent of the new point to that of the old one, and adds that of the hyperparameters to a total."""


@final
class Trajectory:
    """Steps of training, one after the other.

    Attributes:
        step: Makes one.
        compiled: ``step.record`` or ``step.push``, compiled, to make the steps with; None makes them uncompiled.
        losses: The inner loss at every step so far.
        numbers: What ``Made`` calls norms, for every step.
        aux: What the inner loss last returned beside its value.
    """

    def __init__(self, step: Step, compiled: Staged | None = None) -> None:
        """Begin without a step."""
        self.step = step
        self.compiled = compiled
        self.losses: list[Tensor] = []
        self.numbers: list[list[Tensor]] = []
        self.aux: Any = None

    def run(self, hyper: Tensor, point: Point, batches: Sequence[Any]) -> Point:
        """Make steps without a derivative.

        Args:
            hyper: Shape ``(h,)``.
            point: Where to start.
            batches: One per step.

        Returns:
            Where they lead.
        """
        if not batches:
            return point
        with self.step.guarded():
            for batch in batches:
                if self._compiles and self.compiled is not None:
                    # The step compiled with its derivative serves here too. A derivative that is not used costs little.
                    point, _ = self._make(self.compiled, hyper, point, batch)
                else:
                    point = self._note(self.step.run(hyper, point, batch))
        return point

    def record(self, hyper: Tensor, point: Point, batches: Sequence[Any], *, segment: int | None) -> tuple[Point, Pull]:
        """Make steps that can be pulled back.

        Args:
            hyper: Shape ``(h,)``.
            point: Where to start. Its cotangent may be None throughout if nothing there requires a gradient.
            batches: One per step.
            segment: None keeps the graph of every step. A number keeps one point per so many steps, and repeats the
                steps between when they are pulled back.

        Returns:
            Where they lead, and the pull through all of them, which can be called once.
        """
        pulls: list[Pull] = []
        if segment is None and not self._compiles:
            return self._record_at_once(hyper, point, batches)
        if segment is None:
            with self.step.guarded():
                for batch in batches:
                    point, later = self._make(self.step.record, hyper, point, batch)
                    pulls.append(partial(_pull, later))
        else:
            for first in range(0, len(batches), segment):
                some = batches[first : first + segment]
                start, stream, done = point, Stream.current(self.step.inner.problem.device), len(self.losses)
                point = self.run(hyper, start, some)
                pulls.append(self._repeat(hyper, start, some, stream, torch.stack(self.losses[done:])))
                point = point.leaves(requires_grad=True)

        def pull_all(cotangent: Cotangent, total: Tensor) -> tuple[Cotangent, Tensor]:
            while pulls:
                cotangent, total = pulls.pop()(cotangent, total)  # frees its graph
            return cotangent, total

        return point.leaves(), pull_all

    def push(
        self, hyper: Tensor, point: Point, batches: Sequence[Any], directions: Tensor, tangents: list[Tangent]
    ) -> tuple[Point, list[Tangent]]:
        """Make steps and carry tangents along.

        Args:
            hyper: Shape ``(h,)``.
            point: Where to start.
            batches: One per step.
            directions: Of the hyperparameters, one per row.
            tangents: Of the start, one per row.

        Returns:
            Where the steps lead, and the tangents there.
        """
        with self.step.guarded():
            for batch in batches:
                point, later = self._make(self.step.push, hyper, point, batch)
                tangents = [later([*old, direction]) for direction, old in zip(directions, tangents, strict=True)]
        return point, tangents

    def norms(self) -> Tensor:
        """The norm of the gradient at every step, before clipping.

        Returns:
            One number per step.
        """
        most, zero = max(map(len, self.numbers)), self.losses[0].new_zeros(())
        table = [number for row in self.numbers for number in [*row, *[zero] * (most - len(row))]]
        norms: Tensor = torch.linalg.vector_norm(torch.stack(table).view(-1, most), dim=1)
        return norms

    @property
    def _compiles(self) -> bool:
        return self.compiled is not None and self.compiled.working

    def _record_at_once(self, hyper: Tensor, point: Point, batches: Sequence[Any]) -> tuple[Point, Pull]:
        """One graph for all steps, which is cheaper to walk than one for each."""
        start, first = point.leaves(requires_grad=True), hyper.detach().requires_grad_()
        now, last = start, first
        with torch.enable_grad(), self.step.guarded():
            for batch in batches:
                now = self._note(self.step.extend(last, now, batch))
                # Every step takes its own view of the hyperparameters. Their cotangent is then summed in the same
                # order, to the last bit, whether the steps are walked back at once or segment by segment.
                last = last.view_as(last)
        outputs = [*now.variables(), last]
        # A start that depends on nothing needs no cotangent. That saves a Hessian product.
        inputs = start.variables() if any(value.requires_grad for value in point.variables()) else []

        def pull(cotangent: Cotangent, total: Tensor) -> tuple[Cotangent, Tensor]:
            *old, part = vjp(outputs, [*inputs, first], [*cotangent, total])
            return old or [None] * len(start.variables()), total if part is None else part

        return now.leaves(), pull

    def _make(self, stage: Stage, hyper: Tensor, point: Point, batch: Any) -> tuple[Point, Later]:
        if self._compiles and self.compiled is not None:
            # The learning rate as a tensor, so that it can change without another compilation.
            made, (later,) = self.compiled(hyper, point, batch, self.step.optimizer.settings())
        else:
            made, (later,) = stage(hyper, point, batch)
        return self._note(made), later

    def _note(self, made: Made) -> Point:
        safe_point()
        self.losses.append(made.loss)
        self.numbers.append(made.norms)
        self.aux = made.aux
        return made.point

    def _repeat(self, hyper: Tensor, point: Point, batches: Sequence[Any], stream: Stream, losses: Tensor) -> Pull:
        def pull(cotangent: Cotangent, total: Tensor) -> tuple[Cotangent, Tensor]:
            with stream():
                again = Trajectory(self.step, self.compiled)
                _, pull_again = again.record(hyper, point, batches, segment=None)
            # NaN equals nothing, so such a loss cannot be compared. It is reported anyway.
            same = ((torch.stack(again.losses) == losses) | losses.isnan().any()).all()
            if same.device.type == "cpu" and not bool(same):
                raise RuntimeError(
                    "checkpoint=True repeats inner steps, but inner_loss did not repeat its values. Draw its random "
                    "numbers from torch's default generator and keep other changing values out, or use "
                    "checkpoint=False."
                )
            # On a GPU, reading the answer would make the host wait. NaN is noticed at the end of the outer step.
            return pull_again(cotangent, torch.where(same, total, torch.nan))

        return pull


def _pull(later: Later, cotangent: Cotangent, total: Tensor) -> tuple[Cotangent, Tensor]:
    *old, part = later(cotangent)
    return old, total if part is None else total + part
