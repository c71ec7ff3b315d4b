"""A call of a module with other tensors in place of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

Store = dict[str, Any]


def call_with(module: nn.Module, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``torch.func.functional_call(module, tensors, args, kwargs, tie_weights=False)`` does, in less time.

    Args:
        module: To be called.
        tensors: By name. Where the module assigns a new tensor to a buffer, it is put in here.
        args: Of the call.
        kwargs: Of the call.

    Returns:
        What the module returns.
    """
    places = _places(module, tensors)
    if places is None:  # a name stands for something else, such as a parametrized weight
        return functional_call(module, tensors, args, kwargs, tie_weights=False)
    before = [store[key] for store, key in places]
    try:
        for (store, key), tensor in zip(places, tensors.values(), strict=True):
            store[key] = tensor
        return module(*args, **kwargs)
    finally:
        tensors.update({name: store[key] for name, (store, key) in zip(tensors, places, strict=True)})
        for (store, key), tensor in zip(places, before, strict=True):
            store[key] = tensor


def _places(module: nn.Module, names: dict[str, Tensor]) -> list[tuple[Store, str]] | None:
    """The dict in which a module keeps each tensor, and its key there; None if one is elsewhere."""
    found: list[tuple[Store, str]] = []
    owners: dict[str, nn.Module] = {"": module}
    for name in names:
        path, _, key = name.rpartition(".")
        owner = owners.get(path)
        if owner is None:
            owner = module
            for part in path.split("."):
                child = owner._modules.get(part) if type(owner._modules) is dict else None
                if child is None:
                    return None
                owner = child
            owners[path] = owner
        for store in (owner._parameters, owner._buffers):
            if type(store) is dict and key in store:
                found.append((store, key))
                break
        else:
            return None
    return found
