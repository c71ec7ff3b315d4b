"""What :func:`bilevel.solve` returns, and what its callbacks see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bilevel.history import History
from bilevel.plotting import schedules
from bilevel.problem import Problem
from bilevel.report import from_history, page, replace
from bilevel.schedule import Schedule, schedule_of
from bilevel.solver import OuterStep, Solver

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Best:
    """Where the full validation loss was lowest.

    Attributes:
        round: The round after which it was measured.
        validation_loss: The outer loss over all of ``valid``.
        inner_loss: The mean inner loss of that round.
        hyper: Hyperparameters in natural units.
        params: Weights by name.
        state_dict: Weights and buffers under the names of the user's module.

    Example:
        >>> import torch
        >>> best = Best(3, 0.5, 0.25, {"decay": torch.tensor(0.1)}, {}, {})
        >>> print(f"round {best.round}, validation loss {best.validation_loss}, decay {float(best.hyper['decay']):.1f}")
        round 3, validation loss 0.5, decay 0.1
    """

    round: int
    validation_loss: float
    inner_loss: float
    hyper: dict[str, Tensor]
    params: dict[str, Tensor] = field(repr=False)
    state_dict: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Solution:
    r"""The result of :func:`solve`.

    Attributes:
        hyper: The final hyperparameters in natural units.
        params: The weights at the final hyperparameters, by name.
        state_dict: The same with buffers, tied and frozen parameters: loads strictly into the user's module.
        best: The same at the best full validation pass; None if the run ended before the first one.
        history: Losses, hyperparameters, hypergradient norm, scale, signal and time, one row per outer step. The
            columns ``signal.NAME`` have, for each entry of λ, the mean of about the last 39 hypergradients in units of
            its standard error. Where there is only noise, that is about a standard normal variable, mostly between -2
            and 2. Its sign is that of the hypergradient. The standard error is that of the mean square, so that
            hypergradients that are all alike give 6.2 and not infinity.
        signal: How far the sum of all hypergradients left the range of pure noise, by name and entry: the largest
            :math:`|\sum_{i \le k} g_i| / \sqrt{\sum_{i \le k} g_i^2}` over the outer steps k from the tenth to the
            last. As a maximum over the run, it also shows the signal of an entry that moved early and settled then.
            In 1000 steps of pure noise it stays below 2.7 in nine of ten runs; n steps in one direction make it
            :math:`\sqrt{n}`, so that an entry that reaches its optimum in five large steps has little. NaN in a run
            of fewer than ten outer steps.
        stopped: Why the run ended: ``"steps"``, ``"epochs"``, ``"patience"``, ``"time"``, ``"callback"``,
            ``"interrupted"``, ``"terminated"``, ``"diverged"`` or ``"failed"``.
        solver: The solver, to go on or to look closer.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        ...     hyper={"target": bilevel.real(0.0)},
        ... )
        >>> solution = bilevel.solve(problem, steps=5, warmup=0, progress=False)
        >>> solution.stopped, len(solution.history), sorted(solution.hyper), sorted(solution.state_dict)
        ('steps', 5, ['target'], ['w'])
    """

    hyper: dict[str, Tensor]
    params: dict[str, Tensor] = field(repr=False)
    state_dict: dict[str, Any] = field(repr=False)
    best: Best | None
    history: History = field(repr=False)
    signal: dict[str, Tensor] = field(repr=False)
    stopped: str
    solver: Solver = field(repr=False)

    @property
    def problem(self) -> Problem:
        """What was solved; for :func:`bilevel.tune`, what it made of its arguments."""
        return self.solver.problem

    def schedule(self, names: Sequence[str] | None = None) -> Schedule:
        """Every hyperparameter as a function of progress, to be saved as JSON and replayed without this library.

        Args:
            names: Of the hyperparameters; all by default.

        Returns:
            The schedule.
        """
        return schedule_of(self.history, self.problem.space.hyper, self.hyper, names)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the losses, the schedule of every hyperparameter in natural units, and their signal to noise.

        The warm-up is shaded, and the best round marked.

        Args:
            path: Save the figure there, if given.

        Returns:
            A matplotlib figure.

        Raises:
            ValueError: If the history is empty.
        """
        if not self.history:
            raise ValueError("there is nothing to plot: the run ended before its first round.")
        best = None if self.best is None else self.best.round
        return schedules(self.history, self.solver.problem.space.hyper, path, best=best)

    def report(self, path: str | Path, *, title: str = "") -> Path:
        """Write one HTML page of the run; ``python -m bilevel report`` shows more, from its log.

        Args:
            path: Where.
            title: Above it.

        Returns:
            The path.

        Raises:
            ValueError: If the history is empty.
        """
        if not self.history:
            raise ValueError("there is nothing to report: the run ended before its first round.")
        run = from_history(
            self.history,
            self.solver.problem.space.hyper,
            name=title or Path(path).stem,
            method=repr(self.solver.method),
            stopped=self.stopped,
            best=None if self.best is None else float(self.best.round),
        )
        replace(Path(path), page([run], title=title))
        return Path(path)


@dataclass(frozen=True)
class Round:
    """What a callback sees after every round.

    Attributes:
        solver: The solver.
        index: Counted from 1.
        history: What happened until now, also before a run that goes on was stopped. It grows with the run; change
            nothing in it.
        row: Its newest row.
        outer: The last outer step; None in the warm-up.
        validation_loss: Of the full validation pass, if there was one.
        inner_aux: What the inner loss last returned beside its value.

    Example:
        >>> def stop_when_good(round: Round) -> bool:
        ...     return round.validation_loss is not None and round.validation_loss < 0.1
        >>> stop_when_good.__annotations__["round"]
        'Round'
    """

    solver: Solver
    index: int
    history: History
    row: dict[str, float]
    outer: OuterStep | None
    validation_loss: float | None
    inner_aux: Any
