"""Derivatives of the gradient in the hyperparameters, which implicit and unrolled methods need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bilevel.problem import Problem

if TYPE_CHECKING:
    from bilevel.response.curvature import Curvature


def check_continuous(problem: Problem, family: str) -> None:
    """Refuse integers.

    Raises:
        ValueError: If a hyperparameter is an integer.
    """
    for name, entry in problem.space.hyper.items():
        if entry.discrete:
            raise ValueError(_misfit(family, name, "it is an integer, which has no derivative"))


def check_dependence(curvature: Curvature, problem: Problem, family: str, *, start: bool = False) -> None:
    """Refuse a loss without second derivatives, and hyperparameters on which training does not depend.

    Args:
        curvature: Of the inner loss, on the first batch.
        problem: The problem.
        family: What to call the method in a message.
        start: Whether the method also differentiates the start of the training, ``Problem(initial=...)``.

    Raises:
        ValueError: If training does not depend on a hyperparameter in a way that the method differentiates.
    """
    moved = problem.decays.names
    ones = torch.ones(sum(weight.numel() for weight in curvature.weights)).to(curvature.weights[0])
    curvature.product(ones)
    begun = _starts(problem, curvature)
    for name, part in curvature.cross_parts(ones).items():
        if part is not None or name in moved or (start and name in begun):
            continue
        if name in begun:
            raise ValueError(
                f"{family} cannot tune hyper[{name!r}]: training depends on it through initial only. Of all methods, "
                "only Unrolled(restart=True) without truncate differentiates that."
            )
        raise ValueError(
            _misfit(
                family,
                name,
                "the gradient of inner_loss has no derivative in it (as with a random mask) on the first batch. A "
                "hyperparameter that only outer_loss reads is refused for the same reason",
            )
        )


def _starts(problem: Problem, curvature: Curvature) -> set[str]:
    """The hyperparameters on which the start of the training depends."""
    with torch.enable_grad():
        weights = problem.start(problem.space.natural(curvature.hyper)).values()
    live = [weight for weight in weights if weight.requires_grad]
    if not live:
        return set()
    ones = [torch.ones_like(weight) for weight in live]
    slopes = torch.autograd.grad(live, [*curvature.hyper.values()], ones, allow_unused=True)
    return {name for name, slope in zip(curvature.hyper, slopes, strict=True) if slope is not None}


def _misfit(family: str, name: str, why: str) -> str:
    return (
        f"{family} cannot tune hyper[{name!r}]: {why}. Methods that learn their response from perturbed losses can: "
        "delta_stn, centered_stn, stn."
    )
