"""Losses of predictions with one value per example, made of those that people have."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bilevel.functional.examples import align


@final
class Criterion:
    """A loss ``(output, target)`` with one value per example where that can be had.

    The mean of the values is the loss that was given, to rounding.

    Attributes:
        name: Of the loss.
        smooths: Whether it takes ``label_smoothing``.
        splits: Whether it has one value per example; else it returns what it was given.
        smoothing: The label smoothing that the user has set.
    """

    def __init__(
        self,
        name: str,
        values: Callable[..., Tensor],
        *,
        smooths: bool = False,
        splits: bool = True,
        smoothing: float = 0,
    ) -> None:
        """Keep the parts."""
        self.name, self.smooths, self.splits, self.smoothing = name, smooths, splits, smoothing
        self._values = values

    def __call__(self, output: Any, target: Any, *, label_smoothing: Tensor | float | None = None) -> Tensor:
        """The loss.

        Args:
            output: Of the network.
            target: Of the batch.
            label_smoothing: A number, or a tensor of shape ``()`` or ``(B,)``; what the user has set by default.

        Returns:
            One value per example, or a scalar.
        """
        if not self.smooths:
            return self._values(output, target)
        smoothing = self.smoothing if label_smoothing is None else label_smoothing
        return self._values(output, target, label_smoothing=smoothing)


def criterion_of(loss: Any) -> Criterion:
    """Make a criterion of a loss of PyTorch, or of any function ``(output, target) -> Tensor``.

    ``F.cross_entropy``, ``F.nll_loss`` and their modules are known by name. What has a ``reduction`` is called with
    ``"none"``. Anything else is called as it is.

    Args:
        loss: A function, a module, or a ``functools.partial`` of one.

    Returns:
        The criterion.

    Raises:
        TypeError: If the loss cannot be called.

    Example:
        >>> logits, y = torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
        >>> criterion_of(F.cross_entropy)(logits, y)
        tensor([0.6931, 0.1269])
        >>> criterion_of(nn.MSELoss())(logits, torch.zeros(2, 2))
        tensor([0., 2.])
    """
    if isinstance(loss, type):
        raise TypeError(f"tune: loss is the class {loss.__name__}: pass an instance, {loss.__name__}().")
    if not callable(loss):
        raise TypeError(f"tune: loss must be a function (output, target) -> Tensor, got {type(loss).__name__}.")
    if isinstance(loss, nn.CrossEntropyLoss):
        settings = {"weight": loss.weight, "ignore_index": loss.ignore_index, "reduction": loss.reduction}
        return _cross_entropy(settings, loss.label_smoothing)
    if isinstance(loss, nn.NLLLoss):
        # The cross entropy of log-probabilities, whose softmax is the identity; with the curvature that Δ-STN needs.
        settings = {"weight": loss.weight, "ignore_index": loss.ignore_index, "reduction": loss.reduction}
        return _cross_entropy(settings, 0.0, "nll_loss")
    given: dict[str, Any] = {}
    function = loss
    if isinstance(loss, partial) and not loss.args:
        function, given = loss.func, dict(loss.keywords)
    if function is F.cross_entropy:
        return _cross_entropy(given, given.pop("label_smoothing", 0.0))
    if function is F.nll_loss:
        return _cross_entropy(given, 0.0, "nll_loss")
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, nn.Module):
        reduction = getattr(function, "reduction", None)
        single: Any = copy.copy(function)
        single.reduction = "none"
    else:
        reduction = given.get("reduction", _default_reduction(function))
        single = partial(loss, reduction="none")
    if reduction not in ("mean", "sum"):
        return Criterion(name, _as_it_is(loss), splits=False)
    of_torch = str(getattr(function, "__module__", "")).startswith("torch.nn.")
    return Criterion(name, partial(_split, single, loss, reduction, of_torch))


def verified(criterion: Criterion, loss: Any, output: Any, target: Any) -> Criterion:
    """Compare a criterion with the loss that it was made of, on one batch.

    Args:
        criterion: Made by :func:`criterion_of`.
        loss: Of which it was made.
        output: Of the network.
        target: Of the batch.

    Returns:
        The criterion; or one that calls the loss as it is, if its values have another mean.
    """
    found = criterion(output, target).mean()
    try:
        expected = loss(first_tensor(output) if criterion.smooths else output, target)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return criterion  # as with logits of shape (B, ..., C), which only the criterion takes
    if not isinstance(expected, Tensor) or expected.ndim:
        return criterion
    if bool((found - expected).abs() <= 1e-3 * expected.abs().clamp_min(1e-3)):
        return criterion
    return Criterion(criterion.name, _as_it_is(loss), splits=False)


def _cross_entropy(settings: Mapping[str, Any], smoothing: float, name: str = "cross_entropy") -> Criterion:
    known = {"weight", "ignore_index", "reduction"}
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ValueError(f"tune: loss has the argument {unknown[0]!r} of F.{name}, which is not supported.")
    settings = {"weight": None, "ignore_index": -100, "reduction": "mean", **settings}
    return Criterion(name, partial(cross_entropy, **settings), smooths=True, smoothing=smoothing)


def cross_entropy(
    output: Any,
    target: Tensor,
    *,
    label_smoothing: Tensor | float = 0.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""``F.cross_entropy`` with one value per example, whose mean it is to rounding.

    .. math:: \ell_i = \frac{B}{N} \sum_j \bigl[(1 - s_i)\, w_{y_{ij}} (-\log p_{ij y_{ij}})
        - \frac{s_i}{C} \sum_c w_c \log p_{ijc}\bigr]

    with :math:`N = \sum_{ij} w_{y_{ij}}` over the positions that are not ignored. N has the targets in it and no
    prediction and no hyperparameter, so that examples stay apart.

    Args:
        output: Logits, shape ``(B, C, ...)``; or ``(B, ..., C)``, if only that fits the target.
        target: Classes, or their probabilities.
        label_smoothing: s, shape ``()`` or ``(B,)``.
        weight: w, one per class.
        ignore_index: Positions of this class are left out.
        reduction: ``"mean"``, or ``"sum"``, for which N is one.

    Returns:
        Shape ``(B,)``.

    Raises:
        ValueError: If the logits have no dimension of classes.

    Example:
        >>> logits, y = torch.randn(3, 4, 5), torch.tensor([[0, 1], [1, 2], [3, -100]]).repeat(1, 3)[:, :5]
        >>> torch.allclose(cross_entropy(logits, y).mean(), F.cross_entropy(logits, y))
        True
    """
    logits = first_tensor(output)
    if logits.ndim < 2:
        raise ValueError(f"tune: cross entropy needs logits of shape (B, C, ...), got {tuple(logits.shape)}.")
    if not target.is_floating_point() and target.shape != (*logits.shape[:1], *logits.shape[2:]):
        if target.shape == logits.shape[:-1]:
            logits = logits.movedim(-1, 1)
    classes = not target.is_floating_point()
    kept = (target != ignore_index) if classes else None
    if torch.is_autocast_enabled(logits.device.type):  # which takes the cross entropy in single precision
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = F.log_softmax(logits, 1)
    if classes:
        values = F.nll_loss(log_p, target, weight=weight, ignore_index=ignore_index, reduction="none")
    else:
        values = F.cross_entropy(logits, target, weight=weight, reduction="none")
    if isinstance(label_smoothing, Tensor) or label_smoothing != 0:
        if weight is not None:
            log_p = log_p * weight.to(log_p).reshape(-1, *[1] * (log_p.ndim - 2))
        even = log_p.mean(1)
        even = even if kept is None else torch.where(kept, even, 0.0)
        s = align("label_smoothing", label_smoothing, values)
        values = values - s * (values + even)
    total = (values if values.ndim == 1 else values.flatten(1).sum(1)) * len(values)
    if reduction == "sum":
        return total
    if kept is None:
        return total / values.numel()
    if weight is None:
        return total / kept.sum().clamp_min(1)
    weights = torch.where(kept, weight.to(values)[torch.where(kept, target, 0)], 0.0)
    return total / weights.sum().clamp_min(torch.finfo(values.dtype).tiny)


def first_tensor(output: Any) -> Tensor:
    """The logits of what a network returned: a tensor, the first of a tuple, or the entry ``logits``.

    Returns:
        A tensor.

    Raises:
        TypeError: If there is none.
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if logits is None and isinstance(output, tuple | list) and output:
        logits = output[0]
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(
        f"tune: the network returned a {type(output).__name__}, in which there is no tensor of logits: pass "
        "loss=lambda output, target: ... that takes what it needs."
    )


def _split(
    single: Callable[..., Tensor], whole: Callable[..., Tensor], reduction: str, of_torch: bool, output: Any, y: Any
) -> Tensor:
    """One value per example, if entries can be told apart by their first dimension."""
    if of_torch:
        output = first_tensor(output)
        if isinstance(y, Tensor) and y.is_floating_point() and y.shape != output.shape and y.numel() == output.numel():
            raise ValueError(
                f"tune: the network returns the shape {tuple(output.shape)}, and the target has {tuple(y.shape)}; "
                "PyTorch would compare each with each. Use squeeze(-1) in the network or unsqueeze(-1) for the target, "
                "for instance by unpack=lambda batch: (batch[0], batch[1].unsqueeze(-1))."
            )
    values = single(output, y)
    examples = len(y) if isinstance(y, Tensor) and y.ndim else -1
    if not values.ndim or len(values) != examples:
        return whole(output, y)
    values = values.unsqueeze(-1).flatten(1)
    return values.mean(1) if reduction == "mean" else values.sum(1) * len(values)


def _as_it_is(loss: Callable[..., Any]) -> Callable[[Any, Any], Tensor]:
    """Call it; a partial, so that whoever looks into the criterion sees the loss."""
    return partial(_called, loss)


def _called(loss: Callable[..., Any], output: Any, target: Any) -> Tensor:
    value = loss(output, target)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"tune: loss must return a tensor, got {type(value).__name__}: {value!r}. Leave out .item() and float()."
        )
    return value


def _default_reduction(function: Any) -> object:
    try:
        parameter = inspect.signature(function).parameters.get("reduction")
    except (TypeError, ValueError):
        return None
    return None if parameter is None else parameter.default
