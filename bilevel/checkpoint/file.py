r"""One checkpoint file: a line that says what it is, a header in JSON, the bytes of the tensors, and a checksum.

``bilevel checkpoint 3\n``, the length of the header in 16 hexadecimal digits, the header, the tensors, each from the
next multiple of 64 on, and the SHA-256 of all that.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bilevel.checkpoint.encoding import decode, encode, table
from bilevel.checkpoint.errors import CheckpointError

MAGIC = b"bilevel checkpoint 3\n"
DIGITS, DIGEST, ALIGNMENT, CHUNK = 16, 32, 64, 1 << 20
KIND = 19
"""So many bytes of the first line are the same in every version."""
LONGEST_HEADER = 1 << 26


@dataclass
class Part:
    """A file that is not in its place yet.

    Attributes:
        path: A name that nobody can foresee.
        descriptor: Open for reading and writing; -1 when it is closed.
        size: Bytes written so far.
    """

    path: Path
    descriptor: int
    size: int = 0

    def close(self) -> None:
        """Close it, once: the number of the descriptor may be in use by somebody else afterwards."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def drop(self) -> None:
        """Close and remove it."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            self.path.unlink()


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write a state of tensors and plain types, with a checksum, in one piece.

    An interrupt leaves the former file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = write(path, state)
    try:
        seal(part)
        os.replace(part.path, path)
    except BaseException:
        part.drop()
        raise
    sync_folder(path.parent)


def create(path: Path) -> Part:
    """Make an empty file beside ``path``; a link that waits there is not followed.

    Returns:
        The file.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return Part(part, os.open(part, flags, 0o666))


def write(path: Path, state: dict[str, Any], spare: Part | None = None) -> Part:
    """Hand a state to the operating system, straight from the memory of its tensors.

    Args:
        path: Where it will be.
        state: As for :func:`save`. It may change as soon as this returns.
        spare: A file that is not needed any more, to be written over: its pages are in memory already, which is many
            times as fast as new ones where the memory of a machine is virtual.

    Returns:
        The file, without its checksum; :func:`seal` writes that.
    """
    try:
        header, tensors = encode(state)
        start = len(MAGIC) + DIGITS + len(header)
        size = _end([tensor.numel() * tensor.element_size() for tensor in tensors], start)
        part = create(path) if spare is None else spare
    except BaseException:
        if spare is not None:
            spare.drop()
        raise
    try:
        # Room is made first: a full disk is noticed at once, and filling prepared pages is faster.
        if hasattr(os, "posix_fallocate"):
            with suppress(OSError):
                os.posix_fallocate(part.descriptor, 0, size + DIGEST)
        os.lseek(part.descriptor, 0, os.SEEK_SET)
        with os.fdopen(part.descriptor, "wb", 0, closefd=False) as file:
            _put(file, MAGIC + f"{len(header):0{DIGITS}x}".encode() + header)
            for tensor in tensors:
                _put(file, bytes(-file.tell() % ALIGNMENT))
                flat = tensor.reshape(-1).contiguous()
                if flat.is_complex():
                    flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
                _put(file, _bytes(flat.cpu().resolve_neg().view(torch.uint8)))
            file.truncate()
    except BaseException:
        part.drop()
        raise
    part.size = size
    return part


def take(path: Path) -> Part | None:
    """Take a file away from its name, to be written over.

    Args:
        path: Of a checkpoint that is not needed any more.

    Returns:
        The file; None if it is not there, is used under another name as well, or is no file.
    """
    other = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", os.O_EXCL))
    except OSError:
        return None
    part = Part(other, descriptor)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        with suppress(OSError):
            os.rename(path, other)
            return part
    part.close()
    return None


def blank(path: Path, size: int) -> Part:
    """Make a file of zeros, to be written over.

    Args:
        path: Beside which.
        size: In bytes.

    Returns:
        The file.
    """
    part = create(path)
    try:
        with os.fdopen(part.descriptor, "wb", 0, closefd=False) as file:
            for start in range(0, size, CHUNK):
                _put(file, bytes(min(CHUNK, size - start)))
    except BaseException:
        part.drop()
        raise
    return part


def seal(part: Part) -> int:
    """Write the checksum, and wait for the disk.

    Returns:
        The size of the file.

    Raises:
        OSError: If the disk is full or fails.
    """
    digest = hashlib.sha256()
    with os.fdopen(os.dup(part.descriptor), "r+b", 0) as file:
        file.seek(0)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        if file.tell() != part.size:
            raise OSError(f"{part.path} has {file.tell()} bytes instead of {part.size}")
        _put(file, digest.digest())
        os.fsync(file.fileno())
    part.close()
    return part.size + DIGEST


def load(path: str | Path) -> dict[str, Any]:
    """Read what :func:`save` wrote, to the CPU. Never runs code, and takes memory for what is in the file only.

    Returns:
        The state.

    Raises:
        CheckpointError: If the file is something else, damaged, of another version, or cannot be read.
    """
    path = Path(path)
    try:
        with open_file(path) as file:
            state = _read(path, file)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read ({error.strerror or error}).") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint: {path} is damaged, its header cannot be read; {REMEDY}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint: {path} holds no state; {REMEDY}")
    return state


REMEDY = "remove it to start anew."


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; what is no file, such as a pipe, is not waited for.

    Returns:
        The open file.

    Raises:
        CheckpointError: If it is something else.
        OSError: If it cannot be opened.
    """  # noqa: DOC502
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"checkpoint: {path} is not a file; choose another name.")
    return os.fdopen(descriptor, "rb")


def check_own(path: Path) -> None:
    """Refuse to replace a file that is something else.

    Raises:
        CheckpointError: If there is a file that was not written by bilevel.
    """
    try:
        with open_file(path) as file:
            if file.read(KIND) == MAGIC[:KIND]:
                return
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read ({error.strerror or error}).") from error
    raise CheckpointError(f"checkpoint: {path} was not written by bilevel; choose another name, or remove it.")


def _read(path: Path, file: BinaryIO) -> Any:
    size = os.fstat(file.fileno()).st_size
    lead = file.read(len(MAGIC) + DIGITS)
    if lead.startswith(MAGIC[:KIND]) and not lead.startswith(MAGIC):
        raise CheckpointError(f"checkpoint: {path} was written by another version of bilevel; {REMEDY}")
    if not lead.startswith(MAGIC):
        raise CheckpointError(f"checkpoint: {path} was not written by bilevel; choose another name, or remove it.")
    length = int(lead[len(MAGIC) :], 16)
    if not 0 <= length <= min(size, LONGEST_HEADER):
        raise CheckpointError(f"checkpoint: {path} is damaged, it ends in its header; {REMEDY}")
    text = file.read(length)
    digest = hashlib.sha256(lead + text)
    header = json.loads(text)
    entries = table(header)
    if _end([entry[2] for entry in entries], file.tell()) + DIGEST != size:
        raise CheckpointError(f"checkpoint: {path} is damaged, it has {size} bytes; {REMEDY}")
    tensors = []
    for dtype, shape, count in entries:
        digest.update(file.read(-file.tell() % ALIGNMENT))
        tensor = torch.empty(count, dtype=torch.uint8)
        left = _bytes(tensor)
        while left:
            done = file.readinto(left[:CHUNK])  # type: ignore[attr-defined]
            if not done:
                raise CheckpointError(f"checkpoint: {path} is damaged, it ends too early; {REMEDY}")
            digest.update(left[:done])
            left = left[done:]
        tensors.append(tensor.view(dtype).reshape(shape))
    if digest.digest() != file.read():
        raise CheckpointError(f"checkpoint: {path} is damaged, its SHA-256 is another one; {REMEDY}")
    return decode(header["state"], tensors)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _end(sizes: list[int], position: int) -> int:
    """Where the last tensor ends."""
    for size in sizes:
        position += -position % ALIGNMENT + size
    return position


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def _put(file: Any, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left[:CHUNK]) :]
