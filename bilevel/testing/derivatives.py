"""Checks: the Jacobian of the response, by columns (jvp), by rows (vjp) and as a matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bilevel.testing.assertions import expect, expect_close, same
from bilevel.testing.case import Case, quadratic_parts
from bilevel.testing.probes import codirections, directions, flat, jacobian_of, jvp_of, train_batches, vjp_of
from bilevel.testing.registry import check

# A method that solves a linear system approximately is linear only up to the tolerance of the solver.
SOLVED = 1e-5


@check
def _jvp_has_the_names_and_shapes_of_the_weights(case: Case) -> None:
    solver = case.trained_network()
    tangent = solver.response.jvp(solver.vector, directions(solver)[0], train_batches(solver, case.batch()))
    expect({n: t.shape for n, t in tangent.items()} == {n: w.shape for n, w in solver.params.items()}, "shapes differ")


@check
def _jvp_is_linear(case: Case) -> None:
    solver = case.trained()
    u, v = directions(solver)
    parts = [flat(jvp_of(solver, direction)) for direction in (u, v, 2 * u - 3 * v)]
    expect_close(parts[2], 2 * parts[0] - 3 * parts[1], SOLVED)


@check
def _vjp_is_linear(case: Case) -> None:
    solver = case.trained()
    u, v = codirections(solver)
    mixed = {name: 2 * u[name] - 3 * v[name] for name in u}
    parts = [vjp_of(solver, direction) for direction in (u, v, mixed)]
    expect_close(parts[2], 2 * parts[0] - 3 * parts[1], SOLVED)


@check
def _vjp_has_the_shape_of_the_hyperparameters(case: Case) -> None:
    solver = case.trained_network()
    expect(
        solver.response.vjp(solver.vector, solver.params, train_batches(solver, case.batch())).shape
        == solver.vector.shape,
        "shape differs",
    )


@check
def _jvp_and_vjp_are_adjoint(case: Case) -> None:
    solver = case.trained()
    v, u = directions(solver)[0], codirections(solver)[0]
    forward = flat(jvp_of(solver, v)) @ flat(u)
    expect_close(forward, vjp_of(solver, u) @ v, SOLVED)


@check
def _jacobian_columns_are_jvps(case: Case) -> None:
    solver = case.trained()
    v = directions(solver)[0]
    expect_close(
        jacobian_of(solver) @ v,
        flat(jvp_of(solver, v)),
        SOLVED,
    )


@check
def _jacobian_rows_are_vjps(case: Case) -> None:
    solver = case.trained()
    u = codirections(solver)[0]
    expect_close(
        jacobian_of(solver).T @ flat(u),
        vjp_of(solver, u),
        SOLVED,
    )


@check
def _jacobian_has_a_row_per_weight(case: Case) -> None:
    solver = case.trained()
    expect(
        jacobian_of(solver).shape == (3, 2),
        "the shape must be (weights, hyperparameters)",
    )


@check
def _jacobian_is_finite_and_not_zero(case: Case) -> None:
    solver = case.trained()
    jacobian = jacobian_of(solver)
    expect(bool(jacobian.isfinite().all()) and bool(jacobian.any()), "the response has no derivative")


@check
def _jacobian_points_the_right_way(case: Case) -> None:
    a, b, _ = (part.to(case.device) for part in quadratic_parts())
    solver = case.trained(200)
    exact, ours = -torch.linalg.solve(a, b).flatten(), jacobian_of(solver).flatten()
    cosine = F.cosine_similarity(exact, ours, dim=0)
    expect(float(cosine) > 0.5, f"cosine {float(cosine):.2f} with the implicit function theorem on a quadratic")


@check
def _derivatives_leave_the_state_alone(case: Case) -> None:
    solver = case.trained()
    before = solver.state_dict()
    jacobian_of(solver)
    vjp_of(solver, solver.params)
    expect(same(before, solver.state_dict()), "jvp or vjp changed the solver")


@check
def _autograd_through_forward_is_the_vjp(case: Case) -> None:
    solver = case.trained()
    leaf = solver.vector.detach().clone().requires_grad_()
    u = codirections(solver)[0]
    (gradient,) = torch.autograd.grad(flat(solver.response(leaf, train_batches(solver)).params) @ flat(u), leaf)
    expect_close(gradient, vjp_of(solver, u))
