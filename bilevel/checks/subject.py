"""A loss on a batch, under a random response: what the checks of rows evaluate, with equal random numbers each time."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.checks.kinds import isolated, repeatable
from bilevel.checks.statistics import FixedStatistics
from bilevel.precision import HALF, has_half_precision, in_full_precision
from bilevel.problem import Model, Problem, Variables
from bilevel.responding import CannotRespond, Responding, Rows
from bilevel.rng import Stream
from bilevel.structure import respond

REMEDY = "or pass perturb='batch' to the method, with which all examples share one perturbation"


class Unevaluable(Exception):
    """The user's loss raised in a check. If that is no fault of the check, it will raise again in the step."""


@final
class RandomResponse:
    r"""A response by rows, :math:`(\mathbf{U} \delta) \odot_{\text{row}} \mathbf{R}`, under which every weight moves.

    The columns of :math:`\mathbf{R}` are all alike, so that it takes next to no memory.
    """

    def __init__(self, weights: Mapping[str, Tensor], names: Sequence[str], hyper: Tensor, *, wide: bool) -> None:
        """Draw the response of the named weights, about as large as they are."""
        self._templates, self._factors = {}, {}
        for name in names:
            weight = weights[name].detach()
            weight = weight.float() if wide and weight.dtype in HALF else weight
            rows = weight.shape[:1]
            column = (0.3 * weight.square().mean().sqrt() + 1e-3) * torch.randn(rows, dtype=weight.dtype).to(weight)
            self._templates[name] = column.reshape(rows + (1,) * (weight.ndim - 1)).expand_as(weight)
            drawn = torch.randn(len(hyper), *(rows or (1,)), dtype=weight.dtype)
            self._factors[name] = drawn.to(weight) / math.sqrt(len(hyper))

    def rows(self, shift: Tensor) -> dict[str, Rows]:
        """The change of the weights, not multiplied out.

        Args:
            shift: Shape ``(h,)`` or ``(B, h)``.

        Returns:
            By name of the weight.
        """
        return {name: Rows(shift.to(u) @ u, self._templates[name]) for name, u in self._factors.items()}


@final
@dataclass
class Subject:
    """What is checked.

    Attributes:
        problem: The problem.
        inner: Weights and buffers.
        loss: ``"inner_loss"`` or ``"outer_loss"``.
        theta: A random response.
        hyper: Unconstrained, shape ``(h,)``.
        batch: For the loss.
        count: Its number of examples.
        wide: Whether weights, buffers and batch in half precision are cast, so that rounding does not hide a mistake.
        eps: The machine precision in which the loss was computed.
        drawn: The states of all random generators after the last evaluation.
    """

    problem: Problem
    inner: Variables
    loss: str
    theta: RandomResponse
    hyper: Tensor
    batch: Any
    count: int
    wide: bool = True
    eps: float = 0.0
    drawn: list[Any] = field(default_factory=list)

    @property
    def rounding(self) -> float:
        """What rounding can do, relatively: the root of the machine precision."""
        if not self.wide:
            return math.sqrt(torch.finfo(self.problem.dtype).eps)
        return math.sqrt(max(self.eps, torch.finfo(self.hyper.dtype).eps))

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, without a gradient."""
        return {name: self._widen(weight.detach()) for name, weight in self.inner.params().items()}

    def _widen(self, value: Any) -> Any:
        return value.float() if self.wide and isinstance(value, Tensor) and value.dtype in HALF else value

    def shape(self, name: str) -> str:
        """That of a hyperparameter with one row per example."""
        return str((self.count, *self.problem.space.hyper[name].init.shape))

    def evaluate(self, model: Model, hyper: Tensor, *, training: bool | None = None, skip: int = 0) -> Tensor:
        """The loss of a model.

        Args:
            model: What the loss sees.
            hyper: Unconstrained, shape ``(h,)`` or ``(B, h)``.
            training: The mode of the network; that of the loss by default.
            skip: Draw that many random numbers before, to get others.

        Returns:
            A scalar.

        Raises:
            CannotRespond: If the network cannot respond to a perturbation of its own for each example.
            Unevaluable: If the user's loss raises.
        """
        with repeatable(self.hyper.device):
            for device in {torch.device("cpu"), self.hyper.device}:
                torch.rand(skip, device=device)
            try:
                batch = pytree.tree_map(self._widen, isolated(self.batch))
                loss = self.problem.evaluate(self.loss, model, hyper, batch, training=training).value
            except CannotRespond:
                raise
            except Exception as error:
                raise Unevaluable from error
            states = Stream.current(self.hyper.device).state_dict()
            self.drawn = [*(state.tolist() for state in states), str(np.random.get_state()), random.getstate()]
        if has_half_precision(loss):
            self.eps = torch.finfo(torch.bfloat16).eps
        return loss

    def repeats(self) -> bool:
        """Whether the loss is the same again: not with random generators or counters of the user's own."""
        alike = self.hyper.expand(self.count, -1)
        model = self.responding(self.theta.rows(torch.zeros_like(alike)))
        values = [self.evaluate(model, alike).detach() for _ in range(4)]
        return all(torch.allclose(value, values[0], equal_nan=True) for value in values)

    def responding(self, rows: Mapping[str, Rows], fixed: FixedStatistics | None = None) -> Model:
        """The model whose weights respond by rows, as in training, in full precision.

        Args:
            rows: One perturbation per example, by name of the weight.
            fixed: Statistics over the examples, if they should not change.

        Returns:
            What a loss sees.
        """
        weights = self.weights()
        predict = respond(self._predictor(), weights, rows, linearized=False)
        if fixed is not None:
            fixed.again()

        def call(*args: Any, **kwargs: Any) -> Any:
            assert predict is not None
            with fixed or nullcontext():
                output = predict(*args, **kwargs)
            if fixed is not None:
                fixed.look(output)
            return output

        return Model(read(weights, rows), None if predict is None else call)

    def plain(self, weights: Mapping[str, Tensor], params: Mapping[str, Any]) -> Model:
        """The network with some weights, and penalties that read others.

        Returns:
            What a loss sees.
        """
        predict = self._predictor()
        return Model(params, None if predict is None else partial(predict, weights))

    def _predictor(self) -> Any:
        buffers = {name: self._widen(buffer) for name, buffer in self.inner.buffer_values().items()}
        predict = self.inner.predictor(buffers=buffers)
        like = self._widen(next(self.inner.parameters()).detach())
        return None if predict is None else in_full_precision(predict, like)


def read(weights: Mapping[str, Tensor], rows: Mapping[str, Rows]) -> dict[str, Any]:
    """What a penalty reads where weights respond by rows.

    Returns:
        By name.
    """
    return {name: Responding(name, w, rows[name]) if name in rows else w for name, w in weights.items()}


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient in every leaf, zero where there is none.

    Returns:
        One tensor per leaf.
    """
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad and leaves:
        found = torch.autograd.grad(loss, [*leaves], allow_unused=True)
    pairs = zip(found, leaves, strict=True)
    return [torch.zeros_like(leaf) if slope is None else slope.nan_to_num(0.0, 0.0, 0.0) for slope, leaf in pairs]
