r"""A weight that responds to a perturbation of its own for every example, without one weight for every example."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override


class Function(torch.autograd.Function):
    """A function with derivatives of its own, whose arguments are all given by position."""

    @classmethod
    @override
    def apply(cls, *args: Any) -> Any:
        """Call it; without a look at the signature, which takes longer than a small function, where none is needed."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class CannotRespond(Exception):
    """A network cannot respond to a perturbation of its own for each example; with one for the whole batch it can."""


class PerturbationWarning(UserWarning):
    """All examples of a batch share one perturbation, because the network cannot give each its own.

    With ``perturb=None``, the default of self-tuning networks. The warning says which weight and which operation is the
    reason. Results are right either way; the response is learned from more noise.

    Example:
        >>> issubclass(PerturbationWarning, UserWarning)
        True
    """


class NoRule(CannotRespond, NotImplementedError):
    """An operation on a responding weight has no rule."""


class NoExamples(CannotRespond, ValueError):
    """A responding weight meets an activation whose examples are not where they are expected."""


class Rows(NamedTuple):
    r"""The change of one weight, :math:`f \odot_{\text{row}} \mathbf{R}`, not multiplied out.

    Rows are the indices of dimension 0, or those of dimension 1 where dimension 0 has one index only.

    Attributes:
        factor: One number per row, shape ``(rows,)``, or one per example and row, shape ``(B, rows)``.
        template: :math:`\mathbf{R}`, of the shape of the weight.
        ones: Whether all entries of the template are one.
    """

    factor: Tensor
    template: Tensor
    ones: bool = False

    def spread(self) -> Tensor:
        """The factor with the dimensions of the weight, those of size one in which all numbers share a row.

        Returns:
            A tensor of shape ``(*sizes,)`` or ``(B, *sizes)``.
        """
        shape, count = self.template.shape, self.factor.shape[-1]
        dim = 0 if shape[:1] in ((), (count,)) else 1
        sizes = [count if index == dim else 1 for index in range(len(shape))]
        return self.factor.reshape([*self.factor.shape[:-1], *sizes])

    def change(self) -> Tensor:
        """The product, for each example if there are several.

        Returns:
            A tensor of shape ``(*weight.shape,)`` or ``(B, *weight.shape)``.
        """
        return self.spread() * self.template


@final
class Responding:
    r"""What ``model.params`` holds for a weight that differs from example to example.

    Penalties know it: :func:`bilevel.l2` and :func:`bilevel.l1` return one value per example, computed from sums over
    the rows of :math:`\mathbf{W}` and :math:`\mathbf{R}`. Anything else raises.

    Attributes:
        name: Of the weight.
        weight: :math:`\mathbf{W}`, which all examples share.
        rows: Its change, one for each example.
    """

    def __init__(self, name: str, weight: Tensor, rows: Rows) -> None:
        """Pair a weight with its change."""
        self.name, self.weight, self.rows = name, weight, rows

    def l2(self) -> Tensor:
        r"""The sum of squares for each example.

        .. math:: \sum_{rj} (W_{rj} + f_r R_{rj})^2
            = \sum_r \left(\|W_r\|^2 + 2 f_r W_r^\top R_r + f_r^2 \|R_r\|^2\right)

        Returns:
            A tensor of shape ``(B,)``.
        """
        w, r = self._matrices()
        factor = self.rows.factor
        if self.grows:
            return grown_squares([w.new_ones(())], [[self]])
        cross, square = (w * r).sum(1), (r * r).sum(1)
        return (w * w).sum() + factor @ (2 * cross) + (factor * factor) @ square

    def l1(self) -> Tensor:
        r"""The sum of absolute values for each example.

        A row contributes :math:`\sum_j |R_{rj}|\,|f_r - t_{rj}|` with :math:`t = -W / R`, which is linear between
        neighbouring :math:`t`: sorted, with running sums, it takes one search per example and row.

        Returns:
            A tensor of shape ``(B,)``.
        """
        w, r = self._matrices()
        if self.grows:
            return (1 + self.rows.factor).abs() @ w.abs().sum(1)
        zero = r == 0
        bend = torch.where(zero, torch.inf, -w / torch.where(zero, 1.0, r)).detach()
        bend, order = bend.sort(dim=1)
        w, r = w.gather(1, order), r.gather(1, order)
        # Without a slope there is no bend, and f lies to the left of infinity.
        sign = torch.where(r == 0, -w.sign(), r.sign()).detach()
        pad = w.new_zeros(len(w), 1)
        # Up to entry k, f lies to the right of the bends, where |w + f r| = sign(r) (w + f r); beyond it, to the left.
        offset = torch.cat([pad, (sign * w).cumsum(1)], 1)
        slope = torch.cat([pad, (sign * r).cumsum(1)], 1)
        place = torch.searchsorted(bend, self.rows.factor.detach().T.contiguous())  # (rows, B)
        low, tilt = offset.gather(1, place), slope.gather(1, place)
        rest_low, rest_tilt = offset[:, -1:] - low, slope[:, -1:] - tilt
        return ((low - rest_low) + self.rows.factor.T * (tilt - rest_tilt)).sum(0)

    @property
    def grows(self) -> bool:
        """Whether the change is a multiple of the weight itself, row by row."""
        return self.rows.template is self.weight

    def _matrices(self) -> tuple[Tensor, Tensor]:
        rows = self.rows.factor.shape[-1]
        return self.weight.reshape(rows, -1), self.rows.template.reshape(rows, -1)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.weight.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Of the weight."""
        return self.weight.ndim

    def dim(self) -> int:
        """Of the weight."""
        return self.weight.ndim

    def numel(self) -> int:
        """Of the weight."""
        return self.weight.numel()

    @property
    def device(self) -> torch.device:
        """Of the weight."""
        return self.weight.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be used as a tensor."""
        leaves = pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, cls))._refuse(getattr(func, "__name__", str(func)))

    def __getattr__(self, attribute: str) -> NoReturn:
        """Refuse to be used as a tensor."""
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse(attribute)

    def _arithmetic(self, *others: Any) -> NoReturn:
        self._refuse("arithmetic")

    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __pow__ = __neg__ = __abs__ = _arithmetic
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rpow__ = __getitem__ = __len__ = __iter__ = (
        _arithmetic
    )
    __lt__ = __le__ = __gt__ = __ge__ = _arithmetic

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"model.params[{self.name!r}] differs from example to example and cannot be used in {what}: take "
            "bilevel.l2 or bilevel.l1 of it, or pass perturb='batch' to the method, with which it is a plain tensor."
        )


def grown_squares(strengths: Sequence[Tensor], groups: Sequence[Sequence[Responding]]) -> Tensor:
    r"""A weighted sum of :meth:`Responding.l2` over weights that grow, in few operations.

    .. math:: \sum_g a_{ig} \sum_{k \in g} \sum_r (1 + f_{ikr})^2 \|W_{kr}\|^2

    Args:
        strengths: :math:`a_g`, scalars or of shape ``(B,)``.
        groups: The weights that go with each.

    Returns:
        A tensor of shape ``(B,)``.
    """
    members = [weight for group in groups for weight in group]
    factors = [weight.rows.factor.to(weight.weight.dtype) for weight in members]
    matrices = [weight._matrices()[0] for weight in members]
    counts = tuple(map(len, groups))
    with torch.no_grad():  # once for a pass and its derivative
        squares = [torch.linalg.vector_norm(w, dim=1).square_() for w in matrices]
    total: Tensor = _GrownSquares.apply(counts, *strengths, *factors, *matrices, *squares)
    return total


class _GrownSquares(Function):
    """:func:`grown_squares`, with all rows side by side; its derivatives can be differentiated."""

    @staticmethod
    @override
    def forward(counts: tuple[int, ...], *tensors: Tensor) -> Tensor:
        strengths, factors, _, squares = _parted(counts, tensors)
        total: Tensor | None = None
        with _own_digits(squares[0].device.type):
            for strength, part in zip(strengths, _sums(counts, _grown(factors).square_(), squares), strict=True):
                total = strength * part if total is None else torch.addcmul(total, strength, part)
        assert total is not None
        return total

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.counts = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        (given,), counts = cotangents, ctx.counts
        strengths, factors, matrices, squares = _parted(counts, ctx.saved_tensors)
        if torch.is_grad_enabled():  # not as the square of a norm, which has no second derivative at zero
            squares = [(w * w).sum(1) for w in matrices]
        needs, first, size = ctx.needs_input_grad[1:], len(strengths), len(factors)
        grown, double = _grown(factors), 2 * given
        found: list[Tensor | None] = [None] * first
        if any(needs[:first]):
            sums = _sums(counts, grown * grown, squares)
            found = [(given * part).sum_to_size(a.shape) for a, part in zip(strengths, sums, strict=True)]
        widths = [factor.shape[1] for factor in factors]
        of_factors: list[Tensor | None] = [None] * size
        of_matrices: list[Tensor | None] = [None] * size
        of_group = iter((double * strength).unsqueeze(1) for strength in strengths)
        each = [share for count in counts for share in [next(of_group)] * count]
        rows = torch.cat([share.expand(-1, width) for share, width in zip(each, widths, strict=True)], 1) * grown
        if any(needs[first : first + size]):
            of_factors = [*(rows * torch.cat([*squares])).split(widths, 1)]
        if any(needs[first + size : first + 2 * size]):
            scales = (rows * grown).sum(0).split(widths)
            of_matrices = [scale.unsqueeze(1) * w for scale, w in zip(scales, matrices, strict=True)]
        return (None, *found, *of_factors, *of_matrices, *[None] * size)


def _parted(counts: tuple[int, ...], tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
    """Strengths, factors, matrices, and the squares of their rows."""
    first, size = len(counts), sum(counts)
    return tensors[:first], *(tensors[first + i * size : first + (i + 1) * size] for i in range(3))


def _grown(factors: Sequence[Tensor]) -> Tensor:
    """By how much each row grows, those of all weights beside each other, shape ``(B, rows)``."""
    return 1 + torch.cat([*factors], 1)


def _sums(counts: tuple[int, ...], grown_squares: Tensor, squares: Sequence[Tensor]) -> list[Tensor]:
    """The sum of squares of each group, for each example."""
    parts = iter(squares)
    own = [torch.cat(group) if len(group) > 1 else group[0] for group in ([*islice(parts, n)] for n in counts)]
    pieces = grown_squares.split([len(group) for group in own], 1)
    return [piece @ group for piece, group in zip(pieces, own, strict=True)]


def _own_digits(device: str) -> AbstractContextManager[Any]:
    """Without autocast: a sum of squares needs the digits of the weights."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
