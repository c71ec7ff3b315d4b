"""The arguments of :func:`tune` that say what to tune."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bilevel.augment import Images
from bilevel.dropouts import dropout_rates
from bilevel.hyper import Hyper
from bilevel.regularizers import CutMix, InputNoise, LabelSmoothing, Mixture, Mixup, Regularizer, WeightDecay


def weight_decay_of(net: nn.Module, value: Any) -> list[Regularizer]:
    """What ``weight_decay=`` means.

    Returns:
        A penalty, or decoupled decay, or nothing.

    Raises:
        TypeError: If the value has another type.
    """
    if value is None or value is False:
        return []
    if isinstance(value, WeightDecay):
        return [value]
    if value is True:
        return [WeightDecay(net)]
    if isinstance(value, int | float):
        _check_start("weight_decay", value, math.inf)
        return [WeightDecay(net, init=float(value))]
    if value == "decoupled":
        return [WeightDecay(net, decoupled=True)]
    if value in ("layer", "tensor", "one") or isinstance(value, Mapping):
        return [WeightDecay(net, value)]
    raise TypeError(
        "tune: weight_decay must be True, False, 'layer', 'tensor', 'one', 'decoupled', a mapping from names to "
        "patterns, a number to start from, or a bilevel.regularizers.WeightDecay; got "
        f"{type(value).__name__}: {value!r}."
    )


def regularizer_of(name: str, kind: Any, value: Any, **settings: Any) -> list[Regularizer]:
    """What ``label_smoothing=``, ``mixup=``, ``cutmix=`` and ``input_noise=`` mean.

    Args:
        name: Of the argument.
        kind: Of the regularizer.
        value: True, False, a number to start from, or a regularizer.
        settings: Of the regularizer, for True.

    Returns:
        A regularizer, or nothing.

    Raises:
        TypeError: If the value has another type.
    """
    if value is None or value is False:
        return []
    if isinstance(value, kind):
        return [value]
    if value is True:
        return [kind(**settings)]
    if isinstance(value, int | float):
        _check_start(name, value, LARGEST.get(name, math.inf))
        return [kind(init=float(value))]
    raise TypeError(
        f"tune: {name} must be True, False, a number to start from, or a bilevel.regularizers.{kind.__name__}; got "
        f"{type(value).__name__}: {value!r}."
    )


def _check_start(name: str, value: float, high: float) -> None:
    if not 0 < value < high:
        bound = "a positive number" if high == math.inf else f"a number between 0 and {high:g}"
        raise ValueError(
            f"tune: {name} as a number is where the tuning starts, {bound}, got {value:g}. {name}=False switches it "
            "off."
        )


def augment_of(value: Any, inputs: Any) -> list[Regularizer]:
    """What ``augment=`` means.

    Args:
        value: None, or a regularizer; of images, the inputs are checked.
        inputs: Of the first batch.

    Returns:
        A regularizer, or nothing.

    Raises:
        TypeError: If it is none.
    """
    if value is None or value is False:
        return []
    if not isinstance(value, Regularizer):
        raise TypeError(
            "tune: augment must be bilevel.augment.images(...) or another regularizer, got "
            f"{type(value).__name__}: {value!r}."
        )
    if isinstance(value, Images):
        value.check(Mixture.of(inputs, None).tensor)
    return [value]


def dropout_of(net: nn.Module, inputs: Any, value: Any, *, possible: bool) -> dict[str, Hyper]:
    """What ``dropout=`` means.

    Args:
        net: The network.
        inputs: Of the first batch, with which it runs once.
        value: None (where there is some, and the method can tune it), True, False, or groups.
        possible: Whether the method can tune it.

    Returns:
        Hyperparameters.

    Raises:
        TypeError: If the value has another type.
        ValueError: If there is no dropout, and the value asks for it.
    """
    if value is False:
        return {}
    if value is None and not possible:
        return {}
    if value is not None and value is not True and not isinstance(value, str | Mapping):
        raise TypeError(
            "tune: dropout must be True, False, 'layer', 'one', a mapping from names to patterns, or None; got "
            f"{type(value).__name__}: {value!r}."
        )
    if isinstance(value, str) and value not in ("layer", "one"):
        raise ValueError(
            "tune: dropout must be True, False, 'layer', 'one', a mapping from names to patterns, or None; got "
            f"{value!r}."
        )
    groups = "layer" if value is None or value is True else value
    sample = (inputs,) if isinstance(inputs, Tensor) else inputs
    try:
        return dropout_rates(net, sample, groups=groups)
    except ValueError as error:
        if value is None and "has no dropout" in str(error):
            return {}
        raise


def collect(regularizers: Sequence[Regularizer], dropout: Mapping[str, Hyper]) -> dict[str, Hyper]:
    """Put all hyperparameters together.

    Returns:
        By name.

    Raises:
        ValueError: If there are none, or two have one name.
    """
    hyper = dict(dropout)
    for regularizer in regularizers:
        for name, entry in regularizer.hyper.items():
            if name in hyper:
                raise ValueError(f"tune: there are two hyperparameters {name!r}: give each regularizer once.")
            hyper[name] = entry
    if not hyper:
        raise ValueError(
            "tune: there is nothing to tune: the network has no dropout, and all else is off. Pass "
            "weight_decay='layer', label_smoothing=True, mixup=True, input_noise=True or "
            "augment=bilevel.augment.images()."
        )
    return hyper


LARGEST = {"label_smoothing": LabelSmoothing.high, "mixup": 1.0, "cutmix": 1.0}
SIMPLE = {"label_smoothing": LabelSmoothing, "mixup": Mixup, "cutmix": CutMix, "input_noise": InputNoise}
"""Arguments that are on or off."""
