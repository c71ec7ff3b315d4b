"""What the iterative solvers share: warm start, scaling, the true residual, restarts and messages."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.interrupts import safe_point
from bilevel.linear_solvers.base import (
    Attempt,
    ConvergenceWarning,
    LinearSolver,
    LinearSolverError,
    Matvec,
    Operator,
    check_count,
    check_number,
    norm,
    not_finite,
    ratio,
)
from bilevel.linear_solvers.numbers import Number, add_scaled, divide, nought, on_host, pick, stack
from bilevel.parallel import dot, flat_like, is_sharded, local

# Vectors may be divided among processes; what decides are scalars, which all processes have alike.
ASYMMETRIC = (
    "the matrix is not symmetric, or matvec is not deterministic (dropout?); Exact takes any nonsingular matrix."
)


Step = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A step of an iteration, from all that it remembers to the same afterwards."""


class Run(NamedTuple):
    """What one run of an iteration leaves on the device.

    Attributes:
        x: The solution for a right-hand side of norm one.
        remaining: The norm of its residual according to the recursion.
        steps: How many steps changed it.
        failed: One if the iteration broke down, zero otherwise.
        value: The number that explains a failure.
    """

    x: Tensor
    remaining: Number
    steps: Number
    failed: Number
    value: Number


@dataclass(frozen=True, kw_only=True)
class Iterative(LinearSolver):
    r"""A solver that multiplies by :math:`\mathbf{H} + \mu \mathbf{I}` until the residual is small.

    A warm start solves for the correction, :math:`u = x_0 + (\mathbf{H} + \mu \mathbf{I})^{-1} r_0` with
    :math:`r_0 = v - (\mathbf{H} + \mu \mathbf{I}) x_0`, and every right-hand side is divided by its norm, so the scale
    of v does not matter. If the true residual is larger than the recursion believed, the iteration is restarted from
    there.

    Attributes:
        max_steps: Upper bound on the steps.
        rtol: Stop once :math:`\|r\| \le \mathrm{rtol}\,\|v\|`; zero runs exactly ``max_steps`` steps, promises no
            residual, and waits for the device only once, when it is judged.
        damping: The shift :math:`\mu`.
    """

    max_steps: int = 20
    rtol: float = 1e-6
    damping: float = 0.0

    begun: ClassVar[int] = 0
    """How many steps the beginning makes."""
    advice: ClassVar[str]
    divides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_count(self, "max_steps", self.max_steps)
        check_number(self, "rtol", self.rtol, above=0, or_equal=True, advice=" Zero runs max_steps steps.")
        check_number(self, "damping", self.damping, above=0, or_equal=True)

    @override
    def _solve(self, matvec: Matvec, v: Tensor, x0: Tensor | None, root: Matvec | None) -> Attempt:
        operator = Operator(matvec, v.dtype, self.damping, on_host(v))
        v = v.to(torch.promote_types(v.dtype, torch.float32))
        size = operator.number(norm(v))
        # A right-hand side of zero has the solution zero, whatever the guess.
        x: Any = None if x0 is None else pick(size == 0, torch.zeros_like(v), x0)
        r = v if x is None else v - operator(x)
        system, weighted = operator, size
        if root is not None:
            system = Operator(lambda p: root(operator(root(p))), v.dtype, 0.0, operator.host)
            weighted = operator.number(norm(root(v)))
        residual, reached, steps = nought(size) + math.inf, math.inf, 0
        while True:
            # A little more than asked, so that rounding alone does not cause a restart.
            target = divide(0.9 * self.rtol * size, size if r is v else operator.number(norm(r)))
            b = r if root is None else root(r)
            scale = weighted if r is v else operator.number(norm(b))
            run = self._run(system, b / pick(scale == 0, nought(scale) + 1, scale), target, self.max_steps - steps)
            change = run.x if root is None else root(run.x)
            new_x = change.mul_(scale) if x is None else add_scaled(x, change, scale)
            new_r = v - operator.last(new_x)
            new_residual = seen = ratio(operator.number(norm(new_r)), size)
            if root is not None:
                seen = ratio(operator.number(norm(root(new_r))), weighted)
            believed = ratio(scale * run.remaining, weighted)
            facts = stack([new_residual, believed, *run[2:], seen], v)
            if self.rtol == 0:
                return Attempt(new_x, facts[0], facts, partial(self._judge, operator, v, x0))
            now, _, taken, failed, value, _ = facts.tolist()
            if steps == 0 and (failed or not math.isfinite(now)):
                raise self._error(operator, v, x0, int(taken), value if failed else None)
            if failed or not now < reached:
                break
            stalled = now > reached / 2
            x, r, residual, reached, steps = new_x, new_r, facts[0], now, steps + int(taken)
            if reached <= self.rtol or stalled or steps >= self.max_steps or taken == 0:
                break

        def compare(facts: list[float]) -> int:
            if reached > self.rtol:
                warnings.warn(
                    f"{type(self).__name__}: the relative residual is {reached:.1e} after {steps} of {self.max_steps} "
                    f"steps, above rtol={self.rtol:g}: {self._explain(operator, v, x, r)}",
                    ConvergenceWarning,
                    stacklevel=3,
                )
            return steps

        return Attempt(x, residual, local(v).new_zeros(0), compare)

    def made(self, matvec: Matvec, v: Tensor, x0: Tensor | None, solution: Tensor, facts: Tensor) -> Attempt:
        """What :meth:`attempt` returned with a fixed number of steps, inside a graph, to be judged outside.

        Args:
            matvec: As there; it is called only if something went wrong.
            v: As there.
            x0: As there.
            solution: As it was returned.
            facts: Likewise.

        Returns:
            The attempt.
        """
        operator = Operator(matvec, v.dtype, self.damping, on_host(v))
        return Attempt(solution, facts[0], facts, partial(self._judge, operator, v, x0))

    def _judge(self, operator: Operator, v: Tensor, x0: Tensor | None, facts: list[float]) -> int:
        """Say how a fixed number of steps went."""
        now, belief, taken, failed, value, seen = facts
        if failed or not math.isfinite(now):
            raise self._error(operator, v, x0, int(taken), value if failed else None)
        if seen > 1.1 * belief + operator.eps**0.5:
            self._check_disagreement(operator, v, seen, belief)
        return int(taken)

    def _run(self, operator: Operator, b: Tensor, target: Number, max_steps: int) -> Run:
        """Solve for ``b``, of norm one or zero, from zero; overwrites ``b``.

        With ``rtol=0`` it does not wait for the device, so it cannot stop early. Later steps are masked instead.

        Returns:
            What was found.
        """
        loop = getattr(operator.matvec, "loop", None)
        if loop is not None:
            with loop() as advance:
                return self._run_compiled(operator, b, target, max_steps, advance)
        state = self._begin(operator, b, target)
        for step in range(max_steps - self.begun):
            if self.rtol > 0 and bool(self._is_done(operator, state)):
                break
            state = self._advance(operator, state, first=step == 0)
        return self._end(operator, state)

    def _run_compiled(self, operator: Operator, b: Tensor, target: Number, max_steps: int, advance: Step) -> Run:
        """The same by steps that are one graph each."""
        operator = replace(operator, host=False)
        state = self._begin(operator, b, torch.as_tensor(target, dtype=b.dtype, device=b.device))
        for _ in range(max_steps - self.begun):
            if self.rtol > 0 and bool(self._is_done(operator, state)):
                break
            safe_point()
            state = type(state)(*advance(state))
        return self._end(operator, state)

    def step_of_tensors(self, matvec: Matvec, like: Tensor) -> tuple[Step, list[Tensor]]:
        """A step of the iteration as a function of tensors, which can be traced.

        Args:
            matvec: As in :meth:`LinearSolver.__call__`.
            like: A vector.

        Returns:
            The function, and tensors that it can be tried on.
        """
        work = torch.promote_types(like.dtype, torch.float32)
        blank, operator = (Operator(product, like.dtype, self.damping) for product in (torch.clone, matvec))
        with torch.no_grad():
            typical = self._begin(blank, probe(like.to(work)), torch.zeros((), dtype=work, device=like.device))

        def step(tensors: Sequence[Tensor]) -> list[Tensor]:
            # Copies, since a step overwrites what it is given.
            return [*self._advance(operator, type(typical)(*(t.clone() for t in tensors)), first=None)]

        return step, [tensor.detach() for tensor in typical]

    @abstractmethod
    def _begin(self, operator: Operator, b: Tensor, target: Number) -> Any:
        """What the iteration remembers at its start: a tuple of vectors and numbers."""

    @abstractmethod
    def _advance(self, operator: Operator, state: Any, *, first: bool | None) -> Any:
        """Make a step; ``first`` is None if that is known on the device only. Overwrites what it is given."""

    @abstractmethod
    def _is_done(self, operator: Operator, state: Any) -> Number:
        """Whether no further step is needed."""

    @abstractmethod
    def _end(self, operator: Operator, state: Any) -> Run:
        """What the iteration has found."""

    @abstractmethod
    def _failure(self, step: int, value: float) -> str:
        """Say what broke down at a step, and what to try."""

    def _error(
        self, operator: Operator, v: Tensor, x0: Tensor | None, step: int, value: float | None
    ) -> LinearSolverError:
        name = type(self).__name__
        failure = f"overflow after {step} steps: {self.advice}" if value is None else self._failure(step, value)
        error = not_finite(name, operator, v, x0)
        return error or LinearSolverError(f"{name}: {ASYMMETRIC if _is_asymmetric(operator, v) else failure}")

    def _check_disagreement(self, operator: Operator, v: Tensor, now: float, belief: float) -> None:
        """Raise if a truncated iteration went wrong, rather than being short of digits."""
        if _is_asymmetric(operator, v):
            raise LinearSolverError(f"{type(self).__name__}: {ASYMMETRIC}")
        if now > max(0.1, 10 * belief):
            raise LinearSolverError(
                f"{type(self).__name__}: the relative residual is {now:.1e} where the recursion believes {belief:.1e}: "
                f"the matrix is singular, or nearly so for {operator.dtype}. Add damping, or take fewer steps."
            )

    def _explain(self, operator: Operator, v: Tensor, x: Tensor, r: Tensor) -> str:
        """Find the cause of a residual that is too large, and what to try."""
        if _is_asymmetric(operator, v):
            return ASYMMETRIC
        largest, last = float(norm(operator(probe(v)))), float(norm(operator(r / norm(r))))
        if last <= operator.eps**0.5 * largest:
            return (
                "the matrix is singular, or nearly so, and v is not in its range: no vector has a smaller residual; "
                "add damping."
            )
        if float(norm(r)) <= 1e3 * operator.eps * largest * float(norm(x)):
            return (
                f"that is the precision of {operator.dtype} for this matrix, which may be nearly singular; use "
                "float64, add damping or raise rtol."
            )
        return self.advice


def probe(b: Tensor) -> Tensor:
    """A unit vector with a part in every direction, as good as random but without a random number.

    Returns:
        A function of the length of ``b`` only.
    """
    index = torch.arange(1, len(b) + 1, device=b.device)
    vector = (index * index * 2654435761 % 2**32).to(b.dtype) / 2**31 - 1
    vector = flat_like(vector, b) if is_sharded(b) else vector
    return vector / norm(vector)


def _is_asymmetric(operator: Operator, v: Tensor) -> bool:
    p, q = v / norm(v), probe(v)
    first, second = operator(p), operator(q)
    return bool((dot(p, second) - dot(q, first)).abs() > operator.eps**0.5 * (norm(first) + norm(second)))
