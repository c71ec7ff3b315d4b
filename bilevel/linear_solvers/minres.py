"""The minimal residual method: for symmetric matrices, indefinite ones included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.linear_solvers.base import Operator, norm
from bilevel.linear_solvers.iterative import Iterative, Run
from bilevel.linear_solvers.numbers import (
    Number,
    add_scaled,
    add_scaled_,
    divide,
    hypotenuse,
    larger,
    negate,
    nought,
    pick,
)
from bilevel.parallel import dot


class _State(NamedTuple):
    """The solution, the last two Lanczos vectors and directions, and the numbers of the recursion."""

    x: Tensor
    q: Tensor
    older: Tensor
    w: Tensor
    w_older: Tensor
    remaining: Number
    steps: Number
    failed: Number
    value: Number
    largest: Number
    beta: Number
    sine: Number
    shift: Number
    epsilon: Number
    cosine: Number
    running: Number
    target: Number


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
    def _begin(self, operator: Operator, b: Tensor, target: Number) -> _State:
        remaining = operator.number(norm(b))
        zero, x, nothing = nought(remaining), torch.zeros_like(b), torch.zeros_like(b)
        recursion = (zero, zero, zero, zero, zero, zero - 1)
        return _State(x, b, nothing, nothing, nothing, remaining, zero, zero, zero, *recursion, remaining >= 0, target)

    @override
    def _advance(self, operator: Operator, state: _State, *, first: bool | None) -> _State:
        x, q, older, w, w_older, remaining, steps, failed, value, *recursion, running, target = state
        largest, beta_before, sine, shift, epsilon_before, cosine = recursion
        active = running & (remaining > operator.eps)
        u = add_scaled(operator(q), older, -beta_before)
        alpha = operator.number(dot(q, u))
        u = add_scaled_(u, q, -alpha)
        beta = operator.number(norm(u))
        largest = larger(largest, abs(alpha) + beta + beta_before)
        # One more column of the tridiagonal matrix: the last rotation is applied, then the next one found.
        delta, gamma_bar = cosine * shift + sine * alpha, sine * shift - cosine * alpha
        epsilon, shift = sine * beta, -cosine * beta
        gamma = hypotenuse(gamma_bar, beta)
        cosine, sine = divide(gamma_bar, gamma), divide(beta, gamma)
        new = add_scaled_(add_scaled(q, w_older, -epsilon_before), w, -delta).div_(gamma)
        reach = cosine * remaining
        # Singular if the step is so long that its rounding error alone is of the size of the residual.
        tiny = 10 * operator.eps * largest
        singular = active & ((gamma <= tiny) | (tiny * abs(reach) * operator.number(norm(new)) > remaining))
        # A residual at rounding level is a solution, whatever the curvature of what is left.
        failed = pick(singular & (remaining > operator.eps**0.5), nought(failed) + 1, failed)
        value = pick(singular, remaining, value)
        active = active & negate(singular)
        if isinstance(active, Tensor):
            x = torch.where(active, add_scaled(x, new, reach), x)
        elif active:
            x = add_scaled_(x, new, reach)
        remaining = pick(active, sine * remaining, remaining)
        numbers = (remaining, steps + active, failed, value, largest, beta, sine, shift, epsilon, cosine)
        return _State(x, u.div_(beta), q, new, w, *numbers, active & (beta > tiny), target)

    @override
    def _is_done(self, operator: Operator, state: _State) -> Number:
        return negate(state.running & (state.remaining > operator.eps)) | (state.remaining <= state.target)

    @override
    def _end(self, operator: Operator, state: _State) -> Run:
        return Run(state.x, state.remaining, state.steps, state.failed, state.value)

    @override
    def _failure(self, step: int, value: float) -> str:
        return (
            f"the matrix is singular, or nearly so in this precision, and v is not in its range: after {step} steps "
            f"the residual is {value:.1e} of that at the start, and cannot be reduced. Add damping."
        )
