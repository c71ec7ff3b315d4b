"""The problems of ``hypergradients.py``, and their exact hypergradients, in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp

STEPS = 20
Flat = Callable[[Tensor], Tensor]


@dataclass
class Task:
    """Weights in four tensors, each with a log weight decay: fit of the outputs plus sum of exp(λ) |w|²."""

    name: str
    net: nn.Module
    fit: Callable[[Tensor, Tensor], Tensor]
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    log_decay: Tensor
    trained: list[Tensor] = field(default_factory=list)
    scale: float = 0.0  # the inverse of the largest eigenvalue of the Hessian at the trained weights

    def inner(self, weights: Sequence[Tensor], log_decay: Tensor) -> Tensor:
        """The inner loss."""
        penalty = sum(d * (w * w).sum() for d, w in zip(log_decay.exp(), weights, strict=True))
        loss: Tensor = self.fit(self.predict(weights, self.train[0]), self.train[1]) + penalty
        return loss

    def outer(self, weights: Sequence[Tensor]) -> Tensor:
        """The outer loss."""
        return self.fit(self.predict(weights, self.valid[0]), self.valid[1])

    def predict(self, weights: Sequence[Tensor], x: Tensor) -> Any:
        """The outputs of the network."""
        names = [name for name, _ in self.net.named_parameters()]
        return functional_call(self.net, dict(zip(names, weights, strict=True)), (x,))

    def start(self) -> list[Tensor]:
        """The weights before training, as leaves."""
        return [w.detach().clone().requires_grad_() for w in self.net.parameters()]

    def leaves(self) -> tuple[list[Tensor], Tensor]:
        """The trained weights and the hyperparameters."""
        return [w.clone().requires_grad_() for w in self.trained], self.log_decay.clone().requires_grad_()


class Ridge(nn.Module):
    """A linear model whose weights come in four tensors."""

    def __init__(self, features: int) -> None:
        """Start at zero."""
        super().__init__()
        self.blocks = nn.ParameterList(torch.zeros(features // 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return x @ torch.cat(list(self.blocks))


def ridge(name: str, condition: float) -> Task:
    """Linear regression on 128 features whose scales give the Hessian about this condition number."""
    scales = torch.logspace(0, -0.5, 128) ** torch.tensor(condition).log10()
    x, truth = torch.randn(1024, 128) * scales, torch.randn(128) / scales
    y = x @ truth + torch.randn(1024)
    decay = torch.tensor([1.0, 2.0, 3.0, 4.0]) / condition
    return finish(Task(name, Ridge(128), F.mse_loss, (x[:512], y[:512]), (x[512:], y[512:]), decay.log()))


def mlp() -> Task:
    """A 784-256-10 network on ten noisy classes; tanh, since training gets stuck at the kinks of relu."""
    net = nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10))
    y = torch.randint(10, (256,))
    x = 0.2 * torch.randn(10, 784)[y] + torch.randn(256, 784)
    decay = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 1e-2
    train, valid = (x[:128], y[:128]), (x[128:], y[128:])
    return finish(Task("784-256-10 MLP (tanh), batch 128", net, F.cross_entropy, train, valid, decay.log()))


def finish(task: Task) -> Task:
    """Train the weights, and find the largest eigenvalue."""
    weights = task.start()
    optimizer = torch.optim.LBFGS(weights, max_iter=500, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.inner(weights, task.log_decay)
        loss.backward()
        return loss

    optimizer.step(closure)
    task.trained = [w.detach() for w in weights]
    product, v, _ = system(double(task), gauss_newton=False)
    for _ in range(100):
        v = product(v / v.norm())
    task.scale = float(1 / v.norm())
    return task


def double(task: Task) -> Task:
    """The same in float64."""
    task = copy.deepcopy(task)
    task.net.double()
    for name in ("train", "valid"):
        x, y = getattr(task, name)
        setattr(task, name, (x.double(), y.double() if y.is_floating_point() else y))
    task.log_decay, task.trained = task.log_decay.double(), [w.double() for w in task.trained]
    return task


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def system(task: Task, *, gauss_newton: bool) -> tuple[Flat, Tensor, Flat]:
    """The curvature as a map, the outer gradient, and the transposed mixed derivative as a map, in plain torch."""
    weights, log_decay = task.leaves()
    slope = flat(torch.autograd.grad(task.inner(weights, log_decay), weights, create_graph=True))
    sizes = [w.numel() for w in weights]

    def hessian(p: Tensor) -> Tensor:
        return flat(torch.autograd.grad(slope, weights, p, retain_graph=True))

    def predict(*w: Tensor) -> Any:
        return task.predict(w, task.train[0])

    def fit(outputs: Tensor) -> Tensor:
        return task.fit(outputs, task.train[1])

    def gauss(p: Tensor) -> Tensor:
        parts = [part.view_as(w) for part, w in zip(p.split(sizes), weights, strict=True)]
        outputs, back = vjp(predict, *weights)[:2]
        along = jvp(predict, tuple(weights), tuple(parts))[1]
        bent = vjp(grad(fit), outputs)[1](along)[0]  # the output Hessian is symmetric
        return flat([2 * d * q + b for d, q, b in zip(task.log_decay.exp(), parts, back(bent), strict=True)]).detach()

    def cross(u: Tensor) -> Tensor:
        return torch.autograd.grad(slope, log_decay, u, retain_graph=True)[0]

    return gauss if gauss_newton else hessian, flat(torch.autograd.grad(task.outer(weights), weights)), cross


def exact(task: Task, kind: str) -> Tensor:
    """What a kind of method approximates, in float64."""
    task = double(task)
    if kind == "unroll":
        return unroll(task)
    product, b, cross = system(task, gauss_newton=kind == "gauss_newton")
    if b.numel() <= 1000:
        return -cross(torch.linalg.solve(torch.stack([product(e) for e in torch.eye(b.numel()).double()]), b))
    x, r, p = torch.zeros_like(b), b, b
    while r.norm() > 1e-10 * b.norm():
        image = product(p)
        step = (r @ r) / (p @ image)
        x, new = x + step * p, r - step * image
        p, r = new + (new @ new) / (r @ r) * p, new
    return -cross(x)


def unroll(task: Task) -> Tensor:
    """Differentiate gradient descent in plain torch."""
    weights, (_, log_decay) = task.start(), task.leaves()
    for _ in range(STEPS):
        slopes = torch.autograd.grad(task.inner(weights, log_decay), weights, create_graph=True)
        weights = [w - task.scale / 2 * slope for w, slope in zip(weights, slopes, strict=True)]
    return torch.autograd.grad(task.outer(weights), log_decay)[0]
