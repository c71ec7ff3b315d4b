"""Recurrent networks from operations that every method can differentiate.

``nn.LSTM`` and ``nn.GRU`` run fused kernels, which have no forward mode on a CPU, no second derivative on a GPU, and
hide their weights. These compute the same step by step, have the same parameters, and load each other's
``state_dict``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class _Recurrent(nn.RNNBase, ABC):
    """The loop over layers, directions and time."""

    @abstractmethod
    def _cell(self, gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, ...]:
        """The next state, hidden part first. ``gates`` come from the input, ``hidden`` from the last state."""

    def _run(self, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = x if self.batch_first else x.transpose(0, 1)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            passes = []
            for direction in range(2 if self.bidirectional else 1):
                suffix = f"_l{layer}" + "_reverse" * direction
                state = tuple(part[len(ends)] for part in states)
                gates = F.linear(x, self._weight("weight_ih" + suffix), self._weight("bias_ih" + suffix))
                outputs: list[Tensor] = [gates] * gates.shape[1]
                order = range(gates.shape[1])
                for t in reversed(order) if direction else order:
                    hidden = F.linear(state[0], self._weight("weight_hh" + suffix), self._weight("bias_hh" + suffix))
                    state = self._cell(gates[:, t], hidden, state, suffix)
                    outputs[t] = state[0]
                passes.append(torch.stack(outputs, 1))
                ends.append(state)
            x = torch.cat(passes, -1)
        return x if self.batch_first else x.transpose(0, 1), tuple(map(torch.stack, zip(*ends, strict=True)))

    def _weight(self, name: str) -> Any:
        return getattr(self, name, None)  # without bias there is none

    def _check(self, x: Any) -> None:
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{type(self).__name__}: input must be a tensor of three dimensions, got {got}.")

    def _zeros(self, x: Tensor, size: int) -> Tensor:
        count = x.shape[0 if self.batch_first else 1]
        return x.new_zeros(self.num_layers * (2 if self.bidirectional else 1), count, size)


@final
class LSTM(_Recurrent):
    r"""``nn.LSTM``, step by step.

    Takes the same arguments, has the same parameters and returns the same.

    Example:
        >>> net = LSTM(3, 4, batch_first=True)
        >>> output, (hidden, cell) = net(torch.zeros(2, 5, 3))
        >>> output.shape, hidden.shape
        (torch.Size([2, 5, 4]), torch.Size([1, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ``nn.LSTM``."""
        super().__init__("LSTM", *args, **kwargs)

    @override
    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run over a sequence.

        Args:
            input: Shape ``(T, B, features)``, or ``(B, T, features)`` with ``batch_first``.
            hx: Hidden and cell state; zero by default.

        Returns:
            The outputs, and the last hidden and cell state.
        """
        self._check(input)
        if hx is None:
            hx = self._zeros(input, self.proj_size or self.hidden_size), self._zeros(input, self.hidden_size)
        return self._run(input, hx)

    @override
    def _cell(self, gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, ...]:
        i, f, g, o = (gates + hidden).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (F.linear(h, self._weight("weight_hr" + suffix)) if self.proj_size else h), c


@final
class GRU(_Recurrent):
    r"""``nn.GRU``, step by step.

    Takes the same arguments, has the same parameters and returns the same.

    Example:
        >>> output, hidden = GRU(3, 4, batch_first=True)(torch.zeros(2, 5, 3))
        >>> output.shape, hidden.shape
        (torch.Size([2, 5, 4]), torch.Size([1, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ``nn.GRU``."""
        super().__init__("GRU", *args, **kwargs)

    @override
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run over a sequence.

        Args:
            input: Shape ``(T, B, features)``, or ``(B, T, features)`` with ``batch_first``.
            hx: Hidden state; zero by default.

        Returns:
            The outputs, and the last hidden state.
        """
        self._check(input)
        output, (hidden,) = self._run(input, (self._zeros(input, self.hidden_size) if hx is None else hx,))
        return output, hidden

    @override
    def _cell(self, gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, ...]:
        r, z, n = gates.chunk(3, -1)
        hr, hz, hn = hidden.chunk(3, -1)
        z = (z + hz).sigmoid()
        new = (n + (r + hr).sigmoid() * hn).tanh()
        return (new + z * (state[0] - new),)
