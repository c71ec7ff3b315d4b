"""Batches: what they hold, how many examples they have, and how they move to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

PLAIN = frozenset({Tensor, nn.Parameter, np.ndarray, str, int, float, bool})
"""What holds nothing else."""


def leaves(batch: Any) -> Iterator[Any]:
    """What a batch holds, in order.

    Args:
        batch: Nested tuples, lists, named tuples, mappings of any kind, and dataclasses.

    Yields:
        Whatever is none of these: tensors, arrays, and anything else.

    Example:
        >>> from collections import UserDict
        >>> list(leaves(UserDict(x=(1, 2), y=UserDict(z="three"))))
        [1, 2, 'three']
    """
    if type(batch) in PLAIN:  # nearly always; the general way takes ten times as long
        yield batch
        return
    if type(batch) in (tuple, list, dict):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from leaves(part)
        return
    # Packed sequences are tuples of tensors whose first dimension does not count examples.
    for leaf in pytree.tree_leaves(batch, is_leaf=lambda part: isinstance(part, PackedSequence)):
        parts = _parts(leaf)
        if parts is None:
            yield leaf
        else:
            yield from leaves(list(parts.values()))


def count_examples(batch: Any) -> int | None:
    """The number of examples: the size of dimension 0 of the first tensor or array that has a dimension.

    Args:
        batch: As for :func:`leaves`.

    Returns:
        None if there is no such tensor or array.

    Example:
        >>> count_examples({"temperature": torch.tensor(1.0), "x": np.zeros((5, 2))})
        5
    """
    return next((leaf.shape[0] for leaf in leaves(batch) if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim), None)


def describe(batch: Any) -> str:
    """List the tensors and arrays of a batch for an error message.

    Args:
        batch: As for :func:`leaves`.

    Returns:
        Their dtypes, shapes and devices. Without tensors, what there is instead.

    Example:
        >>> describe({"x": torch.zeros(2, 3), "name": "first"})
        'torch.float32 (2, 3) on cpu'
    """
    found = list(leaves(batch))
    tensors = [f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in found if isinstance(x, Tensor)]
    arrays = [f"numpy {x.dtype} {x.shape}" for x in found if isinstance(x, np.ndarray)]
    if tensors or arrays:
        return ", ".join(tensors + arrays)
    kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in found))
    return f"no tensors, but {kinds}" if kinds else "no tensors"


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch: its tensors, and what has a ``to`` of its own. Arrays stay where they are.

    Args:
        batch: As for :func:`leaves`.
        device: Where to.

    Returns:
        The same nesting.

    Example:
        >>> to_device({"x": torch.zeros(2), "name": "first"}, torch.device("meta"))["x"].device
        device(type='meta')
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            # A copy to the CPU that does not block would be read before it has arrived.
            return leaf.to(device, non_blocking=device.type != "cpu")
        if _moves_itself(leaf):
            return leaf.to(device)
        parts = _parts(leaf)
        if parts is None:
            return leaf
        moved = {name: to_device(part, device) for name, part in parts.items()}
        return leaf if all(moved[name] is part for name, part in parts.items()) else _replace(leaf, moved)

    if type(batch) in (tuple, list) and all(type(part) in PLAIN for part in batch):
        return type(batch)(map(move, batch))
    return pytree.tree_map(move, batch, is_leaf=_moves_itself)


def _moves_itself(part: Any) -> bool:
    """Whether it has a ``to``, as tensors, packed sequences and the batches of tokenizers do."""
    return callable(getattr(part, "to", None))


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """The parts of a mapping or a dataclass by name; None for anything else."""
    if isinstance(leaf, Mapping):
        return dict(leaf.items())
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _replace(leaf: Any, parts: dict[Any, Any]) -> Any:
    """A copy with other parts."""
    if isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        return type(leaf)(parts)  # type: ignore[call-arg]
    result = copy.copy(leaf)
    for name, part in parts.items():
        if isinstance(leaf, Mapping):
            result[name] = part
        else:
            object.__setattr__(result, name, part)  # works for frozen dataclasses too
    return result
