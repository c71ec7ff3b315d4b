r"""Linear regressions whose bilevel optimum is known: data, exact inner solutions, and their best hyperparameter.

All three problems of ``exp-toy`` have, in expectation, the inner loss of a ridge regression

.. math:: \frac{1}{2n} \|X v - t\|^2 + \frac{c(\lambda)}{2n} \sum_j s_j v_j^2.

- Ridge regression: :math:`c = e^\lambda` and :math:`s_j = 1`; :math:`c = n e^\lambda` if the penalty is not divided.
- Linear network: :math:`v` is the product of its layers, which can be any vector, and :math:`\partial y / \partial x
  = v` at every input. So :math:`v` minimises the same loss, and the best :math:`\lambda` is that of ridge regression.
- Input dropout at rate p, the kept inputs scaled by :math:`1 / (1 - p)`: the masked inputs have mean :math:`X` and
  variance :math:`X_{ij}^2\, p / (1 - p)`, so that :math:`c = p / (1 - p)` and :math:`s_j = \sum_i X_{ij}^2`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from applications import sklearn_datasets
from applications.data import split as draw_split
from applications.data import uci

PROBLEMS = ("ridge", "input_dropout", "linear_network")
HIGHEST_RATE = 0.95
MARGIN = 4.0
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """A data set, split 80 to 20 and standardised by its training part.

    Attributes:
        name: Of the data set.
        seed: Of the split.
        train: Inputs and targets.
        valid: Inputs and targets.
    """

    name: str
    seed: int
    train: tuple[Array, Array]
    valid: tuple[Array, Array]

    @property
    def small(self) -> bool:
        """Whether the set has fewer than 1000 examples, for which the paper has other settings."""
        return len(self.train[1]) + len(self.valid[1]) < 1000


def load(name: str, seed: int, folder: Path | None, saved: Path | None = None) -> Split:
    """Read and split a data set.

    Args:
        name: Of a UCI set in the folder; ``diabetes`` comes with scikit-learn and needs none.
        seed: Of the split.
        folder: The data folder.
        saved: File in which the split is kept, or from which it is read.

    Returns:
        The split, standardised; inputs that are constant in its training part are left out.

    Raises:
        ValueError: If the set needs a folder.
    """
    if name == "diabetes":
        inputs, targets = sklearn_datasets().load_diabetes(return_X_y=True)
    elif folder is None:
        raise ValueError(f"--sets {name} needs --data DIR with DIR/uci/{name}.npz; without it there is only diabetes.")
    else:
        inputs, targets = uci(name, folder)
    train, valid = (rows.numpy() for rows in draw_split(len(targets), 0.2, seed, saved))
    # Rounding gives the standard deviation of a constant column a value just above zero.
    inputs = inputs[:, inputs[train].std(0) > 1e-12 * np.abs(inputs[train]).max(0)]
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    targets = (targets - targets[train].mean()) / targets[train].std()
    return Split(name, seed, (inputs[train], targets[train]), (inputs[valid], targets[valid]))


class ClosedForm:
    r"""The exact inner solution :math:`v(\lambda) = (X^\top X + c(\lambda)\,\mathrm{diag}(s))^{-1} X^\top t`.

    Attributes:
        strength: The function c of the unconstrained :math:`\lambda`.
        bounds: Where :meth:`optimum` searches.
    """

    def __init__(self, split: Split, problem: str, *, undivided: bool = False) -> None:
        """Decompose the Gram matrix of the training set, in coordinates in which the penalty is a multiple of I."""
        inputs, targets = split.train
        count = len(inputs)
        self.strength: Callable[[Array], Array]
        if problem == "input_dropout":
            scales = (inputs**2).sum(0) ** -0.5
            self.strength = _odds
            self.bounds = (-12.0 - math.log(count), 10.0)
        else:
            scales = np.ones(inputs.shape[1])
            shift = math.log(count) if undivided else 0.0
            self.strength = lambda hyper: np.exp(hyper + shift)
            self.bounds = (-12.0 - shift, 16.0 - shift)
        eigenvalues, basis = np.linalg.eigh((inputs * scales).T @ (inputs * scales))
        self._eigenvalues = np.maximum(eigenvalues, 0.0)
        self._basis = scales[:, None] * basis
        self._projected = self._basis.T @ (inputs.T @ targets)
        valid, self._targets = split.valid[0] @ self._basis, split.valid[1]
        self._gram, self._moment = valid.T @ valid, valid.T @ self._targets
        self._valid = valid

    def weights(self, hyper: float) -> Array:
        """The exact inner solution at the unconstrained ``hyper``."""
        return np.asarray(self._basis @ self._coordinates(hyper))

    def loss(self, hyper: float) -> float:
        """The validation loss of the exact solution."""
        return float(0.5 * np.mean((self._valid @ self._coordinates(hyper) - self._targets) ** 2))

    def optimum(self) -> float:
        """The minimiser of :meth:`loss`: the best point of a grid, then bisection of the derivative beside it.

        Returns:
            Its unconstrained value; an end of ``bounds`` if the loss still falls there.
        """
        grid, step = np.linspace(*self.bounds, 2801, retstep=True)
        weights = self._projected / (self._eigenvalues + self.strength(grid)[:, None])
        best = float(grid[np.argmin(((weights @ self._gram - 2 * self._moment) * weights).sum(1))])
        low, high = best - float(step), best + float(step)
        return _bisect(self._derivative, low, high) if self._derivative(low) < 0 < self._derivative(high) else best

    def is_inside(self, hyper: float) -> bool:
        """Whether an optimum is well inside the bounds: validation does want some penalty, and not all of it."""
        return self.bounds[0] + MARGIN < hyper < self.bounds[1] - MARGIN

    def limit(self, start: float, scale: float) -> float:
        r"""Where Δ-STN with exact expectations and small steps comes to rest.

        With a fixed scale :math:`\sigma` it is not the optimum, since :math:`c(\lambda + \epsilon)` is not linear in
        :math:`\epsilon`: the slopes solve :math:`(\sigma^2 X^\top X + \mathbb{E}[\epsilon^2 c]\,\mathrm{diag}(s))\,
        \Theta = -\mathbb{E}[\epsilon c]\,\mathrm{diag}(s)\,v`.

        Args:
            start: The unconstrained value from which it comes.
            scale: Standard deviation of the perturbation.

        Returns:
            The first zero of its hypergradient on the way down; or the bound that it meets.
        """
        nodes, weights = np.polynomial.hermite_e.hermegauss(64)
        weights = weights / weights.sum()

        def hypergradient(hyper: float) -> float:
            spread = weights @ (nodes**2 * self.strength(hyper + scale * nodes))
            return self._response(hyper, self._eigenvalues + float(spread))

        step = -0.01 if hypergradient(start) > 0 else 0.01
        hyper = start
        while self.bounds[0] < hyper < self.bounds[1]:
            if hypergradient(hyper + step) * step > 0:
                return _bisect(hypergradient, *sorted((hyper, hyper + step)))
            hyper += step
        return min(max(hyper, self.bounds[0]), self.bounds[1])

    def _coordinates(self, hyper: float) -> Array:
        return np.asarray(self._projected / (self._eigenvalues + self.strength(np.array(hyper))))

    def _derivative(self, hyper: float) -> float:
        """The derivative of the loss, but for a positive factor."""
        return self._response(hyper, self._eigenvalues + self.strength(np.array(hyper)))

    def _response(self, hyper: float, curvature: Array) -> float:
        """The change of the loss if the weights change by ``-weights / curvature``."""
        weights = self._coordinates(hyper)
        return float((self._gram @ weights - self._moment) @ (-weights / curvature))


def first_inside(name: str, folder: Path | None, problem: str, *, undivided: bool = False) -> Split:
    """The first split with an optimum inside the bounds: without one there is nothing to converge to.

    Returns:
        The split.

    Raises:
        ValueError: If none of a hundred has one.
    """
    for seed in range(100):
        split = load(name, seed, folder)
        exact = ClosedForm(split, problem, undivided=undivided)
        if exact.is_inside(exact.optimum()):
            return split
    raise ValueError(f"--sets {name}: no split from 0 to 99 has an optimum inside: choose another set.")


def _odds(hyper: Array) -> Array:
    """The odds p / (1 - p) of the rate that the unconstrained ``hyper`` stands for."""
    rate = HIGHEST_RATE / (1 + np.exp(-hyper))
    return np.asarray(rate / (1 - rate))


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """The zero between two values at which the function has different signs."""
    rising = function(high) > 0
    for _ in range(60):
        middle = (low + high) / 2
        if (function(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2
