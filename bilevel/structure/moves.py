"""What a network makes of a weight before it is used: slices, transposes, casts, one copy for each example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    name, _, factor, template, _ = mode.weight(input)
    numbers = torch.arange(factor[0].numel(), device=factor.device).reshape(factor.shape[1:]).expand_as(template)
    moved = [function(x, *args, **kwargs) for x in (input, numbers)]
    results = list(zip(*([x] if isinstance(x, Tensor) else x for x in moved), strict=True))
    for index, (weight, number) in enumerate(results):
        if number.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():  # a copy, not a view
            raise NotImplementedError(mode.refusal(name, function, "after which its rows cannot be told apart"))
        # Stride zero marks a dimension along which the row stays the same.
        some = number[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in number.stride())]

        def part(whole: Tensor, index: int = index) -> Tensor:
            found = function(whole, *args, **kwargs)
            return found if isinstance(found, Tensor) else found[index]

        mode.register(weight, input, part, factor.flatten(1)[:, some])
    return moved[0]


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def repeat(mode: Respond, function: Any, input: Tensor, *sizes: Any) -> Any:
    """One copy for each example, where expanding does the same."""
    times = list(sizes[0] if isinstance(sizes[0], tuple | list) else sizes)
    times = [1] * (input.ndim - len(times)) + times
    shape = [1] * (len(times) - input.ndim) + [*input.shape]
    if any(size > 1 and many > 1 for size, many in zip(shape, times, strict=True)):
        raise NotImplementedError(mode.refusal(mode.name(input), function, "of more than single entries"))
    return move(mode, Tensor.expand, input, *[size * many for size, many in zip(shape, times, strict=True)])


CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "neg")


@rule(*(getattr(Tensor, name) for name in CASTS), torch.clone, torch.neg)
def copy(mode: Respond, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A copy or a cast of a weight, or its negative, responds as the weight does."""
    result = function(input, *args, **kwargs)
    if not mode.responds(input) or not isinstance(result, Tensor):  # as in x.type_as(weight)
        return result
    if not result.is_floating_point():
        raise NotImplementedError(mode.refusal(mode.name(input), function, f"which makes it {result.dtype}"))
    _, _, factor, _, chosen = mode.weight(input)
    return mode.register(result, input, lambda x: function(x, *args, **kwargs), factor.to(result), chosen=chosen)


@rule(torch.cat, torch.concat, torch.concatenate)
def concatenate(mode: Respond, function: Any, tensors: Any, dim: int = 0) -> Tensor:
    """Weights that were expanded to one copy for each example, such as a class token, beside activations."""
    parts = [mode.check(x, function, *tensors) for x in tensors]
    if dim % parts[0].ndim == 0:
        raise ValueError(mode.refusal(mode.name(*tensors), function, "along the dimension of the examples"))
    result: Tensor = function(parts, dim)
    return result
