"""Tune a weight for each class and weight decay on scikit-learn's digits, and compare with the same compute otherwise.

From one digit to the next there are fewer training images, from 90 zeros to 5 nines; validation and test have all
digits alike. So the training loss should weigh the classes: ten class weights, which all start at one, and the weight
decay, eleven hyperparameters. It is the task ``digits_rare`` of ``benchmarks/tasks.py``.

    fixed                  trains once, with the hyperparameters where they start
    random search          6 trials of half the length, with about the FLOPs of delta_stn
    long random search     11 of them, with about its CPU time: on a network this small, it takes more than its FLOPs
    stn, centered_stn, delta_stn    tune the hyperparameters while they train once, with the library's defaults

The first trial of a search has the start values. Half the length served both searches best among a quarter, a half and
all of it, on the seeds 0 to 5; without the start values they did about as well there.
Every method keeps the weights with the lowest validation loss that it saw. Each seed has its own split and initial
weights, which are the same for all methods; test losses are compared within a seed.

    python -m applications.digits       # or: make demo
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm

import bilevel
from applications import sklearn_datasets
from applications.digits_report import Run, draw, table, verdict
from applications.task import STOPPED

TUNERS = ("stn", "centered_stn", "delta_stn")
SEARCHES = {"random search": 6, "long random search": 11}  # trials
LENGTH = 0.5  # of a trial
METHODS = ("fixed", *SEARCHES, *TUNERS)
FIRST_SEED = 100  # the library's defaults were chosen on similar tasks with the seeds from 0 on
TRAIN_BATCH, VALID_BATCH = 50, 100
INNER_STEPS, EVALUATE_EVERY = 5, 10
INNER = partial(torch.optim.Adam, lr=1e-3)
COUNTS = [round(90 * 0.72**label) for label in range(10)]  # training images of each digit
HYPER = {"weights": bilevel.positive([1.0] * 10), "decay": bilevel.positive(1e-5)}
RANGES = {"weights": (0.2, 5.0), "decay": (1e-6, 1e-1)}  # between which the search draws
Batch = tuple[Tensor, Tensor]
Data = Mapping[str, TensorDataset]


class MLP(nn.Module):
    """One hidden layer."""

    def __init__(self, width: int = 64) -> None:
        """Draw the weights."""
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, width), nn.Linear(width, 10)])

    def forward(self, x: Tensor) -> Tensor:
        """Predict logits."""
        y: Tensor = self.layers[1](F.relu(self.layers[0](x)))
        return y


def train_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Cross-entropy of each example, times the weight of its class, and an L2 penalty."""
    x, y = batch
    matrices = [model.params[f"layers.{index}.weight"] for index in range(2)]
    loss = bilevel.functional.cross_entropy(model(x), y, weight=hyper["weights"])
    return loss + hyper["decay"] * bilevel.l2(matrices)


def valid_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Cross-entropy, in which all classes count alike."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def load(device: torch.device, seed: int) -> dict[str, TensorDataset]:
    """Split the 1797 digits: 400 for validation, 497 for the test, and of the other 900 as many as ``COUNTS`` says.

    Returns:
        The three sets, on the device.
    """
    images, labels = sklearn_datasets().load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train, *others = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).split([900, 400, 497])
    kept = torch.cat([train[y[train] == label][:count] for label, count in enumerate(COUNTS)])
    parts = zip(("train", "valid", "test"), (kept, *others), strict=True)
    return {name: TensorDataset(x[part].to(device), y[part].to(device)) for name, part in parts}


def start(device: torch.device, seed: int) -> MLP:
    """The network with which every method begins."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MLP().to(device)


def batches(data: Data, part: str) -> DataLoader[Any]:
    """Shuffled batches; a batch is taken from the tensors at once, not image by image."""
    size, training = (TRAIN_BATCH, True) if part == "train" else (VALID_BATCH, False)
    sampler = BatchSampler(RandomSampler(data[part]), size, drop_last=training)
    return DataLoader(data[part], sampler=sampler, batch_size=None)


def problem(net: MLP) -> bilevel.Problem:
    """The bilevel problem: what is trained, what is tuned, and where it starts."""
    return bilevel.Problem(net, inner_loss=train_loss, outer_loss=valid_loss, hyper=HYPER)


def tune(method: str, net: MLP, data: Data, *, rounds: int, seed: int) -> Run:
    """Train the weights and tune the hyperparameters, in one run.

    Returns:
        The run; where it diverged, until then.

    Raises:
        KeyboardInterrupt: If somebody stopped it.
    """
    started = time.process_time()
    try:
        solution = bilevel.solve(
            problem(net),
            batches(data, "train"),
            batches(data, "valid"),
            method=method,
            steps=rounds,
            evaluate_every=EVALUATE_EVERY,
            progress=False,
            seed=seed,
        )
    except bilevel.DivergenceError as error:
        assert error.solution is not None
        solution = error.solution
    if solution.stopped in STOPPED:
        raise KeyboardInterrupt
    seconds = time.process_time() - started
    best = solution.best
    assert best is not None
    net.load_state_dict(best.state_dict)
    test = evaluate(net, data["test"])
    return Run(method, seed, best.validation_loss, *test, best.round, solution.history, seconds)


def train(net: MLP, data: Data, hyper: Mapping[str, Tensor], *, name: str, rounds: int, seed: int) -> Run:
    """Train the weights with hyperparameters that stay as they are, in plain PyTorch.

    Returns:
        The run.
    """
    started = time.process_time()
    net = copy.deepcopy(net)
    model = bilevel.Model(dict(net.named_parameters()), net)
    optimizer = INNER(net.parameters())
    torch.manual_seed(seed)
    history = bilevel.History()
    columns = {f"weights[{index}]": float(value) for index, value in enumerate(hyper["weights"])}
    columns["decay"] = float(hyper["decay"])
    best, kept, state = math.inf, 0, net.state_dict()
    stream = itertools.chain.from_iterable(itertools.repeat(batches(data, "train")))
    for index in range(1, rounds + 1):
        net.train()
        for batch in itertools.islice(stream, INNER_STEPS):
            optimizer.zero_grad()
            train_loss(model, hyper, batch).mean().backward()
            optimizer.step()
        if index % EVALUATE_EVERY == 0 or index == rounds:
            loss, _ = evaluate(net, data["valid"])
            history.append({"round": index, "validation_loss": loss, **columns})
            if loss < best:
                best, kept, state = loss, index, copy.deepcopy(net.state_dict())
    seconds = time.process_time() - started
    net.load_state_dict(state)
    return Run(name, seed, best, *evaluate(net, data["test"]), kept, history, seconds)


def search(net: MLP, data: Data, *, rounds: int, seed: int) -> list[Run]:
    """Random search: for each number of trials the one with the best validation loss, and the time of all of them."""
    generator = torch.Generator().manual_seed(seed)
    trials = []
    for index in range(max(SEARCHES.values())):
        hyper = initial_hyper() if index == 0 else draw_hyper(generator)
        hyper = {name: value.to(next(net.parameters())) for name, value in hyper.items()}
        trials.append(train(net, data, hyper, name="", rounds=max(1, round(rounds * LENGTH)), seed=seed))
    runs = []
    for name, count in SEARCHES.items():
        best = min(trials[:count], key=lambda trial: trial.valid)
        runs.append(replace(best, name=name, seconds=sum(trial.seconds for trial in trials[:count])))
    return runs


def initial_hyper() -> dict[str, Tensor]:
    """Where the hyperparameters start."""
    return {name: entry.init for name, entry in HYPER.items()}


def draw_hyper(generator: torch.Generator) -> dict[str, Tensor]:
    """Hyperparameters for a trial, whose logarithms are uniform."""
    return {
        name: low * (high / low) ** torch.rand(HYPER[name].init.shape, generator=generator)
        for name, (low, high) in RANGES.items()
    }


@torch.no_grad()
def evaluate(net: MLP, data: TensorDataset) -> tuple[float, float]:
    """The loss and the accuracy on a whole set."""
    net.eval()
    x, y = data.tensors
    logits = net(x)
    return float(F.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


def run(method: str, seed: int, rounds: int, device: str) -> list[Run]:
    """One method on one seed, in a process of its own or not; both searches are one method."""
    where = torch.device(device)
    net, data = start(where, seed), load(where, seed)
    if method in TUNERS:
        return [tune(method, net, data, rounds=rounds, seed=seed)]
    if method in SEARCHES:
        return search(net, data, rounds=rounds, seed=seed)
    hyper = {name: value.to(where) for name, value in initial_hyper().items()}
    return [train(net, data, hyper, name=method, rounds=rounds, seed=seed)]


def run_all(seeds: Sequence[int], rounds: int, *, device: str, workers: int, quiet: bool) -> list[Run]:
    """Every method on every seed.

    Args:
        seeds: Of the runs.
        rounds: Of each run.
        device: Where to run.
        workers: Processes, of one thread each; with 1, all is done in this one.
        quiet: Show no progress bar.

    Returns:
        The runs, by method and seed.
    """
    # The longest first, so that the processes end at about the same time.
    jobs = [
        (method, seed) for method in ("delta_stn", "random search", "centered_stn", "stn", "fixed") for seed in seeds
    ]
    runs = {}
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=len(jobs), unit="run", disable=quiet, dynamic_ncols=True))
        for made in _made(jobs, rounds, device, min(workers, len(jobs)), stack):
            runs.update({(one.name, one.seed): one for one in made})
            bar.set_postfix_str(f"{made[0].name}, seed {made[0].seed}: test loss {made[0].test:.3f}", refresh=False)
            bar.update()
    return [runs[method, seed] for method in METHODS for seed in seeds]


def _made(jobs: list[tuple[str, int]], rounds: int, device: str, workers: int, stack: ExitStack) -> Iterator[list[Run]]:
    if workers == 1:
        yield from (run(method, seed, rounds, device) for method, seed in jobs)
        return
    pool = stack.enter_context(
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    )
    for future in as_completed([pool.submit(run, method, seed, rounds, device) for method, seed in jobs]):
        yield future.result()


def costs() -> dict[str, float]:
    """FLOPs of each method, outer steps included, over those of one plain training run."""
    net, data = start(torch.device("cpu"), 0), load(torch.device("cpu"), 0)
    batch, other = next(iter(batches(data, "train"))), next(iter(batches(data, "valid")))
    model = bilevel.Model(dict(net.named_parameters()), net)
    plain = flops(lambda: train_loss(model, initial_hyper(), batch).mean().backward())
    found = {"fixed": 1.0} | {name: trials * LENGTH for name, trials in SEARCHES.items()}
    for method in TUNERS:
        solver = bilevel.Solver(problem(net), method=method)
        inner, outer = partial(solver.inner_step, batch), partial(solver.outer_step, batch, other)
        inner(), outer()  # the first steps also check the losses
        found[method] = (flops(inner) + flops(outer) / INNER_STEPS) / plain
    return found


def flops(function: Callable[[], Any]) -> int:
    """Of the matrix products in a function."""
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every method, print the table and the verdict, save both with the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600, help="rounds of 5 inner steps and 1 outer step")
    parser.add_argument("--seeds", type=int, default=5, help="runs per method, each with its own split and weights")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="the others follow (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes of one thread each (default: 2 on a CPU, otherwise 1)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: cuda if there is one)")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for digits.png and digits.txt")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    for name in ("rounds", "seeds", "workers"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}.")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    workers = options.workers or (min(2, os.cpu_count() or 1) if device == "cpu" else 1)
    print(
        f"MLP 64-64-10 on {device}; {sum(COUNTS)} digits to train, from {COUNTS[0]} zeros to {COUNTS[-1]} nines, "
        "400 to validate, 497 to test.\n"
        f"{len(METHODS)} methods, {options.seeds} seeds, {options.rounds} rounds of {INNER_STEPS} training steps.",
        flush=True,
    )
    if device == "cpu":
        torch.set_num_threads(1)  # the fastest for matrices this small
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = run_all(seeds, options.rounds, device=device, workers=workers, quiet=options.quiet)
    text = f"{table(runs, costs(), 'random search')}\n\n{verdict(runs, 'delta_stn', ['fixed', *SEARCHES])}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "digits.txt").write_text(text + "\n", encoding="utf-8")
    draw(runs, COUNTS, options.out / "digits.png")
    print(f"\n{text}\n\nFigure: {options.out / 'digits.png'}")


if __name__ == "__main__":
    main()
