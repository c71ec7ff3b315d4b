"""Plausible losses and networks under perturbations of their own for all examples: right, or refused.

The reference takes one example at a time: weights multiplied out, hyperparameters of their own shape, no row anywhere.
A loss is refused exactly if what the library would compute differs from it.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import bilevel
from bilevel import Model, Problem, Solver, interval, positive, real
from bilevel.functional import cross_entropy, dropout, mse_loss, per_example, temperature

B = 6


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def mlp(outputs=1, inputs=5):
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


class Images(nn.Module):
    """Flattens images as wide as the batch is long."""

    def __init__(self, outputs=3):
        super().__init__()
        self.layer = nn.Linear(B * B, outputs)

    def forward(self, x):
        return self.layer(torch.tanh(x).flatten(1))


class Scaled(nn.Module):
    """Takes a strength inside; ``use`` says what it does with it."""

    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(5, B), nn.Linear(B, 1), use

    def forward(self, x, strength):
        return self.last(torch.tanh(self.use(self.first(x), strength)))


class Heads(nn.Module):
    """Several outputs, nested."""

    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, batch):
        hidden = torch.tanh(self.body(batch["x"]))
        return {"value": self.one(hidden), "classes": (self.two(hidden), [hidden])}


def numbers():
    return torch.randn(B, 5), torch.randn(B, 1)


def classes(count=3):
    return torch.randn(B, 5), torch.arange(B) % count


def pictures():
    return torch.randn(B, 1, B, B), torch.arange(B) % 3


def nested():
    return {"x": torch.randn(B, 5), "y": (torch.randn(B, 1), torch.arange(B) % 3)}


def error(model, batch):
    return (model(batch[0]) - batch[1]) ** 2


def decay(model, hyper):
    return hyper["decay"] * bilevel.l2(model.params)


ONE, UNIT = {"a": real(0.7)}, {"a": interval(0.0, 1.0, init=0.3)}
DECAY = {"decay": positive(0.02)}
PAIR = {"a": positive([0.5, 2.0])}
SQUARE = {"a": real(torch.linspace(0.2, 1.0, B))}
REACHES = r"hyper\['a'\] for one example reach the loss of other examples"


@dataclass
class Code:
    """What a user might write, and what should become of it: nothing (it is right), or the words of a refusal."""

    loss: Any
    hyper: dict[str, Any]
    batch: Any = numbers
    net: Any = mlp
    refused: str | None = None


CODES = {
    # The rows of the table in the issue.
    "task weights on means": Code(
        lambda m, h, b: h["a"] * F.mse_loss(m(b[0]), b[1]) + (1 - h["a"]) * m(b[0]).square().mean(),
        UNIT,
        refused=REACHES,
    ),
    "err of shape (B, 1)": Code(lambda m, h, b: (h["a"] * error(m, b)).mean(), ONE, refused=REACHES),
    "first row of shape (1,)": Code(
        lambda m, h, b: error(m, b).mean() + h["a"][0] * bilevel.l2(m.params),
        {"a": positive([0.02])},
        refused=REACHES,
    ),
    "brightness along an axis": Code(
        lambda m, h, b: F.cross_entropy(m(b[0] * h["a"]), b[1]),
        ONE,
        pictures,
        Images,
        refused=REACHES,
    ),
    "temperature along the classes": Code(
        lambda m, h, b: F.cross_entropy(m(b[0]) / h["a"], b[1]),
        ONE,
        lambda: classes(B),
        lambda: mlp(B),
        refused=REACHES,
    ),
    "a learned loss r @ a": Code(
        lambda m, h, b: (error(m, b).squeeze(1) @ h["a"]).mean() / B,
        SQUARE,
        refused=r"means something else by hyper\['a'\]",
    ),
    # The same, as it should be written.
    "task weights per example": Code(
        lambda m, h, b: h["a"] * mse_loss(m(b[0]), b[1]) + (1 - h["a"]) * m(b[0]).square().mean(1),
        UNIT,
    ),
    "err of shape (B,)": Code(lambda m, h, b: h["a"] * error(m, b).squeeze(1), ONE),
    "last entry of shape (1,)": Code(
        lambda m, h, b: error(m, b).mean() + h["a"][..., 0] * bilevel.l2(m.params),
        {"a": positive([0.02])},
    ),
    "brightness per example": Code(
        lambda m, h, b: F.cross_entropy(m(b[0] * per_example(h["a"], b[0])), b[1]),
        ONE,
        pictures,
        Images,
    ),
    "temperature per example": Code(
        lambda m, h, b: F.cross_entropy(temperature(m(b[0]), h["a"]), b[1]),
        ONE,
        lambda: classes(B),
        lambda: mlp(B),
    ),
    # 25 more.
    "decay beside a mean": Code(lambda m, h, b: F.mse_loss(m(b[0]), b[1]) + decay(m, h), DECAY),
    "decay per layer": Code(
        lambda m, h, b: (
            F.mse_loss(m(b[0]), b[1])
            + sum(h["a"][..., i] * bilevel.l2([w]) for i, w in enumerate([m.params["0.weight"], m.params["2.weight"]]))
        ),
        PAIR,
    ),
    "decay per layer from the left": Code(
        lambda m, h, b: F.mse_loss(m(b[0]), b[1]) + h["a"][0].sum() * bilevel.l2(m.params),
        PAIR,
        refused=REACHES,
    ),
    "decay times a mean of penalties": Code(
        lambda m, h, b: F.mse_loss(m(b[0]), b[1]) + h["a"].mean() * bilevel.l2(m.params).mean(),
        UNIT,
        refused=REACHES,
    ),
    "elastic net": Code(
        lambda m, h, b: (
            F.mse_loss(m(b[0]), b[1]) + h["a"][..., 0] * bilevel.l1(m.params) + h["a"][..., 1] * bilevel.l2(m.params)
        ),
        {"a": positive([0.01, 0.02])},
    ),
    "weighted mean": Code(
        lambda m, h, b: (h["a"] * error(m, b).squeeze(1)).sum() / h["a"].sum(),
        UNIT,
        refused=REACHES,
    ),
    "weighted mean of something else": Code(
        lambda m, h, b: (b[0][:, 0].exp() * error(m, b).squeeze(1)).mean() + decay(m, h),
        DECAY,
    ),
    "label smoothing": Code(
        lambda m, h, b: cross_entropy(m(b[0]), b[1], label_smoothing=h["a"]),
        UNIT,
        classes,
        lambda: mlp(3),
    ),
    "label smoothing on means": Code(
        lambda m, h, b: (1 - h["a"]) * F.cross_entropy(m(b[0]), b[1]) - h["a"] * F.log_softmax(m(b[0]), 1).mean(),
        UNIT,
        classes,
        lambda: mlp(3),
        refused=REACHES,
    ),
    "class weights": Code(
        lambda m, h, b: cross_entropy(m(b[0]), b[1], weight=h["a"]),
        {"a": positive([0.5, 1.0, 2.0])},
        classes,
        lambda: mlp(3),
    ),
    "class weights of the first example": Code(
        lambda m, h, b: (h["a"][0][b[1]] * F.cross_entropy(m(b[0]), b[1], reduction="none")).mean(),
        {"a": positive([0.5, 1.0, 2.0])},
        classes,
        lambda: mlp(3),
        refused=REACHES,
    ),
    "class weights by index": Code(
        lambda m, h, b: (
            h["a"].expand(len(b[1]), 3).gather(1, b[1][:, None]).squeeze(1)
            * F.cross_entropy(m(b[0]), b[1], reduction="none")
        ),
        {"a": positive([0.5, 1.0, 2.0])},
        classes,
        lambda: mlp(3),
    ),
    "nested batch, two heads": Code(
        lambda m, h, b: (
            lambda out: (
                h["a"][..., 0] * mse_loss(out["value"], b["y"][0])
                + h["a"][..., 1] * cross_entropy(out["classes"][0], b["y"][1])
            )
        )(m(b)),
        PAIR,
        nested,
        Heads,
    ),
    "nested batch, two heads on means": Code(
        lambda m, h, b: (
            lambda out: (
                h["a"][..., 0] * F.mse_loss(out["value"], b["y"][0])
                + h["a"][..., 1] * F.cross_entropy(out["classes"][0], b["y"][1])
            ).mean()
        )(m(b)),
        PAIR,
        nested,
        Heads,
        refused=REACHES,
    ),
    "activity penalty": Code(
        lambda m, h, b: (
            lambda out: F.mse_loss(out["value"], b["y"][0]) + h["decay"] * out["classes"][1][0].square().sum(1)
        )(m(b)),
        DECAY,
        nested,
        Heads,
    ),
    "contrastive": Code(
        lambda m, h, b: F.cross_entropy(m(b[0]) @ m(b[0]).T, torch.arange(len(b[0])).flip(0)) + decay(m, h).mean(),
        DECAY,
        numbers,
        lambda: mlp(4),
        refused="compares or normalises over the examples",
    ),
    "batch hard": Code(
        lambda m, h, b: torch.cdist(m(b[0]), m(b[0])).amax(1) + decay(m, h),
        DECAY,
        numbers,
        lambda: mlp(4),
        refused="compares or normalises over the examples",
    ),
    "normalised by the batch": Code(
        lambda m, h, b: error(m, b).sum() / (1 + m(b[0]).square().sum()) + decay(m, h),
        DECAY,
        refused="compares or normalises over the examples",
    ),
    "another row": Code(
        lambda m, h, b: h["a"].flip(0) * error(m, b).squeeze(1) if h["a"].ndim else h["a"] * error(m, b)[:, 0],
        ONE,
        refused=REACHES,
    ),
    "noise that is drawn outside": Code(
        lambda m, h, b: F.mse_loss(m(b[0] + per_example(h["a"], b[0]) * b[0].cos()), b[1]),
        ONE,
    ),
    "noise along the features": Code(
        lambda m, h, b: F.mse_loss(m(b[0] + h["a"] * b[0].cos()), b[1]),
        ONE,
        lambda: (torch.randn(B, B), torch.randn(B, 1)),
        lambda: mlp(1, B),
        refused=REACHES,
    ),
    "a strength inside the network": Code(
        lambda m, h, b: F.mse_loss(m(b[0], h["a"]), b[1]),
        ONE,
        net=lambda: Scaled(lambda x, s: x * per_example(s, x)),
    ),
    "a strength along the units": Code(
        lambda m, h, b: F.mse_loss(m(b[0], h["a"]), b[1]),
        ONE,
        net=lambda: Scaled(lambda x, s: x * s),
        refused=REACHES,
    ),
    "a strength of the neighbour": Code(
        lambda m, h, b: F.mse_loss(m(b[0], h["a"]), b[1]),
        ONE,
        net=lambda: Scaled(lambda x, s: x * per_example(s.roll(1, 0) if s.ndim else s, x)),
        refused=REACHES,
    ),
    "the mean of a strength": Code(
        lambda m, h, b: F.mse_loss(m(b[0], h["a"].mean()), b[1]),
        ONE,
        net=lambda: Scaled(lambda x, s: x * s),
        refused=REACHES,
    ),
    "features as a hyperparameter": Code(
        lambda m, h, b: F.mse_loss(m(b[0] * h["a"]), b[1]),
        {"a": positive(torch.ones(5))},
    ),
    "features of the first example": Code(
        lambda m, h, b: F.mse_loss(m(b[0] * h["a"][0]), b[1]),
        {"a": positive(torch.ones(5))},
        refused=REACHES,
    ),
    "outer product of a matrix": Code(
        lambda m, h, b: mse_loss(m((b[0][:, None, :] * h["a"]).sum(-1)), b[1]),
        {"a": real(torch.eye(5))},
    ),
    "shared": Code(
        lambda m, h, b: h["a"] * F.mse_loss(m(b[0]), b[1]) + decay(m, h),
        {"a": positive(0.5, shared=True), **DECAY},
    ),
    "two temperatures in distillation": Code(
        lambda m, h, b: (
            h["a"][..., 0] ** 2
            * F.kl_div(
                F.log_softmax(temperature(m(b[0]), h["a"][..., 0]), 1), b[0][:, :3].softmax(1), reduction="none"
            ).sum(1)
            + h["a"][..., 1] * cross_entropy(m(b[0]), b[1])
        ),
        PAIR,
        classes,
        lambda: mlp(3),
    ),
}


def at(batch, i):
    return pytree.tree_map(lambda x: x[i : i + 1], batch)


def slopes(loss, params):
    found = torch.autograd.grad(loss, params, allow_unused=True)
    return torch.cat([
        torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(params, found, strict=True)
    ])


def library_and_reference(solver, batch):
    """Gradients of all that a centered STN trains with a random response, and those of one example at a time."""
    response, problem = solver.response, solver.problem
    for part in response.theta.parameters():
        nn.init.normal_(part, std=0.3)
    noise = 0.7 * torch.randn(B, len(solver.vector))
    noise = torch.where(problem.space.shared(), noise[:1], noise)
    hyper = solver.vector.detach()
    params = [*response.parameters()]
    ours = problem.inner_loss(response.affine(noise), hyper + noise, batch).value
    theirs: list[Tensor] = []
    for i, shift in enumerate(noise):
        change = response.change(shift)
        weights = {name: w + change[name] for name, w in response.inner.params().items()}
        predict = response.inner.predictor()
        model = Model(weights, lambda *args, weights=weights, predict=predict: predict(weights, *args))
        theirs.append(problem.inner_loss(model, hyper + shift, at(batch, i)).value)
    return slopes(ours, params), slopes(torch.stack(theirs).mean(), params)


@pytest.mark.parametrize("name", CODES)
def test_right_or_refused(name):
    code = CODES[name]
    net, batch = code.net(), code.batch()
    problem = Problem(net, inner_loss=code.loss, outer_loss=code.loss, hyper=code.hyper)
    solver = Solver(problem, method=bilevel.CenteredSTN(perturb="example"))
    if code.refused is None:
        solver.inner_step(batch)
    else:
        with pytest.raises(ValueError, match=code.refused):
            solver.inner_step(batch)
        with pytest.raises(ValueError, match=r"perturb='batch'"):  # and again, with the remedy
            solver.inner_step(batch)
    try:
        ours, theirs = library_and_reference(solver, batch)
    except (IndexError, RuntimeError):
        assert code.refused, "the reference failed"  # the loss does not take one example at a time
        return
    if code.refused is None:
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    else:
        assert (ours - theirs).norm() > 1e-3 * theirs.norm(), "it was refused, but it is right"


@pytest.mark.parametrize("method", [bilevel.STN, bilevel.CenteredSTN, bilevel.DeltaSTN])
@pytest.mark.parametrize("name", [name for name, code in CODES.items() if code.refused])
def test_every_method_refuses_and_changes_nothing(name, method):
    code = CODES[name]
    problem = Problem(code.net(), inner_loss=code.loss, outer_loss=code.loss, hyper=code.hyper)
    solver = Solver(problem, method=method(perturb="example"))
    before = solver.state_dict()
    with pytest.raises(ValueError, match=code.refused):
        solver.inner_step(code.batch())
    after = solver.state_dict()
    leaves = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in leaves)


@pytest.mark.parametrize(
    "name", ["task weights on means", "brightness along an axis", "contrastive", "a learned loss r @ a"]
)
@pytest.mark.parametrize("method", [bilevel.DeltaSTN, bilevel.CenteredSTN, bilevel.STN])
def test_the_remedy_works(name, method):
    """One perturbation for all examples: the hyperparameters have their own shapes."""
    code = CODES[name]
    problem = Problem(code.net(), inner_loss=code.loss, outer_loss=code.loss, hyper=code.hyper)
    solver, batch = Solver(problem, method=method(perturb="batch")), code.batch()
    solver.inner_step(batch)
    solver.outer_step(batch, batch)


def test_the_outer_loss_is_checked_where_it_is_perturbed():
    code = CODES["task weights on means"]
    right = CODES["task weights per example"]
    problem = Problem(mlp(), inner_loss=right.loss, outer_loss=code.loss, hyper=UNIT)
    batch = numbers()
    for entropy, refused in ((1e-3, True), (None, False)):
        solver = Solver(problem, method=bilevel.DeltaSTN(entropy=entropy))
        solver.inner_step(batch)
        if refused:
            with pytest.raises(ValueError, match=r"outer_loss lets the value of hyper\['a'\]"):
                solver.outer_step(batch, batch)
        else:
            solver.outer_step(batch, batch)


def test_dropout_rates_inside_batch_norm_networks_are_right():
    """The statistics couple the examples, as in the paper; the masks do not."""

    class Net(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(5, 4), norm, nn.Linear(4, 1)

        def forward(self, x, rate):
            return self.last(torch.tanh(self.norm(dropout(self.first(x), rate, training=self.training))))

    class Own(nn.Module):
        def forward(self, x):
            return (x - x.mean(0)) / (x.var(0, keepdim=True) + 1e-3).sqrt()

    def loss(model, hyper, batch):
        return F.mse_loss(model(batch[0], hyper["a"]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    for norm in (nn.BatchNorm1d(4), Own()):
        problem = Problem(Net(norm), inner_loss=loss, outer_loss=loss, hyper=UNIT | DECAY)
        for method in ("stn", "delta_stn"):
            Solver(problem, method=method).inner_step(numbers())


def test_unread_hyperparameters_are_refused():
    """As soon as both losses have been seen; one that only the outer loss reads is tuned by its direct gradient."""

    def inner(model, hyper, batch):
        return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    def outer(model, hyper, batch):
        return F.mse_loss(hyper["b"] * model(batch[0]), batch[1])

    batch = numbers()
    for hyper, refused in ((DECAY | {"b": real(1.0)}, None), (DECAY | {"b": real(1.0), "idle": real(0.0)}, "idle")):
        problem = Problem(mlp(), inner_loss=inner, outer_loss=outer, hyper=hyper)
        for method in ("stn", "delta_stn"):
            solver = Solver(problem, method=method)
            solver.inner_step(batch)
            before = solver.hyper
            if refused is None:
                assert solver.outer_step(batch, batch).direct.any()
            else:
                with pytest.raises(ValueError, match=r"neither inner_loss nor outer_loss reads hyper\['idle'\]"):
                    solver.outer_step(batch, batch)
                assert all(torch.equal(before[name], value) for name, value in solver.hyper.items())


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h["a"],
        lambda h: h.get("a"),
        lambda h: dict(h)["a"],
        lambda h: {**h}["a"],
        lambda h: next(iter(h.values())),
        lambda h: dict(h.items())["a"],
        lambda h: next(h[name] for name in h),
    ],
)
def test_every_way_to_read_counts(read):
    def loss(model, hyper, batch):
        return read(hyper) * mse_loss(model(batch[0]), batch[1])

    problem, batch = Problem(mlp(), inner_loss=loss, outer_loss=loss, hyper=ONE), numbers()
    solver = Solver(problem, method="stn")
    solver.inner_step(batch)
    solver.outer_step(batch, batch)


def test_solve_refuses_an_unread_hyperparameter_before_the_warm_up():
    calls = []

    def inner(model, hyper, batch):
        calls.append("inner")
        return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    def outer(model, hyper, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    problem = Problem(mlp(), inner_loss=inner, outer_loss=outer, hyper=DECAY | {"idle": real(0.0)})
    with pytest.raises(ValueError, match=r"reads hyper\['idle'\]"):
        bilevel.solve(problem, [numbers()], [numbers()], method="stn", steps=100, warmup=99, progress=False)
    assert len(calls) < 40
