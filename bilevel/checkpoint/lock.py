"""Keeps a second run away from the files of a first one, also after a crash."""

from __future__ import annotations

import errno
import os
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


@final
class Lock:
    """A lock that the operating system takes back when the process ends, in whichever way."""

    def __init__(self, path: Path) -> None:
        """Take the lock of ``path``, with a file beside it.

        Raises:
            CheckpointError: If another run has it.
            OSError: If the file cannot be made.
        """  # noqa: DOC502
        self._key = os.path.realpath(path)
        self._descriptor: int | None = None
        self._name = name = path.with_name(f"{path.name}.lock")
        if _held.get(self._key) == os.getpid():
            raise CheckpointError(f"checkpoint: {path} is in use by another run of this process; choose another name.")
        if fcntl is not None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            while self._descriptor is None:
                descriptor = os.open(name, flags, 0o666)
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in (errno.EACCES, errno.EAGAIN):
                        owner = os.read(descriptor, 20).decode(errors="replace").strip()
                        os.close(descriptor)
                        raise CheckpointError(
                            f"checkpoint: {path} is in use by another run (process {owner or 'unknown'}); wait for it, "
                            "or choose another name."
                        ) from None
                    # Otherwise the file system knows no locks.
                try:
                    current = os.path.samestat(os.fstat(descriptor), os.stat(name))
                except FileNotFoundError:
                    current = False
                if current:
                    self._descriptor = descriptor
                else:  # its owner has removed it in the meantime
                    os.close(descriptor)
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _held[self._key] = os.getpid()

    def release(self) -> None:
        """Let others in."""
        _held.pop(self._key, None)
        if self._descriptor is not None:
            with suppress(OSError):
                self._name.unlink()
            os.close(self._descriptor)
            self._descriptor = None
