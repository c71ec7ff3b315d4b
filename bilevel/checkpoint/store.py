"""The last few checkpoints of a run, written while it goes on."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from bilevel.checkpoint.errors import CheckpointError
from bilevel.checkpoint.file import Part, blank, check_own, create, load, seal, sync_folder, take, write
from bilevel.checkpoint.lock import Lock

LARGE = 1 << 25
"""Bytes from which on the file of a former checkpoint is written over instead of making a new one."""


@final
class Store:
    """``NAME`` is the newest checkpoint, ``NAME.1`` the one before, and so on.

    Training waits while the tensors are handed to the operating system. Checksum, disk and names follow in a thread.
    Large files are used in turns: the oldest is written over, and there is one more of them than are kept.

    Attributes:
        path: Of the newest one.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        """Take the place, and see whether one can write there.

        Args:
            path: Of the newest one.
            keep: How many to keep.

        Raises:
            CheckpointError: If another run uses it, or if it cannot be written.
        """  # noqa: DOC501
        self.path = path
        self._keep = keep
        self._damaged = False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._spare: Part | None = None
        if os.path.isdir(path):
            raise CheckpointError(f"checkpoint: {path} is a folder; give the name of a file.")
        if os.path.islink(path):
            raise CheckpointError(f"checkpoint: {path} is a symbolic link; give the name of the file itself.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(path)
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            # What a killed run left behind; nobody else writes here now.
            for left in path.parent.iterdir():
                if re.fullmatch(re.escape(path.name) + r"\.[0-9a-f]{16}\.part", left.name):
                    left.unlink()
            create(path).drop()
        except OSError as error:
            self._lock.release()
            raise unwritable(path, error) from error

    @property
    def locked(self) -> bool:
        """Whether other processes are kept away; some file systems know no locks."""
        return self._lock.effective

    @property
    def busy(self) -> bool:
        """Whether the last checkpoint is still on its way to the disk."""
        return self._thread is not None and self._thread.is_alive()

    def generation(self, number: int) -> Path:
        """The name of a checkpoint.

        Args:
            number: 0 for the newest one.

        Returns:
            Its path.
        """
        return generation(self.path, number)

    def load(self) -> tuple[dict[str, Any] | None, str | None]:
        """Read the newest one that is good.

        Returns:
            The state, or None if there is none; and what was wrong with those that are newer, or None.

        Raises:
            CheckpointError: If none of those that are there is good.
        """  # noqa: DOC502
        state, problem, self._damaged = newest(self.path, self._keep)
        return state, problem

    def anew(self) -> None:
        """See that nothing but a checkpoint will be replaced.

        Raises:
            CheckpointError: If there is another file.
        """  # noqa: DOC502
        for number in range(self._keep):
            check_own(self.generation(number))

    def save(
        self, state: dict[str, Any], before: Callable[[], None] | None = None, *, last: bool = True
    ) -> tuple[float, int]:
        """Write a state; returns as soon as the state may change again.

        Args:
            state: Live tensors and plain types.
            before: What must be on the disk before, called in the thread.
            last: Whether no other one is expected; otherwise a file for it is prepared.

        Returns:
            The seconds that it took, and the bytes of the file.

        Raises:
            OSError: If that fails, or if the last one failed.
        """  # noqa: DOC502
        start = time.perf_counter()
        self.wait()
        spare, self._spare = self._spare, None
        part = write(self.path, state, spare)
        self._thread = threading.Thread(target=self._finish, args=(part, before, last), name="bilevel checkpoint")
        self._thread.start()
        return time.perf_counter() - start, part.size

    def wait(self) -> None:
        """Wait for the thread.

        Raises:
            Exception: What went wrong in it; the next call does not raise it again.
        """  # noqa: DOC502
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the thread, and let others in."""
        try:
            self.wait()
        finally:
            if self._spare is not None:
                self._spare.drop()
            self._lock.release()

    def _finish(self, part: Part, before: Callable[[], None] | None, last: bool) -> None:
        try:
            if before is not None:
                before()
            seal(part)
            self._rotate()
            os.replace(part.path, self.path)
            sync_folder(self.path.parent)
        except Exception as error:
            part.drop()
            self._error = error
            return
        if self._spare is None and part.size >= LARGE and not last:
            with suppress(OSError):
                self._spare = blank(self.path, part.size)

    def _rotate(self) -> None:
        """Make the present one the one before; there is no moment without a good file."""
        if self._damaged:
            os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged"))
            self._damaged = False
        if self._keep == 1 or not self.path.exists():
            return
        oldest = self.generation(self._keep - 1)
        if self._spare is None and os.path.lexists(oldest) and oldest.lstat().st_size >= LARGE:
            self._spare = take(oldest)
        for number in range(self._keep - 1, 1, -1):
            with suppress(FileNotFoundError):
                os.replace(self.generation(number - 1), self.generation(number))
        other = create(self.path)
        other.drop()
        try:
            os.link(self.path, other.path)
        except OSError:  # the file system knows no links; load finds the one before if the run ends here
            os.replace(self.path, self.generation(1))
        else:
            os.replace(other.path, self.generation(1))


def generation(path: Path, number: int) -> Path:
    """The name of a checkpoint: ``path`` for the newest one, number 0."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


def newest(path: Path, keep: int = 2) -> tuple[dict[str, Any] | None, str | None, bool]:
    """Read the newest checkpoint that is good.

    Args:
        path: Of the newest one.
        keep: How many there may be.

    Returns:
        The state, or None if there is none; what was wrong with those that are newer, or None; and whether there is
        something at ``path`` that cannot be read.

    Raises:
        CheckpointError: If none of those that are there is good.
    """  # noqa: DOC502
    found: list[CheckpointError] = []
    damaged = False
    for place in (generation(path, number) for number in range(keep + 1)):
        if not os.path.lexists(place):
            continue
        try:
            state = load(place)
        except CheckpointError as error:
            found.append(error)
            damaged |= place == path
            continue
        if not found and place == path:
            return state, None, False
        why = str(found[0]).partition(";")[0] if found else f"checkpoint: {path} is missing"
        return state, f"{why}: the run goes on from {place}, the newest one that is good.", damaged
    if found:
        raise found[0]
    return None, None, False


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """What to say if a file cannot be written."""
    return CheckpointError(f"checkpoint: {path} cannot be written ({error.strerror or error}); choose another place.")
