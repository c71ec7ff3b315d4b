"""The two steps: what they move, what they leave alone, and how a run continues."""

import copy
import functools
import io
import math
from functools import partial

import pytest
import torch
from examples import (
    RATE,
    assert_same,
    at_call,
    batches,
    differs,
    drive,
    for_outer_step,
    inner_loss,
    make_problem,
    make_solver,
    network,
    outer_loss,
    shortened,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import bilevel
from bilevel import DeltaSTN, DivergenceError

BATCH, *_ = BATCHES = batches()
METHODS = [
    *[pytest.param(shortened(method), id=name) for name, method in bilevel.METHODS.items()],
    pytest.param(DeltaSTN(entropy=1e-2), id="learned scale"),
    pytest.param(bilevel.CenteredSTN(objective="stn", perturb_outer=True), id="perturbed outer loss"),
]
HYPERNETWORKS = [entry for entry in METHODS if not isinstance(entry.values[0], bilevel.Implicit | bilevel.Unrolled)]
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
}
SCHEDULERS = {
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.StepLR(optimizer, 2)], [2]
    ),
    "multistep": partial(lr_scheduler.MultiStepLR, milestones=[2, 4]),
}


def rich_problem(**changes):
    """With BatchNorm statistics and dropout, which a state must not forget."""
    return make_problem(network(nn.BatchNorm1d(4), nn.Dropout(0.5)), **changes)


def rich_solver(**changes):
    settings = {"inner_optimizer": OPTIMIZERS["Adam"], "outer_optimizer": OPTIMIZERS["RMSprop"]}
    return make_solver(rich_problem(), **{**settings, **changes})


def assert_continues(make):
    """A run that is saved to a file, read into a fresh solver and continued is the run that never stopped."""
    straight = drive(make(seed=1), 6)
    saved = drive(make(seed=1), 3)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    resumed = make(seed=2)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert_same(resumed.state_dict(), saved.state_dict())
    drive(resumed, 3, start=3)
    assert_same(resumed.state_dict(), straight.state_dict())
    assert_same(resumed.module_state_dict, straight.module_state_dict)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_continues_bit_for_bit(method):
    assert_continues(partial(rich_solver, method=method))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_the_gpu_continues_bit_for_bit():
    problem = make_problem(network(nn.BatchNorm1d(4), nn.Dropout(0.5)).cuda())
    assert_continues(partial(make_solver, problem, inner_optimizer=OPTIMIZERS["Adam"]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_continues_bit_for_bit(name):
    assert_continues(partial(rich_solver, inner_optimizer=OPTIMIZERS[name], outer_optimizer=OPTIMIZERS[name]))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues_bit_for_bit(name):
    inner, outer = OPTIMIZERS["SGD"], OPTIMIZERS["RMSprop"]
    assert_continues(
        partial(
            rich_solver,
            inner_optimizer=inner,
            outer_optimizer=outer,
            inner_scheduler=SCHEDULERS[name],
            outer_scheduler=SCHEDULERS[name],
        )
    )


def test_a_state_is_a_copy_both_ways():
    solver = drive(rich_solver(), 1)
    state = solver.state_dict()
    taken = copy.deepcopy(state)
    drive(solver, 1)
    assert_same(state, taken)
    solver.load_state_dict(state)
    drive(solver, 1)
    assert_same(state, taken)
    assert differs(solver.state_dict(), state)


def test_hyper_and_params_are_copies():
    solver = make_solver()
    hyper, params, module_state = solver.hyper, solver.params, solver.module_state_dict
    values = [value.clone() for value in (hyper["decay"], params["0.weight"], module_state["0.weight"])]
    drive(solver, 2)
    assert_same([hyper["decay"], params["0.weight"], module_state["0.weight"]], values)
    assert differs(solver.params["0.weight"], values[1])


def test_the_module_of_the_user_is_never_changed():
    module = network(nn.BatchNorm1d(4), nn.Dropout(0.5))
    module[1].eval()
    before, modes = {k: v.clone() for k, v in module.state_dict().items()}, [part.training for part in module.modules()]
    drive(make_solver(make_problem(module)), 2).evaluate(BATCHES)
    assert_same(dict(module.state_dict()), before)
    assert [part.training for part in module.modules()] == modes
    assert all(param.grad is None for param in module.parameters())


class TestOptimizers:
    """Who trains what."""

    def test_the_inner_weight_decay_reaches_the_weights_but_never_the_response(self):
        decayed = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
        solver = make_solver(inner_optimizer=decayed, inner_scheduler=SCHEDULERS["cosine"])
        drive(solver, 2)
        assert [group["weight_decay"] for group in solver.optimizers["weights"].param_groups] == [0.5]
        assert [group["weight_decay"] for group in solver.optimizers["response"].param_groups] == [0]

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    def test_slopes_without_a_gradient_do_not_decay(self, optimizer):
        flat = make_problem(
            {"w": torch.ones(2)},
            inner_loss=lambda model, hyper, batch: 0 * (model.params["w"].sum() * hyper["decay"]),
            outer_loss=lambda model, hyper, batch: model.params["w"].sum(),
        )
        for own, kept in ((None, True), (partial(optimizer, lr=0.1, weight_decay=0.5), False)):
            solver = make_solver(
                flat, inner_optimizer=partial(optimizer, lr=0.1, weight_decay=0.5), response_optimizer=own
            )
            (slope,) = solver.optimizers["response"].param_groups[0]["params"]
            slope.data.fill_(1.0)
            solver.inner_step()
            assert torch.equal(slope, torch.ones_like(slope)) == kept
            assert solver.params["w"].max() < 1

    def test_each_group_has_its_own_optimizer(self):
        solver = make_solver(method=DeltaSTN(entropy=1e-3), response_optimizer=torch.optim.Adam)
        kinds = {name: type(optimizer).__name__ for name, optimizer in solver.optimizers.items()}
        assert kinds == {"weights": "SGD", "response": "Adam", "hyper": "SGD", "scale": "SGD"}
        assert "scale" not in make_solver().optimizers

    def test_inner_steps_move_no_hyperparameter_and_outer_steps_no_weight(self):
        solver = make_solver(method=DeltaSTN(entropy=1e-2))
        first = solver.state_dict()
        for _ in range(50):
            solver.inner_step(BATCH)
        second = solver.state_dict()
        assert_same(second["vector"], first["vector"])
        assert_same(second["response"]["scale.raw"], first["response"]["scale.raw"])
        assert differs(second["response"]["inner.weights.0"], first["response"]["inner.weights.0"])
        assert differs(second["response"]["theta.gate.factor"], first["response"]["theta.gate.factor"])
        solver.outer_step(BATCH, BATCH)
        third = solver.state_dict()
        assert differs(third["vector"], second["vector"])
        assert differs(third["response"].pop("scale.raw"), second["response"].pop("scale.raw"))
        assert_same(third["response"], second["response"])

    def test_a_second_loss_term_without_gradient_adds_nothing(self):
        """A loss that happens to be constant where the response is trained must not double the other gradient."""

        def loss(model, hyper, batch):
            return model.params["w"].sum() if next(calls) == 1 else torch.zeros(())

        calls = iter(range(9))
        solver = make_solver(
            make_problem({"w": torch.zeros(2)}, inner_loss=loss), inner_optimizer=partial(torch.optim.SGD, lr=1.0)
        )
        solver.inner_step()
        assert solver.params["w"].tolist() == [-1.0, -1.0]


class TestClipping:
    """Gradient norms are limited for each group of parameters by itself."""

    @staticmethod
    def changes(solver):
        """The norm of what SGD with learning rate 1 did to each group in one round."""
        groups = {name: optimizer.param_groups[0]["params"] for name, optimizer in solver.optimizers.items()}
        before = {name: [param.detach().clone() for param in group] for name, group in groups.items()}
        solver.inner_step(BATCH)
        solver.outer_step(BATCH, BATCH)
        return {
            name: torch.cat([(new - old).flatten() for new, old in zip(group, before[name], strict=True)]).norm().item()
            for name, group in groups.items()
        }

    def test_large_gradients_get_the_limit_in_each_group_and_small_ones_stay(self):
        make = partial(
            make_solver,
            make_problem(hyper={"decay": bilevel.positive(1.0)}),
            method=DeltaSTN(entropy=1.0),
            inner_optimizer=partial(torch.optim.SGD, lr=1.0),
            outer_optimizer=partial(torch.optim.SGD, lr=1.0),
        )
        inner_only, free = self.changes(make(inner_clip=1e-3)), self.changes(make())
        assert min(free.values()) > 1e-3
        assert inner_only["weights"] == pytest.approx(1e-3, rel=1e-2)
        assert inner_only["response"] == pytest.approx(1e-3, rel=1e-2)
        assert inner_only["scale"] > 0.01
        outer_only = self.changes(make(outer_clip=1e-3))
        assert outer_only["hyper"] == pytest.approx(1e-3, rel=1e-2)
        assert outer_only["scale"] == pytest.approx(1e-3, rel=1e-2)
        assert outer_only["weights"] == free["weights"]
        assert self.changes(make(inner_clip=1e6, outer_clip=1e6)) == free

    def test_two_weights_that_share_a_gradient_tensor_are_clipped_once(self):
        shared = make_problem(
            {"a": torch.zeros(2), "b": torch.zeros(2)},
            inner_loss=lambda model, hyper, batch: 5 * (model.params["a"] + model.params["b"]).sum(),
            outer_loss=lambda model, hyper, batch: model.params["a"].sum(),
        )
        solver = make_solver(shared, inner_optimizer=partial(torch.optim.SGD, lr=1.0), inner_clip=1.0, method="stn")
        solver.inner_step()
        weights = torch.cat([param.detach() for param in solver.response.inner.weights])
        torch.testing.assert_close(weights, torch.full((4,), -0.5))

    def test_the_outer_step_reports_the_hypergradient_before_clipping(self):
        clipped, free = (drive(make_solver(outer_clip=clip), 0) for clip in (1e-9, None))
        for solver in (clipped, free):
            solver.inner_step(BATCH)
        assert_same(clipped.outer_step(BATCH, BATCH).hypergradient, free.outer_step(BATCH, BATCH).hypergradient)


class TestSteps:
    """What a step returns and hands to the losses."""

    def test_the_inner_step_returns_the_loss_before_it(self):
        solver = make_solver(method="delta_stn")
        model = solver.response.inner.model(solver.params)
        expected = inner_loss(model, solver.hyper, BATCH)
        actual = solver.inner_step(BATCH)
        torch.testing.assert_close(actual, expected)
        assert not actual.requires_grad

    def test_losses_per_example_are_averaged(self):
        def per_example(model, hyper, batch):
            x, y = batch
            return (model(x) - y).square().squeeze(1) + hyper["decay"] * bilevel.l2(model.params)

        one, other = make_solver(make_problem(inner_loss=per_example)), make_solver()
        torch.testing.assert_close(one.inner_step(BATCH), other.inner_step(BATCH))
        torch.testing.assert_close(one.params, other.params)

    def test_nested_batches_reach_the_loss_whole_and_on_the_device_of_the_weights(self):
        def loss(model, hyper, batch):
            assert batch["names"] == ["a", None]
            assert batch["data"][0].device == model.params["0.weight"].device
            return inner_loss(model, hyper, batch["data"])

        problem = make_problem(inner_loss=loss, outer_loss=loss)
        if torch.cuda.is_available():
            problem = make_problem(network().cuda(), inner_loss=loss, outer_loss=loss)
        solver = make_solver(problem)
        batch = {"data": BATCH, "names": ["a", None]}
        solver.inner_step(batch)
        solver.outer_step(batch, batch)
        assert math.isfinite(solver.evaluate([batch]))

    def test_aux_comes_back_without_its_graph(self):
        def with_aux(loss):
            def wrapped(model, hyper, batch):
                return loss(model, hyper, batch), {"prediction": model(batch[0]), "note": "kept"}

            return wrapped

        solver = make_solver(make_problem(inner_loss=with_aux(inner_loss), outer_loss=with_aux(outer_loss)))
        solver.inner_step(BATCH)
        for aux in (solver.inner_aux, solver.outer_step(BATCH, BATCH).aux):
            assert aux["prediction"].shape == (5, 1)
            assert not aux["prediction"].requires_grad
            assert aux["note"] == "kept"

    def test_the_hypergradient_has_a_direct_part(self):
        def both(model, hyper, batch):
            return outer_loss(model, hyper, batch) + 3 * hyper["decay"]

        step = make_solver(make_problem(outer_loss=both)).outer_step(BATCH, BATCH)
        torch.testing.assert_close(step.direct, torch.tensor([0.03]))  # d(3 exp λ) = 3 exp λ at exp λ = 0.01
        torch.testing.assert_close(step.hypergradient, step.direct)  # slopes start at zero

    @pytest.mark.parametrize("level", ["inner", "outer"])
    @pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
    @pytest.mark.parametrize("method", METHODS)
    def test_exceptions_in_a_loss_leave_the_state_as_it_was(self, method, level, error):
        def failing(model, hyper, batch):
            model(batch[0])  # draws a dropout mask, and updates the BatchNorm statistics of an inner step
            if broken:
                raise error
            return {"inner": inner_loss, "outer": outer_loss}[level](model, hyper, batch)

        broken = False
        solver = drive(make_solver(rich_problem(**{f"{level}_loss": failing}), method=method), 2)
        before, aux = solver.state_dict(), solver.inner_aux
        broken = True
        with pytest.raises(type(error)) as caught:
            solver.inner_step(BATCH) if level == "inner" else solver.outer_step(for_outer_step(solver, BATCH), BATCH)
        assert caught.value is error
        assert_same(solver.state_dict(), before)
        assert solver.inner_aux is aux


class TestEvaluate:
    """A full validation pass."""

    def test_it_is_weighted_by_examples_and_equals_one_big_batch(self):
        solver = drive(make_solver(), 1)
        x, y = (torch.cat(parts) for parts in zip(*BATCHES, strict=True))
        ragged = [(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])]
        assert solver.evaluate(ragged) == pytest.approx(solver.evaluate([(x, y)]), rel=1e-6)
        assert solver.evaluate(ragged) != pytest.approx(solver.evaluate(ragged[:2]), rel=1e-3)

    def test_it_uses_the_users_count_of_examples(self):
        weighted = make_problem(
            examples=lambda batch: batch[2], outer_loss=lambda model, hyper, batch: 0 * hyper["decay"] + batch[0]
        )
        loader = [(torch.tensor(1.0), None, 1), (torch.tensor(5.0), None, 3)]
        assert make_solver(weighted).evaluate(loader) == 4.0

    def test_it_changes_nothing_but_its_own_stream(self):
        solver = drive(rich_solver(), 1)
        before = solver.state_dict()
        solver.evaluate(DataLoader(torch.utils.data.TensorDataset(*BATCH), shuffle=True))
        after = solver.state_dict()
        before["streams"].pop("evaluation"), after["streams"].pop("evaluation")
        assert_same(after, before)

    def test_it_is_in_eval_mode_and_unperturbed(self):
        solver = drive(rich_solver(method=DeltaSTN(entropy=1e-2)), 1)
        assert solver.evaluate(BATCHES) == solver.evaluate(BATCHES)

    def test_a_loss_without_batches_is_evaluated_once(self):
        problem = make_problem(
            {"w": torch.full((2,), 3.0)}, outer_loss=lambda model, hyper, batch: model.params["w"].square().sum()
        )
        assert make_solver(problem).evaluate() == 18.0


class TestSchedulers:
    """Advanced by ``schedule``."""

    def test_the_outer_ones_wait_for_the_first_outer_step(self):
        step = partial(lr_scheduler.StepLR, step_size=1, gamma=0.1)
        solver = make_solver(inner_scheduler=step, outer_scheduler=step)
        solver.inner_step(BATCH)
        solver.schedule()
        rates = {name: scheduler.get_last_lr()[0] for name, scheduler in solver.schedulers.items()}
        assert rates == pytest.approx({"weights": RATE / 10, "response": RATE / 10, "hyper": RATE})
        solver.outer_step(BATCH, BATCH)
        solver.schedule()
        rates = {name: scheduler.get_last_lr()[0] for name, scheduler in solver.schedulers.items()}
        assert rates == pytest.approx({"weights": RATE / 100, "response": RATE / 100, "hyper": RATE / 10})

    def test_plateaus_are_judged_by_validation_losses_only(self):
        plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
        solver = drive(make_solver(inner_scheduler=plateau, outer_scheduler=plateau), 3)
        assert solver.schedulers["weights"].get_last_lr() == [RATE]
        for loss in (1.0, 2.0):
            solver.schedule(loss)
        assert {scheduler.get_last_lr()[0] for scheduler in solver.schedulers.values()} == {RATE / 2}


class Forbid(TorchDispatchMode):
    """Reading a number from the device stops the host until the device has caught up."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class ForbidLists(TorchFunctionMode):
    """``tolist`` and ``numpy`` read without a dispatched operation on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
        return function(*args, **(kwargs or {}))


class TestAccumulation:
    """Several batches, one update."""

    UNEQUAL = (1, 5, 2)

    @staticmethod
    def parts(x, y, sizes):
        return list(zip(x.split(sizes), y.split(sizes), strict=True))

    @pytest.mark.parametrize("sizes", [UNEQUAL, (4, 4), (8,)])
    @pytest.mark.parametrize("inner_clip", [None, 0.1])
    def test_the_update_is_that_of_the_whole_batch(self, sizes, inner_clip):
        """For methods that do not perturb, whatever the optimizer, which must see one gradient."""
        (x, y), *_ = batches(1, 8)
        x, y = x.double(), y.double()
        make = partial(make_solver, method="implicit_cg", inner_optimizer=OPTIMIZERS["Adam"], inner_clip=inner_clip)
        ours, theirs = (make(make_problem(network().double())) for _ in range(2))
        for _ in range(3):
            loss, whole = ours.inner_step(*self.parts(x, y, sizes)), theirs.inner_step((x, y))
            torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
        assert ours.inner_steps == 3
        found, expected = ((s.params, s.optimizers["weights"].state_dict()["state"]) for s in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)

    def test_batches_that_cannot_be_counted_count_the_same(self):
        """As those that are not tensors; the mean of their losses is then the loss."""

        def loss(model, hyper, batch):
            return batch * (model.params["w"] - 1) ** 2 + 0 * hyper["decay"]

        problem = make_problem({"w": torch.zeros((), dtype=torch.float64)}, inner_loss=loss)
        solver = make_solver(problem, method="centered_stn")
        assert solver.inner_step(1.0, 2.0, 6.0) == 3.0
        torch.testing.assert_close(solver.params["w"], torch.tensor(6.0 * RATE, dtype=torch.float64))

    @pytest.mark.parametrize("method", ["stn", "centered_stn", "delta_stn"])
    def test_the_gradient_of_a_network_is_the_average_over_batches_each_with_its_perturbation(self, method):
        """By hand, for a linear model with weight decay, where linearised predictions are exact."""
        (x, y), *_ = batches(1, 8)
        parts = self.parts(x.double(), y.double(), self.UNEQUAL)

        def loss(model, hyper, batch):
            x, y = batch
            w = model.params["w"]
            return (x @ w - y[:, 0]).square().mean() + (hyper["decay"] * w.square()).sum()

        problem = make_problem(
            {"w": torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)},
            inner_loss=loss,
            hyper={"decay": bilevel.positive([0.1, 0.2, 0.3])},
        )
        method = type(bilevel.METHODS[method])(structure="dense", perturb="batch")
        solver = make_solver(problem, method=method)
        (w,), (theta,) = solver.response.inner.weights, solver.response.theta.parameters()
        with torch.no_grad():
            theta.copy_(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
        start, slope, hyper = w.detach().clone(), theta.detach().clone(), solver.vector.detach().clone()
        stream = copy.deepcopy(solver.streams["loss"])
        solver.inner_step(*parts)

        def gradient(weight, at, x, y):
            return 2 / len(x) * x.T @ (x @ weight - y[:, 0]) + 2 * at.exp() * weight

        for_weights, for_slope = torch.zeros_like(start), torch.zeros_like(slope)
        with stream():
            for (part_x, part_y), size in zip(parts, self.UNEQUAL, strict=True):
                noise = torch.randn(3, dtype=torch.float64)
                at = hyper + noise
                shift = at if isinstance(method, bilevel.STN) else noise
                perturbed = gradient(start + shift @ slope, at, part_x, part_y)
                plain = gradient(start, hyper, part_x, part_y)
                for_weights += size / 8 * (perturbed if isinstance(method, bilevel.STN) else plain)
                signal = perturbed if isinstance(method, bilevel.STN) else perturbed - plain
                for_slope += size / 8 * torch.outer(shift, signal)
        torch.testing.assert_close(w.detach(), start - RATE * for_weights, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(theta.detach(), slope - RATE * for_slope, rtol=1e-12, atol=1e-14)
        assert_same(solver.streams["loss"].state_dict(), stream.state_dict())

    @pytest.mark.parametrize("method", METHODS)
    def test_a_bad_batch_among_good_ones_undoes_the_whole_step(self, method):
        solver = drive(make_solver(rich_problem(), method=method), 1)
        good = solver.state_dict()
        bad = (BATCH[0], BATCH[1] * math.nan)
        with pytest.raises(DivergenceError, match=r"the inner loss is nan.* at inner step"):
            solver.inner_step(BATCH, bad, BATCH)
        assert_same(solver.state_dict(), good)
        solver.inner_step(*BATCHES)

    def test_statistics_see_every_batch_and_aux_is_that_of_the_last(self):
        problem = rich_problem(inner_loss=lambda *args: (inner_loss(*args), args[2][0].sum()))
        solver = make_solver(problem, method="delta_stn")
        solver.inner_step(*BATCHES[:3])
        assert solver.module_state_dict["1.num_batches_tracked"] == 3
        assert solver.inner_aux == BATCHES[2][0].sum()


class TestDeferredChecks:
    """On an accelerator a bad step is noted on the device, read at the next check, and undone."""

    @staticmethod
    def deferred(solver):
        solver._finite.at_once = False
        return solver

    @pytest.mark.parametrize("method", METHODS)
    def test_an_inner_step_reads_nothing_from_the_device(self, method):
        solver = self.deferred(drive(make_solver(rich_problem(), method=method, inner_clip=1.0), 1))
        with Forbid(), ForbidLists():
            solver.inner_step(BATCH)
            solver.inner_step(BATCH)

    def test_the_forbidding_works(self):
        solver = drive(make_solver(), 1)
        with pytest.raises(AssertionError), ForbidLists():
            solver.inner_step(BATCH)
        with pytest.raises(AssertionError), Forbid():
            float(torch.ones(()) + 1)

    @pytest.mark.parametrize("method", METHODS)
    def test_it_trains_as_the_immediate_path_does(self, method):
        make = partial(rich_solver, method=method)
        assert_same(drive(self.deferred(make()), 4).state_dict(), drive(make(), 4).state_dict())

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize("ending", ["outer_step", "check"])
    @pytest.mark.parametrize("method", HYPERNETWORKS)
    def test_the_first_bad_step_is_named_and_all_since_the_last_check_undone(self, method, ending):
        once = getattr(method, "objective", None) == "stn" or isinstance(method, bilevel.STN)
        usual = make_solver(rich_problem(), method=method, inner_optimizer=OPTIMIZERS["Adam"])
        calls = sum(1 if once else 1 + usual.response.learns(step, usual.optimizers["response"]) for step in range(6))
        loss = at_call(calls - 1, lambda loss: loss * math.nan, inner_loss)  # the one of the weights
        solver = make_solver(rich_problem(inner_loss=loss), method=method, inner_optimizer=OPTIMIZERS["Adam"])
        drive(self.deferred(solver), 2)
        good = solver.state_dict()
        for batch in BATCHES:
            solver.inner_step(batch)
        assert solver.params["0.weight"].isnan().all()
        with pytest.raises(DivergenceError, match=r"the inner loss is nan.* at inner step 5, counted from 0"):
            solver.check() if ending == "check" else solver.outer_step(BATCH, BATCH)
        assert_same(solver.state_dict(), good)
        drive(solver, 1)  # and the run can go on

    @pytest.mark.usefixtures("unchecked")
    def test_a_check_that_passes_is_a_new_good_state(self):
        loss = at_call(5, lambda loss: loss * math.inf, inner_loss)
        solver = self.deferred(make_solver(rich_problem(inner_loss=loss)))
        for _ in range(2):
            solver.inner_step(BATCH)
        solver.check()
        good = solver.state_dict()
        solver.inner_step(BATCH)
        with pytest.raises(DivergenceError, match=r"the inner loss is inf.* at inner step 2"):
            solver.check()
        assert_same(solver.state_dict(), good)

    @pytest.mark.usefixtures("unchecked")
    def test_what_the_user_changes_between_rounds_survives_the_return(self):
        loss = at_call(4, lambda loss: loss * math.nan, inner_loss)
        solver = drive(self.deferred(make_solver(make_problem(inner_loss=loss))), 1)
        solver.optimizers["weights"].param_groups[0]["lr"] = 1e-5
        solver.inner_step(BATCH)
        with pytest.raises(DivergenceError):
            solver.check()
        assert solver.optimizers["weights"].param_groups[0]["lr"] == 1e-5

    def test_a_bad_outer_step_is_undone_alone(self):
        loss = at_call(0, lambda loss: loss * math.nan, outer_loss)
        solver = self.deferred(make_solver(rich_problem(outer_loss=loss)))
        solver.inner_step(BATCH)
        good = solver.state_dict()
        with pytest.raises(DivergenceError, match=r"the outer loss is nan .*at outer step 0"):
            solver.outer_step(BATCH, BATCH)
        assert_same(solver.state_dict(), good)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("way", ["hook", "hook of all", "on the object", "subclass", "on the class"])
def test_what_the_user_puts_around_a_step_of_an_optimizer_is_called(kind, way, monkeypatch):
    """Steps are made without the wrappers of PyTorch where these have nothing to do."""
    calls, handle = [], None
    own = type("Own", (kind,), {"step": lambda self: calls.append("step") or kind.step(self)})
    made = own if way == "subclass" else kind
    solver = make_solver(method="implicit_identity", outer_optimizer=lambda params: made(params, lr=0.1))
    optimizer = solver.optimizers["hyper"]
    if way == "hook":
        optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    elif way == "hook of all":
        handle = register_optimizer_step_post_hook(lambda which, *_: which is optimizer and calls.append("step"))
    elif way == "on the object":
        optimizer.step = lambda: calls.append("step")
    elif way == "on the class":
        around = functools.wraps(kind.step)(lambda self: which(self, calls) or kept(self))
        kept, which = kind.step, lambda self, calls: self is optimizer and calls.append("step")
        monkeypatch.setattr(kind, "step", around)
    solver.outer_step(BATCH, BATCH)
    if handle is not None:
        handle.remove()
    assert calls == ["step"]


class Around(torch.optim.Optimizer):
    """Passes on to another optimizer, as those of other libraries do, without a memory or hooks of its own."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)

    def step(self, closure=None):
        self.calls += 1
        self.inner.step()


class Callable:
    """What is called like a function, and is none."""

    def __init__(self, function):
        self.function = function

    def __call__(self, optimizer, closure=None):
        return self.function(optimizer)


def test_optimizers_that_pass_on_to_another_one_are_called():
    made = make_solver(outer_optimizer=lambda params: Around(torch.optim.SGD(params, lr=0.1)))
    same = make_solver(outer_optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    odd = type("Odd", (torch.optim.SGD,), {"step": Callable(torch.optim.SGD.step)})
    other = make_solver(outer_optimizer=lambda params: odd(params, lr=0.1))
    for solver in (made, same, other):
        solver.inner_step(BATCH)
        solver.outer_step(BATCH, BATCH)
    assert made.optimizers["hyper"].calls == 1
    assert torch.equal(made.vector, same.vector)
    assert torch.equal(other.vector, same.vector)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_updates_in_one_pass_are_those_of_the_formula(kind):
    """Also of a gradient that lies in memory in another order than its weight, as that of ``w.T`` does."""
    inner, c = {"w": torch.ones(3, 2).double()}, torch.tensor([1.0, -2.0, 3.0]).double()

    def loss(model, hyper, batch):
        return (model.params["w"].T @ c).pow(2).sum() * hyper["decay"]

    problem = make_problem(inner, inner_loss=loss, outer_loss=loss)
    make = partial(kind, lr=0.1, betas=(0.8, 0.9), weight_decay=0.01)
    solver = make_solver(problem, method="implicit_identity", inner_optimizer=make)
    (param,) = solver.response.inner.weights
    decay = problem.space.values(solver.vector.detach())["decay"]
    w, m, v = (torch.full((3, 2), value, dtype=torch.float64) for value in (1.0, 0.0, 0.0))
    for step in range(1, 5):
        solver.inner_step()
        g = 2 * decay * torch.outer(c, w.T @ c)
        if kind is torch.optim.AdamW:
            w = w - 0.1 * 0.01 * w
        else:
            g = g + 0.01 * w
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w = w - 0.1 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
        torch.testing.assert_close(param.detach(), w, rtol=1e-9, atol=1e-12)
    assert all(group["fused"] is None for group in solver.optimizers["weights"].param_groups)  # one_pass, not for good


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_that_change_gradients_in_place_see_tensors_of_their_own(foreach):
    """Nesterov momentum adds to the gradient; autograd gives both parameters the same one, expanded."""
    nesterov = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)
    inner = {"a": torch.zeros(3), "b": torch.zeros(3)}

    def loss(model, hyper, batch):
        return (model.params["a"] + model.params["b"]).sum() * hyper["decay"]

    problem = make_problem(inner, inner_loss=loss, outer_loss=loss)
    solver = make_solver(problem, method="stn", inner_optimizer=nesterov, outer_optimizer=nesterov)
    scale = solver.response.scale
    scale.sample = lambda examples=None: torch.zeros(1)
    for _ in range(2):
        solver.inner_step()
    plain = torch.zeros(3, requires_grad=True)
    optimizer = nesterov([plain])
    for _ in range(2):
        plain.grad = torch.full((3,), 0.01)
        optimizer.step()
    torch.testing.assert_close(solver.response.inner.weights[0].detach(), plain.detach())
    torch.testing.assert_close(solver.response.inner.weights[1].detach(), plain.detach())
    before = solver.vector.detach().clone()
    step = solver.outer_step()
    torch.testing.assert_close(before - 0.19 * step.hypergradient, solver.vector.detach())


def test_an_outer_step_that_overflows_is_undone():
    """The hyperparameter would become infinite: the solver is where it was, and the message blames the outer rate."""
    solver = make_solver(
        make_problem(outer_loss=lambda model, hyper, batch: -hyper["decay"]),
        outer_optimizer=partial(torch.optim.Adam, lr=1e4),
    )
    drive(solver, 0).inner_step(batches()[0])
    before = solver.state_dict()
    with pytest.raises(DivergenceError, match=r"hyperparameter left the range.*outer step 0.*undone.*outer learning"):
        solver.outer_step()
    assert_same(before, solver.state_dict())


def test_gradients_in_half_precision_are_not_called_infinite():
    """Ten thousand entries of 1000 have a norm of 100,000, which overflows float16; no entry does."""
    inner = {"w": torch.zeros(10_000, dtype=torch.float16)}
    problem = make_problem(inner, inner_loss=lambda model, hyper, batch: 1000 * model.params["w"].sum())
    make_solver(problem, method="stn").inner_step()


def test_batches_that_cannot_be_counted_cannot_be_weighted():
    problem = make_problem(outer_loss=lambda model, hyper, batch: bilevel.l2(model.params))
    solver = make_solver(problem)
    assert solver.evaluate(["text"]) > 0
    with pytest.raises(ValueError, match=r"cannot be weighted.*examples"):
        solver.evaluate(["text", "more"])


def test_batches_that_move_themselves_are_moved():
    class Encoding(dict):
        moved = None

        def to(self, device):
            self.moved = device
            return self

    seen = []
    problem = make_problem(
        inner_loss=lambda model, hyper, batch: seen.append(batch.moved) or bilevel.l2(model.params) * hyper["decay"]
    )
    make_solver(problem).inner_step(Encoding(x=torch.zeros(2)))
    assert set(seen) == {problem.device}


def test_aux_of_hyperparameters_and_weights_lets_go_of_the_graph():
    """They are mappings of our own, which detaching must see through."""
    problem = make_problem(
        inner_loss=lambda model, hyper, batch: (bilevel.l2(model.params) * hyper["decay"], (hyper, model.params))
    )
    solver = make_solver(problem)
    solver.inner_step()
    hyper, params = solver.inner_aux
    assert not any(value.requires_grad for value in [*hyper.values(), *params.values()])
    with pytest.raises(KeyError, match="did you mean 'decay'"):
        hyper["decya"]
