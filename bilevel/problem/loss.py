"""A loss: the function that the user writes, and the scalar that is made of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from bilevel.problem.model import Model

LossFunction = Callable[[Model, Mapping[str, Tensor], Any], Any]


class Loss(NamedTuple):
    """A scalar loss, and whatever else the user's loss function returned with it.

    Example:
        >>> import torch
        >>> Loss(torch.tensor(0.5), {"accuracy": 0.9}).aux
        {'accuracy': 0.9}
    """

    value: Tensor
    aux: Any


def reduce(name: str, result: Any, examples: Callable[[Any], int | None], batch: Any) -> Loss:
    """Make a scalar of what the user's loss function returned.

    Args:
        name: Of the function, for error messages.
        result: A scalar or one value per example; or a pair of that and anything else.
        examples: Number of examples in a batch. It is called only if ``result`` is not a scalar.
        batch: What the loss was evaluated on.

    Returns:
        The loss, or its mean over the examples.

    Raises:
        TypeError: If the result is not a real floating-point tensor.
        ValueError: If its shape is neither that of a scalar nor one value per example.

    Example:
        >>> import torch
        >>> reduce("inner_loss", torch.tensor([1.0, 3.0]), len, ["first", "second"])
        Loss(value=tensor(2.), aux=None)
    """
    value, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must return a Tensor, or a pair (Tensor, aux); got {type(value).__name__}.")
    if not value.is_floating_point():
        raise TypeError(f"{name} must return a real floating-point loss, got dtype {value.dtype}.")
    if value.ndim == 0:
        return Loss(value, aux)
    count = examples(batch)
    if value.shape != (count,):
        expected = f"() or ({count},), one value per example" if count is not None else "()"
        raise ValueError(
            f"{name} must return a loss of shape {expected}, got {tuple(value.shape)}. Take the mean, or set "
            "Problem(examples=...) if dimension 0 of the batch's first tensor or array does not count examples."
        )
    return Loss(value.mean(), aux)
