"""Steps in which the weights learn alone."""

from functools import partial

import pytest
import torch
from problems import assert_equal, double, randn, sgd
from test_per_example import Net, batch_of, problem_of
from torch import nn

import bilevel
from bilevel import CenteredSTN, DeltaSTN, Problem, Solver

METHODS = [CenteredSTN, DeltaSTN]


def theta_of(solver):
    return [param.detach().clone() for param in solver.response.theta.parameters()]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_the_response_learns_at_every_so_many_steps_and_the_weights_at_each(method, every):
    """And so does what their optimizers remember."""
    solver = Solver(problem_of(Net()), method=method(response_every=every))
    for step in range(7):
        weights, theta = solver.params, theta_of(solver)
        memory = solver.optimizers["response"].state_dict()["state"]
        counts = [float(entry["step"]) for entry in memory.values()]
        solver.inner_step(batch_of(6, step))
        moved = any(not torch.equal(a, b) for a, b in zip(theta, theta_of(solver), strict=True))
        assert moved == solver.response.learns(step, solver.optimizers["response"])
        assert all(not torch.equal(value, weights[name]) for name, value in solver.params.items())
        after = [float(entry["step"]) for entry in solver.optimizers["response"].state_dict()["state"].values()]
        assert after == ([count + 1 for count in counts] if counts and moved else after if moved else counts)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_one_step_of_each_group_is_chosen(every):
    learns = DeltaSTN(response_every=every).bind(problem_of(Net())).learns
    for group in range(100):
        assert sum(learns(every * group + place, None) for place in range(every)) == 1


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 20])
def test_batches_in_a_fixed_order_train_the_response_equally_often(every, period):
    """With every second step, a loader of two batches would leave one of them out for ever."""
    learns = DeltaSTN(response_every=every).bind(problem_of(Net())).learns
    steps = 400 * period
    shares = [sum(learns(step, None) for step in range(batch, steps, period)) / 400 for batch in range(period)]
    assert max(abs(share - 1 / every) for share in shares) < 0.02


def test_a_run_goes_on_in_the_middle():
    """Whether the next step is one of the response is part of the state."""
    method = DeltaSTN(response_every=2)
    solvers = [Solver(problem_of(Net()), method=method, seed=4) for _ in range(2)]
    batches = [batch_of(6, seed) for seed in range(6)]
    for batch in batches:
        solvers[0].inner_step(batch)
    for batch in batches[:3]:
        solvers[1].inner_step(batch)
    resumed = Solver(problem_of(Net()), method=method, seed=4)
    resumed.load_state_dict(solvers[1].state_dict())
    for batch in batches[3:]:
        resumed.inner_step(batch)
    for one, other in zip(theta_of(solvers[0]), theta_of(resumed), strict=True):
        assert torch.equal(one, other)
    for name, value in solvers[0].params.items():
        assert torch.equal(value, resumed.params[name])


def linear(seed, read):
    """A linear network whose loss reads a hyperparameter as ``read`` says."""
    x, y = randn(seed, (5, 3), (5, 2))
    torch.manual_seed(seed)
    return Problem(
        nn.Linear(3, 2, dtype=torch.float64),
        inner_loss=lambda model, hyper, batch: (
            (model(batch[0]) - batch[1] - read(hyper["shift"])).square().mean(1)
            + hyper["decay"] * bilevel.l2(model.params)
        ),
        outer_loss=lambda model, hyper, batch: (model(batch[0]) - batch[1]).square().mean(),
        hyper={"shift": bilevel.real(double(0.3)), "decay": bilevel.positive(double(0.1))},
    ), (x, y)


def test_a_loss_that_needs_a_row_for_each_example_gets_it():
    """And gives the same as one that takes both shapes."""
    results = []
    for read in (lambda shift: shift[:, None], lambda shift: shift[..., None]):
        problem, batch = linear(1, read)
        solver = Solver(problem, method=CenteredSTN(response_every=2), inner_optimizer=sgd(0.05))
        for _ in range(5):
            solver.inner_step(batch)
        assert solver.response._needs_rows == (not results)
        results.append([*solver.params.values(), *theta_of(solver)])
    for one, other in zip(*results, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("optimizer", "every"),
    [
        (torch.optim.Adam, 2),
        (partial(torch.optim.AdamW, lr=1e-3), 2),
        (torch.optim.RMSprop, 2),
        (sgd(0.1), 1),
        (torch.optim.Rprop, 1),
    ],
)
def test_with_none_the_optimizer_of_the_response_decides(method, optimizer, every):
    """That of the weights does not matter. SGD, which learns slowly, is spared no step."""
    for inner, response in ((optimizer, None), (sgd(0.1), optimizer), (torch.optim.Adam, optimizer)):
        solver = Solver(
            problem_of(Net()), method=method(response_every=None), inner_optimizer=inner, response_optimizer=response
        )
        for step in range(4):
            theta, chosen = theta_of(solver), method(response_every=every).bind(problem_of(Net())).learns(step, None)
            solver.inner_step(batch_of(6, step))
            moved = any(not torch.equal(a, b) for a, b in zip(theta, theta_of(solver), strict=True))
            assert moved == chosen


def test_one_loss_for_both_parts_is_learned_at_every_step():
    solver = Solver(problem_of(Net()), method=CenteredSTN(objective="stn", response_every=3))
    for step in range(3):
        theta = theta_of(solver)
        solver.inner_step(batch_of(6, step))
        assert any(not torch.equal(a, b) for a, b in zip(theta, theta_of(solver), strict=True))


def test_accumulated_batches_spare_the_response_as_one_does():
    solver = Solver(problem_of(Net()), method=DeltaSTN(response_every=2))
    for step in range(2):
        theta = theta_of(solver)
        solver.inner_step(batch_of(6, step), batch_of(4, step + 9))
        moved = any(not torch.equal(a, b) for a, b in zip(theta, theta_of(solver), strict=True))
        assert moved == solver.response.learns(step, solver.optimizers["response"])


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_what_is_no_number_of_steps_is_refused(every):
    with pytest.raises((ValueError, TypeError), match=r"DeltaSTN: response_every must be"):
        DeltaSTN(response_every=every)


def test_by_default_and_in_the_paper_it_learns_at_every_step():
    assert {DeltaSTN().response_every, CenteredSTN().response_every, DeltaSTN.paper().response_every} == {1}
