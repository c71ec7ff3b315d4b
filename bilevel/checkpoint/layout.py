"""Whether a state fits the one that it is to replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

MEMORY = {
    "momentum_buffer",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "exp_inf",
}
"""What optimizers of PyTorch remember in the shape of a parameter."""


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
            for name, value in other.items():
                if not _is_setting(one[name], value):
                    raise ValueError(f"{path}[{index}][{name!r}] is {_describe(one[name])}, not {_describe(value)}.")


def check_memory(path: str, state: Any, params: Sequence[Tensor]) -> None:
    """See whether an optimizer of PyTorch can work with what it is said to remember.

    Args:
        path: Where it is, for the message.
        state: For each parameter, by its number.
        params: The parameters.

    Raises:
        ValueError: If it cannot.
    """
    if not isinstance(state, dict) or not all(isinstance(memory, dict) for memory in state.values()):
        raise ValueError(f"{path} is not what an optimizer remembers.")
    for index, memory in state.items():
        for name in MEMORY & memory.keys():
            value = memory[name]
            fits = isinstance(value, Tensor) and index < len(params) and value.shape == params[index].shape
            if not fits and not (value is None and name == "momentum_buffer"):
                raise ValueError(f"{path}[{index}][{name!r}] is {_describe(value)}, which does not fit its parameter.")


def _is_setting(saved: Any, own: Any) -> bool:
    """Whether a setting of an optimizer can take the place of another."""
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        return len(saved) == len(own) and all(map(_is_setting, saved, own))
    if type(own) in (int, float, list, tuple):  # flags may be None
        number = isinstance(saved, int | float) or (isinstance(saved, Tensor) and saved.numel() == 1)
        return number and not isinstance(own, list | tuple)
    return True


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"entries {', '.join(sorted(map(str, value)))}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
