"""Signals wait while a step is made, so that Ctrl-C finds it not begun or finished."""

from __future__ import annotations

# The functions of signal without wrappers, which make an enum of every answer: that takes longer than a small step.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, final

SIGNALS = sorted(map(int, signal.valid_signals()))
_current: Waiting | None = None


@final
class Waiting:
    """Signals that have a Python handler wait inside the block, and reach that handler at its end.

    They also do so at each :func:`safe_point` inside, so that a long step can be left early. A second signal of the
    same kind does not wait. Only the main thread receives signals: in another thread, and in a block inside a block,
    this does nothing.

    Example:
        >>> try:
        ...     with Waiting():
        ...         signal.raise_signal(signal.SIGINT)
        ...         print("finished")
        ... except KeyboardInterrupt:
        ...     print("interrupted")
        finished
        interrupted
    """

    def __init__(self) -> None:
        """Wait for nothing yet."""
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: dict[int, FrameType | None] = {}
        self._outermost = False
        self._process = os.getpid()

    def __enter__(self) -> Waiting:
        """Begin to wait."""
        global _current
        if _current is not None or threading.current_thread() is not threading.main_thread():
            return self
        try:
            self._outermost = True
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._handle)
            _current = self
        except BaseException:  # a signal came between, and its own handler raised
            self._give_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Hand what came meanwhile to its handlers."""
        global _current
        if not self._outermost:
            return
        try:
            try:
                self._give_back()
            finally:
                _current = None
        finally:
            _current = None  # again, since a signal may have raised at that line, and the next block has to wait, too
            self.deliver()

    def deliver(self) -> None:
        """Hand what came until now to its handlers, of which one may raise."""
        if self._noted:
            # In the order of Python itself: that the run is to end is known before that its workers are gone.
            number = min(self._noted)
            frame = self._noted.pop(number)
            try:
                if _signal.getsignal(number) is not _nothing:  # hushed since, by one of them
                    self._handlers[number](number, frame)
            finally:
                self.deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _current is self and number not in self._noted and os.getpid() == self._process:
            self._noted[number] = frame
        else:  # the second time, in a forked process, or if a signal kept the handlers from being given back
            self._noted.pop(number, None)
            self._handlers[number](number, frame)

    def _give_back(self) -> None:
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)


def hush(number: int) -> Any:
    """Let a signal do nothing from now on.

    Args:
        number: Of the signal.

    Returns:
        The handler that it had.
    """
    if _current is not None and number in _current._handlers:
        former, _current._handlers[number] = _current._handlers[number], _nothing
        return former
    return signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


def safe_point() -> None:
    """Where a step can be left without harm: between passes of the network."""
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.deliver()
