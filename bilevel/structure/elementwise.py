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
        return mode.register(function(input, other), weight, lambda template: function(template, x))
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


@rule(torch.where, Tensor.where)
def choose(mode: Respond, function: Any, condition: Tensor, input: Any, other: Any) -> Tensor:
    """A weight where a mask allows it: a weight again, or one for each example if the mask has one for each."""
    if function is Tensor.where:
        condition, input = input, condition
    weight, x, mask = (input, other, condition) if mode.responds(input) else (other, input, ~condition)
    if mode.responds(x) or (isinstance(x, Tensor) and x.ndim):
        raise NotImplementedError(mode.refusal(mode.name(weight), function, "against something else than a number"))
    return _masked(mode, function, weight, mask, x)


@rule(torch.masked_fill, Tensor.masked_fill)
def fill(mode: Respond, function: Any, input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """The same, with a mask of what is not allowed."""
    return _masked(mode, function, input, ~mask, value)


def _masked(mode: Respond, function: Any, weight: Tensor, mask: Tensor, value: Any) -> Tensor:
    _, _, factor, template, _ = mode.weight(weight)
    result = torch.where(mask, weight, value)
    if result.shape == weight.shape:
        return mode.register(result, weight, torch.where(mask, template, 0.0))
    mode.check(mask, function, weight)
    if weight.ndim > mask.ndim or (weight.ndim == mask.ndim and not mode.spread(weight)):
        reason = f"with a mask of shape {tuple(mask.shape)}, whose dimension 0 it shares"
        raise ValueError(mode.refusal(mode.name(weight), function, reason))
    change = factor[:, 0] * template[0] if weight.ndim == mask.ndim else factor * template
    change = change.reshape(mode.count, *[1] * (result.ndim - change.ndim), *change.shape[1:])
    return mode.join(result, torch.where(mask, change, 0.0))


def _is_mask(mode: Respond, x: Tensor, weight: Tensor) -> bool:
    """Whether a tensor has the shape of the weight and cannot be an activation."""
    shares = mode.spread(weight) or mode.weight(weight).chosen
    return x.shape == weight.shape and not (len(x) == mode.count and shares)


def _elementwise(mode: Respond, function: Any, x: Tensor, weight: Tensor, *, times: bool) -> Tensor:
    x = mode.check(x, function, weight)
    aligned = weight.ndim == x.ndim  # the weight has a dimension of examples too
    _, _, factor, template, chosen = mode.weight(weight)
    if weight.ndim > x.ndim or (aligned and not (mode.spread(weight) or chosen)):
        reason = f"on an input of shape {tuple(x.shape)}, whose dimension 0 it shares"
        raise ValueError(mode.refusal(mode.name(weight), function, reason))
    value, tangent = mode.split(x)
    if not aligned:
        change = factor * template  # one for each example
    elif mode.spread(weight):
        change = factor[:, 0] * template[0]
    else:  # example i takes entry i of it
        change = factor.diagonal(dim1=0, dim2=1).movedim(-1, 0) * template
    change = change.reshape(mode.count, *[1] * (x.ndim - change.ndim), *change.shape[1:])
    if times:
        return mode.join(value * weight, None if tangent is None else tangent * weight, value * change)
    return mode.join(value + weight, tangent, change)
