"""Mixed precision and memory formats where one perturbation serves a whole batch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel
from bilevel import DeltaSTN

METHODS = {structure: DeltaSTN(scale=0.3, structure=structure, perturb="batch") for structure in ("dense", "rowwise")}
sgd = partial(torch.optim.SGD, lr=0.1)


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    )


def inner_loss(model, hyper, batch):
    x, y = batch
    return F.cross_entropy(model(x), y) + hyper["decay"] * bilevel.l2(model.params)


def outer_loss(model, hyper, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def trained(method, *, autocast=False, memory_format=torch.contiguous_format):
    """The solver after some steps, and its losses."""
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0)).to(memory_format=memory_format)
    batch = (x, (x.flatten(1)[:, -1] > 0).long())
    net = convolutions().to(memory_format=memory_format)
    problem = bilevel.Problem(
        net, inner_loss=inner_loss, outer_loss=outer_loss, hyper={"decay": bilevel.positive(0.01)}
    )
    solver = bilevel.Solver(problem, method=method, inner_optimizer=sgd, outer_optimizer=sgd)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = [solver.inner_step(batch) for _ in range(4)]
        losses.append(solver.outer_step(batch, batch).loss)
    return solver, torch.stack([loss.float() for loss in losses])


@pytest.mark.parametrize("structure", METHODS)
def test_autocast_is_close_to_single_precision(structure):
    """Weights, responses and hyperparameters stay in float32."""
    (full, one), (half, other) = (trained(METHODS[structure], autocast=flag) for flag in (False, True))
    torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)
    assert not torch.equal(one, other)
    assert {value.dtype for value in half.response.parameters()} == {torch.float32}
    for a, b in zip(full.response.parameters(), half.response.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.03)


@pytest.mark.parametrize("structure", METHODS)
def test_channels_last_is_the_same_network(structure):
    one, other = (
        trained(METHODS[structure], memory_format=memory_format)[0]
        for memory_format in (torch.contiguous_format, torch.channels_last)
    )
    assert other.response.inner.weights[0].is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(one.response.parameters(), other.response.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
