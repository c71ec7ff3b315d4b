"""How the factors of a response by rows should start: (U δ) ⊙ R, with U of shape (rows, h) and R of the weight's shape.

    python benchmarks/initialization.py --out docs/results/initialization.txt

Each start is judged twice, with a perturbation for each example: by the losses of ``applications/digits.py``, and by
the cosine of the learned with the exact response of the network of ``jacobian_quality.py`` after a fixed number of
inner steps from the solution or from random weights, with the Hessian (H) and with the Gauss-Newton matrix (G). All
starts of one seed see the same data, weights and perturbations. R is one for biases, unless it is zero.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jacobian_quality import REFERENCES, cosine, learn, make_problem, references
from torch import Tensor

import bilevel
from applications import digits

METHODS = {"stn": bilevel.STN, "delta_stn": bilevel.DeltaSTN}
SETTINGS: dict[str, Any] = {"structure": "rowwise", "perturb": "example"}
COLUMNS = ("valid loss", "test loss", "H, solution", "G, solution", "H, scratch", "G, scratch")
Factors = tuple[Tensor, Tensor]
Start = Callable[[Tensor, Tensor, Tensor], Factors]
# From the weight W, an R like the weight of an ordinary layer, and normal numbers z of U's shape. N(0, 0.01) in the
# first STN code is read both as a deviation and as a variance. An STN multiplies U by λ instead of a perturbation.
STARTS: dict[str, Start] = {
    "U = 0, R uniform": lambda w, r, z: (0 * z, r),
    "U ~ 0.01 z, R uniform": lambda w, r, z: (0.01 * z, r),
    "U ~ 0.1 z, R uniform": lambda w, r, z: (0.1 * z, r),
    "U = 0, R = W": lambda w, r, z: (0 * z, w if w.ndim > 1 else r),
    "U = 0, R = 1": lambda w, r, z: (0 * z, torch.ones_like(r)),
    "U ~ z / √h, R = 0": lambda w, r, z: (z / z.shape[1] ** 0.5, 0 * r),
}
OURS = "U ~ z / √(h + |λ|²), R = 0"  # as the library does it, without λ in centered responses


@dataclass(frozen=True)
class Started(bilevel.Method):
    """A method by rows whose factors start elsewhere.

    Attributes:
        method: Whose response it is.
        start: Where it starts; None for the library's own.
        seed: Of the normal numbers.
    """

    method: bilevel.Method
    start: Start | None
    seed: int

    def bind(self, problem: bilevel.Problem) -> bilevel.BestResponse:
        """Create the response."""
        response = self.method.bind(problem)
        theta, generator = response.theta.rowwise, torch.Generator().manual_seed(self.seed)  # type: ignore[union-attr]
        with torch.no_grad():
            for name, u, r in zip(theta.names, theta.factors, theta.templates, strict=True):
                weight, ordinary = problem.params[name], torch.ones_like(r)
                if r.ndim > 1:
                    bound = r[0].numel() ** -0.5
                    ordinary = torch.empty_like(r).uniform_(-bound, bound, generator=generator)
                z = torch.randn(u.shape, generator=generator, dtype=u.dtype)
                if self.start is not None:
                    for old, new in zip((u, r), self.start(weight, ordinary, z), strict=True):
                        old.copy_(new)
        return response


def on_digits(method: Any, rounds: int, seed: int) -> list[float]:
    """The best validation loss, and the test loss of its weights."""
    data = digits.load(torch.device("cpu"), seed)
    torch.manual_seed(seed)
    run = digits.tune(method, digits.MLP(), data, rounds=rounds, seed=seed, progress=False)
    return [run.valid, run.test]


def cosines(method: bilevel.Method, steps: int, seed: int) -> list[float]:
    """Of the learned with the exact response: from the solution, and from random weights, at those that are reached."""
    torch.set_default_dtype(torch.float64)
    values = []
    for solved in (True, False):
        problem, batch = make_problem(seed, solved=solved)
        solver = learn(method, problem, batch, steps, seed)
        assert problem.module is not None
        problem.module.load_state_dict(problem.module.state_dict() if solved else solver.module_state_dict)
        exact, learned = references(problem, batch), solver.response.jacobian(solver.vector)
        values += [cosine(learned, exact[reference]) for reference in REFERENCES]
    torch.set_default_dtype(torch.float32)
    return values


def report(found: dict[tuple[str, str], list[list[float]]], settings: str) -> str:
    """A row for each method and start."""
    lines = [f"mean and standard deviation of {len(next(iter(found.values())))} seeds: {settings}"]
    lines.append(f"{'method':<11}{'start':<30}" + "".join(f"{column:>18}" for column in COLUMNS))
    for (name, label), rows in found.items():
        values = torch.tensor(rows)
        cells = (f"{m:.3f} ± {s:.3f}" for m, s in zip(values.mean(0), values.std(0), strict=True))
        lines.append(f"{name:<11}{label:<30}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="rounds on the digits")
    parser.add_argument("--steps", type=int, default=500, help="inner steps before a cosine")
    parser.add_argument("--scale", type=float, default=0.5, help="of the perturbations before a cosine")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each, over which the mean is taken")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[list[float]]] = {}
    for seed in range(options.seeds):
        for name, make in METHODS.items():
            for label, start in (STARTS | {OURS: None}).items():
                row = on_digits(Started(make(**SETTINGS), start, seed), options.rounds, seed)
                row += cosines(Started(make(scale=options.scale, **SETTINGS), start, seed), options.steps, seed)
                found.setdefault((name, label), []).append(row)
                print(f"{name:<11}{label:<30}" + "".join(f"{value:12.4f}" for value in row), flush=True)
        table = report(found, f"{options.rounds} rounds of digits; {options.steps} inner steps, σ = {options.scale}")
        if options.out:  # after every seed, since all of them take long
            options.out.write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
