"""The formats of the official files, from bytes to arrays. Every error starts with the file's name."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
CIFAR_SHAPE = (3, 32, 32)
PIXELS = math.prod(CIFAR_SHAPE)


def idx(content: bytes, dimensions: int, path: Path) -> Bytes:
    """An array of bytes in the format of MNIST: two zeros, type 8, the number of dimensions, the shape, the values.

    Returns:
        The array, read-only.

    Raises:
        ValueError: If it is not such an array, or too short or long.
    """
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(
            f"{path}: an idx file of bytes with {dimensions} dimensions starts with "
            f"{bytes([0, 0, 8, dimensions]).hex()} and its shape, this one with {content[:start].hex()}."
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path}: its shape is {shape}, but {len(content) - start} values follow.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def cifar_binary(content: bytes, path: Path) -> tuple[Bytes, Bytes]:
    """A binary batch of CIFAR-10: for each image a label, then its red, green and blue values.

    Returns:
        Images (n, 3, 32, 32) and labels (n,), read-only.

    Raises:
        ValueError: If it does not hold whole records.
    """
    if not content or len(content) % (1 + PIXELS):
        raise ValueError(f"{path}: a batch holds records of {1 + PIXELS} bytes, this one has {len(content)} bytes.")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0]


def cifar_python(content: bytes, path: Path) -> tuple[Bytes, Bytes]:
    """A pickled batch of CIFAR-10: a dict with ``data`` (n, 3072) and a list of ``labels``.

    Returns:
        Images (n, 3, 32, 32) and labels (n,).

    Raises:
        ValueError: If the pickle needs anything but arrays and plain types, or does not hold such a dict.
    """
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{path}: cannot be unpickled: {error}") from error
    data = batch.get("data") if isinstance(batch, dict) else None
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise ValueError(f"{path}: a batch has data of type uint8 and shape (n, {PIXELS}).")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise ValueError(f"{path}: a batch has a list of labels.")
    return data.reshape(-1, *CIFAR_SHAPE), np.array(labels, np.uint8)


class ArrayUnpickler(pickle.Unpickler):
    """Reads plain types and numpy arrays; nothing else that a pickle names is imported or called."""

    # The function has moved between versions of numpy, and both names occur in files.
    RECONSTRUCT = np.empty(0).__reduce__()[0]
    ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): RECONSTRUCT,
        ("numpy._core.multiarray", "_reconstruct"): RECONSTRUCT,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Look a name up among the allowed ones.

        Returns:
            What it stands for.

        Raises:
            UnpicklingError: If it is not allowed.
        """
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file.")
        return self.ALLOWED[module, name]


def lines(content: bytes, path: Path) -> list[list[str]]:
    """The words of each line, with ``<eos>`` after the last.

    Returns:
        A list of words for each line, also for an empty one.

    Raises:
        ValueError: If it is not UTF-8.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8: {error}") from error
    return [[*line.split(), "<eos>"] for line in text.removesuffix("\n").split("\n")]
