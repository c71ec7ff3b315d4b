"""Keeps a second run away from the files of a first one, also after a crash."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import final

from bilevel.checkpoint.errors import CheckpointError

try:
    import fcntl
except ImportError:  # there are no such locks on Windows
    fcntl = None  # type: ignore[assignment]

_held: dict[str, int] = {}
"""The files locked by this process, with its id: a lock of the system would let the same process in twice."""
_one_at_a_time = threading.Lock()
LONGEST = 64
"""Bytes of a lock file, which holds a process id."""


@final
class Lock:
    """A lock that the operating system takes back when the process ends, in whichever way.

    Attributes:
        effective: Whether it keeps other processes away; some file systems know no locks.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock of ``path``, with a file beside it.

        Raises:
            CheckpointError: If another run has it.
            OSError: If the file cannot be made.
        """  # noqa: DOC502
        self._key = os.path.realpath(path)
        self._path = path
        self._descriptor: int | None = None
        self._name = path.with_name(f"{path.name}.lock")
        self.effective = True
        with _one_at_a_time:
            if _held.get(self._key) == os.getpid():
                raise CheckpointError(
                    f"checkpoint: {path} is in use by another run of this process; choose another name."
                )
            while fcntl is not None and self._descriptor is None:
                descriptor = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                try:
                    if self._take(descriptor):
                        self._descriptor = descriptor
                finally:
                    if self._descriptor is None:
                        os.close(descriptor)
            _held[self._key] = os.getpid()

    def _take(self, descriptor: int) -> bool:
        """Lock the file; False if its owner has removed it in the meantime."""
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > LONGEST:
            raise CheckpointError(f"checkpoint: {self._name} is no lock of bilevel; remove it, or choose another name.")
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                owner = os.read(descriptor, 20).decode(errors="replace").strip()
                raise CheckpointError(
                    f"checkpoint: {self._path} is in use by another run (process {owner or 'unknown'}); wait for it, "
                    "or choose another name."
                ) from None
            self.effective = False
        try:
            current = os.path.samestat(os.fstat(descriptor), os.stat(self._name))
        except FileNotFoundError:
            return False
        if current:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return current

    def release(self) -> None:
        """Let others in."""
        _held.pop(self._key, None)
        if self._descriptor is not None:
            with suppress(OSError):
                self._name.unlink()
            os.close(self._descriptor)
            self._descriptor = None
