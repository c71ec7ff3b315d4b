"""What several processes do together, beside the steps: data, decisions, errors, checkpoints."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import missing, rank, size, together
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

import bilevel
from bilevel.parallel import Nothing, Split

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count, dtype=torch.float64), torch.arange(count) % 2)


def mean_problem(**settings: Any) -> bilevel.Problem:
    """Fit the mean of a set of numbers, shrunk by a penalty."""
    return bilevel.Problem(
        {"w": torch.zeros((), dtype=torch.float64)},
        inner_loss=lambda model, hyper, batch: (
            ((model.params["w"] - batch[0]) ** 2).mean() + hyper["penalty"] * model.params["w"] ** 2
        ),
        outer_loss=lambda model, hyper, batch: ((model.params["w"] - batch[0]) ** 2).mean(),
        hyper={"penalty": bilevel.positive(0.5)},
        **settings,
    )


def solve(train: Any, valid: Any, **settings: Any) -> bilevel.Solution:
    known = {"method": "implicit_identity", "steps": 5, "warmup": 0, "inner_steps": 2, "progress": False}
    known |= {"inner_optimizer": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.5)}
    known |= {"outer_optimizer": lambda params: torch.optim.SGD(params, lr=0.01)}
    problem = settings.pop("problem", None) or mean_problem()
    return bilevel.solve(problem, train, valid, **(known | settings))


def summary(solution: bilevel.Solution) -> dict[str, Any]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in solution.history.rows]
    return {"hyper": dict(solution.hyper), "params": solution.params, "rows": rows}


# Shares of loaders


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(range(self.count - 1, -1, -1))


class Stream(IterableDataset[Any]):
    """Examples in an order that is drawn anew in every pass."""

    def __iter__(self) -> Any:
        yield from zip(torch.randperm(11).double(), range(11), strict=True)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(numbers(11), 2),
    "shuffled": lambda: DataLoader(numbers(11), 2, shuffle=True),
    "own generator": lambda: DataLoader(numbers(11), 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "whole batches": lambda: DataLoader(numbers(11), 2, shuffle=True, drop_last=True),
    "own sampler": lambda: DataLoader(numbers(11), 2, sampler=Backwards(11)),
    "own batch sampler": lambda: DataLoader(numbers(11), batch_sampler=_Pairs(BatchSampler(Backwards(11), 2, False))),
    "batches of the data set": lambda: DataLoader([torch.arange(3.0) + 3 * i for i in range(5)], batch_size=None),
    "iterable": lambda: DataLoader(Stream(), 2),
    "workers": lambda: DataLoader(numbers(11), 2, shuffle=True, num_workers=1, persistent_workers=True),
    "list": lambda: [(torch.arange(2.0) + 2 * i, 0) for i in range(5)],
    "one batch": lambda: [(torch.arange(4.0), 0)],
    "fewer examples than processes": lambda: DataLoader(numbers(1), 4),
}


class _Pairs:
    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def passes(name: str) -> list[list[list[float]]]:
    """The examples that this process is given in two passes, batch by batch; an empty one stands for nothing."""
    solver = bilevel.Solver(mean_problem(), method="implicit_identity")
    found = []
    loader = solver.share(LOADERS[name]())
    for _ in range(2):
        torch.rand(rank() + 1)  # what a process draws for itself changes nothing
        batches = []
        for batch in loader:
            values = batch.batch if isinstance(batch, Nothing) else batch
            values = values[0] if isinstance(values, list | tuple) else values
            assert len(values), "what stands for nothing can be computed with"
            batches.append([] if isinstance(batch, Nothing) else values.tolist())
        found.append(batches)
        try:
            assert len(loader) == len(batches)
        except TypeError:
            assert name == "iterable"
    return found


def all_passes() -> dict[str, Any]:
    return {name: passes(name) for name in LOADERS}


@pytest.mark.parametrize("count", [2, 3])
def test_every_example_belongs_to_one_process(count: int) -> None:
    shares = together(count, all_passes)
    for name in LOADERS:
        whole = sorted(x for batch in list(LOADERS[name]()) for x in torch.as_tensor(_values(batch)).tolist())
        for number in range(2):
            mine = [share[name][number] for share in shares]
            assert len({len(batches) for batches in mine}) == 1, f"{name}: processes make different numbers of steps"
            given = sorted(x for batches in mine for batch in batches for x in batch)
            if name == "whole batches":
                assert len(given) == len(set(given)) == 2 * count * (11 // (2 * count)), name
            else:
                assert given == whole, name
        if name in ("shuffled", "own generator", "iterable", "workers"):
            assert shares[0][name][0] != shares[0][name][1], f"{name}: each pass has an order of its own"
    # Together they take what one process with a larger batch would take.
    assert shares[0]["in order"][0][0] == [0.0, float(count)]
    assert shares[0]["own sampler"][0][0] == [10.0, 10.0 - count]
    assert shares[1]["own batch sampler"][0][0] == [8.0, 7.0]


def _values(batch: Any) -> Tensor:
    return batch[0] if isinstance(batch, list | tuple) else batch


def uneven() -> dict[str, Any]:
    found = {
        name: summary(solve(make(), make()))
        for name, make in LOADERS.items()
        if name not in ("shuffled", "own generator", "iterable", "workers", "whole batches", "batches of the data set")
    }
    own = [[(torch.arange(2.0) + i, 0) for i in range(3 - rank())] for _ in range(2)]
    found["split"] = summary(solve(Split(own[0]), Split(own[1]), epochs=3, steps=None))
    return found


def test_no_process_waits_for_another_with_fewer_batches() -> None:
    first, second = together(2, uneven)
    assert first == second


def test_one_batch_is_one_batch() -> None:
    """A process that has no examples counts as nothing."""
    found = together(2, uneven)[0]
    for name in ("one batch", "fewer examples than processes"):
        expected = summary(solve(LOADERS[name](), LOADERS[name]()))
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


def without_data() -> Any:
    """Losses that need no batch, a network in half precision, and a diagnosis."""
    target = bilevel.Problem(
        {"w": torch.zeros((), dtype=torch.float64)},
        inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        hyper={"target": bilevel.real(0.0)},
    )
    found = [summary(solve(None, None, problem=target, method=method)) for method in ("implicit_exact", "delta_stn")]
    torch.manual_seed(0)
    half = bilevel.Problem(
        nn.Linear(2, 2).bfloat16(),
        inner_loss=lambda m, h, b: F.cross_entropy(m(b[0]), b[1], reduction="none") + h["d"] * bilevel.l2(m.params),
        outer_loss=lambda m, h, b: F.cross_entropy(m(b[0]), b[1]),
        hyper={"d": bilevel.positive(0.1)},
    )
    loader = DataLoader(TensorDataset(torch.randn(9, 2).bfloat16(), torch.arange(9) % 2), 4 // size())
    solution = solve(loader, loader, problem=half, method="delta_stn")
    found.append(summary(solution))
    bilevel.diagnose(solution.solver, next(iter(loader)), next(iter(loader)))
    return found


def test_losses_without_data_and_half_precision() -> None:
    expected = without_data()
    first, second = together(2, without_data)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first[0], expected[0], rtol=1e-12, atol=1e-12)


# Random numbers


def draws() -> Any:
    torch.manual_seed(rank())  # the weights differ, until they are given those of process 0
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    seen: dict[str, Any] = {"rows": [], "masks": []}

    def inner(model: Any, hyper: Any, batch: Any) -> Any:
        x, y = batch
        seen["rows"].append((hyper["a"].detach().clone(), hyper["b"].detach().clone()))
        seen["masks"].append(torch.rand(4))
        return F.cross_entropy(model(x), y, reduction="none") + (hyper["a"] + hyper["b"]) * bilevel.l2(model.params)

    hyper = {"a": bilevel.positive(0.1), "b": bilevel.positive(0.1, shared=True)}
    problem = bilevel.Problem(
        net, inner_loss=inner, outer_loss=lambda m, h, b: F.cross_entropy(m(b[0]), b[1]), hyper=hyper
    )
    batch = (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    found = []
    for settings in ({}, {"perturb": "batch", "entropy": 1e-2}):
        solver = bilevel.Solver(problem, method=bilevel.DeltaSTN(**settings))
        start = {name: value.clone() for name, value in solver.params.items()}
        solver.inner_step(batch)  # with its checks
        seen["rows"].clear()
        seen["masks"].clear()
        solver.inner_step(batch)
        rows, masks = list(seen["rows"]), list(seen["masks"])
        solver.outer_step(batch, batch)
        found.append((start, rows, masks, solver.params, dict(solver.hyper), solver.module_state_dict))
    return found


def test_noise_of_a_batch_is_common_and_noise_of_examples_is_not() -> None:
    first, second = together(2, draws)
    for number, (mine, others) in enumerate(zip(first, second, strict=True)):
        torch.testing.assert_close(mine[0], others[0], rtol=0, atol=0)
        torch.testing.assert_close(mine[3:], others[3:], rtol=0, atol=0)
        assert not torch.equal(mine[2][0], others[2][0]), "each process draws masks of its own"
        for (a, b), (_, other_b) in zip(mine[1], others[1], strict=True):
            torch.testing.assert_close(b, other_b, rtol=0, atol=0)
            if number == 0:
                assert a.shape == (4,)
        changed = [a for a, _ in mine[1] if a.ndim == 0 or float(a.std()) > 0]
        others_changed = [a for a, _ in others[1] if a.ndim == 0 or float(a.std()) > 0]
        assert changed
        same = [torch.equal(a, b) for a, b in zip(changed, others_changed, strict=True)]
        assert all(same) if number else not any(same)


def statistics() -> Any:
    net = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1)).double()
    problem = bilevel.Problem(
        net,
        inner_loss=lambda model, hyper, batch: (model(batch) ** 2).mean() + hyper["d"] * bilevel.l2(model.params),
        outer_loss=lambda model, hyper, batch: (model(batch) ** 2).mean() + hyper["d"],
        hyper={"d": bilevel.positive(0.1)},
    )
    torch.manual_seed(5)
    x = torch.randn(7, 2, dtype=torch.float64)
    found = []
    for method in ("delta_stn", bilevel.Unrolled(steps=1), bilevel.Unrolled(steps=1, mode="forward")):
        solver = bilevel.Solver(problem, method=method)
        own = x[:5] if rank() == 0 else x[5:]
        if isinstance(method, str):
            solver.inner_step(own)
        else:
            solver.outer_step([own], own)
        state = solver.module_state_dict
        found.append((state["0.running_mean"], state["0.running_var"], int(state["0.num_batches_tracked"])))
    return x, found


def test_running_statistics_are_the_averages_of_the_processes() -> None:
    first, second = together(2, statistics)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    x, found = first
    variance = (5 * x[:5].var(0) + 2 * x[5:].var(0)) / 7
    for mean, var, batches in found:
        torch.testing.assert_close(mean, 0.1 * x.mean(0))
        torch.testing.assert_close(var, 0.9 + 0.1 * variance)
        assert batches == 1


# Decisions


def decisions() -> dict[str, str]:
    loader = DataLoader(numbers(8), 2)
    late = rank() == 1
    seen: list[int] = []

    def stop(event: bilevel.Round) -> bool:
        return late and event.index == 3

    def end(event: bilevel.Round) -> None:
        if late and event.index == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    found = {
        "callback": solve(loader, loader, steps=50, callbacks=[stop]),
        "signal": solve(loader, loader, steps=50, callbacks=[end, lambda event: seen.append(event.index)]),
        "time": solve(loader, loader, steps=10**6, time_budget=1e-9 if late else 1e9),
        "patience": solve(loader, loader, steps=10**6, patience=2, evaluate_every=1, inner_optimizer=_still),
    }
    assert seen == [1, 2]
    return {name: f"{solution.stopped} {len(solution.history)}" for name, solution in found.items()}


def _still(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.0)


def test_all_processes_end_together() -> None:
    for found in together(2, decisions):
        assert found.pop("patience").startswith("patience")
        assert found == {"callback": "callback 3", "signal": "terminated 2", "time": "time 1"}


def not_finite(policy: str) -> Any:
    values = torch.arange(12, dtype=torch.float64)
    values[5] = torch.nan  # belongs to process 1
    bad = DataLoader(TensorDataset(values, values), 4 // size())
    good = DataLoader(numbers(7), 4 // size())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            solution = solve(bad, good, on_nan=policy)
        except bilevel.DivergenceError as error:
            assert error.solution is not None
            return str(error).partition(" at inner step")[0], summary(error.solution)
        told = len([w for w in caught if w.category is bilevel.NotFiniteWarning])
        assert bool(told) == (rank() == 0)
        solution.solver.evaluate(good)
    return solution.solver.bad_steps, summary(solution)


@pytest.mark.parametrize("policy", ["skip", "rollback", "raise"])
def test_a_bad_example_of_one_process_is_bad_for_all(policy: str) -> None:
    expected = not_finite(policy)
    for found in together(2, not_finite, policy):
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)


def evaluations() -> dict[str, float]:
    solver = bilevel.Solver(mean_problem(), method="implicit_identity", on_nan="skip")
    found = {name: solver.evaluate(make()) for name, make in LOADERS.items() if name != "whole batches"}
    values = torch.arange(6, dtype=torch.float64)
    values[3] = torch.nan
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        found["bad"] = solver.evaluate(DataLoader(TensorDataset(values, values), 1))
    return found


def test_evaluation_counts_each_example_once() -> None:
    expected = evaluations()
    for found in together(3, evaluations):
        assert found == pytest.approx(expected, rel=1e-12)


def reads() -> list[int]:
    """How often an outer step waits for the device, where it is not judged at once."""
    found = []
    for method in ("delta_stn", "implicit_identity"):
        loader = DataLoader(numbers(8), 4)
        solver = bilevel.Solver(mean_problem(), method=method)
        solver.guard.finite.at_once = False
        batches = [next(iter(solver.share(loader))) for _ in range(2)]
        solver.inner_step(batches[0])
        solver.outer_step(*batches)
        seen: list[str] = []
        real = {name: getattr(Tensor, name) for name in ("tolist", "item", "__bool__", "__float__", "__int__")}
        with pytest.MonkeyPatch.context() as patch:
            for name, function in real.items():
                patch.setattr(Tensor, name, _noting(seen, name, function))
            solver.outer_step(*batches)
        found.append(len(seen))
    return found


def _noting(seen: list[str], name: str, function: Any) -> Any:
    def noted(tensor: Tensor) -> Any:
        seen.append(name)
        return function(tensor)

    return noted


def test_the_checksum_is_read_with_the_finite_checks() -> None:
    expected = reads()
    assert min(expected) >= 1
    for found in together(2, reads):
        assert found == expected


# Errors


def refusals() -> dict[str, str]:
    found = {}
    loader = DataLoader(numbers(8), 2)

    def message(name: str, function: Any) -> None:
        try:
            function()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def drift(event: bilevel.Round) -> None:
        with torch.no_grad():
            event.solver.vector.add_(1e-12 * rank())

    message("drift", lambda: solve(loader, loader, callbacks=[drift]))
    generator = torch.Generator().manual_seed(rank())
    message("order", lambda: solve(DataLoader(numbers(8), 2, shuffle=True, generator=generator), loader))
    message("batches", lambda: solve([(torch.arange(2.0) + rank(), 0)] * 4, loader))
    message("seed", lambda: solve(loader, loader, seed=rank()))
    message("method", lambda: solve(loader, loader, method="stn" if rank() else "delta_stn"))
    message("compile", lambda: solve(loader, loader, compile=True))
    sampler = DistributedSampler(numbers(8))
    message("sampler", lambda: solve(DataLoader(numbers(8), 2, sampler=sampler), loader))
    torch.manual_seed(rank())
    net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    hyper = {"d": bilevel.positive(0.1)}
    problem = bilevel.Problem(
        net,
        inner_loss=lambda model, hyper, batch: (model(batch[0].float()[:, None]) ** 2).mean() + hyper["d"],
        outer_loss=lambda model, hyper, batch: (model(batch[0].float()[:, None]) ** 2).mean(),
        hyper=hyper,
    )
    message("frozen", lambda: bilevel.Solver(problem))
    message("checked", lambda: solve(loader, loader, problem=problem, method="implicit_cg", distributed=False))
    return found


def test_what_would_go_wrong_is_refused_in_all_processes() -> None:
    for found in together(2, refusals):
        assert found["drift"].startswith("RuntimeError: the hyperparameters or weights differ between processes")
        for name in ("order", "batches"):
            assert found[name].startswith("RuntimeError: the processes read their data in different orders"), name
        assert found["seed"].startswith("ValueError: seed is 0 in process 0 and 1 in process 1")
        assert found["method"].startswith("ValueError: method is DeltaSTN(")
        assert found["compile"].startswith("ValueError: compile=True is for one process")
        assert "DistributedSampler" in found["sampler"] and "leave it out" in found["sampler"]
        assert found["frozen"].startswith("ValueError: inner: '0.weight' has other values in other processes")


def lonely_error() -> str:
    loader = DataLoader(numbers(8), 2)

    def fail(event: bilevel.Round) -> None:
        if rank() == 1:
            raise KeyError("mine")

    try:
        solve(loader, loader, steps=10**6, callbacks=[fail])
    except KeyError:
        return "mine"
    except RuntimeError as error:
        return " ".join(error.__notes__)
    return "nothing"


def test_an_error_of_one_process_ends_the_others() -> None:
    first, second = together(2, lonely_error)
    assert second == "mine"
    assert "lost the others" in first


def alone() -> Any:
    loader = DataLoader(numbers(8), 2)
    return summary(solve(loader, loader, seed=rank(), distributed=False, steps=3 + rank()))


def test_processes_may_be_on_their_own() -> None:
    first, second = together(2, alone)
    assert len(first["rows"]) == 3
    assert len(second["rows"]) == 4
    loader = DataLoader(numbers(8), 2)
    torch.testing.assert_close(first, summary(solve(loader, loader, steps=3)), rtol=0, atol=0)


# States


def rare(model: Any, hyper: Any, batch: Any) -> Any:
    """Reads some weights only for some examples, and one never."""
    x = batch[0]
    loss = ((model.params["w"] - x) ** 2).mean() + hyper["penalty"] * model.params["w"] ** 2
    return loss + (model.params["v"] - 1) ** 2 if 3.0 in x.tolist() else loss


def rarely() -> Any:
    problem = bilevel.Problem(
        {name: torch.ones((), dtype=torch.float64) for name in ("w", "v", "unused")},
        inner_loss=rare,
        outer_loss=lambda model, hyper, batch: ((model.params["w"] - batch[0]) ** 2).mean(),
        hyper={"penalty": bilevel.positive(0.5)},
    )
    loader = DataLoader(numbers(8), 4 // size())
    adam = lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1)  # noqa: E731
    unrolled = bilevel.Unrolled(steps=3, restart=True)
    return [
        summary(solve(loader, loader, problem=problem, inner_optimizer=adam)),
        summary(solve(loader, loader, problem=problem, inner_optimizer=adam, method=unrolled, inner_steps=0)),
    ]


def test_a_weight_without_a_gradient_stays_as_it_is() -> None:
    """In one process, an optimizer leaves it alone, weight decay included."""
    expected = rarely()
    assert float(expected[0]["params"]["unused"]) == 1.0
    first, second = together(2, rarely)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for run in first:
        assert float(run["params"]["unused"]) == 1.0
    assert float(first[0]["params"]["v"]) < 1.0


def initial() -> Any:
    problem = bilevel.Problem(
        {"w": torch.zeros((), dtype=torch.float64)},
        inner_loss=lambda model, hyper, batch: ((model.params["w"] - batch[0]) ** 2).mean(),
        outer_loss=lambda model, hyper, batch: ((model.params["w"] - batch[0] - 1) ** 2).mean(),
        hyper={"start": bilevel.real(0.3)},
        initial=lambda hyper: {"w": 2 * hyper["start"].to(torch.float64)},
    )
    loader = DataLoader(numbers(8), 4 // size())
    return [
        summary(solve(loader, loader, problem=problem, inner_steps=0, method=bilevel.Unrolled(restart=True, **kind)))
        for kind in ({"steps": 3}, {"steps": 3, "mode": "forward"}, {"steps": 4, "checkpoint": True})
    ]


def test_a_start_that_depends_on_hyperparameters_counts_once() -> None:
    expected = initial()
    for found in together(2, initial):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def kept(folder: str, name: str, stop: int | None) -> bilevel.Solution:
    """A run with a checkpoint, until it is stopped."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.3), nn.Tanh(), nn.Linear(3, 1)).double()
    problem = bilevel.Problem(
        net,
        inner_loss=lambda m, h, b: (m(b[0][:, None])[:, 0] - b[1]) ** 2 + h["d"] * bilevel.l2(m.params),
        outer_loss=lambda m, h, b: ((m(b[0][:, None])[:, 0] - b[1]) ** 2).mean(),
        hyper={"d": bilevel.positive(0.1)},
    )
    settings: dict[str, Any] = {"method": "delta_stn", "steps": 7, "warmup": 1, "inner_steps": 2, "progress": False}
    return bilevel.solve(
        problem,
        DataLoader(numbers(11), 2, shuffle=True),
        DataLoader(numbers(7), 2, shuffle=True),
        checkpoint=f"{folder}/{name}",
        callbacks=[lambda event: event.index == stop],
        **settings,
    )


def interrupted(folder: str) -> Any:
    whole = summary(kept(folder, "whole", None))
    for stop in (2, 5, None):
        parts = kept(folder, "parts", stop)
    kept(folder, "left", 3)
    return whole, summary(parts)


def taken_over(folder: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = kept(folder, "more", None)
    told = [str(w.message) for w in caught if w.category is bilevel.CheckpointWarning]
    return told, summary(solution), len(solution.history)


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for whole, parts in together(2, interrupted, str(tmp_path)):
        torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    # The file of two processes serves one process, and that of one serves three, with a warning.
    with pytest.warns(bilevel.CheckpointWarning, match="made by 2 processes and goes on with 1"):
        assert len(kept(str(tmp_path), "left", None).history) == 7
    kept(str(tmp_path), "more", 3)
    (told, first, rows), *others = together(3, taken_over, str(tmp_path))
    assert rows == 7
    assert "made by 1 process and goes on with 3" in told[0]
    for other in others:
        assert other[0] == []
        torch.testing.assert_close(other[1], first, rtol=0, atol=0)


def states(folder: str) -> Any:
    batch = (torch.arange(3.0).double() + rank(), 0)

    def steps(solver: bilevel.Solver) -> Any:
        for _ in range(2):
            solver.inner_step(batch)
            solver.outer_step(batch, batch)
        return solver.params, dict(solver.hyper)

    solver = bilevel.Solver(mean_problem(), method="centered_stn")
    steps(solver)
    state = solver.state_dict()
    solver.save(f"{folder}/state")
    expected = steps(solver)
    again = bilevel.Solver(mean_problem(), method="centered_stn")
    again.load_state_dict(state)
    found = steps(again)
    again.load(f"{folder}/state")
    solver.restart()
    return expected, found, steps(again), solver.params, [torch.rand(2) for _ in [again.streams["loss"].states]]


def test_states_of_solvers(tmp_path: Path) -> None:
    first, second = together(2, states, str(tmp_path))
    for expected, found, again, *_ in (first, second):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)
    torch.testing.assert_close(first[3], second[3], rtol=0, atol=0)
