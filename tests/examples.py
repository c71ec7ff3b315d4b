"""A small regression problem, and how to compare states: shared by the tests of the solver, the loop and bad inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import bilevel

RATE = 2**-7  # small enough for the STN, which is ill-conditioned here
sgd = partial(torch.optim.SGD, lr=RATE)


def batches(count: int = 4, size: int = 5, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Batches of a linear regression with three inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, 3, generator=generator)
    y = x.sum(2, keepdim=True) + 0.1 * torch.randn(count, size, 1, generator=generator)
    return list(zip(x, y, strict=True))


def network(*extra: nn.Module) -> nn.Sequential:
    """Two layers with ``extra`` between them, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), *extra, nn.Tanh(), nn.Linear(4, 1))


def inner_loss(model: bilevel.Model, hyper: Any, batch: Any) -> Tensor:
    x, y = batch
    decay = dict(hyper.items())["decay"]  # reads everything else that a test declares as well
    return F.mse_loss(model(x), y) + decay * bilevel.l2(model.params)


def outer_loss(model: bilevel.Model, hyper: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def make_problem(inner: Any = None, **changes: Any) -> bilevel.Problem:
    """Ridge regression with a small network, or with what ``changes`` replaces."""
    settings = {"inner_loss": inner_loss, "outer_loss": outer_loss, "hyper": {"decay": bilevel.positive(0.01)}}
    return bilevel.Problem(network() if inner is None else inner, **{**settings, **changes})


def make_solver(problem: bilevel.Problem | None = None, **changes: Any) -> bilevel.Solver:
    settings = {"inner_optimizer": sgd, "outer_optimizer": sgd}
    return bilevel.Solver(make_problem() if problem is None else problem, **{**settings, **changes})


def solve(
    problem: bilevel.Problem | None = None, train: Any = ..., valid: Any = ..., **changes: Any
) -> bilevel.Solution:
    """A short run, on four batches unless told otherwise."""
    train, valid = (batches(seed=seed) if given is ... else given for seed, given in enumerate((train, valid)))
    settings = {"inner_optimizer": sgd, "outer_optimizer": sgd, "inner_steps": 2}
    return bilevel.solve(make_problem() if problem is None else problem, train, valid, **{**settings, **changes})


def for_outer_step(solver: bilevel.Solver, batch: Any) -> Any:
    """What an outer step trains on: the batch, or a list with one for each step that the method makes itself."""
    return [batch] * solver.response.unrolled_steps or batch


def shortened(method: bilevel.Method) -> bilevel.Method:
    """A method that takes less time, for tests of which the number of unrolled steps is not the subject."""
    if isinstance(method, bilevel.Unrolled):
        return replace(method, steps=3, truncate=None if method.truncate is None else 2)
    return method


def drive(solver: bilevel.Solver, rounds: int, *, start: int = 0) -> bilevel.Solver:
    """Two inner steps and one outer step per round, on batches that depend on the number of the round only."""
    train, valid = batches(seed=0), batches(seed=1)
    for index in range(start, start + rounds):
        for step in range(2):
            solver.inner_step(train[(2 * index + step) % 4])
        solver.outer_step(for_outer_step(solver, train[index % 4]), valid[index % 4])
        solver.schedule()
    return solver


def assert_same(actual: Any, expected: Any) -> None:
    """Nested containers agree bit for bit."""
    ours, layout = pytree.tree_flatten(actual)
    theirs, expected_layout = pytree.tree_flatten(expected)
    assert layout == expected_layout
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


def differs(actual: Any, expected: Any) -> bool:
    try:
        assert_same(actual, expected)
    except AssertionError:
        return True
    return False


def at_call(number: int, change: Callable[[Tensor], Tensor], loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``loss``, with its value changed at one call (counted from 0)."""
    calls = iter(range(10**9))
    return lambda model, hyper, batch: (change if next(calls) == number else lambda x: x)(loss(model, hyper, batch))
