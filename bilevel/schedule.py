"""The product of a run: every hyperparameter as a function of progress, to be used without this library."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bilevel.checkpoint.layout import Count, Each, Free, Text, check_form
from bilevel.dropouts import DropoutRate
from bilevel.history import History
from bilevel.hyper import LISTED_ENTRIES, Hyper, Space, suggest
from bilevel.regularizers.decay import DecayRate

FORMAT = "bilevel schedule"
COUPLED: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
)
"""Optimizers whose ``weight_decay`` times the weight is added to the gradient, as that of a penalty is."""


@dataclass(frozen=True)
class Schedule:
    r"""Hyperparameters as functions of progress, from 0 at the start of training to 1 at its end.

    A run of R rounds moves them R times. From progress :math:`k / R` on, they have the values ``values[name][k]``: the
    ones with which the weights were trained in round :math:`k + 1`. At 1 they have their final ones.

    Attributes:
        values: R + 1 values for each hyperparameter, by name: numbers, or nested lists of them.
        weights: For strengths of weight decay, the weights that each one is for, by name.
        modules: For dropout rates, the layers that each one is for.
        decoupled: Of the strengths of weight decay, those that are no penalty but decay as AdamW does.

    Example:
        >>> schedule = Schedule({"dropout.2": [0.1, 0.2, 0.4]}, {}, {"dropout.2": ["2"]})
        >>> schedule.at(0.0), schedule.at(0.7), schedule.final
        ({'dropout.2': 0.1}, {'dropout.2': 0.2}, {'dropout.2': 0.4})
        >>> schedule.dropout()
        {'2': 0.4}
    """

    values: Mapping[str, list[Any]] = field(repr=False)
    weights: Mapping[str, list[str]] = field(default_factory=dict)
    modules: Mapping[str, list[str]] = field(default_factory=dict)
    decoupled: Sequence[str] = ()

    @property
    def rounds(self) -> int:
        """R, how many times they move."""
        return len(next(iter(self.values.values()))) - 1

    @property
    def final(self) -> dict[str, Any]:
        """The values at the end."""
        return self.at(1.0)

    def at(self, progress: float) -> dict[str, Any]:
        """The values at some progress.

        Args:
            progress: From 0 to 1: steps that were made, divided by all steps.

        Returns:
            By name.

        Raises:
            ValueError: If it is outside.
        """
        if not 0 <= progress <= 1:
            raise ValueError(f"progress must be from 0 to 1, got {progress}.")
        index = min(self.rounds, math.floor(progress * self.rounds + 1e-9))
        return {name: values[index] for name, values in self.values.items()}

    def dropout(self, progress: float = 1.0) -> dict[str, float]:
        """The rates of layers: what to give to ``nn.Dropout(p)``.

        Rates of functions that a ``forward`` calls are not here; read them in :meth:`at`.

        Args:
            progress: As in :meth:`at`; the final ones by default.

        Returns:
            By name of the layer, as ``net.get_submodule(name)`` takes it.
        """
        values = self.at(progress)
        return {module: float(values[name]) for name, modules in self.modules.items() for module in modules}

    def param_groups(
        self, net: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, *, progress: float = 1.0
    ) -> list[dict[str, Any]]:
        r"""The tuned weight decay as groups of parameters for an optimizer.

        The penalty :math:`\lambda \sum w^2` has the gradient :math:`2 \lambda w`, so that ``weight_decay`` is
        :math:`2\lambda`. That holds for SGD, Adam and others that add ``weight_decay`` times the weight to the
        gradient. For AdamW there is no equal value: it takes its decay past the gradient and its scaling.

        Decoupled decay is that of AdamW, with the same value, and that of no other.

        Args:
            net: Whose parameters are grouped.
            optimizer: The class of the optimizer that gets the groups, ``optimizer(groups, lr=...)``.
            progress: As in :meth:`at`; the final values by default.

        Returns:
            One group for each strength, named ``"name"``, then one for the rest, with ``weight_decay`` 0.

        Raises:
            ValueError: If there is no equal value, or the network has other weights.

        Example:
            >>> schedule = Schedule({"weight_decay": [0.1, 0.3]}, {"weight_decay": ["weight"]})
            >>> groups = schedule.param_groups(nn.Linear(2, 1))
            >>> [(group["name"], group["weight_decay"], len(group["params"])) for group in groups]
            [('weight_decay', 0.6, 1), ('rest', 0.0, 1)]
        """
        if self.decoupled:
            self._check_decoupled(optimizer)
        elif optimizer not in COUPLED:
            names = ", ".join(kind.__name__ for kind in COUPLED)
            raise ValueError(
                f"param_groups: {getattr(optimizer, '__name__', optimizer)} has no weight_decay that equals a penalty "
                f"on the weights; those that have: {names}. With AdamW, add the penalty to the loss: "
                "loss + sum(rate * (w * w).sum() ...)."
            )
        left = dict(net.named_parameters())
        values = self.at(progress)
        groups = []
        for name, weights in self.weights.items():
            missing = [weight for weight in weights if weight not in left]
            if missing:
                raise ValueError(f"param_groups: the network has no weight {missing[0]!r}: {suggest(missing[0], left)}")
            decay = (1 if self.decoupled else 2) * float(values[name])
            groups.append({"params": [left.pop(weight) for weight in weights], "weight_decay": decay, "name": name})
        if left:
            groups.append({"params": [*left.values()], "weight_decay": 0.0, "name": "rest"})
        return groups

    def _check_decoupled(self, optimizer: type[torch.optim.Optimizer]) -> None:
        if optimizer is not torch.optim.AdamW or len(self.decoupled) != len(self.weights):
            raise ValueError(
                f"param_groups: {', '.join(self.decoupled)} is decoupled weight decay, which of the optimizers of "
                "PyTorch only AdamW has, and which no group can have beside a penalty. With another one, multiply the "
                "weights by 1 - lr * rate before each step."
            )

    def save(self, path: str | Path) -> None:
        """Write it as JSON; :meth:`load` reads it, and so does anything else.

        Args:
            path: The file.
        """
        names = {"weights": dict(self.weights), "modules": dict(self.modules), "decoupled": [*self.decoupled]}
        data = {"format": FORMAT, "version": 1, "rounds": self.rounds, **names, "values": dict(self.values)}
        Path(path).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read what :meth:`save` wrote.

        Args:
            path: The file.

        Returns:
            The schedule.

        Raises:
            ValueError: If the file holds something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ValueError("it holds no JSON object")
            if data["format"] != FORMAT or data["version"] != 1:
                raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
            names = Each(Text(), list)
            form = {"format": FORMAT, "version": 1, "rounds": Count(), "values": Each(Free()), "weights": Each(names)}
            check_form("it", {"decoupled": [], **data}, form | {"modules": Each(names), "decoupled": names})
            values = data["values"]
            for name, entries in values.items():
                if not isinstance(entries, list) or len(entries) != data["rounds"] + 1:
                    raise ValueError(f"not {data['rounds'] + 1} values for {name!r}")
                if None in (shapes := {_shape(entry) for entry in entries}) or len(shapes) > 1:
                    raise ValueError(f"the values of {name!r} are not finite numbers of one shape")
            decoupled = data.get("decoupled", [])
            unknown = [name for name in (*data["weights"], *data["modules"], *decoupled) if name not in values]
            if unknown or not values:
                raise ValueError(f"no values for {unknown[0]!r}" if unknown else "it has no values")
            return cls(values, data["weights"], data["modules"], decoupled)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = "nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
            raise ValueError(f"{path} is no schedule of version 1: {what}.") from error


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of nested lists of finite numbers; None for anything else."""
    if not isinstance(value, list):
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return () if plain and abs(value) <= sys.float_info.max else None
    shapes = {_shape(entry) for entry in value}
    if len(shapes) > 1:
        return None
    inner = shapes.pop() if shapes else ()
    return None if inner is None else (len(value), *inner)


def schedule_of(
    history: History, hyper: Mapping[str, Hyper], final: Mapping[str, Tensor], names: Sequence[str] | None = None
) -> Schedule:
    """Take the schedule from a history.

    Args:
        history: Of a run.
        hyper: Those of the problem.
        final: Their values at the end.
        names: Of those to take; all by default.

    Returns:
        The schedule.

    Raises:
        ValueError: If a hyperparameter has too many entries to be in the history, or the history is empty.
    """
    if not history:
        raise ValueError("there is no schedule: the run ended before its first round.")
    chosen = list(hyper) if names is None else list(names)
    unknown = [name for name in chosen if name not in hyper]
    if unknown:
        raise ValueError(f"schedule: no hyperparameter {unknown[0]!r}: {suggest(unknown[0], hyper)}")
    rows = {int(row["round"]): row for row in history.rows}  # the last row of each round
    values: dict[str, list[Any]] = {}
    for name in chosen:
        init = hyper[name].init
        if init.numel() > LISTED_ENTRIES:
            raise ValueError(
                f"schedule: {name!r} has {init.numel()} entries, of which the history keeps mean and range only; "
                "choose others by names=[...], and take this one from solution.hyper."
            )
        columns = [*Space.columns({name: init})]
        shape = tuple(init.shape)
        moved = [np.array([row[column] for column in columns]).reshape(shape).tolist() for row in rows.values()]
        values[name] = [init.tolist(), *moved]
        values[name][-1] = final[name].tolist()
    chosen_hyper = {name: hyper[name] for name in chosen}
    return Schedule(
        values,
        {name: list(entry.weights) for name, entry in chosen_hyper.items() if isinstance(entry, DecayRate)},
        {
            name: [place.module for place in entry.places if place.call is None]
            for name, entry in chosen_hyper.items()
            if isinstance(entry, DropoutRate)
        },
        [name for name, entry in chosen_hyper.items() if isinstance(entry, DecayRate) and entry.decoupled],
    )
