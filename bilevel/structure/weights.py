"""A weight that responds, and what a network made of one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Term = tuple[Tensor, Tensor]
"""A factor and a template."""

READS = frozenset((
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
))
"""What may be asked about a responding weight, because it does not depend on its values."""


class Weight(NamedTuple):
    r"""A responding weight, or what a network made of one: a slice, a transpose, a multiple.

    Attributes:
        name: Of the parameter.
        weight: Its value, which all examples share.
        factor: One number per example and row, of shape ``(B, *sizes)``: sizes are those of the weight in dimensions
            along which the rows lie, and one in all others.
        template: :math:`\mathbf{R}`, of the shape of the weight.
        chosen: Whether its entries were looked up in a table by indices that are the same for every example.
        more: Further factors and templates, whose products are added: weight norm has two, for length and direction.
        ones: Whether all entries of the template are one.
    """

    name: str
    weight: Tensor
    factor: Tensor
    template: Tensor
    chosen: bool = False
    more: tuple[Term, ...] = ()
    ones: bool = False

    @property
    def grows(self) -> bool:
        """Whether the template is the weight itself, and the only one."""
        return self.template is self.weight and not self.more

    @property
    def terms(self) -> tuple[Term, ...]:
        """All factors and templates."""
        return ((self.factor, self.template), *self.more)

    @property
    def rows(self) -> list[int]:
        """The dimensions along which the rows lie, in one term or another."""
        sizes = zip(*(factor.shape[1:] for factor, _ in self.terms), strict=True)
        return [dim for dim, each in enumerate(sizes) if max(each) > 1]

    def change(self) -> Tensor:
        """The change for each example, multiplied out, shape ``(B, *shape)``."""
        # A product with ones would take as long as any other.
        spared = self.ones and self.factor.dtype == self.template.dtype
        total: Tensor = self.factor if spared else self.factor * self.template
        for factor, template in self.more:
            total = total + factor * template
        return total
