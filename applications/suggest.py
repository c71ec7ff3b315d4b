"""What searches suggest: the space of a task, grids, and Optuna's samplers and pruners by name."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from applications.task import Experiment

try:
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise ImportError("searches need Optuna: pip install 'bilevel[applications]'.") from error

PRUNERS = ("median", "hyperband", "none")
HAIR = 1e-4
STARTUP = 5
"""Random trials before a model of the past ones suggests the next; Optuna has 10, half of our default of trials."""
Axis = FloatDistribution | IntDistribution


def distributions(experiment: Experiment) -> dict[str, Axis]:
    """What to suggest: one number for every entry of every hyperparameter that has a range to search.

    Returns:
        Optuna's distributions by name of the entry; an end of an open interval is not part of it.
    """
    found: dict[str, Axis] = {}
    for name, hyper in experiment.problem.space.hyper.items():
        if name not in experiment.search:
            continue
        low, high = experiment.search[name]
        hair = HAIR * (high - low)
        axis: Axis = (
            IntDistribution(int(low), int(high))
            if hyper.discrete
            else FloatDistribution(max(low, hyper.low + hair), min(high, hyper.high - hair))
        )
        for index in np.ndindex(*hyper.init.shape):
            found[f"{name}{list(index)}" if index else name] = axis
    return found


def natural(params: Mapping[str, float]) -> dict[str, Any]:
    """Gather the entries of vectors.

    Returns:
        Values by name of the hyperparameter, as ``Task.build`` takes them.

    Example:
        >>> natural({"dropout[10]": 0.2, "dropout[9]": 0.1, "holes": 3})
        {'dropout': [0.1, 0.2], 'holes': 3}
    """
    values: dict[str, Any] = {}
    # A database does not keep the order.
    for entry in sorted(
        params, key=lambda entry: [int(number) for number in re.findall(r"\d+", entry.partition("[")[2])]
    ):
        name, bracket, _ = entry.partition("[")
        if bracket:
            values.setdefault(name, []).append(params[entry])
        else:
            values[name] = params[entry]
    return dict(sorted(values.items()))


def grid_points(space: Mapping[str, Axis], trials: int) -> dict[str, list[float]]:
    """The finest grid with the same number of points on every axis that needs at most ``trials`` trials.

    Returns:
        Values by name of the entry.

    Raises:
        ValueError: If not even two points on every axis are possible.
    """
    count = 1
    while math.prod(len(_points(axis, count + 1)) for axis in space.values()) <= trials and count < trials:
        count += 1
    if count < 2:
        raise ValueError(
            f"grid_search: two points for each of {len(space)} hyperparameters are {2 ** len(space)} trials, but "
            f"--trials is {trials}. Use --method random_search, or allow that many."
        )
    return {name: _points(axis, count) for name, axis in space.items()}


def sampler(method: str, seed: int, points: Mapping[str, Sequence[float]]) -> BaseSampler:
    """What suggests values for a method of that name; ``points`` are those of a grid."""
    if method == "grid_search":
        return optuna.samplers.GridSampler(points, seed=0)  # every process needs the same order
    if method == "random_search":
        return optuna.samplers.RandomSampler(seed=seed)
    if method == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    if method == "gp":
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP)
    return optuna.samplers.CmaEsSampler(seed=seed, n_startup_trials=STARTUP)


def seed_of(method: str, seed: int, number: int) -> int:
    """The seed of a trial, so that no two methods begin with the same random points."""
    return zlib.crc32(f"{method} {seed} {number}".encode())


def pruner_of(name: str, epochs: int) -> optuna.pruners.BasePruner:
    """What stops bad trials of that many epochs."""
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=epochs)
    return optuna.pruners.MedianPruner() if name == "median" else optuna.pruners.NopPruner()


@final
class Reseeded(BaseSampler):
    """A sampler that is made anew for every trial.

    With a seed that follows from the number of the trial, neither a search that goes on nor parallel processes suggest
    the same again.
    """

    def __init__(self, make: Callable[[int], BaseSampler]) -> None:
        """Make samplers with ``make``, a function of the number of the trial."""
        self._make, self._now = make, make(0)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Make the sampler of the trial."""
        self._now = self._make(trial.number)
        self._now.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """As the sampler does."""
        return self._now.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As the sampler does."""
        return self._now.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """As the sampler does."""
        return self._now.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """As the sampler does."""
        self._now.after_trial(study, trial, state, values)


def _points(axis: Axis, count: int) -> list[float]:
    ends = np.linspace(axis.low, axis.high, count)
    return sorted({round(x) for x in ends}) if isinstance(axis, IntDistribution) else ends.tolist()
