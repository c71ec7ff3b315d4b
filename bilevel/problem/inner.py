"""What ``inner`` may be: the checks of the weights that the user gives."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from bilevel.parallel import is_sharded, whole


def trainable(inner: Any) -> dict[str, Tensor]:
    """The tensors of ``inner`` that are trained, by name.

    Args:
        inner: A module or a mapping, as the user gave it.

    Returns:
        Each tensor once, without frozen ones.

    Raises:
        TypeError: If ``inner`` is neither a module nor a mapping from strings to tensors.
        ValueError: If there is nothing to train, a tensor has two names or no value yet, or a module is wrapped.
    """
    if isinstance(inner, nn.Module):
        _check_wrappers(inner)
        named = dict(inner.named_parameters())
        lazy = [name for name, value in named.items() if isinstance(value, UninitializedParameter)]
        if lazy:
            raise ValueError(f"inner: parameter {lazy[0]!r} is not initialised yet; call the lazy module once first.")
        trainable: dict[str, Tensor] = {name: value for name, value in named.items() if value.requires_grad}
        if not trainable:
            raise ValueError("inner has no trainable parameter: none of them has requires_grad=True.")
        _check_shards(trainable)
        return trainable
    if not isinstance(inner, Mapping):
        raise TypeError(f"inner must be an nn.Module or a mapping from names to tensors, got {type(inner).__name__}.")
    if not inner:
        raise ValueError("inner is an empty mapping: give at least one tensor.")
    for name, value in inner.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"inner must map strings to tensors, got {name!r}: {type(value).__name__}.")
    name, count = Counter(id(value) for value in inner.values()).most_common(1)[0]
    if count > 1:
        twins = [key for key, value in inner.items() if id(value) == name]
        raise ValueError(f"inner: {' and '.join(map(repr, twins))} are the same tensor; give it one name.")
    _check_shards(inner)
    return dict(inner)


def _check_shards(weights: Mapping[str, Tensor]) -> None:
    sharded = [name for name, value in weights.items() if is_sharded(value)]
    if not sharded:
        return
    if len(sharded) < len(weights):
        (plain, *_) = sorted(weights.keys() - set(sharded))
        raise ValueError(
            f"inner: {sharded[0]!r} is a DTensor, of which each process holds a part, and {plain!r} is not: "
            "call bilevel.parallel.shard(net), which divides all that is trained."
        )
    for name, value in weights.items():
        mesh: Any = value.device_mesh  # type: ignore[attr-defined]
        if mesh.ndim != 1 or mesh.size() != torch.distributed.get_world_size():
            raise ValueError(
                f"inner: {name!r} is divided over a mesh of shape {tuple(mesh.shape)}: use one of all "
                f"{torch.distributed.get_world_size()} processes, in one dimension, as bilevel.parallel.shard does."
            )
        if any(placement.is_partial() for placement in value.placements):  # type: ignore[attr-defined]
            raise ValueError(f"inner: {name!r} holds sums that are not added up yet: redistribute it first.")


def _check_wrappers(module: nn.Module) -> None:
    # torch._dynamo takes a second to import; if it has not been, nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, part in module.named_modules():
        where = f"inner.{name}" if name else "inner"
        if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{where} is a {type(part).__name__}, whose gradients bilevel cannot differentiate again: pass the "
                "module inside, net.module. Under torchrun, bilevel itself gives each process its share of the batches "
                "and averages what they find."
            )
        if fsdp is not None and isinstance(part, fsdp.FSDPModule):
            raise ValueError(
                f"{where} went through fully_shard, whose hooks put its own weights in the place of those that bilevel "
                "hands to the network, and cannot be differentiated twice: leave it out, and call "
                "bilevel.parallel.shard(net) to divide the weights among the processes."
            )
        if any(is_sharded(value) and not value.requires_grad for value in part.parameters(recurse=False)):
            raise ValueError(f"{where} has a frozen parameter that is a DTensor: keep what is not trained whole.")
        if dynamo is not None and isinstance(part, dynamo.OptimizedModule):
            raise ValueError(
                f"{where} was compiled by torch.compile, whose result cannot be differentiated twice: pass the "
                "original module, net._orig_mod. Solver and solve compile their steps with compile=True."
            )


def ties(module: nn.Module) -> dict[str, str]:
    """Map every further name of a tied parameter or buffer to its first name."""
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(value), name)) for name, value in everything]
    return {twin: name for twin, name in names if twin != name}


def check_kind(argument: str, params: Mapping[str, Tensor]) -> None:
    """Check that weights are real, finite and of one dtype and device.

    Args:
        argument: From which the weights come, for error messages.
        params: The weights by name.

    Raises:
        TypeError: If a weight is not a real floating-point tensor.
        ValueError: If a weight is empty, has no finite values, or differs in dtype or device.
    """
    (first_name, first), *_ = params.items()
    for name, value in params.items():
        if not value.is_floating_point():
            raise TypeError(f"{argument}: {name!r} must be a floating-point tensor, got {value.dtype}; use .float().")
        if value.numel() == 0:
            raise ValueError(f"{argument}: {name!r} is empty, shape {tuple(value.shape)}; leave it out.")
        for what, here, there in (("device", value.device, first.device), ("dtype", value.dtype, first.dtype)):
            if here != there:
                raise ValueError(
                    f"{argument}: all weights must share one {what}, but {first_name!r} has {there} and {name!r} has "
                    f"{here}; use .to({here!r}) on all of them."
                )
        if value.is_meta:
            raise ValueError(
                f"{argument}: {name!r} is on the meta device, without values; use .to_empty(device=...) first."
            )
        if not bool(whole(value).isfinite().all()):
            raise ValueError(f"{argument}: {name!r} has NaN or infinite values before training; initialise it anew.")
