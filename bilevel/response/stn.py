r"""Self-Tuning Networks (MacKay et al., 2019), in their general linear form.

The best response is :math:`r_\phi(\lambda) = \Phi \lambda + \phi_0` (``eq:old-param``). Both parts are trained on
perturbed losses,

.. math:: \min_\phi \mathbb{E}_{\epsilon \sim p(\epsilon|\sigma)}
    \left[\mathcal{L}_T(\lambda + \epsilon, r_\phi(\lambda + \epsilon))\right] \qquad (\text{eq:lor-objective}).
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
class STN(Hypernetwork):
    r"""Self-Tuning Network: :math:`r_\phi(\lambda) = \Phi \lambda + \phi_0`, trained on perturbed losses.

    The baseline of the paper. Prefer :class:`DeltaSTN`: the uncentered parameterization makes the inner problem
    ill-conditioned and lets :math:`\lambda` drift (``eq:valid-undesirable``), and perturbing :math:`\phi_0` moves it
    away from the solution (``eq:linear-reg-incorrect``).

    Rows respond with a learned direction (``structure="rowwise"``): the gate would multiply a weight by :math:`1 +
    \mathbf{U} \lambda` with all of :math:`\lambda`, and learns badly where that is large (``benchmarks/defaults.py``).

    Its settings ``scale``, ``entropy``, ``perturb_outer``, ``structure``, ``perturb`` and ``max_gigabytes`` are those
    of :class:`bilevel.response.hypernetwork.Hypernetwork`.

    Example:
        >>> STN(scale=0.5)
        STN(scale=0.5, entropy=None, perturb_outer=None, structure=None, perturb=None, max_gigabytes=4.0)
    """

    by_rows = "rowwise"

    @override
    def bind(self, problem: Problem) -> STNResponse:
        """A response that starts with zero slopes."""
        return STNResponse(problem, self)


@final
class STNResponse(HypernetworkResponse):
    r"""The learned :math:`\phi = \{\phi_0, \Phi\}`."""

    @override
    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        r"""One term, :math:`\mathcal{L}_T(\lambda + \epsilon, r_\phi(\lambda + \epsilon))`, for both parts."""
        sample = hyper + self.perturbation(batch)
        yield self.problem.inner_loss(self.affine(sample, update_buffers=True), sample, batch)

    @override
    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> Model:
        r"""The model with weights :math:`\Phi \lambda + \phi_0`; ``center`` plays no part."""
        return self.affine(hyper)
