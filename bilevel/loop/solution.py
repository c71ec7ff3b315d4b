"""What :func:`bilevel.solve` returns, and what its callbacks see."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bilevel.history import History, plot
from bilevel.hyper import Space
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
    """

    round: int
    validation_loss: float
    inner_loss: float
    hyper: dict[str, Tensor]
    params: dict[str, Tensor] = field(repr=False)
    state_dict: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Solution:
    """The result of :func:`solve`.

    Attributes:
        hyper: The final hyperparameters in natural units.
        params: The weights at the final hyperparameters, by name.
        state_dict: The same with buffers, tied and frozen parameters: loads strictly into the user's module.
        best: The same at the best full validation pass; None if the run ended before the first one.
        history: Losses, hyperparameters, hypergradient norm, scale and time, one row per outer step.
        stopped: Why the run ended: ``"steps"``, ``"epochs"``, ``"patience"``, ``"time"``, ``"callback"``,
            ``"interrupted"`` or ``"diverged"``.
        solver: The solver, to go on or to look closer.
    """

    hyper: dict[str, Tensor]
    params: dict[str, Tensor] = field(repr=False)
    state_dict: dict[str, Any] = field(repr=False)
    best: Best | None
    history: History = field(repr=False)
    stopped: str
    solver: Solver = field(repr=False)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw losses and hyperparameter schedules in natural units.

        Args:
            path: Save the figure there, if given.

        Returns:
            A matplotlib figure.

        Raises:
            ValueError: If the history is empty.
        """
        if not self.history:
            raise ValueError("there is nothing to plot: the run ended before its first round.")
        columns = {name: list(Space.columns({name: value})) for name, value in self.hyper.items()}
        return plot(self.history, columns, path)


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
    """

    solver: Solver
    index: int
    history: History
    row: dict[str, float]
    outer: OuterStep | None
    validation_loss: float | None
    inner_aux: Any
