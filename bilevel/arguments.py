"""Checks of arguments: each raises before work starts and says what to give instead."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

BY_NAME = "To choose by name, use params.named_parameters(): it has the names of your module."


def check_integer(name: str, value: object, minimum: int) -> None:
    """Refuse what is not a whole number of at least ``minimum``.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}.")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}: {value!r}.")


def file_name(name: str, value: object) -> Path:
    """The file that an argument stands for, wherever the program goes meanwhile.

    Args:
        name: Of the argument.
        value: A path; ``~`` is the home of the user.

    Returns:
        An absolute path.

    Raises:
        TypeError: If it is no path.
        ValueError: If no file can have that name.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} must be the path of a file, got {type(value).__name__}: {value!r}.")
    text = os.fspath(value)
    if not text or "\0" in text:
        raise ValueError(f"{name} must be the path of a file, got {text!r}.")
    return Path(os.path.abspath(os.path.expanduser(text)))


def length(loader: object) -> int | None:
    """The number of batches of a loader.

    Returns:
        None if it is not known.
    """
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset has __len__ but no length
        return None


def check_loader(name: str, loader: object) -> None:
    """Refuse what cannot be iterated over again and again as batches.

    Raises:
        TypeError: If it is not a re-iterable of batches.
        ValueError: If it is empty.
    """
    if loader is None:
        return
    kind = type(loader).__name__
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"{name} must yield batches, but a {kind} holds single examples: write "
            f"{name}=torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    if isinstance(loader, Tensor | np.ndarray | str | bytes | Mapping) or not isinstance(loader, Iterable):
        raise TypeError(
            f"{name} must be an iterable of batches (a DataLoader or a list) or None, got {kind}; "
            "wrap a single batch in a list: [batch]."
        )
    # Not by iter(loader): that draws random numbers and may start worker processes.
    if isinstance(loader, Iterator):
        raise TypeError(f"{name} is a {kind}, exhausted after one pass: give a list or a DataLoader.")
    if isinstance(loader, tuple) and loader and all(isinstance(part, Tensor) for part in loader):
        raise TypeError(f"{name} is a tuple of tensors, which looks like one batch: write {name}=[(x, y)].")
    if length(loader) == 0:
        raise ValueError(f"{name} is empty: a {kind} of length 0; give at least one batch.")


def check_clip(name: str, clip: Any) -> float | None:
    """Refuse what is not a positive number.

    Returns:
        The number, or None.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not positive and finite.
    """
    if clip is None:
        return None
    if isinstance(clip, bool) or not isinstance(clip, int | float):
        raise TypeError(f"{name} must be a number or None, got {type(clip).__name__}: {clip!r}.")
    if not 0 < clip < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {clip}; None does not clip.")
    return float(clip)


class Parameters(list[nn.Parameter]):
    """What an optimizer factory is given: a list of parameters that knows their names.

    Weights have the names that they have in your module. A parameter of a response that belongs to one weight has the
    name of that weight, so that a factory which chooses by name does the same for both.

    Example:
        >>> params = Parameters([("0.weight", nn.Parameter(torch.ones(2))), ("0.bias", nn.Parameter(torch.ones(1)))])
        >>> def factory(params):
        ...     biases = [param for name, param in params.named_parameters() if name.endswith("bias")]
        ...     others = [param for name, param in params.named_parameters() if not name.endswith("bias")]
        ...     return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}])
        >>> [len(group["params"]) for group in factory(params).param_groups]
        [1, 1]
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Keep parameters with their names."""
        pairs = list(named)
        super().__init__(param for _, param in pairs)
        self._names = [name for name, _ in pairs]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Pairs of a name and a parameter, as ``named_parameters`` of a module gives them.

        Returns:
            An iterator.
        """
        return zip(self._names, self, strict=True)


def make_optimizer(name: str, factory: Any, params: Parameters) -> Optimizer:
    """Call an optimizer factory, and check what it made.

    Returns:
        An optimizer of exactly these parameters.

    Raises:
        TypeError: If it is not a factory of optimizers that step without a closure.
        ValueError: If it made an optimizer of other parameters, or not of all.
    """
    if isinstance(factory, Optimizer):
        kind = type(factory).__name__
        raise TypeError(
            f"{name} must be a factory, got an instance of {kind}; "
            f"write {name}=lambda params: torch.optim.{kind}(params, ...)."
        )
    if not callable(factory):
        raise TypeError(f"{name} must be a function params -> torch.optim.Optimizer, got {type(factory).__name__}.")
    try:
        optimizer = factory(params)
    except Exception as error:
        error.add_note(
            f"Raised by {name}, which is called with a list of parameters, as in "
            f"lambda params: torch.optim.SGD(params, lr=0.1). {BY_NAME}"
        )
        raise
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{name} must return a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(f"{name} made an LBFGS, which needs a closure; use SGD, Adam, AdamW, RMSprop or Adagrad.")
    made = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if made - {id(param) for param in params}:
        raise ValueError(
            f"{name} made an optimizer of other parameters than it was given: pass its argument on, as in "
            "lambda params: torch.optim.SGD(params, lr=0.1). The solver trains copies, so net.parameters() and "
            f"net.named_parameters() are not what it trains. {BY_NAME}"
        )
    missing = [name for name, param in params.named_parameters() if id(param) not in made]
    if missing:
        raise ValueError(
            f"{name} made an optimizer that leaves out {', '.join(map(repr, missing))}: put every parameter into a "
            "group. To keep a weight as it is, call requires_grad_(False) on it before you state the problem."
        )
    return optimizer


def make_scheduler(name: str, factory: Any, optimizer: Optimizer) -> LRScheduler:
    """Call a scheduler factory, and check what it made.

    Returns:
        A scheduler of this optimizer.

    Raises:
        TypeError: If it is not a factory of schedulers.
        ValueError: If it made a scheduler of another optimizer.
    """
    if isinstance(factory, LRScheduler):
        raise TypeError(
            f"{name} must be a factory, got a {type(factory).__name__} instance; write "
            f"{name}=lambda optimizer: torch.optim.lr_scheduler.{type(factory).__name__}(optimizer, ...)."
        )
    if not callable(factory):
        raise TypeError(f"{name} must be a function optimizer -> scheduler, got {type(factory).__name__}.")
    scheduler = factory(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"{name} must return a torch.optim.lr_scheduler, got {type(scheduler).__name__}.")
    if scheduler.optimizer is not optimizer:
        raise ValueError(f"{name} made a scheduler of another optimizer than it was given: pass its argument on.")
    return scheduler
