"""Where a loss, a gradient, a weight or what an optimizer remembers is judged not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from bilevel.response import BestResponse
from bilevel.response.base import Steps
from bilevel.solver.undo import Snapshot

if TYPE_CHECKING:
    from bilevel.loop import Solution

HALF = (torch.float16, torch.bfloat16)


class DivergenceError(RuntimeError):
    """A number of a step became NaN or infinite; the solver is back in its last good state.

    Attributes:
        solution: The solution so far, if the error left :func:`bilevel.solve`.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.ones(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["a"]) ** 2 * float("nan"),
        ...     outer_loss=lambda model, hyper, batch: model.params["w"] ** 2,
        ...     hyper={"a": bilevel.real(1.0)},
        ... )
        >>> try:
        ...     bilevel.solve(problem, steps=2, progress=False)
        ... except DivergenceError as error:
        ...     print(str(error)[:21])
        the inner loss is nan
    """

    solution: Solution | None = None


class NotFiniteWarning(UserWarning):
    """A step was not finite and was left out, because ``on_nan`` is ``"skip"`` or ``"rollback"``.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", NotFiniteWarning)  # to end a run at the first bad step
        >>> warnings.simplefilter("default", NotFiniteWarning)
    """


class NotFinite(Exception):
    """A step is not finite, and has not been undone yet.

    Attributes:
        what: The quantity and the step, as the beginning of a sentence.
        advice: What to change.
        step: Its number.
    """

    def __init__(self, what: str, advice: str, step: int) -> None:
        """Say what is not finite."""
        super().__init__(what)
        self.what, self.advice, self.step = what, advice, step


def finite_number(tensors: Sequence[Tensor], like: Tensor, *, at_once: bool) -> Tensor:
    """A number that is finite if all entries of all tensors are.

    Args:
        tensors: Of any dtype.
        like: With the device and dtype of the number.
        at_once: Whether the number is read now. It is then a sum, which is fast on a CPU and may be infinite where
            the entries are not: look again. Otherwise it is right.

    Returns:
        Zero or NaN.
    """
    present = [torch.view_as_real(t) if t.is_complex() else t for t in tensors if t.numel()]
    present = [tensor for tensor in present if tensor.is_floating_point()]
    if not present:
        return like.new_zeros(())
    sizes: Sequence[Tensor]
    if at_once:
        sizes = [tensor.sum(dtype=torch.float32) if tensor.dtype in HALF else tensor.sum() for tensor in present]
        if like.device.type == "cpu":  # a look at a number takes less time than an operation
            return like.new_full((), 0 * sum(map(float, sizes)))
    else:
        sizes = torch._foreach_norm(present, math.inf)
    if len({size.dtype for size in sizes}) > 1:
        sizes = [size.to(like) for size in sizes]
    return (torch.stack([*sizes]) * 0).sum().to(like)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all entries are finite; waits for the device.

    Returns:
        The answer.
    """
    found = [tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return not found or bool(torch.stack(found).all())


@final
class FiniteCheck:
    """Judges every step by a record of five numbers: the step, its gradient norm, its loss, and two more.

    The fourth is the sum of the perturbed losses of an inner step; for an outer step it is zero times the
    hyperparameters, which is finite if they are. The fifth is finite if the state is: weights, response, buffers,
    hyperparameters, and what the optimizers remember. That of an inner step is the state before its update; the state
    after it is judged with the next step.

    On a CPU a look at a number costs nothing, and a step is judged before the update. Elsewhere it would stall the
    device: there the first bad record stays on the device, and is read together with that of the outer step.

    Attributes:
        at_once: Whether every inner step is judged by itself.
    """

    def __init__(
        self,
        response: BestResponse,
        like: Tensor,
        last_good: Snapshot,
        site: Callable[[], str | None],
        *,
        at_once: bool,
    ) -> None:
        """Judge the steps of a response.

        Args:
            response: What made them.
            like: With the dtype and device of the hyperparameters.
            last_good: Whose flag is to be read as well, where steps are judged later.
            site: Names the first part of the state that is not finite, or returns None; waits for the device.
            at_once: Whether to judge every inner step by itself.
        """
        self.at_once = at_once
        self._response = response
        self._last_good = last_good
        self._site = site
        self._first_bad = like.new_full((5,), math.nan)

    def forget(self) -> None:
        """Start anew, as after loading a state."""
        self._first_bad = torch.full_like(self._first_bad, math.nan)

    def number(self, tensors: Sequence[Tensor]) -> Tensor:
        """The last entry of a record.

        Args:
            tensors: The state.

        Returns:
            Finite if they are; a sum that overflows is not, where it is read at once.
        """
        found = finite_number(tensors, self._first_bad, at_once=self.at_once)
        inner = self._response.inner
        if inner.group is None or inner.shards is None:
            return found
        return inner.group.add([found])[0]  # each process looks at its parts only

    def inner(self, step: int, values: list[Tensor], norms: Tensor, state: Tensor) -> None:
        """Judge an inner step, or note on the device that it was bad.

        Args:
            step: Its number.
            values: The terms of its loss.
            norms: Of its gradients.
            state: From :meth:`number`, before the update.
        """
        terms = torch.stack([value.to(norms) for value in values])
        self._note(torch.stack([terms.new_full((), step), norms.sum(), terms[0], terms[1:].sum(), state]), step)

    def made(self, step: int, steps: Steps | None) -> None:
        """Judge the inner steps that a response made itself.

        Args:
            step: The number of the first one.
            steps: What it made.
        """
        if steps is None:
            return
        norms, losses = steps.norms.to(self._first_bad), steps.losses.to(self._first_bad)
        if self.at_once and math.isfinite(float(norms.sum() + losses.sum())):
            return
        first = (~(norms + losses).isfinite()).to(torch.int).argmax()  # the first bad one, if there is one
        # Not by indexing, which would read the index.
        norm, loss = (values.gather(0, first[None])[0] for values in (norms, losses))
        zero = norms.new_zeros(())
        self._note(torch.stack([first + step, norm, loss, zero, zero]), step)

    def outer(self, step: int, loss: Tensor, norms: Tensor, values: Tensor, state: Tensor, inner_step: int) -> None:
        """Judge an outer step, and all inner steps that have not been judged.

        Args:
            step: Its number.
            loss: The outer loss.
            norms: Of its gradients.
            values: The hyperparameters after it.
            state: From :meth:`number`, after it.
            inner_step: The number of the next inner step.
        """
        if self.at_once and norms.device.type == "cpu":  # a look at a number takes less time than an operation
            found = [float(number) for number in (norms.sum(), loss, (values * 0).sum(), state)]
            facts = [doubt.numbers.tolist() for doubt in self._response.doubts or []]
            self._decide([0.0] * 5, [step, *found], facts, inner_step)
            return
        parts = [norms.new_full((), step), norms.sum(), loss.to(norms), (values * 0).sum(), state.to(norms)]
        self._judge(torch.stack([self._noted(), torch.stack(parts)]), inner_step)

    def pending(self, inner_step: int, state: Tensor) -> None:
        """Judge the state, and the inner steps that have not been judged.

        Args:
            inner_step: The number of the next one.
            state: From :meth:`number`, now.
        """
        record, zero = self._noted(), state.new_zeros(())
        now = torch.stack([zero + inner_step, zero, zero, zero, state])
        first = torch.where(record.isfinite().all(), now, record)
        self._judge(torch.stack([first, torch.zeros_like(record)]), inner_step)

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
        """Read numbers from the device, all at once, and judge them.

        Args:
            records: A row for inner steps, whose fourth entry is the sum of the perturbed terms, and a row for an outer
                step, whose fourth entry is finite if the hyperparameters are.
            inner_step: The number of the next inner step.

        Raises:
            NotFinite: If an entry is not finite.
        """  # noqa: DOC502
        doubts = self._response.doubts or []
        flag = self._last_good.flag
        parts = [records.flatten(), *([] if flag is None else [flag.to(records)[None]])]
        numbers = torch.cat([*parts, *(doubt.numbers.to(records) for doubt in doubts)]).tolist()
        inner, outer, rest = numbers[:5], numbers[5:10], iter(numbers[10:])
        if flag is not None:
            self._last_good.settle(bool(next(rest)))
        facts = [[next(rest) for _ in range(len(doubt.numbers))] for doubt in doubts]
        self._decide(inner, outer, facts, inner_step)

    def _decide(self, inner: list[float], outer: list[float], facts: list[list[float]], inner_step: int) -> None:
        """The same, once they were read; ``facts`` are those of the doubts."""
        if not math.isfinite(sum(inner[1:4])):
            raise self._bad_inner(*inner[:4])
        if not math.isfinite(inner[4]):
            self._judge_state(f"before inner step {int(inner[0])}, counted from 0", int(inner[0]))
        # If both are wrong, a loss that is not finite is the cause.
        if math.isfinite(outer[2]):
            for doubt, numbers in zip(self._response.doubts or [], facts, strict=True):
                doubt.settle(numbers)
        if not math.isfinite(sum(outer[1:4])):
            raise self._bad_outer(*outer[:4])
        if not math.isfinite(outer[4]):
            self._judge_state(f"at outer step {int(outer[0])}, counted from 0", int(outer[0]))

    def _judge_state(self, where: str, step: int) -> None:
        site = self._site()
        if site is None and self.at_once:
            return  # the entries are finite, only their sum is not
        raise NotFinite(
            f"{site or 'a weight or the state of an optimizer'} is NaN or infinite {where}.",
            "Lower the learning rates, clip gradients (inner_clip=1.0, outer_clip=1.0), or raise eps of the optimizer.",
            step,
        )

    def _bad_inner(self, step: float, norm: float, loss: float, others: float) -> NotFinite:
        perturbed = f", at perturbed hyperparameters {others:g}" if others else ""
        smaller = "" if self._response.scale is None else "use a smaller scale of the perturbation, "
        return NotFinite(
            f"the inner loss is {loss:g}{perturbed} and its gradient norm {norm:g} at inner step {int(step)}, counted "
            "from 0.",
            f"Lower the inner learning rate, clip gradients (inner_clip=1.0), {smaller}or look for log, sqrt or "
            "division at zero.",
            int(step),
        )

    def _bad_outer(self, step: float, norm: float, loss: float, moved: float) -> NotFinite:
        where = f"at outer step {int(step)}, counted from 0."
        if math.isfinite(norm + loss):
            return NotFinite(
                f"a hyperparameter left the range of floating-point numbers {where}",
                "Lower the outer learning rate or clip hypergradients (outer_clip=1.0); an interval keeps a "
                "hyperparameter within bounds.",
                int(step),
            )
        adaptive = ""
        if self._response.unrolled_steps:
            adaptive = " The steps of Adam and its like are steep where a gradient is zero: raise eps, or use SGD."
        return NotFinite(
            f"the outer loss is {loss:g} and the norm of the hypergradient {norm:g} {where}",
            "Lower the learning rates, clip hypergradients (outer_clip=1.0), or look for log, sqrt or division at "
            f"zero.{adaptive}",
            int(step),
        )
