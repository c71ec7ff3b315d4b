"""Rows that differ: the loss must be a sum of terms with one perturbation each.

Then the derivative in the perturbations of some examples does not change with those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel.autodiff import map_tensors
from bilevel.checks.statistics import FixedStatistics
from bilevel.checks.subject import REMEDY, Subject, Unevaluable, gradients, read
from bilevel.problem import Model
from bilevel.responding import NoExamples, Rows


def check_separable(subject: Subject, scale: float) -> None:
    """Refuse a loss that is no such sum, and say why it is none.

    Args:
        subject: What is checked.
        scale: Of the perturbations.

    Raises:
        NoExamples: If the network is the cause, or a loss that is none.
        ValueError: If a hyperparameter is.
    """
    pair = _Pair(subject, scale)
    if not pair.coupled(direct=ALL, through=True) or not subject.repeats():
        return
    # Once more with other numbers: samplers that reject may have drawn as many by chance, in other rows.
    pair = _Pair(subject, scale, skip=1)
    if not pair.coupled(direct=ALL, through=True):
        return
    if pair.compared():
        raise NoExamples(
            f"{subject.loss} compares or normalises over the examples of a batch: the derivative in what the network "
            "returns for one example changes with what it returns for others. Then no example can have a perturbation "
            "of its own. Take a loss that is a sum over examples, for instance without dividing by a sum over the "
            f"batch, {REMEDY}."
        )
    culprit = pair.mixing_weight()
    if culprit is not None:
        raise NoExamples(
            f"the network mixes the examples at the weight {culprit!r}: its response to the perturbation of one "
            "example reaches the predictions for others. Either dimension 0 of what meets that weight does not count "
            f"the {subject.count} examples, although it is as long, or the network moves or mixes them. Put the "
            f"examples first, let the weight not respond (structure={{{culprit!r}: 'none'}}), {REMEDY}."
        )
    name = pair.mixing_hyper()
    raise ValueError(
        f"{subject.loss} lets the value of hyper[{name!r}] for one example reach the loss of other examples. It has "
        f"shape {subject.shape(name)} there, one row for each of the {subject.count} examples. The usual causes: it "
        "multiplies a mean over the batch (use a loss per example, as bilevel.functional.cross_entropy, mse_loss or "
        "reduction='none' give, and multiply that); it is broadcast along another axis (write "
        f"x * bilevel.functional.per_example(hyper[{name!r}], x)); it is indexed from the left (write "
        f"hyper[{name!r}][..., 0]). Mend that, declare it with shared=True, {REMEDY}."
    )


NONE, ALL = slice(0), slice(None)


class _Pair:
    """Two perturbations for every example."""

    def __init__(self, subject: Subject, scale: float, *, skip: int = 0) -> None:
        self.subject, self.skip = subject, skip
        hyper, shared = subject.hyper, subject.problem.space.shared().to(subject.hyper.device)
        shape = (2, subject.count, len(hyper))
        first, second = scale * torch.randn(shape, dtype=hyper.dtype).to(hyper)
        self.first = torch.where(shared, first[:1], first)
        self.second = torch.where(shared, self.first, second)
        self.own = ~shared  # the entries with one row per example
        shapes = {(subject.count, *entry.init.shape) for entry in subject.problem.space.hyper.values()}
        self.fixed: FixedStatistics | None = FixedStatistics(subject.count, shapes)
        place, half = torch.arange(subject.count), subject.count // 2
        mixed = torch.randperm(subject.count) < half
        groups = (place < half, place >= half, place % 2 == 1, place // 2 % 2 == 1, mixed)
        self.groups = [group.to(hyper.device) for group in groups]
        self.training: bool | None = None  # the mode of the loss

    def coupled(
        self, *, direct: slice = NONE, through: bool = False, alike: bool = False, names: Sequence[str] | None = None
    ) -> bool:
        """Whether slopes of kept examples change when a group of others gets its second perturbation.

        Args:
            direct: Entries of the hyperparameters that get it.
            through: Whether the weights get it.
            alike: Give all examples the same hyperparameters, and look at the slopes through the weights only.
            names: Of the weights that respond; all by default.

        Returns:
            The answer.
        """
        start = self.first[:1].expand_as(self.first) if alike else self.first
        before = self._slopes(start, self.first, names)
        drawn = self.subject.drawn
        found = []
        for changed in self.groups:
            mixed = torch.where(changed[:, None], self.second, self.first)
            values = start.clone()
            values[:, direct] = mixed[:, direct]
            found.append((changed, self._slopes(values, mixed if through else self.first, names)))
            if drawn != self.subject.drawn:
                # How many numbers are drawn depends on values, as in nn.RReLU, so that other rows get other numbers.
                if self.training is False:
                    return False
                self.training = False
                return self.coupled(direct=direct, through=through, alike=alike, names=names)
        if self.fixed is not None and self.fixed.own and (self.fixed.leaked or self._hidden()):
            self.fixed = None  # what is held fixed is no norm, but what the network computes
            return self.coupled(direct=direct, through=through, alike=alike, names=names)
        for changed, after in found:
            for old, new in [*zip(before, after, strict=True)][1 if alike else 0 :]:
                error, size = (new - old)[~changed].abs(), old.abs().amax(0)
                limit = self.subject.rounding * size + torch.finfo(size.dtype).eps * size.max()
                if bool((error > limit)[:, self.own].any()):
                    return True
        return False

    def _slopes(self, values: Tensor, shift: Tensor, names: Sequence[str] | None) -> list[Tensor]:
        """The derivative of the loss in the hyperparameters of each example, directly and through its weights."""
        subject = self.subject
        through = shift.clone().requires_grad_()
        rows = {name: part for name, part in subject.theta.rows(through).items() if names is None or name in names}
        direct = values.clone().requires_grad_()
        try:
            loss = subject.evaluate(
                subject.responding(rows, self.fixed), subject.hyper + direct, training=self.training, skip=self.skip
            )
        except Unevaluable:  # an operation may refuse to be differentiated in a hyperparameter
            loss = subject.evaluate(
                subject.responding(rows, self.fixed), subject.hyper + values, training=self.training, skip=self.skip
            )
        return gradients(loss, [direct, through])

    def _hidden(self) -> bool:
        """Whether a weight has no effect but through statistics: before a norm, it has."""
        rows = self.subject.theta.rows(self.first)
        leaves = {name: part.factor.detach().requires_grad_() for name, part in rows.items()}
        parts = {name: Rows(leaf, rows[name].template) for name, leaf in leaves.items()}
        sizes = []
        for fixed in (self.fixed, None):
            # Penalties read the weights beside the network, and do not count here.
            params = read(
                self.subject.weights(),
                {name: Rows(part.factor.detach(), part.template.detach()) for name, part in rows.items()},
            )
            model = Model(params, self.subject.responding(parts, fixed))
            loss = self.subject.evaluate(model, self.subject.hyper + self.first, training=self.training)
            sizes.append([float(slope.norm()) for slope in gradients(loss, [*leaves.values()])])
        return any(held == 0 and free > 1e-6 * max(sizes[1]) for held, free in zip(*sizes, strict=True))

    def compared(self) -> bool:
        """Whether the derivative in the outputs for some examples changes with the outputs for others."""
        subject = self.subject
        alike = self.first[:1].expand_as(self.first)
        params = read(subject.weights(), subject.theta.rows(alike))
        predict = subject.inner.predictor()

        def slopes(changed: Tensor | None) -> list[Tensor]:
            outputs: list[Tensor] = []

            def replace(output: Tensor) -> Tensor:
                if not output.is_floating_point() or output.shape[:1] != (subject.count,):
                    return output
                value = output.detach()
                if changed is not None:
                    waves = torch.arange(value.numel(), device=value.device).to(value).cos().view(value.shape)
                    step = (value.std(correction=0) + 0.1) * waves
                    value = torch.where(changed.view(-1, *[1] * (value.ndim - 1)), value + step, value)
                outputs.append(value.clone().requires_grad_())
                return outputs[-1].clone()

            def call(*args: Any, **kwargs: Any) -> Any:
                assert predict is not None
                return map_tensors(replace, predict(subject.weights(), *args, **kwargs))

            loss = subject.evaluate(Model(params, call), subject.hyper + alike, training=self.training, skip=self.skip)
            return gradients(loss, outputs)

        try:
            before = slopes(None)
            for changed in self.groups:
                for old, new in zip(before, slopes(changed), strict=True):
                    if bool((new - old)[~changed].abs().max() > subject.rounding * old.abs().max()):
                        return True
        except (Unevaluable, RuntimeError):  # the loss differentiates the network itself, which is cut off here
            pass
        return False

    def mixing_weight(self) -> str | None:
        """A weight whose response mixes the examples, found by halving; the first of several that do so together."""
        if not self.coupled(through=True, alike=True):
            return None
        names = [*self.subject.theta.rows(self.first)]
        while len(names) > 1:
            half = len(names) // 2
            parts = (names[:half], names[half:])
            mixing = [part for part in parts if self.coupled(through=True, alike=True, names=part)]
            if not mixing:
                break
            names = mixing[0]
        return names[0]

    def mixing_hyper(self) -> str:
        """A hyperparameter that mixes the examples; the first of several that do so together."""
        hyper = self.subject.problem.space.hyper
        stop = 0
        for name, entry in hyper.items():
            start, stop = stop, stop + entry.init.numel()
            if self.coupled(direct=slice(start, stop)):
                return name
        return next(name for name, entry in hyper.items() if not entry.shared)
