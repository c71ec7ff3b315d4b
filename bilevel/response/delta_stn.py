r"""Δ-STN (Bae and Grosse, 2020): a centered STN whose predictions are linearised.

The weights respond as in the centered STN, :math:`w_0 + \Theta \epsilon`. Where :math:`\Theta` is trained, predictions
are replaced by their first-order expansion (``eq:lin-network``),

.. math:: f(x, w_0, \lambda_0 + \epsilon, \xi) + \mathbf{J}_{yw}\,\Theta \epsilon,

so that :math:`\Theta` learns the Jacobian at :math:`\lambda_0` rather than a fit to a nonlinear neighbourhood. Weights
that a penalty reads (``model.params``) are affine already and stay as they are. The outer loss is not linearised.
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
class DeltaSTN(Hypernetwork):
    r"""Δ-STN: :math:`w_0 + \Theta (\lambda - \lambda_0)`, with :math:`\Theta` trained on linearised predictions.

    The method of choice for regularization of a network during one training run. The network must support forward-mode
    differentiation (``nn.LSTM`` does not).

    Its settings ``scale``, ``entropy``, ``perturb_outer``, ``structure``, ``perturb`` and ``max_gigabytes`` are those
    of :class:`bilevel.response.hypernetwork.Hypernetwork`.

    Example:
        >>> DeltaSTN(entropy=1e-3)
        DeltaSTN(scale=1.0, entropy=0.001, perturb_outer=None, structure=None, perturb=None, max_gigabytes=4.0)
    """

    @override
    def bind(self, problem: Problem) -> DeltaResponse:
        """A response that starts with zero slopes."""
        return DeltaResponse(problem, self)


@final
class DeltaResponse(HypernetworkResponse):
    r"""The learned :math:`\theta = \{w_0, \Theta\}`."""

    linearizes = True

    advice = (
        "delta_stn differentiates what forward mode computes, and an operation of the network or of inner_loss has no "
        "such derivative. Use method='centered_stn', or replace the operation (nn.GLU by x * gate.sigmoid(), "
        "nn.Hardsigmoid by nn.Hardtanh(0, 1) of x / 6 + 1 / 2)."
    )

    @override
    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        r"""The unperturbed loss for :math:`w_0`, then the perturbed and linearised one for :math:`\Theta`."""
        yield self.problem.inner_loss(self.inner.model(self.inner.params(), update_buffers=True), hyper, batch)
        noise = self.perturbation(batch)
        response = self.affine(noise, freeze_weights=True, linearized=True)
        yield self.problem.inner_loss(response, hyper + noise, batch)

    @override
    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> Model:
        r"""The model with weights :math:`w_0 + \Theta (\lambda - \lambda_0)`, not linearised."""
        return self.affine(hyper - (hyper.detach() if center is None else center))
