"""Where a loss, a gradient or a hyperparameter is judged not finite."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from bilevel.response import BestResponse
from bilevel.response.base import Steps
from bilevel.solver.undo import LastGood

if TYPE_CHECKING:
    from bilevel.loop import Solution


class DivergenceError(RuntimeError):
    """A loss or gradient became NaN or infinite; the solver is back in its last good state.

    Attributes:
        solution: The solution so far, if the error left :func:`bilevel.solve`.
    """

    solution: Solution | None = None


@final
class FiniteCheck:
    """Judges every step by a record of four numbers: the step, its gradient norm, its loss, and one more.

    The fourth is the sum of the perturbed losses of an inner step; for an outer step it is zero times the
    hyperparameters, which is finite if they are.

    On a CPU a look at a number costs nothing, and a step is judged before the update. Elsewhere it would stall the
    device: there the first bad record stays on the device, and is read together with that of the outer step.

    Attributes:
        at_once: Whether every inner step is judged by itself.
    """

    def __init__(self, response: BestResponse, like: Tensor, last_good: LastGood) -> None:
        """Judge the steps of a response.

        Args:
            response: What made them.
            like: With the dtype and device of the hyperparameters.
            last_good: To return to if an inner step was bad that has been made already.
        """
        self.at_once = like.device.type == "cpu"
        self._response = response
        self._last_good = last_good
        self._first_bad = like.new_full((4,), math.nan)

    def forget(self) -> None:
        """Start anew, as after loading a state."""
        self._first_bad = torch.full_like(self._first_bad, math.nan)

    def inner(self, step: int, values: list[Tensor], norms: Tensor) -> None:
        """Judge an inner step, or note on the device that it was bad.

        Args:
            step: Its number.
            values: The terms of its loss.
            norms: Of its gradients.
        """
        terms = torch.stack([value.to(norms) for value in values])
        self._note(torch.stack([terms.new_full((), step), norms.sum(), terms[0], terms[1:].sum()]), step)

    def made(self, step: int, steps: Steps | None) -> None:
        """Judge the inner steps that a response made itself.

        Args:
            step: The number of the first one.
            steps: What it made.
        """
        if steps is None:
            return
        norms, losses = steps.norms.to(self._first_bad), steps.losses.to(self._first_bad)
        first = (~(norms + losses).isfinite()).to(torch.int).argmax()  # the first bad one, if there is one
        # Not by indexing, which would read the index.
        norm, loss = (values.gather(0, first[None])[0] for values in (norms, losses))
        self._note(torch.stack([first + step, norm, loss, norms.new_zeros(())]), step)

    def outer(self, step: int, loss: Tensor, norms: Tensor, values: Tensor, inner_step: int) -> None:
        """Judge an outer step, and all inner steps that have not been judged.

        Args:
            step: Its number.
            loss: The outer loss.
            norms: Of its gradients.
            values: The hyperparameters after it.
            inner_step: The number of the next inner step.
        """
        record = torch.stack([norms.new_full((), step), norms.sum(), loss.to(norms), (values * 0).sum()])
        self._judge(torch.stack([self._noted(), record]), inner_step)

    def pending(self, inner_step: int) -> None:
        """Judge the inner steps that have not been judged.

        Args:
            inner_step: The number of the next one.
        """
        if not self.at_once:
            record = self._noted()
            self._judge(torch.stack([record, torch.zeros_like(record)]), inner_step)

    @contextmanager
    def reading_once(self) -> Generator[None]:
        """Let the response leave its own doubts to :meth:`outer`, which is to be called inside the block."""
        self._response.doubts = []
        try:
            yield
        finally:
            self._response.doubts = None

    def _note(self, record: Tensor, inner_step: int) -> None:
        if self.at_once:
            self._judge(torch.stack([record, torch.zeros_like(record)]), inner_step)
        else:
            first = self._first_bad[0].isnan() & ~record.isfinite().all()
            self._first_bad = torch.where(first, record, self._first_bad)

    def _noted(self) -> Tensor:
        """The first bad inner step since the last look, on the device; zeros if there was none."""
        return torch.where(self._first_bad[0].isnan(), 0.0, self._first_bad)

    def _judge(self, records: Tensor, inner_step: int) -> None:
        """The one place where numbers are read from the device.

        Args:
            records: A row for inner steps, whose last entry is the sum of the perturbed terms, and a row for an outer
                step, whose last entry is finite if the hyperparameters are.
            inner_step: The number of the next inner step.

        Raises:
            DivergenceError: If an entry is not finite.
        """
        doubts = self._response.doubts or []
        numbers = torch.cat([records.flatten(), *(doubt.numbers.to(records) for doubt in doubts)]).tolist()
        inner, outer, rest = numbers[:4], numbers[4:8], iter(numbers[8:])
        if not math.isfinite(sum(inner[1:])):
            self.forget()
            undone = "That step has been undone."
            if inner_step <= int(inner[0]) < inner_step + self._response.unrolled_steps:
                undone = "That step and the others of its outer step have been undone."
            if self._last_good.restore():
                undone = "All inner steps since the last outer step have been undone."
            raise DivergenceError(self._inner_message(*inner, undone=undone))
        self._last_good.forget()
        # If both are wrong, a loss that is not finite is the cause.
        if math.isfinite(outer[2]):
            for doubt in doubts:
                doubt.settle([next(rest) for _ in range(len(doubt.numbers))])
        if not math.isfinite(sum(outer[1:])):
            raise DivergenceError(self._outer_message(*outer))

    def _inner_message(self, step: float, norm: float, loss: float, others: float, *, undone: str) -> str:
        perturbed = f", at perturbed hyperparameters {others:g}" if others else ""
        smaller = "" if self._response.scale is None else "use a smaller scale of the perturbation, "
        return (
            f"the inner loss is {loss:g}{perturbed} and its gradient norm {norm:g} at inner step {int(step)}, counted "
            f"from 0. {undone} Lower the inner learning rate, clip gradients (inner_clip=1.0), {smaller}or look for "
            "log, sqrt or division at zero."
        )

    def _outer_message(self, step: float, norm: float, loss: float, moved: float) -> str:
        where = f"at outer step {int(step)}, counted from 0. That step has been undone."
        if math.isfinite(norm + loss):
            return (
                f"a hyperparameter left the range of floating-point numbers {where} Lower the outer learning rate or "
                "clip hypergradients (outer_clip=1.0); an interval keeps a hyperparameter within bounds."
            )
        adaptive = ""
        if self._response.unrolled_steps:
            adaptive = " The steps of Adam and its like are steep where a gradient is zero: raise eps, or use SGD."
        return (
            f"the outer loss is {loss:g} and the norm of the hypergradient {norm:g} {where} Lower the learning rates, "
            f"clip hypergradients (outer_clip=1.0), or look for log, sqrt or division at zero.{adaptive}"
        )
