"""Checks that row i of every activation that meets a responding weight belongs to example i."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.rng import Stream


class Watched(Protocol):
    """A pass of the network.

    Attributes:
        seen: The activations that met responding weights, and what to say if one is wrong.
    """

    seen: list[tuple[str, Tensor]]


class Examples:
    """Remembers for which inputs dimension 0 of every activation is known to count the examples.

    The network is run in eval mode as it is, then with the first example replaced, then with the first half. It has
    moved the examples, as ``x.flip(0)`` does, if two things happen at once: a row stays the same although its example
    was replaced, and a row changes although its example was not. This is checked once for every kind of input. A
    network that lets examples see each other, as ``x - x.mean(0)`` does, passes: row i still belongs to example i.

    If another dimension is as long as the batch, the examples may lie along that one. For such shapes no row may change
    unless its example was replaced.

    Two mistakes go unnoticed: a permutation that keeps the first example and the first half in place, and one that
    happens in train mode only.
    """

    def __init__(self, evaluating: Callable[[], AbstractContextManager[None]]) -> None:
        """Start without knowledge; ``evaluating`` puts the network into eval mode."""
        self._evaluating = evaluating
        self._certain: set[Any] = set()

    def check(self, run: Callable[..., Watched], args: Any, kwargs: Any, count: int, *, strict: bool) -> None:
        """Refuse a network that puts something else than example i into row i.

        Args:
            run: The network as a function of its arguments; returns what it saw.
            args: Its arguments.
            kwargs: Likewise.
            count: The number of examples.
            strict: Whether another dimension is as long as the batch.

        Raises:
            ValueError: If row i belongs to another example.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves)
        key = (count, shapes) if strict else tuple(None if shape is None else len(shape) for shape in shapes)
        if count < 2 or key in self._certain:
            return

        def look(changed: list[Any]) -> list[tuple[str, Tensor]]:
            copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in changed]
            some_args, some_kwargs = pytree.tree_unflatten(copies, spec)
            device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
            # Every pass draws the same random numbers.
            with torch.no_grad(), self._evaluating(), Stream.current(device)():
                return run(*some_args, **some_kwargs).seen

        before = None
        for first in sorted({1, count // 2}):
            changed = [_replace(leaf, first, count) for leaf in leaves]
            touched = _differs(leaves, changed, count)
            if not touched.any():
                continue
            before = look(leaves) if before is None else before
            for (refusal, x), (_, y) in zip(before, look(changed), strict=True):
                moved = ~torch.isclose(x, y, equal_nan=True).reshape(count, -1).all(1).cpu()
                if (moved & ~touched).any() and (strict or (touched & ~moved).any()):
                    raise ValueError(refusal)
        self._certain.add(key)


def _replace(leaf: Any, first: int, count: int) -> Any:
    """Replace the first examples by others of the batch, different ones if there are any."""
    if not _has_examples(leaf, count):
        return leaf
    differs = (leaf != leaf[:1]).reshape(count, -1).any(1)
    others = torch.where(differs[:first], 0, differs.to(torch.int).argmax())
    return torch.cat([leaf[others], leaf[first:]])


def _differs(leaves: list[Any], changed: list[Any], count: int) -> Tensor:
    """Which examples were replaced by different ones."""
    touched = torch.zeros(count, dtype=torch.bool)
    for leaf, other in zip(leaves, changed, strict=True):
        if _has_examples(leaf, count):
            touched |= (leaf != other).reshape(count, -1).any(1).cpu()
    return touched


def _has_examples(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count and leaf.numel() > 0
