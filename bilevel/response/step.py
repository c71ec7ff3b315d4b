r"""A step of training as a function that can be run, pulled back and pushed forward.

It maps a :class:`Point` :math:`s_t`, the weights and what the optimizer remembers, to the next one,

.. math:: s_{t+1} = \Phi\left(s_t, \nabla_w \mathcal{L}_T(\lambda, w_t), \lambda\right),

and has a graph of its own, from leaves to leaves. The last :math:`\lambda` is that of decoupled weight decay, which
shrinks the weights before the optimizer moves them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.autodiff import PlainAttention, differentiate, vjp
from bilevel.compilation import Later
from bilevel.optimizers import DifferentiableOptimizer, clip, differentiable_entries
from bilevel.parallel import Group, count, entered, mean_with_graph, plain
from bilevel.problem import Loss, Variables

Tangent = list[Tensor | None]
"""One tensor for each of :meth:`Point.variables`; None stands for zero."""
Cotangent = list[Tensor | None]
"""Likewise: one tensor for each of :meth:`Point.variables`; None stands for zero."""


class Point(NamedTuple):
    """Where the training is: all that a step reads and writes.

    Attributes:
        weights: In the order of the problem.
        state: Of the optimizer.
        buffers: Of the network, by name.
    """

    weights: list[Tensor]
    state: list[dict[str, Any]]
    buffers: dict[str, Tensor]

    def variables(self) -> list[Tensor]:
        """What depends on the hyperparameters.

        Returns:
            The weights, then the moments of the optimizer.
        """
        return [*self.weights, *(value for moments in self._moments() for value in moments.values())]

    def replace(self, variables: Sequence[Tensor]) -> Point:
        """The same point with other variables.

        Returns:
            A new point.
        """
        rest = iter(variables)
        weights = [next(rest) for _ in self.weights]
        state = [
            entry | {name: next(rest) for name in moments}
            for entry, moments in zip(self.state, self._moments(), strict=True)
        ]
        return Point(weights, state, self.buffers)

    def leaves(self, *, requires_grad: bool = False) -> Point:
        """The same point without a graph.

        Returns:
            A new point that shares its memory.
        """
        return self.replace([value.detach().requires_grad_(requires_grad) for value in self.variables()])

    def _moments(self) -> list[dict[str, Tensor]]:
        return [differentiable_entries(entry, weight) for entry, weight in zip(self.state, self.weights, strict=True)]


class Made(NamedTuple):
    """What a step made.

    Attributes:
        point: Where it leads.
        loss: The inner loss before it.
        norms: Numbers whose norm is that of its gradient before clipping.
        aux: What the inner loss returned beside its value.
    """

    point: Point
    loss: Tensor
    norms: list[Tensor]
    aux: Any


@final
class Step:
    """A step of training in three ways: alone, to be pulled back, to be pushed forward.

    :meth:`record` and :meth:`push` are stages of ``bilevel.compilation``: they read nothing but their arguments.

    Attributes:
        inner: The network.
        optimizer: Makes the step.
        clip: Largest norm of a gradient, or None.
        settings: Of the optimizer, for steps that are given none; None for its current ones.
    """

    settings: list[dict[str, Any]] | None = None

    def __init__(self, inner: Variables, optimizer: DifferentiableOptimizer, clip: float | None) -> None:
        """Make steps of this optimizer."""
        self.inner = inner
        self.optimizer = optimizer
        self.clip = clip

    @contextmanager
    def guarded(self) -> Generator[None]:
        """Enter this around steps. Enter it once for all of them, because entering takes time."""
        with PlainAttention(), self.inner.problem.differentiating():
            yield

    def run(self, hyper: Tensor, point: Point, batch: Any) -> Made:
        """Make a step without a derivative.

        Args:
            hyper: Shape ``(h,)``.
            point: Where to start.
            batch: For the inner loss.

        Returns:
            What it made.
        """
        leaves = point.leaves(requires_grad=True)
        slopes, buffers, loss = self._slopes(hyper.detach(), leaves, batch)
        return _made(*self._move(leaves, slopes, hyper.detach(), buffers, self.settings), loss)

    def extend(self, hyper: Tensor, point: Point, batch: Any) -> Made:
        """Make a step that keeps the graph of where it starts, if gradients are enabled.

        Args:
            hyper: Shape ``(h,)``, with a graph.
            point: Where to start, with a graph.
            batch: For the inner loss.

        Returns:
            What it made. Its point keeps the graph so far.
        """
        slopes, buffers, loss = self._slopes(hyper, point, batch)
        return _made(*self._move(point, slopes, hyper, buffers, self.settings), loss, keep_graph=True)

    def record(
        self, hyper: Tensor, point: Point, batch: Any, settings: list[dict[str, Any]] | None = None
    ) -> tuple[Made, list[Later]]:
        """Make a step that can be pulled back once.

        Args:
            hyper: Shape ``(h,)``.
            point: Where to start.
            batch: For the inner loss.
            settings: Of the optimizer, one dict per group; None for its current ones.

        Returns:
            What it made, and one later part. That part maps the cotangents of the new variables to those of the old
            variables and of the hyperparameters.
        """
        leaves, leaf = point.leaves(requires_grad=True), hyper.detach().requires_grad_()
        slopes, buffers, loss = self._slopes(leaf, leaves, batch)
        with torch.enable_grad():
            new, norms = self._move(leaves, slopes, leaf, buffers, settings)
        inputs, outputs = [*leaves.variables(), leaf], new.variables()
        return _made(new, norms, loss), [Later(lambda cotangent: vjp(outputs, inputs, cotangent), outputs)]

    def push(
        self, hyper: Tensor, point: Point, batch: Any, settings: list[dict[str, Any]] | None = None
    ) -> tuple[Made, list[Later]]:
        r"""Make a step along which tangents can be pushed.

        The derivative of the gradient along :math:`(\dot w, \dot\lambda)` is, by symmetry of second derivatives, the
        gradient in w of :math:`\dot w^\top \nabla_w \mathcal{L}_T + \dot\lambda^\top \nabla_\lambda \mathcal{L}_T`: one
        backward pass through a graph that all tangents share. The derivative :math:`J` of :math:`\Phi` is applied
        likewise: the map :math:`u \mapsto J^\top u` is linear, and a backward pass through it multiplies by :math:`J`.

        Args:
            hyper: Shape ``(h,)``.
            point: Where to start.
            batch: For the inner loss.
            settings: Of the optimizer, one dict per group; None for its current ones.

        Returns:
            What it made, and one later part. That part maps the tangents of the old variables and of the
            hyperparameters to those of the new variables.
        """
        leaves, leaf = point.leaves(requires_grad=True), hyper.detach().requires_grad_()
        slopes, buffers, loss = self._local_slopes(leaf, leaves.weights, leaves, batch, [*leaves.weights, leaf])
        detached = [None if slope is None else slope.detach() for slope in slopes[:-1]]
        if self.inner.group is not None:
            detached, loss = self._average(self.inner.group, detached, buffers, loss, batch)
        gradients = [None if slope is None else slope.requires_grad_() for slope in detached]
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        with torch.enable_grad():
            new, norms = self._move(leaves, gradients, leaf, buffers, settings)
            inputs, outputs = [*leaves.variables(), *(g for g in gradients if g is not None), leaf], new.variables()
            probes = [torch.zeros_like(value, requires_grad=True) for value in outputs]
            transposed = vjp(outputs, inputs, probes, create_graph=True)

        def push(tangent: Sequence[Tensor | None]) -> Tangent:
            *old, direction = tangent
            change = vjp(slopes, leaves.weights, [*old[: len(leaves.weights)], direction], retain_graph=True)
            if self.inner.group is not None:
                change, _ = self.inner.group.mean(change, leaves.weights, self._weight(batch))
            moved = [*old, *(change[index] for index in present), direction]
            return vjp(transposed, probes, moved, retain_graph=True)

        return _made(new, norms, loss), [Later(push, [*leaves.variables(), leaf])]

    def _slopes(self, hyper: Tensor, point: Point, batch: Any) -> tuple[list[Tensor | None], dict[str, Tensor], Loss]:
        """The gradient of the inner loss with its graph, the buffers after its pass, and the loss."""
        group = self.inner.group
        if group is None:
            return self._local_slopes(hyper, point.weights, point, batch, point.weights)
        with torch.enable_grad():
            weights = entered(group, point.weights)
            slopes, buffers, loss = self._local_slopes(hyper, weights, point, batch, weights)
            slopes, loss = self._average(group, slopes, buffers, loss, batch)
        return slopes, buffers, loss

    def _average(
        self, group: Group, slopes: list[Tensor | None], buffers: dict[str, Tensor], loss: Loss, batch: Any
    ) -> tuple[list[Tensor | None], Loss]:
        """The same over all processes, by one all-reduce; buffers in place."""
        names = self.inner.moving(group)
        others = [loss.value.detach(), *(buffers[name] for name in names)]
        means, (value, *moved) = mean_with_graph(group, slopes, list(self.inner.weights), self._weight(batch), others)
        buffers.update(zip(names, moved, strict=True))
        return means, Loss(value, loss.aux)

    def _weight(self, batch: Any) -> int:
        examples = count(self.inner.problem.examples, batch)
        return 1 if examples is None else examples

    def _local_slopes(
        self, hyper: Tensor, weights: list[Tensor], point: Point, batch: Any, inputs: list[Tensor]
    ) -> tuple[list[Tensor | None], dict[str, Tensor], Loss]:
        """The same for the batch of this process."""
        problem = self.inner.problem
        buffers = {name: buffer.clone() for name, buffer in point.buffers.items()}
        named = dict(zip(problem.params, weights, strict=True))
        batch = plain(batch)
        with torch.enable_grad():
            loss = problem.inner_loss(self.inner.model(named, buffers=buffers, update_buffers=True), hyper, batch)
            # Always with a graph, so that a repeated step is the same to the last bit.
            slopes = differentiate([loss.value], [torch.ones_like(loss.value)], inputs, create_graph=True)
        return [*slopes], buffers, loss

    def _move(
        self,
        point: Point,
        gradients: Sequence[Tensor | None],
        hyper: Tensor,
        buffers: dict[str, Tensor],
        settings: list[dict[str, Any]] | None,
    ) -> tuple[Point, list[Tensor]]:
        # Given settings are for a graph, in which operations cost nothing.
        clipped, norms = clip(gradients, self.clip, joint=settings is not None)
        weights, decays = point.weights, self.inner.problem.decays
        if decays:
            weights = self.optimizer.decayed(weights, clipped, decays(hyper), settings)
        return Point(*self.optimizer.step(weights, clipped, point.state, settings), buffers), norms


def _made(point: Point, norms: list[Tensor], loss: Loss, *, keep_graph: bool = False) -> Made:
    aux = None if loss.aux is None else pytree.tree_map_only(Tensor, Tensor.detach, loss.aux)
    return Made(point if keep_graph else point.leaves(), loss.value.detach(), norms, aux)
