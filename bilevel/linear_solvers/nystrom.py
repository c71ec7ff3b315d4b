"""The Nyström method: a low-rank approximation of the matrix, solved exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.linear_solvers.base import (
    Attempt,
    LinearSolver,
    LinearSolverError,
    Matvec,
    Operator,
    check_count,
    check_number,
    norm,
    not_finite,
    ratio,
)


@final
@dataclass(frozen=True, kw_only=True)
class Nystrom(LinearSolver):
    r"""Solve :math:`(\mathbf{H}_k + \mu \mathbf{I}) u = v`, where :math:`\mathbf{H}_k` has rank k.

    From the columns :math:`\mathbf{C} = \mathbf{H}_{:,K}` of a random set K of k indices, and
    :math:`\mathbf{W} = \mathbf{H}_{K,K}`,

    .. math::
        \mathbf{H}_k &= \mathbf{C} \mathbf{W}^\dagger \mathbf{C}^\top, \\
        u &= \frac{1}{\mu} v - \frac{1}{\mu^2} \mathbf{C}
            \left(\mathbf{W} + \frac{1}{\mu} \mathbf{C}^\top \mathbf{C}\right)^{-1} \mathbf{C}^\top v.

    The second line (Woodbury) loses digits for small :math:`\mu`; the same u is computed from the eigenvectors
    :math:`\mathbf{Q}` and eigenvalues :math:`\theta` of :math:`\mathbf{H}_k`, as
    :math:`u = \mathbf{Q}\,\mathrm{diag}(\theta + \mu)^{-1} \mathbf{Q}^\top v
    + (\mathbf{I} - \mathbf{Q} \mathbf{Q}^\top) v / \mu`.

    Exact where the rank of :math:`\mathbf{H}` is at most k, an approximation otherwise: it promises no residual and
    never warns. Directions that the columns miss are divided by :math:`\mu`, so it is good only where at most k
    eigenvalues exceed :math:`\mu`, and the columns have a part in their directions. On five benchmark problems no
    rank up to 256 with a damping from 0.001 to 1 came closer than an error of 0.29 times the hypergradient; with the
    defaults it was 0.35 to 42 (:doc:`/lab/measured`). Where the matrix has full rank, as with weight decay, take
    :class:`bilevel.CG`, with :class:`bilevel.Diagonal` where scales differ; where it has a low one, look at the
    reported residual, which is that of the damped system. An eigenvalue :math:`\theta \le -\mu`, or
    an asymmetric :math:`\mathbf{W}`, raises :class:`LinearSolverError`. On a GPU its two small eigendecompositions
    wait for the device.

    Attributes:
        rank: The number k of columns, one Hessian-vector product each; all of them where there are fewer.
        damping: The shift :math:`\mu`, above zero.
        seed: Chooses the columns, always the same ones; no global random state is touched.

    Example:
        >>> H = torch.diag(torch.tensor([3.0, 1.0]))
        >>> Nystrom(rank=2, damping=1.0)(lambda p: H @ p, torch.tensor([1.0, 4.0]))
        tensor([0.2500, 2.0000])

    References:
        Hataya and Yamada (2023), Nyström method for accurate and scalable implicit differentiation.
    """

    rank: int = 20
    damping: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_count(self, "rank", self.rank)
        check_count(self, "seed", self.seed, minimum=0)
        check_number(
            self, "damping", self.damping, above=0, or_equal=False, advice=" A low-rank matrix is singular without it."
        )

    @override
    def _solve(self, matvec: Matvec, v: Tensor, x0: Tensor | None, root: Matvec | None) -> Attempt:
        plain, damped = Operator(matvec, v.dtype, 0.0), Operator(matvec, v.dtype, self.damping)
        v = v.to(torch.promote_types(v.dtype, torch.float32))
        rank = min(self.rank, v.numel())
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(v.numel(), generator=generator)[:rank].to(v.device, non_blocking=True)
        columns = v.new_empty(rank, v.numel()).T  # each of them contiguous
        for index in range(rank):
            columns[:, index] = plain(torch.zeros_like(v).index_fill(0, chosen[index], 1.0))
        zero, finite = ~v.any(), columns.isfinite().all() & v.isfinite().all()
        columns.masked_fill_(~finite, 0.0)  # eigh refuses what is not finite
        theta, basis, skew = _eigen(columns, columns[chosen], plain.eps)
        inside = basis.T @ v
        rest = v - basis @ inside
        # Project twice: 1 / damping would magnify what rounding left inside.
        rest = rest - basis @ (basis.T @ rest)
        x = basis @ (inside / (theta + self.damping)) + rest / self.damping
        x = torch.where(zero, 0.0, x)
        residual = torch.where(zero, 0.0, ratio(norm(v - damped(x)), norm(v)))
        facts = torch.stack([zero.to(v.dtype), finite.to(v.dtype), skew, theta.min(), theta.abs().max()])

        def judge(facts: list[float]) -> int:
            zero, finite, skew, smallest, largest = facts
            if zero:
                return 0
            if not finite:
                raise not_finite("Nystrom", plain, v) or LinearSolverError("Nystrom: matvec returned NaN or infinity.")
            if skew > plain.eps**0.5:
                raise LinearSolverError(
                    "Nystrom: the matrix is not symmetric, or matvec is not deterministic (dropout?). Use Exact."
                )
            if smallest + self.damping <= 10 * plain.eps * (largest + self.damping):
                raise LinearSolverError(
                    f"Nystrom: the low-rank approximation has an eigenvalue of {smallest:.2e}, not above "
                    f"-damping={-self.damping:g}: the matrix is indefinite. Raise damping, use "
                    "curvature='gauss_newton', or MINRES."
                )
            return rank

        return Attempt(x, residual, facts, judge)


def _eigen(columns: Tensor, block: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors of ``columns @ pinv(block) @ columns.T``, and how far it is from symmetric."""
    low, high = torch.aminmax(columns)
    largest = torch.maximum(-low, high)
    largest = torch.where(largest > 0, largest, 1.0)
    skew = (block - block.T).abs().amax() / largest
    # Divided by the largest entry, so that squares neither overflow nor vanish.
    values, vectors = torch.linalg.eigh((block + block.T) / (2 * largest))
    kept = values.abs() > 10 * len(values) * eps * values.abs().amax()
    root = torch.where(kept, values.abs(), 1.0).rsqrt() * kept
    factor = columns / largest @ (vectors * root)
    q, triangle = torch.linalg.qr(factor)
    theta, rotation = torch.linalg.eigh((triangle * values.sign()) @ triangle.T)
    return theta * largest, q @ rotation, skew
