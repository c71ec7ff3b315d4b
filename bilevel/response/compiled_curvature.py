"""Second derivatives of the inner loss from compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast, final

from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from bilevel.compilation import Later, Staged
from bilevel.linear_solvers import LinearSolver
from bilevel.linear_solvers.iterative import Iterative
from bilevel.problem import Variables
from bilevel.response.curvature import Curvature, flatten


class Products(NamedTuple):
    """The products that a linear solve needs, at one point."""

    of_weights: Later
    of_hyper: Later
    step: Later | None = None

    def __call__(self, vector: Tensor) -> Tensor:
        """As :meth:`product`.

        Returns:
            A tensor of shape ``(m,)``.
        """
        return self.product(vector)

    @property
    def loop(self) -> Callable[[], AbstractContextManager[Callable[[Sequence[Tensor]], Sequence[Tensor]]]] | None:
        """Makes whole steps of the solver inside a block, from all that it remembers; None if it makes none."""
        return None if self.step is None else self.step.repeated

    def product(self, vector: Tensor) -> Tensor:
        """As :meth:`Curvature.product`.

        Returns:
            A tensor of shape ``(m,)``.
        """
        return _only(self.of_weights([vector]))

    def cross_vjp(self, vector: Tensor) -> Tensor:
        """As :meth:`Curvature.cross_vjp`.

        Returns:
            A tensor of shape ``(h,)``.
        """
        return _only(self.of_hyper([vector]))


@final
class CompiledCurvature:
    """Makes the products of a curvature from a graph that is compiled once and serves at every point."""

    def __init__(self, kind: type[Curvature], inner: Variables, solver: LinearSolver) -> None:
        """Compile this kind of curvature at the first call, and a step of the solver if it makes any."""
        self._solver = solver if isinstance(solver, Iterative) else None
        self._builder = _Builder(kind, inner)
        self._names = [name for name, _ in self._builder.named_parameters()]
        self._buffer_names = [name for name, _ in self._builder.named_buffers()]
        self._staged = Staged(self._stage, "the products with second derivatives")

    @property
    def working(self) -> bool:
        """Whether nothing has failed so far."""
        return self._staged.working

    def __call__(self, hyper: Tensor, batch: Any) -> Products:
        """The curvature at the current weights.

        Args:
            hyper: Shape ``(h,)``.
            batch: For the inner loss.

        Returns:
            Its products.
        """
        inputs = [*self._builder.parameters()], [*self._builder.buffers()], hyper.detach(), batch
        return Products(*self._staged(*inputs)[1])

    def _stage(
        self, weights: list[Tensor], buffers: list[Tensor], hyper: Tensor, batch: Any
    ) -> tuple[None, list[Later]]:
        named = dict(zip([*self._names, *self._buffer_names], [*weights, *buffers], strict=True))
        curvature: Curvature = functional_call(self._builder, named, (hyper, batch))
        like = flatten(weights).detach()
        parts = [
            Later(lambda vector: [curvature.product(_only(vector))], [like]),
            Later(lambda vector: [curvature.cross_vjp(_only(vector))], [like]),
        ]
        if self._solver is not None:
            step, typical = self._solver.step_of_tensors(curvature.product, like)
            parts.append(Later(cast(Any, step), typical, typical=True))
        return None, parts


def _only(tensors: Sequence[Tensor | None]) -> Tensor:
    (tensor,) = tensors
    assert tensor is not None
    return tensor


class _Builder(nn.Module):
    """Builds a curvature from the weights and buffers that :func:`functional_call` puts in place."""

    def __init__(self, kind: type[Curvature], inner: Variables) -> None:
        super().__init__()
        self.kind = kind
        self.inner = inner

    @override
    def forward(self, hyper: Tensor, batch: Any) -> Curvature:
        # The check reads the values of tensors. A trace has none.
        return self.kind(self.inner, hyper, batch, check=False)
