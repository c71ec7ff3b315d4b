"""What a regularizer is, and how several make one loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.hyper import Hyper

Criterion = Callable[..., Tensor]
"""A loss of predictions, ``criterion(output, target)``: one value per example, shape ``(B,)``, or a scalar."""


@dataclass(frozen=True)
class Mixture:
    r"""A batch on its way to the network: inputs, and the targets that they are to be judged by.

    The loss of example i is :math:`\sum_k a_{ki}\, \ell(f(x_i), y_{ki})`, with shares :math:`a_{ki}` that sum to one.

    Attributes:
        x: Inputs: a tensor, or a mapping with one floating-point tensor among its entries.
        parts: Pairs of shares, shape ``(B,)``, and targets; a single part has the share None, which is one.
        original: Inputs and target as they were. A regularizer that mixes examples takes partners from here: what
            another one has done to a partner was done with the strength of the partner.

    Example:
        >>> Mixture.of(torch.ones(2, 3), torch.tensor([0, 1])).tensor.shape
        torch.Size([2, 3])
    """

    x: Any
    parts: tuple[tuple[Tensor | None, Any], ...]
    original: tuple[Any, Any]

    @classmethod
    def of(cls, x: Any, y: Any) -> Mixture:
        """A batch as it is.

        Args:
            x: Inputs.
            y: Their target.

        Returns:
            The mixture with one part.
        """
        return cls(x, ((None, y),), (x, y))

    @property
    def tensor(self) -> Tensor:
        """The floating-point tensor among the inputs, which can be changed."""
        return _floating(self.x)

    @property
    def partners(self) -> Tensor:
        """The same, as they were."""
        return _floating(self.original[0])

    def with_tensor(self, new: Tensor) -> Mixture:
        """The same with other inputs.

        Args:
            new: In place of :attr:`tensor`.

        Returns:
            A new mixture.
        """
        if isinstance(self.x, Tensor):
            return replace(self, x=new)
        old = self.tensor
        return replace(self, x={name: new if value is old else value for name, value in self.x.items()})

    def with_target(self, share: Tensor, y: Any) -> Mixture:
        """A part of another target in the loss.

        Args:
            share: Of that target, shape ``(B,)``; the others keep the rest.
            y: The target.

        Returns:
            A new mixture.
        """
        kept = tuple((1 - share if old is None else (1 - share) * old, target) for old, target in self.parts)
        return replace(self, parts=(*kept, (share, y)))


class Regularizer(ABC):
    """A regularizer with its hyperparameters; override the place at which it acts.

    Attributes:
        order: Regularizers with a smaller number change the batch earlier.

    Example:
        >>> from bilevel import interval
        >>> class Shift(Regularizer):  # adds a constant to all inputs
        ...     @property
        ...     def hyper(self):
        ...         return {"shift": interval(-1.0, 1.0, init=0.5)}
        ...
        ...     def on_batch(self, mixture, hyper):
        ...         x = mixture.tensor
        ...         return mixture.with_tensor(x + per_example(hyper["shift"], x))
        >>> from bilevel.functional import per_example
        >>> Shift().on_batch(Mixture.of(torch.zeros(2, 1), None), {"shift": torch.tensor([1.0, 2.0])}).x
        tensor([[1.],
                [2.]])
    """

    order: ClassVar[int] = 1

    @property
    @abstractmethod
    def hyper(self) -> dict[str, Hyper]:
        """Its hyperparameters by name, for ``Problem(hyper=...)``."""

    def on_batch(self, mixture: Mixture, hyper: Mapping[str, Tensor]) -> Mixture:
        """Change inputs and targets.

        Args:
            mixture: The batch.
            hyper: Natural values by name, scalars or one per example.

        Returns:
            The changed batch.
        """
        return mixture

    def on_loss(self, criterion: Criterion, hyper: Mapping[str, Tensor]) -> Criterion:
        """Change the loss of the predictions.

        Args:
            criterion: ``(output, target) -> values``.
            hyper: As for :meth:`on_batch`.

        Returns:
            The changed loss.
        """
        return criterion

    def penalty(self, params: Mapping[str, Tensor], hyper: Mapping[str, Tensor]) -> Tensor | None:
        """What to add to the loss.

        Args:
            params: ``model.params``.
            hyper: As for :meth:`on_batch`.

        Returns:
            A scalar, or one value per example; None adds nothing.
        """
        return None


def regularized_loss(
    model: Any,
    hyper: Mapping[str, Tensor],
    x: Any,
    y: Any,
    *,
    criterion: Criterion,
    regularizers: Sequence[Regularizer],
    predict: Callable[[Any], Any] | None = None,
) -> Tensor:
    r"""The training loss of a batch with regularizers.

    .. math:: \sum_k a_k\, \ell\bigl(f(\tilde x), y_k\bigr) + \Omega(w)

    Args:
        model: What the loss of a :class:`bilevel.Problem` is given.
        hyper: Likewise.
        x: Inputs of the network.
        y: Their target.
        criterion: ``(output, target) -> values``, such as :func:`bilevel.functional.cross_entropy`.
        regularizers: Any number. Those that mix examples come first, noise and augmentation after them, so that each
            example is changed by its own strengths only.
        predict: Calls the network with the inputs; ``model(x)`` by default.

    Returns:
        One value per example, or a scalar.

    Raises:
        ValueError: If examples are mixed, and the criterion returns a scalar.

    Example:
        >>> import bilevel
        >>> net = torch.nn.Linear(2, 3)
        >>> used = [bilevel.regularizers.WeightDecay(net), bilevel.regularizers.LabelSmoothing()]
        >>> def train_loss(model, hyper, batch):
        ...     criterion = bilevel.functional.cross_entropy
        ...     return regularized_loss(model, hyper, *batch, criterion=criterion, regularizers=used)
        >>> problem = bilevel.Problem(
        ...     net,
        ...     inner_loss=train_loss,
        ...     outer_loss=lambda model, hyper, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        ...     hyper=used[0].hyper | used[1].hyper,
        ... )
        >>> batch = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
        >>> sorted(bilevel.solve(problem, [batch], [batch], steps=2, progress=False).hyper)
        ['label_smoothing', 'weight_decay.weight']
    """
    mixture = Mixture.of(x, y)
    for regularizer in sorted(regularizers, key=lambda regularizer: regularizer.order):
        mixture = regularizer.on_batch(mixture, hyper)
    for regularizer in regularizers:
        criterion = regularizer.on_loss(criterion, hyper)
    output = model(mixture.x) if predict is None else predict(mixture.x)
    loss: Tensor | None = None
    for share, target in mixture.parts:
        value = criterion(output, target)
        if share is not None:
            if value.ndim != 1:
                raise ValueError(
                    "mixed examples need a loss with one value per example, but the criterion returned the shape "
                    f"{tuple(value.shape)}: use bilevel.functional.cross_entropy, or reduction='none'."
                )
            value = share.to(value.dtype) * value
        loss = value if loss is None else loss + value
    assert loss is not None
    for regularizer in regularizers:
        extra = regularizer.penalty(model.params, hyper)
        loss = loss if extra is None else loss + extra
    return loss


def _floating(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        found = [x] if x.is_floating_point() else []
    elif isinstance(x, Mapping):
        found = [value for value in x.values() if isinstance(value, Tensor) and value.is_floating_point()]
    else:
        found = []
    if len(found) != 1:
        kind = f"{x.dtype} tensor" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            "noise, mixing and augmentation change the inputs, which must be one floating-point tensor; got "
            f"{len(found)} of them in a {kind}. Words and other indices cannot be changed so: leave it out."
        )
    return found[0]


def examples(x: Tensor) -> Tensor:
    """One uniform number in [0, 1) per example.

    Returns:
        Shape ``(len(x),)``, in at least single precision.
    """
    return torch.rand(len(x), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
