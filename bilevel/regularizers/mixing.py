"""Mixtures of two examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.functional import per_example
from bilevel.hyper import Hyper, interval
from bilevel.regularizers.base import Mixture, Regularizer, examples


@final
@dataclass(frozen=True)
class Mixup(Regularizer):
    r"""Mixup (Zhang et al., 2018): each example is blended with a partner, and so is its loss.

    .. math:: \tilde x_i = (1 - m_i)\, x_i + m_i\, x_{\pi(i)}, \qquad
        \ell_i = (1 - m_i)\, \ell(f(\tilde x_i), y_i) + m_i\, \ell(f(\tilde x_i), y_{\pi(i)}), \qquad
        m_i = s_i u_i, \quad u_i \sim \mathcal{U}(0, \frac{1}{2})

    for a random permutation :math:`\pi` of the batch. For cross entropy that is the loss of the mixed labels, for
    squared errors that of mixed targets up to a constant.

    The strength s goes from 0, no mixing, to 1, where :math:`m` has the distribution of the smaller share under Mixup
    with Beta(1, 1). In between it is not Beta(α, α), but another family with the same ends. The reason: :math:`m` is
    a smooth function of s and of numbers that are drawn independently of s. So the loss has a derivative in s, every
    method can tune it, and perturbed and unperturbed passes draw the same numbers. A Beta variable is drawn by
    rejection and has neither property.

    Attributes:
        init: Where s starts.

    Example:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch...>
        >>> mixed = Mixup().on_batch(Mixture.of(torch.eye(2), torch.tensor([0, 1])), {"mixup": torch.tensor(1.0)})
        >>> torch.allclose(mixed.x.sum(1), torch.ones(2)), len(mixed.parts)
        (True, 2)
    """

    order: ClassVar[int] = 0
    init: float = 0.2

    @property
    @override
    def hyper(self) -> dict[str, Hyper]:
        """``mixup``, between 0 and 1."""
        return {"mixup": interval(0.0, 1.0, init=self.init)}

    @override
    def on_batch(self, mixture: Mixture, hyper: Mapping[str, Tensor]) -> Mixture:
        """Blend inputs, and add the target of the partner."""
        x = mixture.tensor
        partner = examples(x).argsort()
        share = _strength("mixup", hyper["mixup"], x) * examples(x) / 2
        m = per_example(share, x)
        mixed = mixture.with_tensor((1 - m) * x + m * mixture.partners[partner])
        return mixed.with_target(share, _taken(mixture.original[1], partner))


@final
@dataclass(frozen=True)
class CutMix(Regularizer):
    r"""CutMix (Yun et al., 2019): a box of a partner is pasted into each image, and the loss is shared by area.

    The box has the shape of the image and the area :math:`s_i u_i` of it, with :math:`u_i \sim \mathcal{U}(0, 1)`,
    around a uniform point, cut off at the border. Its exact area in pixels is the share of the partner in the loss. At
    s = 1 this is CutMix with Beta(1, 1).

    Which pixels are pasted has no derivative in s: it is detached, so that only methods that learn from perturbed
    losses can tune it. The others refuse.

    Attributes:
        init: Where s starts.

    Example:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch...>
        >>> x = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 1, 8, 8)
        >>> mixed = CutMix().on_batch(Mixture.of(x, torch.tensor([0, 1])), {"cutmix": torch.tensor(1.0)})
        >>> share = mixed.parts[1][0]
        >>> bool(((mixed.x - x).abs().mean((1, 2, 3)) <= share).all())
        True
    """

    order: ClassVar[int] = 0
    init: float = 0.2

    @property
    @override
    def hyper(self) -> dict[str, Hyper]:
        """``cutmix``, between 0 and 1."""
        return {"cutmix": interval(0.0, 1.0, init=self.init)}

    @override
    def on_batch(self, mixture: Mixture, hyper: Mapping[str, Tensor]) -> Mixture:
        """Paste, and add the target of the partner."""
        x = mixture.tensor
        if x.ndim != 4:
            raise ValueError(f"cutmix needs images of shape (B, C, H, W), got {tuple(x.shape)}.")
        partner = examples(x).argsort()
        side = (_strength("cutmix", hyper["cutmix"], x).detach() * examples(x)).sqrt()
        height, width = x.shape[2:]
        box = _span(examples(x), side, height)[:, :, None] & _span(examples(x), side, width)[:, None, :]
        pasted = torch.where(box[:, None], mixture.partners[partner], x)
        share = box.to(side.dtype).mean((1, 2))
        return mixture.with_tensor(pasted).with_target(share, _taken(mixture.original[1], partner))


def _span(place: Tensor, side: Tensor, size: int) -> Tensor:
    """Which of ``size`` pixels are within a stretch of relative length ``side`` around ``place``, shape (B, size)."""
    middle, half = place * size, side * size / 2
    pixels = torch.arange(size, device=place.device) + 0.5
    return (pixels >= (middle - half)[:, None]) & (pixels < (middle + half)[:, None])


def _strength(name: str, value: Tensor, x: Tensor) -> Tensor:
    if value.ndim and value.shape != x.shape[:1]:
        raise ValueError(
            f"{name} must be a scalar or have shape ({len(x)},), one per example, got {tuple(value.shape)}."
        )
    return value.expand(len(x))


def _taken(y: Any, index: Tensor) -> Any:
    if isinstance(y, Tensor) and y.ndim and len(y) == len(index):
        return y[index]
    raise ValueError(
        "mixing needs a target that is one tensor with an entry for each example, got "
        f"{f'shape {tuple(y.shape)}' if isinstance(y, Tensor) else type(y).__name__}."
    )
