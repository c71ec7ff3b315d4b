"""Does tuning during one run pay? The table and the figure of the page of evidence, from runs of ``defaults.py``.

    python benchmarks/evidence.py docs/results/factors.jsonl --out docs/results/evidence.md \
        --figure docs/_static/evidence.png

Fixed values are those of the start. The random search has three trials, the first one with the start: 3.0 times the
FLOPs of one plain run, where Δ-STN takes 2.4 times. Compared are test losses of the weights with the best validation
loss, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import tasks as suite

import bilevel
from applications.tables import Sheet

NAMES = {
    "fixed": "fixed values",
    "random_search": "random search",
    "stn": "STN",
    "delta_stn_paper": "Δ-STN, paper",
    "delta_stn": "Δ-STN",
}
CONFIGS = {"default": "delta_stn", "paper": "delta_stn_paper"}
TRIALS = ("fixed", "random_2")  # what the search chooses from, by the validation loss
Losses = dict[str, dict[str, dict[int, float]]]


def read(path: Path) -> Losses:
    """Test losses by task, method and seed, of those seeds that all methods have.

    Returns:
        The losses; tasks without a common seed are left out.
    """
    losses: Losses = {}
    trials: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        name, task, seed = CONFIGS.get(row["config"], row["config"]), row["task"], row["seed"]
        if name in NAMES:
            losses.setdefault(task, {}).setdefault(name, {})[seed] = row["test"]
        if name in TRIALS:
            trials.setdefault((task, seed), {})[name] = row
    for (task, seed), rows in trials.items():
        if len(rows) == len(TRIALS):
            chosen = min(rows.values(), key=lambda row: row["valid"])
            losses.setdefault(task, {}).setdefault("random_search", {})[seed] = chosen["test"]
    shared: Losses = {}
    for task in suite.BUILT_IN | suite.REAL:
        of = losses.get(task, {})
        seeds = set.intersection(*(set(of.get(name, ())) for name in NAMES)) if of else set()
        if seeds:
            shared[task] = {name: {seed: of[name][seed] for seed in sorted(seeds)} for name in NAMES}
    return shared


def ratios(losses: Losses, name: str) -> dict[str, list[float]]:
    """Log of the loss over that of Δ-STN, by task, one for each seed."""
    return {task: [math.log(of[name][s] / of["delta_stn"][s]) for s in of[name]] for task, of in losses.items()}


def table(losses: Losses) -> str:
    """Mean test losses by task, and how many percent each method is behind Δ-STN over all tasks.

    Returns:
        Markdown.
    """
    rows = []
    for task, of in losses.items():
        means = {name: statistics.fmean(of[name].values()) for name in NAMES}
        best = min(means.values())
        cells = [f"**{mean:.3f}**" if mean == best else f"{mean:.3f}" for mean in means.values()]
        rows.append([task.replace("_", " "), *cells])
    summary, lower = ["loss over that of Δ-STN"], ["Δ-STN is lower on"]
    for name in NAMES:
        of_tasks = [statistics.fmean(values) for values in ratios(losses, name).values()]
        mean, error = statistics.fmean(of_tasks), statistics.stdev(of_tasks) / math.sqrt(len(of_tasks))
        itself = name == "delta_stn"
        summary.append("" if itself else f"{100 * (math.exp(mean) - 1):+.1f} % ± {100 * math.exp(mean) * error:.1f}")
        lower.append("" if itself else f"{sum(value > 0 for value in of_tasks)} of {len(of_tasks)}")
    seeds = sorted({len(of["delta_stn"]) for of in losses.values()})
    count = " or ".join(map(str, seeds))
    title = f"Test loss, mean of {count} seeds, lowest in bold; below, means over tasks ± standard error."
    return Sheet(title, ["task", *NAMES.values()], [*rows, summary, lower]).text()


@bilevel.plotting.style()
def draw(losses: Losses, path: Path) -> None:
    """A dot for each task and method: the loss over that of Δ-STN."""
    figure, axes = bilevel.plotting.figure(1, 1, size=(6.4, 4.6))
    (axis,) = axes[0]
    order = sorted(losses, key=lambda task: statistics.fmean(ratios(losses, "fixed")[task]))
    for name in ("fixed", "random_search", "stn"):
        by_task = ratios(losses, name)
        found = [math.exp(statistics.fmean(by_task[task])) for task in order]
        color = bilevel.plotting.color(name)
        axis.plot(found, range(len(order)), "o", markersize=7, color=color, label=NAMES[name])
    axis.axvline(1, color=bilevel.plotting.color("delta_stn"), label=NAMES["delta_stn"])
    axis.set_xscale("log")
    ticks = [tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 5, 8) if tick <= 1.1 * axis.get_xlim()[1]]
    axis.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(order)), [task.replace("_", " ") for task in order])
    axis.set_xlabel("test loss over that of Δ-STN: right of the line, Δ-STN is better")
    axis.legend(loc="lower right")
    figure.savefig(path)


def main() -> None:
    """Print the table; write it and draw the figure where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file of benchmarks/defaults.py")
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument("--figure", type=Path, help="draw the figure there")
    options = parser.parse_args()
    losses = read(options.results)
    if not losses:
        parser.error(
            f"{options.results} has no task with runs of {', '.join([*TRIALS, 'stn', *CONFIGS])} on the same seed."
        )
    text = table(losses)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.figure:
        draw(losses, options.figure)


if __name__ == "__main__":
    main()
