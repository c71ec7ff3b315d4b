"""Regularizers against plain loops over examples, and under every kind of method."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bilevel
from bilevel.regularizers import (
    CutMix,
    InputNoise,
    LabelSmoothing,
    Mixture,
    Mixup,
    WeightDecay,
    regularized_loss,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.conv(x))).flatten(1))


def double(seed=0, count=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64), torch.arange(count) % 3


X = torch.ones(2)


def seeded(function):
    torch.manual_seed(3)
    return function()


@pytest.mark.parametrize("strength", [torch.tensor(0.7).double(), torch.linspace(0, 1, 6).double()])
def test_mixup_is_a_loop_over_examples(strength):
    x, y = double()
    mixed = seeded(lambda: Mixup().on_batch(Mixture.of(x, y), {"mixup": strength}))

    def draws():
        return torch.rand(6, dtype=torch.float64).argsort(), torch.rand(6, dtype=torch.float64)

    partner, u = seeded(draws)
    logits = torch.randn(6, 3, dtype=torch.float64)
    values = sum((1 if a is None else a) * F.cross_entropy(logits, t, reduction="none") for a, t in mixed.parts)
    for i in range(6):
        m = float(strength.expand(6)[i]) * float(u[i]) / 2
        torch.testing.assert_close(mixed.x[i], (1 - m) * x[i] + m * x[partner[i]], rtol=0, atol=1e-12)
        soft = (1 - m) * F.one_hot(y[i], 3).double() + m * F.one_hot(y[partner[i]], 3).double()
        torch.testing.assert_close(values[i], -(soft * logits[i].log_softmax(0)).sum(), rtol=0, atol=1e-12)


def test_cutmix_pastes_a_box_and_shares_the_loss_by_area():
    x, y = double(count=40)
    x = x.repeat(1, 1, 5, 3)  # 20 by 12
    strength = torch.linspace(0, 1, 40).double()
    mixed = seeded(lambda: CutMix().on_batch(Mixture.of(x, y), {"cutmix": strength}))

    def draws():
        first = torch.rand(40, dtype=torch.float64).argsort()
        return first, *(torch.rand(40, dtype=torch.float64) for _ in range(3))

    partner, u, top, left = seeded(draws)
    assert mixed.parts[1][0][0] == 0
    for i in range(40):
        side = (float(strength[i]) * float(u[i])) ** 0.5
        expected, area = x[i].clone(), 0
        for row in range(20):
            for column in range(12):
                inside = -side / 2 <= (row + 0.5) / 20 - float(top[i]) < side / 2
                if inside and -side / 2 <= (column + 0.5) / 12 - float(left[i]) < side / 2:
                    expected[:, row, column] = x[partner[i], :, row, column]
                    area += 1
        assert torch.equal(mixed.x[i], expected)
        assert float(mixed.parts[1][0][i]) == pytest.approx(area / 240)
        assert torch.equal(mixed.parts[1][1][i], y[partner[i]])
    shares = sum(a for a, _ in mixed.parts)
    torch.testing.assert_close(shares, torch.ones(40, dtype=torch.float64))


def test_two_mixtures_take_partners_as_they_were():
    """Else the strength of one example would reach the loss of another."""
    x, y = double()
    batch = Mixture.of(x, y)

    def change(strength):
        hyper = {"mixup": strength, "cutmix": strength}
        mixed = seeded(lambda: CutMix().on_batch(Mixup().on_batch(batch, hyper), hyper))
        return mixed.x, torch.stack([a for a, _ in mixed.parts])

    low, high = torch.full((6,), 0.3).double(), torch.full((6,), 0.9).double()
    for i in range(6):
        other = low.clone()
        other[i] = high[i]
        (x0, a0), (x1, a1) = change(low), change(other)
        same = torch.arange(6) != i
        assert torch.equal(x0[same], x1[same])
        assert torch.equal(a0[:, same], a1[:, same])
        assert not torch.equal(a0[:, i], a1[:, i])
        torch.testing.assert_close(a1.sum(0), torch.ones(6).double())


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("one", {"weight_decay": ("conv.weight", "out.weight")}),
        ("layer", {"weight_decay.conv": ("conv.weight",), "weight_decay.out": ("out.weight",)}),
        ("tensor", {"weight_decay.conv.weight": ("conv.weight",), "weight_decay.out.weight": ("out.weight",)}),
        ({"last": "out.*"}, {"weight_decay.last": ("out.weight",)}),
    ],
)
def test_weight_decay_by_groups(groups, expected):
    net = Net().double()
    decay = WeightDecay(net, groups)
    assert {name: entry.weights for name, entry in decay.hyper.items()} == expected
    params = dict(net.named_parameters())
    hyper = {name: torch.tensor([0.1, 0.7]).double() * (k + 1) for k, name in enumerate(expected)}
    by_hand = sum(hyper[k][:, None] * (params[w] ** 2).sum() for k, weights in expected.items() for w in weights)
    torch.testing.assert_close(decay.penalty(params, hyper), by_hand.flatten()[:2])


def test_weight_decay_leaves_out_biases_norms_and_frozen_weights():
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm((3, 2)), nn.Linear(2, 2))
    net[0].weight.requires_grad_(False)
    assert WeightDecay(net, "one").groups == {"weight_decay": ("2.weight",)}
    all_of_them = WeightDecay(net, "one", everything=True).groups["weight_decay"]
    assert all_of_them == ("0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    with pytest.raises(ValueError, match="no trainable weight with two dimensions"):
        WeightDecay(nn.LayerNorm(3))
    with pytest.raises(ValueError, match=r"nothing is left for the group 'a', 'x\*'; there are 2.weight"):
        WeightDecay(net, {"a": "x*"})
    with pytest.raises(ValueError, match="groups must be"):
        WeightDecay(net, "layers")
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        WeightDecay([])


def problem_of(*used, net=None):
    net = Net().double() if net is None else net
    hyper = {}
    for regularizer in used:
        hyper |= regularizer.hyper if not isinstance(regularizer, type) else {}

    def train_loss(model, hyper, batch):
        x, y = batch
        return regularized_loss(model, hyper, x, y, criterion=bilevel.functional.cross_entropy, regularizers=used)

    return bilevel.Problem(
        net,
        inner_loss=train_loss,
        outer_loss=lambda model, hyper, batch: F.cross_entropy(model(batch[0]), batch[1]),
        hyper=hyper,
    )


EVERYWHERE = {
    "weight_decay": lambda net: WeightDecay(net),
    "label_smoothing": lambda net: LabelSmoothing(),
    "mixup": lambda net: Mixup(),
    "input_noise": lambda net: InputNoise(),
}
BY_VALUE = {"cutmix": lambda net: CutMix(), "augment": lambda net: bilevel.augment.images(flip=True)}
SELF_TUNING = ["stn", "centered_stn", "delta_stn", bilevel.DeltaSTN(perturb="batch"), bilevel.CenteredSTN(entropy=1e-3)]
OTHERS = [bilevel.Implicit(bilevel.CG(damping=0.1), curvature="gauss_newton"), bilevel.Unrolled(steps=2)]


@pytest.mark.parametrize("method", [*SELF_TUNING, *OTHERS], ids=str)
@pytest.mark.parametrize("name", [*EVERYWHERE, *BY_VALUE])
def test_regularizers_under_every_method(name, method):
    """The checks of the library pass, and λ moves; what has no derivative is refused by those that need one."""
    net = Net().double()
    regularizer = (EVERYWHERE | BY_VALUE)[name](net)
    problem = problem_of(regularizer, net=net)
    options = {"steps": 3, "warmup": 0, "progress": False, "method": method}
    if name in BY_VALUE and method in OTHERS:
        with pytest.raises(ValueError, match=f"cannot tune hyper\\['{name}"):
            bilevel.solve(problem, [double()], [double(1)], **options)
        return
    solution = bilevel.solve(problem, [double()], [double(1)], **options)
    for key, entry in problem.space.hyper.items():
        assert float(solution.hyper[key]) != float(entry.init), key


@pytest.mark.parametrize("method", ["delta_stn", bilevel.DeltaSTN(perturb="batch")], ids=str)
def test_all_regularizers_together(method):
    """With every example perturbed on its own, the check of rows would refuse a strength that reached another."""
    net = Net().double()
    used = [make(net) for make in (EVERYWHERE | BY_VALUE).values()]
    solution = bilevel.solve(problem_of(*used, net=net), [double()], [double(1)], steps=3, method=method, warmup=0)
    assert len(solution.hyper) == 2 + 4 + 6


def test_the_check_of_rows_would_notice_partners_that_were_changed_before():
    class Late(bilevel.regularizers.Regularizer):
        """Adds a partner after noise has been added with the partner's own strength."""

        order = 9
        hyper = property(lambda self: {})

        def on_batch(self, mixture, hyper):
            return mixture.with_tensor(mixture.tensor + mixture.tensor.roll(1, 0))

    with pytest.raises(ValueError, match=r"hyper\['input_noise'\] for one example reach the loss of other"):
        bilevel.solve(problem_of(InputNoise(), Late()), [double()], [double(1)], steps=1, progress=False)


@pytest.mark.parametrize("name", ["label_smoothing", "mixup", "input_noise", "weight_decay"])
def test_derivatives_in_a_strength(name):
    """Against finite differences with the same random numbers."""
    net = Net().double().eval()
    regularizer = EVERYWHERE[name](net)
    problem = problem_of(regularizer, net=net)
    x, y = double()
    model = bilevel.Model(dict(net.named_parameters()), net)
    start = problem.initial_hyper().double()

    def loss(vector):
        values = problem.space.values(vector)
        return seeded(lambda: problem.user_losses["inner_loss"](model, values, (x, y)).mean())

    leaf = start.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf)
    step = 1e-5
    for i, direction in enumerate(torch.eye(len(start)).double()):
        difference = (loss(start + step * direction) - loss(start - step * direction)) / (2 * step)
        torch.testing.assert_close(slope[i], difference.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [*EVERYWHERE, *BY_VALUE])
def test_equal_rows_are_one_value(name):
    net = Net().double()
    regularizer = (EVERYWHERE | BY_VALUE)[name](net)
    problem = problem_of(regularizer, net=net)
    model, batch = bilevel.Model(dict(net.named_parameters()), net), double()
    loss = problem.user_losses["inner_loss"]
    one = problem.space.values(problem.initial_hyper())
    rows = problem.space.values(problem.initial_hyper().expand(6, -1))
    expected = seeded(lambda: loss(model, one, batch).mean())
    torch.testing.assert_close(seeded(lambda: loss(model, rows, batch)).mean(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: InputNoise().on_batch(Mixture.of(torch.ones(2, 3).long(), None), {}), "0 of them in a torch.int64"),
        (
            lambda: InputNoise().on_batch(Mixture.of({"a": torch.ones(2), "b": X}, None), {}),
            "got 2 of them",
        ),
        (lambda: CutMix().on_batch(Mixture.of(torch.ones(2, 3), None), {}), r"shape \(B, C, H, W\), got \(2, 3\)"),
        (
            lambda: Mixup().on_batch(Mixture.of(torch.ones(2, 3), None), {"mixup": torch.zeros(3)}),
            r"mixup must be a scalar or have shape \(2,\)",
        ),
        (
            lambda: Mixup().on_batch(Mixture.of(torch.ones(2, 3), "ab"), {"mixup": torch.tensor(0.1)}),
            "one tensor with an entry for each example, got str",
        ),
        (
            lambda: regularized_loss(
                lambda x: x,
                {"mixup": torch.tensor(0.5)},
                torch.ones(2, 3),
                torch.tensor([0, 1]),
                criterion=F.cross_entropy,
                regularizers=[Mixup()],
            ),
            r"one value per example, but the criterion returned the shape \(\)",
        ),
    ],
)
def test_bad_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_inputs_in_a_mapping():
    x = {"pixels": torch.zeros(2, 3), "ids": torch.arange(2)}
    mixed = InputNoise().on_batch(Mixture.of(x, None), {"input_noise": torch.tensor(1.0)})
    assert mixed.x["ids"] is x["ids"]
    assert (mixed.x["pixels"] != 0).all()
    assert (x["pixels"] == 0).all()
