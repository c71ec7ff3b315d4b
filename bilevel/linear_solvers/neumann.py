"""The truncated Neumann series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.linear_solvers.base import Operator, check_number, norm
from bilevel.linear_solvers.iterative import Iterative, Run, probe
from bilevel.parallel import dot, length

POWER_STEPS = 10
SAFETY = 1.1


@final
@dataclass(frozen=True, kw_only=True)
class Neumann(Iterative):
    r"""Solve :math:`\mathbf{A} u = v` with :math:`\mathbf{A} = \mathbf{H} + \mu \mathbf{I}` by a truncated series.

    .. math:: u_k = \alpha \sum_{i=0}^{k-1} (\mathbf{I} - \alpha \mathbf{A})^i v

    which converges where every eigenvalue of :math:`\mathbf{A}` lies between 0 and :math:`2 / \alpha`. Equivalently k
    steps of gradient descent, :math:`u \leftarrow u + \alpha (v - \mathbf{A} u)`. A residual that grows raises
    :class:`LinearSolverError`.

    Attributes:
        max_steps: Upper bound on the terms k.
        rtol: Stop once :math:`\|r\| \le \mathrm{rtol}\,\|v\|`; zero, the default, sums exactly ``max_steps`` terms.
        damping: The shift :math:`\mu`.
        scale: The factor :math:`\alpha`. None takes :math:`1 / (1.1\,\rho)`, where :math:`\rho` estimates the largest
            eigenvalue by 10 steps of power iteration, deterministic, at 11 more Hessian-vector products.

    Example:
        >>> Neumann(max_steps=3, scale=0.5)(lambda p: p, torch.tensor([8.0]))  # 4 + 2 + 1
        tensor([7.])

    References:
        Lorraine, Vicol and Duvenaud (2020), Optimizing millions of hyperparameters by implicit differentiation.
    """

    rtol: float = 0.0
    scale: float | None = None

    advice: ClassVar[str] = "raise max_steps (the series is slow for ill-conditioned matrices), add damping, or use CG."

    @override
    def __post_init__(self) -> None:
        """Check ``scale`` as well."""
        super().__post_init__()
        if self.scale is not None:
            check_number(self, "scale", self.scale, above=0, or_equal=False, advice=" None estimates it.")

    @override
    def _run(self, operator: Operator, b: Tensor, target: Tensor, max_steps: int) -> Run:
        scale = _estimate(operator, b) if self.scale is None else torch.full_like(target, self.scale)
        x, r, size = torch.zeros_like(b), b, norm(b)
        steps = value = torch.zeros_like(size)
        # A zero matrix has an infinite scale.
        zero = (size > 0) & scale.isinf()
        active = ~zero
        rounding = torch.full_like(size, 100 * operator.eps)
        for step in range(max_steps):
            if step > 0:
                r = b - operator(x)
                # The sum of the residuals so far bounds |x| / scale, and so the rounding error of x.
                rounding = torch.add(rounding, size, alpha=100 * operator.eps)
                # Residuals are at most of length one until the series diverges: no need of the safe norm.
                before, size = size, length(r)
                # For symmetric matrices these quotients never fall: one above 1 is proof of divergence.
                grows = active & (size > torch.maximum(before * (1 + operator.eps**0.5), rounding))
                value = torch.where(grows, size / before, value)
                active = active & ~grows
            active = active & (size != 0)
            if self.rtol > 0 and bool(~active | (size <= target)):
                break
            x = torch.addcmul(x, r, torch.where(active, scale, 0.0))
            r = b  # frees the residual before the next product
            steps = steps + active
        return Run(x, size, steps, (zero | (value > 0)).to(b.dtype), value)

    @override
    def _failure(self, step: int, value: float) -> str:
        if value == 0:
            return "the matrix is zero, as far as products with it can tell. Add damping."
        cause = "a negative eigenvalue" if self.scale is None else f"an eigenvalue outside (0, {2 / self.scale:.3g})"
        return (
            f"the series diverges: term {step} multiplied the residual by {value:.3g}, so the matrix has {cause}. "
            "Add damping, lower scale (None estimates it), use curvature='gauss_newton', or MINRES."
        )


def _estimate(operator: Operator, b: Tensor) -> Tensor:
    """The inverse of the largest eigenvalue, a little less to be safe."""
    q = probe(b)
    # The sign keeps the sum from vanishing.
    q = q + torch.where(dot(q, b) < 0, -1.0, 1.0) * b
    size = norm(q)
    for _ in range(POWER_STEPS + 1):
        q = operator(q / torch.where(size == 0, 1.0, size))
        size = norm(q)
    return 1 / (SAFETY * size)
