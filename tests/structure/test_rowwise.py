"""Where responses by rows start."""

import pytest
import torch
from torch import nn

import bilevel
from bilevel.structure.rowwise import Rowwise

METHODS = {"stn": bilevel.STN, "centered_stn": bilevel.CenteredSTN, "delta_stn": bilevel.DeltaSTN}


@pytest.mark.parametrize("size", [1, 3, 50])
def test_nothing_responds_at_first_and_the_factors_have_variance_one_over_h(size):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 400, 3).double().to(memory_format=torch.channels_last)
    theta = Rowwise(dict(layer.named_parameters()), size)
    assert not any(change.any() for change in theta(torch.ones(size).double()).values())
    assert [factor.shape for factor in theta.factors] == [(400, size), (400, size)]
    assert theta.templates[0].is_contiguous(memory_format=torch.channels_last)
    # Products with a shift of norm √h, 800 of them, have the standard deviation 1 ± 0.025.
    products = torch.cat(theta.factors).detach() @ torch.ones(size).double()
    assert abs(float(products.square().mean().sqrt()) - 1) < 0.1


@pytest.mark.parametrize("method", METHODS)
def test_what_the_factors_are_multiplied_with_has_about_length_one_in_every_method(method):
    """A perturbation, of norm √h at scale 1; or, in an STN, all of λ with it."""

    def loss(model, hyper, batch):
        return model(batch).square().mean() + hyper["decay"].sum()

    torch.manual_seed(0)
    net, decay = nn.Linear(2, 500).double(), bilevel.positive([1e-4, 1e-4])
    problem = bilevel.Problem(net, inner_loss=loss, outer_loss=loss, hyper={"decay": decay})
    response = METHODS[method](structure="rowwise").bind(problem)
    center = problem.initial_hyper() if method == "stn" else torch.zeros(2).double()
    shifts = center + torch.randn(100, 2).double()
    products = torch.cat(response.theta.rowwise.factors).detach() @ shifts.T
    assert abs(float(products.square().mean().sqrt()) - 1) < 0.15


def test_both_factors_learn_from_the_second_step_on():
    torch.manual_seed(0)
    theta = Rowwise({"w": torch.randn(3, 4).double()}, 2)
    optimizer = torch.optim.SGD(theta.parameters(), lr=0.1)
    start = [parameter.detach().clone() for parameter in theta.parameters()]
    for _ in range(2):
        loss = (theta(torch.ones(2).double())["w"] - 1).square().sum()
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
    theta = Rowwise({"w": torch.empty(1000, 2)}, 3, max_gigabytes=1.0)
    shifts = torch.zeros(1, 3).expand(300_000, 3)
    with pytest.raises(
        MemoryError, match=r"300,000 examples takes 1.2 GB.*1,000 rows.*smaller batches.*perturb='batch'"
    ):
        theta.rows(shifts)
    assert theta.rows(shifts[:7])["w"].factor.shape == (7, 1000)
    assert theta.rows(shifts[0])["w"].factor.shape == (1000,)
