"""Other products with a weight: einsum, bilinear layers, bags of embeddings; and PReLU."""

from __future__ import annotations

from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.plain import CELLS, PLAIN, is_packed
from bilevel.responding import NoExamples, NoRule
from bilevel.structure.elementwise import scale
from bilevel.structure.linear import linear
from bilevel.structure.moves import move
from bilevel.structure.respond import Respond, rule


@rule(torch.einsum)
def einsum(mode: Respond, function: Any, equation: Any, *operands: Any) -> Tensor:
    """A weight and activations: the factors of its rows are one operand more."""
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = (*operands[0],)
    responding = [x for x in operands if isinstance(x, Tensor) and mode.responds(x)]
    if not isinstance(equation, str) or len(responding) != 1 or len(operands) < 2:
        raise NoRule(mode.refusal(mode.name(*responding), function, "other than one weight with activations"))
    weight = responding[0]
    inputs, output = _labels(mode, function, equation, operands, weight)
    label = _example_label(mode, function, inputs, output, operands, weight)
    pairs = [mode.split(x) for x in operands]
    place = next(index for index, x in enumerate(operands) if x is weight)
    found = mode.terms(weight)

    def contract(*values: Tensor) -> Tensor:
        result: Tensor = torch.einsum(f"{','.join(inputs)}->{output}", *values)
        return result

    values = [pair[0] for pair in pairs]
    tangents = [
        contract(*values[:index], tangent, *values[index + 1 :])
        for index, (_, tangent) in enumerate(pairs)
        if tangent is not None
    ]
    responses = []
    for factor, template in found.terms:
        kept = [dim for dim, size in enumerate(factor.shape[1:]) if size > 1]
        rows = label + "".join(inputs[place][dim] for dim in kept)
        numbers = factor.reshape(mode.count, *(factor.shape[1 + dim] for dim in kept))
        # Right after an operand that has the rows, so that nothing larger than it is made on the way.
        near = next((i for i, own in enumerate(inputs) if i != place and set(rows) <= set(own)), None)
        some = [*values[:place], template, *values[place + 1 :]]
        names = [*inputs]
        order = [*range(len(some))]
        if near is not None:
            order.remove(near)
            order = [near, *order]
        parts, labels = [some[i] for i in order], [names[i] for i in order]
        at = 1 if near is not None else len(parts)
        parts.insert(at, numbers)
        labels.insert(at, rows)
        responses.append(torch.einsum(f"{','.join(labels)}->{output}", *parts))
    return mode.join(contract(*values), *tangents, *responses)


def _labels(mode: Respond, function: Any, equation: str, operands: Any, weight: Tensor) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with letters in place of an ellipsis."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    free = [letter for letter in ascii_letters if letter not in equation]
    widths = [x.ndim - len(own.replace("...", "")) for own, x in zip(inputs, operands, strict=True)]
    widest = max((width for own, width in zip(inputs, widths, strict=True) if "..." in own), default=0)
    dots = "".join(free[:widest])
    full = [own.replace("...", dots[widest - width :]) for own, width in zip(inputs, widths, strict=True)]
    if not arrow:
        counts = "".join(full)
        output = dots + "".join(sorted(letter for letter in set(counts) - set(dots) if counts.count(letter) == 1))
    return full, output.replace("...", dots)


def _example_label(mode: Respond, function: Any, inputs: list[str], output: str, operands: Any, weight: Tensor) -> str:
    """The letter of the examples, which every activation must have, and the weight and no sum."""
    found = set()
    for own, x in zip(inputs, operands, strict=True):
        if x is not weight and mode.layouts.known(x):
            layout = mode.layout(x, function, weight)
            found.add(own[layout.dim] if layout.alone else "")
    label = found.pop() if len(found) == 1 else ""
    if (
        not label
        or label not in output
        or any(label in own for own, x in zip(inputs, operands, strict=True) if x is weight)
    ):
        raise NoRule(mode.refusal(mode.name(weight), function, "in which the examples have no letter of their own"))
    return label


@rule(F.bilinear)
def bilinear_form(
    mode: Respond, function: Any, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """A linear layer on all products of two inputs."""
    if mode.responds(input1) or mode.responds(input2):
        raise NoRule(mode.refusal(mode.name(input1, input2), function, "in the place of an activation"))
    products = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    mode.layouts.note(products, mode.layout(input1, function, weight, bias))
    flat = move(mode, Tensor.flatten, weight, 1) if mode.responds(weight) else weight.flatten(1)
    return linear(mode, F.linear, products, flat, bias)


@rule(*(getattr(owner, name) for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if name in dir(owner)))
def experts(
    mode: Respond, function: Any, input: Tensor, weight: Tensor, offs: Tensor | None = None, **options: Any
) -> Tensor:
    """Each row of the input with the matrix of its expert; a row of the weight is an expert."""
    layout = mode.layout(input, function, weight)
    if (
        any(value is not None for value in options.values())
        or offs is None
        or input.ndim != 2
        or weight.ndim != 3
        or set(mode.terms(weight).rows) - {0}
    ):
        raise NoRule(mode.refusal(mode.name(weight), function, "other than a matrix for each expert"))
    if layout.dim:
        raise NoExamples(mode.refusal(mode.name(weight), function, "with examples in another dimension than the first"))
    expert = torch.searchsorted(offs, torch.arange(len(input), device=offs.device), right=True)
    expert = expert.clamp_max(len(weight) - 1)
    examples = layout.ids(mode.count, input.device)
    value, tangent = mode.split(input)
    found = mode.terms(weight)
    y = function(value, weight, offs=offs)
    responses = [None if tangent is None else function(tangent, weight, offs=offs)]
    for factor, template in found.terms:
        part = y if template is weight else function(value, template, offs=offs)
        numbers = factor.flatten(1).expand(-1, len(weight))
        responses.append(numbers[examples, expert][:, None] * part)
    return mode.join(y, *responses)


@rule(*PLAIN)
def taken_apart(mode: Respond, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Recurrent networks and bags of embeddings: the operations that they hide have rules."""
    if function in CELLS and is_packed(args):
        reason = "with a packed sequence, whose rows are of examples in another order: pass a padded one"
        raise NoExamples(mode.refusal(mode.name(*pytree.tree_leaves(args)), function, reason))
    if function is F.embedding_bag and args[0].ndim != 2:
        reason = "with bags of different lengths (offsets): pad them to (B, length) and pass padding_idx"
        raise NoExamples(mode.refusal(mode.name(*args, *kwargs.values()), function, reason))
    with mode:
        return PLAIN[function](*args, **kwargs)


@rule(F.prelu, torch.prelu)
def prelu(mode: Respond, function: Any, input: Tensor, weight: Tensor) -> Tensor:
    """A slope on the left, one for all or one per channel."""
    if mode.responds(input):
        raise NoRule(mode.refusal(mode.name(input), function, "in the place of an activation"))
    if input.ndim > 2 and weight.numel() > 1:
        weight = move(mode, Tensor.reshape, weight, -1, *[1] * (input.ndim - 2))
    return torch.where(input > 0, input, scale(mode, torch.mul, input, weight))
