"""What losses and networks are built from: penalties, and dropout and noise whose strength is a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel.responding import Responding


def l2(params: Mapping[str, Tensor] | Iterable[Tensor]) -> Tensor:
    r"""The sum of squares :math:`\sum_i w_i^2` of all weights, without a factor one half.

    Args:
        params: ``model.params``, or any of them, or any tensors.

    Returns:
        A scalar; or one value per example, shape ``(B,)``, where each example has weights of its own.

    Example:
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
        >>> l1({"w": torch.tensor([1.0, -2.0])})
        tensor(3.)
    """
    return _total([w.l1() if isinstance(w, Responding) else w.abs().sum() for w in _tensors(params)])


def dropout(x: Tensor, rate: Tensor | float, *, shared_dims: int | Sequence[int] = (), training: bool = True) -> Tensor:
    r"""Zero each entry with probability ``rate`` and scale the others by :math:`1 / (1 - rate)`.

    The rate may be a tensor, so that it can be a hyperparameter. It is detached: a mask has no derivative, and the
    factor :math:`1 / (1 - rate)` alone would give a wrong one.

    Args:
        x: Any tensor.
        rate: In [0, 1]; a scalar, or one value per example, shape ``(len(x),)``.
        shared_dims: Dimensions along which all entries share one mask: ``(2, 3)`` drops whole channels of images of
            shape ``(B, C, H, W)``, ``1`` the same features at all times of ``(B, T, features)``.
        training: Return ``x`` unchanged if false.

    Returns:
        A tensor like ``x``.

    Example:
        >>> dropout(torch.ones(3), 0.0)
        tensor([1., 1., 1.])
    """
    if not training:
        return x
    shape = list(x.shape)
    for dim in (shared_dims,) if isinstance(shared_dims, int) else shared_dims:
        shape[dim] = 1
    return x * _mask(shape, _per_example("dropout: rate", rate, x), x)


def embedding_dropout(
    tokens: Tensor, vectors: Tensor, rate: Tensor | float, *, size: int, training: bool = True
) -> Tensor:
    r"""Drop words: all occurrences of a word in an example keep their vector or lose it together.

    Args:
        tokens: Indices of words, shape ``(B, ...)``.
        vectors: Their embeddings, shape ``(B, ..., features)``.
        rate: As for :func:`dropout`.
        size: Of the vocabulary.
        training: Return ``vectors`` unchanged if false.

    Returns:
        A tensor like ``vectors``.

    Example:
        >>> embedding_dropout(torch.tensor([[0, 1]]), torch.ones(1, 2, 3), 0.0, size=2).shape
        torch.Size([1, 2, 3])
    """
    if not training:
        return vectors
    rate = _per_example("embedding_dropout: rate", rate, vectors)
    mask = _mask([len(tokens), size], rate.reshape(-1, 1) if rate.ndim else rate, vectors)
    return vectors * mask.gather(1, tokens.reshape(len(tokens), -1)).reshape(*tokens.shape, 1)


def drop_connect(weight: Tensor, rate: Tensor | float, *, training: bool = True) -> Tensor:
    r"""Dropout of a weight, the same for all examples.

    Args:
        weight: Any tensor; also inside a network whose weights respond for each example.
        rate: In [0, 1], a scalar; declare such a hyperparameter with ``shared=True``.
        training: Return ``weight`` unchanged if false.

    Returns:
        A tensor like ``weight``.

    Raises:
        ValueError: If ``rate`` is not a scalar.

    Example:
        >>> drop_connect(torch.ones(2, 2), 0.0)
        tensor([[1., 1.],
                [1., 1.]])
    """
    if not training:
        return weight
    rate = torch.as_tensor(rate)
    if rate.ndim:
        raise ValueError(
            f"drop_connect: rate must be a scalar, got shape {tuple(rate.shape)}: all examples share the weight. "
            "Declare the hyperparameter with shared=True."
        )
    like = torch.empty(0, dtype=weight.dtype, device=weight.device)
    return weight * _mask(list(weight.shape), rate.to(like.device).detach(), like)


def gaussian_noise(x: Tensor, scale: Tensor | float, *, training: bool = True) -> Tensor:
    r"""Add normal noise of standard deviation ``scale``, differentiable in it.

    Args:
        x: Any tensor.
        scale: A scalar, or one value per example, shape ``(len(x),)``.
        training: Return ``x`` unchanged if false.

    Returns:
        A tensor like ``x``.

    Example:
        >>> gaussian_noise(torch.ones(3), 0.0)
        tensor([1., 1., 1.])
    """
    if not training:
        return x
    return x + _per_example("gaussian_noise: scale", scale, x).to(x.dtype) * torch.randn_like(x)


def _per_example(name: str, value: Tensor | float, x: Tensor) -> Tensor:
    """A scalar as it is; one value per example with as many dimensions as ``x``."""
    # In at least single precision: bfloat16 uniforms are too coarse for small rates.
    value = torch.as_tensor(value, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if value.ndim == 0:
        return value
    if value.shape != x.shape[:1]:
        raise ValueError(
            f"{name} must be a scalar or have shape ({x.shape[0] if x.ndim else ''},), one per example; got "
            f"{tuple(value.shape)} for x of shape {tuple(x.shape)}."
        )
    return value.reshape(-1, *[1] * (x.ndim - 1))


def _mask(shape: Sequence[int], rate: Tensor, like: Tensor) -> Tensor:
    """Zero with probability ``rate``, otherwise 1 / (1 - rate); without a gradient."""
    rate = rate.detach().to(torch.promote_types(like.dtype, torch.float32))
    keep = torch.rand(list(shape), dtype=rate.dtype, device=like.device) >= rate
    return (keep / (1 - rate).clamp_min(torch.finfo(rate.dtype).tiny)).to(like.dtype)


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
