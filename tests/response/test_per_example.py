"""A perturbation for each example, against a loop over the examples with their weights multiplied out."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, assert_equal, randn, sgd
from torch import nn
from torch.func import jvp
from torch.nn import functional as F

import bilevel
from bilevel import STN, CenteredSTN, DeltaSTN, Problem, Solver
from bilevel.functional import dropout
from bilevel.rng import Stream

EXAMPLE = {"structure": "rowwise", "perturb": "example"}
PAPER = {"control": False, **EXAMPLE}
METHODS = {
    "stn": partial(STN, **EXAMPLE),
    "centered_stn": partial(CenteredSTN, **PAPER),
    "centered_stn, stn objective": partial(CenteredSTN, objective="stn", **PAPER),
    "delta_stn": partial(DeltaSTN, **PAPER),
}
INPUTS, HIDDEN, CLASSES = 3, 5, 2
RATE, DECAY, LASSO = slice(0, 1), slice(1, 3), slice(3, 4)  # where they are in the vector


class Net(nn.Module):
    """A layer, dropout at a rate that is handed in, another layer."""

    def __init__(self, seed=0):
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, HIDDEN).double(), nn.Linear(HIDDEN, CLASSES).double()
        for weight, value in zip(self.parameters(), randn(seed, *(w.shape for w in self.parameters())), strict=True):
            weight.data.copy_(value)

    def forward(self, x, rate):
        return self.two(dropout(torch.tanh(self.one(x)), rate, training=self.training))


def penalty(params, hyper):
    """Two decays, for weights and for biases, and a lasso that all examples share."""
    weights, biases = ([w for name, w in params.items() if name.endswith(kind)] for kind in ("weight", "bias"))
    decays = hyper["decay"][..., 0] * bilevel.l2(weights) + hyper["decay"][..., 1] * bilevel.l1(biases)
    return decays + hyper["lasso"] * bilevel.l1(weights)


def problem_of(net, seen=None, **options):
    """Losses with one value per example; ``seen`` collects the shapes of the hyperparameters."""

    def inner_loss(model, hyper, batch):
        if seen is not None:
            seen.append({name: tuple(value.shape) for name, value in hyper.items()})
        loss = F.cross_entropy(model(batch[0], hyper["rate"]), batch[1], reduction="none")
        return loss + penalty(model.params, hyper)

    def outer_loss(model, hyper, batch):
        loss = F.cross_entropy(model(batch[0], hyper["rate"]), batch[1], reduction="none")
        return loss * (1 + hyper["rate"]) + penalty(model.params, hyper) / 3

    hyper = {
        "rate": bilevel.interval(0.0, 0.9, 0.3),
        "decay": bilevel.positive([0.02, 0.1]),
        "lasso": bilevel.positive(0.03, shared=True),
    }
    return Problem(net, inner_loss=inner_loss, outer_loss=outer_loss, hyper=hyper, **options)


def scramble(response, seed):
    """Random factors and templates; templates start at zero, where gradients would hide mistakes."""
    parts = list(response.theta.parameters())
    for part, value in zip(parts, randn(seed, *(part.shape for part in parts)), strict=True):
        part.data.copy_(value / 2)


def batch_of(count, seed=1):
    return randn(seed, (count, INPUTS))[0], torch.arange(count) % CLASSES


def natural(vector):
    """The natural values of one λ, by hand."""
    return {"rate": 0.9 * torch.sigmoid(vector[0]), "decay": vector[DECAY].exp(), "lasso": vector[3].exp()}


def draw_noise(count, sigma=1.0):
    """As many perturbations, the last entry of which is the same."""
    noise = torch.randn(count, 4, dtype=torch.float64)
    return sigma * torch.cat([noise[:, :3], noise[:1, 3:].expand(count, 1)], 1)


def materialized(response, weights, shift):
    """The weights w + Θδ and their change, entry by entry."""
    changes = {}
    theta = response.theta.rowwise
    for name, factor, template in zip(theta.names, theta.factors, theta.templates, strict=True):
        rows = [(factor[r] * shift).sum() * template[r] for r in range(len(template))]
        changes[name] = torch.stack(rows)
    return {name: w + changes[name] for name, w in weights.items()}, changes


def predict(params, x, mask):
    hidden = torch.tanh(params["one.weight"] @ x + params["one.bias"]) * mask
    return params["two.weight"] @ hidden + params["two.bias"]


def slow_term(response, weights, shifts, hypers, batch, uniform, *, linearized=False, materialize=materialized):
    """The inner loss, example by example."""
    losses = []
    for x, t, shift, vector, u in zip(*batch, shifts, hypers, uniform, strict=True):
        hyper = natural(vector)
        moved, change = materialize(response, weights, shift)
        rate = hyper["rate"].detach()
        mask = (u >= rate).double() / (1 - rate)
        if linearized:
            logits = sum(jvp(lambda w, x=x, mask=mask: predict(w, x, mask), (weights,), (change,)))
        else:
            logits = predict(moved, x, mask)
        losses.append(F.cross_entropy(logits, t) + penalty(moved, hyper))
    return torch.stack(losses).mean()


def slow_terms(kind, response, hyper, batch):
    """The terms of the inner loss; draws random numbers in the order of the method."""
    count = len(batch[0])
    weights = response.inner.params()
    frozen = {name: w.detach() for name, w in weights.items()}
    same = hyper.expand(count, -1)

    def uniform():
        return torch.rand(count, HIDDEN, dtype=torch.float64)

    if kind == "stn":
        points = hyper + draw_noise(count)
        yield slow_term(response, weights, points, points, batch, uniform())
        return
    if kind == "centered_stn, stn objective":
        noise = draw_noise(count)
        yield slow_term(response, weights, noise, hyper + noise, batch, uniform())
        return
    noise = draw_noise(count)
    yield slow_term(response, frozen, noise, hyper + noise, batch, uniform(), linearized=kind == "delta_stn")
    yield slow_term(response, weights, 0 * same, same, batch, uniform())


def test_the_papers_algorithm_by_name_is_the_one_that_is_compared_here():
    """``delta_stn`` of these tests: rows, no control, no pairs, a perturbed outer loss with a learned scale."""
    ours, paper = METHODS["delta_stn"](entropy=1e-3), bilevel.DeltaSTN.paper()
    assert bilevel.METHODS["delta_stn_paper"] == paper
    for name in ("structure", "scale", "entropy"):
        assert getattr(ours, name) == getattr(paper, name)
    problem = problem_of(Net(0))
    one, other = ours.bind(problem), paper.bind(problem)
    for name in ("antithetic", "subtracts", "antithetic_outer", "per_example", "linearizes"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.scale.perturb_outer and other.scale.perturb_outer


@pytest.mark.parametrize("kind", METHODS)
@given(count=st.sampled_from([1, 2, 4, HIDDEN]), seed=SEEDS)
def test_the_inner_loss_is_that_of_a_loop_over_examples(kind, count, seed):
    """Values and gradients of every term in w₀ and Θ, for the same random numbers; B as large as the layer included."""
    problem = problem_of(Net(seed))
    response, hyper, batch = METHODS[kind]().bind(problem), problem.initial_hyper(), batch_of(count, seed)
    scramble(response, seed)
    weights, theta = list(response.inner.weights), list(response.theta.parameters())
    with Stream(seed, torch.device("cpu"))():
        fast = [loss.value for loss in response.inner_loss(hyper, batch)]
    with Stream(seed, torch.device("cpu"))():
        slow = list(slow_terms(kind, response, hyper, batch))
    assert len(fast) == len(slow)
    for index, (one, other) in enumerate(zip(fast, slow, strict=True)):
        assert_equal(one.detach(), other.detach(), 1e-9)
        found = torch.autograd.grad(one, weights + theta, allow_unused=True)
        expected = torch.autograd.grad(other, weights + theta, allow_unused=True)
        if len(fast) == 2:  # only Θ learns from the first, only w₀ from the second
            assert all(gradient is None for gradient in (found[: len(weights)], found[len(weights) :])[index])
        for a, b in zip(found, expected, strict=True):
            if a is None:
                assert b is None or not b.any()
            else:
                assert_equal(a, b)


@pytest.mark.parametrize("kind", METHODS)
@given(count=st.sampled_from([1, 3, HIDDEN]), seed=SEEDS, entropy=st.sampled_from([0.0, 0.3]))
def test_the_outer_step_is_that_of_a_loop_over_examples(kind, count, seed, entropy):
    """The direct part, the hypergradient, and the step of the scale, at one λ + σz for each example."""
    solver = Solver(
        problem_of(Net(seed)),
        method=METHODS[kind](entropy=entropy, scale=0.7),
        inner_optimizer=sgd(0.1),
        outer_optimizer=sgd(1.0),
    )
    response, batch = solver.response, batch_of(count, seed)
    scramble(response, seed)
    with Stream(seed, torch.device("cpu"))():
        z = draw_noise(count)
    perturbation = response.scale
    perturbation.sample = lambda examples: perturbation() * z if examples == count else None
    start, raw = solver.vector.detach().clone(), perturbation.raw.detach().clone()

    direct, through, leaf = (value.clone().requires_grad_() for value in (start, start, raw))
    noise = F.softplus(leaf) * z
    weights = {name: w.detach() for name, w in response.inner.params().items()}
    losses = []
    for x, t, e in zip(*batch, noise, strict=True):
        hyper = natural(direct + e)
        moved, _ = materialized(response, weights, through + e - (0 if kind == "stn" else start))
        loss = F.cross_entropy(predict(moved, x, torch.ones(HIDDEN).double()), t) * (1 + hyper["rate"])
        losses.append(loss + penalty(moved, hyper) / 3)
    value = torch.stack(losses).mean()
    parts = torch.autograd.grad(value - entropy * F.softplus(leaf).log().sum(), [direct, through, leaf])

    step = solver.outer_step(batch, batch)
    assert_equal(step.loss, value.detach())
    assert_equal(step.direct, parts[0])
    assert_equal(step.hypergradient, parts[0] + parts[1])
    assert_equal(raw - perturbation.raw.detach(), parts[2])


@pytest.mark.parametrize("kind", METHODS)
def test_hyperparameters_reach_the_loss_with_one_value_per_example(kind):
    """Those that are shared keep their shape; the unperturbed term sees all of them as they are."""
    seen = []
    problem = problem_of(Net(), seen)
    list(METHODS[kind]().bind(problem).inner_loss(problem.initial_hyper(), batch_of(6)))
    assert seen[0] == {"rate": (6,), "decay": (6, 2), "lasso": ()}
    assert len(seen) == (2 if kind in ("centered_stn", "delta_stn") else 1)
    assert len(seen) == 1 or seen[1] == {"rate": (), "decay": (2,), "lasso": ()}


def test_shared_entries_have_one_perturbation_and_the_others_one_each():
    problem = problem_of(Net())
    response = METHODS["delta_stn"](scale=2.0).bind(problem)
    noise = response.perturbation(batch_of(20_000))
    assert noise.shape == (20_000, 4) and not noise.requires_grad
    assert (noise[:, LASSO] == noise[0, LASSO]).all()
    assert len(noise[:, RATE].unique()) == 20_000
    torch.testing.assert_close(noise[:, :3].std(0), torch.full((3,), 2.0).double(), rtol=0.03, atol=0)
    assert DeltaSTN(perturb="batch").bind(problem).perturbation(batch_of(5)).shape == (4,)


@pytest.mark.parametrize("kind", METHODS)
def test_a_batch_without_examples_is_refused(kind):
    """With the two ways out; Problem(examples=...) is one of them."""
    x, t = batch_of(4)

    def loss(model, hyper, batch):
        return F.cross_entropy(model(x, hyper["rate"]), t, reduction="none").mean()

    hyper = {"rate": bilevel.interval(0.0, 0.9, 0.3)}
    problem = Problem(Net(), inner_loss=loss, outer_loss=loss, hyper=hyper)
    for batch in (None, 3, torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"needs the number of examples.*Problem\(examples=...\).*perturb='batch'"):
            Solver(problem, method=METHODS[kind](), inner_optimizer=sgd(0.1)).inner_step(batch)
    counted = Problem(Net(), inner_loss=loss, outer_loss=loss, hyper=hyper, examples=lambda batch: 4)
    Solver(counted, method=METHODS[kind](), inner_optimizer=sgd(0.1)).inner_step(None)


@pytest.mark.parametrize("kind", METHODS)
def test_training_lowers_both_losses(kind):
    """Two classes that a line separates, with noise."""
    (x,) = randn(0, (80, INPUTS))
    batch = (x, (x[:, 0] + 0.3 * x[:, 1] > 0).long())
    solver = Solver(
        problem_of(Net()),
        method=METHODS[kind](entropy=1e-3, scale=0.5),
        inner_optimizer=sgd(0.2),
        outer_optimizer=sgd(0.05),
    )
    losses = []
    for _ in range(40):
        for _ in range(3):
            inner = solver.inner_step(batch)
        losses.append((float(inner), float(solver.outer_step(batch, batch).loss)))
    first, last = torch.tensor(losses[:5]).mean(0), torch.tensor(losses[-5:]).mean(0)
    assert (last < 0.7 * first).all(), (first, last)
    assert solver.response.jacobian(solver.vector.detach()).abs().max() > 0


@pytest.mark.parametrize("kind", METHODS)
def test_a_run_continues_from_its_state_bit_for_bit(kind):
    def make(seed):
        return Solver(
            problem_of(Net(seed)), method=METHODS[kind](entropy=0.1), inner_optimizer=sgd(0.1), outer_optimizer=sgd(0.1)
        )

    def run(solver):
        for _ in range(3):
            solver.inner_step(batch_of(4))
            solver.outer_step(batch_of(4), batch_of(3, 2))

    one, other = make(0), make(1)
    run(one)
    other.load_state_dict(one.state_dict())
    run(one)
    run(other)
    assert torch.equal(one.vector, other.vector)
    for a, b in zip(one.response.parameters(), other.response.parameters(), strict=True):
        assert torch.equal(a, b)


# Kinds of networks and precisions


def plain_problem(net):
    """Cross-entropy with a decay; for any network."""

    def inner_loss(model, hyper, batch):
        loss = F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")
        return loss + hyper["decay"] * bilevel.l2(model.params)

    def outer_loss(model, hyper, batch):
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    return Problem(net, inner_loss=inner_loss, outer_loss=outer_loss, hyper={"decay": bilevel.positive(0.01)})


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(4 * 9, 2)
    )


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.out = bilevel.nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


def trained(net, x, method, *, steps, optimizer=None, autocast=False):
    """The solver after some steps, and the inner losses."""
    batch = (x, (x.flatten(1)[:, -1] > 0).long())
    solver = Solver(plain_problem(net), method=method, inner_optimizer=optimizer or sgd(0.1), outer_optimizer=sgd(0.1))
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(float(solver.inner_step(batch)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        solver.outer_step(batch, batch)
    return solver, losses


@pytest.mark.parametrize("kind", METHODS)
def test_autocast_is_close_to_single_precision(kind):
    """Weights, responses and hyperparameters stay in float32."""
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    (full, one), (half, other) = (
        trained(convolutions(), x, METHODS[kind](scale=0.3), steps=5, autocast=autocast) for autocast in (False, True)
    )
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0.05, atol=0.02)
    for a, b in zip(full.response.parameters(), half.response.parameters(), strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.03)
    torch.testing.assert_close(full.vector, half.vector, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", METHODS)
def test_channels_last_is_the_same_network(kind):
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    last = torch.channels_last
    (one, _), (other, _) = (
        trained(net, value, METHODS[kind](scale=0.3), steps=3)
        for net, value in ((convolutions(), x), (convolutions().to(memory_format=last), x.to(memory_format=last)))
    )
    for a, b in zip(one.response.parameters(), other.response.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("steps", [5, 8], ids=["T", "T = B"])
def test_a_recurrent_network_trains(kind, steps):
    """bilevel.nn.LSTM, also in forward mode; as many time steps as examples are no problem."""
    x = torch.randn(8, steps, 3, generator=torch.Generator().manual_seed(0))
    adam = partial(torch.optim.Adam, lr=0.05)
    solver, losses = trained(Sequences(), x, METHODS[kind](scale=0.3), steps=40, optimizer=adam)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert solver.response.theta.rowwise.templates[0].abs().max() > 0


class Tokens(nn.Module):
    """A class token in front, and PyTorch's own encoder, which has another path in eval mode without gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.out = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 2)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.out(self.encoder(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("steps", [5, 8], ids=["T", "T = B"])
def test_a_transformer_with_a_class_token_trains(kind, steps):
    x = torch.randn(8, steps, 4, generator=torch.Generator().manual_seed(0))
    adam = partial(torch.optim.Adam, lr=0.03)
    solver, losses = trained(Tokens(), x, METHODS[kind](scale=0.3, entropy=1e-3), steps=30, optimizer=adam)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    theta = solver.response.theta.rowwise
    templates = dict(zip(theta.names, theta.templates, strict=True))
    assert all(templates[name].abs().max() > 0 for name in ("token", "encoder.self_attn.in_proj_weight"))


class Odd(nn.Module):
    """Its first layer puts the examples in another order than they came."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return F.linear(x.flip(0), self.w, self.b).flip(0)


def test_a_network_that_cannot_respond_per_example_names_the_weight_and_the_remedy():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"'w' is used by linear.*perturb='batch'.*'none'.*structure.rule"):
        trained(Odd(), x, METHODS["delta_stn"](perturb="example"), steps=1)


@pytest.mark.parametrize("structure", [None, "rowwise"])
@pytest.mark.parametrize("kind", METHODS)
def test_without_a_choice_it_shares_one_perturbation_and_says_so_once(kind, structure):
    """Bit for bit the run with perturb='batch'."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    method = METHODS[kind](structure=structure, perturb=None)
    with pytest.warns(bilevel.PerturbationWarning, match=r"'w' is used by linear.*perturb='batch'") as caught:
        solver, losses = trained(Odd(), x, method, steps=3)
    assert [warning.category for warning in caught].count(bilevel.PerturbationWarning) == 1
    assert not solver.response.per_example
    assert losses == trained(Odd(), x, METHODS[kind](structure=structure, perturb="batch"), steps=3)[1]
