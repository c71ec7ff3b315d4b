"""Where an index comes from: from the inputs of the network, or from nothing but its shape."""

from __future__ import annotations

from typing import Any, final
from weakref import ref

import torch
from torch import Tensor

from bilevel.batches import leaves

RANGES = (torch.arange, torch.linspace)


@final
class Origins:
    """Follows the operations of a network, to tell words of an example from positions that all examples share.

    Both are integers and may have the same shape and values. An integer tensor comes from the inputs if it is one of
    them, or the result of an operation with something that does. So ``ids``, ``zeros_like(ids)`` and
    ``x.argmax(-1)`` do; ``arange(T)`` and a buffer of positions do not. A floating-point tensor does as well, unless it
    was computed from integers that do not, as the logarithms of distances are. No value is read.

    Example:
        >>> ids, places = torch.tensor([2, 3, 4]), torch.arange(3)
        >>> origins = Origins(((ids,), {}))
        >>> origins.from_inputs(ids), origins.from_inputs(places)
        (True, False)
    """

    def __init__(self, inputs: Any) -> None:
        """Start with the inputs of the network, in any nesting."""
        # Weak: memory that the network frees is free. The number of a tensor may then be that of another one.
        self._given: dict[int, ref[Tensor]] = {}
        self._constant: dict[int, ref[Tensor]] = {}
        for leaf in leaves(inputs):
            if isinstance(leaf, Tensor):
                self.note(leaf)

    def from_inputs(self, x: Tensor) -> bool:
        """Whether a tensor depends on the inputs, as far as that is known."""
        real = _is_real(x)
        found = (self._constant if real else self._given).get(id(x))
        return real if found is None or found() is not x else not real

    @property
    def plain(self) -> bool:
        """Whether all floating-point tensors so far come from the inputs."""
        return not self._constant

    def note(self, x: Tensor) -> None:
        """Count a tensor among those that come from the inputs."""
        self._given[id(x)] = ref(x)

    def follow(self, function: Any, arguments: list[Any], result: Any) -> None:
        """Note where the result of an operation comes from.

        Args:
            function: The operation.
            arguments: Its arguments, without their nesting.
            result: A tensor, several, or something else.
        """
        if type(result) is Tensor and not self._constant and _is_real(result):  # which is what most operations do
            if any(isinstance(x, Tensor) and _is_real(x) for x in arguments):
                return
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if not tensors and function not in RANGES:
            return
        if function is Tensor.__setitem__:
            result = tensors[0]
        comes = any(map(self.from_inputs, tensors))
        for x in (result,) if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else ():
            if isinstance(x, Tensor):
                if _is_real(x) != comes:
                    (self._given if comes else self._constant)[id(x)] = ref(x)
                elif comes and self._constant:  # changed in place perhaps
                    self._constant.pop(id(x), None)


def _is_real(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
