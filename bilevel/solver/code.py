"""A hash of what a function does, so that a changed loss is not taken for the old one."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from bilevel.batches import leaves

DEPTH = 12
MANY = 1000
"""Of longer collections, so many entries count."""
LARGE = 1 << 20
"""Of tensors with more entries, a sample counts."""
SAMPLE = 1 << 16
"""Of larger tensors in a batch, about so many entries count."""
LIBRARIES = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) for module in (os, torch, np))
LIBRARIES += (str(Path(__file__).resolve().parents[1]),)
INSTALLED = {"site-packages", "dist-packages"}
WHOLE = {"vars", "getattr", "attrgetter", "__dict__", "asdict", "astuple", "_get_kwargs"}
"""What reads attributes without their names."""
OURS = ("bilevel.tuning.", "bilevel.regularizers.", "bilevel.augment.")
"""Where the library makes objects of what the user gives: all that is in them counts."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def digest(batch: Any) -> str:
    """Of all tensors, arrays, numbers and strings of a batch.

    Args:
        batch: As a loader yields it.

    Returns:
        A hash.
    """
    total = hashlib.sha256()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            total.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            flat = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            if flat.numel():
                total.update(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcSU":
            total.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
        elif leaf is None or isinstance(leaf, bool | int | float | str | bytes):
            total.update(repr(leaf).encode())
        else:
            total.update(type(leaf).__name__.encode())
    return total.hexdigest()


def sample(batch: Any) -> str:
    """As :func:`digest`, of large tensors and arrays a sample only.

    Returns:
        A hash.
    """
    parts: list[Any] = []
    for leaf in leaves(batch):
        large = isinstance(leaf, np.ndarray) or (isinstance(leaf, Tensor) and leaf.layout == torch.strided)
        if large and (step := 1 + math.prod(leaf.shape) // SAMPLE) > 1:
            parts += [str(tuple(leaf.shape)), leaf.reshape(-1)[::step]]
        else:
            parts.append(leaf)
    return digest(parts)


def code_of(function: Any) -> str:
    """A hash of what a function does: its code, that of the user's functions it calls, and the values that it reads.

    Names of local variables, comments, docstrings and positions do not count; functions of installed packages neither.
    Of values that are captured, global, defaults, or attributes of the object to which a method belongs or of its
    class, these do: numbers, strings, collections of them, tensors without gradients, arrays, and the settings, hooks,
    frozen weights and, if nothing in them learns, buffers of modules. Of a namespace, a dataclass and an object of a
    class of the user's, such as the options of a command line, the attributes count that are read.

    Args:
        function: A function, a method, a partial, an object that can be called, or a module.

    Returns:
        The hash.

    Example:
        >>> code_of(lambda x: x + 1) == code_of(lambda y: y + 1), code_of(lambda x: x + 1) == code_of(lambda x: x + 2)
        (True, False)
    """
    walk = _Walk(set(), {})
    while True:
        walk.see(function, 0)
        if walk.names <= walk.read:
            return walk.total.hexdigest()
        walk = _Walk(walk.names | walk.read, walk.digests)  # now it is known which attributes are read anywhere


def plain_repr(value: Any) -> str:
    """What it prints, without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@final
class _Walk:
    """What has been seen on the way."""

    def __init__(self, read: set[str], digests: dict[int, str]) -> None:
        """Take attributes into account that are called like this; hashes of tensors are made once."""
        self.total = hashlib.sha256()
        self.digests = digests
        self.names: set[str] = set()
        self.read = read
        self._seen: dict[int, Any] = {}  # with the objects, so that no address is used again

    def add(self, *parts: str | bytes) -> None:
        for part in parts:
            content = part if isinstance(part, bytes) else part.encode("utf-8", "replace")
            self.total.update(f"{len(content)}:".encode() + content)

    def see(self, value: Any, depth: int) -> None:
        """Take a value into account."""
        if isinstance(value, PLAIN):
            self.add(repr(value))
            return
        if id(value) in self._seen:
            self.add(f"again {list(self._seen).index(id(value))}")
            return
        if depth > DEPTH:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(value, depth + 1)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self.add(digest(np.asarray(value)))
        elif isinstance(value, CodeType):
            self._code(value, depth + 1)
        elif isinstance(value, FunctionType):
            self._function(value, depth + 1)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.see(part, depth + 1)
        elif isinstance(value, tuple | list | set | frozenset | Mapping):
            self._collection(value, depth + 1)
        elif inspect.ismethod(value):
            self._bound(value.__func__, value.__self__, depth + 1)
        elif isinstance(value, type):
            self._class(value, depth + 1)
        elif isinstance(value, Enum):
            self.add(repr(value))
        elif inspect.isroutine(value):
            self.add(getattr(value, "__module__", None) or "", getattr(value, "__qualname__", ""))
        elif f"{type(value).__module__}.".startswith(OURS):
            self.add(type(value).__qualname__)
            self._collection(attributes(value), depth + 1)
        elif isinstance(value, Namespace | SimpleNamespace) or dataclasses.is_dataclass(value) or of_user(type(value)):
            self._object(value, depth + 1)
        elif callable(value):
            self.see(getattr(value, "__wrapped__", None), depth + 1)

    def _tensor(self, value: Tensor) -> None:
        if value.requires_grad or value.layout != torch.strided or value.is_meta:
            return
        if id(value) not in self.digests:
            flat = value.detach().reshape(-1)
            self.digests[id(value)] = digest(flat[:: 1 + flat.numel() // LARGE])
        self.add(f"{tuple(value.shape)}", self.digests[id(value)])

    def _module(self, value: nn.Module, depth: int) -> None:
        """Its settings, its frozen weights, and how the parts that the user wrote are computed."""
        self.add(plain_repr(value))
        params = dict(value.named_parameters())
        learned = any(param.requires_grad for param in params.values())  # then buffers belong to the state of a run
        for name, tensor in {**params, **({} if learned else dict(value.named_buffers()))}.items():
            if not tensor.requires_grad:
                self.add(name)
                self.see(tensor, depth)
        for part in value.modules():
            forward = inspect.getattr_static(type(part), "forward", None)
            if isinstance(part, torch.jit.ScriptModule):
                self.add(str(part.code))
                continue
            if of_user(forward):
                self._bound(forward, part, depth)
            else:  # what it prints is not all of them
                self._collection(dict(_settings(part)), depth)
            for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
                self.see(hook, depth)

    def _code(self, value: CodeType, depth: int, doc: str | None = None) -> None:
        self.add(value.co_code, repr(value.co_names))
        self.names.update(value.co_names)
        for constant in value.co_consts:
            if constant is None or constant is not doc:
                self.see(constant, depth)

    def _function(self, value: FunctionType, depth: int) -> None:
        if not of_user(value):
            self.add(value.__module__ or "", value.__qualname__)
            return
        self._code(value.__code__, depth, value.__doc__)
        for cell in value.__closure__ or ():
            self.see(_content(cell), depth)
        self.see(value.__defaults__, depth)
        self.see(value.__kwdefaults__, depth)
        names = _names(value.__code__)
        for name in sorted(names):
            if name in value.__globals__:
                self._global(name, value.__globals__[name], names, depth)

    def _global(self, name: str, value: Any, names: set[str], depth: int) -> None:
        """What a function reads from its module: the user's functions, and values."""
        if isinstance(value, ModuleType):
            if of_user(value):
                for inside in sorted(names):
                    if inside in vars(value):
                        self._global(inside, vars(value)[inside], set(), depth)
        elif not callable(value) or of_user(value):
            self.add(name)
            self.see(value, depth)

    def _bound(self, function: Any, owner: Any, depth: int) -> None:
        """A method, with the attributes of its object that it reads, and the methods that it calls."""
        if not isinstance(function, FunctionType) or not of_user(function):
            return
        self.see(function, depth)
        if isinstance(owner, type):
            return
        self._read_of(owner, _names(function.__code__) | {"__call__"}, depth)  # which has no name where it is called

    def _object(self, value: Any, depth: int) -> None:
        """The attributes that are read anywhere; if some are read without names, all plain ones, and all of records."""
        names = self.read | {"__call__"}
        if names & WHOLE:
            record = isinstance(value, Namespace | SimpleNamespace) or dataclasses.is_dataclass(value)
            names |= {name for name, part in attributes(value).items() if record or isinstance(part, PLAIN)}
        self._read_of(value, names, depth)

    def _read_of(self, owner: Any, names: set[str], depth: int) -> None:
        """Attributes of an object and of its class by their names, and what its methods and properties do."""
        own = attributes(owner)
        for name in sorted(names):
            if name in own:
                if name != "training" and not isinstance(own[name], nn.Module):
                    self.add(name)
                    self.see(own[name], depth)
                continue
            found = inspect.getattr_static(type(owner), name, None)
            found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
            found = found.fget if isinstance(found, property) else getattr(found, "func", found)
            if isinstance(found, FunctionType):
                if id(found) not in self._seen:
                    self._bound(found, owner, depth + 1)
            elif isinstance(found, (*PLAIN, tuple, list, dict, set, Tensor, np.ndarray)) and of_user(type(owner)):
                self.add(name)
                self.see(found, depth)

    def _class(self, value: type, depth: int) -> None:
        if of_user(value):
            for name, entry in sorted(vars(value).items()):
                entry = entry.__func__ if isinstance(entry, staticmethod | classmethod) else entry
                if isinstance(entry, FunctionType | bool | int | float | str) and not name.startswith("__"):
                    self.add(name)
                    self.see(entry, depth)

    def _collection(self, value: Any, depth: int) -> None:
        self.add(type(value).__name__, str(len(value)))
        if isinstance(value, Mapping):
            for key in list(value)[:MANY]:
                self.see(key, depth)
                self.see(value[key], depth)
        else:
            entries = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            for entry in entries[:MANY]:
                self.see(entry, depth)


def of_user(value: Any) -> bool:
    """Whether it was written by the user, and not installed.

    Args:
        value: A function, a class or a module.

    Returns:
        The answer.
    """
    if isinstance(value, FunctionType):
        place = value.__code__.co_filename
    else:
        module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
        built_in = module is None or module.__name__ == "builtins"
        place = getattr(module, "__file__", None) or (LIBRARIES[0] if built_in else "")
    return not place.startswith(LIBRARIES) and not INSTALLED & set(Path(place).parts)


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The plain attributes of a module that is installed."""
    for name, value in sorted(vars(module).items()):
        plain = value if isinstance(value, tuple | list) else [value]
        if name != "training" and not name.startswith("_") and all(isinstance(part, PLAIN) for part in plain):
            yield name, value


def _names(code: CodeType) -> set[str]:
    """What a code looks up, and the functions and comprehensions inside it."""
    inside = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inside)


def attributes(value: Any) -> dict[str, Any]:
    """Those of an object, also of one with slots.

    Returns:
        By name.
    """
    slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)}
    found = {name: getattr(value, name) for name in sorted(slots) if hasattr(value, name) and name != "__dict__"}
    return found | dict(getattr(value, "__dict__", {}))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
