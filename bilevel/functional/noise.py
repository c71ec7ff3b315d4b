"""Dropout and noise whose strength is a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from bilevel.functional.examples import align

SELU_LIMIT = -1.7580993408473766
"""What SELU tends to on the left, minus its scale times its alpha."""


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
    return drop(x, align("dropout: rate", rate, x), shared_dims) if training else x


def alpha_dropout(
    x: Tensor, rate: Tensor | float, *, shared_dims: int | Sequence[int] = (), training: bool = True
) -> Tensor:
    r"""Dropout that keeps mean zero and variance one, for networks with SELU (Klambauer et al., 2017).

    A dropped entry becomes :math:`\alpha' \approx -1.758`, the limit of SELU on the left; then all are scaled by
    :math:`a = ((1 - p)(1 + p \alpha'^2))^{-1/2}` and shifted by :math:`-a \alpha' p`. The rate :math:`p` is detached,
    as for :func:`dropout`.

    Args:
        x: Any tensor.
        rate: In [0, 1); as for :func:`dropout`.
        shared_dims: As for :func:`dropout`.
        training: Return ``x`` unchanged if false.

    Returns:
        A tensor like ``x``.

    Example:
        >>> alpha_dropout(torch.ones(3), 0.0)
        tensor([1., 1., 1.])
    """
    return alpha_drop(x, align("alpha_dropout: rate", rate, x), shared_dims) if training else x


def drop(x: Tensor, rate: Tensor, shared_dims: int | Sequence[int] = ()) -> Tensor:
    """:func:`dropout` with a rate that broadcasts to ``x`` already."""
    with DisableTorchFunction():  # a mask is no operation of a network whose operations are followed
        mask = _mask(_mask_shape(x, shared_dims), rate, x)
    return x * mask


def alpha_drop(x: Tensor, rate: Tensor, shared_dims: int | Sequence[int] = ()) -> Tensor:
    """:func:`alpha_dropout` with a rate that broadcasts to ``x`` already."""
    p = rate.detach().to(torch.promote_types(x.dtype, torch.float32))
    p = p.clamp_max(1 - torch.finfo(p.dtype).eps)
    keep = torch.rand(_mask_shape(x, shared_dims), dtype=p.dtype, device=x.device) >= p
    scale = ((1 - p) * (1 + p * SELU_LIMIT**2)).rsqrt()
    return x * (keep * scale).to(x.dtype) + (scale * SELU_LIMIT * ((~keep).to(p.dtype) - p)).to(x.dtype)


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
    with DisableTorchFunction():
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
    with DisableTorchFunction():
        mask = _mask(list(weight.shape), rate.to(device).detach(), like)
    return weight * mask


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


def _mask_shape(x: Tensor, shared_dims: int | Sequence[int]) -> list[int]:
    shape = list(x.shape)
    for dim in (shared_dims,) if isinstance(shared_dims, int) else shared_dims:
        shape[dim] = 1
    return shape


def _mask(shape: Sequence[int], rate: Tensor, like: Tensor) -> Tensor:
    """Zero with probability ``rate``, otherwise 1 / (1 - rate); without a gradient."""
    rate = rate.detach().to(torch.promote_types(like.dtype, torch.float32))
    drawn = torch.rand(list(shape), dtype=rate.dtype, device=like.device)
    rest = (1 - rate).clamp_min(torch.finfo(rate.dtype).tiny)
    fits = rate.ndim <= drawn.ndim and all(a <= b for a, b in zip(rate.shape[::-1], drawn.shape[::-1], strict=False))
    if fits and not torch._C._are_functorch_transforms_active():
        return drawn.ge_(rate).div_(rest).to(like.dtype)
    return ((drawn >= rate) / rest).to(like.dtype)  # one draw for several rates
