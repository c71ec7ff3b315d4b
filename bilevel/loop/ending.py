"""Signals that end a run between two rounds."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, final


@final
class Ending:
    """Inside the block, a signal asks the run to end after its round.

    SIGTERM and SIGUSR1 stand for ``"terminated"``, Ctrl-C for ``"interrupted"``; a second Ctrl-C interrupts at once.
    Handlers can be set in the main thread only. One of the user's own for Ctrl-C, and ignored signals, are left alone.

    Attributes:
        reason: Why to end, or None.
    """

    def __init__(self, active: bool) -> None:
        """Listen, or not."""
        self.reason: str | None = None
        self._active = active and threading.current_thread() is threading.main_thread()
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        """Set the handlers."""
        if self._active:
            for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
                number = getattr(signal, name, None)  # Windows has no SIGUSR1
                former = signal.SIG_IGN if number is None else signal.getsignal(number)
                foreign = name == "SIGINT" and former is not signal.default_int_handler
                if number is not None and former not in (signal.SIG_IGN, None) and not foreign:
                    self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the handlers."""
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.reason == "interrupted":
                raise KeyboardInterrupt
            self.reason = "interrupted"
        else:
            self.reason = self.reason or "terminated"
