"""compile=True changes how fast a hypergradient is, not what it is."""

import copy
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel
from bilevel import CG, MINRES, Implicit, Neumann, Nystrom, Unrolled

METHODS = {
    "hessian": Implicit(CG(max_steps=8, rtol=0.0, damping=10.0)),
    "gauss_newton": Implicit(CG(max_steps=8, rtol=0.0, damping=10.0), curvature="gauss_newton"),
    "neumann": Implicit(Neumann(max_steps=8, rtol=0.0, damping=10.0), curvature="gauss_newton"),
    "nystrom": Implicit(Nystrom(rank=4, damping=10.0), curvature="gauss_newton"),
    "reverse": Unrolled(steps=3),
    "truncated": Unrolled(steps=3, truncate=2),
    "checkpoint": Unrolled(steps=3, checkpoint=True),
    "restart": Unrolled(steps=2, restart=True),
    "forward": Unrolled(steps=3, mode="forward"),
    "forward truncated": Unrolled(steps=3, truncate=1, mode="forward"),
}
TWO = {name: METHODS[name] for name in ("hessian", "reverse")}
FEW = {name: METHODS[name] for name in ("hessian", "gauss_newton", "reverse", "forward")}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


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
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls = self.calls + 1
        hidden = F.dropout(torch.tanh(self.norm(self.first(x))), self.dropout, self.training)
        return self.tied(torch.tanh(self.frozen(hidden)))


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def decayed(model, hyper):
    return sum(d * w.square().sum() for d, w in zip(hyper["decay"], model.params.values(), strict=False))


def inner_loss(model, hyper, batch):
    output = model(batch["x"]) * batch["scale"]
    each = (output - batch["y"]).square().mean(1) * hyper["weight"]
    return each.mean() + decayed(model, hyper), {"each": each, "name": batch["name"]}


def outer_loss(model, hyper, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def problem_of(net=small, inner=inner_loss, **options):
    torch.manual_seed(0)
    net = net().double()
    hyper = {"decay": bilevel.positive([0.1, 0.2]), "weight": bilevel.positive(1.0)}
    return bilevel.Problem(net, inner_loss=inner, outer_loss=outer_loss, hyper=hyper, **options)


def batches(count=6, size=8, *, seed=1, **extra):
    generator = torch.Generator().manual_seed(seed)
    make = {"scale": 1.5, "name": "a", "nothing": None} | extra
    return [
        {key: torch.randn(size, 4, generator=generator, dtype=torch.float64) for key in "xy"} | make
        for _ in range(count)
    ]


def run(
    method, *, compile, problem=None, train=None, rounds=3, between=lambda solver: None, optimizer="momentum", **options
):
    """Some rounds; the solver and what it found in each of them."""
    solver = bilevel.Solver(
        problem_of() if problem is None else problem,
        method=method,
        inner_optimizer=OPTIMIZERS[optimizer],
        outer_optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        compile=compile,
        **options,
    )
    return solver, advance(solver, batches() if train is None else train, rounds, between)


def advance(solver, train, rounds, between=lambda solver: None):
    (valid,) = batches(1, 8, seed=2)
    found, position, count = [], 0, max(solver.response.unrolled_steps, 1)
    for _ in range(rounds):
        some = [train[(position + i) % len(train)] for i in range(count)]
        position += count
        if not solver.response.unrolled_steps:
            solver.inner_step(some[0])
        step = solver.outer_step(some if solver.response.unrolled_steps else some[0], valid)
        found.append((step.loss, step.hypergradient, step.inner_losses, solver.inner_aux["each"]))
        between(solver)
    found.append((solver.vector.detach().clone(), solver.module_state_dict, solver.state_dict()["optimizers"]))
    return found


def compare(method, **options):
    """The compiled and the uncompiled run agree; the compiled solver."""
    # NAdam keeps a product of numbers in single precision, which an uncompiled step rounds more often.
    rtol = 1e-5 if options.get("optimizer") == "nadam" else 1e-10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solver, ours = run(method, compile=True, **options)
    theirs = run(method, compile=False, **options)[1]
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-3 * rtol)
    assert staged(solver).working
    assert staged(solver).compiled
    return solver


def staged(solver):
    """The graph of whole outer steps, or else that of their parts."""
    whole = solver._differentiation.whole
    if whole is not None and whole.staged.working:
        return whole.staged
    compiled = solver.response._compiled
    return compiled._staged if isinstance(solver.method, Implicit) else compiled


@pytest.fixture(autouse=True)
def graphs_as_they_are(request, monkeypatch):
    """Graphs are traced and cut but not compiled, which would take seconds."""
    if "slow" not in request.keywords:
        monkeypatch.setattr("bilevel.compilation.staged.inductor", lambda graph, inputs: graph)


WHOLE = {name: METHODS[name] for name in ("hessian", "gauss_newton", "neumann", "reverse", "truncated")}
WHOLE["minres"] = Implicit(MINRES(max_steps=8, rtol=0.0))
WHOLE["cold"] = Implicit(CG(max_steps=8, rtol=0.0, damping=10.0), warm_start=False)


@pytest.mark.parametrize("method", WHOLE.values(), ids=WHOLE)
def test_an_outer_step_is_one_graph(method):
    """That of all iterations or steps; what it reports is the same, too."""
    solver = compare(method)
    assert solver._differentiation.whole.staged.compiled
    assert solver._differentiation.whole.staged.seconds > 0
    if isinstance(method, Implicit):
        assert staged(solver) is solver._differentiation.whole.staged
        plain, _ = run(method, compile=False)
        last = [s.outer_step(batches()[0], batches(1, 8, seed=2)[0]).report for s in (solver, plain)]
        torch.testing.assert_close(*last, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", TWO.values(), ids=TWO)
def test_parts_are_compiled_where_the_outer_loss_cannot_be(method, monkeypatch):
    """With one warning; a number of Python beside the loss is such a case."""

    def outer(model, hyper, batch):
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        return loss, {"loss": loss.item()}

    problem = problem_of()
    monkeypatch.setitem(problem.user_losses, "outer_loss", outer)
    with pytest.warns(UserWarning, match="could not compile outer steps as one graph") as caught:
        solver, ours = run(method, compile=True, problem=problem)
    assert len(caught) == 1
    assert staged(solver).compiled
    torch.testing.assert_close(ours, run(method, compile=False, problem=problem)[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", TWO.values(), ids=TWO)
def test_parts_are_compiled_where_a_graph_would_be_too_large(method, monkeypatch):
    monkeypatch.setattr("bilevel.solver.gradients.MOST_OPERATIONS", 20)
    solver = compare(method)
    assert not solver._differentiation.whole.staged.working


def test_a_tolerance_stops_early():
    """Then only steps are graphs: how many there are is known at the end."""
    method = Implicit(CG(max_steps=30, rtol=1e-8, damping=10.0), warm_start=False)
    solver = compare(method)
    assert solver._differentiation.whole is None
    step = solver.outer_step(batches()[0], batches(1, 8, seed=2)[0])
    assert step.report["solver_steps"] < 30
    assert step.report["residual"] < 1e-8


def test_a_solve_that_breaks_down_says_why():
    method = Implicit(CG(max_steps=8, rtol=0.0), warm_start=False)

    def inner(model, hyper, batch):
        loss, aux = inner_loss(model, hyper, batch)
        return loss - 10 * bilevel.l2(model.params), aux

    messages = []
    for compile in (True, False):
        with pytest.raises(bilevel.LinearSolverError, match="not positive definite") as caught:
            run(method, compile=compile, problem=problem_of(inner=inner))
        messages.append(str(caught.value)[:60])
    assert messages[0] == messages[1]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_same_run(method):
    """Losses, hypergradients, weights, BatchNorm statistics, moments, dropout masks, aux: all of it."""
    compare(method, problem=problem_of(Net), rounds=2)


@pytest.mark.parametrize(
    ("optimizer", "mode"), [*((name, "reverse") for name in OPTIMIZERS), ("adam", "forward"), ("rmsprop", "forward")]
)
def test_same_run_with_every_optimizer(optimizer, mode):
    """Step counters are inputs: two graphs, one for a fresh state and one for all steps after."""
    solver = compare(Unrolled(steps=3, mode=mode), optimizer=optimizer, rounds=2)
    assert len(staged(solver).compiled) == (1 if optimizer in ("sgd", "adagrad") else 2)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_inner_clip(mode):
    compare(Unrolled(steps=2, mode=mode), inner_clip=0.05)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop", "adagrad", "adamax", "nadam"])
def test_learning_rates_change_without_another_graph(optimizer):
    solver = compare(
        Unrolled(steps=2),
        optimizer=optimizer,
        inner_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        between=lambda solver: solver.schedule(),
        rounds=5,
    )
    assert len(staged(solver).compiled) <= 2


def test_other_settings_that_change_are_respected():
    def between(solver):
        solver.optimizers["weights"].param_groups[0]["momentum"] *= 0.5

    compare(Unrolled(steps=2), between=between)


def test_parameter_groups_keep_their_own_settings():
    def factory(params):
        first, *rest = params
        return torch.optim.SGD([{"params": rest, "lr": 0.1}, {"params": [first], "lr": 0.01, "momentum": 0.5}])

    OPTIMIZERS["groups"] = factory
    try:
        compare(Unrolled(steps=3), optimizer="groups")
    finally:
        del OPTIMIZERS["groups"]


@pytest.mark.parametrize("method", TWO.values(), ids=TWO)
def test_batches_of_other_shapes_and_plain_values(method):
    train = [*batches(2), *batches(1, 5), *batches(1, 8, scale=2.0), *batches(1, 8, name="b")]
    compare(method, train=train, rounds=5)


@pytest.mark.parametrize("method", TWO.values(), ids=TWO)
def test_a_solver_goes_on_from_a_state_dict(method):
    solver, _ = run(method, compile=True, rounds=2)
    state = copy.deepcopy(solver.state_dict())
    other, _ = run(method, compile=True, rounds=0)
    other.load_state_dict(state)
    plain, _ = run(method, compile=False, rounds=0)
    plain.load_state_dict(state)
    train = batches(seed=3)
    expected = advance(solver, train, 2)
    torch.testing.assert_close(advance(other, train, 2), expected, rtol=0, atol=0)
    torch.testing.assert_close(advance(plain, train, 2), expected, rtol=1e-10, atol=1e-12)


def test_plain_inner_steps_between_unrolled_ones():
    """The state of the optimizer goes back and forth; tensors that a graph returns twice must not stay one."""
    compare(Unrolled(steps=2), optimizer="adam", between=lambda solver: solver.inner_step(batches(1, seed=5)[0]))


@pytest.mark.parametrize("method", TWO.values(), ids=TWO)
def test_convolution_and_layer_norm(method):
    def net():
        return nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.GELU(), nn.Flatten(), nn.LayerNorm(9), nn.Linear(9, 4)
        )

    compare(method, problem=problem_of(net))


@pytest.mark.parametrize("method", TWO.values(), ids=TWO)
def test_attention(method):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.MultiheadAttention(2, 1, batch_first=True)

        def forward(self, x):
            y = x.view(len(x), 2, 2)
            return self.mix(y, y, y, need_weights=False)[0].flatten(1)

    compare(method, problem=problem_of(Attention))


@pytest.mark.parametrize("method", FEW.values(), ids=FEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalar_weights_without_a_network(method, dtype):
    def run_one(compile):
        problem = bilevel.Problem(
            {"w": torch.tensor(0.5, dtype=dtype)},
            inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2 + model.params["w"] ** 4,
            outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
            hyper={"target": bilevel.real(0.0)},
        )
        solver = bilevel.Solver(problem, method=method, compile=compile)
        solver.inner_step()
        steps = [solver.outer_step() for _ in range(3)]
        return [step.hypergradient for step in steps], solver.params, solver.state_dict()["optimizers"]["weights"]

    ours, theirs = run_one(True), run_one(False)
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=1e-12)
    assert ours[1]["w"].dtype == dtype


@pytest.mark.parametrize("method", FEW.values(), ids=FEW)
def test_what_cannot_be_traced_gives_the_same_with_one_warning(method):
    def inner(model, hyper, batch):
        loss, aux = inner_loss(model, hyper, batch)
        return (2 * loss if loss.item() > 0 else loss), aux

    problem = problem_of(inner=inner)
    with pytest.warns(UserWarning, match="could not compile") as caught:
        _, ours = run(method, compile=True, problem=problem)
    assert len(caught) == 1
    assert "losses without .item()" in str(caught[0].message)
    torch.testing.assert_close(ours, run(method, compile=False, problem=problem)[1], rtol=1e-12, atol=1e-14)


def test_an_optimizer_that_decides_on_its_step_runs_uncompiled():
    OPTIMIZERS["radam"] = lambda p: torch.optim.RAdam(p, lr=0.01)
    try:
        with pytest.warns(UserWarning, match="could not compile the steps of unrolling"):
            _, ours = run(Unrolled(steps=3), compile=True, optimizer="radam")
        theirs = run(Unrolled(steps=3), compile=False, optimizer="radam")[1]
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    finally:
        del OPTIMIZERS["radam"]


@pytest.mark.parametrize("method", FEW.values(), ids=FEW)
def test_errors_of_the_loss_come_through(method):
    def inner(model, hyper, batch):
        raise KeyError("yours")

    with pytest.raises(KeyError, match="yours"):
        run(method, compile=True, problem=problem_of(inner=inner))


def test_gauss_newton_still_refuses_what_it_cannot_see():
    class Hidden(nn.Linear):
        def forward(self, x):
            self.seen = super().forward(x)
            return self.seen

    net = Hidden(4, 4)

    def inner(model, hyper, batch):
        loss, aux = inner_loss(model, hyper, batch)
        return loss + net.seen.square().mean(), aux

    with pytest.raises(ValueError, match="cannot see how inner_loss depends on the weights"):
        run(METHODS["gauss_newton"], compile=True, problem=problem_of(lambda: net, inner))


class Plain(bilevel.Method):
    """A method of somebody who has not thought about compilation."""

    def bind(self, problem):
        class Response(bilevel.BestResponse):
            def inner_loss(self, hyper, batch):
                yield self.problem.inner_loss(self.inner.model(self.inner.params()), hyper, batch)

            def forward(self, hyper, train_batch=None, center=None):
                return self.inner.model(self.inner.params())

        return Response(problem)


def test_methods_without_compilation_say_so():
    with pytest.raises(ValueError, match="compile=True is for methods whose response"):
        bilevel.Solver(problem_of(), method=Plain(), compile=True)


@pytest.mark.parametrize("value", [1, None, "inductor"])
def test_compile_must_be_a_flag(value):
    with pytest.raises(TypeError, match="compile must be True or False"):
        bilevel.Solver(problem_of(), method="unrolled", compile=value)


@pytest.mark.parametrize("method", ["implicit_cg", "unrolled_truncated"])
def test_solve(method):
    options = {"steps": 2, "progress": False, "inner_optimizer": OPTIMIZERS["sgd"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bilevel.ConvergenceWarning)
        ours, theirs = (
            bilevel.solve(problem_of(), batches(), batches(seed=2), method=method, compile=flag, **options)
            for flag in (True, False)
        )
    torch.testing.assert_close(ours.hyper, theirs.hyper, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("method", FEW.values(), ids=FEW)
def test_same_run_with_the_real_compiler(method):
    compare(method, problem=problem_of(Net), rounds=2)
