"""Hessian and Gauss-Newton products: right through every op, against differences and matrices written by hand."""

import gc
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, Tanh, assert_equal, randn
from test_autodiff import NETWORKS, PICTURES, ROWS, images
from torch import Tensor, nn
from torch.nn import functional as F

import bilevel
from bilevel import Problem
from bilevel.problem import Variables
from bilevel.response.curvature import Curvature, GaussNewton, Hessian

BOTH = [Hessian, GaussNewton]


class LinearSystem(nn.Module):
    """torch.linalg.solve, through whose forward mode PyTorch is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.layer.weight + 3 * torch.eye(4).to(x), (x + self.layer.bias).T).T


OPS = {
    **NETWORKS,
    "linear system": (LinearSystem, ROWS),
    "lstm": (lambda: nn.Sequential(nn.LSTM(4, 3, batch_first=True), First()), (3, 5, 4)),
    "gru": (lambda: nn.Sequential(nn.GRU(4, 3, batch_first=True), First()), (3, 5, 4)),
    "adaptive max pool": (lambda: images(nn.Tanh(), nn.AdaptiveMaxPool2d(2), nn.Flatten()), PICTURES),
    "upsampling": (lambda: images(nn.Tanh(), nn.Upsample(scale_factor=2, mode="bilinear")), PICTURES),
}


class First(nn.Module):
    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return x[0]


@dataclass(frozen=True)
class Both:
    """Two outputs in a dataclass."""

    y: Tensor
    rest: list[Tensor]


def problem_of(inner: object, loss: Callable[..., Tensor], *, decay: float = 0.3, **hyper: bilevel.Hyper) -> Problem:
    return Problem(inner, inner_loss=loss, outer_loss=loss, hyper={"decay": bilevel.positive(decay), **hyper})


def at(problem: Problem, batch: object, kind: type[Curvature], w: Tensor | None = None, hyper: Tensor | None = None):
    """The curvature of a problem at weights w and hyperparameters λ, by default the initial ones."""
    inner = Variables(problem)
    if w is not None:
        for weight, part in zip(inner.weights, w.split([weight.numel() for weight in inner.weights]), strict=True):
            weight.data.copy_(part.view(weight.shape))
    return kind(inner, problem.initial_hyper() if hyper is None else hyper, batch)


def flat(tensors: list[Tensor | None], like: list[Tensor]) -> Tensor:
    pairs = zip(tensors, like, strict=True)
    return torch.cat([torch.zeros_like(leaf).flatten() if part is None else part.flatten() for part, leaf in pairs])


def dense(product: Callable[[Tensor], Tensor], size: int) -> Tensor:
    return torch.stack([product(unit) for unit in torch.eye(size).double()], dim=1)


def matrix(curvature: Curvature) -> Tensor:
    return dense(curvature.product, sum(weight.numel() for weight in curvature.weights))


# Every op


def op_problem(name: str) -> tuple[Problem, Tensor]:
    """A network in a loss with cross entropy, a penalty and a gain of its inputs."""
    make, shape = OPS[name]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        network = make().double()
    (x,) = randn(1, shape)
    if name == "embedding":
        x = torch.arange(15).reshape(shape) % 7

    def loss(model, hyper, batch):
        y = model(batch * hyper["gain"] if batch.is_floating_point() else batch).flatten(1)
        labels = torch.arange(len(y)) % y.shape[1]
        return (
            F.cross_entropy(hyper["gain"] * y, labels) + y.square().mean() + hyper["decay"] * bilevel.l2(model.params)
        )

    return problem_of(network, loss, gain=bilevel.real(1.3)), x


@pytest.mark.parametrize("name", OPS)
def test_hessian_products_are_right_through_every_op(name):
    """Against central differences of the gradient, along a random direction."""
    problem, x = op_problem(name)
    curvature = at(problem, x, Hessian)
    w = flat(curvature.weights, curvature.weights).detach()
    (direction,) = randn(2, w.shape)
    product = curvature.product(direction)
    ends = [at(problem, x, Hessian, w + step * direction) for step in (1e-6, -1e-6)]
    slopes = [flat(end.slopes, end.slopes).detach() for end in ends]
    assert product.abs().max() > 0.01
    assert_equal(product, (slopes[0] - slopes[1]) / 2e-6, 1e-6)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", OPS)
def test_cross_derivatives_are_right_through_every_op(name, kind):
    """∂²L/∂w∂λ and its transpose, with a λ that enters the network: exact for Gauss-Newton too."""
    problem, x = op_problem(name)
    hyper, curvature = problem.initial_hyper(), at(problem, x, kind)
    columns = []
    for unit in torch.eye(len(hyper)).double():
        ends = [at(problem, x, Hessian, hyper=hyper + step * unit) for step in (1e-6, -1e-6)]
        slopes = [flat(end.slopes, end.slopes).detach() for end in ends]
        columns.append((slopes[0] - slopes[1]) / 2e-6)
    expected = torch.stack(columns, dim=1)
    assert_equal(dense(curvature.cross_jvp, len(hyper)), expected, 1e-6)
    (u,) = randn(3, expected.shape[:1])
    assert_equal(curvature.cross_vjp(u), expected.T @ u, 1e-6)
    product, cross = curvature.product_and_cross_vjp(u)
    assert_equal(product, curvature.product(u), 1e-12)
    assert_equal(cross, expected.T @ u, 1e-6)
    u.neg_()  # solvers change their vectors in place
    assert_equal(curvature.product(u), -product, 1e-12)


@pytest.mark.parametrize("name", OPS)
def test_gauss_newton_products_run_through_every_op(name):
    """Symmetric and positive semi-definite along random directions: the loss is convex in the outputs."""
    problem, x = op_problem(name)
    curvature = at(problem, x, GaussNewton)
    u, v = randn(4, *[(sum(weight.numel() for weight in curvature.weights),)] * 2)
    assert_equal(u @ curvature.product(v), v @ curvature.product(u))
    assert u @ curvature.product(u) > 0


def test_attention_is_differentiated_twice_in_single_precision_too():
    """The fused kernels, which PyTorch prefers there, have no second derivative."""
    problem, x = op_problem("attention")
    expected = at(problem, x, Hessian)
    (u,) = randn(5, (sum(weight.numel() for weight in expected.weights),))
    problem.module.float()
    single = at(problem, x.float(), Hessian)
    assert_equal(single.product(u.float()).double(), expected.product(u), 1e-4)


@pytest.mark.parametrize("kind", BOTH)
def test_an_op_without_second_derivatives_is_named(kind):
    """PyTorch names it; the note says what to do."""
    table = {"w": randn(0, (4, 3))[0]}
    problem = problem_of(table, lambda model, hyper, batch: hyper["decay"] * F.pdist(model.params["w"]).square().sum())
    with pytest.raises(RuntimeError, match="_pdist_backward") as raised:
        at(problem, None, kind).product(torch.ones(12).double())
    assert any("second derivatives" in note and "centered_stn" in note for note in raised.value.__notes__)


# Gauss-Newton, against matrices built by hand


def hand_made(name: str, y: Tensor) -> Tensor:
    """The Hessian in one row of outputs, of the cross entropy or of the squared error, before the mean."""
    p = torch.softmax(y, 0)
    return torch.diag(p) - torch.outer(p, p) if name == "cross entropy" else 2 * torch.eye(len(y)).double() / len(y)


def row_loss(name: str, y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t.argmax(1)) if name == "cross entropy" else F.mse_loss(y, t)


LOSSES = ["cross entropy", "squared error"]


@pytest.mark.parametrize("name", LOSSES)
@given(seed=SEEDS, decay=st.floats(0.1, 3.0))
def test_gauss_newton_is_the_matrix_of_its_definition(name, seed, decay):
    """JᵀH_yJ/n + 12 s W² + (c Jᵀ1 1ᵀ + its transpose): the quartic penalty of W, and outputs times weights of V."""
    network = Tanh(2, 3, 2, seed)
    x, t = randn(seed + 1, (5, 2), (5, 2))

    def loss(model, hyper, batch):
        y = model(batch[0])
        penalty = model.params["W"].pow(4).sum() + y.sum() * model.params["V"].sum()
        return row_loss(name, y, batch[1]) + hyper["decay"] * penalty

    actual = matrix(at(problem_of(network, loss, decay=decay), (x, t), GaussNewton))
    w, v = network.W.detach(), network.V.detach()
    expected = torch.diag(decay * torch.cat([12 * w.flatten() ** 2, torch.zeros(v.numel()).double()]))
    reads = torch.cat([torch.zeros(w.numel()), torch.ones(v.numel())]).double()
    for row in x:
        jacobian = Tanh.jacobian(w, v, row)
        curvature = hand_made(name, v @ torch.tanh(w @ row))
        mixed = torch.outer(jacobian.sum(0), reads)
        expected += jacobian.T @ curvature @ jacobian / len(x) + decay * (mixed + mixed.T)
    assert_equal(actual, expected)


class Wrapped(Tanh):
    """Its outputs packed in some way; what is not a tensor passes through."""

    pack: Callable[[Tensor], object]

    def forward(self, x: Tensor) -> object:
        return type(self).pack(super().forward(x))


def wrapped(pack: Callable[[Tensor], object], seed: int) -> nn.Module:
    return type("Packed", (Wrapped,), {"pack": staticmethod(pack)})(2, 3, 2, seed)


PACKS = {
    "dict of lists": (lambda y: {"a": [y[:, :1], "text"], "b": (y[:, 1:], None)}, lambda o: (o["a"][0], o["b"][0])),
    "dataclass": (lambda y: Both(y[:, :1], [y[:, 1:]]), lambda o: (o.y, o.rest[0])),
    "changed in place": (lambda y: y, lambda o: (o.mul_(1.0)[:, :1], o[:, 1:])),
}


@pytest.mark.parametrize("name", PACKS)
def test_gauss_newton_takes_nested_outputs(name):
    """The same matrix however the outputs are packed, and in two calls as in one."""
    pack, unpack = PACKS[name]
    x, t = randn(1, (6, 2), (6, 2))

    def loss(model, hyper, batch):
        rows = [torch.cat(unpack(model(part)), dim=1) for part in batch[0].split(2)]
        return F.mse_loss(torch.cat(rows), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    def plain(model, hyper, batch):
        return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    packed = at(problem_of(wrapped(pack, 0), loss), (x, t), GaussNewton)
    expected = matrix(at(problem_of(Tanh(2, 3, 2), plain), (x, t), GaussNewton))
    assert_equal(matrix(packed), expected)
    assert (matrix(at(problem_of(Tanh(2, 3, 2), plain), (x, t), Hessian)) - expected).abs().max() > 1e-3


@given(seed=SEEDS)
def test_gauss_newton_follows_a_network_that_reads_its_own_outputs(seed):
    """y₂ = f(y₁ + ΣV): the Jacobian is J₂ + f'(y₁ + ΣV) (J₁ + 1 1_Vᵀ), as a recurrent network in a loss needs."""
    network = Tanh(2, 3, 2, seed)
    (x,) = randn(seed + 1, (2,))

    def loss(model, hyper, batch):
        first = model(batch)
        return model(first + model.params["V"].sum()).square().sum() / 2 + first.sum() * hyper["decay"]

    actual = matrix(at(problem_of(network, loss), x, GaussNewton))
    w, v = network.W.detach(), network.V.detach()
    reads = torch.cat([torch.zeros(w.numel()), torch.ones(v.numel())]).double()
    middle = v @ torch.tanh(w @ x) + v.sum()
    slope = v @ torch.diag(1 - torch.tanh(w @ middle) ** 2) @ w
    inside = Tanh.jacobian(w, v, x) + reads
    total = Tanh.jacobian(w, v, middle) + slope @ inside
    assert_equal(actual, total.T @ total)


@given(seed=SEEDS)
def test_gauss_newton_is_the_hessian_of_a_network_linear_in_its_weights(seed):
    """Whatever the loss and the penalty."""
    network = nn.Linear(3, 2).double()
    network.load_state_dict(dict(zip(("weight", "bias"), randn(seed, (2, 3), (2,)), strict=True)))
    batch = tuple(randn(seed + 1, (5, 3), (5, 2)))

    def loss(model, hyper, batch):
        y = model(batch[0])
        penalty = model.params["weight"].pow(4).sum() + (y.exp().sum() * model.params["bias"].sum()).sin()
        return F.cross_entropy(y, batch[1].argmax(1)) + hyper["decay"] * penalty

    problem = problem_of(network, loss)
    assert_equal(matrix(at(problem, batch, GaussNewton)), matrix(at(problem, batch, Hessian)))


@given(seed=SEEDS)
def test_gauss_newton_is_the_hessian_where_there_is_no_network(seed):
    """Everything is a penalty then."""
    w, x = randn(seed, (4,), (6, 4))

    def loss(model, hyper, batch):
        return torch.tanh(batch @ model.params["w"]).sum() * hyper["decay"]

    problem = problem_of({"w": w}, loss)
    slopes = torch.tanh(x @ w)
    expected = 0.3 * x.T @ torch.diag(-2 * slopes * (1 - slopes**2)) @ x
    for kind in BOTH:
        assert_equal(matrix(at(problem, x, kind)), expected)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=SEEDS)
def test_gauss_newton_is_positive_semi_definite(name, seed):
    """Where the Hessian mostly is not: here the network is far from a minimum."""
    batch = tuple(randn(seed + 1, (5, 2), (5, 2)))
    problem = problem_of(Tanh(2, 3, 2, seed), lambda model, hyper, batch: row_loss(name, model(batch[0]), batch[1]))
    values = torch.linalg.eigvalsh(matrix(at(problem, batch, GaussNewton)))
    assert values.min() > -1e-12 * values.max()


def test_a_hessian_can_be_indefinite_where_gauss_newton_is_not():
    batch = tuple(randn(1, (5, 2), (5, 2)))
    problem = problem_of(Tanh(2, 3, 2), lambda model, hyper, batch: F.mse_loss(model(batch[0]), batch[1]))
    assert torch.linalg.eigvalsh(matrix(at(problem, batch, Hessian))).min() < -0.01


# Randomness, and what stays as it was


@pytest.mark.parametrize("kind", BOTH)
def test_a_network_with_dropout_runs_once_per_curvature(kind):
    """One mask for the gradient, the outputs and every product; random numbers advance as in one training pass."""
    calls = []

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            calls.append(F.dropout(torch.ones_like(x), 0.5))
            return self.layer(x * calls[-1])

    def loss(model, hyper, batch):
        noise = torch.randn(batch.shape, dtype=torch.float64)
        return (
            model(batch + noise).square().sum() / 2
            + hyper["decay"] * bilevel.l2(model.params) * torch.rand(1).double()[0]
        )

    (x,), problem = randn(0, (8, 3)), problem_of(Masked(), loss)
    torch.manual_seed(0)
    noise = torch.randn(x.shape, dtype=torch.float64)
    mask = F.dropout(torch.ones_like(x), 0.5)
    factor, after = torch.rand(1).double()[0], torch.get_rng_state()
    torch.manual_seed(0)
    curvature = at(problem, x, kind)
    assert len(calls) == 1
    assert torch.equal(calls[0], mask)
    inputs = (x + noise) * mask
    block = inputs.T @ inputs + 2 * 0.3 * factor * torch.eye(3).double()
    assert_equal(matrix(curvature), torch.block_diag(block, block))
    assert_equal(
        curvature.cross_jvp(torch.ones(1).double()), 2 * 0.3 * factor * curvature.weights[0].detach().flatten()
    )
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("kind", BOTH)
def test_a_curvature_leaves_statistics_and_gradients_alone(kind):
    """BatchNorm in train mode, whose statistics change in place."""
    problem, x = op_problem("batch norm")
    inner = Variables(problem)
    before = [buffer.clone() for buffer in inner.buffers()]
    curvature = kind(inner, problem.initial_hyper(), x)
    (u,) = randn(0, (sum(weight.numel() for weight in curvature.weights),))
    first = curvature.product(u)
    assert torch.equal(curvature.product(u), first)
    assert not first.requires_grad
    assert all(torch.equal(*pair) for pair in zip(inner.buffers(), before, strict=True))
    assert all(parameter.grad is None for parameter in [*inner.parameters(), *problem.module.parameters()])


@pytest.mark.parametrize("kind", BOTH)
def test_a_curvature_is_freed_with_its_last_reference(kind):
    """No cycle keeps the graph of one outer step alive until the garbage collector runs."""
    problem, x = op_problem("linear, relu")
    gc.collect()
    gc.disable()
    try:
        curvature = at(problem, x, kind)
        curvature.product(torch.ones(sum(weight.numel() for weight in curvature.weights)).double())
        watched = [weakref.ref(curvature), weakref.ref(curvature.weights[0]), weakref.ref(curvature.loss)]
        del curvature
        assert [reference() for reference in watched] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["object", "hook"])
def test_gauss_newton_refuses_what_it_cannot_see(way):
    """Outputs inside an opaque object, or features taken by a hook: their curvature would be missing silently."""
    network = wrapped(lambda y: UserDict(y=y), 0) if way == "object" else Tanh(2, 3, 2)
    features = []
    if way == "hook":
        network.register_forward_hook(lambda module, args, output: features.append(output))

    def loss(model, hyper, batch):
        y = model(batch)
        seen = y["y"] if way == "object" else features[-1]
        return seen.square().sum() + hyper["decay"] * bilevel.l2(model.params)

    problem = problem_of(network, loss)
    (x,) = randn(1, (5, 2))
    with pytest.raises(ValueError, match=r"gauss_newton.*model\(\.\.\.\) returns.*model\.params.*curvature='hessian'"):
        at(problem, x, GaussNewton)
    assert matrix(at(problem, x, Hessian)).isfinite().all()


def test_frozen_weights_have_no_curvature():
    """The matrix is that of the trained weights alone."""
    network = Tanh(2, 3, 2)
    network.W.requires_grad_(False)
    (x,) = randn(1, (5, 2))
    problem = problem_of(network, lambda model, hyper, batch: model(batch).square().sum() / 2)
    features = torch.tanh(x @ network.W.T)
    for kind in BOTH:
        curvature = at(problem, x, kind)
        assert [tuple(weight.shape) for weight in curvature.weights] == [(2, 3)]
        assert_equal(matrix(curvature), torch.block_diag(*[features.T @ features] * 2))
