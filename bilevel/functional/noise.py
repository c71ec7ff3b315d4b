"""Dropout and noise whose strength is a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bilevel.functional.examples import align


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
    return x * _mask(shape, align("dropout: rate", rate, x), x)


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
    rate = align("embedding_dropout: rate", rate, vectors)
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
    device = weight.device
    rate = torch.full((), rate, device=device) if isinstance(rate, int | float) else torch.as_tensor(rate)
    if rate.ndim:
        raise ValueError(
            f"drop_connect: rate must be a scalar, got shape {tuple(rate.shape)}: all examples share the weight. "
            "Declare the hyperparameter with shared=True."
        )
    like = torch.empty(0, dtype=weight.dtype, device=device)
    return weight * _mask(list(weight.shape), rate.to(device).detach(), like)


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
    return x + align("gaussian_noise: scale", scale, x).to(x.dtype) * torch.randn_like(x)


def _mask(shape: Sequence[int], rate: Tensor, like: Tensor) -> Tensor:
    """Zero with probability ``rate``, otherwise 1 / (1 - rate); without a gradient."""
    rate = rate.detach().to(torch.promote_types(like.dtype, torch.float32))
    keep = torch.rand(list(shape), dtype=rate.dtype, device=like.device) >= rate
    return (keep / (1 - rate).clamp_min(torch.finfo(rate.dtype).tiny)).to(like.dtype)
