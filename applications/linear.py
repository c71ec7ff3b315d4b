r"""Linear models (``exp-toy``): one hyperparameter, against its exact optimum.

  ridge           linear regression with an L2 penalty exp(λ) / 2n
  input_dropout   linear regression with dropout of its inputs
  linear_network  five hidden linear layers, with a penalty exp(λ) / 2n on the squared norm of the input Jacobian

Settings of the paper: 80/20 split, standardised; batches of 10 (under 1000 examples) or 100; 10 inner steps, then one
outer step on the whole validation set; 100 inner steps of warm-up; a perturbation of scale 1; a start at the penalty 1
(under 1000 examples) or 50, at the rate 0.2. All runs on a split share it; seeds differ in weights, batches, noise.

  python -m applications linear --problem ridge --data DIR --sets boston yacht
  python -m applications linear --problem ridge --undivided    # the penalty is not divided by n
  python -m applications linear --problem ridge --decouple     # STN, then centered, then with the new objective
  python -m applications linear --splits 0 1 2 3 4 --above 3   # split after split, each from λ* + 3
  python -m applications linear --out FOLDER --data DIR --figure ridge.png   # draw a run again

A command that was stopped goes on when it is given again: runs that are in --out are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

import bilevel
from applications.linear_model import hyperparameter, make_problem
from applications.optima import PROBLEMS, ClosedForm, Split, first_inside, load
from applications.run import choose_device, environment, read_json, write
from applications.task import STOPPED, Batches
from applications.trajectories import Panel, Run, draw, read_csv, score, summary, table, write_csv

SETS = ("boston", "yacht", "energy", "power", "naval", "protein")
SCALE = 1.0
INNER_STEPS = 10
METHODS: dict[str, bilevel.Method] = {
    "stn": bilevel.STN(scale=SCALE, structure="dense"),
    "reparam_stn": bilevel.CenteredSTN(scale=SCALE, structure="dense", objective="stn"),
    "centered_stn": bilevel.CenteredSTN(scale=SCALE, structure="dense", control=False),
    "delta_stn_paper": bilevel.DeltaSTN(scale=SCALE, structure="dense", control=False),
    "delta_stn": bilevel.DeltaSTN(structure="dense"),
    # The curvature of many layers has only as many directions as there are features: damped, and stopped in time.
    "implicit_cg": bilevel.Implicit(bilevel.CG(max_steps=50, damping=1e-6), curvature="gauss_newton"),
    "unrolled": bilevel.Unrolled(steps=INNER_STEPS),
}
COMPARED = ("stn", "centered_stn", "delta_stn_paper", "delta_stn", "implicit_cg", "unrolled")
DECOUPLED = ("stn", "reparam_stn", "centered_stn")
DIFFERENTIATING = ("implicit_cg", "unrolled")
LOST = 10.0  # a run has diverged if it ends so many times worse than the prediction 0
LEARNING_RATES = {"ridge": (0.05, 0.02), "input_dropout": (0.05, 0.02), "linear_network": (0.01, 0.005)}


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
    learning_rates: Sequence[float] | None = None,
    device: str = "cpu",
) -> Run:
    """Tune the hyperparameter of one split with one of ``METHODS``; arguments as in :func:`hyperparameter`."""
    torch.set_num_threads(1)  # here, too, since it may be the process of a pool
    stated = make_problem(split, problem, undivided=undivided, seed=seed, start=start, device=device)
    (name,) = stated.space.hyper
    inner_lr, response_lr = learning_rates or LEARNING_RATES[problem]
    train, valid = ([torch.from_numpy(part).to(device) for part in parts] for parts in (split.train, split.valid))
    # The Hessian of ten examples is not that of the training loss, so that implicit methods see all of them.
    size = len(train[0]) if method == "implicit_cg" else batch_size or (10 if split.small else 100)
    decay = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=rounds)
    options: dict[str, Any] = {"response_optimizer": partial(torch.optim.SGD, lr=response_lr)}
    if method != "delta_stn":  # which leaves this to bilevel.solve
        options |= {"warmup": 100 // INNER_STEPS, "outer_optimizer": partial(torch.optim.RMSprop, lr=0.03)}
    try:
        solution = bilevel.solve(
            stated,
            Batches(train, min(size, len(train[0])), shuffle=True),
            Batches(valid, len(valid[0]), shuffle=False),
            method=METHODS[method],
            inner_steps=0 if method == "unrolled" else INNER_STEPS,
            steps=rounds,
            inner_optimizer=partial(torch.optim.SGD, lr=inner_lr),
            inner_scheduler=decay,
            outer_scheduler=decay,
            evaluate_every=rounds,
            progress=False,
            seed=seed,
            **options,
        )
    except bilevel.DivergenceError as error:
        assert error.solution is not None
        solution = error.solution
    if solution.stopped in STOPPED:
        raise KeyboardInterrupt
    values = np.full(rounds, math.nan)
    if solution.history:
        found = solution.history[name][:rounds]
        values[: len(found)] = found
    if solution.stopped == "diverged":
        values[-1] = math.nan
    elif (lost := LOST * 0.5 * float(np.mean(split.valid[1] ** 2))) < solution.history["validation_loss"][-1]:
        # In float64, weights may grow for a long time before they are infinite.
        over = solution.history["outer_loss"] > lost
        values[np.argmax(over) if over.any() else -1 :] = math.nan
    return Run(method, seed, values)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--problem", choices=PROBLEMS, default="ridge", help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder with uci/NAME.npz; without it, scikit-learn's diabetes set")
    parser.add_argument("--sets", nargs="+", help=f"names of the sets (default: {' '.join(SETS)})")
    parser.add_argument(
        "--methods",
        "--method",
        nargs="+",
        choices=METHODS,
        metavar="NAME",
        help=f"what tunes, of {' '.join(METHODS)} (default: {' '.join(COMPARED)})",
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each method on each split (default: %(default)s)")
    parser.add_argument(
        "--splits",
        nargs="+",
        type=int,
        metavar="SEED",
        help="seeds of splits; those without an optimum inside are left out (default: the first that has one)",
    )
    parser.add_argument("--rounds", type=int, default=1000, help="of 10 inner steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, help="training examples in a batch (default: 10 or 100, see above)")
    parser.add_argument(
        "--learning-rates",
        nargs=2,
        type=float,
        metavar=("WEIGHTS", "RESPONSE"),
        help="of SGD (default: "
        + "; ".join(f"{weights} {response} for {name}" for name, (weights, response) in LEARNING_RATES.items())
        + ")",
    )
    parser.add_argument("--above", type=float, help="start so far above the optimum λ* (default: as in the paper)")
    parser.add_argument("--undivided", action="store_true", help="do not divide the penalty by n")
    parser.add_argument("--decouple", action="store_true", help=f"run {' '.join(DECOUPLED)} (fig:decouple)")
    parser.add_argument(
        "--device", default="cpu", help="auto, cuda, ... (default: cpu, the fastest for matrices this small)"
    )
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each a process (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/linear"), help="folder (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help="run nothing; draw the values in --out again, into this file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def check_options(options: argparse.Namespace) -> None:
    """Raise a ValueError for options that do not go together."""
    for name in ("seeds", "rounds", "batch_size", "workers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    for rate in options.learning_rates or ():
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"--learning-rates must be positive numbers, got {rate}.")
    if options.undivided and options.problem == "input_dropout":
        raise ValueError("--undivided is for a penalty; --problem input_dropout has none.")
    if options.decouple and options.methods:
        raise ValueError("--decouple chooses the methods itself; leave out --methods.")
    if options.above is not None and not (math.isfinite(options.above) and options.above != 0):
        raise ValueError(f"--above must be a distance from the optimum other than 0, got {options.above}.")


def main(options: argparse.Namespace) -> None:
    """Run the methods on every split; the files in ``--out`` are complete after each split.

    Raises:
        ValueError: If options do not go together.
    """
    check_options(options)
    if options.figure is not None:
        draw_again(options.out, options.data, options.figure)
        return
    device = choose_device(options.device)
    torch.set_num_threads(1)  # the fastest for matrices this small
    stem = f"linear_{options.problem}" + "_undivided" * options.undivided + "_decouple" * options.decouple
    methods = DECOUPLED if options.decouple else options.methods or COMPARED
    fitting = [name for name in methods if not (options.problem == "input_dropout" and name in DIFFERENTIATING)]
    text = [f"{options.problem}{', undivided' * options.undivided}: {options.rounds} rounds, {options.seeds} seeds"]
    if options.batch_size is not None:
        text[0] += f", batches of {options.batch_size}"
    if options.learning_rates is not None:
        text[0] += f", learning rates {' and '.join(map(str, options.learning_rates))}"
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
    settings = {
        name: _plain(value) for name, value in vars(options).items() if name not in ("command", "out", "figure")
    }
    settings |= {"methods": fitting, "sets": list(dict.fromkeys(split.name for split in splits))}
    write(options.out / f"{stem}_settings.json", settings)
    write(options.out / f"{stem}_environment.json", environment(device))
    panels: list[Panel] = []
    started = time.perf_counter()
    kept = Kept(options.out / f"{stem}_runs.jsonl", options, str(device))
    for panel in make_panels(options, splits, fitting, str(device), kept):
        panels.append(panel)
        text.append("\n" + table(panel))
        tqdm.write(text[-1])
        sys.stdout.flush()
        end = ["\n" + score(panels)] if len(panels) > 1 else []
        (options.out / f"{stem}.txt").write_text("\n".join([*text, *end]) + "\n", encoding="utf-8")
        write_csv(panels, options.out / f"{stem}.csv")
        found = {"settings": settings, "splits": [summary(panel) for panel in panels]}
        write(options.out / f"{stem}_summary.json", found)
        draw(panels, options.out / f"{stem}.png")
    kept.path.unlink(missing_ok=True)
    print("\n".join([*end, "", f"{time.perf_counter() - started:.0f} s; see {options.out / stem}.png"]))


def find_splits(options: argparse.Namespace) -> tuple[list[Split], list[str]]:
    """The splits that are asked for, kept in files of ``--out``; and the names of those that have no optimum inside.

    Returns:
        Both lists.

    Raises:
        ValueError: If no split is left.
    """
    names = options.sets or (SETS if options.data else ("diabetes",))
    if options.splits is None:
        found = [first_inside(name, options.data, options.problem, undivided=options.undivided) for name in names]
        asked = [(split.name, split.seed) for split in found]
    else:
        asked = [(name, seed) for name in names for seed in dict.fromkeys(options.splits)]
    splits, skipped = [], []
    for name, seed in asked:
        split = load(name, seed, options.data, options.out / f"split_{name}_{seed}.json")
        exact = ClosedForm(split, options.problem, undivided=options.undivided)
        if exact.is_inside(exact.optimum()):
            splits.append(split)
        else:
            skipped.append(f"{name} {seed}")
    if not splits:
        raise ValueError(f"the optimum is at the edge for {', '.join(skipped)}; try other seeds with --splits.")
    return splits, skipped


def empty_panel(
    split: Split, problem: str, *, undivided: bool, above: float | None
) -> tuple[Callable[[list[Run]], Panel], float | None]:
    """A split and its optimum.

    Returns:
        What takes the runs on it, and where they start; None is the start of the paper.
    """
    exact = ClosedForm(split, problem, undivided=undivided)
    optimum = exact.optimum()
    start = None if above is None else optimum + above
    ((hyper, space),) = hyperparameter(split, problem, undivided=undivided, start=start).items()
    return partial(Panel, split, exact, hyper, space, optimum, SCALE), start


def draw_again(folder: Path, data: Path | None, figure: Path) -> None:
    """Draw the values that a run has left in its folder.

    Raises:
        ValueError: If the folder holds the values of no run, or of several.
    """
    tables = sorted(folder.glob("linear_*.csv"))
    if len(tables) != 1:
        found = ", ".join(table.name for table in tables) or "nothing"
        raise ValueError(f"--figure draws the one table linear_*.csv in --out {folder}; found {found}.")
    stem = tables[0].with_suffix("")
    settings = read_json(Path(f"{stem}_settings.json"))
    chosen: dict[str, Any] = {name: settings.get(name) for name in ("problem", "undivided", "above")}
    above = chosen["above"]
    fits = {"problem": chosen["problem"] in PROBLEMS, "undivided": isinstance(chosen["undivided"], bool)}
    fits["above"] = above is None or (type(above) in (int, float) and math.isfinite(above))
    for name, good in fits.items():
        if not good:
            raise ValueError(f"{stem}_settings.json is damaged: {name!r} is {chosen[name]!r}.")
    panels = []
    for (name, seed), runs in read_csv(tables[0]).items():
        panel, _ = empty_panel(load(name, seed, data), **chosen)
        panels.append(panel(runs))
    draw(panels, figure)


class Kept:
    """The runs that a command has made so far, one line each, so that it can go on after it was stopped."""

    def __init__(self, path: Path, options: argparse.Namespace, device: str) -> None:
        """Read what is there."""
        self.path = path
        names = ("problem", "undivided", "rounds", "batch_size", "learning_rates", "above")
        self._common = {name: getattr(options, name) for name in names} | {"device": device}
        self._common |= {"bilevel": bilevel.__version__, "torch": torch.__version__}
        self._values: dict[str, list[float]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
                self._values[row["run"]] = row["values"]
            except (ValueError, TypeError, KeyError):
                continue  # it was being written when the command was stopped

    def name(self, split: Split, method: str, seed: int) -> str:
        """What makes a run the run it is."""
        own = {"split": split.name, "split_seed": split.seed, "method": method, "seed": seed}
        return json.dumps({**own, **self._common}, sort_keys=True)

    def get(self, split: Split, method: str, seed: int) -> Run | None:
        """A run that has been made."""
        values = self._values.get(self.name(split, method, seed))
        return None if values is None else Run(method, seed, np.array(values, dtype=np.float64))

    def add(self, split: Split, run: Run) -> None:
        """Write a run down, unless it is there."""
        row = {"run": self.name(split, run.method, run.seed), "values": run.values.tolist()}
        if row["run"] in self._values:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(row))  # a line that was cut off does not spoil this one


def make_panels(
    options: argparse.Namespace, splits: Iterable[Split], methods: Sequence[str], device: str, kept: Kept
) -> Iterator[Panel]:
    """Run all methods with all seeds, but for the runs that are there already.

    Yields:
        What they did, split by split.
    """
    jobs = []
    for split in splits:
        panel, start = empty_panel(split, options.problem, undivided=options.undivided, above=options.above)
        one = partial(
            tune,
            split,
            options.problem,
            undivided=options.undivided,
            rounds=options.rounds,
            start=start,
            batch_size=options.batch_size,
            learning_rates=options.learning_rates,
            device=device,
        )
        runs: list[Run | Callable[[], Run]] = [
            kept.get(split, method, seed) or partial(one, method=method, seed=seed)
            for method in methods
            for seed in range(options.seeds)
        ]
        jobs.append((split, panel, runs))
    with ExitStack() as stack:
        if options.workers > 1:
            # A fork of a process in which torch has threads may hang.
            pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
            stack.callback(pool.shutdown, cancel_futures=True)
            for *_, runs in jobs:
                runs[:] = [run if isinstance(run, Run) else pool.submit(run).result for run in runs]
        total = sum(len(runs) for *_, runs in jobs)
        bar = stack.enter_context(tqdm(total=total, unit="run", disable=True if options.quiet else None))
        for split, panel, runs in jobs:
            done = []
            for run in runs:
                done.append(run if isinstance(run, Run) else run())
                kept.add(split, done[-1])
                bar.update()
            yield panel(done)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
