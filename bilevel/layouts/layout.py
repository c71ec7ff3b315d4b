"""Where examples are in one activation."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override


@final
class Ids:
    """The example of each row, where rows were chosen: the tokens of an expert, or all that are no padding."""

    def __init__(self, ids: Tensor) -> None:
        """Keep the numbers, shape ``(rows,)``."""
        self.ids = ids

    @override
    def __eq__(self, other: object) -> bool:
        """Whether the same examples are in the same order."""
        return isinstance(other, Ids) and torch.equal(self.ids, other.ids)

    @override
    def __hash__(self) -> int:
        """By length."""
        return len(self.ids)


class Layout(NamedTuple):
    """Dimension ``dim`` runs over ``outer * B * inner`` entries, and the examples are in the middle.

    Attributes:
        dim: The dimension.
        outer: How often all examples are repeated in it, as in ``(T * B, features)``.
        inner: How many entries belong to one example, as in ``(B * T, features)``.
        chosen: Instead of both, the example of each entry.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    chosen: Ids | None = None

    @property
    def alone(self) -> bool:
        """Whether the examples have a dimension of their own."""
        return self.outer == self.inner == 1 and self.chosen is None

    def ids(self, count: int, device: torch.device) -> Tensor:
        """The example of each entry."""
        if self.chosen is not None:
            return self.chosen.ids
        examples = torch.arange(count, device=device)
        return examples.repeat_interleave(self.inner).repeat(self.outer)

    def size(self, count: int) -> int:
        """How many entries there are."""
        return self.outer * count * self.inner if self.chosen is None else len(self.chosen.ids)


FIRST = Layout(0)
