"""The scales and shifts of norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunction

from bilevel.duals import unpack
from bilevel.layouts import Layout
from bilevel.responding import NoExamples
from bilevel.structure.linear import LARGE
from bilevel.structure.respond import Respond, rule
from bilevel.structure.slopes import Shifts, Slopes


def _affine(
    mode: Respond,
    function: Any,
    input: Tensor,
    norm: Callable[[Tensor], Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    trailing: int = 0,
) -> Tensor:
    """Scale and shift what a norm has normalised: its channels in dimension 1, or some trailing dimensions."""
    with DisableTorchFunction():  # nothing in here is for another mode, and modes take time
        input = mode.activation(input)
        layout = mode.layout(input, function, weight, bias)
        if layout.dim >= input.ndim - trailing if trailing else layout.dim > 0:
            reason = f"on an input of shape {tuple(input.shape)}, whose dimension {layout.dim} counts the examples"
            raise NoExamples(mode.refusal(mode.name(weight, bias), function, reason))
    normal = norm(input)
    with DisableTorchFunction():
        return _scaled(mode, normal, weight, bias, layout, [] if trailing else [1] * (normal.ndim - 2))


def _scaled(
    mode: Respond, normal: Tensor, weight: Tensor | None, bias: Tensor | None, layout: Layout, free: list[int]
) -> Tensor:
    """Scaled and shifted, by the rules of dual numbers where responses are linearised."""

    def placed(param: Tensor | None) -> Tensor | None:
        if param is None or not mode.responds(param):
            return None
        change = mode.change(param)
        return mode.placed(change.reshape(*change.shape, *free), layout, normal.ndim)

    value, tangent = mode.split(normal)
    factor, shift = placed(weight), placed(bias)
    alike = {x.dtype for x in (value, tangent, weight, bias, factor, shift) if x is not None} == {value.dtype}
    if alike and mode.slope_only and factor is not None and weight is not None and value.numel() >= LARGE:
        offset = None if bias is None else bias.reshape(*bias.shape, *free)
        spread: Tensor = Slopes.apply(value, weight.reshape(*weight.shape, *free), offset, factor, shift)
        return spread
    if alike and mode.linearized and _constant(value, weight, bias) and (factor is not None or shift is not None):
        scale = None if weight is None else weight.reshape(*weight.shape, *free)
        offset = None if bias is None else bias.reshape(*bias.shape, *free)
        if scale is None:
            y = value if offset is None else value + offset
        else:
            y = value * scale if offset is None else torch.addcmul(offset, value, scale)
        return mode.join(y, Shifts.apply(tangent, scale, value, factor, shift))
    y, responses = value, [tangent]
    if weight is not None:
        scale, its_tangent = mode.split(weight.reshape(*weight.shape, *free))
        responses = [None if tangent is None else tangent * scale, None if its_tangent is None else value * its_tangent]
        y = value * scale
    if bias is not None:
        offset, its_tangent = mode.split(bias.reshape(*bias.shape, *free))
        responses.append(its_tangent)
        y = y + offset
    y = y.to(value.dtype)
    return mode.join(y, *responses, None if factor is None else value * factor, shift)


def _constant(*parts: Tensor | None) -> bool:
    """Whether no part is differentiated, in reverse or forward."""
    if torch._C._are_functorch_transforms_active():
        return False
    return all(part is None or (not part.requires_grad and unpack(part)[1] is None) for part in parts)


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
    trailing = 1 if isinstance(normalized_shape, int) else len(normalized_shape)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, normalized_shape, None, None, eps)

    return _affine(mode, function, input, norm, weight, bias, trailing=trailing)


@rule(F.rms_norm)
def rms_norm(
    mode: Respond, function: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    """As layer norm, without a shift."""
    trailing = 1 if isinstance(normalized_shape, int) else len(normalized_shape)

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, normalized_shape, None, eps)

    return _affine(mode, function, input, norm, weight, None, trailing=trailing)


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

    def norm(x: Tensor) -> Tensor:
        return F.group_norm(x, num_groups, None, None, eps)

    return _affine(mode, function, input, norm, weight, bias)


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

    def norm(x: Tensor) -> Tensor:
        return F.batch_norm(x, running_mean, running_var, None, None, *args, **kwargs)

    return _affine(mode, function, input, norm, weight, bias)


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

    def norm(x: Tensor) -> Tensor:
        return F.instance_norm(x, running_mean, running_var, None, None, *args, **kwargs)

    return _affine(mode, function, input, norm, weight, bias)
