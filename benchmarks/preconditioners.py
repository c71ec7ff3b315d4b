"""How exact is a hypergradient after few products: preconditioners of CG, K-FAC as a solver, and Nyström.

python benchmarks/preconditioners.py --out docs/results/preconditioners.txt
python benchmarks/preconditioners.py --nystrom --out docs/results/nystrom.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from hypergradient_tasks import Task, exact, finish, mlp, ridge
from hypergradients import ours
from torch import Tensor, nn

import bilevel

HEADER = """\
|found - exact| / |exact| of the hypergradient in float32, where exact is the converged solve in float64 with the same
matrix. A probe of a preconditioner counts as a product: with 8 products and 2 probes, CG makes 6 steps.
"""
HEADER_OF_NYSTROM = """\
|found - exact| / |exact| of the hypergradient in float32, where exact is the converged solve without damping in float64
with the same matrix. CG 300, with the same damping, has the error of the damping alone.
"""
PRODUCTS = (2, 4, 8, 12, 20)
PRECONDITIONERS: dict[str, bilevel.Preconditioner | None] = {
    "CG": None,
    "CG, Diagonal(probes=1)": bilevel.Diagonal(probes=1),
    "CG, Diagonal()": bilevel.Diagonal(),
    "CG, KFAC()": bilevel.KFAC(),
}


def mixed() -> Task:
    """Ridge regression by a linear layer, whose inputs of different scales have been rotated."""
    scales = torch.logspace(0, -2, 128)
    rotation = torch.linalg.qr(torch.randn(128, 128))[0]
    x = torch.randn(1024, 128) * scales
    y = x @ (torch.randn(128, 1) / scales[:, None]) + torch.randn(1024, 1)
    x, decay = x @ rotation, torch.tensor([1e-4, 1e-4])
    net = nn.Linear(128, 1)
    return finish(
        Task(
            "rotated ridge, condition number 1e4", net, F.mse_loss, (x[:512], y[:512]), (x[512:], y[512:]), decay.log()
        )
    )


def noisy() -> Task:
    """A classifier that cannot fit its 2048 labels, a third of which are random."""
    x, truth = torch.randn(4096, 64) * torch.logspace(0, -1.5, 64), torch.randn(64, 10)
    y = (x @ truth).argmax(1)
    y = torch.where(torch.rand(4096) < 1 / 3, torch.randint(10, (4096,)), y)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    decay = torch.full((4,), 1e-3)
    return finish(
        Task(
            "64-32-10 classifier, 2048 noisy labels",
            net,
            F.cross_entropy,
            (x[:2048], y[:2048]),
            (x[2048:], y[2048:]),
            decay.log(),
        )
    )


TASKS: dict[str, tuple[Callable[[], Task], str]] = {
    "ill-conditioned ridge": (lambda: ridge("ill-conditioned ridge, condition number 1e4", 1e4), "hessian"),
    "rotated ridge": (mixed, "hessian"),
    "MLP, Hessian": (mlp, "hessian"),
    "MLP, Gauss-Newton": (mlp, "gauss_newton"),
    "noisy labels": (noisy, "gauss_newton"),
}


def error(task: Task, truth: Tensor, method: bilevel.Method) -> str:
    """Of one hypergradient; or why there is none."""
    try:
        found = ours(lambda task: method)(task)()
    except (bilevel.LinearSolverError, ValueError) as refusal:
        return "refused" if isinstance(refusal, ValueError) else "failed"
    return f"{float((found.double() - truth).norm() / truth.norm()):.1e}"


def table(make: Callable[[], Task], curvature: str) -> str:
    """Of one task."""
    torch.manual_seed(0)
    task = make()
    truth = exact(task, curvature)

    def of(solver: bilevel.LinearSolver, preconditioner: bilevel.Preconditioner | None = None) -> str:
        settings = {"curvature": curvature, "preconditioner": preconditioner, "warm_start": False}
        return f"{error(task, truth, bilevel.Implicit(solver, **settings)):>9}"

    lines = [f"{task.name}, {curvature}", f"{'products':26}" + "".join(f"{k:9}" for k in PRODUCTS)]
    for name, preconditioner in PRECONDITIONERS.items():
        probes = 0 if preconditioner is None else preconditioner.probes
        steps = [k - probes for k in PRODUCTS]
        row = [of(bilevel.CG(max_steps=k, rtol=0.0), preconditioner) if k else f"{'-':>9}" for k in steps]
        lines.append(f"{name:26}" + "".join(row))
    for damping in (0.0, 1e-2):
        lines.append(f"{f'KFAC(damping={damping:g})':26}" + of(bilevel.KFAC(damping=damping)))
    for damping in (1e-2, 1.0):
        row = [of(bilevel.Nystrom(rank=k, damping=damping)) for k in PRODUCTS]
        lines.append(f"{f'Nystrom(damping={damping:g})':26}" + "".join(row))
    return "\n".join(lines) + "\n"


def nystrom(make: Callable[[], Task], curvature: str) -> str:
    """Of one task: what rank and damping would do, and the error that the damping alone makes."""
    torch.manual_seed(0)
    task = make()
    truth = exact(task, curvature)

    def of(solver: bilevel.LinearSolver) -> str:
        return f"{error(task, truth, bilevel.Implicit(solver, curvature=curvature, warm_start=False)):>9}"

    ranks = (20, 64, 256)
    lines = [f"{task.name}, {curvature}"]
    lines.append(f"{'Nystrom':14}" + "".join(f"{f'rank {k}':>9}" for k in ranks) + f"{'CG 300':>9}")
    for damping in (1e-3, 1e-2, 1e-1, 1.0):
        row = [of(bilevel.Nystrom(rank=k, damping=damping)) for k in ranks]
        row.append(of(bilevel.CG(max_steps=300, rtol=0.0, damping=damping)))
        lines.append(f"{f'damping {damping:g}':14}" + "".join(row))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print a table per task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the tables to this file, too")
    parser.add_argument("--nystrom", action="store_true", help="ranks and dampings of Nyström instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = [HEADER_OF_NYSTROM if options.nystrom else HEADER]
    for make, curvature in TASKS.values():
        tables.append((nystrom if options.nystrom else table)(make, curvature))
        print(tables[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
