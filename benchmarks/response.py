r"""How well Δ-STN learns the response Θ: noise, structure, cost.

    python benchmarks/response.py --out docs/results/response.txt --figure docs/_static/response.png
    python benchmarks/response.py --read docs/results/response.txt --figure docs/_static/response.png  # draw it again

Small networks in double precision. The MLPs start at the minimum for fixed hyperparameters. Networks with norms start
where training usually ends, since the size of a weight before a norm has no minimum. Then only Θ is trained, on
minibatches: the optimizer of the weights has the learning rate zero (``stn`` trains both, since its weights are
:math:`\phi_0 + \Phi \lambda`). Reported are, as means over seeds:

- *cosine*: of the learned response with the exact one, :math:`-\mathbf{G}^{-1} \mathbf{B}` with the Gauss-Newton matrix
  G and the cross derivative B; the mean over the hyperparameters. With batch norm and a perturbation for each example,
  the statistics of a batch hardly move, and the response is compared with that at fixed statistics; the column *exact*
  has the cosine with the other one, in which they respond.
- *ceiling*: the same for the best that a structure can do. The *optimum* minimises the objective that Θ is trained on;
  training converges to it. The *best fit* is the nearest to the exact response, so it has the largest cosine.
- *SNR*: the norm of the mean of the hypergradient over its standard deviation. It is taken in the last part of the run,
  every five inner steps, each time on a new minibatch of the outer loss; so it holds the noise of both.
- *hyper*: the cosine of that mean with the exact hypergradient.
- *metric G*: the cosine of the responses where G measures lengths. Directions in which the loss is nearly flat make up
  most of the plain cosine and hardly change the predictions; here they count little.
- *FLOPs* of an inner step over one of plain training.
"""

from __future__ import annotations

import argparse
import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import variants
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import bilevel
from bilevel.checks.statistics import FixedStatistics
from bilevel.problem import Model, Problem, Variables
from bilevel.response.curvature import GaussNewton

SCALES = (0.1, 0.3, 1.0)
BATCH = 32
INNER_STEPS = 5  # to an outer step
LEARNING_RATE = 2e-3
ADAM = partial(torch.optim.Adam, lr=LEARNING_RATE)
Batch = tuple[Tensor, Tensor]


Curves = dict[str, dict[float, float]]
QUICK = ("mlp", "classifier")
FACTORS = ("classifier", "transformer")
DEFAULT = "gate + control (default)"
VARIANTS: dict[str, tuple[str, Callable[..., bilevel.Method]]] = {
    "delta, paper": ("rowwise", partial(bilevel.DeltaSTN, structure="rowwise", control=False)),
    "rows + pairs": ("rowwise", partial(bilevel.DeltaSTN, structure="rowwise", antithetic=True)),
    "rows + pairs, half of examples": (
        "rowwise",
        partial(variants.Thrifty, structure="rowwise", share=0.5),
    ),
    "gate, plain": ("gate", partial(bilevel.DeltaSTN, control=False)),
    DEFAULT: ("gate", bilevel.DeltaSTN),
    "gate + pairs": ("gate", partial(bilevel.DeltaSTN, antithetic=True)),
    "gate + pairs, half of examples": ("gate", partial(variants.Thrifty, share=0.5)),
    "gate + pairs, every 2nd step": ("gate", partial(bilevel.DeltaSTN, antithetic=True, response_every=2)),
    "gate + control, per batch": ("gate", partial(bilevel.DeltaSTN, perturb="batch")),
    "dense + control": ("dense", partial(bilevel.DeltaSTN, structure="dense")),
    "centered_stn": ("gate", bilevel.CenteredSTN),
    "stn, gate": ("gate", partial(bilevel.STN, structure="gate")),
}
MAIN = ("delta, paper", "rows + pairs", "gate, plain", DEFAULT)


def decayed(net_loss: Callable[[Any, Any, Batch], Tensor], groups: Sequence[str]) -> Callable[..., Tensor]:
    """A loss with one value per example, and a weight decay for each group of weights."""

    def loss(model: Any, hyper: Any, batch: Batch) -> Tensor:
        value = net_loss(model, hyper, batch)
        for index, group in enumerate(groups):
            weights = [weight for name, weight in model.params.items() if name.startswith(tuple(group.split("|")))]
            value = value + hyper["decay"][..., index] * bilevel.l2(weights)
        return value

    return loss


def error(model: Any, hyper: Any, batch: Batch) -> Tensor:
    """Squared error."""
    return (model(batch[0]).squeeze(-1) - batch[1]).square()


def entropy(model: Any, hyper: Any, batch: Batch) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def classes(x: Tensor, count: int = 3, noise: float = 0.5) -> Tensor:
    """Labels from a random network, some of them wrong."""
    flat = x.flatten(1)
    teacher = nn.Sequential(nn.Linear(flat.shape[1], 16), nn.Tanh(), nn.Linear(16, count))
    with torch.no_grad():
        logits = teacher(2 * (flat - flat.mean(0)) / flat.std(0))
        logits = (logits - logits.mean(0)) / logits.std(0)
        return (logits + noise * torch.randn_like(logits)).argmax(1)


class Dropped(nn.Module):
    """An MLP with dropout of two hidden layers."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, rates: Tensor) -> Tensor:
        """Logits."""
        for index, layer in enumerate((self.first, self.second)):
            x = bilevel.functional.dropout(layer(x).tanh(), rates[..., index], training=self.training)
        return self.last(x)


class Transformer(nn.Module):
    """One layer with the norms first."""

    def __init__(self, width: int = 8) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a sequence."""
        x = self.embed(x)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return self.head(x.mean(1))


@dataclass
class Task:
    """A network at its solution.

    Attributes:
        problem: Whose start is the solution.
        train: For the inner loss.
        valid: For the outer loss.
        curvature: The Gauss-Newton matrix G, shape ``(m, m)``.
        cross: The cross derivative B, shape ``(m, h)``.
        fixed: The response if statistics of batch norm did not respond, for a network that has some.
        large: Whether it is slow, so that fewer variants and seeds are run.
        longer: A factor for the number of steps, of a network that learns slowly.
        note: To print.
    """

    problem: Problem
    train: Batch
    valid: Batch
    curvature: Tensor = field(default_factory=lambda: torch.zeros(0))
    cross: Tensor = field(default_factory=lambda: torch.zeros(0))
    fixed: Tensor | None = None
    large: bool = False
    longer: int = 1
    note: str = ""

    def exact(self) -> Tensor:
        """The response −G⁻¹B."""
        return -torch.linalg.solve(self.curvature, self.cross)

    def curved(self, learned: Tensor) -> float:
        """The cosine with the exact response where G measures lengths, so that flat directions count little."""
        exact = self.exact()
        inner = [(a * (self.curvature @ b)).sum(0) for a, b in ((learned, exact), (learned, learned), (exact, exact))]
        return float((inner[0] / (inner[1] * inner[2]).sqrt()).mean())

    def hypergradient(self, response: Tensor, batch: Batch | None = None) -> Tensor:
        """Of the outer loss on a batch, or on all of the data, with a given response."""
        inner = Variables(self.problem)
        params, data = inner.params(), self.valid if batch is None else batch
        loss = self.problem.outer_loss(inner.model(params), self.problem.initial_hyper(), data).value
        return response.T @ flat(torch.autograd.grad(loss, list(params.values())))


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def solve_inner(problem: Problem, batch: Batch, *, steps: int, seed: int | None = None) -> None:
    """Train the network of a problem to its minimum, with the same masks in every evaluation if there is a seed."""
    assert problem.module is not None
    module, hyper = problem.module.train(), problem.space.values(problem.initial_hyper())
    model = Model(dict(module.named_parameters()), module)
    optimizer = torch.optim.LBFGS(
        module.parameters(), max_iter=steps, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=1e-10
    )

    def closure() -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        optimizer.zero_grad()
        value = problem.inner_loss(model, hyper, batch).value
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    module.zero_grad()


def train_inner(problem: Problem, data: Batch, *, steps: int, seed: int) -> None:
    """Train the network of a problem as usual: Adam on minibatches, with a learning rate that falls to zero."""
    assert problem.module is not None
    module, hyper = problem.module.train(), problem.space.values(problem.initial_hyper())
    model = Model(dict(module.named_parameters()), module)
    optimizer = torch.optim.Adam(module.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    stream = minibatches(data, BATCH, torch.Generator().manual_seed(seed))
    for _ in range(steps):
        optimizer.zero_grad()
        problem.inner_loss(model, hyper, next(stream)).value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    module.zero_grad()


def dense_curvature(problem: Problem, batches: Sequence[Batch], *, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """G and B, the mean over batches; with the statistics of batch norm held fixed if asked to."""
    inner, hyper = Variables(problem), problem.initial_hyper()
    size = sum(weight.numel() for weight in inner.weights)
    matrix, cross = torch.zeros(size, size), torch.zeros(size, hyper.numel())
    for batch in batches:
        if fixed:
            with FixedStatistics(len(batch[0])):
                found = GaussNewton(inner, hyper, batch, check=False)
        else:
            found = GaussNewton(inner, hyper, batch, check=False)
        for index, unit in enumerate(torch.eye(size)):
            matrix[:, index] += found.product(unit) / len(batches)
        for index, unit in enumerate(torch.eye(hyper.numel())):
            cross[:, index] += found.cross_jvp(unit) / len(batches)
    return (matrix + matrix.T) / 2, cross


def minibatches(data: Batch, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """Endless epochs in random order."""
    while True:
        order = torch.randperm(len(data[0]), generator=generator)
        for part in order.split(size):
            if len(part) == size:
                yield data[0][part], data[1][part]


def smooth_task(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    groups: Sequence[str],
    decay: float,
    *,
    minimum: bool = True,
    outer_mode: str = "eval",
) -> Task:
    """Weight decay for each group of weights, at the minimum or after training as usual."""
    loss = error if y.is_floating_point() else entropy
    half = len(x) // 2
    problem = Problem(
        net,
        inner_loss=decayed(loss, groups),
        outer_loss=loss,
        hyper={"decay": bilevel.positive([decay * 2**index for index in range(len(groups))])},
        outer_mode=outer_mode,
    )
    task = Task(problem, (x[:half], y[:half]), (x[half:], y[half:]))
    if minimum:
        solve_inner(problem, task.train, steps=3000)
    else:
        train_inner(problem, task.train, steps=2000, seed=0)
    return task


def mlp(seed: int) -> Task:
    """4-6-1, tanh, squared error."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(200, 4)
    y = torch.sin(x @ torch.tensor([1.0, 1.0, -1.0, 0.5])) + 0.3 * torch.randn(200)
    task = smooth_task(net, x, y, ("0", "2"), 0.01)
    task.curvature, task.cross = dense_curvature(task.problem, [task.train])
    return task


def classifier(seed: int) -> Task:
    """8-16-16-3, tanh, cross entropy."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    x = torch.randn(400, 8)
    task = smooth_task(net, x, classes(x), ("0", "2", "4"), 0.002)
    task.curvature, task.cross = dense_curvature(task.problem, [task.train])
    return task


def cnn(seed: int) -> Task:
    """Two convolutions with batch norm; the outer loss is in train mode."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    x = torch.randn(800, 1, 8, 8)
    features = F.conv2d(x, torch.randn(6, 1, 3, 3)).relu().mean((2, 3))
    groups = ("0|1", "3|4", "8")
    task = smooth_task(net, x, classes(features), groups, 0.003, minimum=False, outer_mode="train")
    generator = torch.Generator().manual_seed(seed)
    stream = minibatches(task.train, BATCH, generator)
    batches = [next(stream) for _ in range(20)]
    task.curvature, task.cross = dense_curvature(task.problem, batches)
    curvature, cross = dense_curvature(task.problem, batches, fixed=True)
    task.fixed, task.large, task.longer = -torch.linalg.solve(curvature, cross), True, 3
    losses, hyper = task.problem.user_losses, task.problem.space.hyper
    usual = Problem(net, inner_loss=losses["inner_loss"], outer_loss=losses["outer_loss"], hyper=dict(hyper))
    lines = ["  hypergradients of seed 0, by the response and by what the outer loss uses (the first is true):"]
    for label, response in (("exact response", task.exact()), ("that at fixed statistics", task.fixed)):
        for kind, found in (
            ("fresh running statistics", refreshed(task, response)),
            ("statistics of the batch", task.hypergradient(response)),
            ("running statistics as they are", replace(task, problem=usual).hypergradient(response)),
        ):
            lines.append(f"    {label:<26}{kind:<33}" + "".join(f"{value:9.4f}" for value in found.tolist()))
    task.note = "\n".join(lines)
    return task


def refreshed(task: Task, response: Tensor, delta: float = 1e-3) -> Tensor:
    """The hypergradient in eval mode by differences, with running statistics computed anew on each side."""
    assert task.problem.module is not None
    sides: dict[int, list[Tensor]] = {1: [], -1: []}
    for sign, values in sides.items():
        for column in response.T:
            net = copy.deepcopy(task.problem.module)
            nn.utils.vector_to_parameters(flat(list(net.parameters())) + sign * delta * column, net.parameters())
            for layer in net.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.reset_running_stats()
                    layer.momentum = None  # a plain average
            stream = minibatches(task.train, BATCH, torch.Generator().manual_seed(0))
            with torch.no_grad():
                for _ in range(20):
                    net.train()(next(stream)[0])
                values.append(F.cross_entropy(net.eval()(task.valid[0]), task.valid[1]))
    return (torch.stack(sides[1]) - torch.stack(sides[-1])) / (2 * delta)


def transformer(seed: int) -> Task:
    """One layer of width 8 on sequences of length 6."""
    torch.manual_seed(seed)
    x = torch.randn(400, 6, 4)
    groups = ("embed|norm", "attention", "wide|narrow", "head")
    task = smooth_task(Transformer(), x, classes(x.amax(1)), groups, 0.002, minimum=False)
    task.large, task.longer = True, 3
    task.curvature, task.cross = dense_curvature(task.problem, [task.train])
    return task


def dropout(seed: int) -> Task:
    """8-16-16-3 with two dropout rates; G and B are expectations over masks, B by central differences."""
    torch.manual_seed(seed)
    x = torch.randn(400, 8)
    y = classes(x)

    def inner(model: Any, hyper: Any, batch: Batch) -> Tensor:
        value = F.cross_entropy(model(batch[0], hyper["rate"]), batch[1], reduction="none")
        return value + 0.002 * bilevel.l2(model.params)

    def outer(model: Any, hyper: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0], hyper["rate"]), batch[1], reduction="none")

    hyper = {"rate": bilevel.interval(0.0, 1.0, init=[0.2, 0.3])}
    problem = Problem(Dropped(), inner_loss=inner, outer_loss=outer, hyper=hyper)
    task = Task(problem, (x[:200], y[:200]), (x[200:], y[200:]), large=True)
    many = tuple(value.repeat(100, *[1] * (value.ndim - 1)) for value in task.train)
    solve_inner(problem, many, steps=300, seed=seed)  # type: ignore[arg-type]
    task.curvature, _ = dense_curvature(problem, [many])  # type: ignore[list-item]
    halves = [_difference(problem, many, range(part, 60, 2)) for part in (0, 1)]
    task.cross = (halves[0] + halves[1]) / 2
    answers = [-torch.linalg.solve(task.curvature, half) for half in halves]
    task.note = f"  two halves of the masks give responses with a cosine of {cosine(*answers):.3f}"
    return task


def _difference(problem: Problem, batch: Any, seeds: Sequence[int], delta: float = 0.1) -> Tensor:
    """B by central differences of the gradient, with the same uniform numbers on both sides."""
    inner, hyper = Variables(problem), problem.initial_hyper()
    columns = []
    for unit in torch.eye(hyper.numel()):
        total = torch.zeros(())
        for seed in seeds:
            sides = []
            for sign in (1, -1):
                torch.manual_seed(seed)
                params = inner.params()
                loss = problem.inner_loss(inner.model(params), hyper + sign * delta * unit, batch).value
                sides.append(flat(torch.autograd.grad(loss, list(params.values()))))
            total = total + (sides[0] - sides[1]) / (2 * delta * len(seeds))
        columns.append(total)
    return torch.stack(columns, 1)


NETWORKS: dict[str, Callable[[int], Task]] = {
    "mlp": mlp,
    "classifier": classifier,
    "cnn": cnn,
    "transformer": transformer,
    "dropout": dropout,
}


def cosine(learned: Tensor, exact: Tensor) -> float:
    """Of two responses, the mean over the hyperparameters."""
    return float(F.cosine_similarity(learned, exact, dim=0).mean())


def gate_basis(problem: Problem) -> Tensor:
    """The directions in which the gate can move the weights, one column each."""
    columns = []
    start = 0
    size = sum(weight.numel() for weight in problem.params.values())
    for weight in problem.params.values():
        rows = weight.detach() if weight.ndim > 1 else torch.ones_like(weight)
        dim = int(weight.ndim > 1 and len(weight) == 1)  # a single row grows by columns
        for index in range(weight.shape[dim]):
            one = torch.zeros_like(rows)
            one.select(dim, index).copy_(rows.select(dim, index))
            column = torch.zeros(size)
            column[start : start + weight.numel()] = F.normalize(one.flatten(), dim=0)
            columns.append(column)
        start += weight.numel()
    return torch.stack(columns, 1)


def ceilings(task: Task, structure: str) -> tuple[Tensor, Tensor]:
    """The response that training converges to, and the nearest to the exact one."""
    exact = task.exact()
    if structure == "dense":
        return exact, exact
    if structure == "gate":
        basis = gate_basis(task.problem)
        optimum = -basis @ torch.linalg.lstsq(basis.T @ task.curvature @ basis, basis.T @ task.cross).solution
        return optimum, best_fit(task, structure, exact)
    return _best_rows(task), best_fit(task, structure, exact)


def best_fit(task: Task, structure: str, response: Tensor) -> Tensor:
    """The nearest to a response within a structure."""
    if structure == "rowwise":
        return _nearest_rows(task.problem, response)
    basis = gate_basis(task.problem)
    return basis @ torch.linalg.lstsq(basis, response).solution


def _nearest_rows(problem: Problem, exact: Tensor) -> Tensor:
    """One direction per row: the best approximation of rank one of its block."""
    parts = []
    for weight, part in zip(problem.params.values(), _split(problem, exact), strict=True):
        if weight.ndim < 2:
            parts.append(part)
            continue
        blocks = part.reshape(len(weight), -1, part.shape[1])
        u, s, v = torch.linalg.svd(blocks, full_matrices=False)
        parts.append((u[..., :1] * s[..., None, :1] @ v[..., :1, :]).reshape_as(part))
    return torch.cat(parts)


def _best_rows(task: Task) -> Tensor:
    """The minimum of the objective over U and R, from where training starts."""
    problem, h = task.problem, task.cross.shape[1]
    weights = list(problem.params.values())
    directions = [w.detach().flatten(1) if w.ndim > 1 else torch.ones(w.numel(), 1) for w in weights]
    templates = [direction.clone().requires_grad_() for direction in directions]
    factors = [torch.zeros(len(direction), h, requires_grad=True) for direction in directions]
    optimizer = torch.optim.LBFGS(
        [*templates, *factors], max_iter=2000, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=1e-9
    )

    def response() -> Tensor:
        pairs = zip(templates, factors, strict=True)
        return torch.cat([(r[:, :, None] * u[:, None, :]).reshape(-1, h) for r, u in pairs])

    def closure() -> Tensor:
        optimizer.zero_grad()
        theta = response()
        value = 0.5 * (theta * (task.curvature @ theta)).sum() + (theta * task.cross).sum()
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return response().detach()


def _split(problem: Problem, matrix: Tensor) -> tuple[Tensor, ...]:
    return matrix.split([weight.numel() for weight in problem.params.values()])


def flops(task: Task, method: bilevel.Method) -> float:
    """An inner step over the forward and backward pass of plain training; the mean of two steps."""
    x, y = task.train[0][:BATCH], task.train[1][:BATCH]
    solver = bilevel.Solver(task.problem, method=method)
    inner = solver.response.inner
    solver.inner_step((x, y))
    solver.inner_step((x, y))

    def plain() -> None:
        params = inner.params()
        loss = task.problem.inner_loss(inner.model(params), solver.vector.detach(), (x, y)).value
        torch.autograd.grad(loss, list(params.values()))

    def both() -> None:
        solver.inner_step((x, y))
        solver.inner_step((x, y))

    return _count(both) / _count(plain) / 2


def _count(function: Callable[[], None]) -> float:
    with FlopCounterMode(display=False) as counter:
        function()
    return float(counter.get_total_flops())


@dataclass
class Run:
    """What one run found.

    Attributes:
        cosine: Of the learned with the exact response.
        curved: The same with the Gauss-Newton matrix as metric.
        averaged: The cosine of averages of Θ, by decay.
        at: The cosine after numbers of steps.
        snr: Signal-to-noise ratio of the hypergradient.
        hyper: Cosine of its mean with the exact hypergradient.
        exact: Cosine with the response in which the statistics of batch norm respond, too.
    """

    cosine: float
    curved: float
    averaged: dict[float, float]
    at: dict[int, float]
    snr: float
    hyper: float
    exact: float


def learn(
    task: Task,
    method: bilevel.Method,
    seed: int,
    *,
    steps: int,
    batch: int = BATCH,
    outer_batch: int = BATCH,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAM,
    decays: Sequence[float] = (),
    looks: Sequence[int] = (),
) -> Run:
    """Train Θ at the solution and compare it with the exact response."""
    frozen = partial(torch.optim.SGD, lr=0.0)
    solver = bilevel.Solver(
        task.problem,
        method=method,
        inner_optimizer=optimizer if isinstance(method, bilevel.STN) else frozen,
        response_optimizer=optimizer,
        outer_optimizer=frozen,
        seed=seed,
    )
    generator = torch.Generator().manual_seed(seed)
    train = minibatches(task.train, batch, generator)
    valid = minibatches(task.valid, outer_batch, generator)
    theta = solver.response.theta
    means = {decay: copy.deepcopy(theta) for decay in decays}
    at, gradients, exact = {}, [], task.exact()
    reference = task.fixed if task.fixed is not None and solver.response.per_example else exact
    for step in range(1, steps + 1):
        solver.inner_step(next(train))
        with torch.no_grad():
            for decay, mean in means.items():
                for old, new in zip(mean.parameters(), theta.parameters(), strict=True):
                    old.lerp_(new, 1 - decay)
        if step in looks:
            at[step] = cosine(solver.response.jacobian(solver.vector), reference)
        if step > 0.6 * steps and step % INNER_STEPS == 0:
            gradients.append(solver.outer_step(None, next(valid)).hypergradient)
    found = torch.stack(gradients)
    learned = solver.response.jacobian(solver.vector)
    averaged = {}
    for decay, mean in means.items():
        solver.response.theta = mean
        averaged[decay] = cosine(solver.response.jacobian(solver.vector), reference)
    return Run(
        cosine(learned, reference),
        task.curved(learned),
        averaged,
        at,
        signal_to_noise(found),
        float(F.cosine_similarity(found.mean(0), task.hypergradient(exact), dim=0)),
        cosine(learned, exact),
    )


def signal_to_noise(gradients: Tensor) -> float:
    """Of gradients, one per row: the norm of the mean over the standard deviation."""
    return float(gradients.mean(0).norm() / gradients.var(0).sum().sqrt())


def of_exact_response(task: Task, seed: int, count: int = 80) -> float:
    """The signal-to-noise ratio with the exact response, where only the minibatches of the outer loss are noise."""
    stream = minibatches(task.valid, BATCH, torch.Generator().manual_seed(seed))
    exact = task.exact()
    return signal_to_noise(torch.stack([task.hypergradient(exact, next(stream)) for _ in range(count)]))


def mean(values: Sequence[float]) -> float:
    """The average."""
    return sum(values) / len(values)


def compare(name: str, tasks: Sequence[Task], scales: Sequence[float], steps: int) -> tuple[list[str], Curves]:
    """A table of variants, and the cosines over the scale by variant."""
    batch_norm = tasks[0].fixed is not None
    curves: Curves = {}
    exact = [task.exact() for task in tasks]
    size, h = exact[0].shape
    lines = [f"{name}: {NETWORKS[name].__doc__}"]
    lines[0] += f" {size} weights, {h} hyperparameters, {len(tasks)} seed{'s' if len(tasks) > 1 else ''}."
    lines[0] += f" {tasks[0].longer * steps} steps." if tasks[0].longer > 1 else ""
    lines += [tasks[0].note] if tasks[0].note else []
    lines.append("  ceiling                         optimum  best fit   (of cosine)      hyper of the optimum")
    for structure in ("gate", "rowwise"):
        found = [ceilings(task, structure) for task in tasks]
        both = [mean([cosine(each[i], e) for each, e in zip(found, exact, strict=True)]) for i in (0, 1)]
        triples = zip(tasks, found, exact, strict=True)
        hyper = [F.cosine_similarity(t.hypergradient(f[0]), t.hypergradient(e), dim=0) for t, f, e in triples]
        lines.append(f"  {structure:<30}{both[0]:9.3f}{both[1]:10.3f}{mean([float(v) for v in hyper]):26.3f}")
        curves[f"ceiling, {structure}"] = dict.fromkeys(scales, both[1])
    if batch_norm:
        fixed = [task.fixed for task in tasks if task.fixed is not None]
        apart = mean([cosine(f, e) for f, e in zip(fixed, exact, strict=True)])
        lines.append(f"  cosine of the exact response with that at fixed statistics of batch norm: {apart:.3f}")
        for structure in ("gate", "rowwise"):
            nearest = [cosine(best_fit(t, structure, f), f) for t, f in zip(tasks, fixed, strict=True)]
            lines.append(f"  best fit to that at fixed statistics, {structure}: {mean(nearest):.3f}")
    ratio = mean([of_exact_response(task, seed) for seed, task in enumerate(tasks)])
    lines.append(f"  SNR with the exact response: {ratio:.2f}")
    lines.append(
        f"  {'variant':<32}FLOPs |"
        + "".join(f"σ = {scale:<5g}" for scale in scales)
        + f"| at σ = {_middle(scales):g}: metric G    SNR  hyper"
        + ("  exact" if batch_norm else "")
    )
    for variant, (_, make) in VARIANTS.items():
        if tasks[0].large and variant not in MAIN and not (batch_norm and "per batch" in variant):
            continue
        runs: dict[float, list[Run]] = {}
        for scale in scales if variant in MAIN or "per batch" in variant else (_middle(scales),):
            runs[scale] = [
                learn(task, make(scale=scale), seed, steps=task.longer * steps) for seed, task in enumerate(tasks)
            ]
        curves[variant] = {scale: mean([run.cosine for run in found]) for scale, found in runs.items()}
        cells = "".join(f"{curves[variant][scale]:<9.3f}" if scale in runs else " " * 9 for scale in scales)
        middle = runs[_middle(scales)]
        rest = [mean([run.curved for run in middle]), mean([run.snr for run in middle])]
        rest.append(mean([run.hyper for run in middle]))
        line = f"  {variant:<32}{flops(tasks[0], make()):5.2f} |{cells}|{rest[0]:19.3f}{rest[1]:7.2f}{rest[2]:7.3f}"
        lines.append(line + (f"{mean([run.exact for run in middle]):7.3f}" if batch_norm else ""))
        print(lines[-1], flush=True)
    return lines, curves


def _middle(scales: Sequence[float]) -> float:
    return scales[len(scales) // 2]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam 5e-4": partial(torch.optim.Adam, lr=5e-4),
    "Adam 8e-3": partial(torch.optim.Adam, lr=8e-3),
    "Adam 3e-2": partial(torch.optim.Adam, lr=3e-2),
    "Adam 2e-3, β₂ = 0.9": partial(torch.optim.Adam, lr=2e-3, betas=(0.9, 0.9)),
    "RMSprop 2e-3": partial(torch.optim.RMSprop, lr=2e-3),
    "SGD 1e-2, momentum 0.9": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "SGD 1e-1, momentum 0.9": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
}


def factors(name: str, tasks: Sequence[Task], scale: float, steps: int) -> list[str]:
    """One factor at a time from the default: averages of Θ, its optimizer, batches, the number of steps."""
    steps *= tasks[0].longer
    looks = (steps // 10, steps * 3 // 10, steps)
    head = f"  {'from the default, one at a time':<32}" + "".join(f"{f'{n} steps':>11}" for n in looks)
    lines = [f"{name}, σ = {scale:g}", head + f"{'metric G':>10}{'SNR':>7}{'hyper':>7}"]

    def row(label: str, **options: Any) -> list[Run]:
        method = bilevel.DeltaSTN(scale=scale)
        runs = [
            learn(task, method, seed, **{"steps": steps, "looks": looks, **options}) for seed, task in enumerate(tasks)
        ]
        cells = "".join(f"{mean([run.at[n] for run in runs]):11.3f}" for n in looks)
        curved, snr, hyper = (mean([getattr(run, key) for run in runs]) for key in ("curved", "snr", "hyper"))
        lines.append(f"  {label:<32}{cells}{curved:10.3f}{snr:7.2f}{hyper:7.3f}")
        print(lines[-1], flush=True)
        return runs

    runs = row(f"Adam 2e-3, batches of {BATCH}", decays=(0.98, 0.995))
    for decay in runs[0].averaged:
        label, value = f"average of Θ, decay {decay}", mean([run.averaged[decay] for run in runs])
        lines.append(f"  {label:<32}{'':22}{value:11.3f}")
    for label, optimizer in OPTIMIZERS.items():
        row(label, optimizer=optimizer)
    row(f"inner batches of {4 * BATCH}", batch=4 * BATCH)
    row(f"outer batches of {4 * BATCH}", outer_batch=4 * BATCH)
    return lines


def draw(curves: dict[str, Curves], path: Path) -> None:
    """Save the cosines over the scale, a panel for each network."""
    from bilevel import plotting

    with plotting.style():
        figure, axes = plotting.panels(len(curves), most=2, size=(3.6, 2.5))
        shown = [*MAIN[:-1], "gate + control, per batch", DEFAULT]  # on top
        colors = plotting.colors(shown)
        for axis, (network, found) in zip(axes, curves.items(), strict=True):
            for structure, dashes in (("gate", ":"), ("rowwise", "--")):
                points = found[f"ceiling, {structure}"]
                axis.plot(list(points), list(points.values()), dashes, color="0.5", label=f"best fit, {structure}")
            for variant in shown:
                points = found.get(variant, {})
                if points:
                    axis.plot(list(points), list(points.values()), "o-", color=colors[variant], label=variant)
            axis.set_xscale("log")
            axis.set_xticks(list(points or found[DEFAULT]), [f"{scale:g}" for scale in points or found[DEFAULT]])
            axis.minorticks_off()
            axis.set(title=network, xlabel="scale σ", ylim=(min(0.0, axis.get_ylim()[0]), 1.02))
        axes[0].set_ylabel("cosine with exact")
        handles, labels = next(iter(axes)).get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        figure.savefig(path)


def read(text: str) -> dict[str, Curves]:
    """What :func:`compare` has written of the cosines.

    Returns:
        The cosines over the scale by network and variant.
    """
    curves: dict[str, Curves] = {}
    for block in text.split("\n\n"):
        lines = block.splitlines()
        name = lines[0].partition(":")[0]
        (head,) = [line for line in lines if line.startswith("  variant ")] or [""]
        if name not in NETWORKS or not head:
            continue
        scales = [float(value) for value in re.findall(r"σ = ([\d.]+)", head.split("|")[1])]
        found = curves[name] = {}
        for line in lines:
            ceiling = re.match(r"  (gate|rowwise) +[\d.]+ +([\d.]+)", line)
            if ceiling:
                found[f"ceiling, {ceiling[1]}"] = dict.fromkeys(scales, float(ceiling[2]))
            elif line.count("|") == 2 and line != head:
                cells = [line.split("|")[1][9 * place :][:9].strip() for place in range(len(scales))]
                known = zip(scales, cells, strict=True)
                found[line[2:34].strip()] = {scale: float(cell) for scale, cell in known if cell}
    return curves


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=1000, help="inner steps of each run")
    parser.add_argument("--seeds", type=int, default=2, help="networks of each kind; half as many of the slow ones")
    parser.add_argument("--quick", action="store_true", help="one seed of each MLP, one scale, 300 steps")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--figure", type=Path, help="draw the cosines over the scale")
    parser.add_argument("--read", type=Path, help="measure nothing: draw what --out has written to this file")
    options = parser.parse_args()
    if options.read:
        draw(read(options.read.read_text(encoding="utf-8")), options.figure)
        return
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    scales: tuple[float, ...] = SCALES
    steps, seeds, networks = options.steps, options.seeds, options.networks
    if options.quick:
        scales, steps, seeds, networks = (0.3,), 300, 1, [name for name in networks if name in QUICK]
    began = time.monotonic()
    head = f"Learned responses after {steps} inner steps, batches of {BATCH}, Adam {LEARNING_RATE:g} for Θ, w₀ fixed"
    blocks = [[head]]
    curves: dict[str, Curves] = {}
    studies = []
    for name in networks:
        print(name, flush=True)
        tasks = [NETWORKS[name](0)]
        tasks += [NETWORKS[name](seed) for seed in range(1, max(1, seeds // 2) if tasks[0].large else seeds)]
        table, curves[name] = compare(name, tasks, scales, steps)
        blocks.append(table)
        if name in FACTORS:
            studies.append(factors(name, tasks, 0.3, steps))
    text = "\n\n".join("\n".join(block) for block in blocks + studies)
    print(text)
    print(f"{time.monotonic() - began:.0f} s")
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.figure:
        draw(curves, options.figure)


if __name__ == "__main__":
    main()
