"""Augmentation as a regularizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.augment.changes import apply
from bilevel.hyper import Hyper, interval
from bilevel.regularizers import Mixture, Regularizer

SHAPES: Mapping[str, tuple[float, float]] = {
    "translation": (0.3, 0.03),
    "scale": (0.4, 0.03),
    "rotation": (45.0, 3.0),
    "shear": (30.0, 3.0),
    "cutout": (0.8, 0.1),
}
"""Changes of shape: the upper end of each strength, and where it starts."""

COLORS: Mapping[str, tuple[float, float]] = {
    "brightness": (1.0, 0.1),
    "contrast": (1.0, 0.1),
    "saturation": (1.0, 0.1),
    "hue": (0.5, 0.02),
}
FLIP = (0.5, 0.25)
CLOSE = 1e-3


@final
@dataclass(frozen=True)
class Images(Regularizer):
    """Augmentation of images with tuned strengths; made by :func:`images`.

    Attributes:
        ranges: The upper end of each strength, and where it starts.
        mean: Of the standardisation of the inputs, one value per channel.
        std: Likewise.

    Example:
        >>> import bilevel
        >>> sorted(bilevel.augment.images(only=["rotation", "shear"]).hyper)
        ['augment.rotation', 'augment.shear']
    """

    ranges: Mapping[str, tuple[float, float]]
    mean: tuple[float, ...] = field(default=())
    std: tuple[float, ...] = field(default=())

    @property
    @override
    def hyper(self) -> dict[str, Hyper]:
        """``augment.NAME`` for each change."""
        return {f"augment.{name}": interval(0.0, high, init=init) for name, (high, init) in self.ranges.items()}

    @override
    def on_batch(self, mixture: Mixture, hyper: Mapping[str, Tensor]) -> Mixture:
        """Change the images."""
        x = mixture.tensor
        strengths: dict[str, Tensor | float] = {name: hyper[f"augment.{name}"] for name in self.ranges}
        if "cutout" in strengths:
            size = min(x.shape[-2:])
            strengths |= {"holes": 1.0, "length": strengths.pop("cutout") * size}
        if not self.mean:
            return mixture.with_tensor(apply(x, strengths))
        mean, std = self._moments(x)
        changed = apply(x * std + mean, strengths, fill=mean.flatten())
        return mixture.with_tensor((changed - mean) / std)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, filled in on the device: to copy them there would wait for it."""
        mean, std = (torch.stack([x.new_full((), v) for v in values]) for values in (self.mean, self.std))
        return mean.reshape(-1, 1, 1), std.reshape(-1, 1, 1)

    def check(self, x: Tensor) -> None:
        """Refuse images whose colours would be cut off: those of a colour change must be in [0, 1].

        Args:
            x: A batch of images; it is read, which waits for its device.

        Raises:
            ValueError: If they are not.
        """
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(
                f"augment needs float images of shape (B, C, H, W), got {x.dtype} of shape {tuple(x.shape)}."
            )
        if self.mean and len(self.mean) != x.shape[1]:
            raise ValueError(f"augment: mean has {len(self.mean)} values, the images have {x.shape[1]} channels.")
        if not any(name in COLORS for name in self.ranges):
            return
        if self.mean:
            mean, std = self._moments(x)
            x = x * std + mean
        low, high = float(x.min()), float(x.max())
        if low < -CLOSE or high > 1 + CLOSE:
            given = "with this mean and std" if self.mean else "as they are"
            raise ValueError(
                f"augment: changes of colour need images in [0, 1], but {given} they go from {low:.3g} to {high:.3g}. "
                "Pass the mean and std by which they were standardised, bilevel.augment.images(mean=..., std=...), or "
                "color=False."
            )


def images(
    *,
    mean: Sequence[float] | float | None = None,
    std: Sequence[float] | float | None = None,
    color: bool | None = None,
    flip: bool = False,
    only: Sequence[str] | None = None,
) -> Images:
    """Augmentation of images, each change with a strength that is tuned: a sensible default.

    Shapes: translation, scale, rotation, shear and one square that is cut out, up to 0.8 of the side. Colours, if they
    are on: brightness, contrast, saturation and hue. What comes from outside of the image is zero: black, or the mean
    colour of standardised images.

    Args:
        mean: Per channel, if the images were standardised with it; they are changed as they were before.
        std: Likewise.
        color: Change colours, too. It needs images in [0, 1] before they were standardised. By default, if ``mean`` and
            ``std`` are given for three channels.
        flip: Mirror left and right, with a probability that is tuned from 0.25, below 0.5.
        only: The names of the changes to make, in place of all these.

    Returns:
        A regularizer, for ``bilevel.tune(augment=...)`` or :func:`bilevel.regularizers.regularized_loss`.

    Raises:
        ValueError: If only one of ``mean`` and ``std`` is given, or a name is unknown.

    Example:
        >>> list(images(flip=True).hyper)[:3]
        ['augment.translation', 'augment.scale', 'augment.rotation']
        >>> list(images(only=["cutout"]).hyper)
        ['augment.cutout']
    """
    if (mean is None) != (std is None):
        raise ValueError(f"images: give both mean and std, or none; got mean={mean!r} and std={std!r}.")
    means, stds = (
        () if value is None else tuple(map(float, [value] if isinstance(value, int | float) else value))
        for value in (mean, std)
    )
    if len(means) != len(stds) or not all(value > 0 for value in stds):
        raise ValueError(f"images: mean and std need one value per channel each, std positive; got {mean}, {std}.")
    known = {**SHAPES, "flip": FLIP, **COLORS}
    if only is not None:
        unknown = [name for name in only if name not in known]
        if unknown or not only:
            raise ValueError(f"images: there is no change {unknown[0] if unknown else ''!r}, only {', '.join(known)}.")
        return Images({name: known[name] for name in known if name in only}, means, stds)
    colored = len(means) == 3 if color is None else color
    names = [*SHAPES, *(["flip"] if flip else []), *(COLORS if colored else [])]
    return Images({name: known[name] for name in names}, means, stds)
