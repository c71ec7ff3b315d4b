"""The comparison with a converged linear solve: known answers, what it says, and what it leaves alone."""

import builtins
import math
import warnings
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from examples import assert_same, batches, drive, make_problem, make_solver, network, solve
from problems import dense, double, make_quadratic, set_response, sgd
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import bilevel
from bilevel.diagnostics import Comparison, Diagnose, Diagnosis, diagnose

BATCH, OTHER, *_ = batches()
LEARNED = ["stn", "centered_stn", "delta_stn"]
EVERY_METHOD = sorted(bilevel.METHODS)


def at_solution(case, method="delta_stn", factor=1.0):
    """A solver at the inner solution of a quadratic, with the exact Jacobian times a factor as its response."""
    solver = bilevel.Solver(case.problem(), method=dense(method))
    set_response(solver.response, solver.vector.detach(), case.solution(case.hyper), factor * case.jacobian())
    return solver


def toy(hessian, *, weights, cross=None, outer=None, method="implicit_exact", slope=None, dtype=torch.float64):
    """½ wᵀHw + wᵀBλ inside, cᵀw outside."""
    hessian = torch.as_tensor(hessian, dtype=dtype)
    m = len(hessian)
    cross = torch.eye(m, dtype=dtype) if cross is None else torch.as_tensor(cross, dtype=dtype)
    outer = torch.ones(m, dtype=dtype) if outer is None else torch.as_tensor(outer, dtype=dtype)
    problem = bilevel.Problem(
        {"w": torch.as_tensor(weights, dtype=dtype)},
        inner_loss=lambda model, hyper, batch: (
            model.params["w"] @ hessian @ model.params["w"] / 2 + model.params["w"] @ cross @ hyper["x"].to(dtype)
        ),
        outer_loss=lambda model, hyper, batch: outer @ model.params["w"],
        hyper={"x": bilevel.real(torch.zeros(cross.shape[1]))},
    )
    solver = bilevel.Solver(problem, method=method)
    if slope is not None:
        solver.response.theta.load_state_dict({"slopes.0": torch.as_tensor(slope, dtype=dtype).T})
    return solver


def rows(found):
    """Every comparison of a diagnosis."""
    return [
        Comparison(found.cosine, found.norm_ratio, found.relative_error),
        found.jacobian,
        *found.columns.values(),
    ]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_unrolled_steps_are_as_far_from_the_limit_as_they_must_be(mode):
    """K steps of learning rate r on a Hessian a give the share 1 - (1 - ra)^K of the derivative."""
    solver = toy([[2.0]], weights=[0.0], method=bilevel.Unrolled(steps=3, mode=mode))
    solver = bilevel.Solver(
        solver.problem, method=solver.method, inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    found = diagnose(solver)
    assert found.norm_ratio == pytest.approx(1 - 0.8**3, abs=1e-12)
    assert found.jacobian.norm_ratio == pytest.approx(1 - 0.8**3, abs=1e-12)
    assert found.cosine == pytest.approx(1.0, abs=1e-12)
    assert str(diagnose(solver, [None] * 3)) == str(found)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("method", [*LEARNED, "implicit_exact"])
def test_an_exact_response_has_no_error(method, network, seed):
    case = make_quadratic(4, 3, seed, network)
    found = diagnose(at_solution(case, method))
    for row in [*rows(found), found.total]:
        assert row == pytest.approx((1.0, 1.0, 0.0), abs=1e-9)
    assert list(found.columns) == ["x[0]", "x[1]", "x[2]"]
    assert found.inner_distance < 1e-9
    assert found.inner_gradient < 1e-9
    assert found.residual < 1e-12
    values = torch.linalg.eigvalsh(case.A)
    assert found.smallest_curvature == pytest.approx(values[0].item())
    assert found.largest_curvature == pytest.approx(values[-1].item())
    assert "agrees with the reference" in found.meaning
    assert "not solved" not in found.meaning


@pytest.mark.parametrize("method", LEARNED)
@pytest.mark.parametrize(
    ("factor", "expected", "said"),
    [
        (2.0, (1.0, 2.0, 1.0), "points the right way (cosine 1.000) but is 2 times too long"),
        (0.7, (1.0, 0.7, 0.3), "30 % too short: fine for adaptive"),
        (1.05, (1.0, 1.05, 0.05), "points the right way (cosine 1.000) and has the right length to 5.0 %"),
        (-1.0, (-1.0, 1.0, 2.0), "points the wrong way (cosine -1.000)"),
        (-0.1, (-1.0, 0.1, 1.1), "points the wrong way"),
        (1e-4, (1.0, 1e-4, 0.9999), "1e+04 times too short"),
    ],
)
def test_a_scaled_response_has_that_norm_ratio_and_error(method, factor, expected, said):
    case = make_quadratic(4, 3, 0, False)
    found = diagnose(at_solution(case, method, factor))
    for row in rows(found):
        assert row == pytest.approx(expected, rel=1e-9)
    assert said in found.meaning


def test_the_whole_hypergradient_includes_the_direct_part():
    case = make_quadratic(4, 3, 0, False)
    hyper, weights = case.hyper, case.solution(case.hyper)
    response, direct = case.jacobian().T @ case.outer_slope(hyper, weights), case.direct(hyper, weights)
    found = diagnose(at_solution(case, factor=-1.0))
    a, b = direct - response, direct + response
    assert found.total.cosine == pytest.approx(F.cosine_similarity(a, b, dim=0).item())
    assert found.total.norm_ratio == pytest.approx((a.norm() / b.norm()).item())
    assert found.total.relative_error == pytest.approx(((a - b).norm() / b.norm()).item())
    assert found.meaning.startswith("The response part of the hypergradient points the wrong way")


@pytest.mark.parametrize("method", LEARNED)
def test_the_hypergradient_is_the_one_of_the_outer_step(method):
    """At random slopes and weights: the method's numbers are those it would step along."""
    case = make_quadratic(4, 3, 5, True)
    solver = bilevel.Solver(case.problem(), method=dense(method))
    set_response(solver.response, solver.vector.detach(), case.weights, case.theta)
    found = diagnose(solver)
    step = solver.outer_step()
    ours = step.hypergradient - step.direct
    exact = case.jacobian().T @ case.outer_slope(case.hyper, case.weights)
    assert found.cosine == pytest.approx(F.cosine_similarity(ours, exact, dim=0).item())
    assert found.relative_error == pytest.approx(((ours - exact).norm() / exact.norm()).item())
    along = exact + step.direct
    a, b = case.theta @ along, case.jacobian() @ along
    assert found.jacobian.cosine == pytest.approx(F.cosine_similarity(a, b, dim=0).item())


def test_the_sentence_grades_the_direction():
    right = torch.eye(2, dtype=torch.float64)
    for turn, said in [
        (1.0, "roughly the right way (cosine 0.707)"),
        (3.0, "only vaguely the right way (cosine 0.316)"),
    ]:
        rotation = right + turn * double([[0.0, 1.0], [-1.0, 0.0]])
        found = diagnose(toy(right, weights=[0.0, 0.0], method="delta_stn", slope=-rotation, outer=[1.0, 0.0]))
        assert said in found.meaning
        assert "Train the response longer" in found.meaning


def test_one_hyperparameter_has_a_sign_rather_than_a_direction():
    for slope, said in [(-0.5, "has the right sign but is 50 % too short"), (0.5, "has the wrong sign")]:
        found = diagnose(toy([[1.0]], weights=[0.0], method="delta_stn", slope=[[slope]]))
        assert said in found.meaning


def test_a_direct_part_that_outweighs_a_wrong_response_is_mentioned():
    case = replace(make_quadratic(3, 2, 0, False), t=1e3 * torch.ones(2, dtype=torch.float64))
    found = diagnose(at_solution(case, factor=-1.0))
    assert found.cosine == pytest.approx(-1.0)
    assert "Its direct part outweighs that: the whole hypergradient has cosine 1.000" in found.meaning


def test_a_response_that_is_still_zero():
    found = diagnose(make_solver(method="delta_stn"), BATCH, OTHER)
    assert math.isnan(found.cosine)
    assert (found.norm_ratio, found.relative_error) == (0.0, 1.0)
    assert "no response has been learned" in found.meaning
    assert "warmup" in found.meaning


def test_an_inner_problem_that_is_not_solved():
    case = make_quadratic(4, 3, 0, False)
    solver = at_solution(case)
    shift = double([1.0, 0.0, 0.0, 0.0])
    solution = case.solution(case.hyper)
    set_response(solver.response, solver.vector.detach(), solution + shift, case.jacobian())
    found = diagnose(solver)
    size = (solution + shift).norm()
    assert found.inner_distance == pytest.approx((1 / size).item())
    assert found.inner_gradient == pytest.approx(((case.A @ shift).norm() / size).item())
    assert f"not solved on this batch: a Newton step would move the weights by {100 / size:.0f} %" in found.meaning
    assert "agrees with the reference" in found.meaning


def test_weights_of_zero_that_solve_the_inner_problem():
    assert "not solved" not in diagnose(toy([[2.0, 0.0], [0.0, 1.0]], weights=[0.0, 0.0])).meaning
    assert diagnose(toy([[2.0]], weights=[1.0])).inner_distance == pytest.approx(1.0)
    tiny = diagnose(toy([[2.0]], weights=[1e-12]))
    assert tiny.inner_distance == pytest.approx(1.0)
    assert "not solved" not in tiny.meaning


@pytest.mark.parametrize("max_dense", [500, 0])
def test_negative_curvature_is_reported_and_survived(max_dense):
    hessian = [[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, -0.3]]
    solver = toy(hessian, weights=[0.0, 0.0, 0.0])
    found = diagnose(solver, max_dense=max_dense)
    assert (found.cosine, found.norm_ratio) == pytest.approx((1.0, 1.0))
    assert found.relative_error < 1e-9
    assert (found.smallest_curvature, found.largest_curvature) == pytest.approx((-0.3, 2.0))
    assert "negative curvature -0.3 (the largest is 2)" in found.meaning
    assert "gauss_newton" in found.meaning
    if max_dense:
        assert found.reference == "Exact on the Hessian"
    else:
        assert found.reference == "MINRES on the Hessian"
        assert "The reference is MINRES on the Hessian, since this did not do: CG: the curvature" in found.meaning


@pytest.mark.parametrize("max_dense", [500, 0])
def test_a_singular_hessian(max_dense):
    """Where the outer gradient is in its range there is an answer; elsewhere only a damped one."""
    hessian = [[2.0, 0.0], [0.0, 0.0]]
    inside = toy(hessian, weights=[0.0, 0.0], outer=[1.0, 0.0], method="delta_stn", slope=[[-0.5, 0.0], [0.0, 0.0]])
    found = diagnose(inside, max_dense=max_dense)
    assert found.relative_error < 1e-9
    assert found.residual < 1e-9
    if max_dense:
        assert "since this did not do: Exact: the matrix is singular" in found.meaning
    outside = toy(hessian, weights=[0.0, 0.0], method="delta_stn", slope=[[-0.5, 0.0], [0.0, 0.0]])
    found = diagnose(outside, max_dense=max_dense)
    assert found.reference == "MINRES on the Hessian with damping 2.0e-04"
    assert "singular" in found.meaning
    assert found.residual < 1e-9


def test_a_reference_that_cannot_be_solved_leaves_nan_and_says_why():
    flat = toy([[0.0]], weights=[0.0], method="delta_stn", slope=[[1.0]])
    found = diagnose(flat)
    assert all(math.isnan(number) for row in rows(found) for number in row)
    assert "There is no reference to compare with: MINRES: the matrix is singular" in found.meaning
    own = diagnose(toy([[1.0, 0.0], [0.0, -1.0]], weights=[0.0, 0.0]), linear_solver=bilevel.CG())
    assert math.isnan(own.cosine)
    assert "There is no reference to compare with: CG: the curvature" in own.meaning


def test_a_method_whose_own_solve_fails():
    method = bilevel.Implicit(bilevel.CG())
    found = diagnose(toy([[1.0, 0.0], [0.0, -1.0]], weights=[0.0, 0.0], method=method))
    assert math.isnan(found.cosine)
    assert "The method cannot compute its hypergradient here: CG: the curvature" in found.meaning
    assert found.residual < 1e-9


def test_a_reference_that_is_not_converged_is_not_to_be_relied_on():
    solver = toy(torch.diag(double([1.0, 10.0, 100.0])), weights=[0.0] * 3)
    found = diagnose(solver, linear_solver=bilevel.CG(max_steps=1))
    assert found.residual > 0.1
    assert found.meaning.startswith("The reference is not converged (residual")


def test_a_truncated_solve_of_the_method_is_seen_and_does_not_warn():
    method = bilevel.Implicit(bilevel.CG(max_steps=1))
    solver = toy(torch.diag(double([1.0, 10.0, 100.0])), weights=[0.0] * 3, method=method)
    found = diagnose(solver)
    assert 0.1 < found.relative_error < 1
    assert found.method == "Implicit(CG, hessian)"
    assert "Let the linear solver of the method come closer" in found.meaning


def test_a_method_with_another_matrix_than_the_reference():
    solver = make_solver(method=bilevel.Implicit(bilevel.Exact(), curvature="gauss_newton"))
    drive(solver, 2)
    on_hessian = diagnose(solver, BATCH, OTHER)
    assert on_hessian.relative_error > 1e-2
    same = diagnose(solver, BATCH, OTHER, curvature="gauss_newton")
    assert same.relative_error < 1e-3
    assert same.reference == "Exact on the Gauss-Newton matrix"
    assert same.smallest_curvature == on_hessian.smallest_curvature


def test_the_wrong_matrix_is_named_as_a_cause():
    """Gauss-Newton and Hessian of (w² − 1)² / 2 differ in sign at w = ½: 1 against −½."""

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(double([0.5]))

        def forward(self):
            return self.w.square()

    problem = bilevel.Problem(
        Square(),
        inner_loss=lambda model, hyper, batch: ((model() - 1).square() / 2 + hyper["x"] * model.params["w"]).sum(),
        outer_loss=lambda model, hyper, batch: model.params["w"].sum(),
        hyper={"x": bilevel.real(0.0)},
    )
    solver = bilevel.Solver(problem, method=bilevel.Implicit(bilevel.Exact(), curvature="gauss_newton"))
    found = diagnose(solver)
    assert found.cosine == -1.0
    assert found.norm_ratio == pytest.approx(0.5)
    assert found.smallest_curvature == pytest.approx(-0.5)
    assert "The method uses the Gauss-Newton matrix, unlike the reference: curvature='gauss_newton'" in found.meaning
    assert "agrees" in diagnose(solver, curvature="gauss_newton").meaning


@pytest.mark.parametrize("method", [*LEARNED, "implicit_exact"])
def test_large_problems_get_the_answer_of_small_ones(method):
    """By conjugate gradients and Lanczos instead of a dense matrix, on a network near its minimum."""
    net = network(nn.Dropout(0.5)).double()
    problem = make_problem(net, hyper={"decay": bilevel.positive(1.0)})
    data = tuple(part.double() for part in BATCH)
    solver = bilevel.Solver(problem, method=method, inner_optimizer=sgd(0.05))
    for _ in range(100):
        solver.inner_step(data)
    dense, sparse = (diagnose(solver, data, data, max_dense=size) for size in (500, 0))
    assert dense.reference == "Exact on the Hessian"
    if method != "stn":  # which ends where the Hessian is indefinite
        assert sparse.reference == "CG on the Hessian"
    for name, value in dense.as_dict().items():
        if isinstance(value, float):
            assert sparse.as_dict()[name] == pytest.approx(value, rel=1e-6, abs=1e-8), name
    assert dense.relative_error < 1e-9 or method in LEARNED


def test_lanczos_on_many_weights():
    values = torch.linspace(1.0, 50.0, 700, dtype=torch.float64)
    values[300] = 200.0
    problem = bilevel.Problem(
        {"w": torch.zeros(700, dtype=torch.float64)},
        inner_loss=lambda model, hyper, batch: (
            (values * model.params["w"].square()).sum() / 2 - hyper["x"] * model.params["w"].sum()
        ),
        outer_loss=lambda model, hyper, batch: model.params["w"].sum(),
        hyper={"x": bilevel.real(0.0)},
    )
    solver = bilevel.Solver(problem, method="delta_stn")
    solver.response.theta.load_state_dict({"slopes.0": (1 / values)[None]})
    found = diagnose(solver)
    assert found.reference == "CG on the Hessian"
    assert found.relative_error < 1e-8
    assert found.largest_curvature == pytest.approx(200.0, rel=1e-9)
    assert 1.0 <= found.smallest_curvature < 1.1


class Rich(nn.Module):
    """BatchNorm, dropout of a fixed rate, and dropout of a rate that is given."""

    def __init__(self):
        super().__init__()
        self.body = network(nn.BatchNorm1d(4), nn.Dropout(0.3))

    def forward(self, x, rate):
        return self.body(bilevel.functional.dropout(x, rate, training=self.training))


def masked(model, hyper, batch):
    """Depends on its rate through a mask, without a derivative."""
    return F.mse_loss(model(batch[0], hyper["rate"]), batch[1])


def decayed(model, hyper, batch):
    return masked(model, hyper, batch) + (hyper["decay"] * bilevel.l2(model.params)).sum()


def smooth(model, hyper, batch):
    """Depends on everything differentiably."""
    return decayed(model, hyper, batch) + hyper["rate"] * bilevel.l2(model.params)


RATE, DECAY = {"rate": bilevel.interval(0, 1, 0.2)}, {"decay": bilevel.positive([0.1, 0.2])}


def rich_problem(inner_loss, hyper, dtype=torch.float32, outer_loss=masked):
    return bilevel.Problem(Rich().to(dtype), inner_loss=inner_loss, outer_loss=outer_loss, hyper=hyper)


def everything(solver):
    """All that a diagnosis must leave alone."""
    return [
        solver.state_dict(),
        solver.problem.state_dict({}, {}),
        {name: value.clone() for name, value in solver.response.report.items()},
        torch.get_rng_state(),
        [module.training for module in ([] if solver.problem.module is None else solver.problem.module.modules())],
        [param.grad for param in solver.response.parameters()],
        [int(number) for number in np.random.get_state()[1]],
    ]


@pytest.mark.parametrize(
    ("method", "curvature"),
    [
        *[(method, "hessian") for method in [*EVERY_METHOD, "learned scale"]],
        ("delta_stn", "gauss_newton"),
        ("implicit_cg", "gauss_newton"),
    ],
)
def test_nothing_is_changed_and_the_answer_repeats(method, curvature):
    settings = dense(bilevel.DeltaSTN(entropy=1e-2) if method == "learned scale" else method)
    problem = rich_problem(smooth if method.startswith(("implicit", "unrolled")) else decayed, {**RATE, **DECAY})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bilevel.ConvergenceWarning)
        solver, twin = (drive(make_solver(problem, method=settings), 2) for _ in range(2))
        before = everything(solver)
        first = diagnose(solver, BATCH, OTHER, curvature=curvature, max_columns=1)
        second = diagnose(solver, BATCH, OTHER, curvature=curvature, max_columns=1)
        assert_same(everything(solver), before)
        assert str(first) == str(second)
        assert math.isfinite(first.relative_error)
        drive(solver, 1, start=2)
        drive(twin, 1, start=2)
    assert_same(solver.state_dict(), twin.state_dict())


def test_dropout_masks_are_those_of_the_method():
    """Its own solve is exact, so it agrees only if both see the same mask and the same batch statistics."""
    problem = rich_problem(smooth, {**RATE, **DECAY}, torch.float64)
    data = tuple(part.double() for part in BATCH)
    found = diagnose(bilevel.Solver(problem, method="implicit_exact"), data, data)
    assert found.relative_error < 1e-9
    assert found.jacobian.relative_error < 1e-9


def test_what_the_reference_cannot_see_is_left_out_by_name():
    problem = rich_problem(
        decayed,
        {**RATE, **DECAY, "holes": bilevel.integer(0, 4, 1)},
        outer_loss=lambda model, hyper, batch: masked(model, hyper, batch) + 5 * hyper["rate"],
    )
    solver = make_solver(problem, method=dense("centered_stn"))
    for slope in solver.response.theta.slopes:
        slope.data.uniform_(-1, 1)
    found = diagnose(solver, BATCH, OTHER)
    assert found.excluded == ("rate", "holes")
    assert "Not compared: rate, holes." in found.meaning
    assert list(found.columns) == ["decay[0]", "decay[1]"]
    for slope in solver.response.theta.slopes:
        slope.data[[0, 3]] = 1e3
    again = diagnose(solver, BATCH, OTHER)
    assert (again.cosine, again.norm_ratio, again.jacobian) == (found.cosine, found.norm_ratio, found.jacobian)


def test_nothing_left_to_compare():
    problem = rich_problem(masked, RATE)
    found = diagnose(make_solver(problem, method="delta_stn"), BATCH, OTHER)
    assert math.isnan(found.cosine)
    assert found.columns == {}
    assert found.meaning.startswith("There is nothing to compare.")
    assert "Not compared: rate." in found.meaning
    assert math.isfinite(found.largest_curvature)


def test_an_outer_loss_without_weights():
    problem = bilevel.Problem(
        {"w": torch.zeros(2)},
        inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["x"]).square().sum(),
        outer_loss=lambda model, hyper, batch: hyper["x"] ** 2,
        hyper={"x": bilevel.real(1.0)},
    )
    found = diagnose(bilevel.Solver(problem, method="implicit_exact"))
    assert math.isnan(found.cosine)
    assert "is zero, for the method and for the reference" in found.meaning


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    slope = [[-0.5, 0.0], [0.0, -1.0]]
    solver = toy([[2.0, 0.0], [0.0, 1.0]], weights=[0.0, 0.0], method="delta_stn", slope=slope, dtype=dtype)
    for max_dense in (500, 0):
        found = diagnose(solver, max_dense=max_dense)
        assert found.relative_error < 1e-3
        assert found.largest_curvature == pytest.approx(2.0, rel=1e-2)


def test_it_works_where_gradients_are_off():
    case = make_quadratic(3, 2, 0, False)
    with torch.no_grad():
        assert diagnose(at_solution(case)).relative_error < 1e-9


def test_it_prints_as_a_table_and_turns_into_plain_numbers():
    found = diagnose(at_solution(make_quadratic(3, 2, 0, False), factor=2.0))
    lines = str(found).splitlines()
    assert lines[0] == "DeltaSTN against Exact on the Hessian"
    assert lines[1].split() == ["cosine", "norm", "ratio", "relative", "error"]
    assert lines[2].split() == ["response", "gradient", "1.000", "2", "1"]
    assert len({len(line) for line in lines[1:7]}) == 1
    assert " ".join(lines[9:]) == found.meaning
    assert all(len(line) <= 96 for line in lines)
    entries = found.as_dict()
    assert entries["cosine"] == found.cosine
    assert entries["jacobian.norm_ratio"] == found.jacobian.norm_ratio
    assert entries["columns.x[1].relative_error"] == found.columns["x[1]"].relative_error
    assert entries["excluded"] == []
    assert {type(value) for value in entries.values()} == {str, float, list}
    with pytest.raises(FrozenInstanceError):
        found.cosine = 0.0


def test_columns_only_for_few_hyperparameters():
    case = make_quadratic(3, 4, 0, False)
    assert diagnose(at_solution(case), max_columns=3).columns == {}
    assert len(diagnose(at_solution(case), max_columns=4).columns) == 4


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_as_a_callback_it_does_not_change_the_run(method):
    def run(**changes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bilevel.ConvergenceWarning)
            return solve(method=method, steps=6, warmup=2, progress=False, **changes)

    callback = Diagnose(every=2, train=BATCH, valid=OTHER)
    assert_same(run(callbacks=[callback]).solver.state_dict(), run().solver.state_dict())
    assert callback.history["round"].tolist() == [2, 4, 6]
    assert all(isinstance(found, Diagnosis) for found in callback.diagnoses)
    assert callback.history["relative_error"].tolist() == [found.relative_error for found in callback.diagnoses]
    assert callback.history["largest_curvature"][-1] == callback.diagnoses[-1].largest_curvature


def test_the_callback_draws_what_it_collected(tmp_path):
    callback = Diagnose(every=1, train=BATCH, valid=OTHER)
    with pytest.raises(ValueError, match="the first is made in round 1"):
        callback.plot()
    solve(method="delta_stn", steps=4, callbacks=[callback])
    figure = callback.plot(tmp_path / "diagnoses.png")
    assert [axis.get_ylabel() for axis in figure.axes] == ["cosine", "norm ratio", "relative error"]
    for axis, column in zip(figure.axes, ("cosine", "norm_ratio", "relative_error"), strict=True):
        _, drawn, *_ = axis.lines
        np.testing.assert_array_equal(drawn.get_xdata(), [1, 2, 3, 4])
        np.testing.assert_array_equal(drawn.get_ydata(), callback.history[column])
        assert [text.get_text() for text in axis.get_legend().get_texts()] == [
            "response gradient",
            "hypergradient",
            "weights",
        ]
    assert (tmp_path / "diagnoses.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    callback = Diagnose(every=1, train=BATCH, valid=OTHER)
    solve(method="implicit_exact", steps=1, callbacks=[callback])
    genuine = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install 'bilevel\[plot\]'"):
        callback.plot()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"linear_solver": "cg"}, TypeError, "linear_solver must be a linear solver such as bilevel.CG"),
        ({"curvature": "fisher"}, ValueError, "curvature must be 'hessian' or 'gauss_newton', got 'fisher'"),
        ({"max_dense": -1}, ValueError, "max_dense must be at least 0"),
        ({"max_columns": 2.5}, TypeError, "max_columns must be an integer"),
    ],
)
def test_bad_arguments(changes, error, said):
    solver = make_solver()
    with pytest.raises(error, match=said):
        diagnose(solver, BATCH, OTHER, **changes)
    with pytest.raises(error, match=said):
        Diagnose(train=BATCH, valid=OTHER, **changes)


def test_bad_solvers_batches_and_intervals():
    with pytest.raises(TypeError, match=r"got a Solution: write solution\.solver"):
        diagnose(solve(steps=1), BATCH, OTHER)
    with pytest.raises(TypeError, match=r"solver must be a bilevel\.Solver, got a NoneType"):
        diagnose(None)
    with pytest.raises(TypeError, match=r"the valid batch must be one batch, got a DataLoader: write next\(iter"):
        diagnose(make_solver(), BATCH, DataLoader([BATCH]))
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Diagnose(every=0)


def test_gradients_that_are_not_finite():
    x, y = BATCH
    with pytest.raises(bilevel.DivergenceError, match="gradient of the outer loss in the weights is not finite"):
        diagnose(make_solver(), BATCH, (x * math.nan, y))
    with pytest.raises(bilevel.DivergenceError, match="gradient of the inner loss in the weights is not finite"):
        diagnose(make_solver(), (x * math.nan, y), BATCH)


def test_a_hessian_that_is_not_finite():
    """(w² )^¾ has a gradient at zero, but no curvature."""
    problem = bilevel.Problem(
        {"w": torch.ones(2, dtype=torch.float64)},
        inner_loss=lambda model, hyper, batch: (
            (model.params["w"] - 1).abs().pow(1.5).sum() + hyper["x"] * model.params["w"].sum()
        ),
        outer_loss=lambda model, hyper, batch: model.params["w"].sum(),
        hyper={"x": bilevel.real(0.0)},
    )
    solver = bilevel.Solver(problem, method="delta_stn")
    for max_dense in (500, 0):
        found = diagnose(solver, max_dense=max_dense)
        assert math.isnan(found.cosine)
        assert "There is no reference to compare with: MINRES: matvec returned NaN or infinity" in found.meaning
