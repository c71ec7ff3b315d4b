"""What Δ-STN costs over plain training: time, memory and FLOPs, and how they grow.

    python benchmarks/overhead.py --compile --out docs/results/overhead.txt --figure docs/_static/overhead.png
    python benchmarks/overhead.py --read docs/results/overhead.txt --figure docs/_static/overhead.png  # draw it again

One thread, one process. Plain training and the methods take turns, so that a busy machine slows all of them alike; a
number is the median over the turns of a ratio. Rounds are those of the paper: five inner steps on batches of 128, then
an outer step. Plain training makes five steps of SGD on the same batches, with the same noise at a fixed strength.
"""

from __future__ import annotations

import argparse
import re
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
                F.cross_entropy(self.net(bilevel.functional.gaussian_noise(x, 0.1)), y).backward()
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


def growth(repeats: int) -> str:
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
    return "\n".join(lines)


def _row(curve: list[tuple[int, float]], name: str) -> str:
    return "   ".join(f"{name} {size}: {value:.2f}" for size, value in curve)


ROW = re.compile(r"^(MLP|SimpleCNN) +(.+?) +(\d+\.\d+) +(\d+\.\d+) +(\d+\.\d+)$", re.MULTILINE)
POINT = re.compile(r"(h|batch|width) (\d+): (\d+\.\d+)")
SHOWN = {"stn": "stn", "centered_stn": "centered_stn", "delta_stn": "delta_stn", "paper": "delta_stn_paper"}
"""The methods of the figure, and whose colours they have."""


def numbers(text: str) -> dict[str, float]:
    """The numbers of the tables, by name."""
    kinds = ("time", "memory", "FLOPs")
    found = {
        f"{net} {name} / {kind}": float(x)
        for net, name, *row in ROW.findall(text)
        for kind, x in zip(kinds, row, strict=True)
    }
    return found | {f"{axis} / {x}": float(value) for axis, x, value in POINT.findall(text)}


@bilevel.plotting.style()
def draw(text: str, path: Path) -> None:
    """Draw what was printed: time, memory and FLOPs of both networks, and how cost grows."""
    from matplotlib.ticker import NullLocator

    figure, ((left, right), (growing, flat)) = bilevel.plotting.figure(2, 2, size=(3.4, 2.6))
    rows = ROW.findall(text)
    for axis, network in ((left, "MLP"), (right, "SimpleCNN")):
        found = {method: [float(number) for number in numbers] for name, method, *numbers in rows if name == network}
        for place, (method, named) in enumerate(SHOWN.items()):
            at = [column + 0.2 * (place - 1.5) for column in range(3)]
            axis.bar(at, found[method], width=0.19, color=bilevel.plotting.color(named), label=named)
        axis.axhline(1, color="0.3", linewidth=1, linestyle=":")
        axis.set_xticks(range(3), ["time", "memory", "FLOPs"])
        axis.grid(visible=False, axis="x")
        axis.set(title=f"{network}, plain SGD = 1", ylim=(0, 1.1 * max(max(found[method]) for method in SHOWN)))
    left.set_ylim(0, max(left.get_ylim()[1], right.get_ylim()[1]))
    right.set_ylim(left.get_ylim())
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, size, value in POINT.findall(text):
        curves.setdefault(name, []).append((int(size), float(value)))
    growing.plot(*zip(*curves["h"], strict=True), marker="o", **bilevel.plotting.line("delta_stn"))
    growing.set(title="time of delta_stn, with one = 1", xlabel="hyperparameters")
    for name, marker in (("batch", "s"), ("width", "o")):
        color = bilevel.plotting.shades(bilevel.plotting.color("delta_stn"), 2)[name == "batch"]
        flat.plot(*zip(*curves[name], strict=True), marker=marker, color=color, label=f"by {name}")
    flat.set(title="FLOPs of delta_stn, plain SGD = 1", xlabel="batch, or width of the MLP")
    flat.legend(loc="lower right")
    for axis in (growing, flat):
        axis.set(xscale="log", ylim=(0, 1.15 * axis.get_ylim()[1]))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_locator(NullLocator())
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), columnspacing=1.2)
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
    parser.add_argument("--read", type=Path, help="measure nothing: draw what --out has written to this file")
    options = parser.parse_args()
    if options.read:
        draw(options.read.read_text(encoding="utf-8"), options.figure)
        return
    torch.set_num_threads(1)
    table = overhead(options.repeats, compile=options.compile)
    print(table, flush=True)
    text = f"{table}\n\n{growth(options.repeats)}\n"
    print(text[len(table) :])
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        record.save(options.json, numbers(text))
    if options.figure:
        draw(text, options.figure)


if __name__ == "__main__":
    main()
