"""Five-line tuning against the network as it is: eight small tasks, equal epochs, three seeds.

    python benchmarks/tune.py --out docs/results/tune           # the losses, which takes an hour
    python benchmarks/tune.py --out docs/results/tune --costs   # what an epoch costs, a minute on a quiet machine

For each task and seed, the same network is trained twice from the same weights, with the same optimizer and the same
number of epochs. Once in a plain loop, with the dropout that it has; once by ``bilevel.tune``, in the five lines of
the README. Both keep the weights with the lowest validation loss, and both are judged by their test loss. Everything is
made of what scikit-learn brings along, so that nothing is downloaded.

The cost is that of an epoch of tuning divided by that of a plain epoch of the same network (for the LSTM: of the same
cell), in FLOPs and in CPU time, outer steps included: ten batches of each are timed in turn, fifteen times, and the
medians divided. Losses that are in the file already are not computed again; costs are.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import flop_registry

import bilevel

Splits = tuple[TensorDataset, TensorDataset, TensorDataset]


@dataclass(frozen=True)
class Task:
    """A network that somebody has, and what they would write to tune it."""

    net: Callable[[], nn.Module]
    data: Callable[[int], Splits]
    loss: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 60
    lr: float = 1e-3
    batch: int = 100


class Residual(nn.Module):
    """Two convolutions with batch norm, and what goes around them."""

    def __init__(self, channels: int) -> None:
        """Keep the number of channels."""
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class Encoder(nn.Module):
    """A transformer that classifies pieces of text."""

    def __init__(self, letters: int, classes: int, width: int = 64) -> None:
        """One layer."""
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(40, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.1, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Letters to the scores of classes."""
        x = self.letters(tokens) + self.places.weight[: tokens.shape[1]]
        return self.out(self.encoder(x).mean(1))


class Letters(nn.Module):
    """The next letter, by an LSTM."""

    def __init__(self, letters: int, width: int = 192) -> None:
        """One layer."""
        super().__init__()
        self.embed, self.drop = nn.Embedding(letters, width), nn.Dropout(0.1)
        self.lstm, self.out = bilevel.nn.LSTM(width, width, batch_first=True), nn.Linear(width, letters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Letters to the scores of the next ones."""
        return self.out(self.drop(self.lstm(self.drop(self.embed(tokens)))[0]))


def split(seed: int, train: int, valid: int, *tensors: Tensor) -> Splits:
    """At random; what is left is the test set."""
    order = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(seed))
    parts = order[:train], order[train : train + valid], order[train + valid :]
    first, second, third = (TensorDataset(*(tensor[part] for tensor in tensors)) for part in parts)
    return first, second, third


def digits(seed: int, *, images: bool) -> Splits:
    """300 digits to train on."""
    x, y = datasets.load_digits(return_X_y=True)
    x = torch.tensor(x / 16).float()
    return split(seed, 300, 500, x.reshape(-1, 1, 8, 8) if images else x, torch.tensor(y))


def table(load: Callable[..., Any], train: int, valid: int, seed: int, *, classes: bool) -> Splits:
    """Standardised columns."""
    x, y = load(return_X_y=True)
    x, y = torch.tensor(x).float(), torch.tensor(y)
    if not classes:
        y = ((y - y.mean()) / y.std()).float()[:, None]
    return split(seed, train, valid, (x - x.mean(0)) / x.std(0), y)


def friedman(seed: int) -> Splits:
    """A function of five of ten columns, with noise."""
    x, y = datasets.make_friedman1(n_samples=1500, n_features=10, noise=2.0, random_state=0)
    y = (y - y.mean()) / y.std()
    return split(seed, 150, 350, torch.tensor(2 * x - 1).float(), torch.tensor(y).float()[:, None])


LOADERS = ("diabetes", "breast_cancer", "digits", "iris", "linnerud", "wine")
TEXTS = [str(getattr(datasets, f"load_{name}")().DESCR) for name in LOADERS]
ALPHABET = sorted(set("".join(TEXTS)))


def pieces(length: int) -> tuple[Tensor, Tensor]:
    """The descriptions of six data sets, cut into pieces; and which set each is about."""
    place = {letter: index for index, letter in enumerate(ALPHABET)}
    rows, labels = [], []
    for label, text in enumerate(TEXTS):
        codes = [place[letter] for letter in text]
        cut = [codes[i : i + length] for i in range(0, len(codes) - length, length)]
        rows += cut
        labels += [label] * len(cut)
    return torch.tensor(rows), torch.tensor(labels)


def classes_of_text(seed: int) -> Splits:
    """Which set a piece is about."""
    x, y = pieces(32)
    return split(seed, len(x) // 2, len(x) // 4, x, y)


def letters_of_text(seed: int) -> Splits:
    """The next letter."""
    x, _ = pieces(33)
    return split(seed, len(x) // 2, len(x) // 4, x[:, :-1], x[:, 1:])


def mlp(inputs: int, outputs: int, width: int = 512) -> nn.Module:
    """Two hidden layers with dropout."""
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def cnn() -> nn.Module:
    """Two convolutions, two layers."""
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Dropout(0.1), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))


def resnet() -> nn.Module:
    """Five convolutions with batch norm; no dropout."""
    stem = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), Residual(32), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Residual(32), nn.Flatten(), nn.Linear(512, 10))


AUGMENT = bilevel.augment.images(only=["translation", "rotation", "scale", "cutout"])
TASKS = {
    "digits, MLP": Task(
        lambda: mlp(64, 10, 1024), partial(digits, images=False), F.cross_entropy, {"label_smoothing": True}
    ),
    "digits, CNN": Task(
        cnn, partial(digits, images=True), F.cross_entropy, {"label_smoothing": True, "augment": AUGMENT}, epochs=60
    ),
    "digits, ResNet": Task(
        resnet, partial(digits, images=True), F.cross_entropy, {"label_smoothing": True, "augment": AUGMENT}, epochs=60
    ),
    "tumours, MLP": Task(
        lambda: mlp(30, 2),
        partial(table, datasets.load_breast_cancer, 150, 200, classes=True),
        F.cross_entropy,
        {"label_smoothing": True, "input_noise": True},
        epochs=80,
        batch=50,
    ),
    "diabetes, MLP": Task(
        lambda: mlp(10, 1),
        partial(table, datasets.load_diabetes, 150, 150, classes=False),
        nn.MSELoss(),
        {"input_noise": True},
        epochs=80,
        batch=50,
    ),
    "Friedman, MLP": Task(lambda: mlp(10, 1), friedman, nn.MSELoss(), {"input_noise": True}, epochs=100, batch=50),
    "text classes, transformer": Task(
        lambda: Encoder(len(ALPHABET), 6),
        classes_of_text,
        F.cross_entropy,
        {"label_smoothing": True},
        epochs=30,
        batch=50,
    ),
    "next letter, LSTM": Task(
        lambda: Letters(len(ALPHABET)), letters_of_text, F.cross_entropy, epochs=15, lr=5e-3, batch=50
    ),
}


def mean_loss(net: nn.Module, data: TensorDataset, task: Task) -> float:
    """Of all examples, in eval mode."""
    net.eval()
    *inputs, y = data.tensors
    with torch.no_grad():
        output = net(*inputs)
        return float(task.loss(output.movedim(-1, 1) if output.ndim == 3 else output, y))


def plain_steps(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], task: Task) -> None:
    """As everybody writes it."""
    net.train()
    for x, y in batches:
        output = net(x)
        loss = task.loss(output.movedim(-1, 1) if output.ndim == 3 else output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def tuned_steps(solver: bilevel.Solver, batches: Iterable[Any], valid: DataLoader[Any]) -> None:
    """With an outer step after every fifth inner one, as ``solve`` makes it."""
    held_out = (batch for _ in itertools.count() for batch in valid)
    for index, batch in enumerate(batches):
        solver.inner_step(batch)
        if index % 5 == 4:
            solver.outer_step(batch, next(held_out))


def seconds(function: Callable[[], Any]) -> float:
    """CPU time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def flops(function: Callable[[], Any]) -> int:
    """Floating-point operations of a call."""
    with _Count() as counter:
        function()
    return counter.total


class _Count(TorchDispatchMode):
    """``FlopCounterMode`` without its hooks on modules, which ``autograd.grad`` does not get along with."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def run(name: str, seed: int) -> dict[str, Any]:
    """Both trainings, and what they cost."""
    task = TASKS[name]
    data, held_out, test = task.data(seed)
    train = DataLoader(data, batch_size=task.batch, shuffle=True, drop_last=True)
    valid = DataLoader(held_out, batch_size=128, shuffle=True)
    torch.manual_seed(seed)
    net = task.net()
    start = copy.deepcopy(net.state_dict())

    optimizer = torch.optim.Adam(net.parameters(), lr=task.lr)
    best, kept = float("inf"), start
    for _ in range(task.epochs):
        plain_steps(net, optimizer, train, task)
        loss = mean_loss(net, held_out, task)
        if loss < best:
            best, kept = loss, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    plain = {"valid": best, "test": mean_loss(net, test, task)}

    net.load_state_dict(start)
    optimizer = torch.optim.Adam(net.parameters(), lr=task.lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bilevel.TuningWarning)
        result = bilevel.tune(
            net, train, valid, loss=task.loss, optimizer=optimizer, epochs=task.epochs, seed=seed, progress=False,
            **task.options,
        )  # fmt: skip
    net.load_state_dict(result.best.state_dict)
    tuned = {"valid": result.best.validation_loss, "test": mean_loss(net, test, task)}

    return {"task": name, "seed": seed, "plain": plain, "tuned": tuned, "hyperparameters": len(result.hyper)}


def cost(name: str, rounds: int = 15) -> dict[str, Any]:
    """An epoch of tuning divided by a plain one; the middle half of the pairs says how much that varies."""
    task = TASKS[name]
    data, held_out, _ = task.data(0)
    train = DataLoader(data, batch_size=task.batch, shuffle=True, drop_last=True)
    valid = DataLoader(held_out, batch_size=128, shuffle=True)
    torch.manual_seed(0)
    net = task.net()
    optimizer = torch.optim.Adam(net.parameters(), lr=task.lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bilevel.TuningWarning)
        result = bilevel.tune(
            net, train, valid, loss=task.loss, optimizer=optimizer, steps=3, progress=False, **task.options
        )
    batches = list(itertools.islice((batch for _ in itertools.count() for batch in train), 10))
    plain_one = partial(plain_steps, net, optimizer, batches, task)
    tuned_one = partial(tuned_steps, result.solver, batches, valid)
    count = flops(plain_one), flops(tuned_one)
    times = [(seconds(plain_one), seconds(tuned_one)) for _ in range(rounds)]
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    low, _, high = statistics.quantiles([b / a for a, b in times])
    return {"task": name, "flops": count[1] / count[0], "time": second / first, "low": low, "high": high}


def table_of(rows: list[dict[str, Any]], costs: list[dict[str, Any]]) -> str:
    """Means over seeds; ± is the standard error of the difference within a seed."""
    head = f"{'':26}{'hyper-':>7}{'test loss':>18}{'difference':>18}{'better':>8}{'FLOPs':>8}{'CPU time':>18}"
    lines = [head, f"{'task':26}{'params':>7}{'plain':>9}{'tuned':>9}{'tuned − plain':>18}{'seeds':>8}"]
    wins = 0
    price = {row["task"]: row for row in costs}
    for name in TASKS:
        own = [row for row in rows if row["task"] == name]
        if not own:
            continue
        plain, tuned = (np.array([row[kind]["test"] for row in own]) for kind in ("plain", "tuned"))
        gap = tuned - plain
        error = gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else float("nan")
        wins += gap.mean() < 0
        lines.append(
            f"{name:26}{own[0]['hyperparameters']:>7}{plain.mean():>9.3f}{tuned.mean():>9.3f}"
            f"{gap.mean():>+10.3f} ± {error:.3f}{f'{(gap < 0).sum()}/{len(gap)}':>8}"
            f"{_price(price.get(name))}"
        )
    seeds = len({row["seed"] for row in rows})
    total = len({row["task"] for row in rows})
    lines.append(f"Tuning is better in the mean over {seeds} seeds on {wins} of {total} tasks.")
    lines.append("FLOPs and CPU time: an epoch of tuning divided by a plain epoch of the same network; in brackets the")
    lines.append("middle half of pairs of ten steps each.")
    return "\n".join(lines)


def _price(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{found['flops']:>8.2f}{found['time']:>6.2f} ({found['low']:.2f}, {found['high']:.2f})"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write NAME.jsonl and NAME.txt")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--costs", action="store_true", help="measure the costs only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = None if options.out is None else options.out.with_suffix(".jsonl")
    found = [] if file is None or not file.exists() else file.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in found]
    costs, losses = [row for row in rows if "flops" in row], [row for row in rows if "flops" not in row]
    if options.costs:
        costs = [row for row in costs if row["task"] not in options.tasks]
        for name in options.tasks:
            costs.append(cost(name))
            print(json.dumps(costs[-1]), flush=True)
    for seed in [] if options.costs else options.seeds:
        for name in options.tasks:
            if any(row["task"] == name and row["seed"] == seed for row in losses):
                continue
            losses.append(run(name, seed))
            print(json.dumps(losses[-1]), flush=True)
            if file is not None:
                write(file, losses + costs)
    text = table_of(losses, costs)
    print(text)
    if file is not None:
        write(file, losses + costs)
        file.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """A row to a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
