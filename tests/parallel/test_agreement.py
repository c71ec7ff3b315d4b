"""W processes with batches of B examples make the steps of one process with batches of W · B."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from processes import missing, rank, size, together
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.hyper.scale import Scale

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
BATCH = 12
TRAIN, VALID = 31, 17  # neither is a multiple of the batch, and shares of the last one differ
SHORT = {
    "delta_stn": bilevel.DeltaSTN(),
    "pairs, batch": bilevel.DeltaSTN(antithetic=True, perturb="batch"),
    "learned scale, batch": bilevel.DeltaSTN(entropy=1e-2, perturb="batch"),
    "dense": bilevel.CenteredSTN(structure="dense"),
    # As many steps in one process as in several: at a tolerance, rounding decides about the last one.
    "minres": bilevel.Implicit(bilevel.MINRES(max_steps=8, rtol=0.0, damping=0.1), curvature="gauss_newton"),
    "hessian, cold": bilevel.Implicit(bilevel.CG(max_steps=5, rtol=1e-3, damping=10.0), warm_start=False),
    "checkpointed": bilevel.Unrolled(steps=4, checkpoint=True),
}


def shortened(name: str) -> bilevel.Method:
    """A method of the table, with few steps and a system that can be solved."""
    method = bilevel.METHODS.get(name) or SHORT[name]
    if isinstance(method, bilevel.Unrolled):
        return dataclasses.replace(method, steps=4, truncate=method.truncate and 2)
    if name == "implicit_exact":
        return bilevel.Implicit(bilevel.Exact(damping=0.1))
    if name == "implicit_cg":  # many steps on a badly conditioned matrix would magnify rounding
        return bilevel.Implicit(bilevel.CG(max_steps=8, rtol=0.0, damping=0.1), curvature="gauss_newton")
    return method


class Attention(nn.Module):
    """A small transformer for classification."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x.view(len(x), 2, 4)).mean(1))


def network(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    if kind == "transformer":
        return Attention().double()
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 2), norm, nn.Softplus(), nn.Flatten(), nn.Linear(9, 3)
    ).double()


def problem(kind: str, *, parts: int, sharded: bool = False) -> bilevel.Problem:
    """A classifier with two hyperparameters; statistics of a batch are those of each of so many parts of it."""

    def data_loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        shares = [F.cross_entropy(model(x[part::parts]), y[part::parts], reduction="sum") for part in range(parts)]
        return torch.stack(shares).sum() / len(x)

    def inner(model: Any, hyper: Any, batch: Any) -> Any:
        if hyper["decay"].ndim:  # a perturbation for each example
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return hyper["weight"] * losses + hyper["decay"] * bilevel.l2(model.params)
        return hyper["weight"] * data_loss(model, batch) + hyper["decay"] * bilevel.l2(model.params)

    def outer(model: Any, hyper: Any, batch: Any) -> Any:
        if hyper["decay"].ndim:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + 0.1 * hyper["weight"]
        return data_loss(model, batch) + 0.1 * hyper["weight"]

    hyper = {"decay": bilevel.positive(1e-2), "weight": bilevel.positive(1.0, shared=kind == "mlp")}
    net = bilevel.parallel.shard(network(kind)) if sharded else network(kind)
    return bilevel.Problem(net, inner_loss=inner, outer_loss=outer, hyper=hyper)


def fixed(scale: Scale, examples: int | None = None, common: Tensor | None = None) -> Tensor:
    """The same perturbation for every example, however the batch is divided."""
    drawn = torch.randn(64, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = drawn[0] if examples is None else drawn[rank() :: size()][:examples]
    return scale() * torch.where(scale.shared, drawn[0], rows) if examples is not None else scale() * rows


def data(count: int, seed: int) -> TensorDataset:
    torch.manual_seed(seed)
    x = torch.randn(count, 8, dtype=torch.float64)
    return TensorDataset(x, (x[:, :3] + 0.5 * torch.randn(count, 3)).argmax(1))


def answers(names: list[str], kind: str, parts: int = 1, sharded: bool = False) -> dict[str, Any]:
    """What a short run of each method finds."""
    found = {}
    for which in names:
        method = shortened(which)
        if kind == "cnn" and isinstance(method, bilevel.response.hypernetwork.Hypernetwork):
            method = dataclasses.replace(method, perturb="batch")
        unrolled = bool(method.unrolled_steps)
        with patch.object(Scale, "sample", fixed), warnings.catch_warnings():
            warnings.simplefilter("ignore", bilevel.ConvergenceWarning)
            warnings.simplefilter("ignore", bilevel.TuningWarning)
            solution = bilevel.solve(
                problem(kind, parts=parts, sharded=sharded),
                DataLoader(data(TRAIN, 3), BATCH // size()),
                DataLoader(data(VALID, 4), BATCH // size()),
                method=method,
                # With a small eps, Adam magnifies the rounding of gradients that are zero, as that of a bias of keys.
                inner_optimizer=lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-3),
                outer_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
                inner_clip=0.5,
                inner_steps=0 if unrolled else 2,
                accumulate=1 if unrolled else 2,
                warmup=1,
                steps=4,
                progress=False,
            )
        # At rounding level, a linear solver may take one step more or less.
        names = [name for name in solution.history.rows[-1] if name not in ("seconds", "method.solver_steps")]
        rows = [{name: row.get(name, 0.0) for name in names} for row in solution.history.rows]
        params = {name: bilevel.parallel.whole(value) for name, value in solution.params.items()}
        found[which] = {"hyper": dict(solution.hyper), "params": params, "history": rows}
    return found


def compare(count: int, names: list[str], kind: str) -> None:
    expected = answers(names, kind, parts=count if kind == "cnn" else 1)
    for found in together(count, answers, names, kind):
        for name in names:
            torch.testing.assert_close({name: found[name]}, {name: expected[name]}, rtol=1e-9, atol=1e-11)


def test_every_method_in_two_processes() -> None:
    compare(2, list(bilevel.METHODS), "mlp")


def test_variants_in_two_processes() -> None:
    compare(2, list(SHORT), "mlp")


@pytest.mark.parametrize("kind", ["transformer", "cnn"])
def test_other_networks_in_two_processes(kind: str) -> None:
    compare(2, ["delta_stn", "implicit_cg", "unrolled_forward"], kind)


def test_four_processes() -> None:
    compare(4, ["delta_stn", "implicit_cg", "unrolled"], "mlp")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "transformer", "cnn"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_method_network_and_number_of_processes(kind: str, count: int) -> None:
    compare(count, [*bilevel.METHODS, *SHORT], kind)
