"""Tune six regularizers of an MLP on scikit-learn's digits, in one training run per method.

A weight decay for each layer, and a dropout rate for the input and for each hidden layer. A fifth of the training
labels is replaced at random, so that there is something to regularize. Every method starts from the same weights and
hyperparameters; ``fixed`` keeps the hyperparameters where they start.

    python -m applications.digits       # or: make demo
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

import bilevel
from applications import sklearn_datasets

METHODS = ("stn", "centered_stn", "delta_stn")
BATCH, INNER_STEPS, EVALUATE_EVERY = 100, 5, 10
INNER = partial(torch.optim.Adam, lr=1e-3)
Batch = tuple[Tensor, Tensor]


class MLP(nn.Module):
    """Two hidden layers; dropout before each of the three linear maps."""

    def __init__(self, width: int = 128) -> None:
        """Draw the weights."""
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)])

    def forward(self, x: Tensor, rates: Tensor) -> Tensor:
        """Predict logits, with one dropout rate per layer, and perhaps for each example."""
        for index, layer in enumerate(self.layers):
            x = bilevel.functional.dropout(x if index == 0 else F.relu(x), rates[..., index], training=self.training)
            x = layer(x)
        return x


def train_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Cross-entropy with dropout, and one L2 penalty per layer."""
    x, y = batch
    weights = [model.params[f"layers.{index}.weight"] for index in range(3)]
    penalty = sum(hyper["decay"][..., index] * bilevel.l2([weight]) for index, weight in enumerate(weights))
    return F.cross_entropy(model(x, hyper["dropout"]), y) + penalty


def valid_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Cross-entropy; in eval mode dropout does nothing."""
    x, y = batch
    return F.cross_entropy(model(x, hyper["dropout"]), y)


@dataclass(frozen=True)
class Run:
    """What the table and the figure show of a run.

    Attributes:
        name: Of the method.
        hyper: Natural values at the end.
        valid: The best validation loss.
        test: Test loss of the weights with the best validation loss.
        accuracy: Test accuracy of the same weights.
        history: Validation loss and hyperparameters by round.
        seconds: Time of the whole run.
    """

    name: str
    hyper: Mapping[str, Tensor]
    valid: float
    test: float
    accuracy: float
    history: bilevel.History
    seconds: float


def load(device: torch.device, seed: int) -> dict[str, TensorDataset]:
    """Split the 1797 digits into 300 for training, 500 for validation and 997 for the test; make training labels noisy.

    Returns:
        The three sets, on the device.
    """
    images, labels = sklearn_datasets().load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32, device=device)
    y = torch.tensor(labels, device=device)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(y), generator=generator).split([300, 500, 997])
    noisy = rows[0][torch.rand(300, generator=generator) < 0.2]
    y[noisy] = torch.randint(10, noisy.shape, generator=generator).to(device)
    return {name: TensorDataset(x[part], y[part]) for name, part in zip(("train", "valid", "test"), rows, strict=True)}


def problem(net: MLP) -> bilevel.Problem:
    """The bilevel problem: what is trained, what is tuned, and where it starts."""
    return bilevel.Problem(
        net,
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={
            "dropout": bilevel.interval(0.0, 0.95, init=[0.05, 0.05, 0.05]),
            "decay": bilevel.positive([1e-4, 1e-4, 1e-4]),
        },
    )


def tune(method: str, net: MLP, data: dict[str, TensorDataset], *, rounds: int, seed: int, progress: bool) -> Run:
    """Train the weights and tune the hyperparameters with one method.

    Returns:
        The run.
    """
    started = time.perf_counter()
    solution = bilevel.solve(
        problem(net),
        DataLoader(data["train"], batch_size=BATCH, shuffle=True),
        DataLoader(data["valid"], batch_size=BATCH, shuffle=True),
        method=method,
        inner_optimizer=INNER,
        outer_optimizer=partial(torch.optim.RMSprop, lr=0.03),
        inner_steps=INNER_STEPS,
        warmup=rounds // 20,
        steps=rounds,
        evaluate_every=EVALUATE_EVERY,
        progress=progress,
        seed=seed,
    )
    seconds = time.perf_counter() - started
    best = solution.best
    assert best is not None
    net = copy.deepcopy(net)
    net.load_state_dict(best.state_dict)
    test = evaluate(net, data["test"])
    return Run(method, solution.hyper, best.validation_loss, *test, solution.history, seconds)


def train_fixed(net: MLP, data: dict[str, TensorDataset], *, rounds: int, seed: int, progress: bool) -> Run:
    """Train the weights for as many steps with the initial hyperparameters, in plain PyTorch.

    Returns:
        The run.
    """
    started = time.perf_counter()
    net = copy.deepcopy(net)
    model = bilevel.Model(dict(net.named_parameters()), net)
    hyper = {name: entry.init.to(next(net.parameters())) for name, entry in problem(net).space.hyper.items()}
    optimizer = INNER(net.parameters())
    torch.manual_seed(seed)
    history = bilevel.History()
    columns = {f"{name}[{index}]": float(v) for name, value in hyper.items() for index, v in enumerate(value)}
    best, state = math.inf, net.state_dict()
    batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(data["train"], batch_size=BATCH, shuffle=True)))
    for index in tqdm(range(1, rounds + 1), unit="round", disable=not progress):
        net.train()
        for batch in itertools.islice(batches, INNER_STEPS):
            optimizer.zero_grad()
            train_loss(model, hyper, batch).backward()
            optimizer.step()
        if index % EVALUATE_EVERY == 0:
            loss, _ = evaluate(net, data["valid"])
            history.append({"round": index, "validation_loss": loss, **columns})
            if loss < best:
                best, state = loss, copy.deepcopy(net.state_dict())
    seconds = time.perf_counter() - started
    net.load_state_dict(state)
    return Run("fixed", hyper, best, *evaluate(net, data["test"]), history, seconds)


@torch.no_grad()
def evaluate(net: MLP, data: TensorDataset) -> tuple[float, float]:
    """The loss and the accuracy on a whole set."""
    net.eval()
    x, y = data.tensors
    logits = net(x, torch.zeros(3, device=x.device))
    return float(F.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


def report(runs: list[Run]) -> str:
    """The final table: losses and time of each method, averaged over its runs, and the values of the last one."""
    pad = " " * 9 if len({run.name for run in runs}) < len(runs) else ""
    lines = [
        f"{'method':<14}{'valid loss':>11}{'test loss':>11}{pad}{'test acc':>10}{'time':>8}   dropout, decay per layer"
    ]
    for name in dict.fromkeys(run.name for run in runs):
        group = [run for run in runs if run.name == name]
        measured = torch.tensor([[run.valid, run.test, run.accuracy, run.seconds] for run in group])
        valid, test, accuracy, seconds = measured.mean(0).tolist()
        spread = f" ± {measured[:, 1].std():.4f}" if len(group) > 1 else ""
        found = " ".join(f"{value:.2f}" for value in group[-1].hyper["dropout"].tolist())
        found += "   " + " ".join(f"{value:.1e}" for value in group[-1].hyper["decay"].tolist())
        lines.append(f"{name:<14}{valid:11.4f}{test:11.4f}{spread}{accuracy:10.1%}{seconds:6.1f} s   {found}")
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    """Save the validation losses and the schedules of all hyperparameters, one line per run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, axes = plt.subplots(1, 7, figsize=(21, 3.2), layout="constrained")
    colors = {name: f"C{index}" for index, name in enumerate(dict.fromkeys(run.name for run in runs))}
    columns = ["validation_loss", *(f"{name}[{index}]" for name in ("dropout", "decay") for index in range(3))]
    for axis, column in zip(axes, columns, strict=True):
        for run in runs:
            values = run.history[column]
            there = ~np.isnan(values)
            axis.plot(run.history["round"][there], values[there], color=colors[run.name], linewidth=1.3)
        axis.set_title(column.replace("_", " "))
        axis.set_xlabel("round")
        axis.grid(alpha=0.3)
        if not column.startswith("dropout"):
            axis.set_yscale("log")
    axes[0].legend(handles=[Line2D([], [], color=color, label=name) for name, color in colors.items()])
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run every method, print the table, save the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="rounds of 5 inner steps and 1 outer step")
    parser.add_argument("--seeds", type=int, default=1, help="runs per method, each with its own split and weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: cuda if there is one)")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for digits.png and digits.txt")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args()
    name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    if name == "cpu":
        torch.set_num_threads(1)  # the fastest for matrices this small
    print(
        f"MLP 64-128-128-10 on {name}; 300 digits to train (a fifth with random labels), 500 to validate, 997 to test.",
        flush=True,
    )
    runs = []
    for seed in range(options.seeds):
        data = load(torch.device(name), seed)
        torch.manual_seed(seed)
        net = MLP().to(name)
        settings: dict[str, Any] = {"rounds": options.rounds, "seed": seed, "progress": not options.quiet}
        for method in ("fixed", *METHODS):
            print(method, flush=True)
            start = train_fixed if method == "fixed" else partial(tune, method)
            runs.append(start(net, data, **settings))
    table = report(runs)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "digits.txt").write_text(table + "\n", encoding="utf-8")
    draw(runs, options.out / "digits.png")
    print(f"\n{table}\n\nSchedules: {options.out / 'digits.png'}")


if __name__ == "__main__":
    main()
