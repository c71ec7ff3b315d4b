"""The smallest and the largest eigenvalue of a symmetric matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bilevel.linear_solvers.base import Matvec, Operator, norm
from bilevel.linear_solvers.iterative import probe

LANCZOS_STEPS = 50


def dense_matrix(product: Matvec, like: Tensor) -> Tensor:
    """Form the matrix from its products with the unit vectors."""
    return torch.stack([product(unit) for unit in torch.eye(len(like)).to(like)], dim=1).detach()


def extreme_eigenvalues(matrix: Tensor) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a symmetric matrix; NaN if it is not finite."""
    wide = matrix.cpu().double()
    if not bool(wide.isfinite().all()):
        return math.nan, math.nan
    values = torch.linalg.eigvalsh((wide + wide.T) / 2)
    return float(values[0]), float(values[-1])


def lanczos(product: Matvec, like: Tensor) -> tuple[float, float]:
    """Estimate the smallest and the largest eigenvalue, always from the same start. Both lie between the true ones."""
    operator = Operator(product, like.dtype, 0.0)
    q = probe(like.to(torch.promote_types(like.dtype, torch.float32)))
    older, beta = torch.zeros_like(q), torch.zeros_like(q[0])
    alphas: list[float] = []
    betas: list[float] = []
    # Reorthogonalisation would keep every vector in memory. Without it, extreme eigenvalues repeat, which does no harm.
    for _ in range(min(LANCZOS_STEPS, len(q))):
        u = operator(q) - beta * older
        alpha = q @ u
        u = u - alpha * q
        beta = norm(u)
        alphas.append(float(alpha))
        betas.append(float(beta))
        if not betas[-1] > 10 * operator.eps * max(map(abs, alphas + betas)):
            break
        older, q = q, u / beta
    side = torch.tensor(betas[:-1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(side, 1) + torch.diag(side, -1)
    return extreme_eigenvalues(tridiagonal)
