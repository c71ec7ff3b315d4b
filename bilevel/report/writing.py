"""Write a page, once or again and again while a run goes on."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bilevel.report.find import read
from bilevel.report.page import page

SHARE = 5.0
"""A page that takes a second to make is made every five seconds at most."""


def write(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    title: str = "",
    watch: float | None = None,
    told: Callable[[Path], object] | None = None,
) -> Path:
    r"""Make one HTML page of one run, or of several side by side; ``python -m bilevel report`` does the same.

    The page needs nothing from the network and opens from a file. It shows the losses, the schedule of every
    hyperparameter, the signal to noise of the hypergradient, what the method reports, time and memory, checkpoints,
    resumes and warnings, settings and environment. A run that goes on can be looked at: its log is only read.

    Args:
        runs: Event logs, folders that have some, or ``history.csv``; one or several.
        out: Where to write the page; by default ``report.html`` beside the first run.
        title: Above it; the name of the run by default.
        watch: Write it again every so many seconds until all runs have ended; the page loads itself again as often.
        told: Called with the path after every writing.

    Returns:
        Where the page is.

    Raises:
        ValueError: If a log is empty or not a log, or ``watch`` is not positive.

    Example:
        >>> import json, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> log = [{"event": "start", "method": "stn"}, {"event": "round", "round": 1, "inner_loss": 0.5}]
        >>> _ = (folder / "run.pt.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
        >>> write(folder).name
        'report.html'
    """
    if watch is not None and not watch > 0:
        raise ValueError(f"watch must be a positive number of seconds, got {watch}.")
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    if not paths:
        raise ValueError("runs is empty: give at least one event log or folder.")
    first = Path(paths[0])
    path = Path(out) if out is not None else (first if first.is_dir() else first.parent) / "report.html"
    _check_place(path)
    while True:
        started = time.perf_counter()
        found = read(paths, empty=watch is not None)
        replace(path, page(found, title=title, refresh=watch))
        if told is not None:
            told(path)
        if watch is None or not any(run.running for run in found):
            return path
        time.sleep(max(watch, SHARE * (time.perf_counter() - started)))


def _check_place(path: Path) -> None:
    """Refuse to replace what is no page."""
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"out: {path} cannot be a file; give the name of a page in a folder that is there.")
    if path.exists():
        with path.open("rb") as file:
            if file.read(15).lower() not in (b"<!doctype html>", b""):
                raise ValueError(f"out: {path} is no page, and would be lost; choose another name.")


def replace(path: Path, content: str) -> None:
    """Write a file in one piece: who reads it sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
