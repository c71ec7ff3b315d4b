r"""Centered Self-Tuning Networks: the Δ-STN without its linearisation.

The best response is :math:`r_\theta(\lambda, \lambda_0) = \Theta (\lambda - \lambda_0) + w_0` (``eq:new-param``), where
:math:`\lambda_0` is the current :math:`\lambda`. Its parts have objectives of their own (``eq:new-objective_hw0``,
``eq:new-objective_hw1``):

.. math::
    w_0^* &= \arg\min_{w_0} \mathcal{L}_T(\lambda, w_0) \\
    \Theta^* &= \arg\min_\Theta \mathbb{E}_{\epsilon \sim p(\epsilon|\sigma)}
        \left[\mathcal{L}_T(\lambda + \epsilon, w_0 + \Theta \epsilon)\right]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from typing_extensions import override

from bilevel.problem import Loss, Model, Problem
from bilevel.response.hypernetwork import Hypernetwork, HypernetworkResponse


@final
@dataclass(frozen=True, kw_only=True)
class CenteredSTN(Hypernetwork):
    r"""Centered STN: :math:`w_0 + \Theta (\lambda - \lambda_0)`, with :math:`w_0` trained unperturbed.

    Needs no forward-mode differentiation, so it runs networks that :class:`DeltaSTN` cannot.

    Attributes:
        objective: ``"centered"``, or ``"stn"`` to train both parts on one perturbed loss (``fig:decouple``).

    Example:
        >>> CenteredSTN(objective="stn").objective
        'stn'
    """

    objective: str = "centered"

    @override
    def __post_init__(self) -> None:
        """Check ``objective`` as well."""
        super().__post_init__()
        if self.objective not in ("centered", "stn"):
            raise ValueError(f"CenteredSTN: objective must be 'centered' or 'stn', got {self.objective!r}.")

    @override
    def bind(self, problem: Problem) -> CenteredResponse:
        """A response that starts with zero slopes."""
        return CenteredResponse(problem, self)


@final
class CenteredResponse(HypernetworkResponse):
    r"""The learned :math:`\theta = \{w_0, \Theta\}`."""

    def __init__(self, problem: Problem, settings: CenteredSTN) -> None:
        """Start with no response to the hyperparameters."""
        super().__init__(problem, settings)
        self.objective = settings.objective

    @override
    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        r"""The unperturbed loss, then the perturbed one for :math:`\Theta`; only the latter if ``objective="stn"``."""
        if self.objective == "stn":
            noise = self.perturbation(batch)
            yield self.problem.inner_loss(self.affine(noise, update_buffers=True), hyper + noise, batch)
            return
        yield self.problem.inner_loss(self.inner.model(self.inner.params(), update_buffers=True), hyper, batch)
        noise = self.perturbation(batch)
        yield self.problem.inner_loss(self.affine(noise, freeze_weights=True), hyper + noise, batch)

    @override
    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> Model:
        r"""The model with weights :math:`w_0 + \Theta (\lambda - \lambda_0)`."""
        return self.affine(hyper - (hyper.detach() if center is None else center))
