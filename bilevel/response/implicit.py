r"""Implicit differentiation: the best-response Jacobian from the implicit function theorem.

The weights are trained as usual. At the outer step, with :math:`\mathbf{H} = \partial^2_w \mathcal{L}_T` at the current
weights (Lemma ``best-response-lamma``),

.. math::
    \left(\frac{\partial r}{\partial \lambda}\right)^\top u
    = -\left(\frac{\partial^2 \mathcal{L}_T}{\partial w\,\partial \lambda}\right)^\top \mathbf{H}^{-1} u,

where a linear solver approximates :math:`\mathbf{H}^{-1} u` from products with :math:`\mathbf{H}`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from bilevel.checks import check_continuous, check_dependence, check_outputs, check_smooth, isolated, repeatable
from bilevel.linear_solvers import CG, LinearSolver, LinearSolverError
from bilevel.linear_solvers.base import Attempt, Matrix, Matvec
from bilevel.linear_solvers.iterative import Iterative
from bilevel.parallel import added, count, flat_like, is_sharded, plain, whole
from bilevel.precision import has_half_precision, own_precision
from bilevel.problem import Loss, Model, Problem
from bilevel.response.base import BestResponse, Doubt, Method
from bilevel.response.compiled_curvature import CompiledCurvature, Products
from bilevel.response.curvature import Curvature, GaussNewton, Hessian, flatten, unflatten
from bilevel.response.kfac import KFAC
from bilevel.response.preconditioner import Preconditioner

FAMILY = "implicit differentiation"
HALF_PRECISION = (
    "inner_loss computes in half precision (autocast, or half() inside the network), where products with second "
    "derivatives have two or three correct digits: a linear solver takes that for a matrix that is not symmetric. "
    "Switch it off where the loss itself or the network switches it on, or use method='implicit_identity', 'unrolled' "
    "or 'delta_stn'."
)
MOST_STEPS = 50
"""Of a solver, as one graph."""
CURVATURES: dict[str, type[Curvature]] = {"hessian": Hessian, "gauss_newton": GaussNewton}


@final
@dataclass(frozen=True)
class Implicit(Method):
    r"""Implicit differentiation with a linear solver.

    The hypergradient is exact where the weights minimise the inner loss and the solver converges. It needs no response
    to be learned and works for any number of hyperparameters. A product costs a backward pass through the gradient.
    It cannot tune a hyperparameter in which the inner loss has no derivative, such as a dropout rate or an integer.

    Attributes:
        linear_solver: Approximates :math:`\mathbf{H}^{-1} u`.
        curvature: ``"hessian"``, or ``"gauss_newton"`` for the positive semi-definite matrix in which the network is
            linearised.
        warm_start: Start the solver from the solution of the previous outer step.
        preconditioner: Lets a solver that iterates take fewer steps to the same solution; made anew at each outer step.

    Example:
        >>> Implicit(CG(max_steps=5)).curvature
        'hessian'
    """

    linear_solver: LinearSolver = field(default_factory=CG)
    curvature: str = "hessian"
    warm_start: bool = True
    preconditioner: Preconditioner | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            TypeError: If ``linear_solver`` is not a linear solver.
            ValueError: If another setting is out of range.
        """
        if not isinstance(self.linear_solver, LinearSolver):
            raise TypeError(
                f"Implicit: linear_solver must be a linear solver such as bilevel.CG(), got {self.linear_solver!r}."
            )
        if self.curvature not in list(CURVATURES):
            raise ValueError(f"Implicit: curvature must be 'hessian' or 'gauss_newton', got {self.curvature!r}.")
        if not isinstance(self.warm_start, bool):
            raise ValueError(f"Implicit: warm_start must be True or False, got {self.warm_start!r}.")
        if self.preconditioner is None:
            return
        if not isinstance(self.preconditioner, Preconditioner):
            raise TypeError(
                f"Implicit: preconditioner must be a preconditioner such as bilevel.Diagonal(), got "
                f"{self.preconditioner!r}."
            )
        if not isinstance(self.linear_solver, Iterative):
            raise ValueError(
                f"Implicit: a preconditioner is for solvers that iterate, CG, MINRES and Neumann, and "
                f"{type(self.linear_solver).__name__} does not: leave it out."
            )
        if isinstance(self.preconditioner, KFAC) and self.preconditioner.damping:
            raise ValueError(
                f"Implicit: as a preconditioner, KFAC takes the damping of the linear solver, got "
                f"{self.preconditioner!r}: give it to {type(self.linear_solver).__name__}."
            )

    @property
    def approximation(self) -> Preconditioner | None:
        """The preconditioner, or the solver if it is one, which is made anew at each outer step; or None."""
        return self.linear_solver if isinstance(self.linear_solver, Preconditioner) else self.preconditioner

    @override
    def bind(self, problem: Problem) -> ImplicitResponse:
        """Refuse integers, then start at the weights of the problem."""
        check_continuous(problem, FAMILY)
        return ImplicitResponse(problem, self)


@final
class ImplicitResponse(BestResponse):
    """The current weights, and the derivative of their best response."""

    guess: Tensor
    can_compile = True

    def __init__(self, problem: Problem, settings: Implicit) -> None:
        """Start at the weights of the problem."""
        super().__init__(problem)
        self.settings = settings
        self.register_buffer("guess", torch.zeros_like(flatten(list(self.inner.params().values()))).detach())
        self._solution = self.guess
        self._compiled: CompiledCurvature | None = None
        self._traced: list[Any] | None = None
        solver = settings.linear_solver
        fixed = isinstance(solver, Iterative) and solver.rtol == 0 and solver.max_steps <= MOST_STEPS
        self.whole = fixed and settings.preconditioner is None

    @override
    def divide(self, like: Tensor) -> None:
        """Keep a part of the vectors of the solver, too.

        Raises:
            ValueError: If the solver needs whole ones.
        """
        if not self.settings.linear_solver.divides:
            raise ValueError(
                f"Implicit: {type(self.settings.linear_solver).__name__} needs whole vectors, and the weights are "
                "divided among processes: use CG, MINRES, Neumann or Identity."
            )
        if self.settings.preconditioner is not None:
            raise ValueError(
                "Implicit: a preconditioner needs whole vectors, and the weights are divided among processes: leave it "
                "out."
            )
        self.guess = flat_like(self.guess, like)
        self._solution = self.guess

    @override
    def connect(self, optimizer: Optimizer, clip: float | None) -> None:
        """Compile the products if ``compiles`` is set; the optimizer is not used."""
        if self.compiles:
            self._compiled = CompiledCurvature(
                CURVATURES[self.settings.curvature], self.inner, self.settings.linear_solver
            )

    @override
    def check(self, hyper: Tensor, batch: Any) -> None:
        """Refuse what has no second derivatives, and losses that the theorem, or the curvature, does not fit."""
        with repeatable(self.problem.device):
            check_dependence(self._curvature(hyper, isolated(batch)), self.problem, FAMILY)
        check_smooth(self.problem, self.inner, hyper, batch, method=FAMILY)
        if self.settings.approximation is not None:
            with repeatable(self.problem.device):
                self.settings.approximation.check(self.inner, hyper, isolated(batch))
        if self.settings.curvature == "gauss_newton":
            who = "the Gauss-Newton matrix"
            check_outputs(self.problem, self.inner, hyper, batch, method=who, remedy="curvature='hessian'")

    @override
    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        r"""The inner loss of the weights, :math:`\mathcal{L}_T(\lambda, w)`."""
        yield self.problem.inner_loss(self.inner.model(self.inner.params(), update_buffers=True), hyper, batch)

    @override
    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> Model:
        """The model at the current weights; differentiating it solves the linear system on ``train_batch``."""
        weights = [weight.detach() for weight in self.inner.params().values()]
        values = weights
        if hyper.requires_grad:
            values = _Response.apply(self, train_batch, hyper, *weights)  # type: ignore[no-untyped-call]
        return self.inner.model(dict(zip(self.inner.params(), values, strict=True)))

    @override
    def jvp(self, hyper: Tensor, tangent: Tensor, train_batch: Any = None) -> dict[str, Tensor]:
        r"""The product :math:`-\mathbf{H}^{-1} \frac{\partial^2 \mathcal{L}_T}{\partial w\,\partial \lambda} v`."""
        with own_precision(hyper.device):
            curvature, share = self._curvature(hyper, plain(train_batch)), self._share(train_batch)
            right = -curvature.cross_jvp(tangent)
            solution = self._jvp_solution(hyper, train_batch, self._added(curvature, share), self._add(right, share))
        return dict(zip(self.inner.params(), unflatten(whole(solution), curvature.weights), strict=True))

    @property
    @override
    def carries(self) -> bool:
        """With a warm start."""
        return self.settings.warm_start

    @override
    def commit(self) -> None:
        """Keep the solution of this outer step as the guess of the next one."""
        if self.settings.warm_start:
            self.guess.copy_(self._solution)

    def solve(self, hyper: Tensor, train_batch: Any, cotangent: Tensor) -> Tensor:
        r"""The transposed action :math:`(\partial r / \partial \lambda)^\top u` by one linear solve.

        Args:
            hyper: Shape ``(h,)``.
            train_batch: As in :meth:`forward`.
            cotangent: The weights u, flat.

        Returns:
            A tensor of shape ``(h,)``; with several processes, the part of this one, of the sum of all their u.
        """
        share = self._share(train_batch)
        root = self._root(hyper, plain(train_batch), share)
        curvature = self._products(hyper, plain(train_batch))
        guess = self.guess if self.settings.warm_start else None
        right = self._sum(cotangent)
        matrix = self._added(curvature, share)
        found = self.settings.linear_solver.attempt(matrix, right, guess, root)
        part = -(matrix if isinstance(matrix, _Shared) else curvature).cross_vjp(whole(found.solution))
        if self._traced is not None:
            self._traced = [found.solution, found.facts, right, guess]
            return part
        self._judge(found, lambda: curvature)
        return part if share is None else torch.where(share == 0, 0.0, share.to(part) * part)

    def _judge(self, found: Attempt, curvature: Callable[[], Curvature | Products]) -> None:
        """Judge a solve now, or with everything else."""
        self._solution = found.solution

        def settle(facts: list[float]) -> None:
            try:
                steps = torch.full((), found.judge(facts), device=found.solution.device)
            except LinearSolverError as error:
                at = curvature()
                if isinstance(at, Curvature) and has_half_precision(at.loss):
                    error.add_note(HALF_PRECISION)
                raise
            self.report = {"residual": found.residual, "solver_steps": steps}
            if self.settings.approximation is not None:
                self.report["preconditioner_products"] = torch.full_like(steps, self.settings.approximation.probes)

        if self.doubts is None:
            settle(found.facts.tolist())
        else:
            self.doubts.append(Doubt(found.facts, settle))

    @override
    @contextmanager
    def trace(self, reads: Any) -> Generator[None]:
        """Products are traced, not compiled, and nothing is judged."""
        self._traced = []
        try:
            yield
        finally:
            self._traced = None

    @override
    def left(self) -> Any:
        """The solution, what judges it, the right-hand side, and the guess."""
        return self._traced

    @override
    def accept(self, left: Any, hyper: Tensor, train_batch: Any) -> None:
        """Judge a solve that was compiled; if it failed, products that are not compiled find out why."""
        solution, facts, right, guess = left
        made: list[Curvature] = []

        def curvature() -> Curvature:
            if not made:
                made.append(self._curvature(hyper, plain(train_batch)))
            return made[0]

        solver = self.settings.linear_solver
        assert isinstance(solver, Iterative)
        self._judge(solver.made(lambda p: curvature().product(p), right, guess, solution, facts), curvature)

    @override
    def runs_compiled(self) -> bool:
        """Whether the products are."""
        return self._compiled is not None and self._compiled.working

    def _root(self, hyper: Tensor, batch: Any, share: Tensor | None) -> Matvec | None:
        """The preconditioner on this batch, if there is one."""
        made, solver = self.settings.approximation, cast(Any, self.settings.linear_solver)
        if made is None:
            return None
        return made.root(self.inner, hyper, batch, solver.damping, lambda vector: self._add(vector, share))

    def _jvp_solution(self, hyper: Tensor, batch: Any, matvec: Matvec, right: Tensor) -> Tensor:
        solver = self.settings.linear_solver
        if self.settings.approximation is None:
            return solver(matvec, right)
        found = solver.attempt(matvec, right, None, self._root(hyper, plain(batch), self._share(batch)))
        found.judge(found.facts.tolist())
        return found.solution

    def _share(self, batch: Any) -> Tensor | None:
        """The part of the examples that this process has, or None if it is the only one."""
        group = self.inner.group
        return None if group is None else group.share(count(self.problem.examples, batch))

    def _added(self, curvature: Curvature | Products, share: Tensor | None) -> Matvec:
        """Products with the curvature of all processes: one all-reduce each, of the size of the weights."""
        if isinstance(curvature, Products):  # of one process
            return cast(Matvec, curvature)
        if share is None:
            return _Shared(curvature)
        return lambda vector: self._add(curvature.product(whole(vector)), share)

    def _add(self, vector: Tensor, share: Tensor | None) -> Tensor:
        if self.inner.group is None or share is None:
            return vector
        return self._sum(torch.where(share == 0, 0.0, share.to(vector) * vector))

    def _sum(self, vector: Tensor) -> Tensor:
        """Over all processes; of which each gets a part, if it keeps no more of the weights."""
        if self.inner.group is None:
            return vector
        if is_sharded(self.guess):
            return added(vector, self.guess)
        return self.inner.group.add([vector])[0]

    def _products(self, hyper: Tensor, batch: Any) -> Curvature | Products:
        """The curvature that a solve uses."""
        if self._traced is not None:  # without the check, which reads the values of tensors: a trace has none
            return CURVATURES[self.settings.curvature](self.inner, hyper, batch, check=False)
        return self._curvature(hyper, batch) if self._compiled is None else self._compiled(hyper, batch)

    def _curvature(self, hyper: Tensor, batch: Any) -> Curvature:
        return CURVATURES[self.settings.curvature](self.inner, hyper, batch)


@final
class _Shared(Matrix):
    """A curvature that makes the product with the solution and the mixed one in one backward pass."""

    def __init__(self, curvature: Curvature) -> None:
        self._curvature = curvature
        self._solution: Tensor | None = None
        self._version = 0
        self._cross: Tensor | None = None

    @override
    def __call__(self, p: Tensor) -> Tensor:
        return self._curvature.product(p)

    @override
    def last(self, x: Tensor) -> Tensor:
        product, self._cross = self._curvature.product_and_cross_vjp(x)
        self._solution, self._version = x, x._version
        return product

    def cross_vjp(self, solution: Tensor) -> Tensor:
        """As :meth:`Curvature.cross_vjp`."""
        if self._cross is None or solution is not self._solution or solution._version != self._version:
            return self._curvature.cross_vjp(solution)
        return self._cross


class _Response(torch.autograd.Function):
    """The weights as a function of λ, whose derivative is that of the implicit function theorem."""

    @staticmethod
    @override
    def forward(
        ctx: Any, response: ImplicitResponse, batch: Any, hyper: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.response, ctx.batch = response, batch
        ctx.save_for_backward(hyper)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @override
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (hyper,) = ctx.saved_tensors
        gradient = ctx.response.solve(hyper, ctx.batch, flatten(cotangents))
        return None, None, gradient, *[None] * len(cotangents)
