"""Weights that are added or multiplied entry by entry: scales, position embeddings, masks on a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel.structure.respond import Respond, rule


@rule(torch.mul, Tensor.mul, torch.div, Tensor.div)
def scale(mode: Respond, function: Any, input: Any, other: Any) -> Tensor:
    """A weight times a number or a mask is a weight again; times an activation, it scales each example by its own."""
    if isinstance(input, Tensor) and mode.rows(input) is not None:
        rows = mode.rows(input)
        assert rows is not None
        if not isinstance(other, Tensor) or (mode.rows(other) is None and other.shape in ((), input.shape)):
            return mode.register(function(input, other), input, function(rows.template, other))
        if function in (torch.div, Tensor.div):
            raise NotImplementedError(mode.refusal(mode.name(input), function, "by an activation"))
        return _elementwise(mode, function, other, input, times=True)
    if function in (torch.div, Tensor.div):
        raise NotImplementedError(mode.refusal(mode.name(other), function, "as a divisor"))
    if not isinstance(input, Tensor) or input.shape in ((), other.shape):
        return scale(mode, function, other, input)
    return _elementwise(mode, function, input, other, times=True)


@rule(torch.add, Tensor.add)
def shift(mode: Respond, function: Any, input: Any, other: Any) -> Tensor:
    """A weight that is added to an activation, such as a position embedding."""
    first = isinstance(input, Tensor) and mode.rows(input) is not None
    x, weight = (other, input) if first else (input, other)
    return _elementwise(mode, function, x, weight, times=False)


def _elementwise(mode: Respond, function: Any, x: Any, weight: Tensor, *, times: bool) -> Tensor:
    if not isinstance(x, Tensor) or mode.rows(x) is not None:
        raise NotImplementedError(mode.refusal(mode.name(weight), function, "without an activation"))
    mode.check(x, function, weight)
    rows = mode.rows(weight)
    assert rows is not None
    if weight.ndim > x.ndim or (weight.ndim == x.ndim and len(weight) > 1):
        reason = f"on an input of shape {tuple(x.shape)}, whose dimension 0 it shares"
        raise ValueError(mode.refusal(mode.name(weight), function, reason))
    value, tangent = mode.split(x)
    change = rows.change()  # one for each example
    own = weight.shape[1:] if weight.ndim == x.ndim else weight.shape
    change = change.reshape(mode.count, *[1] * (x.ndim - 1 - len(own)), *own)
    if times:
        return mode.join(value * weight, None if tangent is None else tangent * weight, value * change)
    return mode.join(value + weight, tangent, change)
