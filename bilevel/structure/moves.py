"""What a network makes of a weight before it is used: slices, transposes, casts, one copy for each example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel.layouts import FIRST, Layout
from bilevel.responding import NoExamples, NoRule
from bilevel.structure.respond import Respond, rule

VIEWS = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to"),
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "chunk", "split", "unbind", "narrow", "select"),
)


@rule(
    *(getattr(owner, name) for owner in (torch, Tensor) for name in VIEWS if name in dir(owner)),
    *(Tensor.T.__get__, Tensor.mT.__get__, Tensor.__getitem__),  # type: ignore[attr-defined]
)
def move(mode: Respond, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A view of a weight is the same view of its template and of the numbers of its rows."""
    if not mode.responds(input):  # as in x.expand_as(weight)
        return function(input, *args, **kwargs)
    found = mode.terms(input)
    moved = function(input, *args, **kwargs)
    single = isinstance(moved, Tensor)
    terms = [_moved_factor(mode, function, input, factor, args, kwargs) for factor, _ in found.terms]
    for index, weight in enumerate([moved] if single else moved):

        def part(whole: Tensor, index: int = index, single: bool = single) -> Tensor:
            result = function(whole, *args, **kwargs)
            chosen: Tensor = result if single else result[index]
            return chosen

        more = tuple((term[index], part(template)) for term, (_, template) in zip(terms[1:], found.more, strict=True))
        mode.register(weight, input, part, terms[0][index], more=more)
    return moved


def _moved_factor(mode: Respond, function: Any, input: Tensor, factor: Tensor, args: Any, kwargs: Any) -> list[Tensor]:
    """The numbers of the rows after a view of the weight, one tensor for each part of it."""
    numbers = torch.arange(factor[0].numel(), device=factor.device).reshape(factor.shape[1:]).expand_as(input)
    found = function(numbers, *args, **kwargs)
    results = []
    for number in [found] if isinstance(found, Tensor) else found:
        if number.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():  # a copy, not a view
            raise NoRule(mode.refusal(mode.name(input), function, "after which its rows cannot be told apart"))
        # Stride zero marks a dimension along which the row stays the same.
        some = number[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in number.stride())]
        results.append(factor.flatten(1)[:, some])
    return results


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def repeat(mode: Respond, function: Any, input: Tensor, *sizes: Any) -> Any:
    """One copy for each example, where expanding does the same."""
    times = list(sizes[0] if isinstance(sizes[0], tuple | list) else sizes)
    times = [1] * (input.ndim - len(times)) + times
    shape = [1] * (len(times) - input.ndim) + [*input.shape]
    if mode.count > 1 and times == [mode.count] + [1] * (input.ndim - 1):
        # One copy after the other for the examples, (B * rows, ...).
        value = input.expand(mode.count, *input.shape).flatten(0, 1).clone(memory_format=torch.contiguous_format)
        result = mode.join(value, mode.change(input).flatten(0, 1))
        mode.layouts.note(result, Layout(0, 1, len(input)))
        return result
    if any(size > 1 and many > 1 for size, many in zip(shape, times, strict=True)):
        raise NoRule(mode.refusal(mode.name(input), function, "of more than single entries"))
    return move(mode, Tensor.expand, input, *[size * many for size, many in zip(shape, times, strict=True)])


CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "neg")


@rule(*(getattr(Tensor, name) for name in CASTS), torch.clone, torch.neg)
def copy(mode: Respond, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A copy or a cast of a weight, or its negative, responds as the weight does."""
    result = function(input, *args, **kwargs)
    if not mode.responds(input) or not isinstance(result, Tensor):  # as in x.type_as(weight)
        return result
    if not result.is_floating_point():
        raise NoRule(mode.refusal(mode.name(input), function, f"which makes it {result.dtype}"))
    found = mode.terms(input)

    def made(x: Tensor) -> Tensor:
        copied: Tensor = function(x, *args, **kwargs)
        return copied

    more = tuple((factor.to(result), made(template)) for factor, template in found.more)
    return mode.register(result, input, made, found.factor.to(result), chosen=found.chosen, more=more)


@rule(torch.nn.functional.dropout, torch.dropout)
def masked(mode: Respond, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """DropConnect: a mask that all examples share."""
    if kwargs.get("inplace") or (len(args) > 2 and args[2]):
        raise NoRule(mode.refusal(mode.name(input), function, "in place"))
    mask = function(torch.ones_like(input), *args, **kwargs)
    found = mode.terms(input)
    more = tuple((factor, template * mask) for factor, template in found.more)
    return mode.register(input * mask, input, lambda template: template * mask, more=more)


@rule(torch.cat, torch.concat, torch.concatenate)
def concatenate(mode: Respond, function: Any, tensors: Any, dim: int = 0) -> Tensor:
    """Weights that were expanded to one copy for each example, such as a class token, beside activations."""
    if all(mode.responds(x) and not (mode.spread(x) and len(x) == mode.count > 1) for x in tensors):
        raise NoRule(mode.refusal(mode.name(*tensors), function, "of weights alone"))
    parts = [mode.activation(x) for x in tensors]
    layouts = {mode.layouts.of(x) for x in parts if not mode.responds(x) and x.ndim == max(y.ndim for y in parts)}
    if layouts != {FIRST} or any(map(mode.responds, parts)):
        parts = [mode.check(x, function, *tensors) for x in parts]
    if dim % parts[0].ndim == 0:
        raise NoExamples(mode.refusal(mode.name(*tensors), function, "along the dimension of the examples"))
    result: Tensor = function(parts, dim)
    return result
