"""Recurrent networks from operations that every method can differentiate.

``nn.LSTM`` and ``nn.GRU`` run fused kernels, which have no forward mode on a CPU, no second derivative on a GPU, and
hide their weights. The library takes them apart where it must. These always compute the same step by step, have the
same parameters, and load each other's ``state_dict``.
"""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from bilevel import plain


class _Recurrent(nn.RNNBase):
    """The loop over layers, directions and time."""

    _cell: plain.Cell

    def _run(self, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        def drop(y: Tensor) -> Tensor:
            return F.dropout(y, self.dropout, self.training)

        suffixes = [f"_l{layer}{end}" for layer in range(self.num_layers) for end in self._directions]
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        return plain.run(
            type(self)._cell,
            x,
            states,
            [[getattr(self, part + suffix, None) for part in parts] for suffix in suffixes],  # some have no bias
            layers=self.num_layers,
            bidirectional=self.bidirectional,
            batch_first=self.batch_first,
            drop=drop if self.dropout else None,
        )

    @property
    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _check(self, x: Any) -> None:
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{type(self).__name__}: input must be a tensor of three dimensions, got {got}.")

    def _zeros(self, x: Tensor, size: int) -> Tensor:
        count = x.shape[0 if self.batch_first else 1]
        return x.new_zeros(self.num_layers * len(self._directions), count, size)


@final
class LSTM(_Recurrent):
    r"""``nn.LSTM``, step by step.

    Takes the same arguments, has the same parameters and returns the same.

    Example:
        >>> import torch
        >>> net = LSTM(3, 4, batch_first=True)
        >>> output, (hidden, cell) = net(torch.zeros(2, 5, 3))
        >>> output.shape, hidden.shape
        (torch.Size([2, 5, 4]), torch.Size([1, 2, 4]))
    """

    _cell = staticmethod(plain.lstm_cell)

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


@final
class GRU(_Recurrent):
    r"""``nn.GRU``, step by step.

    Takes the same arguments, has the same parameters and returns the same.

    Example:
        >>> import torch
        >>> output, hidden = GRU(3, 4, batch_first=True)(torch.zeros(2, 5, 3))
        >>> output.shape, hidden.shape
        (torch.Size([2, 5, 4]), torch.Size([1, 2, 4]))
    """

    _cell = staticmethod(plain.gru_cell)

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
