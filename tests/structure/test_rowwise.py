"""Where responses by rows start."""

from functools import partial

import pytest
import torch
from torch import nn

import bilevel
from bilevel.structure.rowwise import Rowwise

METHODS = {"stn": bilevel.STN, "centered_stn": bilevel.CenteredSTN, "delta_stn": bilevel.DeltaSTN}


@pytest.mark.parametrize("size", [1, 3, 50])
def test_nothing_responds_at_first_and_rows_start_along_the_weight(size):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 400, 3).double().to(memory_format=torch.channels_last)
    layer.weight.data[7] = 0
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    theta = Rowwise(weights, size)
    assert not any(change.any() for change in theta(torch.ones(size).double(), weights).values())
    assert [factor.shape for factor in theta.factors] == [(400, size), (400, size)]
    template, shift = theta.templates
    assert template.is_contiguous(memory_format=torch.channels_last)
    same = torch.arange(400) != 7
    assert torch.equal(template[same], weights["weight"][same])
    assert torch.equal(shift, torch.ones(400).double())
    assert 0 < template[7].abs().max() <= 1 / 6  # 36 inputs: as an ordinary layer would


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["rowwise", "gate"])
@pytest.mark.parametrize("zero", ["a row", "the last layer", "a bias"])
def test_every_row_of_every_weight_learns_to_respond_wherever_it_starts(method, structure, zero):
    """What starts at zero responds as soon as the weight has left zero."""

    def loss(model, hyper, batch):
        return (model(batch[0]) - batch[1]).square().mean(-1) + hyper["decay"] * bilevel.l2(model.params)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        {"a row": net[0].weight[1], "the last layer": net[2].weight, "a bias": net[0].bias}[zero].zero_()
    problem = bilevel.Problem(net, inner_loss=loss, outer_loss=loss, hyper={"decay": bilevel.positive(0.1)})
    sgd = partial(torch.optim.SGD, lr=0.1)
    solver = bilevel.Solver(problem, method=METHODS[method](structure=structure), inner_optimizer=sgd)
    batch = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    for _ in range(20):
        solver.inner_step(batch)
    change = solver.response.change(torch.ones(1).double())
    assert change.keys() == solver.params.keys()
    for name, value in change.items():
        assert (value.flatten(1).abs().amax(1) > 0).all() if value.ndim > 1 else (value != 0).all(), name


def test_both_factors_learn_from_the_second_step_on():
    torch.manual_seed(0)
    weights = {"w": torch.randn(3, 4).double()}
    theta = Rowwise(weights, 2)
    optimizer = torch.optim.SGD(theta.parameters(), lr=0.1)
    start = [parameter.detach().clone() for parameter in theta.parameters()]
    for _ in range(2):
        loss = (theta(torch.ones(2).double(), weights)["w"] - 1).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all((new != old).all() for new, old in zip(theta.parameters(), start, strict=True))


def test_a_response_that_does_not_fit_is_refused_before_it_is_allocated():
    """200,000 hyperparameters and 40,000 rows: 32 GB. Nothing is on the meta device after an allocation elsewhere."""
    virtual = {"w": torch.empty(40_000, 10, device="meta"), "b": torch.empty((), device="meta")}
    message = (
        r"40,001 rows of 400,001 weights to 200,000 hyperparameters takes 32.0 GB.*implicit or unrolled.*max_gigabytes"
    )
    with pytest.raises(MemoryError, match=message):
        Rowwise(virtual, 200_000, max_gigabytes=4.0)
    Rowwise(virtual, 10, max_gigabytes=4.0)


def test_factors_of_too_many_examples_are_refused_before_they_are_allocated():
    weights = {"w": torch.ones(1000, 2)}
    theta = Rowwise(weights, 3, max_gigabytes=1.0)
    shifts = torch.zeros(1, 3).expand(300_000, 3)
    with pytest.raises(
        MemoryError, match=r"300,000 examples takes 1.2 GB.*1,000 rows.*smaller batches.*perturb='batch'"
    ):
        theta.rows(shifts, weights)
    assert theta.rows(shifts[:7], weights)["w"].factor.shape == (7, 1000)
    assert theta.rows(shifts[0], weights)["w"].factor.shape == (1000,)
