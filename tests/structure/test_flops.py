"""What a step costs, in multiples of the forward and backward pass of plain training; counted, not timed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bilevel

BATCH = 128


def mlp():
    sizes = [(784, 1200), (1200, 1200), (1200, 1200)]
    hidden = [layer for pair in sizes for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1200, 10)), torch.randn(BATCH, 784)


def simple_cnn():
    """Two convolutions of 16 and 32 filters with pooling, then 32 * 7 * 7 = 1568 hidden units."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1568, 1568),
        nn.ReLU(),
        nn.Linear(1568, 10),
    )
    return net, torch.randn(BATCH, 1, 28, 28)


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def costs(method, make):
    """An inner and an outer step over plain training."""
    torch.manual_seed(0)
    net, x = make()
    batch = x, torch.arange(BATCH) % 10
    plain = flops(lambda: F.cross_entropy(net(batch[0]), batch[1]).backward())

    def loss(model, hyper, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + hyper["decay"].sum(-1)

    hyper = {"decay": bilevel.positive([1e-3] * 3)}
    problem = bilevel.Problem(net, inner_loss=loss, outer_loss=loss, hyper=hyper)
    solver = bilevel.Solver(problem, method=method)
    solver.inner_step(batch)  # the first step of each level also checks what it is given
    solver.outer_step(batch, batch)
    return flops(lambda: solver.inner_step(batch)) / plain, flops(lambda: solver.outer_step(batch, batch)) / plain


def floor(layers, extra):
    """Products per layer over those of plain training, which makes three, and two in the first layer.

    A Δ-STN adds to them, with :math:`w_0` frozen: the value again, R x, and the gradient of R; where the input has a
    tangent, also its product with W and that product's gradient. An STN doubles the products of plain training.
    """
    first, *rest = layers
    plain = 2 * first + 3 * sum(rest)
    return {"delta_stn": (plain + 3 * first + 5 * sum(rest)) / plain, "stn": 2.0}[extra]


MLP_LAYERS = [784 * 1200, 1200 * 1200, 1200 * 1200, 1200 * 10]
CNN_LAYERS = [16 * 25 * 28 * 28, 32 * 16 * 25 * 14 * 14, 1568 * 1568, 1568 * 10]


ROWS = {"structure": "rowwise", "perturb": "example"}
METHODS = {"delta_stn": bilevel.DeltaSTN(**ROWS), "stn": bilevel.STN(**ROWS)}


@pytest.mark.parametrize(("method", "inner", "outer"), [("delta_stn", 2.70, 2.0), ("stn", 2.05, 2.0)])
def test_the_mlp_of_the_paper(method, inner, outer):
    found = costs(METHODS[method], mlp)
    assert found[0] <= inner
    assert found[1] <= outer
    assert found[0] == pytest.approx(floor(MLP_LAYERS, method), rel=0.01)


@pytest.mark.parametrize("method", ["delta_stn", "stn"])
def test_the_cnn_of_the_paper_is_at_its_floor(method):
    found = costs(METHODS[method], simple_cnn)
    assert found[0] == pytest.approx(floor(CNN_LAYERS, method), rel=0.1)
    assert found[1] <= 2.0


@pytest.mark.parametrize("learned", [False, True])
def test_an_outer_step(learned):
    """Perturbed for each example only if the scale is learned."""
    method = bilevel.DeltaSTN(entropy=1e-3 if learned else None, **ROWS)
    assert costs(method, mlp)[1] <= 2.0
