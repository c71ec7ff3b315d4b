"""What people do to runs: signals of their own, links, second runs, warnings as errors, closed doors."""

import multiprocessing
import os
import signal
import threading
import time
import warnings
from functools import partial

import pytest
import torch
from examples import assert_same, batches
from faulty import result, run

import bilevel
from bilevel import events
from bilevel.checkpoint import load
from bilevel.interrupts import Waiting
from bilevel.loop.ending import Ending


def at(index, action):
    return [lambda event: action() if event.index == index else None]


def raise_in(error):
    def action():
        raise error

    return action


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
                    callbacks=at(4, lambda: monkeypatch.setattr("bilevel.checkpoint.store.write", full)),
                )
        assert len(caught.value.solution.history) == 4

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
