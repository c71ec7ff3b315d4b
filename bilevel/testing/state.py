"""Checks: seeds, saved states, and that nothing of the user's changes."""

from __future__ import annotations

import copy
import io

import torch

from bilevel.loop import solve
from bilevel.testing.assertions import expect, same
from bilevel.testing.case import Case, Network
from bilevel.testing.probes import flat, run
from bilevel.testing.registry import check


@check
def _same_seed_gives_the_same_run(case: Case) -> None:
    first, second = (case.solver(case.network(), seed=3) for _ in range(2))
    for solver in (first, second):
        run(solver, case.batch())
    expect(
        same(first.state_dict(), second.state_dict()),
        "two runs with one seed differ: is every operation repeatable? torch.linalg.lstsq is not, to the last bit",
    )


@check
def _another_seed_gives_another_run(case: Case) -> None:
    first, second = (case.solver(case.network(), seed=seed) for seed in (3, 4))
    for solver in (first, second):
        run(solver, case.batch())
    expect(not torch.equal(flat(first.params), flat(second.params)), "the seed has no effect on dropout")


@check
def _state_dict_continues_bit_for_bit(case: Case) -> None:
    first, second = (
        case.solver(case.network(), inner_optimizer=torch.optim.Adam, outer_clip=1.0, seed=s) for s in (1, 2)
    )
    run(first, case.batch())
    second.load_state_dict(first.state_dict())
    for solver in (first, second):
        run(solver, case.batch())
    expect(same(first.state_dict(), second.state_dict()), "the continued run differs")


@check
def _state_dict_survives_a_safe_file(case: Case) -> None:
    solver, file = case.trained(), io.BytesIO()
    torch.save(solver.state_dict(), file)
    file.seek(0)
    expect(same(torch.load(file, weights_only=True), solver.state_dict()), "the state changed in the file")


@check
def _state_dict_is_a_copy(case: Case) -> None:
    solver = case.trained()
    state = solver.state_dict()
    kept = copy.deepcopy(state)
    run(solver, None)
    expect(same(state, kept), "a state_dict taken earlier changed with the run")


@check
def _global_random_state_is_untouched(case: Case) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(20201117)
        before = torch.get_rng_state()
        run(case.solver(case.network()), case.batch())
        solve(case.quadratic(), method=case.method_for(case.quadratic()), steps=2, progress=False)
        expect(torch.equal(before, torch.get_rng_state()), "the user's random state changed")


@check
def _users_module_is_untouched(case: Case) -> None:
    net = Network()
    before = copy.deepcopy(net.to(case.device, torch.float64).state_dict())
    run(case.solver(case.network(net=net)), case.batch())
    expect(same(before, net.state_dict()), "parameters or buffers of the user's module changed")
    expect(all(p.grad is None for p in net.parameters()), "gradients were left in the user's module")


@check
def _users_tensors_are_untouched(case: Case) -> None:
    inner = {"w": torch.ones(3, dtype=torch.float64, device=case.device)}
    run(case.solver(case.quadratic(inner=inner)), None)
    expect(bool((inner["w"] == 1).all()) and not inner["w"].requires_grad, "the user's tensor changed")


@check
def _users_batch_is_untouched(case: Case) -> None:
    batch = case.batch()
    before = tuple(part.clone() for part in batch)
    run(case.solver(case.network()), batch)
    expect(same(before, batch), "the batch changed")
