"""Image classification (``exp-image-class``): five networks on three data sets, dropout and data augmentation tuned.

Images are augmented in the training loss, each with its own strengths, then standardised with the mean and standard
deviation of the training images. Where the published code and the paper differ, these are the paper's ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel
from applications import data as datasets
from applications.models import MLP, VGG16, AlexNet, ResNet18, SimpleCNN
from applications.task import Batches, Experiment, Settings, Task, initial, option, outer_optimizer, starting

AUGMENTATIONS: Mapping[str, tuple[float, float]] = {
    "translation": (0.0, 0.5),
    "scale": (0.0, 0.5),
    "rotation": (0.0, 45.0),
    "shear": (0.0, 45.0),
    "brightness": (0.0, 1.0),
    "contrast": (0.0, 1.0),
    "saturation": (0.0, 1.0),
    "hue": (0.0, 0.5),
}
CUTOUT: Mapping[str, tuple[float, float]] = {"holes": (0, 4), "length": (0.0, 24.0)}
START = {"holes": 1, "length": 4.0}
DROPOUT, SEARCHED_DROPOUT = (0.0, 0.95), (0.0, 0.85)
EVALUATION_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Settings):
    """Settings of the image tasks."""

    width: float = option(
        1.0, "units of a hidden layer (mnist), or factor for the channels of the paper's network", above=0
    )
    momentum: float = option(0.9, "of the inner optimizer", least=0, below=1)
    decay_after: int | None = option(
        None, "epochs after each of which the learning rate drops to a fifth; none keeps it", least=1
    )
    valid_share: float = option(0.15, "share of the training images held out for validation", above=0, below=1)
    only_input: bool = option(False, "tune no dropout but that of the input; the others are off")


@final
class ImageTask(Task):
    """Classify images while their augmentation and the dropout of the network are tuned."""

    def __init__(
        self,
        name: str,
        summary: str,
        dataset: str,
        network: Callable[[float], nn.Module],
        rates: int,
        ranges: Mapping[str, tuple[float, float]],
        presets: Mapping[str, ImageSettings],
    ) -> None:
        """Describe a task: ``rates`` counts the dropouts, ``ranges`` holds the other hyperparameters."""
        self.name, self.summary, self.datasets, self.presets = name, summary, (dataset,), presets
        self._network, self._rates, self._ranges = network, rates, ranges

    def build(
        self,
        settings: Any,
        *,
        data: Path | None,
        folder: Path | None,
        seed: int,
        device: torch.device,
        init: Mapping[str, Any],
    ) -> Experiment:
        """See :meth:`applications.task.Task.build`."""
        hyper = self._hyper(init, only_input=settings.only_input)
        (dataset,) = self.datasets
        images = datasets.synthetic_images(dataset) if data is None else datasets.images(dataset, data)
        saved = None if folder is None else folder / "split.json"
        train, valid = datasets.split(len(images.train_y), settings.valid_share, seed, saved, limit=settings.limit)
        mean, std = _moments(images.train_x[train])
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            net = self._network(settings.width).to(device)
        loss = partial(_loss, mean.to(device), std.to(device), self._rates)
        problem = bilevel.Problem(
            net,
            inner_loss=partial(loss, training=True),
            outer_loss=partial(loss, training=False),
            hyper=hyper,
        )

        def batches(x: Tensor, y: Tensor, size: int, *, shuffle: bool = True) -> Batches:
            return Batches([x.to(device), y.to(device)], size, shuffle=shuffle)

        decay = settings.decay_after
        schedule = None if decay is None else partial(torch.optim.lr_scheduler.StepLR, step_size=decay, gamma=0.2)
        return Experiment(
            problem=problem,
            net=net,
            outer_loss=partial(loss, training=False),
            train=batches(images.train_x[train], images.train_y[train], settings.batch_size),
            valid=batches(images.train_x[valid], images.train_y[valid], settings.batch_size),
            test=batches(images.test_x, images.test_y, EVALUATION_BATCH, shuffle=False),
            solve={
                "inner_optimizer": partial(torch.optim.SGD, lr=settings.learning_rate, momentum=settings.momentum),
                "outer_optimizer": outer_optimizer(torch.optim.RMSprop, settings),
                "inner_scheduler": schedule,
            },
            search={"dropout": SEARCHED_DROPOUT, **self._ranges},
        )

    def _hyper(self, init: Mapping[str, Any], *, only_input: bool) -> dict[str, bilevel.Hyper]:
        known = ("dropout", *self._ranges)
        unknown = [name for name in init if name not in known]
        if unknown:
            raise ValueError(f"--init {unknown[0]}: {self.name} has no such hyperparameter, but {', '.join(known)}.")
        count = 1 if only_input else self._rates
        rates = torch.as_tensor(initial(init, "dropout", 0.05, count), dtype=torch.float64).expand(count)
        hyper = {"dropout": starting("dropout", bilevel.interval, *DROPOUT, init=rates)}
        for name, (low, high) in self._ranges.items():
            kind = bilevel.integer if name == "holes" else bilevel.interval
            hyper[name] = starting(name, kind, low, high, init=initial(init, name, START.get(name, 0.05)))
        return hyper


def _loss(
    mean: Tensor,
    std: Tensor,
    rates: int,
    model: bilevel.Model,
    hyper: Mapping[str, Tensor],
    batch: tuple[Tensor, Tensor],
    *,
    training: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of augmented images for training, of plain ones otherwise; and the accuracy."""
    x, y = batch
    x = x.to(mean) / 255
    if training:
        x = bilevel.augment.apply(x, {name: value for name, value in hyper.items() if name != "dropout"}, fill=mean)
    dropout = hyper["dropout"]
    dropout = F.pad(dropout, (0, rates - dropout.shape[-1]))  # if only that of the input is tuned
    logits = model((x - mean) / std, dropout)
    return F.cross_entropy(logits, y), {"accuracy": (logits.detach().argmax(1) == y).to(x.dtype).mean()}


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel, in the range from 0 to 1."""
    counts = torch.stack([torch.bincount(channel.flatten().int(), minlength=256) for channel in x.transpose(0, 1)])
    values = torch.arange(256, dtype=torch.float64) / 255
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = weights @ values
    std = (weights @ values**2 - mean**2).sqrt()
    return mean.float().reshape(-1, 1, 1), std.float().reshape(-1, 1, 1)


_MNIST = ImageSettings(epochs=300, width=1200, entropy=1e-3)
_CIFAR = ImageSettings(epochs=200, decay_after=60, valid_share=0.2)
_QUICK: dict[str, Any] = {"epochs": 5, "warmup": 1, "limit": 10_000}


def _presets(paper: ImageSettings, **quick: Any) -> dict[str, ImageSettings]:
    return {"paper": paper, "quick": dataclasses.replace(paper, **_QUICK, **quick)}


def _cifar(
    name: str, network: Any, rates: int, paper: ImageSettings, width: float, stn: ImageSettings | None = None
) -> ImageTask:
    count = rates + len(AUGMENTATIONS) + len(CUTOUT)
    presets = _presets(paper, width=width)
    if stn is not None:
        presets |= {f"{preset}_stn": settings for preset, settings in _presets(stn, width=width).items()}
    summary = f"{network.__name__} on CIFAR-10, {count} hyperparameters"
    ranges = {**AUGMENTATIONS, **CUTOUT}
    return ImageTask(name, summary, "cifar10", lambda factor: network(width=factor), rates, ranges, presets)


TASKS = (
    ImageTask(
        "mnist",
        "MLP on MNIST, 3 dropout rates",
        "mnist",
        lambda width: MLP(width=max(1, round(width))),
        3,
        {},
        {
            **_presets(_MNIST, width=200),
            "width400": dataclasses.replace(_MNIST, width=400, epochs=100),
        },
    ),
    ImageTask(
        "fashion",
        "SimpleCNN on FashionMNIST, 6 hyperparameters with Cutout",
        "fashion_mnist",
        lambda width: SimpleCNN(channels=(max(1, round(16 * width)), max(1, round(32 * width)))),
        4,
        CUTOUT,
        _presets(dataclasses.replace(_MNIST, width=1.0), width=0.5),
    ),
    _cifar("alexnet", AlexNet, 8, dataclasses.replace(_CIFAR, learning_rate=0.03, entropy=1e-3), 0.25),
    _cifar(
        "vgg16",
        VGG16,
        16,
        dataclasses.replace(_CIFAR, learning_rate=0.01, entropy=1e-4),
        0.125,
        stn=dataclasses.replace(_CIFAR, learning_rate=0.01, entropy=1e-3),
    ),
    _cifar("resnet18", ResNet18, 9, dataclasses.replace(_CIFAR, learning_rate=0.05, entropy=1e-4), 0.125),
)
