"""The truncated Neumann series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.linear_solvers.base import Operator, check_number, norm
from bilevel.linear_solvers.iterative import Iterative, Run, probe
from bilevel.linear_solvers.numbers import Number, add_scaled_, divide, is_infinite, larger, negate, nought, pick
from bilevel.parallel import dot, length

POWER_STEPS = 10
SAFETY = 1.1


class _State(NamedTuple):
    """The sum so far, and the size of its residual before the last term; and how it goes."""

    x: Tensor
    b: Tensor
    size: Number
    steps: Number
    value: Number
    active: Number
    rounding: Number
    scale: Number
    target: Number


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

    begun: ClassVar[int] = 1
    advice: ClassVar[str] = "raise max_steps (the series is slow for ill-conditioned matrices), add damping, or use CG."

    @override
    def __post_init__(self) -> None:
        """Check ``scale`` as well."""
        super().__post_init__()
        if self.scale is not None:
            check_number(self, "scale", self.scale, above=0, or_equal=False, advice=" None estimates it.")

    @override
    def _run(self, operator: Operator, b: Tensor, target: Number, max_steps: int) -> Run:
        """With numbers on the host and a fixed number of terms, the sizes of the residuals are judged at the end."""
        if not operator.host or self.rtol > 0 or max_steps < 2 or getattr(operator.matvec, "loop", None) is not None:
            return super()._run(operator, b, target, max_steps)
        state, lengths = self._begin(operator, b, target), []
        x, scale = state.x, pick(state.active, state.scale, 0.0)
        for _ in range(max_steps - self.begun):
            r = torch.sub(b, operator(x))
            lengths.append(torch.linalg.vector_norm(r))
            x.add_(r, alpha=scale)
            del r  # before the next one needs memory
        for size in torch.stack(lengths).tolist():
            state = self._judged(operator, state, size)
        return self._end(operator, state)

    @override
    def _begin(self, operator: Operator, b: Tensor, target: Number) -> _State:
        size = operator.number(norm(b))
        scale = self.scale if self.scale is not None else operator.number(_estimate(operator, b))
        if isinstance(size, Tensor):
            scale = torch.as_tensor(scale).to(size)
        # A zero matrix has an infinite scale.
        zero = (size > 0) & is_infinite(scale)
        none = nought(size)
        active = negate(zero) & (size != 0) & (size > target)
        x = b * pick(active, scale, 0.0)
        return _State(x, b, size, none + active, none, active, none + 100 * operator.eps, scale, target)

    @override
    def _advance(self, operator: Operator, state: _State, *, first: bool | None) -> _State:
        r = state.b - operator(state.x)
        # Residuals are at most of length one until the series diverges: no need of the safe norm.
        state = self._judged(operator, state, operator.number(length(r)))
        return state._replace(x=add_scaled_(state.x, r, pick(state.active, state.scale, 0.0)))

    def _judged(self, operator: Operator, state: _State, size: Number) -> _State:
        """Whether a residual of this size calls for one term more."""
        x, b, before, steps, value, active, rounding, scale, target = state
        # The sum of the residuals so far bounds |x| / scale, and so the rounding error of x.
        rounding = rounding + 100 * operator.eps * before
        # For symmetric matrices these quotients never fall: one above 1 is proof of divergence.
        grows = active & (size > larger(before * (1 + operator.eps**0.5), rounding))
        value = pick(grows, divide(size, before), value)
        active = active & negate(grows) & (size != 0) & (size > target)
        return _State(x, b, size, steps + active, value, active, rounding, scale, target)

    @override
    def _is_done(self, operator: Operator, state: _State) -> Number:
        return negate(state.active)

    @override
    def _end(self, operator: Operator, state: _State) -> Run:
        zero = (state.size > 0) & is_infinite(state.scale)
        return Run(state.x, state.size, state.steps, zero | (state.value > 0), state.value)

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
