"""Hyperparameters: transforms, the vector λ, and the perturbation scale."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from problems import assert_equal, double

import bilevel
from bilevel.hyper import Scale, Space

UNIT = st.floats(1e-3, 1 - 1e-3)
SHAPES = st.sampled_from([(), (1,), (3,), (2, 3)])


@st.composite
def hypers(draw):
    """Any kind of hyperparameter, scalar or tensor-valued, with an init anywhere in its range."""
    shape = draw(SHAPES)
    count = math.prod(shape)
    kind = draw(st.sampled_from(["real", "positive", "interval", "integer"]))
    if kind == "real":
        init = draw(st.lists(st.floats(-1e3, 1e3), min_size=count, max_size=count))
        return bilevel.real(double(init).reshape(shape))
    if kind == "positive":
        init = draw(st.lists(st.floats(1e-6, 1e6), min_size=count, max_size=count))
        return bilevel.positive(double(init).reshape(shape))
    lo = draw(st.integers(-50, 50))
    hi = lo + draw(st.integers(1, 100))
    if kind == "interval":
        init = lo + (hi - lo) * double(draw(st.lists(UNIT, min_size=count, max_size=count)))
        return bilevel.interval(lo, hi, init=init.reshape(shape))
    init = draw(st.lists(st.integers(lo, hi), min_size=count, max_size=count))
    return bilevel.integer(lo, hi, init=torch.tensor(init).reshape(shape))


SPACES = st.lists(hypers(), min_size=1, max_size=4).map(
    lambda entries: Space({f"h{index}": entry for index, entry in enumerate(entries)})
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@given(space=SPACES)
def test_transforms_round_trip(dtype, tolerance, space):
    """Natural values come back from the vector, of every kind and shape, in both precisions."""
    vector = space.init(dtype, torch.device("cpu"))
    assert vector.shape == (space.size,)
    assert vector.dtype == dtype
    for name, value in space.values(vector).items():
        init = space.hyper[name].init
        assert value.shape == init.shape
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), init, rtol=tolerance, atol=tolerance * max(1, init.abs().max()))


@given(space=SPACES, seed=st.integers(0, 1000))
def test_the_vector_is_the_inverse_of_the_values(space, seed):
    """Space.vector undoes Space.values wherever nothing was rounded."""
    vector = 2 * torch.randn(space.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    again = space.split(space.vector(space.values(vector)))
    for name, part in space.split(vector).items():
        if not space.hyper[name].discrete:
            torch.testing.assert_close(again[name], part, rtol=1e-7, atol=1e-7)


@given(space=SPACES, batch=st.sampled_from([(1,), (5,), (2, 3)]))
def test_values_keep_batch_dimensions(space, batch):
    """A batch of vectors gives a batch of values, row by row the same as one at a time."""
    rows = torch.linspace(-1, 1, math.prod(batch) * space.size, dtype=torch.float64).reshape(*batch, space.size)
    together = space.values(rows)
    last = space.values(rows[(-1,) * len(batch)])
    for name, value in together.items():
        assert value.shape == batch + space.hyper[name].init.shape
        assert_equal(value[(-1,) * len(batch)], last[name])


@given(init=st.floats(1e-6, 1 - 1e-6))
def test_init_is_kept_in_double_precision(init):
    """A Python float is not rounded to single precision on its way in."""
    assert bilevel.real(init).init.item() == init
    assert bilevel.positive([init]).init.item() == init
    assert bilevel.interval(0, 1, init=init).init.item() == init


def test_init_does_not_alias_the_users_tensor():
    """Changing the tensor later does not change the declaration."""
    mine = torch.ones(2, dtype=torch.float64)
    declared = bilevel.real(mine)
    mine.zero_()
    assert declared.init.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("hyper", "unconstrained", "natural", "slope"),
    [
        (bilevel.real(0.0), 1.5, 1.5, 1.0),
        (bilevel.positive(1.0), 1.5, math.exp(1.5), math.exp(1.5)),
        (bilevel.interval(2.0, 6.0, init=3.0), 0.0, 4.0, 1.0),
    ],
    ids=["real", "positive", "interval"],
)
def test_transforms_are_the_documented_ones(hyper, unconstrained, natural, slope):
    """Identity, exp and a stretched sigmoid, with their derivatives."""
    point = double(unconstrained).requires_grad_()
    value = hyper.natural(point)
    value.backward()
    assert value.item() == pytest.approx(natural, rel=1e-12)
    assert point.grad.item() == pytest.approx(slope, rel=1e-12)


@given(lo=st.integers(-20, 20), width=st.integers(1, 30), point=st.floats(-1e4, 1e4))
def test_integers_are_whole_and_inside_their_range(lo, width, point):
    """However far the vector strays, in either precision; zero is never negative zero."""
    entry = bilevel.integer(lo, lo + width, init=lo)
    for dtype in (torch.float32, torch.float64):
        value = entry.natural(torch.tensor(point, dtype=dtype))
        assert value.item() == round(value.item())
        assert lo <= value.item() <= lo + width
        assert value.item() != 0 or math.copysign(1, value.item()) == 1


@given(lo=st.integers(-20, 20), width=st.integers(1, 30), data=st.data())
def test_an_integer_may_start_anywhere_ends_included(lo, width, data):
    """The stretched sigmoid reaches half a unit beyond both ends, so lo and hi have finite preimages."""
    for init in (lo, lo + width, data.draw(st.integers(lo, lo + width))):
        entry = bilevel.integer(lo, lo + width, init=init)
        point = entry.unconstrained(entry.init)
        assert point.isfinite()
        assert entry.natural(point).item() == init


def test_integers_have_no_gradient():
    """Rounding is piecewise constant: only the response can carry a gradient."""
    space = Space({"holes": bilevel.integer(0, 4, init=2), "decay": bilevel.positive(1.0)})
    values = space.values(torch.zeros(2, requires_grad=True))
    assert not values["holes"].requires_grad
    assert values["decay"].requires_grad


def test_few_entries_are_columns_and_many_are_summarised():
    """Up to 16 entries are listed with their index; of 17, mean, min and max are."""
    values = {"a": torch.tensor(1.0), "b": torch.ones(2, 2), "c": torch.arange(16.0), "d": torch.arange(17.0)}
    columns = Space.columns(values)
    assert list(columns) == (
        ["a", "b[0, 0]", "b[0, 1]", "b[1, 0]", "b[1, 1]"]
        + [f"c[{index}]" for index in range(16)]
        + ["d.mean", "d.min", "d.max"]
    )
    assert [columns[name].item() for name in ("c[15]", "d.mean", "d.min", "d.max")] == [15, 8, 0, 16]


def make_scale(init: float, *, entropy: float | None = 0.1, size: int = 3) -> Scale:
    return Scale(size, init, entropy=entropy, perturb_outer=True, like=torch.zeros((), dtype=torch.float64))


@given(init=st.floats(1e-6, 1e3))
def test_a_fixed_scale_is_exact_and_a_learned_one_starts_there(init):
    """A fixed scale is not a parameter; a learned one passes through the softplus and back."""
    fixed, learned = make_scale(init, entropy=None), make_scale(init)
    assert fixed().tolist() == [init] * 3
    assert not list(fixed.parameters())
    torch.testing.assert_close(learned().detach(), fixed(), rtol=1e-9, atol=0)
    assert [name for name, _ in learned.named_parameters()] == ["raw"]


@example(raw=-1e6)
@example(raw=1e6)
@given(raw=st.floats(-1e3, 1e3))
def test_a_learned_scale_stays_positive_and_finite(raw):
    """Whatever the optimizer does to the raw value, σ and its entropy are usable."""
    scale = make_scale(1.0)
    scale.raw.data.fill_(raw)
    assert (scale() > 0).all()
    assert scale().isfinite().all()
    assert scale.entropy().isfinite()


@given(raw=st.lists(st.floats(-20, 20), min_size=3, max_size=3), seed=st.integers(0, 100))
def test_a_sample_is_differentiable_in_the_scale(raw, seed):
    """ε = σz, so that ∂ε/∂raw = z softplus'(raw) with softplus' the logistic function."""
    scale = make_scale(1.0)
    scale.raw.data.copy_(double(raw))
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        sample = scale.sample()
        torch.manual_seed(seed)
        z = torch.randn(3, dtype=torch.float64)
    assert_equal(sample.detach(), z * scale().detach())
    (gradient,) = torch.autograd.grad(sample.sum(), scale.raw)
    assert_equal(gradient, z / (1 + torch.exp(-double(raw))))


@given(sigma=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=4))
def test_entropy_is_that_of_a_gaussian(sigma):
    """Σ log σᵢ + h/2 log 2πe, and its gradient in σ is 1/σ."""
    scale = make_scale(1.0, size=len(sigma))
    scale.raw.data.copy_(double(sigma).expm1().log().where(double(sigma) < 20, double(sigma)))
    expected = sum(map(math.log, sigma)) + len(sigma) / 2 * math.log(2 * math.pi * math.e)
    assert scale.entropy().item() == pytest.approx(expected, rel=1e-7, abs=1e-7)
    (gradient,) = torch.autograd.grad(scale.entropy(), scale.raw)
    logistic = 1 / (1 + torch.exp(-scale.raw.detach()))
    torch.testing.assert_close(gradient, logistic / double(sigma), rtol=1e-6, atol=1e-9)


def test_samples_have_the_scale_as_their_standard_deviation():
    """σ is a standard deviation, not a variance."""
    scale = make_scale(3.0, entropy=None, size=20_000)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        assert scale.sample().std().item() == pytest.approx(3.0, rel=0.03)


@pytest.mark.parametrize("typed", ["Delta-STN", "delta stn", "DELTA_STN", "deltastn"])
def test_a_name_is_suggested_whatever_its_case_and_dashes(typed):
    with pytest.raises(ValueError, match=r"did you mean 'delta_stn'\?"):
        bilevel.response.get_method(typed)


def test_neighbours_of_one_kind_are_mapped_as_each_alone():
    """Those of another kind, other bounds or rounding come between them; the order stays."""
    space = Space({
        "a": bilevel.positive(0.1), "b": bilevel.positive([0.2, 0.3]), "c": bilevel.interval(0, 1, init=0.5),
        "d": bilevel.interval(0, 2, init=0.5), "e": bilevel.interval(0, 2, init=[[0.1], [0.2]]),
        "f": bilevel.integer(0, 2, init=1), "g": bilevel.real(1.0), "h": bilevel.real(2.0, shared=True),
    })  # fmt: skip
    vector = torch.randn(4, space.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for point in (vector, vector[0]):
        values, parts = space.values(point), space.split(point)
        assert list(values) == list(space.hyper)
        for name, entry in space.hyper.items():
            part = parts[name][0] if entry.shared and point.ndim > 1 else parts[name]
            torch.testing.assert_close(values[name], entry.natural(part), rtol=0, atol=0)
    assert len(space._runs) == 5
