"""What does a hypergradient cost, and how exact is it? bilevel and its peers, in one run, interleaved, on one thread.

python benchmarks/hypergradients.py --out docs/results/hypergradients.txt --json docs/results/hypergradients.json

Each peer is optional, and none is a dependency of bilevel. To measure them all, in an environment of their own:

    pip install torch numpy tqdm jax graphviz optree matplotlib
    pip install --no-deps -e . betty-ml higher torchopt boat-torch jaxopt
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import record
import torch
from hypergradient_peers import (
    Hypergradient,
    Jitted,
    betty,
    boat,
    higher_unroll,
    jaxopt,
    torchopt_implicit,
    torchopt_unroll,
)
from hypergradient_tasks import STEPS, Task, exact, mlp, ridge
from torch import Tensor

import bilevel

HEADER = f"""\
Hypergradients: {STEPS} iterations of a linear solver, terms of a series, columns, or inner steps. Float32, one thread.

time    of the processor for one hypergradient, over that for a plain inner step (forward, backward, SGD update in plain
        torch) in the same round; median over the rounds, in which all methods take turns. Ours is a whole outer step:
        the true residual, the checks and the update of the hyperparameters included. "alone" is what peers compute:
        the hypergradient, without check or update; Neumann 19 makes as many products as peers do for 20 terms, since
        one gives its residual.
memory  largest growth of the resident memory during one hypergradient, the second one of a fresh process, in which
        malloc returns what is freed; for jax, which frees late, what XLA says it needs. Also over that of a plain step.
        Below the resolution on the small problems.
error   |found - exact| / |exact|. Exact is what the method approximates, in float64: for implicit methods the converged
        solve with the same matrix (Hessian or Gauss-Newton) at the same weights; for unrolling the same inner steps.
"""
INSTALL = "see the top of benchmarks/hypergradients.py for how to install them"


def plain(task: Task) -> Hypergradient:
    """An inner step, without hypergradient."""
    net, decay = copy.deepcopy(task.net), task.log_decay.exp()
    weights = list(net.parameters())
    optimizer = torch.optim.SGD(weights, lr=task.scale / 2)

    def step() -> None:
        optimizer.zero_grad()
        penalty = sum(d * (w * w).sum() for d, w in zip(decay, weights, strict=True))
        (task.fit(net(task.train[0]), task.train[1]) + penalty).backward()
        optimizer.step()

    return step


def ours(
    method: Callable[[Task], bilevel.Method], *, compile: bool = False, alone: bool = False
) -> Callable[[Task], Hypergradient]:
    """An outer step of a bilevel.Solver; or the hypergradient alone, which is what peers compute."""

    def prepare(task: Task) -> Hypergradient:
        def inner_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
            penalty = sum(d * (w * w).sum() for d, w in zip(hyper["decay"], model.params.values(), strict=True))
            loss: Tensor = task.fit(model(batch[0]), batch[1]) + penalty
            return loss

        def outer_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
            return task.fit(model(batch[0]), batch[1])

        net, settings, batch = copy.deepcopy(task.net), method(task), task.train
        if isinstance(settings, bilevel.Implicit):
            for w, trained in zip(net.parameters(), task.trained, strict=True):
                w.data.copy_(trained)
        hyper = {"decay": bilevel.positive(task.log_decay.exp())}
        problem = bilevel.Problem(net, inner_loss=inner_loss, outer_loss=outer_loss, hyper=hyper)
        solver = bilevel.Solver(
            problem,
            method=settings,
            inner_optimizer=lambda params: torch.optim.SGD(params, lr=task.scale / 2),
            outer_optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
            compile=compile,
        )
        batches = batch if isinstance(settings, bilevel.Implicit) else [batch] * STEPS

        def gradient() -> Tensor:
            point = solver.vector.detach().requires_grad_()
            loss = problem.outer_loss(solver.response(point, batches), point, task.valid).value
            return torch.autograd.grad(loss, point)[0]

        return gradient if alone else lambda: solver.outer_step(batches, task.valid).hypergradient

    return prepare


def cg(curvature: str) -> Callable[[Task], bilevel.Method]:
    """Our conjugate gradients."""
    return lambda task: bilevel.Implicit(bilevel.CG(max_steps=STEPS, rtol=0), curvature=curvature, warm_start=False)


def diagonal(steps: int, probes: int) -> Callable[[Task], bilevel.Method]:
    """Our conjugate gradients, preconditioned."""
    solver, preconditioner = bilevel.CG(max_steps=steps, rtol=0), bilevel.Diagonal(probes=probes)
    return lambda task: bilevel.Implicit(solver, preconditioner=preconditioner, warm_start=False)


def kfac(steps: int) -> Callable[[Task], bilevel.Method]:
    """Our conjugate gradients, preconditioned layer by layer."""
    solver = bilevel.CG(max_steps=steps, rtol=0)
    return lambda task: bilevel.Implicit(solver, preconditioner=bilevel.KFAC(), warm_start=False)


def neumann(task: Task, terms: int = STEPS) -> bilevel.Method:
    """Our Neumann series."""
    return bilevel.Implicit(bilevel.Neumann(max_steps=terms, scale=task.scale), warm_start=False)


def one_term_less(task: Task) -> bilevel.Method:
    """With as many products as peers make for one term more, since the last one gives our residual."""
    return neumann(task, STEPS - 1)


def unroll(**settings: Any) -> Callable[[Task], bilevel.Method]:
    """Our unrolling."""
    return lambda task: bilevel.Unrolled(steps=STEPS, **settings)


METHODS: dict[str, tuple[str, Callable[[Task], Hypergradient]]] = {
    "bilevel CG": ("hessian", ours(cg("hessian"))),
    "bilevel CG, compiled": ("hessian", ours(cg("hessian"), compile=True)),
    "bilevel CG 18, 2 probes": ("hessian", ours(diagonal(18, 2))),
    "bilevel CG 8, 2 probes": ("hessian", ours(diagonal(8, 2))),
    "bilevel CG 7, K-FAC": ("hessian", ours(kfac(7))),
    "betty CG": ("hessian", betty("cg")),
    "boat_torch CG": ("hessian", boat("conjugate_gradient")),
    "torchopt CG": ("hessian", torchopt_implicit("cg")),
    "jaxopt CG (jit)": ("hessian", jaxopt("cg")),
    "bilevel CG, Gauss-Newton": ("gauss_newton", ours(cg("gauss_newton"))),
    "bilevel Neumann": ("hessian", ours(neumann)),
    "bilevel Neumann 19, alone": ("hessian", ours(one_term_less, alone=True)),
    "bilevel Neumann, compiled": ("hessian", ours(neumann, compile=True)),
    "betty Neumann": ("hessian", betty("neumann")),
    "boat_torch Neumann": ("hessian", boat("neumann")),
    "torchopt Neumann": ("hessian", torchopt_implicit("neumann")),
    "bilevel Nystrom": ("hessian", ours(lambda task: bilevel.Implicit(bilevel.Nystrom(rank=STEPS), warm_start=False))),
    "bilevel unrolled": ("unroll", ours(unroll())),
    "bilevel unrolled, alone": ("unroll", ours(unroll(), alone=True)),
    "bilevel unrolled, compiled": ("unroll", ours(unroll(), compile=True)),
    "bilevel unrolled, checkpoint": ("unroll", ours(unroll(checkpoint=True))),
    "bilevel unrolled, forward": ("unroll", ours(unroll(mode="forward"))),
    "bilevel forward, compiled": ("unroll", ours(unroll(mode="forward"), compile=True)),
    "higher unrolled": ("unroll", higher_unroll),
    "torchopt unrolled": ("unroll", torchopt_unroll),
    "jaxopt unrolled (jit)": ("unroll", jaxopt("unroll")),
}
TASKS: dict[str, Callable[[], Task]] = {
    "ridge": lambda: ridge("ridge, 128 features, condition number 10", 10.0),
    "ill": lambda: ridge("ill-conditioned ridge, 128 features, condition number 1e4", 1e4),
    "mlp": mlp,
}


def status(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def memory(run: Hypergradient) -> float:
    """How far the resident memory of this process rises during a call, in MB."""
    if isinstance(run, Jitted):
        return run.memory()
    run()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def measure_memory(task: Task, method: str) -> float:
    """The same in a fresh process."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(task, Path(folder, "task.pt"))
        command = [sys.executable, __file__, "--memory", str(Path(folder, "task.pt")), method]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure_time(runs: dict[str, Hypergradient], rounds: int) -> dict[str, float]:
    """The time of each over that of a plain step."""
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    seconds = []
    for _ in range(rounds):
        taken = {}
        for name, run in runs.items():
            repeats = STEPS if name == "plain" else 1
            started = time.process_time()
            for _ in range(repeats):
                run()
            taken[name] = (time.process_time() - started) / repeats
        seconds.append(taken["plain"])
        for name in runs:
            ratios[name].append(taken[name] / taken["plain"])
    return {name: statistics.median(found) for name, found in ratios.items()} | {"ms": 1e3 * statistics.median(seconds)}


def missing() -> list[str]:
    """The peers that are not installed."""
    return sorted(name for name in {key.split()[0] for key in METHODS} if importlib.util.find_spec(name) is None)


def report(key: str, rounds: int) -> tuple[str, dict[str, float]]:
    """The table of one task, and its numbers by name."""
    torch.manual_seed(0)
    task = TASKS[key]()
    truth = {kind: exact(task, kind) for kind in ("hessian", "gauss_newton", "unroll")}
    runs, errors, failures, compiling = {"plain": plain(task)}, {}, {}, {}
    installed = {name: value for name, value in METHODS.items() if name.split()[0] not in missing()}
    for name, (kind, prepare) in installed.items():
        try:
            runs[name], started = prepare(task), time.perf_counter()
            found = torch.as_tensor(runs[name]().tolist(), dtype=torch.float64)
            if "compiled" in name:
                compiling[name] = time.perf_counter() - started
            errors[name] = float((found - truth[kind]).norm() / truth[kind].norm())
        except Exception as error:
            runs.pop(name, None)
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0][:90]
    times = measure_time(runs, rounds)
    peaks = {name: measure_memory(task, name) for name in runs} if key == "mlp" else {}
    lines = [
        f"{task.name}: a plain step takes {times['ms']:.2f} ms" + (f" and {peaks['plain']:.1f} MB" if peaks else "")
    ]
    lines.append(f"{'':30} {'time':>7} {'memory':>16} {'error':>9}")
    for name in installed:
        if name in failures:
            lines.append(f"{name:30} {failures[name]}")
            continue
        peak = f"{peaks[name]:6.1f} MB {peaks[name] / peaks['plain']:5.1f} x" if peaks else "-"
        lines.append(f"{name:30} {times[name]:7.1f} {peak:>16} {errors[name]:9.1e}")
    if compiling:
        lines.append("seconds of the first call, which compiles, or finds in a cache what an earlier run compiled:")
        lines.append("  " + ", ".join(f"{name.partition(', ')[0]} {taken:.0f}" for name, taken in compiling.items()))
    numbers = {f"{key} / {name} / time": times[name] for name in runs if name != "plain"}
    numbers |= {f"{key} / {name} / MB": peak for name, peak in peaks.items()}
    numbers |= {f"{key} / {name} / error": error for name, error in errors.items()}
    return "\n".join(lines) + "\n", numbers


def main() -> None:
    """Print a table per task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the tables to this file, too")
    parser.add_argument("--json", type=Path, help="write a record to this file, too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--memory", nargs=2, metavar=("FILE", "METHOD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchopt|higher|boat_torch|betty|jax")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # for jax, which has threads of its own
    if arguments.memory:
        path, name = arguments.memory
        task = torch.load(path, weights_only=False)
        print(memory(plain(task) if name == "plain" else METHODS[name][1](task)))
        return
    tables = [HEADER + (f"missing: {', '.join(missing())}; {INSTALL}\n" if missing() else "")]
    print(tables[0])
    numbers: dict[str, float] = {}
    for key in arguments.tasks:
        table, found = report(key, arguments.rounds)
        tables.append(table)
        numbers |= found
        print(table, flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(tables))
    if arguments.json:
        record.save(arguments.json, numbers)


if __name__ == "__main__":
    main()
