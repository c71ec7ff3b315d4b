"""Conjugate gradients: for positive definite matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from bilevel.linear_solvers.base import Operator, norm
from bilevel.linear_solvers.iterative import Iterative, Run


@final
@dataclass(frozen=True, kw_only=True)
class CG(Iterative):
    r"""Solve :math:`(\mathbf{H} + \mu \mathbf{I}) u = v` for positive definite :math:`\mathbf{H} + \mu \mathbf{I}`.

    With :math:`p_0 = r_0 = v - (\mathbf{H} + \mu \mathbf{I}) x_0`, a step is

    .. math::
        \alpha &= \frac{r^\top r}{p^\top (\mathbf{H} + \mu \mathbf{I}) p} \\
        u &\leftarrow u + \alpha p \\
        r_+ &= r - \alpha (\mathbf{H} + \mu \mathbf{I}) p \\
        p &\leftarrow r_+ + \frac{r_+^\top r_+}{r^\top r}\, p

    A direction with :math:`p^\top (\mathbf{H} + \mu \mathbf{I}) p \le 0`, to rounding, raises
    :class:`LinearSolverError`.

    Attributes:
        max_steps: Upper bound on Hessian-vector products; the true residual takes one more, a warm start another.
        rtol: Stop once :math:`\|r\| \le \mathrm{rtol}\,\|v\|`; zero runs exactly ``max_steps`` steps.
        damping: The shift :math:`\mu`.

    Example:
        >>> H = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> CG(max_steps=2)(lambda p: H @ p, torch.tensor([1.0, 2.0]))
        tensor([0.0909, 0.6364])

    References:
        Hestenes and Stiefel (1952), Methods of conjugate gradients for solving linear systems.
    """

    advice: ClassVar[str] = "raise max_steps, add damping, or set rtol=0 to ask for a truncated solution."

    def _run(self, operator: Operator, b: Tensor, target: Tensor, max_steps: int) -> Run:
        x, r, p = torch.zeros_like(b), b, b
        rr = r @ r
        steps = failed = largest = value = torch.zeros_like(rr)
        for _ in range(max_steps):
            active = (rr.sqrt() > operator.eps) & (failed == 0)
            if self.rtol > 0 and bool(~active | (rr.sqrt() <= target)):
                break
            product = operator(p)
            curvature = (p @ product) / (p @ p)
            # A Rayleigh quotient too, along the root of the matrix times p: closer to the largest eigenvalue.
            length = norm(product)
            largest = torch.maximum(largest, length / (p @ product).abs() * length)
            # What rounding puts into a residual without curvature gives it some: the square of its share.
            rounding = torch.clamp((3 * operator.eps) ** 2 / rr, min=10 * operator.eps)
            flat = active & ((curvature <= 0) | (curvature <= rounding * largest))
            # A residual at rounding level is a solution, whatever the curvature of what is left.
            failed = torch.where(flat, 1.0 + (rr <= operator.eps), failed)
            value = torch.where(flat, curvature, value)
            active = active & ~flat
            alpha = torch.where(active, rr / (p @ product), 0.0)
            x = x + alpha * p
            r = r - alpha * product
            before, rr = rr, r @ r
            p = r + torch.where(active, rr / before, 0.0) * p
            steps = steps + active
        return Run(x, rr.sqrt(), steps, (failed == 1).to(x.dtype), value)

    def _failure(self, step: int, value: float) -> str:
        cause = "nearly singular in this precision" if value > 0 else "singular or indefinite"
        return (
            f"the curvature p·Hp / p·p is {value:.1e} along the direction of step {step}, counted from 0: the matrix "
            f"is not positive definite but {cause}. Add damping (above minus the smallest eigenvalue), use "
            "curvature='gauss_newton', or MINRES."
        )
