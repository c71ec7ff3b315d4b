"""Whether a state fits the one that it is to replace."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_layout(path: str, saved: Any, own: Any) -> None:
    """Compare nested keys, shapes and dtypes; what an optimizer gathers (its ``state``) may differ.

    Raises:
        ValueError: At the first difference.
    """
    if isinstance(own, Tensor):
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (own.shape, own.dtype):
            raise ValueError(f"{path} is {_describe(saved)}, this solver has {_describe(own)}.")
    elif isinstance(own, dict):
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            raise ValueError(f"{path} has {_describe(saved)}, this solver has {_describe(own)}.")
        for key, value in own.items():
            if key != "state":
                check_layout(f"{path}[{key!r}]", saved[key], value)
    elif isinstance(own, list) and path.endswith("['param_groups']"):
        if not isinstance(saved, list) or len(saved) != len(own):
            raise ValueError(f"{path} has {_describe(saved)}, this solver has {_describe(own)}.")
        for index, (one, other) in enumerate(zip(saved, own, strict=True)):
            check_layout(f"{path}[{index}]", one, other)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"entries {', '.join(sorted(map(str, value)))}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
