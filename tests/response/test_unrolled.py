"""Unrolling: the derivative of the steps that training really makes, and what it leaves behind."""

import copy
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from examples import assert_same, at_call, batches, inner_loss, make_problem, make_solver, network, solve
from hypothesis import given
from hypothesis import strategies as st
from problems import OPTIMIZERS, SEEDS, assert_equal, double, make_quadratic, quadratics, randn, sgd
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as activation_checkpoint

import bilevel
from bilevel import DivergenceError, Problem, Solver, Unrolled

MODES = {"reverse": {}, "forward": {"mode": "forward"}, "checkpoint": {"checkpoint": True}}
BATCHES = [tuple(randn(seed, (5, 2), (5,))) for seed in range(20)]
VALID = tuple(randn(99, (7, 2), (7,)))
HYPER = {"decay": bilevel.positive(0.1), "shift": bilevel.real([0.5, -0.3])}


def predict(params, x):
    """A small nonlinear model with a scalar weight."""
    return torch.tanh(x @ params["W"]).sum(1) + params["b"]


def train_loss(model, hyper, batch):
    x, y = batch
    fit = (predict(model.params, x + hyper["shift"]) - y).square().mean()
    return fit + hyper["decay"] * sum(value.square().sum() for value in model.params.values())


def valid_loss(model, hyper, batch):
    x, y = batch
    return (predict(model.params, x) - y).square().mean() + (hyper["decay"] * hyper["shift"]).sum()


def weights():
    w, b = randn(7, (2, 3), ())
    return {"W": w, "b": b}


def small_problem(**changes):
    return Problem(weights(), **{"inner_loss": train_loss, "outer_loss": valid_loss, "hyper": HYPER, **changes})


class Params:
    """What a loss needs of a model."""

    def __init__(self, params):
        self.params = params


def natural(vector):
    return {"decay": vector[0].exp(), "shift": vector[1:3]}


def plain_training(factory, vectors, batches, clip=None, start=None, natural=natural, loss=train_loss):
    """A loop over a plain optimizer, one λ and one batch per step."""
    params = {name: value.detach().clone().requires_grad_() for name, value in (start or weights()).items()}
    optimizer = factory(list(params.values()))
    for vector, batch in zip(vectors, batches, strict=True):
        optimizer.zero_grad()
        loss(Params(params), natural(vector), batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(params.values(), clip)
        optimizer.step()
    return params, optimizer


def finite_differences(function, vector, size=1e-3):
    """The gradient, with an error of the fourth order."""
    slopes = []
    for direction in torch.eye(len(vector)).to(vector) * size:
        near, far = (function(vector + k * direction) - function(vector - k * direction) for k in (1, 2))
        slopes.append((8 * near - far) / (12 * size))
    return torch.stack(slopes)


def assert_relative(actual, expected, tolerance=1e-6):
    assert (actual - expected).norm() <= tolerance * expected.norm(), (actual, expected)


@pytest.mark.parametrize(("clip", "truncate"), [(None, None), (0.5, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hypergradient_is_that_of_the_plain_training(name, clip, truncate):
    """After inner steps and an outer step; truncated, the weights before the last steps are held fixed."""
    factory, steps = OPTIMIZERS[name], 4
    count = 2 + 2 * steps
    for settings in MODES.values():
        method = Unrolled(steps=steps, truncate=truncate, **settings)
        solver = Solver(
            small_problem(), method=method, inner_optimizer=factory, outer_optimizer=sgd(0.1), inner_clip=clip
        )
        vectors = [solver.vector.detach().clone()] * (2 + steps)
        for batch in BATCHES[:2]:
            solver.inner_step(batch)
        solver.outer_step(BATCHES[2 : 2 + steps], VALID)
        last = solver.vector.detach().clone()
        outer = solver.outer_step(BATCHES[2 + steps : count], VALID)
        if settings == {}:
            moving = truncate or steps
            vectors += [last] * (steps - moving)

            def outer_loss(vector, vectors=vectors, moving=moving):
                params, _ = plain_training(factory, vectors + [vector] * moving, BATCHES[:count], clip)
                return valid_loss(Params(params), natural(vector), VALID).detach()

            expected = finite_differences(outer_loss, last)
            params, optimizer = plain_training(factory, vectors + [last] * moving, BATCHES[:count], clip)
            value = outer_loss(last)
        assert_relative(outer.hypergradient, expected)
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if name == "NAdam" else {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(outer.loss, value, **tolerance)
        torch.testing.assert_close(solver.params, {key: p.detach() for key, p in params.items()}, **tolerance)
        ours, theirs = solver.optimizers["weights"].state_dict(), optimizer.state_dict()
        assert ours["state"].keys() == theirs["state"].keys()
        for index, entry in theirs["state"].items():
            assert ours["state"][index].keys() == entry.keys()
            for key, theirs_value in entry.items():
                if theirs_value is not None:
                    torch.testing.assert_close(ours["state"][index][key], theirs_value, **tolerance)
        assert (solver.inner_steps, solver.outer_steps, len(outer.inner_losses)) == (count, 2, steps)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["Adam", "Adam, amsgrad", "RMSprop, centered", "Adagrad"])
def test_a_weight_without_a_gradient_does_no_harm(name, clip):
    """As of an input that is always zero: the root of its second moment has no slope."""
    factory = partial(OPTIMIZERS[name].func, lr=0.05, **({"amsgrad": True} if "amsgrad" in name else {}))
    some = [(x * double([1.0, 0.0]), y) for x, y in BATCHES[:3]]

    def loss(model, hyper, batch):
        scaled = (hyper["shift"].exp() * batch[0], batch[1])
        return (predict(model.params, scaled[0]) - batch[1]).square().mean() * hyper["decay"]

    start = small_problem().initial_hyper()

    def outer_loss(vector):
        params, _ = plain_training(factory, [vector] * 3, some, clip, loss=loss)
        return valid_loss(Params(params), natural(vector), VALID).detach()

    expected = finite_differences(outer_loss, start)
    for settings in MODES.values():
        method = Unrolled(steps=3, **settings)
        solver = Solver(small_problem(inner_loss=loss), method=method, inner_optimizer=factory, inner_clip=clip)
        assert_relative(solver.outer_step(some, VALID).hypergradient, expected)


def test_what_the_last_inner_loss_returns_beside_its_value_is_kept():
    def loss(model, hyper, batch):
        return train_loss(model, hyper, batch), {"first": batch[0][0, 0], "weights": model.params["W"]}

    for settings in MODES.values():
        solver = Solver(small_problem(inner_loss=loss), method=Unrolled(steps=3, **settings))
        solver.outer_step(BATCHES[:3], VALID)
        assert solver.inner_aux["first"] == BATCHES[2][0][0, 0]
        assert not solver.inner_aux["weights"].requires_grad


def logistic_problem(seed, examples=6, features=3):
    x, y, hyper, w = randn(seed, (examples, features), (examples,), (features,), (features,))
    labels = y.sign()

    def inner_loss(model, hyper, batch):
        w = model.params["w"]
        rows = slice(None) if batch is None else batch
        return F.softplus(-labels[rows] * (x[rows] @ w)).mean() + (hyper["decay"].exp() * w.square()).sum()

    return Problem(
        {"w": w},
        inner_loss=inner_loss,
        outer_loss=lambda model, hyper, batch: F.softplus(labels.flip(0) * (x @ model.params["w"])).mean(),
        hyper={"decay": bilevel.real(hyper - 1)},
    )


@st.composite
def lengths(draw):
    steps = draw(st.integers(1, 8))
    return steps, draw(st.none() | st.integers(1, steps))


@given(
    problem=quadratics().map(lambda quadratic: quadratic.problem()) | SEEDS.map(logistic_problem),
    length=lengths(),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    clip=st.sampled_from([None, 1.0]),
)
def test_forward_is_reverse(problem, length, name, clip):
    steps, truncate = length
    factory = OPTIMIZERS[name]
    found = []
    for settings in MODES.values():
        method = Unrolled(steps=steps, truncate=truncate, **settings)
        solver = Solver(problem, method=method, inner_optimizer=factory, inner_clip=clip)
        solver.inner_step()
        found.append(solver.outer_step())
    for other in found[1:]:
        assert_equal(other.hypergradient, found[0].hypergradient, 1e-10)
        assert_equal(other.loss, found[0].loss, 1e-10)
        assert_equal(other.inner_losses, found[0].inner_losses, 1e-10)


@given(quadratic=quadratics(), length=lengths(), settings=st.sampled_from(list(MODES.values())))
def test_jacobian_of_gradient_descent_on_a_quadratic(quadratic, length, settings):
    """-(I - (I - lr A)^k) A⁻¹B, and w_K = w* + (I - lr A)^K (w₀ - w*)."""
    steps, truncate = length
    rate = 1 / float(torch.linalg.eigvalsh(quadratic.A)[-1])
    eye = torch.eye(len(quadratic.A)).double()
    shrink = torch.linalg.matrix_power(eye - rate * quadratic.A, truncate or steps)
    jacobian = (eye - shrink) @ quadratic.jacobian()
    solution = quadratic.solution(quadratic.hyper)
    end = solution + torch.linalg.matrix_power(eye - rate * quadratic.A, steps) @ (quadratic.weights - solution)
    expected = quadratic.direct(quadratic.hyper, end) + jacobian.T @ quadratic.outer_slope(quadratic.hyper, end)

    method = Unrolled(steps=steps, truncate=truncate, **settings)
    solver = Solver(quadratic.problem(), method=method, inner_optimizer=sgd(rate))
    batches = [None] * steps
    assert_equal(solver.response.jacobian(solver.vector, batches), jacobian)
    assert_equal(torch.cat([v.flatten() for v in solver.params.values()]), quadratic.weights)  # nothing is kept yet
    ones = {name: torch.ones_like(value) for name, value in solver.params.items()}
    assert_equal(solver.response.vjp(solver.vector, ones, batches), jacobian.sum(0))
    outer = solver.outer_step()
    assert_equal(outer.hypergradient, expected)
    assert_equal(outer.direct, quadratic.direct(quadratic.hyper, end))
    assert_equal(torch.cat([v.flatten() for v in solver.params.values()]), end)
    losses = [
        quadratic.inner(
            quadratic.hyper,
            solution + torch.linalg.matrix_power(eye - rate * quadratic.A, t) @ (quadratic.weights - solution),
        )
        for t in range(steps)
    ]
    assert_equal(outer.inner_losses, torch.stack(losses))


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_long_unrolling_becomes_implicit_differentiation(settings):
    quadratic = make_quadratic(4, 3, seed=3, network=True)
    rate = 1 / float(torch.linalg.eigvalsh(quadratic.A)[-1])
    hyper, solution = quadratic.hyper, quadratic.solution(quadratic.hyper)
    exact = quadratic.direct(hyper, solution) + quadratic.jacobian().T @ quadratic.outer_slope(hyper, solution)
    errors = []
    for steps in (10, 40, 130):
        solver = Solver(quadratic.problem(), method=Unrolled(steps=steps, **settings), inner_optimizer=sgd(rate))
        errors.append(float((solver.outer_step().hypergradient - exact).norm() / exact.norm()))
    assert all(after < before / 10 for before, after in pairwise(errors)) and errors[-1] < 1e-6


def noisy_solver(method, dtype=torch.float64, **changes):
    """With BatchNorm statistics, dropout, and a norm whose gradient has other last bits if a graph of it is kept."""
    module = network(nn.BatchNorm1d(4), nn.GroupNorm(1, 4), nn.Dropout(0.5)).to(dtype)
    settings = {"inner_optimizer": OPTIMIZERS["Adam"], "outer_optimizer": sgd(0.1)}
    return Solver(make_problem(module), method=method, **{**settings, **changes})


def noisy_batches(count, dtype=torch.float64, seed=0):
    return [(x.to(dtype), y.to(dtype)) for x, y in batches(count, seed=seed)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("steps", "truncate"), [(1, None), (2, None), (7, None), (16, None), (7, 3)])
def test_checkpointing_changes_no_bit(steps, truncate, dtype):
    outcomes = []
    for checkpoint in (False, True):
        method = Unrolled(steps=steps, truncate=truncate, checkpoint=checkpoint)
        solver = noisy_solver(method, dtype, inner_clip=1.0)
        batches = noisy_batches(steps, dtype)
        found = [vars(solver.outer_step(batches, batches[0])) for _ in range(2)]
        outcomes.append((found, {key: value for key, value in solver.state_dict().items() if key != "method"}))
    assert_same(*outcomes)
    assert outcomes[0][0][0]["hypergradient"].all()


@pytest.mark.parametrize("settings", [MODES["forward"], MODES["checkpoint"]], ids=["forward", "checkpoint"])
def test_all_modes_draw_the_same_masks(settings):
    batches = noisy_batches(5)
    one, other = (noisy_solver(Unrolled(steps=5, **changes), seed=3) for changes in ({}, settings))
    for _ in range(2):
        first, second = (solver.outer_step(batches, batches[0]) for solver in (one, other))
        assert_relative(second.hypergradient, first.hypergradient, 1e-10)
        torch.testing.assert_close(second.inner_losses, first.inner_losses, rtol=1e-12, atol=1e-12)
    assert_same(one.streams["loss"].state_dict(), other.streams["loss"].state_dict())


def test_the_check_of_the_fit_leaves_the_random_numbers_to_the_training():
    """The first inner step draws the mask that its loss alone would draw."""
    solver, batch = noisy_solver(Unrolled(steps=2)), noisy_batches(1)[0]
    stream, inner = copy.deepcopy(solver.streams["loss"]), solver.response.inner
    with stream():
        expected = solver.problem.inner_loss(inner.model(inner.params()), solver.vector, batch).value
    assert solver.inner_step(batch) == expected
    assert_same(solver.streams["loss"].state_dict(), stream.state_dict())


class Live:
    """Counts the bytes that graphs keep."""

    def __init__(self):
        self.now = self.peak = 0

    def __enter__(self):
        live = self

        class Box:
            def __init__(self, tensor):
                self.tensor = tensor.detach()  # not the graph that keeps this box
                live.now += tensor.nbytes
                live.peak = max(live.peak, live.now)

            def __del__(self):
                live.now -= self.tensor.nbytes

        self.hooks = torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)


def test_checkpointing_needs_memory_for_the_root_of_the_steps_and_two_passes():
    def measure(steps, **settings):
        calls = []

        def counted(model, hyper, batch):
            calls.append(1)
            return train_loss(model, hyper, batch)

        problem = small_problem(inner_loss=counted)
        solver = Solver(problem, method=Unrolled(steps=steps, **settings), inner_optimizer=OPTIMIZERS["Adam"])
        solver.inner_step(BATCHES[0])
        calls.clear()
        with Live() as live:
            solver.outer_step(BATCHES[:1] * steps, VALID)
        assert live.now == 0
        return live.peak, len(calls)

    (few, once), (many, _) = measure(9), measure(81)
    assert once == 9 and 8 < many / few < 10
    (few, twice), (many, _) = measure(9, checkpoint=True), measure(81, checkpoint=True)
    assert twice == 18 and 2 < many / few < 4
    (few, once), (many, _) = measure(9, mode="forward"), measure(81, mode="forward")
    assert once == 9 and many == few


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_statistics_are_those_of_plain_training(settings):
    module = network(nn.BatchNorm1d(4)).double()
    train = noisy_batches(10)
    solver = make_solver(
        make_problem(copy.deepcopy(module)), method=Unrolled(steps=5, **settings), outer_optimizer=sgd(0)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=2**-7)
    for x, y in train:
        optimizer.zero_grad()
        (F.mse_loss(module(x), y) + 0.01 * sum(p.square().sum() for p in module.parameters())).backward()
        optimizer.step()
    for some in (train[:5], train[5:]):
        solver.outer_step(some, train[0])
    assert solver.module_state_dict["1.num_batches_tracked"] == 10
    torch.testing.assert_close(solver.module_state_dict, module.state_dict(), rtol=1e-12, atol=1e-12)
    module.eval()
    again = solver.outer_step(train[:5], train[0])  # its loss is in eval mode, with the statistics after its steps
    assert again.loss != F.mse_loss(module(train[0][0]), train[0][1])
    module.load_state_dict(solver.module_state_dict)
    torch.testing.assert_close(again.loss, F.mse_loss(module(train[0][0]), train[0][1]).detach())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
@pytest.mark.parametrize("error", [math.nan, RuntimeError("mine"), KeyboardInterrupt()], ids=repr)
def test_a_failure_inside_is_named_and_undone(settings, error, deferred):
    calls = []

    def loss(model, hyper, batch):
        calls.append(1)
        value = inner_loss(model, hyper, batch)
        if armed and len(calls) == 3:
            if isinstance(error, BaseException):
                raise error
            return value * error
        return value

    armed = False
    problem = make_problem(network(nn.BatchNorm1d(4), nn.Dropout(0.5)).double(), inner_loss=loss)
    solver = Solver(problem, method=Unrolled(steps=5, **settings), inner_optimizer=OPTIMIZERS["Adam"])
    solver._finite.at_once = not deferred
    train = noisy_batches(5)
    for batch in train[:2]:
        solver.inner_step(batch)
    solver.outer_step(train, train[0])
    before, aux = solver.state_dict(), solver.inner_aux
    calls.clear()
    armed = True
    message = r"^mine|^$|the inner loss is nan and its gradient norm nan at inner step 9, counted from 0"
    with pytest.raises(DivergenceError if error is math.nan else type(error), match=message):
        solver.outer_step(train, train[0])
    assert_same(solver.state_dict(), before)
    assert solver.inner_aux is aux
    armed = False
    found = solver.outer_step(train, train[0])  # and the run goes on
    assert found.hypergradient.isfinite().all() and solver.inner_steps == 12


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_an_outer_loss_that_is_not_finite_is_undone_with_the_inner_steps(settings, deferred):
    problem = small_problem(outer_loss=at_call(1, lambda loss: loss * math.nan, valid_loss))
    solver = Solver(problem, method=Unrolled(steps=3, **settings), inner_optimizer=OPTIMIZERS["Adam"])
    solver._finite.at_once = not deferred
    solver.outer_step(BATCHES[:3], VALID)
    before = solver.state_dict()
    with pytest.raises(DivergenceError, match=r"the outer loss is nan .* at outer step 1"):
        solver.outer_step(BATCHES[:3], VALID)
    assert_same(solver.state_dict(), before)
    assert solver.outer_step(BATCHES[:3], VALID).loss.isfinite()


def test_deferred_checks_name_the_first_bad_step():
    """A NaN in an inner step, found by the outer step after it."""
    loss = at_call(3, lambda value: value * math.nan, train_loss)  # the check of the fit evaluates it once more
    solver = Solver(small_problem(inner_loss=loss), method=Unrolled(steps=3), inner_optimizer=sgd(0.1))
    solver._finite.at_once = False
    before = solver.state_dict()
    for batch in BATCHES[:4]:
        solver.inner_step(batch)
    with pytest.raises(DivergenceError, match=r"at inner step 2, counted from 0. All inner steps since the last"):
        solver.outer_step(BATCHES[:3], VALID)
    assert_same(solver.state_dict(), before)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(3, 12).double(), nn.Linear(4, 1).double()

    def forward(self, x):
        q, k, v = self.read(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0])


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_attention(settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Attention()
    train = noisy_batches(3)

    def outer_step(vector):
        solver = Solver(make_problem(module), method=Unrolled(steps=3, **settings), inner_optimizer=sgd(0.1))
        solver.vector.data.copy_(vector)
        return solver.outer_step(train, train[0])

    start = double([-2.0])
    assert_relative(outer_step(start).hypergradient, finite_differences(lambda v: outer_step(v).loss, start))


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_activation_checkpointing_is_refused(settings):
    """At once, and if the network begins with it after the first steps."""

    class Checkpointed(nn.Sequential):
        active = True

        def forward(self, x):
            first = super(Checkpointed, self[:-1]).forward
            return self[-1](activation_checkpoint(first, x, use_reentrant=False) if self.active else first(x))

    for late in (False, True):
        module = Checkpointed(*network().double())
        problem = make_problem(module, outer_loss=lambda model, hyper, batch: bilevel.l2(model.params))
        solver = make_solver(problem, method=Unrolled(steps=2, **settings))
        if late:
            module.active = False
            solver.outer_step(noisy_batches(2), noisy_batches(1)[0])
            module.active = True
        before = solver.state_dict()
        with pytest.raises(RuntimeError, match=r"remove the checkpointing from the network"):
            solver.outer_step(noisy_batches(2), noisy_batches(1)[0])
        assert_same(solver.state_dict(), before)


START = {"W": bilevel.real(randn(3, (2, 3))[0]), "decay": bilevel.positive(0.1), "shift": bilevel.real([0.5, -0.3])}


def natural_start(vector):
    return {"W": vector[:6].reshape(2, 3), "decay": vector[6].exp(), "shift": vector[7:9]}


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", ["SGD, momentum", "Adam", "Adagrad"])
def test_hypergradient_of_an_initialisation(name, settings):
    """Every outer step starts anew, at the current λ and with a fresh optimizer, whatever was trained between."""
    problem = small_problem(hyper=START, initial=lambda hyper: {"W": hyper["W"] * hyper["decay"]})
    method = Unrolled(steps=4, restart=True, **settings)
    solver = Solver(problem, method=method, inner_optimizer=OPTIMIZERS[name], outer_optimizer=sgd(0.1))
    torch.testing.assert_close(solver.params["W"], START["W"].init * 0.1)
    solver.inner_step(BATCHES[9])
    for some in (BATCHES[:4], BATCHES[4:8]):
        vector = solver.vector.detach().clone()

        def train(vector, some=some):
            values = natural_start(vector)
            start = {"W": values["W"] * values["decay"], "b": weights()["b"]}
            return plain_training(OPTIMIZERS[name], [vector] * 4, some, start=start, natural=natural_start)[0]

        def outer_loss(vector, train=train):
            return valid_loss(Params(train(vector)), natural_start(vector), VALID).detach()

        outer = solver.outer_step(some, VALID)
        assert_relative(outer.hypergradient, finite_differences(outer_loss, vector))
        torch.testing.assert_close(solver.params, {key: value.detach() for key, value in train(vector).items()})


def test_restarting_returns_to_the_users_buffers():
    train = noisy_batches(3)
    solver = noisy_solver(Unrolled(steps=3, restart=True))
    for _ in range(2):
        solver.outer_step(train, train[0])
        assert solver.module_state_dict["1.num_batches_tracked"] == 3


def only_initial(**changes):
    """A problem in which one hyperparameter matters at the start only."""
    hyper = {"W": START["W"], **HYPER}
    return small_problem(hyper=hyper, initial=lambda hyper: {"W": hyper["W"]}, **changes)


def test_an_initialisation_alone_is_a_hyperparameter():
    solver = Solver(only_initial(), method=Unrolled(steps=3, restart=True), inner_optimizer=sgd(0.1))
    assert solver.outer_step(BATCHES[:3], VALID).hypergradient[:6].all()


def misfit(model, hyper, batch):
    return train_loss(model, hyper, batch) + 0 * hyper["odd"].detach().sum()


def masked(model, hyper, batch):
    x = bilevel.functional.dropout(batch[0], hyper["odd"], training=True)
    return train_loss(model, hyper, (x, batch[1]))


FITS = [
    ("integer", bilevel.integer(0, 4, init=1), misfit, r"it is an integer, which has no derivative"),
    ("dropout", bilevel.interval(0.0, 0.9, init=0.3), masked, r"inner_loss has no derivative in it \(as with a random"),
    ("unused", bilevel.real(0.5), misfit, r"inner_loss has no derivative in it"),
]


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("odd", "loss", "why"), [row[1:] for row in FITS], ids=[row[0] for row in FITS])
def test_hyperparameters_that_do_not_fit_are_refused_before_any_step(odd, loss, why, settings):
    problem = small_problem(hyper={**HYPER, "odd": odd}, inner_loss=loss)
    message = rf"unrolling cannot tune hyper\['odd'\]: .*{why}.*Methods .* can: delta_stn, centered_stn, stn"
    with pytest.raises(ValueError, match=message):
        solver = Solver(problem, method=Unrolled(steps=2, **settings))
        before = solver.state_dict()
        try:
            solver.outer_step(BATCHES[:2], VALID)
        finally:
            assert_same(solver.state_dict(), before)


@pytest.mark.parametrize(
    "method",
    [
        Unrolled(steps=3, truncate=2, restart=True),
        Unrolled(steps=3, truncate=2, restart=True, mode="forward"),
        Unrolled(steps=3),
    ],
    ids=str,
)
def test_an_initialisation_needs_the_whole_trajectory(method):
    solver = Solver(only_initial(), method=method)
    with pytest.raises(ValueError, match=r"cannot tune hyper\['W'\]: .*initial.*Unrolled\(restart=True\) .*truncate"):
        solver.outer_step(BATCHES[:3], VALID)


@pytest.mark.parametrize("settings", [MODES["reverse"], MODES["checkpoint"]], ids=["reverse", "checkpoint"])
def test_one_weight_per_example(settings):
    """Outer variables of any shape; an example without an effect on the outer loss gets none."""
    x, y = BATCHES[0]

    def inner_loss(model, hyper, rows):
        errors = (predict(model.params, x[rows]) - y[rows]).square()
        return (hyper["weights"][rows, 0].sigmoid() * errors).mean() + 0.1 * bilevel.l2(model.params)

    problem = small_problem(
        inner_loss=inner_loss,
        outer_loss=lambda model, hyper, batch: (predict(model.params, VALID[0]) - VALID[1]).square().mean(),
        hyper={"weights": bilevel.real(torch.zeros(5, 1))},
    )
    solver = Solver(problem, method=Unrolled(steps=2, **settings), inner_optimizer=sgd(0.1))
    gradient = solver.outer_step([torch.tensor([0, 1]), torch.tensor([1, 3])]).hypergradient
    assert gradient.shape == (5,)
    assert (gradient != 0).tolist() == [True, True, False, True, False]


RESTARTING = ["implicit_cg", "delta_stn", "centered_stn", "stn", bilevel.DeltaSTN(entropy=1e-2), Unrolled(steps=3)]


@pytest.mark.parametrize("method", RESTARTING, ids=str)
@pytest.mark.parametrize("name", ["Adam", "Adagrad"])
def test_restart_forgets_what_was_trained_and_nothing_else(name, method):
    initial = lambda hyper: {"3.bias": hyper["decay"].reshape(1)}  # noqa: E731
    module = network(nn.BatchNorm1d(4))
    problem = make_problem(module, initial=initial)
    scheduler = partial(optim.lr_scheduler.ExponentialLR, gamma=0.5)
    solver = make_solver(problem, method=method, inner_optimizer=OPTIMIZERS[name], inner_scheduler=scheduler)
    fresh = solver.state_dict()
    for batch in batches():
        solver.inner_step(batch)
        solver.outer_step([batch] * solver.response.unrolled_steps or batch, batch)
        solver.schedule()
    trained = solver.state_dict()
    solver.restart()
    now = solver.state_dict()
    assert solver.hyper["decay"] != problem.space.hyper["decay"].init
    expected = {**module.state_dict(), "3.bias": solver.hyper["decay"].reshape(1)}
    torch.testing.assert_close(solver.module_state_dict, expected)
    for part in set(fresh["optimizers"]) & {"weights", "response"}:
        assert_same(now["optimizers"][part]["state"], fresh["optimizers"][part]["state"])
    scales = [key for key in now["response"] if key.startswith("scale.")]
    assert len(scales) == (solver.response.scale is not None)
    for state in (now, trained):
        for part in set(fresh["optimizers"]) & {"weights", "response"}:
            del state["optimizers"][part]["state"]
        state["response"] = {key: state["response"][key] for key in scales}
        del state["streams"]["loss"]
    assert_same(now, trained)
    solver.inner_step(batches()[0])


class TestSolve:
    """Unrolled steps are inner steps: of the round, of the epoch and of the history."""

    @pytest.mark.parametrize(
        ("method", "count"), [(Unrolled(steps=3), 3), ("implicit_cg", 5), ("delta_stn", 5)], ids=str
    )
    def test_the_number_of_inner_steps_by_default(self, method, count):
        solution = solve(method=method, steps=2, inner_steps=None)
        assert (solution.solver.inner_steps, solution.solver.outer_steps) == (2 * count, 2)

    def test_inner_steps_come_on_top(self):
        seen = []

        def loss(model, hyper, batch):
            seen.append(int(batch[2]))
            return inner_loss(model, hyper, batch[:2])

        train = [(*batch, torch.tensor(index)) for index, batch in enumerate(batches())]
        solution = solve(
            make_problem(inner_loss=loss), train, method=Unrolled(steps=3), inner_steps=2, outer_steps=2, steps=2
        )
        assert solution.solver.inner_steps == 16 and len(solution.history) == 4
        assert seen[1:] == list(range(4)) * 4  # after the check of the fit

    def test_warm_up_makes_as_many_plain_steps(self):
        solution = solve(method=Unrolled(steps=3), steps=4, warmup=3, inner_steps=None)
        assert (solution.solver.inner_steps, solution.solver.outer_steps) == (12, 1)
        assert [math.isnan(value) for value in solution.history["outer_loss"]] == [True] * 3 + [False]

    @pytest.mark.parametrize(("epochs", "rounds"), [(1, 2), (3, 4)])
    def test_epochs_count_the_batches_of_unrolled_steps(self, epochs, rounds):
        solution = solve(method=Unrolled(steps=3), epochs=epochs, inner_steps=None)  # four batches
        assert (len(solution.history), solution.stopped) == (rounds, "epochs")

    def test_the_history_keeps_the_mean_inner_loss(self):
        rows = []
        solution = solve(
            method=Unrolled(steps=3),
            steps=2,
            inner_steps=None,
            callbacks=[lambda event: rows.append(event.outer.inner_losses)],
        )
        assert all(losses.shape == (3,) for losses in rows)
        assert solution.history["inner_loss"].tolist() == pytest.approx([float(losses.mean()) for losses in rows])

    def test_schedulers_take_part(self):
        """Without torch's warning that the optimizer made no step."""
        scheduler = partial(optim.lr_scheduler.ExponentialLR, gamma=0.5)
        solution = solve(method=Unrolled(steps=3), steps=3, inner_steps=None, inner_scheduler=scheduler)
        assert solution.solver.optimizers["weights"].param_groups[0]["lr"] == 2**-10

    @pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
    def test_a_problem_is_solved(self, settings):
        """An initialisation for two tasks, at which the outer steps of both cancel."""
        targets = [double(0.0), double(3.0)]
        problem = Problem(
            {"w": double(5.0)},
            inner_loss=lambda model, hyper, target: (model.params["w"] - target).square(),
            outer_loss=lambda model, hyper, target: (model.params["w"] - target).square(),
            hyper={"start": bilevel.real(5.0)},
            initial=lambda hyper: {"w": hyper["start"]},
        )
        solver = Solver(
            problem,
            method=Unrolled(steps=3, restart=True, **settings),
            inner_optimizer=sgd(0.1),
            outer_optimizer=sgd(1.0),
        )
        for _ in range(20):
            for target in targets:
                solver.outer_step([target] * 3, target)
        rate = 2 * 0.8**6  # of the step towards the target, which the last task sees first
        torch.testing.assert_close(solver.hyper["start"], double(3 / (2 - rate)))


def small(**changes):
    """Three weights pulled to a hyperparameter."""
    settings = {
        "inner_loss": lambda model, hyper, batch: (model.params["w"] - hyper["x"]).square().sum(),
        "outer_loss": lambda model, hyper, batch: (model.params["w"] - 1).square().sum(),
        "hyper": {"x": bilevel.real([0.1, 0.2, 0.3])},
    }
    return bilevel.Problem({"w": torch.ones(3, dtype=torch.float64)}, **(settings | changes))


def test_step_hooks_of_the_optimizer_are_refused_whenever_they_come():
    def hooked(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(TypeError, match="step hooks"):
        bilevel.Solver(small(), method="unrolled", inner_optimizer=hooked)
    bilevel.Solver(small(), method="implicit_cg", inner_optimizer=hooked)
    solver = bilevel.Solver(small(), method="unrolled")
    solver.optimizers["weights"].register_step_pre_hook(lambda *_: None)
    with pytest.raises(TypeError, match="step hooks"):
        solver.outer_step()


def test_a_loss_that_does_not_repeat_is_noticed_under_checkpointing():
    generator = torch.Generator().manual_seed(0)

    def noisy(model, hyper, batch):
        noise = torch.randn(3, generator=generator, dtype=torch.float64)
        return (model.params["w"] * noise - hyper["x"]).square().sum()

    problem = small(inner_loss=noisy)
    bilevel.Solver(problem, method=bilevel.Unrolled(steps=4)).outer_step()
    solver = bilevel.Solver(problem, method=bilevel.Unrolled(steps=4, checkpoint=True))
    before = solver.state_dict()
    with pytest.raises(RuntimeError, match="did not repeat its values"):
        solver.outer_step()
    assert torch.equal(before["vector"], solver.vector)


def test_an_interrupt_while_the_steps_are_kept_undoes_the_outer_step(monkeypatch):
    solver = bilevel.Solver(small(), method="unrolled")

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(solver.response, "commit", interrupt)
    before = solver.vector.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        solver.outer_step()
    assert torch.equal(before, solver.vector)
    assert (solver.inner_steps, solver.outer_steps) == (0, 0)


def test_adams_slope_at_a_zero_gradient_is_explained():
    problem = small(hyper={"x": bilevel.real([1.0, 1.0, 1.0])}, outer_loss=lambda m, h, b: m.params["w"].square().sum())
    with pytest.raises(bilevel.DivergenceError, match="raise eps, or use SGD"):
        bilevel.Solver(problem, method=bilevel.Unrolled(steps=60)).outer_step()
