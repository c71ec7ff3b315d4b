"""Checks: what an inner step, an outer step and a whole run do."""

from __future__ import annotations

from typing import Any

import torch

from bilevel.loop import solve
from bilevel.testing.assertions import expect, expect_close
from bilevel.testing.case import Case, quadratic_parts, sgd
from bilevel.testing.probes import outer_noise, train_batches
from bilevel.testing.registry import check


@check
def _hypergradient_is_direct_plus_response(case: Case) -> None:
    solver = case.trained()
    c = quadratic_parts()[2].to(case.device)
    noise, center = outer_noise(solver), solver.vector.detach().clone()
    with torch.no_grad():
        w = solver.response(center + noise, train_batches(solver), center).params["w"]
    response = solver.response.vjp(center, {"w": w - c}, train_batches(solver))
    step = solver.outer_step()
    expect_close(step.hypergradient, step.direct + response)


@check
def _direct_gradient_has_its_closed_form(case: Case) -> None:
    solver = case.trained()
    expected = 2 * (solver.vector.detach() + outer_noise(solver))
    expect_close(solver.outer_step().direct, expected)


@check
def _direct_gradient_is_zero_without_dependence(case: Case) -> None:
    solver = case.trained_network()
    expect(
        not solver.outer_step(train_batches(solver, case.batch()), case.batch()).direct.any(),
        "the outer loss does not depend on λ directly",
    )


@check
def _hypergradient_is_flat_and_keeps_dtype(case: Case) -> None:
    solver = case.trained()
    step = solver.outer_step()
    expect(step.hypergradient.shape == solver.vector.shape, "shape differs from the vector of hyperparameters")
    expect(step.hypergradient.dtype == torch.float64, "dtype changed")


@check
def _outer_step_follows_its_optimizer(case: Case) -> None:
    solver = case.trained()
    before = solver.vector.detach().clone()
    step = solver.outer_step()
    expect_close(solver.vector.detach(), before - 0.1 * step.hypergradient)


@check
def _outer_step_clips_to_its_limit(case: Case) -> None:
    solver = case.solver(case.quadratic(), outer_clip=1e-3)
    solver.inner_step()
    before = solver.vector.detach().clone()
    solver.outer_step()
    expect(
        float((solver.vector.detach() - before).norm()) <= 0.1 * 1e-3 * 1.001, "the step is longer than clipping allows"
    )


@check
def _outer_step_counts(case: Case) -> None:
    solver = case.trained(2)
    solver.outer_step()
    expect((solver.inner_steps, solver.outer_steps) == (2 + solver.response.unrolled_steps, 1), "steps are not counted")


@check
def _inner_step_returns_the_loss(case: Case) -> None:
    loss = case.solver(case.quadratic()).inner_step()
    expect(loss.ndim == 0 and not loss.requires_grad and bool(loss.isfinite()), "the loss must be a detached scalar")


@check
def _inner_steps_reduce_the_inner_loss(case: Case) -> None:
    solver = case.trained(0)
    problem = solver.problem
    before = problem.inner_loss(solver.response.inner.model(solver.params), solver.vector.detach(), None).value
    for _ in range(200):
        solver.inner_step()
    after = problem.inner_loss(solver.response.inner.model(solver.params), solver.vector.detach(), None).value
    expect(float(after) < float(before), f"the inner loss went from {float(before):g} to {float(after):g}")


@check
def _inner_step_leaves_the_hyperparameters(case: Case) -> None:
    solver = case.solver(case.quadratic())
    before = solver.vector.detach().clone()
    solver.inner_step()
    expect(torch.equal(before, solver.vector), "an inner step moved the hyperparameters")


@check
def _inner_step_trains_every_weight(case: Case) -> None:
    solver = case.trained_network(0)
    before = solver.params
    for _ in range(2):
        solver.inner_step(case.batch())
    expect(not any(torch.equal(before[name], value) for name, value in solver.params.items()), "a weight did not move")


@check
def _no_gradient_is_left_behind(case: Case) -> None:
    solver = case.trained(1)
    solver.outer_step()
    left = [p for p in [*solver.response.parameters(), solver.vector] if p.grad is not None]
    expect(not left, "parameters keep their .grad after a step")


@check
def _solve_lowers_the_outer_loss(case: Case) -> None:
    start = case.solver(case.quadratic())
    method = case.method_for(start.problem)
    settings: dict[str, Any] = {"method": method, "inner_optimizer": sgd, "progress": False}
    for _ in range(60):
        start.inner_step()
    solution = solve(case.quadratic(), steps=60, warmup=20, **settings)
    expect(solution.solver.evaluate() < start.evaluate(), "tuning did not lower the outer loss")
