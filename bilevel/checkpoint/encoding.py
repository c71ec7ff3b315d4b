"""A state as JSON and a list of tensors, and back: plain types only, so that reading a file never runs code."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.checkpoint.errors import CheckpointError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


def encode(state: Any) -> tuple[bytes, list[Tensor]]:
    """Split a state into JSON and tensors.

    Numbers, strings and None stand for themselves; anything else is an object with one key, which says what it is.

    Args:
        state: Nested dicts, lists, tuples, sets and counters of tensors, arrays, numbers, strings, bytes and None.

    Returns:
        The JSON, and the tensors in the order of their numbers: not copies, and none twice.

    Raises:
        CheckpointError: If there is something else in it.

    Example:
        >>> encode({"w": torch.zeros(2), "betas": (0.9, math.inf)})[0].decode()
        '{"state":{"dict":[["w",{"tensor":0}],["betas",{"tuple":[0.9,{"float":"inf"}]}]]},"tensors":[["float32",[2]]]}'
    """
    tensors: list[Tensor] = []
    known: dict[Any, int] = {}

    def put(tensor: Tensor, where: str) -> int:
        if tensor.layout != torch.strided or str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointError(f"checkpoint: {where} cannot be saved, a tensor of {tensor.layout}, {tensor.dtype}.")
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = (*memory, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() == 0 or key not in known:
            known[key] = len(tensors)
            tensors.append(tensor.detach())
        return known[key]

    def plain(value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, Tensor):
            return {"tensor": put(value, where)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"array": put(torch.from_numpy(np.array(value)), where)}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, Mapping):
            pairs = [[plain(key, where), plain(entry, f"{where}[{key!r}]")] for key, entry in value.items()]
            return {"counter" if isinstance(value, Counter) else "dict": pairs}
        for name, kind in (("list", list), ("tuple", tuple), ("set", set | frozenset)):
            if isinstance(value, kind):
                return {name: [plain(entry, f"{where}[{index}]") for index, entry in enumerate(value)]}
        raise CheckpointError(f"checkpoint: {where} cannot be saved, it is a {type(value).__name__}.")

    try:
        content = plain(state, "state")
    except RecursionError:
        raise CheckpointError("checkpoint: the state is nested too deeply to be saved.") from None
    table = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    return json.dumps({"state": content, "tensors": table}, separators=(",", ":")).encode(), tensors


def table(header: Any) -> list[tuple[torch.dtype, list[int], int]]:
    """The tensors that a header speaks of.

    Args:
        header: Read from JSON; anything.

    Returns:
        Their dtype, shape and number of bytes.

    Raises:
        ValueError: If it is not what :func:`encode` writes.
    """
    if not isinstance(header, dict) or header.keys() != {"state", "tensors"} or not isinstance(header["tensors"], list):
        raise ValueError("not a header")
    found = []
    for name, shape in header["tensors"]:
        if name not in DTYPES or not isinstance(shape, list) or len(shape) > 64:
            raise ValueError("not a tensor")
        if not all(type(size) is int and size >= 0 for size in shape) or math.prod(filter(None, shape)) >= 1 << 59:
            raise ValueError("not a shape")
        found.append((DTYPES[name], shape, math.prod(shape) * DTYPES[name].itemsize))
    return found


def decode(content: Any, tensors: list[Tensor]) -> Any:
    """Put a state together again.

    Args:
        content: Under ``state`` in the header.
        tensors: In order.

    Returns:
        The state.

    Raises:
        ValueError: If it is not what :func:`encode` writes.
    """
    if content is None or isinstance(content, bool | int | float | str):
        return content
    if not isinstance(content, dict) or len(content) != 1:
        raise ValueError("not a value")
    ((kind, value),) = content.items()
    if kind in ("tensor", "array") and type(value) is int and 0 <= value < len(tensors):
        return tensors[value] if kind == "tensor" else tensors[value].numpy()
    if kind == "float" and value in ("nan", "inf", "-inf"):
        return float(value)
    if kind == "bytes" and isinstance(value, str):
        return bytes.fromhex(value)
    if kind in ("dict", "counter") and isinstance(value, list):
        pairs = {decode(key, tensors): decode(entry, tensors) for key, entry in value}
        return pairs if kind == "dict" else Counter(pairs)
    kinds: dict[str, type] = {"list": list, "tuple": tuple, "set": set}
    if kind in kinds and isinstance(value, list):
        return kinds[kind](decode(entry, tensors) for entry in value)
    raise ValueError("not a value")
