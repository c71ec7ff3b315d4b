"""The share of a process in the batches of a loader: every example once, in no process twice, and nobody waits."""

from __future__ import annotations

import copy
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from typing_extensions import override

from bilevel.batches import leaves
from bilevel.parallel.group import Group
from bilevel.rng import Stream

SEEN = 4096
"""So many numbers of a tensor count where batches are compared."""
_END = object()


@final
@dataclass(frozen=True)
class Nothing:
    """Stands for no examples at all, in a process that has none left while others have.

    Attributes:
        batch: What to compute on instead, so that all processes do the same; it counts as nothing.
    """

    batch: Any


def plain(batch: Any) -> Any:
    """What a loss is evaluated on.

    Returns:
        The batch, or what stands for it.
    """
    return batch.batch if isinstance(batch, Nothing) else batch


def count(examples: Callable[[Any], int | None], batch: Any) -> int | None:
    """How many examples a batch counts for.

    Args:
        examples: Counts those of a batch.
        batch: Maybe :class:`Nothing`.

    Returns:
        None if they cannot be counted.
    """
    return 0 if isinstance(batch, Nothing) else examples(batch)


@final
class Split:
    """A loader that gives each process batches of its own already, as streams from many files do.

    Without it, all processes read the same batches, and each takes every W-th.

    Example:
        >>> list(Split([1, 2]))
        [1, 2]
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Take the batches as they come."""
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        """A pass.

        Returns:
            An iterator.
        """
        return iter(self.loader)


class Shared(ABC):
    """The batches of one process: as many as the others have, of which the last may be :class:`Nothing`.

    Attributes:
        loader: Of all batches.
        group: The processes.
        order: The random numbers of the order, the same in all processes.
    """

    def __init__(self, loader: Any, group: Group, order: Stream) -> None:
        """Share out a loader."""
        self.loader, self.group, self.order = loader, group, order

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """A pass.

        Returns:
            An iterator.
        """

    def note(self, number: int) -> None:
        """Remember what the order of the batches was, to compare it with that of the others."""
        self.group.order = zlib.crc32(number.to_bytes(4, "little"), self.group.order)


def share(loader: Any, group: Group | None, order: Stream) -> Any:
    """The part of a loader that belongs to this process.

    A map-style ``DataLoader`` is divided by examples: its own sampler draws the order in all processes alike, and
    process r takes the examples r, r + W, r + 2W, ... of it. Of anything else, it takes every W-th batch.

    Args:
        loader: Any re-iterable of batches, or None.
        group: None leaves it as it is.
        order: For the sampler.

    Returns:
        A re-iterable.

    Raises:
        ValueError: If the loader has a ``DistributedSampler``.
    """
    if isinstance(loader, Split) and group is None:
        return loader.loader
    if loader is None or group is None:
        return loader
    if isinstance(loader, Split):
        return _OwnBatches(loader.loader, group, order)
    if not isinstance(loader, DataLoader):
        return _EveryBatch(loader, group, order)
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(
            "the loader has a DistributedSampler, which repeats examples to make the shares equal: leave it out "
            "(shuffle=True instead). bilevel gives each process its share of any loader."
        )
    if isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__:
        return _EveryBatch(loader, group, order)
    return _ByExample(loader, group, order)


@final
class _ByExample(Shared):
    """A map-style loader, whose sampler is asked for the examples of all processes."""

    def __len__(self) -> int:
        sampler, size, whole = self._parts()
        steps = len(sampler) / (size * self.group.size)
        return math.floor(steps) if whole else math.ceil(steps)

    @override
    def __iter__(self) -> Iterator[Any]:
        sampler, size, whole = self._parts()
        chunks = _Chunks(sampler, size, whole, self.group, self.order)
        by_batch = self.loader.batch_sampler is not None
        if not by_batch:
            own: Any = _First(chunks)
        else:
            own = chunks if type(self.loader.batch_sampler) is BatchSampler else _First(chunks)
        last, given = None, 0
        for last in _copy(self.loader, **{"batch_sampler" if by_batch else "sampler": own}, generator=None):
            self.note(chunks.numbers[given])
            given += 1
            yield Nothing(last) if given == 1 and chunks.lent else last
        while given < len(chunks.numbers):
            self.note(chunks.numbers[given])
            given += 1
            yield Nothing(last)

    def _parts(self) -> tuple[Any, int, bool]:
        """What is divided, how much of it makes a batch, and whether only whole batches count."""
        batches = self.loader.batch_sampler
        if batches is None:
            return self.loader.sampler, 1, False
        if type(batches) is BatchSampler:
            return batches.sampler, batches.batch_size, batches.drop_last
        return batches, 1, False


class _Chunks:
    """The order of all examples in chunks of W · B, of each the part of this process.

    Attributes:
        numbers: A checksum of every chunk so far.
        lent: Whether the first batch is one of the others', because this process has none at all.
    """

    def __init__(self, sampler: Any, size: int, whole: bool, group: Group, order: Stream) -> None:
        self.sampler, self.size, self.whole, self.group, self.order = sampler, size, whole, group, order
        self.numbers: list[int] = []
        self.lent = False

    def __iter__(self) -> Iterator[list[Any]]:
        length = self.size * self.group.size
        with self.order():
            indices = iter(self.sampler)
        while True:
            with self.order():
                chunk = list(islice(indices, length))
            if not chunk or (self.whole and len(chunk) < length):
                return
            self.numbers.append(zlib.crc32(repr(chunk).encode()))
            own = chunk[self.group.rank :: self.group.size]
            if len(self.numbers) == 1:
                self.lent = not own
                yield own or chunk
            elif own:
                yield own


class _First:
    """The only entry of each chunk, where the sampler gives whole batches."""

    def __init__(self, chunks: _Chunks) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[Any]:
        for entry, *_ in self._chunks:
            yield entry


@final
class _EveryBatch(Shared):
    """Any other loader: all processes read all batches, and each takes every W-th."""

    def __len__(self) -> int:
        return math.ceil(len(self.loader) / self.group.size)

    @override
    def __iter__(self) -> Iterator[Any]:
        with self.order():
            batches = iter(_copy(self.loader) if isinstance(self.loader, DataLoader) else self.loader)
        last: Any = _END
        for step in range(2**62):
            with self.order():
                chunk = list(islice(batches, self.group.size))
            if not chunk:
                return
            self.note(len(chunk) if step else _look(chunk))
            if self.group.rank < len(chunk):
                last = chunk[self.group.rank]
                yield last
            else:
                last = chunk[0] if last is _END else last
                yield Nothing(last)


@final
class _OwnBatches(Shared):
    """A loader of this process only. The pass ends when it has ended in all processes."""

    @override
    def __iter__(self) -> Iterator[Any]:
        batches, last = iter(self.loader), _END
        while True:
            batch = next(batches, _END)
            if not self.group.highest(batch is not _END)[0]:
                return
            if batch is _END and last is _END:
                raise ValueError(
                    f"bilevel.parallel.Split: the loader gives process {self.group.rank} no batch in this pass: give "
                    "each process at least one."
                )
            last = last if batch is _END else batch
            yield Nothing(last) if batch is _END else batch


def _copy(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """The same loader with other samplers, whose workers start anew in every pass."""
    twin = copy.copy(loader)
    twin.__dict__.update(persistent_workers=False, _iterator=None, **changes)
    return twin


def _look(batches: Sequence[Any]) -> int:
    """A checksum of a few numbers of some batches."""
    total = len(batches)
    for leaf in leaves(list(batches)):
        if isinstance(leaf, Tensor):
            few = leaf.detach().flatten()[:SEEN].cpu().double().numpy()
            total = zlib.crc32(few.tobytes() + repr(tuple(leaf.shape)).encode(), total)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            total = zlib.crc32(leaf.ravel()[:SEEN].tobytes() + repr(leaf.shape).encode(), total)
        elif isinstance(leaf, str | int | float | bytes):
            total = zlib.crc32(repr(leaf).encode(), total)
    return total
