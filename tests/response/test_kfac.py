"""K-FAC: where it is exact, what it estimates elsewhere, which layers it finds; and all preconditioners together."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import SEEDS
from torch import nn

import bilevel
from bilevel import CG, KFAC, MINRES, Diagonal, Exact, Implicit, Neumann
from bilevel.response.curvature import flatten, unflatten
from bilevel.structure import Layers

DECAY = 0.3
SHAPE = {"conv1d": (3, 7), "conv2d": (3, 6, 5), "conv3d": (2, 4, 5, 4)}


def made(net, x, y, *, linear, decay=DECAY, **kwargs):
    """A solver of ridge regression with a network, and its batch."""

    def fit(model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    problem = bilevel.Problem(
        net.double(),
        inner_loss=lambda model, hyper, batch: fit(model, batch) + hyper["decay"] * bilevel.l2(model.params),
        outer_loss=lambda model, hyper, batch: fit(model, (batch[0], 2 * batch[1] + 1)),
        hyper={"decay": bilevel.positive(torch.tensor(decay, dtype=torch.float64))},
    )
    return bilevel.Solver(problem, method=Implicit(linear, **kwargs)), (x.double(), y.double())


def dense(solver, batch, preconditioner, damping=0.0):
    """The approximation as a matrix."""
    inner = solver.response.inner
    root = preconditioner.root(inner, solver.vector.detach(), batch, damping, lambda vector: vector)
    size = sum(weight.numel() for weight in inner.params().values())
    matrix = torch.stack([root(unit) for unit in torch.eye(size).double()])
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-9, atol=1e-9)
    return torch.linalg.inv(matrix @ matrix)


@pytest.mark.parametrize("examples", [2, 9])  # fewer than columns, and more
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_model_with_one_output_is_exact(examples, bias):
    """Its Hessian is the second moment of the inputs; the bias is an input that is one."""
    torch.manual_seed(0)
    x, y = torch.randn(examples, 4), torch.randn(examples, 1)
    solver, batch = made(nn.Linear(4, 1, bias=bias), x, y, linear=CG())
    wide = torch.cat([batch[0], torch.ones(examples, 1).double()], 1) if bias else batch[0]
    hessian = 2 * wide.T @ wide / examples + (2 * DECAY + 0.1) * torch.eye(wide.shape[1]).double()
    torch.testing.assert_close(dense(solver, batch, KFAC(), 0.1), hessian, rtol=1e-9, atol=1e-9)


def test_as_a_solver_it_is_then_exact():
    """And says so; elsewhere it reports the residual of the true matrix."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 4), torch.randn(9, 1)
    found = []
    for linear in (KFAC(damping=0.2), Exact(damping=0.2)):
        torch.manual_seed(1)
        solver, batch = made(nn.Linear(4, 1), x, y, linear=linear)
        found.append(solver.outer_step(batch, batch))
    torch.testing.assert_close(found[0].hypergradient, found[1].hypergradient, rtol=1e-9, atol=1e-12)
    assert float(found[0].report["residual"]) < 1e-9 and int(found[0].report["solver_steps"]) == 0
    solver, batch = made(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), x, y, linear=KFAC(damping=0.2))
    hyper, response = solver.vector.detach().clone(), solver.response
    curvature, root = response._curvature(hyper, batch), KFAC().root(response.inner, hyper, batch, 0.2, torch.clone)
    v = torch.randn(19).double()
    names = list(response.inner.params())
    cotangents = dict(zip(names, unflatten(v, curvature.weights), strict=True))
    found = response.vjp(hyper, cotangents, batch)
    torch.testing.assert_close(found, -curvature.cross_vjp(root(root(v))), rtol=1e-9, atol=1e-12)
    residual = (v - curvature.product(root(root(v))) - 0.2 * root(root(v))).norm() / v.norm()
    torch.testing.assert_close(response.report["residual"], residual, rtol=1e-9, atol=0)
    assert residual > 1e-3
    tangent = torch.ones(1).double()
    jvp = flatten(list(response.jvp(hyper, tangent, batch).values()))
    torch.testing.assert_close(jvp, -root(root(curvature.cross_jvp(tangent))), rtol=1e-9, atol=1e-12)


def test_two_layers_are_products_of_two_moments():
    """With many probes; against the two second moments of each layer, written out."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    solver, batch = made(net, x, y, linear=CG())
    found = dense(solver, batch, KFAC(probes=4000))
    hidden = net[:2](batch[0])
    ones = torch.ones(6, 1).double()
    columns = [torch.cat([batch[0], ones], 1), torch.cat([hidden, ones], 1)]
    curvature = torch.full((6, 2), 2 / 12).double()  # of the mean of squares, over outputs
    through = net[2].weight[None] * (1 - hidden**2)[:, None]  # (examples, outputs, hidden)
    moments = [torch.einsum("noi,no,noj->ij", through, curvature, through), torch.diag(curvature.sum(0))]
    start = 0
    for a, s, (units, inputs) in zip(columns, moments, [(4, 3), (2, 4)], strict=True):
        size = units * (inputs + 1)
        block = found[start : start + size, start : start + size]
        order = [
            unit * inputs + column if column < inputs else units * inputs + unit
            for unit in range(units)
            for column in range(inputs + 1)
        ]
        expected = torch.kron(s, a.T @ a / 6) + 2 * DECAY * torch.eye(size).double()
        torch.testing.assert_close(block[order][:, order], expected, rtol=0.1, atol=0.02)
        start += size
    assert found[:16, 16:].abs().max() < 1e-9


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(SHAPE)),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, "same", "valid"]),
    bias=st.booleans(),
    batched=st.booleans(),
)
def test_a_convolution_is_a_product_with_its_patches(name, stride, dilation, padding, bias, batched):
    """The inputs, outputs and weight of a layer, as matrices."""
    stride = 1 if padding == "same" else stride
    x = torch.randn(2, *SHAPE[name]) if batched else torch.randn(SHAPE[name])
    dims = len(SHAPE[name]) - 1
    weight = torch.randn(5, SHAPE[name][0], *([2, 3, 2][:dims])).requires_grad_()
    offset = torch.randn(5).requires_grad_() if bias else None
    with Layers() as layers:
        y = getattr(F, name)(x, weight, offset, stride, padding, dilation)
    (layer,) = layers.found
    assert layer.weight is weight and layer.bias is offset
    product = layer.inputs() @ weight.flatten(1).T + (0 if offset is None else offset)
    torch.testing.assert_close(product, layer.rows(y), rtol=1e-4, atol=1e-4)


def test_many_patches_are_thinned():
    """Of whole examples; there are enough left."""
    x, weight = torch.randn(64, 2, 12, 12), torch.randn(3, 2, 2, 2).requires_grad_()
    with Layers() as layers:
        F.conv2d(x, weight)
    every = F.unfold(x, 2).transpose(1, 2)
    step = 64 * 121 // (8 * 8)
    assert torch.equal(layers.found[0].inputs(), every[:: min(64, step)].reshape(-1, 8))


def test_what_changes_an_output_in_place_changes_no_factor():
    """The cotangents are those of the layer, not of the operation after it."""
    roots = []
    for inplace in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 2))
        solver, batch = made(net, torch.randn(6, 3), torch.randn(6, 2), linear=CG())
        roots.append(dense(solver, batch, KFAC()))
    torch.testing.assert_close(*roots, rtol=1e-12, atol=1e-12)


class Others(nn.Module):
    """Layers beside weights of other kinds: a norm, an embedding, a scale, a tied weight, a grouped convolution."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 4, 3, padding=1)
        self.grouped = nn.Conv1d(4, 4, 1, groups=2)
        self.norm = nn.LayerNorm(4)
        self.tied = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        y = self.grouped(torch.tanh(self.convolution(x))).transpose(1, 2)
        y = torch.tanh(self.tied(self.norm(y)))
        return self.head((self.tied(y) * self.scale).mean(1))


class Sequences(nn.Module):
    """An LSTM, whose kernel is taken apart."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(10, 3, bias=False), nn.Tanh(), nn.Linear(3, 1)), (2, 5)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 1)),
        (2, 5),
    ),
    "others": (Others, (2, 5)),
    "sequences": (Sequences, (4, 2)),
}
SOLVERS = {
    "CG": CG(max_steps=400, rtol=1e-11, damping=20.0),
    "MINRES": MINRES(max_steps=400, rtol=1e-10, damping=20.0),
    "Neumann": Neumann(max_steps=4000, rtol=1e-10, damping=20.0),
}
PRECONDITIONERS = {"diagonal": Diagonal, "kfac": KFAC}


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=2)
@given(seed=SEEDS, probes=st.integers(1, 3), curvature=st.sampled_from(["hessian", "gauss_newton"]))
def test_every_preconditioned_solver_finds_the_same(name, kind, seed, probes, curvature):
    """A preconditioner changes the way to a solution, and not the solution; the reports are true."""
    make, shape = NETWORKS[name]
    x, y = torch.randn(5, *shape, generator=torch.Generator().manual_seed(seed)), torch.arange(5.0)[:, None] / 5
    y = y.double()

    def step(linear, **kwargs):
        torch.manual_seed(seed)
        solver, batch = made(make(), x, y, linear=linear, curvature=curvature, **kwargs)
        return solver.outer_step(batch, batch)

    right = step(Exact(damping=20.0)).hypergradient
    for linear in SOLVERS.values():
        found = step(linear, preconditioner=PRECONDITIONERS[kind](probes=probes))
        torch.testing.assert_close(found.hypergradient, right, rtol=1e-7, atol=1e-9)
        assert float(found.report["residual"]) <= linear.rtol
        assert 0 < int(found.report["solver_steps"]) <= linear.max_steps
        assert int(found.report["preconditioner_products"]) == probes


def test_which_weights_are_those_of_layers():
    """All others have the diagonal of the other preconditioner."""
    torch.manual_seed(0)
    solver, batch = made(Others(), torch.randn(5, 2, 5), torch.randn(5, 1), linear=CG())
    matrix, other = dense(solver, batch, KFAC()), dense(solver, batch, Diagonal(probes=1))
    units = unflatten(torch.arange(len(matrix)), list(solver.response.inner.params().values()))
    for name, places in zip(solver.response.inner.params(), units, strict=True):
        block = matrix[places.flatten()]
        alone = name in {"grouped.weight", "grouped.bias", "norm.weight", "norm.bias", "scale"}
        assert alone == (block.count_nonzero(1) == 1).all() or block.abs().gt(1e-9).sum() == len(block)
        if alone:
            torch.testing.assert_close(block.sum(1), other.diagonal()[places.flatten()], rtol=1e-9, atol=1e-9)


def test_it_needs_fewer_steps_where_inputs_are_mixed():
    """A rotation hides different scales from the diagonal, and not from the second moment of the inputs."""
    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(24, 24))[0].double()
    x = torch.randn(96, 24).double() * torch.logspace(0, -3, 24).double() @ rotation
    y = torch.randn(96, 1).double()
    steps = {}
    for name, preconditioner in {"none": None, "diagonal": Diagonal(), "kfac": KFAC()}.items():
        linear = CG(max_steps=500, rtol=1e-8)
        solver, batch = made(nn.Linear(24, 1), x, y, linear=linear, decay=1e-8, preconditioner=preconditioner)
        steps[name] = int(solver.outer_step(batch, batch).report["solver_steps"])
    assert steps["kfac"] <= 4 and min(steps["none"], steps["diagonal"]) > 20


def test_numbers_that_are_not_finite_have_the_message_of_the_solver():
    """An eigendecomposition would refuse them with one of its own."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for linear, preconditioner in ((CG(), KFAC()), (KFAC(damping=0.1), None)):
        settings = {"linear": linear, "preconditioner": preconditioner, "curvature": "gauss_newton"}
        solver, batch = made(net, torch.randn(5, 3), torch.randn(5, 1), **settings)
        solver.outer_step(batch, batch)
        with torch.no_grad():
            solver.response.inner.params()["0.weight"][0, 0] = torch.nan
        with pytest.raises(Exception, match=r"not finite|NaN|is nan"):
            solver.outer_step(batch, batch)


def test_what_it_refuses():
    """Settings, a call without a network, and networks without layers."""
    with pytest.raises(ValueError, match="KFAC: damping"):
        KFAC(damping=-1.0)
    with pytest.raises(ValueError, match="KFAC: max_size"):
        KFAC(max_size=0)
    with pytest.raises(ValueError, match=r"takes the damping of the linear solver.*give it to CG"):
        Implicit(CG(), preconditioner=KFAC(damping=0.1))
    with pytest.raises(ValueError, match=r"solvers that iterate.*KFAC does not"):
        Implicit(KFAC(), preconditioner=Diagonal())
    with pytest.raises(TypeError, match=r"KFAC needs to see the layers.*bilevel\.Implicit"):
        KFAC()(lambda p: p, torch.ones(3))
    x, y = torch.randn(5, 3), torch.randn(5, 1)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 1))

        def forward(self, x):
            return x @ self.weight

    for linear in (CG(), KFAC()):
        solver, batch = made(Plain(), x, y, linear=linear, preconditioner=KFAC() if linear == CG() else None)
        with pytest.raises(ValueError, match=r"no linear layer or convolution.*Diagonal\(\)"):
            solver.outer_step(batch, batch)
    solver, batch = made(nn.Linear(3, 1), x, y, linear=KFAC(max_size=2))
    with pytest.raises(ValueError, match=r"max_size=2 inputs and outputs"):
        solver.outer_step(batch, batch)
