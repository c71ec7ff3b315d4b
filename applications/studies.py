"""Sensitivity studies: many runs of one task that differ in one thing, a table and a figure of them.

A study is a list of runs and a drawing function. Its runs are folders like any other; those that are there already are
not made again, so that a study that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bilevel
from applications.run import describe, read_summary, run
from applications.tables import markdown, read_csv, shown, write_csv
from applications.task import SEARCHES, STOPPED, Settings, Task, as_usual


@dataclass(frozen=True)
class Outcome:
    """A run of a study.

    Attributes:
        value: What was varied, as text.
        method: The name of the method.
        seed: The seed.
        folder: Of the run.
        summary: Of the run; empty if the training diverged.
    """

    value: str
    method: str
    seed: int
    folder: Path
    summary: Mapping[str, Any]

    @property
    def loss(self) -> float:
        """The best validation loss; NaN if there is none."""
        return float(self.summary["valid"]["loss"]) if self.summary else math.nan


@dataclass(frozen=True)
class Study:
    """A figure of the paper as a command.

    Attributes:
        name: On the command line.
        summary: One line for the help.
        description: What is varied, what is drawn, what to expect.
        tasks: Which tasks it can be made of; the first is the default.
        methods: Which methods are compared, unless told otherwise.
        values: What is tried, unless told otherwise.
        change: From a value to the settings and the initial hyperparameters that it changes.
        draw: From the outcomes and an empty figure's file to the figure.
    """

    name: str
    summary: str
    description: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    values: tuple[str, ...]
    change: Callable[[str], tuple[dict[str, Any], dict[str, Any]]]
    draw: Callable[[Sequence[Outcome], Path], None]


def run_study(
    study: Study,
    task: Task,
    settings: Settings,
    *,
    out: Path,
    data: Path | None,
    values: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    device: torch.device | None = None,
    progress: bool | None = None,
) -> str:
    """Make all runs that are not there yet, then ``table.md``, ``results.csv`` and ``figure.png``.

    Args:
        study: Which one.
        task: Of what.
        settings: What all runs have in common.
        out: The folder of the study.
        data: Folder of the datasets; None takes small generated data.
        values: What to try; those of the study by default.
        methods: What to compare; likewise.
        seeds: One run for each.
        device: Where to train; the CPU by default.
        progress: Show progress bars; as in :func:`bilevel.solve`.

    Returns:
        The table.

    Raises:
        ValueError: If an option does not fit the study.
    """
    values, methods = list(values or study.values), list(methods or study.methods)
    if task.name not in study.tasks:
        raise ValueError(f"--task must be one of {', '.join(study.tasks)} for study {study.name}, got {task.name}.")
    for name, given in (("--values", values), ("--methods", methods), ("--seeds", seeds)):
        if len(set(given)) < len(given):
            raise ValueError(f"{name}: something is given twice in {' '.join(map(str, given))}.")
    unknown = [method for method in methods if method not in task.methods]
    if unknown:
        raise ValueError(f"--methods: {task.name} has no method {unknown[0]!r}, but {', '.join(task.methods)}.")
    if any(method in SEARCHES for method in methods):
        raise ValueError("--methods: a search is no method of a study, which sets the hyperparameters itself.")
    changes = {value: study.change(value) for value in values}  # all are read before the first run
    outcomes = []
    for value, (changed, init) in changes.items():
        for method in methods:
            for seed in seeds:
                folder = out / f"{task.name}-{method}-{value}-{seed}"
                if progress is not False:
                    print(f"{study.name}: {method}, {value}, seed {seed}", flush=True)
                these = dataclasses.replace(as_usual(settings, method), **changed)
                summary = _run(
                    task, method, these, out=folder, data=data, seed=seed, device=device, init=init, progress=progress
                )
                outcomes.append(Outcome(value, method, seed, folder, summary))
    text = table(outcomes)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    write_csv(out / "results.csv", [_row(outcome) for outcome in outcomes])
    study.draw(outcomes, out / "figure.png")
    return text


def table(outcomes: Sequence[Outcome]) -> str:
    """Best validation (test) loss, one row for each value, one column for each method."""
    methods = list(dict.fromkeys(outcome.method for outcome in outcomes))
    rows = []
    for value in dict.fromkeys(outcome.value for outcome in outcomes):
        cells = []
        for method in methods:
            these = [o for o in outcomes if (o.value, o.method) == (value, method)]
            done = [o for o in these if o.summary]
            tests = [float(o.summary["test"]["loss"]) for o in done]
            cell = f"{shown([o.loss for o in done], 4)} ({shown(tests, 4)})" if done else ""
            lost = len(these) - len(done)
            cells.append(f"{cell} {lost} of {len(these)} diverged".strip() if lost else cell)
        rows.append([value, *cells])
    seeds = len({outcome.seed for outcome in outcomes})
    title = f"Best validation (test) loss, {seeds} seed{'s' if seeds > 1 else ''}."
    return f"{title}\n\n{markdown(['value', *methods], rows)}"


@bilevel.plotting.style()
def draw_schedules(outcomes: Sequence[Outcome], path: Path) -> None:
    """The input dropout over epochs, a panel for each method, a colour for each initial value."""
    methods = list(dict.fromkeys(outcome.method for outcome in outcomes))
    values = list(dict.fromkeys(outcome.value for outcome in outcomes))
    hues = dict(zip(values, bilevel.plotting.spectrum(len(values)), strict=True))
    figure, axes = bilevel.plotting.figure(1, len(methods), size=(4.5, 3.2))
    for axis, method in zip(axes[0], methods, strict=True):
        labels = {value: value for value in values}
        for outcome in outcomes:
            if outcome.method == method and outcome.summary:
                rows = read_csv(outcome.folder / "history.csv")
                rounds = np.array([float(row["round"]) for row in rows])
                epochs = rounds * outcome.summary["epochs"] / rounds[-1]
                dropout = [float(row["dropout[0]"]) for row in rows]
                label = labels.pop(outcome.value, None)
                axis.plot(epochs, dropout, color=hues[outcome.value], linewidth=1.2, label=label)
        axis.set_title(method)
        axis.set_xlabel("epochs")
        axis.set_ylim(0, 0.95)
    axes[0][0].set_ylabel("input dropout")
    axes[0][-1].legend(title="initial value", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)


@bilevel.plotting.style()
def draw_scales(outcomes: Sequence[Outcome], path: Path) -> None:
    """The best validation loss over the scale: points are runs, lines their means."""
    figure, axes = bilevel.plotting.figure(1, 1, size=(4.5, 3.2))
    (axis,) = axes[0]
    for method in dict.fromkeys(outcome.method for outcome in outcomes):
        these = [outcome for outcome in outcomes if outcome.method == method and outcome.summary]
        x = sorted({float(outcome.value) for outcome in these})
        means = [np.mean([outcome.loss for outcome in these if float(outcome.value) == value]) for value in x]
        color = bilevel.plotting.color(method)
        axis.plot([float(o.value) for o in these], [o.loss for o in these], "o", color=color, alpha=0.4)
        axis.plot(x, means, color=color, label=method)
    axis.set_xscale("log")
    ticks = sorted({float(outcome.value) for outcome in outcomes})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_xlabel("perturbation scale")
    axis.set_ylabel("best validation loss")
    axis.legend()
    figure.savefig(path)


@bilevel.plotting.style()
def draw_intervals(outcomes: Sequence[Outcome], path: Path) -> None:
    """A heat map of the best validation loss for each method; what was not tried is empty."""
    methods = list(dict.fromkeys(outcome.method for outcome in outcomes))
    pairs = {outcome.value: _pair(outcome.value) for outcome in outcomes}
    trains, valids = (sorted({pair[axis] for pair in pairs.values()}) for axis in (0, 1))
    figure, axes = bilevel.plotting.figure(1, len(methods), size=(4.5, 3.2))
    for axis, method in zip(axes[0], methods, strict=True):
        cells = np.full((len(valids), len(trains)), np.nan)
        for value, (train, valid) in pairs.items():
            done = [o.loss for o in outcomes if (o.value, o.method) == (value, method) and o.summary]
            if done:
                cells[valids.index(valid), trains.index(train)] = np.mean(done)
        axis.grid(visible=False)
        image = axis.imshow(cells, origin="lower", aspect="auto", cmap="viridis_r")
        for row, column in zip(*np.nonzero(~np.isnan(cells)), strict=True):
            color = "black" if image.norm(cells[row, column]) < 0.5 else "white"
            axis.text(column, row, f"{cells[row, column]:.3f}", ha="center", va="center", fontsize=7, color=color)
        axis.set_xticks(range(len(trains)), trains)
        axis.set_yticks(range(len(valids)), valids)
        axis.set_xlabel("training steps between (T_train)")
        axis.set_ylabel("outer steps after them (T_valid)")
        axis.set_title(method)
        figure.colorbar(image, ax=axis, label="best validation loss")
    figure.savefig(path)


def _initial(value: str) -> tuple[dict[str, Any], dict[str, Any]]:
    rate = _number("initial", value, "an input dropout between 0 and 0.95, the ends excluded", 0.0, 0.95)
    return {"only_input": True, "scale": 1.0, "entropy": None}, {"dropout": rate}


def _scale(value: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"scale": _number("scale", value, "a positive number", 0.0, math.inf), "entropy": None}, {}


def _intervals(value: str) -> tuple[dict[str, Any], dict[str, Any]]:
    train, valid = _pair(value)
    return {"inner_steps": train, "outer_steps": valid}, {}


STUDIES = {
    study.name: study
    for study in (
        Study(
            name="initial",
            summary="does the schedule depend on where it starts?",
            description="Tune the input dropout of an MLP on MNIST, the other dropouts off and the perturbation scale "
            "fixed to 1, from several initial dropouts (--values). The figure shows the schedules: with a method that "
            "works, all end up at the same one (fig:mnist-schedule-init). With --values 0.5 --methods fixed "
            "fixed_noise stn delta_stn the table is that of tab:dropout-rate.",
            tasks=("mnist",),
            methods=("stn", "delta_stn"),
            values=("0.05", "0.3", "0.6", "0.9"),
            change=_initial,
            draw=draw_schedules,
        ),
        Study(
            name="scale",
            summary="how much does the perturbation scale matter?",
            description="Train with perturbation scales (--values) that stay fixed. The figure shows the best "
            "validation loss over the scale: the flatter, the more robust (fig:sensiv2).",
            tasks=("fashion", "mnist", "alexnet"),
            methods=("stn", "delta_stn_paper", "delta_stn"),
            values=("0.1", "0.3", "1", "3"),
            change=_scale,
            draw=draw_scales,
        ),
        Study(
            name="intervals",
            summary="how often should the hyperparameters move?",
            description="Train with several numbers of training steps between outer steps, and of outer steps after "
            "them: --values 5x1 stands for 5 training steps, then 1 outer step. The figure is a heat map of the best "
            "validation loss (fig:sensiv).",
            tasks=("fashion", "alexnet"),
            methods=("delta_stn",),
            values=tuple(f"{train}x{valid}" for train in (1, 5, 10, 25) for valid in (1, 2, 5)),
            change=_intervals,
            draw=draw_intervals,
        ),
    )
}


def _run(
    task: Task, method: str, settings: Settings, *, out: Path, init: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """A run, or its summary if it has been made.

    Returns:
        The summary; empty if the training diverged.

    Raises:
        KeyboardInterrupt: If the user stopped it.
    """
    wanted = json.loads(json.dumps(describe(task, method, settings, data=more["data"], seed=more["seed"], init=init)))
    try:
        summary = read_summary(out / "summary.json")
    except (OSError, ValueError):
        summary = {}
    if summary.get("stopped") == "epochs" and all(summary.get(key) == value for key, value in wanted.items()):
        return summary
    try:
        summary = run(task, method, settings, out=out, init=init, **more)
    except bilevel.DivergenceError as error:
        print(f"warning: {out}: {error}", flush=True)
        return {}
    if summary["stopped"] in STOPPED:  # the user means the study, not only this run
        raise KeyboardInterrupt
    return summary


def _row(outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"value": outcome.value, "method": outcome.method, "seed": outcome.seed}
    if not outcome.summary:
        return {**row, "stopped": "diverged"}
    summary = outcome.summary
    row |= {"stopped": summary["stopped"], "epochs": summary["epochs"], "seconds": summary["seconds"]}
    row |= {f"{part}_{name}": number for part in ("valid", "test") for name, number in summary[part].items()}
    return {**row, **{f"final {name}": json.dumps(value) for name, value in summary["hyper"].items()}}


def _number(study: str, value: str, kind: str, low: float, high: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not low < number < high:
        raise ValueError(f"--values of study {study}: {value!r} is not {kind}.")
    return number


def _pair(value: str) -> tuple[int, int]:
    train, _, valid = value.partition("x")
    if not (train.isdecimal() and valid.isdecimal() and int(train) > 0 and int(valid) > 0):
        raise ValueError(f"--values of study intervals: {value!r} is not two whole numbers, such as 5x1.")
    return int(train), int(valid)
