"""One page in one file: no script, font or picture comes from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bilevel.report import tables
from bilevel.report.colors import DARK, INK, LIGHT, Colors, of_runs
from bilevel.report.runs import Run
from bilevel.report.sections import Section, compared, sections_of

FINEST, COARSEST = 360, 40
"""Steps of the horizontal axis that can be told apart, in a page with few lines and in one with many."""
POINTS = 100_000
"""Points of all lines together; about ten bytes each."""


def page(runs: Sequence[Run], *, title: str = "", refresh: float | None = None, now: float | None = None) -> str:
    """Make the page of one run, or of several that are compared.

    Args:
        runs: At least one.
        title: Above it; the name of the run by default.
        refresh: The page loads itself again after so many seconds.
        now: Seconds of the clock, to say how long ago a log grew.

    Returns:
        HTML.

    Raises:
        ValueError: If there is no run.
    """
    if not runs:
        raise ValueError("a page needs at least one run.")
    now = time.time() if now is None else now
    colors = Colors()
    single = runs[0] if len(runs) == 1 else None
    title = title or (single.name if single else f"{len(runs)} runs compared")
    parts = _single(single, colors, now) if single else _several(runs, colors, now)
    live = refresh if any(run.running for run in runs) else None
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in parts[1])
    body = "".join(
        f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{content}</section>' for name, content in parts[1]
    )
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text(encoding="utf-8")
    style = (folder / "page.css").read_text(encoding="utf-8")
    style += colors.css(LIGHT) + f"@media (prefers-color-scheme:dark){{{colors.css(DARK)}}}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    again = f'<noscript><meta http-equiv="refresh" content="{live:g}"></noscript>' if live else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{again}<title>{escape(title)}</title>'
        f"<style>{style}</style></head>"
        f"<body{f' data-refresh={live:g}' if live else ''}><header><h1>{escape(title)}</h1>{parts[0]}"
        f"<nav>{links}</nav></header><main>{body}</main>"
        f"<footer>Made by bilevel at {made}.</footer><script>{script}</script></body></html>\n"
    )


def _single(run: Run, colors: Colors, now: float) -> tuple[str, list[tuple[str, str]]]:
    words = [word for word in (run.method, f"started {run.started}" if run.started else "") if word]
    head = f'<p class="line">{tables.status(run, now)}<span>{escape(" · ".join(words))}</span></p>{tables.tiles(run)}'
    parts = _drawn(sections_of(run), colors)
    if not parts:
        parts = [("Rounds", "<p>No round has been recorded yet.</p>")]
    parts += [
        ("What happened", tables.happened([run])),
        ("Values", tables.values(run)),
        ("Settings", tables.facts(run.settings, "Settings")),
        ("Environment", tables.facts(run.environment, "Environment")),
    ]
    return head, [(name, content) for name, content in parts if content]


def _several(runs: Sequence[Run], colors: Colors, now: float) -> tuple[str, list[tuple[str, str]]]:
    hues = of_runs([run.method for run in runs])
    names = [run.name for run in runs]
    methods = [{"method": run.method} if run.method else {} for run in runs]
    settings = [own | dict(run.settings) for own, run in zip(methods, runs, strict=True)]
    parts = [
        ("Runs", tables.overview(runs, hues, colors, now)),
        ("Settings", tables.differing(settings, names, "Settings")),
        *_drawn(compared(runs, hues), colors),
        ("Values", tables.best_values(runs)),
        ("What happened", tables.happened(runs)),
        ("Environment", tables.differing([run.environment for run in runs], names, "Environments")),
    ]
    running = sum(run.running for run in runs)
    going = f"{running} of them running" if running else "all of them ended"
    return f'<p class="line"><span>{going}</span></p>', [(name, content) for name, content in parts if content]


def _drawn(sections: Sequence[Section], colors: Colors) -> list[tuple[str, str]]:
    """The charts as HTML, with as many points as fit into a page."""
    colors(INK)
    lines = sum(len(chart.lines) + len(chart.bands) for section in sections for chart in section.charts)
    buckets = max(COARSEST, min(FINEST, POINTS // (3 * max(lines, 1))))
    parts = []
    for section in sections:
        figures = [chart.html(colors, buckets) for chart in section.charts]
        text = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
        text += f'<div class="charts">{"".join(figures[: section.shown])}</div>'
        if figures[section.shown :]:
            rest = f'<div class="charts">{"".join(figures[section.shown :])}</div>'
            text += tables.folded(f"{len(figures) - section.shown} more", rest)
        parts.append((section.title, text))
    return parts


def _anchor(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())
