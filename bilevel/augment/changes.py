"""Random changes of images whose strengths are tensors, one for each example, so that they can be hyperparameters.

All functions take images of shape ``(B, C, H, W)`` with values in [0, 1], and strengths that are scalars or have shape
``(B,)``. Each image gets its own draw, from the generator of its device; nothing waits for the device, so the values of
strengths are not checked. Strengths are detached: how an image changes has no useful derivative in them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.functional import gaussian_noise

Strength = Tensor | float
WARPS = ("translation", "scale", "rotation", "shear")
NAMES = (*WARPS, "flip", "brightness", "contrast", "saturation", "hue", "noise", "holes", "length")
"""What :func:`apply` knows, in the order in which it is applied."""


def apply(x: Tensor, strengths: Mapping[str, Strength], *, fill: Strength = 0.0) -> Tensor:
    """Apply those changes whose strengths are given, in the order of ``NAMES``.

    Args:
        x: Images.
        strengths: By name.
        fill: For :func:`cutout`.

    Returns:
        Images like ``x``.

    Raises:
        ValueError: If a name is not one of them, or only one of ``holes`` and ``length`` is given.

    Example:
        >>> apply(torch.ones(2, 3, 8, 8), {"hue": torch.tensor([0.0, 0.5]), "rotation": torch.tensor(45.0)}).shape
        torch.Size([2, 3, 8, 8])
    """
    unknown = [name for name in strengths if name not in NAMES]
    if unknown:
        raise ValueError(f"strengths: there is no augmentation {unknown[0]!r}, only {', '.join(NAMES)}.")
    if ("holes" in strengths) != ("length" in strengths):
        raise ValueError(f"strengths: cutout needs both 'holes' and 'length', got {', '.join(strengths)}.")
    warps = {name: strengths[name] for name in WARPS if name in strengths}
    if warps:
        x = affine(x, **warps)
    for change in (flip, brightness, contrast, saturation, hue, noise):
        if change.__name__ in strengths:
            x = change(x, strengths[change.__name__])
    return cutout(x, strengths["holes"], strengths["length"], fill=fill) if "holes" in strengths else x


def affine(
    x: Tensor, *, translation: Strength = 0.0, scale: Strength = 0.0, rotation: Strength = 0.0, shear: Strength = 0.0
) -> Tensor:
    """Shear, scale and rotate about the centre, then translate, in one bilinear warp; what comes from outside is black.

    Args:
        x: Images.
        translation: By up to this part of the width to either side, and of the height up or down.
        scale: By a factor from ``1 - scale`` to ``1 + scale``; below 1.
        rotation: By up to this many degrees to either side.
        shear: Along the rows, by up to this many degrees to either side; below 90.

    Returns:
        Images like ``x``.

    Example:
        >>> affine(torch.ones(1, 1, 2, 2), translation=0.0).flatten()
        tensor([1., 1., 1., 1.])
    """
    shift = _strength("translation", translation, x)
    return _warp(
        x,
        torch.stack([_symmetric(shift), _symmetric(shift)], 1),
        1 + _symmetric(_strength("scale", scale, x)),
        _symmetric(_strength("rotation", rotation, x)),
        _symmetric(_strength("shear", shear, x)),
    )


def flip(x: Tensor, strength: Strength) -> Tensor:
    """Mirror left and right, with probability ``strength``.

    Returns:
        Images like ``x``.

    Example:
        >>> flip(torch.tensor([[[[1.0, 2.0]]], [[[1.0, 2.0]]]]), torch.tensor([0.0, 1.0])).flatten(1)
        tensor([[1., 2.],
                [2., 1.]])
    """
    strength = _strength("flip", strength, x)
    chosen = torch.rand_like(strength) < strength
    return torch.where(chosen[:, None, None, None], x.flip(-1), x)


def brightness(x: Tensor, strength: Strength) -> Tensor:
    """Multiply by a factor from ``max(0, 1 - strength)`` to ``1 + strength``.

    Returns:
        Images like ``x``.

    Example:
        >>> brightness(torch.full((1, 1, 1, 2), 0.5), 0.0).flatten()
        tensor([0.5000, 0.5000])
    """
    factor = _factor(_strength("brightness", strength, x))
    return _blend(x, x.new_zeros(()), factor)


def contrast(x: Tensor, strength: Strength) -> Tensor:
    """Scale the distance to the mean luminance of the image, by a factor as for :func:`brightness`.

    Returns:
        Images like ``x``.

    Example:
        >>> contrast(torch.full((1, 1, 1, 2), 0.5), 1.0).flatten()
        tensor([0.5000, 0.5000])
    """
    factor = _factor(_strength("contrast", strength, x))
    return _blend(x, _grey(x).mean((1, 2, 3), keepdim=True), factor)


def saturation(x: Tensor, strength: Strength) -> Tensor:
    """Scale the distance to the luminance of each pixel, by a factor as for :func:`brightness`.

    Returns:
        Images like ``x``.

    Example:
        >>> saturation(torch.full((1, 3, 1, 1), 0.5), 1.0).flatten()
        tensor([0.5000, 0.5000, 0.5000])
    """
    factor = _factor(_strength("saturation", strength, x))
    return _blend(x, _grey(x), factor)


def hue(x: Tensor, strength: Strength) -> Tensor:
    """Turn all hues by up to ``strength`` of the circle to either side; 0.5 reaches every hue.

    Returns:
        Images like ``x``.

    Example:
        >>> hue(torch.full((1, 3, 1, 1), 0.5), 0.5).flatten()
        tensor([0.5000, 0.5000, 0.5000])
    """
    shift = _symmetric(_strength("hue", strength, x))
    _check_channels(x)
    return x if x.shape[1] == 1 else _shift_hue(x, shift)


def noise(x: Tensor, strength: Strength) -> Tensor:
    """Multiply every value by normal noise of mean one and standard deviation ``strength``; may leave [0, 1].

    Returns:
        Images like ``x``.

    Example:
        >>> noise(torch.ones(1, 1, 1, 2), 0.0).flatten()
        tensor([1., 1.])
    """
    return x * gaussian_noise(torch.ones_like(x), _strength("noise", strength, x))


def cutout(x: Tensor, holes: Strength, length: Strength, *, fill: Strength = 0.0, max_holes: int = 4) -> Tensor:
    """Overwrite squares around random pixels (DeVries and Taylor, 2017); they may overlap and reach over the border.

    Args:
        x: Images.
        holes: How many, rounded, at most ``max_holes``.
        length: Of their sides in pixels, rounded.
        fill: The value in the holes, or one for each channel; the mean of the data leaves the mean as it is.
        max_holes: As many are drawn for each image.

    Returns:
        Images like ``x``.

    Example:
        >>> cutout(torch.ones(1, 1, 3, 3), 1.0, 9.0).sum()
        tensor(0.)
    """
    shape = (len(x), max_holes)
    holes, length = _strength("holes", holes, x), _strength("length", length, x)
    rows = torch.randint(x.shape[2], shape, device=x.device)
    columns = torch.randint(x.shape[3], shape, device=x.device)
    return torch.where(_covered(x, rows, columns, holes, length), _tensor(fill, x).reshape(-1, 1, 1), x)


def _strength(name: str, value: Strength, x: Tensor) -> Tensor:
    """One strength for each example, without a gradient; checks the images, too."""
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(
            f"x must be float images of shape (B, C, H, W) in [0, 1], got {x.dtype} of shape {tuple(x.shape)}."
        )
    value = _tensor(value, x).detach()
    if value.ndim and value.shape != x.shape[:1]:
        raise ValueError(
            f"{name} must be a scalar or have shape ({len(x)},), one per example, got {tuple(value.shape)}."
        )
    return value.expand(len(x))


def _tensor(value: Strength, like: Tensor) -> Tensor:
    # Filled in on the device: to copy a number there would wait for it.
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


def _symmetric(strength: Tensor) -> Tensor:
    """Uniform from -strength to strength."""
    return strength * (2 * torch.rand_like(strength) - 1)


def _factor(strength: Tensor) -> Tensor:
    """Uniform from max(0, 1 - strength) to 1 + strength."""
    low = (1 - strength).clamp_min(0)
    return low + (1 + strength - low) * torch.rand_like(strength)


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """From ``other`` at 0 to ``x`` at 1, and beyond."""
    factor = factor[:, None, None, None]
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def _grey(x: Tensor) -> Tensor:
    """The luminance (ITU-R 601), shape ``(B, 1, H, W)``."""
    _check_channels(x)
    if x.shape[1] == 1:
        return x
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]


def _check_channels(x: Tensor) -> None:
    if x.shape[1] not in (1, 3):
        raise ValueError(f"x must have 3 channels (red, green, blue) or 1, got {x.shape[1]}.")


def _shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Add to the hue of HSV, in parts of the circle."""
    red, green, blue = x.split(1, 1)
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    chroma = high - low
    unit = torch.where(chroma > 0, chroma, 1)
    sector = torch.where(
        red == high,
        (green - blue) / unit,
        torch.where(green == high, 2 + (blue - red) / unit, 4 + (red - green) / unit),
    )
    # As a function of hue, each channel is one trapezoid, moved by a third of the circle.
    offset = torch.arange(5, 0, -2, device=x.device).reshape(1, 3, 1, 1)
    position = (sector + 6 * shift[:, None, None, None] + offset) % 6
    return high - chroma * torch.minimum(position, 4 - position).clamp(0, 1)


def _warp(x: Tensor, shift: Tensor, factor: Tensor, rotation: Tensor, shear: Tensor) -> Tensor:
    """Warp by ``p -> factor R(rotation) S(shear) p + shift * (W, H)``, in pixels (column, row) from the centre."""
    ratio = x.shape[2] / x.shape[3]
    cos, sin, tan = torch.cos(torch.deg2rad(rotation)), torch.sin(torch.deg2rad(rotation)), torch.deg2rad(shear).tan()
    # Where a pixel comes from: the inverse, in coordinates from -1 to 1 along each axis.
    a, b = (cos - tan * sin) / factor, (sin + tan * cos) / factor * ratio
    c, d = -sin / factor / ratio, cos / factor
    u, v = (2 * shift).unbind(1)
    inverse = torch.stack([a, b, -a * u - b * v, c, d, -c * u - d * v], 1).reshape(-1, 2, 3)
    grid = F.affine_grid(inverse, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _covered(x: Tensor, rows: Tensor, columns: Tensor, holes: Tensor, length: Tensor) -> Tensor:
    """Which pixels are in one of the squares around ``(rows, columns)``, shape ``(B, 1, H, W)``."""
    half = length.round()[:, None, None] / 2

    def near(centres: Tensor, size: int) -> Tensor:
        distance = torch.arange(size, device=x.device) - centres[:, :, None]
        return (distance >= -half) & (distance < half)

    used = torch.arange(rows.shape[1], device=x.device) < holes.round()[:, None]
    vertical = near(rows, x.shape[2]) & used[:, :, None]
    return (vertical[:, :, :, None] & near(columns, x.shape[3])[:, :, None, :]).any(1, keepdim=True)
