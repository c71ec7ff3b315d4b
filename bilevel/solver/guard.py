"""What happens to a step that is not finite: how far back the solver goes, and whether it goes on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

from torch import Tensor

from bilevel.arguments import check_integer
from bilevel.parallel import local
from bilevel.solver.finite import DivergenceError, FiniteCheck, NotFinite, NotFiniteWarning, all_finite
from bilevel.solver.undo import Snapshot, View

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver

POLICIES = ("raise", "skip", "rollback")
LARGE, SELDOM = 2**16, 10
"""A state with more numbers than this is copied before every tenth inner update, a smaller one before each."""


@final
class Guard:
    """The copies to which a solver returns, and the rule by which it does.

    Attributes:
        policy: One of ``POLICIES``.
        finite: Judges the steps.
        step: The state before the last inner update, or one of the last few, where steps are judged at once. Its loss
            and gradient were finite.
        outer: What an outer step changes, before it. That is everything for a method that carries something on.
        round: The state at the first inner step since the last outer one, where steps are judged later or rolled back.
        dropped: How many steps were left out.
    """

    def __init__(self, solver: Solver, policy: str, max_bad_steps: int) -> None:
        """Guard the steps of a solver.

        Raises:
            ValueError: If there is no such policy.
        """
        if policy not in POLICIES:
            raise ValueError(f"on_nan must be 'raise', 'skip' or 'rollback', got {policy!r}.")
        check_integer("max_bad_steps", max_bad_steps, 1)
        self._solver = solver
        self.policy = policy
        self._limit = max_bad_steps
        self.dropped = 0
        self._in_a_row = {"inner": 0, "outer": 0}
        self._reached = {"inner": -1, "outer": -1}
        names = list(solver.optimizers)
        self.carries = solver.response.carries
        small = [name for name in names if name in ("hyper", "scale")]
        self.step = Snapshot(solver, names, whole=True)
        self.round = Snapshot(solver, names, whole=True)
        self.outer = Snapshot(solver, names if self.carries else small, whole=self.carries)
        at_once = solver.vector.device.type == "cpu" or policy != "raise"
        self.finite = FiniteCheck(solver.response, solver.vector.detach(), self.round, self.site, at_once=at_once)
        self._due = True
        self._between = SELDOM if self._numbers() > LARGE else 1
        self._since = self._between

    def state_dict(self) -> dict[str, Any]:
        """How many steps were left out, and how many in a row.

        Returns:
            Plain types.
        """
        return {"dropped": self.dropped, "in_a_row": dict(self._in_a_row), "reached": dict(self._reached)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from :meth:`state_dict`."""
        check_integer("dropped", state["dropped"], 0)
        self.dropped = state["dropped"]
        for own, name in ((self._in_a_row, "in_a_row"), (self._reached, "reached")):
            for level in own:
                check_integer(name, state[name][level], -1)
                own[level] = state[name][level]

    def keeps_rounds(self) -> bool:
        """Whether the start of a round is to be copied now."""
        return self._due and (not self.finite.at_once or self.policy == "rollback")

    def kept_round(self) -> None:
        """The start of this round has been copied."""
        self._due = False

    def judges_state(self) -> bool:
        """Whether the state is to be judged before the next inner update, and perhaps copied by :meth:`keep`."""
        # With few examples, that takes a few percent of the time of an inner step of a large network.
        return not self.finite.at_once or self._since >= self._between or self.keeps_rounds()

    def keep(self, view: View, buffers: Sequence[Tensor], number: Tensor) -> None:
        """Copy the state before an inner update, if that is due.

        Args:
            view: The state.
            buffers: Instead of those of the response, which the pass has changed already.
            number: Finite if the state is.
        """
        at_once = self.finite.at_once
        if self.keeps_rounds():
            self.round.keep(view, buffers, None if at_once else number.isfinite())
            self.kept_round()
        if at_once:
            self.step.keep(view, buffers)
        self._since = 0

    def vouches_for(self, view: View) -> bool:
        """Whether an outer step that is good says the same of the state before it.

        A method that restarts does not read that state, so it is judged itself, where steps are judged at once.

        Args:
            view: That state.

        Returns:
            The answer.
        """
        read = not (self._solver.response.restarts and self.finite.at_once)
        return read or self._all_finite(view.tensors)

    def updated(self) -> None:
        """An inner update was made."""
        self._since += 1

    def good(self, level: str) -> None:
        """A step was judged good."""
        if level == "outer":
            self._since = self._between
        steps = self._solver.inner_steps if level == "inner" else self._solver.outer_steps
        if steps > self._reached[level]:
            self._in_a_row[level] = 0
        self._due = self._due or level == "outer"

    def checked(self) -> None:
        """All steps so far were good: the next inner step begins something that could be undone alone."""
        self._due = self._due or not self.finite.at_once

    def forget(self) -> None:
        """Start anew, as after loading a state."""
        self.finite.forget()
        for snapshot in (self.step, self.round, self.outer):
            snapshot.forget()
        self._due, self._since = True, self._between

    def rollback(self) -> bool:
        """Return to the last state whose losses were finite.

        Returns:
            Whether there is one.
        """
        self.finite.forget()
        self._due, self._since = True, self._between
        first, second = (self.step, self.round) if self.finite.at_once else (self.round, self.step)
        return first.restore() or second.restore()

    def handle(self, level: str, bad: NotFinite) -> None:
        """Return to a good state after a bad step, which has been undone itself.

        Args:
            level: Of the step that was being made.
            bad: What was noticed.

        Raises:
            DivergenceError: If the policy is to raise, or there is no good state.
        """
        steps = self._solver.inner_steps if level == "inner" else self._solver.outer_steps
        unrolled = self._solver.response.unrolled_steps
        undone = "That step has been undone."
        if level == "outer" and unrolled and "inner step" in bad.what:
            undone = "That step and the others of its outer step have been undone."
        deferred = not self.finite.at_once and "inner step" in bad.what
        self.finite.forget()
        if (deferred or self.policy == "rollback") and self.round.restore():
            undone = "All inner steps since the last outer step have been undone."
            self._due = True
        elif not self.is_finite():
            before = self._solver.inner_steps
            if not (self.step.restore() or self.round.restore()) or not self.is_finite():
                undone = "There is no good state to return to: load one, or begin with finite weights."
                raise DivergenceError(f"{bad.what} {undone} {bad.advice}")
            gone = before - self._solver.inner_steps
            undone = (
                f"The {f'{gone} updates' if gone > 1 else 'update'} before it {'have' if gone > 1 else 'has'} been "
            )
            undone += "undone as well."
        if self.policy == "raise":
            raise DivergenceError(f"{bad.what} {undone} {bad.advice}")
        self.dropped += 1
        self._in_a_row[level] += 1
        self._reached[level] = max(self._reached[level], steps)
        if self._in_a_row[level] > self._limit:
            self._give_up(bad, level)
        warnings.warn(
            f"{bad.what} {undone} on_nan={self.policy!r} goes on with the next batch; {self.dropped} steps were left "
            f"out so far, at most {self._limit} in a row may be.",
            NotFiniteWarning,
            stacklevel=4,
        )

    def is_finite(self) -> bool:
        """Whether the whole state is; waits for the device."""
        return self._all_finite(self.step.tensors())

    def _all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """The same answer in all processes, also where each has a part of the tensors only."""
        found, group = all_finite(tensors), self._solver.group
        return found if group is None or self._solver.shards is None else not group.highest(not found)[0]

    def _numbers(self) -> int:
        """How many numbers a copy of the state has, in all processes that share it together."""
        params = [param for params in self._solver.optimization.params.values() for param in params]
        return sum(tensor.numel() for tensor in [*params, *self._solver.response.buffers()])

    def site(self) -> str | None:
        """The first part of the state that is not finite; waits for the device.

        Returns:
            Its name, or None.
        """
        solver, response = self._solver, self._solver.response
        named = {"hyper": solver.vector, **{f"weights[{n!r}]": w for n, w in response.inner.params().items()}}
        named |= {f"buffer {n!r}": b for n, b in response.inner.buffer_values().items()}
        named |= {f"response.{n}": p for n, p in [*response.named_parameters(), *response.named_buffers()]}
        for name, tensor in named.items():
            if not self._all_finite([local(tensor)]):
                return name
        for name in solver.optimizers:
            params = len(solver.optimization.params[name])
            if not self._all_finite(Snapshot(solver, [name], whole=False).tensors()[params:]):
                return f"what the optimizer of the {name} remembers"
        return None

    def _give_up(self, bad: NotFinite, level: str) -> NoReturn:
        self.rollback()
        raise DivergenceError(
            f"{bad.what} {self._in_a_row[level]} {level} steps in a row were not finite, max_bad_steps={self._limit} "
            f"allows no more. The solver is back in the last state with finite losses. {bad.advice}"
        )
