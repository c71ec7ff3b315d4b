"""All hyperparameters of a problem as one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bilevel.hyper.kinds import Hyper
from bilevel.hyper.named import Named
from bilevel.hyper.show import LISTED_ENTRIES, show


class Space:
    r"""All hyperparameters of a problem as one unconstrained vector :math:`\lambda \in \mathbb{R}^h` with names.

    Example:
        >>> from bilevel import interval, positive
        >>> space = Space({"decay": positive(1.0), "rates": interval(0, 1, init=[0.5, 0.5])})
        >>> space.size
        3
        >>> space.values(torch.zeros(3))["rates"]
        tensor([0.5000, 0.5000])
    """

    def __init__(self, hyper: Mapping[str, Hyper]) -> None:
        """Lay out the hyperparameters in the order of the mapping.

        Raises:
            TypeError: If ``hyper`` is not a mapping from names to hyperparameters.
            ValueError: If it is empty.
        """
        if not isinstance(hyper, Mapping):
            raise TypeError(f"hyper must map names to hyperparameters, got {type(hyper).__name__}.")
        if not hyper:
            raise ValueError("hyper is empty: declare at least one, for example {'decay': bilevel.positive(1e-3)}.")
        for name, entry in hyper.items():
            if not isinstance(name, str):
                raise TypeError(f"hyper: names must be strings, got {name!r}.")
            if not isinstance(entry, Hyper):
                raise TypeError(
                    f"hyper[{name!r}] must be made by bilevel.real, positive, interval or integer, "
                    f"got {type(entry).__name__}: {entry!r}."
                )
        self.hyper = dict(hyper)
        self.size = sum(entry.init.numel() for entry in hyper.values())
        self._runs = _runs(self.hyper)
        self._lengths = [sum(sizes) for _, sizes in self._runs]
        self._shapes = [(name, entry.init.shape) for name, entry in self.hyper.items()]

    def init(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The initial vector.

        Returns:
            A tensor of shape ``(h,)``.

        Raises:
            ValueError: If an initial value leaves its domain when it is rounded to ``dtype``.
        """
        vector = self.vector({name: entry.init for name, entry in self.hyper.items()}).to(device, dtype)
        for name, value in self.values(vector).items():
            entry = self.hyper[name]
            inside = value.isfinite() if entry.discrete else (entry.low < value) & (value < entry.high)
            if not bool(inside.all()):
                raise ValueError(
                    f"hyper[{name!r}]: init {show(entry.init)} is too close to the end of ({entry.low:g}, "
                    f"{entry.high:g}) for {dtype}; move it inside, or use weights of higher precision."
                )
        return vector

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector, by name.

        Args:
            vector: Shape ``(*batch, h)``.

        Returns:
            For each hyperparameter a tensor of shape ``(*batch, *its own shape)``.
        """
        parts = _divided(vector, [entry.init.numel() for entry in self.hyper.values()])
        return {
            name: part.reshape(vector.shape[:-1] + entry.init.shape)
            for (name, entry), part in zip(self.hyper.items(), parts, strict=True)
        }

    def values(self, vector: Tensor) -> Named:
        """The natural values of a vector, by name.

        Args:
            vector: Unconstrained, shape ``(*batch, h)``.

        Returns:
            For each hyperparameter a tensor of shape ``(*batch, *its own shape)``. A shared one has its own shape only.
        """
        # Neighbours of one kind are mapped together, but kept apart from others: rounding has no graph.
        blocks = _divided(vector, self._lengths)
        natural = [
            part
            for (entry, sizes), block in zip(self._runs, blocks, strict=True)
            for part in _divided(entry.natural(block), sizes)
        ]
        shapes = self._shapes
        if vector.ndim > 1:
            shapes = [(name, vector.shape[:-1] + shape) for name, shape in shapes]
        parts = {
            name: part if part.shape == shape else part.reshape(shape)
            for (name, shape), part in zip(shapes, natural, strict=True)
        }
        if vector.ndim > 1:
            parts = {name: part[0] if self.hyper[name].shared else part for name, part in parts.items()}
        return Named("hyperparameter", parts.items())

    def shared(self) -> Tensor:
        """Which entries of the vector all examples of a batch share.

        Returns:
            A boolean tensor of shape ``(h,)``.
        """
        return torch.cat([torch.full((entry.init.numel(),), entry.shared) for entry in self.hyper.values()])

    def natural(self, parts: Mapping[str, Tensor]) -> Named:
        """The natural values of unconstrained ones, by name.

        Returns:
            For each hyperparameter a tensor of the same shape.
        """
        return Named("hyperparameter", [(name, self.hyper[name].natural(part)) for name, part in parts.items()])

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of :meth:`values`, without batch dimensions.

        Returns:
            The unconstrained vector, shape ``(h,)``.
        """
        return torch.cat([entry.unconstrained(values[name]).reshape(-1) for name, entry in self.hyper.items()])

    @staticmethod
    def columns(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars that describe values by name: all entries of a tensor, or mean, min and max if there are many.

        Returns:
            A mapping from column names to zero-dimensional tensors.
        """
        columns: dict[str, Tensor] = {}
        for name, value in values.items():
            if value.numel() > LISTED_ENTRIES:
                columns |= {f"{name}.mean": value.mean(), f"{name}.min": value.min(), f"{name}.max": value.max()}
            elif value.ndim == 0:
                columns[name] = value
            else:
                columns |= {f"{name}{list(index)}": value[index] for index in np.ndindex(*value.shape)}
        return columns


def _divided(vector: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Parts of the last dimension; a single one without an operation, since steps of unrolling each pay for theirs."""
    return [vector] if len(sizes) == 1 else torch.split(vector, sizes, dim=-1)


def _runs(hyper: Mapping[str, Hyper]) -> list[tuple[Hyper, list[int]]]:
    """Neighbours with the same map to natural values: the first of them, and how many numbers each of them has."""
    runs: list[tuple[Hyper, list[int]]] = []
    for entry in hyper.values():
        if not (runs and _alike(runs[-1][0], entry)):
            runs.append((entry, []))
        runs[-1][1].append(entry.init.numel())
    return runs


def _alike(one: Hyper, other: Hyper) -> bool:
    same = (one.low, one.high, one.discrete) == (other.low, other.high, other.discrete)
    return same and type(one).natural is type(other).natural and one.transform == other.transform
