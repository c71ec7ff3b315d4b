"""Penalties: sums over the weights, for one model or for one per example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from bilevel.responding import Responding


def l2(params: Mapping[str, Tensor] | Iterable[Tensor]) -> Tensor:
    r"""The sum of squares :math:`\sum_i w_i^2` of all weights, without a factor one half.

    Args:
        params: ``model.params``, or any of them, or any tensors.

    Returns:
        A scalar; or one value per example, shape ``(B,)``, where each example has weights of its own.

    Example:
        >>> import torch
        >>> l2({"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)})
        tensor(14.)
    """
    # A product rather than square(), whose second derivative takes more than twice the time.
    return _total([w.l2() if isinstance(w, Responding) else (w * w).sum() for w in _tensors(params)])


def l1(params: Mapping[str, Tensor] | Iterable[Tensor]) -> Tensor:
    r"""The sum of absolute values :math:`\sum_i |w_i|` of all weights.

    Args:
        params: As for :func:`l2`.

    Returns:
        As for :func:`l2`.

    Example:
        >>> import torch
        >>> l1({"w": torch.tensor([1.0, -2.0])})
        tensor(3.)
    """
    return _total([w.l1() if isinstance(w, Responding) else w.abs().sum() for w in _tensors(params)])


def _total(parts: list[Tensor]) -> Tensor:
    """The sum of scalars and of vectors with one entry per example."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _tensors(params: Mapping[str, Tensor] | Iterable[Tensor]) -> list[Any]:
    if isinstance(params, Tensor | Responding):
        return [params]
    tensors = list(params.values() if isinstance(params, Mapping) else params)
    if not tensors:
        raise ValueError("a penalty needs at least one tensor, got none: check how you select from model.params.")
    return tensors
