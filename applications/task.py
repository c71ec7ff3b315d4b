"""What an experiment consists of: settings with names, a bilevel problem, batches, optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import bilevel

SELF_TUNING = ("stn", "centered_stn", "delta_stn", "delta_stn_paper")
FIXED = ("fixed", "fixed_noise")
SEARCHES = ("grid_search", "random_search", "tpe", "gp", "cmaes")
STOPPED = ("interrupted", "terminated")
"""How a run ends that somebody stopped, and that is no result."""
Loss = Callable[[bilevel.Model, Mapping[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]]


def option(
    default: Any, help: str, *, least: float | None = None, above: float | None = None, below: float | None = None
) -> Any:
    """A setting with a line of help for the command line, and a bound if it has one.

    Returns:
        A field of a dataclass.
    """
    return field(default=default, metadata={"help": help, "least": least, "above": above, "below": below})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers of a run that every task has."""

    epochs: int = option(100, "passes over the training data", least=1)
    batch_size: int = option(128, "examples per batch", least=1)
    warmup: int | None = option(5, "epochs in which no hyperparameter moves; none: as in bilevel.solve", least=0)
    inner_steps: int = option(5, "training steps between outer steps (T_train)", least=1)
    outer_steps: int = option(1, "outer steps after them (T_valid)", least=1)
    learning_rate: float = option(0.01, "of the weights and of their response", above=0)
    outer_learning_rate: float | None = option(
        0.01, "of the hyperparameters and of their scale; none: the optimizer of bilevel.solve", above=0
    )
    scale: float = option(1.0, "standard deviation of the perturbation, at the start", least=0)
    entropy: float | None = option(
        None, "weight of the entropy with which the scale is learned; none keeps it fixed", least=0
    )
    limit: int | None = option(None, "use only so many training examples; none uses all", least=1)

    def __post_init__(self) -> None:
        """Raise a ValueError for a number that is out of bounds."""
        for entry in fields(self):
            value, flag = asdict(self)[entry.name], f"--{entry.name.replace('_', '-')}"
            least, above, below = (entry.metadata.get(bound) for bound in ("least", "above", "below"))
            if value is None:
                continue
            if least is not None and not value >= least:
                raise ValueError(f"{flag} must be at least {least}, got {value}.")
            if above is not None and not value > above:
                raise ValueError(f"{flag} must be above {above}, got {value}.")
            if below is not None and not value < below:
                raise ValueError(f"{flag} must be below {below}, got {value}.")


def preset_for(task: Task, preset: str, method: str) -> tuple[str, Settings]:
    """The settings with which a method is run, unless told otherwise.

    Returns:
        The name of the preset, which may be one of the method's own, and the settings.
    """
    preset = f"{preset}_{method}" if f"{preset}_{method}" in task.presets else preset
    return preset, as_usual(task.presets[preset], method)


def as_usual(settings: Settings, method: str) -> Settings:
    """Leave to ``bilevel.solve`` what Δ-STN does not take from the paper; ``delta_stn_paper`` and others take all.

    Returns:
        Settings without warm-up, outer learning rate and entropy for ``delta_stn``, otherwise those that were given.
    """
    if method != "delta_stn":
        return settings
    return replace(settings, warmup=None, outer_learning_rate=None, entropy=None)


def outer_optimizer(kind: Callable[..., torch.optim.Optimizer], settings: Settings) -> Any:
    """Makes the optimizer of the hyperparameters; None leaves it to ``bilevel.solve``."""
    rate = settings.outer_learning_rate
    return None if rate is None else partial(kind, lr=rate)


def initial(init: Mapping[str, Any], name: str, default: float, count: int = 1) -> Any:
    """The initial value of a hyperparameter: one number, or one for each of its ``count`` entries.

    Returns:
        What was given, or the default.

    Raises:
        ValueError: If there are more numbers, or fewer.
    """
    value = init.get(name, default)
    given = torch.as_tensor(value).numel()
    if given not in (1, count):
        wanted = "one number" if count == 1 else f"one number or {count}"
        raise ValueError(f"--init {name} takes {wanted}, got {given}: {value}.")
    return value


def starting(name: str, kind: Callable[..., bilevel.Hyper], *arguments: Any, **options: Any) -> bilevel.Hyper:
    """Make a hyperparameter; what is wrong with its initial value is wrong with ``--init``.

    Returns:
        ``kind(*arguments, **options)``.

    Raises:
        ValueError: If that does.
    """
    try:
        return kind(*arguments, **options)
    except ValueError as error:
        raise ValueError(f"--init {name}: {error}") from None


class Loader(Protocol):
    """Batches, pass after pass."""

    def __len__(self) -> int:
        """Count the batches of a pass."""

    def __iter__(self) -> Iterator[Any]:
        """Pass over the data once."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A task with its data and its network, ready to run.

    Attributes:
        problem: The bilevel problem; its outer loss returns a pair of the loss and of other measures by name.
        net: The network of the problem.
        outer_loss: The same loss once more, to be measured on ``test``.
        train: Batches for the inner loss.
        valid: Batches for the outer loss.
        test: Batches that no method sees.
        solve: Further arguments of :func:`bilevel.solve`: optimizers, schedulers, clipping, callbacks.
        search: Range that black-box searches explore, by name of the hyperparameter.
        derive: Further measures, computed from the means over a set, such as a perplexity.
    """

    problem: bilevel.Problem
    net: nn.Module
    outer_loss: Loss
    train: Loader
    valid: Iterable[Any]
    test: Iterable[Any]
    solve: Mapping[str, Any]
    search: Mapping[str, tuple[float, float]]
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda means: {}


class Task(ABC):
    """A row of the paper's table: data, network, hyperparameters and presets.

    Attributes:
        name: On the command line.
        summary: One line for the help.
        presets: Settings by name: ``paper`` as published, ``quick`` for minutes on a CPU.
        methods: What can tune it.
        datasets: What has to be under the data folder.
    """

    name: str
    summary: str
    presets: Mapping[str, Settings]
    methods: tuple[str, ...] = (*SELF_TUNING, *FIXED, *SEARCHES)
    datasets: tuple[str, ...] = ()

    @abstractmethod
    def build(
        self,
        settings: Any,
        *,
        data: Path | None,
        folder: Path | None,
        seed: int,
        device: torch.device,
        init: Mapping[str, Any],
    ) -> Experiment:
        """Read the data, draw the weights and the split.

        Args:
            settings: One of the presets, perhaps changed.
            data: Folder of the datasets; None generates small data of the same kind.
            folder: Of the run, where the split is kept; None keeps nothing.
            seed: Of the weights and of the split.
            device: Where to train.
            init: Initial values of hyperparameters that differ from those of the task, by name.

        Returns:
            The experiment.
        """


class Batches:
    """Batches of tensors that are on the device already, shuffled anew in every pass.

    Example:
        >>> [x.tolist() for (x,) in Batches([torch.arange(5)], 2, shuffle=False)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, tensors: Sequence[Tensor], size: int, *, shuffle: bool) -> None:
        """Cut tensors into batches of ``size`` examples."""
        self.tensors, self.size, self.shuffle = tensors, size, shuffle

    def __len__(self) -> int:
        """Count the batches.

        Returns:
            Their number.
        """
        return -(-len(self.tensors[0]) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Pass over the data once.

        Yields:
            One tensor of a batch for each tensor.
        """
        count, device = len(self.tensors[0]), self.tensors[0].device
        # The order comes from the CPU, so that it is the same on every device.
        order = (torch.randperm(count) if self.shuffle else torch.arange(count)).to(device)
        for rows in order.split(self.size):
            yield tuple(tensor[rows] for tensor in self.tensors)
