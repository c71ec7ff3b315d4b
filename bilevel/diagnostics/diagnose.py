"""Compare the hypergradient of a method with a converged linear solve."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bilevel.arguments import check_integer
from bilevel.diagnostics.diagnosis import UNKNOWN, Comparison, Diagnosis, compare, quotient
from bilevel.diagnostics.eigenvalues import dense_matrix, extreme_eigenvalues, lanczos
from bilevel.diagnostics.point import Point
from bilevel.diagnostics.reference import ACCURATE, MATRICES, Reference, default_solvers, name_of
from bilevel.diagnostics.words import cautions, verdict
from bilevel.linear_solvers import CG, ConvergenceWarning, Exact, LinearSolver, LinearSolverError
from bilevel.linear_solvers.base import norm
from bilevel.loop import Solution
from bilevel.precision import own_precision
from bilevel.response import Implicit, Method
from bilevel.response.curvature import flatten
from bilevel.solver import DivergenceError, Solver

SOLVED = 0.05  # a Newton step, relative to the weights, below which the inner problem counts as solved


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

    Both are taken at the current weights and at the hyperparameters without perturbation, on the same batches and with
    the same dropout masks. For :class:`Unrolled` the weights are those after its steps, which all use ``train_batch``.
    Nothing is changed: not the solver, its random streams, the user's module or the global random state.

    It costs one linear solve for the hypergradient, one for the Newton step, one for the Jacobian along the
    hypergradient and one per column. With more than ``max_dense`` weights, a solve takes up to 1000 products with the
    Hessian. Two copies of the response are kept in memory.

    Args:
        solver: The solver, at any point of a run.
        train_batch: One batch for the inner loss. The larger it is, the better it represents the inner problem. For
            :class:`Unrolled` it may be a list with one batch per step; the reference uses the first.
        valid_batch: One batch for the outer loss.
        linear_solver: The reference. By default a dense solve for at most ``max_dense`` weights, otherwise :class:`CG`
            until rounding stops it. If that fails because the matrix is singular or indefinite, :class:`MINRES`
            follows, first without and then with damping.
        curvature: Matrix of the reference, ``"hessian"`` or ``"gauss_newton"``.
        max_dense: Form the matrix if there are at most that many weights. Otherwise estimate its eigenvalues by 50
            steps of Lanczos.
        max_columns: Compare the columns of the Jacobian one by one if there are at most that many.

    Returns:
        The comparison. A linear system that cannot be solved leaves NaN, and the diagnosis says why.

    Raises:
        DivergenceError: If a gradient is not finite.
        TypeError: If ``solver`` is not a solver.
        ValueError: If an argument is out of range, weight decay is decoupled, or the weights are divided among
            processes.

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
    if solver.shards is not None:
        raise ValueError("solver: its weights are divided among processes; diagnose needs whole ones.")
    check_options(train_batch, valid_batch, linear_solver, curvature, max_dense, max_columns)
    if solver.problem.decays:
        raise ValueError(
            "diagnose solves for the minimum of inner_loss, of which decoupled weight decay, "
            f"hyper[{solver.problem.decays.names[0]!r}], is no term: there is no reference for it."
        )
    with warnings.catch_warnings(), torch.enable_grad(), own_precision(solver.problem.device):
        # The comparison itself shows what an inexact solve does to the hypergradient.
        warnings.simplefilter("ignore", ConvergenceWarning)
        point = Point(solver, solver.to_device(train_batch), solver.to_device(valid_batch), curvature)
        for name, vector in (("outer", point.cotangent), ("inner", point.gradient)):
            if not bool(vector.isfinite().all()):
                raise DivergenceError(
                    f"the gradient of the {name} loss in the weights is not finite on this batch: look for log, sqrt "
                    "or division at zero, or for weights that have diverged."
                )
        return _examine(point, linear_solver, max_dense, max_columns)


def check_options(train: Any, valid: Any, linear_solver: Any, curvature: Any, max_dense: Any, max_columns: Any) -> None:
    """Raise an error if one of the arguments of :func:`diagnose` cannot be used."""
    for name, batch in (("train", train), ("valid", valid)):
        if isinstance(batch, DataLoader):
            raise TypeError(f"the {name} batch must be one batch, got a DataLoader: write next(iter(loader)).")
    if linear_solver is not None and not isinstance(linear_solver, LinearSolver):
        raise TypeError(f"linear_solver must be a linear solver such as bilevel.CG() or None, got {linear_solver!r}.")
    if curvature not in MATRICES:
        raise ValueError(f"curvature must be 'hessian' or 'gauss_newton', got {curvature!r}.")
    check_integer("max_dense", max_dense, 0)
    check_integer("max_columns", max_columns, 0)


def _examine(point: Point, linear_solver: LinearSolver | None, max_dense: int, max_columns: int) -> Diagnosis:
    """Compare the method with the reference, and explain."""
    hyper, curvature = point.hyper, point.curvature
    reference, smallest, largest = _make_reference(point, linear_solver, max_dense)

    # The diagnosis names the solver that solves for the hypergradient, so this system comes first.
    exact = ours = torch.full_like(hyper, math.nan)
    residual, problems = math.nan, []
    try:
        found = reference.solve(point.cotangent)
        exact, residual = -curvature.cross_vjp(found.solution), float(found.residual)
    except LinearSolverError as error:
        problems.append(f"There is no reference to compare with: {error}")
    name, troubles = name_of(reference.solvers[0], point.kind), list(reference.troubles)
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
    response = compare(ours[kept], exact[kept])
    size = float(norm(point.weights.double()))
    diagnosis = Diagnosis(
        method=_describe(point.method),
        reference=name,
        cosine=response.cosine,
        norm_ratio=response.norm_ratio,
        relative_error=response.relative_error,
        total=compare((ours + point.direct)[kept], (exact + point.direct)[kept]),
        jacobian=_compare_jacobians(point, reference, direction / norm(direction)),
        columns={
            entry: _compare_jacobians(point, reference, unit)
            for entry, unit, keep in zip(entries, units, kept.tolist(), strict=False)
            if keep
        },
        largest_curvature=largest,
        smallest_curvature=smallest,
        inner_gradient=quotient(float(norm(point.gradient.double())), size),
        inner_distance=quotient(_newton_step(point, reference), size),
        residual=residual,
        excluded=tuple(excluded),
        meaning="",
    )
    if not problems:
        problems = [verdict(diagnosis, point.method, count, bool(point.direct[kept].any()))]
    if residual > ACCURATE:
        problems.insert(
            0,
            f"The reference is not converged (residual {residual:.1e}), so take this with care; float64 or a "
            "linear_solver with damping may help.",
        )
    # Next to small weights even a rounding error looks large, so the limit grows as they shrink.
    rounding = torch.finfo(point.weights.dtype).eps ** 0.5 / size if size else 0.0
    return replace(diagnosis, meaning=" ".join(problems + cautions(diagnosis, troubles, max(SOLVED, rounding))))


def _make_reference(point: Point, linear_solver: LinearSolver | None, max_dense: int) -> tuple[Reference, float, float]:
    """The reference, and the smallest and the largest eigenvalue of the Hessian."""
    weights, hessian, curvature = point.weights, point.hessian, point.curvature
    matrix = dense_matrix(hessian.product, weights) if len(weights) <= max_dense else None
    smallest, largest = lanczos(hessian.product, weights) if matrix is None else extreme_eigenvalues(matrix)
    if linear_solver is not None:
        reference = Reference(curvature.product, [linear_solver])
    elif matrix is None:
        reference = Reference(curvature.product, default_solvers(CG, weights.dtype, smallest, largest))
    else:
        matrix = matrix if curvature is hessian else dense_matrix(curvature.product, weights)
        reference = Reference(matrix.__matmul__, default_solvers(Exact, weights.dtype, smallest, largest))
    return reference, smallest, largest


def _compare_jacobians(point: Point, reference: Reference, direction: Tensor) -> Comparison:
    if not bool(direction.isfinite().all()):
        return UNKNOWN
    try:
        exact = reference.solve(-point.curvature.cross_jvp(direction)).solution
        return compare(point.jvp(direction), exact)
    except LinearSolverError:
        return UNKNOWN


def _newton_step(point: Point, reference: Reference) -> float:
    try:
        return float(norm(reference.solve(point.gradient).solution.double()))
    except LinearSolverError:
        return math.nan


def _describe(method: Method) -> str:
    if isinstance(method, Implicit):
        return f"Implicit({type(method.linear_solver).__name__}, {method.curvature})"
    return type(method).__name__
