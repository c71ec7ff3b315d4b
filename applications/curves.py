"""Losses over time as step functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Curve = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def average(curves: Sequence[Curve]) -> Curve:
    """The mean of step functions, where all of them are defined.

    Returns:
        One step function, with the steps of all.

    Example:
        >>> average([(np.array([1.0, 2.0]), np.array([4.0, 2.0])), (np.array([1.0, 3.0]), np.array([6.0, 0.0]))])
        (array([1., 2.]), array([5., 4.]))
    """
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    every = np.unique(np.concatenate([x for x, _ in curves]))
    steps = every[(every >= first) & (every <= last)]
    if not len(steps):  # one run ended before another had its first value
        return np.array([]), np.array([])
    return steps, np.mean([y[np.searchsorted(x, steps, side="right") - 1] for x, y in curves], axis=0)
