"""What a loader is made of: its options, its content, and what moves from pass to pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from bilevel.arguments import length
from bilevel.checkpoint import CheckpointError
from bilevel.checkpoint.layout import Count, Maybe, Number
from bilevel.solver.code import attributes, code_of, digest, of_user, sample

FEW = 64
"""Of longer lists, so many entries are looked at."""
DEPTH = 7
MANY = 10_000
"""At most so many objects."""
LONG = 100_000
"""Of longer lists, a sample of the numbers counts."""
HELD = (Tensor, np.ndarray, list, tuple, range)
LIMITS = {"pos": 624, "buffer_pos": 4, "has_gauss": 1, "has_uint32": 1, "uinteger": 2**32 - 1}
"""The largest values of what NumPy's generators count."""
SEED = "seed of its generator"
FUNCTIONS = ("collate_fn", "worker_init_fn", "transform")
CALLED = ("__iter__", "__next__", "__getitem__", "__getitems__", "__call__")


@cache
def _generators() -> tuple[type, ...]:
    """Their classes. NumPy loads its own when they are asked for, which takes a while."""
    return torch.Generator, np.random.Generator, np.random.RandomState, random.Random


@cache
def _whole() -> tuple[type, ...]:
    """What is not looked into."""
    return Tensor, np.ndarray, nn.Module, type, ModuleType, *_generators()


def parts(loader: Any) -> dict[str, Any]:
    """A loader, its samplers, its data set, its functions, and what they have and read.

    Returns:
        Each once, by its place.
    """
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # with the objects, so that no address is used again
    level = {"": loader}
    for _ in range(DEPTH):
        deeper: dict[str, Any] = {}
        for place, value in level.items():
            plain = value is None or isinstance(value, bool | int | float | str | bytes)
            if plain or id(value) in seen or len(seen) > MANY:
                continue
            seen[id(value)] = found[place] = value
            if not isinstance(value, _whole()):
                deeper |= {f"{place}.{name}": part for name, part in _inside(value)}
        level = deeper
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(value[:FEW]))
    elif isinstance(value, dict):
        yield from ((str(key), part) for key, part in list(value.items())[:FEW])
    elif isinstance(value, FunctionType):
        yield from _read_by(value)
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, partial):
        yield from (("function", value.func), ("args", value.args), ("keywords", value.keywords))
    else:
        # Not the pass that a loader with persistent workers has under way.
        yield from ((name, part) for name, part in attributes(value).items() if name != "_iterator")
        for name in CALLED:
            method = getattr(type(value), name, None)
            if isinstance(method, FunctionType):
                yield from ((f"{name}.{inner}", part) for inner, part in _read_by(method))


def _read_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function of the user captures, and the generators and functions of its module that it names."""
    if not of_user(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            yield name, cell.cell_contents
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (*_generators(), FunctionType)):
            yield name, value


def generators(loader: Any) -> list[Any]:
    """The random generators that belong to a loader, its samplers, its data set and their functions.

    Returns:
        Those of torch, numpy and Python, each once.
    """
    return [part for part in parts(loader).values() if isinstance(part, _generators())]


def numbers(loader: Any) -> dict[str, int]:
    """The whole numbers that the user's samplers and data sets have as attributes, such as that of the pass.

    Returns:
        By their places.
    """
    return {
        f"{place}.{name}".lstrip("."): value
        for place, part in _objects(loader).items()
        for name, value in _counters(part).items()
    }


def set_numbers(loader: Any, values: dict[str, int]) -> None:
    """Return to :func:`numbers`, as far as they are there."""
    for place, part in _objects(loader).items():
        for name, value in _counters(part).items():
            new = values.get(f"{place}.{name}".lstrip("."), value)
            if new != value:
                vars(part)[name] = new


def _counters(value: Any) -> dict[str, int]:
    """The whole numbers of an object and of its class."""
    kinds = [vars(kind) for kind in reversed(type(value).__mro__) if of_user(kind)]
    found = {name: part for own in [*kinds, vars(value)] for name, part in own.items()}
    return {name: part for name, part in found.items() if type(part) is int and not name.startswith("__")}


def _objects(loader: Any) -> dict[str, Any]:
    """Those of classes that the user wrote."""
    others = (*_whole(), FunctionType, MethodType)
    found = {place: part for place, part in parts(loader).items() if not isinstance(part, others)}
    return {place: part for place, part in found.items() if hasattr(part, "__dict__") and of_user(type(part))}


def options(loader: Any) -> dict[str, Any]:
    """What is known about a loader without reading from it: its kind, its length, its options, its tensors and arrays.

    Returns:
        Plain types.
    """
    found: dict[str, Any] = {"kind": type(loader).__name__}
    if isinstance(loader, DataLoader):
        data, sampler = loader.dataset, loader.sampler if loader.batch_sampler is not None else None
        found |= {name: getattr(loader, name) for name in ("batch_size", "drop_last", "num_workers")}
        found |= {"data set": type(data).__name__, "number of examples": length(data)}
        found |= {"sampler": type(sampler).__name__, "batch_sampler": type(loader.batch_sampler).__name__}
        found |= {name: code_of(getattr(loader, name)) for name in ("collate_fn", "worker_init_fn")}
        found["transform"] = code_of(getattr(data, "transform", None))
    if isinstance(loader, list | tuple):
        found["content"] = digest([sample(batch) for batch in loader[:: 1 + len(loader) // FEW]])
    else:
        # A file that is mapped into memory may be on a slow disk.
        held = [_values(part) for part in parts(loader).values() if isinstance(part, HELD)]
        found["content"] = sample([p for p in held if not isinstance(p, np.memmap) and not _is_learned(p)])
        found[SEED] = [seed for seed in map(_seed, generators(loader)) if seed is not None]
    return found | {"number of batches": length(loader)}


def _values(part: Any) -> Any:
    """Of a list, such as the indices of a subset, the numbers and tensors. Of a long one, a sample."""
    if not isinstance(part, list | tuple | range):
        return part
    return [entry for entry in part[:: 1 + len(part) // LONG] if isinstance(entry, int | float | np.number | Tensor)]


def _seed(generator: Any) -> int | None:
    """What a generator of torch or numpy was made with, if that was chosen by somebody."""
    if isinstance(generator, torch.Generator):
        seed: Any = generator.initial_seed()
    else:
        bits = getattr(generator, "bit_generator", None)
        seed = getattr(getattr(bits, "seed_seq", None), "entropy", None)
    return seed if isinstance(seed, int) and 0 <= seed < 1 << 32 else None  # the system and torch draw larger ones


def _is_learned(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def keeps_what_it_draws(loader: Any) -> bool:
    """Whether random numbers that are drawn in the middle of a pass may decide about later batches of it.

    Those that are drawn to make an example in the main process decide about the batch at hand only.

    Returns:
        The answer.
    """
    if isinstance(loader, DataLoader):
        return loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset)
    return not isinstance(loader, list | tuple)


def get_global() -> list[Any]:
    """The states of numpy's and Python's own random numbers, as integers."""
    return [state_of(np.random.mtrand._rand), state_of(random)]


def form_of_global() -> list[Any]:
    """The form of :func:`get_global`."""
    return [form_of_state(np.random.mtrand._rand), form_of_state(random)]


def set_global(states: list[Any]) -> None:
    """Return to :func:`get_global`."""
    for module, state in zip((np.random.mtrand._rand, random), states, strict=True):
        restore(module, state)


def state_of(generator: Any) -> Any:
    """The state of a generator, or of the module ``random``, in plain types."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, numbers, rest = generator.getstate()
    return {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "rest": rest}


def form_of_state(generator: Any) -> Any:
    """The form of :func:`state_of`.

    Args:
        generator: Or the module ``random``.

    Returns:
        The form; NumPy does not see that a number is too large, and reads beyond its memory.
    """

    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: Count(0, LIMITS[k]) if k in LIMITS else form(entry) for k, entry in value.items()}
        if isinstance(value, int):
            return Count(0, None)
        return Number() if isinstance(value, float) else value

    own = state_of(generator)
    if isinstance(generator, torch.Generator | np.random.Generator | np.random.RandomState):
        return form(own)
    return own | {"rest": Maybe(Number())}


def restore(generator: Any, state: Any) -> None:
    """Return to :func:`state_of`.

    Raises:
        CheckpointError: If it is the state of something else.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.setstate((state["version"], tuple(state["numbers"].tolist()), state["rest"]))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"checkpoint: a random state does not fit {type(generator).__name__} ({error})."
        ) from error
