"""The scale of the perturbation of the hyperparameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.distributions.transforms import SoftplusTransform
from typing_extensions import override


class Scale(nn.Module):
    r"""The standard deviations :math:`\sigma \in \mathbb{R}^h_+` of the perturbation :math:`p(\epsilon | \sigma)`.

    Fixed, or learned with the entropy term of ``eq:stn-val-obj`` and kept positive by a softplus.

    Example:
        >>> scale = Scale(2, 1.0, entropy=None, perturb_outer=False, like=torch.zeros(()))
        >>> scale()
        tensor([1., 1.])
        >>> round(float(scale.entropy()), 4)  # 2 * log(2 pi e) / 2
        2.8379
    """

    sigma: Tensor
    shared: Tensor

    def __init__(
        self,
        size: int,
        init: float,
        *,
        entropy: float | None,
        perturb_outer: bool,
        like: Tensor,
        shared: Tensor | None = None,
    ) -> None:
        """Start every entry at ``init``, with the dtype and device of ``like``."""
        super().__init__()
        none = torch.zeros(size, dtype=torch.bool)
        self.register_buffer("shared", (none if shared is None else shared).to(like.device), persistent=False)
        self.entropy_weight = entropy
        self.perturb_outer = perturb_outer
        start = torch.full((size,), init, dtype=like.dtype, device=like.device)
        if entropy is None:
            self.register_buffer("sigma", start)
        else:
            self.raw = nn.Parameter(SoftplusTransform().inv(start))

    @override
    def forward(self) -> Tensor:
        """The standard deviations, a positive tensor of shape ``(h,)``."""
        if self.entropy_weight is None:
            return self.sigma
        sigma: Tensor = SoftplusTransform()(self.raw)
        return sigma.clamp_min(torch.finfo(sigma.dtype).tiny)

    def sample(self, examples: int | None = None, common: Tensor | None = None) -> Tensor:
        r"""Draw :math:`\epsilon = \sigma \odot z` with standard normal z, differentiable in :math:`\sigma`.

        Args:
            examples: Number of draws, which have the same shared entries. None draws once.
            common: z for one draw, and for the shared entries of several: the same in all processes.

        Returns:
            A tensor of shape ``(h,)`` or ``(examples, h)``.
        """
        sigma: Tensor = self()
        if examples is None:
            return sigma * (torch.randn_like(sigma) if common is None else common)
        noise = torch.randn(examples, len(sigma), dtype=sigma.dtype, device=sigma.device)
        return sigma * torch.where(self.shared, noise[:1] if common is None else common, noise)

    def penalty(self) -> Tensor:
        r"""What a learned scale adds to the outer loss, :math:`-\tau\,\mathbb{H}[p(\epsilon | \sigma)]`.

        Returns:
            A scalar; zero if the scale is fixed.
        """
        return self().new_zeros(()) if self.entropy_weight is None else -self.entropy_weight * self.entropy()

    def entropy(self) -> Tensor:
        r"""The entropy :math:`\mathbb{H}[p(\epsilon | \sigma)] = \sum_i \log \sigma_i + \tfrac{h}{2} \log 2 \pi e`.

        Returns:
            A scalar.
        """
        sigma = self()
        total: Tensor = Normal(torch.zeros_like(sigma), sigma, validate_args=False).entropy().sum()
        return total
