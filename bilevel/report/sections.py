"""Which charts a page has: those of one run, and those that compare several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bilevel.plotting.palette import OTHERS, shades
from bilevel.plotting.run import BAND
from bilevel.report.charts import Band, Chart, Line
from bilevel.report.colors import INK
from bilevel.report.numbers import duration, size
from bilevel.report.runs import KNOWN, Run, Series, Tuned
from bilevel.report.thinning import Array

LINES = 6
"""A tensor with more entries than this is a band with its mean."""
TOGETHER = 6
"""Signals and scales of so many hyperparameters share one chart."""
MOST = 200
"""Charts of one section; the values of all hyperparameters are in the table."""
LOSSES = {"inner_loss": OTHERS[5], "outer_loss": OTHERS[4], "validation_loss": INK}


@dataclass(frozen=True)
class Section:
    """Charts that belong together.

    Attributes:
        title: Of the section.
        charts: Of it.
        note: A sentence below the title.
        shown: How many charts are open at first.
    """

    title: str
    charts: Sequence[Chart]
    note: str = ""
    shown: int = 12


def sections_of(run: Run) -> list[Section]:
    """The charts of one run.

    Args:
        run: To show.

    Returns:
        Those sections that have a chart.
    """
    best = run.best_round
    common: dict[str, Any] = {
        "x_range": (min(1.0, run.last_round), run.last_round),
        "warmup": run.warmup,
        "best": [] if best is None else [(best, INK)],
    }
    hues = {tuned.name: OTHERS[index % len(OTHERS)] for index, tuned in enumerate(run.hyper)}
    losses = [
        Line(
            name.replace("_", " "),
            *run.get(name),
            hue,
            width=2.0 if name == "validation_loss" else 1.1,
            dots=name == "validation_loss",
        )
        for name, hue in LOSSES.items()
        if name in run.series
    ]
    marks = ([] if best is None else ["the dotted line marks the best round"]) + (
        ["the warm-up is shaded"] if run.warmup else []
    )
    found = [
        Section("Losses", [Chart("loss", losses, wide=True, **common)] if losses else [], _sentence(marks)),
        Section(
            "Hyperparameters",
            [_schedule(run, tuned, hues[tuned.name], common) for tuned in run.hyper[:MOST]],
            "In natural units."
            + (f" {len(run.hyper) - MOST} more are in the table of values." if len(run.hyper) > MOST else ""),
        ),
        Section(
            "Signal to noise of the hypergradient",
            _prefixed(run, "signal.", hues, common, noise=BAND, log=False),
            "The mean of about the last 39 hypergradients in units of its standard error; noise alone stays mostly in "
            f"the shaded range from −{BAND:g} to {BAND:g}.",
            6,
        ),
        Section("Diagnostics", [*_diagnostics(run, common), *_prefixed(run, "scale.", hues, common)], "", 9),
        Section("Time and memory", _costs([run], [OTHERS[0]], common)),
    ]
    return [section for section in found if section.charts]


def compared(runs: Sequence[Run], hues: Sequence[str]) -> list[Section]:
    """The charts that compare several runs, a line for each.

    Args:
        runs: To compare.
        hues: A colour for each.

    Returns:
        Those sections that have a chart.
    """
    last = max(run.last_round for run in runs)
    common: dict[str, Any] = {"x_range": (min(1.0, last), last)}
    pairs = [(run.best_round, hue) for run, hue in zip(runs, hues, strict=True)]
    best = {"best": [(at, hue) for at, hue in pairs if at is not None]}

    def chart(title: str, column: str, **options: Any) -> Chart:
        lines = []
        for index, (run, hue) in enumerate(zip(runs, hues, strict=True)):
            x, y = run.get(column)
            if len(x):
                lines.append(Line(run.name, x, y, hue, dots="validation" in column, dashed=index >= len(OTHERS)))
        return Chart(title, lines, **common, **options)

    by_time = [
        Line(run.name, *_against_time(run), hue, dots=True, dashed=index >= len(OTHERS))
        for index, (run, hue) in enumerate(zip(runs, hues, strict=True))
        if len(run.get("validation_loss")[0])
    ]
    names = list(dict.fromkeys(tuned.name for run in runs for tuned in run.hyper))
    schedules = [one for name in names for one in _schedules(runs, hues, name, common | best)]
    signals = [
        chart(f"signal of {column.removeprefix('signal.')}", column, noise=BAND, log=False, low=-3.0, high=3.0)
        for column in _columns(runs, "signal.")[:MOST]
    ]
    others = ["hypergradient_norm", *(c for p in ("method.", "scale.") for c in _columns(runs, p))]
    found = [
        Section(
            "Losses",
            [
                chart("validation loss", "validation_loss", **best),
                Chart("validation loss by time", by_time, x_label="seconds"),
                chart("outer loss", "outer_loss"),
                chart("inner loss", "inner_loss"),
            ],
            "A line for each run; dotted lines mark the best rounds.",
        ),
        Section("Hyperparameters", schedules[:MOST], "In natural units.", 12),
        Section("Signal to noise of the hypergradient", signals, "Noise alone stays mostly in the shaded range.", 3),
        Section("Diagnostics", [chart(_title(column), column) for column in others[:MOST]], "", 3),
        Section("Time and memory", _costs(runs, hues, common)),
    ]
    kept = [replace(section, charts=[one for one in section.charts if one.lines]) for section in found]
    return [section for section in kept if section.charts]


def _schedule(run: Run, tuned: Tuned, hue: str, common: dict[str, Any]) -> Chart:
    lines, bands = _entries(run, tuned, hue)
    return Chart(tuned.name, lines, bands, **_range(tuned), **common)


def _schedules(runs: Sequence[Run], hues: Sequence[str], name: str, common: dict[str, Any]) -> list[Chart]:
    """One chart for each entry of a hyperparameter, or one with the mean and range of all if there are many."""
    owners = {run.name: tuned for run in runs for tuned in run.hyper if tuned.name == name}
    columns = list(dict.fromkeys(column for tuned in owners.values() for column in tuned.columns))
    many = len(columns) > LINES or any(tuned.summarized for tuned in owners.values())
    if many:
        lines: list[Line] = []
        bands: list[Band] = []
        for run, hue in zip(runs, hues, strict=True):
            if run.name in owners:
                own, around = _entries(run, owners[run.name], hue)
                lines += [replace(line, label=run.name) for line in own if not line.faint]
                bands += around
        return [Chart(f"{name}, mean and range", lines, bands, **_range(next(iter(owners.values()))), **common)]
    found = []
    for column in columns:
        lines = [
            Line(run.name, *run.get(column), hue, steps=owners[run.name].discrete, dashed=index >= len(OTHERS))
            for index, (run, hue) in enumerate(zip(runs, hues, strict=True))
            if run.name in owners and len(run.get(column)[0])
        ]
        found.append(Chart(column, lines, **_range(next(iter(owners.values()))), **common))
    return found


def _entries(run: Run, tuned: Tuned, hue: str, prefix: str = "") -> tuple[list[Line], list[Band]]:
    """The lines of one hyperparameter: its entries, or the mean and the range of many."""
    own = [prefix + column for column in tuned.columns if prefix + column in run.series]
    if tuned.summarized and len(own) == 3:
        (x, mean), (_, low), (_, high) = (run.get(column) for column in own)
        if len(mean) == len(low) == len(high):
            return [Line("mean of all entries", x, mean, hue, steps=tuned.discrete)], [Band(x, low, high, hue)]
    if len(own) > LINES:
        stacked = _stacked([run.get(column) for column in own])
        if stacked is not None:
            x, values = stacked
            lines = [Line("", x, row, hue, width=0.7, faint=True, steps=tuned.discrete) for row in values[:24]]
            lines.append(Line(f"mean of {len(own)} entries", x, values.mean(0), hue, steps=tuned.discrete))
            return lines, [Band(x, values.min(0), values.max(0), hue)]
    labels = [column.removeprefix(prefix).removeprefix(tuned.name) or tuned.name for column in own]
    return [
        Line(label if len(own) > 1 else "now" if run.running else "end", *run.get(column), shade, steps=tuned.discrete)
        for label, column, shade in zip(labels, own, shades(hue, len(own)) if own else [], strict=True)
    ], []


def _stacked(series: Sequence[Series]) -> tuple[Array, Array] | None:
    """Several columns that have the same rounds, as one array."""
    x = series[0][0]
    return (x, np.stack([y for _, y in series])) if all(np.array_equal(x, other) for other, _ in series) else None


def _prefixed(run: Run, prefix: str, hues: dict[str, str], common: dict[str, Any], **options: Any) -> list[Chart]:
    """The signal, or the scale, of every hyperparameter: in one chart if they are few."""
    what = prefix.rstrip(".")
    if what == "signal":
        options |= {"low": -3.0, "high": 3.0}
    there = [tuned for tuned in run.hyper if any(prefix + column in run.series for column in tuned.columns)][:MOST]
    drawn = [(tuned, *_entries(run, tuned, hues[tuned.name], prefix)) for tuned in there]
    if 1 <= len(there) <= TOGETHER:
        lines: list[Line] = []
        for tuned, own, _ in drawn:
            single = sum(bool(line.label) for line in own) == 1
            lines += [
                replace(line, label=tuned.name if single else f"{tuned.name}{line.label}") if line.label else line
                for line in own
            ]
        bands = [band for *_, own in drawn for band in own]
        return [Chart(what, lines, bands, wide=what == "signal", **common, **options)]
    return [Chart(f"{what} of {tuned.name}", lines, bands, **common, **options) for tuned, lines, bands in drawn]


def _diagnostics(run: Run, common: dict[str, Any]) -> list[Chart]:
    """The norm of the hypergradient, what the method reports, and columns that somebody else has added."""
    tuned = {column for one in run.hyper for column in one.columns}
    names = ["hypergradient_norm", *_columns([run], "method.")]
    names += [
        name
        for name in run.series
        if name not in KNOWN | tuned and not name.startswith(("scale.", "signal.", "method."))
    ]
    drawn = [(name, *run.get(name)) for name in names[:MOST]]
    return [
        Chart(_title(name), [Line("now" if run.running else "end", x, y, OTHERS[7], width=1.2)], **common)
        for name, x, y in drawn
        if len(x)
    ]


def _costs(runs: Sequence[Run], hues: Sequence[str], common: dict[str, Any]) -> list[Chart]:
    """Time per round, memory, and how long checkpoints held the run up."""
    times, memory, stalls = [], [], []
    for index, (run, hue) in enumerate(zip(runs, hues, strict=True)):
        style: dict[str, Any] = {"width": 1.2, "dashed": index >= len(OTHERS)}
        label = run.name if len(runs) > 1 else "last"
        times.append(Line(label, *seconds_per_round(run), hue, **style))
        memory.append(Line(label, *run.get("memory"), hue, **style))
        saved = [event for event in run.events if event.kind == "checkpoint" and math.isfinite(event.seconds)]
        at, seconds = (np.array([value(event) for event in saved], np.float64) for value in (_round_of, _seconds_of))
        stalls.append(Line(label, at, seconds, hue, dots=True, **style))
    common = {key: value for key, value in common.items() if key != "best"}
    found = [
        Chart("time per round", times, shown=duration, **common),
        Chart("memory", memory, shown=size, log=False, **common),
        Chart("time that a checkpoint held the run up", stalls, shown=duration, **common),
    ]
    return [
        replace(chart, lines=[line for line in chart.lines if len(line.x)])
        for chart in found
        if any(len(line.x) for line in chart.lines)
    ]


def seconds_per_round(run: Run) -> Series:
    """The time of every round, where the clock and the rounds go forward.

    Args:
        run: With a column ``seconds``.

    Returns:
        Rounds and seconds.
    """
    x, seconds = run.get("seconds")
    rounds, passed = np.diff(x), np.diff(seconds)
    good = (rounds > 0) & (passed >= 0)
    return x[1:][good], passed[good] / rounds[good]


def _against_time(run: Run) -> Series:
    x, y = run.get("validation_loss")
    rounds, seconds = run.get("seconds")
    if not len(rounds):
        return np.empty(0), np.empty(0)
    places = np.clip(np.searchsorted(rounds, x), 0, len(rounds) - 1)
    order = np.argsort(seconds[places], kind="stable")
    return seconds[places][order], y[order]


def _range(tuned: Tuned) -> dict[str, Any]:
    """The vertical axis of a hyperparameter: as ``bilevel.plotting`` has it."""
    if tuned.discrete:
        return {"low": tuned.low - 0.3, "high": tuned.high + 0.3, "log": False}
    if tuned.low == 0 and tuned.high == math.inf:
        return {"log": True}
    if math.isfinite(tuned.low) and math.isfinite(tuned.high):
        return {"low": tuned.low, "high": tuned.high, "log": False}
    return {"log": None if math.isnan(tuned.low) else False}


def _columns(runs: Sequence[Run], prefix: str) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.series if name.startswith(prefix)))


def _title(column: str) -> str:
    return "norm of the hypergradient" if column == "hypergradient_norm" else column.removeprefix("method.")


def _sentence(parts: Sequence[str]) -> str:
    text = ", ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _round_of(event: Any) -> float:
    return float(event.round)


def _seconds_of(event: Any) -> float:
    return float(event.seconds)
