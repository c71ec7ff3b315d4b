"""Antithetic pairs and the control variate: the same expected gradient of Θ, without the noise of every example."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SCALES, SEEDS, assert_equal, double, quadratics, randn, set_response, sgd, terms
from test_per_example import Net, batch_of, draw_noise, natural, penalty, predict, problem_of, scramble, slow_term
from torch import nn
from torch.distributions.transforms import SoftplusTransform
from torch.func import jvp
from torch.nn import functional as F

import bilevel
from bilevel import CenteredSTN, DeltaSTN, Problem, Solver
from bilevel.rng import Repeated, Stream

CPU = torch.device("cpu")
BOTH = {"centered_stn": CenteredSTN, "delta_stn": DeltaSTN}
LESS = {"control": {"control": True}, "pairs": {"antithetic": True}}


# On a quadratic, in closed form


@pytest.mark.parametrize("less", LESS)
@pytest.mark.parametrize("method", BOTH)
@given(quadratic=quadratics(), seed=SEEDS)
def test_for_every_single_perturbation_only_the_signal_is_left(method, less, quadratic, seed):
    """The gradient of Θ is (AΘ + B)εεᵀ for each ε, wherever w₀ is; w₀ trains as without a perturbation."""
    problem = quadratic.problem()
    response = BOTH[method](structure="dense", **LESS[less]).bind(problem)
    set_response(response, quadratic.hyper, quadratic.weights, quadratic.theta)
    (noise,) = randn(seed, quadratic.hyper.shape)
    first, *rest = terms(response, quadratic.hyper, noise)
    signal = (quadratic.A @ quadratic.theta + quadratic.B) @ torch.outer(noise, noise)
    found = [term.theta for term in (first, *rest) if term.theta is not None]
    assert len(rest) == (2 if less == "pairs" else 1)
    assert_equal(sum(found), signal)
    assert_equal(first.weights, quadratic.inner_slope(quadratic.hyper, quadratic.weights))
    assert_equal(first.value, quadratic.inner(quadratic.hyper, quadratic.weights))
    assert all(term.weights is None for term in rest)


@pytest.mark.parametrize("method", BOTH)
@given(quadratic=quadratics(), seed=SEEDS)
def test_the_paper_leaves_the_whole_gradient_as_noise(method, quadratic, seed):
    """What is removed above: the slope of w₀ times ε."""
    response = BOTH[method](structure="dense", control=False).bind(quadratic.problem())
    set_response(response, quadratic.hyper, quadratic.weights, quadratic.theta)
    (noise,) = randn(seed, quadratic.hyper.shape)
    first, second = terms(response, quadratic.hyper, noise)
    signal = (quadratic.A @ quadratic.theta + quadratic.B) @ torch.outer(noise, noise)
    slope = quadratic.inner_slope(quadratic.hyper, quadratic.weights)
    assert first.theta is None
    assert_equal(second.theta, signal + torch.outer(slope, noise))


@pytest.mark.parametrize("method", BOTH)
@given(quadratic=quadratics(), seed=SEEDS, entropy=st.sampled_from([0.0, 0.3]))
def test_an_outer_step_takes_the_mean_of_a_perturbation_and_its_negative(method, quadratic, seed, entropy):
    """λ gets the slope at no perturbation, since the loss is quadratic; σ gets only what is quadratic in z."""
    solver = Solver(
        quadratic.problem(),
        method=BOTH[method](structure="dense", entropy=entropy, scale=0.7),
        inner_optimizer=sgd(0.1),
        outer_optimizer=sgd(1.0),
    )
    set_response(solver.response, quadratic.hyper, quadratic.weights, quadratic.theta)
    (z,) = randn(seed, quadratic.hyper.shape)
    scale = solver.response.scale
    scale.sample = lambda examples=None: scale() * z
    raw = scale.raw.detach().clone()
    step = solver.outer_step()
    hyper, w, theta = quadratic.hyper, quadratic.weights, quadratic.theta
    direct = quadratic.direct(hyper, w)
    assert_equal(step.direct, direct)
    assert_equal(step.hypergradient, direct + theta.T @ quadratic.outer_slope(hyper, w))
    total = quadratic.R + theta.T @ quadratic.P @ theta + quadratic.Q.T @ theta + theta.T @ quadratic.Q
    slope = z * (total @ (0.7 * z)) - entropy / 0.7
    assert_equal(raw - scale.raw.detach(), slope / (1 + torch.exp(-raw)))
    sides = [quadratic.outer(hyper + sign * 0.7 * z, w + sign * 0.7 * theta @ z) for sign in (1, -1)]
    assert_equal(step.loss, sum(sides) / 2)


@pytest.mark.parametrize("less", LESS)
@pytest.mark.parametrize("method", BOTH)
@given(quadratic=quadratics(), seed=SEEDS, scale=SCALES, learned=st.booleans())
def test_a_step_of_sgd_learns_the_same_whatever_the_scale(method, less, quadratic, seed, scale, learned):
    """The gradient is (AΘ + B)zzᵀ for ε = σz, divided by an entry of σ² for each hyperparameter that responds."""
    h = len(quadratic.hyper)
    solver = Solver(
        quadratic.problem(),
        method=BOTH[method](structure="dense", scale=scale, entropy=0.1 if learned else None, **LESS[less]),
        inner_optimizer=sgd(0.1),
    )
    sigma = torch.full((h,), scale, dtype=torch.float64)
    if learned:  # each entry then has a scale of its own
        sigma = scale * torch.linspace(1, 3, h, dtype=torch.float64)
        solver.response.scale.raw.data = SoftplusTransform().inv(sigma)
    set_response(solver.response, quadratic.hyper, quadratic.weights, quadratic.theta)
    (z,) = randn(seed, (h,))
    solver.response.scale.sample = lambda examples=None: sigma * z
    solver.inner_step()
    found = torch.cat([slope.detach().reshape(h, -1) for slope in solver.response.theta.parameters()], 1).T
    gradient = (quadratic.A @ quadratic.theta + quadratic.B) @ torch.outer(sigma * z, sigma * z) / sigma**2
    assert_equal(found, quadratic.theta - 0.1 * gradient, 1e-8)


@pytest.mark.parametrize("settings", [{"structure": "gate"}, {"structure": "rowwise"}, {"perturb": "batch"}], ids=str)
@given(seed=SEEDS, scale=SCALES)
def test_all_parts_of_a_response_learn_the_same_whatever_the_scale(settings, seed, scale):
    """A linear network and a squared error that is linear in λ: rows, and directions that are learned as well."""
    x, y = randn(seed, (4, 3), (4, 2))
    theta = []
    for sigma in (1.0, scale):
        problem = Problem(
            nn.Linear(3, 2, dtype=torch.float64),
            inner_loss=lambda model, hyper, batch: (model(x) - y - hyper["shift"].reshape(-1, 1)).square().mean(-1),
            outer_loss=lambda model, hyper, batch: model(x).square().mean(),
            hyper={"shift": bilevel.real(double(0.3))},
            examples=lambda batch: 4,
        )
        torch.manual_seed(seed)
        problem.module.reset_parameters()
        solver = Solver(problem, method=DeltaSTN(scale=sigma, **settings), inner_optimizer=sgd(0.05))
        solver.inner_step(0)
        theta.append([param.detach().clone() for param in solver.response.theta.parameters()])
    assert any(param.abs().max() > 1e-6 for param in theta[0])
    for one, other in zip(*theta, strict=True):
        assert_equal(one, other, 1e-8)


def test_the_papers_gradient_keeps_its_scale():
    """With the noise still in, a small scale divided out would drown the signal."""
    response = DeltaSTN.paper(scale=0.1).bind(problem_of(Net()))
    gradients = [torch.ones_like(param) for param in response.theta.parameters()]
    assert response.scaled(gradients) is gradients


# With masks, penalties and a perturbation for each example


def gated(response, weights, shift):
    """The weights (1 + Uδ) ⊙ W and b + Vδ, and their change, entry by entry."""
    changes = {}
    gate = response.theta.gate
    for name, factor in zip(gate.names, gate.factors, strict=True):
        grow = factor @ shift
        changes[name] = grow[:, None] * weights[name] if weights[name].ndim > 1 else grow
    return {name: w + changes[name] for name, w in weights.items()}, changes


slow_loss = partial(slow_term, materialize=gated)


@pytest.mark.parametrize("less", LESS)
@pytest.mark.parametrize("method", BOTH)
@given(count=st.sampled_from([1, 2, 5]), seed=SEEDS)
def test_gates_learn_from_the_difference_to_no_perturbation_with_the_same_masks(method, less, count, seed):
    """Against a loop over the examples: dropout, decay, lasso, a shared hyperparameter."""
    problem = problem_of(Net(seed))
    response, hyper, batch = BOTH[method](**LESS[less]).bind(problem), problem.initial_hyper(), batch_of(count, seed)
    scramble(response, seed)
    weights, theta = list(response.inner.weights), list(response.theta.parameters())
    with Stream(seed, CPU)():
        losses = [loss.value for loss in response.inner_loss(hyper, batch)]
        after = torch.rand(3)
    found = torch.autograd.grad(sum(losses), weights + theta)

    with Stream(seed, CPU)():
        noise = draw_noise(count)
        uniform = torch.rand(count, 5, dtype=torch.float64)
        assert torch.equal(after, torch.rand(3))  # numbers that are drawn twice count once
    live, frozen = response.inner.params(), {name: w.detach() for name, w in response.inner.params().items()}
    same, linearized = hyper.expand(count, -1), method == "delta_stn"
    plain = slow_loss(response, live, 0 * noise, same, batch, uniform, linearized=False)
    of_weights = torch.autograd.grad(plain, weights)
    assert_equal(losses[response.reported].detach(), plain.detach())

    def slope(shift):
        loss = slow_loss(response, frozen, shift, hyper + shift, batch, uniform, linearized=linearized)
        return torch.autograd.grad(loss, theta)[0]

    if less == "pairs":
        expected = (slope(noise) + slope(-noise)) / 2
    else:  # the slope along the response where there is none, by a step so small that the rest vanishes
        none = slow_loss_along(response, frozen, noise, same, batch, uniform)
        expected = slope(noise) - torch.autograd.grad(none, theta)[0]
    for one, other in zip(found, [*of_weights, expected], strict=True):
        assert_equal(one, other)


def slow_loss_along(response, weights, noise, hypers, batch, uniform):
    """The derivative of the loss at w₀ and λ along the change of the weights, a function of Θ."""
    total = 0
    for x, t, shift, vector, u in zip(*batch, noise, hypers, uniform, strict=True):
        hyper = natural(vector)
        _, change = gated(response, weights, shift)
        mask = (u >= hyper["rate"]).double() / (1 - hyper["rate"])

        def loss(w, x=x, t=t, mask=mask, hyper=hyper):
            return F.cross_entropy(predict(w, x, mask), t) + penalty(w, hyper)

        total = total + jvp(loss, (weights,), (change,))[1]
    return total / len(noise)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("perturb", ["batch", "example"])
def test_the_noise_of_one_step_is_a_small_share_of_the_papers(method, perturb):
    """Standard deviation of the gradient of Θ over perturbations, at a small scale and away from the solution."""
    spreads = []
    for less in ({"control": False}, {"control": True}, {"antithetic": True}):
        settings = {"scale": 0.01, "structure": "gate", "perturb": perturb}
        problem = problem_of(Net())
        response, hyper = BOTH[method](**settings, **less).bind(problem), problem.initial_hyper()
        scramble(response, 0)
        problem.module.eval()
        slopes = []
        with Stream(0, CPU)():
            for _ in range(30):
                total = sum(loss.value for loss in response.inner_loss(hyper, batch_of(4)))
                slopes.append(torch.autograd.grad(total, response.theta.gate.factor)[0])
        spreads.append(float(torch.stack(slopes).std(0).norm()))
    assert max(spreads[1:]) < 0.3 * spreads[0]  # what flips masks remains


# Common random numbers


RATE = torch.tensor([0.3, 0.31, 0.29, 0.3])


def images(count=4):
    return torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(0))


TOKENS = torch.arange(8).reshape(4, 2)
MIXTURE = bilevel.regularizers.Mixture.of(images(), torch.arange(4))
HELPERS = {
    "dropout": lambda rate: bilevel.functional.dropout(torch.ones(4, 50), rate),
    "dropout of channels": lambda rate: bilevel.functional.dropout(images(), rate, shared_dims=(2, 3)),
    "embedding_dropout": lambda rate: bilevel.functional.embedding_dropout(TOKENS, torch.ones(4, 2, 3), rate, size=8),
    "alpha_dropout": lambda rate: bilevel.functional.alpha_dropout(torch.ones(4, 50), rate),
    "flip": lambda rate: bilevel.augment.flip(images(64), rate.repeat(16)),
    "drop_connect": lambda rate: bilevel.functional.drop_connect(torch.ones(9, 9), rate[0]),
    "gaussian_noise": lambda rate: bilevel.functional.gaussian_noise(torch.ones(4, 50), rate),
    "F.dropout": lambda rate: F.dropout(torch.ones(4, 50), 0.5) * rate[:, None],
    "bernoulli": lambda rate: torch.bernoulli(rate[:, None].expand(4, 50)),
    "nn.RReLU": lambda rate: nn.RReLU()(-torch.ones(4, 50)) * rate[:, None],
    "brightness": lambda rate: bilevel.augment.brightness(images(), rate),
    "contrast": lambda rate: bilevel.augment.contrast(images(), rate),
    "saturation": lambda rate: bilevel.augment.saturation(images(), rate),
    "hue": lambda rate: bilevel.augment.hue(images(), rate),
    "noise": lambda rate: bilevel.augment.noise(images(), rate),
    "cutout": lambda rate: bilevel.augment.cutout(images(), 10 * rate, 7 * rate),
    "mixup": lambda rate: bilevel.regularizers.Mixup().on_batch(MIXTURE, {"mixup": rate}).x,
    "cutmix": lambda rate: bilevel.regularizers.CutMix().on_batch(MIXTURE, {"cutmix": rate}).x,
    "affine": lambda rate: bilevel.augment.apply(
        images(), {"translation": rate, "rotation": 30 * rate, "scale": rate, "shear": rate}
    ),
}


DRAW_NOTHING = {"cross_entropy", "l1", "l2", "mse_loss", "per_example", "temperature"}


def test_every_helper_that_draws_is_tried():
    made = {"apply", "images", "Images"}  # of the others
    assert {*bilevel.functional.__all__, *bilevel.augment.__all__} - DRAW_NOTHING - made <= HELPERS.keys()


@pytest.mark.parametrize("name", HELPERS)
def test_helpers_draw_the_same_numbers_whatever_the_strength(name):
    """Equal strengths give equal results, and others leave the random state where it was."""
    helper, again = HELPERS[name], Repeated(CPU)
    with Stream(0, CPU)():
        with again():
            one, state = helper(RATE), torch.get_rng_state()
        assert torch.equal(torch.get_rng_state(), state)
        with again():
            assert torch.equal(helper(RATE), one)
        with again():
            other, after = helper(1.5 * RATE), torch.get_rng_state()
            assert torch.equal(after, state)  # as many numbers
        assert not torch.equal(other, one)
        assert torch.equal(torch.get_rng_state(), state)
        with again():
            share = (helper(RATE * (1 + 1e-6)) - one).abs().gt(1e-3).double().mean()
        assert share < 0.01  # the same masks, but for what flips
        assert not torch.equal(helper(RATE), one)  # outside, the stream goes on


@pytest.mark.parametrize("less", LESS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
def test_the_passes_of_a_step_draw_the_same_masks(less, autocast, batches):
    """Under autocast and with accumulated batches, too; the paper's passes draw their own."""
    for settings, same in ((LESS[less], True), ({"control": False}, False)):
        masks = []

        def loss(model, hyper, batch, masks=masks):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                x = bilevel.functional.dropout(batch[0], 0.5)
                masks.append(x != 0)
                return (model(x).float() - batch[1]).square().mean(1) + hyper["decay"] * bilevel.l2(model.params)

        problem = Problem(nn.Linear(6, 2), inner_loss=loss, outer_loss=loss, hyper={"decay": bilevel.positive(0.1)})
        solver = Solver(problem, method=DeltaSTN(**settings), inner_optimizer=sgd(0.01))
        data = [(torch.randn(4, 6), torch.randn(4, 2)) for _ in range(batches)]
        solver.inner_step(*data)
        masks.clear()
        solver.inner_step(*data)
        passes = 3 if "antithetic" in settings else 2
        assert len(masks) == passes * batches
        for start in range(0, len(masks), passes):
            assert all(torch.equal(mask, masks[start]) for mask in masks[start : start + passes]) == same
        assert batches == 1 or not torch.equal(masks[0], masks[passes])


# Settings


def test_what_cannot_be_had_is_refused():
    problem = problem_of(Net())
    for method in BOTH.values():
        with pytest.raises(ValueError, match=r"antithetic=True and control=True remove the same noise twice"):
            method(antithetic=True, control=True)
        for name in ("antithetic", "control"):
            with pytest.raises(ValueError, match=f"{name} must be True, False or None, got 'yes'"):
                method(**{name: "yes"})
        with pytest.raises(ValueError, match=r"control=True.*rowwise.*antithetic=True.*perturb='batch'"):
            method(structure="rowwise", control=True).bind(problem)


@pytest.mark.parametrize("settings", [{"antithetic": True}, {"control": True}])
def test_one_loss_for_both_parts_has_nothing_to_subtract(settings):
    with pytest.raises(ValueError, match=r"objective='stn'.*leave them out"):
        CenteredSTN(objective="stn", **settings)
    assert not CenteredSTN(objective="stn", entropy=1e-3).bind(problem_of(Net())).antithetic_outer


@pytest.mark.parametrize("method", BOTH.values())
@pytest.mark.parametrize(
    ("settings", "antithetic", "subtracts"),
    [
        ({}, False, True),
        ({"structure": "rowwise"}, True, False),
        ({"structure": {"one.*": "rowwise"}}, True, False),
        ({"structure": "rowwise", "perturb": "batch"}, False, True),
        ({"structure": "rowwise", "perturb": "batch", "control": True}, False, True),
        ({"structure": "dense"}, False, True),
        ({"antithetic": True}, True, False),
        ({"antithetic": False}, False, True),
        ({"antithetic": False, "structure": "rowwise"}, False, False),
        ({"control": False}, False, False),
        ({"control": False, "antithetic": True}, True, False),
    ],
)
def test_what_is_done_by_default(method, settings, antithetic, subtracts):
    response = method(**settings).bind(problem_of(Net()))
    assert (response.antithetic, response.subtracts) == (antithetic, subtracts)


@pytest.mark.parametrize("method", [partial(DeltaSTN), partial(CenteredSTN), partial(DeltaSTN, antithetic=True)])
def test_the_weights_train_as_without_a_response(method):
    """With an optimizer of its own for Θ, w₀ is that of plain SGD to rounding, also through penalties and masks."""
    problem = problem_of(Net())
    solver = Solver(problem, method=method(scale=2.0), inner_optimizer=sgd(0.1), seed=3)
    scramble(solver.response, 1)
    net, batch = Net(), batch_of(6)
    optimizer, hyper = torch.optim.SGD(net.parameters(), lr=0.1), dict(solver.hyper)
    model = bilevel.Model(dict(net.named_parameters()), net)
    for step in range(4):
        with solver.streams["loss"]():
            state = [part.clone() for part in solver.streams["loss"].states]
        solver.inner_step(batch)
        with Stream.current(CPU)():
            torch.set_rng_state(state[0])
            if solver.response.learns(step, solver.optimizers["response"]):
                draw_noise(6)
            optimizer.zero_grad()
            problem.user_losses["inner_loss"](model, hyper, batch).mean().backward()
        optimizer.step()
    for name, value in net.named_parameters():
        assert_equal(solver.params[name], value.detach())
    assert double(solver.response.theta.gate.factor.detach().tolist()).abs().max() > 0
