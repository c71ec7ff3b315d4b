"""Checks: losses that no method can use are reported, with a message that helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bilevel.problem import Model, Problem
from bilevel.solver import DivergenceError
from bilevel.testing.assertions import expect, same
from bilevel.testing.case import Case
from bilevel.testing.probes import train_batches
from bilevel.testing.registry import check


def _expect_divergence(case: Case, broken: str, words: list[str]) -> None:
    """A NaN in one of the losses raises an error, and the solver stays as it was after the last good step."""

    def scaled(problem: Problem, name: str) -> Any:
        loss = problem.user_losses[name]
        return lambda model, hyper, batch: loss(model, hyper, batch) * batch

    plain = case.quadratic()
    solver = case.solver(case.quadratic(**{name: scaled(plain, name) for name in ("inner_loss", "outer_loss")}))
    good = torch.ones((), dtype=torch.float64, device=case.device)
    bad = {name: good * float("nan") if name == broken else good for name in ("inner_loss", "outer_loss")}
    for _ in range(2):
        solver.inner_step(good)
        solver.outer_step(train_batches(solver, good), good)
    before = solver.state_dict()
    try:
        if broken == "inner_loss":
            solver.inner_step(bad["inner_loss"])
        solver.outer_step(train_batches(solver, good), bad["outer_loss"])
    except DivergenceError as error:
        expect(all(word in str(error) for word in words), f"the message lacks one of {words}: {error}")
    else:
        raise AssertionError("a NaN loss was passed on")
    expect(same(before, solver.state_dict()), "the failed step changed the solver")


@check
def _nan_in_the_inner_loss_is_reported(case: Case) -> None:
    _expect_divergence(case, "inner_loss", ["inner loss", "nan", "inner step"])


@check
def _nan_in_the_outer_loss_is_reported(case: Case) -> None:
    _expect_divergence(case, "outer_loss", ["outer loss", "nan", "outer step"])


def _expect_refusal(case: Case, broken: str) -> None:
    """A constant in place of one of the losses raises an error that names the loss."""

    def loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
        return torch.ones((), dtype=torch.float64, device=case.device)

    solver = case.solver(case.quadratic(**{broken: loss}))
    try:
        solver.inner_step()
        solver.outer_step()
    except ValueError as error:
        expect(broken in str(error), f"the message does not name {broken}: {error}")
    else:
        raise AssertionError(f"an {broken} that depends on nothing was accepted")


@check
def _inner_loss_without_weights_is_refused(case: Case) -> None:
    _expect_refusal(case, "inner_loss")


@check
def _outer_loss_without_variables_is_refused(case: Case) -> None:
    _expect_refusal(case, "outer_loss")
