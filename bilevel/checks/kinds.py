"""Which batches are of a kind that has not been checked."""

from __future__ import annotations

import copy
import random
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bilevel.batches import leaves
from bilevel.rng import Stream

EXACT = 16
"""So many kinds are told apart by all sizes of their tensors; later ones by less, so that checks come to an end."""
WORDS = 8
"""Of a batch, so many words and flags count."""


@final
class Kinds:
    """Remembers which kinds of batches have been checked.

    Two batches are of one kind if they agree in their type and in the dtypes and shapes of their tensors. Every batch
    may have another shape, as sequences do that are trimmed to the longest. Then only the first ones are told apart by
    all sizes, the others by what can confuse examples with something else: their number, and which dimensions are as
    long as the batch.

    Example:
        >>> kinds = Kinds()
        >>> kinds.add(torch.zeros(4, 3), 4)
        >>> [kinds.new(torch.zeros(size, 3), size) for size in (4, 2)]
        [False, True]
    """

    def __init__(self) -> None:
        """Start without knowledge."""
        self._exact: set[Hashable] = set()
        self._rough: set[Hashable] = set()

    def new(self, batch: Any, count: int | None) -> bool:
        """Whether no batch of this kind was added before.

        Args:
            batch: Any nesting.
            count: Its number of examples.

        Returns:
            The answer.
        """
        kind = _exact(batch)
        return kind not in self._exact and (len(self._exact) < EXACT or _rough(kind, count) not in self._rough)

    def add(self, batch: Any, count: int | None) -> None:
        """This kind has been checked, and passed.

        Args:
            batch: Any nesting.
            count: Its number of examples.
        """
        kind = _exact(batch)
        self._exact.add(kind)
        self._rough.add(_rough(kind, count))


Kind = tuple[Hashable, tuple[tuple[Any, tuple[int, ...]], ...]]


def _exact(batch: Any) -> Kind:
    found = list(leaves(batch))
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor | np.ndarray)]
    # Words and flags may lead a loss to another branch; numbers would make every batch another kind.
    words = tuple(leaf for leaf in found if isinstance(leaf, str | bool))[:WORDS]
    return (type(batch), words), tuple((leaf.dtype, leaf.shape) for leaf in tensors)


def _rough(kind: Kind, count: int | None) -> Hashable:
    """A kind by what can confuse examples with something else: dimensions that are as long as the batch."""
    few = count if count is not None and count < EXACT else None
    return kind[0], few, tuple((dtype, *(size == count for size in shape)) for dtype, shape in kind[1])


@contextmanager
def repeatable(device: torch.device) -> Generator[None]:
    """Leave all random numbers that are drawn inside the block to be drawn again."""
    numbers, others = np.random.get_state(), random.getstate()
    try:
        with Stream.current(device)(), torch.enable_grad():
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(others)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def isolated(batch: Any) -> Any:
    """A batch for one more evaluation, which may change it in place or leave something behind in it.

    Args:
        batch: Any nesting.

    Returns:
        A copy; what cannot be copied stays as it is.
    """
    try:
        return copy.deepcopy(batch, {id(leaf): _copy(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor)})
    except Exception:
        return batch
