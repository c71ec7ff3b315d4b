r"""The response of the paper: every row of a weight moves along a learned direction.

Section "Structured Hypernetwork Representation" and, for convolutions, ``append:conv-nn``:

.. math::
    \mathbf{W}(\lambda) &= \mathbf{W} + (\mathbf{U} \delta) \odot_{\text{row}} \mathbf{R} \\
    \mathbf{b}(\lambda) &= \mathbf{b} + (\mathbf{V} \delta) \odot \mathbf{b}_R
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import override

from bilevel.structure.by_rows import ByRows


@final
class Rowwise(ByRows):
    r"""The matrices :math:`\mathbf{U}` and :math:`\mathbf{R}` of every parameter, both learned.

    A weight with n numbers and r rows takes n + r h numbers in addition to its own.

    :math:`\mathbf{U}` starts at zero. :math:`\mathbf{R}` starts at the weight itself, so that a row first learns to
    grow and shrink, as :class:`bilevel.structure.gate.Gate` does, and then to turn. A row of zeros gets random numbers
    as in an ordinary layer, and a bias gets ones: with both factors at zero, neither would ever move. The paper's code
    draws all of :math:`\mathbf{R}` at random.

    Example:
        >>> theta = Rowwise({"w": torch.ones(3, 4)}, 2)
        >>> theta(torch.ones(2), {"w": torch.ones(3, 4)})["w"].shape, sum(p.numel() for p in theta.parameters())
        (torch.Size([3, 4]), 18)
    """

    def __init__(self, params: Mapping[str, Tensor], size: int, *, max_gigabytes: float = math.inf) -> None:
        """Start the response of ``params`` to ``size`` hyperparameters, unless it exceeds ``max_gigabytes``."""
        numbers = sum(weight.numel() for weight in params.values())
        super().__init__(params, size, max_gigabytes=max_gigabytes, numbers=numbers)
        self.templates = nn.ParameterList([nn.Parameter(_start(weight.detach())) for weight in params.values()])

    @override
    def template(self, index: int, weight: Tensor) -> Tensor:
        """The learned one."""
        learned: Tensor = self.templates[index]
        return learned


def _start(weight: Tensor) -> Tensor:
    if weight.ndim < 2:
        return torch.ones_like(weight)
    bound = 1 / math.sqrt(weight[0].numel())
    drawn = torch.empty_like(weight).uniform_(-bound, bound)
    dead = (weight == 0).flatten(1).all(1).reshape(-1, *[1] * (weight.ndim - 1))
    return torch.where(dead, drawn, weight).contiguous(memory_format=_layout(weight))


def _layout(weight: Tensor) -> torch.memory_format:
    """That of the weight, such as channels last."""
    last = weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not weight.is_contiguous() else torch.contiguous_format
