"""Which weights are those of linear layers and convolutions: seen while the network runs, which stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from typing_extensions import override

ENOUGH = 8
"""So many rows of inputs for each column are enough to know their second moments."""


class Layer(NamedTuple):
    """A use of a weight: ``outputs = inputs @ weight.flatten(1).T + bias``, one row per example and position.

    Attributes:
        weight: Its tensor, with output units in dimension 0.
        bias: That of the output units, or None.
        inputs: Makes the inputs, shape ``(rows, columns)``; those of a part of the examples where they are many.
        edge: Where the outputs are in the graph.
        rows: Brings a cotangent of the outputs into the shape ``(rows, units)``.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Callable[[], Tensor]
    edge: GradientEdge
    rows: Callable[[Tensor], Tensor]


@final
class Layers(TorchFunctionMode):
    """While it is active, notes where linear layers and convolutions use weights that are leaves.

    Attributes:
        found: In the order in which they were used.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(inplace=True))
        >>> with Layers() as layers:
        ...     y = net(torch.ones(4, 3))
        >>> [use.weight is net[0].weight for use in layers.found], layers.found[0].inputs().shape
        ([True], torch.Size([4, 3]))
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.found: list[Layer] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        reader = READERS.get(func)
        if reader is not None and output.requires_grad:
            read = reader(*args, **(kwargs or {}))
            if read is not None and read[0].is_leaf and read[0].requires_grad:
                # Not the output itself: the next operation may change it in place.
                self.found.append(Layer(*read[:3], get_gradient_edge(output), read[3]))
        return output


Read = tuple[Tensor, Tensor | None, Callable[[], Tensor], Callable[[Tensor], Tensor]]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Read:
    x = input.detach()
    return weight, bias, lambda: x.reshape(-1, x.shape[-1]), lambda c: c.reshape(-1, c.shape[-1])


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Read | None:
    if groups != 1:
        return None
    x, dims = input.detach(), weight.ndim - 2
    x = x if input.ndim == weight.ndim else x[None]
    size, stride, dilation = [*weight.shape[2:]], _each(stride, dims), _each(dilation, dims)
    around = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
    before: Sequence[int]
    after: Sequence[int]
    if padding == "same":
        before = [total // 2 for total in around]
        after = [total - start for total, start in zip(around, before, strict=True)]
    else:
        before = after = _each(0 if padding == "valid" else padding, dims)

    def inputs() -> Tensor:
        columns = weight[0].numel()
        places = [
            (n + a + b - t - 1) // s + 1
            for n, a, b, t, s in zip(x.shape[2:], before, after, around, stride, strict=True)
        ]
        total = len(x)
        for count in places:
            total *= count
        some = x[:: max(1, min(len(x), total // (ENOUGH * columns)))]
        pads = [pad for pair in zip(reversed(before), reversed(after), strict=True) for pad in pair]
        patches = F.pad(some, pads)
        for dim, (k, d, s) in enumerate(zip(size, dilation, stride, strict=True)):
            patches = patches.unfold(dim + 2, d * (k - 1) + 1, s)[..., ::d]
        # Shape (examples, channels, *places, *sizes).
        return patches.movedim(1, dims + 1).reshape(-1, columns)

    def rows(cotangent: Tensor) -> Tensor:
        batched = cotangent if cotangent.ndim == weight.ndim else cotangent[None]
        return batched.movedim(1, -1).reshape(-1, batched.shape[1])

    return weight, bias, inputs, rows


def _each(value: Any, dims: int) -> Sequence[int]:
    values = [value] if isinstance(value, int) else [*value]
    return values * dims if len(values) == 1 else values


READERS: dict[Any, Callable[..., Read | None]] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
}
"""How the weight of an operation is used."""
