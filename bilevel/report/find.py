"""Where a run is: an event log, a history, or a folder that has some."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bilevel.events import counting
from bilevel.report.runs import Run, from_folder, from_log, read_json

GENERIC = ("checkpoint", "run", "log", "events", "history")
"""Names of files that say nothing about a run: its folder does."""
BESIDE = (".html", ".lock", ".part", ".png", ".svg", ".pdf")
"""What lies beside logs and is none."""
DEEPEST = 3
"""How many folders down logs are looked for."""


def read(paths: Sequence[str | Path], *, empty: bool = False) -> list[Run]:
    """Read runs.

    Args:
        paths: Event logs, histories (``.csv``), or folders that have some.
        empty: Whether a log may have no line yet.

    Returns:
        The runs, with names that differ.

    Example:
        >>> read(["nowhere.jsonl"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: nowhere.jsonl does not exist: give an event log ...
    """
    given = [Path(path) for path in paths]
    if len(given) > 1:  # as a shell puts them in the place of runs/*
        given = [path for path in given if path.suffix not in BESIDE] or given
    files = list(dict.fromkeys(file for path in given for file in files_of(path)))
    runs = [read_file(file, empty=empty) for file in files]
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names_of(files), strict=True)]


def files_of(path: Path) -> list[Path]:
    """The logs and histories that a path stands for.

    Returns:
        At least one.

    Raises:
        FileNotFoundError: If there is none.
    """
    if path.is_dir():
        for depth in range(DEEPEST + 1):
            inside = path.glob("/".join(["*"] * depth)) if depth else [path]
            folders = sorted(folder for folder in inside if folder.is_dir())
            if found := [file for folder in folders for file in _of_folder(folder)]:
                return found
        raise FileNotFoundError(f"{path} has no run: neither an event log (*.jsonl) nor a history.csv.")
    newest = re.sub(r"\.\d+$", "", path.name)  # NAME.1 is the checkpoint before
    beside = path.with_name(newest + ".jsonl")  # the checkpoint was given instead of its log
    if (newest != path.name or path.suffix in (".pt", ".pth", ".ckpt")) and beside.is_file():
        return [beside]
    if not path.exists():
        raise FileNotFoundError(
            f'{path} does not exist: give an event log (solve(checkpoint="run.pt") writes run.pt.jsonl) or its folder.'
        )
    return [path]


def _of_folder(folder: Path) -> list[Path]:
    logs = sorted(file for file in folder.glob("*.jsonl") if file.is_file() and _begins_like_a_log(file))
    history = folder / "history.csv"
    return logs or ([history] if history.is_file() else [])


def _begins_like_a_log(path: Path) -> bool:
    """Whether the first line is that of an event log; a folder may have other files of the kind."""
    with path.open("rb") as file:
        return b'"event"' in file.readline(2**16)


def read_file(path: Path, *, empty: bool = False) -> Run:
    """Read one run.

    Returns:
        The run; without a name of its own.

    Raises:
        ValueError: If it is not an event log, or empty.
    """
    if not path.is_file():  # such as a pipe, which would be waited for
        raise ValueError(f"{path} is not a file: give an event log (*.jsonl) or a folder.")
    if path.suffix == ".csv":
        return from_folder(path)
    with path.open("rb") as file:
        first = file.read(1)
    if not first and not empty:
        raise ValueError(f"{path} is empty: the run has written nothing yet. Wait, or watch it with --watch 5.")
    written = path.stat().st_mtime
    beside = read_json(path.with_name("settings.json")) if path.name.startswith("checkpoint") else {}
    return from_log(lines_of(path), beside, written=written)


def lines_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """The events of a log; a last line that is still being written is left out."""
    good = bad = 0
    with path.open("rb") as file:
        for line in counting(file):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict) and "event" in event:
                good += 1
                yield event
            elif line.endswith(b"\n"):
                bad += 1
            if bad > good:
                raise ValueError(f"{path} is not an event log: its lines are not JSON objects with an event.")
    if bad:
        yield {"event": "warning", "message": f"{bad} lines of the log could not be read."}


def names_of(files: Sequence[Path]) -> list[str]:
    """Short names that differ.

    Returns:
        One for each.

    Example:
        >>> names_of([Path("runs/a/checkpoint.pt.jsonl"), Path("runs/b/checkpoint.pt.jsonl")])
        ['a', 'b']
        >>> names_of([Path("runs/decay.pt.jsonl")])
        ['decay']
    """
    parts = []
    for file in files:
        stem = file.name
        while (bare := Path(stem)).suffix in (".jsonl", ".pt", ".pth", ".ckpt", ".csv", ".json"):
            stem = bare.stem
        folders = Path(os.path.abspath(file)).parts[1:-1]
        parts.append((*folders, stem))
    lasts = {own[-1] for own in parts}
    if len(lasts) == 1 and (len(parts) > 1 or parts[0][-1] in GENERIC):
        parts = [own[:-1] or own for own in parts]
    levels = zip(*(own[:-1] for own in parts), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    names: list[str] = []
    for own in parts:
        name = "/".join(own[shared:])
        taken = names.count(name) + sum(other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({taken + 1})" if taken else name)
    return names
