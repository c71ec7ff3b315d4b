"""A preconditioner: the diagonal of the Gauss-Newton matrix, estimated by a few probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.autodiff import vjp
from bilevel.linear_solvers.base import Matvec
from bilevel.problem import Variables
from bilevel.response.curvature import GaussNewton, flatten, unflatten
from bilevel.response.preconditioner import Preconditioner
from bilevel.rng import Stream


@final
@dataclass(frozen=True, kw_only=True)
class Diagonal(Preconditioner):
    r"""Divide every weight by the root of its own curvature, so that iterations need not resolve different scales.

    With :math:`\mathbf{D}` close to the diagonal of the matrix :math:`\mathbf{H} + \mu \mathbf{I}`, it multiplies by
    :math:`\mathbf{R} = \mathbf{D}^{-1/2}`. That saves steps where weights, or the inputs that they multiply, have
    different scales. With the loss as a function of outputs and of the weights that penalties read,
    :math:`\ell(y, w)`, random signs z of the outputs and :math:`\zeta` of the weights,

    .. math::
        d = \Bigl|\operatorname{mean}\, (\mathbf{J}^\top z) \odot (\mathbf{J}^\top \nabla^2_y \ell\, z)\Bigr|
          + \Bigl|\operatorname{mean}\, \zeta \odot \nabla^2_w \ell\, \zeta\Bigr| + \mu

    estimates the diagonal of the Gauss-Newton matrix. Signs of outputs, instead of signs of all weights
    (Hutchinson), give every entry the same relative error, however small it is beside the others. For a loss without
    a network, the second term is all there is, and is Hutchinson's estimate. The diagonal is made anew at every
    outer step, on the batch of that step, and a probe costs about as much as a product with the Hessian.

    Attributes:
        probes: How many draws of signs are averaged. The signs are always the same ones.

    Example:
        >>> import bilevel
        >>> bilevel.Implicit(bilevel.CG(max_steps=18, rtol=0.0), preconditioner=Diagonal()).preconditioner
        Diagonal(probes=2)

    References:
        Bekas, Kokiopoulou and Saad (2007), An estimator for the diagonal of a matrix.
    """

    probes: int = 2

    @override
    def root(
        self, inner: Variables, hyper: Tensor, batch: Any, damping: float, add: Callable[[Tensor], Tensor]
    ) -> Matvec:
        """The product with the diagonal to the power of minus one half."""
        return root_of(add(self.estimate(inner, hyper, batch)), damping)

    def estimate(self, inner: Variables, hyper: Tensor, batch: Any) -> Tensor:
        """The diagonal, without damping.

        Args:
            inner: The network.
            hyper: Shape ``(h,)``.
            batch: For the inner loss.

        Returns:
            A tensor of shape ``(m,)``, nowhere negative.
        """
        with Stream.current(hyper.device)():  # the loss draws what it will draw for the matrix itself
            curvature = GaussNewton(inner, hyper, batch, check=False, differentiate=False)
        through, read = [], []
        for probe in range(self.probes):
            z = signs([*curvature.seen, *curvature.read], probe)
            bent = curvature.bend(z)
            count = len(curvature.seen)
            left, right = (_pulled(curvature, part[:count]) for part in (z, bent))
            through.append(left * right)
            read.append(flatten([a * b for a, b in zip(z[count:], bent[count:], strict=True)]))
        return (sum(through) / self.probes).abs() + (sum(read) / self.probes).abs()  # type: ignore[union-attr]


def root_of(diagonal: Tensor, damping: float) -> Callable[[Tensor], Tensor]:
    """The map that multiplies a vector by a diagonal to the power of minus one half.

    Args:
        diagonal: Nowhere negative.
        damping: Added to it.

    Returns:
        A function of vectors.
    """
    wide = diagonal.to(torch.promote_types(diagonal.dtype, torch.float32)) + damping
    # Weights without curvature, and what is not finite, are left to the matrix itself.
    largest = wide.nan_to_num(0.0, 0.0, 0.0).amax()
    floor = torch.where(largest > 0, largest, 1.0) * torch.finfo(wide.dtype).eps
    scale = torch.where(wide.isfinite() & (largest > 0), torch.maximum(wide, floor), 1.0).rsqrt()
    return lambda vector: vector * scale


def _pulled(curvature: GaussNewton, cotangents: Sequence[Tensor]) -> Tensor:
    parts = vjp(curvature.outputs, curvature.weights, cotangents, retain_graph=True)
    pairs = zip(parts, curvature.weights, strict=True)
    return flatten([torch.zeros_like(weight) if part is None else part for part, weight in pairs])


def signs(like: Sequence[Tensor], probe: int) -> list[Tensor]:
    """Random signs, always the same ones for a probe; no global random state is touched.

    Args:
        like: Tensors.
        probe: The number of the draw.

    Returns:
        One tensor for each of ``like``.
    """
    generator = torch.Generator().manual_seed(probe)
    first, size = like[0], sum(tensor.numel() for tensor in like)
    drawn = torch.empty(size, dtype=first.dtype).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    return unflatten(drawn.to(first.device, non_blocking=True), like)
