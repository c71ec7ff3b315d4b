"""Data hyper-cleaning: learn which training examples to trust.

Some training labels are wrong. Every training example gets a weight between 0 and 1, so that there are as many
hyperparameters as examples; the weights are chosen such that the network trained on the weighted examples does well on
a small clean validation set. Corrupted examples should end near 0.

Four baselines are trained without such weights: on all training examples (noisy), on the validation set (valid), on
both together (noisy+valid), and, as an upper bound, on the training examples with a right label (oracle). They detect
wrong labels too: where they give them a low probability (AUC), where they predict another one (F1).

    python -m applications.cleaning                   # scikit-learn's digits; or: make cleaning
    python -m applications.cleaning --data DIR        # MNIST: DIR/mnist/train-images-idx3-ubyte.gz, ...

Two kinds of methods do not fit, and can be tried with --methods. Those that learn a response (stn, centered_stn,
delta_stn) see the weight of each example only through the noise of all others. And unrolled_forward pushes one tangent
for each example through every step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel
from applications import data as datasets
from applications import sklearn_datasets
from applications.task import STOPPED

METHODS = ("implicit_cg", "implicit_neumann", "implicit_nystrom", "unrolled", "unrolled_truncated")
INNER_STEPS = 20  # in a round; the unrolled methods make as many in their outer step
DECAY = 1e-3
INNER = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
OUTER = partial(torch.optim.Adam, lr=0.3)
Batch = tuple[Tensor, Tensor, Tensor]


def train_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Weighted cross-entropy; a batch carries the indices of its examples, to find their weights."""
    x, y, index = batch
    losses = F.cross_entropy(model(x), y, reduction="none")
    return (hyper["weight"][index] * losses).mean() + DECAY * bilevel.l2(model.params)


def valid_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Cross-entropy on clean examples."""
    x, y, _ = batch
    return F.cross_entropy(model(x), y)


@dataclass(frozen=True)
class Data:
    """Images, labels and indices; ``corrupted`` tells which labels of ``train`` are wrong."""

    train: Batch
    valid: Batch
    test: Batch
    corrupted: Tensor


@dataclass(frozen=True)
class Run:
    """What the table and the figure show of a run.

    Attributes:
        name: Of the method or baseline.
        trust: In each training example: its learned weight, or the probability that a baseline gives to its label.
        metrics: Test accuracy, test loss, AUC and F1 of finding the corrupted examples, CPU seconds.
        curve: The test loss by round.
    """

    name: str
    trust: Tensor
    metrics: list[float]
    curve: dict[int, float]


def load(folder: Path | None, seed: int, train: int, valid: int, noise: float) -> Data:
    """Split a data set, without a folder scikit-learn's digits, and give some training examples another label.

    Returns:
        The data; at most 10,000 examples are kept for the test.
    """
    if folder is None:
        images, labels = sklearn_datasets().load_digits(return_X_y=True)
    else:
        mnist = datasets.images("mnist", folder)
        images, labels = mnist.train_x.numpy(), mnist.train_y.numpy()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(labels), generator=generator)[: train + valid + 10_000].numpy()
    x = torch.tensor(images[rows].reshape(len(rows), -1) / images.max(), dtype=torch.float32)
    y = torch.tensor(labels[rows], dtype=torch.int64)
    corrupted = torch.rand(train, generator=generator) < noise
    y[:train] = (y[:train] + corrupted * torch.randint(1, 10, (train,), generator=generator)) % 10
    sizes = [train, valid, len(rows) - train - valid]
    batches = [(a, b, torch.arange(len(b))) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
    return Data(batches[0], batches[1], batches[2], corrupted)


def network(data: Data, seed: int) -> nn.Sequential:
    """An MLP with one hidden layer, the same for all methods."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(data.train[0].shape[1], 32), nn.ReLU(), nn.Linear(32, 10))


def clean(method: str, data: Data, *, rounds: int, seed: int, progress: bool = False) -> Run:
    """Learn the weights of the examples together with the network.

    Returns:
        The run.

    Raises:
        KeyboardInterrupt: If somebody stopped it.
    """
    net = network(data, seed)
    problem = bilevel.Problem(
        net,
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={"weight": bilevel.interval(0.0, 1.0, init=torch.full((len(data.corrupted),), 0.5), shared=True)},
    )
    curve: dict[int, float] = {}
    started = time.process_time()
    solution = bilevel.solve(
        problem,
        [data.train],
        [data.valid],
        method=method,
        inner_optimizer=INNER,
        outer_optimizer=OUTER,
        inner_steps=0 if method.startswith("unrolled") else INNER_STEPS,
        steps=rounds,
        callbacks=[lambda event: curve.update({event.index: event.solver.evaluate([data.test])})],
        progress=progress,
        seed=seed,
    )
    if solution.stopped in STOPPED:
        raise KeyboardInterrupt
    seconds = time.process_time() - started
    net.load_state_dict(solution.state_dict)
    trust = solution.hyper["weight"]
    found = detection(trust, trust < 0.5, data.corrupted)
    return Run(method, trust, [*evaluate(net, data.test), *found, seconds], curve)


def train(name: str, batch: Batch, data: Data, *, rounds: int, seed: int) -> Run:
    """Train as many steps on one batch, with all weights at 1, in plain PyTorch.

    Returns:
        The run.
    """
    net = network(data, seed)
    model, hyper = bilevel.Model(dict(net.named_parameters()), net), {"weight": torch.ones(len(batch[1]))}
    optimizer, curve = INNER(net.parameters()), {}
    started = time.process_time()
    for index in range(1, rounds + 1):
        for _ in range(INNER_STEPS):
            optimizer.zero_grad()
            train_loss(model, hyper, batch).backward()
            optimizer.step()
        curve[index] = evaluate(net, data.test)[1]
    seconds = time.process_time() - started
    with torch.no_grad():
        logits = net(data.train[0])
    trust = logits.softmax(1).gather(1, data.train[1][:, None])[:, 0]
    found = detection(trust, logits.argmax(1) != data.train[1], data.corrupted)
    return Run(name, trust, [*evaluate(net, data.test), *found, seconds], curve)


def baselines(data: Data) -> dict[str, Batch]:
    """What each baseline is trained on."""
    (x, y, _), (more_x, more_y, _), right = data.train, data.valid, ~data.corrupted
    sets = {"noisy": (x, y), "valid": (more_x, more_y)}
    sets |= {"noisy+valid": (torch.cat([x, more_x]), torch.cat([y, more_y])), "oracle": (x[right], y[right])}
    return {name: (inputs, labels, torch.arange(len(labels))) for name, (inputs, labels) in sets.items()}


@torch.no_grad()
def evaluate(net: nn.Module, batch: Batch) -> tuple[float, float]:
    """Accuracy and loss."""
    x, y, _ = batch
    logits = net(x)
    return float((logits.argmax(1) == y).float().mean()), float(F.cross_entropy(logits, y))


def detection(trust: Tensor, flagged: Tensor, corrupted: Tensor) -> tuple[float, float]:
    """The share of pairs of a clean and a corrupted example that trust orders (AUC), and F1 of the flagged ones."""
    difference = trust[~corrupted][:, None] - trust[corrupted]
    auc = (difference > 0).float().mean() + 0.5 * (difference == 0).float().mean()
    return float(auc), float(2 * (flagged & corrupted).sum() / (flagged.sum() + corrupted.sum()))


def report(runs: list[Run]) -> str:
    """The final table: mean and standard deviation over the seeds; times relative to training on the noisy set."""
    titles = ("test accuracy, %", "test loss", "AUC", "F1")
    lines = [f"{'method':<20}" + "".join(f"{title:>17}" for title in titles) + f"{'CPU time':>11}"]
    plain = np.mean([run.metrics[-1] for run in runs if run.name == "noisy"])
    for name in dict.fromkeys(run.name for run in runs):
        measured = np.array([[100 * run.metrics[0], *run.metrics[1:]] for run in runs if run.name == name])
        mean, cells = measured.mean(0), []
        for values, digits in zip(measured.T, (1, 3, 3, 3), strict=False):
            spread = f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.{digits}f}{spread}")
        lines.append(f"{name:<20}" + "".join(f"{cell:>17}" for cell in cells) + f"{mean[4] / plain:9.1f} ×")
    return "\n".join(lines)


@bilevel.plotting.style()
def draw(runs: list[Run], corrupted: Tensor, path: Path) -> None:
    """Save the weights that each method learned, and all test losses."""
    learned = [run for run in runs if run.name in bilevel.METHODS]
    figure, (*axes, last) = bilevel.plotting.panels(len(learned) + 1, size=(3.6, 2.6), most=2)
    groups = {"right label": ~corrupted, "wrong label": corrupted}
    for axis, run in zip(axes, learned, strict=True):
        shades = bilevel.plotting.shades(bilevel.plotting.color(run.name), 3)
        values = [run.trust[chosen].tolist() for chosen in groups.values()]
        axis.hist(values, bins=20, range=(0, 1), label=[*groups], color=[shades[0], shades[2]])
        axis.set(title=run.name, xlabel="learned weight", ylabel="training examples")
        axis.legend(loc="upper center")
    hues = bilevel.plotting.colors(run.name for run in runs)
    for run in runs:
        width, dashes = (1.5, "-") if run in learned else (1.2, ":")
        last.plot(
            list(run.curve), list(run.curve.values()), dashes, color=hues[run.name], linewidth=width, label=run.name
        )
    last.set(title="test loss", xlabel="round", ylim=(0, 1.9))
    last.legend(loc="upper right", ncols=2)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Run every method and baseline, print the table, save the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=bilevel.METHODS, metavar="NAME", help="to run")
    parser.add_argument("--data", type=Path, help="folder of the datasets, for MNIST (default: scikit-learn's digits)")
    parser.add_argument("--train", type=int, default=700, help="training examples (default: 700)")
    parser.add_argument("--valid", type=int, default=100, help="validation examples (default: 100)")
    parser.add_argument("--noise", type=float, default=0.4, help="share of wrong training labels (default: 0.4)")
    parser.add_argument("--rounds", type=int, default=60, help="of 20 inner steps and 1 outer step (default: 60)")
    parser.add_argument("--seeds", type=int, default=3, help="runs, each with its own split and noise (default: 3)")
    parser.add_argument("--quick", action="store_true", help="1 seed, 200 training examples, 15 rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/cleaning"), help="folder for the table and the figure")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.train, options.rounds = 1, 200, 15
    torch.set_num_threads(1)  # the fastest for matrices this small
    runs: list[Run] = []
    for seed in range(options.seeds):
        data = load(options.data, seed, options.train, options.valid, options.noise)
        latest = [train(name, part, data, rounds=options.rounds, seed=seed) for name, part in baselines(data).items()]
        for method in options.methods:
            print(f"seed {seed}: {method}", flush=True)
            try:
                latest.append(clean(method, data, rounds=options.rounds, seed=seed, progress=not options.quiet))
            except (MemoryError, bilevel.DivergenceError, bilevel.LinearSolverError) as error:
                print(f"{method} failed: {error}", flush=True)
        runs += latest
    sizes = f"{options.train} training examples ({options.noise:.0%} wrong), {options.valid} to validate"
    spread = f"; mean ± standard deviation, n = {options.seeds}" if options.seeds > 1 else ""
    table = f"{sizes}, {len(data.test[1])} to test{spread}\n\n{report(runs)}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cleaning.txt").write_text(table + "\n", encoding="utf-8")
    draw(latest, data.corrupted, options.out / "cleaning.png")
    print(f"\n{table}\n\nWeights and losses of the last seed: {options.out / 'cleaning.png'}")


if __name__ == "__main__":
    main()
