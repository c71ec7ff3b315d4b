"""Softer targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

from torch import Tensor
from typing_extensions import override

from bilevel.hyper import Hyper, interval
from bilevel.regularizers.base import Criterion, Regularizer


@final
@dataclass(frozen=True)
class LabelSmoothing(Regularizer):
    r"""Label smoothing: a part s of the target goes to all classes alike (Szegedy et al., 2016).

    .. math:: \ell_i = (1 - s_i)\, \ell(f(x_i), y_i) - \frac{s_i}{C} \sum_c \log p_c(x_i)

    Attributes:
        init: Where s starts.
        high: It stays below.

    Example:
        >>> import torch, bilevel
        >>> loss = LabelSmoothing().on_loss(bilevel.functional.cross_entropy, {"label_smoothing": torch.tensor(0.5)})
        >>> loss(torch.tensor([[0.0, 2.0]]), torch.tensor([1]))
        tensor([0.6269])
    """

    init: float = 0.05
    high: float = 0.9

    @property
    @override
    def hyper(self) -> dict[str, Hyper]:
        """``label_smoothing``, in an interval."""
        return {"label_smoothing": interval(0.0, self.high, init=self.init)}

    @override
    def on_loss(self, criterion: Criterion, hyper: Mapping[str, Tensor]) -> Criterion:
        """Hand the smoothing to the criterion, as its argument ``label_smoothing``."""
        return partial(criterion, label_smoothing=hyper["label_smoothing"])
