"""How well each method learns the best-response Jacobian, as numbers (``fig:toy-linearization`` of the paper).

    python benchmarks/jacobian_quality.py --out docs/results/jacobian.txt --figure docs/_static/jacobian.png

A small network (4-6-1, tanh, double precision) is trained with a weight decay for each layer, at fixed hyperparameters
and from the solution, for a fixed number of inner steps. Then the learned response is compared with two from the
implicit function theorem at the solution, one with the Hessian and one with the Gauss-Newton matrix, which is what
linearised predictions can learn (``app:just-linear``): the mean cosine between the changes of the weights along each
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
REFERENCES = ("hessian", "gauss_newton")
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


def references(problem: bilevel.Problem, batch: Any) -> dict[str, Tensor]:
    """The response by the implicit function theorem, for each curvature."""
    found = {}
    for curvature in REFERENCES:
        solver = bilevel.Solver(problem, method=bilevel.Implicit(bilevel.Exact(), curvature=curvature))
        found[curvature] = solver.response.jacobian(solver.vector, batch)
    return found


def learn(method: bilevel.Method, problem: bilevel.Problem, batch: Any, steps: int, seed: int) -> bilevel.Solver:
    """A solver after some inner steps."""
    adam = lambda params: torch.optim.Adam(params, lr=2e-3)  # noqa: E731
    solver = bilevel.Solver(problem, method=method, inner_optimizer=adam, seed=seed)
    for _ in range(steps):
        solver.inner_step(batch)
    return solver


def cosine(learned: Tensor, exact: Tensor) -> float:
    """Of two responses, the mean over the hyperparameters."""
    return float(F.cosine_similarity(learned, exact, dim=0).mean())


def make_problem(seed: int, *, solved: bool = True) -> tuple[bilevel.Problem, tuple[Tensor, Tensor]]:
    """A network, at the minimum of its training loss if ``solved``, and its data."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(100, 4)
    batch = x, torch.sin(x @ torch.tensor([1.0, 1.0, -1.0, 0.5])) + 0.3 * torch.randn(100)
    decay = torch.tensor([0.01, 0.02])
    if solved:
        solve_inner(net, decay, batch)
    hyper = {"decay": bilevel.positive(decay)}
    return bilevel.Problem(net, inner_loss=loss, outer_loss=loss, hyper=hyper), batch


def draw(mean: dict[tuple[str, str, str, float], float], path: Path) -> None:
    """Save the cosines over the scale: a row for each reference, a column for each kind of response."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (3.2 * len(KINDS), 5.2)
    figure, axes = plt.subplots(2, len(KINDS), figsize=size, sharex=True, sharey=True, layout="constrained")
    for line, reference in zip(axes, REFERENCES, strict=True):
        for axis, kind in zip(line, KINDS, strict=True):
            for name in METHODS:
                axis.plot(SCALES, [mean[reference, kind, name, scale] for scale in SCALES], "o-", label=name)
            axis.set_title(kind if reference == REFERENCES[0] else "")
            axis.grid(alpha=0.3)
        line[0].set_ylabel(f"cosine, {reference.replace('_', '-')}")
    for axis in axes[-1]:
        axis.set_xlabel("scale σ")
    axes[0, 0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="inner steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="networks over which the mean is taken")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--figure", type=Path, help="draw the cosines over the scale")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    found: dict[tuple[str, str, str, float], list[float]] = {}
    agree = []
    for seed in range(options.seeds):
        problem, batch = make_problem(seed)
        exact = references(problem, batch)
        agree.append(cosine(exact["hessian"], exact["gauss_newton"]))
        for kind, settings in KINDS.items():
            for name, make in METHODS.items():
                for scale in SCALES:
                    solver = learn(make(scale=scale, **settings), problem, batch, options.steps, seed)
                    for reference in REFERENCES:
                        value = cosine(solver.response.jacobian(solver.vector), exact[reference])
                        found.setdefault((reference, kind, name, scale), []).append(value)
    mean = {key: sum(values) / len(values) for key, values in found.items()}
    lines = [f"mean cosine, {options.steps} inner steps, {options.seeds} networks"]
    lines.append("between the two references: " + ", ".join(f"{value:.3f}" for value in agree))
    wide = 10 * len(SCALES)
    lines.append(" " * 35 + f"{'with the Hessian':<{wide}}with the Gauss-Newton matrix")
    lines.append("response            method         " + "".join(f"σ = {scale:<6}" for scale in SCALES * 2).rstrip())
    for kind in KINDS:
        for name in METHODS:
            values = [mean[reference, kind, name, scale] for reference in REFERENCES for scale in SCALES]
            lines.append(f"{kind:<19} {name:<14} " + "".join(f"{value:<10.3f}" for value in values).rstrip())
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.figure:
        draw(mean, options.figure)


if __name__ == "__main__":
    main()
