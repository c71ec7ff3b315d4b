"""A language model of words, with its dropout rates as inputs; and texts as batches for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import bilevel
from bilevel.functional import drop_connect, dropout, embedding_dropout

RATES = ("input_dropout", "hidden_dropout", "output_dropout", "embedding_dropout", "drop_connect")
PADDING = -100  # what F.cross_entropy leaves out
State = tuple[Tensor, Tensor]


class Reading(NamedTuple):
    """What the model makes of a piece of text.

    Attributes:
        logits: Of the next word, shape ``(B, T, words)``.
        output: Of the last layer, shape ``(B, T, width)``.
        dropped: The same after dropout.
        state: Hidden and cell state at the end, each ``(B, layers, width)``.
    """

    logits: Tensor
    output: Tensor
    dropped: Tensor
    state: State


@final
class LanguageModel(nn.Module):
    """Layers of LSTM between an embedding and a decoder with the same weight (Merity et al., 2017).

    The mask of a dropout is the same at all times. Embedding dropout drops words, of which each stream of text has its
    own; DropConnect drops weights from hidden to hidden, which all streams share.

    Example:
        >>> net = LanguageModel(words=5, width=3, layers=2).eval()
        >>> net(torch.zeros(4, 7, dtype=torch.long), None, dict.fromkeys(RATES, 0.1)).logits.shape
        torch.Size([4, 7, 5])
    """

    def __init__(self, *, words: int, width: int, layers: int) -> None:
        """Draw the weights; words start within 0.1 of zero."""
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.layers = nn.ModuleList(bilevel.nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, state: State | None, rates: Mapping[str, Tensor | float]) -> Reading:
        """Read a piece of text, one in each row.

        Args:
            tokens: Shape ``(B, T)``.
            state: That in which the piece before was left; None at the beginning of a text.
            rates: By the names in ``RATES``; each a scalar, or one for each row, but ``drop_connect`` a scalar.

        Returns:
            Predictions and activations.
        """
        x = self.encoder(tokens)
        rate, words = rates["embedding_dropout"], self.encoder.num_embeddings
        x = embedding_dropout(tokens, x, rate, size=words, training=self.training)
        ends: list[State] = []
        for index, layer in enumerate(self.layers):
            x = dropout(x, rates["hidden_dropout" if index else "input_dropout"], shared_dims=1, training=self.training)
            recurrent: Any = layer.weight_hh_l0
            weight = drop_connect(recurrent, rates["drop_connect"], training=self.training)
            start = None if state is None else tuple(part[None, :, index] for part in state)
            x, end = functional_call(layer, {"weight_hh_l0": weight}, (x, start), tie_weights=False)
            ends.append(end)
        dropped = dropout(x, rates["output_dropout"], shared_dims=1, training=self.training)
        hidden, cell = (torch.cat(parts).transpose(0, 1) for parts in zip(*ends, strict=True))
        return Reading(self.decoder(dropped), x, dropped, (hidden, cell))


@final
class Memory:
    """The state of a model between two batches of a pass over a text.

    A method may evaluate its loss on a batch several times. All start from where the first evaluation of the batch
    before ended; so the state does not depend on how many there are, and self-tuning networks that train their weights
    unperturbed, which they do first, carry an unperturbed state.

    Attributes:
        tokens: How many tokens a batch of this pass has on average.
    """

    def __init__(self, tokens: float, before: Memory | None = None) -> None:
        """Follow the batch ``before``; None begins a text."""
        self.tokens, self._before = tokens, before
        self._end: State | None = None

    def start(self) -> State | None:
        """The state in which the batch before was left, without a gradient.

        Returns:
            None at the beginning of a text; also after batches that nobody evaluated.
        """
        return None if self._before is None else self._before._end

    def leave(self, state: State) -> None:
        """Keep the state after this batch; that of the last evaluation counts, which is not perturbed."""
        self._end = state[0].detach(), state[1].detach()
        if self._before is not None:
            self._before._before = None  # no longer needed: without this, memories of a whole pass would stay


@final
class Streams:
    """A text in several streams that are read side by side, in batches ``(x, y, memory)`` of a given length.

    Every token is a target once, also the first one, which follows the end of a line. Where the streams do not come out
    even, the last target is ``PADDING``.

    Example:
        >>> for x, y, memory in Streams(torch.arange(1, 6), streams=2, length=2, end=0):
        ...     print(x.tolist(), y.tolist(), memory.tokens)
        [[0, 1], [3, 4]] [[1, 2], [4, 5]] 2.5
        [[2], [0]] [[3], [-100]] 2.5
    """

    def __init__(self, tokens: Tensor, *, streams: int, length: int, end: int) -> None:
        """Cut a text; ``end`` is the token at the end of a line.

        Raises:
            ValueError: If there are fewer tokens than streams.
        """
        if len(tokens) < streams:
            raise ValueError(f"a text of {len(tokens)} tokens cannot be read in {streams} streams: use fewer.")
        padding = -len(tokens) % streams
        before = torch.cat([tokens.new_full((1,), end), tokens[:-1]])
        self.length, self.count = length, len(tokens)
        self.x = F.pad(before, (0, padding), value=end).reshape(streams, -1)
        self.y = F.pad(tokens, (0, padding), value=PADDING).reshape(streams, -1)

    def __len__(self) -> int:
        """Count the batches.

        Returns:
            Their number.
        """
        return -(-self.x.shape[1] // self.length)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Memory]]:
        """Pass over the text once, with a fresh memory.

        Yields:
            Tokens ``(B, T)``, those that follow them, and the memory.
        """
        memory = None
        for x, y in zip(self.x.split(self.length, 1), self.y.split(self.length, 1), strict=True):
            memory = Memory(self.count / len(self), memory)
            yield x, y, memory
