"""The linear solvers: right answers on systems they promise to solve, and what a call costs."""

import warnings
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import SEEDS, double, randn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bilevel.linear_solvers import (
    CG,
    MINRES,
    ConvergenceWarning,
    Exact,
    Identity,
    LinearSolver,
    Neumann,
    Nystrom,
    base,
    iterative,
    relative_residual,
)

# What solves any positive definite system; the Neumann series takes κ log(1 / rtol) steps.
# Rounding leaves MINRES a residual of about κ times the precision of float64: 2e-12 for κ = 1e4.
SOLVERS = [Exact(), CG(max_steps=1000, rtol=1e-12), MINRES(max_steps=1000, rtol=1e-11)]
NEUMANN = Neumann(max_steps=10_000, rtol=1e-10)
EVERY = [*SOLVERS, NEUMANN, Nystrom(rank=100, damping=1e-3), Identity()]
ITERATIVE = [CG(max_steps=100), MINRES(max_steps=100), Neumann(max_steps=300, rtol=1e-6)]
SIZES = st.integers(1, 12)


def name(solver: object) -> str:
    """The id of a test."""
    return type(solver).__name__


def symmetric(seed: int, eigenvalues: Tensor) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    size = len(eigenvalues)
    vectors = torch.linalg.qr(randn(seed, (size, size))[0])[0]
    return (vectors * eigenvalues) @ vectors.T


def positive(seed: int, size: int, condition: float) -> Tensor:
    """A random positive definite matrix."""
    exponents = torch.linspace(0, 1, size, dtype=torch.float64) if size > 1 else torch.zeros(1, dtype=torch.float64)
    return symmetric(seed, condition**-exponents)


def product(matrix: Tensor):
    """Multiplication by a matrix."""
    return lambda p: matrix @ p


def assert_solves(solver: LinearSolver, matrix: Tensor, v: Tensor, tolerance: float, x0: Tensor | None = None) -> None:
    """The reported residual is the true one, and the error is small for the condition of the matrix."""
    found = solver.solve_with_info(product(matrix), v, x0)
    expected = torch.linalg.solve(matrix, v)
    true = torch.linalg.vector_norm(v - matrix @ found.solution) / torch.linalg.vector_norm(v)
    torch.testing.assert_close(found.residual, true, rtol=1e-6, atol=1e-13)
    error = torch.linalg.vector_norm(found.solution - expected) / torch.linalg.vector_norm(expected)
    assert float(error) <= tolerance


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
@given(seed=SEEDS, size=SIZES, condition=st.floats(1, 1e4), scale=st.floats(-9, 9), size_v=st.floats(-9, 9))
@example(seed=535159, size=2, condition=9458.475008241126, scale=0.0, size_v=2.75)
def test_positive_definite(solver, seed, size, condition, scale, size_v):
    """Whatever the scales of the matrix and of the right-hand side."""
    (v,) = randn(seed + 1, (size,))
    assert_solves(solver, 10**scale * positive(seed, size, condition), 10**size_v * v, 1e-6)


@settings(max_examples=15)
@given(seed=SEEDS, size=SIZES, condition=st.floats(1, 20), scale=st.floats(-9, 9))
def test_neumann_finds_its_scale(seed, size, condition, scale):
    """By power iteration; the result is that of a direct solve."""
    (v,) = randn(seed + 1, (size,))
    assert_solves(NEUMANN, 10**scale * positive(seed, size, condition), v, 1e-7)


@pytest.mark.parametrize("solver", [Exact(), MINRES(max_steps=1000, rtol=1e-11)], ids=name)
@given(seed=SEEDS, size=SIZES, condition=st.floats(1, 1e4), signs=SEEDS)
def test_indefinite(solver, seed, size, condition, signs):
    """Eigenvalues of both signs."""
    exponents = torch.linspace(0, 1, size, dtype=torch.float64)
    (sign,) = randn(signs, (size,))
    (v,) = randn(seed + 1, (size,))
    assert_solves(solver, symmetric(seed, sign.sign() * condition**-exponents), v, 1e-6)


@given(seed=SEEDS, size=SIZES)
def test_exact_takes_asymmetric_matrices(seed, size):
    """In the right orientation: not the transpose."""
    noise, v = randn(seed, (size, size), (size,))
    assert_solves(Exact(), 5 * torch.eye(size).double() + noise / size, v, 1e-10)


@given(seed=SEEDS, size=SIZES)
def test_neumann_takes_asymmetric_matrices(seed, size):
    """As long as the series converges."""
    noise, v = randn(seed, (size, size), (size,))
    matrix = 5 * torch.eye(size).double() + noise / size
    assert_solves(replace(NEUMANN, scale=0.1), matrix, v, 1e-8)


@given(seed=SEEDS, size=SIZES, exponents=st.floats(0, 12))
def test_exact_takes_badly_scaled_matrices(seed, size, exponents):
    """Rows and columns whose scales differ by up to 24 orders of magnitude."""
    scales = 10 ** torch.linspace(-exponents, exponents, size, dtype=torch.float64)
    core, (solution,) = positive(seed, size, 10.0), randn(seed + 1, (size,))
    matrix, solution = scales[:, None] * core * scales, solution / scales
    found = Exact()(product(matrix), matrix @ solution)
    torch.testing.assert_close(found * scales, solution * scales, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", [CG(max_steps=100), MINRES(max_steps=100)], ids=name)
@given(seed=SEEDS, size=st.integers(2, 12))
def test_singular_but_consistent(solver, seed, size):
    """The solution of least norm: nothing is added where the matrix has no curvature."""
    eigenvalues = torch.linspace(0, 1, size, dtype=torch.float64)
    matrix, (solution,) = symmetric(seed, eigenvalues), randn(seed + 1, (size,))
    v = matrix @ solution
    for rtol in (1e-10, 0.0):
        found = replace(solver, rtol=rtol)(product(matrix), v)
        torch.testing.assert_close(found, torch.linalg.pinv(matrix) @ v, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rtol", [1e-6, 0.0])
@pytest.mark.parametrize("solver", [CG(max_steps=100), MINRES(max_steps=100)], ids=name)
@settings(max_examples=15)
@given(seed=SEEDS, size=st.integers(2, 12))
def test_singular_and_almost_consistent(solver, rtol, seed, size):
    """A part outside the range that is smaller than any tolerance is no reason to fail."""
    matrix, (solution, noise) = symmetric(seed, torch.arange(size).double()), randn(seed + 1, (size,), (size,))
    v = matrix @ solution
    v = v / torch.linalg.vector_norm(v) + 1e-12 * noise
    found = replace(solver, rtol=rtol).solve_with_info(product(matrix), v)
    assert float(found.residual) < 1e-6


def test_nystrom_with_small_damping_in_single_precision():
    """Rounding errors are not multiplied by the inverse of the damping."""
    matrix, (v,) = 100 * positive(0, 12, 10.0).float(), randn(1, (12,))
    assert float(Nystrom(damping=1e-4).solve_with_info(product(matrix), v.float()).residual) < 1e-4


@pytest.mark.parametrize("solver", [*SOLVERS, NEUMANN], ids=name)
@given(seed=SEEDS, size=SIZES, damping=st.floats(0.1, 3.0))
def test_damping_shifts_the_matrix(solver, seed, size, damping):
    """By a multiple of the identity."""
    matrix, (v,) = positive(seed, size, 20.0), randn(seed + 1, (size,))
    found = replace(solver, damping=damping).solve_with_info(product(matrix), v)
    shifted = matrix + damping * torch.eye(size).double()
    torch.testing.assert_close(found.solution, torch.linalg.solve(shifted, v), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        found.residual, relative_residual(product(matrix), found.solution, v, damping), rtol=1e-6, atol=1e-14
    )


@given(seed=SEEDS, size=st.integers(2, 12), rank=st.integers(1, 12), damping=st.floats(-3, 0), scale=st.floats(-8, 8))
def test_nystrom_is_exact_up_to_its_rank(seed, size, rank, damping, scale):
    """Where the matrix has no more nonzero eigenvalues than there are columns."""
    rank, damping = min(rank, size), 10 ** (damping + scale)
    factor, v = randn(seed, (size, rank), (size,))
    matrix = 10**scale * factor @ factor.T
    found = Nystrom(rank=rank, damping=damping).solve_with_info(product(matrix), v)
    assert float(relative_residual(product(matrix), found.solution, v, damping)) < 1e-6
    assert found.steps == rank


@given(seed=SEEDS, size=st.integers(2, 12), rank=st.integers(1, 12), chosen=st.integers(0, 9))
def test_nystrom_is_the_published_formula(seed, size, rank, chosen):
    """Equation by equation, for any rank, with the columns it says."""
    rank, damping = min(rank, size), 0.5
    matrix, (v,) = positive(seed, size, 10.0), randn(seed + 1, (size,))
    columns = torch.randperm(size, generator=torch.Generator().manual_seed(chosen))[:rank]
    c, w = matrix[:, columns], matrix[columns][:, columns]
    expected = v / damping - c @ torch.linalg.solve(w + c.T @ c / damping, c.T @ v) / damping**2
    found = Nystrom(rank=rank, damping=damping, seed=chosen)(product(matrix), v)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@given(seed=SEEDS, size=SIZES, steps=st.integers(1, 8), scale=st.floats(0.1, 1.0))
def test_neumann_is_the_truncated_series(seed, size, steps, scale):
    """Term by term, with and without a warm start."""
    matrix, (v, x0) = positive(seed, size, 10.0), randn(seed + 1, (size,), (size,))
    solver = Neumann(max_steps=steps, scale=scale)
    contraction = torch.eye(size).double() - scale * matrix
    series = scale * sum(torch.linalg.matrix_power(contraction, i) for i in range(steps))
    torch.testing.assert_close(solver(product(matrix), v), series @ v)
    torch.testing.assert_close(solver(product(matrix), v, x0), x0 + series @ (v - matrix @ x0))


@given(seed=SEEDS, size=SIZES, steps=st.integers(1, 12), magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 1e7, 1e30]))
def test_truncated_cg_minimises_over_the_krylov_space(seed, size, steps, magnitude):
    """The defining property, at every number of steps and every scale; m steps are exact."""
    matrix, (v,) = positive(seed, size, 10.0), randn(seed + 1, (size,))
    steps = min(steps, size)
    found = CG(max_steps=steps, rtol=0)(product(matrix), magnitude * v) / magnitude
    krylov = torch.stack([torch.linalg.matrix_power(matrix, i) @ v for i in range(steps)], dim=1)
    basis = torch.linalg.qr(krylov)[0]
    expected = basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ v)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    exact = CG(max_steps=size, rtol=0)(product(matrix), magnitude * v) / magnitude
    torch.testing.assert_close(exact, torch.linalg.solve(matrix, v), rtol=1e-6, atol=1e-6)


@given(seed=SEEDS, size=SIZES, steps=st.integers(1, 6))
def test_truncated_minres_minimises_the_residual(seed, size, steps):
    """Over the Krylov space, for an indefinite matrix."""
    (eigenvalues, v) = randn(seed + 1, (size,), (size,))
    matrix, steps = symmetric(seed, eigenvalues.sign() * (0.5 + eigenvalues.abs())), min(steps, size)
    found = MINRES(max_steps=steps, rtol=0).solve_with_info(product(matrix), v)
    krylov = torch.stack([torch.linalg.matrix_power(matrix, i) @ v for i in range(steps)], dim=1)
    basis = torch.linalg.qr(krylov)[0]
    best = v - matrix @ basis @ torch.linalg.lstsq(matrix @ basis, v[:, None]).solution[:, 0]
    expected = torch.linalg.vector_norm(best) / torch.linalg.vector_norm(v)
    torch.testing.assert_close(found.residual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "solver", [CG(), CG(rtol=0), MINRES(), MINRES(rtol=0), Exact(), Neumann(max_steps=50, rtol=1e-6)], ids=repr
)
@settings(max_examples=15)
@given(
    entry=st.floats(-12, 12),
    v=st.sampled_from([-1e20, -3.0, -1e-20, 0.0, 1e-20, 3.0, 1e20]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_scalar_systems(solver, entry, v, dtype):
    """A system of one equation, which has a one-dimensional vector of length one."""
    right, matrix = torch.tensor([v], dtype=dtype), torch.tensor([10.0**entry], dtype=dtype)
    found = solver(lambda p: matrix * p, right)
    torch.testing.assert_close(found, right / matrix, rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", ITERATIVE, ids=name)
@settings(max_examples=10)
@given(seed=SEEDS, size=st.integers(8, 12))
def test_warm_start(solver, seed, size):
    """Near the solution fewer steps are needed; at the solution none."""
    matrix, (v, noise) = positive(seed, size, 8.0), randn(seed + 1, (size,), (size,))
    exact = torch.linalg.solve(matrix, v)
    cold = solver.solve_with_info(product(matrix), v)
    near = solver.solve_with_info(product(matrix), v, exact + 1e-6 * noise)
    there = solver.solve_with_info(product(matrix), v, exact)
    assert near.steps < cold.steps
    assert there.steps == 0
    assert torch.equal(there.solution, exact)
    for found in (cold, near, there):
        assert float(found.residual) <= solver.rtol
    fixed = replace(solver, rtol=0.0)(product(matrix), v, exact)
    torch.testing.assert_close(fixed, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", EVERY, ids=name)
def test_a_zero_right_hand_side_gives_zero(solver):
    """Even from a warm start, even for a matrix that is singular or indefinite, with and without a tolerance."""
    solver = replace(solver, max_steps=20) if isinstance(solver, (CG, MINRES, Neumann)) else solver
    variants = [solver] if isinstance(solver, (Exact, Nystrom, Identity)) else [solver, replace(solver, rtol=0.0)]
    for variant in variants:
        for matrix in (torch.eye(3), torch.zeros(3, 3), torch.diag(torch.tensor([1.0, -1.0, 0.0]))):
            for x0 in (None, torch.ones(3)):
                found = variant.solve_with_info(product(matrix), torch.zeros(3), x0)
                assert torch.equal(found.solution, torch.zeros(3))
                assert float(found.residual) == 0


@pytest.mark.parametrize("solver", [Exact(), CG(max_steps=50), MINRES(max_steps=50), ITERATIVE[2]], ids=name)
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_single_precision(solver, magnitude):
    """The default tolerance is met, and squares of small or large entries neither vanish nor overflow."""
    matrix = positive(3, 20, 5.0).float()
    v = magnitude * randn(4, (20,))[0].float()
    found = solver.solve_with_info(product(matrix), v)
    assert found.solution.dtype == torch.float32
    assert float(found.residual) <= 1e-6
    expected = torch.linalg.solve(matrix.double(), v.double())
    torch.testing.assert_close(found.solution.double(), expected, rtol=1e-4, atol=1e-5 * magnitude)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "solver", [Exact(), CG(rtol=0), MINRES(rtol=0), Neumann(), Nystrom(rank=5), Identity()], ids=name
)
def test_half_precision(solver, dtype):
    """Only the products are in half precision."""
    diagonal = torch.tensor([1.0, 1.25, 1.5, 1.75, 2.0], dtype=dtype)
    v = torch.tensor([1.0, -2.0, 3.0, 0.5, 1.0], dtype=dtype)
    found = solver(lambda p: diagonal * p, v)
    assert found.dtype == dtype
    expected = v if isinstance(solver, Identity) else v / diagonal
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("solver", EVERY, ids=name)
def test_no_graph_no_randomness_no_side_effects(solver):
    """The result has no graph, repeats bit for bit, leaves the arguments and the random state alone."""
    matrix = positive(0, 6, 10.0).requires_grad_()
    (v,) = randn(1, (6,))
    v.requires_grad_()
    copy, state = v.detach().clone(), torch.get_rng_state()
    first, second = (solver(product(matrix), v) for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert torch.equal(v.detach(), copy)
    assert torch.equal(torch.get_rng_state(), state)


def test_matvec_may_reuse_its_memory():
    """A product that is overwritten by the next one."""
    matrix, (v,) = positive(0, 6, 10.0), randn(1, (6,))
    memory = torch.empty_like(v)
    for solver in (*SOLVERS, NEUMANN):
        found = solver(lambda p: torch.mv(matrix, p, out=memory), v)
        torch.testing.assert_close(found, torch.linalg.solve(matrix, v), rtol=1e-7, atol=1e-7)


def test_matvec_by_automatic_differentiation():
    """It may build its own graph: the solver does not switch gradients off."""
    w, (v,) = double([0.3, -0.2, 0.5]), randn(0, (3,))

    def matvec(p):
        leaf = w.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf.exp() + leaf**2).sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient, leaf, p)[0]

    torch.testing.assert_close(CG()(matvec, v), v / (w.exp() + 2), rtol=1e-6, atol=1e-6)


class Reads(TorchDispatchMode):
    """Counts the operations that make the host wait for the device."""

    waiting = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.waiting
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("x0", [None, double([0.1] * 8)], ids=["cold", "warm"])
@pytest.mark.parametrize("solver", [CG(rtol=0, damping=0.1), MINRES(rtol=0), Neumann(), Neumann(scale=0.5)], ids=repr)
def test_a_fixed_number_of_steps_reads_the_device_once(solver, x0, monkeypatch):
    """At the end: no step waits, not even those after the solution is found."""
    for module in (base, iterative):  # a CPU keeps its scalars as numbers of Python
        monkeypatch.setattr(module, "on_host", lambda vector: False)
    matrix, (v,) = positive(0, 8, 10.0), randn(1, (8,))
    lists, products = [], []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: lists.append(len(products)) or tolist(self))
    with Reads() as reads:
        solver.solve_with_info(lambda p: products.append(p) or matrix @ p, v, x0)
    assert reads.count == 0
    assert lists == [len(products)]
    with Reads() as reads:
        replace(solver, rtol=1e-6, max_steps=500)(product(matrix), v)
    assert reads.count > 0  # the counter counts


def test_the_number_of_products():
    """What the documentation says a solve costs."""
    matrix, (v,) = positive(0, 8, 10.0), randn(1, (8,))
    products = []

    def count(solver, x0=None):
        products.clear()
        found = solver.solve_with_info(lambda p: products.append(p) or matrix @ p, v, x0)
        return len(products), found.steps

    assert count(CG(max_steps=5, rtol=0)) == (6, 5)
    assert count(CG(max_steps=5, rtol=0), v) == (7, 5)
    assert count(MINRES(max_steps=5, rtol=0)) == (6, 5)
    assert count(Neumann(max_steps=5, scale=0.5)) == (5, 5)
    assert count(Neumann(max_steps=5)) == (16, 5)
    assert count(Nystrom(rank=3)) == (4, 3)
    assert count(Exact()) == (9, 8)
    assert count(Identity()) == (1, 0)
    products.clear()
    assert torch.equal(Identity(scale=0.5)(lambda p: products.append(p), v), 0.5 * v)
    assert not products
    assert torch.equal(Identity(scale=0.5).solve_with_info(product(matrix), v).solution, 0.5 * v)


def test_fixed_steps_never_warn_about_the_residual():
    """The user asked for a truncated solution."""
    matrix, (v,) = positive(0, 12, 1e4), randn(1, (12,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for solver in (
            CG(max_steps=2, rtol=0),
            MINRES(max_steps=2, rtol=0),
            Neumann(max_steps=2),
            Nystrom(rank=2),
            Identity(),
        ):
            assert float(solver.solve_with_info(product(matrix), v).residual) > 1e-3
    with pytest.warns(ConvergenceWarning):
        CG(max_steps=2)(product(matrix), v)


def test_settings_are_values():
    """They print, compare, hash, and do not change; options are named."""
    assert repr(CG(damping=0.1)) == "CG(max_steps=20, rtol=1e-06, damping=0.1)"
    assert CG() == CG(max_steps=20) != CG(max_steps=21)
    assert len({MINRES(), MINRES(), Exact()}) == 2
    with pytest.raises(FrozenInstanceError):
        CG().rtol = 0.0
    with pytest.raises(TypeError):
        CG(20)
