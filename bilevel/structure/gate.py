r"""The cheapest response: every row of a weight grows or shrinks.

.. math::
    \mathbf{W}(\lambda) &= (1 + \mathbf{U} \delta) \odot_{\text{row}} \mathbf{W} \\
    \mathbf{b}(\lambda) &= \mathbf{b} + \mathbf{V} \delta

This is the structure of the paper with :math:`\mathbf{R}` tied to the weight itself. The response of a layer is then
its own output, scaled: no second matrix is stored, multiplied or differentiated.
"""

from __future__ import annotations

from typing import final

from torch import Tensor
from typing_extensions import override

from bilevel.structure.by_rows import ByRows


@final
class Gate(ByRows):
    r"""The matrices :math:`\mathbf{U}` and :math:`\mathbf{V}` of every parameter.

    A weight with r rows takes r h numbers. One with a single row grows by columns, each input unit on its own: one
    number would say too little about it. Biases, the scales of norms and other vectors are shifted, so that one that
    starts at zero responds as well. A row of a matrix that is zero responds as soon as it is not; so do scales and
    shifts of norms over several dimensions, position embeddings and class tokens, which count as matrices here.

    Example:
        >>> import torch
        >>> weights = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        >>> gate = Gate(weights, 1)
        >>> gate.factor.data = torch.tensor([[0.5, 0.0]])  # the first row grows by a half
        >>> gate(torch.ones(1), weights)["w"].detach()
        tensor([[0.5000, 1.0000],
                [0.0000, 0.0000]])
    """

    ones = True

    @override
    def count(self, weight: Tensor) -> int:
        """A weight with a single row, such as the last layer of a regression, grows by columns instead."""
        return weight.shape[1] if weight.ndim > 1 and weight.shape[0] == 1 else super().count(weight)

    @override
    def template(self, index: int, weight: Tensor) -> Tensor:
        """The weight itself; ones for a vector."""
        return weight if weight.ndim > 1 else weight.new_ones(()).expand_as(weight)
