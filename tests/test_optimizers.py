"""Differentiable steps: the steps of ``torch.optim``, with the derivative of what these do."""

import copy

import pytest
import torch
from examples import assert_same
from problems import OPTIMIZERS, double, randn
from torch import optim

from bilevel.optimizers import DIFFERENTIABLE, DifferentiableOptimizer, clip, differentiable_entries

SHAPES = ((1, 2), (), (1,))


def plain(factory, steps, seed=0):
    """Weights and their optimizer after some steps on random gradients."""
    weights = [weight.requires_grad_() for weight in randn(seed, *SHAPES)]
    optimizer = factory(weights)
    for index in range(steps):
        for weight, gradient in zip(weights, randn(index + 1, *SHAPES), strict=True):
            weight.grad = gradient
        optimizer.step()
    return weights, optimizer


def detached(weights):
    return [weight.detach().clone() for weight in weights]


def test_every_optimizer_is_in_the_table():
    assert {factory.func for factory in OPTIMIZERS.values()} == set(DIFFERENTIABLE)


@pytest.mark.parametrize("used", [0, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_makes_the_same_steps_and_changes_nothing_it_was_given(name, used):
    weights, optimizer = plain(OPTIMIZERS[name], used)
    steps = DifferentiableOptimizer(optimizer, weights)
    new, state = detached(weights), steps.state()
    for index in range(used, used + 8):
        gradients = randn(index + 1, *SHAPES)
        given = (new, gradients, state)
        before = copy.deepcopy(given)
        new, state = steps.step(new, gradients, state)
        assert_same(given, before)
        assert all(weight.grad is None for weight in new)
    expected, reference = plain(OPTIMIZERS[name], used + 8)
    tolerance = 1e-7 if name == "NAdam" else 1e-12  # NAdam keeps a product in single precision
    torch.testing.assert_close(new, detached(expected), rtol=tolerance, atol=tolerance)
    steps.load([
        {key: torch.as_tensor(value).detach() for key, value in entry.items() if value is not None} for entry in state
    ])
    for weight, other in zip(weights, expected, strict=True):
        theirs = {key: torch.as_tensor(value) for key, value in reference.state[other].items() if value is not None}
        torch.testing.assert_close(dict(optimizer.state[weight]), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("used", [0, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_derivative_is_that_of_finite_differences(name, used):
    """Of the new weights and moments in the old ones and in the gradient, forward and reverse."""
    weights, optimizer = plain(OPTIMIZERS[name], used)
    steps = DifferentiableOptimizer(optimizer, weights)
    entries = [differentiable_entries(entry, w) for entry, w in zip(steps.state(), weights, strict=True)]
    moments = [value for entry in entries for value in entry.values()]

    def step(*inputs):
        rest = iter(inputs)
        old, gradients = ([next(rest) for _ in SHAPES] for _ in range(2))
        state = [full | {key: next(rest) for key in part} for full, part in zip(steps.state(), entries, strict=True)]
        new, after = steps.step(old, gradients, state)
        kept = [differentiable_entries(entry, w) for entry, w in zip(after, new, strict=True)]
        return *new, *(value for entry in kept for value in entry.values())

    inputs = [value.requires_grad_() for value in detached([*weights, *randn(99, *SHAPES), *moments])]
    assert torch.autograd.gradcheck(step, inputs, eps=1e-6, atol=1e-7, rtol=1e-6, check_forward_ad=True, fast_mode=True)


def test_the_first_momentum_depends_on_its_gradient():
    """Which ``torch.optim.SGD`` detaches, even if it is differentiable: two steps of w ← w − lr (g, then 0.9 g + g)."""
    weights, optimizer = plain(OPTIMIZERS["SGD, momentum"], 0)
    steps = DifferentiableOptimizer(optimizer, weights)
    gradients = [gradient.requires_grad_() for gradient in randn(1, *SHAPES)]
    new, state = steps.step(detached(weights), gradients, steps.state())
    new, _ = steps.step(new, gradients, state)
    (slope,) = torch.autograd.grad(new[1], gradients[1])
    torch.testing.assert_close(slope, double(-0.1 * 2.9))


@pytest.mark.parametrize("used", [0, 2])
@pytest.mark.parametrize(("name", "eps"), [("Adam", 1e-8), ("AdamW", 1e-8), ("RMSprop", 1e-8), ("Adagrad", 1e-10)])
def test_a_weight_without_a_gradient_so_far_has_a_derivative(name, eps, used):
    """At zero, g / (|g| + eps) has the slope 1 / eps; the square root in it must not make it NaN."""
    settings = {key: value for key, value in OPTIMIZERS[name].keywords.items() if key == "lr"}
    weight = double([1.0, 2.0]).requires_grad_()
    optimizer = OPTIMIZERS[name].func([weight], **settings, weight_decay=0)
    for _ in range(used):
        weight.grad = double([0.0, 1.0])
        optimizer.step()
    steps = DifferentiableOptimizer(optimizer, [weight])
    gradient = double([0.0, 1.0]).requires_grad_()
    (new,), _ = steps.step([weight.detach()], [gradient], steps.state())
    (slope,) = torch.autograd.grad(new.sum(), gradient)
    assert slope.isfinite().all()
    rate = 0.1 if "Adam" in name and used else 1.0  # Adam: the slope of the first moment, corrected for its bias
    rate = rate / (1 - 0.9 ** (used + 1)) if "Adam" in name and used else rate
    torch.testing.assert_close(slope[0], double(-settings["lr"] * rate / eps), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "kept"), [("AdamW", "exp_avg"), ("SGD", None)])
def test_weights_without_a_gradient_stay(name, kept):
    weights, optimizer = plain(OPTIMIZERS[name], 0)
    steps = DifferentiableOptimizer(optimizer, weights)
    new, state = steps.step(weights, [randn(1, (1, 2))[0], None, None], steps.state())
    assert torch.equal(new[1], weights[1]) and state[1] == {} and (kept is None or kept in state[0])
    assert not torch.equal(new[0], weights[0])


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_several_groups_in_another_order(momentum):
    a, b, c = (weight.requires_grad_() for weight in randn(0, *SHAPES))
    groups = [{"params": [c], "lr": 0.5, "maximize": True}, {"params": [b, a], "weight_decay": 0.1}]
    optimizer = optim.SGD(groups, lr=0.1, momentum=momentum)
    steps = DifferentiableOptimizer(optimizer, [a, b, c])
    new, state = detached([a, b, c]), steps.state()
    for index in range(3):
        gradients = randn(index, *SHAPES)
        new, state = steps.step(new, gradients, state)
        for weight, gradient in zip((a, b, c), gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(new, detached([a, b, c]), rtol=1e-12, atol=1e-12)


def test_a_learning_rate_may_be_a_tensor():
    weight = torch.ones(2, requires_grad=True)
    steps = DifferentiableOptimizer(optim.SGD([weight], lr=torch.tensor([0.5])), [weight])
    (new,), _ = steps.step([weight], [torch.ones(2)], steps.state())
    assert torch.equal(new, torch.full((2,), 0.5))


def test_it_follows_a_scheduler():
    weights, optimizer = plain(OPTIMIZERS["SGD"], 0)
    steps = DifferentiableOptimizer(optimizer, weights)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    for rate in (0.1, 0.01, 0.001):
        new, _ = steps.step([torch.zeros_like(weight) for weight in weights], randn(1, *SHAPES), steps.state())
        torch.testing.assert_close(new[1], -rate * randn(1, *SHAPES)[1])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    "settings", [{"foreach": True}, {"fused": True}, {"differentiable": True}, {"capturable": False}]
)
def test_how_the_users_steps_are_computed_does_not_matter(settings):
    weights, optimizer = plain(lambda params: optim.Adam(params, lr=0.05, **settings), 0)
    other, reference = plain(OPTIMIZERS["Adam"], 0)
    twins = [DifferentiableOptimizer(one, its) for one, its in ((optimizer, weights), (reference, other))]
    ours, theirs = (steps.step(detached(weights), randn(1, *SHAPES), steps.state())[0] for steps in twins)
    assert_same(ours, theirs)


class MySGD(optim.SGD):
    """Might do anything in its step."""


@pytest.mark.parametrize("kind", [optim.Rprop, optim.ASGD, MySGD])
def test_others_are_refused(kind):
    weights, optimizer = plain(kind, 0)
    with pytest.raises(
        TypeError, match=rf"inner_optimizer made a {kind.__name__}, .*SGD, Adam, AdamW, RMSprop, Adagrad"
    ):
        DifferentiableOptimizer(optimizer, weights)


def test_the_fresh_state_is_not_the_live_one():
    """Adagrad begins with a state, and its plain steps write into it."""
    weights, optimizer = plain(OPTIMIZERS["Adagrad"], 0)
    steps = DifferentiableOptimizer(optimizer, weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all(not entry["sum"].any() and entry["step"] == 0 for entry in steps.fresh)


@pytest.mark.parametrize("limit", [None, 1e-3, 1e3])
def test_clipping_is_that_of_torch(limit):
    gradients = [*randn(0, *SHAPES), None]
    clipped, (norm,) = clip(gradients, limit)
    apart = torch.stack(clip(gradients, limit, joint=False)[1])
    weights = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    for weight, gradient in zip(weights, gradients, strict=False):
        weight.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(weights, torch.inf if limit is None else limit)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(apart.norm(), expected)
    torch.testing.assert_close(clipped[:3], [weight.grad for weight in weights])
    assert clipped[3] is None and not norm.requires_grad


def test_clipping_zero_and_half_precision():
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(clip([zero], 1.0)[0][0].sum(), zero)
    torch.testing.assert_close(slope, torch.ones(3).double())
    big = torch.full((100,), 1e4, dtype=torch.float16)
    (clipped,), (norm,) = clip([big], 1.0)
    assert clipped.dtype == torch.float16 and clipped.isfinite().all()
    torch.testing.assert_close(norm, torch.tensor(1e5))
