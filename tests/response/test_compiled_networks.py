"""compile=True changes how fast the steps of self-tuning networks are, not what they do."""

import copy
import math
import shutil
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from examples import assert_same
from torch import nn

import bilevel
from bilevel import CenteredSTN, DeltaSTN, DivergenceError
from bilevel.compilation import gains

METHODS = {"stn": bilevel.STN, "centered_stn": CenteredSTN, "delta_stn": DeltaSTN}
PERTURB = {
    "batch": {"structure": {"first.weight": "dense", "*.bias": "none"}, "perturb": "batch", "perturb_outer": True},
    "example": {"structure": "rowwise", "perturb": "example", "entropy": 1e-2},
    "gate": {"structure": "gate", "perturb": "example", "entropy": 1e-2},
}
DELTA = DeltaSTN(scale=0.3, structure="rowwise", perturb="example")
CENTERED = CenteredSTN(scale=0.3, structure="rowwise", perturb="batch")  # takes less time to trace


class Net(nn.Module):
    """BatchNorm, dropout, a frozen layer, and a weight that is used twice."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.dropout = dropout

    def forward(self, x):
        hidden = F.dropout(torch.tanh(self.norm(self.first(x))), self.dropout, self.training)
        return self.tied(torch.tanh(self.frozen(hidden)))


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(27, 4),
    )  # fmt: skip


def inner_loss(model, hyper, batch):
    each = (model(batch["x"]) - batch["y"]).square().mean(1) * hyper["weight"]
    return each + hyper["decay"] * bilevel.l2(model.params), {"each": each, "name": batch["name"]}


def outer_loss(model, hyper, batch):
    return (model(batch["x"]) - batch["y"]).square().mean() + 0.1 * hyper["weight"].mean(), batch["name"]


def problem_of(net=small, inner=inner_loss, outer=outer_loss):
    torch.manual_seed(0)
    hyper = {"decay": bilevel.positive(0.1), "weight": bilevel.positive(1.0)}
    return bilevel.Problem(net().double(), inner_loss=inner, outer_loss=outer, hyper=hyper)


def batches(count=4, size=6, *, seed=1, name="a"):
    generator = torch.Generator().manual_seed(seed)
    return [
        {key: torch.randn(size, 4, generator=generator, dtype=torch.float64) for key in "xy"} | {"name": name}
        for _ in range(count)
    ]


def make_solver(method=DELTA, *, compile=True, problem=None, rate=0.1, **options):
    return bilevel.Solver(
        problem_of() if problem is None else problem,
        method=method,
        inner_optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9),
        outer_optimizer=partial(torch.optim.SGD, lr=rate),
        compile=compile,
        **options,
    )


def advance(solver, train, rounds=3):
    """What some rounds find, and all that the solver holds in the end but its random streams."""
    found = []
    for index in range(rounds):
        loss = solver.inner_step(train[index % len(train)])
        step = solver.outer_step(train[0], train[-1 - index % len(train)])
        found += [loss, solver.inner_aux["each"], step.loss, step.hypergradient, step.direct]
    state = solver.state_dict()
    return found, state["vector"], state["response"], [entry["state"] for entry in state["optimizers"].values()]


def compare(method=DELTA, *, train=None, rounds=3, **options):
    """The compiled and the uncompiled run agree; the compiled solver."""
    solver, plain = (make_solver(method, compile=flag, **options) for flag in (True, False))
    train = batches() if train is None else train
    theirs = advance(plain, train, rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        ours = advance(solver, train, rounds)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    inner, alone = solver._differentiation.inner
    for part in (inner, alone, solver._differentiation.outer):
        assert part.staged.working
        assert part is alone or part.staged.compiled
    assert bool(alone.staged.compiled) == (not solver.response.learns(1, solver.optimizers["response"]))
    return solver


@pytest.fixture(autouse=True)
def graphs_as_they_are(request, monkeypatch):
    """Graphs are traced but not compiled, which would take many seconds."""
    if not request.node.get_closest_marker("slow") and "real_compiler" not in request.fixturenames:
        monkeypatch.setattr("bilevel.compilation.staged.inductor", lambda graph, inputs: graph)


@pytest.fixture
def real_compiler():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("needs a C++ compiler")


@pytest.mark.parametrize("perturb", PERTURB)
@pytest.mark.parametrize("method", METHODS)
def test_same_run(method, perturb):
    """Losses, hypergradients, scale, weights, response, statistics, moments, perturbations, dropout masks, aux."""
    solver = compare(METHODS[method](scale=0.3, **PERTURB[perturb]), problem=problem_of(Net))
    assert len(solver._differentiation.inner[0].staged.compiled) == 1
    assert len(solver._differentiation.outer.staged.compiled) == 1


@pytest.fixture
def convolutions_too(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr("bilevel.solver.gradients.gains", lambda module, device: True)


def test_convolutions(convolutions_too):
    compare(problem=problem_of(convolutions), rounds=2)


def test_convolutions_run_uncompiled_on_a_cpu_where_they_gain_nothing():
    with pytest.warns(UserWarning, match="convolutions are not faster, so they run uncompiled") as caught:
        solver = make_solver(DELTA, compile=True, problem=problem_of(convolutions))
    assert len(caught) == 1 and solver._differentiation.inner is None and solver._differentiation.outer is None
    plain = make_solver(DELTA, compile=False, problem=problem_of(convolutions))
    assert_same(advance(solver, batches(), 2), advance(plain, batches(), 2))
    assert gains(convolutions(), torch.device("cuda")) and gains(None, torch.device("cpu"))


def test_dropout_draws_anew_at_every_call_and_a_seed_repeats_a_run():
    def net():
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def run():
        solver = make_solver(CENTERED, problem=problem_of(net), rate=0.0)
        return [float(solver.inner_step(batch)) for batch in batches(1) * 4]

    first = run()
    assert len(set(first)) == 4
    assert run() == first


def test_accumulated_batches_of_several_shapes():
    ours, theirs = (make_solver(CENTERED, compile=flag) for flag in (True, False))
    parts = [*batches(1, 2), *batches(1, 5)]
    for solver in (ours, theirs):
        solver.inner_step(*parts)
    torch.testing.assert_close(ours.params, theirs.params, rtol=1e-10, atol=1e-12)
    assert len(ours._differentiation.inner[0].staged.compiled) == 2


def test_gradients_stay_when_the_graph_runs_again():
    """Results of one call are not the memory of the next, and not that of the batch."""
    solver, (first, second) = make_solver(CenteredSTN(objective="stn")), batches(2)
    before = copy.deepcopy((first, second))
    _, _, kept = solver._differentiation.of_inner_loss(solver.vector.detach(), first)
    copies = copy.deepcopy(kept)
    solver._differentiation.of_inner_loss(solver.vector.detach(), second)
    torch.testing.assert_close(kept, copies, rtol=0, atol=0)
    torch.testing.assert_close((first["x"], second["x"]), (before[0]["x"], before[1]["x"]), rtol=0, atol=0)


def test_a_solver_goes_on_from_a_state_dict():
    solver = make_solver(CENTERED, problem=problem_of(Net))
    advance(solver, batches(), 2)
    other, plain = (make_solver(CENTERED, problem=problem_of(Net), compile=flag) for flag in (True, False))
    for each in (other, plain):
        each.load_state_dict(solver.state_dict())
    expected = advance(solver, batches(seed=3), 2)
    torch.testing.assert_close(advance(other, batches(seed=3), 2), expected, rtol=0, atol=0)
    torch.testing.assert_close(advance(plain, batches(seed=3), 2), expected, rtol=1e-10, atol=1e-12)


def test_a_step_that_is_not_finite_is_undone():
    solver = make_solver(CENTERED, problem=problem_of(Net))
    good, bad = batches(2)
    solver.inner_step(good)
    bad["y"] *= math.nan
    state = solver.state_dict()
    with pytest.raises(DivergenceError, match=r"the inner loss is nan.* at inner step 1"):
        solver.inner_step(bad)
    with pytest.raises(DivergenceError, match=r"the outer loss is nan.* at outer step 0"):
        solver.outer_step(good, bad)
    for key in ("vector", "response", "optimizers", "streams"):
        torch.testing.assert_close(solver.state_dict()[key], state[key], rtol=0, atol=0, equal_nan=True)


def undecided(loss):
    def decided(model, hyper, batch):
        value, aux = loss(model, hyper, batch)
        return (2 * value if value.sum().item() > 0 else value), aux

    return decided


@pytest.mark.parametrize("level", ["inner", "outer", "both"])
def test_what_cannot_be_traced_gives_the_same_with_one_warning(level):
    problem = problem_of(
        inner=inner_loss if level == "outer" else undecided(inner_loss),
        outer=outer_loss if level == "inner" else undecided(outer_loss),
    )
    solver, plain = (make_solver(CENTERED, compile=flag, problem=problem) for flag in (True, False))
    with pytest.warns(UserWarning, match=r"could not compile (inner|outer) steps, which run uncompiled") as caught:
        ours = advance(solver, batches())
    assert len(caught) == 1
    assert "losses without .item()" in str(caught[0].message)
    torch.testing.assert_close(ours, advance(plain, batches()), rtol=1e-10, atol=1e-12)
    assert bool(solver._differentiation.inner[0].staged.compiled) == (level == "outer")


def test_without_a_compiler_one_warning_says_so(monkeypatch):
    def missing(graph, inputs):
        raise ImportError("no inductor here")

    monkeypatch.setattr("bilevel.compilation.staged.inductor", missing)
    solver, plain = (make_solver(CENTERED, compile=flag) for flag in (True, False))
    with pytest.warns(UserWarning, match=r"ImportError: no inductor here.*Needed are a C\+\+ compiler") as caught:
        ours = advance(solver, batches())
    assert len(caught) == 1
    torch.testing.assert_close(ours, advance(plain, batches()), rtol=1e-12, atol=1e-14)


class Turned(nn.Module):
    """Puts something else than the examples first, which shows only if there are as many."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        return self.line(x.T).T


def test_the_place_of_the_examples_is_checked_before_the_trace():
    """A batch as long as a layer is wide is in doubt; what the check finds out stays outside of the graph."""
    with pytest.raises(ValueError, match=r"dimension 1 counts the 4 examples"):
        make_solver(problem=problem_of(Turned)).inner_step(batches(1, 4)[0])
    solver = compare(train=batches(2, 4))
    for part in (solver._differentiation.inner[0], solver._differentiation.outer):
        (compiled,) = part.staged.compiled.values()
        assert not any("allclose" in str(node.target) for node in compiled.known[0].graph.nodes)


def constant(model, hyper, batch):
    return hyper["decay"].mean(), None


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (constant, "inner_loss does not depend on the weights"),
        (lambda model, hyper, batch: batch["x"][0, 0] / {}["yours"], "yours"),
    ],
)
def test_errors_come_through(loss, message):
    with pytest.raises((ValueError, KeyError), match=message):
        make_solver(problem=problem_of(inner=loss)).inner_step(batches(1)[0])


def test_the_module_of_the_user_is_no_part_of_the_loss():
    net = small().double()

    def own(model, hyper, batch):
        return net(batch["x"]).square().mean() + model(batch["x"]).square().mean(1) * hyper["decay"]

    with pytest.raises(ValueError, match="inner_loss depends on your own module"):
        make_solver(problem=problem_of(lambda: net, own)).inner_step(batches(1)[0])


def test_autocast():
    """Casts are in the graph, and those of one precision are not used for another."""
    ours, theirs = (make_solver(CENTERED, compile=flag) for flag in (True, False))
    (batch,) = batches(1)
    for enabled in (False, True, True, True):
        found = []
        for solver in (ours, theirs):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                found.append((solver.inner_step(batch), solver.params))
        torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)
    assert len(ours._differentiation.inner[0].staged.compiled) == 2


def test_the_real_compiler(real_compiler):
    """Two compilations, of the smallest network there is."""
    compare(problem=problem_of(lambda: nn.Linear(4, 4)), rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("perturb", PERTURB)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("net", [Net, convolutions])
def test_same_run_with_the_real_compiler(net, method, perturb, real_compiler, convolutions_too):
    by_rows = {"structure": "gate" if perturb == "gate" else "rowwise"}
    settings = PERTURB[perturb] | (by_rows if net is convolutions else {})
    compare(METHODS[method](scale=0.3, **settings), problem=problem_of(net))
