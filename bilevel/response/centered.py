r"""What the centered STN and the Δ-STN share: how the response :math:`\Theta` is learned, and with how much noise.

Both learn from a loss at perturbed hyperparameters, :math:`\ell(\epsilon) = \mathcal{L}_T(\lambda + \epsilon,
w_0 + \Theta \epsilon)`. Its gradient in :math:`\Theta` is

.. math:: \nabla_\Theta \ell(\epsilon)
    = \mathbf{J}^\top g\,\epsilon^\top + (\mathbf{G} \Theta + \mathbf{B})\,\epsilon \epsilon^\top + O(\epsilon^3).

The second term is the signal, of order :math:`\sigma^2`: it vanishes at the best response :math:`-\mathbf{G}^{-1}
\mathbf{B}`. The first has mean zero, but it holds the whole gradient g of every example, and drowns the signal where
:math:`\sigma` is small. There are two ways to be rid of it, both with *common random numbers*: all evaluations in a
step draw the same masks and augmentations.

- The *control variate* subtracts the first term, :math:`\mathbf{J}^\top g\,\epsilon^\top`, itself. The pass that trains
  :math:`w_0` computes g already. So that pass gets the weights :math:`w_0 + \operatorname{stop}(\Theta \epsilon) -
  \Theta \epsilon`, which are :math:`w_0` but for their slope in :math:`\Theta`. With the gate that costs no
  product with a weight.
- *Antithetic pairs* average over :math:`\epsilon` and :math:`-\epsilon`. All odd terms cancel, at the price of a second
  perturbed pass.

What is left is divided by :math:`\sigma^2`, entry by entry of :math:`\lambda`. Its expectation is then
:math:`\mathbf{G} \Theta + \mathbf{B}` whatever the scale, and an optimizer like SGD learns as fast with a small one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from bilevel.arguments import check_integer
from bilevel.checks import takes_own_shape
from bilevel.problem import Loss, Model, Problem
from bilevel.response.hypernetwork import Hypernetwork, HypernetworkResponse
from bilevel.rng import Repeated
from bilevel.structure import Held, Theta, at_center

COPIES, PER_COPY, FEWEST = 4, 25, 8
"""With many hyperparameters, up to so many examples of a batch share a perturbation, one more for each 25 of them,
as long as so many different ones are left. Products with the response are then as many times smaller."""


ADAPTIVE = (
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
"""Optimizers whose steps are as long whatever the length of the gradient."""

GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of an irrational number, modulo one, are spread evenly, and so is every n-th of them."""


@dataclass(frozen=True, kw_only=True)
class Centered(Hypernetwork):
    r"""Settings of the centered STN and the Δ-STN.

    Attributes:
        antithetic: Train :math:`\Theta` on pairs :math:`\pm\epsilon` with the same random numbers.
        control: Subtract the gradient of :math:`\Theta` at :math:`\epsilon = 0`, with the same random numbers.
            By default (None for both) the control is subtracted, except where each example has a perturbation of its
            own and a weight the structure ``"rowwise"``: there pairs are taken. False for both is the paper's
            algorithm, with other random numbers in each pass.
        response_every: Train :math:`\Theta` at one of so many inner steps; the weights learn at each. The others cost
            about as much as a step of plain training. Which one it is differs, so that no batch is left out where they
            come in a fixed order. None, as in :func:`bilevel.tune`, is 2 where the optimizer of the response is one of
            ``ADAPTIVE``, such as Adam, and 1 otherwise: plain SGD learns slowly enough as it is.
    """

    antithetic: bool | None = None
    control: bool | None = None
    response_every: int | None = 1

    @override
    def __post_init__(self) -> None:
        """Check ``antithetic``, ``control`` and ``response_every`` as well."""
        super().__post_init__()
        if self.response_every is not None:
            check_integer(f"{type(self).__name__}: response_every", self.response_every, 1)
        for name, value in (("antithetic", self.antithetic), ("control", self.control)):
            if value not in (None, True, False):
                raise ValueError(f"{type(self).__name__}: {name} must be True, False or None, got {value!r}.")
        if self.antithetic and self.control:
            raise ValueError(
                f"{type(self).__name__}: antithetic=True and control=True remove the same noise twice; leave one out."
            )


class CenteredResponse(HypernetworkResponse):
    r"""The learned :math:`\theta = \{w_0, \Theta\}`, each with an objective of its own."""

    reported = -1

    def __init__(self, problem: Problem, settings: Centered) -> None:
        """Start with no response to the hyperparameters."""
        super().__init__(problem, settings)
        self._settings = settings
        self._needs_rows = False
        if settings.control and self._two_factors:
            raise ValueError(
                f"{type(settings).__name__}: control=True does not go with structure='rowwise' where each example has "
                "a perturbation of its own: take antithetic=True, structure='gate' or perturb='batch'."
            )
        self._decide()

    @property
    def _two_factors(self) -> bool:
        return self.per_example and isinstance(self.theta, Theta) and self.theta.rowwise is not None

    def _decide(self) -> None:
        settings, two_factors = self._settings, self._two_factors
        undecided = settings.antithetic is None and settings.control is None
        self.antithetic = two_factors if undecided else bool(settings.antithetic)
        self.subtracts = not (self.antithetic or two_factors) if settings.control is None else settings.control
        self.antithetic_outer = self.scale.perturb_outer and (self.antithetic or self.subtracts)

    @override
    def share(self, reason: str) -> None:
        """One perturbation for all examples, and the noise removed as is right for that."""
        super().share(reason)
        self._decide()

    @abstractmethod
    def perturbed(self, noise: Tensor, held: Held | None = None) -> Model:
        r"""The model at :math:`\epsilon` from which :math:`\Theta` learns, with :math:`w_0` frozen.

        Args:
            noise: Shape ``(h,)`` or ``(B, h)``.
            held: As in ``affine``.

        Returns:
            What the inner loss sees.
        """

    @override
    def check(self, hyper: Tensor, batch: Any) -> None:
        """See whether the loss takes hyperparameters of their own shape as well as one row for each example."""
        super().check(hyper, batch)
        if self.per_example and self._settings.response_every != 1 and not self._needs_rows:
            self._needs_rows = not takes_own_shape(self.problem, self.inner, hyper, batch)

    @override
    def learns(self, step: int, optimizer: Optimizer | None) -> bool:
        """At one step of each group; its place in the group is equally often each, whatever period the batches have."""
        every = self._settings.response_every or (2 if isinstance(optimizer, ADAPTIVE) else 1)
        group, place = divmod(step, every)
        return place == int(group * GOLDEN % 1 * every)

    @override
    def weights_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        """The unperturbed loss."""
        examples = self._examples(batch) if self._needs_rows else None
        if examples is None:
            model = self.inner.model(self.inner.params(), update_buffers=True)
        else:
            hyper = hyper.expand(examples, -1).clone()
            model = self.affine(torch.zeros_like(hyper), control=True, update_buffers=True)
        yield self.problem.inner_loss(model, hyper, batch)

    @override
    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        r"""The perturbed loss or two for :math:`\Theta`, then the unperturbed one for :math:`w_0`."""
        # In this order the gradient of all weights need not wait in memory while Θ learns.
        examples = self._examples(batch)
        copies = self._copies(examples)
        noise = self.perturbation(batch, copies)
        again = Repeated(self.problem.device) if self.antithetic or self.subtracts else nullcontext
        signs = (1, -1) if self.antithetic else (1,)
        held = Held(copies) if self.subtracts else None
        for sign in signs:
            shift = sign * noise
            with again():
                loss = self.problem.inner_loss(self.perturbed(shift, held), hyper + shift, batch)
            yield Loss(loss.value / len(signs), loss.aux)
        with again():
            loss = self._unperturbed(hyper, noise, batch, held)
        yield loss

    def _copies(self, examples: int | None) -> int:
        """How many examples share a perturbation."""
        if examples is None or not self.subtracts:
            return 1
        size: int = self.scale().numel()
        return max(1, min(COPIES, size // PER_COPY, examples // FEWEST))

    def _unperturbed(self, hyper: Tensor, noise: Tensor, batch: Any, held: Held | None) -> Loss:
        if held is None:
            return self.problem.inner_loss(self.inner.model(self.inner.params(), update_buffers=True), hyper, batch)
        # One row of hyperparameters per example, as in the perturbed pass, so that both draw the same numbers.
        model = self.affine(noise, control=True, update_buffers=True, held=held)
        loss = self.problem.inner_loss(model, hyper.expand_as(noise).clone(), batch)
        return Loss(held.passed_on(loss.value), loss.aux)

    @override
    def scaled(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        r"""Without the :math:`\sigma^2` of the signal. With the noise still in, that would only make it louder."""
        settings = self._settings
        if not (self.antithetic or self.subtracts) or (settings.entropy is None and settings.scale == 1):
            return gradients
        sigma = self.scale().detach()
        # Below this, the rounding errors of a loss are larger than what a perturbation changes.
        square = sigma.clamp_min(torch.finfo(sigma.dtype).eps ** 0.5).square()
        rowwise = self.theta.rowwise if isinstance(self.theta, Theta) else None
        directions = set() if rowwise is None else {id(template) for template in rowwise.templates}
        return [
            None if g is None else g / _along(square.mean()[None] if id(param) in directions else square, g)
            for param, g in zip(self.theta.parameters(), gradients, strict=True)
        ]

    @override
    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> Model:
        r"""The model with weights :math:`w_0 + \Theta (\lambda - \lambda_0)`."""
        if center is not None or hyper.ndim > 1:
            return self.affine(hyper - (hyper.detach() if center is None else center))
        return self.inner.model(at_center(self.theta, hyper, self.inner.params()))


def _along(numbers: Tensor, gradient: Tensor) -> Tensor:
    """Numbers for dimension 0 of a gradient."""
    return numbers.to(gradient.dtype).view(-1, *[1] * (gradient.ndim - 1))
