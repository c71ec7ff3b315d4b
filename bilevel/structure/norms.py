"""The scales and shifts of norms."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bilevel.structure.respond import Respond, rule


def _affine(mode: Respond, normal: Tensor, weight: Tensor | None, bias: Tensor | None, *, trailing: bool) -> Tensor:
    """Scale and shift what a norm has normalised: its channels in dimension 1, or the trailing dimensions."""

    def place(param: Tensor) -> Tensor:
        """Reshape a parameter, or one per example, to the dimensions of the activation."""
        batched = param.ndim > _own_dims(weight, bias)
        own = param.shape[1:] if batched else param.shape
        first = [len(param)] if batched else [1]
        free = [1] * (normal.ndim - 1 - len(own))
        return param.reshape([*first, *free, *own] if trailing else [*first, *own, *free])

    y = normal if weight is None else normal * place(weight)
    y = y if bias is None else y + place(bias)
    value, tangent = mode.split(y.to(normal.dtype))
    plain = mode.split(normal)[0]
    return mode.join(
        value,
        tangent,
        None if weight is None or not mode.responds(weight) else plain * place(mode.change(weight)),
        None if bias is None or not mode.responds(bias) else place(mode.change(bias)),
    )


def _own_dims(weight: Tensor | None, bias: Tensor | None) -> int:
    return next(param.ndim for param in (weight, bias) if param is not None)


@rule(F.layer_norm)
def layer_norm(
    mode: Respond,
    function: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Scale and shift respond per feature; with several normalised dimensions, per index of the first."""
    input = mode.check(input, function, weight, bias)
    normal = F.layer_norm(input, normalized_shape, None, None, eps)
    return _affine(mode, normal, weight, bias, trailing=True)


@rule(F.rms_norm)
def rms_norm(
    mode: Respond, function: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    """As layer norm, without a shift."""
    input = mode.check(input, function, weight)
    return _affine(mode, F.rms_norm(input, normalized_shape, None, eps), weight, None, trailing=True)


@rule(F.group_norm)
def group_norm(
    mode: Respond,
    function: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Scale and shift respond per channel."""
    input = mode.check(input, function, weight, bias)
    return _affine(mode, F.group_norm(input, num_groups, None, None, eps), weight, bias, trailing=False)


@rule(F.batch_norm)
def batch_norm(
    mode: Respond,
    function: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Scale and shift respond per channel; the statistics are those of the whole batch."""
    input = mode.check(input, function, weight, bias)
    normal = F.batch_norm(input, running_mean, running_var, None, None, *args, **kwargs)
    return _affine(mode, normal, weight, bias, trailing=False)


@rule(F.instance_norm)
def instance_norm(
    mode: Respond,
    function: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Scale and shift respond per channel."""
    input = mode.check(input, function, weight, bias)
    normal = F.instance_norm(input, running_mean, running_var, None, None, *args, **kwargs)
    return _affine(mode, normal, weight, bias, trailing=False)
