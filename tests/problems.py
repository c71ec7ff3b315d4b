"""Problems with known answers, and ways to look inside a response, shared by the tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.nn import functional as F

import bilevel
from bilevel import BestResponse, Problem, Solver
from bilevel.response import get_method
from bilevel.response.hypernetwork import Hypernetwork, HypernetworkResponse

SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.floats(0.05, 3.0)
OPTIMIZERS = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "SGD, dampening": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD, nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, maximize": partial(optim.SGD, lr=0.02, momentum=0.5, maximize=True),
    "Adam": partial(optim.Adam, lr=0.05),
    "Adam, amsgrad": partial(optim.Adam, lr=0.05, betas=(0.8, 0.9), amsgrad=True, weight_decay=0.1),
    "AdamW": partial(optim.AdamW, lr=0.05, weight_decay=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.02, alpha=0.9, weight_decay=0.1),
    "RMSprop, centered": partial(optim.RMSprop, lr=0.01, alpha=0.9, centered=True, momentum=0.9),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1),
    "Adadelta": partial(optim.Adadelta, lr=1.0, eps=1e-2),
    "Adamax": partial(optim.Adamax, lr=0.05),
    "NAdam": partial(optim.NAdam, lr=0.05, weight_decay=0.1),
    "RAdam": partial(optim.RAdam, lr=0.05, betas=(0.9, 0.9)),  # rectified from the sixth step on
}
HYPERNETWORKS = ["centered_stn", "delta_stn", "stn"]


def randn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Standard normal tensors in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def double(values: object) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Compare relative to the largest entry, so that cancellation between large terms is judged fairly."""
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * size)


def sgd(lr: float):
    """An optimizer factory."""
    return lambda params: torch.optim.SGD(params, lr=lr)


class TwoTensors(nn.Module):
    """A network that predicts its own weights: the simplest one on which a prediction can be linearised."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.first = nn.Parameter(weights[:1].clone())
        self.rest = nn.Parameter(weights[1:].clone().reshape(1, -1))

    def forward(self) -> Tensor:
        return torch.cat([self.first, self.rest.flatten()])


@dataclass(frozen=True)
class Quadratic:
    """The quadratic problem of Theorem ``thm-quad-min``, with every derivative written out.

    L_T = ½ wᵀAw + wᵀBλ + ½ λᵀCλ + dᵀw + eᵀλ  and  L_V = ½ wᵀPw + wᵀQλ + ½ λᵀRλ + sᵀw + tᵀλ.
    """

    A: Tensor
    B: Tensor
    C: Tensor
    d: Tensor
    e: Tensor
    P: Tensor
    Q: Tensor
    R: Tensor
    s: Tensor
    t: Tensor
    hyper: Tensor
    weights: Tensor
    theta: Tensor
    network: bool

    def inner(self, hyper: Tensor, w: Tensor) -> Tensor:
        return w @ self.A @ w / 2 + w @ self.B @ hyper + hyper @ self.C @ hyper / 2 + self.d @ w + self.e @ hyper

    def outer(self, hyper: Tensor, w: Tensor) -> Tensor:
        return w @ self.P @ w / 2 + w @ self.Q @ hyper + hyper @ self.R @ hyper / 2 + self.s @ w + self.t @ hyper

    def inner_slope(self, hyper: Tensor, w: Tensor) -> Tensor:
        return self.A @ w + self.B @ hyper + self.d

    def outer_slope(self, hyper: Tensor, w: Tensor) -> Tensor:
        return self.P @ w + self.Q @ hyper + self.s

    def direct(self, hyper: Tensor, w: Tensor) -> Tensor:
        return self.Q.T @ w + self.R @ hyper + self.t

    def solution(self, hyper: Tensor) -> Tensor:
        return -torch.linalg.solve(self.A, self.B @ hyper + self.d)

    def jacobian(self) -> Tensor:
        return -torch.linalg.solve(self.A, self.B)

    def problem(self) -> Problem:
        """As a user would write it; from the weights directly, or from the prediction of a network."""

        def read(model: bilevel.Model) -> Tensor:
            return model() if self.network else torch.cat([value.flatten() for value in model.params.values()])

        inner = TwoTensors(self.weights)
        return Problem(
            inner if self.network else dict(inner.named_parameters()),
            inner_loss=lambda model, hyper, batch: self.inner(hyper["x"], read(model)),
            outer_loss=lambda model, hyper, batch: self.outer(hyper["x"], read(model)),
            hyper={"x": bilevel.real(self.hyper)},
        )


def make_quadratic(m: int, h: int, seed: int, network: bool) -> Quadratic:
    """A random quadratic problem, with a point (λ, w₀, Θ) at which to look at it."""
    a, b, c, d, e, p, q, r, s, t, hyper, w, theta = randn(
        seed, (m, m), (m, h), (h, h), (m,), (h,), (m, m), (m, h), (h, h), (m,), (h,), (h,), (m,), (m, h)
    )
    definite = a @ a.T / m + 0.5 * torch.eye(m).double()
    return Quadratic(definite, b, c + c.T, d, e, p + p.T, q, r + r.T, s, t, hyper, w, theta, network)


def quadratics() -> st.SearchStrategy[Quadratic]:
    """Random quadratic problems, with and without a network."""
    return st.builds(make_quadratic, m=st.integers(2, 5), h=st.integers(1, 4), seed=SEEDS, network=st.booleans())


def make_ill_conditioned(m: int, h: int, seed: int, digits: float, network: bool) -> Quadratic:
    """A random quadratic problem whose Hessian has a condition number of 10 to the power of ``digits``."""
    vectors = torch.linalg.qr(randn(seed, (m, m))[0]).Q
    A = vectors @ torch.diag(torch.logspace(0, -digits, m, dtype=torch.float64)) @ vectors.T
    return replace(make_quadratic(m, h, seed, network), A=(A + A.T) / 2)


def ill_conditioned_quadratics() -> st.SearchStrategy[Quadratic]:
    """Random quadratic problems with condition numbers up to 1e4, with and without a network."""
    return st.builds(
        make_ill_conditioned,
        m=st.integers(2, 6),
        h=st.integers(1, 4),
        seed=SEEDS,
        digits=st.floats(0.0, 4.0),
        network=st.booleans(),
    )


@dataclass(frozen=True)
class Ridge:
    """Ridge regression whose penalty is λ itself, as in appendix ``sec:linear-reg-example``."""

    X: Tensor
    t: Tensor
    penalty: float
    weights: Tensor
    theta: Tensor

    def matrix(self) -> Tensor:
        return self.X.T @ self.X + self.penalty * torch.eye(self.X.shape[1]).double()

    def problem(self) -> Problem:
        n, m = self.X.shape

        def loss(model, hyper, batch):
            x, t = batch
            return ((model(x).squeeze(1) - t).square().sum() + hyper["penalty"] * bilevel.l2(model.params)) / (2 * n)

        return Problem(
            nn.Linear(m, 1, bias=False).double(),
            inner_loss=loss,
            outer_loss=loss,
            hyper={"penalty": bilevel.real(self.penalty)},
        )


def make_ridge(n: int, m: int, seed: int, penalty: float) -> Ridge:
    x, t, w, theta = randn(seed, (n, m), (n,), (m,), (m, 1))
    return Ridge(x, t, penalty, w, theta)


def ridges() -> st.SearchStrategy[Ridge]:
    """Random ridge regressions."""
    return st.builds(make_ridge, n=st.integers(2, 8), m=st.integers(1, 4), seed=SEEDS, penalty=st.floats(1.0, 5.0))


class Tanh(nn.Module):
    """y = V tanh(W x): nonlinear in its weights, with a Jacobian short enough to write down."""

    def __init__(self, inputs: int, hidden: int, outputs: int, seed: int = 0) -> None:
        super().__init__()
        w, v = randn(seed, (hidden, inputs), (outputs, hidden))
        self.W = nn.Parameter(w)
        self.V = nn.Parameter(v)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.W.T) @ self.V.T

    @staticmethod
    def jacobian(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """∂y/∂(W, V) at one input, shape (outputs, weights), by hand."""
        a = torch.tanh(w @ x)
        through_w = v[:, :, None] * (1 - a**2)[None, :, None] * x[None, None, :]
        through_v = torch.einsum("ki,j->kij", torch.eye(len(v)).double(), a)
        return torch.cat([through_w.flatten(1), through_v.flatten(1)], dim=1)


def network_problem(network: nn.Module, *, outer_mode: str = "eval") -> Problem:
    """Mean squared error of a network with a tuned penalty, in the precision of its weights."""
    return Problem(
        network,
        inner_loss=lambda model, hyper, batch: (
            F.mse_loss(model(batch[0]), batch[1])
            + hyper["decay"] * bilevel.l2(model.params)
            + 0 * hyper["idle"].sum(-1)
        ),
        outer_loss=lambda model, hyper, batch: F.mse_loss(model(batch[0]), batch[1]),
        hyper={"decay": bilevel.positive(0.1), "idle": bilevel.real([0.5, -1.0])},
        outer_mode=outer_mode,
    )


def flat_weights(response: BestResponse, hyper: Tensor) -> Tensor:
    """The weights of a response at λ as one vector."""
    return torch.cat([value.detach().flatten() for value in response(hyper).params.values()])


def dense(method: str | bilevel.Method) -> bilevel.Method:
    """The method with the full Jacobian and one perturbation per batch, for a network, too."""
    settings = get_method(method)
    return replace(settings, structure="dense") if isinstance(settings, Hypernetwork) else settings


def set_response(response: BestResponse, hyper: Tensor, w: Tensor, theta: Tensor) -> None:
    """Make the response at λ have weights w, shape (m,), and slopes Θ, shape (m, h), whatever its parameterization."""
    if isinstance(response, HypernetworkResponse):
        for slope, part in zip(response.theta.slopes, split_like(response, theta.T), strict=True):
            slope.data.copy_(part)
        if isinstance(response, bilevel.response.stn.STNResponse):
            w = w - theta @ hyper
    for weight, part in zip(response.inner.weights, split_like(response, w), strict=True):
        weight.data.copy_(part)


def split_like(response: BestResponse, values: Tensor) -> list[Tensor]:
    """Split the last dimension of values into tensors of the shapes of the weights."""
    weights = list(response.inner.weights)
    ends = torch.tensor([0, *[weight.numel() for weight in weights]]).cumsum(0).tolist()
    return [
        values[..., start:end].reshape(values.shape[:-1] + weight.shape)
        for (start, end), weight in zip(pairwise(ends), weights, strict=True)
    ]


def scramble(response: HypernetworkResponse, hyper: Tensor, seed: int = 1) -> None:
    """Give the response random slopes, leaving its weights at λ where they are."""
    w = flat_weights(response, hyper)
    (theta,) = randn(seed, (len(w), len(hyper)))
    set_response(response, hyper, w, theta.to(w) / 4)


def perturb_by(response: HypernetworkResponse, *points: Tensor) -> None:
    """Make the response draw the given perturbations, in turn, instead of random ones."""
    queue = list(points)
    response.scale.sample = lambda examples=None: queue.pop(0)


def points(scale: Tensor) -> Tensor:
    """The 2h points ±√h σᵢ eᵢ, whose mean and covariance are those of p(ε|σ): exact where a quadratic is averaged."""
    return len(scale) ** 0.5 * torch.cat([torch.diag(scale), -torch.diag(scale)])


@dataclass(frozen=True)
class Term:
    """One term of the inner loss: its value and gradients, None where it has none."""

    value: Tensor
    weights: Tensor | None
    theta: Tensor | None


def terms(response: HypernetworkResponse, hyper: Tensor, noise: Tensor, batch: object = None) -> list[Term]:
    """The terms of the inner loss under one perturbation, the reported one first, with gradients (m,) and (m, h)."""

    def joined(gradients: list[Tensor | None], start: int) -> Tensor | None:
        if all(gradient is None for gradient in gradients):
            return None
        return torch.cat([gradient.flatten(start) for gradient in gradients], dim=-1)

    perturb_by(response, noise)
    weights, slopes = list(response.inner.weights), list(response.theta.slopes)
    result = []
    for loss in response.inner_loss(hyper, batch):
        gradients = torch.autograd.grad(loss.value, weights + slopes, allow_unused=True)
        theta = joined(list(gradients[len(weights) :]), 1)
        result.append(
            Term(loss.value.detach(), joined(list(gradients[: len(weights)]), 0), None if theta is None else theta.T)
        )
    return [result.pop(response.reported), *result]


def expected_terms(response: HypernetworkResponse, hyper: Tensor, scale: Tensor, batch: object = None) -> list[Term]:
    """The mean of the terms over the 2h points."""

    def mean(values: list[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.stack(values).mean(0)

    samples = [terms(response, hyper, point, batch) for point in points(scale)]
    return [
        Term(
            mean([term.value for term in column]),
            mean([term.weights for term in column]),
            mean([term.theta for term in column]),
        )
        for column in zip(*samples, strict=True)
    ]


def solver_at(
    problem: Problem, method: str | bilevel.Method, w: Tensor, theta: Tensor, *, lr: float = 0.1, outer_lr: float = 0.1
) -> Solver:
    """A solver with plain SGD whose response has been put at (w, Θ)."""
    solver = Solver(problem, method=dense(method), inner_optimizer=sgd(lr), outer_optimizer=sgd(outer_lr))
    set_response(solver.response, solver.vector.detach(), w, theta)
    return solver
