"""Penalties of weights that differ from example to example, against the weights multiplied out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, assert_equal, randn

from bilevel import l1, l2
from bilevel.functional.penalties import weighted_l2
from bilevel.responding import Responding, Rows

SHAPES = st.sampled_from([(), (1,), (4,), (3, 1), (3, 5), (2, 3, 2), (4, 2, 3, 3)])


def responding(shape, count, seed, zeros=0.0):
    """A weight, a template of which a share of the entries is zero, and factors; all leaves."""
    weight, template, factor, chance = randn(seed, shape, shape, (count, shape[0] if shape else 1), shape)
    template = torch.where(chance.abs() < 1.5 * zeros, 0.0, template)
    leaves = [leaf.requires_grad_() for leaf in (weight, template, factor)]
    return leaves, Responding("0.weight", weight, Rows(factor, template))


def multiplied_out(weight, template, factor):
    """One weight for each example, by a loop."""
    if weight.ndim == 0:
        return [weight + f[0] * template for f in factor]
    return [torch.stack([w + f * r for w, f, r in zip(weight, fs, template, strict=True)]) for fs in factor]


@pytest.mark.parametrize("penalty", [l1, l2])
@given(shape=SHAPES, count=st.integers(1, 5), seed=SEEDS, zeros=st.sampled_from([0.0, 0.5, 2.0]))
def test_penalties_equal_those_of_the_weights_multiplied_out(penalty, shape, count, seed, zeros):
    """Values for each example, and gradients of any combination of them in the weight, the template and the factor."""
    leaves, weight = responding(shape, count, seed, zeros)
    slow = torch.stack([penalty([w]) for w in multiplied_out(*leaves)])
    fast = penalty({"0.weight": weight})
    assert fast.shape == (count,)
    assert_equal(fast.detach(), slow.detach(), 1e-10)
    (cotangent,) = randn(seed + 1, (count,))
    found, expected = (torch.autograd.grad(value @ cotangent, leaves) for value in (fast, slow))
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other, 1e-10)


@pytest.mark.parametrize("penalty", [l1, l2])
def test_plain_weights_add_the_same_to_every_example(penalty):
    """``model.params`` may hold both kinds."""
    _, weight = responding((3, 2), 4, 0)
    (plain,) = randn(1, (5,))
    for params in ({"a": weight, "b": plain}, [plain, weight]):
        assert_equal(penalty(params).detach(), (penalty([weight]) + penalty([plain])).detach(), 1e-12)
    assert_equal(penalty(weight).detach(), penalty([weight]).detach(), 0)


@given(count=st.integers(1, 4), seed=SEEDS)
def test_l1_takes_each_side_of_a_bend(count, seed):
    """At and beside the point where an entry changes its sign, and far away."""
    (weight, template, _), _ = responding((2, 3), count, seed)
    for factor in (0.0, 1e-3, 1e6, -1e6, *(-weight / template).detach()[0].tolist()):
        rows = Rows(torch.full((count, 2), factor, dtype=torch.float64), template)
        slow = torch.stack([l1([w]) for w in multiplied_out(weight, template, rows.factor)])
        assert_equal(l1([Responding("w", weight, rows)]).detach(), slow.detach(), 1e-10)


@given(shape=SHAPES, count=st.integers(1, 4), seed=SEEDS)
def test_the_change_is_that_of_the_loop(shape, count, seed):
    (weight, template, factor), entry = responding(shape, count, seed)
    change = entry.rows.change().detach()
    assert change.shape == (count, *shape)
    assert_equal(change, (torch.stack(multiplied_out(weight, template, factor)) - weight).detach(), 1e-12)


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (torch.sum, "sum"),
        (lambda x: torch.stack([x, x]), "stack"),
        (lambda x: x * 2, "arithmetic"),
        (lambda x: 2 * x, "arithmetic"),
        (lambda x: torch.ones(3) * x, "arithmetic"),
        (lambda x: torch.mul(torch.ones(3), x), "mul"),
        (lambda x: x > 0, "arithmetic"),
        (lambda x: 2**x, "arithmetic"),
        (lambda x: x + 1, "arithmetic"),
        (lambda x: -x, "arithmetic"),
        (lambda x: x**2, "arithmetic"),
        (lambda x: x[0], "arithmetic"),
        (list, "arithmetic"),
        (lambda x: x.sum(), "sum"),
        (lambda x: x.square(), "square"),
        (lambda x: x.detach(), "detach"),
    ],
)
def test_everything_else_is_refused(use, word):
    """By name of the weight, of the use, and of what to do."""
    _, weight = responding((3, 2), 4, 0)
    with pytest.raises(TypeError) as raised:
        use(weight)
    for part in ("'0.weight'", word, "perturb='batch'", "bilevel.l2"):
        assert part in str(raised.value)


@pytest.mark.parametrize("shape, count", [((3, 5), 4), ((1, 4), 2), ((2, 3, 2, 2), 3)])
def test_the_sum_of_squares_of_a_weight_that_grows_can_be_differentiated_twice(shape, count):
    weight, factor, along = randn(0, shape, (count, shape[0]), (count,))
    leaves = [weight.requires_grad_(), factor.requires_grad_()]
    sizes = [count, shape[0], *[1] * (len(shape) - 1)]

    def derivatives(values):
        first = torch.autograd.grad((values * along).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum((slope**3).sum() for slope in first), leaves)
        return values, *first, *second

    found = derivatives(l2([Responding("0.weight", weight, Rows(factor, weight))]))
    expected = derivatives((weight * (1 + factor.view(sizes))).square().flatten(1).sum(1))
    for one, other in zip(found, expected, strict=True):
        assert_equal(one.detach(), other.detach())
    with torch.no_grad():
        torch.testing.assert_close(l2([Responding("0.weight", weight, Rows(factor, weight))]), expected[0])


def test_a_weighted_sum_of_weights_that_grow_in_all_its_derivatives():
    """The function that a penalty of several weights is, against weights multiplied out; a row is zero."""
    first, second, factor, other, strength = randn(0, (3, 4), (2, 5), (6, 3), (6, 2), (6,))
    first[1] = 0.0
    leaves = [leaf.requires_grad_() for leaf in (first, second, factor, other, strength, torch.tensor(0.3).double())]

    def taken(first, second, factor, other, strength, number):
        grown = [Responding("w", w, Rows(f, w)) for w, f in ((first, factor), (second, other), (second, other))]
        return weighted_l2([strength, number], [[grown[0], grown[1]], [grown[2]]])

    def expected(first, second, factor, other, strength, number):
        one, two = (((1 + f)[:, :, None] * w).square().sum((1, 2)) for w, f in ((first, factor), (second, other)))
        return strength * (one + two) + number * two

    pairs = [(taken(*leaves), expected(*leaves))]
    for _ in range(2):
        found, wanted = (
            torch.autograd.grad(sum(value.pow(2).sum() for value in values), leaves, create_graph=True)
            for values in zip(*pairs, strict=True)
        )
        pairs = list(zip(found, wanted, strict=True))
        for one, other_one in pairs:
            assert_equal(one.detach(), other_one.detach())
