"""Decoupled weight decay: hyperparameters that act on the update of the weights, and not on a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from torch import Tensor

from bilevel.hyper import Space, suggest
from bilevel.regularizers.decay import DecayRate


@final
class Decays:
    """How much each weight of a problem is to shrink in a step of training.

    Attributes:
        names: Of the hyperparameters that say so.

    Example:
        >>> import torch, bilevel
        >>> hyper = bilevel.regularizers.WeightDecay(torch.nn.Linear(2, 1), decoupled=True, init=0.5).hyper
        >>> decays = Decays(["weight", "bias"], Space(hyper))
        >>> decays.names, [value if value is None else round(float(value), 6) for value in decays(torch.zeros(1))]
        (('weight_decay.weight',), [1.0, None])
    """

    def __init__(self, params: Iterable[str], space: Space) -> None:
        """Find the decoupled decay among the hyperparameters of a problem with these weights.

        Raises:
            ValueError: If one is for a weight that is not there.
        """
        self._params = list(params)
        self._space = space
        found = {name: entry for name, entry in space.hyper.items() if isinstance(entry, DecayRate) and entry.decoupled}
        self.names = tuple(found)
        self._weights = {name: entry.weights for name, entry in found.items()}
        for name, weights in self._weights.items():
            missing = [weight for weight in weights if weight not in self._params]
            if missing:
                raise ValueError(
                    f"hyper[{name!r}] decays {missing[0]!r}, which is not a trainable weight of the problem: "
                    f"{suggest(missing[0], self._params)}"
                )

    def __bool__(self) -> bool:
        """Whether there is some."""
        return bool(self.names)

    def __call__(self, hyper: Tensor) -> list[Tensor | None]:
        """The strengths at some hyperparameters, differentiable in them.

        Args:
            hyper: Unconstrained, shape ``(h,)``.

        Returns:
            One for each weight of the problem; None for those that do not shrink.
        """
        strengths: dict[str, Tensor] = {}
        values = self._space.values(hyper) if self.names else {}
        for name in self.names:
            for weight in self._weights[name]:
                strengths[weight] = strengths[weight] + values[name] if weight in strengths else values[name]
        return [strengths.get(name) for name in self._params]
