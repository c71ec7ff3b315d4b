"""The minimal residual method: for symmetric matrices, indefinite ones included."""

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
class MINRES(Iterative):
    r"""Solve :math:`(\mathbf{H} + \mu \mathbf{I}) u = v` for symmetric, possibly indefinite :math:`\mathbf{H}`.

    Step k minimises the residual over the Krylov space of :math:`\mathbf{A} = \mathbf{H} + \mu \mathbf{I}`,

    .. math::
        u_k = \arg\min_{u \in \mathcal{K}_k} \|v - \mathbf{A} u\|, \qquad
        \mathcal{K}_k = \mathrm{span}\{v, \mathbf{A} v, \ldots, \mathbf{A}^{k-1} v\},

    by the Lanczos recursion :math:`\beta_{k+1} q_{k+1} = \mathbf{A} q_k - \alpha_k q_k - \beta_k q_{k-1}` and Givens
    rotations of its tridiagonal matrix. A singular matrix whose range does not contain v raises
    :class:`LinearSolverError`. On an asymmetric matrix the recursion goes wrong, which the true residual shows.

    Attributes:
        max_steps: Upper bound on Hessian-vector products; the true residual takes one more, a warm start another.
        rtol: Stop once :math:`\|r\| \le \mathrm{rtol}\,\|v\|`; zero runs exactly ``max_steps`` steps.
        damping: The shift :math:`\mu`.

    Example:
        >>> H = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> MINRES(max_steps=2)(lambda p: H @ p, torch.tensor([4.0, 1.0]))
        tensor([0.5000, 2.0000])

    References:
        Paige and Saunders (1975), Solution of sparse indefinite systems of linear equations.
    """

    advice: ClassVar[str] = "raise max_steps, add damping, or set rtol=0 to ask for a truncated solution."

    @override
    def _run(self, operator: Operator, b: Tensor, target: Tensor, max_steps: int) -> Run:
        x, q, older = torch.zeros_like(b), b, torch.zeros_like(b)
        w, w_older = torch.zeros_like(b), torch.zeros_like(b)
        remaining = norm(b)
        steps = failed = value = largest = beta = sine = shift = epsilon = torch.zeros_like(remaining)
        cosine, running = torch.full_like(remaining, -1.0), torch.ones_like(remaining, dtype=torch.bool)
        for _ in range(max_steps):
            active = running & (remaining > operator.eps)
            if self.rtol > 0 and bool(~active | (remaining <= target)):
                break
            u = operator(q) - beta * older
            alpha = dot(q, u)
            u = u - alpha * q
            beta, beta_before = norm(u), beta
            largest = torch.maximum(largest, alpha.abs() + beta + beta_before)
            # One more column of the tridiagonal matrix: the last rotation is applied, then the next one found.
            delta, gamma_bar = cosine * shift + sine * alpha, sine * shift - cosine * alpha
            epsilon_before, epsilon, shift = epsilon, sine * beta, -cosine * beta
            gamma = torch.hypot(gamma_bar, beta)
            cosine, sine = gamma_bar / gamma, beta / gamma
            w, w_older = (q - epsilon_before * w_older - delta * w) / gamma, w
            step = cosine * remaining * w
            # Singular if the step is so long that its rounding error alone is of the size of the residual.
            tiny = 10 * operator.eps * largest
            singular = active & ((gamma <= tiny) | (tiny * norm(step) > remaining))
            # A residual at rounding level is a solution, whatever the curvature of what is left.
            failed = torch.where(singular & (remaining > operator.eps**0.5), 1.0, failed)
            value = torch.where(singular, remaining, value)
            active = active & ~singular
            x = torch.where(active, x + step, x)
            remaining = torch.where(active, sine * remaining, remaining)
            steps = steps + active
            running = active & (beta > tiny)
            older, q = q, u / beta
        return Run(x, remaining, steps, failed, value)

    @override
    def _failure(self, step: int, value: float) -> str:
        return (
            f"the matrix is singular, or nearly so in this precision, and v is not in its range: after {step} steps "
            f"the residual is {value:.1e} of that at the start, and cannot be reduced. Add damping."
        )
