"""Problem and Model: what a loss sees, and what happens to the user's module."""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from problems import (
    HYPERNETWORKS,
    assert_equal,
    dense,
    flat_weights,
    network_problem,
    perturb_by,
    randn,
    scramble,
    sgd,
    terms,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import bilevel
from bilevel import METHODS, STN, CenteredSTN, Problem, Solver

ALL_OBJECTIVES = [*(METHODS[name] for name in HYPERNETWORKS), CenteredSTN(objective="stn")]
BATCH = tuple(randn(5, (6, 3), (6, 2)))
Pair = namedtuple("Pair", ["prediction", "extra"])


@dataclass(frozen=True)
class Output:
    """A dataclass, as many libraries return."""

    prediction: Tensor
    count: int


def make_solver(problem: Problem, method: object, *, lr: float = 0.01) -> Solver:
    """A solver with plain SGD and random slopes, so that perturbed weights differ from the others."""
    solver = Solver(problem, method=dense(method), inner_optimizer=sgd(lr), outer_optimizer=sgd(lr))
    scramble(solver.response, solver.vector.detach())
    return solver


def train(solver: Solver, steps: int = 1) -> None:
    """A few rounds on one batch, with a validation pass."""
    for _ in range(steps):
        solver.inner_step(BATCH)
        solver.outer_step(BATCH, BATCH)
        solver.evaluate([BATCH])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_training_starts_at_the_initial_weights_in_their_precision(dtype):
    """Some are given, the others are the user's; the user's module keeps its own."""
    module = mlp().to(dtype)
    own = copy.deepcopy(module.state_dict())
    problem = Problem(
        module,
        inner_loss=lambda model, hyper, batch: bilevel.l2(model.params),
        outer_loss=lambda model, hyper, batch: bilevel.l2(model.params),
        hyper={"bias": bilevel.real([1.0, 2.0])},
        initial=lambda hyper: {"2.bias": 2 * hyper["bias"]},
    )
    for method in METHODS.values():
        params = Solver(problem, method=method).params
        expected = {**own, "2.bias": torch.tensor([2.0, 4.0], dtype=dtype)}
        torch.testing.assert_close(params, expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(dict(module.state_dict()), dict(own), rtol=0, atol=0)
    (slope,) = torch.autograd.grad(
        problem.start(vector := problem.initial_hyper().requires_grad_())["2.bias"].sum(), vector
    )
    assert slope.tolist() == [2.0, 2.0]


def mlp(*extra: nn.Module) -> nn.Sequential:
    """A small network in float64, with something in its middle."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), *extra, nn.Tanh(), nn.Linear(4, 2)).double()


def same(one: dict, other: dict) -> bool:
    """Whether two state dicts are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# What a loss sees


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_a_mapping_and_a_module_with_the_same_weights_are_the_same_problem(method):
    """Both give the same losses, hypergradients and weights."""
    network = nn.Linear(3, 2, bias=False).double()
    of_module = network_problem(network)

    def predict(model, x):
        return F.linear(x, model.params["weight"])

    of_mapping = Problem(
        {"weight": network.weight.detach().clone()},
        inner_loss=lambda model, hyper, batch: (
            F.mse_loss(predict(model, batch[0]), batch[1])
            + hyper["decay"] * bilevel.l2(model.params)
            + 0 * hyper["idle"].sum(-1)
        ),
        outer_loss=lambda model, hyper, batch: F.mse_loss(predict(model, batch[0]), batch[1]),
        hyper=of_module.space.hyper,
    )
    solvers = [make_solver(problem, method) for problem in (of_module, of_mapping)]
    for _ in range(3):
        losses = [solver.inner_step(BATCH) for solver in solvers]
        steps = [solver.outer_step(BATCH, BATCH) for solver in solvers]
        assert_equal(losses[0], losses[1], 1e-12)
        assert_equal(steps[0].hypergradient, steps[1].hypergradient, 1e-12)
    assert_equal(solvers[0].params["weight"], solvers[1].params["weight"], 1e-12)


def test_names_that_do_not_exist_get_a_hint():
    """A typo in model.params or hyper says what was probably meant."""
    problem = network_problem(mlp())
    model = METHODS["stn"].bind(problem)(problem.initial_hyper())
    with pytest.raises(KeyError, match=r"no parameter '0.wieght': did you mean '0.weight'"):
        model.params["0.wieght"]
    with pytest.raises(KeyError, match=r"no hyperparameter 'deacy': did you mean 'decay'"):
        problem.space.values(problem.initial_hyper())["deacy"]


def losses_of(result) -> Problem:
    """A problem whose losses return what ``result`` makes of one squared error per example."""

    def loss(model, hyper, batch):
        return result((model(batch[0]) - batch[1]).square().sum(1) + 0 * hyper["x"])

    return Problem(mlp(), inner_loss=loss, outer_loss=loss, hyper={"x": bilevel.real(0.0)})


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_a_loss_is_a_scalar_or_one_value_per_example(method):
    """The mean is taken, and whatever comes with it reaches the caller."""
    by_hand = make_solver(losses_of(lambda values: values.mean()), method)
    per_example = make_solver(losses_of(lambda values: (values, {"worst": values.max().item()})), method)
    assert by_hand.inner_step(BATCH) == per_example.inner_step(BATCH)
    steps = [solver.outer_step(BATCH, BATCH) for solver in (by_hand, per_example)]
    assert torch.equal(steps[0].hypergradient, steps[1].hypergradient)
    assert by_hand.inner_aux is None
    assert per_example.inner_aux["worst"] > 0
    assert steps[0].aux is None
    assert steps[1].aux["worst"] > 0


def test_examples_says_where_a_batch_counts_them():
    """Time-major data has its examples in dimension 1."""
    x = torch.zeros(7, 4, 3, dtype=torch.float64)

    def loss(model, hyper, batch):
        return model(batch).square().sum((0, 2)) + hyper["x"]

    settings = {"inner_loss": loss, "outer_loss": loss, "hyper": {"x": bilevel.real(0.0)}}
    method = bilevel.DeltaSTN(perturb="batch")
    Solver(Problem(mlp(), examples=lambda batch: batch.shape[1], **settings), method=method).inner_step(x)
    with pytest.raises(ValueError, match=r"shape \(\) or \(7,\).*got \(4,\).*Problem\(examples=...\)"):
        Solver(Problem(mlp(), **settings), method=method).inner_step(x)


class Wrapped(nn.Module):
    """A network whose output is packed."""

    def __init__(self, pack) -> None:
        super().__init__()
        self.body = mlp()
        self.pack = pack

    def forward(self, x: Tensor) -> object:
        return self.pack(self.body(x))


PACKAGES = {
    "tuple": (lambda y: (y, y.argmax(1), "name"), lambda out: out[0]),
    "list": (lambda y: [None, y], lambda out: out[1]),
    "dict": (lambda y: {"y": y, "step": 3, "mask": y > 0}, lambda out: out["y"]),
    "ordered": (lambda y: OrderedDict(y=y), lambda out: out["y"]),
    "namedtuple": (lambda y: Pair(y, 1.5), lambda out: out.prediction),
    "dataclass": (lambda y: Output(y, 2), lambda out: out.prediction),
    "nested": (lambda y: {"a": ([y.detach(), (Pair(y, None),)], 1)}, lambda out: out["a"][0][1][0].prediction),
}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("method", ALL_OBJECTIVES, ids=repr)
def test_outputs_may_be_nested(method, package):
    """A packed prediction gives the same terms and gradients as a bare one, beside leaves that are no predictions."""

    def terms_of(pack, unpack):
        problem = Problem(
            Wrapped(pack),
            inner_loss=lambda model, hyper, batch: F.mse_loss(unpack(model(batch[0])), batch[1]) * hyper["x"].exp(),
            outer_loss=lambda model, hyper, batch: F.mse_loss(unpack(model(batch[0])), batch[1]),
            hyper={"x": bilevel.real(0.3)},
        )
        solver = make_solver(problem, method)
        hyper = solver.vector.detach().clone()
        return terms(solver.response, hyper, torch.full_like(hyper, 0.5), BATCH), solver.outer_step(BATCH, BATCH)

    (packed, packed_step), (bare, bare_step) = terms_of(*PACKAGES[package]), terms_of(lambda y: y, lambda y: y)
    for one, other in zip(packed, bare, strict=True):
        assert one.value == other.value
        for gradient, reference in ((one.weights, other.weights), (one.theta, other.theta)):
            assert (gradient is None) == (reference is None)
            assert reference is None or torch.equal(gradient, reference)
    assert torch.equal(packed_step.hypergradient, bare_step.hypergradient)


# Buffers


class Reassigns(nn.Module):
    """Keeps statistics by assignment rather than in place, in every mode, and one of them out of the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(4, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.running = 0.9 * self.running + 0.1 * x.mean(0)
        return x - self.running.detach()


BUFFERED = {"batch norm": lambda: nn.BatchNorm1d(4), "reassigned": Reassigns}


@pytest.mark.parametrize("kind", BUFFERED)
@pytest.mark.parametrize("method", ALL_OBJECTIVES, ids=repr)
def test_buffers_are_updated_once_per_inner_step_by_the_pass_that_trains_the_weights(method, kind):
    """They equal those of a plain module, called once in train mode with the weights of that pass."""
    network = mlp(BUFFERED[kind]())
    solver = make_solver(network_problem(network), method)
    response, hyper = solver.response, solver.vector.detach()
    noise = torch.tensor([0.7, -0.4, 0.2], dtype=torch.float64)
    perturbed = method in (STN(), CenteredSTN(objective="stn"))
    plain = copy.deepcopy(network).train()
    for _ in range(2):
        weights = response(hyper + noise if perturbed else hyper, center=hyper).params
        plain.load_state_dict({name: value.detach() for name, value in weights.items()}, strict=False)
        with torch.no_grad():
            plain(BATCH[0])
        perturb_by(response, noise)
        solver.inner_step(BATCH)
        buffers = response.inner.buffer_values()
        assert buffers.keys() == dict(plain.named_buffers()).keys()
        for name, expected in plain.named_buffers():
            assert_equal(buffers[name].double(), expected.double(), 1e-12)


@pytest.mark.parametrize("outer_mode", ["eval", "train"])
@pytest.mark.parametrize("kind", BUFFERED)
@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_buffers_are_left_alone_by_outer_steps_and_evaluation(method, kind, outer_mode):
    """Even in train mode, in which BatchNorm would update its statistics."""
    solver = make_solver(network_problem(mlp(BUFFERED[kind]()), outer_mode=outer_mode), method)
    solver.inner_step(BATCH)
    before = {name: value.clone() for name, value in solver.response.inner.buffer_values().items()}
    solver.outer_step(BATCH, BATCH)
    solver.evaluate([BATCH])
    assert same(before, solver.response.inner.buffer_values())


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_the_users_module_is_never_changed(method):
    """Weights, buffers and gradients of the user's own module are what they were."""
    network = mlp(nn.BatchNorm1d(4), Reassigns())
    before = copy.deepcopy(network)
    train(make_solver(network_problem(network), method), steps=2)
    assert same(dict(network.named_parameters()), dict(before.named_parameters()))
    assert same(dict(network.named_buffers()), dict(before.named_buffers()))
    assert all(param.grad is None for param in network.parameters())


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_the_result_loads_strictly_and_predicts_the_same(method):
    """Persistent buffers are in the state_dict, others are not."""
    network = mlp(nn.BatchNorm1d(4), Reassigns())
    solver = make_solver(network_problem(network), method)
    train(solver, steps=2)
    state = solver.module_state_dict
    assert "2.calls" in state
    assert "2.running" not in state
    fresh = mlp(nn.BatchNorm1d(4), Reassigns())
    fresh.load_state_dict(state, strict=True)
    assert fresh[2].calls == 2
    assert fresh[1].num_batches_tracked == 2
    assert_equal(torch.cat([p.detach().flatten() for p in fresh.parameters()]), flat_weights_of(solver), 0.0)


def flat_weights_of(solver: Solver) -> Tensor:
    return flat_weights(solver.response, solver.vector.detach())


# Modes


class Recorder(nn.Module):
    """Notes the mode in which it is called, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = []
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        if self.fail:
            raise ArithmeticError("told to")
        return x


@pytest.mark.parametrize("outer_mode", ["eval", "train"])
@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_modes_are_set_per_loss_and_restored_per_submodule(method, outer_mode):
    """Inner in train mode, outer in outer_mode; afterwards every part has the flag that its owner gave it."""
    recorder = Recorder()
    network = mlp(recorder, nn.Dropout(0.5))
    network.eval()
    network[2].train()
    flags = [part.training for part in network.modules()]
    solver = make_solver(network_problem(network, outer_mode=outer_mode), method)
    solver.inner_step(BATCH)
    assert recorder.modes
    assert all(recorder.modes)
    recorder.modes.clear()
    solver.outer_step(BATCH, BATCH)
    solver.evaluate([BATCH])
    assert recorder.modes == [outer_mode == "train"] * 2
    assert [part.training for part in network.modules()] == flags


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_modes_are_restored_after_an_error(method):
    """And the error says which loss it came from and what the batch looked like."""
    recorder = Recorder()
    network = mlp(recorder)
    network.eval()
    recorder.train()
    flags = [part.training for part in network.modules()]
    solver = make_solver(network_problem(network), method)
    recorder.fail = True
    for step in (lambda: solver.inner_step(BATCH), lambda: solver.outer_step(BATCH, BATCH)):
        with pytest.raises(ArithmeticError, match="told to") as raised:
            step()
        assert any("Raised while evaluating" in note and "(6, 3)" in note for note in raised.value.__notes__)
        assert [part.training for part in network.modules()] == flags


# Frozen, tied and parametrized weights


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_frozen_parameters_stay_and_do_not_respond(method):
    """They are in the state_dict, not among the weights, and keep their values bit for bit."""
    network = mlp()
    network[0].requires_grad_(False)
    solver = make_solver(network_problem(network), method)
    assert list(solver.problem.params) == ["2.weight", "2.bias"]
    assert len(solver.response.jacobian(solver.vector.detach(), BATCH)) == 4 * 2 + 2
    train(solver, steps=2)
    state = solver.module_state_dict
    assert torch.equal(state["0.weight"], network[0].weight)
    assert torch.equal(state["0.bias"], network[0].bias)
    assert not torch.equal(state["2.weight"], network[2].weight)


class Tied(nn.Module):
    """An autoencoder-like network whose two layers share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3).double()
        self.two = nn.Linear(3, 3).double()
        self.two.weight = self.one.weight
        self.out = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.two(torch.tanh(self.one(x)))))


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_tied_weights_share_one_response_and_stay_tied(method):
    """One entry among the weights, both names in the state_dict, with the same trained values."""
    solver = make_solver(network_problem(Tied()), method)
    assert "one.weight" in solver.problem.params
    assert "two.weight" not in solver.problem.params
    train(solver, steps=2)
    state = solver.module_state_dict
    assert torch.equal(state["one.weight"], state["two.weight"])
    assert torch.equal(state["one.weight"], solver.params["one.weight"])
    fresh = Tied()
    fresh.load_state_dict(state, strict=True)
    assert fresh.one.weight is fresh.two.weight


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_both_uses_of_a_tied_weight_respond(method):
    """The hypergradient is that of a network in which each use moves, by finite differences in λ."""
    solver = make_solver(network_problem(Tied()), method)
    hyper = solver.vector.detach().clone()
    step = solver.outer_step(BATCH, BATCH)

    def outer(point: Tensor) -> Tensor:
        plain = Tied()
        weights = solver.response(point, center=hyper).params
        plain.load_state_dict({name: value.detach() for name, value in weights.items()}, strict=False)
        return F.mse_loss(plain(BATCH[0]), BATCH[1]).detach()

    shifts = 1e-4 * torch.eye(len(hyper)).double()
    expected = torch.stack([(outer(hyper + shift) - outer(hyper - shift)) / 2e-4 for shift in shifts])
    assert_equal(step.hypergradient, expected, 1e-7)


class Positive(nn.Module):
    """A parametrization: weights are the exponential of what is trained."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.abs().log()


def positive(module: nn.Module) -> nn.Module:
    """Parametrize the weight of a module to be positive."""
    return parametrize.register_parametrization(module, "weight", Positive())


# PyTorch has no forward mode for the two of its own that are left out.
PARAMETRIZED = [
    (method, parametrization)
    for method in HYPERNETWORKS
    for parametrization in (positive, parametrizations.weight_norm, parametrizations.spectral_norm)
    if method != "delta_stn" or parametrization is positive
]


@pytest.mark.parametrize(("method", "parametrization"), PARAMETRIZED)
def test_parametrized_modules_work(method, parametrization):
    """Their originals are the weights; the result loads into a module that is parametrized alike."""
    solver = make_solver(network_problem(parametrization(nn.Linear(3, 2).double())), method)
    assert all("parametrizations" in name or name == "bias" for name in solver.problem.params)
    train(solver, steps=2)
    fresh = parametrization(nn.Linear(3, 2).double())
    fresh.load_state_dict(solver.module_state_dict, strict=True)
    assert F.mse_loss(fresh.eval()(BATCH[0]), BATCH[1]).item() == pytest.approx(solver.evaluate([BATCH]), rel=1e-9)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.parametrize("method", HYPERNETWORKS)
def test_activation_checkpointing_is_refused(method):
    """It would repeat the forward pass with the module's own weights, and give a wrong gradient."""
    solver = make_solver(network_problem(Checkpointed()), method)
    before = solver.state_dict()
    with pytest.raises(RuntimeError, match=r"during differentiation.*torch\.utils\.checkpoint.*remove"):
        train(solver)
    assert_equal(before["vector"], solver.state_dict()["vector"], 0.0)
    assert solver.inner_steps == 0
