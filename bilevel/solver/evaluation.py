"""A full validation pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from bilevel.arguments import check_loader
from bilevel.precision import own_precision
from bilevel.solver.finite import DivergenceError, NotFiniteWarning

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver


def mean_outer_loss(solver: Solver, loader: Iterable[Any] | None, *, leave_out: bool) -> float:
    """The outer loss over a whole set, as :meth:`Solver.evaluate` documents it.

    Args:
        solver: Whose weights to use.
        loader: Batches.
        leave_out: Leave out batches whose loss is not finite, with a warning, unless that is all of them.

    Returns:
        The mean loss.

    Raises:
        DivergenceError: If it is not finite.
        ValueError: If there is no batch.
    """
    check_loader("loader", loader)
    problem = solver.problem
    model = solver.response.inner.model(solver.params)
    losses, sizes = [], []
    with solver.streams["evaluation"](), own_precision(problem.device):
        for batch in [None] if loader is None else loader:
            moved = solver.to_device(batch)
            sizes.append(problem.examples(moved))
            losses.append(problem.outer_loss(model, solver.vector.detach(), moved).value.detach())
    if not losses:
        raise ValueError("loader is empty: a validation pass needs at least one batch.")
    if None in sizes and len(sizes) > 1:
        raise ValueError(
            "loader has several batches, and one of them has no tensor whose dimension 0 could count its examples, so "
            "that their losses cannot be weighted: set Problem(examples=...)."
        )
    weights = torch.tensor([size or 1 for size in sizes], dtype=torch.float64)
    values = torch.stack(losses).cpu().double()
    good = values.isfinite()
    if leave_out and good.any() and not good.all():
        warnings.warn(
            f"the outer loss of {int((~good).sum())} of {len(values)} batches is not finite after {solver.inner_steps} "
            "inner steps; they were left out of the validation loss.",
            NotFiniteWarning,
            stacklevel=3,
        )
        values, weights = values[good], weights[good]
    mean = float(values @ weights / weights.sum())
    if not math.isfinite(mean):
        solver.check()  # if the state is the cause, that returns to a good one
        raise DivergenceError(
            f"the outer loss over the whole set is {mean} after {solver.inner_steps} inner steps: lower the learning "
            "rates, or look for overflow in outer_loss."
        )
    return mean
