"""Δ-STN beside the published code: the same images, split, starting weights, batch sizes and number of epochs.

    git clone https://github.com/pomonam/Self-Tuning-Networks PUBLISHED
    python benchmarks/published.py --published PUBLISHED --data DIR --out docs/results/published.jsonl
    python benchmarks/published.py --report docs/results/published.jsonl

The published code runs from its own folder, which is never changed. Taken from there are its layers, hyperparameters,
dropout and optimizer of steps (``layers``, ``hyper``, ``utils``, ``base_step_optimizer``). Its loop is written again
below, as its ``base_trainer`` needs wandb and an older PyTorch; and so are the networks, because its MLP never applies
its last layer. ``published`` has the settings of its scripts: SGD 0.01 with momentum for weights and response, RMSprop
0.01 for hyperparameters and scales, an entropy weight of 0.001, five epochs of warm-up. No task here was used to choose
the defaults of this library. Each finished run is a line of JSON; a run whose line is there is skipped. ``DIR`` is the
data folder of the applications (``python -m applications download``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tasks as suite
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel
from bilevel.augment import cutout
from bilevel.functional import cross_entropy, dropout

SGD, ADAM = suite.sgd(0.01), suite.adam(1e-3)
Layer = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A set of images and a network for it.

    Attributes:
        data: Name of the set; all but MNIST are halved in height and width.
        train: How many images; as many again, at most 2,000, are for validation.
        epochs: Passes over them.
        convolutions: Channels of the input and after each convolution of 5 × 5, which a pooling of 2 × 2 follows.
        hidden: Inputs of the first linear layer, and outputs of each.
        rates: Dropout rates: one before each of the first layers, beginning with the input.
        cutout: Whether cutout is tuned, too.
    """

    data: str
    train: int
    epochs: int
    convolutions: tuple[int, ...]
    hidden: tuple[int, ...]
    rates: int
    cutout: bool


TASKS = {
    "mnist_2000": Task("mnist", 2000, 60, (), (784, 128, 128, 128, 10), 3, False),
    "fashion_3000": Task("fashion_mnist", 3000, 30, (), (196, 128, 128, 10), 3, True),
    "cifar_3000": Task("cifar10", 3000, 12, (3, 16, 32), (512, 256, 10), 4, True),
    "mnist_10000": Task("mnist", 10000, 60, (), (784, 128, 128, 128, 10), 3, False),
}
RUNS = ["published", "published_adam", "default", "default_sgd", "paper_sgd", "stn", "fixed", "fixed_sgd"]


class Net(nn.Module):
    """Convolutions, then linear layers; our form of a task's network."""

    def __init__(self, task: Task) -> None:
        """Draw the weights."""
        super().__init__()
        self.task = task
        convolutions = [nn.Conv2d(*pair, 5, padding=2) for pair in pairwise(task.convolutions)]
        self.layers = nn.ModuleList([*convolutions, *(nn.Linear(*pair) for pair in pairwise(task.hidden))])

    def forward(self, x: Tensor, rates: Tensor) -> Tensor:
        """Predict, with one dropout rate for each of the first layers."""

        def drop(index: int, x: Tensor) -> Tensor:
            return dropout(x, rates[..., index], shared_dims=(2, 3) if x.ndim == 4 else (), training=self.training)

        return through(self.task, lambda index, x: self.layers[index](x), drop, x)


def through(task: Task, apply: Layer, drop: Layer, x: Tensor) -> Tensor:
    """Run a network of either code: dropout and layers by their index.

    Returns:
        Its logits.
    """
    first = max(0, len(task.convolutions) - 1)
    for index in range(first + len(task.hidden) - 1):
        x = F.relu(x) if index else x
        x = F.max_pool2d(x, 2) if 0 < index <= first else x
        x = x.flatten(1) if index >= first else x
        x = apply(index, drop(index, x) if index < task.rates else x)
    return x


def batches(task: Task, seed: int, roots: suite.Roots) -> tuple[suite.Batches, suite.Batches]:
    """The batches for training and for validation."""
    parts = suite.images(task.data, roots, (task.train, min(task.train, 2000)), 1000 + seed)
    return suite.Batches(parts[0], 128), suite.Batches(parts[1], 128)


def ours(name: str, task: Task, seed: int, roots: suite.Roots) -> tuple[list[float], dict[str, Any]]:
    """Tune with this library, or train with the start.

    Returns:
        The validation loss after each epoch, and the hyperparameters at the end.
    """
    train, valid = batches(task, seed, roots)
    torch.manual_seed(seed)
    net = Net(task)
    hyper: dict[str, bilevel.Hyper] = {"dropout": bilevel.interval(0.0, 0.95, init=[0.05] * task.rates)}
    if task.cutout:
        hyper |= {"holes": bilevel.integer(0, 4, init=1), "length": bilevel.integer(1, 8, init=4)}

    def inner(model: bilevel.Model, values: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        x = cutout(x, values["holes"], values["length"]) if task.cutout else x
        return cross_entropy(model(x, values["dropout"]), y)

    def outer(model: bilevel.Model, values: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0], values["dropout"]), batch[1])

    problem = bilevel.Problem(net, inner_loss=inner, outer_loss=outer, hyper=hyper)
    optimizer = SGD if name.endswith("_sgd") else ADAM
    if name.startswith("fixed"):
        return fixed(problem, net, optimizer, train, valid, task.epochs), {}
    options: dict[str, Any] = {"inner_optimizer": SGD} if name.endswith("_sgd") else {}
    if name == "stn":
        options["method"] = "stn"
    if name == "paper_sgd":
        options["method"] = bilevel.DeltaSTN.paper(entropy=1e-3)
        options["outer_optimizer"] = partial(torch.optim.RMSprop, lr=0.01)
        options["warmup"] = math.ceil(5 * len(train) / 5)
    solution = bilevel.solve(problem, train, valid, epochs=task.epochs, seed=seed, progress=False, **options)
    losses = [row["validation_loss"] for row in solution.history.rows if "validation_loss" in row]
    return losses, {key: value.tolist() for key, value in solution.hyper.items()}


def fixed(
    problem: bilevel.Problem,
    net: nn.Module,
    optimizer: suite.Factory,
    train: suite.Batches,
    valid: suite.Batches,
    epochs: int,
) -> list[float]:
    """Train with the hyperparameters at the start, in plain PyTorch.

    Returns:
        The validation loss after each epoch.
    """
    values = problem.space.values(problem.initial_hyper())
    model, updates, losses = bilevel.Model(dict(net.named_parameters()), net), optimizer(net.parameters()), []
    for _ in range(epochs):
        net.train()
        for batch in train:
            updates.zero_grad()
            problem.user_losses["inner_loss"](model, values, batch).mean().backward()
            updates.step()
        net.eval()
        losses.append(mean_loss(lambda x: net(x, values["dropout"]), valid))
    return losses


def mean_loss(predict: Callable[[Tensor], Tensor], valid: suite.Batches) -> float:
    """The cross entropy over a whole set; the random state is as before."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        total = sum(float(F.cross_entropy(predict(x), y, reduction="sum")) for x, y in valid)
    return total / len(valid.tensors[0])


def published(name: str, task: Task, seed: int, roots: suite.Roots, folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Tune with the published code.

    Returns:
        The validation loss after each epoch, and the hyperparameters at the end.
    """
    sys.path.insert(0, str(folder))
    # Modules of the published code, found in its folder.
    from base_model import StnModel
    from base_step_optimizer import DeltaStnStepOptimizer
    from hyper.container import HyperContainer
    from layers.conv2d import StnConv2d
    from layers.linear import StnLinear
    from utils import dropout_utils

    train, valid = batches(task, seed, roots)
    torch.manual_seed(seed)
    start = Net(task)
    container = HyperContainer(torch.device("cpu"))
    for index in range(task.rates):
        container.register(f"dropout{index}", 0.05, 1.0, min_range=0.0, max_range=0.95)
    if task.cutout:
        # As its scripts: whole numbers by rounding down.
        container.register("holes", 1.5, 1.0, min_range=0.0, max_range=5.0, discrete=True)
        container.register("length", 4.5, 1.0, min_range=1.0, max_range=9.0, discrete=True)
    count = container.get_size()

    class Published(StnModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            convolutions = [StnConv2d(*pair, 5, padding=2, num_hyper=count) for pair in pairwise(task.convolutions)]
            linear = [StnLinear(*pair, num_hyper=count) for pair in pairwise(task.hidden)]
            self.layers = nn.ModuleList([*convolutions, *linear])
            for layer, like in zip(self.layers, start.layers, strict=True):
                layer.general_weight.data.copy_(like.weight.data)
                layer.general_bias.data.copy_(like.bias.data)

        def get_layers(self) -> nn.ModuleList:
            return self.layers

        def forward(self, x: Tensor, h_net: Tensor, h_param: Tensor) -> Tensor:
            def drop(index: int, x: Tensor) -> Tensor:
                rate = container.transform_perturbed_hyper(h_param, f"dropout{index}")
                form = dropout_utils.dropout_2d if x.ndim == 4 else dropout_utils.dropout
                return form(x, rate, self.training)

            return through(task, lambda index, x: self.layers[index](x, h_net), drop, x)

    model = Published()
    weights = ADAM if name == "published_adam" else SGD
    rmsprop = partial(torch.optim.RMSprop, lr=0.01)
    optimizer = DeltaStnStepOptimizer(
        model,
        weights(model.get_general_parameters()),
        weights(model.get_response_parameters()),
        rmsprop([container.h_tensor]),
        rmsprop([container.h_scale]),
        nn.CrossEntropyLoss(),
        container,
        tune_scales=True,
        entropy_weight=1e-3,
        do_linearize=True,
    )

    def changed(x: Tensor, h: Tensor) -> Tensor:
        if not task.cutout:
            return x
        holes, length = (container.transform_perturbed_hyper(h, key).detach() for key in ("holes", "length"))
        return cutout(x, holes, length)

    def predict(x: Tensor) -> Tensor:
        h = container.h_tensor.detach().expand(len(x), count)
        return model(x, torch.zeros_like(h), h)

    def pass_over(data: suite.Batches) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from data

    outer, losses, steps = pass_over(valid), [], 0
    for epoch in range(task.epochs):
        for x, y in train:
            h = container.h_tensor.detach().expand(len(x), count)
            perturbed = container.get_perturbed_hyper(len(x))
            optimizer.step(changed(x, h), y, perturbed, changed(x, perturbed))
            steps += 1
            if epoch >= 5 and steps % 5 == 0:
                images, labels = next(outer)
                optimizer.step(images, labels, container.get_perturbed_hyper(len(images)), tune_hyper=True)
        model.eval()
        losses.append(mean_loss(predict, valid))
    return losses, {key: float(container.transform(key).detach()) for key in container.h_dict}


def run(name: str, task: str, seed: int, roots: suite.Roots, folder: Path | None) -> dict[str, Any]:
    """One run, in a process of its own.

    Returns:
        Its line in the file.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    if name.startswith("published"):
        assert folder is not None
        losses, hyper = published(name, TASKS[task], seed, roots, folder)
    else:
        losses, hyper = ours(name, TASKS[task], seed, roots)
    return {
        "run": name,
        "task": task,
        "seed": seed,
        "best": min(losses),
        "last": losses[-1],
        "cpu": round(time.process_time() - started, 1),
        "losses": [round(loss, 5) for loss in losses],
        "hyper": hyper,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The finished runs in a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def report(rows: list[dict[str, Any]]) -> str:
    """The best and the last validation loss of each run: means over seeds, paired differences to the published code.

    Returns:
        The tables.
    """
    lines = []
    for key, title in (("best", "Best validation loss"), ("last", "Validation loss at the end")):
        lines += [
            f"{title}: mean over seeds; in brackets the difference to `published`, paired, with its standard error."
        ]
        for task in TASKS:
            found = {(row["run"], row["seed"]): row[key] for row in rows if row["task"] == task}
            for name in RUNS:
                seeds = sorted(seed for run, seed in found if run == name)
                if not seeds:
                    continue
                values = [found[name, seed] for seed in seeds]
                gaps = [found[name, seed] - found["published", seed] for seed in seeds if ("published", seed) in found]
                error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
                gap = f"({statistics.fmean(gaps):+.3f} ± {error:.3f})" if gaps and name != "published" else ""
                text = f"{task:14s} {name:16s} {statistics.fmean(values):.3f}  {gap:18s}"
                lines.append(f"{text} seeds {', '.join(map(str, seeds))}".rstrip())
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, help="folder of the published code")
    parser.add_argument("--data", type=Path, action="append", default=[], help="data folder")
    parser.add_argument("--out", type=Path, default=Path("published.jsonl"), help="file of results")
    parser.add_argument("--report", type=Path, help="print the tables of this file")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    arguments = parser.parse_args()
    if arguments.report:
        print(report(read(arguments.report)))
        return
    if not arguments.data:
        parser.error("--data DIR is needed: the folder with the sets of images.")
    if any(name.startswith("published") for name in arguments.runs) and not arguments.published:
        parser.error("--published DIR is needed for the published code; leave it out with --runs.")
    done = {(row["run"], row["task"], row["seed"]) for row in read(arguments.out)}
    jobs = [
        (name, task, seed) for task in arguments.tasks for seed in range(arguments.seeds) for name in arguments.runs
    ]
    jobs = [job for job in jobs if job not in done]
    roots, failed = tuple(arguments.data), False
    with (
        arguments.out.open("a", encoding="utf-8") as file,
        ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool,
    ):
        futures = {pool.submit(run, *job, roots, arguments.published): job for job in jobs}
        for count, future in enumerate(as_completed(futures), 1):
            try:
                row = future.result()
            except (OSError, ValueError) as error:
                # A set that is not there, for example: the others are run.
                print(f"[{count}/{len(jobs)}] {' '.join(map(str, futures[future]))} failed: {error}", flush=True)
                failed = True
                continue
            file.write(json.dumps(row) + "\n")
            file.flush()
            losses = f"best {row['best']:.4f}  last {row['last']:.4f}"
            print(
                f"[{count}/{len(jobs)}] {row['run']} {row['task']} {row['seed']}: {losses}  {row['cpu']} s", flush=True
            )
    print(report(read(arguments.out)))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
