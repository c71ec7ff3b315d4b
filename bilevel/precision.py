"""Autocast is for the user's losses: the arithmetic of the library keeps the precision of the weights."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

HALF = (torch.float16, torch.bfloat16)
_outside: ContextVar[tuple[str, torch.dtype] | None] = ContextVar("_outside", default=None)


@contextmanager
def own_precision(device: torch.device) -> Generator[None]:
    """Switch autocast off inside the block, except in the losses of the user.

    Products with the response, linear solvers and differentiation lose digits under autocast for no gain.

    Args:
        device: Of the weights.
    """
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    token = _outside.set((device.type, torch.get_autocast_dtype(device.type)))
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _outside.reset(token)


@contextmanager
def users_precision() -> Generator[None]:
    """Inside the block, autocast is what it was outside of :func:`own_precision`."""
    # It keeps casts of weights until the outermost block of autocast ends, and so would not see that they are trained.
    torch.clear_autocast_cache()
    outside = _outside.get()
    if outside is None:
        yield
        return
    with torch.autocast(outside[0], dtype=outside[1]):
        yield


@contextmanager
def full_precision(device: torch.device) -> Generator[None]:
    """Switch autocast off inside the block, in the losses of the user too unless they switch it on themselves.

    Args:
        device: Of the weights.
    """
    token = _outside.set(None)
    try:
        if not torch.is_autocast_enabled(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _outside.reset(token)


def in_full_precision(predict: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """A network without autocast, even inside a loss that switches it on.

    Args:
        predict: The network.
        like: One of its weights.

    Returns:
        A function of the same arguments. Inputs in half precision, which autocast allows, are cast.
    """

    def full(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(like.device.type):
            return predict(*args, **kwargs)

        def cast(x: Tensor) -> Tensor:
            return x.to(like.dtype) if x.dtype in HALF else x

        args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
        with torch.autocast(like.device.type, enabled=False):
            return predict(*args, **kwargs)

    return full


def autocast_outside(devices: set[str]) -> frozenset[tuple[str, torch.dtype]]:
    """The kinds of autocast that the losses of the user run under.

    Args:
        devices: Whose autocast counts, by type.

    Returns:
        A pair of device and dtype for each that is on.
    """
    on = {(device, torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)}
    outside = _outside.get()
    return frozenset(on if outside is None or outside[0] not in devices else on | {outside})


def has_half_precision(value: Tensor) -> bool:
    """Whether half precision took part in the computation of a value, as its graph tells."""
    if value.dtype in HALF:
        return True
    seen: set[Any] = set()
    todo = [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(entry.dtype in HALF for entry in node._input_metadata):
            return True
        todo += [child for child, _ in node.next_functions]
    return False
