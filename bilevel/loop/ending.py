"""Signals that end a run between two rounds."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, final

from bilevel.interrupts import hush


@final
class Ending:
    """Inside the block, a signal asks the run to end after its round.

    SIGTERM and SIGUSR1 stand for ``"terminated"``, Ctrl-C for ``"interrupted"``; a second Ctrl-C interrupts at once.
    Handlers can be set in the main thread only. One of the user's own is called when the block is left; ignored signals
    are left alone. A process that is forked inside the block is terminated as ever. It does not listen to Ctrl-C, which
    a terminal sends to all: the workers of a loader live on until the round is over. Workers that got the signal, too,
    are dead then. PyTorch would raise that anywhere; here it is left to the loader to say so when it is asked for a
    batch, and to :class:`bilevel.loop.feed.Feed` to start others.

    Attributes:
        reason: Why to end, or None.
    """

    def __init__(self, active: bool) -> None:
        """Listen, or not."""
        self.reason: str | None = None
        self._active = active and threading.current_thread() is threading.main_thread()
        self._former: dict[int, Any] = {}
        self._noted: dict[int, FrameType | None] = {}
        self._process = os.getpid()

    def __enter__(self) -> Ending:
        """Set the handlers."""
        if self._active:
            for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
                number = getattr(signal, name, None)  # Windows has no SIGUSR1
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the handlers, and call those of the user that wait."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        for number, frame in self._noted.items():
            handler = self._former[number]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            if number != signal.SIGINT:
                signal.signal(number, self._former[number])
                signal.raise_signal(number)
            return
        self._noted[number] = frame
        child = getattr(signal, "SIGCHLD", None)
        if child is not None and child not in self._former and callable(signal.getsignal(child)):
            self._former[child] = hush(child)
        if number == signal.SIGINT:
            if self.reason == "interrupted":
                raise KeyboardInterrupt
            self.reason = "interrupted"
        else:
            self.reason = self.reason or "terminated"
