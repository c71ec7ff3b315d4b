"""Penalties: sums over the weights, for one model or for one per example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bilevel.responding import Responding, grown_squares


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


def weighted_l2(strengths: Sequence[Tensor], groups: Sequence[Sequence[Any]]) -> Tensor:
    r"""The sum :math:`\sum_g a_g \|w_g\|^2` of squares of groups of weights, each with its strength.

    Args:
        strengths: Scalars, or one value per example.
        groups: Entries of ``model.params``.

    Returns:
        What ``a * l2(group)`` adds up to; in fewer operations, if all weights grow.

    Example:
        >>> import torch
        >>> weighted_l2([torch.tensor(0.5), torch.tensor(2.0)], [[torch.tensor([2.0])], [torch.ones(3)]])
        tensor(8.)
    """
    if all(isinstance(w, Responding) and w.grows for group in groups for w in group):
        return grown_squares(strengths, groups)
    return _total([strength * l2(group) for strength, group in zip(strengths, groups, strict=True)])


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
