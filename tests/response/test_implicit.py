"""Implicit differentiation against the implicit function theorem, written out by hand."""

import copy
import math
import warnings
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from examples import assert_same, differs
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import (
    SEEDS,
    Quadratic,
    Tanh,
    assert_equal,
    double,
    ill_conditioned_quadratics,
    make_quadratic,
    quadratics,
    randn,
    sgd,
    solver_at,
)
from torch import Tensor, nn
from torch.nn import functional as F

import bilevel
from bilevel import (
    CG,
    MINRES,
    ConvergenceWarning,
    DivergenceError,
    Exact,
    Identity,
    Implicit,
    LinearSolverError,
    Neumann,
    Nystrom,
    Problem,
    Solver,
)
from bilevel.linear_solvers import relative_residual
from bilevel.linear_solvers.base import Attempt

# The residual that double precision can reach grows with the condition number.
SOLVERS = {
    "Exact": Exact(),
    "CG": CG(max_steps=200, rtol=1e-11),
    "MINRES": MINRES(max_steps=200, rtol=1e-11),
    "Nystrom": Nystrom(rank=10, damping=1e-11),
}
CURVATURES = ["hessian", "gauss_newton"]
every_solver = pytest.mark.parametrize("linear_solver", SOLVERS.values(), ids=SOLVERS)
every_curvature = pytest.mark.parametrize("curvature", CURVATURES)


def assert_close(
    actual: Tensor, expected: Tensor, scale: Tensor | float | None = None, tolerance: float = 1e-6
) -> None:
    """The error is small against the size of what is expected, or of what it was added up from."""
    size = expected.norm() if scale is None else scale
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= tolerance * size


def at_solution(case: Quadratic, method: Implicit, **changes: float) -> tuple[Solver, Tensor]:
    w = case.solution(case.hyper)
    return solver_at(case.problem(), method, w, case.theta, **changes), w


def by_name(solver: Solver, vector: Tensor) -> dict[str, Tensor]:
    parts = vector.split([value.numel() for value in solver.params.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(solver.params.items(), parts, strict=True)}


# Quadratic problems


@every_solver
@given(curvature=st.sampled_from(CURVATURES), case=ill_conditioned_quadratics(), seed=SEEDS)
def test_derivatives_have_their_closed_form_on_quadratics(linear_solver, curvature, case, seed):
    """−A⁻¹B, its action, its transposed action and the hypergradient, for condition numbers up to 1e4."""
    solver, w = at_solution(case, Implicit(linear_solver, curvature=curvature))
    response, expected, slope = solver.response, case.jacobian(), case.outer_slope(case.hyper, w)
    assert_close(response.jacobian(case.hyper), expected)
    u, v = randn(seed, w.shape, case.hyper.shape)
    along = torch.cat([part.flatten() for part in response.jvp(case.hyper, v).values()])
    assert_close(along, expected @ v, expected.norm() * v.norm())
    assert_close(response.vjp(case.hyper, by_name(solver, u)), expected.T @ u, expected.norm() * u.norm())
    step, direct = solver.outer_step(), case.direct(case.hyper, w)
    assert_close(step.direct, direct)
    assert_close(step.hypergradient, direct + expected.T @ slope, direct.norm() + expected.norm() * slope.norm())


@every_curvature
@settings(max_examples=15)
@given(case=quadratics(), terms=st.integers(1, 6), scale=st.floats(0.01, 0.05))
def test_neumann_is_its_truncated_series(curvature, case, terms, scale):
    """−(α Σ (I − αA)ⁱ) B and its transpose: exactly that, not the inverse."""
    solver = solver_at(
        case.problem(), Implicit(Neumann(max_steps=terms, scale=scale), curvature), case.weights, case.theta
    )
    factor = torch.eye(len(case.A)).double() - scale * case.A
    series = scale * sum(torch.linalg.matrix_power(factor, i) for i in range(terms))
    assert_close(solver.response.jacobian(case.hyper), -series @ case.B, tolerance=1e-9)
    slope, direct = case.outer_slope(case.hyper, case.weights), case.direct(case.hyper, case.weights)
    assert_equal(solver.outer_step().hypergradient, direct - case.B.T @ series @ slope)


@given(case=quadratics(), scale=st.floats(0.01, 10.0))
def test_identity_is_a_step_of_gradient_descent(case, scale):
    """−αB, whatever A is."""
    solver = solver_at(case.problem(), Implicit(Identity(scale=scale)), case.weights, case.theta)
    assert_close(solver.response.jacobian(case.hyper), -scale * case.B, tolerance=1e-12)
    slope, direct = case.outer_slope(case.hyper, case.weights), case.direct(case.hyper, case.weights)
    assert_equal(solver.outer_step().hypergradient, direct - scale * case.B.T @ slope)


@dataclass(frozen=True, kw_only=True)
class Doubled(bilevel.LinearSolver):
    """Returns twice the vector whose residual it reports, in the same memory."""

    def _solve(self, matvec, v, x0, root):
        x = v.clone()
        residual = relative_residual(matvec, x, v)
        return Attempt(x.mul_(2), residual, residual[None], lambda facts: 1)


def test_a_solution_that_is_changed_after_its_last_product_is_multiplied_anew():
    """The mixed product comes with that of the residual only as long as it is of the same vector."""
    case = make_quadratic(3, 2, 0, False)
    steps = [
        solver_at(case.problem(), Implicit(solver), case.weights, case.theta).outer_step().hypergradient
        for solver in (Doubled(), Identity(scale=2.0))
    ]
    assert_equal(*steps)


@every_solver
@settings(max_examples=15)
@given(case=quadratics(), damping=st.floats(0.1, 3.0))
def test_damping_shifts_the_matrix(linear_solver, case, damping):
    """−(A + μI)⁻¹B."""
    solver = solver_at(case.problem(), Implicit(replace(linear_solver, damping=damping)), case.weights, case.theta)
    expected = -torch.linalg.solve(case.A + damping * torch.eye(len(case.A)).double(), case.B)
    assert_close(solver.response.jacobian(case.hyper), expected)


@settings(max_examples=15)
@given(case=quadratics(), seed=SEEDS)
def test_an_indefinite_problem_is_solved_by_the_solvers_for_it(case, seed):
    """A saddle point has a derivative too."""
    vectors = torch.linalg.qr(randn(seed, case.A.shape)[0]).Q
    values = torch.linspace(-1.5, 2.0, len(case.A), dtype=torch.float64)
    case = replace(case, A=vectors @ torch.diag(values) @ vectors.T)
    for linear_solver in (Exact(), SOLVERS["MINRES"]):
        solver, _ = at_solution(case, Implicit(linear_solver))
        assert_close(solver.response.jacobian(case.hyper), case.jacobian())


@settings(max_examples=15)
@given(case=quadratics())
def test_the_inner_learning_rate_does_not_matter(case):
    """Betty's CG is right for one step size only."""
    steps = [
        solver_at(case.problem(), Implicit(SOLVERS["CG"]), case.weights, case.theta, lr=lr).outer_step()
        for lr in (1e-4, 1.0, 100.0)
    ]
    slope, direct = case.outer_slope(case.hyper, case.weights), case.direct(case.hyper, case.weights)
    assert_equal(steps[0].hypergradient, direct + case.jacobian().T @ slope, 1e-8)
    for step in steps[1:]:
        assert torch.equal(step.hypergradient, steps[0].hypergradient)


@pytest.mark.parametrize("network", [False, True])
@every_solver
@settings(max_examples=15)
@given(curvature=st.floats(0.1, 10.0), target=st.floats(-2.0, 2.0).filter(lambda x: abs(x) > 0.01))
def test_a_scalar_weight_and_a_scalar_hyperparameter(linear_solver, network, curvature, target):
    """L_T = a w²/2 − 3wλ, so that w* = 3λ/a: TorchOpt returns zero for a scalar."""

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(double(3 * target / curvature))

        def forward(self) -> Tensor:
            return self.w

    def weight(model: bilevel.Model) -> Tensor:
        return model() if network else model.params["w"]

    problem = Problem(
        Scalar() if network else {"w": double(3 * target / curvature)},
        inner_loss=lambda model, hyper, batch: curvature * weight(model) ** 2 / 2 - 3 * weight(model) * hyper["x"],
        outer_loss=lambda model, hyper, batch: weight(model) ** 2,
        hyper={"x": bilevel.real(target)},
    )
    for kind in CURVATURES:
        step = Solver(problem, method=Implicit(linear_solver, kind)).outer_step()
        assert_close(step.hypergradient, double([18 * target / curvature**2]))


@given(seed=SEEDS)
def test_gauss_newton_replaces_the_hessian(seed):
    """−(Σ JᵀJ · 2/(nk) + 2sI)⁻¹ 2s w on a network that is not linear, with J by hand."""
    network = Tanh(2, 3, 2, seed)
    x, t = randn(seed + 1, (5, 2), (5, 2))
    solver = Solver(decayed(network), method=Implicit(Exact(), curvature="gauss_newton"))
    jacobians = [Tanh.jacobian(network.W.detach(), network.V.detach(), row) for row in x]
    matrix = sum(j.T @ j for j in jacobians) / 5 + 0.2 * torch.eye(12).double()
    w = torch.cat([network.W.flatten(), network.V.flatten()]).detach()
    expected = -torch.linalg.solve(matrix, 0.2 * w)[:, None]
    assert_close(solver.response.jacobian(solver.vector.detach(), (x, t)), expected)


# Regularised logistic regression


@dataclass(frozen=True)
class Logistic:
    """Logistic regression with a penalty exp(λⱼ) wⱼ² per feature; gradients, Hessian and solution by hand."""

    X: Tensor
    t: Tensor
    X_valid: Tensor
    t_valid: Tensor
    hyper: Tensor

    def slope(self, hyper: Tensor, w: Tensor) -> Tensor:
        return self.X.T @ (torch.sigmoid(self.X @ w) - self.t) / len(self.t) + 2 * hyper.exp() * w

    def hessian(self, hyper: Tensor, w: Tensor) -> Tensor:
        p = torch.sigmoid(self.X @ w)
        return self.X.T @ torch.diag(p * (1 - p)) @ self.X / len(self.t) + 2 * torch.diag(hyper.exp())

    def solution(self, hyper: Tensor) -> Tensor:
        w = torch.zeros(self.X.shape[1]).double()
        for _ in range(50):
            change = torch.linalg.solve(self.hessian(hyper, w), self.slope(hyper, w))
            w = w - change
            if change.norm() < 1e-8:  # whose square is left
                break
        assert self.slope(hyper, w).norm() < 1e-12
        return w

    def outer(self, w: Tensor) -> Tensor:
        z = self.X_valid @ w
        return (torch.log1p(torch.exp(z)) - self.t_valid * z).mean()

    def outer_slope(self, w: Tensor) -> Tensor:
        return self.X_valid.T @ (torch.sigmoid(self.X_valid @ w) - self.t_valid) / len(self.t_valid)

    def jacobian(self, hyper: Tensor, w: Tensor) -> Tensor:
        return -torch.linalg.solve(self.hessian(hyper, w), 2 * torch.diag(hyper.exp() * w))

    def solver(self, w: Tensor, method: Implicit) -> Solver:
        network = nn.Linear(len(w), 1, bias=False).double()
        network.weight.data.copy_(w[None])

        def predict(model, batch):
            return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])

        problem = Problem(
            network,
            inner_loss=lambda model, hyper, batch: (
                predict(model, batch) + (hyper["decay"] * model.params["weight"][0] ** 2).sum()
            ),
            outer_loss=lambda model, hyper, batch: predict(model, batch),
            hyper={"decay": bilevel.positive(self.hyper.exp())},
        )
        return Solver(problem, method=method)


@st.composite
def regressions(draw: st.DrawFn) -> Logistic:
    n, d = draw(st.integers(6, 30)), draw(st.integers(1, 5))
    x, noise, x_valid, noise_valid, truth = randn(draw(SEEDS), (n, d), (n,), (n, d), (n,), (d,))
    labels = [(a @ truth + b > 0).double() for a, b in ((x, noise), (x_valid, noise_valid))]
    hyper = double(draw(st.lists(st.floats(-4.0, 1.0), min_size=d, max_size=d)))
    return Logistic(x, labels[0], x_valid, labels[1], hyper)


@every_solver
@given(curvature=st.sampled_from(CURVATURES), case=regressions())
def test_derivatives_have_their_closed_form_on_logistic_regression(linear_solver, curvature, case):
    """The network is linear in its weights, so that both curvatures are the Hessian."""
    w = case.solution(case.hyper)
    solver = case.solver(w, Implicit(linear_solver, curvature=curvature))
    train, valid = (case.X, case.t), (case.X_valid, case.t_valid)
    expected, slope = case.jacobian(case.hyper, w), case.outer_slope(w)
    assert_close(solver.response.jacobian(solver.vector.detach(), train), expected)
    step = solver.outer_step(train, valid)
    assert_close(step.hypergradient, expected.T @ slope, expected.norm() * slope.norm())
    assert torch.equal(step.direct, torch.zeros_like(step.direct))


@given(case=regressions())
def test_derivatives_are_the_differences_of_solutions_of_logistic_regression(case):
    """The inner problem solved again at λ ± δ, by Newton's method."""
    w = case.solution(case.hyper)
    solver = case.solver(w, Implicit(Exact()))
    jacobian = solver.response.jacobian(solver.vector.detach(), (case.X, case.t))
    hypergradient = solver.outer_step((case.X, case.t), (case.X_valid, case.t_valid)).hypergradient
    for index, unit in enumerate(torch.eye(len(case.hyper)).double()):
        ends = [case.solution(case.hyper + step * unit) for step in (1e-4, -1e-4)]
        assert_equal(jacobian[:, index], (ends[0] - ends[1]) / 2e-4, 1e-6)
        assert_equal(hypergradient[index], (case.outer(ends[0]) - case.outer(ends[1])) / 2e-4, 1e-6)


# Hyperparameters of any size and shape


@pytest.mark.parametrize("shape", [(50,), (5, 10), (1, 50, 1)])
@every_solver
def test_a_weight_per_example(linear_solver, shape):
    """Weighted least squares, Σ sᵢ (xᵢᵀw − tᵢ)² / n + μ‖w‖²: h = 50 examples, s a sigmoid."""
    x, t, x_valid, t_valid, raw = randn(0, (50, 3), (50,), (20, 3), (20,), (50,))
    s = torch.sigmoid(raw)
    hessian = 2 * x.T @ torch.diag(s) @ x / 50 + 2 * 0.1 * torch.eye(3).double()
    w = torch.linalg.solve(hessian, 2 * x.T @ (s * t) / 50)
    problem = Problem(
        {"w": w},
        inner_loss=lambda model, hyper, batch: (
            (hyper["s"].flatten() * (x @ model.params["w"] - t) ** 2).mean() + 0.1 * bilevel.l2(model.params)
        ),
        outer_loss=lambda model, hyper, batch: (x_valid @ model.params["w"] - t_valid).square().mean(),
        hyper={"s": bilevel.interval(0.0, 1.0, init=s.view(shape))},
    )
    solver = Solver(problem, method=Implicit(linear_solver))
    cross = 2 * x.T * ((x @ w - t) * s * (1 - s)) / 50
    expected = -torch.linalg.solve(hessian, cross)
    slope = 2 * x_valid.T @ (x_valid @ w - t_valid) / 20
    assert solver.hyper["s"].shape == shape
    assert_close(solver.response.jacobian(solver.vector.detach()), expected)
    assert_close(solver.outer_step().hypergradient, expected.T @ slope)


@every_curvature
def test_the_training_data_as_hyperparameters(curvature):
    """Distillation: ∂²L/∂w∂xᵢⱼ = 2 (wⱼ xᵢ + rᵢ eⱼ) / n, where the network itself takes the hyperparameter."""
    n, d = 6, 3
    x, t, x_valid, t_valid = randn(0, (n, d), (n,), (20, d), (20,))
    hessian = 2 * x.T @ x / n + 0.2 * torch.eye(d).double()
    w = torch.linalg.solve(hessian, 2 * x.T @ t / n)
    network = nn.Linear(d, 1, bias=False).double()
    network.weight.data.copy_(w[None])
    problem = Problem(
        network,
        inner_loss=lambda model, hyper, batch: (
            (model(hyper["x"])[:, 0] - t).square().mean() + 0.1 * bilevel.l2(model.params)
        ),
        outer_loss=lambda model, hyper, batch: (model(x_valid)[:, 0] - t_valid).square().mean(),
        hyper={"x": bilevel.real(x)},
    )
    solver = Solver(problem, method=Implicit(Exact(), curvature=curvature))
    residual = x @ w - t
    cross = 2 * (torch.einsum("j,ik->kij", w, x) + torch.einsum("i,jk->kij", residual, torch.eye(d).double())) / n
    expected = -torch.linalg.solve(hessian, cross.reshape(d, n * d))
    slope = 2 * x_valid.T @ (x_valid @ w - t_valid) / 20
    assert_close(solver.response.jacobian(solver.vector.detach()), expected)
    assert_close(solver.outer_step().hypergradient, expected.T @ slope)


# BatchNorm and dropout inside the inner problem


def normalised() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def decayed(network: nn.Module, **changes: object) -> Problem:
    """Squared error with a tuned penalty."""
    arguments = {
        "inner_loss": lambda model, hyper, batch: (
            F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)
        ),
        "outer_loss": lambda model, hyper, batch: F.mse_loss(model(batch[0]), batch[1]),
        "hyper": {"decay": bilevel.positive(0.1)},
    }
    return Problem(network, **{**arguments, **changes})


def test_batch_norm_inside_the_inner_problem():
    """Batch statistics inside, running ones outside; a hypergradient changes neither."""
    train, valid = (tuple(randn(seed, (8, 3), (8, 1))) for seed in (0, 1))
    solver = Solver(decayed(normalised()), method=Implicit(Exact(damping=0.5)), inner_optimizer=sgd(0.05))
    for _ in range(20):
        solver.inner_step(train)
    buffers = [buffer.clone() for buffer in solver.response.inner.buffers()]
    weights = {name: value.clone() for name, value in solver.params.items()}
    network = normalised()
    network.load_state_dict(solver.module_state_dict)
    step = solver.outer_step(train, valid)
    assert all(torch.equal(*pair) for pair in zip(solver.response.inner.buffers(), buffers, strict=True))
    assert int(solver.module_state_dict["1.num_batches_tracked"]) == 20

    def flat_gradient(w: Tensor, batch: tuple[Tensor, Tensor], *, training: bool, decay: float) -> Tensor:
        plain = copy.deepcopy(network).train(training)
        nn.utils.vector_to_parameters(w, plain.parameters())
        loss = F.mse_loss(plain(batch[0]), batch[1]) + decay * sum(p.square().sum() for p in plain.parameters())
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(plain.parameters()))).detach()

    w = torch.cat([value.flatten() for value in weights.values()])
    at = partial(flat_gradient, batch=train, training=True, decay=0.1)
    hessian = torch.stack([(at(w + 1e-6 * e) - at(w - 1e-6 * e)) / 2e-6 for e in torch.eye(len(w)).double()])
    solution = torch.linalg.solve(
        hessian + 0.5 * torch.eye(len(w)).double(), flat_gradient(w, valid, training=False, decay=0.0)
    )
    assert_equal(step.hypergradient, -(2 * 0.1 * w @ solution)[None], 1e-6)


# Does the method fit the problem?


def masked(rate: bilevel.Hyper, **others: bilevel.Hyper) -> Problem:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def forward(self, x: Tensor, rate: Tensor) -> Tensor:
            return self.layer(bilevel.functional.dropout(x, rate, training=self.training))

    def loss(model, hyper, batch):
        penalty = hyper["decay"] * bilevel.l2(model.params) if "decay" in hyper else 0.0
        return F.mse_loss(model(batch[0], hyper["rate"]), batch[1]) + penalty

    return Problem(Masked(), inner_loss=loss, outer_loss=loss, hyper={"rate": rate, **others})


@pytest.mark.parametrize("method", [name for name in bilevel.METHODS if name.startswith("implicit")])
def test_an_integer_is_refused_before_work_starts(method):
    problem = masked(bilevel.integer(0, 4, init=1), decay=bilevel.positive(0.1))
    with pytest.raises(
        ValueError, match=r"cannot tune hyper\['rate'\]: it is an integer.*delta_stn, centered_stn, stn"
    ):
        Solver(problem, method=method)


@pytest.mark.parametrize("others", [{}, {"decay": bilevel.positive(0.1)}])
@pytest.mark.parametrize("method", [name for name in bilevel.METHODS if name.startswith("implicit")])
def test_a_dropout_rate_is_refused_before_a_weight_has_changed(method, others):
    """At the first inner step, or at the first outer step of somebody who trains the weights in another way."""
    batch = tuple(randn(0, (5, 3), (5, 1)))
    solver = Solver(masked(bilevel.interval(0.0, 0.9, init=0.3), **others), method=method)
    before = solver.state_dict()
    message = r"cannot tune hyper\['rate'\]: the gradient of inner_loss has no derivative.*delta_stn, centered_stn, stn"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            solver.inner_step(batch)
        with pytest.raises(ValueError, match=message):
            solver.outer_step(batch, batch)
    assert_same(solver.state_dict(), before)


def test_what_is_left_without_the_dropout_rate_is_accepted():
    batch = tuple(randn(0, (5, 3), (5, 1)))
    solver = Solver(decayed(nn.Sequential(nn.Dropout(0.3), nn.Linear(3, 1).double())), method="implicit_cg")
    solver.inner_step(batch)
    assert solver.outer_step(batch, batch).hypergradient.abs().min() > 0


def test_an_op_without_second_derivatives_is_refused_before_a_weight_has_changed():
    problem = Problem(
        {"w": randn(0, (4, 3))[0]},
        inner_loss=lambda model, hyper, batch: (
            F.pdist(model.params["w"]).square().sum() + hyper["decay"] * bilevel.l2(model.params)
        ),
        outer_loss=lambda model, hyper, batch: bilevel.l2(model.params),
        hyper={"decay": bilevel.positive(0.1)},
    )
    solver = Solver(problem, method="implicit_cg")
    before = solver.state_dict()
    with pytest.raises(RuntimeError, match="_pdist_backward") as raised:
        solver.inner_step()
    assert any("without second derivatives" in note for note in raised.value.__notes__)
    assert_same(solver.state_dict(), before)


@every_curvature
def test_the_check_of_the_fit_consumes_no_random_numbers(curvature):
    """A run is the same bit for bit without it, and so is the user's random state."""
    batch = tuple(randn(0, (8, 3), (8, 1)))
    solvers = [
        Solver(
            decayed(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()),
            method=Implicit(CG(max_steps=5, rtol=0, damping=30.0), curvature),
        )
        for _ in range(2)
    ]
    solvers[1].response.load_state_dict(solvers[0].response.state_dict())
    solvers[1].response._checked = True
    user = torch.get_rng_state()
    for solver in solvers:
        for _ in range(2):
            solver.inner_step(batch)
            solver.outer_step(batch, batch)
    assert_same(solvers[0].state_dict(), solvers[1].state_dict())
    assert torch.equal(torch.get_rng_state(), user)


# Reports and failures


@pytest.mark.parametrize(
    "linear_solver",
    [CG(max_steps=2, rtol=0), MINRES(max_steps=2, rtol=0), Neumann(max_steps=3, scale=0.01), Exact(), Identity()],
    ids=lambda solver: type(solver).__name__,
)
@settings(max_examples=15)
@given(case=quadratics())
def test_the_reported_residual_is_the_true_one(linear_solver, case):
    """‖v − A u‖ / ‖v‖ for the u that the hypergradient was computed from, v the slope of the outer loss."""
    solver = solver_at(case.problem(), Implicit(linear_solver), case.weights, case.theta)
    step = solver.outer_step()
    slope, u = case.outer_slope(case.hyper, case.weights), solver.response.guess
    assert set(step.report) == {"residual", "solver_steps"}
    assert_equal(step.hypergradient, case.direct(case.hyper, case.weights) - case.B.T @ u)
    assert_equal(step.report["residual"], (slope - case.A @ u).norm() / slope.norm(), 1e-9)
    expected = {CG: 2, MINRES: 2, Neumann: 3, Exact: len(u), Identity: 0}[type(linear_solver)]
    assert int(step.report["solver_steps"]) == expected


def test_the_history_has_the_residual():
    case = make_quadratic(4, 2, 0, network=True)
    solution = bilevel.solve(
        case.problem(), method=Implicit(CG()), steps=3, inner_optimizer=sgd(0.1), outer_optimizer=sgd(0.001)
    )
    assert all(0 <= row["method.residual"] <= 1e-6 for row in solution.history.rows)
    assert all(0 <= row["method.solver_steps"] <= 20 for row in solution.history.rows)


def test_too_few_steps_are_reported():
    """With a tolerance to miss; without one, a truncated solution is what was asked for."""
    case = replace(make_quadratic(5, 2, 0, network=False), A=torch.diag(double([1.0, 2.0, 3.0, 4.0, 500.0])))
    with pytest.warns(ConvergenceWarning, match=r"residual is .* above rtol=1e-06.*max_steps"):
        solver_at(case.problem(), Implicit(CG(max_steps=2)), case.weights, case.theta).outer_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = solver_at(case.problem(), Implicit(CG(max_steps=2, rtol=0)), case.weights, case.theta).outer_step()
    assert step.report["residual"] > 1e-6


def test_negative_curvature_leaves_everything_as_it_was():
    """The message has the remedies, and each of those works."""
    case = make_quadratic(3, 2, 0, network=False)
    batch = None

    def make(linear_solver: bilevel.LinearSolver) -> Solver:
        return Solver(
            case.problem(),
            method=Implicit(linear_solver),
            inner_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            outer_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        )

    solver = make(CG())
    solver.inner_step(batch)
    solver.outer_step(batch, batch)
    solver.inner_step(batch)
    before, good = solver.state_dict(), case.A.clone()
    case.A.copy_(torch.diag(double([1.0, -2.0, 3.0])))
    with pytest.raises(LinearSolverError, match=r"not positive definite.*damping.*gauss_newton.*MINRES"):
        solver.outer_step(batch, batch)
    assert_same(solver.state_dict(), before)
    for remedy in (MINRES(), CG(damping=3.0), Exact()):
        make(remedy).outer_step()
    case.A.copy_(good)
    solver.outer_step(batch, batch)
    assert differs(solver.state_dict(), before)


EVERY_SOLVER = {**SOLVERS, "Neumann": Neumann(scale=0.01), "Neumann, estimated": Neumann(), "Identity": Identity()}


@pytest.mark.parametrize("where", ["outer loss", "outer gradient", "inner Hessian", "cross derivative"])
@pytest.mark.parametrize("linear_solver", EVERY_SOLVER.values(), ids=EVERY_SOLVER)
def test_nan_is_never_turned_into_a_number(linear_solver, where):
    """BOAT makes zeros of it. The state stays as it was."""

    def inner_loss(model, hyper, batch):
        w, x = model.params["w"], hyper["x"]
        if where == "inner Hessian":
            return (w - 1).square().sum() + ((w - 1).abs() ** 1.5).sum() + (w * x).sum()
        if where == "cross derivative":
            return (w - 1).square().sum() + w.sum() * (x - x.detach()).abs().sqrt().sum()
        return (w - 1).square().sum() + (w * x).sum()

    def outer_loss(model, hyper, batch):
        w = model.params["w"]
        if where == "outer loss":
            return w.sum() * math.nan
        return (w - 1).square().sum().sqrt() if where == "outer gradient" else w.sum()

    problem = Problem(
        {"w": double([1.0, 1.0])},
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        hyper={"x": bilevel.real([0.0, 0.0])},
    )
    solver = Solver(problem, method=Implicit(linear_solver))
    before = solver.state_dict()
    expected = DivergenceError if where in ("outer loss", "cross derivative") else LinearSolverError
    with pytest.raises(expected, match=r"nan|NaN|not finite"):
        solver.outer_step()
    assert_same(solver.state_dict(), before)


# Warm start


def test_a_second_outer_step_starts_from_the_solution_of_the_first():
    """The same system again takes no step at all, a similar one fewer."""
    case = replace(make_quadratic(30, 3, 0, network=False), A=torch.diag(torch.linspace(1, 50, 30).double()))
    warm, cold = (
        solver_at(case.problem(), Implicit(CG(max_steps=100), warm_start=start), case.weights, case.theta, outer_lr=0)
        for start in (True, False)
    )
    first, second = warm.outer_step(), warm.outer_step()
    assert int(second.report["solver_steps"]) == 0 < int(first.report["solver_steps"])
    assert second.report["residual"] <= 1e-6
    for weight in warm.response.inner.weights:
        weight.data.add_(1e-4)
    assert 0 < int(warm.outer_step().report["solver_steps"]) < int(first.report["solver_steps"])
    for _ in range(2):
        again = cold.outer_step()
        assert int(again.report["solver_steps"]) == int(first.report["solver_steps"])
        assert torch.equal(again.hypergradient, first.hypergradient)
    assert not cold.response.guess.any()


def test_the_guess_is_part_of_the_state():
    """A run that continues from a state is the same bit for bit."""
    case = make_quadratic(5, 2, 0, network=True)

    def make() -> Solver:
        return Solver(case.problem(), method=Implicit(CG(max_steps=2, rtol=0)), inner_optimizer=sgd(0.01))

    solver = make()
    solver.inner_step()
    solver.outer_step()
    saved = solver.state_dict()
    assert saved["response"]["guess"].any()
    other = make()
    other.load_state_dict(saved)
    for each in (solver, other):
        each.inner_step()
        each.outer_step()
    assert_same(other.state_dict(), solver.state_dict())
    saved["response"]["guess"].zero_()
    other.load_state_dict(saved)
    other.inner_step()
    assert not torch.equal(other.outer_step().hypergradient, solver.outer_step().hypergradient)


def test_looking_at_the_derivatives_does_not_change_the_guess():
    case = make_quadratic(5, 2, 0, network=True)
    solver = Solver(case.problem(), method=Implicit(CG(max_steps=2, rtol=0)), inner_optimizer=sgd(0.01))
    solver.outer_step()
    before = solver.state_dict()
    solver.response.vjp(case.hyper, by_name(solver, case.s))
    solver.response.jacobian(case.hyper)
    assert_same(solver.state_dict(), before)


# Settings


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"linear_solver": "cg"}, TypeError, r"linear_solver must be a linear solver such as bilevel.CG\(\), got 'cg'"),
        ({"linear_solver": CG}, TypeError, r"such as bilevel.CG\(\), got <class"),
        ({"linear_solver": None}, TypeError, "got None"),
        ({"curvature": "fisher"}, ValueError, "curvature must be 'hessian' or 'gauss_newton', got 'fisher'"),
        ({"curvature": None}, ValueError, "got None"),
        ({"curvature": ["hessian"]}, ValueError, r"got \['hessian'\]"),
        ({"warm_start": "yes"}, ValueError, "warm_start must be True or False, got 'yes'"),
        ({"warm_start": 1}, ValueError, "warm_start must be True or False, got 1"),
        ({"warm_start": None}, ValueError, "got None"),
    ],
)
def test_bad_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Implicit(**arguments)
