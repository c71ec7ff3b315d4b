r"""Δ-STN (Bae and Grosse, 2020): a centered STN whose predictions are linearised.

The weights respond as in the centered STN, :math:`w_0 + \Theta \epsilon`. Where :math:`\Theta` is trained, predictions
are replaced by their first-order expansion (``eq:lin-network``),

.. math:: f(x, w_0, \lambda_0 + \epsilon, \xi) + \mathbf{J}_{yw}\,\Theta \epsilon,

so that :math:`\Theta` learns the Jacobian at :math:`\lambda_0` rather than a fit to a nonlinear neighbourhood. Weights
that a penalty reads (``model.params``) are affine already and stay as they are. The outer loss is not linearised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor
from typing_extensions import override

from bilevel.problem import Model, Problem
from bilevel.response.centered import Centered, CenteredResponse
from bilevel.structure import Held


@final
@dataclass(frozen=True, kw_only=True)
class DeltaSTN(Centered):
    r"""Δ-STN: :math:`w_0 + \Theta (\lambda - \lambda_0)`, with :math:`\Theta` trained on linearised predictions.

    The method of choice for regularization of a network during one training run. The network must support forward-mode
    differentiation.

    Its settings ``scale``, ``entropy``, ``perturb_outer``, ``structure``, ``perturb`` and ``max_gigabytes`` are those
    of :class:`bilevel.response.hypernetwork.Hypernetwork`; ``antithetic``, ``control`` and ``response_every`` are those
    of :class:`bilevel.response.centered.Centered`. The paper's own algorithm is :meth:`paper`.

    Example:
        >>> DeltaSTN().control is None  # the control variate, which the paper does not have
        True
        >>> DeltaSTN.paper().structure, DeltaSTN.paper().control
        ('rowwise', False)
    """

    @classmethod
    def paper(cls, *, scale: float = 1.0, entropy: float | None = 1e-3) -> DeltaSTN:
        r"""The algorithm of the paper, ``alg:dstn-training``; also under the name ``"delta_stn_paper"``.

        Responses by rows with a learned direction, one perturbation per example of a network, other random numbers in
        each pass, no control variate and no pairs, :math:`\sigma` learned. The paper does not say where
        :math:`\mathbf{R}` starts. Its code draws it; here it starts at :math:`\mathbf{W}`.

        Args:
            scale: As in :class:`DeltaSTN`.
            entropy: As there.

        Returns:
            Settings.
        """
        return cls(
            scale=scale, entropy=entropy, perturb_outer=True, structure="rowwise", antithetic=False, control=False
        )

    @override
    def bind(self, problem: Problem) -> DeltaResponse:
        """A response that starts with zero slopes."""
        return DeltaResponse(problem, self)


@final
class DeltaResponse(CenteredResponse):
    r"""The learned :math:`\theta = \{w_0, \Theta\}`."""

    linearizes = True

    advice = (
        "delta_stn differentiates what forward mode computes, and an operation of the network or of inner_loss has no "
        "such derivative. Use method='centered_stn', or replace the operation."
    )

    @override
    def perturbed(self, noise: Tensor, held: Held | None = None) -> Model:
        r"""The model with weights :math:`w_0 + \Theta \epsilon`, its predictions linearised."""
        return self.affine(noise, freeze_weights=True, linearized=True, held=held)
