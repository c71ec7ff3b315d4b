"""No silent failure: a solver meets its tolerance, or says why not and what to try."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import SEEDS, double, randn
from torch import Tensor

from bilevel.linear_solvers import (
    CG,
    MINRES,
    ConvergenceWarning,
    Exact,
    Identity,
    LinearSolverError,
    Neumann,
    Nystrom,
)

TOLERANT = [Exact(), CG(max_steps=100), MINRES(max_steps=100), Neumann(max_steps=100, rtol=1e-6)]
EVERY = [*TOLERANT, CG(rtol=0), MINRES(rtol=0), Neumann(), Nystrom(rank=4), Identity()]
KINDS = ["definite", "indefinite", "singular", "inconsistent", "scaled", "asymmetric", "skew", "rank one", "zero"]


def system(kind: str, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """A matrix and a right-hand side of some kind."""
    square, v, eigenvalues = randn(seed, (size, size), (size,), (size,))
    vectors = torch.linalg.qr(square)[0]
    eigenvalues = 0.1 + eigenvalues.abs()
    signs = torch.ones(size).double()
    signs[::2] = {"indefinite": -1.0, "singular": 0.0, "inconsistent": 0.0}.get(kind, 1.0)
    matrix = (vectors * eigenvalues * signs) @ vectors.T
    scales = 10 ** torch.linspace(-12, 12, size).double()
    matrix = {
        "scaled": scales[:, None] * matrix * scales,
        "asymmetric": square,
        "skew": square - square.T,
        "rank one": torch.outer(v, v),
        "zero": torch.zeros_like(matrix),
    }.get(kind, matrix)
    return matrix, matrix @ v if kind == "singular" else v


def call(solver, matvec, v, x0=None):
    """The solution, or None and what the solver said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = solver.solve_with_info(matvec, v, x0)
        except LinearSolverError as error:
            return None, str(error)
    assert all(warning.category is ConvergenceWarning for warning in caught)
    return found, " ".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("solver", TOLERANT, ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(seed=SEEDS, size=st.integers(1, 8), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_meets_its_tolerance_or_says_why_not(solver, kind, seed, size, dtype):
    """On every kind of system, judged by the true residual."""
    matrix, v = (entry.to(dtype) for entry in system(kind, seed, size))
    found, said = call(solver, lambda p: matrix @ p, v)
    if found is not None and not said:
        tolerance = torch.finfo(dtype).eps ** 0.5 if isinstance(solver, Exact) else 1e-6
        missing = torch.linalg.vector_norm(v - matrix @ found.solution)
        assert float(missing) <= 1.01 * tolerance * float(torch.linalg.vector_norm(v))
    else:
        assert said.startswith(type(solver).__name__)
        assert any(word in said for word in ("damping", "Exact", "float64"))


@pytest.mark.parametrize("solver", EVERY, ids=repr)
@settings(max_examples=15)
@given(seed=SEEDS, size=st.integers(1, 6), where=st.sampled_from(["v", "matrix", "x0"]), value=st.sampled_from("ni"))
def test_not_finite_is_an_error(solver, seed, size, where, value):
    """NaN and infinity are neither returned nor turned into zeros, and the culprit is named."""
    matrix, v = system("definite", seed, size)
    x0 = torch.ones_like(v)
    broken = {"v": v, "matrix": matrix, "x0": x0}[where]
    broken[0] = torch.nan if value == "n" else torch.inf
    iterates = isinstance(solver, (CG, MINRES, Neumann))
    if where == "x0" and not iterates:
        return
    with pytest.raises(
        LinearSolverError, match=f"{'matvec returned' if where == 'matrix' else where + ' is not finite'}"
    ):
        solver.solve_with_info(lambda p: matrix @ p, v, x0 if where == "x0" else None)


@pytest.mark.parametrize("rtol", [0.0, 1e-6])
@given(seed=SEEDS, size=st.integers(1, 8))
def test_cg_reports_negative_curvature(rtol, seed, size):
    """With the step, the curvature and three remedies; each of them works."""
    matrix, v = system("indefinite", seed, size)
    with pytest.raises(LinearSolverError, match=r"curvature .* is -.* step 0") as error:
        CG(rtol=rtol)(lambda p: -matrix @ matrix @ p, v)
    assert all(word in str(error.value) for word in ("damping", "gauss_newton", "MINRES"))
    found, said = call(CG(max_steps=50, rtol=rtol), lambda p: matrix @ p, v)
    assert found is None and "positive definite" in said
    smallest = float(torch.linalg.eigvalsh(matrix)[0])
    assert call(CG(max_steps=500, damping=0.5 - smallest), lambda p: matrix @ p, v)[1] == ""
    assert call(MINRES(max_steps=500), lambda p: matrix @ p, v)[1] == ""


@pytest.mark.parametrize(
    "solver", [CG(max_steps=50), CG(max_steps=50, rtol=0), MINRES(rtol=0), MINRES(), Exact()], ids=repr
)
@settings(max_examples=15)
@given(seed=SEEDS, size=st.integers(2, 8))
def test_a_singular_system_without_solution_is_an_error(solver, seed, size):
    """Also with a fixed number of steps, if they are enough to see it; damping is the remedy."""
    matrix, v = system("inconsistent", seed, size)
    found, said = call(solver, lambda p: matrix @ p, v)
    assert found is None
    assert "singular" in said and "amping" in said
    for kind in ("zero", "rank one"):
        flat, _ = system(kind, seed, size)
        found, said = call(solver, lambda p, flat=flat: flat @ p, v.flip(0) + 0.5)
        assert found is None and "singular" in said


@settings(max_examples=10)
@given(seed=SEEDS, size=st.integers(2, 8))
def test_neumann_reports_divergence(seed, size):
    """A negative eigenvalue, or a scale that is too large; a zero matrix has no scale."""
    matrix, v = system("indefinite", seed, size)
    for solver in (Neumann(max_steps=100), Neumann(max_steps=100, rtol=1e-6)):
        with pytest.raises(LinearSolverError, match=r"diverges: .* negative eigenvalue.*damping"):
            solver(lambda p: matrix @ p, v)
    definite, v = system("definite", seed, size)
    largest = float(torch.linalg.eigvalsh(definite)[-1])
    with pytest.raises(LinearSolverError, match=r"diverges: .* outside \(0, .*lower scale"):
        Neumann(max_steps=100, scale=2.5 / largest)(lambda p: definite @ p, v)
    with pytest.raises(LinearSolverError, match="matrix is zero"):
        Neumann()(lambda p: 0 * p, v)
    with pytest.warns(ConvergenceWarning, match="singular, or nearly so"):
        Neumann(rtol=1e-6, max_steps=30)(lambda p: torch.cat([p[:1] * 0, p[1:]]), 1 + v.abs())


@pytest.mark.parametrize("solver", [CG(max_steps=60), MINRES(max_steps=60), MINRES(max_steps=60, rtol=0)], ids=repr)
@settings(max_examples=15)
@given(seed=SEEDS, size=st.integers(3, 8))
def test_an_asymmetric_matrix_is_named(solver, seed, size):
    """As the reason, unless the solution is right all the same."""
    matrix, v = system("asymmetric", seed, size)
    found, said = call(solver, lambda p: matrix @ p, v)
    if found is None or said:
        assert "not symmetric" in said and "Exact" in said
    else:
        # Without a tolerance only a result that is worse than the recursion believes is an error.
        assert float(found.residual) <= (1e-6 if solver.rtol > 0 else 1.2)
    found, said = call(MINRES(rtol=0, max_steps=60), lambda p: (matrix - matrix.T) @ p, v)
    assert found is None and "not symmetric" in said


def test_nystrom_refuses_what_it_cannot_approximate():
    """An indefinite matrix, unless damping covers it, and an asymmetric one."""
    matrix, v = torch.diag(double([1.0, -0.5])), double([1.0, 1.0])
    with pytest.raises(LinearSolverError, match=r"eigenvalue of -5.00e-01, not above -damping=-0.1: .*Raise damping"):
        Nystrom(damping=0.1)(lambda p: matrix @ p, v)
    torch.testing.assert_close(Nystrom(damping=1.0)(lambda p: matrix @ p, v), double([0.5, 2.0]))
    with pytest.raises(LinearSolverError, match=r"not symmetric.*Exact"):
        Nystrom()(lambda p: torch.stack([p[0] + p[1], p[1]]), v)
    torch.testing.assert_close(Nystrom(damping=0.5)(lambda p: 0 * p, v), double([2.0, 2.0]))


@pytest.mark.parametrize("solver", [Exact(), CG(max_steps=60), MINRES(max_steps=60)], ids=lambda s: type(s).__name__)
def test_a_random_matvec_is_noticed(solver):
    """Dropout left on inside the inner loss makes every product another one."""
    matrix, v = system("definite", 0, 6)
    generator = torch.Generator().manual_seed(0)

    def noisy(p):
        return matrix @ (p * (1 + 0.1 * torch.randn(p.shape, generator=generator)))

    _, said = call(solver, noisy, v)
    assert "dropout" in said


def test_the_warning_says_how_far_it_came():
    """The residual, the steps, the tolerance and the remedy."""
    matrix = torch.diag(torch.linspace(1, 1000, 50).double())
    message = r"CG: the relative residual is .*e.* after 3 of 3 steps, above rtol=1e-06: raise max_steps, add damping"
    with pytest.warns(ConvergenceWarning, match=message):
        CG(max_steps=3)(lambda p: matrix @ p, torch.ones(50).double())


def test_a_tolerance_below_the_precision():
    """Restarts from the true residual get as far as the precision allows, and the warning says so."""
    matrix = torch.diag(10 ** torch.linspace(0, 4, 40)).float()
    v = torch.ones(40)
    rotation = torch.linalg.qr(randn(0, (40, 40))[0])[0].float()
    for solver in (CG(max_steps=5000, rtol=1e-9), MINRES(max_steps=5000, rtol=1e-9)):
        with pytest.warns(ConvergenceWarning, match=r"precision of torch.float32 .*use float64"):
            assert float(solver.solve_with_info(lambda p: rotation @ (matrix @ (rotation.T @ p)), v).residual) < 1e-3


@pytest.mark.parametrize("solver", EVERY, ids=repr)
def test_bad_arguments(solver):
    """Refused with the name of the argument before any work; a bad product when it appears."""
    v = torch.ones(3)

    def unused(p):
        raise AssertionError

    for bad, error, message in [
        (torch.ones(3, 1), ValueError, r"v must be a flat vector .* shape \(3, 1\): flatten it"),
        (torch.ones(()), ValueError, "flat vector"),
        (torch.ones(0), ValueError, "at least one entry"),
        (torch.ones(3, dtype=torch.int64), TypeError, "floating-point tensor, got dtype torch.int64"),
        (torch.ones(3, dtype=torch.complex64), TypeError, "floating-point"),
        ([1.0], TypeError, "got list"),
    ]:
        with pytest.raises(error, match=message):
            solver(unused, bad)
    for x0 in (torch.ones(4), torch.ones(3, 1), torch.ones(3).double()):
        with pytest.raises(ValueError, match=r"x0 must be like v \(shape \(3,\), torch.float32, cpu\), got"):
            solver(unused, v, x0)
    with pytest.raises(TypeError, match="x0 must be a tensor"):
        solver(unused, v, 0.0)
    with pytest.raises(TypeError, match=r"matvec must be a function.*lambda p: H @ p"):
        solver(torch.eye(3), v)
    for wrong in (lambda p: p[:2], lambda p: p[:, None], lambda p: p.double(), lambda p: p.sum()):
        with pytest.raises(ValueError, match="matvec must return a vector like its argument"):
            solver.solve_with_info(wrong, v)
    with pytest.raises(TypeError, match="matvec must return a tensor, got NoneType"):
        solver.solve_with_info(lambda p: None, v)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CG(max_steps=0), r"CG: max_steps must be a whole number of at least 1, got 0\."),
        (lambda: MINRES(max_steps=2.5), "got 2.5"),
        (lambda: MINRES(max_steps=True), "got True"),
        (lambda: CG(rtol=-1e-3), r"CG: rtol must be a finite number of at least 0, got -0.001\. Zero runs max_steps"),
        (lambda: CG(rtol=float("nan")), "got nan"),
        (lambda: CG(damping=-1.0), r"CG: damping must be .*, got -1.0"),
        (lambda: CG(damping="1"), "got '1'"),
        (lambda: Neumann(scale=0.0), r"Neumann: scale must be a finite number above 0, got 0.0\. None estimates it"),
        (lambda: Neumann(max_steps=-1), "got -1"),
        (lambda: Nystrom(damping=0), r"Nystrom: damping must be a finite number above 0, got 0\. A low-rank matrix"),
        (lambda: Nystrom(rank=0), "rank must be"),
        (lambda: Nystrom(seed=-1), "seed must be a whole number of at least 0, got -1"),
        (lambda: Exact(damping=float("inf")), "got inf"),
        (lambda: Exact(max_size=0), "max_size must be"),
        (lambda: Identity(scale=-1.0), r"Identity: scale must be a finite number above 0, got -1.0"),
    ],
)
def test_bad_settings(make, message):
    """Refused by the constructor, with the value."""
    with pytest.raises(ValueError, match=message):
        make()


def test_exact_refuses_large_systems():
    """Before the first product; the limit can be raised."""
    with pytest.raises(
        ValueError, match=r"Exact: v has 10,001 entries, above max_size=10,000: .* 0.4 GB. Use CG, or raise"
    ):
        Exact()(lambda p: p, torch.ones(10_001))
    assert torch.equal(Exact(max_size=3)(lambda p: 2 * p, torch.ones(3)), torch.full((3,), 0.5))
