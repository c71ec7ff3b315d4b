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
from torch.optim import Optimizer
from typing_extensions import override

from bilevel.problem import Loss, Model, Problem
from bilevel.response.centered import Centered, CenteredResponse
from bilevel.structure import Held


@final
@dataclass(frozen=True, kw_only=True)
class CenteredSTN(Centered):
    r"""Centered STN: :math:`w_0 + \Theta (\lambda - \lambda_0)`, with :math:`w_0` trained unperturbed.

    Needs no forward-mode differentiation, so it runs networks that :class:`DeltaSTN` cannot.

    Attributes:
        objective: ``"centered"``, or ``"stn"`` to train both parts on one perturbed loss (``fig:decouple``), at every
            step whatever ``response_every`` says.

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
        if self.objective == "stn" and (self.antithetic or self.control):
            raise ValueError(
                "CenteredSTN: objective='stn' has one perturbed loss for both parts, from which antithetic=True and "
                "control=True can take nothing; leave them out."
            )

    @override
    def bind(self, problem: Problem) -> CenteredSTNResponse:
        """A response that starts with zero slopes."""
        return CenteredSTNResponse(problem, self)


@final
class CenteredSTNResponse(CenteredResponse):
    r"""The learned :math:`\theta = \{w_0, \Theta\}`."""

    def __init__(self, problem: Problem, settings: CenteredSTN) -> None:
        """Start with no response to the hyperparameters."""
        super().__init__(problem, settings)
        self.objective = settings.objective
        self.antithetic_outer = self.antithetic_outer and self.objective == "centered"

    @override
    def learns(self, step: int, optimizer: Optimizer | None) -> bool:
        return self.objective == "stn" or super().learns(step, optimizer)

    @override
    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        r"""As in every centered method; one perturbed loss for both parts if ``objective="stn"``."""
        if self.objective == "centered":
            yield from super().inner_loss(hyper, batch)
            return
        noise = self.perturbation(batch)
        yield self.problem.inner_loss(self.affine(noise, update_buffers=True), hyper + noise, batch)

    @override
    def perturbed(self, noise: Tensor, held: Held | None = None) -> Model:
        r"""The model with weights :math:`w_0 + \Theta \epsilon`."""
        return self.affine(noise, freeze_weights=True, held=held)
