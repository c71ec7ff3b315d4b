"""Penalties, and dropout whose rate is a tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, double, randn

from bilevel import l1, l2
from bilevel.functional import dropout


@pytest.fixture(autouse=True)
def seeded():
    """Dropout draws from torch's global stream, which outside a solver is the user's."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        yield


@given(seed=SEEDS)
def test_penalties_are_plain_sums(seed):
    """Σ|w| and Σw², no factor one half, over a mapping, a list or a generator."""
    weights = randn(seed, (3, 2), (4,), ())
    flat = torch.cat([weight.flatten() for weight in weights]).tolist()
    for params in (dict(zip("abc", weights, strict=True)), weights, iter(weights)):
        kept = params if isinstance(params, dict) else list(params)
        assert l1(kept).item() == pytest.approx(sum(abs(value) for value in flat), rel=1e-12)
        assert l2(kept).item() == pytest.approx(sum(value**2 for value in flat), rel=1e-12)


def test_penalties_have_the_gradients_of_textbooks():
    """2w and sign(w)."""
    w = double([1.5, -2.0]).requires_grad_()
    assert torch.autograd.grad(l2([w]), w)[0].tolist() == [3.0, -4.0]
    assert torch.autograd.grad(l1([w]), w)[0].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["float", "tensor", "per example"])
def test_dropout_zeroes_at_its_rate_and_keeps_the_mean(rate, kind):
    """The fraction of zeros is the rate, the others are scaled by 1/(1 − rate), the mean stays."""
    x = torch.full((4, 20_000), 3.0, dtype=torch.float64)
    given_rate = {"float": rate, "tensor": double(rate), "per example": double([rate] * 4)}[kind]
    y = dropout(x, given_rate)
    assert (y == 0).double().mean().item() == pytest.approx(rate, abs=0.01)
    assert y.mean().item() == pytest.approx(3.0, rel=0.03)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 3 / (1 - rate)))


def test_every_example_may_have_its_own_rate():
    """Row i is dropped at rate i, whatever the number of further dimensions."""
    rates = [0.0, 0.25, 0.75]
    y = dropout(torch.ones(3, 50, 400), torch.tensor(rates))
    for row, rate in zip(y, rates, strict=True):
        assert (row == 0).float().mean().item() == pytest.approx(rate, abs=0.02)
        assert row.mean().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("rate", [torch.tensor(0.5), torch.tensor([0.5, 0.2])], ids=["scalar", "per example"])
def test_the_rate_gets_no_gradient(rate):
    """A mask has no derivative, and the factor 1/(1 − rate) alone would give a wrong one."""
    rate.requires_grad_()
    x = torch.ones(2, 3, requires_grad=True)
    y = dropout(x, rate)
    gradients = torch.autograd.grad(y.sum(), [x, rate], allow_unused=True)
    assert torch.equal(gradients[0], y.detach())
    assert gradients[1] is None
    rate.requires_grad_(False)


def test_dropout_does_nothing_in_eval_mode():
    """Not even a copy."""
    x = torch.ones(3)
    assert dropout(x, 0.9, training=False) is x


@given(dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_dropout_keeps_the_dtype(dtype):
    """Also when the rate comes from hyperparameters in another precision."""
    assert dropout(torch.ones(3, dtype=dtype), double(0.5)).dtype == dtype


@pytest.mark.parametrize(("shape", "rate"), [((3, 2), (2,)), ((3, 2), (3, 2)), ((3, 2), (1,)), ((), (1,))])
def test_dropout_refuses_other_shapes_of_the_rate(shape, rate):
    """A rate per feature would be mistaken for one per example: say what is allowed."""
    with pytest.raises(ValueError, match=r"rate must be a scalar or have shape .*one per example"):
        dropout(torch.ones(shape), torch.full(rate, 0.5))


def test_a_penalty_takes_a_single_tensor():
    assert l2(torch.tensor(3.0)).item() == 9.0
    assert l1(torch.tensor([1.0, -2.0])).item() == 3.0


def test_a_rate_of_one_drops_everything_and_has_a_finite_gradient():
    """A saturated sigmoid may give it, and inverted dropout would divide by zero."""
    x = torch.ones(5, requires_grad=True)
    y = dropout(x, 1.0)
    y.sum().backward()
    assert not y.any() and not x.grad.any()


def test_small_rates_are_right_in_half_precision():
    """Uniform numbers in bfloat16 are so coarse that a rate of 0.001 would drop 0.003."""
    x = torch.ones(400_000, dtype=torch.bfloat16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = (dropout(x, 0.001) == 0).double().mean()
    assert abs(dropped.item() - 0.001) < 3e-4  # six standard deviations
