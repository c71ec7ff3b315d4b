"""What a preconditioner is: settings, from which each outer step makes a map that is close to the inverse curvature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bilevel.linear_solvers.base import Matvec, check_count
from bilevel.problem import Variables


@dataclass(frozen=True, kw_only=True)
class Preconditioner(ABC):
    r"""Settings of a preconditioner, for ``Implicit(..., preconditioner=...)``.

    With a matrix :math:`\mathbf{A} = \mathbf{H} + \mu \mathbf{I}` and a symmetric positive definite
    :math:`\mathbf{R}`, a solver finds y in

    .. math:: \mathbf{R} \mathbf{A} \mathbf{R}\, y = \mathbf{R} v, \qquad u = \mathbf{R} y,

    which has the same solution u for every :math:`\mathbf{R}`. It takes few steps where :math:`\mathbf{R}^2` is close
    to the inverse of :math:`\mathbf{A}`.

    Attributes:
        probes: How many draws of random signs are averaged. The signs are always the same ones.

    Example:
        >>> import bilevel
        >>> isinstance(bilevel.Diagonal(), Preconditioner), isinstance(bilevel.KFAC(), Preconditioner)
        (True, True)
    """

    probes: int = 1

    def __post_init__(self) -> None:
        """Check the setting."""
        check_count(self, "probes", self.probes)

    def check(self, inner: Variables, hyper: Tensor, batch: Any) -> None:  # noqa: B027
        """Refuse, before work starts, a network that this preconditioner does not fit.

        Args:
            inner: The network.
            hyper: Shape ``(h,)``.
            batch: For the inner loss.
        """

    @abstractmethod
    def root(
        self, inner: Variables, hyper: Tensor, batch: Any, damping: float, add: Callable[[Tensor], Tensor]
    ) -> Matvec:
        r"""The product with :math:`\mathbf{R}` at the current weights.

        Args:
            inner: The network.
            hyper: Shape ``(h,)``.
            batch: For the inner loss.
            damping: The shift :math:`\mu`.
            add: Averages a vector of the size of the weights over all processes.

        Returns:
            A map of vectors of the size of the weights.
        """
