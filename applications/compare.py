"""Put runs side by side: the paper's tables and curves, from the folders that runs left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bilevel
from applications.curves import Curve, average
from applications.paper import COLUMNS, PAPER, PAPER_ACCURACY, Pair
from applications.run import read_summary
from applications.tables import Sheet, mean_and_deviation, page, read_csv, shown, write_csv
from applications.task import FIXED, SEARCHES, STOPPED

REFERENCE = "delta_stn"  # what others are compared with, seed by seed
CUT = ("limit",)  # what a reader has to know of a row, also if all of its runs have the same
OWN_CORE = 0.9  # share of the processor's time in the clock's, from which on a run had a core of its own
# How a method tunes: every method may have its own numbers. Plain training does not look at them.
TUNING = ("warmup", "inner_steps", "outer_steps", "outer_learning_rate", "response_learning_rate", "scale", "entropy")


@dataclass(frozen=True)
class Result:
    """One finished run.

    Attributes:
        folder: Where it is.
        row: The task; also whether only the input dropout is tuned, and whether the data are generated.
        method: The name of the method.
        summary: The content of ``summary.json``.
    """

    folder: Path
    row: str
    method: str
    summary: Mapping[str, Any]


Table = dict[str, dict[str, list[Result]]]  # by row and method; a row is that of its results, and what sets it apart


def compare(paths: Sequence[Path], *, out: Path | None = None, figure: Path | None = None) -> str:
    """Compare all runs in some folders.

    Args:
        paths: Folders of runs, or folders that hold them at any depth.
        out: Write the tables there as Markdown, and beside as HTML and CSV.
        figure: Draw the best validation loss so far there, over epochs, and over time if all runs had a core of their
            own; by default beside ``out``, if matplotlib is installed.

    Returns:
        The tables, then everything that the reader should know about the runs.

    Raises:
        ImportError: If a ``figure`` is asked for without matplotlib.
        ValueError: If there is no finished run.
    """
    if out is not None and out.suffix in (".csv", ".html", ".png"):
        raise ValueError(
            f"--out {out}: name the text file, such as table.md; the {out.suffix} file is written beside it."
        )
    results, warnings = load(paths)
    if not results:
        raise ValueError("\n".join([f"no finished run in {', '.join(map(str, paths))}.", *warnings]))
    table = arrange(results)
    warnings += differences(table)
    sheets = [sheet for sheet in (losses(table), pairs(table), accuracy(table)) if sheet.rows]
    report = "\n\n".join([*(sheet.text() for sheet in sheets), *(["\n".join(warnings)] if warnings else [])])
    drawn = figure or (out.with_suffix(".png") if out is not None else None)
    if drawn is not None:
        try:
            draw(table, drawn)
        except ImportError:
            if figure is not None:  # otherwise nobody asked for it
                raise
            drawn = None
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report + "\n", encoding="utf-8")
        out.with_suffix(".html").write_text(page("Runs compared", sheets, warnings, drawn), encoding="utf-8")
        write_csv(out.with_suffix(".csv"), numbers(table))
    return report


def load(paths: Iterable[Path]) -> tuple[list[Result], list[str]]:
    """Read all runs; one that cannot be used is named.

    Returns:
        The finished runs, and a line for each of the others.

    Raises:
        FileNotFoundError: If a path does not exist.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give folders of runs.")
        marks = [path] if path.is_file() else sorted([*path.rglob("settings.json"), *path.rglob("summary.json")])
        folders |= {
            mark.parent.resolve(): mark.parent for mark in marks if mark.name in ("settings.json", "summary.json")
        }
    results, warnings = [], []
    for folder in folders.values():
        try:
            results.append(_result(folder))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{error.args[0]!r} is missing in summary.json" if isinstance(error, KeyError) else error
            warnings.append(f"warning: skipped {folder}: {reason}")
    return results, warnings


def arrange(results: Iterable[Result]) -> Table:
    """Runs by row and method, methods in the order of the table."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.row, []).append(result)
    tasks, order = [*PAPER, *sorted(found)], [*COLUMNS]
    table: Table = {}
    for task in sorted(found, key=tasks.index):
        for row, runs in apart(found[task]).items():
            methods = sorted(
                dict.fromkeys(run.method for run in runs),
                key=lambda method: order.index(method) if method in order else len(order),
            )
            table[row] = {method: [run for run in runs if run.method == method] for method in methods}
    return table


def apart(runs: Sequence[Result]) -> dict[str, list[Result]]:
    """Put runs of one task that differ in their settings into different rows.

    The label of a row names the settings that vary. How a method tunes sets its runs apart only from those of the same
    method. A run whose method does not look at a setting that varies stands in all rows that agree with the rest of it:
    so does a search, whose epochs are those of a trial, in the rows of the runs with other epochs.

    Returns:
        The runs by label.
    """
    looked_at = [_settings(run) for run in runs]
    starts = [name for settings in looked_at for name in settings if name.startswith("init ")]
    for run, settings in zip(runs, looked_at, strict=True):
        if run.method not in SEARCHES:
            settings.update({name: settings.get(name, "default") for name in starts})
    varying = []
    for name in dict.fromkeys(name for settings in looked_at for name in settings):
        own = name in TUNING or name == "epochs per trial"
        values: dict[str, set[str]] = {}
        for run, settings in zip(runs, looked_at, strict=True):
            if name in settings:
                values.setdefault(run.method if own else "", set()).add(str(settings[name]))
        if any(len(different) > 1 for different in values.values()) or (name in CUT and values[""] != {"None"}):
            varying.append(name)
    varying.sort(key=lambda name: name.startswith("epochs"))  # they come last
    kinds = [{name: _label(name, of[name]) for name in varying if name in of} for of in looked_at]
    rows = [kind for kind in kinds if not any(kind.items() < other.items() for other in kinds)]
    return {
        ", ".join([runs[0].row, *kind.values()]): [
            run for run, of in zip(runs, kinds, strict=True) if of.items() <= kind.items()
        ]
        for kind in rows
    }


def differences(table: Table) -> list[str]:
    """Whatever makes a comparison unfair: other settings, the same seed twice, runs that ended early.

    Returns:
        A line for each.
    """
    lines = []
    stands: Counter[Path] = Counter()
    for row, methods in table.items():
        for method, results in methods.items():
            seeds: dict[Any, Path] = {}
            for result in results:
                seed = result.summary["seed"]
                if seed in seeds:
                    lines.append(f"warning: {row}, {method}: seed {seed} twice: {seeds[seed]}, {result.folder}")
                seeds.setdefault(seed, result.folder)
                stands[result.folder] += 1
                # A callback is a rule of the task, such as that of the language models for the learning rate.
                if result.summary["stopped"] not in ("epochs", "trials", "callback"):
                    epochs = result.summary["epochs"]
                    lines.append(
                        f"note: {result.folder} was stopped ({result.summary['stopped']}) after {epochs} epochs"
                    )
        lines += [
            f"note: {row}, between methods: {line}" for line in _differing([runs[0] for runs in methods.values()])
        ]
    lines += [
        f"note: {folder} stands in {count} rows: its method does not look at what sets them apart"
        for folder, count in stands.items()
        if count > 1
    ]
    return list(dict.fromkeys(lines))


def losses(table: Table) -> Sheet:
    """Best validation loss and the test loss of the same weights, or perplexities: ``tab:classification``."""
    title = "Best validation (test) loss, perplexity for text; mean ± standard deviation over n seeds, lowest in bold."
    return _sheet(title, table, _loss_pairs, PAPER, smallest=True)


def pairs(table: Table) -> Sheet:
    """How far each method is behind Δ-STN, in percent, seed by seed; without rows if no two runs share a seed."""
    title = (
        f"Validation (test) loss over that of {COLUMNS[REFERENCE]} on the same seed, in percent; mean ± standard error."
    )
    rows, columns = [], [name for name in COLUMNS if name != REFERENCE and any(name in row for row in table.values())]
    for row, methods in table.items():
        base = {run.summary["seed"]: run for run in methods.get(REFERENCE, ())}
        cells = []
        for name in columns:
            shared = [run for run in methods.get(name, ()) if run.summary["seed"] in base]
            gaps = [_behind(run, base[run.summary["seed"]]) for run in shared]
            cells.append(f"{_error(gaps, 0)} ({_error(gaps, 1)}), n={len(gaps)}" if gaps else "")
        if any(cells):
            rows.append([row, *cells])
    return Sheet(title, ["task", *(COLUMNS[name] for name in columns)], rows)


def _behind(run: Result, base: Result) -> Pair:
    """By how many percent the two losses of a run are above those of another one."""
    (first, second), (valid, test) = _loss_pairs([run])[0], _loss_pairs([base])[0]
    return 100 * (first / valid - 1 if valid else math.nan), 100 * (second / test - 1 if test else math.nan)


def _error(gaps: Sequence[Pair], part: int) -> str:
    """The mean of one part, and its standard error if there is one."""
    mean, deviation = mean_and_deviation([gap[part] for gap in gaps])
    return f"{mean:+.1f}" + (f" ± {deviation / len(gaps) ** 0.5:.1f}" if len(gaps) > 1 else "")


def accuracy(table: Table) -> Sheet:
    """The accuracies of the same weights, ``tab:acc``; without rows if no run has them."""
    having: Table = {}
    for row, methods in table.items():
        kept = {
            m: r
            for m, r in methods.items()
            if all("accuracy" in run.summary[p] for run in r for p in ("valid", "test"))
        }
        if kept:
            having[row] = kept
    title = "Validation (test) accuracy in percent, of the weights with the best validation loss."
    return _sheet(title, having, _accuracy_pairs, PAPER_ACCURACY, smallest=False)


def numbers(table: Table) -> list[dict[str, Any]]:
    """The table as one row per task and method, and the paper's numbers beside."""
    rows: list[dict[str, Any]] = []
    last = _last_rows(table)
    for row, methods in table.items():
        for method, results in methods.items():
            entry: dict[str, Any] = {"task": row, "method": method, "source": "measured", "n": len(results)}
            for part, values in zip(("valid", "test"), zip(*_loss_pairs(results), strict=True), strict=True):
                entry[part], entry[f"{part}_std"] = mean_and_deviation(values)
            entry["seconds"] = mean_and_deviation([run.summary["seconds"] for run in results])[0]
            rows.append(entry)
        if row in last:
            task = last[row]
            source, pairs = PAPER.get(task, ("", {}))
            rows += [
                {"task": task, "method": m, "source": source, "valid": v, "test": t} for m, (v, t) in pairs.items()
            ]
    return rows


@bilevel.plotting.style()
def draw(table: Table, path: Path) -> None:
    """Draw the best validation loss so far: one row per task, over epochs, and over time if all runs had a core each.

    Thin lines are runs; a thick one is their mean, as far as all of them went. Of the fall at the start, only what is
    below one and a half times the worst end is shown.
    """
    timed = {row: all(_undisturbed(run) for runs in methods.values() for run in runs) for row, methods in table.items()}
    columns = ("epoch", "seconds") if any(timed.values()) else ("epoch",)
    figure, axes = bilevel.plotting.figure(len(table), len(columns), size=(3.6 if len(columns) > 1 else 5.4, 2.8))
    for (row, methods), pair in zip(table.items(), axes, strict=True):
        every = [curve(run, "epoch")[1] for results in methods.values() for run in results]
        lowest, first, worst = min(y[-1] for y in every), max(y[0] for y in every), max(y[-1] for y in every)
        limits = (0.95 * lowest, 1.05 * min(first, 1.5 * worst))
        for axis, column in zip(pair, columns, strict=True):
            axis.set_visible(column == "epoch" or timed[row])
            for method, results in methods.items():
                color, curves = bilevel.plotting.color(method), [curve(run, column) for run in results]
                for x, y in curves if len(curves) > 1 else []:
                    axis.step(x, y, where="post", color=color, linewidth=0.5, alpha=0.5)
                axis.step(*average(curves), where="post", color=color, linewidth=1.8, label=COLUMNS.get(method, method))
            axis.set_xlim(left=0)
            axis.set(xlabel="epochs" if column == "epoch" else "seconds", ylim=limits)
            bilevel.plotting.log_axis(axis, least=1.0)
        pair[0].set_title(f"{row}: best validation loss")
        pair[0].legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _undisturbed(run: Result) -> bool:
    """Whether a run is known to have had a core of its own, so that its time says something."""
    share: float = run.summary.get("processor_share", 0.0)
    return share >= OWN_CORE


def curve(result: Result, column: str) -> Curve:
    """The best validation loss so far, over ``epoch`` or ``seconds``."""
    rows = [row for row in read_csv(result.folder / "history.csv") if row.get("validation_loss")]
    loss = np.minimum.accumulate([float(row["validation_loss"]) for row in rows])
    if column == "epoch" and "epoch" not in rows[0]:
        rounds = np.array([float(row["round"]) for row in rows])
        return rounds * (result.summary["epochs"] / rounds[-1]), loss
    return np.array([float(row[column]) for row in rows]), loss


def _result(folder: Path) -> Result:
    """Read a run.

    Returns:
        What the tables need of it.

    Raises:
        ValueError: If it is not finished, or a file is damaged.
    """
    path = folder / "summary.json"
    if not path.exists():
        raise ValueError("it has no summary.json, so the run is not finished")
    summary = read_summary(path)
    if summary["stopped"] in STOPPED:
        raise ValueError(f"it was {summary['stopped']}; the same command goes on with it")
    if not all(math.isfinite(summary[part]["loss"]) for part in ("valid", "test")):
        raise ValueError("its losses are not finite")
    row = summary["task"]
    row += ", input dropout only" if summary["settings"].get("only_input") else ""
    row += ", generated data" if summary["data"] == "generated" else ""
    result = Result(folder, row, summary["method"], summary)
    try:
        curve(result, "seconds")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"history.csv is missing or damaged ({error})") from None
    return result


def _settings(run: Result) -> dict[str, Any]:
    """The settings that the method of a run looks at."""
    summary = run.summary
    settings = {name: value for name, value in summary["settings"].items() if name != "only_input"}
    if run.method in (*FIXED, *SEARCHES):
        unused = [name for name in TUNING if (run.method, name) != ("fixed_noise", "scale")]
        settings = {name: value for name, value in settings.items() if name not in unused}
    if run.method in SEARCHES:
        return {"epochs per trial" if name == "epochs" else name: value for name, value in settings.items()}
    return settings | {f"init {name}": value for name, value in summary["init"].items()}


def _label(name: str, value: Any) -> str:
    """A setting as part of the name of a row."""
    if name == "limit" and value is not None:
        return f"{value:,} examples"
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {name}" if name.startswith("epochs") else f"{name.replace('_', ' ')} {text}"


def _differing(results: Sequence[Result]) -> list[str]:
    """What the settings of runs do not have in common, of those that their methods look at."""
    lines = []
    whole = [_settings(run) for run in results]
    for key in dict.fromkeys(key for settings in whole for key in settings):
        values: dict[str, list[str]] = {}
        for run, settings in zip(results, whole, strict=True):
            # Not to be given is a difference for an initial value; otherwise the method does not look at it.
            if key in settings or (key.startswith("init ") and run.method not in SEARCHES):
                values.setdefault(str(settings.get(key, "not given")), []).append(str(run.folder))
        if len(values) > 1:
            lines.append(f"{key} is " + ", ".join(f"{value} in {' and '.join(at)}" for value, at in values.items()))
    return lines


def _last_rows(table: Table) -> dict[str, str]:
    """The last row of each task, after which the paper's numbers come, and the task."""
    tasks = {next(iter(methods.values()))[0].row: row for row, methods in table.items()}
    return {row: task for task, row in tasks.items()}


def _loss_pairs(results: Sequence[Result]) -> list[Pair]:
    def number(measures: Mapping[str, float]) -> float:
        return measures.get("perplexity", measures["loss"])

    return [(number(run.summary["valid"]), number(run.summary["test"])) for run in results]


def _accuracy_pairs(results: Sequence[Result]) -> list[Pair]:
    return [(100 * run.summary["valid"]["accuracy"], 100 * run.summary["test"]["accuracy"]) for run in results]


def _sheet(
    title: str, table: Table, pairs_of: Any, paper: Mapping[str, tuple[str, Mapping[str, Pair]]], *, smallest: bool
) -> Sheet:
    used = {method for methods in table.values() for method in methods}
    last = _last_rows(table)
    used |= {method for task in last.values() for method in paper.get(task, ("", {}))[1]}
    columns = [*(method for method in COLUMNS if method in used), *sorted(used - set(COLUMNS))]
    rows = []
    for row, methods in table.items():
        cells = {method: pairs_of(results) for method, results in methods.items()}
        rows.append([row, *_cells(cells, columns, digits=4, smallest=smallest)])
        if last.get(row) in paper:
            source, pairs = paper[last[row]]
            published = {method: [pair] for method, pair in pairs.items()}
            rows.append([f"paper, {source}", *_cells(published, columns, digits=3, smallest=smallest)])
    return Sheet(title, ["task", *(COLUMNS.get(method, method) for method in columns)], rows)


def _cells(pairs: Mapping[str, Sequence[Pair]], columns: Sequence[str], *, digits: int, smallest: bool) -> list[str]:
    """Text for each column; the best mean of validation and that of test are bold."""
    means = {method: np.mean(values, axis=0) for method, values in pairs.items()}
    best = (np.min if smallest else np.max)(list(means.values()), axis=0)
    cells = []
    for method in columns:
        if method not in pairs:
            cells.append("")
            continue
        parts = []
        for index, values in enumerate(zip(*pairs[method], strict=True)):
            text = shown(values, 2 if best[index] >= 10 else digits)
            parts.append(f"**{text}**" if len(means) > 1 and means[method][index] == best[index] else text)
        cells.append(f"{parts[0]} ({parts[1]})" + (f", n={len(pairs[method])}" if len(pairs[method]) > 1 else ""))
    return cells
