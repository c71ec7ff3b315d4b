"""Our augmentations beside those of kornia, with one strength per image: the median of interleaved CPU times.

pip install kornia
python benchmarks/augment.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import kornia
import torch
from torch import Tensor

from bilevel.augment import changes


def main() -> None:
    """Time 128 images of 32 by 32 pixels, and compare the results where both compute the same."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.rand(128, 3, 32, 32)
    factor, shift, degrees = 0.5 + torch.rand(128), torch.rand(128) - 0.5, 60 * torch.rand(128) - 30
    one, zero = torch.ones(128), torch.zeros(128)
    centre = torch.full((128, 2), 15.5)
    matrix = kornia.geometry.get_rotation_matrix2d(centre, -degrees, torch.ones(128, 2))
    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "brightness": (
            lambda: changes._blend(x, x.new_zeros(()), factor),
            lambda: kornia.enhance.adjust_brightness_accumulative(x, factor),
        ),
        "saturation": (
            lambda: changes._blend(x, changes._grey(x), factor),
            lambda: kornia.enhance.adjust_saturation_with_gray_subtraction(x, factor),
        ),
        "hue": (
            lambda: changes._shift_hue(x, shift),
            lambda: kornia.enhance.adjust_hue(x, 2 * torch.pi * shift),
        ),
        "rotation": (
            lambda: changes._warp(x, torch.zeros(128, 2), one, degrees, zero),
            lambda: kornia.geometry.warp_affine(x, matrix, (32, 32), align_corners=False),
        ),
    }
    print(f"{'':12}{'ours, ms':>10}{'kornia, ms':>12}{'ratio':>8}{'difference':>12}")
    for name, functions in pairs.items():
        times: list[tuple[float, ...]] = []
        for _ in range(15):
            row = []
            for function in functions:
                start = time.process_time()
                function()
                row.append(time.process_time() - start)
            times.append(tuple(row))
        ours, theirs = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        gap = float((functions[0]() - functions[1]()).abs().max())
        print(f"{name:12}{ours:>10.2f}{theirs:>12.2f}{theirs / ours:>8.2f}{gap:>12.1e}")


if __name__ == "__main__":
    main()
