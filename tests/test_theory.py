"""The paper's claims as properties of this code, against closed forms. Labels are those of the paper."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import (
    HYPERNETWORKS,
    SCALES,
    SEEDS,
    Quadratic,
    Ridge,
    Tanh,
    assert_equal,
    dense,
    double,
    expected_terms,
    flat_weights,
    make_quadratic,
    perturb_by,
    points,
    quadratics,
    randn,
    ridges,
    set_response,
    solver_at,
    split_like,
    terms,
)
from torch import Tensor
from torch.nn import functional as F

import bilevel
from bilevel import STN, CenteredSTN, DeltaSTN, Method, Problem

CENTERED = [CenteredSTN(), DeltaSTN()]


def name_of(method: Method) -> str:
    """The name of a method in the report of a test."""
    return type(method).__name__


def bound(case: Quadratic | Ridge, method: Method, w: Tensor, theta: Tensor):
    """The response of a problem at (w, Θ), and λ."""
    problem = case.problem()
    response, hyper = dense(method).bind(problem), problem.initial_hyper()
    set_response(response, hyper, w, theta)
    return response, hyper


def scales(h: int, scale: float) -> Tensor:
    """Unequal standard deviations, so that a mixed-up axis shows."""
    return scale * torch.linspace(1.0, 2.0, h, dtype=torch.float64)


# Theorem thm-quad-min


@pytest.mark.parametrize("method", CENTERED, ids=name_of)
@given(quadratic=quadratics(), scale=SCALES)
def test_the_response_is_trained_by_the_gradient_of_the_theorem(method, quadratic, scale):
    """For any λ₀, w₀ and Θ the expected gradient is (AΘ + B)Σ, which vanishes at −A⁻¹B only."""
    response, hyper = bound(quadratic, method, quadratic.weights, quadratic.theta)
    sigma = scales(len(hyper), scale)
    gradient = expected_terms(response, hyper, sigma)[1].theta
    assert_equal(gradient, (quadratic.A @ quadratic.theta + quadratic.B) * sigma**2)


@pytest.mark.parametrize("method", CENTERED, ids=name_of)
@given(quadratic=quadratics(), scale=SCALES)
def test_the_response_is_stationary_at_the_best_response_jacobian(method, quadratic, scale):
    """Theorem thm-quad-min, for arbitrary w₀: not only at the optimum of the inner problem."""
    response, hyper = bound(quadratic, method, quadratic.weights, quadratic.jacobian())
    gradient = expected_terms(response, hyper, scales(len(hyper), scale))[1].theta
    assert_equal(gradient, torch.zeros_like(gradient))


@given(quadratic=quadratics(), scale=SCALES)
def test_the_stn_mixes_the_error_of_its_weights_into_its_response(quadratic, scale):
    """For Φ of the STN the expected gradient is (AΦ + B)Σ + (∇_w L_T) λᵀ: right only where w is optimal."""
    response, hyper = bound(quadratic, STN(), quadratic.weights, quadratic.theta)
    sigma = scales(len(hyper), scale)
    (term,) = expected_terms(response, hyper, sigma)
    slope = quadratic.inner_slope(hyper, quadratic.weights)
    assert_equal(term.weights, slope)
    assert_equal(term.theta, (quadratic.A @ quadratic.theta + quadratic.B) * sigma**2 + torch.outer(slope, hyper))


# Observations obs:gnhhw and obs:condition-kfac


@given(seed=SEEDS, h=st.integers(1, 3), scale=SCALES)
def test_the_gauss_newton_hessian_of_a_hypernetwork_is_a_kronecker_product(seed, h, scale):
    """Observation obs:gnhhw: E[λ̂λ̂ᵀ ⊗ JᵀH_yJ], with J of a small network and H_y of cross entropy by hand."""
    network = Tanh(2, 3, 2, seed)
    x, hyper, w, theta = randn(seed, (2,), (h,), (12,), (12, h))
    problem = Problem(
        network,
        inner_loss=lambda model, hyper, batch: F.cross_entropy(model(batch), torch.zeros(1, dtype=torch.long)),
        outer_loss=lambda model, hyper, batch: model(batch).sum(),
        hyper={"x": bilevel.real(hyper)},
    )
    response = dense(STN()).bind(problem)
    set_response(response, hyper, w, theta)
    parameters = [*response.theta.slopes, *response.inner.weights]

    def of_hypernetwork(point: Tensor) -> Tensor:
        """J_yφ: one row per output, columns ordered as (Φ₁, …, Φ_h, φ₀)."""
        rows = []
        for output in response(point)(x):
            parts = torch.autograd.grad(output, parameters, retain_graph=True)
            slopes = torch.cat([part.flatten(1) for part in parts[: len(parts) // 2]], dim=1)
            rows.append(torch.cat([slopes.flatten(), *[part.flatten() for part in parts[len(parts) // 2 :]]]))
        return torch.stack(rows)

    left, right = torch.zeros(()), torch.zeros(())
    for point in hyper + points(scales(h, scale)):
        p = torch.softmax(response(point)(x).detach(), 0)
        curvature = torch.diag(p) - torch.outer(p, p)
        jacobian = Tanh.jacobian(*split_like(response, flat_weights(response, point)), x)
        homogeneous = torch.cat([point, torch.ones(1).double()])
        big = of_hypernetwork(point)
        left = left + big.T @ curvature @ big
        right = right + torch.kron(torch.outer(homogeneous, homogeneous), jacobian.T @ curvature @ jacobian)
    assert_equal(left, right)


def hessian(case: Quadratic, method: Method, sigma: Tensor) -> Tensor:
    """The Hessian of the expected inner objective in (Θ₁, …, Θ_h, w₀): differences of its affine gradient."""
    problem = case.problem()
    response, hyper = dense(method).bind(problem), problem.initial_hyper()
    m, h = len(case.weights), len(hyper)

    def gradient(parameters: Tensor) -> Tensor:
        for slope, part in zip(response.theta.slopes, split_like(response, parameters[:-m].view(h, m)), strict=True):
            slope.data.copy_(part)
        for weight, part in zip(response.inner.weights, split_like(response, parameters[-m:]), strict=True):
            weight.data.copy_(part)
        total = torch.zeros(h + 1, m).double()
        for term in expected_terms(response, hyper, sigma):
            total[:h] += 0 if term.theta is None else term.theta.T
            total[h] += 0 if term.weights is None else term.weights
        return total.flatten()

    zero = torch.zeros((h + 1) * m).double()
    return torch.stack([gradient(unit) - gradient(zero) for unit in torch.eye(len(zero)).double()], dim=1)


def second_moment(hyper: Tensor, sigma: Tensor) -> Tensor:
    """E[λ̂λ̂ᵀ] = Cov(ε) + λ̄λ̄ᵀ, where λ̄ is λ with a one appended (``eq:decomp``)."""
    homogeneous = torch.cat([hyper, torch.ones(1).double()])
    return torch.diag(torch.cat([sigma**2, torch.zeros(1).double()])) + torch.outer(homogeneous, homogeneous)


@settings(max_examples=8)
@given(quadratic=quadratics(), scale=SCALES)
def test_the_stn_objective_is_conditioned_by_the_second_moment_of_the_hyperparameters(quadratic, scale):
    """Eq. eq:decomp: the Hessian is (Cov(ε) + λ̄λ̄ᵀ) ⊗ A, with condition number κ(E[λ̂λ̂ᵀ]) κ(A)."""
    sigma = scales(len(quadratic.hyper), scale)
    moment = second_moment(quadratic.hyper, sigma)
    actual = hessian(quadratic, STN(), sigma)
    assert_equal(actual, torch.kron(moment, quadratic.A))
    product = torch.linalg.cond(moment) * torch.linalg.cond(quadratic.A)
    torch.testing.assert_close(torch.linalg.cond(actual), product, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", CENTERED, ids=name_of)
@settings(max_examples=8)
@given(quadratic=quadratics(), scale=SCALES)
def test_centering_conditions_the_objective_better(method, quadratic, scale):
    """The Hessian is diag(σ², 1) ⊗ A whatever λ is; the STN's is never better, and κ grows with 1 + ‖λ‖²."""
    sigma = scales(len(quadratic.hyper), scale)
    diagonal = torch.cat([sigma**2, torch.ones(1).double()])
    centered = hessian(quadratic, method, sigma)
    assert_equal(centered, torch.kron(torch.diag(diagonal), quadratic.A))
    stn = torch.kron(second_moment(quadratic.hyper, sigma), quadratic.A)
    assert torch.linalg.cond(stn) >= torch.linalg.cond(centered) * (1 - 1e-9)
    bound = (1 + quadratic.hyper.square().sum()) / diagonal.min() * torch.linalg.cond(quadratic.A)
    assert torch.linalg.cond(stn) >= bound * (1 - 1e-9)


@given(seed=SEEDS, m=st.integers(1, 5), n=st.integers(1, 5))
def test_condition_numbers_of_kronecker_products_multiply(seed, m, n):
    """Observation obs:condition-kfac, on which the conditioning argument rests."""
    a, b = randn(seed, (m, m), (n, n))
    a, b = a @ a.T + 0.1 * torch.eye(m).double(), b @ b.T + 0.1 * torch.eye(n).double()
    product = torch.linalg.cond(a) * torch.linalg.cond(b)
    torch.testing.assert_close(torch.linalg.cond(torch.kron(a, b)), product, rtol=1e-9, atol=0)


# Appendix sec:linear-reg-example: the STN's objective has a wrong fixed point


@pytest.mark.parametrize("method", [CenteredSTN(objective="stn"), STN()], ids=name_of)
@given(ridge=ridges(), scale=st.floats(0.05, 0.9))
def test_the_stn_objective_moves_ridge_regression_off_its_solution(method, ridge, scale):
    """Eq. eq:linear-reg-incorrect: given Θ, w₀ is stationary at (XᵀX + λI)⁻¹(Xᵀt − Θσ²)."""
    sigma, matrix = double([scale]), ridge.matrix()
    response, hyper = bound(ridge, method, ridge.weights, ridge.theta)
    (term,) = expected_terms(response, hyper, sigma, (ridge.X, ridge.t))
    wrong = torch.linalg.solve(matrix, ridge.X.T @ ridge.t - ridge.theta.squeeze(1) * scale**2)
    assert_equal(term.weights, matrix @ (ridge.weights - wrong) / len(ridge.X))


@given(ridge=ridges(), scale=st.floats(0.05, 0.9))
def test_the_stn_objective_has_a_wrong_joint_fixed_point(ridge, scale):
    """Eqs. eq:linear-reg-incorrect and eq:linear-reg-l2-jacob together: w₀ = (M − σ²M⁻¹)⁻¹Xᵀt, M = XᵀX + λI."""
    sigma, matrix = double([scale]), ridge.matrix()
    w = torch.linalg.solve(matrix - scale**2 * torch.linalg.inv(matrix), ridge.X.T @ ridge.t)
    theta = -torch.linalg.solve(matrix, w)[:, None]
    response, hyper = bound(ridge, CenteredSTN(objective="stn"), w, theta)
    (term,) = expected_terms(response, hyper, sigma, (ridge.X, ridge.t))
    assert_equal(term.weights, torch.zeros_like(w))
    assert_equal(term.theta, torch.zeros_like(theta))


@pytest.mark.parametrize("method", CENTERED, ids=name_of)
@given(ridge=ridges(), scale=SCALES)
def test_the_centered_objective_has_ridge_regression_as_its_fixed_point(method, ridge, scale):
    """Eqs. eq:new-objective_hw0 and eq:linear-reg-l2-jacob: both gradients vanish at w* and −(XᵀX + λI)⁻¹w*."""
    sigma, matrix = double([scale]), ridge.matrix()
    w = torch.linalg.solve(matrix, ridge.X.T @ ridge.t)
    response, hyper = bound(ridge, method, w, -torch.linalg.solve(matrix, w)[:, None])
    first, second = expected_terms(response, hyper, sigma, (ridge.X, ridge.t))
    assert_equal(first.weights, torch.zeros_like(w))
    assert_equal(second.theta, torch.zeros_like(second.theta))
    assert_equal(first.theta, torch.zeros_like(second.theta))  # the control variate has mean zero
    assert second.weights is None


# Eq. eq:valid-undesirable: the drift of the STN


@given(quadratic=quadratics(), lr=st.floats(1e-3, 0.5))
def test_one_step_of_the_stn_makes_its_hyperparameters_drift(quadratic, lr):
    """Eq. eq:valid-undesirable: without any perturbation the response gradient gains −α⟨∇L_T, ∇L_V⟩λ."""
    solver = solver_at(quadratic.problem(), STN(), quadratic.weights, quadratic.theta, lr=lr)
    hyper = solver.vector.detach().clone()
    perturb_by(solver.response, torch.zeros_like(hyper))
    slope = quadratic.inner_slope(hyper, quadratic.weights)
    solver.inner_step()
    step = solver.outer_step()
    w = quadratic.weights - lr * (1 + hyper @ hyper) * slope
    ahead = quadratic.outer_slope(hyper, w)
    drift = -lr * (slope @ ahead) * hyper
    assert_equal(step.hypergradient, quadratic.direct(hyper, w) + quadratic.theta.T @ ahead + drift)


@pytest.mark.parametrize("method", CENTERED, ids=name_of)
@given(quadratic=quadratics(), lr=st.floats(1e-3, 0.5))
def test_one_step_of_a_centered_method_leaves_the_response_alone(method, quadratic, lr):
    """Without a perturbation w₀ makes the step of plain gradient descent, and Θ does not move."""
    solver = solver_at(quadratic.problem(), method, quadratic.weights, quadratic.theta, lr=lr)
    hyper = solver.vector.detach().clone()
    perturb_by(solver.response, torch.zeros_like(hyper))
    solver.inner_step()
    step = solver.outer_step()
    w = quadratic.weights - lr * quadratic.inner_slope(hyper, quadratic.weights)
    expected = quadratic.direct(hyper, w) + quadratic.theta.T @ quadratic.outer_slope(hyper, w)
    assert_equal(step.hypergradient, expected)
    assert_equal(solver.response.jacobian(hyper), quadratic.theta)


# Appendix app:just-linear


@given(quadratic=quadratics(), scale=SCALES)
def test_steins_identity_turns_a_perturbed_gradient_into_a_cross_derivative(quadratic, scale):
    """E[∂²L_T/∂w∂λ] Σ = E[(∂L_T/∂w) εᵀ], and that is the gradient of Θ where Θ = 0."""
    zero = torch.zeros_like(quadratic.theta)
    perturbed, hyper = bound(quadratic, CenteredSTN(objective="stn"), quadratic.weights, zero)
    sigma = scales(len(hyper), scale)
    correlations = [torch.outer(terms(perturbed, hyper, point)[0].weights, point) for point in points(sigma)]
    assert_equal(torch.stack(correlations).mean(0), quadratic.B * sigma**2)
    for method in CENTERED:
        response, _ = bound(quadratic, method, quadratic.weights, zero)
        assert_equal(expected_terms(response, hyper, sigma)[1].theta, quadratic.B * sigma**2)


@pytest.mark.parametrize("method", CENTERED, ids=name_of)
@given(quadratic=quadratics(), scale=SCALES)
def test_the_perturbed_loss_is_the_trace_objective(method, quadratic, scale):
    """Eq. eq:second-stein-lem: Θ adds tr(BᵀΘΣ) + ½ tr(AΘΣΘᵀ) to the loss, through Δw and through Δy alike."""
    sigma = scales(len(quadratic.hyper), scale)
    covariance, theta = torch.diag(sigma**2), quadratic.theta

    def value(slopes: Tensor) -> Tensor:
        response, hyper = bound(quadratic, method, quadratic.weights, slopes)
        return expected_terms(response, hyper, sigma)[1].value

    first = torch.trace(quadratic.B.T @ theta @ covariance)
    second = torch.trace(quadratic.A @ theta @ covariance @ theta.T)
    base = value(torch.zeros_like(theta))
    assert_equal(value(theta) - base, first + second / 2, 1e-8)
    # Odd in Θ: the first order. Even in Θ: the second.
    assert_equal((value(theta) - value(-theta)) / 2, first, 1e-8)


@given(seed=SEEDS, h=st.integers(1, 3))
def test_the_linearised_loss_is_its_gauss_newton_expansion(seed, h):
    """On a nonlinear network L(y + Δy) = L + ⟨∂L/∂y, Δy⟩ + ½ ΔyᵀH_yΔy with Δy = J_yw Θε, for squared error."""
    network = Tanh(2, 3, 2, seed)
    x, t, hyper, noise, theta = randn(seed + 1, (4, 2), (4, 2), (h,), (h,), (12, h))
    problem = Problem(
        network,
        inner_loss=lambda model, hyper, batch: (model(x) - t).square().sum() / 2,
        outer_loss=lambda model, hyper, batch: model(x).sum(),
        hyper={"x": bilevel.real(hyper)},
    )
    response = dense(DeltaSTN()).bind(problem)
    set_response(response, hyper, flat_weights(response, hyper), theta)
    base, linearised = (term.value for term in terms(response, hyper, noise))
    w, v = network.W.detach(), network.V.detach()
    change = torch.stack([Tanh.jacobian(w, v, row) @ theta @ noise for row in x])
    residual = torch.tanh(x @ w.T) @ v.T - t
    assert_equal(linearised - base, (residual * change).sum() + change.square().sum() / 2)


# Eq. eq:valid-loss-decompose: direct and response gradient


@pytest.mark.parametrize("method", HYPERNETWORKS)
@given(quadratic=quadratics())
def test_the_hypergradient_is_exact_where_the_response_is(method, quadratic):
    """At w* and −A⁻¹B every method gives the gradient of L_V(λ, w*(λ)) by the implicit function theorem."""
    hyper = quadratic.hyper
    w, jacobian = quadratic.solution(hyper), quadratic.jacobian()
    step = solver_at(quadratic.problem(), method, w, jacobian).outer_step()
    assert_equal(step.direct, quadratic.direct(hyper, w), 1e-8)
    assert_equal(step.hypergradient - step.direct, jacobian.T @ quadratic.outer_slope(hyper, w), 1e-8)
    assert_equal(step.loss, quadratic.outer(hyper, w), 1e-8)


@pytest.mark.parametrize("method", HYPERNETWORKS)
@given(quadratic=quadratics())
def test_the_hypergradient_agrees_with_finite_differences(method, quadratic):
    """The same gradient from central differences of the outer loss at the solved inner problem."""
    hyper = quadratic.hyper
    step = solver_at(quadratic.problem(), method, quadratic.solution(hyper), quadratic.jacobian()).outer_step()

    def outer(point: Tensor) -> Tensor:
        return quadratic.outer(point, quadratic.solution(point))

    shifts = 1e-3 * torch.eye(len(hyper)).double()
    expected = torch.stack([(outer(hyper + shift) - outer(hyper - shift)) / 2e-3 for shift in shifts])
    assert_equal(step.hypergradient, expected, 1e-7)


@pytest.mark.parametrize("method", HYPERNETWORKS)
@given(x=st.floats(0.1, 3.0), rate=st.floats(0.1, 0.9), slope=st.floats(-3.0, 3.0))
def test_the_direct_gradient_passes_through_the_transforms(method, x, rate, slope):
    """L_V = w x² + rate has direct gradient 2wx² in log x, plus s'(λ) of the interval; no λ is detached."""
    problem = Problem(
        {"w": double([2.0])},
        inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["x"]).square().sum(),
        outer_loss=lambda model, hyper, batch: model.params["w"].sum() * hyper["x"] ** 2 + hyper["rate"],
        hyper={"x": bilevel.positive(x), "rate": bilevel.interval(0.0, 1.0, init=rate)},
    )
    theta = double([[slope, -slope]])
    step = solver_at(problem, method, double([2.0]), theta).outer_step()
    assert_equal(step.direct, double([4 * x**2, rate * (1 - rate)]))
    assert_equal(step.hypergradient - step.direct, x**2 * theta[0])


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_the_outer_step_descends_along_the_hypergradient(method):
    """One SGD step moves λ by −lr times the reported hypergradient, direct part included."""
    quadratic = make_quadratic(3, 2, seed=0, network=True)
    solver = solver_at(quadratic.problem(), method, quadratic.weights, quadratic.theta, outer_lr=0.25)
    step = solver.outer_step()
    assert step.direct.abs().min() > 0.1
    assert_equal(solver.vector.detach(), quadratic.hyper - 0.25 * step.hypergradient)
