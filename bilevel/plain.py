"""Functions of PyTorch that hide their parts, made of plain operations: with all derivatives, and weights in sight.

The kernels of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` have no forward mode on a CPU and no second derivative on a GPU;
``F.embedding_bag`` has no forward mode, and that of ``F.glu`` and ``F.hardsigmoid`` cannot be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...], Tensor | None], tuple[Tensor, ...]]
"""The next state, hidden part first: of gates from the input, gates from the last state, that state, a projection."""
Drop = Callable[[Tensor], Tensor]


def lstm_cell(
    gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...], projection: Tensor | None
) -> tuple[Tensor, ...]:
    """A step of an LSTM, perhaps with a projection of its output."""
    i, f, g, o = (gates + hidden).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if projection is None else F.linear(h, projection), c


def gru_cell(gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...], projection: Tensor | None) -> tuple[Tensor, ...]:
    """A step of a GRU."""
    r, z, n = gates.chunk(3, -1)
    hr, hz, hn = hidden.chunk(3, -1)
    z = (z + hz).sigmoid()
    new = (n + (r + hr).sigmoid() * hn).tanh()
    return (new + z * (state[0] - new),)


def tanh_cell(
    gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...], projection: Tensor | None
) -> tuple[Tensor, ...]:
    """A step of a simple network."""
    return ((gates + hidden).tanh(),)


def relu_cell(
    gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...], projection: Tensor | None
) -> tuple[Tensor, ...]:
    """A step of a simple network."""
    return ((gates + hidden).relu(),)


def run(
    cell: Cell,
    x: Tensor,
    states: tuple[Tensor, ...],
    weights: Sequence[Sequence[Tensor | None]],
    *,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
    drop: Drop | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loop over layers, directions and time.

    Args:
        cell: One step.
        x: Shape ``(T, B, features)``, or ``(B, T, features)`` with ``batch_first``; ``(T, features)`` for one example.
        states: At the start, each of shape ``(layers * directions, B, size)``, or without ``B``.
        weights: For each layer and direction those from input and state, their biases, and the projection.
        layers: Their number.
        bidirectional: Run backwards too.
        batch_first: Order of the dimensions.
        drop: Dropout between layers.

    Returns:
        The outputs, and the states at the end.
    """
    time = 1 if batch_first and x.ndim == 3 else 0
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        if layer and drop is not None:
            x = drop(x)
        passes = []
        for direction in range(2 if bidirectional else 1):
            w_input, w_hidden, b_input, b_hidden, projection = weights[len(ends)]
            assert w_input is not None
            assert w_hidden is not None
            state = tuple(part[len(ends)] for part in states)
            steps = F.linear(x, w_input, b_input).unbind(time)
            outputs: list[Tensor] = [*steps]
            order = range(len(steps))
            for t in reversed(order) if direction else order:
                state = cell(steps[t], F.linear(state[0], w_hidden, b_hidden), state, projection)
                outputs[t] = state[0]
            passes.append(torch.stack(outputs, time))
            ends.append(state)
        x = torch.cat(passes, -1) if bidirectional else passes[0]
    return x, tuple(torch.stack(part) for part in zip(*ends, strict=True))


def run_packed(
    cell: Cell,
    data: Tensor,
    sizes: Tensor,
    states: tuple[Tensor, ...],
    weights: Sequence[Sequence[Tensor | None]],
    *,
    layers: int,
    bidirectional: bool,
    drop: Drop | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same for a packed sequence: at each time, the rows of the examples that are not at their end.

    Args:
        cell: As for :func:`run`.
        data: All rows, of the first time first.
        sizes: How many rows there are at each time.
        states: As for :func:`run`.
        weights: As for :func:`run`.
        layers: As for :func:`run`.
        bidirectional: As for :func:`run`.
        drop: As for :func:`run`.

    Returns:
        The outputs, packed, and the states at the end.
    """
    counts = sizes.tolist()
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        if layer and drop is not None:
            data = drop(data)
        passes = []
        for direction in range(2 if bidirectional else 1):
            w_input, w_hidden, b_input, b_hidden, projection = weights[len(ends)]
            assert w_input is not None
            assert w_hidden is not None
            state = tuple(part[len(ends)] for part in states)
            steps = F.linear(data, w_input, b_input).split(counts)
            outputs: list[Tensor] = [*steps]
            order = range(len(steps))
            for t in reversed(order) if direction else order:
                live = tuple(part[: counts[t]] for part in state)
                new = cell(steps[t], F.linear(live[0], w_hidden, b_hidden), live, projection)
                outputs[t] = new[0]
                state = tuple(torch.cat([a, b[counts[t] :]]) for a, b in zip(new, state, strict=True))
            passes.append(torch.cat(outputs))
            ends.append(state)
        data = torch.cat(passes, -1) if bidirectional else passes[0]
    return data, tuple(torch.stack(part) for part in zip(*ends, strict=True))


CELLS: dict[Any, Cell] = {
    torch.lstm: lstm_cell,
    torch.gru: gru_cell,
    torch.rnn_tanh: tanh_cell,
    torch.rnn_relu: relu_cell,
}


def is_packed(args: Sequence[Any]) -> bool:
    """Whether a call of ``torch.lstm`` and its relatives is one with a packed sequence."""
    return isinstance(args[3], tuple | list)


def recurrent(function: Any, *args: Any, drop: Drop | None = None) -> Any:
    """``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` or ``torch.rnn_relu``, step by step.

    Args:
        function: Which one.
        args: As there.
        drop: Dropout between layers; by default with the rate among the arguments.

    Returns:
        As there.
    """
    packed = is_packed(args)
    x, sizes, hx, flat = args[:4] if packed else (args[0], None, *args[1:3])
    biases, layers, dropout, train, bidirectional, *first = args[4 if packed else 3 :]
    states = (*hx,) if isinstance(hx, tuple | list) else (hx,)
    per = len(flat) // (layers * (2 if bidirectional else 1))
    projects = per - (4 if biases else 2) > 0

    def pick(at: int) -> list[Tensor | None]:
        own = flat[at * per : (at + 1) * per]
        return [*own[:2], *(own[2:4] if biases else (None, None)), own[-1] if projects else None]

    if drop is None and dropout:

        def drop(y: Tensor) -> Tensor:
            return F.dropout(y, dropout, train)

    weights = [pick(at) for at in range(len(flat) // per)]
    options: dict[str, Any] = {"layers": layers, "bidirectional": bidirectional, "drop": drop}
    if sizes is not None:
        output, ends = run_packed(CELLS[function], x, sizes, states, weights, **options)
    else:
        output, ends = run(CELLS[function], x, states, weights, batch_first=first[0], **options)
    return output, *ends


def _one_step(cell: Cell) -> Callable[..., Any]:
    def step(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        state = (*hx,) if isinstance(hx, tuple | list) else (hx,)
        new = cell(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state, None)
        return new if len(new) > 1 else new[0]

    return step


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``F.embedding_bag`` for bags of equal length, ``(B, length)``.

    Returns:
        As there.

    Raises:
        NotImplementedError: If there are bags of different lengths.
    """
    if input.ndim != 2:
        raise NotImplementedError(
            "embedding_bag with bags of different lengths (offsets) has no forward mode: pad them to (B, length) and "
            "pass padding_idx, or use method='centered_stn' with perturb='batch'."
        )
    vectors = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        vectors = vectors * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return vectors.sum(1) if mode == "sum" else vectors.mean(1) if mode == "mean" else vectors.max(1).values
    real = (input != padding_idx % len(weight)).unsqueeze(-1)
    if mode == "max":
        largest = vectors.masked_fill(~real, -torch.inf).max(1).values
        return largest.masked_fill(~real.any(1), 0.0)
    total = vectors.masked_fill(~real, 0.0).sum(1)
    return total if mode == "sum" else total / real.sum(1).clamp_min(1)


def _recurrent(function: Any) -> Callable[..., Any]:
    def replaced(*args: Any) -> Any:
        return recurrent(function, *args)

    return replaced


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """``F.glu``: the derivative of its forward mode cannot be differentiated.

    Returns:
        As there.
    """
    half, gate = input.chunk(2, dim)
    return half * gate.sigmoid()


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """``F.hardsigmoid``, likewise.

    Returns:
        As there.
    """
    result = F.hardtanh(input / 6 + 0.5, 0.0, 1.0)
    return input.copy_(result) if inplace else result


PLAIN: dict[Any, Callable[..., Any]] = {
    **{function: _recurrent(function) for function in CELLS},
    torch.lstm_cell: _one_step(lstm_cell),
    torch.gru_cell: _one_step(gru_cell),
    torch.rnn_tanh_cell: _one_step(tanh_cell),
    torch.rnn_relu_cell: _one_step(relu_cell),
    F.embedding_bag: embedding_bag,
    F.glu: glu,
    F.hardsigmoid: hardsigmoid,
}
"""What stands in for each of these functions."""
