"""The networks of the paper's image experiments (``exp-image-class``), with their dropout rates as inputs.

All are called as ``net(x, rates)``. The first rate is that of the input, the others follow the layers; the last
dimension of ``rates`` counts them, and a first one, if there is, the examples. Networks for CIFAR-10 have a factor
``width`` for their channels, so that a small one runs anywhere.
"""

from __future__ import annotations

from itertools import pairwise
from typing import final

from torch import Tensor, nn

import bilevel


class Stages(nn.Module):
    """Modules in a row, each behind a dropout of its own.

    Attributes:
        stages: The modules; there are as many dropout rates.
    """

    def __init__(self, *stages: nn.Module) -> None:
        """Put the stages together."""
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor, rates: Tensor) -> Tensor:
        """Predict logits.

        Args:
            x: Images.
            rates: One dropout rate for each stage, shape ``(n,)``; or for each example, too, ``(B, n)``.

        Returns:
            Shape ``(B, classes)``.

        Raises:
            ValueError: If there is not one rate for each stage.
        """
        if rates.ndim not in (1, 2) or rates.shape[-1] != len(self.stages):
            raise ValueError(
                f"rates must have shape ({len(self.stages)},) or ({len(x)}, {len(self.stages)}), the input's first; "
                f"got {tuple(rates.shape)}."
            )
        for index, stage in enumerate(self.stages):
            x = stage(bilevel.functional.dropout(x, rates[..., index], training=self.training))
        return x


@final
class MLP(Stages):
    """Three hidden layers; dropout of the input and of the first two of them."""

    def __init__(self, *, width: int = 1200, inputs: int = 784, classes: int = 10) -> None:
        """Draw the weights."""
        super().__init__(
            nn.Sequential(nn.Flatten(), *_dense(inputs, width)),
            nn.Sequential(*_dense(width, width)),
            nn.Sequential(*_dense(width, width), nn.Linear(width, classes)),
        )


@final
class SimpleCNN(Stages):
    """Two convolutions and two linear layers, for 28 × 28 images; dropout before each of them."""

    def __init__(self, *, channels: tuple[int, int] = (16, 32), inputs: int = 1, classes: int = 10) -> None:
        """Draw the weights; ``inputs`` is the number of channels of an image."""
        first, second = channels
        features = second * 7 * 7
        super().__init__(
            nn.Sequential(nn.Conv2d(inputs, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), *_dense(features, features)),
            nn.Linear(features, classes),
        )


@final
class AlexNet(Stages):
    """AlexNet for 32 × 32 images: five convolutions and three linear layers; dropout before each of them."""

    def __init__(self, *, width: float = 1.0, classes: int = 10) -> None:
        """Draw the weights."""
        channels = [3, *(_scaled(size, width) for size in (64, 192, 384, 256, 256))]
        hidden = _scaled(4096, width)
        convolutions = [
            nn.Sequential(
                nn.Conv2d(*sizes, 3, stride=1 if index else 2, padding=1),
                nn.ReLU(),
                *([nn.MaxPool2d(2)] if index in (0, 1, 4) else []),
            )
            for index, sizes in enumerate(pairwise(channels))
        ]
        super().__init__(
            *convolutions,
            nn.Sequential(nn.Flatten(), *_dense(channels[-1] * 2 * 2, hidden)),
            nn.Sequential(*_dense(hidden, hidden)),
            nn.Linear(hidden, classes),
        )


@final
class VGG16(Stages):
    """VGG16 with batch norm for 32 × 32 images: 13 convolutions and 3 linear layers; dropout before each of them."""

    def __init__(self, *, width: float = 1.0, classes: int = 10) -> None:
        """Draw the weights."""
        convolutions: list[nn.Module] = []
        last = 3
        for size, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for index in range(count):
                channels = _scaled(size, width)
                convolutions.append(
                    nn.Sequential(
                        nn.Conv2d(last, channels, 3, padding=1),
                        nn.BatchNorm2d(channels),
                        nn.ReLU(),
                        *([nn.MaxPool2d(2)] if index == count - 1 else []),
                    )
                )
                last = channels
        super().__init__(
            *convolutions,
            nn.Sequential(nn.Flatten(), *_dense(last, last)),
            nn.Sequential(*_dense(last, last)),
            nn.Linear(last, classes),
        )


@final
class ResNet18(Stages):
    """ResNet18 for 32 × 32 images: eight blocks; dropout of the input and after each block."""

    def __init__(self, *, width: float = 1.0, classes: int = 10) -> None:
        """Draw the weights."""
        channels = [_scaled(size, width) for size in (64, 64, 64, 128, 128, 256, 256, 512, 512)]
        blocks = [
            _Block(*sizes, stride=2 if index in (2, 4, 6) else 1) for index, sizes in enumerate(pairwise(channels))
        ]
        stem = nn.Sequential(
            nn.Conv2d(3, channels[0], 3, padding=1, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU()
        )
        super().__init__(
            nn.Sequential(stem, blocks[0]),
            *blocks[1:],
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], classes)),
        )


@final
class _Block(nn.Module):
    """Two convolutions and a shortcut, which is a convolution of size one where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.shortcut(x) + self.residual(x)).relu()
        return y


def _dense(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(inputs, outputs), nn.ReLU()


def _scaled(size: int, width: float) -> int:
    return max(1, round(size * width))
