"""A solver's random streams: its own, reproducible, and never the user's."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import assert_same, inner_loss, make_problem, make_solver, network, shortened, solve
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.rng import Stream


def noisy(model, hyper, batch):
    """A loss that draws random numbers of its own."""
    return inner_loss(model, hyper, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def dropout_problem(inner_loss=noisy):
    return make_problem(network(nn.Dropout(0.5)), inner_loss=inner_loss)


def shuffled(seen=None):
    """A DataLoader that shuffles; the first input of every batch goes to ``seen``."""
    data = TensorDataset(torch.arange(60.0).reshape(20, 3), torch.zeros(20, 1))

    def collate(examples):
        x, y = torch.utils.data.default_collate(examples)
        if seen is not None:
            seen.append(x[0, 0].item())
        return x / 60, y

    return DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate)


def global_states():
    numpy = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state(), numpy["key"].tolist(), numpy["pos"], random.getstate()


def outcome(**changes):
    solution = solve(dropout_problem(), shuffled(), shuffled(), steps=4, **changes)
    return solution.hyper, solution.params, solution.solver.state_dict(), solution.history["outer_loss"].tolist()


def test_a_stream_continues_where_it_was_saved():
    stream = Stream(1, torch.device("cpu"))
    with stream():
        torch.rand(3)
    other = Stream(2, torch.device("cpu"))
    other.load_state_dict(stream.state_dict())
    with stream():
        expected = torch.rand(3)
    with other():
        assert torch.equal(torch.rand(3), expected)


def test_a_stream_is_where_it_was_when_its_block_raises():
    stream = Stream(1, torch.device("cpu"))
    before, outside = stream.state_dict(), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt), stream():
        torch.rand(3)
        raise KeyboardInterrupt
    assert_same(stream.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), outside)


@pytest.mark.parametrize("method", sorted(bilevel.METHODS))
def test_the_seed_decides_everything_and_the_global_state_nothing(method):
    torch.manual_seed(1)
    method = shortened(bilevel.METHODS[method])
    first = outcome(method=method, seed=7)
    torch.manual_seed(2)
    assert_same(outcome(method=method, seed=7), first)
    other = outcome(method=method, seed=8)
    assert not torch.equal(other[1]["0.weight"], first[1]["0.weight"])
    assert other[3] != first[3]


def test_every_method_sees_the_same_batches_under_one_seed():
    orders = {}
    for name, method in bilevel.METHODS.items():
        seen = ([], [])
        unrolled = isinstance(method, bilevel.Unrolled)  # makes the two inner steps of a round itself
        changes = (
            {"method": replace(method, steps=2, truncate=None), "inner_steps": 0} if unrolled else {"method": method}
        )
        solve(dropout_problem(), *map(shuffled, seen), steps=6, seed=3, evaluate_every=2, **changes)
        orders[name] = seen
    first = orders.pop("stn")
    assert len(set(first[0])) > 5
    assert all(order == first for order in orders.values())


def test_two_passes_are_shuffled_differently():
    seen = []
    solve(dropout_problem(), shuffled(seen), steps=5, inner_steps=2)
    assert seen[:5] != seen[5:10]


def raise_at(number, error):
    calls = iter(range(10**9))

    def loss(model, hyper, batch):
        value = noisy(model, hyper, batch)
        if next(calls) == number:
            raise error
        return value

    return loss


@pytest.mark.parametrize(
    "error", [None, ValueError("mine"), KeyboardInterrupt()], ids=["success", "error", "interrupt"]
)
def test_the_random_state_of_the_user_is_untouched(error):
    before = global_states()
    loss = noisy if error is None else raise_at(5, error)
    try:
        solve(dropout_problem(loss), shuffled(), shuffled(), steps=3, evaluate_every=1)
    except ValueError as caught:
        assert caught is error
    assert_same(global_states(), before)


@pytest.mark.usefixtures("unchecked")
def test_numpy_and_random_stay_the_users_own():
    def loss(model, hyper, batch):
        drawn.append((np.random.rand(), random.random()))
        return inner_loss(model, hyper, batch)

    drawn = []
    np.random.seed(0)
    random.seed(0)
    solve(make_problem(inner_loss=loss), steps=1, method="stn")
    np.random.seed(0)
    random.seed(0)
    assert drawn == [(np.random.rand(), random.random()) for _ in drawn]


def test_evaluation_has_a_stream_of_its_own():
    solver = make_solver(dropout_problem())
    before = solver.state_dict()
    solver.evaluate(shuffled())
    after = solver.state_dict()
    assert not torch.equal(after["streams"].pop("evaluation")[0], before["streams"].pop("evaluation")[0])
    assert_same(after, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_covers_the_device_and_the_cpu():
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_rng_state(device), torch.get_rng_state()
    draws = []
    for _ in range(2):
        with Stream(1, device)():
            draws.append((torch.rand(3), torch.rand(3, device=device)))
    assert_same(draws[0], draws[1])
    assert_same((torch.cuda.get_rng_state(device), torch.get_rng_state()), before)
