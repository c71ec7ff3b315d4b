"""Conjugate gradients: for positive definite matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.linear_solvers.base import Operator, norm
from bilevel.linear_solvers.iterative import Iterative, Run
from bilevel.linear_solvers.numbers import Number, add_scaled_, divide, larger, negate, nought, pick, root
from bilevel.parallel import dot


class _State(NamedTuple):
    """Solution, residual and direction; their squares; what rounding is judged by; and how it goes."""

    x: Tensor
    r: Tensor
    p: Tensor
    rr: Number
    pp: Number
    largest: Number
    value: Number
    steps: Number
    active: Number
    broken: Number
    target: Number


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
    def _begin(self, operator: Operator, b: Tensor, target: Number) -> _State:
        rr = operator.number(dot(b, b))
        zero = nought(rr)
        return _State(torch.zeros_like(b), b, b.clone(), rr, rr, zero, zero, zero, rr > 0, rr < 0, target)

    @override
    def _advance(self, operator: Operator, state: _State, *, first: bool | None) -> _State:
        x, r, p, rr, pp, largest, value, steps, active, broken, target = state
        active = active & (rr > operator.eps**2)
        product = operator(p)
        bend = operator.number(dot(p, product))
        if first is not False:
            # The Rayleigh quotient of sqrt(A) p: closer to the largest eigenvalue than that of p.
            length = operator.number(norm(product))
            quotient = pick(length > 0, divide(length, abs(bend)) * length, nought(length))
            largest = pick(steps == 0, quotient, largest)
        # Rounding makes up a share eps / |r| of a residual. Its curvature is then wrong by that share, squared.
        rounding = larger(divide((3 * operator.eps) ** 2, rr), 10 * operator.eps)
        flat = active & (bend <= rounding * largest * pp)
        value = pick(flat, divide(bend, pp), value)
        active, broken = active & negate(flat), broken | flat
        alpha = pick(active, divide(rr, bend), 0.0)
        add_scaled_(r, product, -alpha)
        add_scaled_(x, p, alpha)
        before, rr = rr, operator.number(dot(r, r))
        beta = pick(active, divide(rr, before), 0.0)
        p.mul_(beta).add_(r)
        # A residual is orthogonal to the one before and to the last direction. So p·p and the quotient above
        # need no pass over the vectors. Both are used only while active, when alpha is not zero.
        pp = rr + beta * beta * pp
        largest = larger(largest, divide(1 + beta, alpha))
        return _State(x, r, p, rr, pp, largest, value, steps + active, active, broken, target)

    @override
    def _is_done(self, operator: Operator, state: _State) -> Number:
        return negate(state.active & (state.rr > operator.eps**2)) | (root(state.rr) <= state.target)

    @override
    def _end(self, operator: Operator, state: _State) -> Run:
        # A residual at rounding level is a solution, whatever the curvature of what is left.
        failed = state.broken & (state.rr > operator.eps)
        return Run(state.x, root(state.rr), state.steps, failed, state.value)

    @override
    def _failure(self, step: int, value: float) -> str:
        cause = "nearly singular in this precision" if value > 0 else "singular or indefinite"
        return (
            f"the curvature p·Hp / p·p is {value:.1e} along the direction of step {step}, counted from 0: the matrix "
            f"is not positive definite but {cause}. Add damping (above minus the smallest eigenvalue), use "
            "curvature='gauss_newton', or MINRES."
        )
