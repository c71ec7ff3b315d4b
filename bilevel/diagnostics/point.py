"""The point of a run at which a method is diagnosed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bilevel.parallel import plain
from bilevel.problem import Variables
from bilevel.response import BestResponse
from bilevel.response.curvature import Curvature, GaussNewton, Hessian, flatten, unflatten
from bilevel.solver import Solver


class Point:
    """Copies of what a diagnosis needs of a solver: weights, gradients, curvature and response.

    Attributes:
        method: Settings of the method.
        response: A copy of the response, since a method may change its own state while it differentiates.
        hyper: The unconstrained vector of hyperparameters.
        inner: The weights at ``hyper``. For some methods they differ from those in ``response.inner``.
        weights: The same weights as one vector.
        cotangent: The gradient of the outer loss in the weights.
        direct: The gradient of the outer loss in the hyperparameters, at fixed weights.
        hessian: The Hessian of the inner loss.
        curvature: The matrix of the reference.
        kind: The name of that matrix.
        gradient: The gradient of the inner loss in the weights.
    """

    def __init__(self, solver: Solver, train_batch: Any, valid_batch: Any, curvature: str) -> None:
        """Take copies, and differentiate both losses."""
        self.method, self.problem = solver.method, solver.problem
        train_batch, valid_batch = _plain(train_batch), plain(valid_batch)
        count = solver.response.unrolled_steps
        self.train_batch = [train_batch] * count if count else train_batch
        if count and isinstance(train_batch, list) and len(train_batch) == count:  # as an outer step takes it
            self.train_batch, train_batch = train_batch, train_batch[0]
        self.kind = curvature
        self.stream = solver.streams["loss"]
        self.hyper = solver.vector.detach().clone()
        self.response: BestResponse = self._copy(solver.response)
        ahead: BestResponse = self._copy(solver.response)
        with self.replay():
            params = ahead(self.hyper, self.train_batch).params
        ahead.commit()
        self.inner: Variables = ahead.inner
        with torch.no_grad():
            for name, weight in self.inner.params().items():
                weight.copy_(params[name])
        self.weights = flatten([weight.detach() for weight in self.inner.weights])
        self.cotangent, self.direct = self._outer_gradient(valid_batch)
        with self.replay():
            self.hessian = Hessian(self.inner, self.hyper, train_batch)
        self.curvature: Curvature = self.hessian
        if curvature == "gauss_newton":
            with self.replay():
                self.curvature = GaussNewton(self.inner, self.hyper, train_batch)
        self.gradient = flatten(self.hessian.slopes).detach()

    def replay(self) -> AbstractContextManager[None]:
        """Draw the random numbers of the solver's next step. Every call starts over with the first."""
        return copy.deepcopy(self.stream)()

    def vjp(self) -> Tensor:
        """The response part of the method's hypergradient."""
        cotangent = dict(zip(self.inner.params(), unflatten(self.cotangent, list(self.inner.weights)), strict=True))
        with self.replay():
            return self.response.vjp(self.hyper, cotangent, self.train_batch).detach()

    def jvp(self, direction: Tensor) -> Tensor:
        """The method's change of the weights along a direction."""
        with self.replay():
            change = self.response.jvp(self.hyper, direction, self.train_batch)
        return flatten([change[name].detach() for name in self.inner.params()])

    def _copy(self, module: Any) -> Any:
        own = copy.deepcopy(module, {id(self.problem): self.problem})
        own.inner.group = None  # of several processes, each looks at its own batch
        return own

    def _outer_gradient(self, batch: Any) -> tuple[Tensor, Tensor]:
        leaf = self.hyper.clone().requires_grad_()
        inputs = [*self.inner.weights, leaf]
        with self.replay():
            loss = self.problem.outer_loss(self.inner.model(self.inner.params()), leaf, batch).value
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if loss.requires_grad:
            with self.problem.differentiating():
                found = torch.autograd.grad(loss, inputs, allow_unused=True)
        pairs = zip(found, inputs, strict=True)
        *through, direct = [torch.zeros_like(one) if part is None else part for part, one in pairs]
        return flatten(through), direct


def _plain(train_batch: Any) -> Any:
    return [plain(batch) for batch in train_batch] if type(train_batch) is list else plain(train_batch)
