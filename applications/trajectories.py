"""Trajectories of one hyperparameter against its exact optimum: a table, values, a figure."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bilevel
from applications.optima import Array, ClosedForm, Split

CSV_POINTS = 50
ENOUGH = 0.9


@dataclass(frozen=True)
class Run:
    """What a method did to the hyperparameter.

    Attributes:
        method: Its name.
        seed: Of the run.
        values: Natural values after each round; NaN after a divergence.
        rounds: After which the values were taken; None means after every one.
    """

    method: str
    seed: int
    values: Array
    rounds: Array | None = None

    @property
    def diverged(self) -> bool:
        """Whether the run ended early."""
        return bool(np.isnan(self.values[-1]))


@dataclass(frozen=True)
class Panel:
    """All runs on one split.

    Attributes:
        split: The data.
        exact: Its closed form.
        hyper: Name of the hyperparameter.
        space: Its transform and its start.
        optimum: The best unconstrained value.
        scale: Of the perturbation.
        runs: What the methods did.
    """

    split: Split
    exact: ClosedForm
    hyper: str
    space: bilevel.Hyper
    optimum: float
    scale: float
    runs: list[Run]

    def unconstrained(self, values: Array) -> Array:
        """The unconstrained λ of natural values."""
        return self.space.unconstrained(torch.from_numpy(values)).numpy()

    def natural(self, value: float) -> float:
        """The natural value of an unconstrained λ."""
        return float(self.space.natural(torch.tensor(value, dtype=torch.float64)))

    @property
    def start(self) -> float:
        """Where the runs begin, unconstrained."""
        return float(self.unconstrained(self.space.init.double().numpy()))

    @property
    def limit(self) -> float:
        """Where Δ-STN would end with exact expectations, unconstrained."""
        return self.exact.limit(self.start, self.scale)


def summary(panel: Panel) -> dict[str, Any]:
    r"""What the methods came to on a split.

    Returns:
        The optimum; and by method the hyperparameter at the end, the distance :math:`|\lambda - \lambda^*|` with its
        deviation over the seeds, the farthest distance of all rounds, the excess loss relative to the optimum, the
        share of the excess at the start that is gone (by seed), and how many runs diverged. None stands where there is
        no number.
    """
    best, first = (panel.exact.loss(value) for value in (panel.optimum, panel.start))
    methods: dict[str, Any] = {}

    def closed(run: Run) -> float:
        (end,) = panel.unconstrained(run.values[-1:])
        return 1 - (panel.exact.loss(end) - best) / (first - best)

    for method in dict.fromkeys(run.method for run in panel.runs):
        runs = [run for run in panel.runs if run.method == method]
        away = np.abs(panel.unconstrained(np.stack([run.values for run in runs])) - panel.optimum)
        ends = panel.unconstrained(np.array([run.values[-1] for run in runs if not run.diverged]))
        distance = np.abs(ends - panel.optimum)
        there = len(ends) > 0
        losses = [panel.exact.loss(end) for end in ends]
        methods[method] = {
            panel.hyper: panel.natural(float(ends.mean())) if there else None,
            "distance": float(distance.mean()) if there else None,
            "distance_std": float(distance.std(ddof=1)) if len(ends) > 1 else None,
            "farthest": None if np.isnan(away).all() else float(np.nanmax(away)),
            "excess_loss": float(np.mean(losses) / best - 1) if there else None,
            "closed": [None if run.diverged else closed(run) for run in runs],
            "diverged": len(runs) - len(ends),
            "runs": len(runs),
        }
    return {
        "set": panel.split.name,
        "split": panel.split.seed,
        "optimum": panel.natural(panel.optimum),
        "start": float(panel.space.init),
        "limit_distance": abs(panel.limit - panel.optimum),
        "methods": methods,
    }


def table(panel: Panel) -> str:
    """The runs on a split against its optimum, by method."""
    rows, found = panel.split.train[0].shape, summary(panel)
    lines = [
        f"{panel.split.name}, split {panel.split.seed}: {rows[0]} training examples, {rows[1]} features; optimal "
        f"{panel.hyper} {found['optimum']:.4g} (λ* = {panel.optimum:.2f}), start "
        f"{found['start']:.4g}; limit of delta_stn: |λ − λ*| = {found['limit_distance']:.2f}",
        f"  {'method':<14}{panel.hyper:>11}{'|λ − λ*| at the end':>22}{'farthest':>10}{'excess loss':>13}"
        f"{'closed':>9}{'diverged':>10}",
    ]
    for method, numbers in found["methods"].items():
        cells, excess, closed = f"{'-':>11}{'-':>22}", "-", "-"
        if numbers["distance"] is not None:
            spread = "" if numbers["distance_std"] is None else f" ± {numbers['distance_std']:.2f}"
            distance = f"{numbers['distance']:.2f}{spread}"
            cells = f"{numbers[panel.hyper]:>11.4g}{distance:>22}"
            shares = [share for share in numbers["closed"] if share is not None]
            excess, closed = f"{numbers['excess_loss']:.2%}", f"{np.mean(shares):.1%}"
        farthest = "-" if numbers["farthest"] is None else f"{numbers['farthest']:.2f}"
        diverged = f"{numbers['diverged']} of {numbers['runs']}"
        lines.append(f"  {method:<14}{cells}{farthest:>10}{excess:>13}{closed:>9}{diverged:>10}")
    return "\n".join(lines)


def score(panels: list[Panel]) -> str:
    """How many runs of each method closed most of the excess validation loss that they started with."""
    found = [summary(panel)["methods"] for panel in panels]
    lines = []
    for method in dict.fromkeys(name for methods in found for name in methods):
        there = [methods[method] for methods in found if method in methods]
        runs, diverged = (sum(numbers[key] for numbers in there) for key in ("runs", "diverged"))
        enough = sum(share is not None and share >= ENOUGH for numbers in there for share in numbers["closed"])
        ending = f"closed at least {ENOUGH:.0%} of the excess loss, {diverged} diverged."
        lines.append(f"{method}: {enough} of {runs} runs {ending}")
    return "\n".join(lines)


@bilevel.plotting.style()
def draw(panels: list[Panel], path: Path) -> None:
    """Save the hyperparameter by round: the mean over the seeds in λ, a band from the lowest to the highest.

    Of runs that diverge, the rounds before.
    """
    figure, axes = bilevel.plotting.panels(len(panels), most=2, size=(3.6, 2.6), sharex=True)
    hues = bilevel.plotting.colors(run.method for panel in panels for run in panel.runs)
    for axis, panel in zip(axes, panels, strict=True):
        methods = list(dict.fromkeys(run.method for run in panel.runs))
        for place, method in enumerate(methods):
            own = [run for run in panel.runs if run.method == method]
            values, rounds = np.stack([run.values for run in own]), own[0].rounds
            there = ~np.isnan(values).all(axis=0)
            steps = (np.arange(1, values.shape[1] + 1) if rounds is None else rounds)[there]
            values = values[:, there]
            middle = [panel.natural(value) for value in np.nanmean(panel.unconstrained(values), 0)]
            width = 1.5 + 0.6 * (len(methods) - place - 1)  # of two equal lines, one shows below the other
            axis.plot(steps, middle, color=hues[method], linewidth=width, label=method)
            lowest, highest = np.nanmin(values, 0), np.nanmax(values, 0)
            axis.fill_between(steps, lowest, highest, color=hues[method], alpha=0.15, linewidth=0)
        axis.axhline(panel.natural(panel.optimum), color="black", linestyle="--", linewidth=1, label="optimum")
        axis.axhline(panel.natural(panel.limit), color="grey", linestyle=":", linewidth=1, label="limit of delta_stn")
        axis.set(title=f"{panel.split.name}, split {panel.split.seed}", ylabel=panel.hyper)
        bilevel.plotting.log_axis(axis)
    bilevel.plotting.label_rounds(axes)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)))
    figure.savefig(path)


def write_csv(panels: list[Panel], path: Path) -> None:
    """Write the values of all runs at some fifty rounds, a column for each seed."""
    seeds = sorted({run.seed for panel in panels for run in panel.runs})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["set", "split", "method", "round", "optimum", *(f"seed {seed}" for seed in seeds)])
        for panel in panels:
            optimum = f"{panel.natural(panel.optimum):.5g}"
            rounds = len(panel.runs[0].values)
            shown = sorted({*range(0, rounds, max(1, rounds // CSV_POINTS)), rounds - 1})
            for method in dict.fromkeys(run.method for run in panel.runs):
                runs = [run for run in panel.runs if run.method == method]
                for index in shown:
                    values = [f"{run.values[index]:.5g}" for run in runs]
                    writer.writerow([panel.split.name, panel.split.seed, method, index + 1, optimum, *values])


def read_csv(path: Path) -> dict[tuple[str, int], list[Run]]:
    """What :func:`write_csv` wrote.

    Returns:
        The runs by set and split.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seeds = [int(name.removeprefix("seed ")) for name in rows[0] if name.startswith("seed ")]
    found: dict[tuple[str, int], list[Run]] = {}
    for name, split, method in dict.fromkeys((row["set"], row["split"], row["method"]) for row in rows):
        own = [row for row in rows if (row["set"], row["split"], row["method"]) == (name, split, method)]
        rounds = np.array([int(row["round"]) for row in own])
        for seed in seeds:
            values = np.array([float(row[f"seed {seed}"]) for row in own])
            found.setdefault((name, int(split)), []).append(Run(method, seed, values, rounds))
    return found
