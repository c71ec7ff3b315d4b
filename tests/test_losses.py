"""Losses with one value per example, whose smoothing, weights and temperature may be hyperparameters."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, double, randn
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import bilevel
from bilevel.functional import cross_entropy, mse_loss, per_example, temperature

B, C = 3, 4
POSITIONS = st.sampled_from([(), (2,), (2, 3)])
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def classification(seed, positions, *, probabilities=False):
    """Logits, targets, one smoothing and one row of class weights per example."""
    logits, raw, s, w = randn(seed, (B, C, *positions), (B, C, *positions), (B,), (B, C))
    y = raw.softmax(1) if probabilities else raw.argmax(1)
    return logits, y, s.sigmoid(), w.exp()


# Values


@given(seed=SEEDS, positions=POSITIONS, probabilities=st.booleans())
def test_cross_entropy_is_that_of_torch_one_example_at_a_time(seed, positions, probabilities):
    """F.cross_entropy takes one smoothing and one weight vector: call it once per example, and do not reduce."""
    logits, y, s, w = classification(seed, positions, probabilities=probabilities)
    expected = [
        F.cross_entropy(
            logits[i : i + 1], y[i : i + 1], label_smoothing=s[i].item(), weight=w[i], reduction="none"
        ).mean()
        for i in range(B)
    ]
    close(cross_entropy(logits, y, label_smoothing=s, weight=w), torch.stack(expected))


@given(seed=SEEDS, positions=POSITIONS)
def test_cross_entropy_is_its_formula(seed, positions):
    """−Σ_c w q log p with logarithms written out; classes are probabilities of one."""
    logits, y, s, w = classification(seed, positions)
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    q = torch.stack([y == c for c in range(C)], 1).double()
    s_, w_ = s.reshape(B, *[1] * (q.ndim - 1)), w.reshape(B, C, *[1] * len(positions))
    expected = -(w_ * ((1 - s_) * q + s_ / C) * p.log()).sum(1).reshape(B, -1).mean(1)
    close(cross_entropy(logits, y, label_smoothing=s, weight=w), expected)
    close(cross_entropy(logits, q, label_smoothing=s, weight=w), expected)


@given(seed=SEEDS, positions=POSITIONS, smoothing=st.sampled_from([0.0, 0.3, 1.0]))
def test_without_weights_the_mean_is_that_of_torch(seed, positions, smoothing):
    logits, y, _, _ = classification(seed, positions)
    mean = F.cross_entropy(logits, y, label_smoothing=smoothing)
    close(cross_entropy(logits, y, label_smoothing=smoothing).mean(), mean)


@given(seed=SEEDS, positions=POSITIONS)
def test_weights_of_mean_one_over_the_labels_give_the_mean_of_torch(seed, positions):
    """Torch divides by the weights of all targets; that is what the documentation says to divide by beforehand."""
    logits, y, _, w = classification(seed, positions)
    normalised = w[0] / w[0][y].mean()
    close(cross_entropy(logits, y, weight=normalised).mean(), F.cross_entropy(logits, y, weight=w[0]))


@given(seed=SEEDS, smoothed=st.booleans(), ignored=st.sampled_from([-100, -1, 2]))
def test_ignored_positions_are_left_out_of_the_mean_of_their_example(seed, smoothed, ignored):
    """Position by position with torch; an example of which nothing is left has loss zero and a zero gradient."""
    logits, y, s, w = classification(seed, (5,))
    y[0, 1], y[1, :] = ignored, ignored
    logits.requires_grad_()
    s = s if smoothed else torch.zeros(B, dtype=torch.float64)
    loss = cross_entropy(logits, y, label_smoothing=s, weight=w, ignore_index=ignored)
    expected = torch.zeros(B, dtype=torch.float64)
    for i in range(B):
        kept = [j for j in range(5) if y[i, j] != ignored]
        for j in kept:
            one = F.cross_entropy(
                logits[i : i + 1, :, j], y[i : i + 1, j], label_smoothing=s[i].item(), weight=w[i], reduction="none"
            )
            expected[i] += one.detach().squeeze() / len(kept)
    close(loss.detach(), expected)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[1].any()


@given(seed=SEEDS, positions=POSITIONS)
def test_mse_loss_is_that_of_torch_one_example_at_a_time(seed, positions):
    x, y = randn(seed, (B, *positions), (B, *positions))
    close(mse_loss(x, y), torch.stack([F.mse_loss(x[i], y[i]) for i in range(B)]))
    close(mse_loss(x, y).mean(), F.mse_loss(x, y))


@given(seed=SEEDS, positions=POSITIONS)
def test_values_per_example_act_on_dimension_0_only(seed, positions):
    x, value = randn(seed, (B, *positions), (B,))
    close(x * per_example(value, x), torch.stack([x[i] * value[i].item() for i in range(B)]))
    close(temperature(x, value.exp()), torch.stack([x[i] / value[i].exp().item() for i in range(B)]))
    assert per_example(0.5, x).shape == ()
    assert per_example(value, x).shape == (B, *[1] * len(positions))


# What a hyperparameter relies on


@given(seed=SEEDS, positions=POSITIONS, probabilities=st.booleans())
def test_a_scalar_is_the_same_value_for_every_example(seed, positions, probabilities):
    logits, y, s, w = classification(seed, positions, probabilities=probabilities)
    T = w[0, 0]
    shared = cross_entropy(temperature(logits, T), y, label_smoothing=s[0], weight=w[0])
    rows = cross_entropy(temperature(logits, T.expand(B)), y, label_smoothing=s[0].expand(B), weight=w[0].expand(B, C))
    close(shared, rows)
    close(cross_entropy(temperature(logits, T.item()), y, label_smoothing=s[0].item(), weight=w[0]), rows)
    close(per_example(T.item(), logits), per_example(T.expand(B), logits)[0].squeeze())


@given(seed=SEEDS, positions=POSITIONS, row=st.integers(0, B - 1))
def test_row_i_of_an_argument_changes_entry_i_of_the_loss_and_no_other(seed, positions, row):
    """The Jacobian with respect to every argument is diagonal over examples, and not zero there."""
    logits, y, s, w = classification(seed, positions)
    T = w[:, 0].clone()

    def loss(logits, s, w, T):
        return cross_entropy(temperature(logits, T), y, label_smoothing=s, weight=w)

    before = loss(logits, s, w, T)
    for place in range(4):
        arguments = [logits, s, w, T]
        arguments[place] = arguments[place].clone()
        arguments[place][row] *= 0.7
        changed = loss(*arguments) != before
        assert changed.tolist() == [index == row for index in range(B)]
    x = logits.clone()
    x[row] += 1
    assert (mse_loss(x, logits) != 0).tolist() == [index == row for index in range(B)]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per example"])
@pytest.mark.parametrize(("positions", "probabilities"), [((), False), ((2,), False), ((2,), True)])
def test_first_and_second_derivatives_are_those_of_finite_differences(positions, probabilities, shared):
    """In all arguments, in reverse mode, forward mode, and forward over reverse."""
    logits, y, s, w = classification(0, positions, probabilities=probabilities)
    if positions and not probabilities:
        y[0, 0] = -100
    arguments = [logits, *((s[0], w[0], w[0, 0]) if shared else (s, w, w[:, 0]))]
    arguments = [argument.clone().requires_grad_() for argument in arguments]

    def loss(logits, s, w, T):
        return cross_entropy(temperature(logits, T), y, label_smoothing=s, weight=w)

    assert gradcheck(loss, arguments, check_forward_ad=True)
    assert gradgradcheck(loss, arguments, check_fwd_over_rev=True)


def test_derivatives_of_the_squared_error_and_of_values_per_example():
    x, y, value = (tensor.requires_grad_() for tensor in randn(0, (B, 2), (B, 2), (B,)))

    def loss(x, y, value):
        return mse_loss(x * per_example(value, x), y)

    assert gradcheck(loss, [x, y, value], check_forward_ad=True)
    assert gradgradcheck(loss, [x, y, value], check_fwd_over_rev=True)


def test_no_value_is_read_from_the_device():
    """Fake tensors have shapes and no values: a host read raises."""
    with FakeTensorMode():
        logits, y, s, w = torch.randn(B, C, 2), torch.zeros(B, 2, dtype=torch.long), torch.rand(B), torch.rand(B, C)
        loss = cross_entropy(temperature(logits, s), y, label_smoothing=s, weight=w) * mse_loss(logits, logits)
        assert loss.shape == (B,)
        assert per_example(s, logits).shape == (B, 1, 1)


def test_a_masked_class_does_not_spoil_loss_and_gradients_without_smoothing():
    """Logits of minus infinity, as for actions that are not allowed."""
    logits = double([[0.0, 0.0, -torch.inf]]).requires_grad_()
    w = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0]), weight=w)
    close(loss, double([2.0]).log())
    close(torch.autograd.grad(loss, logits, retain_graph=True)[0], double([[-0.5, 0.5, 0.0]]))
    close(torch.autograd.grad(loss, w)[0], double([[2.0, 1.0, 1.0]]).log())


@pytest.mark.parametrize("method", ["stn", "centered_stn", "delta_stn"])
def test_they_are_losses_of_networks_with_a_perturbation_for_each_example(method):
    """The hyperparameters arrive as (B,) and (B, C), and the steps are finite."""
    shapes = []

    def inner_loss(model, hyper, batch):
        x, y = batch
        shapes.append([tuple(value.shape) for value in hyper.values()])
        logits = temperature(model(x * per_example(hyper["gain"], x)), hyper["T"])
        balance = C * hyper["balance"].softmax(-1)
        return hyper["a"] * cross_entropy(logits, y, label_smoothing=hyper["s"], weight=balance)

    problem = bilevel.Problem(
        torch.nn.Linear(2, C, dtype=torch.float64),
        inner_loss=inner_loss,
        outer_loss=lambda model, hyper, batch: cross_entropy(model(batch[0]), batch[1]),
        hyper={
            **{name: bilevel.positive(1.0) for name in ("gain", "T", "a")},
            "s": bilevel.interval(0.0, 1.0, init=0.1),
            "balance": bilevel.real([0.0] * C),
        },
    )
    solver = bilevel.Solver(problem, method=method)
    batch = (randn(0, (B, 2))[0], torch.tensor([0, 1, 2]))
    assert solver.inner_step(batch).isfinite()
    assert solver.outer_step(batch, batch).hypergradient.isfinite().all()
    assert [(B,), (B,), (B,), (B,), (B, C)] in shapes


# What is refused, and what is kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per example"])
def test_precision_is_at_least_single_for_losses_and_that_of_the_tensor_otherwise(dtype, shared):
    """Whatever the precision of the hyperparameters, and also for one value."""
    x, value = torch.ones(B, C, dtype=dtype), double(0.5) if shared else double([0.5] * B)
    wide = torch.promote_types(dtype, torch.float32)
    y = torch.zeros(B, dtype=torch.uint8)
    assert cross_entropy(x, y, label_smoothing=value, weight=torch.ones(C, dtype=torch.float64)).dtype == wide
    assert cross_entropy(x, x.double(), label_smoothing=value).dtype == wide
    assert mse_loss(x, x).dtype == wide
    assert temperature(x, value).dtype == per_example(value, x).dtype == dtype
    assert per_example(value, torch.ones(B, 2, dtype=torch.uint8)).is_floating_point()


def test_an_empty_batch_has_no_losses():
    assert cross_entropy(torch.ones(0, C), torch.ones(0, dtype=torch.long), label_smoothing=torch.ones(0)).shape == (0,)
    assert mse_loss(torch.ones(0, 2), torch.ones(0, 2)).shape == (0,)


LOGITS, LABELS = torch.zeros(B, C), torch.zeros(B, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cross_entropy([[0.0]], LABELS), TypeError, "logits must be a tensor, got list"),
        (lambda: cross_entropy(LOGITS, [0, 0, 0]), TypeError, "y must be a tensor, got list"),
        (lambda: cross_entropy(LOGITS[0], LABELS), ValueError, r"logits must have shape \(B, C\) .* got \(4,\)"),
        (lambda: cross_entropy(LOGITS, LABELS[:2]), ValueError, r"y must have shape \(3,\) .* got \(2,\)"),
        (lambda: cross_entropy(LOGITS, LABELS.float()), ValueError, r"probabilities for .* use y\.long\(\)"),
        (lambda: cross_entropy(torch.zeros(3, 2, 4), torch.zeros(3, 2).long()), ValueError, r"movedim\(-1, 1\)"),
        (lambda: cross_entropy(LOGITS, LABELS + 9), (RuntimeError, IndexError), "out of bounds"),
        (
            lambda: cross_entropy(LOGITS, LABELS, label_smoothing=1.5),
            ValueError,
            r"\[0, 1\], got 1.5; bilevel.interval",
        ),
        (lambda: cross_entropy(LOGITS, LABELS, label_smoothing=-1), ValueError, r"\[0, 1\], got -1"),
        (
            lambda: cross_entropy(LOGITS, LABELS, label_smoothing=torch.zeros(4)),
            ValueError,
            r"label_smoothing must be a scalar or have shape \(3,\), one per example; got \(4,\)",
        ),
        (lambda: cross_entropy(LOGITS, LABELS, weight=[1.0] * 4), TypeError, "weight must be a tensor, got list"),
        (
            lambda: cross_entropy(LOGITS, LABELS, weight=torch.ones(3)),
            ValueError,
            r"weight must have shape \(4,\), one per class, or \(3, 4\).* got \(3,\)\. To weight whole examples",
        ),
        (lambda: cross_entropy(LOGITS, LOGITS, ignore_index=0), ValueError, "ignore_index=0 needs classes"),
        (lambda: mse_loss(torch.ones(3, 1), torch.ones(3)), ValueError, r"got \(3, 1\) and \(3,\)\. Use squeeze"),
        (lambda: mse_loss(torch.ones(()), torch.ones(())), ValueError, r"same shape \(B, \.\.\.\)"),
        (lambda: mse_loss(torch.ones(3), 1.0), TypeError, "target must be a tensor, got float"),
        (lambda: temperature(LOGITS, 0.0), ValueError, "T must be positive, got 0.0; bilevel.positive"),
        (lambda: temperature(LOGITS, torch.ones(4)), ValueError, r"T must be a scalar or have shape \(3,\)"),
        (lambda: per_example(torch.ones(3, 4), LOGITS), ValueError, r"got \(3, 4\) .* hyper\[...\]\[..., i\]"),
        (lambda: per_example(torch.ones(1), torch.ones(())), ValueError, "value must be a scalar"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(call, error, message):
    with pytest.raises(error, match=message):
        call()
