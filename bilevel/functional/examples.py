"""Values that are the same for all examples, or one for each."""

from __future__ import annotations

import torch
from torch import Tensor


def per_example(value: Tensor | float, like: Tensor) -> Tensor:
    r"""Reshape a value so that it broadcasts along dimension 0 of ``like`` only.

    With one value per example, ``x * hyper["gain"]`` would scale the last dimension of ``x``, or fail.
    ``x * per_example(hyper["gain"], x)`` scales the examples, each by its own value or all by the same.

    Args:
        value: A scalar, or one value per example, shape ``(len(like),)``. Of a vector of hyperparameters, take one
            entry at a time, from the right: ``hyper["gains"][..., i]``.
        like: What to combine it with; dimension 0 counts examples.

    Returns:
        A scalar, or a tensor of shape ``(len(like), 1, ..., 1)`` with as many dimensions as ``like``. It has the device
        of ``like``, and its dtype if that is a floating-point one.

    Example:
        >>> x = torch.ones(2, 3)
        >>> x * per_example(torch.tensor([2.0, 5.0]), x)
        tensor([[2., 2., 2.],
                [5., 5., 5.]])
        >>> per_example(0.5, x)
        tensor(0.5000)
    """
    value = align("per_example: value", value, like)
    return value.to(like.dtype) if like.is_floating_point() else value


def align(name: str, value: Tensor | float, like: Tensor) -> Tensor:
    """A scalar as it is; one value per example with as many dimensions as ``like``.

    Args:
        name: What errors call the value.
        value: A scalar or of shape ``(len(like),)``.
        like: Dimension 0 counts examples.

    Returns:
        A tensor in at least single precision: bfloat16 is too coarse for small rates.

    Raises:
        ValueError: If the value has another shape.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    if isinstance(value, int | float):  # filled in on the device: to copy a number there would wait for it
        return torch.full((), value, dtype=dtype, device=like.device)
    value = torch.as_tensor(value, dtype=dtype, device=like.device)
    if value.ndim == 0:
        return value
    if value.shape != like.shape[:1]:
        raise ValueError(
            f"{name} must be a scalar or have shape ({len(like) if like.ndim else ''},), one per example; got "
            f"{tuple(value.shape)} for a tensor of shape {tuple(like.shape)}. Take one entry of a vector of "
            "hyperparameters, from the right: hyper[...][..., i]."
        )
    return value.reshape(-1, *[1] * (like.ndim - 1))
