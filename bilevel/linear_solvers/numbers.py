"""The scalars of an iteration: numbers of Python on a CPU, where they cost nothing; tensors where a look would wait."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from bilevel.parallel import is_sharded

Number = Any
"""A number or a truth value: of Python, or a scalar tensor."""


def on_host(v: Tensor) -> bool:
    """Whether scalars that belong to a vector are kept as numbers: on a CPU, unless a graph is being traced."""
    return v.device.type == "cpu" and get_proxy_mode() is None and not is_sharded(v)


def pick(condition: Any, first: Any, second: Any) -> Any:
    """The first if the condition holds, and otherwise the second.

    Returns:
        One of them.
    """
    if isinstance(condition, Tensor):
        return torch.where(condition, first, second)
    return first if condition else second


def nought(like: Number) -> Number:
    """Zero, of the same kind as another number.

    Returns:
        A number.
    """
    return torch.zeros_like(like) if isinstance(like, Tensor) else 0.0


def negate(condition: Number) -> Number:
    """Whether the condition does not hold.

    Returns:
        A truth value of the same kind.
    """
    return ~condition if isinstance(condition, Tensor) else not condition


def divide(a: Number, b: Number) -> Number:
    """A quotient that is infinite or NaN where the divisor is zero, as that of tensors.

    Returns:
        The quotient.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor) or b != 0:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def larger(a: Number, b: Number) -> Number:
    """The larger of two numbers, or NaN if one of them is.

    Returns:
        A number of their kind.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.clamp(a, min=b) if isinstance(a, Tensor) else torch.clamp(b, min=a)
    return math.nan if a != a or b != b else max(a, b)


def root(a: Number) -> Number:
    """A square root; NaN of what is negative.

    Returns:
        A number of the same kind.
    """
    if isinstance(a, Tensor):
        return a.sqrt()
    return math.sqrt(a) if a >= 0 else math.nan


def hypotenuse(a: Number, b: Number) -> Number:
    """The root of the sum of two squares, which do not overflow.

    Returns:
        A number of their kind.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.hypot(a, b)
    return math.hypot(a, b)


def is_infinite(a: Number) -> Number:
    """Whether a number is infinite.

    Returns:
        A truth value of the same kind.
    """
    return a.isinf() if isinstance(a, Tensor) else math.isinf(a)


def add_scaled(y: Tensor, x: Tensor, factor: Number) -> Tensor:
    """The sum of a vector and a multiple of another one.

    Returns:
        A new vector.
    """
    return torch.addcmul(y, x, factor) if isinstance(factor, Tensor) else torch.add(y, x, alpha=factor)


def add_scaled_(y: Tensor, x: Tensor, factor: Number) -> Tensor:
    """The same in place.

    Returns:
        The vector that was added to.
    """
    return y.addcmul_(x, factor) if isinstance(factor, Tensor) else y.add_(x, alpha=factor)


def stack(numbers: list[Number], like: Tensor) -> Tensor:
    """Numbers as a vector.

    Returns:
        On the device of ``like``, in its dtype.
    """
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number, device=like.device).to(like.dtype) for number in numbers])
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)
