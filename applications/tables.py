"""What the reports share: CSV files and text tables."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
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
