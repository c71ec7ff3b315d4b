"""What happened during a run: columns of numbers."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bilevel.hyper import suggest

LEADING = ("round", "seconds", "inner_loss", "outer_loss", "validation_loss", "hypergradient_norm")


class History:
    """Columns of numbers, one row per outer step (and one per round of the warm-up).

    Missing entries are NaN: the validation loss in rounds without a full pass, the outer loss in the warm-up.

    Example:
        >>> history = History()
        >>> history.append({"round": 1, "outer_loss": 0.5})
        >>> history.append({"round": 2, "outer_loss": 0.25, "validation_loss": 0.3})
        >>> history["validation_loss"]
        array([nan, 0.3])
    """

    def __init__(self) -> None:
        """Start without rows."""
        self.rows: list[dict[str, float]] = []

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row."""
        self.rows.append(dict(row))

    @property
    def columns(self) -> list[str]:
        """The names of the columns, losses first, then in the order in which they appeared."""
        there = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in LEADING if name in there] + [name for name in there if name not in LEADING]

    def __len__(self) -> int:
        """Count the rows.

        Returns:
            Their number.
        """
        return len(self.rows)

    def __getitem__(self, column: str) -> npt.NDArray[np.float64]:
        """One column.

        Returns:
            An array with one number per row.

        Raises:
            KeyError: If there is no such column.
        """
        if not any(column in row for row in self.rows):
            raise KeyError(f"no column {column!r}: {suggest(column, self.columns)}")
        return np.array([row.get(column, math.nan) for row in self.rows], dtype=np.float64)

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file with a header; missing entries are empty."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def to_pandas(self) -> Any:
        """The history as a frame.

        Returns:
            A ``pandas.DataFrame``.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("History.to_pandas needs pandas: pip install pandas.") from error
        return pd.DataFrame({name: self[name] for name in self.columns})
