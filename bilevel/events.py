"""The event log of a run: a file of JSON lines that only grows, written while the run goes on and read by anyone.

Every line is one object, and ``event`` says what it is:

* ``start``: a run begins. ``version``, ``time``, ``method``, ``settings``, ``environment``, and ``hyper`` with the
  bounds and the shape of every hyperparameter.
* ``round``: one row of the history with all its columns, and ``memory`` in bytes.
* ``resume``: the run goes on after ``round``, from a checkpoint that was written when the log had ``bytes`` bytes. What
  is between that place and this line is void, also if it is a run of its own.
* ``checkpoint``: the run was kept, after ``round``, in ``bytes`` bytes; training waited for ``seconds``.
* ``warning``: something went wrong, and the run went on; ``message`` says what.
* ``end``: the run is over, after ``round``; ``stopped`` says why. ``validation_loss`` is there if the last pass was
  made for the end alone.

Numbers that are not finite are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch

VERSION = 1
RESERVED = ("event", "memory")
"""Keys of a ``round`` that are no columns of the history."""

NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass
class Record:
    """What a log holds, as far as it is written.

    Attributes:
        start: The ``start`` event; empty if there is none.
        rows: The rows of the history.
        memory: In bytes, one number per row; NaN where it is not known.
        events: All other events in order.
        end: The ``end`` event, if the run is over.
        skipped: Lines that are no events, such as one that a crash cut off.

    Example:
        >>> record = Record({"settings": {"seed": 0}}, [{"round": 1.0}], [math.nan], [], None, 0)
        >>> record.settings, len(record.rows), record.end is None
        ({'seed': 0}, 1, True)
    """

    start: dict[str, Any]
    rows: list[dict[str, float]]
    memory: list[float]
    events: list[dict[str, Any]]
    end: dict[str, Any] | None
    skipped: int

    @property
    def settings(self) -> dict[str, Any]:
        """Of the run, as they were when it began."""
        settings = self.start.get("settings", {})
        return settings if isinstance(settings, dict) else {}


@final
class Log:
    """Writes a log. What cannot be written waits for the next :meth:`flush`; nothing is written twice.

    Attributes:
        path: Of the file.
        size: Bytes in the file, all of them written by a log.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it; what is there stays.

        Raises:
            ValueError: If the file is something else.
            OSError: If it cannot be opened.
        """  # noqa: DOC502
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"log: {path} is not a file; choose another name.")
        self._flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.fdopen(os.open(path, self._flags, 0o666), "r+b", 0)
        self._digest = hashlib.sha256()
        self._waiting = b""
        self.size = 0
        ended = True
        while chunk := self._file.read(1 << 20):
            if self.size == 0 and not chunk.startswith(b'{"event": "start"'):
                self._file.close()
                raise ValueError(f"log: {path} is not an event log of bilevel; choose another name.")
            self._digest.update(chunk)
            self.size += len(chunk)
            ended = chunk.endswith(b"\n")
        if not ended:  # a crash cut the last line off
            self._waiting = b"\n"

    def write(self, event: str, content: Mapping[str, Any]) -> None:
        """Add an event; it reaches the file with the next :meth:`flush`.

        Args:
            event: Its kind.
            content: Plain types.
        """
        line = json.dumps({"event": event, **_plain(content)}, ensure_ascii=False, allow_nan=False)
        self._waiting += line.encode("utf-8", "replace") + b"\n"

    def flush(self) -> None:
        """Hand everything to the operating system, in one piece.

        Raises:
            OSError: If that fails; it is tried again at the next call.
        """  # noqa: DOC502
        if not self._waiting:
            return
        self._file.seek(self.size)
        left = memoryview(self._waiting)
        while left:
            left = left[self._file.write(left) :]
        self._digest.update(self._waiting)
        self.size += len(self._waiting)
        self._waiting = b""

    def position(self) -> dict[str, Any]:
        """What :func:`prefix` needs to find the present content again.

        Returns:
            The number of bytes and their SHA-256.
        """
        return {"bytes": self.size, "sha256": self._digest.copy().hexdigest()}

    def restore(self) -> bool:
        """Put the file back if somebody has removed it, or put another one at its name, which gets ``.damaged``.

        What was written is still there as long as this log is open.

        Returns:
            Whether that was necessary.

        Raises:
            OSError: If the file cannot be made.
        """  # noqa: DOC502
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self._file.fileno())):
                return False
            os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = os.fdopen(os.open(self.path, self._flags | os.O_EXCL, 0o666), "r+b", 0)
        try:
            self._file.seek(0)
            while chunk := self._file.read(1 << 20):
                new.write(chunk)
        except BaseException:
            new.close()
            self.path.unlink()
            raise
        self._file.close()
        self._file = new
        return True

    def sync(self) -> None:
        """Wait until the file is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def prefix(path: Path, position: Mapping[str, Any]) -> Record:
    """Read a log as it was at a position.

    Args:
        path: Of the log.
        position: Of :meth:`Log.position`.

    Returns:
        What was in it.

    Raises:
        ValueError: If the file is missing, shorter, or another one.
    """
    where = f"the log {path}, which holds the history of the run,"
    remedy = "put it back, or give its place as log=."
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < position["bytes"]:
                raise ValueError(f"{where} is shorter than it was; {remedy}")
            content = file.read(position["bytes"])
    except OSError as error:
        raise ValueError(f"{where} cannot be read ({error.strerror}); {remedy}") from error
    if hashlib.sha256(content).hexdigest() != position["sha256"]:
        raise ValueError(f"{where} is not what it was, or that of another run; {remedy}")
    return _record(content)


def read(path: str | Path) -> Record:
    """Read a log, also while it is written. Of several runs in one file, the last one counts.

    Args:
        path: Of the log.

    Returns:
        What is in it. A line that is cut off or no event is left out, and so is what a ``resume`` made void.

    Raises:
        ValueError: If the path is that of a folder, a pipe or a device.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> log = Log(path)
        >>> log.write("start", {"settings": {"seed": 0}})
        >>> log.write("round", {"round": 1, "outer_loss": math.nan, "memory": 1000})
        >>> log.flush()
        >>> log.close()
        >>> record = read(path)
        >>> record.settings, record.rows, record.memory
        ({'seed': 0}, [{'round': 1, 'outer_loss': nan}], [1000])
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is not a file: give an event log (*.jsonl).")
    return _record(path.read_bytes())


def environment(device: torch.device) -> dict[str, Any]:
    """Where a run is made.

    Returns:
        Versions, platform, device and number of threads.
    """
    bilevel = sys.modules["bilevel"]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bilevel": getattr(bilevel, "__version__", ""),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
    }


def now() -> str:
    """The time in ISO format, with its zone."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def memory(device: torch.device) -> int | None:
    """Bytes that are in use: on the device if it keeps count, otherwise by this process.

    Returns:
        None where it is not known.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def counting(lines: Iterable[bytes]) -> Iterator[bytes]:
    r"""The lines of a log that count: not those between the checkpoint that a run went on from and its ``resume``.

    Args:
        lines: All of them, with their ends.

    Yields:
        Those that count.

    Example:
        >>> lines = [b'{"event": "start"}\n', b'{"event": "start"}\n', b'{"event": "resume", "bytes": 19}\n']
        >>> list(counting(lines)) == [lines[0], lines[2]]
        True
    """
    Chain = tuple[bytes, Any]  # a line, and what counts before it
    chain: Chain | None = None
    at, ends = 0, {0: chain}
    for line in lines:
        if line.startswith(b'{"event": "resume"'):
            try:
                place = json.loads(line).get("bytes")
            except ValueError:
                place = None
            chain = ends[place] if isinstance(place, int) and place in ends else chain
        at += len(line)
        chain = ends[at] = (line, chain)
    found = []
    while chain is not None:
        line, chain = chain
        found.append(line)
    yield from reversed(found)


def _record(content: bytes) -> Record:
    record = Record({}, [], [], [], None, 0)
    for line in counting(content.splitlines(keepends=True)):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError, RecursionError):
            record.skipped += 1
            continue
        if kind == "start":
            record = Record(event, [], [], [], None, record.skipped)
        elif kind == "round":
            record.memory.append(_number(event.get("memory")))
            record.rows.append({name: _number(value) for name, value in event.items() if name not in RESERVED})
        else:
            record.events.append(event)
            record.end = event if kind == "end" else None if kind == "resume" else record.end
            if kind == "resume":
                kept = [_number(row.get("round")) <= _number(event.get("round")) for row in record.rows]
                record.rows = [row for row, keep in zip(record.rows, kept, strict=True) if keep]
                record.memory = [value for value, keep in zip(record.memory, kept, strict=True) if keep]
    return record


def _number(value: Any) -> float:
    if isinstance(value, str):
        return NAMES.get(value, math.nan)
    return value if isinstance(value, int | float) else math.nan


def _plain(value: Any) -> Any:
    """The same in types of JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
