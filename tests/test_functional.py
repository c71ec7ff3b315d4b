"""Penalties, and dropout whose rate is a tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, double, randn
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from bilevel import l1, l2
from bilevel.functional import drop_connect, dropout, embedding_dropout, gaussian_noise
from bilevel.responding import Rows
from bilevel.structure import respond


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


# Rates for each example, and masks that are shared


RATES = [0.0, 0.25, 0.75]


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((3, 400, 5, 6), (2, 3)), ((3, 400, 5, 6), (-1, -2)), ((3, 5, 400), 1), ((3, 5, 400), ()), ((3, 400), 0)],
)
def test_shared_dims_share_one_mask(shape, dims):
    """Constant along them, at the rate of each example; the mask is the one that the same seed draws in that shape."""
    rate = torch.tensor(RATES, dtype=torch.float64) if dims != 0 else double(0.25)
    state = torch.get_rng_state()
    y = dropout(torch.ones(shape, dtype=torch.float64), rate, shared_dims=dims)
    listed = [dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)]
    small = [1 if dim in listed else size for dim, size in enumerate(shape)]
    torch.set_rng_state(state)
    rate = rate.reshape(-1, *[1] * (len(shape) - 1)) if rate.ndim else rate
    expected = (torch.rand(small, dtype=torch.float64) >= rate) / (1 - rate)
    torch.testing.assert_close(y, expected.expand(shape), rtol=1e-12, atol=0)
    for row, chance in zip(y, RATES if dims != 0 else [0.25] * 3, strict=True):
        assert (row == 0).double().mean().item() == pytest.approx(chance, abs=0.08)


@given(seed=SEEDS, per_example=st.booleans(), further=st.booleans())
def test_embedding_dropout_drops_all_occurrences_of_a_word_together(seed, per_example, further):
    """In each example on its own: the factor of a position is that of its word."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 6, (3, 4, 5) if further else (3, 20), generator=generator)
    vectors = torch.rand(*tokens.shape, 2, generator=generator, dtype=torch.float64) + 1
    rate = double(RATES if per_example else 0.5)
    torch.manual_seed(seed)
    factor = embedding_dropout(tokens, vectors, rate, size=6) / vectors
    torch.manual_seed(seed)
    column = rate[:, None] if per_example else rate
    mask = (torch.rand(3, 6, dtype=torch.float64) >= column) / (1 - column)
    for example in range(3):
        for word in range(6):
            found = factor[example][tokens[example] == word]
            torch.testing.assert_close(found, mask[example, word].expand_as(found))


def test_embedding_dropout_differs_between_examples_and_keeps_the_mean():
    tokens = torch.arange(5_000).expand(3, -1)
    y = embedding_dropout(tokens, torch.ones(3, 5_000, 1), torch.tensor(RATES), size=5_000)
    for row, rate in zip(y, RATES, strict=True):
        assert (row == 0).float().mean().item() == pytest.approx(rate, abs=0.03)
        assert row.mean().item() == pytest.approx(1.0, abs=0.1)
    same = embedding_dropout(tokens, torch.ones(3, 5_000, 1), 0.5, size=5_000)
    assert not torch.equal(same[0], same[1])


def test_drop_connect_masks_a_weight_at_a_scalar_rate():
    weight = torch.full((200, 300), 2.0, requires_grad=True)
    rate = torch.tensor(0.25, requires_grad=True)
    dropped = drop_connect(weight, rate)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(dropped[dropped != 0], torch.full_like(dropped[dropped != 0], 2 / 0.75))
    gradients = torch.autograd.grad(dropped.sum(), [weight, rate], allow_unused=True)
    torch.testing.assert_close(gradients[0], dropped.detach() / 2)
    assert gradients[1] is None
    with pytest.raises(ValueError, match=r"rate must be a scalar, got shape \(3,\).*shared=True"):
        drop_connect(weight, torch.tensor(RATES))


@pytest.mark.parametrize("linearized", [False, True])
@given(seed=SEEDS)
def test_drop_connect_works_on_a_weight_that_responds(linearized, seed):
    """The mask falls on W and on R alike: each example has (W + f R) ⊙ mask, for the same random numbers."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(randn(seed, (4, 3))[0])

        def forward(self, x, rate):
            return F.linear(x, drop_connect(self.weight, rate))

    net = Net()
    weight, template, factor, x = randn(seed, (4, 3), (4, 3), (5, 4), (5, 3))
    predict = respond(
        lambda weights, *args: functional_call(net, weights, args),
        {"weight": weight},
        {"weight": Rows(factor, template)},
        linearized=linearized,
    )
    torch.manual_seed(seed)
    y = predict(x, double(0.4))
    torch.manual_seed(seed)
    mask = (torch.rand(4, 3, dtype=torch.float64) >= 0.4).double() / 0.6
    slow = torch.stack([((weight + f[:, None] * template) * mask) @ row for f, row in zip(factor, x, strict=True)])
    torch.testing.assert_close(y, slow, rtol=1e-10, atol=1e-10)


@given(seed=SEEDS, shape=st.sampled_from([(3,), (3, 2), (3, 2, 4)]), per_example=st.booleans())
def test_gaussian_noise_is_differentiable_in_its_scale(seed, shape, per_example):
    """y = x + σz, so ∂(c · y)/∂σ is c · z, over the entries of an example if it has a scale of its own."""
    x, c = randn(seed, shape, shape)
    scale = double([0.1, 1.0, 3.0] if per_example else 0.7).requires_grad_()
    torch.manual_seed(seed)
    y = gaussian_noise(x, scale)
    torch.manual_seed(seed)
    z = torch.randn_like(x)
    column = scale.detach().reshape(-1, *[1] * (len(shape) - 1)) if per_example else scale.detach()
    torch.testing.assert_close(y.detach(), x + column * z, rtol=1e-12, atol=1e-12)
    expected = (c * z).reshape(3, -1).sum(1)
    (found,) = torch.autograd.grad((c * y).sum(), scale)
    torch.testing.assert_close(found, expected if per_example else expected.sum(), rtol=1e-10, atol=1e-12)


def test_nothing_happens_in_eval_mode():
    x, tokens = torch.ones(3, 2), torch.zeros(3, dtype=torch.long)
    assert gaussian_noise(x, 0.9, training=False) is x
    assert drop_connect(x, 0.9, training=False) is x
    assert embedding_dropout(tokens, x, 0.9, size=1, training=False) is x
    assert dropout(x, 0.9, shared_dims=1, training=False) is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_helpers_keep_the_dtype(dtype):
    x, tokens, rate = torch.ones(3, 2, dtype=dtype), torch.zeros(3, 1, dtype=torch.long), double(RATES)
    assert gaussian_noise(x, rate).dtype == dtype
    assert drop_connect(x, double(0.5)).dtype == dtype
    assert embedding_dropout(tokens, x[:, None], rate, size=1).dtype == dtype


@pytest.mark.parametrize("bad", [(2,), (3, 2), (1,)])
def test_helpers_refuse_other_shapes_of_a_rate(bad):
    x, tokens, rate = torch.ones(3, 2), torch.zeros(3, 1, dtype=torch.long), torch.full(bad, 0.5)
    with pytest.raises(ValueError, match=r"gaussian_noise: scale must be a scalar or have shape \(3,\)"):
        gaussian_noise(x, rate)
    with pytest.raises(ValueError, match=r"embedding_dropout: rate must be a scalar or have shape \(3,\)"):
        embedding_dropout(tokens, x[:, None], rate, size=1)
