"""Inputs and targets of a batch, and how the network is called with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from bilevel.batches import describe

TARGETS = ("labels", "label", "targets", "target", "y")
"""Names under which a mapping may hold its target; the first that is there counts."""

Unpack = Callable[[Any], tuple[Any, Any]]


def as_mapping(batch: Any) -> dict[str, Any] | None:
    """A batch with names as a dict: a mapping, the batch of a tokenizer, a TensorDict.

    Returns:
        None for anything else.

    Example:
        >>> as_mapping({"x": 1}), as_mapping((1, 2))
        ({'x': 1}, None)
    """
    named = isinstance(batch, Mapping) or (callable(getattr(batch, "keys", None)) and not isinstance(batch, Tensor))
    return {str(name): batch[name] for name in batch.keys()} if named else None


def unpacker(net: nn.Module) -> Unpack:
    """What to do with the batches of a network: inputs, and the target.

    Args:
        net: The network, whose ``forward`` says whether it takes an input by name.

    Returns:
        A function from a batch to inputs and target. Inputs are one argument, a tuple of them, or a dict of keyword
        arguments.

    Example:
        >>> unpacker(nn.Linear(2, 1))({"image": 1, "label": 2}), unpacker(nn.Linear(2, 1))((1, 2, 3))
        ((1, 2), ((1, 2), 3))
    """
    accepts = _accepts(net)

    def unpack(batch: Any) -> tuple[Any, Any]:
        named = as_mapping(batch)
        if named is not None:
            key = next((name for name in TARGETS if name in named), None)
            if key is None:
                raise ValueError(
                    f"tune: a batch with the entries {', '.join(named)} has none that is called "
                    f"{', '.join(TARGETS)}: pass unpack=lambda batch: (inputs, target)."
                )
            target = named.pop(key)
            if len(named) == 1 and not accepts(*named):
                return next(iter(named.values())), target
            return named, target
        if isinstance(batch, tuple | list) and len(batch) >= 2:
            *inputs, target = batch
            return (inputs[0] if len(inputs) == 1 else tuple(inputs)), target
        raise ValueError(
            f"tune: a batch must be (inputs, target) or a mapping with a target, got a {type(batch).__name__} with "
            f"{describe(batch)}: pass unpack=lambda batch: (inputs, target)."
        )

    return unpack


def checked(unpack: Any) -> Unpack:
    """A function of the user's that says what it should have returned.

    Args:
        unpack: From a batch to inputs and target.

    Returns:
        The same, with a check.

    Raises:
        TypeError: If it cannot be called.
    """
    if not callable(unpack):
        raise TypeError(
            "tune: unpack must be a function from a batch to (inputs, target), such as lambda batch: (batch['x'], "
            f"batch['y']); got {type(unpack).__name__}: {unpack!r}."
        )
    return partial(_pair_of, unpack)


def _pair_of(unpack: Unpack, batch: Any) -> tuple[Any, Any]:
    pair = unpack(batch)
    if isinstance(pair, tuple | list) and len(pair) == 2:
        return pair[0], pair[1]
    raise ValueError(
        f"tune: unpack must return a pair (inputs, target), got a {type(pair).__name__}: {describe(pair)}."
    )


def call(model: Any, inputs: Any) -> Any:
    """Call a network with one argument, a tuple of them, or a dict of keyword arguments.

    Returns:
        What it returns.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _accepts(net: nn.Module) -> Callable[[str], bool]:
    try:
        parameters = inspect.signature(net.forward).parameters
    except (TypeError, ValueError):
        return lambda name: True
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return lambda name: any_name or name in parameters
