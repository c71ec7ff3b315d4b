r"""Ridge regression (``eq:linear-reg-obj``) with every method, against the closed-form optimum.

.. math:: \mathcal{L}_T(\lambda, w) = \frac{1}{2n} \|X w - t\|^2 + \frac{e^\lambda}{2n} \|w\|^2

Each run starts at :math:`\lambda^* + 3`, where :math:`\lambda^*` minimises the validation loss of the exact solution,
and is scored by how much of the excess validation loss at the start is gone at the end, again at the exact solution.

The column ``limit`` is that score for Δ-STN with exact expectations and infinitely many steps: with a fixed scale
:math:`\sigma` the perturbed penalty :math:`e^{\lambda + \epsilon}` is not linear in :math:`\epsilon`, so its fixed
point is not exactly :math:`\lambda^*`.

    python -m applications.ridge --data DIR     # DIR/uci/boston.npz, ... with arrays X and y
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm.auto import tqdm

import bilevel
from applications import sklearn_datasets
from applications.optima import Split

SETS = ("boston", "yacht", "energy", "power", "protein")
METHODS = {"stn": bilevel.STN, "centered_stn": bilevel.CenteredSTN, "delta_stn": bilevel.DeltaSTN}
START = 3.0
Array = npt.NDArray[np.float64]


class ClosedForm:
    r"""The exact solution :math:`(X^\top X + e^\lambda I)^{-1} X^\top t`, in the eigenbasis of the Gram matrix."""

    def __init__(self, split: Split) -> None:
        """Decompose the Gram matrix of the training set."""
        inputs, targets = split.train
        eigenvalues, basis = np.linalg.eigh(inputs.T @ inputs)
        self.eigenvalues = np.maximum(eigenvalues, 0.0)
        self.projected = basis.T @ (inputs.T @ targets)
        self.valid = (split.valid[0] @ basis, split.valid[1])

    def weights(self, hyper: float) -> Array:
        """The exact solution in the eigenbasis."""
        weights: Array = self.projected / (self.eigenvalues + math.exp(hyper))
        return weights

    def loss(self, hyper: float) -> float:
        """The validation loss of the exact solution."""
        inputs, targets = self.valid
        return float(0.5 * np.mean((inputs @ self.weights(hyper) - targets) ** 2))

    def optimum(self) -> float:
        """The minimiser of :meth:`loss` on a grid from -12 to 16."""
        grid = np.arange(-12.0, 16.0, 0.01)
        return float(grid[np.argmin([self.loss(x) for x in grid])])

    def closed(self, hyper: float, optimum: float) -> float:
        """The share of the excess validation loss at the start that is gone at ``hyper``."""
        best = self.loss(optimum)
        return 1 - (self.loss(hyper) - best) / (self.loss(optimum + START) - best)

    def delta_stn_limit(self, optimum: float, scale: float) -> float:
        r"""Where Δ-STN stops when its expectations are exact, coming down from the start.

        Its slopes solve :math:`(X^\top X\,\mathbb{E}\epsilon^2 + e^\lambda\,\mathbb{E}[\epsilon^2 e^\epsilon])\,\Theta
        = -e^\lambda\,\mathbb{E}[\epsilon e^\epsilon]\,w^*`, with Gaussian moments in closed form.

        Returns:
            The first zero of its hypergradient below the start.
        """
        variance = scale**2
        inputs, targets = self.valid
        for hyper in np.arange(optimum + START, optimum - 12.0, -0.01):
            penalty = math.exp(hyper + variance / 2)
            weights = self.weights(hyper)
            slope = -penalty * weights / (self.eigenvalues + penalty * (1 + variance))
            if (inputs @ weights - targets) @ (inputs @ slope) < 0:
                break
        return float(hyper)


class Batches:
    """Shuffled batches of arrays."""

    def __init__(self, data: tuple[Array, Array], size: int) -> None:
        """Hold the data as tensors."""
        self.data = [torch.from_numpy(part) for part in data]
        self.size = size

    def __len__(self) -> int:
        """The number of batches of a pass."""
        return math.ceil(len(self.data[0]) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of one pass."""
        for rows in torch.randperm(len(self.data[0])).split(self.size):
            yield tuple(part[rows] for part in self.data)


def load(name: str, seed: int, folder: Path | None) -> Split:
    """Read and split a data set; ``diabetes`` comes with scikit-learn.

    Returns:
        The split, standardised.

    Raises:
        FileNotFoundError: If the folder does not have it.
    """
    if folder is None:
        inputs, targets = sklearn_datasets().load_diabetes(return_X_y=True)
    else:
        path = folder / "uci" / f"{name}.npz"
        if not path.exists():
            raise FileNotFoundError(f"--data: {path} does not exist; it should hold arrays X (n, d) and y (n,).")
        with np.load(path) as file:
            inputs, targets = file["X"], file["y"]
    rows = np.random.default_rng(seed).permutation(len(targets))
    train, valid = np.split(rows, [int(0.8 * len(rows))])
    inputs = inputs[:, inputs[train].std(0) > 0]
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    targets = (targets - targets[train].mean()) / targets[train].std()
    return Split(name, seed, (inputs[train], targets[train]), (inputs[valid], targets[valid]))


def squared_error(model: bilevel.Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Half the mean squared error of a linear model."""
    inputs, targets = batch
    return 0.5 * (inputs @ model.params["w"] - targets).square().mean()


def run(split: Split, method: bilevel.Method, optimum: float, rounds: int, lr: float, response_lr: float) -> float:
    """Tune the penalty of one split.

    Returns:
        The final λ, or NaN if the run diverged.
    """
    torch.set_num_threads(1)
    examples, features = split.train[0].shape
    problem = bilevel.Problem(
        {"w": torch.zeros(features, dtype=torch.float64)},
        inner_loss=lambda model, hyper, batch: (
            squared_error(model, batch) + hyper["penalty"] / (2 * examples) * bilevel.l2(model.params)
        ),
        outer_loss=lambda model, hyper, batch: squared_error(model, batch),
        hyper={"penalty": bilevel.positive(math.exp(optimum + START))},
    )
    try:
        solution = bilevel.solve(
            problem,
            Batches(split.train, 10 if split.small else 100),
            Batches(split.valid, len(split.valid[1])),
            method=method,
            inner_steps=10,
            warmup=10,
            steps=rounds,
            inner_optimizer=lambda params: torch.optim.SGD(params, lr=lr),
            response_optimizer=lambda params: torch.optim.SGD(params, lr=response_lr),
            outer_optimizer=lambda params: torch.optim.RMSprop(params, lr=0.03),
            inner_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds),
            outer_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds),
            evaluate_every=rounds,
            progress=False,
        )
    except bilevel.DivergenceError:
        return math.nan
    return float(solution.hyper["penalty"].log())


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with uci/NAME.npz; without it, scikit-learn's diabetes set")
    parser.add_argument("--sets", nargs="+", default=None, help=f"names of the sets (default: {' '.join(SETS)})")
    parser.add_argument("--splits", type=int, default=5, help="random splits of each set (default: 5)")
    parser.add_argument("--rounds", type=int, default=2000, help="rounds of 10 inner steps and 1 outer step")
    parser.add_argument("--scale", type=float, default=1.0, help="standard deviation of the perturbation (default: 1)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of the weights (default: 0.05)")
    parser.add_argument("--response-lr", type=float, default=0.02, help="and of their response (default: 0.02)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="methods to run")
    parser.add_argument("--limits", type=int, metavar="N", help="only count where the limit of N splits is under 90 %%")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="parallel processes")
    parser.add_argument("--out", type=Path, help="write the results to this CSV file too")
    options = parser.parse_args()
    names = options.sets or (SETS if options.data else ["diabetes"])

    if options.limits is not None:
        count_limits(names, options.limits, options.data, options.scale)
        return
    started = time.perf_counter()
    rows: list[dict[str, float | str]] = []
    skipped = []
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = {}
        for name in names:
            for seed in range(options.splits):
                split = load(name, seed, options.data)
                exact = ClosedForm(split)
                optimum = exact.optimum()
                if not -8 < optimum < 12:
                    skipped.append(f"{name} {seed}")
                    continue
                limit = exact.closed(exact.delta_stn_limit(optimum, options.scale), optimum)
                row: dict[str, float | str] = {"set": name, "split": seed, "optimum": optimum, "limit": limit}
                rows.append(row)
                for method in options.methods:
                    settings = (METHODS[method](scale=options.scale), optimum, options.rounds, options.lr)
                    job = pool.submit(run, split, *settings, options.response_lr)
                    jobs[job] = (row, method, exact, optimum)
        for job in tqdm(as_completed(jobs), total=len(jobs), unit="run"):
            row, method, exact, optimum = jobs[job]
            row[method] = job.result()
            row[f"{method} closed"] = exact.closed(job.result(), optimum) if math.isfinite(job.result()) else math.nan
    report(rows, options.methods, skipped)
    print(f"{len(jobs)} runs of {options.rounds} rounds in {time.perf_counter() - started:.0f} s.")
    if options.out is not None:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def count_limits(names: Iterable[str], splits: int, folder: Path | None, scale: float) -> None:
    """Print on how many splits Δ-STN with exact expectations closes less than 90 %."""
    for name in names:
        limits = []
        for seed in range(splits):
            exact = ClosedForm(load(name, seed, folder))
            optimum = exact.optimum()
            if -8 < optimum < 12:
                limits.append(exact.closed(exact.delta_stn_limit(optimum, scale), optimum))
        low = sum(limit < 0.9 for limit in limits)
        print(f"{name}: limit under 90 % on {low} of {len(limits)} usable splits; lowest {min(limits):.1%}")


def report(rows: list[dict[str, float | str]], methods: list[str], skipped: list[str]) -> None:
    """Print, for each split, the final λ and the share of the excess validation loss that each method closed."""
    print("\n" + " " * 24 + "".join(f"{method:>22}" for method in methods) + "    delta_stn")
    print(f"{'set':<10}{'split':>5}{'λ*':>9}" + f"{'λ':>13}{'closed':>9}" * len(methods) + f"{'limit':>13}")
    for row in rows:
        cells = ""
        for method in methods:
            hyper, closed = float(row[method]), float(row[f"{method} closed"])
            cells += f"{'diverged':>22}" if math.isnan(hyper) else f"{hyper:13.2f}{closed:9.1%}"
        print(f"{row['set']:<10}{row['split']:>5}{float(row['optimum']):9.2f}{cells}{float(row['limit']):13.1%}")
    for method in methods:
        shares = np.array([float(row[f"{method} closed"]) for row in rows])
        enough, diverged = int((shares >= 0.9).sum()), int(np.isnan(shares).sum())
        print(f"{method}: at least 90 % closed on {enough} of {len(rows)} splits, diverged on {diverged}.")
    if skipped:
        print(f"Skipped, because λ* is not inside (-8, 12): {', '.join(skipped)}.")


if __name__ == "__main__":
    main()
