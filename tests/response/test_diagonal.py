"""The diagonal preconditioner: what it estimates, that it changes no solution, and that it saves steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import SEEDS, double
from torch import nn

import bilevel
from bilevel import CG, MINRES, Diagonal, Exact, Identity, Implicit, Neumann, Nystrom
from bilevel.response.diagonal import root_of

DECAY = 0.3


def penalty(model, hyper):
    """A weight decay per tensor."""
    return sum(d * (w**2).sum() for d, w in zip(hyper["decay"], model.params.values(), strict=True))


def network(seed, *, scales=None, examples=6, curvature="hessian"):
    """A network with one output, its problem, a batch, and a solver for any method."""
    torch.manual_seed(seed)
    scales = torch.ones(3) if scales is None else scales
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    x, y = torch.randn(examples, 3).double() * scales.double(), torch.randn(examples).double()

    def loss(model, hyper, batch):
        return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()

    problem = bilevel.Problem(
        net,
        inner_loss=lambda model, hyper, batch: loss(model, hyper, batch) + penalty(model, hyper),
        outer_loss=loss,
        hyper={"decay": bilevel.positive(torch.full((4,), DECAY, dtype=torch.float64))},
    )

    def solver(**kwargs):
        linear = kwargs.pop("linear")
        method = Implicit(linear, curvature=curvature, **kwargs)
        return bilevel.Solver(problem, method=method)

    return net, (x, y), solver


def estimate(solver, batch, probes):
    """The diagonal at the current weights."""
    return Diagonal(probes=probes).estimate(solver.response.inner, solver.vector.detach(), batch)


def dense_diagonal(net, batch):
    """That of the Gauss-Newton matrix of the mean squared error and of the penalty, written out."""
    rows = []
    for x in batch[0]:
        parts = torch.autograd.grad(net(x[None]).sum(), list(net.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    return 2 * torch.stack(rows).square().mean(0) + 2 * DECAY


def test_one_example_is_exact():
    """The square of a sign is one, so that a single output leaves nothing to average."""
    net, batch, solver = network(0, examples=1)
    made = solver(linear=CG())
    torch.testing.assert_close(estimate(made, batch, 1), dense_diagonal(net, batch), rtol=1e-12, atol=1e-12)


def test_more_probes_come_closer():
    """Every entry has the same relative error, also where inputs are small."""
    net, batch, solver = network(1, scales=double([1.0, 1e-2, 1e-4]), examples=8)
    made, right = solver(linear=CG()), dense_diagonal(net, batch)
    few, many = (((estimate(made, batch, probes) - right) / right).abs().max() for probes in (2, 512))
    assert many < 0.15 and many < 0.3 * few


def test_a_loss_without_a_network():
    """Signs of the weights are exact for a Hessian that is diagonal."""
    problem = bilevel.Problem(
        {"a": double([1.0, 2.0]), "b": double([3.0])},
        inner_loss=lambda model, hyper, batch: (
            hyper["c"] * (model.params["a"] ** 4).sum() + 5 * (model.params["b"] ** 2).sum()
        ),
        outer_loss=lambda model, hyper, batch: model.params["a"].sum(),
        hyper={"c": bilevel.positive(double(0.5))},
    )
    made = bilevel.Solver(problem, method=Implicit(preconditioner=Diagonal()))
    torch.testing.assert_close(estimate(made, None, 1), double([6.0, 24.0, 10.0]), rtol=1e-12, atol=0)


@settings(max_examples=10)
@given(seed=SEEDS, probes=st.integers(1, 5), curvature=st.sampled_from(["hessian", "gauss_newton"]))
def test_every_preconditioned_solver_finds_the_same(seed, probes, curvature):
    """A preconditioner changes the way to a solution, and not the solution; damping included."""
    _, batch, solver = network(seed, scales=double([1.0, 0.1, 0.01]), curvature=curvature)
    preconditioner, damping = Diagonal(probes=probes), 4.0
    right = solver(linear=Exact(damping=damping)).outer_step(batch, batch).hypergradient
    for linear in (
        CG(max_steps=200, rtol=1e-11, damping=damping),
        MINRES(max_steps=200, rtol=1e-10, damping=damping),
        Neumann(max_steps=3000, rtol=1e-10, damping=damping),
    ):
        step = solver(linear=linear, preconditioner=preconditioner).outer_step(batch, batch)
        torch.testing.assert_close(step.hypergradient, right, rtol=1e-7, atol=1e-9)
        assert float(step.report["residual"]) <= linear.rtol
        assert int(step.report["preconditioner_products"]) == probes


@pytest.mark.parametrize("rtol", [0.0, 1e-8])
def test_fewer_steps_where_scales_differ(rtol):
    """And the report has the residual of the system that was asked for, a fixed number of steps included."""
    torch.manual_seed(0)
    scales = torch.logspace(0, -3, 24).double()
    x = torch.randn(96, 24).double() * scales
    y = x @ (torch.randn(24).double() / scales)
    problem = bilevel.Problem(
        nn.Linear(24, 1, bias=False).double(),
        inner_loss=lambda model, hyper, batch: (
            ((model(x)[:, 0] - y) ** 2).mean() + hyper["decay"] * bilevel.l2(model.params)
        ),
        outer_loss=lambda model, hyper, batch: ((model(x)[:, 0] - 2 * y) ** 2).mean(),
        hyper={"decay": bilevel.positive(double(1e-8))},
    )

    def made(preconditioner, steps):
        method = Implicit(CG(max_steps=steps, rtol=rtol), preconditioner=preconditioner)
        return bilevel.Solver(problem, method=method)

    solver = made(Diagonal(probes=8), 24)
    step = solver.outer_step(None, None)
    assert float(step.report["residual"]) < 1e-3 if rtol == 0 else int(step.report["solver_steps"]) < 24
    hessian = 2 * x.T @ x / 96 + 2e-8 * torch.eye(24).double()
    with torch.no_grad():
        weight = solver.params["weight"][0]
        v = 2 * x.T @ (x @ weight - 2 * y) / 96
        u = solver.response._solution
        residual = (v - hessian @ u).norm() / v.norm()
    torch.testing.assert_close(step.report["residual"], residual, rtol=1e-3, atol=1e-12)
    if rtol == 0:
        plain = made(None, 24).outer_step(None, None)
        exact = bilevel.Solver(problem, method=Implicit(Exact())).outer_step(None, None).hypergradient
        errors = [float((found.hypergradient - exact).norm()) for found in (step, plain)]
        assert errors[0] < 0.1 * errors[1]


def test_what_is_not_finite_or_zero_is_left_alone():
    """A weight without curvature gets the smallest positive scale, and no NaN."""
    assert torch.equal(root_of(torch.zeros(2), 0.0)(torch.ones(2)), torch.ones(2))
    found = root_of(torch.tensor([4.0, 0.0, torch.nan, torch.inf]), 0.0)(torch.ones(4))
    assert found.isfinite().all() and found[0] == 0.5 and found[2] == found[3] == 1.0


def test_settings():
    """A setting out of range is refused, and so is a solver that does not iterate."""
    with pytest.raises(ValueError, match="probes"):
        Diagonal(probes=0)
    with pytest.raises(TypeError, match="preconditioner must be a preconditioner"):
        Implicit(CG(), preconditioner="diagonal")
    for linear in (Exact(), Identity(), Nystrom()):
        with pytest.raises(ValueError, match="solvers that iterate"):
            Implicit(linear, preconditioner=Diagonal())
