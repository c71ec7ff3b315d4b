"""A full validation pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bilevel.arguments import check_loader
from bilevel.parallel import Group, Nothing, share
from bilevel.precision import own_precision
from bilevel.solver.finite import DivergenceError, NotFiniteWarning
from bilevel.solver.state import params
from bilevel.solver.together import order

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver

EMPTY = "loader is empty: a validation pass needs at least one batch."
UNCOUNTED = (
    "loader has several batches, and one of them has no tensor whose dimension 0 could count its examples, so that "
    "their losses cannot be weighted: set Problem(examples=...)."
)


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
    """  # noqa: DOC502
    check_loader("loader", loader)
    problem = solver.problem
    model = solver.response.inner.model(params(solver))
    losses, sizes, group = [], [], solver.group
    if group is not None:
        loader = share(loader, group, order(solver.seed, problem.device, solver.inner_steps, solver.outer_steps))
    with solver.streams["evaluation"](), own_precision(problem.device):
        for batch in [None] if loader is None else loader:
            if isinstance(batch, Nothing):
                continue
            moved = solver.to_device(batch)
            sizes.append(1 if loader is None else problem.examples(moved))
            losses.append(problem.outer_loss(model, solver.vector.detach(), moved).value.detach())
    if group is not None:
        return _of_all_processes(solver, group, losses, sizes, leave_out=leave_out)
    if not losses:
        raise ValueError(EMPTY)
    if None in sizes and len(sizes) > 1:
        raise ValueError(UNCOUNTED)
    weights = torch.tensor([size or 1 for size in sizes], dtype=torch.float64)
    values = torch.stack(losses).cpu().double()
    good = values.isfinite()
    if leave_out and good.any() and not good.all():
        _warn(int((~good).sum()), len(values), solver)
        values, weights = values[good], weights[good]
    return _checked(solver, float(values @ weights / weights.sum()))


def _of_all_processes(
    solver: Solver, group: Group, losses: list[Tensor], sizes: list[int | None], *, leave_out: bool
) -> float:
    """The same over the batches of all processes, each example once."""
    values = torch.stack(losses).cpu().double() if losses else torch.zeros(0, dtype=torch.float64)
    weights = torch.tensor([size or 1 for size in sizes], dtype=torch.float64)
    good = values.isfinite()
    sums = [(values @ weights), weights.sum(), values[good] @ weights[good], weights[good].sum(), (~good).sum()]
    uncounted = float(None in sizes)
    both, all_weights, kept, kept_weights, bad, batches, unknown = group.total([
        *map(float, sums),
        float(len(values)),
        uncounted,
    ])
    if not batches:
        raise ValueError(EMPTY)
    if unknown and batches > 1:
        raise ValueError(UNCOUNTED)
    if leave_out and kept_weights and bad:
        if group.main:
            _warn(int(bad), int(batches), solver)
        return _checked(solver, kept / kept_weights)
    return _checked(solver, both / all_weights)


def _warn(bad: int, batches: int, solver: Solver) -> None:
    warnings.warn(
        f"the outer loss of {bad} of {batches} batches is not finite after {solver.inner_steps} inner steps; they were "
        "left out of the validation loss.",
        NotFiniteWarning,
        stacklevel=4,
    )


def _checked(solver: Solver, mean: float) -> float:
    if not math.isfinite(mean):
        solver.check()  # if the state is the cause, that returns to a good one
        raise DivergenceError(
            f"the outer loss over the whole set is {mean} after {solver.inner_steps} inner steps: lower the learning "
            "rates, or look for overflow in outer_loss."
        )
    return mean
