"""The weights at the center: the same slope as that of weights with their change added."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, assert_equal, randn

from bilevel.structure import at_center, make

SHAPES = {"matrix": (3, 2), "kernel": (2, 3, 2, 2), "vector": (4,), "scalar": (), "row": (1, 5), "channel": (1, 2, 3)}


@pytest.mark.parametrize("kind", ["gate", "rowwise", "dense", "mixed"])
@given(seed=SEEDS, h=st.integers(1, 3))
def test_the_slope_is_that_of_weights_with_their_change(kind, seed, h):
    torch.manual_seed(seed)  # for the start of rows
    values = dict(zip(SHAPES, randn(seed, *SHAPES.values()), strict=True))
    mixed = dict(zip(SHAPES, ("gate", "rowwise", "dense", "none", "gate", "dense"), strict=True))
    theta = make(values, mixed if kind == "mixed" else dict.fromkeys(SHAPES, kind), h, max_gigabytes=1.0)
    for index, part in enumerate(theta.parameters()):
        part.data = randn(seed + index + 1, part.shape)[0]
    weights = {name: value.requires_grad_() for name, value in values.items()}
    cotangents = dict(zip(SHAPES, randn(seed + 100, *SHAPES.values()), strict=True))
    del cotangents["kernel"]  # a weight that the loss does not read
    (hyper,) = randn(seed + 200, (h,))
    hyper.requires_grad_()
    moved = at_center(theta, hyper, weights)
    change = theta(hyper - hyper.detach(), weights)
    expected = {name: weight + change[name] if name in change else weight for name, weight in weights.items()}
    for name, weight in weights.items():
        assert torch.equal(moved[name], weight) and moved[name].data_ptr() == weight.data_ptr()
    inputs = [hyper, *weights.values()]
    found, right = (
        torch.autograd.grad(sum((of[n] * c).sum() for n, c in cotangents.items()), inputs, allow_unused=True)
        for of in (moved, expected)
    )
    for a, b in zip(found, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_equal(a, b, 1e-12)


def test_it_has_no_second_derivative_that_would_be_wrong():
    weights = {"w": torch.ones(2, requires_grad=True)}
    theta = make(weights, {"w": "gate"}, 1, max_gigabytes=1.0)
    hyper = torch.ones(1, requires_grad=True)
    (slope,) = torch.autograd.grad(at_center(theta, hyper, weights)["w"].square().sum(), hyper, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
