"""Convolutions and their transposes."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bilevel.structure.linear import bilinear
from bilevel.structure.respond import Respond, rule


@rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(
    mode: Respond, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """A row is an output channel."""

    def op(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y: Tensor = function(x, w, b, *args, **kwargs)
        return y

    if input.ndim != weight.ndim:
        raise ValueError(mode.refusal(mode.name(weight, bias), function, "on an input without a dimension of examples"))
    return bilinear(mode, function, op, input, weight, bias, 1)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def transposed_convolution(
    mode: Respond, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """A row of the weight is an input channel: the input is scaled. A row of the bias is an output channel."""
    if input.ndim != weight.ndim:
        raise ValueError(mode.refusal(mode.name(weight, bias), function, "on an input without a dimension of examples"))
    mode.check(input, function, weight, bias)
    value, tangent = mode.split(input)
    y = function(value, weight, bias, *args, **kwargs)
    rows, offsets = mode.rows(weight), mode.rows(bias)
    ones = [1] * (y.ndim - 2)
    scaled = None if rows is None else value * rows.factor.reshape(*rows.factor.shape, *ones)
    change = None if offsets is None else offsets.factor * offsets.template
    return mode.join(
        y,
        None if tangent is None else function(tangent, weight, None, *args, **kwargs),
        None if rows is None else function(scaled, rows.template, None, *args, **kwargs),
        None if change is None else change.reshape(*change.shape, *ones),
    )
