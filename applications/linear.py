r"""Linear models (``exp-toy``): one hyperparameter, against its exact optimum.

  ridge           linear regression with an L2 penalty exp(λ) / 2n
  input_dropout   linear regression with dropout of its inputs
  linear_network  five hidden linear layers, with a penalty exp(λ) / 2n on the squared norm of the input Jacobian

Settings of the paper: 80/20 split, standardised; batches of 10 (under 1000 examples) or 100; 10 inner steps, then one
outer step on the whole validation set; 100 inner steps of warm-up; a perturbation of scale 1; a start at the penalty 1
(under 1000 examples) or 50, at the rate 0.2. All runs of a set share a split; seeds differ in weights, batches, noise.

  python -m applications linear --problem ridge --data DIR --sets boston yacht
  python -m applications linear --problem ridge --undivided    # the penalty is not divided by n
  python -m applications linear --problem ridge --decouple     # STN, then centered, then with the new objective
  python -m applications linear --splits 0 1 2 3 4 --above 3   # splits in turn, from a start that is as hard for each
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import bilevel
from applications.optima import HIGHEST_RATE, PROBLEMS, ClosedForm, Split, first_inside, load
from applications.run import choose_device, environment, write
from applications.task import Batches
from applications.trajectories import Panel, Run, draw, score, summary, table, write_csv

SETS = ("boston", "yacht", "energy", "power", "naval", "protein")
SCALE = 1.0
INNER_STEPS = 10
METHODS: dict[str, bilevel.Method] = {
    "stn": bilevel.STN(scale=SCALE, structure="dense"),
    "reparam_stn": bilevel.CenteredSTN(scale=SCALE, structure="dense", objective="stn"),
    "centered_stn": bilevel.CenteredSTN(scale=SCALE, structure="dense"),
    "delta_stn": bilevel.DeltaSTN(scale=SCALE, structure="dense"),
    # The curvature of many layers has only as many directions as there are features: damped, and stopped in time.
    "implicit_cg": bilevel.Implicit(bilevel.CG(max_steps=50, damping=1e-6), curvature="gauss_newton"),
    "unrolled": bilevel.Unrolled(steps=INNER_STEPS),
}
COMPARED = ("stn", "centered_stn", "delta_stn", "implicit_cg", "unrolled")
DECOUPLED = ("stn", "reparam_stn", "centered_stn")
DIFFERENTIATING = ("implicit_cg", "unrolled")
LEARNING_RATES = {"ridge": (0.05, 0.02), "input_dropout": (0.05, 0.02), "linear_network": (0.01, 0.005)}
Batch = tuple[Tensor, Tensor]


class LinearNetwork(nn.Module):
    """Square linear layers without biases, then one output; no hidden layer is linear regression."""

    def __init__(self, features: int, hidden: int) -> None:
        """Draw orthogonal layers, so that the product of many does not vanish; an output of zero starts at y = 0."""
        super().__init__()
        layers = [nn.Linear(features, features, bias=False) for _ in range(hidden)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight)
        self.hidden = nn.Sequential(*layers)
        self.output = nn.Linear(features, 1, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Predict.

        Returns:
            One number for each row of ``x``.
        """
        prediction: Tensor = self.output(self.hidden(x)).squeeze(-1)
        return prediction


def squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Half the mean squared error."""
    return 0.5 * (predictions - targets).square().mean()


def penalised_loss(model: bilevel.Model, hyper: Any, batch: Batch, *, divisor: int) -> Tensor:
    """With half the penalty times the squared norm of the input Jacobian."""
    inputs, targets = batch
    # Without biases, predictions at the unit vectors are the Jacobian: a method that linearises one linearises both.
    units = torch.eye(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
    predictions, jacobian = model(torch.cat([inputs, units])).split([len(inputs), len(units)])
    penalty: Tensor = hyper["penalty"] / (2 * divisor) * jacobian.square().sum()
    return squared_error(predictions, targets) + penalty


def dropout_loss(model: bilevel.Model, hyper: Any, batch: Batch) -> Tensor:
    """With masked inputs; those that are kept are scaled by 1 / (1 - rate)."""
    inputs, targets = batch
    return squared_error(model(bilevel.functional.dropout(inputs, hyper["rate"])), targets)


def valid_loss(model: bilevel.Model, hyper: Any, batch: Batch) -> Tensor:
    """As it is."""
    inputs, targets = batch
    return squared_error(model(inputs), targets)


def hyperparameter(
    split: Split, problem: str, *, undivided: bool, start: float | None = None
) -> dict[str, bilevel.Hyper]:
    """The hyperparameter of a problem.

    Args:
        split: The data.
        problem: One of ``PROBLEMS``.
        undivided: Do not divide the penalty by n.
        start: Its unconstrained initial value; that of the paper by default, where an undivided penalty is as strong.

    Returns:
        It by name.
    """
    if problem == "input_dropout":
        rate = 0.2 if start is None else HIGHEST_RATE / (1 + math.exp(-start))
        return {"rate": bilevel.interval(0.0, HIGHEST_RATE, init=rate)}
    penalty = (1.0 if split.small else 50.0) / (len(split.train[0]) if undivided else 1)
    return {"penalty": bilevel.positive(penalty if start is None else math.exp(start))}


def make_problem(
    split: Split, problem: str, *, undivided: bool, seed: int, start: float | None = None, device: str = "cpu"
) -> bilevel.Problem:
    """The bilevel problem of a split; arguments as in :func:`hyperparameter`, and the seed of the weights."""
    count, features = split.train[0].shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = LinearNetwork(features, 5 if problem == "linear_network" else 0).double().to(device)
    return bilevel.Problem(
        net,
        inner_loss=dropout_loss
        if problem == "input_dropout"
        else partial(penalised_loss, divisor=1 if undivided else count),
        outer_loss=valid_loss,
        hyper=hyperparameter(split, problem, undivided=undivided, start=start),
    )


def tune(
    split: Split,
    problem: str,
    method: str,
    *,
    undivided: bool,
    rounds: int,
    seed: int,
    start: float | None = None,
    batch_size: int | None = None,
    device: str = "cpu",
) -> Run:
    """Tune the hyperparameter of one split with one of ``METHODS``; arguments as in :func:`hyperparameter`."""
    torch.set_num_threads(1)  # the fastest for matrices this small
    stated = make_problem(split, problem, undivided=undivided, seed=seed, start=start, device=device)
    (name,) = stated.space.hyper
    inner_lr, response_lr = LEARNING_RATES[problem]
    train, valid = ([torch.from_numpy(part).to(device) for part in parts] for parts in (split.train, split.valid))
    # The Hessian of ten examples is not that of the training loss, so that implicit methods see all of them.
    size = len(train[0]) if method == "implicit_cg" else batch_size or (10 if split.small else 100)
    try:
        solution = bilevel.solve(
            stated,
            Batches(train, min(size, len(train[0])), shuffle=True),
            Batches(valid, len(valid[0]), shuffle=False),
            method=METHODS[method],
            inner_steps=0 if method == "unrolled" else INNER_STEPS,
            warmup=100 // INNER_STEPS,
            steps=rounds,
            inner_optimizer=lambda params: torch.optim.SGD(params, lr=inner_lr),
            response_optimizer=lambda params: torch.optim.SGD(params, lr=response_lr),
            outer_optimizer=lambda params: torch.optim.RMSprop(params, lr=0.03),
            inner_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds),
            outer_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds),
            evaluate_every=rounds,
            progress=False,
            seed=seed,
        )
    except bilevel.DivergenceError as error:
        assert error.solution is not None
        solution = error.solution
    values = np.full(rounds, math.nan)
    found = solution.history[name][:rounds]
    values[: len(found)] = found
    if solution.stopped == "diverged":
        values[-1] = math.nan
    return Run(method, seed, values)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--problem", choices=PROBLEMS, default="ridge", help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder with uci/NAME.npz; without it, scikit-learn's diabetes set")
    parser.add_argument("--sets", nargs="+", help=f"names of the sets (default: {' '.join(SETS)})")
    parser.add_argument(
        "--methods", "--method", nargs="+", choices=METHODS, help=f"what tunes (default: {' '.join(COMPARED)})"
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each method (default: %(default)s)")
    parser.add_argument(
        "--splits",
        nargs="+",
        type=int,
        metavar="SEED",
        help="seeds of splits; those without an optimum inside are left out (default: the first that has one)",
    )
    parser.add_argument("--rounds", type=int, default=1000, help="of 10 inner steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, help="training examples in a batch (default: 10 or 100, see above)")
    parser.add_argument("--above", type=float, help="start so far above the optimum λ* (default: as in the paper)")
    parser.add_argument("--undivided", action="store_true", help="do not divide the penalty by n")
    parser.add_argument("--decouple", action="store_true", help=f"run {' '.join(DECOUPLED)} (fig:decouple)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...; for matrices this small cpu is the fastest")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each a process (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/linear"), help="folder (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def check_options(options: argparse.Namespace) -> None:
    """Raise a ValueError for options that do not go together."""
    for name in ("seeds", "rounds", "batch_size", "workers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    if options.undivided and options.problem == "input_dropout":
        raise ValueError("--undivided is for a penalty; --problem input_dropout has none.")
    if options.decouple and options.methods:
        raise ValueError("--decouple chooses the methods itself; leave out --methods.")
    choose_device(options.device)


def main(options: argparse.Namespace) -> None:
    """Run the methods on every split; the files in ``--out`` are complete after each split.

    Raises:
        ValueError: If options do not go together.
    """
    check_options(options)
    stem = f"linear_{options.problem}" + "_undivided" * options.undivided + "_decouple" * options.decouple
    methods = DECOUPLED if options.decouple else options.methods or COMPARED
    fitting = [name for name in methods if not (options.problem == "input_dropout" and name in DIFFERENTIATING)]
    text = [f"{options.problem}{', undivided' * options.undivided}: {options.rounds} rounds, {options.seeds} seeds"]
    if options.batch_size is not None:
        text[0] += f", batches of {options.batch_size}"
    if options.above is not None:
        text[0] += f", from λ* + {options.above:g}"
    if len(fitting) < len(methods):
        left_out = ", ".join(name for name in methods if name not in fitting)
        text.append(f"Left out: {left_out}. A mask has no derivative, which they would need to tune a dropout rate.")
    if not fitting:
        raise ValueError(f"--methods {' '.join(methods)}: none can tune a dropout rate; try delta_stn.")
    splits, skipped = find_splits(options)
    if skipped:
        text.append(f"Splits without an optimum inside: {', '.join(skipped)}.")
    print("\n".join(text), flush=True)
    # Problems share a folder, so that their name is part of all names.
    settings = {name: _plain(value) for name, value in vars(options).items() if name not in ("command", "out")}
    settings |= {"methods": fitting, "sets": list(dict.fromkeys(split.name for split in splits))}
    write(options.out / f"{stem}_settings.json", settings)
    write(options.out / f"{stem}_environment.json", environment(choose_device(options.device)))
    panels: list[Panel] = []
    started = time.perf_counter()
    for panel in make_panels(options, splits, fitting):
        panels.append(panel)
        text.append("\n" + table(panel))
        tqdm.write(text[-1])
        (options.out / f"{stem}.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
        write_csv(panels, options.out / f"{stem}.csv")
        found = {"settings": settings, "splits": [summary(panel) for panel in panels]}
        write(options.out / f"{stem}_summary.json", found)
        draw(panels, options.out / f"{stem}.png")
    if len(panels) > 1:
        print("\n" + score(panels))
        (options.out / f"{stem}.txt").write_text("\n".join([*text, "", score(panels)]) + "\n", encoding="utf-8")
    print(f"\n{time.perf_counter() - started:.0f} s; see {options.out / stem}.png")


def find_splits(options: argparse.Namespace) -> tuple[list[Split], list[str]]:
    """The splits that are asked for, kept in files of ``--out``; and the names of those that have no optimum inside.

    Returns:
        Both lists.

    Raises:
        ValueError: If no split is left.
    """
    asked = [
        split
        for name in options.sets or (SETS if options.data else ("diabetes",))
        for split in (
            [first_inside(name, options.data, options.problem, undivided=options.undivided)]
            if options.splits is None
            else [load(name, seed, options.data) for seed in options.splits]
        )
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    splits, skipped = [], []
    for split in asked:
        file = options.out / f"split_{split.name}_{split.seed}.json"
        kept = load(split.name, split.seed, options.data, file)
        exact = ClosedForm(kept, options.problem, undivided=options.undivided)
        if exact.is_inside(exact.optimum()):
            splits.append(kept)
        else:
            skipped.append(f"{split.name} {split.seed}")
    if not splits:
        raise ValueError(f"--splits: the optimum is at the edge for {', '.join(skipped)}; try other seeds.")
    return splits, skipped


def make_panels(options: argparse.Namespace, splits: Iterable[Split], methods: list[str]) -> Iterator[Panel]:
    """Run all methods with all seeds.

    Yields:
        What they did, split by split.
    """
    jobs: list[tuple[Callable[[list[Run]], Panel], list[Callable[[], Run]]]] = []
    for split in splits:
        exact = ClosedForm(split, options.problem, undivided=options.undivided)
        optimum = exact.optimum()
        start = None if options.above is None else optimum + options.above
        one = partial(
            tune,
            split,
            options.problem,
            undivided=options.undivided,
            rounds=options.rounds,
            start=start,
            batch_size=options.batch_size,
            device=options.device,
        )
        runs = [partial(one, method=method, seed=seed) for method in methods for seed in range(options.seeds)]
        ((hyper, space),) = hyperparameter(split, options.problem, undivided=options.undivided, start=start).items()
        jobs.append((partial(Panel, split, exact, hyper, space, optimum, SCALE), [*runs]))
    with ExitStack() as stack:
        if options.workers > 1:
            # A fork of a process in which torch has threads may hang.
            pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
            stack.callback(pool.shutdown, cancel_futures=True)
            jobs = [(panel, [pool.submit(run).result for run in pending]) for panel, pending in jobs]
        total = sum(len(pending) for _, pending in jobs)
        bar = stack.enter_context(tqdm(total=total, unit="run", disable=True if options.quiet else None))
        for panel, pending in jobs:
            done = []
            for run in pending:
                done.append(run())
                bar.update()
            yield panel(done)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
