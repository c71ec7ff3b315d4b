"""What the reports share: CSV files and text tables."""

from __future__ import annotations

import base64
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows; the columns are those of all rows, missing entries are empty."""
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""A table with aligned columns, readable as text and as Markdown.

    Returns:
        The lines.

    Example:
        >>> print(markdown(["task", "stn"], [["mnist", "0.04"]]))
        | task  | stn  |
        |-------|------|
        | mnist | 0.04 |
    """
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


STYLE = """\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 0 auto; padding: 1rem; }
h2 { font-size: 1rem; font-weight: 600; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8886; padding: 0.3rem 0.8rem 0.3rem 0; text-align: left; white-space: nowrap; }
img { max-width: 100%; background: white; }
p { font-size: 0.9rem; overflow-wrap: anywhere; }"""


@dataclass(frozen=True)
class Sheet:
    """A table with a title.

    Attributes:
        title: What the numbers are.
        head: The columns.
        rows: The cells; those in ``**`` are bold.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """The title, and the table as text and Markdown."""
        return f"{self.title}\n\n{markdown(self.head, self.rows)}"

    def html(self) -> str:
        r"""The same in HTML.

        Returns:
            A heading and a table that scrolls where it is too wide.

        Example:
            >>> print(Sheet("Loss", ["task", "a<b"], [["mnist", "**0.04** (0.05)"]]).html())
            <h2>Loss</h2>
            <div class="wide"><table>
            <tr><th>task</th><th>a&lt;b</th></tr>
            <tr><td>mnist</td><td><b>0.04</b> (0.05)</td></tr>
            </table></div>
        """
        rows = [_html_row("th", self.head), *(_html_row("td", row) for row in self.rows)]
        table = "\n".join(['<div class="wide"><table>', *rows, "</table></div>"])
        return f"<h2>{escape(self.title)}</h2>\n{table}"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    """A row; every second piece between ``**`` is bold."""
    parts = []
    for cell in cells:
        pieces = escape(cell).split("**")
        text = "".join(f"<b>{piece}</b>" if index % 2 else piece for index, piece in enumerate(pieces))
        parts.append(f"<{tag}>{text}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"


def page(title: str, sheets: Sequence[Sheet], notes: Sequence[str], figure: Path | None = None) -> str:
    """One HTML file that needs no other, with tables, notes and a picture.

    Returns:
        Its text.
    """
    parts = [sheet.html() for sheet in sheets]
    if figure is not None:
        data = base64.b64encode(figure.read_bytes()).decode()
        parts.append(f'<p><img src="data:image/png;base64,{data}" alt="best validation loss so far"></p>')
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    head = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{STYLE}\n</style></head>'
    )
    return "\n".join([head, f"<body><h1>{escape(title)}</h1>", *parts, "</body></html>\n"])


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the sample standard deviation, which is NaN for one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def shown(values: Sequence[float], digits: int) -> str:
    """A mean, with its deviation if there is one.

    Returns:
        Such as ``0.040 ± 0.001``.
    """
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(deviation) else f" ± {deviation:.{digits}f}")
