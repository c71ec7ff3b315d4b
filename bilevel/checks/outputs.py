r"""Predictions that are linearised: what the loss must do with them.

Δ-STN and the Gauss-Newton matrix replace the network by its first-order expansion in the weights. What is left of the
curvature is that of the loss in what the network returns, :math:`\mathbf{J}^\top \nabla_y^2 \ell\, \mathbf{J}`. A
network that returns log-probabilities, or its own loss, leaves none.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.autodiff import Gate, map_tensors
from bilevel.checks.kinds import isolated, repeatable
from bilevel.problem import Model, Problem, Variables


@final
class Outputs:
    """The inner loss on a batch, as a function of what the network returns and of the weights that it reads.

    Attributes:
        seen: What the network returned, as the loss sees it.
        places: Of these among the tensors that one call returned.
        read: The weights in ``model.params``, by name.
        weights: The weights of the network, by name.
        loss: The loss.
        gate: Closed, it cuts the graph between the loss and the network.
        differentiated: Whether the loss differentiates the network in its inputs.
    """

    def __init__(self, problem: Problem, inner: Variables, hyper: Tensor, batch: Any) -> None:
        """Evaluate the loss at unperturbed hyperparameters."""
        self.gate = Gate()
        self.seen: list[Tensor] = []
        self.places: list[int] = []
        self.differentiated = False
        self.weights = {name: w.detach().requires_grad_() for name, w in inner.params().items()}
        self.read = {name: self.gate(w) for name, w in self.weights.items()}
        self._before = 0
        predict = inner.predictor()

        def record(output: Tensor) -> Tensor:
            if not output.requires_grad:
                return output
            self.places.append(len(self.seen) - self._before)
            self.seen.append(self.gate(output))
            return self.seen[-1].clone()  # which the loss may change in place

        def call(*args: Any, **kwargs: Any) -> Any:
            assert predict is not None
            inputs = pytree.tree_leaves((args, kwargs))
            self._before = len(self.seen)
            self.differentiated |= any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
            return map_tensors(record, predict(self.weights, *args, **kwargs))

        model = Model(self.read, None if predict is None else call)
        self.loss = problem.inner_loss(model, hyper, isolated(batch)).value

    def slopes(self, inputs: list[Tensor]) -> list[Tensor]:
        """The derivative of the loss in what it sees, with its graph; zero where there is no dependence."""
        found: list[Tensor | None] = [None] * len(inputs)
        if self.loss.requires_grad and inputs:
            with self.gate.closed():
                found = [*torch.autograd.grad(self.loss, inputs, create_graph=True, allow_unused=True)]
        return [torch.zeros_like(leaf) if slope is None else slope for slope, leaf in zip(found, inputs, strict=True)]

    def bends(self, slopes: list[Tensor]) -> list[bool]:
        """For each output, whether the derivative in it, or in that of another call, changes with some output."""
        result = []
        for slope in slopes:
            curved = False
            if slope.requires_grad:
                probe = torch.linspace(1, 3, slope.numel(), device=slope.device).to(slope).cos().view(slope.shape)
                with self.gate.closed():
                    found = torch.autograd.grad(
                        slope, self.seen, probe, retain_graph=True, allow_unused=True, materialize_grads=False
                    )
                curved = any(part is not None and bool(part.any()) for part in found)
            result.append(curved)
        curved_places = {place for place, curved in zip(self.places, result, strict=True) if curved}
        return [place in curved_places for place in self.places]


def check_outputs(problem: Problem, inner: Variables, hyper: Tensor, batch: Any, *, method: str, remedy: str) -> None:
    """Refuse what cannot be linearised.

    Args:
        problem: The problem.
        inner: Weights and buffers.
        hyper: Unconstrained, shape ``(h,)``.
        batch: For the inner loss.
        method: Who linearises predictions.
        remedy: What else to use.

    Raises:
        ValueError: If the loss reads the network in another way than through its outputs, or has no curvature in one.
    """
    if problem.module is None:
        return
    with repeatable(hyper.device):
        outputs = Outputs(problem, inner, hyper, batch)
        if not outputs.differentiated:
            _check_sight(outputs, method, remedy)
        slopes = outputs.slopes(outputs.seen)
        for seen, slope, bends in zip(outputs.seen, slopes, outputs.bends(slopes), strict=True):
            if bends or not bool(slope.any()):
                continue
            raise ValueError(
                f"inner_loss is linear, or linear in pieces, in what the network returns ({_describe(seen)}), and "
                f"{method} linearises the network: it would see no curvature at all. {_cause(seen)} Or use {remedy}."
            )


def _check_sight(outputs: Outputs, method: str, remedy: str) -> None:
    weights = list(outputs.weights.values())
    if not outputs.loss.requires_grad:
        return
    with outputs.gate.closed():
        bypass = torch.autograd.grad(outputs.loss, weights, retain_graph=True, allow_unused=True)
    for name, part in zip(outputs.weights, bypass, strict=True):
        if part is not None and bool(part.any()):
            raise ValueError(
                f"inner_loss depends on the weight {name!r} in another way than through what model(...) returns and "
                "through model.params: through a forward hook, an attribute that the network keeps, or an object that "
                f"is no tuple, list, dict or dataclass. {method} cannot linearise that. Return those tensors from "
                f"forward, or use {remedy}."
            )


def _describe(output: Tensor) -> str:
    return f"a tensor of shape {tuple(output.shape)}" if output.ndim else "a single number"


def _cause(output: Tensor) -> str:
    """What to do about it, if the cause can be told."""
    if output.numel() == 1:
        return "If that is the network's own loss, let it return logits, and compute the loss from them in inner_loss."
    close = torch.finfo(output.dtype).eps ** 0.5
    dims = {1 % output.ndim, output.ndim - 1} if output.ndim else set()
    if any(bool((output.detach().float().logsumexp(dim).abs() < max(close, 1e-3)).all()) for dim in dims):
        return (
            "It returns log-probabilities: return logits, without the log_softmax, and take it in the loss, as "
            "F.cross_entropy does."
        )
    return "L1 and hinge losses are of that kind: a smooth one, as F.smooth_l1_loss or F.mse_loss, is not."
