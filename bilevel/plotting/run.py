"""The figure of one run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bilevel.history import History
from bilevel.hyper import Hyper, Space
from bilevel.plotting.layout import label_rounds, log_axis, mark_best, panels, shade_warmup, style
from bilevel.plotting.palette import OTHERS, shades, spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEPARATE = 12
"""With more hyperparameters, those with one prefix and one kind share a panel."""

NAMED = 6
"""A legend names so many lines at most; of more, the first, the middle and the last."""

LISTED, SHORT = 4, 10
"""Beside the signals, so many panels are named at most, or some more if their names have so few letters."""

BAND = 2.0
"""How far the signal of pure noise goes, in standard errors."""


def schedules(
    history: History, hyper: Mapping[str, Hyper], path: str | Path | None = None, *, best: int | None = None
) -> Figure:
    """Draw the losses of a run, every hyperparameter in natural units, and their signal to noise.

    Positive hyperparameters have a logarithmic axis, those in an interval one from end to end; whole numbers are drawn
    as steps. Of a tensor with many entries, the mean and the range. Of more than twelve hyperparameters, those of one
    kind whose names begin alike, as ``weight_decay.0`` and ``weight_decay.3`` do, share a panel.

    Args:
        history: What to draw.
        hyper: Those of the problem, by name.
        path: Save the figure there, if given.
        best: The round to mark in every panel.

    Returns:
        The figure; it is not shown.

    Example:
        >>> from bilevel import History, positive
        >>> history = History()
        >>> for index in (1, 2):
        ...     history.append({"round": index, "inner_loss": 1 / index, "decay": 0.1 * index})
        >>> drawn = schedules(history, {"decay": positive(0.1)}, best=2)
        >>> [axis.get_title(loc="left") for axis in drawn.axes]
        ['loss', 'decay']
    """
    columns = {name: [*Space.columns({name: entry.init})] for name, entry in hyper.items()}
    first = next(iter(next(iter(columns.values()))))
    signal = f"signal.{first}" in history.columns
    together = _panels(hyper)
    colours = OTHERS if len(together) <= len(OTHERS) else spectrum(len(together))
    hues = dict(zip(together, colours, strict=False))
    with style():
        made, axes = panels(1 + len(together) + signal)
        _draw_losses(axes[0], history)
        for axis, (title, names) in zip(axes[1:], together.items(), strict=False):
            if len(names) == 1:
                entry = hyper[names[0]]
                _draw_entries(axis, history, names[0], columns[names[0]], hues[title], steps=entry.discrete)
            else:
                _draw_several(axis, history, title, names, hues[title], steps=hyper[names[0]].discrete)
            axis.set_title(title)
            _set_range(axis, hyper[names[0]])
        if signal:
            _draw_signal(axes[-1], history, columns, {n: hues[title] for title, own in together.items() for n in own})
            _name_signals(axes[-1], hues)
        warm = _warmup(history)
        rounds = history["round"]
        for axis in axes:
            shade_warmup(axis, warm)
            mark_best(axis, best)
            axis.set_xlim(min(rounds[0], 1 if warm else rounds[0]), max(rounds[-1], rounds[0] + 1))
        _legend(axes[0])
        label_rounds(axes)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            made.savefig(path)
    return made


def _draw_losses(axis: Axes, history: History) -> None:
    axis.set_title("loss")
    drawn = []
    for name, hue, strength in (
        ("inner_loss", OTHERS[5], 0.9),
        ("outer_loss", OTHERS[4], 0.9),
        ("validation_loss", "#111111", 1.0),
    ):
        if name in history.columns:
            x, y = _present(history, name)
            marker = "o" if name == "validation_loss" and len(x) <= 40 else ""
            width = 1.6 if name == "validation_loss" else 0.9
            axis.plot(x, y, color=hue, alpha=strength, linewidth=width, marker=marker, label=name.replace("_", " "))
            drawn.append(y[np.isfinite(y)])
    values = np.concatenate(drawn)
    if len(values) and values.min() > 0 and values.max() > 5 * values.min():
        log_axis(axis)


def _draw_entries(
    axis: Axes, history: History, name: str, columns: list[str], hue: str, *, steps: bool, prefix: str = ""
) -> None:
    """The lines of one hyperparameter, with a legend if there are several."""
    drawstyle = "steps-post" if steps else "default"
    if columns[0] == f"{name}.mean":
        rounds, mean = _present(history, prefix + columns[0])
        low, high = (_present(history, prefix + column)[1] for column in columns[1:])
        axis.fill_between(rounds, low, high, color=hue, alpha=0.2, linewidth=0, label="all entries")
        axis.plot(rounds, mean, color=hue, drawstyle=drawstyle, label="mean")
    else:
        for column, shade in zip(columns, shades(hue, len(columns)), strict=True):
            label = column.removeprefix(name)
            axis.plot(*_present(history, prefix + column), color=shade, drawstyle=drawstyle, linewidth=1.4, label=label)
    if len(columns) > 1 and not prefix:
        axis.legend(ncols=math.ceil(len(columns) / 5), columnspacing=0.8)


def _panels(hyper: Mapping[str, Hyper]) -> dict[str, list[str]]:
    """Which hyperparameters share a panel, by its title."""
    if len(hyper) <= SEPARATE:
        return {name: [name] for name in hyper}
    found: dict[tuple[str, float, float, bool], list[str]] = {}
    for name, entry in hyper.items():
        alone = entry.init.ndim > 0
        key = name if alone else name.partition(".")[0]
        found.setdefault((key, entry.low, entry.high, entry.discrete), []).append(name)
    titles: dict[str, list[str]] = {}
    for (key, *_), names in found.items():
        titles[names[0] if len(names) == 1 or key in titles else key] = names
    return titles


def _draw_several(axis: Axes, history: History, title: str, names: list[str], hue: str, *, steps: bool) -> None:
    """One line for each scalar hyperparameter, of which a few are named."""
    middle = {0, len(names) // 2, len(names) - 1}
    for index, (name, shade) in enumerate(zip(names, shades(hue, len(names)), strict=True)):
        label = name.removeprefix(f"{title}.") if len(names) <= NAMED or index in middle else None
        drawstyle = "steps-post" if steps else "default"
        axis.plot(*_present(history, name), color=shade, drawstyle=drawstyle, linewidth=1.0, label=label)
    axis.legend(title=f"{len(names)} of them" if len(names) > NAMED else None)


def _draw_signal(axis: Axes, history: History, columns: Mapping[str, list[str]], hues: Mapping[str, str]) -> None:
    axis.set_title("signal to noise of the hypergradient")
    axis.axhspan(-BAND, BAND, color="#F3EBD3", linewidth=0, zorder=0.5)
    axis.axhline(0, color="0.6", linewidth=0.7, zorder=1)
    for name, own in columns.items():
        _draw_entries(axis, history, name, own, hues[name], steps=False, prefix="signal.")
    reach = max(3.0, *(abs(value) for value in axis.get_ylim()))
    axis.set_ylim(-reach, 1.4 * reach)  # room for the legend


def _name_signals(axis: Axes, hues: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    short = all(len(name) <= SHORT for name in hues)
    if len(hues) > (2 * LISTED if short else LISTED):
        axis.text(0.98, 0.98, "colours of the panels", transform=axis.transAxes, ha="right", va="top", fontsize=8.5)
        return
    handles = [Line2D([], [], color=hue, label=name) for name, hue in hues.items()]
    axis.legend(handles=handles, ncols=3 if short else 1, columnspacing=0.8, loc="upper right")


def _set_range(axis: Axes, entry: Hyper) -> None:
    from matplotlib.ticker import MaxNLocator

    if entry.discrete:
        axis.set_ylim(entry.low - 0.3, entry.high + 0.3)
        axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    elif entry.low == 0 and entry.high == math.inf:
        log_axis(axis)
    elif math.isfinite(entry.low) and math.isfinite(entry.high):
        margin = 0.02 * (entry.high - entry.low)
        axis.set_ylim(entry.low - margin, entry.high + margin)


def _legend(axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles, labels, loc="best")


def _warmup(history: History) -> float:
    """The last round of the warm-up, or 0: its rows have no outer loss."""
    warm = [row["round"] for row in history.rows if "outer_loss" not in row]
    return max(warm, default=0.0) if "outer_loss" in history.columns else 0.0


def _present(history: History, column: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    values = history[column]
    there = ~np.isnan(values)
    return history["round"][there], values[there]
