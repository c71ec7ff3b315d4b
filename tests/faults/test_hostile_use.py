"""What people do to runs: signals of their own, links, second runs, warnings as errors, closed doors."""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from functools import partial

import pytest
import torch
from examples import assert_same, batches, inner_loss, make_problem, sgd
from faulty import in_child, result, run

import bilevel
import bilevel.report.find
from bilevel import events
from bilevel.checkpoint import load
from bilevel.interrupts import Waiting, safe_point
from bilevel.loop.ending import Ending


def at(index, action):
    return [lambda event: action() if event.index == index else None]


def raise_in(error):
    def action():
        raise error

    return action


class Slow(torch.utils.data.Dataset):
    """Examples that take a moment, so that workers are at work when a signal comes."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.01)
        x, y = batches()[index // 5]
        return x[index % 5] + self.noise * torch.randn(3), y[index % 5]


def with_workers(file, context, **changes):
    # More validation passes than one, and rounds that end in the middle of a pass.
    options = {"batch_size": 5, "shuffle": True, "num_workers": 2, "multiprocessing_context": context}
    train, valid = (torch.utils.data.DataLoader(Slow(noise), **options) for noise in (0.1, 0.0))
    settings = {"inner_steps": 3, "steps": 12, "evaluate_every": 4, "inner_optimizer": sgd, "outer_optimizer": sgd}
    settings |= {"method": "implicit_identity", "warmup": 0, "progress": False, "checkpoint": file}
    return bilevel.solve(make_problem(), train, valid, **settings | changes)


def signalled(file, number, context):
    os.setpgrp()

    def send(event):
        if event.index == 3:
            threading.Timer(0.02, os.killpg, (os.getpgrp(), number)).start()

    with_workers(file, context, callbacks=[send])


# Started by fork, workers do not listen to Ctrl-C; those of spawn take seconds to start. It takes PyTorch five seconds
# to see that workers are gone.
GROUPS = [
    (signal.SIGTERM, "fork"),
    pytest.param(signal.SIGUSR1, "fork", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, "fork", marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, "spawn", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, "spawn", marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, "forkserver", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, "forkserver", marks=pytest.mark.slow),
]


class TestSignals:
    """Handlers of others."""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    def test_a_handler_of_the_users_own_is_called_after_the_checkpoint(self, tmp_path, number):
        seen = []
        file = tmp_path / "run.pt"
        before = signal.signal(number, lambda *args: seen.append((args[0], load(file)["rounds"])))
        try:
            solution = run("implicit_identity", file, callbacks=at(5, lambda: signal.raise_signal(number)))
        finally:
            signal.signal(number, before)
        assert seen == [(number, 5)] and len(solution.history) == 5
        assert len(run("implicit_identity", file).history) == 12

    def test_a_run_inside_a_run_ends_both(self):
        inner = []

        def nested():
            inner.append(run("implicit_identity", callbacks=at(2, lambda: signal.raise_signal(signal.SIGTERM))))

        outer = run("implicit_identity", callbacks=at(3, nested))
        assert inner[0].stopped == outer.stopped == "terminated"
        assert (len(inner[0].history), len(outer.history)) == (2, 3)

    def test_ignored_signals_stay_ignored(self):
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            solution = run("implicit_identity", callbacks=at(3, lambda: signal.raise_signal(signal.SIGUSR1)))
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert solution.stopped == "steps"

    def test_opted_out(self):
        with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
            with Ending(False) as ending:
                signal.raise_signal(signal.SIGINT)
        assert ending.reason is None

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
    @pytest.mark.parametrize("context", [lambda: Ending(True), Waiting])
    def test_a_forked_process_can_be_terminated(self, context):
        with context():
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            for _ in range(100):  # a signal that comes before the child has begun is lost
                child.terminate()
                child.join(0.3)
                if child.exitcode is not None:
                    break
        assert child.exitcode == -signal.SIGTERM

    def test_in_another_thread_a_run_leaves_signals_alone(self):
        found = []
        before = signal.getsignal(signal.SIGTERM)
        look = lambda: found.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
        thread = threading.Thread(target=lambda: run("implicit_identity", callbacks=at(3, look)))
        thread.start()
        thread.join()
        assert found == [before]


class TestErrors:
    """Whatever ends a run: its solution is there."""

    def test_warnings_as_errors(self, tmp_path, monkeypatch):
        def full(*args):
            raise OSError(28, "No space left on device")

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(bilevel.CheckpointWarning) as caught:
                run(
                    "implicit_identity",
                    tmp_path / "run.pt",
                    callbacks=at(2, lambda: monkeypatch.setattr("bilevel.checkpoint.store.write", full)),
                )
        assert len(caught.value.solution.history) == 2  # of the first checkpoint: a later one may wait for the disk

    def test_an_error_where_nothing_can_be_written(self, tmp_path, monkeypatch):
        def action():
            monkeypatch.setattr("bilevel.checkpoint.store.write", raise_in(MemoryError()))
            raise RuntimeError("mine")

        with pytest.warns(bilevel.CheckpointWarning), pytest.raises(RuntimeError, match="mine") as caught:
            run("implicit_identity", tmp_path / "run.pt", callbacks=at(4, action))
        assert len(caught.value.solution.history) == 4
        assert events.read(tmp_path / "run.pt.jsonl").end["stopped"] == "failed"

    def test_an_error_over_a_state_that_is_not_finite(self, tmp_path):
        """The update of the last inner step has not been judged yet."""
        file = tmp_path / "run.pt"

        def spoil(event):
            if event.index == 5:
                event.solver.response.inner.weights[0].data[0] = float("nan")
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine") as caught:
            run("implicit_identity", file, callbacks=[spoil])
        assert all(value.isfinite().all() for value in caught.value.solution.params.values())
        assert load(file)["rounds"] in (2, 4)  # the second may have waited for the first to reach the disk
        assert_same(result(run("implicit_identity", file)), result(run("implicit_identity")))

    @pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
    @pytest.mark.parametrize(("number", "context"), GROUPS)
    def test_a_signal_to_all_processes_of_a_job_loses_nothing(self, tmp_path, number, context):
        """As schedulers send it; the workers of the loaders die of it."""
        file = tmp_path / "run.pt"
        assert in_child(partial(signalled, file, number, context)) == 0
        record = events.read(file.with_name("run.pt.jsonl"))
        assert record.end["stopped"] == ("interrupted" if number == signal.SIGINT else "terminated")
        assert load(file)["rounds"] == len(record.rows) >= 3
        assert_same(result(with_workers(file, context)), result(with_workers(None, context)))

    @pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="no SIGCHLD")
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    @pytest.mark.parametrize("inside", [True, False])
    def test_workers_that_die_while_a_step_is_made(self, number, inside):
        """PyTorch's handler would raise at the end of the step, and the round would be lost."""
        former = signal.signal(signal.SIGCHLD, lambda *_: 1 / 0)
        try:
            with Ending(True) as ending:
                with Waiting():
                    for one in (number, signal.SIGCHLD):
                        signal.raise_signal(one)
                    if inside:
                        safe_point()
                assert ending.reason == ("interrupted" if number == signal.SIGINT else "terminated")
            with pytest.raises(ZeroDivisionError):
                signal.raise_signal(signal.SIGCHLD)
        finally:
            signal.signal(signal.SIGCHLD, former)

    @pytest.mark.parametrize("reason", [signal.SIGTERM, signal.SIGINT])
    def test_workers_that_got_the_signal_too(self, tmp_path, reason):
        def action():
            signal.raise_signal(reason)
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")

        solution = run("implicit_identity", tmp_path / "run.pt", callbacks=at(5, action))
        assert solution.stopped == {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}[reason]
        assert events.read(tmp_path / "run.pt.jsonl").end["stopped"] == solution.stopped


class TestFiles:
    """Names that somebody else has taken."""

    def test_a_file_of_the_user_is_not_replaced(self, tmp_path):
        file = tmp_path / "thesis.tex"
        file.write_text("mine")
        for resume in (True, False, "override"):
            with pytest.raises(bilevel.CheckpointError, match="was not written by bilevel; choose another name"):
                run("implicit_identity", file, resume=resume)
        with pytest.raises(bilevel.CheckpointError, match="was not written by bilevel"):
            run("implicit_identity").solver.save(file)
        assert file.read_text() == "mine"

    def test_links_at_the_other_names(self, tmp_path):
        target = tmp_path / "target"
        (tmp_path / "run.pt.jsonl").symlink_to(target)
        with pytest.raises(bilevel.CheckpointError, match=r"log: .* is not a file"):
            run("implicit_identity", tmp_path / "run.pt")
        assert not target.exists()
        target.write_text("mine")
        os.link(target, tmp_path / "other.pt.lock")
        with pytest.raises(bilevel.CheckpointError, match="is no lock of bilevel"):
            run("implicit_identity", tmp_path / "other.pt")
        assert target.read_text() == "mine"
        run("implicit_identity", tmp_path / "third.pt")  # nothing is left behind that would keep others away

    def test_two_runs_on_one_log(self, tmp_path):
        def second():
            with pytest.raises(bilevel.CheckpointError, match="in use by another run of this process"):
                run("implicit_identity", log=tmp_path / "log")

        run("implicit_identity", log=tmp_path / "log", callbacks=at(3, second))
        assert len(events.read(tmp_path / "log").rows) == 12

    def test_two_threads_on_one_file(self, tmp_path):
        outcomes, barrier = [], threading.Barrier(2)

        def work():
            barrier.wait()
            try:
                outcomes.append(len(run("implicit_identity", tmp_path / "run.pt").history))
            except bilevel.CheckpointError:
                outcomes.append("refused")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, outcomes)) in (["12", "12"], ["12", "refused"])  # one after the other, or one of them

    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "run.pt")
        for resume in (True, False):
            with pytest.raises(bilevel.CheckpointError, match="is not a file"):
                run("implicit_identity", tmp_path / "run.pt", resume=resume)


class TestOwnLoops:
    """``Solver.save`` and ``Solver.load``."""

    def test_a_damaged_file_is_replaced_by_the_one_before(self, tmp_path):
        file, solver = tmp_path / "state", run("implicit_identity", steps=3).solver
        solver.save(file)
        expected = solver.state_dict()
        solver.inner_step(batches()[0])
        solver.save(file)
        file.write_bytes(file.read_bytes()[:-3])
        with pytest.warns(bilevel.CheckpointWarning, match=r"state is damaged.*state\.1"):
            solver.load(file)
        assert_same(solver.state_dict(), expected)

    def test_a_change_is_refused_or_taken_over(self, tmp_path):
        file, solver = tmp_path / "state", run("implicit_identity", steps=3).solver
        solver.save(file)
        changed = bilevel.Solver(
            solver.problem,
            method="implicit_identity",
            inner_optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.5),
            outer_optimizer=partial(torch.optim.Adam, lr=0.1),
        )
        with pytest.raises(bilevel.CheckpointError, match=r"inner_optimizer: lr was 0\.0078125, this call has 0\.5"):
            changed.load(file)
        changed.load(file, override=True)
        assert changed.optimizers["weights"].param_groups[0]["lr"] == 0.5
        assert_same(changed.state_dict()["vector"], solver.state_dict()["vector"])
        assert_same(
            changed.state_dict()["optimizers"]["weights"]["state"],
            solver.state_dict()["optimizers"]["weights"]["state"],
        )

    def test_a_missing_file_and_a_locked_one(self, tmp_path):
        solver = run("implicit_identity", steps=3).solver
        with pytest.raises(bilevel.CheckpointError, match="does not exist"):
            solver.load(tmp_path / "nothing")

        def save():
            with pytest.raises(bilevel.CheckpointError, match="in use by another run"):
                solver.save(tmp_path / "run.pt")

        run("implicit_identity", tmp_path / "run.pt", callbacks=at(3, save))


class TestPlaces:
    """Where files are, and what is in them."""

    def test_the_history_of_a_run_that_was_begun_anew_and_given_up(self, tmp_path):
        """The run goes on from a checkpoint that is older than the last start in the log."""
        file = tmp_path / "run.pt"
        run("implicit_identity", file, steps=6)
        with pytest.raises(ZeroDivisionError):
            run("implicit_identity", file, resume=False, evaluate_every=100, callbacks=at(2, lambda: 1 / 0))
        file.with_name("run.pt.1").replace(file)  # what a run leaves that is killed before it has written a checkpoint
        for steps in (8, 10):
            solution = run("implicit_identity", file, steps=steps)
            assert [row["round"] for row in solution.history.rows] == list(range(1, steps + 1))
            assert [row["round"] for row in events.read(f"{file}.jsonl").rows] == list(range(1, steps + 1))
            assert bilevel.report.find.read([tmp_path])[0].last_round == steps

    def test_the_folder_of_the_process_may_change(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "elsewhere").mkdir()
        run("implicit_identity", "run.pt", callbacks=at(5, lambda: os.chdir("elsewhere")))
        assert load(tmp_path / "run.pt")["rounds"] == 12 and not any((tmp_path / "elsewhere").iterdir())

    @pytest.mark.parametrize("name", ["checkpoint", "log"])
    @pytest.mark.parametrize("value", [123, True, b"run.pt", "a\0b", ""])
    def test_what_is_no_path_is_refused_by_name(self, name, value):
        with pytest.raises((TypeError, ValueError), match=f"{name} must be the path of a file"):
            run("implicit_identity", **{name: value})

    def test_a_page_replaces_only_pages(self, tmp_path):
        file = tmp_path / "run.pt"
        run("implicit_identity", file)
        log = tmp_path / "run.pt.jsonl"
        before = log.read_bytes()
        with pytest.raises(ValueError, match=r"is no page, and would be lost"):
            bilevel.report.write([log], log)
        with pytest.raises(ValueError, match=r"cannot be a file"):
            bilevel.report.write([log], tmp_path)
        assert log.read_bytes() == before
        for _ in range(2):
            bilevel.report.write([*tmp_path.iterdir()], tmp_path / "report.html")

    def test_a_file_at_the_name_of_an_older_checkpoint_is_not_replaced(self, tmp_path):
        (tmp_path / "run.pt.1").write_text("mine")
        with pytest.raises(bilevel.CheckpointError, match="was not written by bilevel"):
            run("implicit_identity", tmp_path / "run.pt", resume=False)
        assert (tmp_path / "run.pt.1").read_text() == "mine"

    def test_a_warning_that_is_an_error_carries_the_solution(self, monkeypatch):
        def warn(*_):
            raise bilevel.TuningWarning("no signal")

        monkeypatch.setattr(sys.modules["bilevel.loop.solve"], "warn_after", warn)
        with pytest.raises(bilevel.TuningWarning) as caught:
            run("implicit_identity")
        assert len(caught.value.solution.history) == 12


@pytest.mark.parametrize("kind", ["loader", "list", "data set"])
def test_a_batch_after_the_first_one_that_changed_is_refused(tmp_path, kind):
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))

    def train():
        if kind == "list":
            return [(x[i : i + 5].clone(), y[i : i + 5].clone()) for i in range(0, 20, 5)]
        data = torch.utils.data.TensorDataset(x, y) if kind == "data set" else list(zip(x, y, strict=True))
        return torch.utils.data.DataLoader(data, batch_size=5)

    settings = {"method": "implicit_identity", "inner_steps": 3, "inner_optimizer": sgd, "outer_optimizer": sgd}
    settings |= {"progress": False, "warmup": 0, "checkpoint": tmp_path / "run.pt"}
    bilevel.solve(make_problem(), train(), batches(seed=1), steps=5, **settings)
    x = x.clone()
    x[7] += 1  # in the second batch, of which the pass has given out three
    with pytest.raises(bilevel.CheckpointError, match=r"train: (a batch after the first|content)"):
        bilevel.solve(make_problem(), train(), batches(seed=1), steps=6, **settings)


def test_of_the_options_of_a_program_those_count_that_the_loss_reads(tmp_path):
    def solve(**options):
        args = argparse.Namespace(**options)

        def smooth(value):
            return value * args.smooth

        def inner(model, hyper, batch):
            return smooth(inner_loss(model, hyper, batch))

        problem = make_problem(inner_loss=inner)
        settings = {"method": "implicit_identity", "inner_optimizer": sgd, "outer_optimizer": sgd, "progress": False}
        return bilevel.solve(
            problem, batches(), batches(seed=1), steps=options["steps"], checkpoint=tmp_path / "run.pt", **settings
        )

    solve(steps=3, smooth=1.0)
    assert len(solve(steps=5, smooth=1.0).history) == 5
    with pytest.raises(bilevel.CheckpointError, match="inner_loss"):
        solve(steps=7, smooth=2.0)


class TestWhatOthersDoMeanwhile:
    """The log of a run that goes on."""

    # On a slow disk, the folder may go while a checkpoint is on its way there; that one is tried again, too.
    @pytest.mark.filterwarnings("ignore:.*cannot be written.*tried again:bilevel.CheckpointWarning")
    @pytest.mark.parametrize("kind", ["removed", "replaced", "the whole folder"])
    def test_a_log_that_is_gone_is_put_back(self, tmp_path, kind):
        file, log = tmp_path / "runs" / "run.pt", tmp_path / "runs" / "run.pt.jsonl"

        def spoil():
            if kind == "the whole folder":
                shutil.rmtree(file.parent)
            else:
                log.unlink()
            if kind == "replaced":
                log.write_text("mine")

        with pytest.warns(bilevel.CheckpointWarning, match=r"run\.pt\.jsonl was removed or replaced"):
            run("implicit_identity", file, steps=8, callbacks=at(5, spoil))
        assert len(events.read(log).rows) == 8
        if kind == "replaced":
            assert log.with_name("run.pt.jsonl.damaged").read_text() == "mine"
        assert_same(result(run("implicit_identity", file)), result(run("implicit_identity")))


def test_a_symbolic_link_is_not_replaced(tmp_path):
    run("implicit_identity", tmp_path / "real.pt", steps=3)
    before = (tmp_path / "real.pt").read_bytes()
    (tmp_path / "run.pt").symlink_to(tmp_path / "real.pt")
    for action in (lambda: run("implicit_identity", tmp_path / "run.pt"), lambda: saved(tmp_path / "run.pt")):
        with pytest.raises(bilevel.CheckpointError, match=r"run\.pt is a symbolic link"):
            action()
    assert (tmp_path / "real.pt").read_bytes() == before
    assert (tmp_path / "run.pt").is_symlink()


def saved(file):
    run("implicit_identity", steps=3).solver.save(file)


class Failing(torch.utils.data.DataLoader):
    """Its workers cannot be started a few times, as when the server that forks them got the signal, too."""

    errors = iter(())

    def __iter__(self):
        for _ in self.errors:
            raise ConnectionRefusedError("no server")
        return super().__iter__()


@pytest.mark.parametrize("failures", [2, 99])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("where", ["train", "valid"])
def test_workers_that_cannot_be_started_while_a_run_ends(tmp_path, monkeypatch, where, kept, failures):
    monkeypatch.setattr("bilevel.loop.feed.PAUSES", (0.0, 0.0, 0.0, None))
    loaders = {}
    for name, noise in (("train", 0.1), ("valid", 0.0)):
        loaders[name] = Failing(Slow(noise), batch_size=5, num_workers=1, shuffle=True)
    settings = {"inner_steps": 3, "steps": 12, "evaluate_every": 4, "inner_optimizer": sgd, "outer_optimizer": sgd}
    settings |= {"method": "implicit_identity", "warmup": 0, "progress": False}
    begins = {"train": 2, "valid": 4}[where]  # a pass in this round

    def inner(model, hyper, batch):
        if len(seen) == begins - 1 and not stopped:
            stopped.append(signal.raise_signal(signal.SIGTERM))
            loaders[where].errors = iter(range(failures))
        return inner_loss(model, hyper, batch)

    seen, stopped = [], []
    solution = bilevel.solve(
        make_problem(inner_loss=inner),
        *loaders.values(),
        **settings,
        callbacks=[seen.append],
        checkpoint=tmp_path / "run.pt" if kept else None,
    )
    assert solution.stopped == "terminated"
    whole = failures < 9 and (kept or where == "valid")
    assert solution.solver.outer_steps == (begins if whole or where == "valid" else begins - 1)
    assert "validation_loss" in solution.history.rows[-1] or not (whole and where == "valid")
