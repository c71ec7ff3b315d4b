"""Whether what was read from a file has the form of what a fresh run would write."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor

MOST = 2**53
"""No count is larger, and every number up to it is exact as a float."""


@final
@dataclass(frozen=True)
class Count:
    """A whole number; an end that is None is open."""

    lowest: int | None = 0
    highest: int | None = MOST


@final
@dataclass(frozen=True)
class Number:
    """A finite number, or a whole one that a float can be; ``nan`` allows NaN, ``inf`` infinity."""

    lowest: float = -math.inf
    highest: float = sys.float_info.max
    nan: bool = False
    inf: bool = False


@final
@dataclass(frozen=True)
class Text:
    """Any string."""


@final
@dataclass(frozen=True)
class Flag:
    """True or False."""


@final
@dataclass(frozen=True)
class Plain:
    """None, a flag, a number, a string, or a list of such."""


@final
@dataclass(frozen=True)
class Free:
    """Anything; somebody else judges it."""


@final
@dataclass(frozen=True)
class Maybe:
    """None, or what has a form."""

    form: Any


@final
@dataclass(frozen=True)
class Each:
    """A dict with strings for keys, or a list, as ``kind`` says, of any length; its values have one form."""

    form: Any
    kind: type = dict


@final
@dataclass(frozen=True)
class Step:
    """A number of steps, as a number or as a tensor of floats, as PyTorch's default dtype was."""


@final
@dataclass(frozen=True)
class Within:
    """A tensor like another one, with numbers in a range, but for what rounding makes; perhaps not all finite."""

    own: Tensor
    lowest: float = -math.inf
    highest: float = math.inf
    finite: bool = True


def check_form(path: str, saved: Any, form: Any) -> None:
    """Compare a state with a form.

    Args:
        path: Where it is, for the message.
        saved: Anything.
        form: A dict, list or tuple of forms; a tensor or array for finite ones of its shape and dtype; one of the
            classes above. Any other value stands for itself.

    Raises:
        ValueError: At the first difference.

    Example:
        >>> import torch
        >>> form = {"rounds": Count(), "loss": Number(), "vector": torch.zeros(2)}
        >>> check_form("state", {"rounds": 3, "loss": 0.5, "vector": torch.ones(2)}, form)
        >>> check_form("state", {"rounds": -1, "loss": 0.5, "vector": torch.ones(2)}, form)
        Traceback (most recent call last):
        ValueError: state['rounds'] is -1, not a whole number from 0 on.
    """
    if isinstance(form, Tensor | Within | np.ndarray):
        _check_tensor(path, saved, form)
    elif isinstance(form, Mapping):
        if not isinstance(saved, dict):
            raise ValueError(f"{path} is {describe(saved)}, not a dict.")
        if saved.keys() != form.keys():
            lacks = [f"lacks {key!r}" for key in form if key not in saved]
            has = [f"has {describe(key)}, which does not belong there" for key in saved if key not in form]
            raise ValueError(f"{path} {' and '.join(lacks[:1] + has[:1])}.")
        for key, inner in form.items():
            check_form(f"{path}[{key!r}]", saved[key], inner)
    elif isinstance(form, list | tuple):
        if type(saved) is not type(form) or len(saved) != len(form):
            raise ValueError(f"{path} is {describe(saved)}, not {describe(form)}.")
        for index, (one, inner) in enumerate(zip(saved, form, strict=True)):
            check_form(f"{path}[{index}]", one, inner)
    elif isinstance(form, Maybe):
        if saved is not None:
            check_form(path, saved, form.form)
    elif isinstance(form, Each):
        if not isinstance(saved, dict | list) or type(saved) is not form.kind:
            raise ValueError(f"{path} is {describe(saved)}, not a {form.kind.__name__}.")
        if isinstance(saved, dict) and not all(isinstance(key, str) for key in saved):
            raise ValueError(f"{path} has a key that is no text.")
        for key, value in saved.items() if isinstance(saved, dict) else enumerate(saved):
            check_form(f"{path}[{key!r}]", value, form.form)
    elif not _is(saved, form):
        raise ValueError(f"{path} is {describe(saved)}, not {_name(form)}.")


def form_of(value: Any) -> Any:
    """The form of a state of which nothing is known but how it begins: the same types, no number below its first one.

    Args:
        value: Fresh.

    Returns:
        The form.
    """
    if isinstance(value, bool):
        return Flag()
    if isinstance(value, int):
        return Count(min(value, 0))
    if isinstance(value, float):
        return Number(nan=math.isnan(value), inf=math.isinf(value))
    if isinstance(value, Mapping):
        return {key: form_of(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(form_of(entry) for entry in value)
    return value


def _check_tensor(path: str, saved: Any, form: Tensor | Within | np.ndarray[Any, Any]) -> None:
    own = form.own if isinstance(form, Within) else form
    if not isinstance(saved, Tensor if isinstance(own, Tensor) else np.ndarray):
        raise ValueError(f"{path} is {describe(saved)}, not {describe(own)}.")
    if (saved.shape, saved.dtype) != (own.shape, own.dtype):
        raise ValueError(f"{path} is {describe(saved)}, not {describe(own)}.")
    if (
        not isinstance(saved, Tensor)
        or not isinstance(own, Tensor)
        or not (own.is_floating_point() or own.is_complex())
    ):
        return
    finite = not isinstance(form, Within) or form.finite
    if finite and not bool(saved.isfinite().all()) and (own.is_meta or bool(own.isfinite().all())):
        raise ValueError(f"{path} is NaN or infinite.")
    if isinstance(form, Within) and saved.numel():
        low, high = (float(value) for value in saved.float().aminmax())
        slack = 1e-5 * max((abs(end) for end in (form.lowest, form.highest) if math.isfinite(end)), default=0.0)
        if low < form.lowest - slack or high > form.highest + slack:
            raise ValueError(
                f"{path} has numbers from {low:g} to {high:g}, not from {form.lowest:g} to {form.highest:g}."
            )


def _is(saved: Any, form: Any) -> bool:
    """Whether a value has a form without parts."""
    if isinstance(form, Count):
        if type(saved) is not int:
            return False
        return (form.lowest is None or form.lowest <= saved) and (form.highest is None or saved <= form.highest)
    if isinstance(form, Number):
        if type(saved) not in (int, float):
            return False
        if isinstance(saved, float) and not math.isfinite(saved):
            return form.nan if math.isnan(saved) else form.inf
        return bool(form.lowest <= saved and abs(saved) <= (MOST if type(saved) is int else form.highest))
    if isinstance(form, Step):
        if isinstance(saved, Tensor) and saved.is_floating_point() and saved.numel() == 1:
            saved = float(saved)
        return _is(saved, Number(0.0, MOST)) and float(saved).is_integer()
    if isinstance(form, Text | Flag):
        return isinstance(saved, str if isinstance(form, Text) else bool)
    if isinstance(form, Plain):
        return all(value is None or isinstance(value, bool | int | float | str) for value in _leaves(saved))
    if isinstance(form, Free):
        return True
    return type(saved) is type(form) and bool(saved == form)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield value


def _name(form: Any) -> str:
    if isinstance(form, Count):
        ends = f"from {form.lowest} on" if form.highest in (None, MOST) else f"from {form.lowest} to {form.highest}"
        return "a whole number" + ("" if form.lowest is None else f" {ends}")
    if isinstance(form, Number):
        return "a finite number" + (f" of at least {form.lowest:g}" if form.lowest > -math.inf else "")
    names = {
        Step: "a number of steps",
        Text: "text",
        Flag: "True or False",
        Plain: "None, a number, text or a list of them",
    }
    return names[type(form)] if type(form) in names else f"{form!r}"


def describe(value: Any) -> str:
    """What a value is, in a few words.

    Args:
        value: Anything.

    Returns:
        The words.
    """
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        names = sorted(map(str, value))
        return f"entries {', '.join(names[:12])}{', ...' * (len(names) > 12)}"[:300] if names else "no entries"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 63 else "a huge number"
        return text if len(text) <= 80 else f"{text[:77]}..."
    return type(value).__name__
