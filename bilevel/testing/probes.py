"""Short ways to drive and to differentiate a solver in a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bilevel.solver import OuterStep, Solver


def flat(params: Mapping[str, Tensor]) -> Tensor:
    """All weights in one vector."""
    return torch.cat([value.flatten() for value in params.values()])


def directions(solver: Solver) -> tuple[Tensor, Tensor]:
    """Two fixed directions in the space of the hyperparameters."""
    size = solver.vector.numel()
    u = torch.linspace(1, 2, size).to(solver.vector)
    return u, u.flip(0).cos()


def codirections(solver: Solver) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two fixed directions in the space of the weights."""
    u = {name: torch.linspace(-1, 2, w.numel()).to(w).reshape(w.shape) for name, w in solver.params.items()}
    return u, {name: value.sin() for name, value in u.items()}


def train_batches(solver: Solver, batch: Any = None) -> Any:
    """The training data of an outer step: one batch, or a list with one batch per unrolled step."""
    count = solver.response.unrolled_steps
    return [batch] * count if count else batch


def jvp_of(solver: Solver, tangent: Tensor) -> dict[str, Tensor]:
    """The change of the weights along a tangent, at the current hyperparameters."""
    return solver.response.jvp(solver.vector, tangent, train_batches(solver))


def vjp_of(solver: Solver, cotangent: Mapping[str, Tensor]) -> Tensor:
    """The transposed Jacobian times a cotangent, at the current hyperparameters."""
    return solver.response.vjp(solver.vector, cotangent, train_batches(solver))


def jacobian_of(solver: Solver) -> Tensor:
    """The Jacobian of the weights, at the current hyperparameters."""
    return solver.response.jacobian(solver.vector, train_batches(solver))


def outer_noise(solver: Solver) -> Tensor:
    """The mean perturbation of the next outer step: what it draws, or zero for a pair. The solver is left as it was."""
    scale = solver.response.scale
    if scale is None or not scale.perturb_outer or solver.response.antithetic_outer:
        return torch.zeros_like(solver.vector)
    state = solver.state_dict()
    with torch.no_grad(), solver.streams["loss"]():
        noise = scale.sample()
    solver.load_state_dict(state)
    return noise


def run(solver: Solver, batch: Any, rounds: int = 3) -> list[OuterStep]:
    """Make two inner steps and an outer step per round; return the outer steps."""
    steps = []
    for _ in range(rounds):
        for _ in range(2):
            solver.inner_step(batch)
        steps.append(solver.outer_step(train_batches(solver, batch), batch))
    return steps
