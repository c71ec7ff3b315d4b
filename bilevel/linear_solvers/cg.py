"""Conjugate gradients: for positive definite matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.linear_solvers.base import Operator, norm
from bilevel.linear_solvers.iterative import Iterative, Run
from bilevel.parallel import dot


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

    @override
    def _run(self, operator: Operator, b: Tensor, target: Tensor, max_steps: int) -> Run:
        x, r, p = torch.zeros_like(b), b, b.clone()
        rr = pp = dot(r, r)
        steps = largest = value = torch.zeros_like(rr)
        active, broken = rr > 0, rr < 0
        for step in range(max_steps):
            active = active & (rr > operator.eps**2)
            if self.rtol > 0 and bool(~active | (rr.sqrt() <= target)):
                break
            product = operator(p)
            bend = dot(p, product)
            if step == 0:
                # The Rayleigh quotient of sqrt(A) p: closer to the largest eigenvalue than that of p.
                length = norm(product)
                largest = (length / bend.abs() * length).nan_to_num()
            # Rounding makes up a share eps / |r| of a residual. Its curvature is then wrong by that share, squared.
            rounding = torch.clamp((3 * operator.eps) ** 2 / rr, min=10 * operator.eps)
            flat = active & (bend <= rounding * largest * pp)
            value = torch.where(flat, bend / pp, value)
            active, broken = active & ~flat, broken | flat
            alpha = torch.where(active, rr / bend, 0.0)
            r.addcmul_(product, alpha, value=-1)
            x.addcmul_(p, alpha)
            before, rr = rr, dot(r, r)
            beta = torch.where(active, rr / before, 0.0)
            p = torch.addcmul(r, p, beta)
            # A residual is orthogonal to the one before and to the last direction. So p·p and the quotient above
            # need no pass over the vectors. Both are used only while active, when alpha is not zero.
            pp = torch.addcmul(rr, beta.square(), pp)
            largest = torch.maximum(largest, (1 + beta) / alpha)
            steps = steps + active
        # A residual at rounding level is a solution, whatever the curvature of what is left.
        return Run(x, rr.sqrt(), steps, (broken & (rr > operator.eps)).to(x.dtype), value)

    @override
    def _failure(self, step: int, value: float) -> str:
        cause = "nearly singular in this precision" if value > 0 else "singular or indefinite"
        return (
            f"the curvature p·Hp / p·p is {value:.1e} along the direction of step {step}, counted from 0: the matrix "
            f"is not positive definite but {cause}. Add damping (above minus the smallest eigenvalue), use "
            "curvature='gauss_newton', or MINRES."
        )
