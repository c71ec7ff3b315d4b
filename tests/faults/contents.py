"""Runs of many kinds, and every way to replace a part of what they saved, with a right checksum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples import batches
from faulty import run
from torch import Tensor, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import bilevel

Place = tuple[Any, ...]


class Stateful:
    """A loader that says where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 4:
            self.at += 1
            yield batches()[self.at - 1]
        self.at = 0

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Counting(TensorDataset):
    """A data set that counts, with generators of its own."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.epoch, self.offset = 0, 3
        self.noise, self.other = np.random.default_rng(0), np.random.RandomState(1)

    def __getitem__(self, index: int) -> Any:
        self.epoch += 1
        x, y = super().__getitem__(index)
        return x + 0.01 * float(self.noise.normal() + self.other.normal()), y


def counting() -> DataLoader:
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    return DataLoader(Counting(x, y), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1))


def groups(params: Any) -> optim.Optimizer:
    """Two groups of one optimizer."""
    first, *rest = params
    both = [{"params": [first], "lr": 0.01}, {"params": rest}] if rest else [{"params": [first]}]
    return optim.AdamW(both, lr=1e-3, amsgrad=True, foreach=False)


def chain(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[2])


SCHEDULERS = [
    None,
    partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    partial(lr_scheduler.CosineAnnealingLR, T_max=20),
    partial(lr_scheduler.ReduceLROnPlateau, patience=0),
    partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
    chain,
    partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=30),
    partial(lr_scheduler.MultiStepLR, milestones=[2, 4]),
    partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
]
OPTIMIZERS = [
    partial(optim.SGD, lr=2**-7, momentum=0.5),
    partial(optim.Adam, lr=1e-3),
    groups,
    partial(optim.RMSprop, lr=1e-3, centered=True, momentum=0.1),
    partial(optim.Adagrad, lr=1e-3),
    partial(optim.Rprop, lr=1e-3),
    partial(optim.SGD, lr=2**-7),
    partial(optim.NAdam, lr=1e-3),
    partial(optim.RAdam, lr=1e-3),
    partial(optim.Adadelta, lr=1e-3),
    partial(optim.Adamax, lr=1e-3),
    partial(optim.ASGD, lr=1e-3),
    partial(optim.Adafactor, lr=1e-3),
]


def kinds() -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Runs by name: a method, and the changes of its arguments, made anew for every call."""
    found = {}
    for index, method in enumerate(sorted(bilevel.METHODS)):
        settings: dict[str, Any] = {
            "inner_optimizer": OPTIMIZERS[index % 5],
            "outer_optimizer": OPTIMIZERS[(index + 1) % len(OPTIMIZERS)],
            "inner_scheduler": SCHEDULERS[index % len(SCHEDULERS)],
            "outer_scheduler": SCHEDULERS[(index + 1) % len(SCHEDULERS)],
            "on_nan": ("raise", "skip", "rollback")[index % 3],
        }
        if index % 2:  # no validation pass before the checkpoint, so that there is no best one yet
            settings["evaluate_every"] = 50
        found[method] = (method, partial(dict, settings))
    for index, optimizer in enumerate(OPTIMIZERS):
        scheduler = SCHEDULERS[index % len(SCHEDULERS)]
        if index == 6:  # one cycle needs a momentum
            scheduler = partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2, cycle_momentum=False)
        own = {"inner_optimizer": optimizer, "outer_optimizer": optimizer, "inner_scheduler": scheduler, "patience": 50}
        found[f"optimizer {index}"] = ("delta_stn", partial(dict, own))
    found["stateful"] = ("implicit_identity", lambda: {"train": Stateful()})
    found["counting"] = ("centered_stn", lambda: {"train": counting(), "accumulate": 2})
    return found


def call(kind: tuple[str, Callable[[], dict[str, Any]]], file: Path | None, **changes: Any) -> bilevel.Solution:
    """A run of a kind."""
    method, make = kind
    if bilevel.METHODS[method].unrolled_steps:
        changes |= {"accumulate": 1}
    return run(method, file, **make() | changes)


def deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


FOREIGN = [
    *(None, "text", True, 7, -7, 10**30, 0.5, math.nan, math.inf, -math.inf, 1e308, b"bytes"),
    *([], {}, (), {1, 2}, [1.5], {"a": 1}, deep(40), torch.zeros(2), torch.zeros(0, 3), np.zeros(3)),
]


def mutants(value: Any) -> Iterator[tuple[str, Any, bool]]:
    """What may stand in the place of a value: in words, the other value, and whether it must be refused."""
    for other in FOREIGN:
        alike = type(value) is type(other) and isinstance(value, bool | int | float | str | None)
        if isinstance(value, float):
            alike = type(other) in (int, float) and abs(other) < math.inf
        empty = isinstance(value, list | tuple | dict | set) and type(value) is type(other) and not value and not other
        same = isinstance(value, float) and isinstance(other, float) and f"{value}" == f"{other}"
        if not empty and not same and not (alike and other == value):
            yield f"{type(other).__name__} {str(other)[:12]}", other, not alike
    if isinstance(value, dict):
        for key in value:
            yield f"without {key!r}", {name: entry for name, entry in value.items() if name != key}, True
        yield "with another key", value | {"zz": 0}, True
        yield "with the key 99", value | {99: {}}, True
        keys = list(value)
        for one, other in pairwise(keys):
            yield f"{one!r} and {other!r} exchanged", value | {one: value[other], other: value[one]}, False
    if isinstance(value, list | tuple):
        make = type(value)
        yield "another sequence", (tuple if make is list else list)(value), True
        if value:
            yield "shorter", value[:-1], True
            yield "longer", make([*value, value[-1]]), True
            yield "reversed", value[::-1], False
    if isinstance(value, str):
        yield "empty", "", False
        yield "more", value + "x", False
    if type(value) is int:
        for number in (value + 1, -value - 1, 10**9):
            yield f"int {number}", number, False
    if isinstance(value, float):
        yield "negative", -abs(value) - 1, False
    if isinstance(value, Tensor):
        yield "flat and one more", torch.cat([value.reshape(-1), value.reshape(-1)[:1]]), True
        yield "one dimension more", value[None], True
        yield "another dtype", value.double() if value.dtype != torch.float64 else value.float(), True
        yield "integers", value.long() if value.dtype != torch.int64 else value.int(), True
        if value.is_floating_point() and value.numel():
            for number in (math.nan, math.inf):
                yield f"{number}", torch.full_like(value, number), True
                one = value.clone()
                one.reshape(-1)[-1] = number
                yield f"one {number}", one, True
            yield "negative numbers", -value.abs() - 1, False
        if not value.is_floating_point():
            yield "ones", torch.ones_like(value), False
            yield (
                "largest",
                torch.full_like(value, torch.iinfo(value.dtype).max) if value.dtype != torch.bool else value,
                False,
            )
    if isinstance(value, np.ndarray):
        yield "one less", value[:-1], True
        yield "another dtype", value.astype(np.float64), True


def places(state: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every part of a state."""
    yield place, state
    if isinstance(state, dict):
        for key, value in state.items():
            yield from places(value, (*place, key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from places(value, (*place, index))


def replaced(state: Any, place: Place, value: Any) -> Any:
    """A state with another value somewhere inside."""
    if not place:
        return value
    first, *rest = place
    if isinstance(state, dict):
        return {key: replaced(part, tuple(rest), value) if key == first else part for key, part in state.items()}
    parts = [replaced(part, tuple(rest), value) if index == first else part for index, part in enumerate(state)]
    return type(state)(parts)


def may_be_accepted(place: Place, label: str, state: Any, *, override: bool) -> bool:
    """Whether a state with this part is one that a run could really have, though the part has another form.

    Args:
        place: Of the part.
        label: What was done to it.
        state: Before.
        override: Whether what changed is to be taken over.

    Returns:
        The answer.
    """
    part = state
    for key in place:
        part = part[key]
    names = [str(key) for key in place]
    if "state" in names and "optimizers" in names:  # nothing is remembered before a first step, or a first gradient
        inside = len(names) - names.index("state") - 1
        if (inside == 0 and label.startswith("without")) or (inside < 2 and label == "dict {}"):
            return True
        if names[-1] == "step":  # of another default dtype, or a number
            return label in ("another dtype", "one dimension more", "int 7", "flat and one more") or isinstance(
                part, float
            )
        if label == "without 'momentum_buffer'" or (names[-1] == "momentum_buffer" and label == "NoneType None"):
            return True
    if names[-2:] == ["start", "numbers"] and label in ("with another key", "dict {'a': 1}"):
        return True
    if names[-1] == "rest" or (
        label in ("bool True", "float inf") and (names[0] == "fingerprint" or "options" in names)
    ):
        return True
    if names[-1] in ("base_lrs", "_last_lr") and label == "list [1.5]" and len(part) == 1:
        return True
    if place in (("seconds",), ("best", "inner_loss")):  # a whole number of seconds, no step in that round
        return label in ("int 7", "float nan", "float inf", "float -inf")
    if names[0] == "signal" and ("nan" in label or "inf" in label) and not label.startswith("float"):  # by overflow
        return True
    if isinstance(part, int) and "param_groups" in names:  # a setting that was given as a whole number
        return label.startswith("float")
    if override and names[0] == "fingerprint":  # whatever it was, this call says what it is now
        return len(names) > 1 or label.startswith("with")
    replaced_anyway = {"generators", "options", "first", "stream"}
    return override and names[0] == "feeds" and not replaced_anyway.isdisjoint(names)


def words(place: Place) -> str:
    return "/".join(map(str, place))
