"""Decoupled weight decay: it is part of the update, so only unrolling differentiates it."""

import math
from functools import partial

import pytest
import torch
from problems import randn
from torch import nn, optim
from torch.nn import functional as F

import bilevel
from bilevel import Problem, Solver, Unrolled
from bilevel.regularizers import InputNoise, WeightDecay, regularized_loss

STEPS = 6
BATCHES = [tuple(randn(seed, (5, 2), (5, 1))) for seed in range(STEPS)]
VALID = tuple(randn(99, (7, 2), (7, 1)))
MODES = {
    "reverse": {},
    "forward": {"mode": "forward"},
    "checkpoint": {"checkpoint": True},
    "restart": {"restart": True},
}
RATES = {"weight_decay.0": 0.7, "weight_decay.2": 0.2}
LR = 0.05


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def decoupled(net):
    """One strength for each layer, each with a start of its own."""
    first = WeightDecay(net, {"0": "0.weight"}, init=0.7, decoupled=True)
    second = WeightDecay(net, {"2": "2.weight"}, init=0.2, decoupled=True)
    return first.hyper | second.hyper


def squared_error(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def make_problem(**changes):
    net = network()
    losses = {"inner_loss": squared_error, "outer_loss": squared_error, "hyper": decoupled(net)}
    return Problem(net, **losses | changes)


def sgd_by_hand(w, g, state, t):
    v = 0.9 * state["v"] + g if state else g
    return w - LR * v, {"v": v}


def adam_by_hand(w, g, state, t):
    m = 0.9 * state.get("m", 0.0) + 0.1 * g
    v = 0.99 * state.get("v", 0.0) + 0.01 * g**2
    m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.99**t)
    return w - LR * m_hat / (v_hat.sqrt() + 1e-8), {"m": m, "v": v}


OPTIMIZERS = {
    "sgd": (partial(optim.SGD, lr=LR, momentum=0.9), sgd_by_hand),
    "adam": (partial(optim.Adam, lr=LR, betas=(0.9, 0.99)), adam_by_hand),
    "adamw": (partial(optim.AdamW, lr=LR, betas=(0.9, 0.99), weight_decay=0.0), adam_by_hand),
}


def by_hand(step, *, rates=(0.7, 0.2), coupled=0.0, clip=None):
    """The validation loss after all steps and its gradient in the logarithms of the rates, by one graph."""
    net = network()
    vector = torch.tensor(rates, dtype=torch.float64).log().requires_grad_()
    w, state = dict(net.named_parameters()), {}
    for t, (x, y) in enumerate(BATCHES, start=1):
        loss = F.mse_loss(torch.func.functional_call(net, w, (x,)), y) + coupled * w["0.weight"].square().sum()
        g = dict(zip(w, torch.autograd.grad(loss, list(w.values()), create_graph=True), strict=True))
        if clip is not None:
            norm = sum(value.square().sum() for value in g.values()).sqrt()
            g = {name: value * (clip / (norm + 1e-6)).clamp(max=1.0) for name, value in g.items()}
        for k, name in enumerate(["0.weight", "2.weight"]):
            w[name] = w[name] - LR * vector[k].exp() * w[name]
        for name in w:
            w[name], state[name] = step(w[name], g[name], state.get(name, {}), t)
    end = F.mse_loss(torch.func.functional_call(net, w, (VALID[0],)), VALID[1])
    return end.detach(), torch.autograd.grad(end, vector)[0], {name: value.detach() for name, value in w.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hypergradient_equals_that_of_a_loop_by_hand(name, mode):
    make, step = OPTIMIZERS[name]
    solver = Solver(make_problem(), method=Unrolled(steps=STEPS, **MODES[mode]), inner_optimizer=make)
    made = solver.outer_step(BATCHES, VALID)
    loss, gradient, weights = by_hand(step)
    torch.testing.assert_close(made.loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(made.hypergradient, gradient, rtol=1e-10, atol=0)
    for key, value in solver.params.items():
        torch.testing.assert_close(value, weights[key], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_clipping_leaves_the_decay_alone(mode):
    make, step = OPTIMIZERS["adam"]
    method = Unrolled(steps=STEPS, **MODES[mode])
    solver = Solver(make_problem(), method=method, inner_optimizer=make, inner_clip=0.2)
    torch.testing.assert_close(
        solver.outer_step(BATCHES, VALID).hypergradient, by_hand(step, clip=0.2)[1], rtol=1e-10, atol=0
    )


def test_truncated_steps_count_as_independent():
    """Only the last step is differentiated: the weight before it is a constant."""
    method = Unrolled(steps=2, truncate=1)
    solver = Solver(make_problem(), method=method, inner_optimizer=partial(optim.SGD, lr=LR))
    before = Solver(make_problem(), method=Unrolled(steps=1), inner_optimizer=partial(optim.SGD, lr=LR))
    before.outer_step(BATCHES[:1], VALID)
    jacobian = solver.response.jacobian(solver.vector.detach(), BATCHES[:2])
    for k, (name, rate) in enumerate([("0.weight", 0.7), ("2.weight", 0.2)]):
        start = sum(value.numel() for value in list(solver.params.values())[: 2 * k])
        column = torch.zeros(len(jacobian), dtype=torch.float64)
        weight = before.params[name].flatten()
        column[start : start + len(weight)] = -LR * rate * weight
        torch.testing.assert_close(jacobian[:, k], column, rtol=1e-10, atol=1e-14)


def adamw_run(rates=(0.7, 0.2), *, batches=tuple(BATCHES)):
    """Plain PyTorch: AdamW with one group for each rate."""
    net = network()
    groups = [{"params": [net[i].weight], "weight_decay": rate} for i, rate in zip((0, 2), rates, strict=True)]
    groups.append({"params": [net[0].bias, net[2].bias], "weight_decay": 0.0})
    optimizer = optim.AdamW(groups, lr=LR, betas=(0.9, 0.99))
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    return net


def test_adam_makes_the_steps_of_adamw_and_its_hypergradient_is_a_difference_quotient_of_it():
    solver = Solver(make_problem(), method=Unrolled(steps=STEPS), inner_optimizer=OPTIMIZERS["adam"][0])
    found = solver.outer_step(BATCHES, VALID).hypergradient
    for name, value in adamw_run().named_parameters():
        torch.testing.assert_close(solver.params[name], value, rtol=1e-12, atol=1e-14)
    vector, h = torch.tensor([*RATES.values()], dtype=torch.float64).log(), 1e-5

    def loss(v):
        return F.mse_loss(adamw_run(v.exp().tolist())(VALID[0]), VALID[1]).item()

    quotient = [(loss(vector + h * e) - loss(vector - h * e)) / (2 * h) for e in torch.eye(2).double()]
    torch.testing.assert_close(found, torch.tensor(quotient).double(), rtol=1e-6, atol=1e-9)


def test_inner_steps_between_decay_as_well():
    solver = Solver(make_problem(), method=Unrolled(steps=2), inner_optimizer=OPTIMIZERS["adam"][0])
    for batch in BATCHES[:4]:
        solver.inner_step(batch)
    solver.outer_step(BATCHES[4:], VALID)  # its hook is not taken for one of the user
    for name, value in adamw_run().named_parameters():
        torch.testing.assert_close(solver.params[name], value, rtol=1e-12, atol=1e-14)


def test_hooks_of_the_user_are_still_refused():
    def hooked(params):
        optimizer = optim.SGD(params, lr=LR)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    with pytest.raises(TypeError, match="step hooks"):
        Solver(make_problem(), method=Unrolled(steps=2), inner_optimizer=hooked)
    solver = Solver(make_problem(), method=Unrolled(steps=2), inner_optimizer=partial(optim.SGD, lr=LR))
    solver.optimizers["weights"].register_step_post_hook(lambda *_: None)
    with pytest.raises(TypeError, match="step hooks"):
        solver.outer_step(BATCHES[:2], VALID)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_beside_a_hyperparameter_of_the_loss(mode):
    """Both paths of the derivative at once: through the gradient, and past it."""

    def penalised(model, hyper, batch):
        return squared_error(model, hyper, batch) + hyper["coupled"] * model.params["0.weight"].square().sum()

    make, step = OPTIMIZERS["sgd"]
    hyper = {"coupled": bilevel.positive(0.3)} | decoupled(network())
    problem = make_problem(inner_loss=penalised, hyper=hyper)
    solver = Solver(problem, method=Unrolled(steps=STEPS, **MODES[mode]), inner_optimizer=make)
    found = solver.outer_step(BATCHES, VALID).hypergradient
    torch.testing.assert_close(found[1:], by_hand(step, coupled=0.3)[1], rtol=1e-10, atol=0)
    h = 1e-5
    ends = [by_hand(step, coupled=0.3 * torch.tensor(h * sign).double().exp())[0] for sign in (1, -1)]
    torch.testing.assert_close(found[0], (ends[0] - ends[1]) / (2 * h), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_compiled_steps_decay_the_same(mode, monkeypatch):
    """Traced as it is compiled, run without a compiler."""
    monkeypatch.setattr("bilevel.compilation.staged.inductor", lambda graph, inputs: graph)
    make, step = OPTIMIZERS["adam"]
    method = Unrolled(steps=STEPS, **MODES[mode])
    solver = Solver(make_problem(), method=method, inner_optimizer=make, compile=True)
    made = solver.outer_step(BATCHES, VALID)
    torch.testing.assert_close(made.hypergradient, by_hand(step)[1], rtol=1e-8, atol=0)


@pytest.mark.parametrize("method", ["stn", "centered_stn", "delta_stn", "implicit_exact", "implicit_cg"])
def test_other_methods_refuse(method):
    with pytest.raises(ValueError, match=r"cannot tune hyper\['weight_decay.0'\].*only Unrolled.*method='unrolled'"):
        Solver(make_problem(), method=method)


def test_a_weight_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"hyper\['weight_decay.0'\] decays '0.weight', which is not a trainable"):
        Problem({"w": torch.ones(1)}, inner_loss=squared_error, outer_loss=squared_error, hyper=decoupled(network()))


def test_two_strengths_of_one_weight_add_up():
    net = network()
    hyper = WeightDecay(net, {"a": "0.weight"}, init=0.4, decoupled=True).hyper
    hyper |= WeightDecay(net, {"b": "0.weight"}, init=0.3, decoupled=True).hyper
    hyper |= WeightDecay(net, {"c": "2.weight"}, init=0.2, decoupled=True).hyper
    solver = Solver(make_problem(hyper=hyper), method=Unrolled(steps=STEPS), inner_optimizer=OPTIMIZERS["adam"][0])
    solver.outer_step(BATCHES, VALID)
    for name, value in adamw_run().named_parameters():
        torch.testing.assert_close(solver.params[name], value, rtol=1e-12, atol=1e-14)


def test_solve_finds_the_decay_and_goes_on_from_a_checkpoint(tmp_path):
    settings = {
        "method": Unrolled(steps=2),
        "inner_optimizer": OPTIMIZERS["adam"][0],
        "outer_optimizer": partial(optim.SGD, lr=5.0),
        "warmup": 0,
        "progress": False,
    }
    whole = bilevel.solve(make_problem(), BATCHES, [VALID], steps=4, **settings)
    bilevel.solve(make_problem(), BATCHES, [VALID], steps=2, checkpoint=tmp_path / "run", **settings)
    parts = bilevel.solve(make_problem(), BATCHES, [VALID], steps=4, checkpoint=tmp_path / "run", **settings)
    solver = Solver(make_problem(), **{key: settings[key] for key in list(settings)[:3]})
    for start in (0, 2, 4, 0):
        solver.outer_step(BATCHES[start : start + 2], VALID)
    for name, rate in RATES.items():
        assert whole.hyper[name] == parts.hyper[name] == solver.hyper[name] != rate
    swapped = dict(zip(RATES, reversed(decoupled(network()).values()), strict=True))
    with pytest.raises(ValueError, match=r"decays 0\.weight, this call has .*decays 2\.weight"):
        bilevel.solve(make_problem(hyper=swapped), BATCHES, [VALID], steps=5, checkpoint=tmp_path / "run", **settings)


def test_warm_up_decays_with_the_strengths_at_the_start():
    solution = bilevel.solve(
        make_problem(),
        BATCHES,
        [VALID],
        steps=4,
        warmup=3,
        method=Unrolled(steps=2),
        inner_optimizer=OPTIMIZERS["adam"][0],
        outer_optimizer=partial(optim.SGD, lr=0.0),
        progress=False,
    )
    for name, value in adamw_run(batches=[*BATCHES, *BATCHES[:2]]).named_parameters():
        torch.testing.assert_close(solution.params[name], value.detach(), rtol=1e-11, atol=1e-13)


def test_diagnose_has_no_reference():
    solver = Solver(make_problem(), method=Unrolled(steps=2))
    with pytest.raises(ValueError, match="no term: there is no reference"):
        bilevel.diagnose(solver, BATCHES[0], VALID)


def test_tune_equals_the_loop_by_hand():
    """``tune(weight_decay="decoupled")``: one round, whose step of λ tells the hypergradient."""
    make, step = OPTIMIZERS["sgd"]
    net = network()
    decay = WeightDecay(net, decoupled=True, init=0.7)
    result = bilevel.tune(
        net,
        BATCHES,
        [VALID],
        loss=nn.MSELoss(),
        weight_decay=decay,
        method=Unrolled(steps=STEPS),
        optimizer=make(net.parameters()),
        outer_optimizer=partial(optim.SGD, lr=1.0),
        steps=1,
        warmup=0,
        progress=False,
    )
    moved = torch.stack([result.hyper[name].log() - math.log(0.7) for name in RATES])
    torch.testing.assert_close(-moved, by_hand(step, rates=(0.7, 0.7))[1], rtol=1e-10, atol=1e-14)
    schedule = result.schedule()
    groups = schedule.param_groups(net, optim.AdamW)
    assert [group["weight_decay"] for group in groups] == [*(float(result.hyper[name]) for name in RATES), 0.0]
    with pytest.raises(ValueError, match="decoupled weight decay, which of the optimizers of PyTorch only AdamW has"):
        schedule.param_groups(net, optim.SGD)


def test_tune_by_name_and_with_the_default_method():
    net = network().float()
    batches = [tuple(part.float() for part in batch) for batch in BATCHES]
    call = {"loss": nn.MSELoss(), "weight_decay": "decoupled", "epochs": 4, "progress": False}
    result = bilevel.tune(net, batches, batches[:2], method="unrolled", **call)
    assert list(result.hyper) == [*RATES]
    with pytest.raises(ValueError, match="only Unrolled differentiates"):
        bilevel.tune(net, batches, batches[:2], **call)
    with pytest.warns(UserWarning, match="AdamW decays the weights by 0.01 beside"):
        bilevel.tune(net, batches, batches[:2], method="unrolled", optimizer=optim.AdamW(net.parameters()), **call)


def test_it_is_no_penalty():
    net = network()
    decay = WeightDecay(net, decoupled=True)
    values = {name: torch.tensor(1.0) for name in decay.hyper}
    assert decay.penalty(dict(net.named_parameters()), values) is None
    model = bilevel.Model(dict(net.named_parameters()), net)
    loss = regularized_loss(model, values, *VALID, criterion=F.mse_loss, regularizers=[decay])
    assert loss == F.mse_loss(net(VALID[0]), VALID[1])
    assert float(decay.hyper["weight_decay.0"].init) == 0.01
    assert float(WeightDecay(net).hyper["weight_decay.0"].init) == 1e-4
    with pytest.raises(ValueError, match="decoupled=True"):
        WeightDecay(net, "decoupled")
    assert InputNoise().penalty({}, {}) is None
