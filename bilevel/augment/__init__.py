"""Random changes of images, with a strength for each example: functions, and :func:`images` for :func:`bilevel.tune`.

Every function takes images of shape ``(B, C, H, W)`` and strengths that are scalars or have shape ``(B,)``. It works on
the device of the images and waits for nothing there. Strengths are detached: how an image changes has no useful
derivative in them, so that only ``stn``, ``centered_stn`` and ``delta_stn`` can tune them.
"""

from bilevel.augment.changes import (
    affine,
    apply,
    brightness,
    contrast,
    cutout,
    flip,
    hue,
    noise,
    saturation,
)
from bilevel.augment.images import Images, images

__all__ = [
    "Images",
    "affine",
    "apply",
    "brightness",
    "contrast",
    "cutout",
    "flip",
    "hue",
    "images",
    "noise",
    "saturation",
]
