"""Weights that are added or multiplied entry by entry: scales, position embeddings, masks on a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel.structure.moves import copy
from bilevel.structure.respond import Respond, rule

DIVISIONS = (torch.div, Tensor.div)


@rule(torch.mul, Tensor.mul, *DIVISIONS)
def scale(mode: Respond, function: Any, input: Any, other: Any) -> Tensor:
    """A weight times a number or a mask is a weight again; times an activation, it scales each example on its own."""
    if function in DIVISIONS and mode.responds(other):
        raise NotImplementedError(mode.refusal(mode.name(other), function, "as a divisor"))
    weight, x = (input, other) if mode.responds(input) else (other, input)
    if not isinstance(x, Tensor) or (not mode.responds(x) and (x.ndim == 0 or _is_mask(mode, x, weight))):
        return mode.register(function(input, other), weight, function(mode.weight(weight).template, x))
    if function in DIVISIONS:
        raise NotImplementedError(mode.refusal(mode.name(input), function, "by an activation"))
    return _elementwise(mode, function, x, weight, times=True)


@rule(torch.add, Tensor.add)
def shift(mode: Respond, function: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """A weight plus a number is a weight again; plus an activation, such as a position, it shifts each example."""
    weight, x = (input, other) if mode.responds(input) else (other, input)
    if alpha != 1:
        raise NotImplementedError(mode.refusal(mode.name(weight), function, "with alpha"))
    if not isinstance(x, Tensor) or (not mode.responds(x) and x.ndim == 0):
        return mode.register(weight + x, weight, mode.weight(weight).template)
    return _elementwise(mode, function, x, weight, times=False)


@rule(torch.sub, Tensor.sub)
def difference(mode: Respond, function: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """The sum with the negative."""
    negative = copy(mode, torch.neg, other) if mode.responds(other) else -other
    return shift(mode, function, input, negative, alpha=alpha)


@rule(torch.rsub, Tensor.__rsub__)
def difference_from(mode: Respond, function: Any, input: Any, other: Any) -> Tensor:
    """The difference in the other order."""
    return difference(mode, function, other, input)


def _is_mask(mode: Respond, x: Tensor, weight: Tensor) -> bool:
    """Whether a tensor has the shape of the weight and cannot be an activation."""
    return x.shape == weight.shape and not (len(x) == mode.count and mode.spread(weight))


def _elementwise(mode: Respond, function: Any, x: Tensor, weight: Tensor, *, times: bool) -> Tensor:
    x = mode.check(x, function, weight)
    aligned = weight.ndim == x.ndim  # the weight has a dimension of examples too
    if weight.ndim > x.ndim or (aligned and not mode.spread(weight)):
        reason = f"on an input of shape {tuple(x.shape)}, whose dimension 0 it shares"
        raise ValueError(mode.refusal(mode.name(weight), function, reason))
    value, tangent = mode.split(x)
    _, _, factor, template = mode.weight(weight)
    change = factor[:, 0] * template[0] if aligned else factor * template  # one for each example
    change = change.reshape(mode.count, *[1] * (x.ndim - change.ndim), *change.shape[1:])
    if times:
        return mode.join(value * weight, None if tangent is None else tangent * weight, value * change)
    return mode.join(value + weight, tangent, change)
