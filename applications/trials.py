"""The trials of a search: read from Optuna's storage, written as tables and a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import bilevel

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Trial:
    """What is known of a trial that has ended.

    Attributes:
        number: Counted from 0.
        state: ``complete``, ``pruned``, or ``fail`` if the user stopped it.
        params: Natural values by name of the entry, such as ``dropout[0]``.
        interval: When it began and ended, in seconds of the clock of the machine.
        passes: Epoch, seconds since the beginning, and loss of every validation pass; none if it ended before.
        processor: The seconds of the processor that it took; nan if nobody knows.
    """

    number: int
    state: str
    params: dict[str, float]
    interval: tuple[float, float]
    passes: list[tuple[float, float, float]]
    processor: float = math.nan


def read(study: optuna.Study) -> list[Trial]:
    """The trials of a study that have ended."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        record = trial.user_attrs.get("record")
        if record is not None:
            interval = (record["date"], record["date"] + record["seconds"])
            passes = [(epoch, seconds, loss) for epoch, seconds, loss in record["passes"]]
            processor = record.get("processor", math.nan)
            found.append(Trial(trial.number, trial.state.name.lower(), dict(trial.params), interval, passes, processor))
    return found


def worked(intervals: Iterable[tuple[float, float]], until: float = math.inf) -> float:
    """The time in which at least one trial was running: neither pauses count, nor do processes add up.

    Returns:
        Seconds.

    Example:
        >>> worked([(0.0, 2.0), (1.0, 3.0), (10.0, 11.0)])
        4.0
    """
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, min(end, until) - max(start, reached))
        reached = max(reached, end)
    return total


def history(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """All validation passes in the order in which they happened, with the epochs and the time of all trials so far."""
    passes = []
    for trial in trials:
        reached = 0.0
        for epoch, seconds, loss in trial.passes:
            passes.append((trial.interval[0] + seconds, epoch - reached, loss, trial))
            reached = epoch
    intervals = [trial.interval for trial in trials]
    rows, epochs = [], 0.0
    for date, more, loss, trial in sorted(passes, key=lambda entry: entry[0]):
        epochs += more
        row = {"trial": trial.number, "epoch": round(epochs, 4), "seconds": worked(intervals, date)}
        rows.append({**row, "validation_loss": loss, **trial.params})
    return rows


def summary_of(trial: Trial) -> dict[str, Any]:
    """A row of ``trials.csv``."""
    epoch = trial.passes[-1][0] if trial.passes else 0.0
    best = min((loss for _, _, loss in trial.passes), default=None)
    start, end = trial.interval
    row = {"trial": trial.number, "state": trial.state, "validation_loss": best, "epochs": round(epoch, 2)}
    return {**row, "seconds": round(end - start, 2), **trial.params}


@bilevel.plotting.style()
def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw every row of :func:`history`, and the best so far, over epochs and time."""
    losses = [float(row["validation_loss"]) for row in rows]
    figure, axes = bilevel.plotting.figure(1, 2, size=(4.5, 3.2))
    for axis, column in zip(axes[0], ("epoch", "seconds"), strict=True):
        x = [float(row[column]) for row in rows]
        axis.plot(x, losses, "o", markersize=2, alpha=0.4, label="validation pass")
        axis.step(x, np.minimum.accumulate(losses), where="post", label="best so far")
        axis.set_xlabel(f"{column}{'' if column == 'seconds' else 's'} of all trials")
    axes[0][0].set_ylabel("validation loss")
    axes[0][0].legend()
    figure.savefig(path)
