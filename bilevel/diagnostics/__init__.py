r"""How good is the hypergradient? A method's best response against a converged linear solve.

At a solution of the inner problem the implicit function theorem (Lemma ``best-response-lamma``) gives the Jacobian that
every method approximates, :math:`\partial r / \partial \lambda = -\mathbf{H}^{-1} \partial_w \partial_\lambda
\mathcal{L}_T`. If the network is small enough to solve with :math:`\mathbf{H}`, the two can be compared.
"""

from bilevel.diagnostics.callback import Diagnose
from bilevel.diagnostics.diagnose import diagnose
from bilevel.diagnostics.diagnosis import Comparison, Diagnosis

__all__ = ["Comparison", "Diagnose", "Diagnosis", "diagnose"]
