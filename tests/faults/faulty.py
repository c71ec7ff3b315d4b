"""A small run of every method, processes that are killed, and where the figures of the long form go."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from examples import batches, make_problem, network, shortened
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel

LONG = os.environ.get("FAULTS") == "long"
TALLY: Counter[str] = Counter()
FIGURES = Path(__file__).parents[2] / "docs" / "results" / "faults.txt"


def count(short: int, long: int) -> int:
    """How many faults: few in a test run, many by ``make faults``."""
    return long if LONG else short


def tally(what: str, number: int) -> None:
    """Add to a figure of the long form."""
    TALLY[what] += number


def write_figures() -> None:
    """Put the figures into the docs; those of tests that did not run stay."""
    lines = FIGURES.read_text(encoding="utf-8").splitlines() if FIGURES.exists() else []
    old = {what: int(number) for number, what in (line.split(maxsplit=1) for line in lines)}
    found = sorted((old | TALLY).items())
    FIGURES.write_text("".join(f"{number:>6} {what}\n" for what, number in found), encoding="utf-8")


def loader(seed: int) -> DataLoader:
    x, y = (torch.cat(parts) for parts in zip(*batches(seed=seed), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)


def run(method: str, checkpoint: Path | None = None, train: object = None, **changes: object) -> bilevel.Solution:
    settings = {
        "method": shortened(bilevel.METHODS[method]),
        "inner_optimizer": partial(torch.optim.SGD, lr=2**-7, momentum=0.5),
        "outer_optimizer": partial(torch.optim.Adam, lr=0.1),
        "steps": 12,
        "evaluate_every": 2,
        "warmup": 0,
        "progress": False,
        "checkpoint": checkpoint,
    }
    if not settings["method"].unrolled_steps:
        settings["inner_steps"] = 2
    problem = make_problem(network(nn.BatchNorm1d(4), nn.Dropout(0.5)))
    return bilevel.solve(problem, loader(0) if train is None else train, loader(1), **{**settings, **changes})


def result(solution: bilevel.Solution) -> object:
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in solution.history.rows]
    return solution.hyper, solution.params, solution.state_dict, vars(solution.best), solution.signal, rows


def _quietly(action: Callable[[], object], threads: int) -> None:
    torch.set_num_threads(threads)  # sums in another order have other last bits
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    action()


def in_child(
    action: Callable[[], object], *, send: int | None = None, after: float = 0.0, ready: Path | None = None
) -> int:
    """Run ``action`` in a process of its own, send it a signal after some time, and return its exit status.

    The time begins when ``ready`` is there.
    The process is forked by one that has made no gradients yet: autograd's threads do not survive a fork.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faulty"])
    with pytest.MonkeyPatch.context() as patch:  # where the server finds what it is to import
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        child = context.Process(target=_quietly, args=(action, torch.get_num_threads()))
        child.start()
    if send is not None:
        while ready is not None and child.is_alive() and not ready.exists():
            time.sleep(0.001)
        time.sleep(after)
        assert child.pid is not None
        with suppress(ProcessLookupError):  # it may have come to its end
            os.kill(child.pid, send)
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def moments(seed: int, number: int, longest: float) -> list[float]:
    generator = random.Random(seed)
    return [generator.uniform(0, longest) for _ in range(number)]


KILL, TERMINATE, INTERRUPT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
