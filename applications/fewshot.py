"""Few-shot learning: meta-learn an initialisation from which a few gradient steps learn a new task.

The tasks are the sine curves of Finn et al. (2017), with amplitudes in [0.1, 5] and phases in [0, π]. A task shows 10
points, and a network with two hidden layers of 40 units, adapted to them by a few steps of gradient descent, has to
predict the rest of the curve. The hyperparameters are the initial weights: a bilevel problem with
``Problem(initial=...)``, in which the inner problem is the adaptation to a batch of tasks, all at once.

    maml               differentiates through the steps of the adaptation: Unrolled(restart=True)
    maml_checkpoint    the same from less memory: Unrolled(restart=True, checkpoint=True)
    imaml              solves a linear system instead; the adaptation is pulled towards the initialisation with
                       μ/2 |w − λ|², so that its end depends on it (Rajeswaran et al. 2019): Implicit(CG(...))
    joint              pretrains one network on all tasks
    random             does not train at all

Every method keeps the round whose initialisation adapted best to 100 validation tasks. All of them are adapted to new
tasks in the same way, without the pull.

    python -m applications.fewshot       # or: make fewshot
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm.auto import tqdm

import bilevel

SHOTS, WIDTH = 10, 40
TASKS = 25  # in a meta-batch
STEPS = 5  # of adaptation in training
INNER = partial(torch.optim.SGD, lr=0.01)
OUTER = partial(torch.optim.Adam, lr=3e-3)
PULL, PULLED_STEPS = 2.0, 16  # of imaml: μ, and its steps of adaptation, which should come near the minimum
METHODS = {
    "maml": bilevel.Unrolled(steps=STEPS, restart=True),
    "maml_checkpoint": bilevel.Unrolled(steps=STEPS, restart=True, checkpoint=True),
    "imaml": bilevel.Implicit(bilevel.CG(max_steps=5, rtol=0.0), curvature="gauss_newton"),
}
PATIENCE = 100
REPORTED = (0, 1, 5, 10, 20)
Weights = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor]


class Networks(nn.Module):
    """One network per task: every weight has a leading dimension of tasks. Their start is that of the problem."""

    def __init__(self, start: Weights, tasks: int) -> None:
        """Make room for the weights."""
        super().__init__()
        for name, weight in start.items():
            self.register_parameter(name, nn.Parameter(weight.expand(tasks, *weight.shape).clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Predict, from shape (tasks, points, 1) to the same."""
        weights = dict(self.named_parameters())
        for layer in range(3):
            x = torch.baddbmm(weights[f"bias{layer}"], x, weights[f"weight{layer}"])
            x = x.relu() if layer < 2 else x
        return x


def draw_start(seed: int) -> dict[str, Tensor]:
    """Weights of one network, drawn as PyTorch does."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise((1, WIDTH, WIDTH, 1))]
    weights = {f"weight{index}": layer.weight.detach().T.contiguous() for index, layer in enumerate(layers)}
    return weights | {f"bias{index}": layer.bias.detach()[None] for index, layer in enumerate(layers)}


def sines(count: int, queries: int, seed: int) -> Iterator[tuple[Batch, Batch]]:
    """Batches of tasks without end: points to adapt to, and others of the same curves."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        amplitude, phase, x = (torch.rand(count, n, 1, generator=generator) for n in (1, 1, SHOTS + queries))
        x = 10 * x - 5
        y = (0.1 + 4.9 * amplitude) * torch.sin(x - math.pi * phase)
        yield (x[:, :SHOTS], y[:, :SHOTS]), (x[:, SHOTS:], y[:, SHOTS:])


def errors(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of each task."""
    return (prediction - target).square().mean((1, 2))


def problem(start: Weights, tasks: int, pull: float = 0.0) -> bilevel.Problem:
    """The bilevel problem: adapt to each task from the initialisation, and do well on its other points."""

    def adaptation_loss(model: bilevel.Model, hyper: Weights, batch: Batch) -> Tensor:
        # The sum, not the mean: the weights of a task are its own, and so is its step.
        loss = errors(model(batch[0]), batch[1]).sum()
        if pull > 0:
            away = [(weight - hyper[name]).square().sum() for name, weight in model.params.items()]
            loss = loss + pull / 2 * torch.stack(away).sum()
        return loss

    def query_loss(model: bilevel.Model, hyper: Weights, batch: Batch) -> Tensor:
        return errors(model(batch[0]), batch[1])

    return bilevel.Problem(
        Networks(start, tasks),
        inner_loss=adaptation_loss,
        outer_loss=query_loss,
        hyper={name: bilevel.real(weight) for name, weight in start.items()},
        initial=lambda hyper: {name: weight.expand(tasks, *weight.shape) for name, weight in hyper.items()},
    )


def meta_learn(name: str, seed: int) -> Iterator[Weights]:
    """The initialisation after each round of one method, without end."""
    pull = PULL if name == "imaml" else 0.0
    tasks = problem(draw_start(seed), TASKS, pull)
    solver = bilevel.Solver(tasks, method=METHODS[name], inner_optimizer=INNER, outer_optimizer=OUTER, seed=seed)
    for support, query in sines(TASKS, SHOTS, seed):
        if name == "imaml":
            solver.restart()
            for _ in range(PULLED_STEPS):
                solver.inner_step(support)
            solver.outer_step(support, query)
        else:  # starts again and adapts by itself
            solver.outer_step([support] * STEPS, query)
        yield solver.hyper


def pretrain(seed: int) -> Iterator[Weights]:
    """The weights of one network after each step on the same points of the same tasks, in plain PyTorch."""
    weights = {name: value.requires_grad_() for name, value in draw_start(seed).items()}
    network, optimizer = Networks(weights, TASKS), OUTER(weights.values())
    for support, query in sines(TASKS, SHOTS, seed):
        x, y = (torch.cat(pair, 1) for pair in zip(support, query, strict=True))
        copies = {name: value.expand(TASKS, *value.shape) for name, value in weights.items()}
        optimizer.zero_grad()
        errors(functional_call(network, copies, x), y).mean().backward()
        optimizer.step()
        yield {name: value.detach().clone() for name, value in weights.items()}


def keep_best(starts: Iterator[Weights], rounds: int, *, seed: int, progress: bool) -> tuple[Weights, int]:
    """Stop once validation tasks have not become easier to adapt to for ``PATIENCE`` rounds.

    Returns:
        The initialisation that was best there, and its round.
    """
    support, query = next(sines(100, 100, seed + 1_000_000))
    kept: Weights = draw_start(seed)
    best, lowest = 0, math.inf
    for index, start in enumerate(tqdm(islice(starts, rounds), total=rounds, unit="round", disable=not progress), 1):
        if index % 20 == 0 or index == rounds:
            error = float(errors(adapt(start, support, query[0], 10)[-1], query[1]).mean())
            if error < lowest:
                kept, best, lowest = start, index, error
            if index - best >= PATIENCE:
                break
    return kept, best


def adapt(start: Weights, support: Batch, x: Tensor, steps: int) -> list[Tensor]:
    """Predictions at ``x`` after 0, 1, ... steps of adaptation to the support."""
    solver = bilevel.Solver(problem(start, len(x)), method=METHODS["maml"], inner_optimizer=INNER)
    predictions = []
    for _ in range(steps + 1):
        predictions.append(solver.response(solver.vector.detach())(x))
        solver.inner_step(support)
    return predictions


def refusal(seed: int) -> str:
    """What the library says to a method that cannot see the initialisation."""
    method = bilevel.Unrolled(steps=STEPS, truncate=1, restart=True)
    support, query = next(sines(TASKS, SHOTS, seed))
    try:
        bilevel.Solver(problem(draw_start(seed), TASKS), method=method).outer_step([support] * STEPS, query)
    except ValueError as error:
        return str(error)
    return "nothing"


def report(found: Mapping[str, Tensor], cost: Mapping[str, str]) -> str:
    """The final table: test errors with 95 % intervals by steps of adaptation, the round that was kept, CPU time."""
    lines = [f"{'':<16}" + "".join(f"{f'{steps} steps':>16}" for steps in REPORTED) + f"{'round':>8}{'CPU time':>11}"]
    for name, error in found.items():
        mean, half = error.mean(1), 1.96 * error.std(1) / math.sqrt(error.shape[1])
        cells = "".join(f"{f'{mean[steps]:.3f} ± {half[steps]:.3f}':>16}" for steps in REPORTED)
        lines.append(f"{name:<16}{cells}{cost[name]}")
    return "\n".join(lines)


@bilevel.plotting.style()
def draw(found: Mapping[str, Tensor], starts: Mapping[str, Weights], seed: int, path: Path) -> None:
    """Save the errors by steps of adaptation, and how three initialisations adapt to one task."""
    figure, axes = bilevel.plotting.panels(4, size=(3.6, 2.8), most=2)
    hues = bilevel.plotting.colors(found)
    for name, error in found.items():
        mean, half = error.mean(1), 1.96 * error.std(1) / math.sqrt(error.shape[1])
        style = "--" if name == "maml_checkpoint" else "-"  # lies on top of maml
        axes[0].plot(mean, style, color=hues[name], label=name)
        axes[0].fill_between(range(len(mean)), mean - half, mean + half, color=hues[name], alpha=0.2, linewidth=0)
    axes[0].set(title="test error of new tasks", xlabel="steps of adaptation", ylabel="mean squared error", ylim=0)
    support, (x, y) = next(sines(1, 300, seed))
    order = x[0, :, 0].argsort()
    x, y = x[:, order], y[0, order, 0]
    for axis, name in zip(axes[1:], ("maml", "imaml", "joint"), strict=True):
        predictions = adapt(starts[name], support, x, REPORTED[-1])
        for steps, color in zip(REPORTED, bilevel.plotting.spectrum(len(REPORTED)), strict=True):
            axis.plot(x[0, :, 0], predictions[steps][0, :, 0], label=f"{steps} steps", color=color)
        axis.plot(x[0, :, 0], y, "k--", linewidth=1, label="truth")
        axis.plot(support[0][0, :, 0], support[1][0, :, 0], "k.", label="shown points")
        axis.set(title=f"{name}: a new task", xlabel="x", ylim=(-5.5, 4))
    axes[0].legend(loc="upper right")
    axes[1].legend(loc="lower center", ncols=3, columnspacing=0.8)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Train with every method, adapt to new tasks, print the table, save the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600, help="at most, each with 25 tasks (default: 600)")
    parser.add_argument("--tasks", type=int, default=500, help="new tasks to test on (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and tasks (default: 0)")
    parser.add_argument("--quick", action="store_true", help="40 rounds and 100 new tasks: too few to judge a method")
    parser.add_argument("--out", type=Path, default=Path("runs/fewshot"), help="folder for the table and the figure")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.tasks = 40, 100
    torch.set_num_threads(1)  # the fastest for matrices this small
    support, query = next(sines(options.tasks, 100, options.seed + 2_000_000))
    found, cost = {}, {}
    starts: dict[str, Weights] = {}
    for name in ("random", "joint", *METHODS):
        print(name, flush=True)
        started = time.process_time()
        run = {"random": iter(()), "joint": pretrain(options.seed)}.get(name) or meta_learn(name, options.seed)
        starts[name], kept = keep_best(run, options.rounds, seed=options.seed, progress=not options.quiet)
        cost[name] = f"{kept:>8}{time.process_time() - started:9.1f} s"
        predictions = adapt(starts[name], support, query[0], REPORTED[-1])
        found[name] = torch.stack([errors(prediction, query[1]) for prediction in predictions])
    title = f"mean squared error on {options.tasks} new tasks, ± 95 %, by steps of adaptation to {SHOTS} points"
    table = f"{title}\n\n{report(found, cost)}\n\nunrolled_truncated: {refusal(options.seed)}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fewshot.txt").write_text(table + "\n", encoding="utf-8")
    draw(found, starts, options.seed + 3_000_003, options.out / "fewshot.png")
    print(f"\n{table}\n\nErrors and curves: {options.out / 'fewshot.png'}")


if __name__ == "__main__":
    main()
