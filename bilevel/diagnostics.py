r"""How good is the hypergradient? A method's best response against a converged linear solve.

At a solution of the inner problem the implicit function theorem (Lemma ``best-response-lamma``) gives the Jacobian that
every method approximates, :math:`\partial r / \partial \lambda = -\mathbf{H}^{-1} \partial_w \partial_\lambda
\mathcal{L}_T`. Where m weights are few enough to solve with :math:`\mathbf{H}`, the two can be compared.
"""

from __future__ import annotations

import copy
import math
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bilevel.arguments import check_integer
from bilevel.history import History
from bilevel.linear_solvers import (
    CG,
    MINRES,
    ConvergenceWarning,
    Exact,
    LinearSolver,
    LinearSolverError,
    Neumann,
    Nystrom,
    Solve,
)
from bilevel.linear_solvers.base import Matvec, Operator, norm
from bilevel.linear_solvers.iterative import probe
from bilevel.loop import Round, Solution
from bilevel.problem import Variables
from bilevel.response import BestResponse, Implicit, Method
from bilevel.response.curvature import Curvature, GaussNewton, Hessian, flatten, unflatten
from bilevel.response.hypernetwork import Hypernetwork
from bilevel.solver import DivergenceError, Solver

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LANCZOS_STEPS = 50
SOLVE_STEPS = 1000
ACCURATE = 1e-3  # a residual, or a relative error, that is as good as zero here
SOLVED = 0.05  # a Newton step, relative to the weights, below which the inner problem counts as solved
RELATIVE_DAMPING = 1e-4
MATRICES = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton matrix"}


class Comparison(NamedTuple):
    r"""A vector a of the method against b of the reference.

    Attributes:
        cosine: Of the angle between them; NaN if one of them is zero.
        norm_ratio: :math:`\|a\| / \|b\|`.
        relative_error: :math:`\|a - b\| / \|b\|`.
    """

    cosine: float
    norm_ratio: float
    relative_error: float


UNKNOWN = Comparison(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Diagnosis:
    r"""What :func:`diagnose` found. Prints as a table, and says what it means.

    A number that could not be computed is NaN, and ``meaning`` says why.

    Attributes:
        method: The method.
        reference: The linear solver that it was compared with, and its matrix.
        cosine: Between the response parts :math:`(\partial r / \partial \lambda)^\top \partial_w \mathcal{L}_V` of the
            hypergradient; NaN if one of them is zero.
        norm_ratio: Norm of the method's response part over that of the reference.
        relative_error: Norm of their difference over that of the reference.
        total: The same comparison of the whole hypergradient, its direct part included.
        jacobian: The same comparison of :math:`(\partial r / \partial \lambda)\, v`, the change of the weights along
            the hypergradient v of the reference.
        columns: The same comparison of :math:`\partial r / \partial \lambda_i`, by hyperparameter; empty if there are
            more than ``max_columns``.
        largest_curvature: The largest eigenvalue of the inner Hessian; from below, if estimated.
        smallest_curvature: The smallest one; from above, if estimated.
        inner_gradient: :math:`\|\nabla_w \mathcal{L}_T\| / \|w\|`.
        inner_distance: :math:`\|\mathbf{H}^{-1} \nabla_w \mathcal{L}_T\| / \|w\|`, the Newton step to the inner
            solution, relative to the weights.
        residual: Relative residual of the reference's linear system, recomputed from its solution.
        excluded: Hyperparameters in which the gradient of the inner loss has no derivative, left out of everything
            above: the reference cannot see them.
        meaning: What it means and what to try.
    """

    method: str
    reference: str
    cosine: float
    norm_ratio: float
    relative_error: float
    total: Comparison
    jacobian: Comparison
    columns: dict[str, Comparison]
    largest_curvature: float
    smallest_curvature: float
    inner_gradient: float
    inner_distance: float
    residual: float
    excluded: tuple[str, ...]
    meaning: str

    def as_dict(self) -> dict[str, Any]:
        """Everything in one flat dict of numbers and strings.

        Returns:
            Keys like ``"cosine"``, ``"jacobian.cosine"`` and ``"columns.decay.cosine"``; ``excluded`` is a list.
        """
        entries: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Comparison):
                entries |= {f"{name}.{key}": number for key, number in value._asdict().items()}
            elif name == "columns":
                for column, row in self.columns.items():
                    entries |= {f"columns.{column}.{key}": number for key, number in row._asdict().items()}
            else:
                entries[name] = list(value) if name == "excluded" else value
        return entries

    def __str__(self) -> str:
        """Make a table of the comparisons, then the rest, then the meaning."""
        rows = {
            "response gradient": Comparison(self.cosine, self.norm_ratio, self.relative_error),
            "hypergradient": self.total,
            "weights along it": self.jacobian,
            **{f"weights along {name}": row for name, row in self.columns.items()},
        }
        width = max(map(len, rows)) + 2
        lines = [f"{self.method} against {self.reference}", " " * width + "  cosine  norm ratio  relative error"]
        lines += [
            f"{name:<{width}}{row.cosine:>8.3f}{row.norm_ratio:>12.3g}{row.relative_error:>16.2g}"
            for name, row in rows.items()
        ]
        lines += [
            f"curvature from {self.smallest_curvature:.3g} to {self.largest_curvature:.3g}, "
            f"residual of the reference {self.residual:.1e}",
            f"inner gradient {self.inner_gradient:.2g} and Newton step {self.inner_distance:.2g}, "
            "relative to the weights",
        ]
        return "\n".join([*lines, *textwrap.wrap(self.meaning, 96, break_on_hyphens=False)])


def diagnose(
    solver: Solver,
    train_batch: Any = None,
    valid_batch: Any = None,
    *,
    linear_solver: LinearSolver | None = None,
    curvature: str = "hessian",
    max_dense: int = 500,
    max_columns: int = 8,
) -> Diagnosis:
    r"""Compare a method's hypergradient and Jacobian with a converged linear solve.

    Both are taken at the current weights and unperturbed hyperparameters, on the same batches and with the same dropout
    masks; for :class:`Unrolled`, at the weights after its steps, all of them on ``train_batch``. Nothing is changed:
    not the solver, its random streams, the user's module or the global random state.

    It costs one solve for the hypergradient, one for the Newton step, one for the Jacobian along the hypergradient and
    one per column, each of up to 1000 products with the Hessian if there are more than ``max_dense`` weights; and two
    copies of the response in memory.

    Args:
        solver: At any point of a run.
        train_batch: One batch for the inner loss. The larger, the better it stands for the inner problem. For
            :class:`Unrolled` also a list of one for each step, the first of which is that of the reference.
        valid_batch: One batch for the outer loss.
        linear_solver: The reference. By default a dense solve for at most ``max_dense`` weights, otherwise :class:`CG`
            to rounding; :class:`MINRES`, at last with damping, if the matrix is singular or indefinite.
        curvature: Matrix of the reference, ``"hessian"`` or ``"gauss_newton"``.
        max_dense: Form the matrix if there are at most that many weights; estimate its eigenvalues by 50 steps of
            Lanczos otherwise.
        max_columns: Compare the columns of the Jacobian one by one if there are at most that many.

    Returns:
        The comparison. A linear system that cannot be solved leaves NaN, and the diagnosis says why.

    Raises:
        DivergenceError: If a gradient is not finite.
        TypeError: If ``solver`` is not a solver.

    Example:
        >>> import bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(2)},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]).square().sum(),
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3).square().sum(),
        ...     hyper={"target": bilevel.real([0.0, 0.0])},
        ... )
        >>> solver = bilevel.Solver(problem, method="delta_stn")
        >>> slope = 0.5 * torch.eye(2)  # where the best response has slope 1
        >>> solver.response.theta.load_state_dict({"slopes.0": slope})
        <All keys matched successfully>
        >>> print(diagnose(solver))
        DeltaSTN against Exact on the Hessian
                                   cosine  norm ratio  relative error
        response gradient           1.000         0.5             0.5
        hypergradient               1.000         0.5             0.5
        weights along it            1.000         0.5             0.5
        weights along target[0]     1.000         0.5             0.5
        weights along target[1]     1.000         0.5             0.5
        curvature from 2 to 2, residual of the reference 0.0e+00
        inner gradient 0 and Newton step 0, relative to the weights
        The hypergradient points the right way (cosine 1.000) but is 50 % too short: fine for adaptive
        outer optimizers such as Adam and RMSprop; plain SGD takes steps that much too small.
    """
    if not isinstance(solver, Solver):
        hint = ": write solution.solver" if isinstance(solver, Solution) else ""
        raise TypeError(f"solver must be a bilevel.Solver, got a {type(solver).__name__}{hint}.")
    _check(train_batch, valid_batch, linear_solver, curvature, max_dense, max_columns)
    with warnings.catch_warnings(), torch.enable_grad():
        # What an inexact solve does to the hypergradient is the subject of the comparison.
        warnings.simplefilter("ignore", ConvergenceWarning)
        point = _Point(solver, solver.to_device(train_batch), solver.to_device(valid_batch), curvature)
        for name, vector in (("outer", point.cotangent), ("inner", point.gradient)):
            if not bool(vector.isfinite().all()):
                raise DivergenceError(
                    f"the gradient of the {name} loss in the weights is not finite on this batch: look for log, sqrt "
                    "or division at zero, or for weights that have diverged."
                )
        return _examine(point, linear_solver, max_dense, max_columns)


class Diagnose:
    """A callback that diagnoses the method every few rounds, always on the same batches.

    It changes nothing about the run: ``bilevel.solve(..., callbacks=[Diagnose(every=10, train=batch, valid=batch)])``.

    Attributes:
        diagnoses: One :class:`Diagnosis` each.
        history: The round and their numbers, named as in :meth:`Diagnosis.as_dict`.

    Example:
        >>> import bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        ...     hyper={"target": bilevel.real(0.0)},
        ... )
        >>> callback = Diagnose(every=2)
        >>> solution = bilevel.solve(problem, method="implicit_exact", steps=6, progress=False, callbacks=[callback])
        >>> callback.history["round"], callback.history["cosine"]
        (array([2., 4., 6.]), array([1., 1., 1.]))
    """

    def __init__(
        self,
        *,
        every: int = 10,
        train: Any = None,
        valid: Any = None,
        linear_solver: LinearSolver | None = None,
        curvature: str = "hessian",
        max_dense: int = 500,
        max_columns: int = 0,
    ) -> None:
        """Choose when, and on which batches.

        Args:
            every: Rounds from one diagnosis to the next.
            train: One batch for the inner loss.
            valid: One batch for the outer loss.
            linear_solver: As in :func:`diagnose`, and so is all that follows.
            curvature: See there.
            max_dense: See there.
            max_columns: See there.
        """
        check_integer("every", every, 1)
        _check(train, valid, linear_solver, curvature, max_dense, max_columns)
        self.every = every
        self.diagnoses: list[Diagnosis] = []
        self.history = History()
        self._batches = (train, valid)
        self._options: dict[str, Any] = {
            "linear_solver": linear_solver,
            "curvature": curvature,
            "max_dense": max_dense,
            "max_columns": max_columns,
        }

    def __call__(self, event: Round) -> None:
        """Diagnose, if it is time to.

        Args:
            event: The round that has ended.
        """
        if event.index % self.every:
            return
        found = diagnose(event.solver, *self._batches, **self._options)
        self.diagnoses.append(found)
        numbers = {name: value for name, value in found.as_dict().items() if isinstance(value, float)}
        self.history.append({"round": event.index, **numbers})

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw cosine, norm ratio and relative error over the rounds.

        Args:
            path: Save the figure there, if given.

        Returns:
            A matplotlib figure; it is not shown.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If there is no diagnosis yet.
        """
        if not self.history:
            raise ValueError(f"there is nothing to plot: no diagnosis yet, the first is made in round {self.every}.")
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'bilevel[plot]'.") from error
        figure = Figure(figsize=(10.8, 2.8), layout="constrained")
        FigureCanvasAgg(figure)
        for axis, (quantity, ideal) in zip(
            figure.subplots(1, 3), {"cosine": 1.0, "norm_ratio": 1.0, "relative_error": 0.0}.items(), strict=True
        ):
            axis.axhline(ideal, color="0.7", linewidth=1)
            for label, prefix in (("response gradient", ""), ("hypergradient", "total."), ("weights", "jacobian.")):
                values = self.history[prefix + quantity]
                shown = np.where(np.isfinite(values), values, np.nan)
                axis.plot(self.history["round"], shown, "o-", markersize=2, linewidth=1.2, label=label)
            axis.set_ylabel(quantity.replace("_", " "))
            axis.set_xlabel("round")
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axis.legend(fontsize=6)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


class _Point:
    """Where the solver stands, on copies: the weights, both gradients, the curvature and the response.

    Attributes:
        method: Settings of the method.
        response: A copy of the response, since a method may note things while it differentiates.
        hyper: The unconstrained vector.
        inner: The weights at ``hyper``, which are not those in ``response.inner`` for every method.
        weights: The same, flat.
        cotangent: The gradient of the outer loss in the weights.
        direct: Its gradient in the hyperparameters at fixed weights.
        hessian: Of the inner loss.
        curvature: The matrix of the reference.
        kind: Its name.
        gradient: Of the inner loss in the weights.
    """

    def __init__(self, solver: Solver, train_batch: Any, valid_batch: Any, curvature: str) -> None:
        """Take copies, and differentiate both losses."""
        self.method, self.problem = solver.method, solver.problem
        count = solver.response.unrolled_steps
        self.train_batch = [train_batch] * count if count else train_batch
        if count and isinstance(train_batch, list) and len(train_batch) == count:  # as an outer step takes it
            self.train_batch, train_batch = train_batch, train_batch[0]
        self.kind = curvature
        self.stream = solver.streams["loss"]
        self.hyper = solver.vector.detach().clone()
        self.response: BestResponse = self._copy(solver.response)
        ahead: BestResponse = self._copy(solver.response)
        with self.replay():
            params = ahead(self.hyper, self.train_batch).params
        ahead.commit()
        self.inner: Variables = ahead.inner
        with torch.no_grad():
            for name, weight in self.inner.params().items():
                weight.copy_(params[name])
        self.weights = flatten([weight.detach() for weight in self.inner.weights])
        self.cotangent, self.direct = self._outer_gradient(valid_batch)
        with self.replay():
            self.hessian = Hessian(self.inner, self.hyper, train_batch)
        self.curvature: Curvature = self.hessian
        if curvature == "gauss_newton":
            with self.replay():
                self.curvature = GaussNewton(self.inner, self.hyper, train_batch)
        pairs = zip(self.hessian.gradient, self.hessian.weights, strict=True)
        self.gradient = flatten([torch.zeros_like(leaf) if part is None else part.detach() for part, leaf in pairs])

    def replay(self) -> AbstractContextManager[None]:
        """Draw what the next step of the solver would draw, always from the start."""
        return copy.deepcopy(self.stream)()

    def vjp(self) -> Tensor:
        """The response part of the method's hypergradient."""
        cotangent = dict(zip(self.inner.params(), unflatten(self.cotangent, list(self.inner.weights)), strict=True))
        with self.replay():
            return self.response.vjp(self.hyper, cotangent, self.train_batch).detach()

    def jvp(self, direction: Tensor) -> Tensor:
        """The method's change of the weights along a direction."""
        with self.replay():
            change = self.response.jvp(self.hyper, direction, self.train_batch)
        return flatten([change[name].detach() for name in self.inner.params()])

    def _copy(self, module: Any) -> Any:
        return copy.deepcopy(module, {id(self.problem): self.problem})

    def _outer_gradient(self, batch: Any) -> tuple[Tensor, Tensor]:
        leaf = self.hyper.clone().requires_grad_()
        inputs = [*self.inner.weights, leaf]
        with self.replay():
            loss = self.problem.outer_loss(self.inner.model(self.inner.params()), leaf, batch).value
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if loss.requires_grad:
            with self.problem.differentiating():
                found = torch.autograd.grad(loss, inputs, allow_unused=True)
        pairs = zip(found, inputs, strict=True)
        *through, direct = [torch.zeros_like(one) if part is None else part for part, one in pairs]
        return flatten(through), direct


@dataclass
class _Reference:
    """Linear solvers in a row: the first that manages takes over from those before it.

    Attributes:
        matvec: The matrix.
        solvers: The one in charge, and those to fall back on.
        troubles: What made the earlier ones give up.
    """

    matvec: Matvec
    solvers: list[LinearSolver]
    troubles: list[str] = field(default_factory=list)

    def solve(self, v: Tensor) -> Solve:
        """Solve the system, or raise what the last solver raises."""
        while True:
            solver, *rest = self.solvers
            try:
                found = solver.solve_with_info(self.matvec, v)
                if not rest or float(found.residual) <= ACCURATE:
                    return found
                trouble = f"{type(solver).__name__}: the relative residual is {float(found.residual):.1e}."
            except LinearSolverError as error:
                if not rest:
                    raise
                trouble = str(error)
            self.troubles.append(trouble)
            self.solvers = rest


def _examine(point: _Point, linear_solver: LinearSolver | None, max_dense: int, max_columns: int) -> Diagnosis:
    """Compare, and explain."""
    hyper, curvature = point.hyper, point.curvature
    dense = len(point.weights) <= max_dense
    matrix = _dense(point.hessian.product, point.weights) if dense else None
    smallest, largest = _lanczos(point.hessian.product, point.weights) if matrix is None else _eigenvalues(matrix)
    if linear_solver is not None:
        reference = _Reference(curvature.product, [linear_solver])
    elif matrix is None:
        reference = _Reference(curvature.product, _default_solvers(CG, point.weights.dtype, smallest, largest))
    else:
        matrix = matrix if curvature is point.hessian else _dense(curvature.product, point.weights)
        reference = _Reference(matrix.__matmul__, _default_solvers(Exact, point.weights.dtype, smallest, largest))

    # The order matters for the names: whoever solves for the hypergradient is the reference.
    exact = ours = torch.full_like(hyper, math.nan)
    residual, problems = math.nan, []
    try:
        found = reference.solve(point.cotangent)
        exact, residual = -curvature.cross_vjp(found.solution), float(found.residual)
    except LinearSolverError as error:
        problems.append(f"There is no reference to compare with: {error}")
    name, troubles = _name(reference.solvers[0], point.kind), list(reference.troubles)
    try:
        ours = point.vjp()
    except LinearSolverError as error:
        problems.append(f"The method cannot compute its hypergradient here: {error}")

    excluded = [name for name, part in curvature.cross_parts(torch.ones_like(point.weights)).items() if part is None]
    leaves = curvature.hyper.items()
    kept = flatten([torch.full_like(leaf, name not in excluded, dtype=torch.bool) for name, leaf in leaves])
    count = int(kept.sum())
    direction = torch.where(kept, exact + point.direct, 0.0)
    units = torch.eye(len(hyper) if count <= max_columns else 0, len(hyper)).to(hyper)
    entries = [f"{name}{list(i)}" if i else name for name, leaf in leaves for i in np.ndindex(*leaf.shape)]
    response = _compare(ours[kept], exact[kept])
    size = float(norm(point.weights.double()))
    diagnosis = Diagnosis(
        method=_describe(point.method),
        reference=name,
        cosine=response.cosine,
        norm_ratio=response.norm_ratio,
        relative_error=response.relative_error,
        total=_compare((ours + point.direct)[kept], (exact + point.direct)[kept]),
        jacobian=_compare_jacobians(point, reference, direction / norm(direction)),
        columns={
            entry: _compare_jacobians(point, reference, unit)
            for entry, unit, keep in zip(entries, units, kept.tolist(), strict=False)
            if keep
        },
        largest_curvature=largest,
        smallest_curvature=smallest,
        inner_gradient=_quotient(float(norm(point.gradient.double())), size),
        inner_distance=_quotient(_newton_step(point, reference), size),
        residual=residual,
        excluded=tuple(excluded),
        meaning="",
    )
    if not problems:
        problems = [_verdict(diagnosis, point.method, count, bool(point.direct[kept].any()))]
    if residual > ACCURATE:
        problems.insert(
            0,
            f"The reference is not converged (residual {residual:.1e}), so take this with care; float64 or a "
            "linear_solver with damping may help.",
        )
    # At weights of zero every distance is large next to them.
    rounding = torch.finfo(point.weights.dtype).eps ** 0.5 / size if size else 0.0
    return replace(diagnosis, meaning=" ".join(problems + _cautions(diagnosis, troubles, max(SOLVED, rounding))))


def _default_solvers(
    first: type[Exact] | type[CG], dtype: torch.dtype, smallest: float, largest: float
) -> list[LinearSolver]:
    damping = RELATIVE_DAMPING * max(abs(smallest), abs(largest))
    if not math.isfinite(damping):
        return [MINRES(max_steps=1)]  # finds out at once that there is nothing to solve
    settings: dict[str, Any] = {"max_steps": SOLVE_STEPS, "rtol": min(max(1e-10, 100 * torch.finfo(dtype).eps), 1e-2)}
    return [
        Exact() if first is Exact else CG(**settings),
        MINRES(**settings),
        MINRES(**settings, damping=damping),
    ]


def _compare_jacobians(point: _Point, reference: _Reference, direction: Tensor) -> Comparison:
    if not bool(direction.isfinite().all()):
        return UNKNOWN
    try:
        exact = reference.solve(-point.curvature.cross_jvp(direction)).solution
        return _compare(point.jvp(direction), exact)
    except LinearSolverError:
        return UNKNOWN


def _newton_step(point: _Point, reference: _Reference) -> float:
    try:
        return float(norm(reference.solve(point.gradient).solution.double()))
    except LinearSolverError:
        return math.nan


def _check(train: Any, valid: Any, linear_solver: Any, curvature: Any, max_dense: Any, max_columns: Any) -> None:
    for name, batch in (("train", train), ("valid", valid)):
        if isinstance(batch, DataLoader):
            raise TypeError(f"the {name} batch must be one batch, got a DataLoader: write next(iter(loader)).")
    if linear_solver is not None and not isinstance(linear_solver, LinearSolver):
        raise TypeError(f"linear_solver must be a linear solver such as bilevel.CG() or None, got {linear_solver!r}.")
    if curvature not in MATRICES:
        raise ValueError(f"curvature must be 'hessian' or 'gauss_newton', got {curvature!r}.")
    check_integer("max_dense", max_dense, 0)
    check_integer("max_columns", max_columns, 0)


def _compare(ours: Tensor, exact: Tensor) -> Comparison:
    a, b = ours.detach().cpu().double(), exact.detach().cpu().double()
    if len(a) == 0:
        return UNKNOWN
    size, reference = float(norm(a)), float(norm(b))
    cosine = math.nan if size == 0 or reference == 0 else float((a / size) @ (b / reference))
    # max and min would turn NaN into a number.
    cosine = cosine if abs(cosine) <= 1 or math.isnan(cosine) else math.copysign(1.0, cosine)
    return Comparison(cosine, size / reference if reference else math.nan, _quotient(float(norm(a - b)), reference))


def _quotient(size: float, reference: float) -> float:
    """A quotient of norms in which 0 / 0 is 0."""
    return 0.0 if size == 0 else size / reference if reference else math.inf if size > 0 else math.nan


def _dense(product: Matvec, like: Tensor) -> Tensor:
    return torch.stack([product(unit) for unit in torch.eye(len(like)).to(like)], dim=1).detach()


def _eigenvalues(matrix: Tensor) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a symmetric matrix; NaN if it is not finite."""
    wide = matrix.cpu().double()
    if not bool(wide.isfinite().all()):
        return math.nan, math.nan
    values = torch.linalg.eigvalsh((wide + wide.T) / 2)
    return float(values[0]), float(values[-1])


def _lanczos(product: Matvec, like: Tensor) -> tuple[float, float]:
    """Estimate the smallest and the largest eigenvalue from inside, always from the same start."""
    operator = Operator(product, like.dtype, 0.0)
    q = probe(like.to(torch.promote_types(like.dtype, torch.float32)))
    older, beta = torch.zeros_like(q), torch.zeros_like(q[0])
    alphas: list[float] = []
    betas: list[float] = []
    # Without reorthogonalisation, which would keep every vector: rounding then repeats extreme values, no more.
    for _ in range(min(LANCZOS_STEPS, len(q))):
        u = operator(q) - beta * older
        alpha = q @ u
        u = u - alpha * q
        beta = norm(u)
        alphas.append(float(alpha))
        betas.append(float(beta))
        if not betas[-1] > 10 * operator.eps * max(map(abs, alphas + betas)):
            break
        older, q = q, u / beta
    side = torch.tensor(betas[:-1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(side, 1) + torch.diag(side, -1)
    return _eigenvalues(tridiagonal)


def _describe(method: Method) -> str:
    if isinstance(method, Implicit):
        return f"Implicit({type(method.linear_solver).__name__}, {method.curvature})"
    return type(method).__name__


def _name(solver: LinearSolver, curvature: str) -> str:
    damping = solver.damping if isinstance(solver, Exact | CG | MINRES | Neumann | Nystrom) else 0.0
    damped = f" with damping {damping:.1e}" if damping else ""
    return f"{type(solver).__name__} on the {MATRICES[curvature]}{damped}"


def _verdict(found: Diagnosis, method: Method, size: int, direct: bool) -> str:
    """What the comparison says about the hypergradient, and what to try."""
    cosine, ratio, error = found.cosine, found.norm_ratio, found.relative_error
    subject = "The response part of the hypergradient" if direct else "The hypergradient"
    if size == 0:
        return "There is nothing to compare."
    if math.isnan(ratio):
        if error == 0:
            return f"{subject} is zero, for the method and for the reference: here the outer loss does not feel it."
        return f"{subject} is zero for the reference, but not for the method."
    if ratio == 0:
        return f"{subject} is zero, where that of the reference is not: no response has been learned. {_advice(method)}"
    if error <= ACCURATE:
        return f"{subject} agrees with the reference to a relative error of {error:.1e}."
    length = _length(ratio)
    if cosine >= 0.95:
        way = "has the right sign" if size == 1 else f"points the right way (cosine {cosine:.3f})"
        if not length:
            return f"{subject} {way} and has the right length to {100 * abs(ratio - 1):.1f} %."
        steps = "too small" if ratio < 1 else "too large"
        return (
            f"{subject} {way} but is {length}: fine for adaptive outer optimizers such as Adam and RMSprop; plain SGD "
            f"takes steps that much {steps}."
        )
    if cosine < 0:
        way = "has the wrong sign" if size == 1 else f"points the wrong way (cosine {cosine:.3f})"
        said = f"{subject} {way}: a small step along it raises the outer loss."
    else:
        roughly = "roughly" if cosine >= 0.7 else "only vaguely"
        said = f"{subject} points {roughly} the right way (cosine {cosine:.3f}){f' and is {length}' * bool(length)}."
    if direct and found.total.cosine >= 0.95:
        said += f" Its direct part outweighs that: the whole hypergradient has cosine {found.total.cosine:.3f}."
    if isinstance(method, Implicit) and MATRICES[method.curvature] not in found.reference:
        said += (
            f" The method uses the {MATRICES[method.curvature]}, unlike the reference: "
            f"curvature={method.curvature!r} judges its linear solver alone."
        )
    return f"{said} {_advice(method)}"


def _length(ratio: float) -> str:
    """Say how wrong a length is; empty within ten percent."""
    if abs(ratio - 1) <= 0.1:
        return ""
    if ratio < 1:
        return f"{100 * (1 - ratio):.0f} % too short" if ratio >= 0.01 else f"{1 / ratio:.2g} times too short"
    return f"{100 * (ratio - 1):.0f} % too long" if ratio < 2 else f"{ratio:.2g} times too long"


def _advice(method: Method) -> str:
    if isinstance(method, Hypernetwork):
        return (
            "Train the response longer before the outer steps (warmup, inner_steps), with an adaptive "
            "response_optimizer or a higher learning rate; if that does not help, lower scale."
        )
    if isinstance(method, Implicit):
        return "Let the linear solver of the method come closer: more steps or a higher rank, less damping, or CG."
    return "Make more inner steps before each outer step."


def _cautions(found: Diagnosis, troubles: Sequence[str], solved: float) -> list[str]:
    """What limits the comparison: the inner problem, the curvature, the reference, and what was left out."""
    said = []
    if found.inner_distance > solved:
        share = f"{100 * found.inner_distance:.0f} %" if found.inner_distance < 10 else "many times"
        said.append(
            f"The inner problem is not solved on this batch: a Newton step would move the weights by {share} of their "
            "norm, and the reference holds only at a solution. Make more inner steps, or give a larger train batch."
        )
    if found.smallest_curvature < -1e-6 * max(found.largest_curvature, -found.smallest_curvature):
        convex = "" if "Gauss" in found.reference else "; curvature='gauss_newton' compares with a convex model instead"
        said.append(
            f"The inner Hessian has negative curvature {found.smallest_curvature:.2g} (the largest is "
            f"{found.largest_curvature:.2g}): the weights are not at a minimum{convex}."
        )
    if troubles:
        # The remedies that follow the first sentence are for solvers that the user chose.
        causes = "; ".join(trouble.partition(". ")[0].rstrip(".") for trouble in troubles)
        said.append(f"The reference is {found.reference}, since this did not do: {causes}.")
    if found.excluded:
        said.append(
            f"Not compared: {', '.join(found.excluded)}. The gradient of the inner loss has no derivative there (as "
            "with dropout masks and integers), so the reference cannot see them."
        )
    return said


__all__ = ["Comparison", "Diagnose", "Diagnosis", "diagnose"]
