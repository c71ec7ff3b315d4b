"""Which weight responds how."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import final

from torch import Tensor, nn
from typing_extensions import override

from bilevel.hyper import suggest
from bilevel.responding import Rows
from bilevel.structure.dense import Dense
from bilevel.structure.rowwise import Rowwise

STRUCTURES = ("rowwise", "dense", "none")
"""Names of the structures: the paper's, the full Jacobian, and none at all."""

Choice = str | Mapping[str, str]


def choose(structure: Choice, names: list[str]) -> dict[str, str]:
    """Resolve a choice for every weight.

    Args:
        structure: The name of a structure for all weights; or names of structures by pattern, such as
            ``{"head.*": "dense", "embedding.weight": "none"}``. The first pattern that fits counts; a weight that fits
            none is ``"rowwise"``.
        names: Of the weights.

    Returns:
        The name of a structure for every weight.

    Raises:
        TypeError: If it is neither a name nor a mapping.
        ValueError: If a name is unknown, or a pattern fits no weight.

    Example:
        >>> choose({"*.bias": "none"}, ["0.weight", "0.bias"])
        {'0.weight': 'rowwise', '0.bias': 'none'}
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
        name: next((kind for pattern, kind in structure.items() if fnmatchcase(name, pattern)), "rowwise")
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
    if not chosen["dense"] and not chosen["rowwise"]:
        raise ValueError("structure: no weight responds; give at least one of them 'rowwise' or 'dense'.")
    dense = Dense(chosen["dense"], size, max_gigabytes=max_gigabytes) if chosen["dense"] else None
    if dense is not None and not chosen["rowwise"]:
        return dense
    return Theta(Rowwise(chosen["rowwise"], size, max_gigabytes=max_gigabytes), dense)


@final
class Theta(nn.Module):
    r"""A response :math:`\Theta` by rows of some weights and, if chosen, a dense one of others."""

    def __init__(self, rowwise: Rowwise, dense: Dense | None) -> None:
        """Join the parts."""
        super().__init__()
        self.rowwise, self.dense = rowwise, dense

    @override
    def forward(self, shift: Tensor) -> dict[str, Tensor]:
        r"""The change of the weights, :math:`\Theta \delta`.

        Args:
            shift: Shape ``(h,)``.

        Returns:
            One tensor for every weight that responds.
        """
        changes: dict[str, Tensor] = self.rowwise(shift)
        return changes if self.dense is None else changes | self.dense(shift)

    def rows(self, shift: Tensor) -> dict[str, Rows]:
        r"""The change of the weights that respond by rows, one for each example, not multiplied out.

        Args:
            shift: Shape ``(B, h)``.

        Returns:
            By name of the weight.
        """
        return self.rowwise.rows(shift)
