"""What a run is made of, by the names of the arguments: so that a changed argument is not taken for the old one."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bilevel.batches import leaves
from bilevel.solver import Solver

OPTIMIZERS = {
    "weights": "inner_optimizer",
    "response": "inner_optimizer for the response",
    "hyper": "outer_optimizer",
    "scale": "outer_optimizer for the scale",
}
FIXED = ("method", "hyper", "weights", "dtype")
"""What cannot be taken over: the state of the run has another form then."""


def fingerprint(solver: Solver, settings: dict[str, Any], *, default_outer: bool) -> dict[str, dict[str, Any]]:
    """Describe a run, before its first step.

    Args:
        solver: With its optimizers.
        settings: Those of the loop.
        default_outer: Whether the outer optimizer was left to :func:`solve`, which makes it from the number of rounds.

    Returns:
        By argument, and within it by setting: plain types.
    """
    problem = solver.problem
    found: dict[str, dict[str, Any]] = {name: {"": value} for name, value in settings.items()}
    found["method"] = {"": _clean(repr(solver.method))}
    found["hyper"] = {
        name: f"{entry.low:g} to {entry.high:g}, discrete {entry.discrete}, shape {tuple(entry.init.shape)}"
        for name, entry in problem.space.hyper.items()
    }
    found["weights"] = {name: f"{tuple(value.shape)}" for name, value in problem.params.items()}
    found["dtype"] = {"": str(problem.dtype)}
    found["network"] = {"": "" if problem.module is None else _clean(repr(problem.module))}
    found["outer_mode"] = {"": problem.outer_mode}
    found["device"] = {"": problem.device.type}
    for name, optimizer in solver.optimizers.items():
        if default_outer and name in ("hyper", "scale"):
            found[OPTIMIZERS[name]] = {"": "the default"}
            continue
        own: dict[str, Any] = {"class": type(optimizer).__name__}
        for index, group in enumerate(optimizer.param_groups):
            of = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
            own |= {f"{key}{of}": _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        found[OPTIMIZERS[name]] = own
        scheduler = solver.schedulers.get(name)
        state = {} if scheduler is None else {k: _plain(v) for k, v in vars(scheduler).items() if k != "optimizer"}
        state = {key: value for key, value in state.items() if value is not NotImplemented}
        kind = "none" if scheduler is None else type(scheduler).__name__
        found[OPTIMIZERS[name].replace("optimizer", "scheduler")] = {"class": kind, **state}
    found |= {
        name: {"code": code_of(loss), "python": list(sys.version_info[:2])}
        for name, loss in problem.user_losses.items()
    }
    return found


def differences(before: Any, now: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Compare two fingerprints.

    Args:
        before: That of the checkpoint.
        now: That of this call.

    Returns:
        What changed, by argument, in words.
    """
    found = {}
    for name in {**before, **now}:
        old, values = before.get(name, {}), now.get(name, {})
        if old == values:
            continue
        if "code" in values:
            if old.get("python") == values["python"]:
                found[name] = f"{name} is another function, or reads other values"
            continue
        keys = [key for key in {**old, **values} if old.get(key) != values.get(key)]
        key = "class" if "class" in keys else keys[0]
        what = f"{name}: {key}" if key else name
        found[name] = f"{what} was {_show(old.get(key))}, this call has {_show(values.get(key))}"
    return found


def digest(batch: Any) -> str:
    """Of all tensors, arrays, numbers and strings of a batch.

    Returns:
        A hash.
    """
    total = hashlib.sha256()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            total.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                total.update(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcSU":
            total.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
        elif leaf is None or isinstance(leaf, bool | int | float | str | bytes):
            total.update(repr(leaf).encode())
        else:
            total.update(type(leaf).__name__.encode())
    return total.hexdigest()


def code_of(function: Any) -> str:
    """A hash of what a function does: its code, that of the functions it calls in its own module, and what it captures.

    Names of local variables, comments and positions do not count. Of captured values, numbers, strings, tensors without
    gradients, and the settings of modules do.

    Returns:
        The hash.
    """
    total = hashlib.sha256()
    _walk(function, total.update, set(), 0)
    return total.hexdigest()


def _walk(value: Any, add: Any, seen: set[int], depth: int) -> None:
    if id(value) in seen or depth > 8:
        return
    if isinstance(value, nn.Module):
        add(_clean(repr(value)).encode())
    elif isinstance(value, Tensor):
        if not value.requires_grad and value.numel() <= 1 << 22:
            add(digest(value).encode())
    elif value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype):
        add(repr(value).encode())
    elif isinstance(value, CodeType):
        add(value.co_code + repr(value.co_names).encode())
        for constant in value.co_consts:
            _walk(constant, add, seen, depth + 1)
    elif isinstance(value, tuple | frozenset):
        for entry in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            _walk(entry, add, seen, depth + 1)
    elif isinstance(value, functools.partial):
        seen.add(id(value))
        for part in (value.func, value.args, tuple(sorted(value.keywords.items()))):
            _walk(part, add, seen, depth + 1)
    elif inspect.ismethod(value):
        _walk(value.__func__, add, seen, depth + 1)
    elif inspect.isfunction(value):
        seen.add(id(value))
        docs = {value.__doc__}
        add(value.__code__.co_code + repr(value.__code__.co_names).encode())
        for constant in value.__code__.co_consts:
            if constant not in docs:
                _walk(constant, add, seen, depth + 1)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        for part in (*cells, value.__defaults__, tuple(sorted((value.__kwdefaults__ or {}).items()))):
            _walk(part, add, seen, depth + 1)
        for name in value.__code__.co_names:
            called = value.__globals__.get(name)
            if inspect.isfunction(called) and called.__module__ == value.__module__:
                _walk(called, add, seen, depth + 1)
    elif callable(value) and not isinstance(value, type):
        seen.add(id(value))
        _walk(vars(type(value)).get("__call__"), add, seen, depth + 1)
        for name, entry in sorted(getattr(value, "__dict__", {}).items()):
            if isinstance(entry, bool | float | str):
                add(f"{name}{entry!r}".encode())


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _plain(value: Any) -> Any:
    """A setting that can be compared after it was written and read; NotImplemented for one that cannot."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple):
        entries = [_plain(entry) for entry in value]
        return NotImplemented if any(entry is NotImplemented for entry in entries) else entries
    if isinstance(value, dict):
        return _plain([[key, entry] for key, entry in value.items()])
    if inspect.isfunction(value) or isinstance(value, functools.partial):
        return code_of(value)
    return value if value is None or isinstance(value, bool | int | float | str) else NotImplemented


def _clean(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _show(value: Any) -> str:
    text = " ".join(f"{value}".split())
    return text if len(text) <= 120 else f"{text[:117]}..."
