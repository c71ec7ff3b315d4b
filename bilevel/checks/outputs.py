r"""Predictions that are linearised: what the loss must do with them.

Δ-STN and the Gauss-Newton matrix replace the network by its first-order expansion in the weights. What is left of the
curvature is that of the loss in what the network returns, :math:`\mathbf{J}^\top \nabla_y^2 \ell\, \mathbf{J}`. A
network that returns log-probabilities, or its own loss, leaves none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.autodiff import Gate, map_tensors
from bilevel.checks.kinds import isolated, repeatable
from bilevel.problem import Model, Problem, Variables

FAR = (10.0, 1e3, 1e5)
"""So many standard deviations away, a loss that is linear in pieces has another slope."""
HALVINGS = 30


@final
class Outputs:
    """The inner loss on a batch, as a function of what the network returns and of the weights that it reads.

    Attributes:
        seen: What the network returned, as the loss sees it.
        places: For each of these, its position among the tensors that its call returned.
        read: The weights in ``model.params``, by name.
        weights: The weights of the network, by name.
        loss: The loss.
        gate: Closed, it cuts the graph between the loss and the network.
        differentiated: Whether the loss differentiates the network in its inputs.
    """

    def __init__(self, problem: Problem, inner: Variables, hyper: Tensor, batch: Any) -> None:
        """Evaluate the loss at unperturbed hyperparameters."""
        self._arguments = problem, inner, hyper, batch
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

    def slopes_at(
        self, values: Sequence[Tensor], params: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The derivatives of the loss at other predictions, and at other weights that it reads.

        Args:
            values: In place of what the network returns.
            params: In place of ``model.params``.

        Returns:
            The derivatives in both.
        """
        problem, inner, hyper, batch = self._arguments
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        moved = [value.clone().requires_grad_() for value in values]
        rest, predict = iter(moved), inner.predictor()

        def replace(output: Tensor) -> Tensor:
            return next(rest).clone() if output.requires_grad else output

        def call(*args: Any, **kwargs: Any) -> Any:
            assert predict is not None
            return map_tensors(replace, predict(self.weights, *args, **kwargs))

        with repeatable(hyper.device):
            model = Model(leaves, None if predict is None else call)
            loss = problem.inner_loss(model, hyper, isolated(batch)).value
            inputs = [*moved, *leaves.values()]
            found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        return [*found[: len(moved)]], dict(zip(leaves, found[len(moved) :], strict=True))

    def kinds(self) -> list[str]:
        """How the loss depends on each output: ``"none"``, ``"smooth"``, ``"linear"`` or ``"pieces"``.

        Returns:
            One word per output. Where calls return several tensors, those in one place share the best of their words.
        """
        slopes = self.slopes(self.seen)
        kinds = ["none" if not bool(slope.any()) else "smooth" if self._bends(slope) else "linear" for slope in slopes]
        smooth = {place for place, kind in zip(self.places, kinds, strict=True) if kind == "smooth"}
        kinds = ["smooth" if place in smooth else kind for place, kind in zip(self.places, kinds, strict=True)]
        if "linear" not in kinds or self.differentiated:
            return kinds
        for index, (kind, slope) in enumerate(zip(kinds, slopes, strict=True)):
            if kind == "linear":
                with suppress(Exception):  # a loss may not be defined elsewhere: then what was seen here must do
                    kinds[index] = self._far(index, slope)
        return kinds

    def _bends(self, slope: Tensor) -> bool:
        """Whether the derivative in an output changes with some output."""
        if not slope.requires_grad:
            return False
        probe = _waves(slope)
        try:
            with self.gate.closed():
                found = torch.autograd.grad(slope, self.seen, probe, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a loss without second derivatives, as F.ctc_loss
            return False
        return any(part is not None and bool(part.any()) for part in found)

    def _far(self, index: int, slope: Tensor) -> str:
        """Where there is no curvature here, walk to far predictions, and halve the way down to the largest jump."""
        params = {name: w.detach() for name, w in self.weights.items()}
        start = [seen.detach() for seen in self.seen]
        way = [(value.std(correction=0) + 1) * _waves(value) for value in start]

        def at(distance: float) -> Tensor:
            return self.slopes_at([a + distance * b for a, b in zip(start, way, strict=True)], params)[0][index]

        def difference(one: Tensor, other: Tensor) -> float:
            return float((one - other).abs().max())

        below = slope.detach()
        size = float(below.abs().max())
        for far in FAR:
            low, high, above = 0.0, far, at(far)
            total = difference(above, below)
            if total > 1e-3 * size:
                break
        else:
            return "linear"
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            found = at(middle)
            if difference(found, below) >= difference(above, found):
                high, above = middle, found
            else:
                low, below = middle, found
        return "pieces" if difference(above, below) > 1e-2 * total else "smooth"


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
        for seen, kind, slope in zip(outputs.seen, outputs.kinds(), slopes, strict=True):
            if kind == "none" or (kind == "smooth" and not _is_log_probability(seen, slope)):
                continue
            raise ValueError(
                f"inner_loss has no curvature of its own in {_describe(seen)}, which the network returns, and {method} "
                f"linearises the network: its own curvature would be ignored. {_cause(seen, kind)} Or use {remedy}."
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
    return f"the tensor of shape {tuple(output.shape)}" if output.ndim else "the number"


def _cause(output: Tensor, kind: str) -> str:
    """What to do about it."""
    if _is_log_probability(output):
        return (
            "It returns log-probabilities: return logits, without the log_softmax, and take it in the loss, as "
            "F.cross_entropy does."
        )
    if kind == "pieces":
        return "The loss is linear in pieces there, as L1 and hinge losses are: take a smooth one, as F.smooth_l1_loss."
    return (
        "The loss is linear there: if that is the network's own loss, or a part of it, let it return what it is "
        "computed from (logits, means and variances), and compute it in inner_loss."
    )


def _is_log_probability(output: Tensor, slope: Tensor | None = None) -> bool:
    """Whether exponentials along one dimension add up to one.

    A loss with a softmax of its own takes them for logits: a constant that is added there changes nothing, so that
    ``slope``, its derivative, adds up to zero. That is as good as logits.

    Returns:
        The answer; no, if they are as good as logits.
    """
    dims = {dim for dim in (1, output.ndim - 1) if 0 < dim < output.ndim and output.shape[dim] > 1}
    close = 1e-3 if output.dtype in (torch.float64, torch.float32) else 0.1
    found = [dim for dim in dims if bool((output.detach().float().logsumexp(dim).abs() < close).all())]
    if slope is None:
        return bool(found)
    size = float(slope.detach().abs().max())
    return any(float(slope.detach().sum(dim).abs().max()) > close * size for dim in found)


def _waves(like: Tensor) -> Tensor:
    """Numbers of both signs, always the same, none of them small."""
    waves = torch.linspace(1, like.numel() + 1, like.numel(), device=like.device).to(like).cos()
    return (waves + 0.3 * waves.sign()).view(like.shape)
