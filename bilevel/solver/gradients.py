"""The gradients of both levels: of the inner loss in all that is trained, and of the outer loss in λ and σ."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.compilation import OfModule, TooLarge, WholeStep, gains
from bilevel.interrupts import safe_point
from bilevel.linear_solvers import LinearSolverError
from bilevel.parallel import Group, Nothing, Shards, added, count, plain
from bilevel.problem import Loss, Model, Problem
from bilevel.response import BestResponse
from bilevel.rng import Repeated, Stream
from bilevel.solver.finite import FiniteCheck
from bilevel.solver.optimization import Gradients, Optimization
from bilevel.solver.undo import buffers_kept

MOST_OPERATIONS = 6000
"""In one graph. Compiling as many takes half a minute to a minute."""
Part = TypeVar("Part", Tensor, Tensor | None)


@final
class Differentiation:
    """Differentiates the losses of a response, compiled if asked to.

    Attributes:
        inner: The compiled gradient of inner steps, or None; and that of those in which only the weights learn.
        outer: The compiled gradient of outer steps, or None.
    """

    def __init__(
        self, response: BestResponse, optimization: Optimization, finite: FiniteCheck, *, compile: bool
    ) -> None:
        """Compile when first called, if asked to and if that gains something."""
        self._response = response
        self._problem: Problem = response.problem
        self._finite = finite
        self._weights = optimization.whole["weights"]
        self._rest = optimization.whole.get("response", [])
        self._scale = optimization.params.get("scale", [])
        self._users = [param for param in self._problem.params.values() if param.requires_grad]
        self._share: Tensor | None = None  # of this process in the examples of an outer step, if there are several
        self.inner: tuple[OfModule, OfModule] | None = None
        self.outer: OfModule | None = None
        if compile and response.pure and gains(self._problem.module, self._problem.device):
            trained, alone = self._weights + self._rest, partial(self._terms, learns=False)
            both = OfModule(response, trained, "inner steps", self._terms)
            after = both.staged
            self.inner = both, OfModule(response, self._weights, "inner steps", alone, after=after)
            self.outer = OfModule(response, self._scale, "outer steps", self._slopes, after=after)
        self.whole: WholeStep | None = None
        if compile and response.whole:
            self.whole = WholeStep(response, "outer steps", self._whole, limit=MOST_OPERATIONS)

    def of_inner_losses(
        self, hyper: Tensor, batches: list[Any], *, learns: bool = True
    ) -> tuple[Loss, list[Tensor], Gradients]:
        """What :meth:`of_inner_loss` returns, averaged over batches, with the aux of the last one.

        Args:
            hyper: Shape ``(h,)``.
            batches: For the inner loss, weighted by their number of examples.
            learns: As there.

        Returns:
            As there.
        """
        group = self._response.inner.group
        if group is not None:
            return self._of_all_processes(group, hyper, batches, learns)
        return self._of_batches(hyper, batches, learns)

    def _of_batches(self, hyper: Tensor, batches: list[Any], learns: bool) -> tuple[Loss, list[Tensor], Gradients]:
        """The same in one process, whatever there is in others."""
        if len(batches) == 1:
            return self.of_inner_loss(hyper, plain(batches[0]), learns=learns)
        counts, total = self._counts(batches)
        if total == 0 and any(isinstance(batch, Nothing) for batch in batches):
            return self._of_batches(hyper, [plain(batches[0])], learns)
        values: list[Tensor] = []
        gradients: Gradients = {}
        for index, (batch, size) in enumerate(zip(batches, counts, strict=True)):
            if self._response.inner.group is not None:
                self._response.inner.group.index = index  # another perturbation for each
            loss, new_values, new = self.of_inner_loss(hyper, plain(batch), learns=learns)
            share = size / (total or math.nan)  # no example at all: reported as a loss that is not finite
            values = _add_share(values, new_values, share)
            gradients = {name: _add_share(gradients.get(name, []), found, share) for name, found in new.items()}
        return Loss(values[0], loss.aux), values, gradients

    def _counts(self, batches: list[Any]) -> tuple[list[int], int]:
        """How much each batch counts, and all together."""
        sizes = [count(self._problem.examples, batch) for batch in batches]
        counts = [1 if None in sizes else size or 0 for size in sizes]
        return counts, sum(counts)

    def _of_all_processes(
        self, group: Group, hyper: Tensor, batches: list[Any], learns: bool
    ) -> tuple[Loss, list[Tensor], Gradients]:
        """The averages over the batches of all processes: an all-reduce for the weights, one for the response.

        If each process keeps a part of them, a reduce-scatter for each instead.

        Returns:
            As :meth:`of_inner_losses`.
        """
        loss, values, gradients = self._of_batches(hyper, batches, learns)
        inner, (_, weight) = self._response.inner, self._counts(batches)
        buffers = [inner.buffer_values()[name] for name in inner.moving(group)]
        # One number for all perturbed terms: processes may differ in how many they have.
        values = [values[0], sum(values[1:], start=torch.zeros_like(values[0]))]
        others = [*values, *buffers]
        weights: list[Tensor] = [*self._weights]
        if inner.shards is not None:
            means, rest = self._of_shards(group, inner.shards, gradients, others, weight)
        else:
            found, _ = group.mean([*gradients["weights"], *others], [*weights, *others], weight)
            means = {"weights": found[: len(weights)]}
            if "response" in gradients:
                means["response"], _ = group.mean(gradients["response"], self._rest, weight)
            rest = [part for part in found[len(weights) :] if part is not None]
        with torch.no_grad():
            for buffer, value in zip(buffers, rest[len(values) :], strict=True):
                buffer.copy_(value)
        return Loss(rest[0], loss.aux), rest[: len(values)], means

    def _of_shards(
        self, group: Group, shards: Shards, gradients: Gradients, others: list[Tensor], weight: float
    ) -> tuple[Gradients, list[Tensor]]:
        """The averages of gradients, of which each process gets its parts, and of some numbers."""
        own = [gradient for found in gradients.values() for gradient in found]
        params = [param for name in gradients for param in (self._weights if name == "weights" else self._rest)]
        parts, flags = group.filled(own, params)
        *rest, seen, share = group.weighted([*others, flags], weight)
        if not weight:  # whatever they hold
            parts = [torch.zeros_like(gradient) for gradient in parts]
        sums = [added(g * share.to(g), shards.of(param)) for g, param in zip(parts, params, strict=True)]
        means = iter(group.emptied(own, sums, seen))
        return {name: [next(means) for _ in found] for name, found in gradients.items()}, rest

    def of_inner_loss(self, hyper: Tensor, batch: Any, *, learns: bool = True) -> tuple[Loss, list[Tensor], Gradients]:
        """Differentiate the terms that the response minimises.

        Args:
            hyper: Shape ``(h,)``.
            batch: For the inner loss.
            learns: Whether what the method adds to the weights learns as well.

        Returns:
            The loss to report, all terms, and the gradients of their sum by group of parameters.
        """
        if self.inner is not None:
            loss, values, total = self.inner[0 if learns else 1](hyper, batch)
        else:
            loss, values, total = self._terms(self._weights + (self._rest if learns else []), hyper, batch, learns)
        own = len(self._weights)
        groups = {"weights": total[:own], "response": self._response.scaled(total[own:]) if learns else []}
        return loss, values, {name: gradients for name, gradients in groups.items() if gradients}

    def of_outer_loss(
        self, hyper: Tensor, batches: tuple[Any, Any], steps: tuple[int, int]
    ) -> tuple[Loss, list[Tensor]]:
        """Differentiate the outer loss.

        Args:
            hyper: Shape ``(h,)``.
            batches: For the response, and for the outer loss.
            steps: The numbers of the next inner and of the next outer step, for messages.

        Returns:
            The outer loss, and its gradient in λ, directly and through the weights, and in the raw scale.
        """
        group = self._response.inner.group
        if group is not None:
            train_batch, valid_batch = batches
            self._share = group.share(count(self._problem.examples, valid_batch)).to(hyper)
            group.at("outer", steps[1])
            loss, slopes = self._slopes(self._scale, hyper, train_batch, plain(valid_batch), steps)
            *slopes, value = group.add([*slopes, self._share * loss.value.to(hyper)], self._share)
            return Loss(value, loss.aux), slopes
        if self.whole is not None:
            for (loss, slopes), left in self.whole(self._response.reads(), hyper, *batches):
                self._response.accept(left, hyper, batches[0])
                self._finite.made(steps[0], self._response.steps)
                return loss, slopes
        if self.outer is None:
            found = self._slopes(self._scale, hyper, *batches, steps)
            self._say_why()
            return found
        loss, slopes = self.outer(hyper, None, batches[1], None)
        return loss, slopes

    def _whole(
        self, reads: Any, hyper: Tensor, train_batch: Any, valid_batch: Any
    ) -> tuple[tuple[Loss, list[Tensor]], Any]:
        """What :meth:`of_outer_loss` returns, and what the response has left behind."""
        with self._response.trace(reads):
            return self._slopes(self._scale, hyper, train_batch, valid_batch, None), self._response.left()

    def _say_why(self) -> None:
        """Warn once, if an outer step could not be one graph but its parts could."""
        if self.whole is None or not self.whole.staged.reason:
            return
        reason, self.whole.staged.reason = self.whole.staged.reason, ""
        if self._response.runs_compiled() and not reason.startswith(TooLarge.__name__):
            warnings.warn(
                f"compile=True: could not compile outer steps as one graph ({reason}), so that their parts are "
                "compiled one by one, which is slower. Needed are an outer loss and a batch of plain tensors, and no "
                ".item() there.",
                UserWarning,
                stacklevel=6,
            )

    def rehearse(self, hyper: Tensor, batch: Any) -> None:
        """Run all checks of an inner step, for a response that makes its steps itself.

        Args:
            hyper: Shape ``(h,)``.
            batch: For the inner loss.
        """
        with buffers_kept(self._response.inner), Stream.current(self._problem.device)():
            self.of_inner_loss(hyper, plain(batch))

    def _terms(
        self, params: Sequence[Tensor], hyper: Tensor, batch: Any, learns: bool = True
    ) -> tuple[Loss, list[Tensor], list[Tensor | None]]:
        """The loss to report, all terms, and the gradients of their sum in one list."""
        total: list[Tensor | None] = [None] * len(params)
        found: list[Loss] = []
        terms = self._response.inner_loss if learns else self._response.weights_loss
        for term in terms(hyper, batch):
            if not isinstance(term, Loss):
                raise TypeError(
                    f"{type(self._response).__name__}.inner_loss must yield bilevel.Loss, as problem.inner_loss "
                    f"returns it; got {type(term).__name__}."
                )
            found.append(Loss(term.value.detach(), _detached(term.aux)))
            new = self._differentiate("inner_loss", term.value, params)
            safe_point()
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, new, strict=True)]
        if not found or all(gradient is None for gradient in total[: len(self._weights)]):
            raise ValueError(
                "inner_loss does not depend on the weights: compute it from model(...) and model.params, not from your "
                "own module, and without detach() or no_grad()."
            )
        reported = found.pop(self._response.reported)
        return reported, [reported.value, *(term.value for term in found)], total

    def _slopes(
        self, scale: Sequence[Tensor], hyper: Tensor, train_batch: Any, valid_batch: Any, steps: tuple[int, int] | None
    ) -> tuple[Loss, list[Tensor]]:
        """What :meth:`of_outer_loss` returns."""
        signs = (1, -1) if self._response.antithetic_outer else (1,)
        again = Repeated(self._problem.device) if len(signs) > 1 else nullcontext
        found = []
        for sign in signs:
            with again():  # which draws the same perturbation for both, and the same random numbers of the loss
                found.append(self._slopes_at(sign, scale, hyper, train_batch, valid_batch, steps))
        losses, slopes = zip(*found, strict=True)
        if len(signs) == 1:
            return losses[0], slopes[0]
        value = torch.stack([loss.value for loss in losses]).mean()
        return Loss(value, losses[0].aux), [torch.stack(parts).mean(0) for parts in zip(*slopes, strict=True)]

    def _slopes_at(
        self,
        sign: int,
        scale: Sequence[Tensor],
        hyper: Tensor,
        train_batch: Any,
        valid_batch: Any,
        steps: tuple[int, int] | None,
    ) -> tuple[Loss, list[Tensor]]:
        """The same at one perturbation, or at its negative, or at none."""
        # Two copies of λ keep the parts apart, so that one backward pass gives both.
        direct, through_weights = (hyper.clone().requires_grad_() for _ in range(2))
        drawn = self._response.outer_perturbation(valid_batch)
        if drawn is None:  # no leaves all the same, which hooks on modules, as of FlopCounterMode, do not take
            at, seen = (copy.view_as(copy) for copy in (through_weights, direct))
        else:
            at, seen = (copy + sign * drawn for copy in (through_weights, direct))
        model = self._response(at, train_batch, None if drawn is None else hyper)
        if not isinstance(model, Model):
            raise TypeError(
                f"{type(self._response).__name__}.forward must return a bilevel.Model, got {type(model).__name__}."
            )
        if steps is not None:
            self._finite.made(steps[0], self._response.steps)
        loss = self._problem.outer_loss(model, seen, valid_batch)
        objective = loss.value
        if self._response.scale is not None and scale:
            objective = objective + self._response.scale.penalty()
        if self._share is not None:  # so that the gradients of all processes add up
            objective = objective * self._share.to(objective)
        inputs = [direct, through_weights, *scale]
        try:
            found = self._differentiate("outer_loss", objective, inputs)
        except LinearSolverError:
            if steps is not None:  # a loss that is not finite is the cause then, and the better message
                value = loss.value.detach().to(hyper)
                if self._share is not None and self._response.inner.group is not None:
                    (value,) = self._response.inner.group.add([self._share * value], self._share)
                zero = value.new_zeros(1)
                self._finite.outer(steps[1], value, value[None], zero, zero[0], steps[0])
            raise
        if not loss.value.requires_grad or (found[0] is None and found[1] is None):
            raise ValueError(
                "outer_loss depends neither on the weights nor on a hyperparameter: compute it from model(...), "
                "model.params or hyper, not from your own module, and without detach() or no_grad()."
            )
        pairs = zip(inputs, found, strict=True)
        gradients = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]
        return Loss(loss.value.detach(), _detached(loss.aux)), gradients

    def _differentiate(self, name: str, value: Tensor, inputs: Sequence[Any]) -> list[Tensor | None]:
        """The gradient of a loss.

        Returns:
            One entry per input, None where the loss does not depend on it.

        Raises:
            RuntimeError: If PyTorch lacks a derivative.
            ValueError: If it depends on the user's own tensors, which are not the ones that are trained.
        """
        if not value.requires_grad:
            return [None] * len(inputs)
        try:
            with self._problem.differentiating():
                found = torch.autograd.grad(value, [*inputs, *self._users], allow_unused=True)
        except RuntimeError as error:
            if self._response.advice and name == "inner_loss" and "is not implemented" in str(error):
                error.add_note(self._response.advice)
            raise
        gradients: list[Tensor | None] = [*found]
        if any(gradient is not None for gradient in gradients[len(inputs) :]):
            raise ValueError(
                f"{name} depends on your own module, whose weights the solver does not train: compute it from "
                "model(...) and model.params, and detach() what is meant as a constant."
            )
        return gradients[: len(inputs)]


def _add_share(total: list[Part], new: list[Part], share: float) -> list[Part]:
    """Add a part of some tensors to a sum of such parts, empty at first; None stands for zero."""
    parts = [tensor if tensor is None else share * tensor for tensor in new]
    if not total:
        return parts
    return [b if a is None else a if b is None else a + b for a, b in zip(total, parts, strict=True)]


def _detached(aux: Any) -> Any:
    """Without its graph, which would keep the memory of the step."""
    return None if aux is None else pytree.tree_map_only(Tensor, Tensor.detach, aux)
