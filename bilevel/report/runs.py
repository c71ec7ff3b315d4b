"""What a page shows of a run, from its event log, its history, or the folder of an application."""

from __future__ import annotations

import csv
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bilevel.history import LEADING, History
from bilevel.hyper import Hyper, Space
from bilevel.report.thinning import Array

Series = tuple[Array, Array]
OTHERS = ("scale.", "signal.", "method.")
KNOWN = {*LEADING, "memory", "time", "event", "epoch", "trial"}
LARGEST = 64 * 2**20
"""Of a JSON file beside a history, in bytes: what is larger is not one."""


@dataclass(frozen=True)
class Event:
    """Something that happened besides rounds.

    Attributes:
        kind: ``checkpoint``, ``resume`` or ``warning``.
        round: After which round.
        text: What to say about it.
        seconds: How long it held the run up, if that is known.
        bytes: How much was written, if that is known.
    """

    kind: str
    round: float
    text: str = ""
    seconds: float = math.nan
    bytes: float = math.nan


@dataclass(frozen=True)
class Tuned:
    """A hyperparameter: its columns and its range.

    Attributes:
        name: As the user wrote it.
        columns: One for each entry, or those of mean, least and largest entry.
        low: The least value it may have.
        high: The largest.
        discrete: Whether it takes whole numbers only.
    """

    name: str
    columns: tuple[str, ...]
    low: float = math.nan
    high: float = math.nan
    discrete: bool = False

    @property
    def summarized(self) -> bool:
        """Whether the columns are mean, least and largest entry of many."""
        return self.columns == tuple(f"{self.name}.{part}" for part in ("mean", "min", "max"))


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Attributes:
        name: To tell it from others.
        series: Rounds and values of every column, where it has a value.
        hyper: The hyperparameters.
        method: Its name.
        settings: By name; those of nested mappings have names with dots.
        environment: Where it ran.
        events: Other than rounds, in their order.
        stopped: Why it ended, an empty text if it is not known, None while it runs.
        written: When the log grew last, in seconds of the clock; None if there is no log.
        started: When it began, as the log has it.
        best: The best round, if something else than the validation losses says so.
    """

    name: str
    series: Mapping[str, Series]
    hyper: Sequence[Tuned]
    method: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[Event] = ()
    stopped: str | None = ""
    written: float | None = None
    started: str = ""
    best: float | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended, as far as its log says."""
        return self.stopped is None

    @property
    def last_round(self) -> float:
        """The last round that is recorded; 0 if there is none."""
        return max((float(x[-1]) for x, _ in self.series.values() if len(x)), default=0.0)

    @property
    def best_round(self) -> float | None:
        """The round of the lowest validation loss, the first of equal ones."""
        if self.best is not None:
            return self.best
        x, y = self.get("validation_loss")
        return float(x[np.nanargmin(y)]) if np.isfinite(y).any() else None

    @property
    def warmup(self) -> float:
        """The last round of the warm-up, or 0: its rows have no outer loss."""
        rounds, _ = self.get("inner_loss")
        tuned, _ = self.get("outer_loss")
        if not len(tuned) or not len(rounds):
            return 0.0
        before = rounds[rounds < tuned[0]]
        return float(before[-1]) if len(before) else 0.0

    def get(self, column: str) -> Series:
        """Rounds and values of a column; both empty if there is none."""
        return self.series.get(column, (np.empty(0), np.empty(0)))

    def at(self, column: str, round_: float | None = None) -> float:
        """The value of a column at a round, or the one before; by default the last. NaN if there is none."""
        x, y = self.get(column)
        index = len(x) if round_ is None else int(np.searchsorted(x, round_, side="right"))
        return float(y[index - 1]) if index else math.nan


def from_history(history: History, hyper: Mapping[str, Hyper], **facts: Any) -> Run:
    """A run from its history.

    Args:
        history: Of the run.
        hyper: The hyperparameters of its problem.
        facts: Other fields of :class:`Run`; settings and environment may be nested.

    Returns:
        The run.
    """
    tuned = [
        Tuned(name, tuple(Space.columns({name: entry.init})), entry.low, entry.high, entry.discrete)
        for name, entry in hyper.items()
    ]
    return _run(history.rows, tuned, **facts)


def from_log(events: Iterable[Mapping[str, Any]], beside: Mapping[str, Any] | None = None, **facts: Any) -> Run:
    """A run from the events of its log.

    Args:
        events: As they were written; rounds that a resume has made void are left out here.
        beside: Settings that an application has written beside the log.
        facts: Other fields of :class:`Run`.

    Returns:
        The run.
    """
    rows: list[dict[str, float]] = []
    others: list[Event] = []
    start: dict[str, Any] = {}
    stopped: str | None = None
    for event in events:
        kind = event.get("event")
        if kind == "round":
            row = {key: value for key, entry in event.items() if (value := _number(entry)) is not None}
            if math.isfinite(row.get("round", 0.0)):
                rows.append(row)
            stopped = None
        elif kind == "start":
            rows, others, start, stopped = [], [], dict(event), None  # of several runs in a file, the last counts
        elif kind == "resume":
            back = _number(event.get("round")) or 0.0
            while rows and rows[-1].get("round", 0.0) > back:
                rows.pop()
            others = [other for other in others if other.round <= back or other.kind != "checkpoint"]
            others.append(Event("resume", back, _text(event.get("time", ""))))
            stopped = None
        elif kind == "end":
            stopped = _text(event.get("stopped", ""))
            if rows and (loss := _number(event.get("validation_loss"))) is not None:  # of a pass for the end alone
                rows[-1]["validation_loss"] = loss
        elif kind in ("checkpoint", "warning"):
            at = _number(event.get("round"))
            at = (rows[-1].get("round", 0.0) if rows else 0.0) if at is None else at
            seconds, size = (_number(event.get(key)) for key in ("seconds", "bytes"))
            text = _text(event.get("message", ""))
            others.append(
                Event(kind, at, text, math.nan if seconds is None else seconds, math.nan if size is None else size)
            )
    known = start.get("hyper")
    described = known if isinstance(known, Mapping) else {}
    settings = start.get("settings")
    facts |= {
        "method": _method((beside or {}).get("method") or start.get("method", "")),
        "settings": {**(beside or {}), **(settings if isinstance(settings, Mapping) else {})},
        "environment": start.get("environment", {}),
        "started": _text(start.get("time", "")),
    }
    return _run(rows, tuned_of(rows, described), events=others, stopped=stopped, **facts)


def from_folder(history: Path) -> Run:
    """A run from ``history.csv``, with the JSON files of an application beside it if they are there.

    Args:
        history: The CSV file.

    Returns:
        The run.

    Raises:
        ValueError: If it is not a table of numbers with a header.
    """
    try:
        with history.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [
                {key: float(value) for key, value in row.items() if key is not None and value not in ("", None)}
                for row in reader
            ]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{history} is not a history: {error}. Give an event log (*.jsonl) or a folder.") from error
    if not rows or not any("round" in row or "validation_loss" in row for row in rows):
        raise ValueError(
            f"{history} is not a history: it has no column round. Give an event log (*.jsonl) or a folder."
        )
    for index, row in enumerate(rows, 1):
        row.setdefault("round", float(index))
    settings, summary, environment = (
        read_json(history.with_name(f"{name}.json")) for name in ("settings", "summary", "environment")
    )
    settings = settings or {key: summary[key] for key in ("task", "method", "seed", "settings") if key in summary}
    return _run(
        rows,
        tuned_of(rows, {}),
        method=_method(settings.get("method", "")),
        settings=settings,
        environment=environment,
        stopped=_text(summary.get("stopped", "")),
        written=history.stat().st_mtime,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one if there is none that can be read: a page shows what there is."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return {}
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def tuned_of(rows: Sequence[Mapping[str, float]], described: Mapping[str, Any]) -> list[Tuned]:
    """The hyperparameters among the columns of rows.

    Args:
        rows: Of a history.
        described: What the log says about them, by name; without it, they are guessed from the names of the columns.

    Returns:
        Those that have a column.

    Example:
        >>> [one.columns for one in tuned_of([{"round": 1, "rate[0]": 0.1, "rate[1]": 0.2, "scale.rate[0]": 1}], {})]
        [('rate[0]', 'rate[1]')]
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    free = [name for name in columns if name not in KNOWN and not name.startswith(OTHERS)]
    groups: dict[str, list[str]] = {str(name): [] for name in described}
    for column in columns if described else free:
        stem = re.sub(r"(\[[\d, ]*\]|\.mean|\.min|\.max)$", "", column)
        owner = next((name for name in (column, stem) if name in groups), None if described else stem)
        if owner is not None:
            groups.setdefault(owner, []).append(column)
    found = []
    for name, own in groups.items():
        facts = described.get(name)
        facts = facts if isinstance(facts, Mapping) else {}
        low, high = (_number(facts.get(end)) for end in ("low", "high"))
        if own:
            found.append(
                Tuned(
                    name,
                    tuple(own),
                    math.nan if low is None else low,
                    math.nan if high is None else high,
                    facts.get("discrete") is True,
                )
            )
    return found


def flat(value: Any, prefix: str = "", depth: int = 0) -> dict[str, str]:
    """A nested mapping as names with dots and short texts.

    Returns:
        Texts by name.

    Example:
        >>> flat({"seed": 0, "settings": {"epochs": 3}})
        {'seed': '0', 'settings.epochs': '3'}
    """
    if not isinstance(value, Mapping):
        return {prefix: _text(value)} if prefix else {}
    if depth >= 8:
        return {prefix: "…"}
    found: dict[str, str] = {}
    for key, entry in value.items():
        found |= flat(entry, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    return found


def _run(rows: Sequence[Mapping[str, float]], hyper: Sequence[Tuned], **facts: Any) -> Run:
    points: dict[str, tuple[list[float], list[float]]] = {}
    for index, row in enumerate(rows, 1):
        at = row.get("round", float(index))
        for name, value in row.items():
            if name != "round":
                xs, ys = points.setdefault(name, ([], []))
                xs.append(at)
                ys.append(value)
    series = {}
    for name, (xs, ys) in points.items():
        order = np.argsort(x := np.array(xs, np.float64), kind="stable")
        series[name] = x[order], np.array(ys, np.float64)[order]
    for name in ("settings", "environment"):
        facts[name] = flat(facts.get(name, {}))
    facts["settings"] = {
        key.removeprefix("settings."): value for key, value in facts["settings"].items() if key != "method"
    }
    return Run(**{"name": "run", "series": series, "hyper": hyper, **facts})


def _number(value: Any) -> float | None:
    """A number of a log, where those that are not finite are texts."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value) if type(value) is str else None


def _method(value: Any) -> str:
    """A method without those of its settings that are None."""
    return re.sub(r"\(, ", "(", re.sub(r"(, |(?<=\())\w+=None\b", "", _text(value)))


def _text(value: Any) -> str:
    """A short text."""
    if isinstance(value, float):
        return f"{value:.10g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else text[:399] + "…"


def ago(run: Run, now: float | None = None) -> float:
    """How long ago the log grew, in seconds."""
    return max(0.0, (time.time() if now is None else now) - (run.written or 0.0))
