r"""What the three self-tuning networks share: an affine response :math:`w_0 + \Theta\,\delta` and a perturbation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from bilevel.hyper import Scale
from bilevel.problem import Problem
from bilevel.response.base import BestResponse, Method
from bilevel.structure import Dense


@dataclass(frozen=True, kw_only=True)
class Hypernetwork(Method):
    r"""Settings of every self-tuning network.

    Attributes:
        scale: Standard deviation :math:`\sigma` of the perturbation, in the unconstrained space.
        entropy: None keeps :math:`\sigma` fixed; a number :math:`\tau` learns it at the outer step, with
            :math:`-\tau\,\mathbb{H}[p(\epsilon|\sigma)]` added to the outer loss.
        perturb_outer: Evaluate the outer loss at :math:`\lambda + \epsilon`, as in ``eq:stn-val-obj``. None does so
            only when :math:`\sigma` is learned.
        max_gigabytes: Refuse a response that takes more memory.
    """

    scale: float = 1.0
    entropy: float | None = None
    perturb_outer: bool | None = None
    max_gigabytes: float = 4.0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: If one is out of range.
        """
        name = type(self).__name__
        if not _is_number(self.scale) or not 0 < self.scale < math.inf:
            raise ValueError(f"{name}: scale must be a positive number (a standard deviation), got {self.scale!r}.")
        if self.entropy is not None and (not _is_number(self.entropy) or not 0 <= self.entropy < math.inf):
            raise ValueError(
                f"{name}: entropy must be None (fixed scale) or a number of at least 0, got {self.entropy!r}."
            )
        if self.perturb_outer not in (None, True, False):
            raise ValueError(f"{name}: perturb_outer must be True, False or None, got {self.perturb_outer!r}.")
        if self.entropy is not None and self.perturb_outer is False:
            raise ValueError(f"{name}: perturb_outer=False leaves a learned scale without a loss; use entropy=None.")
        if not _is_number(self.max_gigabytes) or not self.max_gigabytes > 0:
            raise ValueError(f"{name}: max_gigabytes must be positive, got {self.max_gigabytes!r}.")


class HypernetworkResponse(BestResponse):
    r"""An affine response: :math:`w_0` or :math:`\phi_0` in ``inner``, :math:`\Theta` or :math:`\Phi` in ``theta``."""

    scale: Scale

    def __init__(self, problem: Problem, settings: Hypernetwork) -> None:
        """Start with no response to the hyperparameters."""
        super().__init__(problem)
        hyper = problem.initial_hyper()
        self.theta = Dense(problem.params, hyper.numel(), max_gigabytes=settings.max_gigabytes)
        learned = settings.entropy is not None
        self.scale = Scale(
            hyper.numel(),
            settings.scale,
            entropy=settings.entropy,
            perturb_outer=learned if settings.perturb_outer is None else settings.perturb_outer,
            like=hyper,
        )

    def perturbation(self) -> Tensor:
        r"""Draw :math:`\epsilon \sim p(\epsilon | \sigma)`; the inner level does not train :math:`\sigma`.

        Returns:
            A tensor of shape ``(h,)``.
        """
        return self.scale.sample().detach()

    def affine(self, shift: Tensor, *, freeze_weights: bool = False) -> dict[str, Tensor]:
        r"""The weights :math:`w_0 + \Theta\,\delta`.

        Args:
            shift: :math:`\delta`, shape ``(h,)``.
            freeze_weights: Detach :math:`w_0`, so that only :math:`\Theta` learns from the result.

        Returns:
            One tensor per parameter.
        """
        change = self.theta(shift)
        weights = self.inner.params()
        return {name: (w.detach() if freeze_weights else w) + change[name] for name, w in weights.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
