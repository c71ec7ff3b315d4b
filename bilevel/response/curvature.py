r"""Second derivatives of the inner loss at one point, from one graph.

The graph of :math:`\nabla_w \mathcal{L}_T` is built once and differentiated again for every product (reverse over
reverse), at the price of a backward pass through it. Vectors are flat: the weights, or the hyperparameters, in order.
Autocast is off here, also where the loss switches it on around the network: in half precision, second derivatives are
too inexact for linear solvers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from typing_extensions import override

from bilevel.autodiff import Gate, PlainAttention, SecondDerivatives, differentiate, map_tensors, vjp
from bilevel.hyper import Named
from bilevel.precision import full_precision, in_full_precision
from bilevel.problem import Model, Variables


class Curvature(ABC):
    r"""The curvature in the weights, and the exact :math:`\partial_w \partial_\lambda \mathcal{L}_T`.

    Attributes:
        weights: Leaves at the current weights.
        hyper: Leaves at the current hyperparameters, unconstrained, one per name.
        loss: The inner loss, with its graph.
        slopes: The gradient of the inner loss in the weights, with its graph, one tensor for each.
    """

    def __init__(
        self, inner: Variables, hyper: Tensor, batch: Any, *, check: bool = True, differentiate: bool = True
    ) -> None:
        """Build the graph of the gradient on a batch.

        Args:
            inner: The network.
            hyper: Shape ``(h,)``.
            batch: For the inner loss.
            check: Whether this kind of curvature fits the loss.
            differentiate: Without it there is no gradient, and ``cross_vjp`` and the like cannot be called.
        """
        space = inner.problem.space
        differentiating = inner.problem.differentiating()
        with torch.enable_grad(), PlainAttention(), full_precision(hyper.device), differentiating:
            self.weights = [weight.detach().requires_grad_() for weight in inner.params().values()]
            self.hyper = {name: part.detach().requires_grad_() for name, part in space.split(hyper).items()}
            natural = [(name, space.hyper[name].natural(part)) for name, part in self.hyper.items()]
            values = Named("hyperparameter", natural)
            self.loss = inner.problem.inner_loss(self._model(inner), values, batch).value
            if not differentiate:
                return
            self.slopes = _zeros_for_none(_gradient(self.loss, self.weights), self.weights)
            self._moving = [index for index, slope in enumerate(self.slopes) if slope.requires_grad]
            self._outputs = tuple(self.slopes[index] for index in self._moving)
            self._vector: Tensor | None = None
            self._parts: tuple[Tensor, ...] = ()

    def _model(self, inner: Variables) -> Model:
        """What the loss sees."""
        weights = dict(zip(inner.params(), self.weights, strict=True))
        predict = inner.predictor()
        return Model(
            weights, None if predict is None else partial(in_full_precision(predict, self.weights[0]), weights)
        )

    @abstractmethod
    def product(self, vector: Tensor) -> Tensor:
        r"""The curvature times a vector, :math:`\mathbf{H} p`.

        Args:
            vector: Shape ``(m,)``.

        Returns:
            A tensor of shape ``(m,)``.
        """

    def product_and_cross_vjp(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Both :meth:`product` and :meth:`cross_vjp`, by one backward pass if they can share one.

        Args:
            vector: Shape ``(m,)``.

        Returns:
            Tensors of shape ``(m,)`` and ``(h,)``.
        """
        return self.product(vector), self.cross_vjp(vector)

    def cross_parts(self, vector: Tensor) -> dict[str, Tensor | None]:
        r"""The parts of :math:`(\partial_w \partial_\lambda \mathcal{L}_T)^\top u`, one per hyperparameter.

        Args:
            vector: The weights u, shape ``(m,)``.

        Returns:
            By name; None where the gradient of the inner loss does not depend on the hyperparameter.
        """
        return dict(zip(self.hyper, self._pull(vector, tuple(self.hyper.values())), strict=True))

    def cross_vjp(self, vector: Tensor) -> Tensor:
        r"""The product :math:`(\partial_w \partial_\lambda \mathcal{L}_T)^\top u`.

        Args:
            vector: The weights u, shape ``(m,)``.

        Returns:
            A tensor of shape ``(h,)``.
        """
        parts = list(self.cross_parts(vector).values())
        return flatten(_zeros_for_none(parts, list(self.hyper.values())))

    def cross_jvp(self, vector: Tensor) -> Tensor:
        r"""The product :math:`\partial_w \partial_\lambda \mathcal{L}_T\, v`.

        Args:
            vector: The hyperparameters v, shape ``(h,)``.

        Returns:
            A tensor of shape ``(m,)``.
        """
        leaves = list(self.hyper.values())
        with torch.enable_grad():
            dummies = [torch.zeros_like(weight).requires_grad_() for weight in self.weights]
            transposed = vjp(self.slopes, leaves, dummies, create_graph=True, retain_graph=True)
        # The transposed product is linear in the dummies, so its derivative in them is the product itself.
        return flatten(_zeros_for_none(vjp(transposed, dummies, unflatten(vector, leaves), retain_graph=True), dummies))

    def _pull(self, vector: Tensor, inputs: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        """Differentiate the product of the gradient with a vector."""
        if not self._outputs or not inputs:
            return [None] * len(inputs)
        if vector is not self._vector:  # solvers change a vector in place, and its parts with it
            parts = unflatten(vector, self.weights)
            self._vector, self._parts = vector, tuple(parts[index] for index in self._moving)
        with SecondDerivatives():
            return differentiate(self._outputs, self._parts, inputs)


@final
class Hessian(Curvature):
    """The Hessian of the inner loss."""

    @override
    def product(self, vector: Tensor) -> Tensor:
        r"""Differentiate the gradient, :math:`\mathbf{H} p = \nabla_w (p^\top \nabla_w \mathcal{L}_T)`."""
        return flatten(_zeros_for_none(self._pull(vector, tuple(self.weights)), self.weights))

    @override
    def product_and_cross_vjp(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The cross product comes with the product."""
        leaves = [*self.weights, *self.hyper.values()]
        parts = _zeros_for_none(self._pull(vector, tuple(leaves)), leaves)
        return flatten(parts[: len(self.weights)]), flatten(parts[len(self.weights) :])


@final
class GaussNewton(Curvature):
    r"""The Gauss-Newton matrix: the Hessian of the inner loss with the network linearised in its weights.

    With the loss as a function of outputs and of the weights that penalties read, :math:`\ell(y, w)`, it is
    :math:`[\mathbf{J}; \mathbf{I}]^\top\, \nabla^2 \ell\; [\mathbf{J}; \mathbf{I}]`: the output Hessian between output
    Jacobians, plus the Hessian of the penalties. It is positive semi-definite where :math:`\ell` is convex.
    """

    def __init__(
        self, inner: Variables, hyper: Tensor, batch: Any, *, check: bool = True, differentiate: bool = True
    ) -> None:
        """Build the graphs of the network and of the loss on a batch.

        Raises:
            ValueError: If the loss depends on the weights in another way than through outputs and ``model.params``.
        """
        self.gate = Gate()
        self.outputs: list[Tensor] = []  # as the network returned them
        self.seen: list[Tensor] = []  # as the loss sees them, behind the gate
        self.read: list[Tensor] = []
        super().__init__(inner, hyper, batch, check=check, differentiate=differentiate)
        with self.gate.closed():
            self.bent = _gradient(self.loss, [*self.seen, *self.read])
            bypass = []
            if check:
                bypass = vjp([self.loss], self.weights, [torch.ones_like(self.loss)], retain_graph=True)
        if check and any(part is not None and bool(part.any()) for part in bypass):
            raise ValueError(
                "curvature='gauss_newton' cannot see how inner_loss depends on the weights: it must do so through what "
                "model(...) returns (tensors, in tuples, lists, dicts or dataclasses) and through model.params, not "
                "through other objects, forward hooks, or derivatives of model(x) in x (a gradient penalty). Return "
                "those tensors, or use curvature='hessian'."
            )

    @cached_property
    def _transposed(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Cotangents of the outputs, of which the product with the transposed Jacobian is linear, and that product."""
        with torch.enable_grad():
            dummies = [torch.zeros_like(output).requires_grad_() for output in self.outputs]
            return dummies, vjp(self.outputs, self.weights, dummies, create_graph=True, retain_graph=True)

    @override
    def _model(self, inner: Variables) -> Model:
        """Gates behind the outputs and the weights, so that the graphs of network and loss can be cut apart."""
        self.read = [self.gate(weight) for weight in self.weights]
        names, predict = list(inner.params()), inner.predictor()
        full = None if predict is None else in_full_precision(predict, self.weights[0])

        def record(output: Tensor) -> Tensor:
            if not output.requires_grad:
                return output
            self.outputs.append(output)
            self.seen.append(self.gate(output))
            return self.seen[-1].clone()  # a copy, since the loss may change it in place

        def call(*args: Any, **kwargs: Any) -> Any:
            if full is None:
                raise TypeError("the problem has no network.")
            return map_tensors(record, full(dict(zip(names, self.weights, strict=True)), *args, **kwargs))

        return Model(dict(zip(names, self.read, strict=True)), None if full is None else call)

    @override
    def product(self, vector: Tensor) -> Tensor:
        r"""Three products in turn: with the Jacobian, with :math:`\nabla^2 \ell`, with the transposed Jacobian."""
        change = unflatten(vector, self.weights)
        dummies, transposed = self._transposed
        along = _zeros_for_none(vjp(transposed, dummies, change, retain_graph=True), dummies)
        bent = self.bend([*along, *change])
        parts = vjp([*self.outputs, *self.read], self.weights, bent, retain_graph=True)
        return flatten(_zeros_for_none(parts, self.weights))

    def bend(self, change: Sequence[Tensor]) -> list[Tensor]:
        r"""The product with :math:`\nabla^2 \ell`.

        Args:
            change: Of the outputs, then of the weights that the loss reads.

        Returns:
            Likewise.
        """
        arguments = [*self.seen, *self.read]
        with self.gate.closed():
            return _zeros_for_none(vjp(self.bent, arguments, change, retain_graph=True), arguments)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors as one vector.

    Returns:
        A tensor of one dimension.
    """
    # A single one is copied, as several are.
    flat: Tensor = _flatten_dense_tensors(tensors) if len(tensors) > 1 else tensors[0].reshape(-1).clone()
    return flat


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`flatten`.

    Returns:
        One tensor for each of ``like``, of its shape.
    """
    return [*_unflatten_dense_tensors(vector, like)]


def _gradient(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(inputs)
    return [*differentiate([loss], [torch.ones_like(loss)], inputs, create_graph=True)]


def _zeros_for_none(parts: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(leaf) if part is None else part for part, leaf in zip(parts, like, strict=True)]
