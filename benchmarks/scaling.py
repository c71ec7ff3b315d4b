"""What several processes say to each other: bytes and all-reduces, against the least that there can be.

    python benchmarks/scaling.py --out docs/results/scaling.txt

Runs a few steps of each method in 1, 2 and 4 processes of gloo on this machine, and counts what is handed to
``torch.distributed``. The least is one all-reduce of the gradients of the weights, and one of those of the response, in
an inner step; of the weights, for every product with the curvature. With m weights, h hyperparameters and θ numbers of
the response, all in single precision, the model predicts the bytes; the table has both. A second table is for weights
that are divided among the processes: what is gathered before a pass, and added up where the parts are kept.

Then the model is used where nothing can be measured here: 7 billion weights on 64 devices.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bilevel

STEPS, SOLVES, BATCH, HYPER = 10, 10, 16, 3
METHODS: dict[str, bilevel.Method] = {
    "stn": bilevel.STN(),
    "centered_stn": bilevel.CenteredSTN(),
    "delta_stn": bilevel.DeltaSTN(),
    "implicit_cg": bilevel.Implicit(bilevel.CG(max_steps=SOLVES, rtol=0.0, damping=1.0), curvature="gauss_newton"),
    "implicit_neumann": bilevel.Implicit(bilevel.Neumann(max_steps=SOLVES), curvature="gauss_newton"),
    "unrolled": bilevel.Unrolled(steps=STEPS),
    "unrolled_forward": bilevel.Unrolled(steps=STEPS, mode="forward"),
}


DIVIDED = ("stn", "delta_stn", "implicit_cg")


def network() -> nn.Module:
    """An MLP with 12,800 weights or so."""
    return nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 64))


def predicted(method: str, m: int, theta: int, h: int) -> tuple[float, float]:
    """Numbers that are handed to an all-reduce in an inner step, and in an outer step, of one process."""
    inner = float(m + theta)
    small = 2 * h + 11  # the hypergradient in two parts and the loss; counts and checksums in double precision
    if method.startswith("implicit"):
        # The cotangent, and for every step a product; one for a warm start and one for the true residual.
        # The series needs none for its first term, but eleven to estimate the largest eigenvalue.
        power = 10 if "neumann" in method else 0
        return m, m * (1 + SOLVES + 2 + power) + small
    if method == "unrolled":  # each step forth, each but the first back, and the cotangent
        return m, m * 2 * STEPS + small
    if method == "unrolled_forward":  # each step, and a product for each hyperparameter
        return m, m * STEPS * (1 + h) + small
    return inner, small


class Counter:
    """Counts what is handed to ``all_reduce``."""

    def __init__(self) -> None:
        """Start at zero."""
        self.calls = self.bytes = 0
        self._real: Callable[..., Any] = dist.all_reduce

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Count, and hand it on."""
        self.calls += 1
        self.bytes += tensor.numel() * tensor.element_size()
        return self._real(tensor, *args, **kwargs)


class Parts(TorchDispatchMode):
    """Counts what is gathered, and what is added up for the processes that keep it; whole tensors, in bytes."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.gathered = self.added = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and hand it on."""
        found = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(func):
            self.gathered += found.numel() * found.element_size()
        elif "reduce_scatter_tensor" in str(func):
            self.added += args[0].numel() * args[0].element_size()
        return found


def measure(name: str, *, divided: bool = False) -> dict[str, float]:
    """Bytes and calls of one inner and of one outer step, after the first ones with their checks."""
    torch.manual_seed(0)
    net = bilevel.parallel.shard(network()) if divided else network()
    problem = bilevel.Problem(
        net,
        inner_loss=lambda model, hyper, batch: (
            F.mse_loss(model(batch), batch, reduction="none").mean(1)
            + hyper["decay"].exp().sum(-1) * bilevel.l2(model.params) * 1e-3
        ),
        outer_loss=lambda model, hyper, batch: F.mse_loss(model(batch), batch),
        hyper={"decay": bilevel.real([0.0] * HYPER)},
    )
    solver = bilevel.Solver(
        problem, method=METHODS[name], inner_optimizer=lambda params: torch.optim.SGD(params, lr=1e-2)
    )
    batch = torch.randn(BATCH, 64)
    batches: Any = [batch] * STEPS if solver.response.unrolled_steps else batch
    found: dict[str, float] = {
        "weights": sum(weight.numel() for weight in solver.response.inner.weights),
        "response": sum(param.numel() for param in solver.optimization.params.get("response", [])),
    }
    solver.inner_step(batch)
    solver.outer_step(batches, batch)
    for level, step in (
        ("inner", lambda: solver.inner_step(batch)),
        ("outer", lambda: solver.outer_step(batches, batch)),
    ):
        counter, parts = Counter(), Parts() if divided else nullcontext()
        with patch.object(dist, "all_reduce", counter), parts:
            step()
        found |= {f"{level} bytes": counter.bytes, f"{level} calls": counter.calls}
        if isinstance(parts, Parts):
            found |= {f"{level} gathered": parts.gathered, f"{level} added": parts.added}
    return found


def _work(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = {name: measure(name) for name in METHODS}
    if size > 1:
        found |= {f"{name}, divided": measure(name, divided=True) for name in DIVIDED}
    torch.save(found, Path(folder) / f"{rank}.pt")


def measured(size: int) -> dict[str, dict[str, float]]:
    """What the first of several processes says."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [multiprocessing.Process(target=_work, args=(rank, size, folder)) for rank in range(size)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        found: dict[str, dict[str, float]] = torch.load(Path(folder) / "0.pt")
    return found


def table() -> list[str]:
    """Measured bytes of one process, and how many times the predicted ones that is."""
    lines = [
        f"{'method':18}{'processes':>10}{'inner: calls':>14}{'bytes':>10}{'/ model':>9}"
        f"{'outer: calls':>14}{'bytes':>12}{'/ model':>9}"
    ]
    divided = [
        f"{'divided weights':18}{'processes':>10}{'inner: gathered':>17}{'/ model':>9}{'added up':>10}{'/ model':>9}"
        f"{'outer: gathered':>17}{'/ model':>9}{'added up':>10}{'/ model':>9}"
    ]
    for size in (1, 2, 4):
        for name, found in measured(size).items():
            if name.endswith(", divided"):
                divided.append(f"{name.removesuffix(', divided'):18}{size:>10}{_of_parts(name, found)}")
                continue
            inner, outer = predicted(name, int(found["weights"]), int(found["response"]), HYPER)
            ratios = [
                f"{found[f'{level} bytes'] / (4 * numbers):.3f}"
                for level, numbers in (("inner", inner), ("outer", outer))
            ]
            ratios = ratios if size > 1 else ["", ""]
            lines.append(
                f"{name:18}{size:>10}{found['inner calls']:>14.0f}{found['inner bytes']:>10.0f}{ratios[0]:>9}"
                f"{found['outer calls']:>14.0f}{found['outer bytes']:>12.0f}{ratios[1]:>9}"
            )
    return [*lines, "", *divided]


def _of_parts(name: str, found: dict[str, float]) -> str:
    """Measured bytes of divided weights, each followed by how many times the predicted ones that is."""
    m, theta = found["weights"], found["response"]
    products = SOLVES + 2 if name.startswith("implicit") else 0
    # The weights for the pass; for every product the vector, and the solution for the cross derivative.
    model = {
        "inner gathered": m + theta,
        "inner added": m + theta,
        "outer gathered": m + theta + (m * (products + 1) if products else 0),
        "outer added": m * (products + 1) if products else 0,
    }
    text = ""
    for (key, numbers), width in zip(model.items(), (17, 10, 17, 10), strict=True):
        ratio = f"{found[key] / (4 * numbers):.3f}" if numbers else ""
        text += f"{found[key]:>{width}.0f}{ratio:>9}"
    return text


def extrapolated(m: float = 7e9, h: int = 20, size: int = 64, speed: float = 50e9) -> list[str]:
    """The model for a large network: traffic and memory of one device, in bf16 weights and fp32 sums."""
    share = 2 * (size - 1) / size  # what a ring sends per byte of an all-reduce
    theta = m / 1000  # a gate has h numbers per row, and a row of such a network some thousand weights
    lines = [
        f"{m:.0e} weights, {h} hyperparameters, {size} devices, {speed / 1e9:.0f} GB/s per device, sums in fp32:",
        f"{'method':18}{'inner: GB sent':>15}{'seconds':>9}{'outer: GB sent':>16}{'seconds':>9}{'GB held':>9}"
        f"{'divided':>9}",
    ]
    for name in METHODS:
        response = h * theta + (m if name == "stn" else 0)  # which has a direction for each row
        inner, outer = predicted(name, int(m), int(response), h)
        sent = [share * 4 * numbers / 1e9 for numbers in (inner, outer)]
        lines.append(
            f"{name:18}{sent[0]:>15.1f}{sent[0] * 1e9 / speed:>9.2f}{sent[1]:>16.1f}{sent[1] * 1e9 / speed:>9.2f}"
            f"{memory(name, m, h, response) / 1e9:>9.0f}"
            + (f"{divided_memory(name, m, h, response, size) / 1e9:>9.0f}" if not name.startswith("unrolled") else "")
        )
    return lines


def memory(method: str, m: float, h: int, theta: float) -> float:
    """Bytes of one device beside the activations, with all weights on each: weights and Adam in bf16, sums in fp32."""
    training = 2 * m + 2 * m + 2 * 2 * m + 4 * m  # weights, gradient, Adam's two moments, the bucket
    copies = 3 * 2 * m  # the last good state, to which a bad step returns
    if method.startswith("implicit"):
        return training + copies + 4 * 4 * m  # x, r, p and a product, in single precision
    if method == "unrolled":
        return training + copies + STEPS * 4 * 2 * m  # weights, moments and gradient of every step
    if method == "unrolled_forward":
        return training + copies + h * 3 * 2 * m  # a tangent of weights and moments for each hyperparameter
    return training + copies + 10 * theta


def divided_memory(method: str, m: float, h: int, theta: float, size: int) -> float:
    """The same with weights divided among the processes: during a pass, they and their gradient are whole."""
    largest = 2 * m + 2 * m + 4 * theta  # weights, gradient, the response and its gradient
    if method.startswith("implicit"):
        largest += 4 * m  # a vector and a product
    return largest + memory(method, m, h, theta) / size


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    arguments = parser.parse_args()
    text = "\n".join([*table(), "", *extrapolated()])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
