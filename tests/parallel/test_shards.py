"""Weights of which each process keeps a part make the steps of whole ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import missing, rank, size, together
from test_agreement import SHORT, answers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.parallel import is_sharded, shard, whole

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
WHOLE = ("implicit_exact", "implicit_nystrom", "unrolled", "unrolled_truncated", "unrolled_forward", "checkpointed")
"""Methods that need whole vectors, or copies of whole weights, and say so."""
NAMES = [name for name in [*bilevel.METHODS, *SHORT] if name not in WHOLE]


def compare(count: int, names: list[str], kind: str) -> None:
    expected = answers(names, kind, count if kind == "cnn" else 1)
    for found in together(count, answers, names, kind, 1, True):
        for name in names:
            torch.testing.assert_close({name: found[name]}, {name: expected[name]}, rtol=1e-9, atol=1e-11)


def test_methods_with_parts_of_the_weights() -> None:
    compare(2, ["stn", "delta_stn", "learned scale, batch", "implicit_cg", "minres"], "mlp")


@pytest.mark.parametrize("kind", ["transformer", pytest.param("cnn", marks=pytest.mark.slow)])
def test_other_networks_with_parts_of_the_weights(kind: str) -> None:
    compare(2, ["delta_stn"], kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "transformer", "cnn"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_method_and_network_with_parts_of_the_weights(kind: str, count: int) -> None:
    compare(count, NAMES, kind)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2)).double()


def problem(net: nn.Module) -> bilevel.Problem:
    """A classifier."""

    def inner(model: Any, hyper: Any, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses + hyper["decay"] * bilevel.l2(model.params)

    return bilevel.Problem(
        net,
        inner_loss=inner,
        outer_loss=lambda model, hyper, batch: F.cross_entropy(model(batch[0]), batch[1]),
        hyper={"decay": bilevel.positive(1e-2)},
    )


def data(count: int) -> TensorDataset:
    x = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, (x.sum(1) > 0).long())


def run(net: nn.Module, **settings: Any) -> bilevel.Solution:
    known: dict[str, Any] = {"method": "delta_stn", "steps": 6, "warmup": 1, "inner_steps": 2, "progress": False}
    loaders = [DataLoader(data(count), 4, shuffle=True, drop_last=True) for count in (24, 18)]
    return bilevel.solve(problem(net), *loaders, evaluate_every=2, **known | settings)


def gathered(solution: bilevel.Solution) -> Any:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in solution.history.rows]
    assert solution.best is not None
    everything = {**solution.state_dict, **{f"best.{name}": value for name, value in solution.best.params.items()}}
    return rows, dict(solution.hyper), {name: whole(value) for name, value in everything.items()}


def kept() -> Any:
    """How many numbers a process keeps between two steps, and how many there are."""
    found = {}
    for name in ("delta_stn", "implicit_cg"):
        method = bilevel.METHODS[name]
        if name == "implicit_cg":
            method = bilevel.Implicit(bilevel.CG(damping=1.0), curvature="gauss_newton")
        net = shard(network())
        solution = run(net, method=method, inner_optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
        solver = solution.solver
        tensors = [*solver.guard.step.look().tensors, *net.parameters(), *solution.params.values()]
        own = sum((t.to_local() if is_sharded(t) else t).numel() for t in tensors)
        memory = [value for state in solver.optimizers["weights"].state.values() for value in state.values()]
        assert all(is_sharded(value) for value in memory if value.ndim)
        assert is_sharded(solver.response.guess) if name == "implicit_cg" else is_sharded(solver.shards.parts[-1])
        assert all(weight.isnan().all() for weight in solver.response.inner.weights), "outside, nothing can be read"
        net.load_state_dict(solution.state_dict)
        found[name] = own
    return found


def test_a_process_keeps_a_part() -> None:
    first, second = together(2, kept)
    weights = sum(param.numel() for param in network().parameters())
    # Both halves together are one copy of everything: weights, Adam, the network, the solution, the response.
    for name, copies in {"delta_stn": 5, "implicit_cg": 6}.items():
        assert first[name] + second[name] < copies * weights + 2 * 100, name
        assert abs(first[name] - second[name]) < weights, name


def interrupted(folder: str) -> Any:
    undisturbed = gathered(run(shard(network()), checkpoint=f"{folder}/whole"))
    for stop in (2, 5, None):
        parts = run(
            shard(network()), checkpoint=f"{folder}/parts", callbacks=[lambda event, at=stop: event.index == at]
        )
    run(shard(network()), checkpoint=f"{folder}/left", callbacks=[lambda event: event.index == 3])
    solver = parts.solver
    state = solver.state_dict()
    loss = solver.evaluate(DataLoader(data(7), 2))
    solver.restart()
    assert solver.evaluate(DataLoader(data(7), 2)) != loss
    solver.load_state_dict(state)
    return undisturbed, gathered(parts), loss, solver.evaluate(DataLoader(data(7), 2))


def test_a_run_with_parts_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for undisturbed, parts, loss, again in together(2, interrupted, str(tmp_path)):
        torch.testing.assert_close(parts, undisturbed, rtol=0, atol=0)
        assert loss == again
    # The file holds whole tensors, so that a process alone can go on with a whole network.
    with pytest.warns(bilevel.CheckpointWarning, match="made by 2 processes and goes on with 1"):
        assert len(run(network(), checkpoint=f"{tmp_path}/left").history) == 6


def not_finite(policy: str, sharded: bool) -> Any:
    bad = data(24)
    bad.tensors[0][5] = torch.nan
    net = shard(network()) if sharded else network()
    loaders = [DataLoader(one, 8 // size()) for one in (bad, data(16))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bilevel.NotFiniteWarning)
        solution = bilevel.solve(problem(net), *loaders, steps=4, inner_steps=3, on_nan=policy, progress=False)
        solver = solution.solver
        # What only one process has, a memory of its optimizer, is not finite: all of them go back.
        if sharded and rank() == 1:
            next(iter(solver.optimizers["weights"].state.values()))["exp_avg"].to_local().fill_(torch.nan)
        if sharded:
            solver.check()
            assert solver.guard.is_finite()
    return solver.bad_steps, {name: whole(value).isfinite().all() for name, value in solution.params.items()}


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_what_is_not_finite_in_one_part_is_undone_in_all(policy: str) -> None:
    steps, _ = not_finite(policy, False)
    for bad, finite in together(2, not_finite, policy, True):
        assert bad == steps + 1
        assert all(finite.values())


def refusals() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    found = {}

    def message(name: str, function: Any) -> None:
        try:
            function()
        except ValueError as error:
            found[name] = str(error)

    mixed = network()
    mesh = init_device_mesh("cpu", (size(),))
    mixed[0].weight = nn.Parameter(distribute_tensor(mixed[0].weight.detach(), mesh, [Shard(0)]))
    message("mixed", lambda: problem(mixed))
    message("hooks", lambda: problem(fully_shard(network(), mesh=mesh)))
    frozen = shard(network())
    frozen[0].weight.requires_grad_(False)
    message("frozen", lambda: problem(frozen))
    net = shard(network())
    message("alone", lambda: bilevel.Solver(problem(net), distributed=False))
    for name in ("unrolled", "implicit_exact", "implicit_nystrom"):
        message(name, lambda name=name: bilevel.Solver(problem(net), method=name))
    message("tune", lambda: bilevel.tune(net, [data(4)[:]], [data(4)[:]], loss=F.cross_entropy, epochs=1))
    message("diagnose", lambda: bilevel.diagnose(bilevel.Solver(problem(net)), data(4)[:], data(4)[:]))
    return found


def test_what_needs_whole_weights_says_so() -> None:
    for found in together(2, refusals):
        assert found["mixed"].startswith("inner: '0.weight' is a DTensor, of which each process holds a part, and")
        assert found["hooks"].startswith("inner went through fully_shard")
        assert "bilevel.parallel.shard(net)" in found["hooks"]
        assert found["frozen"].startswith("inner.0 has a frozen parameter that is a DTensor")
        assert "distributed=True" in found["alone"]
        assert "whole copies of the weights of every step" in found["unrolled"]
        for name in ("exact", "nystrom"):
            assert found[f"implicit_{name}"].endswith("use CG, MINRES, Neumann or Identity.")
        assert found["tune"].startswith("tune: the network is divided among processes")
        assert "diagnose needs whole ones" in found["diagnose"]


def test_one_process_has_nothing_to_divide() -> None:
    with pytest.raises(RuntimeError, match="one process only"):
        shard(network())
