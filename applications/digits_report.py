"""The table, the verdict and the figure of ``digits.py``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import bilevel
from bilevel import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[np.float64]
FIXED, FLAGSHIP = "fixed", "delta_stn"
CERTAIN = 2.0  # standard errors from which on a difference counts
RARE = 3  # classes with the fewest training images, drawn with thick lines


@dataclass(frozen=True)
class Run:
    """What the table and the figure show of a run.

    Attributes:
        name: Of the method.
        seed: Of split, weights and batches.
        valid: The best validation loss.
        test: Test loss of the weights with the best validation loss.
        accuracy: Test accuracy of the same weights.
        best: The round of the best validation loss.
        history: Validation loss and hyperparameters by round; of a search, those of the best trial.
        seconds: CPU time of the whole run; of a search, of all trials.
    """

    name: str
    seed: int
    valid: float
    test: float
    accuracy: float
    best: int
    history: bilevel.History
    seconds: float


def names(runs: Sequence[Run]) -> list[str]:
    """Of the methods, in the order of the runs."""
    return list(dict.fromkeys(run.name for run in runs))


def paired(runs: Sequence[Run], method: str, other: str) -> tuple[float, float]:
    """By how much the test loss of a method is below that of another, on the same seeds.

    Args:
        runs: All of them.
        method: The one.
        other: The other.

    Returns:
        The mean and its standard error, which is NaN for a single seed; positive if ``method`` is better.
    """
    tests = {(run.name, run.seed): run.test for run in runs}
    gains = [tests[other, seed] - test for (name, seed), test in tests.items() if name == method]
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    return statistics.fmean(gains), error


def table(runs: Sequence[Run], costs: Mapping[str, float], rival: str) -> str:
    """Means over seeds, and differences of the test loss to fixed values and to a rival.

    Args:
        runs: All of them.
        costs: FLOPs by method, in plain training runs.
        rival: The method of the last column.

    Returns:
        Text, one line per method.
    """
    width = 2 + max(map(len, names(runs)))
    lines = [
        f"{'':{width}}valid   test      test    FLOPs,      CPU   test loss minus that of, ± standard error",
        f"{'method':{width}} loss   loss  accuracy   plain=1     time   {FIXED:<17}{rival}",
    ]
    for name in names(runs):
        own = [run for run in runs if run.name == name]
        valid, test, accuracy, seconds = (
            statistics.fmean(values)
            for values in zip(*((run.valid, run.test, run.accuracy, run.seconds) for run in own), strict=True)
        )
        gaps = [difference(runs, name, other) if name != other else "" for other in (FIXED, rival)]
        lines.append(
            f"{name:{width}}{valid:5.3f}  {test:5.3f}{accuracy:10.1%}{costs[name]:10.1f}{seconds:7.1f} s   "
            f"{gaps[0]:<17}{gaps[1]}".rstrip()
        )
    count = len({run.seed for run in runs})
    return "\n".join([*lines, f"Means over {count} {'seed' if count == 1 else 'seeds'}; differences within a seed."])


def difference(runs: Sequence[Run], method: str, other: str) -> str:
    """Such as ``−0.031 ± 0.004``: below zero, the method is better than the other."""
    gain, error = paired(runs, method, other)
    return f"{-gain:+.3f}".replace("-", "−") + ("" if math.isnan(error) else f" ± {error:.3f}")


def verdict(runs: Sequence[Run], method: str, others: Sequence[str]) -> str:
    """One sentence: whom the method beats in test loss, to whom it loses, and from whom it cannot be told apart.

    Args:
        runs: All of them.
        method: Which to judge.
        others: The methods to compare it with.

    Returns:
        The sentence; it also says if a method that is not among the others does best.
    """
    found: dict[str, list[str]] = {}
    for other in others:
        gain, error = paired(runs, method, other)
        certain = math.isnan(error) or abs(gain) > CERTAIN * error
        word = "cannot be told apart from" if not certain else "beats" if gain > 0 else "loses to"
        amount = f"by {abs(gain):.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")
        if not certain:
            amount = f"({'better' if gain > 0 else 'worse'} {amount})"
        found.setdefault(word, []).append(f"{other} {amount}")
    parts = [f"{word} {listed(compared)}" for word, compared in found.items()]
    sentence = f"Verdict, test loss: {method} {'; it '.join(parts)}."
    means = {name: statistics.fmean(run.test for run in runs if run.name == name) for name in names(runs)}
    best = min(means, key=lambda name: means[name])
    return sentence if best == method else f"{sentence} The lowest mean is that of {best}."


def listed(items: Sequence[str]) -> str:
    """Such as ``a, b and c``."""
    *some, last = items
    return f"{', '.join(some)} and {last}" if some else last


@plotting.style()
def draw(runs: Sequence[Run], counts: Sequence[int], path: Path) -> None:
    """Save the figure: validation losses, test losses by seed, and the schedules of class weights and decay.

    Args:
        runs: All of them.
        counts: Training images of each class.
        path: Of the figure.
    """
    made, axes = plotting.figure(2, 2, size=(3.9, 3.1))
    draw_losses(axes[0, 0], runs)
    draw_tests(axes[0, 1], runs)
    one = next(run for run in runs if run.name == FLAGSHIP)
    draw_weights(axes[1, 0], one, counts)
    draw_decay(axes[1, 1], runs)
    warm = sum("outer_loss" not in row for row in one.history.rows)
    timed = [axes[0, 0], axes[1, 0], axes[1, 1]]
    for axis in timed:
        plotting.shade_warmup(axis, warm, label="warm-up: hyperparameters stay")
    plotting.label_rounds(timed)
    for axis in timed:
        axis.set_xlabel("round")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside upper center", ncols=math.ceil(len(labels) / 2), columnspacing=1.2)
    made.savefig(path)


def look(name: str) -> dict[str, Any]:
    """The colour and dashes of a method; a longer search is darker, with longer dashes."""
    if not name.startswith("long "):
        return plotting.line(name)
    line = plotting.line(name.removeprefix("long "))
    return line | {"color": plotting.shades(line["color"], 3)[0], "linestyle": (0, (3, 1.5))}


def draw_losses(axis: Axes, runs: Sequence[Run]) -> None:
    """Mean validation loss by round, with its standard error; a search shows the trials that it chose."""
    axis.set_title("validation loss (dot: lowest mean)")
    lowest = []
    for name in names(runs):
        own, line = [run for run in runs if run.name == name], look(name)
        rounds, values = aligned(own, "validation_loss")
        mean, error = values.mean(0), values.std(0, ddof=min(1, len(own) - 1)) / math.sqrt(len(own))
        order = 3 if name == FLAGSHIP else 2
        axis.fill_between(rounds, mean - error, mean + error, color=line["color"], alpha=0.13, linewidth=0)
        axis.plot(rounds, mean, **line, label=name, zorder=order)
        place = int(mean.argmin())
        axis.plot(rounds[place], mean[place], "o", color=line["color"], markersize=4.5, zorder=order + 1)
        lowest.append(mean[place])
    axis.set_ylim(0.78 * min(lowest), 1.9 * min(lowest))  # the first rounds are far above
    plotting.log_axis(axis, least=1.0)


def draw_tests(axis: Axes, runs: Sequence[Run]) -> None:
    """Test loss by method: a dot per seed, those of a seed joined, and the mean."""
    axis.set_title("test loss (dots: seeds; bars: means)")
    shown = names(runs)
    tests = {(run.name, run.seed): run.test for run in runs}
    for seed in sorted({run.seed for run in runs}):
        axis.plot([tests[name, seed] for name in shown], color="0.78", linewidth=0.9, zorder=1)
    for place, name in enumerate(shown):
        hue, own = look(name)["color"], [run.test for run in runs if run.name == name]
        axis.plot([place] * len(own), own, "o", color=hue, markersize=4.5, alpha=0.75, markeredgewidth=0)
        mean = statistics.fmean(own)
        axis.plot([place - 0.28, place + 0.28], [mean, mean], color=hue, linewidth=2.6, solid_capstyle="butt")
        axis.annotate(
            f"{mean:.3f}",
            (place, mean),
            (0, 3),
            textcoords="offset points",
            ha="center",
            color=hue,
            fontsize=8.5,
            fontweight="bold",
        )
    labels = [name.replace(" ", "\n").replace("_", "_\n", 1) for name in shown]
    axis.set_xticks(range(len(shown)), labels)
    axis.set_xlim(-0.45, len(shown) - 0.4)
    axis.grid(visible=False, axis="x")


def draw_weights(axis: Axes, run: Run, counts: Sequence[int]) -> None:
    """The weight of every class by round, in one run; lines of rare classes are thick."""
    axis.set_title(f"class weights, seed {run.seed} (digit: images)")
    rounds, ends = run.history["round"], []
    for label, (count, hue) in enumerate(zip(counts, plotting.spectrum(len(counts)), strict=True)):
        values = run.history[f"weights[{label}]"]
        rare = label >= len(counts) - RARE
        axis.plot(rounds, values, color=hue, linewidth=2.4 if rare else 1.1, zorder=3 if rare else 2)
        ends.append((math.log(values[-1]), f"{label}: {count}", hue, rare))
    axis.set_xlim(0, 1.16 * rounds[-1])
    plotting.log_axis(axis)
    low, high = np.log(axis.get_ylim())
    axis.set_ylim(math.exp(low - 0.08 * (high - low)), math.exp(high))
    for place, (value, text, hue, rare) in zip(spread(ends, (high - low) / 17), sorted(ends), strict=True):
        axis.annotate(
            text,
            (rounds[-1], math.exp(value)),
            (1.04 * rounds[-1], math.exp(place)),
            color=hue,
            fontsize=8.5,
            fontweight="bold" if rare else "normal",
            va="center",
            arrowprops={"arrowstyle": "-", "color": hue, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
        )


def spread(ends: Sequence[tuple[float, str, str, bool]], gap: float) -> list[float]:
    """Heights for labels, in increasing order, near their values but no closer than a gap."""
    places: list[float] = []
    for value, *_ in sorted(ends):
        places.append(max(value, places[-1] + gap) if places else value)
    shift = statistics.fmean(place - value for place, (value, *_) in zip(places, sorted(ends), strict=True))
    return [place - shift for place in places]


def draw_decay(axis: Axes, runs: Sequence[Run]) -> None:
    """Weight decay by round, geometric mean over seeds; at the right what the searches chose."""
    axis.set_title("weight decay, mean (circles: searches)")
    for name in names(runs):
        own = [run for run in runs if run.name == name]
        if name.endswith("search"):
            continue
        rounds, values = aligned(own, "decay")
        mean, deviation = np.log(values).mean(0), np.log(values).std(0)
        if name == FLAGSHIP:
            low, high = np.exp([mean - deviation, mean + deviation])
            axis.fill_between(rounds, low, high, color=plotting.color(name), alpha=0.13, linewidth=0)
        axis.plot(rounds, np.exp(mean), **plotting.line(name), zorder=3 if name == FLAGSHIP else 2)
    last = rounds[-1]
    for place, name in enumerate(names([run for run in runs if run.name.endswith("search")])):
        chosen = [run.history["decay"][-1] for run in runs if run.name == name]
        edge = [(1.04 + 0.05 * place) * last] * len(chosen)
        axis.plot(edge, chosen, "o", markerfacecolor="none", color=look(name)["color"])
    axis.set_xlim(0, 1.14 * last)
    plotting.log_axis(axis)


def aligned(runs: Sequence[Run], column: str) -> tuple[Array, Array]:
    """The rounds at which all runs have a column, and its values, one row per run."""
    series = [
        {row["round"]: row[column] for row in run.history.rows if column in row and math.isfinite(row[column])}
        for run in runs
    ]
    rounds = sorted(set.intersection(*(set(one) for one in series)))
    return np.array(rounds), np.array([[one[index] for index in rounds] for one in series])
