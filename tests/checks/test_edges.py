"""Where checks could be blind, or see ghosts: half precision, small effects, kinks, random numbers, statistics."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel
from bilevel import CenteredSTN, Problem, Solver, interval, positive
from bilevel.checks import Kinds
from bilevel.functional import mse_loss, per_example

B = 32


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def mlp(outputs=1, inputs=5):
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


CENTERED = bilevel.CenteredSTN(perturb="example")


def numbers():
    return torch.randn(B, 5), torch.randn(B, 1)


def error(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def check(net, loss, hyper, batch, method=CENTERED, outer=error):
    problem = Problem(net, inner_loss=loss, outer_loss=outer, hyper=hyper)
    Solver(problem, method=method).inner_step(batch)


def half(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


ONE = {"a": interval(0.0, 1.0, init=0.3)}
REACHES = r"hyper\['a'\] for one example reach the loss of other examples"


def test_half_precision_does_not_hide_a_mistake():
    def wrong(model, hyper, batch):
        return hyper["a"] * F.mse_loss(half(model, batch[0]).float(), batch[1])

    with pytest.raises(ValueError, match=REACHES):
        check(mlp(), wrong, ONE, numbers())


@pytest.mark.parametrize("method", ["stn", "centered_stn", "delta_stn"])
@pytest.mark.parametrize("last", [lambda y: y, lambda y: y.float()])
def test_half_precision_is_no_mistake(last, method):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), mlp(1, 8))

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return last(self.body(x))

    def loss(model, hyper, batch):
        return F.mse_loss(model(batch[0]).float(), batch[1]) + hyper["a"] * bilevel.l2(model.params)

    check(Net(), loss, ONE, numbers(), method, outer=lambda m, h, b: F.mse_loss(m(b[0]).float(), b[1]))


@pytest.mark.parametrize("rate", [1e-2, 1e-4, 1e-6])
def test_small_effects_are_seen_in_single_precision(rate):
    def wrong(model, hyper, batch):
        return error(model, hyper, batch) + hyper["a"].mean() * bilevel.l2(model.params).mean()

    def right(model, hyper, batch):
        return error(model, hyper, batch) + hyper["a"] * bilevel.l2(model.params)

    check(mlp(), right, {"a": positive(rate)}, numbers())
    with pytest.raises(ValueError, match=REACHES):
        check(mlp(), wrong, {"a": positive(rate)}, numbers())


def test_a_small_scale_of_the_method_does_not_hide_a_mistake():
    with pytest.raises(ValueError, match=REACHES):
        check(mlp(), lambda m, h, b: h["a"] * error(m, h, b), ONE, numbers(), CenteredSTN(scale=1e-3))


class Gate(nn.Module):
    """Takes the mean of a hyperparameter over the examples, as if it were a statistic."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3)

    def forward(self, x, gain):
        return self.net(x) * (gain.mean(0) if gain.ndim == 2 else gain)


class Means(nn.Module):
    """Returns a mean over the examples."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3)

    def forward(self, x):
        return self.net(x).square().mean(0)


def test_means_that_are_no_norm_are_refused():
    hyper = {"a": positive([1.0, 0.5, 2.0])}
    with pytest.raises(ValueError, match=REACHES):
        check(
            Gate(),
            lambda m, h, b: m(b[0], h["a"]).square().mean(-1),
            hyper,
            numbers(),
            outer=None or (lambda m, h, b: m(b[0], h["a"]).square().mean()),
        )
    with pytest.raises(ValueError, match="mixes the examples"):
        check(
            Means(),
            lambda m, h, b: (h["a"] * (m(b[0]) - 1) ** 2).mean(-1),
            hyper,
            numbers(),
            CenteredSTN(perturb="example"),
            outer=lambda m, h, b: m(b[0]).sum(),
        )


@pytest.mark.parametrize(
    "mean", [lambda x: x.mean(0), lambda x: x.mean(axis=0), lambda x: torch.mean(x, dim=0, keepdim=True)]
)
def test_norms_of_the_user_pass_in_every_spelling(mean):
    class Norm(nn.Module):
        def forward(self, x):
            centered = x - mean(x)
            return centered / (mean(centered.square()) + 1e-3).sqrt()

    net = nn.Sequential(nn.Linear(5, 6), Norm(), nn.Tanh(), nn.Linear(6, 1))
    check(net, lambda m, h, b: error(m, h, b) + h["a"] * bilevel.l2(m.params), ONE, numbers())


def test_pairs_at_any_distance_are_seen():
    for shape in ((-1, 2, 1), (-1, 2, 2), (-1, 2, 4), (2, -1)):

        def pairs(model, hyper, batch, shape=shape):
            z = model(batch[0]).view(*shape, 1)
            z = z if shape[0] == -1 else z.transpose(0, 1)
            return ((z[:, 0] - z[:, 1]) ** 2).mean() + hyper["a"] * bilevel.l2(model.params)

        with pytest.raises(ValueError, match="compares or normalises over the examples"):
            check(mlp(), pairs, ONE, tuple(part[:16] for part in numbers()), CenteredSTN(perturb="example"))


def test_generators_and_counters_of_the_user_are_no_mistake():
    """Equal inputs give other losses; nothing can be compared then."""
    generator, numpy_generator = torch.Generator().manual_seed(0), np.random.default_rng(0)
    calls = iter(range(10**6))

    def penalty(model, hyper):
        return hyper["a"] * bilevel.l2(model.params)

    noisy = {
        "torch": lambda m, h, b: mse_loss(m(b[0] + torch.randn(b[0].shape, generator=generator)), b[1]) + penalty(m, h),
        "numpy": lambda m, h, b: (
            mse_loss(m(b[0] + torch.tensor(numpy_generator.normal(size=b[0].shape)).float()), b[1]) + penalty(m, h)
        ),
        "counter": lambda m, h, b: (1 + 0.1 * next(calls)) * mse_loss(m(b[0]), b[1]) + penalty(m, h),
    }
    for loss in noisy.values():
        check(mlp(), loss, ONE, numbers())


def test_draws_that_depend_on_values_are_no_mistake():
    net = nn.Sequential(nn.Linear(5, 6), nn.RReLU(), nn.Linear(6, 1))
    check(net, lambda m, h, b: error(m, h, b) + h["a"] * bilevel.l2(m.params), ONE, numbers())

    def mixup(draw, model, hyper, batch):
        share = draw(hyper["a"], len(batch[0]))[:, None]
        return F.mse_loss(model(share * batch[0] + (1 - share) * batch[0].flip(0)), batch[1])

    def beta(a, count):
        return torch.distributions.Beta(a, a).sample(() if a.ndim else (count,))

    def numpy_beta(a, count):
        return torch.tensor(np.random.beta(a.detach().numpy(), a.detach().numpy(), size=count)).float()

    def python_beta(a, count):
        return torch.tensor([random.betavariate(float(v), float(v)) for v in a.detach().expand(count)])

    for draw in (beta, numpy_beta, python_beta):
        check(mlp(), partial(mixup, draw), {"a": positive(0.4)}, numbers())


def test_numbers_in_the_shape_of_a_hyperparameter_are_no_mistake():
    def loss(model, hyper, batch):
        return mse_loss(model(batch[0]), batch[1]) * (1 + 20 * (torch.rand_like(hyper["a"]) < hyper["a"]))

    check(mlp(), loss, {"a": interval(0.0, 1.0, init=0.02)}, numbers())


def test_random_states_of_numpy_and_python_stay():
    def loss(model, hyper, batch):
        return mse_loss(model(batch[0] * (1 + 0.1 * np.random.rand() + 0.1 * random.random())), batch[1]) * hyper["a"]

    np.random.seed(3)
    random.seed(3)
    problem = Problem(mlp(), inner_loss=loss, outer_loss=loss, hyper=ONE)
    Solver(problem, method="stn").inner_step(numbers())
    found = np.random.rand(), random.random()
    np.random.seed(3)
    random.seed(3)
    np.random.rand(), random.random()  # those of the step itself
    assert found == (np.random.rand(), random.random())


def test_a_batch_that_is_changed_in_place_is_changed_by_the_step_alone():
    def loss(model, hyper, batch):
        batch[0].sub_(3).div_(5)
        return error(model, hyper, batch) + hyper["a"] * bilevel.l2(model.params)

    x, y = numbers()
    batch = x.clone(), y
    check(mlp(), loss, ONE, batch, "implicit_exact")
    torch.testing.assert_close(batch[0], (x - 3) / 5)


def test_penalties_may_choose_weights_by_shape():
    def loss(model, hyper, batch):
        matrices = [w for w in model.params.values() if w.ndim > 1 and w.numel() > 2 and len(w.shape) == w.dim()]
        return error(model, hyper, batch) + hyper["a"] * bilevel.l2(matrices)

    check(mlp(), loss, ONE, numbers())


def decayed(data):
    return lambda m, h, b: data(m, b) + h["a"] * bilevel.l2(m.params)


@pytest.mark.parametrize(
    ("method", "target"), [("delta_stn", 1.0), ("implicit_cg", 1.0), ("delta_stn", 100.0), ("implicit_exact", 9.0)]
)
@pytest.mark.parametrize("loss", [F.smooth_l1_loss, partial(F.huber_loss, delta=0.1)])
def test_smooth_losses_far_from_their_curvature_are_accepted(loss, method, target):
    method = bilevel.Implicit(bilevel.Exact(damping=10.0)) if method == "implicit_exact" else method
    check(mlp(), decayed(lambda m, b: loss(m(b[0]), target * (b[1] + 5))), ONE, numbers(), method)


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_saturated_losses_are_accepted(size):
    data = lambda m, b: F.binary_cross_entropy_with_logits(m(size * b[0]), (b[1] > 0).float())  # noqa: E731
    check(mlp(), decayed(data), ONE, numbers(), "delta_stn")


def test_losses_without_second_derivatives_are_accepted_where_none_is_needed():
    lengths = torch.full((4,), 6), torch.full((4,), 2)

    def ctc(model, batch):
        return F.ctc_loss(model(batch[0]).unflatten(1, (6, 3)).log_softmax(2).transpose(0, 1), batch[1], *lengths)

    batch = torch.randn(4, 5), torch.randint(1, 3, (4, 2))
    for method in ("centered_stn", "delta_stn"):
        check(mlp(18), decayed(ctc), ONE, batch, method, outer=lambda m, h, b: ctc(m, b))


def test_log_probabilities_with_a_trace_of_curvature_are_refused():
    def traced(model, batch):
        return F.nll_loss(model(batch[0]), batch[1]) + 1e-6 * model(batch[0]).square().mean()

    batch = torch.randn(B, 5), torch.arange(B) % 3
    net = nn.Sequential(mlp(3), nn.LogSoftmax(1))
    with pytest.raises(ValueError, match="log-probabilities: return logits"):
        check(net, decayed(traced), ONE, batch, "delta_stn", outer=lambda m, h, b: traced(m, b))


W = torch.linspace(-1, 2, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("penalty", "kink"),
    [
        (lambda w: w.abs().sum(), "entries are zero"),
        (lambda w: (w - W.to(w)).abs().sum(), "at the start"),
        (lambda w: w.square().sum(), None),
        (lambda w: (w.norm() - 1) ** 2, None),
        (lambda w: -torch.distributions.Normal(0.0, w.square().sum()).log_prob(torch.ones(())), None),
    ],
)
def test_kinks_without_a_network(penalty, kink, dtype):
    """Also where the penalty is small beside the curvature of the data, and where the loss is not defined at zero."""
    x = torch.randn(B, 24, dtype=dtype)

    def loss(model, hyper, batch):
        w = model.params["w"]
        hidden = torch.relu(batch @ w.view(24, 1))
        return (10 * batch @ w - 1).square().mean() + hidden.mean() + hyper["a"] * penalty(w)

    problem = Problem({"w": W.to(dtype)}, inner_loss=loss, outer_loss=loss, hyper={"a": positive(0.1)})
    solver = Solver(problem, method="implicit_exact")
    if kink is None:
        solver.inner_step(x)
    else:
        with pytest.raises(ValueError, match=rf"kink in model.params\['w'\] where .*{kink}"):
            solver.inner_step(x)


def test_weights_in_their_domain_only():
    """A covariance that is factored: near zero there is none."""

    def loss(model, hyper, batch):
        factor = torch.linalg.cholesky(model.params["c"] @ model.params["c"].T + 1e-9 * torch.eye(3))
        return (
            torch.linalg.solve(factor, batch.T).square().mean()
            + factor.diagonal().log().sum()
            + hyper["a"] * bilevel.l2(model.params)
        )

    problem = Problem({"c": torch.eye(3) + 0.1}, inner_loss=loss, outer_loss=loss, hyper=ONE)
    Solver(problem, method="implicit_exact").inner_step(torch.randn(B, 3))


def test_a_parameter_without_dimensions():
    class ReZero(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.gain, self.last = nn.Linear(5, 5), nn.Parameter(torch.zeros(())), nn.Linear(5, 1)

        def forward(self, x):
            return self.last(x + self.gain * self.layer(x))

    for method in ("stn", "centered_stn", "delta_stn"):
        check(ReZero(), lambda m, h, b: error(m, h, b) + h["a"] * bilevel.l2(m.params), ONE, numbers(), method)


def test_tasks_in_turn_are_read_in_turn():
    """A hyperparameter that the first batch leaves alone is read before the first outer step."""

    def loss(model, hyper, batch):
        return hyper[batch[2]] * mse_loss(model(batch[0]), batch[1])

    batches = [(*numbers(), "a"), (*numbers(), "b")]
    problem = Problem(mlp(), inner_loss=loss, outer_loss=error, hyper=ONE | {"b": positive(1.0)})
    assert bilevel.solve(problem, batches, batches, method="centered_stn", steps=2, progress=False).stopped == "steps"


def test_words_in_a_batch_are_another_kind():
    kinds, x = Kinds(), torch.zeros(4, 2)
    kinds.add(("a", x), 4)
    assert not kinds.new(("a", x + 1), 4)
    assert kinds.new(("b", x), 4)


def test_kinds_come_to_an_end():
    """Batches of many sizes and lengths: the checks stop, except where a dimension is as long as the batch."""
    kinds, new = Kinds(), []
    for count in range(20, 60):
        batch = torch.zeros(count, 200 - count)
        new.append(kinds.new(batch, count))
        if new[-1]:
            kinds.add(batch, count)
    assert sum(new) < 20
    assert kinds.new(torch.zeros(33, 33), 33)


class TimeFirst(nn.Module):
    """As many time steps as examples, which it puts first and then averages over."""

    def __init__(self, pool):
        super().__init__()
        self.first, self.last, self.pool = nn.Linear(5, 4), nn.Linear(4, 1), pool

    def forward(self, x):
        return self.last(self.pool(torch.tanh(self.first(x.transpose(0, 1)))))


@pytest.mark.parametrize("pool", [lambda x: x.mean(0), lambda x: x.sum(0) / 8, lambda x: x[-1]])
def test_an_average_over_time_is_no_norm(pool):
    """Right, since the examples are followed; a mean over time is held fixed meanwhile, and found out to be none."""
    batch = torch.randn(8, 8, 5), torch.randn(8, 1)
    for perturb in ("example", "batch"):
        check(
            TimeFirst(pool),
            lambda m, h, b: mse_loss(m(b[0]), b[1]) + h["a"] * bilevel.l2(m.params),
            ONE,
            batch,
            CenteredSTN(perturb=perturb),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_do_not_hide_a_mistake(dtype):
    for seed in range(4):
        torch.manual_seed(seed)
        batch = tuple(part.to(dtype) for part in numbers())
        net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)
        with pytest.raises(ValueError, match=REACHES):
            check(net, lambda m, h, b: h["a"] * error(m, h, b), ONE, batch)
        check(net, lambda m, h, b: error(m, h, b) + h["a"] * bilevel.l2(m.params), ONE, batch)


def test_kinks_in_large_and_in_transposed_weights():
    def lasso(model, hyper, batch):
        return (model.params["w"] - 1).square().mean() + hyper["a"] * model.params["w"].abs().sum()

    for w in (torch.full((2**24 + 4,), 1e-3), torch.full((16, 10), 1e-3).T):
        problem = Problem({"w": w}, inner_loss=lasso, outer_loss=lasso, hyper={"a": positive(1.0)})
        with pytest.raises(ValueError, match=r"kink in model\.params"):
            Solver(problem, method="implicit_identity").inner_step()


def test_integers_that_reach_other_examples_are_refused():
    def wrong(model, hyper, batch):
        return F.mse_loss(
            model(batch[0] * (1 + per_example(hyper["a"].flip(0) if hyper["a"].ndim else hyper["a"], batch[0]))),
            batch[1],
        )

    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match=REACHES):
            check(mlp(), wrong, {"a": bilevel.integer(0, 1, init=0)}, numbers())
