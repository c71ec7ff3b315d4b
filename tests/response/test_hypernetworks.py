"""STN, centered STN and Δ-STN differ only as the paper says."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    SEEDS,
    Tanh,
    assert_equal,
    double,
    flat_weights,
    network_problem,
    perturb_by,
    quadratics,
    randn,
    scramble,
    set_response,
    sgd,
    solver_at,
    terms,
)
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional as F

import bilevel
from bilevel import Problem, Solver

# The full Jacobian and one perturbation per batch; tests/response/test_per_example.py is about responses by rows. As in
# the paper; tests/response/test_noise.py is about less noise.
STN = partial(bilevel.STN, structure="dense")
CenteredSTN, DeltaSTN = (
    partial(method, structure="dense", control=False) for method in (bilevel.CenteredSTN, bilevel.DeltaSTN)
)
THREE = [STN, CenteredSTN, DeltaSTN]


def bound(method, network: nn.Module, seed: int):
    """A response with random slopes, λ, a perturbation and a batch."""
    problem = network_problem(network)
    response, hyper = method.bind(problem), problem.initial_hyper()
    scramble(response, hyper, seed)
    x, t, noise = randn(seed + 1, (5, 3), (5, 2), (len(hyper),))
    return response, hyper, noise, (x, t)


def linear_network(seed: int) -> nn.Module:
    """A network linear in its weights, with two outputs and a bias."""
    network = nn.Linear(3, 2).double()
    network.load_state_dict(dict(zip(("weight", "bias"), randn(seed, (2, 3), (2,)), strict=True)))
    return network


@given(seed=SEEDS)
def test_on_a_linear_network_centered_and_delta_are_the_same(seed):
    """Both terms, values and all gradients, for any w₀, Θ and ε: there is nothing to linearise."""
    network = linear_network(seed)
    centered, delta = (terms(*bound(method, network, seed)) for method in (CenteredSTN(), DeltaSTN()))
    for one, other in zip(centered, delta, strict=True):
        assert_equal(one.value, other.value, 1e-12)
    assert_equal(centered[0].weights, delta[0].weights, 1e-12)
    assert_equal(centered[1].theta, delta[1].theta, 1e-12)


@given(seed=SEEDS)
def test_on_a_nonlinear_network_they_differ_in_the_second_term_only(seed):
    """w₀ is trained alike; Θ sees the network, or its linearisation."""
    network = Tanh(3, 4, 2, seed)
    centered, delta = (terms(*bound(method, network, seed)) for method in (CenteredSTN(), DeltaSTN()))
    assert torch.equal(centered[0].value, delta[0].value)
    assert torch.equal(centered[0].weights, delta[0].weights)
    assert (centered[1].value - delta[1].value).abs() > 1e-8
    assert (centered[1].theta - delta[1].theta).abs().max() > 1e-8


@given(seed=SEEDS)
def test_where_theta_is_zero_centered_and_delta_push_it_alike(seed):
    """Linearisation changes nothing to first order: both gradients are (∂L/∂w) εᵀ at w₀."""
    network = Tanh(3, 4, 2, seed)
    both = []
    for method in (CenteredSTN(), DeltaSTN()):
        response, hyper, noise, batch = bound(method, network, seed)
        for slope in response.theta.slopes:
            slope.data.zero_()
        both.append(terms(response, hyper, noise, batch)[1])
    assert_equal(both[0].theta, both[1].theta, 1e-12)


@given(seed=SEEDS)
def test_delta_predicts_with_a_jacobian_vector_product(seed):
    """f(x, w₀) + J_yw Θε as torch.func.jvp gives it, and ``params`` are w₀ + Θε."""
    network = Tanh(3, 4, 2, seed)
    response, _, noise, (x, _) = bound(DeltaSTN(), network, seed)
    model = response.affine(noise, freeze_weights=True, linearized=True)
    weights = {name: value.detach() for name, value in response.inner.params().items()}
    change = {name: value.detach() for name, value in response.change(noise).items()}
    value, slope = jvp(lambda params: functional_call(network, params, (x,)), (weights,), (change,))
    assert_equal(model(x).detach(), value + slope, 1e-10)
    for name, param in model.params.items():
        assert_equal(param.detach(), weights[name] + change[name], 1e-12)


@pytest.mark.parametrize("method", THREE)
@given(seed=SEEDS)
def test_the_outer_level_is_not_linearised(method, seed):
    """forward at λ + δ predicts with the network itself, at the weights w₀ + Θδ."""
    network = Tanh(3, 4, 2, seed)
    response, hyper, noise, (x, _) = bound(method(), network, seed)
    model = response(hyper + noise, center=hyper)
    assert_equal(model(x).detach(), functional_call(network, dict(model.params), (x,)).detach(), 1e-12)
    before = flat_weights(response, hyper)
    moved = torch.cat([value.detach().flatten() for value in model.params.values()])
    assert_equal(moved - before, response.jacobian(hyper) @ noise, 1e-10)


@given(seed=SEEDS)
def test_an_stn_shifted_by_the_center_is_a_centered_one(seed):
    """With φ₀ = w₀ − Φλ₀ both have the same weights everywhere, and the same perturbed loss."""
    network = Tanh(3, 4, 2, seed)
    stn, hyper, noise, batch = bound(STN(), network, seed)
    centered, *_ = bound(CenteredSTN(), network, seed)
    coupled, *_ = bound(CenteredSTN(objective="stn"), network, seed)
    for name, value in stn(hyper + 3 * noise).params.items():
        assert_equal(centered(hyper + 3 * noise, center=hyper).params[name].detach(), value.detach())
    (uncentered,) = terms(stn, hyper, noise, batch)
    (one,) = terms(coupled, hyper, noise, batch)
    _, perturbed = terms(centered, hyper, noise, batch)
    assert_equal(uncentered.value, one.value)
    assert_equal(uncentered.value, perturbed.value)
    assert_equal(uncentered.weights, one.weights)
    assert_equal(perturbed.theta, one.theta)
    assert_equal(one.theta, torch.outer(one.weights, noise))
    assert_equal(uncentered.theta, torch.outer(one.weights, hyper + noise))


@pytest.mark.parametrize("method", [CenteredSTN(), DeltaSTN()], ids=["centered", "delta"])
@pytest.mark.parametrize("part", ["prediction", "penalty", "both"])
def test_weights_are_frozen_wherever_they_are_perturbed(method, part):
    """The second term has no gradient in w₀, penalties included; the first has none in Θ."""

    def loss(model, hyper, batch):
        prediction = F.mse_loss(model(batch[0]), batch[1]) if part != "penalty" else 0
        return prediction + (hyper["decay"] * bilevel.l2(model.params) if part != "prediction" else 0)

    problem = Problem(Tanh(3, 4, 2), inner_loss=loss, outer_loss=loss, hyper={"decay": bilevel.positive(0.1)})
    response, hyper = method.bind(problem), problem.initial_hyper()
    scramble(response, hyper)
    first, second = terms(response, hyper, double([0.7]), tuple(randn(1, (5, 3), (5, 2))))
    assert first.weights.abs().max() > 0
    assert first.theta is None
    assert second.weights is None
    assert second.theta.abs().max() > 0


@pytest.mark.parametrize("method", [CenteredSTN, DeltaSTN])
def test_the_weights_train_as_without_a_hypernetwork(method):
    """However large the perturbation, w₀ follows plain SGD on the unperturbed loss bit for bit."""
    network = Tanh(3, 4, 2)
    solver = Solver(network_problem(network), method=method(scale=3.0), inner_optimizer=sgd(0.1))
    batch = tuple(randn(1, (5, 3), (5, 2)))
    plain = copy.deepcopy(network)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(5):
        solver.inner_step(batch)
        optimizer.zero_grad()
        (F.mse_loss(plain(batch[0]), batch[1]) + solver.hyper["decay"] * bilevel.l2(plain.parameters())).backward()
        optimizer.step()
    for name, value in plain.named_parameters():
        assert torch.equal(solver.params[name], value.detach())
    assert solver.response.jacobian(solver.vector.detach()).abs().max() > 0


# The perturbation scale


@pytest.mark.parametrize("method", THREE)
@given(quadratic=quadratics(), entropy=st.floats(0.0, 2.0), scale=st.floats(0.1, 2.0), seed=SEEDS)
def test_a_learned_scale_descends_the_perturbed_outer_loss_and_its_entropy(method, quadratic, entropy, scale, seed):
    """Eq. eq:stn-val-obj for one z: ∂/∂σᵢ = zᵢ [∂L_V/∂λ + Θᵀ∂L_V/∂w]ᵢ − τ/σᵢ at λ + σz, times softplus'."""
    settings = method(entropy=entropy, scale=scale)
    solver = solver_at(quadratic.problem(), settings, quadratic.weights, quadratic.theta, outer_lr=1.0)
    (z,) = randn(seed, quadratic.hyper.shape)
    perturbation = solver.response.scale
    perturbation.sample = lambda examples=None: perturbation() * z
    raw = perturbation.raw.detach().clone()
    step = solver.outer_step()
    hyper, w = quadratic.hyper + scale * z, quadratic.weights + quadratic.theta @ (scale * z)
    direct = quadratic.direct(hyper, w)
    total = direct + quadratic.theta.T @ quadratic.outer_slope(hyper, w)
    assert_equal(step.loss, quadratic.outer(hyper, w), 1e-8)
    assert_equal(step.direct, direct, 1e-8)
    assert_equal(step.hypergradient, total, 1e-8)
    assert_equal(raw - perturbation.raw.detach(), (z * total - entropy / scale) / (1 + torch.exp(-raw)), 1e-8)


@pytest.mark.parametrize("method", THREE)
def test_the_inner_level_does_not_train_the_scale(method):
    """A learned σ is moved by outer steps only."""
    solver = Solver(network_problem(Tanh(3, 4, 2)), method=method(entropy=0.1), inner_optimizer=sgd(0.1))
    raw = solver.response.scale.raw.detach().clone()
    batch = tuple(randn(1, (5, 3), (5, 2)))
    solver.inner_step(batch)
    assert torch.equal(solver.response.scale.raw, raw)
    solver.outer_step(batch, batch)
    assert not torch.equal(solver.response.scale.raw, raw)


@pytest.mark.parametrize("method", THREE)
@given(quadratic=quadratics(), seed=SEEDS)
def test_the_outer_loss_is_perturbed_on_request(method, quadratic, seed):
    """A fixed σ leaves the outer step unperturbed, unless perturb_outer=True."""
    (noise,) = randn(seed, quadratic.hyper.shape)
    for perturb, shift in ((None, 0 * noise), (False, 0 * noise), (True, noise)):
        settings = method(perturb_outer=perturb)
        solver = solver_at(quadratic.problem(), settings, quadratic.weights, quadratic.theta)
        perturb_by(solver.response, noise)
        expected = quadratic.outer(quadratic.hyper + shift, quadratic.weights + quadratic.theta @ shift)
        assert_equal(solver.outer_step().loss, expected)


# What does not fit


@pytest.mark.parametrize("method", THREE)
def test_a_response_larger_than_the_limit_is_refused(method):
    """The error has the number and the remedy; max_gigabytes lifts the limit."""
    problem = Problem(
        {"w": torch.zeros(2000)},
        inner_loss=lambda model, hyper, batch: model.params["w"].sum(),
        outer_loss=lambda model, hyper, batch: model.params["w"].sum(),
        hyper={"weights": bilevel.real(torch.zeros(1_000_000))},
    )
    with pytest.raises(MemoryError, match=r"2,000 weights to 1,000,000 hyperparameters takes 8.0 GB.*max_gigabytes"):
        method().bind(problem)
    with pytest.raises(MemoryError, match="the limit is 1e-07 GB"):
        method(max_gigabytes=1e-7).bind(network_problem(Tanh(3, 4, 2)))


def test_a_dense_jacobian_larger_than_the_limit_is_refused():
    """``jacobian`` has the same guard."""
    problem = network_problem(Tanh(3, 4, 2))
    with pytest.raises(MemoryError, match=r"takes 0.0 GB.*the limit is 1e-09 GB"):
        STN().bind(problem).jacobian(problem.initial_hyper(), max_gigabytes=1e-9)


class Recurrent(nn.Module):
    """An nn.LSTM, whose kernel on a CPU has no forward mode, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("perturb", [None, "batch"])
@pytest.mark.parametrize("method", THREE)
def test_an_lstm_is_trained(method, perturb):
    """Also in forward mode, which its kernel does not have."""
    solver = Solver(network_problem(Recurrent()), method=method(perturb=perturb), inner_optimizer=sgd(0.1))
    before = solver.params
    batch = (torch.ones(5, 6, 3), torch.ones(5, 2))
    solver.inner_step(batch)
    solver.outer_step(batch, batch)
    assert all(not torch.equal(solver.params[name], value) for name, value in before.items())


def test_set_response_is_seen_by_the_solver():
    """The helper of these tests: at λ the response has the weights and the Jacobian that it was given."""
    problem = network_problem(Tanh(3, 4, 2))
    hyper = problem.initial_hyper()
    w, theta = randn(0, (20,), (20, len(hyper)))
    for method in THREE:
        response = method().bind(problem)
        set_response(response, hyper, w, theta)
        assert_equal(flat_weights(response, hyper), w)
        assert_equal(response.jacobian(hyper), theta)


@pytest.mark.parametrize("transform", [False, True])
@pytest.mark.parametrize("perturb", ["batch", "example"])
@pytest.mark.parametrize(
    ("norm", "right"),
    [(nn.LayerNorm(4), False), (nn.BatchNorm1d(4, track_running_stats=False), False), (nn.GroupNorm(2, 4), True)],
)
def test_derivatives_in_the_input_through_norms_are_refused_where_pytorch_is_wrong(norm, right, perturb, transform):
    def inner_loss(model, hyper, batch):
        if transform:
            slope = torch.func.grad(lambda x: model(x).sum())(batch)
        else:
            x = batch.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return model(batch).square().mean(1) + hyper["penalty"] * slope.square().mean(1)

    def outer_loss(model, hyper, batch):
        return model(batch).square().mean()

    net = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1))
    hyper = {"penalty": bilevel.positive(0.1)}
    problem = bilevel.Problem(net, inner_loss=inner_loss, outer_loss=outer_loss, hyper=hyper)
    solver = bilevel.Solver(problem, method=bilevel.DeltaSTN(perturb=perturb))
    batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    if right:
        solver.inner_step(batch)
        return
    with pytest.raises(NotImplementedError, match=r"through (layer|batch)_norm.*centered_stn"):
        solver.inner_step(batch)
