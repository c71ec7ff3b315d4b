"""Hypergradients by other libraries, each used as its documentation says, or as its own code does."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypergradient_tasks import STEPS, Ridge, Task
from torch import Tensor
from torch.func import grad

Hypergradient = Callable[[], Any]


def betty(solve: str) -> Callable[[Task], Hypergradient]:
    """Betty's own function, on stand-ins for its Problem classes."""

    def prepare(task: Task) -> Hypergradient:
        function = getattr(importlib.import_module(f"betty.hypergradient.{solve}"), solve)
        weights, log_decay = task.leaves()
        config = SimpleNamespace(
            cg_iterations=STEPS, cg_alpha=1.0, neumann_iterations=STEPS - 1, neumann_alpha=task.scale
        )
        lower = SimpleNamespace(
            paths=[],
            config=config,
            cur_batch=None,
            training_step_exec=lambda batch: task.inner(weights, log_decay),
            parameters=lambda: weights,
            trainable_parameters=lambda: weights,
        )
        upper = SimpleNamespace(trainable_parameters=lambda: [log_decay])
        return lambda: function(torch.autograd.grad(task.outer(weights), weights), lower, upper)[0]

    return prepare


def boat(solve: str) -> Callable[[Task], Hypergradient]:
    """BOAT's own function, on the map of one step of gradient descent, as its operators call it."""

    def prepare(task: Task) -> Hypergradient:
        function = getattr(importlib.import_module("boat_torch.utils.op_utils"), solve)
        weights, log_decay = task.leaves()
        steps = STEPS if solve == "conjugate_gradient" else STEPS - 1

        def step(params: list[Tensor], loss: Tensor) -> list[Tensor]:
            slopes = torch.autograd.grad(loss, params, create_graph=True)
            return [w - task.scale * slope for w, slope in zip(params, slopes, strict=True)]

        def run() -> Tensor:
            upper, lower = task.outer(weights), task.inner(weights, log_decay)
            found: Tensor = function(weights, [log_decay], upper, lower, steps, step, 0.0)[0]
            return found

        return run

    return prepare


def torchopt_implicit(solver: str) -> Callable[[Task], Hypergradient]:
    """TorchOpt's custom_root."""

    def prepare(task: Task) -> Hypergradient:
        torchopt = importlib.import_module("torchopt")
        weights, log_decay = task.leaves()
        solve = {
            "cg": torchopt.linear_solve.solve_cg(maxiter=STEPS, rtol=0.0),
            "neumann": torchopt.linear_solve.solve_inv(ns=True, maxiter=STEPS - 1, alpha=task.scale),
        }[solver]
        trained = tuple(w.detach() for w in weights)
        slope = grad(lambda w, d: task.inner(w, d))

        @torchopt.diff.implicit.custom_root(slope, argnums=1, solve=solve)  # type: ignore[untyped-decorator]
        def best(start: Any, d: Tensor) -> Any:
            return trained

        return lambda: torch.autograd.grad(task.outer(best(trained, log_decay)), log_decay)[0]

    return prepare


def torchopt_unroll(task: Task) -> Hypergradient:
    """TorchOpt's functional SGD."""
    torchopt = importlib.import_module("torchopt")
    optimizer = torchopt.sgd(lr=task.scale / 2)

    def run() -> Tensor:
        weights, (_, log_decay) = tuple(task.start()), task.leaves()
        state = optimizer.init(weights)
        for _ in range(STEPS):
            slopes = torch.autograd.grad(task.inner(weights, log_decay), weights, create_graph=True)
            updates, state = optimizer.update(slopes, state, inplace=False)
            weights = torchopt.apply_updates(weights, updates, inplace=False)
        return torch.autograd.grad(task.outer(weights), log_decay)[0]

    return run


def higher_unroll(task: Task) -> Hypergradient:
    """The inner loop of higher."""
    higher = importlib.import_module("higher")
    net, log_decay = copy.deepcopy(task.net), task.leaves()[1]
    optimizer = torch.optim.SGD(net.parameters(), lr=task.scale / 2)

    def run() -> Tensor:
        with higher.innerloop_ctx(net, optimizer) as (model, steps):
            for _ in range(STEPS):
                penalty = sum(d * (w * w).sum() for d, w in zip(log_decay.exp(), model.parameters(), strict=True))
                steps.step(task.fit(model(task.train[0]), task.train[1]) + penalty)
            return torch.autograd.grad(task.fit(model(task.valid[0]), task.valid[1]), log_decay)[0]

    return run


@dataclass
class Jitted:
    """A compiled function of jax, and its arguments."""

    function: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        """Run it to its end."""
        return self.function(*self.arguments).block_until_ready()

    def memory(self) -> float:
        """What it needs beside its arguments, in MB."""
        size: int = self.function.lower(*self.arguments).compile().memory_analysis().temp_size_in_bytes
        return size / 2**20


def jaxopt(kind: str) -> Callable[[Task], Hypergradient]:
    """Jaxopt, all of it in one jit."""

    def prepare(task: Task) -> Hypergradient:
        lib, jax = importlib.import_module("jaxopt"), importlib.import_module("jax")
        weights = task.net.parameters() if kind == "unroll" else task.trained
        arguments = jax.tree.map(
            lambda t: jax.numpy.asarray(t.detach().numpy()), (task.log_decay, tuple(weights), task.train, task.valid)
        )

        def fit(w: Any, batch: Any) -> Any:
            if isinstance(task.net, Ridge):
                return ((batch[0] @ jax.numpy.concatenate(w) - batch[1]) ** 2).mean()
            z = jax.numpy.tanh(batch[0] @ w[0].T + w[1]) @ w[2].T + w[3]
            return -jax.nn.log_softmax(z)[jax.numpy.arange(len(batch[1])), batch[1]].mean()

        def inner(w: Any, d: Any, train: Any) -> Any:
            return fit(w, train) + sum(jax.numpy.exp(d[i]) * (part**2).sum() for i, part in enumerate(w))

        if kind == "unroll":
            options = {"acceleration": False, "implicit_diff": False, "unroll": True, "tol": 0.0}
            descent = lib.GradientDescent(inner, stepsize=task.scale / 2, maxiter=STEPS, **options)
            run = jax.jit(jax.grad(lambda d, w, train, valid: fit(descent.run(w, d, train).params, valid)))
        else:
            solve = functools.partial(lib.linear_solve.solve_cg, maxiter=STEPS, tol=0.0)
            slope = jax.grad(inner)
            run = jax.jit(
                lambda d, w, train, valid: lib.implicit_diff.root_vjp(
                    lambda w, d: slope(w, d, train), w, (d,), jax.grad(fit)(w, valid), solve=solve
                )[0]
            )
        return Jitted(run, arguments)

    return prepare
