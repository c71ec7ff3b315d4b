"""A signal at any line of a step finds the solver before or after the step, bit for bit."""

import copy
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from examples import assert_same, batches, differs, for_outer_step, make_problem, make_solver, network, shortened
from faulty import tally
from torch import nn

import bilevel
from bilevel.interrupts import Waiting, safe_point

METHODS = {name: shortened(method) for name, method in bilevel.METHODS.items()}
METHODS |= {"learned scale": bilevel.DeltaSTN(entropy=1e-2)}
SOURCES = str(Path(bilevel.__file__).parent)
BATCH, OTHER, *_ = batches()


def make(method, **changes):
    module = network(nn.BatchNorm1d(4), nn.Dropout(0.2))
    settings = {"inner_optimizer": torch.optim.Adam, "outer_optimizer": torch.optim.RMSprop}
    solver = make_solver(make_problem(module), method=METHODS[method], **{**settings, **changes})
    solver.inner_step(BATCH)
    solver.outer_step(for_outer_step(solver, BATCH), OTHER)
    return solver, module


def step(solver, level):
    if level == "inner":
        solver.inner_step(BATCH)
    else:
        solver.outer_step(for_outer_step(solver, BATCH), OTHER)


def traced(function, at=None):
    """Count the lines of the package and of torch.optim that run, and send a signal to this process at one of them."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        name = frame.f_code.co_filename
        if not (
            name.startswith(SOURCES) or name.endswith(("contextlib.py", "torch/random.py")) or "torch/optim" in name
        ):
            return None
        if event == "line":
            count += 1
            if count == at:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def check(method, level, share, **changes):
    """Signals at a share of all lines."""
    solver, module = make(method, **changes)
    start, numbers = solver.state_dict(), torch.get_rng_state()
    own = {name: id(value) for name, value in [*module.named_parameters(), *module.named_buffers()]}
    total = traced(lambda: step(solver, level))
    end = solver.state_dict()
    assert differs(start, end)
    handler, seen = signal.getsignal(signal.SIGINT), {"before": 0, "after": 0}
    for at in range(1 + total % share, total + 1, share):
        solver.load_state_dict(copy.deepcopy(start))
        with suppress(KeyboardInterrupt):  # not raised if the step takes fewer lines than the first time
            traced(lambda: step(solver, level), at)
        state = solver.state_dict()
        after = state["inner_steps"] + state["outer_steps"] > start["inner_steps"] + start["outer_steps"]
        assert_same(state, end if after else start)
        seen["after" if after else "before"] += 1
        assert signal.getsignal(signal.SIGINT) is handler
        assert torch.equal(torch.get_rng_state(), numbers)
        assert {name: id(value) for name, value in [*module.named_parameters(), *module.named_buffers()]} == own
        assert all(param.grad is None for param in solver.response.parameters())
    solver.load_state_dict(start)
    step(solver, level)
    assert_same(solver.state_dict(), end)
    return seen


@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("method", ["stn", "delta_stn", "learned scale", "implicit_cg", "unrolled"])
def test_a_step_is_whole(method, level):
    seen = check(method, level, 97)
    assert seen["after"] or seen["before"]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_whole_at_many_lines(method, level):
    seen = check(method, level, 41)
    tally("Ctrl-C at a line of a step, which was whole or had not begun", sum(seen.values()))
    assert seen["after"] > 3
    assert seen["before"] > 3


@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("method", METHODS)
def test_an_error_inside_an_optimizer_undoes_the_step(method, level):
    """The weights have been moved by then, and the response has not."""
    solver, _ = make(method)
    while not solver.response.learns(solver.inner_steps, solver.optimizers.get("response")):
        step(solver, "inner")
    before = solver.state_dict()
    names = [n for n in solver.optimizers if n in (("weights", "response") if level == "inner" else ("hyper", "scale"))]
    last = solver.optimizers[names[-1]]
    original = last.step

    def fail(*args):
        original(*args)
        raise KeyboardInterrupt

    last.step = fail
    with pytest.raises(KeyboardInterrupt):
        step(solver, level)
    last.step = original
    assert_same(solver.state_dict(), before)


class TestWaiting:
    """How signals wait."""

    def test_every_handler_is_called_at_the_end_and_given_back(self):
        seen = []
        before = signal.signal(signal.SIGUSR1, lambda *args: seen.append(args[0]))
        try:
            own = signal.getsignal(signal.SIGUSR1)
            with Waiting():
                with Waiting():
                    signal.raise_signal(signal.SIGUSR1)
                assert seen == []
            assert seen == [signal.SIGUSR1]
            assert signal.getsignal(signal.SIGUSR1) is own
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_a_second_signal_does_not_wait(self):
        with pytest.raises(KeyboardInterrupt), Waiting():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    def test_a_safe_point_delivers(self):
        reached = []
        with pytest.raises(KeyboardInterrupt), Waiting():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            safe_point()
            reached.append(2)
        assert reached == [1]

    def test_another_thread_does_nothing(self):
        before, found = signal.getsignal(signal.SIGINT), []

        def work():
            with Waiting():
                found.append(signal.getsignal(signal.SIGINT))
                safe_point()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [before]
