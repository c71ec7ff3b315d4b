"""How far a run is: a progress bar on a terminal and in a notebook, lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NoReturn, final

from tqdm.auto import tqdm
from typing_extensions import override

from bilevel.loop.solution import Round

HIDDEN = {"round", "seconds", "hypergradient_norm"}
MOST = 8


@final
class Progress(AbstractContextManager["Progress"]):
    """Shows the rounds of a run.

    A bar redraws itself, which fills a log file with thousands of its pictures. So where the standard error is no
    terminal, and there is no notebook, each full validation pass writes one line.
    """

    def __init__(self, total: int | None, shown: bool | None, *, done: int = 0) -> None:
        """Start.

        Args:
            total: Rounds, if that is known.
            shown: Whether to show anything; None unless the environment variable ``CI`` is set.
            done: Rounds that were made before.
        """
        on = not os.environ.get("CI") if shown is None else shown
        bar = on and (_in_a_notebook() or sys.stderr.isatty())
        self._total, self._lines = total, on and not bar
        self._bar: tqdm[NoReturn] = tqdm(total=total, initial=done, disable=not bar, unit="round", dynamic_ncols=True)

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def show(self, event: Round) -> None:
        """Show a round.

        Args:
            event: What happened.
        """
        self._bar.update()
        self._bar.set_postfix_str(summary(event.row), refresh=False)
        if event.validation_loss is not None:
            self.line(event.index, event.row)

    def say(self, text: str) -> None:
        """Write a sentence about the run as a whole.

        Args:
            text: The sentence.
        """
        if self._lines or not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def line(self, index: int, row: Mapping[str, float]) -> None:
        """Write a line, where there is no bar.

        Args:
            index: The round.
            row: Of the history.
        """
        if self._lines:
            total = "" if self._total is None else f"/{self._total}"
            print(f"round {index}{total}, {row['seconds']:.1f} s: {summary(row)}", file=sys.stderr)


def summary(row: Mapping[str, float]) -> str:
    """The losses and the first hyperparameters, in one line."""
    prefixes = ("scale.", "signal.", "method.")
    shown = [(n, v) for n, v in row.items() if n not in HIDDEN and not n.startswith(prefixes)]
    losses = [pair for pair in shown if pair[0].endswith("_loss")]
    rest = [pair for pair in shown if not pair[0].endswith("_loss")]
    more = len(losses) + len(rest) - MOST
    text = ", ".join(f"{name} {value:.4g}" for name, value in [*losses, *rest][:MOST])
    return f"{text}, and {more} more" if more > 0 else text


def _in_a_notebook() -> bool:
    return any("notebook" in kind.__module__ for kind in tqdm.__mro__)
