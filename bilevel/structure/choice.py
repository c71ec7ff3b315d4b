"""Which weight responds how."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import override

from bilevel.hyper import suggest
from bilevel.responding import Rows
from bilevel.structure.by_rows import ByRows
from bilevel.structure.dense import Dense
from bilevel.structure.gate import Gate
from bilevel.structure.rowwise import Rowwise
from bilevel.structure.slopes import Held

STRUCTURES = ("gate", "rowwise", "dense", "none")
"""Names of the structures: rows that grow, rows as in the paper, the full Jacobian, and none at all."""

Choice = str | Mapping[str, str]


def choose(structure: Choice, names: list[str], default: str = "gate") -> dict[str, str]:
    """Resolve a choice for every weight.

    Args:
        structure: The name of a structure for all weights; or names of structures by pattern, such as
            ``{"head.*": "dense", "embedding.weight": "none"}``. The first pattern that fits counts.
        names: Of the weights.
        default: Of a weight that fits no pattern.

    Returns:
        The name of a structure for every weight.

    Raises:
        TypeError: If it is neither a name nor a mapping.
        ValueError: If a name is unknown, or a pattern fits no weight.

    Example:
        >>> choose({"*.bias": "none"}, ["0.weight", "0.bias"])
        {'0.weight': 'gate', '0.bias': 'none'}
    """
    if isinstance(structure, str):
        structure = {"*": structure}
    if not isinstance(structure, Mapping):
        raise TypeError(f"structure must be a name or a mapping from patterns to names, got {structure!r}.")
    for pattern, kind in structure.items():
        if kind not in STRUCTURES:
            raise ValueError(f"structure: {kind!r} for {pattern!r} is unknown: {suggest(kind, STRUCTURES)}")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"structure: the pattern {pattern!r} fits no weight: {suggest(pattern, names)}")
    return {
        name: next((kind for pattern, kind in structure.items() if fnmatchcase(name, pattern)), default)
        for name in names
    }


def make(params: Mapping[str, Tensor], kinds: Mapping[str, str], size: int, *, max_gigabytes: float) -> Dense | Theta:
    """Create the response of weights to ``size`` hyperparameters, as chosen.

    Returns:
        A module that maps a shift of the hyperparameters to changes of the weights.

    Raises:
        ValueError: If no weight responds.
    """
    chosen = {kind: {name: params[name] for name in params if kinds[name] == kind} for kind in STRUCTURES}
    if not any(chosen[kind] for kind in STRUCTURES if kind != "none"):
        raise ValueError("structure: no weight responds; give at least one of them 'gate', 'rowwise' or 'dense'.")
    gate = Gate(chosen["gate"], size, max_gigabytes=max_gigabytes) if chosen["gate"] else None
    rowwise = Rowwise(chosen["rowwise"], size, max_gigabytes=max_gigabytes) if chosen["rowwise"] else None
    dense = Dense(chosen["dense"], size, max_gigabytes=max_gigabytes) if chosen["dense"] else None
    if dense is not None and gate is None and rowwise is None:
        return dense
    return Theta(gate, rowwise, dense)


@final
class Theta(nn.Module):
    r"""A response :math:`\Theta` by rows of some weights and, if chosen, a dense one of others.

    Attributes:
        gate: Of the weights whose rows grow, if there are any.
        rowwise: Of those that respond as in the paper.
        dense: Of those with a full Jacobian.
    """

    def __init__(self, gate: Gate | None, rowwise: Rowwise | None, dense: Dense | None) -> None:
        """Join the parts."""
        super().__init__()
        self.gate, self.rowwise, self.dense = gate, rowwise, dense

    @property
    def by_rows(self) -> list[ByRows]:
        """The parts that respond by rows."""
        return [part for part in (self.gate, self.rowwise) if part is not None]

    @property
    def names(self) -> list[str]:
        """Of the weights that respond by rows."""
        return [name for part in self.by_rows for name in part.names]

    @property
    def all_names(self) -> list[str]:
        """Of the weights that respond in any way."""
        return self.names if self.dense is None else [*self.names, *self.dense.names]

    def transposed(self, cotangents: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        r"""The transposed action on cotangents of the weights, :math:`\Theta^\top u`.

        Args:
            cotangents: Of some of the weights, by name.
            weights: Their present values, by name.

        Returns:
            Shape ``(h,)``.
        """
        found = [part.transposed(cotangents, weights) for part in self.by_rows]
        found += [] if self.dense is None else [self.dense.transposed(cotangents, weights)]
        return torch.stack(found).sum(0)

    @override
    def forward(self, shift: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r"""The change of the weights, :math:`\Theta \delta`.

        Args:
            shift: Shape ``(h,)``.
            weights: Their present values, by name.

        Returns:
            One tensor for every weight that responds.
        """
        changes = {name: rows.change() for name, rows in self.rows(shift, weights).items()}
        return changes if self.dense is None else changes | self.dense(shift, weights)

    def rows(
        self, shift: Tensor, weights: Mapping[str, Tensor], *, slope_only: bool = False, held: Held | None = None
    ) -> dict[str, Rows]:
        r"""The change of the weights that respond by rows, not multiplied out.

        Args:
            shift: Shape ``(h,)``, or ``(B, h)`` with one for each example.
            weights: Their present values, by name.
            slope_only: As in :meth:`bilevel.structure.by_rows.ByRows.rows`.
            held: As there; of one part that responds by rows.

        Returns:
            By name of the weight.
        """
        parts = [part.rows(shift, weights, slope_only=slope_only, held=held) for part in self.by_rows]
        return {name: rows for part in parts for name, rows in part.items()}
