"""How many entries of a tensor a reader is shown."""

from __future__ import annotations

from torch import Tensor

LISTED_ENTRIES = 16


def show(value: Tensor) -> str:
    """Write a tensor for an error message: its entries, or the shape of one with many entries."""
    return str(value.tolist() if value.numel() <= LISTED_ENTRIES else f"a tensor of shape {tuple(value.shape)}")
