"""A callback that diagnoses a method during a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel import plotting
from bilevel.arguments import check_integer
from bilevel.diagnostics.diagnose import check_options, diagnose
from bilevel.diagnostics.diagnosis import Diagnosis
from bilevel.history import History
from bilevel.linear_solvers import LinearSolver
from bilevel.loop import Round

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Diagnose:
    """A callback that diagnoses the method every few rounds, always on the same batches.

    It does not change the run. Write ``bilevel.solve(..., callbacks=[Diagnose(every=10, train=batch, valid=batch)])``.

    Attributes:
        diagnoses: Every :class:`Diagnosis` so far.
        history: The rounds and the numbers of the diagnoses, named as in :meth:`Diagnosis.as_dict`.

    Example:
        >>> import torch
        >>> import bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        ...     hyper={"target": bilevel.real(0.0)},
        ... )
        >>> callback = Diagnose(every=2)
        >>> solution = bilevel.solve(problem, method="implicit_exact", steps=6, progress=False, callbacks=[callback])
        >>> callback.history["round"], callback.history["cosine"]
        (array([2., 4., 6.]), array([1., 1., 1.]))
    """

    def __init__(
        self,
        *,
        every: int = 10,
        train: Any = None,
        valid: Any = None,
        linear_solver: LinearSolver | None = None,
        curvature: str = "hessian",
        max_dense: int = 500,
        max_columns: int = 0,
    ) -> None:
        """Choose when, and on which batches.

        Args:
            every: Rounds from one diagnosis to the next.
            train: One batch for the inner loss.
            valid: One batch for the outer loss.
            linear_solver: As in :func:`diagnose`.
            curvature: As in :func:`diagnose`.
            max_dense: As in :func:`diagnose`.
            max_columns: As in :func:`diagnose`, but none by default.
        """
        check_integer("every", every, 1)
        check_options(train, valid, linear_solver, curvature, max_dense, max_columns)
        self.every = every
        self.diagnoses: list[Diagnosis] = []
        self.history = History()
        self._batches = (train, valid)
        self._options: dict[str, Any] = {
            "linear_solver": linear_solver,
            "curvature": curvature,
            "max_dense": max_dense,
            "max_columns": max_columns,
        }

    def __call__(self, event: Round) -> None:
        """Diagnose every few rounds.

        Args:
            event: The round that has ended.
        """
        if event.index % self.every:
            return
        found = diagnose(event.solver, *self._batches, **self._options)
        self.diagnoses.append(found)
        numbers = {name: value for name, value in found.as_dict().items() if isinstance(value, float)}
        self.history.append({"round": event.index, **numbers})

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw cosine, norm ratio and relative error over the rounds.

        Args:
            path: Save the figure there, if given.

        Returns:
            A matplotlib figure; it is not shown.

        Raises:
            ValueError: If there is no diagnosis yet.
        """
        if not self.history:
            raise ValueError(f"there is nothing to plot: no diagnosis yet, the first is made in round {self.every}.")
        ideals = {"cosine": 1.0, "norm_ratio": 1.0, "relative_error": 0.0}
        with plotting.style():
            figure, axes = plotting.panels(len(ideals))
            for axis, (quantity, ideal) in zip(axes, ideals.items(), strict=True):
                axis.axhline(ideal, color="0.6", linewidth=1)
                for label, prefix in (("response gradient", ""), ("hypergradient", "total."), ("weights", "jacobian.")):
                    values = self.history[prefix + quantity]
                    shown = np.where(np.isfinite(values), values, np.nan)
                    axis.plot(self.history["round"], shown, "o-", label=label)
                axis.set_ylabel(quantity.replace("_", " "))
                axis.legend()
            plotting.label_rounds(axes)
            if path is not None:
                figure.savefig(path)
        return figure
