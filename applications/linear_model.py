"""The linear models of ``exp-toy`` as bilevel problems; :mod:`applications.optima` has their exact solutions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import bilevel
from applications.optima import HIGHEST_RATE, Split

Batch = tuple[Tensor, Tensor]


class LinearNetwork(nn.Module):
    """Square linear layers without biases, then one output; no hidden layer is linear regression."""

    def __init__(self, features: int, hidden: int) -> None:
        """Draw orthogonal layers, so that the product of many does not vanish; an output of zero starts at y = 0."""
        super().__init__()
        layers = [nn.Linear(features, features, bias=False) for _ in range(hidden)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight)
        self.hidden = nn.Sequential(*layers)
        self.output = nn.Linear(features, 1, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Predict.

        Returns:
            One number for each row of ``x``.
        """
        prediction: Tensor = self.output(self.hidden(x)).squeeze(-1)
        return prediction


def squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Half the mean squared error."""
    return 0.5 * (predictions - targets).square().mean()


def penalised_loss(model: bilevel.Model, hyper: Any, batch: Batch, *, divisor: int) -> Tensor:
    """With half the penalty times the squared norm of the input Jacobian."""
    inputs, targets = batch
    # Without biases, predictions at the unit vectors are the Jacobian: a method that linearises one linearises both.
    units = torch.eye(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
    predictions, jacobian = model(torch.cat([inputs, units])).split([len(inputs), len(units)])
    penalty: Tensor = hyper["penalty"] / (2 * divisor) * jacobian.square().sum()
    return squared_error(predictions, targets) + penalty


def dropout_loss(model: bilevel.Model, hyper: Any, batch: Batch) -> Tensor:
    """With masked inputs; those that are kept are scaled by 1 / (1 - rate)."""
    inputs, targets = batch
    return squared_error(model(bilevel.functional.dropout(inputs, hyper["rate"])), targets)


def valid_loss(model: bilevel.Model, hyper: Any, batch: Batch) -> Tensor:
    """As it is."""
    inputs, targets = batch
    return squared_error(model(inputs), targets)


def hyperparameter(
    split: Split, problem: str, *, undivided: bool, start: float | None = None
) -> dict[str, bilevel.Hyper]:
    """The hyperparameter of a problem.

    Args:
        split: The data.
        problem: One of ``PROBLEMS``.
        undivided: Do not divide the penalty by n.
        start: Its unconstrained initial value; that of the paper by default, where an undivided penalty is as strong.

    Returns:
        It by name.
    """
    if problem == "input_dropout":
        rate = 0.2 if start is None else HIGHEST_RATE / (1 + math.exp(-start))
        return {"rate": bilevel.interval(0.0, HIGHEST_RATE, init=rate)}
    penalty = (1.0 if split.small else 50.0) / (len(split.train[0]) if undivided else 1)
    return {"penalty": bilevel.positive(penalty if start is None else math.exp(start))}


def make_problem(
    split: Split, problem: str, *, undivided: bool, seed: int, start: float | None = None, device: str = "cpu"
) -> bilevel.Problem:
    """The bilevel problem of a split; arguments as in :func:`hyperparameter`, and the seed of the weights."""
    count, features = split.train[0].shape
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = LinearNetwork(features, 5 if problem == "linear_network" else 0).double().to(device)
    return bilevel.Problem(
        net,
        inner_loss=dropout_loss
        if problem == "input_dropout"
        else partial(penalised_loss, divisor=1 if undivided else count),
        outer_loss=valid_loss,
        hyper=hyperparameter(split, problem, undivided=undivided, start=start),
    )
