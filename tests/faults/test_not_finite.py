"""NaN and infinity at every site of a step: noticed by every method, never saved, and the last good state is back."""

import copy
import math
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
from examples import (
    assert_same,
    batches,
    for_outer_step,
    inner_loss,
    make_problem,
    make_solver,
    network,
    outer_loss,
    shortened,
    solve,
)
from faulty import tally
from torch import nn
from torch.utils import _pytree as pytree

import bilevel
from bilevel import DeltaSTN, DivergenceError, LinearSolverError, NotFiniteWarning, Unrolled
from bilevel.solver import guard

METHODS = {name: shortened(method) for name, method in bilevel.METHODS.items()} | {
    "implicit_exact": bilevel.Implicit(bilevel.Exact(damping=0.1)),
    "learned scale": DeltaSTN(entropy=1e-2),
    "pairs": DeltaSTN(antithetic=True),
    "one per batch": DeltaSTN(perturb="batch", structure="dense"),
    "checkpoints": Unrolled(steps=4, checkpoint=True),
    "restarts": Unrolled(steps=3, restart=True),
    "forward": Unrolled(steps=3, truncate=2, mode="forward"),
}
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
}
ENDINGS = ["step", "state_dict"]
EVERYWHERE = "NaN and inf in the state: every site, every method, now and deferred, noticed and never saved"
TRAIN, VALID = batches(seed=0), batches(seed=1)


class Listing(torch.optim.Optimizer):
    """Remembers past gradients in a list, as L-BFGS does, and a tensor in its group."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "size": None})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["size"] = torch.ones(2) if group["size"] is None else group["size"] + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                past = self.state[param].setdefault("past", [])
                past.append(param.grad.clone())
                del past[:-3]
                param.sub_(group["lr"] * past[-1])


def make(method, deferred=False, **changes):
    problem = make_problem(network(nn.BatchNorm1d(4), nn.Dropout(0.2)), **changes.pop("problem", {}))
    settings = {"inner_optimizer": OPTIMIZERS["adam"], "outer_optimizer": OPTIMIZERS["rmsprop"]}
    solver = make_solver(problem, method=METHODS.get(method, method), **{**settings, **changes})
    if deferred:
        solver._finite.at_once = False
    return solver


def round_of(solver, index=0):
    """Inner steps, unless the method returns to the start anyway, then an outer step."""
    if not solver.response.restarts:
        for step in range(2):
            solver.inner_step(TRAIN[(index + step) % 4])
    solver.outer_step(for_outer_step(solver, TRAIN[index % 4]), VALID[index % 4])


def assert_good(state):
    for key in ("vector", "response", "optimizers"):
        for leaf in pytree.tree_leaves(state[key]):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                assert leaf.isfinite().all(), key


def state_tensors(optimizer):
    leaves = pytree.tree_leaves([list(optimizer.state.values()), [g.get("size") for g in optimizer.param_groups]])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def sites(solver):
    """What can be spoiled between two steps, by name."""
    response = solver.response
    found = {"λ": solver.vector, "weights": response.inner.weights[0]}
    found |= {f"buffer {name}": b for name, b in response.named_buffers() if b.is_floating_point() and b.numel()}
    rest = solver.optimization.params.get("response", [])
    found |= {"Θ": rest[0]} if rest else {}
    found |= {"σ": response.scale.raw} if "scale" in solver.optimizers else {}
    for name, optimizer in solver.optimizers.items():
        found |= {f"optimizer of {name} {i}": tensor for i, tensor in enumerate(state_tensors(optimizer))}
    return found


def spoil(tensor, value):
    tensor.data.view(-1)[0] = value


def started(method, deferred=False, **changes):
    """After two good rounds."""
    solver = make(method, deferred, **changes)
    for index in range(2):
        round_of(solver, index)
    return solver


def check_site(solver, site, value, ending):
    """Spoil one entry after good rounds: it is noticed, and the state that comes back is a good one."""
    spoil(sites(solver)[site], value)
    if ending == "state_dict":
        with pytest.raises(DivergenceError):
            solver.state_dict()
    else:
        # What a method draws anew in every outer step is not read, and the next state does not hold it.
        unread = solver.response.restarts and site not in ("λ", "optimizer of hyper 0", "optimizer of hyper 1")
        with suppress(DivergenceError) if unread else pytest.raises((DivergenceError, LinearSolverError)):
            round_of(solver, 2)
    assert_good(solver.state_dict())


def go_on(solver):
    solver.evaluate(VALID)
    round_of(solver, 3)


def hash_of(text):
    return sum(map(ord, text))


@pytest.mark.parametrize("method", METHODS)
def test_a_spoiled_state_is_noticed(method):
    """A sample: other sites, values and ways for each method."""
    solvers = [started(method, deferred) for deferred in (False, True)]
    for site in {"λ", *list(sites(solvers[0]))[hash_of(method) % 5 :: 11]}:
        number = hash_of(method + site)
        check_site(solvers[number % 2], site, list(VALUES.values())[number % 3], ENDINGS[number // 2 % 2])
        go_on(solvers[number % 2])


@pytest.mark.slow
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_spoiled_state_is_noticed_everywhere(method, deferred):
    """One solver lives through all values at a site."""
    for site in sites(started(method, deferred)):
        solver = started(method, deferred)
        for value in VALUES.values():
            for ending in ENDINGS:
                check_site(solver, site, value, ending)
        go_on(solver)
        tally(EVERYWHERE, len(VALUES) * len(ENDINGS))


@pytest.mark.parametrize("policy", ["raise", "rollback"])
def test_a_state_that_a_restart_does_not_read_is_none_to_return_to(policy):
    solver = started("restarts", on_nan=policy)
    for _ in range(2):
        spoil(sites(solver)["weights"], math.nan)
        round_of(solver, 2)
        good = copy.deepcopy(solver.state_dict())
        spoil(sites(solver)["weights"], math.nan)
        with pytest.raises(DivergenceError) if policy == "raise" else pytest.warns(NotFiniteWarning):
            solver.check()
        assert_good(solver.state_dict())
        solver.load_state_dict(good)
        round_of(solver, 3)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "listing"])
def test_a_spoiled_memory_of_every_optimizer_is_noticed(name, deferred):
    optimizer = OPTIMIZERS.get(name, Listing)
    changes = {"inner_optimizer": optimizer, "outer_optimizer": optimizer}
    solver = started("delta_stn", deferred, **changes)
    for site in [site for site in sites(solver) if site.startswith("optimizer")][::5]:
        check_site(solver, site, math.inf, "step")
        go_on(solver)


class Spoiled:
    """A loss that is spoiled when asked to: its value, or only its gradient."""

    def __init__(self, loss, part):
        self.loss, self.part, self.value = loss, part, None

    def __call__(self, model, hyper, batch):
        loss = self.loss(model, hyper, batch)
        if self.value is None:
            return loss
        # The square root of zero has the value 0 and an infinite slope.
        return loss + self.value if self.part == "value" else loss + (loss * 0).sqrt() * math.copysign(1, self.value)


def check_loss(method, level, part, values, deferred):
    loss = Spoiled({"inner": inner_loss, "outer": outer_loss}[level], part)
    solver = started(method, deferred, problem={f"{level}_loss": loss})
    for value in values:
        before = solver.state_dict()
        loss.value = value
        with pytest.raises((DivergenceError, LinearSolverError)):
            round_of(solver, 2)
        loss.value = None
        assert_good(solver.state_dict())
        if level == "inner" and not deferred:
            assert_same(solver.state_dict(), before)
        round_of(solver, 2)


LOSSES = [(level, part) for level in ("inner", "outer") for part in ("value", "gradient")]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("method", METHODS)
def test_a_loss_or_gradient_is_noticed(method, level):
    part, deferred = ["value", "gradient"][hash_of(method) % 2], hash_of(level + method) % 3 > 0
    check_loss(method, level, part, [list(VALUES.values())[hash_of(method + level) % 3]], deferred)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("level", "part"), LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_a_loss_or_gradient_is_noticed_everywhere(method, level, part, deferred):
    check_loss(method, level, part, VALUES.values(), deferred)
    tally("NaN and inf in a loss or its gradient: both levels, every method, now and deferred, noticed", len(VALUES))


@pytest.mark.parametrize("rate", [1e30, 1e36])
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "rmsprop"])
@pytest.mark.parametrize("method", ["stn", "delta_stn", "implicit_cg", "unrolled"])
def test_the_solution_after_an_overflow_of_the_optimizer_is_of_use(method, optimizer, rate):
    """Also where the exploded weights are finite, but no loss is."""
    exploding = partial(OPTIMIZERS[optimizer].func, lr=rate)
    with warnings.catch_warnings(), pytest.raises((DivergenceError, LinearSolverError)) as caught:
        warnings.simplefilter("ignore")
        solve(method=METHODS[method], inner_optimizer=exploding, steps=9, warmup=0, progress=False)
    if isinstance(caught.value, DivergenceError):
        solution = caught.value.solution
        assert_good(solution.solver.state_dict())
        assert math.isfinite(solution.solver.evaluate(VALID))


@pytest.fixture
def seldom(monkeypatch):
    """Copies as seldom as those of a state with many numbers."""
    monkeypatch.setattr(guard, "LARGE", -1)


@pytest.mark.usefixtures("seldom")
@pytest.mark.parametrize("method", ["stn", "delta_stn", "implicit_cg", "unrolled"])
def test_with_a_copy_before_every_tenth_update_nothing_more_is_missed(method):
    solver = started(method)
    for index, site in enumerate(["weights", *list(sites(solver))[hash_of(method) % 5 :: 9]]):
        check_site(solver, site, list(VALUES.values())[hash_of(site) % 3], ENDINGS[index % 2])
        go_on(solver)


@pytest.mark.usefixtures("seldom")
def test_an_update_that_explodes_takes_back_those_since_the_copy():
    solver = make("delta_stn")
    states = []
    for index in range(13):
        states.append(solver.state_dict())
        solver.inner_step(TRAIN[index % 4])
    spoil(solver.response.inner.weights[0], math.inf)
    with pytest.raises(DivergenceError, match="3 updates before it have been undone"):
        solver.inner_step(TRAIN[0])
    assert_same(solver.state_dict(), states[10])
    failing = partial(solver.optimizers["weights"].step)
    solver.inner_step(TRAIN[10 % 4])
    solver.optimizers["weights"].step = lambda: failing() or 1 / 0  # fails after it has changed the weights
    with pytest.raises(ZeroDivisionError):
        solver.inner_step(TRAIN[11 % 4])
    assert_same(solver.state_dict(), states[10])
    del solver.optimizers["weights"].step
    for index in (10, 11, 12):
        solver.inner_step(TRAIN[index % 4])
    assert solver.inner_steps == 13


def test_a_large_state_that_is_finite_is_no_error():
    """Its sum is infinite, no entry is."""
    solver = make("delta_stn", inner_optimizer=OPTIMIZERS["momentum"])
    round_of(solver)
    extra = next(iter(solver.optimizers["weights"].state.values()))
    extra["mine"] = torch.full((4, 3), 3e38)
    solver.state_dict()
    round_of(solver)


class TestOnNan:
    """What ``on_nan`` leaves out."""

    BAD = (TRAIN[0][0] * math.nan, TRAIN[0][1])

    @pytest.mark.parametrize("method", [name for name in METHODS if name != "restarts"])
    def test_a_skipped_batch_leaves_everything_as_if_it_had_not_been_there(self, method):
        ours, theirs = make(method, on_nan="skip"), make(method, on_nan="skip")
        for solver in (ours, theirs):
            round_of(solver)
        with pytest.warns(NotFiniteWarning, match="at inner step"):
            assert ours.inner_step(self.BAD).isnan()
        with pytest.warns(NotFiniteWarning, match="outer step 1"):
            ours.outer_step(for_outer_step(ours, TRAIN[1]), self.BAD)
        assert (ours.bad_steps, theirs.bad_steps) == (2, 0)
        for solver in (ours, theirs):
            round_of(solver, 1)
        assert_same(ours.state_dict(), theirs.state_dict())

    @pytest.mark.parametrize("method", METHODS)
    def test_a_bad_training_batch_of_an_outer_step_is_skipped(self, method):
        solver = make(method, on_nan="skip")
        round_of(solver)
        before = solver.state_dict()
        reads = not solver.response.pure
        with pytest.warns(NotFiniteWarning) if reads else warnings.catch_warnings():
            solver.outer_step(for_outer_step(solver, self.BAD), VALID[0])
        if reads:
            assert_same(solver.state_dict(), before)

    def test_rollback_returns_to_the_first_inner_step_since_the_last_outer_one(self):
        solver = make("delta_stn", on_nan="rollback")
        round_of(solver)
        before = solver.state_dict()
        for batch in TRAIN[:3]:
            solver.inner_step(batch)
        with pytest.warns(NotFiniteWarning, match="All inner steps since"):
            solver.inner_step(self.BAD)
        assert_same(solver.state_dict(), before)
        round_of(solver)

    @pytest.mark.parametrize("policy", ["skip", "rollback"])
    def test_too_many_bad_steps_raise(self, policy):
        solver = make("delta_stn", on_nan=policy, max_bad_steps=3)
        round_of(solver)
        for _ in range(3):
            with pytest.warns(NotFiniteWarning):
                solver.inner_step(self.BAD)
        with pytest.raises(DivergenceError, match=r"4 inner steps in a row.*max_bad_steps=3"):
            solver.inner_step(self.BAD)
        assert_good(solver.state_dict())

    @pytest.mark.parametrize("policy", ["skip", "rollback"])
    @pytest.mark.parametrize("method", ["delta_stn", "implicit_cg", "unrolled"])
    def test_one_bad_row_does_not_end_a_run(self, method, policy):
        x, y = (torch.cat(parts) for parts in zip(*TRAIN, strict=True))
        x = x.clone()
        x[7, 1] = math.nan
        train = list(zip(x.split(4), y.split(4), strict=True))
        with pytest.warns(NotFiniteWarning):
            solution = solve(None, train, train, method=METHODS[method], on_nan=policy, steps=8, warmup=1,
                             progress=False)  # fmt: skip
        assert solution.stopped == "steps"
        assert solution.history["bad_steps"][-1] >= 2
        assert_good(solution.solver.state_dict())
        assert math.isfinite(solution.history["validation_loss"][-1])

    def test_a_run_with_bad_rows_goes_on_to_the_last_bit(self, tmp_path):
        """Also the number of steps that were left out."""
        x = torch.cat([batch[0] for batch in TRAIN]).clone()
        x[7, 1] = math.nan
        train = list(zip(x.split(5), [batch[1] for batch in TRAIN], strict=True))
        settings = {"method": "delta_stn", "on_nan": "skip", "steps": 9, "warmup": 1, "progress": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotFiniteWarning)
            whole = solve(None, train, **settings)
            solve(None, train, checkpoint=tmp_path / "run", callbacks=[lambda event: event.index == 5], **settings)
            rest = solve(None, train, checkpoint=tmp_path / "run", **settings)
        assert whole.history["bad_steps"][-1] > whole.history["bad_steps"][4] > 0
        assert list(rest.history["bad_steps"]) == list(whole.history["bad_steps"])
        assert_same(rest.solver.state_dict(), whole.solver.state_dict())

    def test_arguments(self):
        with pytest.raises(ValueError, match="on_nan must be 'raise', 'skip' or 'rollback', got 'ignore'"):
            make("delta_stn", on_nan="ignore")
        with pytest.raises(ValueError, match="max_bad_steps"):
            make("delta_stn", max_bad_steps=0)


class TestFiles:
    """``Solver.save`` and ``Solver.load``."""

    @pytest.mark.parametrize("method", METHODS)
    def test_a_run_goes_on_bit_for_bit(self, method, tmp_path):
        ours, theirs = make(method, seed=1), make(method, seed=1)
        round_of(ours)
        round_of(theirs, 1)
        ours.save(tmp_path / "state")
        theirs.load(str(tmp_path / "state"))
        for solver in (ours, theirs):
            round_of(solver, 1)
        assert_same(theirs.state_dict(), ours.state_dict())

    def test_a_bad_state_is_not_saved_and_another_one_not_loaded(self, tmp_path):
        file = tmp_path / "state"
        solver = make("delta_stn")
        round_of(solver)
        solver.save(file)
        good = file.read_bytes()
        spoil(solver.vector, -math.inf)
        with pytest.raises(DivergenceError):
            solver.save(file)
        assert file.read_bytes() == good
        with pytest.raises(ValueError, match=r"state is of another run: method was DeltaSTN"):
            make("stn").load(file)
        state = solver.state_dict()
        state["vector"][0] = math.inf
        before = solver.state_dict()
        with pytest.raises(ValueError, match="NaN or infinite"):
            solver.load_state_dict(state)
        assert_same(solver.state_dict(), before)
