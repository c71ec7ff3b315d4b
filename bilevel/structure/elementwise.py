"""Weights that are added or multiplied entry by entry: scales, position embeddings, masks on a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel.layouts import FIRST, Layout
from bilevel.responding import NoExamples, NoRule
from bilevel.structure.moves import copy
from bilevel.structure.respond import Respond, rule
from bilevel.structure.weights import Term

DIVISIONS = (torch.div, Tensor.div, torch.true_divide, Tensor.true_divide)


@rule(torch.mul, Tensor.mul, torch.multiply, Tensor.multiply, *DIVISIONS)
def scale(mode: Respond, function: Any, input: Any, other: Any, **options: Any) -> Tensor:
    """A weight times a number or a mask is a weight again; times an activation, it scales each example on its own."""
    if options or (function in DIVISIONS and mode.responds(other)):
        return pointwise(mode, function, input, other, **options)
    weight, x = (input, other) if mode.responds(input) else (other, input)
    if not isinstance(x, Tensor) or _is_constant(mode, x, weight):
        result, found = function(input, other), mode.terms(weight)
        (factor, _), *more = _lifted(mode, weight, result)
        rest = tuple((f, function(template, x)) for (f, _), (_, template) in zip(more, found.more, strict=True))
        return mode.register(result, weight, lambda template: function(template, x), factor, more=rest)
    if function in DIVISIONS:
        return pointwise(mode, function, input, other)
    weight, x = _sides(mode, function, weight, x)
    value, tangent = mode.split(x)
    change = _change(mode, function, weight, mode.layout(x, function, weight), x)
    return mode.join(value * weight, None if tangent is None else tangent * weight, value * change)


@rule(torch.add, Tensor.add)
def shift(mode: Respond, function: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """A weight plus a number is a weight again; plus an activation, such as a position, it shifts each example."""
    weight, x = (input, other) if mode.responds(input) else (other, input)
    if alpha != 1:
        return pointwise(mode, function, input, other, alpha=alpha)
    if not isinstance(x, Tensor) or _is_constant(mode, x, weight):
        result = weight + x
        (factor, template), *more = _lifted(mode, weight, result)
        return mode.register(result, weight, template, factor, more=tuple(more))
    weight, x = _sides(mode, function, weight, x)
    value, tangent = mode.split(x)
    change = _change(mode, function, weight, mode.layout(x, function, weight), x)
    return mode.join(value + weight, tangent, change)


@rule(torch.sub, Tensor.sub, torch.subtract, Tensor.subtract)
def difference(mode: Respond, function: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """The sum with the negative."""
    if alpha != 1:
        return pointwise(mode, function, input, other, alpha=alpha)
    negative = copy(mode, torch.neg, other) if mode.responds(other) else -other
    if not mode.responds(other) and isinstance(other, Tensor) and mode.layouts.known(other):
        mode.layouts.note(negative, mode.layouts.of(other))
    return shift(mode, torch.add, input, negative)


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
        return pointwise(mode, torch.where, condition, input, other)
    return _masked(mode, function, weight, mask, x)


@rule(torch.masked_fill, Tensor.masked_fill)
def fill(mode: Respond, function: Any, input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """The same, with a mask of what is not allowed."""
    if isinstance(value, Tensor) and (value.ndim or mode.responds(value)):
        return pointwise(mode, torch.where, ~mask, input, value)
    if not mode.responds(input):
        return pointwise(mode, function, input, mask, value)
    return _masked(mode, function, input, ~mask, value)


def _masked(mode: Respond, function: Any, weight: Tensor, mask: Tensor, value: Any) -> Tensor:
    result = torch.where(mask, weight, value)
    if result.shape == weight.shape and not (mode.layouts.known(mask) and _shares(mode, weight)):
        more = tuple((factor, torch.where(mask, template, 0.0)) for factor, template in mode.terms(weight).more)
        return mode.register(result, weight, torch.where(mask, mode.terms(weight).template, 0.0), more=more)
    layout = mode.layout(mask, function, weight)
    if weight.ndim > mask.ndim:
        reason = f"with a mask of shape {tuple(mask.shape)}, whose dimension 0 it shares"
        raise NoExamples(mode.refusal(mode.name(weight), function, reason))
    change = _change(mode, function, weight, layout, mask)
    return mode.join(result, torch.where(mask, change, 0.0))


def pointwise(mode: Respond, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Any function of entries: of weights alone, it is a weight again; with activations, an activation.

    Args:
        mode: The active mode.
        function: Of tensors that broadcast.
        args: Of the function.
        kwargs: Of the function.

    Returns:
        Its result.

    Raises:
        NoExamples: If a weight has more dimensions than the activation.
        NoRule: If there are weights alone, and no rule by rows.
    """
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    weights = [x for x in tensors if mode.responds(x)]
    others = [x for x in tensors if not mode.responds(x) and x.ndim]
    active = [x for x in others if mode.layouts.known(x)]
    active = active or [x for x in others if x.shape[:1] == (mode.count,)]
    active = active or [mode.activation(x) for x in weights if _shares(mode, x)]
    if not active:
        if len(weights) == 1 and not others and mode.linearized:
            return _along(mode, function, weights[0], args, kwargs)
        raise NoRule(mode.refusal(mode.name(*weights), function, "which has no rule"))
    x = max(active, key=lambda x: x.ndim)
    layout = mode.layout(x, function, *weights)
    ndim = max(x.ndim for x in tensors)
    if ndim > x.ndim:
        reason = f"on an input of shape {tuple(x.shape)}, whose dimension 0 it shares"
        raise NoExamples(mode.refusal(mode.name(*weights), function, reason))

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or not mode.responds(value):
            return value
        change = _change(mode, function, value, layout, x)
        if value.ndim == x.ndim and value.shape[layout.dim] == mode.count:
            return mode.join(value.clone(memory_format=torch.contiguous_format), change)
        return mode.join(value.expand(torch.broadcast_shapes(value.shape, change.shape)).contiguous(), change)

    result: Tensor = function(*map(own, args), **{key: own(value) for key, value in kwargs.items()})
    return result


def _along(mode: Respond, function: Any, weight: Tensor, args: Any, kwargs: Any) -> Tensor:
    """The derivative along the template, row by row: linearised, a function of entries keeps the rows."""
    found = mode.terms(weight)

    def slope(template: Tensor) -> Tensor:
        def dual(value: Any) -> Any:
            return mode.join(weight, template) if value is weight else value

        result = mode.split(function(*map(dual, args), **{key: dual(value) for key, value in kwargs.items()}))[1]
        return torch.zeros_like(template) if result is None else result

    (factor, template), *more = found.terms
    result = mode.split(function(*args, **kwargs))[0]
    rest = tuple((factor, slope(template)) for factor, template in more)
    return mode.register(result, weight, slope(template), factor, more=rest)


NAMES = (
    *("exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "square", "pow", "reciprocal", "abs", "sigmoid", "tanh", "relu"),
    *("softplus", "sin", "cos", "sinh", "cosh", "asinh", "atan", "erf", "clamp", "clamp_min", "clamp_max", "silu"),
    *("gelu", "elu", "selu", "celu", "leaky_relu", "hardtanh", "relu6", "logsigmoid", "exp2", "log2", "logit", "lerp"),
    *(
        "maximum",
        "minimum",
        "addcmul",
        "addcdiv",
        "atan2",
        "hypot",
        "logaddexp",
        "__rdiv__",
        "__rtruediv__",
        "__rpow__",
    ),
    *("__pow__", "__truediv__", "__div__", "softsign", "mish", "clip", "absolute", "arctan", "positive", "xlogy"),
)


@rule(*{getattr(owner, name) for owner in (torch, Tensor, torch.nn.functional) for name in NAMES if name in dir(owner)})
def entries(mode: Respond, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A function of entries, as in ``logit_scale.exp()``, ``gate.sigmoid() * x`` or ``x / temperature``."""
    if kwargs.get("inplace"):
        raise NoRule(mode.refusal(mode.name(*args, *kwargs.values()), function, "in place"))
    return pointwise(mode, function, *args, **kwargs)


INPLACE: dict[Any, Any] = {
    **{getattr(Tensor, name): getattr(torch, name.strip("_")) for name in ("add_", "sub_", "mul_", "div_")},
    Tensor.__iadd__: torch.add,
    Tensor.__isub__: torch.sub,
    Tensor.__imul__: torch.mul,
    Tensor.__itruediv__: torch.div,
    Tensor.masked_fill_: torch.masked_fill,
}
KINDS: dict[Any, Callable[..., Tensor]] = {
    torch.add: shift,
    torch.sub: difference,
    torch.mul: scale,
    torch.div: scale,
    torch.masked_fill: fill,
}


@rule(*INPLACE)
def in_place(mode: Respond, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``x += weight`` changes the activation, and all that shares its memory."""
    if mode.responds(input) or not mode.layouts.known(input):
        raise NoRule(mode.refusal(mode.name(input, *args), function, "which changes something in place"))
    before = input.clone()  # products keep their factors for the backward pass
    mode.layouts.note(before, mode.layouts.of(input))
    plain = INPLACE[function]
    return input.copy_(KINDS[plain](mode, plain, before, *args, **kwargs))


def _sides(mode: Respond, function: Any, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A weight and an activation, if one of two weights was expanded to one entry for each example."""
    if not mode.responds(x):
        return weight, x
    if _shares(mode, weight):
        weight, x = x, weight
    if not _shares(mode, x):
        raise NoRule(mode.refusal(mode.name(weight), function, "together with another weight"))
    return weight, mode.activation(x)


def _shares(mode: Respond, weight: Tensor) -> bool:
    """Whether a weight was expanded to one entry for each example."""
    return weight.ndim > 0 and len(weight) == mode.count > 1 and mode.spread(weight)


def _is_constant(mode: Respond, x: Tensor, weight: Tensor) -> bool:
    """Whether a tensor is neither a weight nor an activation: a number, a mask on the weight, a buffer."""
    if mode.responds(x) or mode.layouts.known(x):
        return False
    if x.ndim < weight.ndim or x.ndim == 0 or x.shape[:1] != (mode.count,):
        return True
    return x.shape == weight.shape and not (mode.spread(weight) or mode.terms(weight).chosen)


def _lifted(mode: Respond, weight: Tensor, result: Tensor) -> list[Term]:
    """The terms of a weight that was broadcast to the shape of a result."""
    free = [1] * (result.ndim - weight.ndim)
    return [
        (factor.reshape(mode.count, *free, *factor.shape[1:]), template.expand_as(result))
        for factor, template in mode.terms(weight).terms
    ]


def _change(mode: Respond, function: Any, weight: Tensor, layout: Layout, x: Tensor) -> Tensor:
    """The change of a weight for each example, so that it broadcasts to an activation."""
    place = layout.dim - (x.ndim - weight.ndim)  # where the examples would be in the weight
    if weight.ndim > x.ndim:
        reason = f"on an input of shape {tuple(x.shape)}, whose dimension 0 it shares"
        raise NoExamples(mode.refusal(mode.name(weight), function, reason))
    if place < 0 or weight.shape[place] == 1:
        return mode.placed(mode.change(weight), layout, x.ndim)
    _, _, factor, template, chosen, *_ = mode.weight(weight)
    if factor.shape[1 + place] == 1 and template.stride(place) == 0:  # the same for all
        return mode.placed(factor * template.narrow(place, 0, 1), layout, x.ndim)
    if layout == FIRST and chosen:  # example i takes entry i of it
        return factor.diagonal(dim1=0, dim2=1).movedim(-1, 0) * template
    reason = f"on an input of shape {tuple(x.shape)}, whose dimension {layout.dim} it shares"
    raise NoExamples(mode.refusal(mode.name(weight), function, reason))
