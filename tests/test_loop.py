"""``bilevel.solve``: how it counts, evaluates, stops and reports."""

import importlib
import math
import time
from collections import Counter
from functools import partial

import pytest
import torch
from examples import (
    RATE,
    assert_same,
    at_call,
    batches,
    differs,
    inner_loss,
    make_problem,
    make_solver,
    network,
    outer_loss,
    shortened,
    solve,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import bilevel
from bilevel.loop import Feed
from bilevel.rng import Stream

TRAIN, VALID = batches(seed=0), batches(seed=1)


def rich_problem(**changes):
    return make_problem(network(nn.BatchNorm1d(4), nn.Dropout(0.5)), **changes)


def result(solution):
    """What a run computed, without the times."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in solution.history.rows]
    return solution.hyper, solution.params, solution.state_dict, rows


def recording(loss, log, label):
    def recorded(model, hyper, batch):
        log.append((label, hyper["decay"].flatten()[0].item()))
        return loss(model, hyper, batch)

    return recorded


class Numbers(IterableDataset):
    """Ten batches, without a length."""

    def __iter__(self):
        return iter(batches(10))


class Sized(IterableDataset):
    """Ten batches whose length may lie."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(batches(10))

    def __len__(self):
        return self.length


class TestCounting:
    """Rounds, steps and passes."""

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(("inner_steps", "outer_steps"), [(1, 1), (3, 1), (2, 4)])
    def test_a_round_is_so_many_inner_and_then_so_many_outer_steps(self, inner_steps, outer_steps):
        log = []
        problem = make_problem(
            inner_loss=recording(inner_loss, log, "inner"), outer_loss=recording(outer_loss, log, "outer")
        )
        solution = solve(
            problem, method="stn", inner_steps=inner_steps, outer_steps=outer_steps, steps=3, evaluate_every=99
        )
        round_ = ["inner"] * inner_steps + ["outer"] * outer_steps
        final_pass = ["outer"] * len(VALID)
        assert [label for label, _ in log] == round_ * 3 + final_pass
        assert (solution.solver.inner_steps, solution.solver.outer_steps) == (3 * inner_steps, 3 * outer_steps)
        assert len(solution.history) == 3 * outer_steps

    @pytest.mark.usefixtures("unchecked")
    def test_batches_come_in_the_order_of_the_loaders(self):
        seen = []
        labelled = [
            [(name, index, *batch) for index, batch in enumerate(data)] for name, data in (("t", TRAIN), ("v", VALID))
        ]

        def log(loss):
            def logged(model, hyper, batch):
                seen.append(batch[:2])
                return loss(model, hyper, batch[2:])

            return logged

        problem = make_problem(inner_loss=log(inner_loss), outer_loss=log(outer_loss))
        solve(problem, *labelled, method="stn", inner_steps=3, outer_steps=2, steps=2, evaluate_every=99)
        first = [("t", 0), ("t", 1), ("t", 2), ("v", 0), ("v", 1)]
        second = [("t", 3), ("t", 0), ("t", 1), ("v", 2), ("v", 3)]
        assert seen[:10] == first + second

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize("method", ["centered_stn", "delta_stn", "stn"])
    def test_the_warm_up_perturbs_but_moves_neither_hyperparameters_nor_scale(self, method):
        log = []
        settings = type(bilevel.METHODS[method])(entropy=1e-2)
        problem = make_problem(inner_loss=recording(inner_loss, log, "inner"))
        solution = solve(problem, method=settings, warmup=3, steps=5)
        history = solution.history
        assert len(set(history["decay"][:3])) == 1
        assert len(set(history["scale.decay"][:3])) == 1
        assert history["decay"][2] == pytest.approx(0.01)
        assert len(set(history["decay"][2:])) == 3
        assert len(set(history["scale.decay"][2:])) == 3
        assert len({value for _, value in log[:6]}) >= 4
        assert solution.solver.outer_steps == 2

    @pytest.mark.parametrize(
        ("train", "length"),
        [
            pytest.param(batches(10), 10, id="list"),
            pytest.param(tuple(batches(10)), 10, id="tuple"),
            pytest.param(
                DataLoader(TensorDataset(torch.randn(10, 5, 3), torch.randn(10, 5, 1)), batch_size=None),
                10,
                id="DataLoader",
            ),
            pytest.param(DataLoader(Sized(10), batch_size=None), 10, id="honest"),
        ],
    )
    def test_epochs_are_passes_over_train(self, train, length):
        solution = solve(train=train, epochs=3, inner_steps=5)
        assert solution.stopped == "epochs"
        assert solution.solver.inner_steps == 3 * length

    def test_epochs_may_end_within_a_round(self):
        assert solve(train=batches(10), epochs=2, inner_steps=7).solver.inner_steps == 21

    @pytest.mark.parametrize(("accumulate", "inner_steps", "rounds"), [(2, 5, 2), (3, 2, 4), (20, 1, 1)])
    def test_accumulated_batches_count_towards_a_pass(self, accumulate, inner_steps, rounds, monkeypatch):
        expected = []

        def bar(total, progress, *, done):
            expected.append(total)
            return original(total, progress, done=done)

        loop = importlib.import_module("bilevel.loop.solve")
        original = loop.Progress
        monkeypatch.setattr(loop, "Progress", bar)
        solution = solve(
            train=batches(10), epochs=2, accumulate=accumulate, inner_steps=inner_steps, method="implicit_cg"
        )
        assert solution.stopped == "epochs"
        assert solution.solver.inner_steps == rounds * inner_steps
        assert expected == [len(solution.history)] == [rounds]

    def test_accumulation_is_a_step_on_several_batches(self):
        losses = []
        solution = solve(
            accumulate=3, inner_steps=2, warmup=1, steps=2, callbacks=[lambda event: losses.append(event.row)]
        )
        solver = make_solver()
        order = [TRAIN[index % 4] for index in range(12)]
        first = torch.stack([solver.inner_step(*order[:3]), solver.inner_step(*order[3:6])]).mean()
        solver.inner_step(*order[6:9])
        solver.inner_step(*order[9:])
        solver.outer_step(order[-1], VALID[0])
        assert_same(solution.solver.state_dict()["response"], solver.state_dict()["response"])
        assert_same(solution.solver.vector, solver.vector)
        assert losses[0]["inner_loss"] == pytest.approx(float(first))

    def test_unrolled_steps_do_not_accumulate(self):
        message = r"accumulate must be 1 with Unrolled\(.*\), whose outer steps make inner steps .* got 2"
        with pytest.raises(ValueError, match=message):
            solve(method="unrolled", accumulate=2)

    @pytest.mark.parametrize(
        ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
    )
    def test_accumulate_is_a_positive_whole_number(self, value, error):
        with pytest.raises(error, match=r"accumulate must be"):
            solve(accumulate=value)

    def test_a_pass_without_a_length_is_noticed_when_the_next_one_begins(self):
        solution = solve(train=DataLoader(Numbers(), batch_size=None), epochs=2, inner_steps=5)
        assert (solution.stopped, solution.solver.inner_steps) == ("epochs", 25)

    @pytest.mark.parametrize("length", [1, 4, 9, 11, 1000])
    def test_a_length_that_lies_loses_no_batch(self, length):
        feed = Feed("train", Sized(length), Stream(0, torch.device("cpu")))
        given = [next(feed)[0] for _ in range(25)]
        expected = [x for x, _ in batches(10)]
        assert_same(given, (expected * 3)[:25])
        assert feed.passes == 2

    def test_a_loader_may_end_early_in_some_passes_but_not_yield_nothing(self):
        class Shrinking:
            passes = 0

            def __iter__(self):
                self.passes += 1
                return iter(batches(3 - self.passes))

        with pytest.raises(ValueError, match=r"train yielded no batch in pass 3: give at least one batch"):
            solve(train=Shrinking(), steps=5)

    def test_losses_without_batches_need_no_loaders(self):
        problem = make_problem(
            {"w": torch.zeros(2)},
            inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]).square().sum(),
            outer_loss=lambda model, hyper, batch: (model.params["w"] - 1).square().sum(),
            hyper={"target": bilevel.real([0.0, 0.0])},
        )
        fast = partial(torch.optim.SGD, lr=0.1)
        solution = solve(problem, None, None, steps=100, inner_optimizer=fast, outer_optimizer=fast)
        assert solution.stopped == "steps"
        torch.testing.assert_close(solution.hyper["target"], torch.ones(2), atol=0.05, rtol=0)

    def test_workers_and_collated_dicts_work(self):
        class Points(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return {"x": torch.full((3,), index / 8), "y": torch.ones(1)}

        def unpacked(loss):
            return lambda model, hyper, batch: loss(model, hyper, (batch["x"], batch["y"]))

        problem = make_problem(inner_loss=unpacked(inner_loss), outer_loss=unpacked(outer_loss))
        run = partial(solve, problem, steps=2, seed=5)
        in_process = run(DataLoader(Points(), 4, shuffle=True), DataLoader(Points(), 4))
        with_workers = run(DataLoader(Points(), 4, shuffle=True, num_workers=1), DataLoader(Points(), 4))
        assert_same(result(with_workers), result(in_process))


class TestEvaluation:
    """Full validation passes, and the best of them."""

    def test_they_come_after_every_pass_over_train_by_default(self):
        history = solve(train=batches(6), inner_steps=2, steps=7).history
        assert [not math.isnan(value) for value in history["validation_loss"]] == [False, False, True] * 2 + [True]

    def test_they_come_every_so_many_rounds_if_asked_and_at_the_end(self):
        history = solve(steps=7, evaluate_every=3).history
        assert [not math.isnan(value) for value in history["validation_loss"]] == [False, False, True] * 2 + [True]

    @pytest.mark.parametrize("method", sorted(bilevel.METHODS))
    def test_they_do_not_change_the_run(self, method):
        data = TensorDataset(torch.cat([x for x, _ in VALID]), torch.cat([y for _, y in VALID]))
        run = partial(
            solve,
            rich_problem(),
            TRAIN,
            DataLoader(data, 5, shuffle=True),
            method=shortened(bilevel.METHODS[method]),
            steps=6,
        )
        often, never = run(evaluate_every=1), run(evaluate_every=99)
        for row in often.history.rows + never.history.rows:
            row.pop("validation_loss", None)
        assert_same(result(often), result(never))

    def test_the_recorded_loss_is_the_one_over_all_of_valid(self):
        losses = []
        solve(
            evaluate_every=1,
            steps=3,
            callbacks=[lambda event: losses.append((event.validation_loss, event.solver.evaluate(VALID)))],
        )
        assert all(recorded == measured for recorded, measured in losses)

    def test_best_is_the_best_full_pass_and_keeps_its_own_copies(self):
        snapshots = {}

        def snapshot(event):
            snapshots[event.index] = (dict(event.solver.hyper), event.solver.params, event.solver.module_state_dict)

        solution = solve(  # a learning rate that first helps and then destroys
            rich_problem(),
            steps=12,
            evaluate_every=2,
            callbacks=[snapshot],
            inner_scheduler=partial(lr_scheduler.LambdaLR, lr_lambda=lambda round_: 1.0 if round_ < 6 else 500.0),
            inner_clip=1.0,
        )
        losses = solution.history["validation_loss"]
        best = solution.best
        assert best.validation_loss == min(value for value in losses if not math.isnan(value))
        assert solution.history["round"][losses == best.validation_loss].tolist() == [best.round]
        assert best.round < 12
        assert best.inner_loss == solution.history["inner_loss"][best.round - 1]
        assert_same((best.hyper, best.params, best.state_dict), snapshots[best.round])
        assert differs(best.params, solution.params)

    def test_the_state_dict_loads_strictly_and_gives_the_validation_loss(self):
        solution = solve(rich_problem(), steps=4, evaluate_every=1)
        for state, loss in (
            (solution.state_dict, solution.history["validation_loss"][-1]),
            (solution.best.state_dict, solution.best.validation_loss),
        ):
            module = network(nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
            module.load_state_dict(state, strict=True)
            by_hand = [outer_loss(module, solution.hyper, batch).item() for batch in VALID]
            assert sum(by_hand) / 4 == pytest.approx(loss, rel=1e-5)


class TestSchedulers:
    """When learning rates change in a run; any warning of torch is an error here."""

    rate = staticmethod(lambda solution, name: solution.solver.schedulers[name].get_last_lr()[0])
    halve = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)

    def test_with_steps_they_advance_every_round(self):
        solution = solve(steps=3, inner_scheduler=self.halve, outer_scheduler=self.halve)
        assert {self.rate(solution, name) for name in ("weights", "response", "hyper")} == {RATE / 8}

    def test_with_epochs_they_advance_every_pass(self):
        solution = solve(epochs=3, inner_steps=1, inner_scheduler=self.halve, outer_scheduler=self.halve)
        assert solution.solver.inner_steps == 12
        assert {self.rate(solution, name) for name in ("weights", "response", "hyper")} == {RATE / 8}

    def test_a_round_of_several_passes_advances_several_times(self):
        solution = solve(epochs=4, inner_steps=8, inner_scheduler=self.halve)
        assert self.rate(solution, "weights") == RATE / 16

    def test_plateaus_follow_the_full_validation_passes(self):
        plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
        solution = solve(steps=6, evaluate_every=2, inner_scheduler=plateau, outer_scheduler=plateau)
        assert self.rate(solution, "weights") == RATE / 4  # the first of three passes sets the mark
        assert self.rate(solution, "hyper") == RATE / 4

    def test_the_outer_ones_wait_through_the_warm_up(self):
        solution = solve(steps=5, warmup=3, inner_scheduler=self.halve, outer_scheduler=self.halve)
        assert self.rate(solution, "weights") == RATE / 32
        assert self.rate(solution, "hyper") == RATE / 4


class TestStopping:
    """Why a run ends."""

    def test_by_steps(self):
        solution = solve(steps=3)
        assert (solution.stopped, len(solution.history)) == ("steps", 3)

    def test_by_a_callback_after_all_callbacks_ran(self):
        calls = Counter()

        def stop(event):
            calls["stop"] += 1
            return event.index == 2

        solution = solve(steps=9, callbacks=[stop, lambda event: calls.update(["after"])])
        assert (solution.stopped, len(solution.history)) == ("callback", 2)
        assert calls == {"stop": 2, "after": 2}

    def test_by_patience(self):
        growing = at_call(-1, lambda loss: loss, lambda model, hyper, batch: 0 * hyper["decay"] + next(worse))
        worse = iter(torch.arange(1e4))
        solution = solve(make_problem(outer_loss=growing), steps=99, warmup=0, evaluate_every=2, patience=3)
        assert (solution.stopped, solution.best.round, len(solution.history)) == ("patience", 2, 8)

    def test_by_time(self, monkeypatch):
        """A day passes in each round; no machine takes half a day for them."""
        real, days = time.perf_counter, [0]
        monkeypatch.setattr(time, "perf_counter", lambda: real() + days[0] * 86400)

        def pass_the_day(event):
            days[0] = event.index

        solution = solve(steps=9, time_budget=3.5 * 86400, callbacks=[pass_the_day])
        assert (solution.stopped, len(solution.history)) == ("time", 4)

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize("where", ["inner_loss", "outer_loss", "callback", "loader"])
    def test_by_an_interrupt_from_the_keyboard_with_the_solution_so_far(self, where, tmp_path):
        calls = iter(range(10**9))

        def interrupt(*args):
            if next(calls) == 7:
                raise KeyboardInterrupt

        def interrupted(loss):
            def wrapped(*args):
                interrupt()
                return loss(*args)

            return wrapped

        class Loader:
            def __iter__(self):
                for batch in TRAIN:
                    interrupt()
                    yield batch

        losses = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        changes = {where: interrupted(losses[where])} if where in losses else {}
        solution = solve(
            rich_problem(**changes),
            Loader() if where == "loader" else TRAIN,
            steps=99,
            evaluate_every=1,
            callbacks=[interrupt] if where == "callback" else [],
        )
        assert solution.stopped == "interrupted"
        assert 1 <= len(solution.history) < 99
        assert all(value.isfinite().all() for value in [*solution.hyper.values(), *solution.params.values()])
        network(nn.BatchNorm1d(4), nn.Dropout(0.5)).load_state_dict(solution.state_dict, strict=True)
        solution.plot(tmp_path / "plot.png")
        assert solution.best is not None

    @pytest.mark.usefixtures("unchecked")
    def test_an_interrupt_before_a_deferred_check_does_not_leave_a_bad_state(self):
        calls = iter(range(10**9))

        def loss(model, hyper, batch):
            call = next(calls)
            if call == 6:
                raise KeyboardInterrupt
            return inner_loss(model, hyper, batch) * (math.nan if call == 5 else 1.0)

        def defer(event):
            event.solver._finite.at_once = False

        solution = solve(make_problem(inner_loss=loss), method="stn", inner_steps=4, warmup=0, callbacks=[defer])
        assert solution.stopped == "interrupted"
        assert all(value.isfinite().all() for value in solution.params.values())
        assert_same(solution.params, solve(method="stn", inner_steps=4, steps=1).params)

    def test_a_solver_goes_on_after_the_run(self):
        solution = solve(steps=2)
        solution.solver.inner_step(TRAIN[0])
        assert solution.solver.inner_steps == 5


class TestCallbacks:
    """What a callback sees."""

    def test_a_round(self):
        events = []
        solution = solve(steps=3, warmup=1, outer_steps=2, evaluate_every=3, callbacks=[events.append])
        assert [event.index for event in events] == [1, 2, 3]
        assert [event.outer is None for event in events] == [True, False, False]
        assert [event.validation_loss is None for event in events] == [True, True, False]
        assert [event.row for event in events] == [solution.history.rows[index] for index in (0, 2, 4)]
        assert events[-1].row["outer_loss"] == events[-1].outer.loss.item()
        assert all(event.solver is solution.solver for event in events)

    def test_aux_of_both_losses(self):
        def with_aux(loss, name):
            return lambda model, hyper, batch: (loss(model, hyper, batch), name)

        seen = []
        solve(
            make_problem(inner_loss=with_aux(inner_loss, "inner"), outer_loss=with_aux(outer_loss, "outer")),
            steps=1,
            callbacks=[lambda event: seen.append((event.inner_aux, event.outer.aux))],
        )
        assert seen == [("inner", "outer")]

    def test_a_callback_sees_the_whole_history(self, tmp_path):
        """Of all outer steps of a round, and of the time before a run was stopped."""
        seen = []

        def note(event):
            assert event.row == event.history.rows[-1]
            seen.append([row["round"] for row in event.history.rows])

        arguments = {"outer_steps": 2, "evaluate_every": 1, "checkpoint": tmp_path / "run.pt", "callbacks": [note]}
        solve(steps=1, **arguments)
        solve(steps=2, **arguments)
        assert seen == [[1, 1], [1, 1, 2, 2]]

    def test_exceptions_of_a_callback_reach_the_user(self):
        def fail(event):
            raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            solve(steps=2, callbacks=[fail])


class TestProgress:
    """The bar on stderr."""

    def test_it_shows_losses_and_hyperparameters(self, capsys):
        solve(steps=3, evaluate_every=1, progress=True)
        shown = capsys.readouterr().err
        assert "3/3" in shown
        for name in ("inner_loss", "outer_loss", "validation_loss", "decay 0.0"):
            assert name in shown

    def test_it_knows_how_many_rounds_the_epochs_take(self, capsys):
        solve(epochs=3, progress=True)
        assert "6/6" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("variable", "progress", "shown"), [("1", None, False), ("", None, True), ("", False, False), ("1", True, True)]
    )
    def test_it_is_off_by_argument_and_in_ci(self, variable, progress, shown, capsys, monkeypatch):
        monkeypatch.setenv("CI", variable)
        solve(steps=1, progress=progress)
        captured = capsys.readouterr()
        assert bool(captured.err) == shown
        assert captured.out == ""

    def test_a_file_gets_one_line_per_evaluation(self, capsys):
        """And no bar, of which each picture would be kept."""
        solve(steps=5, evaluate_every=2, progress=True)
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(",")[0] for line in lines] == ["round 2/5", "round 4/5", "round 5/5"]
        assert all("validation_loss" in line for line in lines)

    def test_a_terminal_gets_a_bar(self, capsys, monkeypatch):
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        solve(steps=3, progress=True)
        shown = capsys.readouterr().err
        assert "3/3" in shown
        assert "round 3/3," not in shown


def test_solve_is_a_thin_loop_over_the_solver():
    solver = make_solver()
    for index in range(3):
        for step in range(2):
            batch = TRAIN[(2 * index + step) % 4]
            solver.inner_step(batch)
        solver.outer_step(batch, VALID[index])
    solution = solve(steps=3, evaluate_every=99)
    assert_same(solution.params, solver.params)
    assert_same(solution.hyper, dict(solver.hyper))


@pytest.mark.parametrize("answer", ["text", 12, 0.5])
def test_a_callback_answers_yes_or_no(answer):
    """Anything else, such as the count that ``file.write`` returns, is not a wish to stop."""
    with pytest.raises(TypeError, match=rf"callback must return None, False, or True.*got {answer!r}"):
        solve(steps=2, callbacks=[lambda event: answer])
