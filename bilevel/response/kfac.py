r"""K-FAC: the curvature of a layer as a product of two small matrices, as a preconditioner or as a solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from bilevel.autodiff import vjp
from bilevel.linear_solvers.base import (
    Attempt,
    LinearSolver,
    LinearSolverError,
    Matvec,
    Operator,
    check_count,
    check_number,
    norm,
    not_finite,
    ratio,
)
from bilevel.problem import Variables
from bilevel.response.curvature import GaussNewton, flatten, unflatten
from bilevel.response.diagonal import root_of, signs
from bilevel.response.preconditioner import Preconditioner
from bilevel.rng import Stream
from bilevel.structure import Layer, Layers


@final
@dataclass(frozen=True, kw_only=True)
class KFAC(Preconditioner, LinearSolver):
    r"""Take the Gauss-Newton matrix of each layer for a Kronecker product.

    For a linear layer or a convolution with inputs a, a one for the bias included, and outputs s,

    .. math::
        \mathbf{H} \approx \mathbf{A} \otimes \mathbf{S} + d\,\mathbf{I}, \qquad
        \mathbf{A} = \operatorname{mean} a a^\top, \qquad
        \mathbf{S} = \sum \left(\frac{\partial y}{\partial s}\right)^\top \nabla^2_y \ell\,
        \frac{\partial y}{\partial s},

    where y are the outputs of the network, the mean and the sum are over examples and positions, and d is the mean
    curvature of what the loss reads of the weights themselves, such as a weight decay. :math:`\mathbf{S}` is estimated
    from random signs z of the outputs, by the symmetric part of
    :math:`\sum (\mathbf{J}^\top z)(\mathbf{J}^\top \nabla^2_y \ell\, z)^\top`. The two eigendecompositions of a layer
    give any power of the matrix with :math:`\mu` added. Layers are found while the network runs, which stays as it is.
    All other weights, such as those of norms, embeddings, recurrent cells with weights of their own kind, and grouped
    convolutions, have the diagonal of :class:`bilevel.Diagonal`.

    As a preconditioner, ``Implicit(CG(), preconditioner=KFAC())``, it changes no solution, and saves products unless
    the network has fitted a few examples (:doc:`/lab/measured`). As a solver, ``Implicit(KFAC(damping=1e-2))``, it
    takes the approximation for the matrix: two backward passes and no iteration. That is crude: it promises no residual
    and never warns; the report has the true one.

    Attributes:
        probes: How many draws of signs are averaged. The signs are always the same ones.
        damping: The shift :math:`\mu` of the solver. A preconditioner takes that of the solver it helps.
        max_size: Layers with more inputs, or more outputs, than that are left to the diagonal: a decomposition takes
            time with the third power. Of inputs, as many count as there are rows, if those are fewer.

    Example:
        >>> import bilevel
        >>> bilevel.Implicit(bilevel.CG(max_steps=8, rtol=0.0), preconditioner=KFAC()).preconditioner
        KFAC(probes=1, damping=0.0, max_size=2048)
        >>> bilevel.Implicit(KFAC(damping=1e-2)).linear_solver
        KFAC(probes=1, damping=0.01, max_size=2048)

    References:
        Martens and Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature; Grosse and
        Martens (2016), A Kronecker-factored approximate Fisher matrix for convolution layers.
    """

    damping: float = 0.0
    max_size: int = 2048

    @override
    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_number(self, "damping", self.damping, above=0, or_equal=True)
        check_count(self, "max_size", self.max_size)

    @override
    def check(self, inner: Variables, hyper: Tensor, batch: Any) -> None:
        """Refuse networks without such layers, and several processes."""
        if inner.group is not None:
            raise ValueError("KFAC: the factors of several processes cannot be averaged: use Diagonal().")
        if not self._blocks(*_curvature(inner, hyper, batch)):
            raise ValueError(
                "KFAC: no linear layer or convolution of the network uses one of its weights as it is, with at most "
                f"max_size={self.max_size:,} inputs and outputs: use Diagonal()."
            )

    @override
    def root(
        self, inner: Variables, hyper: Tensor, batch: Any, damping: float, add: Callable[[Tensor], Tensor]
    ) -> Matvec:
        r"""The inverse square root of the approximation."""
        curvature, layers = _curvature(inner, hyper, batch)
        weights, blocks = curvature.weights, self._blocks(curvature, layers)
        known = {index for block in blocks for index in block.indices}
        rest = [index for index in range(len(weights)) if index not in known]
        edges = [layer.edge for block in blocks for layer in block.layers]
        through: list[Tensor | float] = [0.0] * len(rest)
        outputs: list[Tensor | float] = [0.0] * len(blocks)
        read: list[Tensor | float] = [0.0] * len(weights)
        count = len(curvature.seen)
        for probe in range(self.probes):
            z = signs([*curvature.seen, *curvature.read], probe)
            bent = curvature.bend(z)
            inputs: list[Any] = [*edges, *(weights[index] for index in rest)]
            left, right = (vjp(curvature.outputs, inputs, part[:count], retain_graph=True) for part in (z, bent))
            pairs = iter(zip(left, right, strict=True))
            for number, block in enumerate(blocks):
                outputs[number] = outputs[number] + sum(
                    _moment(layer, *next(pairs)) / self.probes for layer in block.layers
                )
            for number, (p, q) in enumerate(pairs):
                through[number] = through[number] + (0.0 if p is None or q is None else p * q / self.probes)
            for number, (a, b) in enumerate(zip(z[count:], bent[count:], strict=True)):
                read[number] = read[number] + a * b / self.probes
        own = [torch.as_tensor(part).abs() for part in read]
        roots = [
            _inverse_root(block, torch.as_tensor(moment), own[block.weight].mean() + damping)
            for block, moment in zip(blocks, outputs, strict=True)
        ]
        diagonals = [
            root_of(torch.as_tensor(part).abs() + own[index], damping)
            for index, part in zip(rest, through, strict=True)
        ]

        def product(vector: Tensor) -> Tensor:
            parts = [*unflatten(vector, weights)]
            for index, diagonal in zip(rest, diagonals, strict=True):
                parts[index] = diagonal(parts[index])
            for block, inverse_root in zip(blocks, roots, strict=True):
                columns = [parts[index].reshape(len(parts[index]), -1) for index in block.indices]
                found = inverse_root(torch.cat(columns, dim=1))
                for index, part in zip(block.indices, found.split([c.shape[1] for c in columns], 1), strict=True):
                    parts[index] = part.reshape(parts[index].shape)
            return flatten(parts)

        return product

    @override
    def _solve(self, matvec: Matvec, v: Tensor, x0: Tensor | None, root: Matvec | None) -> Attempt:
        if root is None:
            raise TypeError("KFAC needs to see the layers of a network: use it in bilevel.Implicit.")
        operator = Operator(matvec, v.dtype, self.damping)
        v = v.to(torch.promote_types(v.dtype, torch.float32))
        x = root(root(v))
        residual = ratio(norm(v - operator(x)), norm(v))

        def judge(facts: list[float]) -> int:
            if not facts[0] < float("inf"):
                raise not_finite("KFAC", operator, v) or LinearSolverError("KFAC: overflow: raise damping.")
            return 0

        return Attempt(x, residual, residual[None], judge)

    def _blocks(self, curvature: GaussNewton, layers: Sequence[Layer]) -> list[_Block]:
        """The weights of the network that layers use, a bias together with the weight that it belongs to."""
        places = {id(weight): index for index, weight in enumerate(curvature.weights)}
        uses: dict[int, list[Layer]] = {}
        for layer in layers:
            if id(layer.weight) in places:
                uses.setdefault(places[id(layer.weight)], []).append(layer)
        biases = [{places.get(id(layer.bias)) for layer in found} for found in uses.values()]
        blocks = []
        for (weight, found), own in zip(uses.items(), biases, strict=True):
            alone = len(own) == 1 and sum(bool(own & other) for other in biases) == 1
            bias = next(iter(own)) if alone else None
            inputs = torch.cat([layer.inputs() for layer in found])
            if max(min(inputs.shape), len(curvature.weights[weight])) <= self.max_size:
                blocks.append(_Block(weight, bias, inputs, found))
        return blocks


class _Block(NamedTuple):
    """A weight and perhaps a bias, by their places among all weights; the inputs of all uses, and those uses."""

    weight: int
    bias: int | None
    inputs: Tensor
    layers: list[Layer]

    @property
    def indices(self) -> list[int]:
        """The places of both."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def _curvature(inner: Variables, hyper: Tensor, batch: Any) -> tuple[GaussNewton, list[Layer]]:
    with Stream.current(hyper.device)(), Layers() as layers:  # the loss draws what it will draw for the matrix itself
        curvature = GaussNewton(inner, hyper, batch, check=False, differentiate=False)
    return curvature, layers.found


def _moment(layer: Layer, left: Tensor | None, right: Tensor | None) -> Tensor | float:
    """The part of one use in the matrix of outputs, not symmetric."""
    if left is None or right is None:
        return 0.0
    return layer.rows(left).T @ layer.rows(right)


def _inverse_root(block: _Block, moment: Tensor, shift: Tensor) -> Matvec:
    r"""The map :math:`\mathbf{V} \mapsto (\mathbf{A} \otimes \mathbf{S} + d \mathbf{I})^{-1/2} \mathbf{V}`."""
    work = torch.promote_types(shift.dtype, torch.float32)
    inputs, shift = block.inputs.to(work), shift.to(work).nan_to_num(0.0, 0.0, 0.0)
    if block.bias is not None:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    inputs = inputs.nan_to_num(0.0, 0.0, 0.0) / len(inputs) ** 0.5
    moment = moment.to(inputs).expand(len(block.layers[0].weight), len(block.layers[0].weight))
    tiny = torch.finfo(work).eps
    if len(inputs) < inputs.shape[1]:  # the eigenvectors with eigenvalues other than zero
        a, vectors = _eigen(inputs @ inputs.T)
        kept = a > 10 * len(a) * tiny * a.amax()
        a, q = torch.where(kept, a, 0.0), inputs.T @ (vectors * torch.where(kept, a, 1.0).rsqrt() * kept)
    else:
        a, q = _eigen(inputs.T @ inputs)
    s, p = _eigen((moment + moment.T) / 2)
    values = s[:, None].abs() * a.clamp_min(0) + shift
    # What has hardly any curvature in the approximation may have some in the matrix itself.
    floor = torch.maximum(values.amax(), shift) * tiny**0.5
    floor = torch.where(floor > 0, floor, 1.0)
    outside = torch.maximum(shift, floor).rsqrt()
    inside = torch.maximum(values, floor).rsqrt() - outside

    def product(matrix: Tensor) -> Tensor:
        wide = matrix.to(work)
        change: Tensor = p @ (inside * (p.T @ (wide @ q))) @ q.T
        return (outside * wide + change).to(matrix.dtype)

    return product


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; what is not finite, which they would refuse, is zero."""
    values, vectors = torch.linalg.eigh(matrix.nan_to_num(0.0, 0.0, 0.0))
    return values, vectors
