"""The augmentations, against references written for one image and one pixel at a time."""

import colorsys
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bilevel
from bilevel.augment import affine, apply, brightness, contrast, cutout, flip, hue, noise, saturation
from bilevel.augment import changes as module
from bilevel.regularizers import Mixture

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
ALL = {
    "translation": 0.3,
    "scale": 0.4,
    "rotation": 40.0,
    "shear": 30.0,
    "flip": 1.0,
    "brightness": 0.8,
    "contrast": 0.8,
    "saturation": 0.8,
    "hue": 0.5,
    "noise": 0.1,
    "holes": 2.0,
    "length": 3.0,
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def images(count=4, channels=3, height=6, width=9, seed=0):
    """Random ones, in which some pixels are grey, black or have two equal channels."""
    x = torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[:, :, 0, 0] = 0.0
    x[:, :, 0, 1] = 0.5
    x[:, 1:, 0, 2] = 0.25
    x[:, :-1, 0, 3] = 0.75
    return x


def by_pixel(x, change):
    """Apply a function of a pixel's channels, its row and column and the index of its image."""
    x = x.numpy()
    out = np.empty_like(x)
    for i, row, column in np.ndindex(x.shape[0], *x.shape[2:]):
        out[i, :, row, column] = change(x[i, :, row, column], i, row, column)
    return torch.from_numpy(out)


def luminance(pixel):
    return pixel[0] if len(pixel) == 1 else 0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def factors(monkeypatch, values):
    monkeypatch.setattr(module, "_factor", lambda strength: torch.tensor(values, dtype=strength.dtype))


@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_contrast_and_saturation_of_given_factors(monkeypatch, channels):
    x, values = images(channels=channels), [0.0, 0.4, 1.0, 1.9]
    factors(monkeypatch, values)
    means = [np.mean([luminance(x[i, :, r, c].numpy()) for r in range(6) for c in range(9)]) for i in range(4)]

    def blend(factor, pixel, other):
        return np.clip(other + factor * (pixel - other), 0, 1)

    assert_equal(brightness(x, 1.0), by_pixel(x, lambda p, i, *_: blend(values[i], p, 0.0)))
    assert_equal(contrast(x, 1.0), by_pixel(x, lambda p, i, *_: blend(values[i], p, means[i])))
    assert_equal(saturation(x, 1.0), by_pixel(x, lambda p, i, *_: blend(values[i], p, luminance(p))))


@given(shifts=st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4))
def test_hue_of_given_shifts(shifts):
    x = images(len(shifts))

    def shift(pixel, i, *_):
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        return colorsys.hsv_to_rgb((h + shifts[i]) % 1.0, s, v)

    assert_equal(module._shift_hue(x, torch.tensor(shifts, dtype=torch.float64)), by_pixel(x, shift))


def rotation_matrix(degrees):
    angle = math.radians(degrees)
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


@given(
    shift=st.tuples(st.floats(-0.5, 0.5), st.floats(-0.5, 0.5)),
    factor=st.floats(0.5, 1.5),
    rotation=st.floats(-45, 45),
    shear=st.floats(-45, 45),
    seed=st.integers(0, 9),
)
def test_a_given_warp(shift, factor, rotation, shear, seed):
    """Bilinear, from the inverse of the stated map, solved for each pixel; the second image stays as it is."""
    x = images(2, height=5, width=8, seed=seed)
    matrix = factor * rotation_matrix(rotation) @ np.array([[1, -math.tan(math.radians(shear))], [0, 1]])
    centre, moved = np.array([3.5, 2.0]), np.array([shift[0] * 8, shift[1] * 5])

    def sample(pixel, i, row, column):
        if i == 1:
            return pixel
        source = np.linalg.solve(matrix, np.array([column, row]) - centre - moved) + centre
        left, top = math.floor(source[0]), math.floor(source[1])
        total = np.zeros(3)
        for c, r in ((left, top), (left + 1, top), (left, top + 1), (left + 1, top + 1)):
            if 0 <= c < 8 and 0 <= r < 5:
                total += (1 - abs(source[0] - c)) * (1 - abs(source[1] - r)) * x[i, :, r, c].numpy()
        return total

    drawn = torch.tensor([[*shift, factor, rotation, shear], [0, 0, 1, 0, 0]], dtype=torch.float64)
    assert_equal(module._warp(x, drawn[:, :2], *drawn[:, 2:].unbind(1)), by_pixel(x, sample))


def test_the_directions_of_a_warp():
    """A translation moves content right and down; a turn takes it from the right to the bottom."""
    x = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    x[:, 0, 2, 4] = 1.0
    drawn = torch.tensor([[-0.4, 0.2, 1, 0, 0], [0, 0, 1, 90, 0]], dtype=torch.float64)
    warped = module._warp(x, drawn[:, :2], *drawn[:, 2:].unbind(1))
    assert warped[:, 0].flatten(1).argmax(1).tolist() == [3 * 5 + 2, 4 * 5 + 2]


@given(
    holes=st.lists(st.floats(0, 4), min_size=1, max_size=4),
    length=st.floats(0, 24),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    seed=st.integers(0, 99),
)
def test_given_holes(holes, length, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.ones(len(holes), 1, *size, dtype=torch.float64)
    rows, columns = (torch.randint(side, (len(holes), 4), generator=generator) for side in size)
    side = round(length)

    def inside(_, i, row, column):
        for hole in range(round(holes[i])):
            top, left = int(rows[i, hole]) - side // 2, int(columns[i, hole]) - side // 2
            if row in range(top, top + side) and column in range(left, left + side):
                return 1.0
        return 0.0

    lengths = torch.full((len(holes),), length, dtype=torch.float64)
    covered = module._covered(x, rows, columns, torch.tensor(holes, dtype=torch.float64), lengths)
    assert torch.equal(covered.double(), by_pixel(x, inside))


def test_cutout_draws_as_many_holes_as_asked_for():
    """Holes of one pixel: their number is that of changed pixels, or less by overlaps; any pixel may be hit."""
    x = torch.ones(500, 2, 10, 14)
    holes = torch.arange(500) % 5
    hit = cutout(x, holes, torch.ones(500)) == 0
    assert torch.equal(hit[:, 0], hit[:, 1])
    counts = hit[:, 0].sum((1, 2))
    assert (counts <= holes).all()
    assert counts.sum() > 0.95 * holes.sum()
    assert (counts[holes > 0] > 0).all()
    assert cutout(torch.ones(2000, 1, 3, 5), 4, 1.0).eq(0).any(0).all()


def test_holes_beyond_the_maximum_are_not_drawn():
    assert cutout(torch.ones(50, 1, 20, 20), 9, 1).eq(0).sum((1, 2, 3)).max() == 4
    assert cutout(torch.ones(50, 1, 20, 20), 9, 1, max_holes=6).eq(0).sum((1, 2, 3)).max() == 6


def test_cutout_fills_with_a_colour():
    x, color = torch.zeros(3, 3, 4, 4), torch.tensor([0.1, 0.2, 0.3])
    assert torch.equal(cutout(x, 1, 24, fill=color), color.reshape(3, 1, 1).expand_as(x))
    assert torch.equal(cutout(x, 1, 24, fill=0.5), torch.full_like(x, 0.5))
    assert torch.equal(apply(x, {"holes": torch.tensor(1), "length": torch.tensor(24)}, fill=color)[0, :, 0, 0], color)


def test_flip_mirrors_as_often_as_asked_for():
    """Each image whole or not at all; with the strength as the probability."""
    x = images(1).expand(3000, -1, -1, -1)
    y = flip(x, torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64).repeat_interleave(1000))
    mirrored = (y == x.flip(-1)).flatten(1).all(1)
    assert torch.equal(~mirrored, (y == x).flatten(1).all(1))
    assert mirrored.reshape(3, 1000).sum(1).tolist() == [0, pytest.approx(300, abs=60), 1000]


def test_factors_are_uniform_around_one_and_never_negative():
    strength = torch.tensor([0.0, 0.3, 1.0, 2.0], dtype=torch.float64).repeat_interleave(4000)
    drawn = module._factor(strength).reshape(4, 4000)
    assert (drawn[0] == 1).all()
    for values, low, high in zip(drawn[1:], (0.7, 0.0, 0.0), (1.3, 2.0, 3.0), strict=True):
        assert_uniform(values, low, high)


def test_shifts_are_uniform_to_either_side():
    drawn = module._symmetric(torch.tensor([0.0, 0.5, 45.0], dtype=torch.float64).repeat_interleave(4000))
    assert (drawn[:4000] == 0).all()
    assert_uniform(drawn[4000:8000], -0.5, 0.5)
    assert_uniform(drawn[8000:], -45.0, 45.0)


def assert_uniform(values, low, high):
    """By the largest distance of the empirical distribution, below 2.2 / √n in all but 1 of 10,000 cases."""
    assert values.min() >= low
    assert values.max() <= high
    expected = (values.sort().values - low) / (high - low)
    steps = torch.arange(1, len(values) + 1) / len(values)
    assert (expected - steps).abs().max() < 2.2 / len(values) ** 0.5


def test_affine_draws_each_part_of_its_own(monkeypatch):
    """From its own strength, for each example, and both directions of a translation apart."""
    seen = []
    monkeypatch.setattr(module, "_warp", lambda x, *drawn: seen.append(drawn) or x)
    strengths = torch.tensor([[0.1, 0.2, 30.0, 40.0], [0.5, 0.4, 10.0, 20.0]]).repeat_interleave(3000, 0)
    affine(torch.zeros(6000, 1, 2, 2), **dict(zip(module.WARPS, strengths.unbind(1), strict=True)))
    shift, factor, rotation, shear = (part.double() for part in seen[0])
    drawn = torch.stack([*shift.unbind(1), factor - 1, rotation, shear], 1)
    for half, strength in ((drawn[:3000], strengths[0]), (drawn[3000:], strengths[-1])):
        for values, bound in zip(half.unbind(1), strength[[0, 0, 1, 2, 3]].tolist(), strict=True):
            assert_uniform(values / bound, -1 - 1e-6, 1 + 1e-6)
        assert (half.T.corrcoef() - torch.eye(5)).abs().max() < 0.08


def test_noise_multiplies():
    strength = torch.tensor([0.0, 0.1, 0.5])
    x = torch.full((3, 1, 200, 200), 0.5)
    x[:, :, :100] = 0.0
    y = noise(x, strength)
    assert torch.equal(y[0], x[0])
    assert (y[:, :, :100] == 0).all()
    ratio = y[:, 0, 100:] / 0.5
    torch.testing.assert_close(ratio.mean((1, 2)), torch.ones(3), rtol=0, atol=0.015)
    torch.testing.assert_close(ratio.std((1, 2)), strength, rtol=0.03, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 3, 6, 9), (5, 3, 9, 6), (5, 1, 4, 4), (1, 1, 28, 28)])
def test_strength_zero_changes_nothing_and_each_example_has_its_own(device, shape):
    x = (0.1 + 0.8 * torch.rand(shape, dtype=torch.float64)).to(device)
    zero = {name: torch.zeros(shape[0], device=device) for name in ALL}
    assert_equal(apply(x, zero), x)
    torch.testing.assert_close(
        apply(x.float(), {name: torch.tensor(0.0, device=device) for name in ALL}), x.float(), rtol=0, atol=1e-5
    )
    last = torch.zeros(shape[0], device=device)
    last[-1] = 1.0
    grey = shape[1] == 1
    for name, value in ALL.items():
        if name in ("holes", "length"):
            continue
        y = apply(x, {name: value * last})
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        assert_equal(y[:-1], x[:-1])
        assert ((y[-1] - x[-1]).abs().max() < 1e-9) == (grey and name in ("hue", "saturation")), name
    cut = apply(x, {"holes": 4 * last, "length": 24 * last}) == 0
    assert torch.equal(cut.flatten(1).any(1), last.bool())


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("holes", "length", "flip")])
def test_equal_images_change_differently(name):
    """Also if they share one strength; and a seed gives the same again."""
    x = images(1).expand(3, -1, -1, -1)
    torch.manual_seed(1)
    y = apply(x, {name: torch.tensor(ALL[name])})
    assert not torch.allclose(y[0], y[1])
    assert not torch.allclose(y[1], y[2])
    torch.manual_seed(1)
    assert torch.equal(apply(x, {name: torch.full((3,), ALL[name])}), y)


def test_the_order_is_the_documented_one(monkeypatch):
    called = []
    for name in ("affine", "flip", "brightness", "contrast", "saturation", "hue", "noise", "cutout"):

        def record(x, *args, name=name, **kwargs):
            called.append(name)
            return x

        record.__name__ = name
        monkeypatch.setattr(module, name, record)
    strengths = {name: torch.tensor(value) for name, value in reversed(ALL.items())}
    apply(images(), strengths)
    assert called == ["affine", "flip", "brightness", "contrast", "saturation", "hue", "noise", "cutout"]
    assert set(module.NAMES) == set(ALL)


def test_nothing_is_done_without_strengths():
    x = images()
    assert apply(x, {}) is x


@pytest.mark.parametrize("channels", [1, 3])
def test_values_stay_in_range_and_strengths_get_no_gradient(channels):
    x = torch.rand(64, channels, 8, 8)
    strengths = {name: torch.tensor(value, requires_grad=True) for name, value in ALL.items() if name != "noise"}
    y = apply(x, strengths)
    assert not y.requires_grad
    assert not noise(x, torch.tensor(0.1, requires_grad=True)).requires_grad
    assert y.min() >= 0
    assert y.max() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: hue(torch.zeros(2, 3, 4, 4), torch.zeros(3)),
            r"hue must be a scalar or have shape \(2,\).*got \(3,\)",
        ),
        (lambda: cutout(torch.zeros(2, 3, 4, 4), 1, torch.zeros(2, 1)), r"length must be a scalar"),
        (lambda: brightness(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), 0.5), "x must be float images.*uint8"),
        (lambda: contrast(torch.zeros(3, 4, 4), 0.5), r"x must be float images.*\(3, 4, 4\)"),
        (lambda: saturation(torch.zeros(2, 4, 4, 4), 0.5), "x must have 3 channels.*got 4"),
        (lambda: hue(torch.zeros(2, 2, 4, 4), 0.5), "x must have 3 channels.*got 2"),
        (lambda: apply(torch.zeros(2, 3, 4, 4), {"hew": 0.1}), "no augmentation 'hew', only translation.* hue"),
        (lambda: apply(torch.zeros(2, 3, 4, 4), {"holes": torch.tensor(1)}), "needs both 'holes' and 'length'"),
    ],
)
def test_bad_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call()


MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)


def test_standardised_images_are_changed_as_they_were_before():
    x, hyper = images(), {}
    change = bilevel.augment.images(mean=MEAN, std=STD, flip=True)
    hyper = {name: torch.rand(4, dtype=torch.float64) * entry.high for name, entry in change.hyper.items()}
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(3, 1, 1) for values in (MEAN, STD))
    torch.manual_seed(1)
    changed = change.on_batch(Mixture.of((x - mean) / std, None), hyper).x
    torch.manual_seed(1)
    strengths = {name.removeprefix("augment."): value for name, value in hyper.items()}
    strengths |= {"holes": 1.0, "length": 6 * strengths.pop("cutout")}
    torch.testing.assert_close(changed * std + mean, apply(x, strengths, fill=mean.flatten()), rtol=0, atol=1e-12)
    assert {"brightness", "hue", "flip", "rotation"} <= strengths.keys()


@pytest.mark.parametrize(
    ("make", "x", "message"),
    [
        (
            lambda: bilevel.augment.images(color=True),
            torch.randn(2, 3, 4, 4),
            r"in \[0, 1\], but as they are",
        ),
        (lambda: bilevel.augment.images(mean=MEAN, std=STD), 20 * torch.rand(2, 3, 4, 4), "with this mean and std"),
        (lambda: bilevel.augment.images(mean=0.5, std=1.0), torch.rand(2, 3, 4, 4), "1 values, the images have 3"),
        (lambda: bilevel.augment.images(), torch.rand(2, 9), r"shape \(B, C, H, W\), got torch.float32"),
        (lambda: bilevel.augment.images(mean=0.5), None, "both mean and std"),
        (lambda: bilevel.augment.images(mean=0.5, std=0.0), None, "std positive"),
        (lambda: bilevel.augment.images(only=["hew"]), None, "no change 'hew', only translation"),
    ],
)
def test_images_that_would_be_spoilt_are_refused(make, x, message):
    with pytest.raises(ValueError, match=message):
        make().check(x)


def test_images_that_fit_pass():
    bilevel.augment.images().check(torch.randn(2, 1, 4, 4))
    bilevel.augment.images(color=True).check(torch.rand(2, 3, 4, 4))
    assert not any(name in bilevel.augment.images(mean=0.5, std=0.5).hyper for name in ("augment.hue",))
