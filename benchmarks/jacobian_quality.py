"""How well each method learns the best-response Jacobian, as numbers (``fig:toy-linearization`` of the paper).

    python benchmarks/jacobian_quality.py --out docs/results/jacobian.txt

A small network (4-6-1, tanh, double precision) is trained with a weight decay for each layer, at fixed hyperparameters
and from the solution, for a fixed number of inner steps. Then the learned response is compared with the exact one, from
the implicit function theorem at the solution: the mean cosine between the changes of the weights along each
hyperparameter.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel

METHODS = {"stn": bilevel.STN, "centered_stn": bilevel.CenteredSTN, "delta_stn": bilevel.DeltaSTN}
KINDS = {
    "dense, per batch": {"structure": "dense", "perturb": "batch"},
    "rows, per batch": {"structure": "rowwise", "perturb": "batch"},
    "rows, per example": {"structure": "rowwise", "perturb": "example"},
}
SCALES = (0.1, 0.5, 1.0, 2.0)
LAYERS = ("0", "2")


def loss(model: Any, hyper: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error and a decay for each layer."""
    x, y = batch
    error = (model(x).squeeze(-1) - y).square()
    for index, layer in enumerate(LAYERS):
        decays = [weight for name, weight in model.params.items() if name.startswith(layer)]
        error = error + hyper["decay"][..., index] * bilevel.l2(decays)
    return error


def solve_inner(net: nn.Module, hyper: Tensor, batch: tuple[Tensor, Tensor]) -> None:
    """Train the network to its minimum."""
    model = bilevel.Model(dict(net.named_parameters()), net)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5000, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model, {"decay": hyper}, batch).mean()
        value.backward()
        return value

    for _ in range(5):
        optimizer.step(closure)  # type: ignore[no-untyped-call]


def cosine(method: bilevel.Method, problem: bilevel.Problem, exact: Tensor, batch: Any, steps: int, seed: int) -> float:
    """Of the learned response with the exact one, after some inner steps."""
    adam = lambda params: torch.optim.Adam(params, lr=2e-3)  # noqa: E731
    solver = bilevel.Solver(problem, method=method, inner_optimizer=adam, seed=seed)
    for _ in range(steps):
        solver.inner_step(batch)
    learned = solver.response.jacobian(solver.vector)
    return float(F.cosine_similarity(learned, exact, dim=0).mean())


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="inner steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="networks over which the mean is taken")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    found: dict[tuple[str, str, float], list[float]] = {}
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        x = torch.randn(100, 4)
        batch = x, torch.sin(x @ torch.tensor([1.0, 1.0, -1.0, 0.5])) + 0.3 * torch.randn(100)
        decay = torch.tensor([0.01, 0.02])
        solve_inner(net, decay, batch)
        hyper = {"decay": bilevel.positive(decay)}
        problem = bilevel.Problem(net, inner_loss=loss, outer_loss=loss, hyper=hyper)
        implicit = bilevel.Solver(problem, method="implicit_exact")
        exact = implicit.response.jacobian(implicit.vector, batch)
        for kind, settings in KINDS.items():
            for name, make in METHODS.items():
                for scale in SCALES:
                    value = cosine(make(scale=scale, **settings), problem, exact, batch, options.steps, seed)
                    found.setdefault((kind, name, scale), []).append(value)
    lines = [f"mean cosine, {options.steps} inner steps, {options.seeds} networks"]
    lines.append("response            method         " + "".join(f"σ = {scale:<6}" for scale in SCALES))
    for kind in KINDS:
        for name in METHODS:
            values = [sum(found[kind, name, scale]) / options.seeds for scale in SCALES]
            lines.append(f"{kind:<19} {name:<14} " + "".join(f"{value:<10.3f}" for value in values))
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
