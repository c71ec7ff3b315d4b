"""Networks that compute their loss themselves: which loss of their logits it is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bilevel.functional import mse_loss
from bilevel.tuning.criteria import Criterion, criterion_of, cross_entropy, first_tensor

CLOSE = 1e-3


def own_criterion(net: nn.Module, inputs: Any, target: Any) -> tuple[Criterion, bool]:
    """Find out which loss a network computes of its logits and labels.

    The network returns its loss, and its logits beside it. Methods that linearise predictions need the logits, and
    penalties per example need a loss per example. So the usual losses are tried on the logits, and the one with the
    same value is taken: cross entropy of classes, of the next word, of several labels, or a squared error.

    Args:
        net: Called once in eval mode, without gradients.
        inputs: Keyword arguments.
        target: The labels.

    Returns:
        The criterion, and whether the network must be given the labels to compute its logits.

    Raises:
        ValueError: If the network returns no loss, or none of these.
    """
    if not isinstance(inputs, Mapping):
        raise ValueError(
            "tune: without loss= the network has to compute it, which takes batches with names, as those of a "
            "tokenizer; pass loss=F.cross_entropy, for example."
        )
    with torch.no_grad():
        output = net(**inputs, labels=target)
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(value, Tensor) or value.ndim:
            raise ValueError(
                f"tune: the network returned a {type(output).__name__} without a loss: pass loss=F.cross_entropy, for "
                "example."
            )
        logits = first_tensor(output)
        for criterion in _candidates():
            try:
                found = criterion(logits, target).mean()
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            if bool((found - value).abs() <= CLOSE * value.abs().clamp_min(CLOSE)):
                return criterion, _needs_labels(net, inputs, logits)
    raise ValueError(
        f"tune: the loss that {type(net).__name__} computes is none of the usual ones of its logits: pass "
        "loss=lambda output, target: ..., where output is what the network returns."
    )


def without_cache(net: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Tell networks that can keep keys and values for later words that there are none.

    Returns:
        The inputs, with ``use_cache=False`` if ``forward`` has that argument.
    """
    known = "use_cache" in inspect.signature(net.forward).parameters
    return {"use_cache": False, **inputs} if known else {**inputs}


def _candidates() -> list[Criterion]:
    return [
        criterion_of(F.cross_entropy),
        Criterion("cross entropy of the next word", next_word, smooths=True),
        Criterion("squared error", squared_error),
        criterion_of(F.binary_cross_entropy_with_logits),
    ]


def next_word(output: Any, target: Tensor, *, label_smoothing: Tensor | float = 0.0) -> Tensor:
    """The cross entropy of each word, predicted from those before.

    Args:
        output: Logits of shape ``(B, T, C)``.
        target: Words, shape ``(B, T)``; -100 is left out.
        label_smoothing: As in cross entropy.

    Returns:
        One value per example.
    """
    logits = first_tensor(output)
    return cross_entropy(logits[:, :-1].movedim(-1, 1), target[:, 1:], label_smoothing=label_smoothing)


def squared_error(output: Any, target: Tensor) -> Tensor:
    """The squared error, also of logits of shape ``(B, 1)`` and targets of shape ``(B,)``.

    Args:
        output: Predictions.
        target: As many numbers.

    Returns:
        One value per example.
    """
    return mse_loss(first_tensor(output).reshape(target.shape), target)


def _needs_labels(net: nn.Module, inputs: Mapping[str, Any], logits: Tensor) -> bool:
    try:
        alone = first_tensor(net(**inputs))
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return True
    return alone.shape != logits.shape or not torch.allclose(alone, logits, atol=1e-4)
