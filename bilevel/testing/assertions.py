"""What checks assert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def expect(condition: bool, message: str) -> None:
    """Fail with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def expect_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Fail unless two tensors agree up to a relative and absolute tolerance."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def same(first: Any, second: Any) -> bool:
    """Whether nested dicts, lists and tensors are equal bit for bit."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
