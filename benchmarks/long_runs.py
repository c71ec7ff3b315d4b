"""What a long run costs: memory and time of 2,000 outer steps of every method, and of checkpoints early and late.

    python benchmarks/long_runs.py --out docs/results/long_runs.txt

One thread; every row is a process of its own. ``--parts steps`` makes one part only, and leaves the others in the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel
from bilevel import events

STEPS = 2000


def small_problem() -> bilevel.Problem:
    """A small network with batch norm and dropout: what grows shows against little."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

    def inner_loss(model: bilevel.Model, hyper: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    def outer_loss(model: bilevel.Model, hyper: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return bilevel.Problem(net, inner_loss=inner_loss, outer_loss=outer_loss, hyper={"decay": bilevel.positive(1e-3)})


def batches(seed: int, inputs: int = 5, size: int = 16, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Noise with labels that depend on it."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, inputs, generator=draw)
    return list(zip(x, x[..., :3].argmax(-1), strict=True))


def many_steps(name: str) -> dict[str, Any]:
    """The memory and the time of a round, early and late.

    Returns:
        Megabytes after 10 %, 50 % and 100 % of the steps, and milliseconds of the processor per round, the median of
        the second and of the last quarter.
    """
    method = bilevel.METHODS[name]
    if isinstance(method, bilevel.Unrolled):
        method = replace(method, steps=3, truncate=None if method.truncate is None else 2)
    memory: list[int] = []
    clock: list[float] = []  # of the processor, which other programs do not disturb

    def look(event: bilevel.Round) -> None:
        memory.append(events.memory(torch.device("cpu")) or 0)
        clock.append(time.thread_time())

    with tempfile.TemporaryDirectory() as folder:
        bilevel.solve(
            small_problem(),
            batches(0),
            batches(1),
            method=method,
            inner_steps=0 if method.unrolled_steps else 2,
            steps=STEPS,
            warmup=0,
            evaluate_every=100,
            checkpoint=Path(folder) / "run.pt",
            progress=False,
            callbacks=[look],
        )
    took = [after - before for before, after in itertools.pairwise(clock)]
    quarter = STEPS // 4
    early, late = took[quarter : 2 * quarter], took[-quarter:]
    return {
        "method": name,
        "MB at 200": memory[STEPS // 10] / 1e6,
        "MB at 1000": memory[STEPS // 2] / 1e6,
        "MB at 2000": memory[-1] / 1e6,
        "ms, 2nd quarter": 1e3 * statistics.median(early),
        "ms, last quarter": 1e3 * statistics.median(late),
    }


def scalar_problem() -> bilevel.Problem:
    """As little as there can be, so that 100,000 rows take minutes."""
    return bilevel.Problem(
        {"w": torch.zeros(3)},
        inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]).square().sum(),
        outer_loss=lambda model, hyper, batch: (model.params["w"] - 3).square().sum(),
        hyper={"target": bilevel.real([0.0] * 3)},
    )


def many_rows(name: str) -> dict[str, Any]:
    """Checkpoints at the first and the last rows of a history of 100,000.

    Returns:
        Milliseconds for which training waited, and bytes; and the seconds to read everything again.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.pt"
        sgd: Callable[..., Any] = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        settings = {"method": name, "inner_steps": 1, "outer_steps": 10, "warmup": 0, "progress": False}
        settings |= {"inner_optimizer": sgd, "outer_optimizer": sgd, "checkpoint": file, "resume": "override"}
        for steps, every in ((20, 1), (10_000, 1000), (10_020, 1)):
            start = time.perf_counter()
            solution = bilevel.solve(scalar_problem(), steps=steps, evaluate_every=every, **settings)
        start = time.perf_counter()
        bilevel.solve(scalar_problem(), steps=steps, evaluate_every=every, **settings)
        again = time.perf_counter() - start
        kept = [event for event in events.read(f"{file}.jsonl").events if event["event"] == "checkpoint"]
    first, last = kept[1:20], kept[-19:]
    return {
        "rows": len(solution.history),
        "ms at row 20": 1e3 * statistics.median(event["seconds"] for event in first),
        "ms at the last rows": 1e3 * statistics.median(event["seconds"] for event in last),
        "bytes at row 20": first[0]["bytes"],
        "bytes at the last row": last[-1]["bytes"],
        "seconds to resume": again,
    }


def large(keep: str) -> dict[str, Any]:
    """49 million weights and 1,000 hyperparameters.

    Returns:
        Seconds for which training waited, the bytes of the file and the highest memory.
    """
    torch.manual_seed(0)
    inputs = 1000
    net = nn.Sequential(nn.Linear(inputs, 6600), nn.ReLU(), nn.Linear(6600, 6300), nn.ReLU(), nn.Linear(6300, 10))

    def inner_loss(model: bilevel.Model, hyper: Any, batch: Any) -> Tensor:
        return bilevel.functional.cross_entropy(model(batch[0] * hyper["gain"]), batch[1])

    def outer_loss(model: bilevel.Model, hyper: Any, batch: Any) -> Tensor:
        return bilevel.functional.cross_entropy(model(batch[0]), batch[1])

    problem = bilevel.Problem(
        net, inner_loss=inner_loss, outer_loss=outer_loss, hyper={"gain": bilevel.positive([1.0] * inputs)}
    )
    weights = sum(param.numel() for param in net.parameters())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.pt"
        bilevel.solve(
            problem,
            batches(0, inputs, 16, 4),
            batches(1, inputs, 16, 2),
            inner_steps=2,
            steps=9,
            warmup=0,
            evaluate_every=2,
            progress=False,
            checkpoint=file if keep == "yes" else None,
        )
        found = events.read(f"{file}.jsonl").events if keep == "yes" else []
    kept = [event for event in found if event["event"] == "checkpoint"]
    return {
        "weights": weights,
        "checkpoints": len(kept),
        "seconds that training waits, median": statistics.median(e["seconds"] for e in kept) if kept else 0.0,
        "longest": max((e["seconds"] for e in kept), default=0.0),
        "bytes of the file per weight": kept[-1]["bytes"] / weights if kept else 0.0,
        "highest memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


PARTS: dict[str, tuple[Callable[[str], dict[str, Any]], list[str], str]] = {
    "steps": (many_steps, list(bilevel.METHODS), f"{STEPS:,} outer steps of every method, with a checkpoint every 100"),
    "rows": (many_rows, ["implicit_identity"], "A checkpoint early and late in a history"),
    "large": (
        large,
        ["no", "yes"],
        "49 million weights and 1,000 hyperparameters, delta_stn, Adam: without and with checkpoints",
    ),
}


def show(rows: list[dict[str, Any]]) -> str:
    """A table: one column for each key, or one line for each if there are few rows."""

    def text(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)

    if len(rows) <= 2:
        width = max(map(len, rows[0]))
        return "\n".join(f"  {name:{width}}" + "".join(f"{text(row[name]):>16}" for row in rows) for name in rows[0])
    lines = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[place]) for line in lines) + 2 for place in range(len(lines[0]))]
    return "\n".join("".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(PARTS[options.one[0]][0](options.one[1])))
        return
    former = options.out.read_text(encoding="utf-8") if options.out and options.out.exists() else ""
    sections = {part.partition("\n")[0]: part.strip() for part in former.split("\n\n") if part.strip()}
    for part in options.parts:
        _, rows, title = PARTS[part]
        made = []
        for row in rows:
            command = [sys.executable, "-W", "ignore", __file__, "--one", part, row]
            made.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        sections[title] = f"{title}\n{show(made)}"
        print(sections[title] + "\n", flush=True)
        if options.out:
            ordered = [sections[entry[2]] for entry in PARTS.values() if entry[2] in sections]
            options.out.write_text("\n\n".join(ordered) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
