"""What solve does where it is not told."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from examples import batches, make_problem
from examples import solve as short

import bilevel
from bilevel.loop.defaults import plan

OWN = partial(torch.optim.SGD, lr=0.5)


def solve(**changes):
    """On four batches, with the outer optimizer that solve chooses."""
    return short(**{"outer_optimizer": None} | changes)


@pytest.mark.parametrize(
    ("steps", "epochs", "batches", "per_round", "limit", "rounds"),
    [
        (None, None, None, 5, 1000, 1000),
        (None, None, 4, 5, 1000, 1000),
        (None, None, 5000, 5, 10_000, 10_000),  # ten passes
        (300, None, 5000, 5, 300, 300),
        (None, 20, 79, 5, None, 316),
        (None, 20, None, 5, None, None),  # a loader without a length
    ],
)
def test_the_length_of_a_run(steps, epochs, batches, per_round, limit, rounds):
    found = plan(steps, epochs, batches, per_round)
    assert (found.limit, found.rounds) == (limit, rounds)


@pytest.mark.parametrize(("steps", "rate"), [(1000, 0.02), (316, 20 / 316), (20, 0.2), (100_000, 0.003)])
def test_the_outer_learning_rate_lets_the_hyperparameters_travel_as_far_in_any_run(steps, rate):
    made = plan(steps, None, None, 5).outer_optimizer([torch.zeros(1, requires_grad=True)])
    assert isinstance(made, torch.optim.Adam)
    assert made.param_groups[0]["lr"] == pytest.approx(rate)
    assert made.param_groups[0]["betas"] == (0.9, 0.99)


def test_the_optimizer_of_a_run_is_that_of_its_length_and_yours_is_kept():
    rates = {}
    for name, options in {"short": {"steps": 40}, "own": {"steps": 40, "outer_optimizer": OWN}}.items():
        group = solve(**options).solver.optimizers["hyper"].param_groups[0]
        rates[name] = group["lr"]
    assert rates == {"short": 0.2, "own": 0.5}
    by_epochs = solve(epochs=30, inner_steps=2)  # 4 batches: 60 rounds
    assert by_epochs.solver.optimizers["hyper"].param_groups[0]["lr"] == pytest.approx(0.2)
    assert len(by_epochs.history) == 60


@pytest.mark.parametrize(("options", "warm"), [({}, 4), ({"warmup": 0}, 0), ({"warmup": 7}, 7)])
def test_a_tenth_of_the_rounds_is_warm_up(options, warm):
    history = solve(steps=40, **options).history
    assert np.isnan(history["outer_loss"]).sum() == warm


def test_methods_that_return_to_the_start_have_no_warm_up():
    method = bilevel.Unrolled(steps=2, restart=True)
    assert not np.isnan(solve(method=method, steps=20, inner_steps=0).history["outer_loss"]).any()


def test_short_passes_are_not_all_followed_by_a_validation_pass():
    history = solve(steps=450, inner_steps=4, method="implicit_identity").history  # each round is a pass
    assert (~np.isnan(history["validation_loss"])).sum() == 450 // math.ceil(450 / 200)
    few = solve(steps=20, inner_steps=4).history
    assert not np.isnan(few["validation_loss"]).any()


def test_a_run_that_is_made_longer_keeps_its_warm_up_and_learning_rate(tmp_path):
    file = tmp_path / "run.pt"
    first = solve(steps=30, checkpoint=file)
    longer = solve(steps=60, checkpoint=file)
    assert np.isnan(longer.history["outer_loss"]).sum() == 3
    rates = [run.solver.optimizers["hyper"].param_groups[0]["lr"] for run in (first, longer)]
    assert rates[0] == rates[1]


def test_patience_waits_for_the_warm_up():
    """Without training, no validation pass is better than the first."""
    still = partial(torch.optim.SGD, lr=0.0)
    run = solve(steps=100, evaluate_every=1, patience=3, inner_optimizer=still)
    assert run.stopped == "patience"
    assert len(run.history) == 10 + 3


@pytest.mark.parametrize("value", [-1, 2.5, "3", 0.0])
def test_a_bad_warm_up_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="warmup"):
        bilevel.solve(make_problem(), batches(seed=0), batches(seed=1), warmup=value, steps=3)
