r"""What a linear solver is: settings, called as ``solve(matvec, v, x0=None)`` on flat vectors.

Every solver approximates :math:`u = (\mathbf{H} + \mu \mathbf{I})^{-1} v`, where ``matvec`` is
:math:`p \mapsto \mathbf{H} p` and :math:`\mu` the damping. None fails silently: one that promises a tolerance
recomputes the true residual at the end and warns if it is larger; one that breaks down raises, and says what to try.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bilevel.interrupts import safe_point
from bilevel.linear_solvers.numbers import Number, divide, on_host, pick
from bilevel.parallel import all_finite, each, is_sharded, local

Matvec = Callable[[Tensor], Tensor]


class LinearSolverError(RuntimeError):
    """A linear system that its solver cannot solve: singular, indefinite, divergent or not finite.

    Example:
        >>> import bilevel
        >>> try:
        ...     bilevel.CG()(lambda p: -p, torch.ones(2))
        ... except LinearSolverError as error:
        ...     print("indefinite" in str(error) or "curvature" in str(error))
        True
    """


class NotFiniteSystemError(LinearSolverError):
    """A linear system with a number that is NaN or infinite."""


class ConvergenceWarning(UserWarning):
    """A linear solver returned a solution that misses its tolerance.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", ConvergenceWarning)  # to make it an error
        >>> warnings.simplefilter("default", ConvergenceWarning)
    """


class Solve(NamedTuple):
    r"""What a linear solver found.

    Attributes:
        solution: The vector u, without an autograd graph.
        residual: The relative residual :math:`\|v - (\mathbf{H} + \mu \mathbf{I}) u\| / \|v\|`, a scalar tensor,
            recomputed from u.
        steps: Iterations taken; for solvers that do not iterate, the products with :math:`\mathbf{H}` they needed.
    """

    solution: Tensor
    residual: Tensor
    steps: int


class Attempt(NamedTuple):
    """A solution that has not been judged yet, because that means to wait for the device.

    Attributes:
        solution: As in :class:`Solve`.
        residual: As in :class:`Solve`.
        facts: The numbers that decide, a vector on the device; empty if they have been read already.
        judge: Takes the facts as numbers. Returns the steps, after a warning where one is due, or raises
            :class:`LinearSolverError`.
    """

    solution: Tensor
    residual: Tensor
    facts: Tensor
    judge: Callable[[list[float]], int]


@dataclass(frozen=True, kw_only=True)
class LinearSolver(ABC):
    """Settings of a linear solver: a frozen dataclass that is called, can be printed and compared, and has no state.

    Attributes:
        divides: Whether it also solves for vectors of which each process has a part.

    Example:
        >>> import bilevel
        >>> H = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> solver: LinearSolver = bilevel.CG(max_steps=2)
        >>> solver(lambda p: H @ p, torch.tensor([2.0, 4.0]))
        tensor([1.0000, 1.0000])
    """

    divides: ClassVar[bool] = False

    def __call__(self, matvec: Matvec, v: Tensor, x0: Tensor | None = None) -> Tensor:
        r"""Solve :math:`(\mathbf{H} + \mu \mathbf{I}) u = v`.

        Args:
            matvec: The linear map :math:`p \mapsto \mathbf{H} p` on vectors like ``v``.
            v: The right-hand side, shape ``(m,)``.
            x0: A guess of the solution, for solvers that iterate; the others ignore it.

        Returns:
            The vector u, of the shape, dtype and device of ``v``, without an autograd graph.
        """
        return self.solve_with_info(matvec, v, x0).solution

    def solve_with_info(self, matvec: Matvec, v: Tensor, x0: Tensor | None = None) -> Solve:
        """The same, and how well it went.

        Args:
            matvec: As in :meth:`__call__`.
            v: As in :meth:`__call__`.
            x0: As in :meth:`__call__`.

        Returns:
            The solution, its true relative residual and the number of steps.
        """
        found = self.attempt(matvec, v, x0)
        return Solve(found.solution, found.residual, found.judge(found.facts.tolist()))

    def attempt(
        self, matvec: Matvec, v: Tensor, x0: Tensor | None = None, root: Callable[[Tensor], Tensor] | None = None
    ) -> Attempt:
        r"""The same, judged later: for callers that read the device once for several purposes.

        Args:
            matvec: As in :meth:`__call__`.
            v: As in :meth:`__call__`.
            x0: As in :meth:`__call__`.
            root: A preconditioner, for solvers that iterate; the others ignore it. It multiplies by a symmetric
                positive definite matrix :math:`\mathbf{R}` of which :math:`\mathbf{R}^2` is close to the inverse of
                :math:`\mathbf{H} + \mu \mathbf{I}`.

        Returns:
            The solution, which may be wrong as long as it is not judged.
        """
        check_system(matvec, v, x0)
        # Half precision is for the matrix only: dot products and factorizations need at least single precision.
        work = torch.promote_types(v.dtype, torch.float32)
        guess = None if x0 is None else x0.detach().to(work)
        found = self._solve(matvec, v.detach(), guess, root)
        return found._replace(solution=found.solution.to(v.dtype))

    @abstractmethod
    def _solve(self, matvec: Matvec, v: Tensor, x0: Tensor | None, root: Callable[[Tensor], Tensor] | None) -> Attempt:
        """Solve a system whose vectors are checked and detached; ``x0`` is in at least single precision."""


class Matrix(ABC):
    """A linear map that is told which product is that with the solution, so that it can compute more along with it."""

    @abstractmethod
    def __call__(self, p: Tensor) -> Tensor:
        """Multiply."""

    @abstractmethod
    def last(self, x: Tensor) -> Tensor:
        """Multiply by what may be the solution."""


@dataclass(frozen=True)
class Operator:
    r"""The map :math:`p \mapsto (\mathbf{H} + \mu \mathbf{I}) p` in at least single precision, its results checked.

    Attributes:
        matvec: Multiplies by :math:`\mathbf{H}`.
        dtype: What ``matvec`` takes and returns.
        damping: The shift :math:`\mu`.
        host: Whether the scalars of an iteration are numbers of Python.
    """

    matvec: Matvec
    dtype: torch.dtype
    damping: float

    host: bool = False

    @cached_property
    def eps(self) -> float:
        """The rounding unit of a product."""
        return torch.finfo(self.dtype).eps

    def number(self, scalar: Tensor) -> Number:
        """A scalar as a number of Python if ``host`` is set, or else as it is.

        Returns:
            The same value.
        """
        return scalar.item() if self.host else scalar

    def __call__(self, p: Tensor) -> Tensor:
        """Multiply.

        Returns:
            A vector of the dtype of ``p``.

        Raises:
            TypeError: If ``matvec`` returns something else than a tensor.
            ValueError: If that tensor is not like its argument.
        """  # noqa: DOC502
        return self._multiply(self.matvec, p)

    def last(self, x: Tensor) -> Tensor:
        """The same for what may be the solution."""
        return self._multiply(self.matvec.last if isinstance(self.matvec, Matrix) else self.matvec, x)

    def _multiply(self, matvec: Matvec, p: Tensor) -> Tensor:
        safe_point()
        given = p if p.dtype == self.dtype else p.to(self.dtype)
        product: Any = matvec(given)
        if not isinstance(product, Tensor):
            raise TypeError(f"matvec must return a tensor, got {type(product).__name__}.")
        alike = product.shape == given.shape and product.dtype == given.dtype and product.device == given.device
        if not alike:
            raise ValueError(
                f"matvec must return a vector like its argument ({_describe(given)}), got one of {_describe(product)}."
            )
        result = product.detach() if product.requires_grad else product
        result = result if result.dtype == p.dtype else result.to(p.dtype)
        return result if self.damping == 0 else torch.add(result, p, alpha=self.damping)


def norm(v: Tensor) -> Tensor:
    """The Euclidean norm, without the overflow and underflow of squares.

    Returns:
        A scalar tensor, the same in all processes that share the vector.

    Example:
        >>> norm(torch.tensor([3e-30, 4e-30])) / 1e-30
        tensor(5.)
    """
    if is_sharded(v):
        return norm(each(v, norm(local(v))))
    if v.numel() == 0:  # of a vector with fewer entries than there are processes
        return v.new_zeros(())
    if on_host(v):
        plain: Tensor = torch.linalg.vector_norm(v)
        # Of this size, no square that matters has left the range of the smallest dtype.
        if 1e-10 < float(plain) < 1e15:
            return plain
    low, high = torch.aminmax(v)
    largest = torch.maximum(-low, high)
    safe = torch.where(largest > 0, largest, 1.0)
    length: Tensor = safe * torch.linalg.vector_norm(v / safe)
    return length


def relative_residual(matvec: Matvec, x: Tensor, v: Tensor, damping: float = 0.0) -> Tensor:
    r"""How far a vector is from solving a system, :math:`\|v - (\mathbf{H} + \mu \mathbf{I}) x\| / \|v\|`.

    Args:
        matvec: The linear map :math:`p \mapsto \mathbf{H} p`.
        x: The vector to judge.
        v: The right-hand side.
        damping: The shift :math:`\mu`.

    Returns:
        A scalar tensor; for ``v = 0``, zero if the residual is zero and infinity otherwise.

    Example:
        >>> relative_residual(lambda p: 2 * p, torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0]))
        tensor(0.7071)
    """
    r = v - Operator(matvec, v.dtype, damping).last(x.to(torch.promote_types(v.dtype, torch.float32)))
    found: Tensor = ratio(norm(r), norm(v))
    return found


def ratio(length: Number, reference: Number) -> Number:
    """A quotient of norms in which 0 / 0 is 0.

    Returns:
        A number of their kind.
    """
    return pick(length == 0, length, divide(length, reference))


def check_system(matvec: object, v: object, x0: object) -> None:
    """Refuse what is not a linear system on flat vectors, before work starts.

    Raises:
        TypeError: If ``matvec`` is not callable, or ``v`` or ``x0`` not a real floating-point tensor.
        ValueError: If ``v`` is not a vector, or ``x0`` not like it.
    """
    if not callable(matvec):
        raise TypeError(f"matvec must be a function of a vector, got {type(matvec).__name__}: write lambda p: H @ p.")
    if not isinstance(v, Tensor) or not v.is_floating_point():
        got = f"dtype {v.dtype}" if isinstance(v, Tensor) else type(v).__name__
        raise TypeError(f"v must be a floating-point tensor, got {got}.")
    if v.ndim != 1 or v.numel() == 0:
        raise ValueError(f"v must be a flat vector with at least one entry, got shape {tuple(v.shape)}: flatten it.")
    if x0 is None:
        return
    if not isinstance(x0, Tensor):
        raise TypeError(f"x0 must be a tensor like v or None, got {type(x0).__name__}.")
    if (x0.shape, x0.dtype, x0.device) != (v.shape, v.dtype, v.device):
        raise ValueError(f"x0 must be like v ({_describe(v)}), got {_describe(x0)}; x0=None starts at zero.")


def check_number(solver: object, name: str, value: object, *, above: float, or_equal: bool, advice: str = "") -> None:
    """Refuse a setting that is not a finite number in range.

    Raises:
        ValueError: If it is not.
    """
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (value > above or (or_equal and value == above)):  # type: ignore[operator]
        bound = f"of at least {above:g}" if or_equal else f"above {above:g}"
        raise ValueError(f"{type(solver).__name__}: {name} must be a finite number {bound}, got {value!r}.{advice}")


def check_count(solver: object, name: str, value: object, *, minimum: int = 1) -> None:
    """Refuse a setting that is not a whole number of at least ``minimum``.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(
            f"{type(solver).__name__}: {name} must be a whole number of at least {minimum}, got {value!r}."
        )


def not_finite(name: str, operator: Operator, v: Tensor, x0: Tensor | None = None) -> LinearSolverError | None:
    """Find out why a solution is not finite.

    Returns:
        The error to raise; None if the inputs and a product with the matrix are finite.
    """
    if not all_finite(v):
        return NotFiniteSystemError(
            f"{name}: v is not finite: look for NaN or overflow in the gradient of the outer loss."
        )
    if x0 is not None and not all_finite(x0):
        return NotFiniteSystemError(f"{name}: x0 is not finite: start from None.")
    if not all_finite(operator(v / norm(v))):
        return NotFiniteSystemError(
            f"{name}: matvec returned NaN or infinity: look for log, sqrt or division at zero in the inner loss, or "
            "for a learning rate that let the weights diverge."
        )
    return None


def _describe(v: Tensor) -> str:
    return f"shape {tuple(v.shape)}, {v.dtype}, {v.device}"
