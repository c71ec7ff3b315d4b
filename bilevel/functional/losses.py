"""Losses with one value per example, which a hyperparameter with one value per example may scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bilevel.functional.examples import align

IGNORED = -100


def cross_entropy(
    logits: Tensor,
    y: Tensor,
    *,
    label_smoothing: Tensor | float = 0.0,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
) -> Tensor:
    r"""The cross entropy of each example; label smoothing and class weights may be hyperparameters.

    .. math:: \ell_i = -\frac{1}{J_i} \sum_j \sum_c w_{ic}\, \tilde q_{ijc} \log p_{ijc},
        \qquad \tilde q_{ijc} = (1 - s_i)\, q_{ijc} + \frac{s_i}{C}

    The probabilities :math:`p` are the softmax of the logits. Example :math:`i` has :math:`J_i` positions :math:`j`:
    one, or as many pixels or words as are not ignored. The target :math:`q` is one at the class ``y``, or is ``y``
    itself.

    The mean over examples is that of ``F.cross_entropy``, except where that divides by a sum over the batch, by which
    one example would act on the others:

    * Class weights are not divided by the sum of the weights of all targets. Give them a mean of one over the training
      labels, and the loss has the same size: :math:`\sum_c w_c\, n_c / n = 1` for :math:`n_c` labels of class c.
    * Each example counts the same, however many of its positions are ignored. With none left, its loss is zero.

    Args:
        logits: Of shape ``(B, C)``, or ``(B, C, ...)`` for several positions.
        y: Classes, shape ``(B, ...)``; or their probabilities, shape ``(B, C, ...)``, floating point.
        label_smoothing: :math:`s` in [0, 1], the part of the target that goes to all classes alike. A scalar, or one
            value per example, shape ``(B,)``.
        weight: :math:`w`, one value per class, shape ``(C,)``, or per example and class, shape ``(B, C)``. To weight
            whole examples, multiply the result.
        ignore_index: Positions of this class are left out.

    Returns:
        One value per example, shape ``(B,)``, in at least single precision.

    Example:
        >>> logits, y = torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
        >>> cross_entropy(logits, y)
        tensor([0.6931, 0.1269])
        >>> cross_entropy(logits, y, label_smoothing=torch.tensor([0.0, 0.5]))
        tensor([0.6931, 0.6269])
    """
    _check_targets(logits, y, ignore_index)
    log_p = F.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    w = _class_weights(weight, log_p)
    keep = None
    if y.is_floating_point():
        loss = -(w * y.to(log_p.dtype) * log_p).sum(1)
    else:
        y = y.long()
        keep = y != ignore_index
        label = torch.where(keep, y, 0).unsqueeze(1)
        loss = -(w.expand_as(log_p).gather(1, label) * log_p.gather(1, label)).squeeze(1)
    # Without smoothing, a class may be masked by an infinite logit.
    if isinstance(label_smoothing, Tensor) or label_smoothing != 0:
        s = _smoothing(label_smoothing, loss)
        loss = (1 - s) * loss - s * (w * log_p).mean(1)
    return _mean(loss, keep)


def mse_loss(input: Tensor, target: Tensor) -> Tensor:
    r"""The mean squared error of each example, :math:`\ell_i = \frac{1}{J} \sum_j (x_{ij} - y_{ij})^2`.

    The mean over examples is that of ``F.mse_loss``.

    Args:
        input: Predictions, shape ``(B, ...)``.
        target: Of the same shape.

    Returns:
        One value per example, shape ``(B,)``, in at least single precision.

    Raises:
        ValueError: If the shapes differ, or there is no dimension of examples.

    Example:
        >>> mse_loss(torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.zeros(2, 2))
        tensor([ 2.5000, 17.0000])
    """
    _check_tensors("mse_loss", input=input, target=target)
    if input.shape != target.shape or not input.ndim:
        raise ValueError(
            f"mse_loss: input and target must have the same shape (B, ...), got {tuple(input.shape)} and "
            f"{tuple(target.shape)}. Use squeeze(-1) or unsqueeze(-1) where only one of them has a last dimension of 1."
        )
    error = input.to(torch.promote_types(input.dtype, torch.float32)) - target
    return _mean(error * error)


def temperature(logits: Tensor, T: Tensor | float) -> Tensor:
    r"""Logits at a temperature, :math:`z / T`; above one, it evens out the probabilities of the classes.

    Args:
        logits: Of shape ``(B, ...)``.
        T: Positive; a scalar, or one value per example, shape ``(B,)``.

    Returns:
        A tensor like ``logits``.

    Raises:
        ValueError: If ``T`` is a number that is not positive.

    Example:
        >>> temperature(torch.tensor([[2.0, 4.0], [2.0, 4.0]]), torch.tensor([1.0, 2.0]))
        tensor([[2., 4.],
                [1., 2.]])
    """
    if isinstance(T, int | float) and not T > 0:
        raise ValueError(f"temperature: T must be positive, got {T}; bilevel.positive makes such a hyperparameter.")
    return logits / align("temperature: T", T, logits).to(logits.dtype)


def _smoothing(value: Tensor | float, loss: Tensor) -> Tensor:
    # A tensor is not looked at: reading it would stall its device.
    if isinstance(value, int | float) and not 0 <= value <= 1:
        raise ValueError(
            f"cross_entropy: label_smoothing must be in [0, 1], got {value}; bilevel.interval(0.0, 1.0, init=...) "
            "makes such a hyperparameter."
        )
    return align("cross_entropy: label_smoothing", value, loss)


def _class_weights(weight: Tensor | None, log_p: Tensor) -> Tensor:
    """With the dimensions of ``log_p``."""
    if weight is None:
        return log_p.new_ones([1] * log_p.ndim)
    _check_tensors("cross_entropy", weight=weight)
    examples, classes, *positions = log_p.shape
    if weight.shape not in ((classes,), (examples, classes)):
        raise ValueError(
            f"cross_entropy: weight must have shape ({classes},), one per class, or ({examples}, {classes}), one per "
            f"example and class; got {tuple(weight.shape)}. To weight whole examples, multiply the result."
        )
    return weight.to(log_p).reshape(-1, classes, *[1] * len(positions))


def _mean(values: Tensor, keep: Tensor | None = None) -> Tensor:
    """The mean over all dimensions but the first, of the entries to keep; zero if there are none."""
    if keep is None:
        return values.unsqueeze(-1).flatten(1).mean(1)
    kept = torch.where(keep, values, 0).unsqueeze(-1).flatten(1).sum(1)
    return kept / keep.unsqueeze(-1).flatten(1).sum(1).clamp_min(1)


def _check_targets(logits: Tensor, y: Tensor, ignore_index: int) -> None:
    _check_tensors("cross_entropy", logits=logits, y=y)
    shape = tuple(logits.shape)
    if len(shape) < 2:
        raise ValueError(f"cross_entropy: logits must have shape (B, C) or (B, C, ...), got {shape}.")
    expected = shape if y.is_floating_point() else (shape[0], *shape[2:])
    if y.shape == expected:
        if y.is_floating_point() and ignore_index != IGNORED:
            raise ValueError(f"cross_entropy: ignore_index={ignore_index} needs classes in y, got probabilities.")
        return
    if y.is_floating_point():
        remedy = "If y holds classes, use y.long()."
    elif y.shape == shape[:-1]:
        remedy = "Classes belong in dimension 1: use logits.movedim(-1, 1)."
    else:
        remedy = "One class for each distribution over classes, which lies along dimension 1 of the logits."
    kind = "probabilities" if y.is_floating_point() else "classes"
    raise ValueError(
        f"cross_entropy: y must have shape {expected} to hold the {kind} for logits of shape {shape}, got "
        f"{tuple(y.shape)}. {remedy}"
    )


def _check_tensors(function: str, **arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{function}: {name} must be a tensor, got {type(value).__name__}; use torch.as_tensor.")
