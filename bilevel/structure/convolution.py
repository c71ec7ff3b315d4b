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
    """A row is an output channel; an input channel where there is one output channel only."""
    return _convolve(mode, function, input, weight, bias, args, kwargs, out=0, into=1)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def transposed_convolution(
    mode: Respond, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """A row of the weight is an input channel: the input is scaled. A row of the bias is an output channel."""
    return _convolve(mode, function, input, weight, bias, args, kwargs, into=0, out=1)


def _convolve(
    mode: Respond, function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, args: Any, kwargs: Any, **rows: int
) -> Tensor:
    def op(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y: Tensor = function(x, w, b, *args, **kwargs)
        return y

    if x.ndim != weight.ndim:
        raise ValueError(mode.refusal(mode.name(weight, bias), function, "on an input without a dimension of examples"))
    groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
    if groups > 1:  # dimension 1 counts the channels of one group
        rows = {side: dim for side, dim in rows.items() if dim == 0}
    return bilinear(mode, function, op, x, weight, bias, axis=1, **rows)
