"""What a batch holds: how many examples, and which tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def first_dimension(batch: Any) -> int | None:
    """The size of dimension 0 of the first tensor; None if that is a scalar, or if there is no tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            return leaf.shape[0] if leaf.ndim else None
    return None


def describe(batch: Any) -> str:
    """List the tensors of a batch for an error message.

    Returns:
        Their dtypes, shapes and devices.

    Example:
        >>> import torch
        >>> describe({"x": torch.zeros(2, 3), "name": "first"})
        'torch.float32 (2, 3) on cpu'
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors) or "no tensors"
