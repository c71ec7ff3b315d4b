"""What losses and networks are built from: penalties, and dropout whose rate is a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def l2(params: Mapping[str, Tensor] | Iterable[Tensor]) -> Tensor:
    r"""The sum of squares :math:`\sum_i w_i^2` of all weights, without a factor one half.

    Args:
        params: ``model.params``, or any tensors.

    Returns:
        A scalar.

    Example:
        >>> l2({"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)})
        tensor(14.)
    """
    # A product rather than square(), whose second derivative takes more than twice the time.
    return torch.stack([(weight * weight).sum() for weight in _tensors(params)]).sum()


def l1(params: Mapping[str, Tensor] | Iterable[Tensor]) -> Tensor:
    r"""The sum of absolute values :math:`\sum_i |w_i|` of all weights.

    Args:
        params: ``model.params``, or any tensors.

    Returns:
        A scalar.

    Example:
        >>> l1({"w": torch.tensor([1.0, -2.0])})
        tensor(3.)
    """
    return torch.stack([weight.abs().sum() for weight in _tensors(params)]).sum()


def dropout(x: Tensor, rate: Tensor | float, *, training: bool = True) -> Tensor:
    r"""Zero each entry with probability ``rate`` and scale the others by :math:`1 / (1 - rate)`.

    The rate may be a tensor, so that it can be a hyperparameter. It is detached: a mask has no derivative, and the
    factor :math:`1 / (1 - rate)` alone would give a wrong one.

    Args:
        x: Any tensor.
        rate: In [0, 1]; a scalar, or one value per example, shape ``(len(x),)``.
        training: Return ``x`` unchanged if false.

    Returns:
        A tensor like ``x``.

    Raises:
        ValueError: If ``rate`` is neither a scalar nor one value per example.

    Example:
        >>> dropout(torch.ones(3), 0.0)
        tensor([1., 1., 1.])
    """
    if not training:
        return x
    # In at least single precision: bfloat16 uniforms are too coarse for small rates.
    wide = torch.promote_types(x.dtype, torch.float32)
    rate = torch.as_tensor(rate, dtype=wide, device=x.device).detach()
    if rate.ndim:
        if rate.shape != x.shape[:1]:
            raise ValueError(
                f"dropout: rate must be a scalar or have shape ({x.shape[0] if x.ndim else ''},), one per example; "
                f"got {tuple(rate.shape)} for x of shape {tuple(x.shape)}."
            )
        rate = rate.reshape(-1, *[1] * (x.ndim - 1))
    keep = torch.rand_like(x, dtype=wide) >= rate
    return x * (keep / (1 - rate).clamp_min(torch.finfo(wide).tiny)).to(x.dtype)


def _tensors(params: Mapping[str, Tensor] | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    tensors = list(params.values() if isinstance(params, Mapping) else params)
    if not tensors:
        raise ValueError("a penalty needs at least one tensor, got none: check how you select from model.params.")
    return tensors
