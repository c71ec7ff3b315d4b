"""Tables and lists of a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

from bilevel.report.charts import SIDE
from bilevel.report.colors import Colors
from bilevel.report.numbers import Axis, duration, number, size
from bilevel.report.runs import Event, Run, ago
from bilevel.report.sections import seconds_per_round

ROWS = 24
"""A longer table is folded."""
LISTED = 60
"""Messages that are listed."""
QUIET = 600.0
"""A log that has not grown for this long, in seconds, and for twenty rounds, may belong to a run that is no more."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", kind: str = "") -> str:
    """A table of cells that are HTML already; the first of each row is its heading."""
    rows = list(rows)
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    header = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    whole = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or "table")}">'
        f'<table class="{kind}">{named}{header}<tbody>{body}</tbody></table></div>'
    )
    return folded(f"{caption or 'table'}, {len(rows)} rows", whole) if len(rows) > ROWS else whole


def folded(title: str, content: str) -> str:
    """Something that opens with a click."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def status(run: Run, now: float) -> str:
    """How a run is doing, as a coloured label."""
    if not run.running:
        kind = "bad" if run.stopped in ("diverged", "failed", "error") else "done"
        return f'<span class="status {kind}">{escape(f"ended: {run.stopped}" if run.stopped else "history")}</span>'
    quiet = ago(run, now)
    _, seconds = seconds_per_round(run)
    patience = max(QUIET, 20 * float(np.median(seconds))) if len(seconds) else QUIET
    kind, word = ("late", "silent, perhaps ended") if quiet > patience else ("live", "running")
    age = f'<span class="age" data-written="{run.written or 0:.0f}">{duration(round(quiet))}</span>'
    return f'<span class="status {kind}">{word}, last written {age} ago</span>'


def tiles(run: Run) -> str:
    """The figures that one wants to see first."""
    found = [("round", number(run.last_round, 6), "")]
    if run.best_round is not None:
        value = run.at("validation_loss", run.best_round)
        found.append(("best validation loss", number(value), f"at round {number(run.best_round, 6)}"))
        found.append(("last validation loss", number(run.at("validation_loss")), ""))
    elif "outer_loss" in run.series:
        found.append(("last outer loss", number(run.at("outer_loss")), ""))
    if "seconds" in run.series:
        _, seconds = seconds_per_round(run)
        per_round = f"{duration(float(np.median(seconds)))} per round" if len(seconds) else ""
        found.append(("time", duration(run.at("seconds")), per_round))
    if "memory" in run.series:
        _, values = run.get("memory")
        finite = values[np.isfinite(values)]
        if len(finite):
            found.append(("memory", size(float(finite[-1])), f"at most {size(float(finite.max()))}"))
    saved = [event for event in run.events if event.kind == "checkpoint"]
    if saved:
        found.append(("last checkpoint", f"round {number(saved[-1].round, 6)}", _written(saved)))
    warned = sum(event.kind == "warning" for event in run.events)
    if warned:
        found.append(("warnings", str(warned), "see what happened"))
    return '<dl class="tiles">{}</dl>'.format(
        "".join(
            f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
            for label, value, more in found
        )
    )


def values(run: Run) -> str:
    """Every hyperparameter at the start, at the best round and now."""
    best = run.best_round
    rows = []
    for tuned in run.hyper:
        for column in tuned.columns:
            _, y = run.get(column)
            if len(y):
                at_best = "" if best is None else number(run.at(column, best))
                reach = "" if math.isnan(tuned.low) else f"{number(tuned.low)} … {number(tuned.high)}"
                rows.append([escape(column), number(float(y[0])), at_best, number(float(y[-1])), reach])
    head = ["hyperparameter", "start", "best round", "now" if run.running else "end", "range"]
    return table(head, rows, caption="Values of the hyperparameters", kind="numbers") if rows else ""


def facts(entries: Mapping[str, str], caption: str) -> str:
    """Names and texts."""
    if not entries:
        return ""
    return table(
        ["", ""], ([escape(key), escape(value)] for key, value in entries.items()), caption=caption, kind="facts"
    )


def happened(runs: Sequence[Run]) -> str:
    """When checkpoints were written, and every resume and warning."""
    strips = "".join(_strip(run) for run in runs) if len(runs) == 1 else ""
    items: list[str] = []
    for run in runs:
        whose = f"{run.name}: " if len(runs) > 1 else ""
        told = [event for event in run.events if event.kind != "checkpoint"]
        repeats = Counter((event.kind, event.text) for event in told)
        for event in told:
            times = repeats.pop((event.kind, event.text), 0)
            if times:
                again = f" ({times} times)" if times > 1 else ""
                text = f"went on from a checkpoint {event.text}" if event.kind == "resume" else event.text
                where = f"{whose}round {number(event.round, 6)}"
                items.append(f'<li class="{event.kind}"><b>{escape(where)}</b> {escape(text.strip() + again)}</li>')
    left = f"<li>… and {len(items) - LISTED} more</li>" if len(items) > LISTED else ""
    listed = f'<ul class="events">{"".join(items[-LISTED:])}{left}</ul>' if items else ""
    return strips + listed


def _strip(run: Run) -> str:
    """Marks along the rounds, a row for each kind of event."""
    across = Axis(min(1.0, run.last_round), max(run.last_round, 2.0))
    text = ""
    for kind in ("checkpoint", "resume", "warning"):
        own = [event for event in run.events if event.kind == kind]
        if own:
            places = sorted({round(SIDE * min(max(across.place(event.round), 0.0), 1.0), -1) for event in own})
            d = "".join(f"M{place:.0f} 0V{SIDE}" for place in places)
            more = f", {_written(own)}" if kind == "checkpoint" else ""
            count = f"{len(own)} {kind}{'s' if len(own) > 1 else ''}{more}"
            text += (
                f'<div class="strip"><span>{escape(count)}</span><svg viewBox="0 0 {SIDE} {SIDE}" role="img" '
                f'aria-label="{escape(count)}" preserveAspectRatio="none"><path class="{kind}" d="{d}"/></svg></div>'
            )
    return f'<div class="strips">{text}</div>' if text else ""


def _written(saved: Sequence[Event]) -> str:
    """How large the last checkpoint was, and how long it took at most."""
    parts = [] if math.isnan(saved[-1].bytes) else [size(saved[-1].bytes)]
    stalls = [event.seconds for event in saved if math.isfinite(event.seconds)]
    return ", ".join(parts + ([f"at most {duration(max(stalls))}"] if stalls else []))


def overview(runs: Sequence[Run], hues: Sequence[str], colors: Colors, now: float) -> str:
    """One row for each run, the best first in bold."""
    losses = [math.nan if run.best_round is None else run.at("validation_loss", run.best_round) for run in runs]
    finite = [loss for loss in losses if math.isfinite(loss)]
    rows = []
    for index, (run, hue, loss) in enumerate(zip(runs, hues, losses, strict=True)):
        shown = "" if math.isnan(loss) else number(loss)
        _, seconds = seconds_per_round(run)
        memory = run.at("memory")
        dashed = " dashed" if index >= 8 else ""
        rows.append([
            f'<i class="{colors(hue)}{dashed}"></i>{escape(run.name)}',
            status(run, now),
            f"<strong>{shown}</strong>" if finite and loss == min(finite) else shown,
            "" if run.best_round is None else number(run.best_round, 6),
            "" if "validation_loss" not in run.series else number(run.at("validation_loss")),
            number(run.last_round, 6),
            "" if "seconds" not in run.series else duration(run.at("seconds")),
            duration(float(np.median(seconds))) if len(seconds) else "",
            "" if math.isnan(memory) else size(memory),
            str(sum(event.kind == "warning" for event in run.events)),
            escape(run.method),
        ])
    head = ["run", "state", "best validation loss", "at round", "last", "rounds", "time", "per round"]
    return table([*head, "memory", "warnings", "method"], rows, caption="Runs", kind="runs")


def differing(entries: Sequence[Mapping[str, str]], names: Sequence[str], caption: str) -> str:
    """What is not the same in all runs; a sentence if all is."""
    keys = dict.fromkeys(key for own in entries for key in own)
    rows = [
        [escape(key), *(escape(own.get(key, "—")) for own in entries)]
        for key in keys
        if len({own.get(key) for own in entries}) > 1
    ]
    if not rows:
        return f"<p>{escape(caption)}: the same in all runs.</p>" if keys else ""
    return table(["", *(escape(name) for name in names)], rows, caption=f"{caption} that differ", kind="numbers")


def best_values(runs: Sequence[Run]) -> str:
    """The hyperparameters of every run at its best round."""
    columns = dict.fromkeys(column for run in runs for tuned in run.hyper for column in tuned.columns)
    rows = []
    for column in columns:
        cells = [run.at(column, run.best_round) for run in runs]
        rows.append([escape(column), *("—" if math.isnan(cell) else number(cell) for cell in cells)])
    head = ["at the best round", *(escape(run.name) for run in runs)]
    return table(head, rows, caption="Best values of the hyperparameters", kind="numbers") if rows else ""
