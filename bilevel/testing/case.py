"""The problems on which checks run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from bilevel.functional import l2
from bilevel.hyper import positive, real
from bilevel.problem import Model, Problem
from bilevel.response import Method
from bilevel.response.hypernetwork import Hypernetwork
from bilevel.solver import Solver

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A method and the device on which to check it."""

    method: Method
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def quadratic(self, **changes: Any) -> Problem:
        r"""Quadratic losses with a closed form.

        The inner loss is :math:`w^\top A w / 2 + w^\top B \lambda`, the outer loss :math:`|w - c|^2 / 2 + |\lambda|^2`.

        Returns:
            A problem without a network, with three weights and two hyperparameters.
        """
        a, b, c = (part.to(self.device) for part in quadratic_parts())

        def inner_loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
            w = model.params["w"]
            return 0.5 * w @ a @ w + w @ b @ hyper["x"]

        def outer_loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
            return 0.5 * (model.params["w"] - c).square().sum() + hyper["x"].square().sum()

        settings: dict[str, Any] = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        settings["hyper"] = {"x": real([0.5, -1.0])}
        settings["inner"] = {"w": torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64, device=self.device)}
        return Problem(**(settings | changes))

    def network(self, *, dtype: torch.dtype = torch.float64, net: nn.Module | None = None, **changes: Any) -> Problem:
        """Classification with BatchNorm and dropout; the hyperparameters are two weight decays.

        Returns:
            A problem with a network of 43 weights.
        """

        def inner_loss(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1]) + (hyper["decay"] * l2(model.params)[..., None]).sum(-1)

        def outer_loss(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        net = Network() if net is None else net
        settings: dict[str, Any] = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        settings["hyper"] = {"decay": positive([0.01, 0.1])}
        return Problem(net.to(self.device, dtype), **(settings | changes))

    def batch(self, dtype: torch.dtype = torch.float64) -> Batch:
        """Twelve examples with three features and two classes."""
        x = torch.linspace(-2, 2, 36, device=self.device, dtype=dtype).reshape(12, 3).sin()
        return x, (x.sum(1) > 0).long()

    def method_for(self, problem: Problem) -> Method:
        """The method, made to perturb once per batch if the problem has no network with examples."""
        if problem.module is None and isinstance(self.method, Hypernetwork):
            return dataclasses.replace(self.method, perturb="batch")
        return self.method

    def solver(self, problem: Problem, **changes: Any) -> Solver:
        """A solver with plain gradient descent on both levels."""
        settings: dict[str, Any] = {"inner_optimizer": sgd, "outer_optimizer": sgd}
        settings["method"] = self.method_for(problem)
        return Solver(problem, **(settings | changes))

    def trained(self, steps: int = 20, **changes: Any) -> Solver:
        """A solver of :meth:`quadratic` after some inner steps, so that its derivative is not trivial."""
        solver = self.solver(self.quadratic(**changes))
        for _ in range(steps):
            solver.inner_step()
        return solver

    def trained_network(self, steps: int = 3, **changes: Any) -> Solver:
        """A solver of :meth:`network` after some inner steps."""
        solver = self.solver(self.network(**changes))
        for _ in range(steps):
            solver.inner_step(self.batch())
        return solver


class Network(nn.Module):
    """A network that shows how it was called: it has BatchNorm and dropout, and notes the mode of every call."""

    def __init__(self) -> None:
        """Draw the weights with a fixed seed; the global random state stays."""
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.modes: list[bool] = []

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Predict logits."""
        self.modes.append(self.training)
        hidden: Tensor = F.dropout(torch.tanh(self.norm(self.first(x))), 0.2, self.training)
        logits: Tensor = self.last(hidden)
        return logits


def quadratic_parts() -> tuple[Tensor, Tensor, Tensor]:
    """The matrices A, B and the target c of :meth:`Case.quadratic`."""
    a = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.2], [0.0, 0.2, 1.5]], dtype=torch.float64)
    b = torch.tensor([[1.0, 0.2], [-0.5, 1.0], [0.3, -0.7]], dtype=torch.float64)
    return a, b, torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(params, lr=0.1)
