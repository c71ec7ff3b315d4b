"""What Δ-STN costs over plain training: time, memory and FLOPs, and how they grow.

    python benchmarks/overhead.py --compile --out docs/results/overhead.txt --figure docs/_static/overhead.png

One thread, one process. Plain training and the methods take turns, so that a busy machine slows all of them alike; a
number is the median over the turns of a ratio. Rounds are those of the paper: five inner steps on batches of 128, then
an outer step. Plain training makes five steps of SGD on the same batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import bilevel

INNER_STEPS = 5
METHODS = {
    "stn": bilevel.STN(),
    "centered_stn": bilevel.CenteredSTN(),
    "delta_stn": bilevel.DeltaSTN(),
    "  pairs": bilevel.DeltaSTN(antithetic=True),
    "  paper": bilevel.DeltaSTN(structure="rowwise", control=False),
    "  rows, pairs": bilevel.DeltaSTN(structure="rowwise", antithetic=True),
}


def mlp(width: int = 1200) -> nn.Module:
    """The MLP of the paper."""
    sizes = [(784, width), (width, width), (width, width)]
    hidden = [layer for pair in sizes for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def simple_cnn() -> nn.Module:
    """The SimpleCNN of the paper: 16 and 32 filters, 1568 hidden units."""
    first = [nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(1568, 1568), nn.ReLU(), nn.Linear(1568, 10))


@dataclass
class Task:
    """A network with h regularizers, and its batches."""

    net: nn.Module
    hyperparameters: int = 3
    batch: int = 128

    def __post_init__(self) -> None:
        """Draw the batches."""
        torch.manual_seed(0)
        self.batches = [
            (torch.randn(self.batch, 1, 28, 28), torch.randint(10, (self.batch,))) for _ in range(INNER_STEPS + 1)
        ]

    def plain(self) -> Callable[[], None]:
        """The inner steps of a round, by plain SGD."""
        optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

        def run() -> None:
            for x, y in self.batches[:INNER_STEPS]:
                optimizer.zero_grad()
                F.cross_entropy(self.net(x), y).backward()
                optimizer.step()

        return run

    def tuned(self, method: str, *, compile: bool = False) -> Callable[[], None]:
        """A round of a method that tunes the strength of noise on the pixels."""

        def inner(model: Any, hyper: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            strength = hyper["noise"].mean(-1)
            return F.cross_entropy(model(bilevel.functional.gaussian_noise(x, strength)), y, reduction="none")

        def outer(model: Any, hyper: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        hyper = {"noise": bilevel.positive([0.1] * self.hyperparameters)}
        sgd = lambda params: torch.optim.SGD(params, lr=1e-3)  # noqa: E731
        problem = bilevel.Problem(self.net, inner_loss=inner, outer_loss=outer, hyper=hyper)
        solver = bilevel.Solver(problem, method=METHODS[method], inner_optimizer=sgd, compile=compile)

        def run() -> None:
            for batch in self.batches[:INNER_STEPS]:
                solver.inner_step(batch)
            solver.outer_step(self.batches[0], self.batches[-1])

        return run


def time_ratios(runs: dict[str, Callable[[], None]], reference: str, repeats: int) -> dict[str, float]:
    """Median time of each run over the reference that was timed beside it."""
    for run in runs.values():
        run()
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        base = seconds(runs[reference])
        for name, run in runs.items():
            ratios[name].append(seconds(run) / base)
    return {name: statistics.median(values) for name, values in ratios.items()}


def seconds(run: Callable[[], None]) -> float:
    """CPU time, which other processes do not add to."""
    start = time.process_time()
    run()
    return time.process_time() - start


def peak_megabytes(make: Callable[[], nn.Module], method: str) -> float:
    """The most memory that tensors hold at once, those that persist between steps included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        task = Task(make())
        run = task.plain() if method == "plain" else task.tuned(method)
        run()
    held = most = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 1e6


def flops(run: Callable[[], None]) -> int:
    """Of matrix products and convolutions, in a round after the first, which may check the shapes it sees."""
    run()
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def overhead(repeats: int, *, compile: bool) -> str:
    """The table for both networks."""
    lines = ["network     method         time  memory  FLOPs   (plain SGD = 1, per inner step, outer steps included)"]
    for name, make in (("MLP", mlp), ("SimpleCNN", simple_cnn)):
        task = Task(make())
        runs = {"plain": task.plain(), **{method: task.tuned(method) for method in METHODS}}
        if compile:
            # The library would not compile the CNN on a CPU, for what this table says.
            with patch("bilevel.solver.gradients.gains", lambda module, device: True):
                runs["compiled"] = task.tuned("delta_stn", compile=True)
        times = time_ratios(runs, "plain", repeats)
        base_flops, base_memory = flops(runs["plain"]), peak_megabytes(make, "plain")
        for method in METHODS:
            memory = peak_megabytes(make, method) / base_memory
            lines.append(
                f"{name:<11} {method:<13} {times[method]:5.2f}  {memory:6.2f}  {flops(runs[method]) / base_flops:5.2f}"
            )
        if compile:
            lines.append(f"{name:<11} {'  compiled':<13} {times['compiled']:5.2f}")
    return "\n".join(lines)


def growth(repeats: int) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    """How cost grows with the number of hyperparameters, the batch and the width."""
    counts = [1, 10, 100, 1000]
    runs = {str(h): Task(mlp(), hyperparameters=h).tuned("delta_stn") for h in counts}
    times = time_ratios(runs, "1", repeats)
    curves = {"hyperparameters": [(h, times[str(h)] / times["1"]) for h in counts], "batch": [], "width": []}
    for name, sizes in (("batch", [16, 32, 128, 512]), ("width", [128, 512, 1200, 2048])):
        for size in sizes:
            task = Task(mlp(), batch=size) if name == "batch" else Task(mlp(size))
            curves[name].append((size, flops(task.tuned("delta_stn")) / flops(task.plain())))
    lines = ["delta_stn, MLP"]
    lines.append("time over that with one hyperparameter:  " + _row(curves["hyperparameters"], "h"))
    lines.append("FLOPs over plain training:               " + _row(curves["batch"], "batch"))
    lines.append("                                         " + _row(curves["width"], "width"))
    return "\n".join(lines), curves


def _row(curve: list[tuple[int, float]], name: str) -> str:
    return "   ".join(f"{name} {size}: {value:.2f}" for size, value in curve)


def _numbers(table: str) -> dict[str, float]:
    """The numbers of the first table by name."""
    found = {}
    for line in table.splitlines()[1:]:
        words = line.split()
        values = [word for word in words if word.replace(".", "", 1).isdigit()]
        name = " ".join(words[: len(words) - len(values)])
        found |= {f"{name} / {kind}": float(x) for kind, x in zip(("time", "memory", "FLOPs"), values, strict=False)}
    return found


@bilevel.plotting.style()
def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """One panel per curve."""
    figure, panels = bilevel.plotting.panels(3)
    titles = {"hyperparameters": "time, h = 1 is 1", "batch": "FLOPs, plain is 1", "width": "FLOPs, plain is 1"}
    for panel, (name, curve) in zip(panels, curves.items(), strict=True):
        panel.plot(*zip(*curve, strict=True), marker="o", **bilevel.plotting.line("delta_stn"))
        panel.set(xscale="log", xlabel=name, ylabel=titles[name], ylim=(0, None))
    figure.savefig(path)


def main() -> None:
    """Measure, print, and keep what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="turns over which the median is taken")
    parser.add_argument(
        "--compile", action="store_true", help="also time Δ-STN with compile=True; compiling takes minutes"
    )
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", type=Path, help="write a record to this file, too")
    parser.add_argument("--figure", type=Path, help="also draw the growth into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = overhead(options.repeats, compile=options.compile)
    print(table, flush=True)
    text, curves = growth(options.repeats)
    print("\n" + text)
    if options.out:
        options.out.write_text(f"{table}\n\n{text}\n")
    if options.json:
        names = [(kind, x, value) for kind, curve in curves.items() for x, value in curve]
        record.save(options.json, {f"{kind} / {x}": value for kind, x, value in names} | _numbers(table))
    if options.figure:
        draw(curves, options.figure)


if __name__ == "__main__":
    main()
