"""Five lines on networks that people have, with the data that they have."""

import sys
import warnings
from collections import namedtuple
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import bilevel
from bilevel.tuning.criteria import criterion_of, cross_entropy


class ResNet18(nn.Module):
    """Of four stages of two blocks each, with batch norm, as torchvision has it, but narrow."""

    class Block(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
            same = stride == 1 and before == after
            short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            self.short = nn.Identity() if same else short

        def forward(self, x):
            y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(y + self.short(x))

    def __init__(self, width=4, classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for stage, (before, after) in enumerate(pairwise(sizes)):
            blocks += [self.Block(before, after, 1 if stage == 0 else 2), self.Block(after, after, 1)]
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.dropout(x.mean((2, 3)), 0.1, self.training))


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def data(count=12, seed=0, features=(5,), classes=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *features, generator=generator), torch.arange(count) % classes


def loaders(batch_size=6, **settings):
    return [
        DataLoader(TensorDataset(*data(seed=seed, **settings)), batch_size=batch_size, shuffle=seed == 0)
        for seed in (0, 1)
    ]


QUICK = {"epochs": 2, "inner_steps": 1, "warmup": 0, "progress": False}


def test_the_mlp_on_digits(tmp_path):
    """The lines of the README; the validation loss gets better than that of the same training without tuning."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16).float(), torch.tensor(y)
    train = DataLoader(TensorDataset(x[:150], y[:150]), batch_size=50, shuffle=True)
    valid = DataLoader(TensorDataset(x[150:500], y[150:500]), batch_size=350)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 10))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    call = partial(bilevel.tune, net, train, valid, loss=F.cross_entropy, epochs=60, inner_steps=2)
    options = {"optimizer": torch.optim.Adam(net.parameters(), lr=0.01), "progress": False}
    result = call(dropout=True, weight_decay="layer", label_smoothing=True, **options)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert result.problem.space.hyper.keys() == {
        "dropout.2",
        "weight_decay.0",
        "weight_decay.3",
        "label_smoothing",
    }
    untuned = call(dropout=True, weight_decay=False, warmup=sys.maxsize, **options)
    assert result.best.validation_loss < untuned.best.validation_loss
    net.load_state_dict(result.best.state_dict)
    net.eval()
    with torch.no_grad():
        loss = F.cross_entropy(net(x[150:500]), y[150:500])
    assert float(loss) == pytest.approx(result.best.validation_loss, rel=1e-4)
    assert result.report(tmp_path / "run.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("method", "expected"),
    [(None, bilevel.DeltaSTN(response_every=None)), ("delta_stn", bilevel.DeltaSTN()), ("stn", bilevel.STN())],
)
def test_it_spares_the_response_steps_unless_a_method_is_given(method, expected):
    """And only with an optimizer that learns it fast."""
    data = [(torch.randn(8, 3), torch.randn(8, 1))] * 4
    for optimizer, spares in ((partial(torch.optim.Adam, lr=1e-3), True), (partial(torch.optim.SGD, lr=1e-3), False)):
        options = {} if method is None else {"method": method}
        result = bilevel.tune(
            nn.Linear(3, 1), data, data[:2], loss=nn.MSELoss(), optimizer=optimizer, steps=2, progress=False, **options
        )
        solver = result.solver
        assert solver.method == expected
        learns = [solver.response.learns(step, solver.optimizers["response"]) for step in range(10)]
        assert sum(learns) == (5 if method is None and spares else 10)


def test_a_resnet_with_batch_norm():
    train, valid = loaders(features=(3, 8, 8), classes=10)
    net = ResNet18()
    result = bilevel.tune(
        net,
        train,
        valid,
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        dropout=True,
        weight_decay="layer",
        label_smoothing=True,
        augment=bilevel.augment.images(flip=True),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        **QUICK,
    )
    names = set(result.hyper)
    assert {"dropout.dropout", "label_smoothing", "augment.flip", "weight_decay.fc", "weight_decay.conv1"} <= names
    assert not any(".bn" in name for name in names)
    assert float(result.problem.space.hyper["label_smoothing"].init) == 0.1
    net.load_state_dict(result.best.state_dict)


class Tagger(nn.Module):
    """Words to the next words, with nn.LSTM."""

    def __init__(self, words=11, size=6):
        super().__init__()
        self.embed, self.drop = nn.Embedding(words, size), nn.Dropout(0.1)
        self.lstm, self.out = nn.LSTM(size, size, batch_first=True), nn.Linear(size, words)

    def forward(self, tokens):
        return self.out(self.drop(self.lstm(self.drop(self.embed(tokens)))[0]))


def words(count=8, length=5, seed=0):
    text = torch.randint(11, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def test_an_lstm_language_model():
    """Logits of shape (B, T, C) and words of shape (B, T), as they come."""
    result = bilevel.tune(Tagger(), [words()], [words(seed=1)], loss=F.cross_entropy, label_smoothing=True, **QUICK)
    assert set(result.hyper) == {
        "dropout.drop",
        "label_smoothing",
        *(f"weight_decay.{n}" for n in ("embed", "lstm", "out")),
    }


# Batches

Pair = namedtuple("Pair", ["inputs", "labels"])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, first, second):
        return self.layer(first + second)


@pytest.mark.parametrize(
    ("net", "make"),
    [
        (mlp, lambda x, y: (x, y)),
        (mlp, lambda x, y: [x, y]),
        (mlp, lambda x, y: Pair(x, y)),
        (mlp, lambda x, y: {"input": x, "label": y}),
        (mlp, lambda x, y: {"pixels": x, "labels": y}),  # forward has another name for its only argument
        (Two, lambda x, y: {"first": x, "second": x, "target": y}),
        (Two, lambda x, y: (x, x, y)),
    ],
)
def test_batches_of_many_kinds(net, make):
    batches = [make(*data())], [make(*data(seed=1))]
    result = bilevel.tune(net(), *batches, loss=F.cross_entropy, **QUICK)
    assert result.stopped == "epochs"


def test_batches_of_other_kinds_are_unpacked_by_a_function():
    class Batch:
        def __init__(self, x, y):
            self.x, self.y = x, y

        def to(self, device):
            return self

    batch = Batch(*data())
    with pytest.raises(ValueError, match=r"got a Batch with.*pass unpack=lambda batch"):
        bilevel.tune(mlp(), [batch], [batch], loss=F.cross_entropy, **QUICK)
    result = bilevel.tune(
        mlp(),
        [data()],
        [data(seed=1)],
        loss=F.cross_entropy,
        unpack=lambda batch: ((batch[0],), batch[1]),
        **QUICK,
    )
    assert result.stopped == "epochs"


# Losses


LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES = torch.tensor([[0, 1, 2, -100, 1], [-100] * 5, [2, 2, 1, 0, 0], [1, -100, -100, 0, 2]])
WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("target", [CLASSES, LOGITS.softmax(1).flip(0)])
def test_cross_entropy_is_that_of_torch(weight, smoothing, reduction, target):
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, reduction=reduction)
    values = criterion_of(loss)(LOGITS, target)
    assert values.shape == (4,)
    torch.testing.assert_close(values.mean(), loss(LOGITS, target), rtol=0, atol=1e-12)
    other = criterion_of(partial(F.cross_entropy, weight=weight, label_smoothing=smoothing, reduction=reduction))
    assert torch.equal(other(LOGITS, target), values)
    each = torch.full((4,), smoothing, dtype=torch.float64)
    rows = cross_entropy(LOGITS, target, weight=weight, reduction=reduction, label_smoothing=each)
    torch.testing.assert_close(rows, values, rtol=0, atol=1e-12)


def test_cross_entropy_with_a_smoothing_for_each_example():
    s = torch.tensor([0.0, 0.2, 0.5, 0.9], dtype=torch.float64)
    found = cross_entropy(LOGITS, CLASSES, label_smoothing=s)
    for i in range(4):
        alone = cross_entropy(LOGITS, CLASSES, label_smoothing=float(s[i]))
        torch.testing.assert_close(found[i], alone[i], rtol=0, atol=1e-12)


def test_classes_in_the_last_dimension():
    expected = F.cross_entropy(LOGITS, CLASSES)
    torch.testing.assert_close(cross_entropy(LOGITS.movedim(1, -1), CLASSES).mean(), expected)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        nn.MSELoss(),
        nn.MSELoss(reduction="sum"),
        nn.L1Loss(),
        F.smooth_l1_loss,
        partial(F.huber_loss, delta=0.5),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0] * 5, dtype=torch.float64)),
    ],
    ids=["mse", "MSE", "MSE, sum", "L1", "smooth L1", "Huber", "BCE"],
)
def test_losses_of_torch_are_split(loss):
    target = LOGITS.flip(0).sigmoid()
    criterion = criterion_of(loss)
    values = criterion(LOGITS, target)
    assert criterion.splits
    assert values.shape == (4,)
    torch.testing.assert_close(values.mean(), loss(LOGITS, target), rtol=0, atol=1e-12)


def test_a_loss_of_ones_own_is_used_as_it_is():
    """A scalar is enough for dropout and weight decay; mixtures need one value per example, and say so."""

    def loss(output, target):
        return F.cross_entropy(output, target)

    result = bilevel.tune(mlp(), [data()], [data(seed=1)], loss=loss, **QUICK)
    assert len(result.hyper) == 3
    with pytest.raises(ValueError, match="mixup and cutmix need a loss with one value per example, but loss"):
        bilevel.tune(mlp(), [data()], [data(seed=1)], loss=loss, mixup=True, **QUICK)
    with pytest.raises(ValueError, match=r"label_smoothing needs a cross entropy, but the loss is loss: pass"):
        bilevel.tune(mlp(), [data()], [data(seed=1)], loss=loss, label_smoothing=True, **QUICK)


def test_a_loss_whose_parts_have_another_mean_is_used_as_it_is():
    def loss(output, target, reduction="mean"):
        values = F.cross_entropy(output, target, reduction="none")
        return values.mean() ** 2 if reduction == "mean" else values

    with pytest.raises(ValueError, match="need a loss with one value per example"):
        bilevel.tune(mlp(), [data()], [data(seed=1)], loss=loss, mixup=True, **QUICK)


def test_regression():
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    x, _ = data()
    y = x.sum(1, keepdim=True)
    options = {"loss": nn.MSELoss(), "input_noise": True, "mixup": 0.3} | QUICK
    result = bilevel.tune(net, [(x, y)], [(x, y)], **options)
    assert set(result.hyper) == {"weight_decay.0", "weight_decay.2", "mixup", "input_noise"}
    assert float(result.problem.space.hyper["mixup"].init) == 0.3
    with pytest.raises(ValueError, match=r"returns the shape \(12, 1\), and the target has \(12,\)"):
        bilevel.tune(net, [(x, y[:, 0])], [(x, y[:, 0])], **options)


# Networks that compute their loss themselves


def shifted(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


KINDS = {
    "cross_entropy": (lambda z, y: F.cross_entropy(z, y), lambda x, y: y),
    "squared error": (lambda z, y: F.mse_loss(z[:, 0], y), lambda x, y: y.float()),
    "binary_cross_entropy_with_logits": (
        lambda z, y: F.binary_cross_entropy_with_logits(z, y),
        lambda x, y: F.one_hot(y, 3).float(),
    ),
    "cross entropy of the next word": (shifted, lambda x, y: torch.where(x[..., 0] > 1, -100, y[:, None].repeat(1, 4))),
}


class Own(nn.Module):
    """Returns a mapping with loss and logits, as networks of transformers do."""

    def __init__(self, kind, *, needs_labels=False):
        super().__init__()
        self.layer, self.drop = nn.Linear(5, 1 if kind == "squared error" else 3), nn.Dropout(0.1)
        self.loss, self.needs_labels, self.cached = KINDS[kind][0], needs_labels, []

    def forward(self, x, labels=None, use_cache=True):
        self.cached.append(use_cache)
        if self.needs_labels and labels is None:
            raise ValueError("labels are needed")
        logits = self.layer(self.drop(x))
        return {"logits": logits} | ({} if labels is None else {"loss": self.loss(logits, labels)})


@pytest.mark.parametrize("needs_labels", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_that_a_network_computes_is_found(kind, needs_labels):
    def batch(seed):
        x, y = data(seed=seed, features=(4, 5) if "word" in kind else (5,))
        return {"x": x, "labels": KINDS[kind][1](x, y)}

    torch.manual_seed(0)
    net = Own(kind, needs_labels=needs_labels)
    result = bilevel.tune(net, [batch(0)], [batch(1)], **QUICK)
    assert result.problem.user_losses["inner_loss"].criterion.name == kind
    assert set(result.hyper) == {"dropout.drop", "weight_decay.layer"}
    assert not any(net.cached)
    net.load_state_dict(result.state_dict)
    expected = float(net.eval()(**batch(1))["loss"].detach())
    assert result.solver.evaluate([batch(1)]) == pytest.approx(expected, rel=1e-5)


def test_a_loss_of_another_kind_is_refused():
    net = Own("cross_entropy")
    net.loss = lambda z, y: F.cross_entropy(z, y) + 3
    x, y = data()
    with pytest.raises(ValueError, match="the loss that Own computes is none of the usual ones of its logits: pass"):
        bilevel.tune(net, [{"x": x, "labels": y}], [{"x": x, "labels": y}], **QUICK)
    net.loss = lambda z, y: None
    with pytest.raises(ValueError, match="returned a dict without a loss"):
        bilevel.tune(net, [{"x": x, "labels": y}], [{"x": x, "labels": y}], **QUICK)


def test_bfloat16():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = bilevel.tune(mlp(), [data()], [data(seed=1)], loss=F.cross_entropy, label_smoothing=True, **QUICK)
    assert all(value.dtype == torch.float32 for value in result.params.values())


# What to tune


@pytest.mark.parametrize("method", ["implicit_identity", bilevel.Unrolled(steps=2)], ids=str)
def test_methods_that_cannot_tune_dropout_leave_it_alone_unless_told(method):
    options = QUICK | {"method": method}
    if isinstance(method, bilevel.Unrolled):
        options["inner_steps"] = 0
    result = bilevel.tune(mlp(), [data()], [data(seed=1)], loss=F.cross_entropy, mixup=True, **options)
    assert set(result.hyper) == {"weight_decay.0", "weight_decay.3", "mixup"}
    with pytest.raises(ValueError, match=r"cannot tune hyper\['dropout.2'\]"):
        bilevel.tune(mlp(), [data()], [data(seed=1)], loss=F.cross_entropy, dropout=True, **options)


def test_everything_at_once():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 3))
    train, valid = loaders(features=(1, 6, 6))
    result = bilevel.tune(
        net,
        train,
        valid,
        loss=F.cross_entropy,
        label_smoothing=0.1,
        mixup=True,
        cutmix=True,
        input_noise=0.1,
        augment=bilevel.augment.images(),
        weight_decay={"all": "*"},
        dropout="one",
        **QUICK,
    )
    assert list(result.hyper)[:2] == ["dropout", "weight_decay.all"]
    assert len(result.hyper) == 6 + 5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"net": 3}, TypeError, "net must be an nn.Module, got int"),
        ({"valid_loader": None}, TypeError, "valid_loader must be an iterable of batches, got None"),
        ({"net": nn.Linear(5, 3), "weight_decay": False}, ValueError, "nothing to tune: the network has no dropout"),
        ({"net": nn.Linear(5, 3), "dropout": True}, ValueError, "has no dropout"),
        ({"net": nn.ReLU()}, ValueError, "no parameters"),
        ({"loss": "mse"}, TypeError, "loss must be a function"),
        ({"loss": None}, ValueError, "without loss= the network has to compute it"),
        ({"epoch": 3}, TypeError, "no argument 'epoch': did you mean 'epochs'"),
        ({"scheduler": None}, TypeError, "the scheduler of the learning rate is inner_scheduler"),
        ({"weight_decay": "decoupled"}, ValueError, "decoupled weight decay, that of AdamW, is no term of inner"),
        ({"weight_decay": [1]}, TypeError, "weight_decay must be True, False"),
        ({"dropout": 0.5}, TypeError, "dropout must be True, False"),
        ({"mixup": "yes"}, TypeError, "mixup must be True, False, a number"),
        ({"augment": True}, TypeError, r"augment must be bilevel\.augment\.images"),
        ({"augment": bilevel.augment.images()}, ValueError, r"float images of shape \(B, C, H, W\)"),
        ({"regularizers": [bilevel.regularizers.Mixup()] * 2}, ValueError, "two hyperparameters 'mixup'"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=1.0)}, ValueError, "not one of the network's"),
        ({"optimizer": torch.optim.Adam, "inner_optimizer": torch.optim.Adam}, TypeError, "are the same"),
        ({"train_loader": [{"a": torch.ones(2)}]}, ValueError, "has none that is called labels"),
    ],
)
def test_bad_arguments(change, error, message):
    call = {"net": mlp(), "train_loader": [data()], "valid_loader": [data(seed=1)], "loss": F.cross_entropy} | change
    with pytest.raises(error, match=message):
        bilevel.tune(**call, **{name: value for name, value in QUICK.items() if name not in change})


def test_advice_about_a_run_points_at_the_call_of_tune():
    with pytest.warns(bilevel.TuningWarning, match="leaves no round") as caught:
        bilevel.tune(
            mlp(), [data()], [data(seed=1)], loss=F.cross_entropy, steps=2, warmup=2, inner_steps=1, progress=False
        )
    assert {warning.filename for warning in caught if warning.category is bilevel.TuningWarning} == {__file__}


def test_one_loader_for_both_is_warned_of():
    batches = [data()]
    with pytest.warns(bilevel.TuningWarning, match="valid_loader is train_loader"):
        bilevel.tune(mlp(), batches, batches, loss=F.cross_entropy, **QUICK)


def test_two_loaders_of_one_data_set_are_warned_of_unless_a_sampler_divides_it():
    everything = TensorDataset(*data())
    train, valid = DataLoader(everything, 6, shuffle=True), DataLoader(everything, 6)
    with pytest.warns(bilevel.TuningWarning, match="has the data set of train_loader"):
        bilevel.tune(mlp(), train, valid, loss=F.cross_entropy, **QUICK)
    first, second = (SubsetRandomSampler(part) for part in (range(6), range(6, 12)))
    train, valid = (DataLoader(everything, 3, sampler=part) for part in (first, second))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bilevel.tune(mlp(), train, valid, loss=F.cross_entropy, **QUICK)


# Schedules, and what a run that goes on notices


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_a_learning_rate_that_changes_with_every_step(every):
    made = []

    def schedule(optimizer):
        made.append(optimizer)
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)

    train = DataLoader(TensorDataset(*data(24)), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bilevel.TuningWarning)
        bilevel.tune(
            mlp(), train, [data(seed=1)], loss=F.cross_entropy, epochs=2, inner_steps=4, inner_scheduler=schedule,
            schedule_every=every, progress=False,
        )  # fmt: skip
    expected = 0.0 if every == "step" else 1e-3 * (1 - 2 / 8)
    assert [optimizer.param_groups[0]["lr"] for optimizer in made] == pytest.approx([expected] * 2)


@pytest.mark.filterwarnings("ignore::bilevel.TuningWarning")  # half of the schedule is asked for at first
def test_a_schedule_by_steps_goes_on_where_it_was(tmp_path):
    def run(epochs, path):
        return bilevel.tune(
            mlp(), *loaders(), loss=F.cross_entropy, epochs=epochs, inner_steps=1, schedule_every="step", seed=1,
            inner_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
            outer_optimizer=lambda params: torch.optim.SGD(params, lr=0.1), warmup=0, checkpoint=path, progress=False,
        )  # fmt: skip

    torch.manual_seed(0)
    whole = run(4, tmp_path / "whole.pt")
    torch.manual_seed(0)
    run(2, tmp_path / "parts.pt")
    torch.manual_seed(0)
    parts = run(4, tmp_path / "parts.pt")
    assert parts.solver.optimizers["weights"].param_groups[0]["lr"] == pytest.approx(
        whole.solver.optimizers["weights"].param_groups[0]["lr"], rel=0, abs=0
    )
    for name, value in whole.params.items():
        assert torch.equal(parts.params[name], value)


def test_a_schedule_that_hardly_begins_is_warned_of():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)

    settings = {"loss": F.cross_entropy, "epochs": 2, "inner_steps": 1, "inner_scheduler": schedule, "progress": False}
    train, length = DataLoader(TensorDataset(*data(24)), 3), 2 * 8
    with pytest.warns(bilevel.TuningWarning, match="made for 16 steps, but advances once per epoch, 2 times"):
        bilevel.tune(mlp(), train, [data(seed=1)], **settings)
    for other in (2, 400):  # the first epochs of a long schedule
        length = other
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="inner_scheduler")
            bilevel.tune(mlp(), train, [data(seed=1)], **settings)


def test_a_schedule_by_steps_needs_steps_of_its_own():
    with pytest.raises(ValueError, match="schedule_every must be 'epoch' or 'round' with Unrolled"):
        bilevel.tune(mlp(), *loaders(), loss=F.cross_entropy, method="unrolled", schedule_every="step", **QUICK)
    with pytest.raises(ValueError, match="schedule_every must be 'epoch', 'round' or 'step', got 'steps'"):
        bilevel.tune(mlp(), *loaders(), loss=F.cross_entropy, schedule_every="steps", **QUICK)


CHANGED = {
    "weight": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 1.0])),
    "reduction": nn.CrossEntropyLoss(reduction="sum"),
    "own": lambda output, target: F.cross_entropy(output, target) ** 2,
    "partial": partial(F.cross_entropy, ignore_index=2),
    "module": nn.MultiMarginLoss(),
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_a_run_that_goes_on_notices_another_loss(changed, tmp_path):
    settings = QUICK | {"checkpoint": tmp_path / "run.pt"}
    bilevel.tune(mlp(), *loaders(), loss=F.cross_entropy, **settings)
    bilevel.tune(mlp(), *loaders(), loss=nn.CrossEntropyLoss(), **settings)  # is the same
    with pytest.raises(bilevel.CheckpointError, match="inner_loss is another function"):
        bilevel.tune(mlp(), *loaders(), loss=changed, **settings)


def test_a_run_that_goes_on_notices_other_settings_of_a_regularizer(tmp_path):
    settings = QUICK | {"checkpoint": tmp_path / "run.pt", "loss": F.cross_entropy, "weight_decay": False}
    images = [[data(features=(1, 8, 8))], [data(features=(1, 8, 8), seed=1)]]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    bilevel.tune(net, *images, augment=bilevel.augment.images(only=["translation"]), **settings)
    bilevel.tune(net, *images, augment=bilevel.augment.images(only=["translation"]), **settings)
    with pytest.raises(bilevel.CheckpointError, match="inner_loss is another function"):
        bilevel.tune(net, *images, augment=bilevel.augment.images(only=["translation"], mean=0.5, std=0.5), **settings)


def test_a_run_says_that_it_goes_on_and_that_it_is_over(tmp_path, capsys):
    settings = {"checkpoint": tmp_path / "run.pt", "loss": F.cross_entropy, "inner_steps": 1, "progress": True}
    for epochs, said in ((1, ""), (2, "goes on from run.pt, after round"), (2, "the run in run.pt is over (epochs,")):
        bilevel.tune(mlp(), *loaders(), epochs=epochs, **settings)
        assert said in capsys.readouterr().err


MISTAKEN = {
    "class": ({"loss": nn.CrossEntropyLoss}, TypeError, r"pass an instance, CrossEntropyLoss\(\)"),
    "float": ({"loss": lambda o, y: F.cross_entropy(o, y).item()}, TypeError, "must return a tensor, got float"),
    "unpack": ({"unpack": ("x", "y")}, TypeError, "unpack must be a function"),
    "pair": ({"unpack": lambda batch: batch[0]}, ValueError, "unpack must return a pair .* got a Tensor"),
    "decay": ({"weight_decay": 0}, ValueError, "weight_decay=False switches it off"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, "label_smoothing as a number .* between 0 and 0.9, got 1.5"),
    "noise": ({"input_noise": 0.0}, ValueError, "input_noise=False"),
    "lr": ({"lr": 0.1}, TypeError, r"no argument 'lr': pass optimizer=torch.optim.Adam"),
    "clip": ({"clip": 0.1}, TypeError, "inner_clip"),
    "optimizer": ({"optimizer": "adam"}, TypeError, "tune: optimizer must be an optimizer, .* got str: 'adam'"),
    "groups": ({"weight_decay": "group"}, TypeError, "tune: weight_decay must be True, .*'group'"),
    "dropout": ({"dropout": "yes"}, ValueError, "tune: dropout must be True, .*'yes'"),
}


@pytest.mark.parametrize(("given", "error", "message"), MISTAKEN.values(), ids=MISTAKEN)
def test_a_mistake_is_named_as_it_was_made(given, error, message):
    with pytest.raises(error, match=message):
        bilevel.tune(mlp(), *loaders(), **{"loss": F.cross_entropy, **QUICK, **given})


def test_a_network_that_takes_other_arguments_is_told_of_unpack():
    batches, others = [(*data(), torch.ones(12))], [(*data(seed=1), torch.ones(12))]
    with pytest.raises(TypeError, match="positional argument") as caught:
        bilevel.tune(mlp(), batches, others, loss=F.cross_entropy, **QUICK)
    assert "pass unpack=lambda batch: (inputs, target)" in caught.value.__notes__[-1]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        bilevel.tune(mlp(), [data(features=(4,))], others, loss=F.cross_entropy, **QUICK)
    assert "called with torch.float32 (12, 4)" in caught.value.__notes__[-1]
    with pytest.raises(RuntimeError, match="target tensor should be 1-D") as caught:
        bilevel.tune(mlp(), [(data()[0], data()[1][:, None])], others, loss=nn.MultiMarginLoss(), **QUICK)
    assert "the output torch.float32 (12, 3)" in caught.value.__notes__[-1]
    frozen = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters of the network are frozen"):
        bilevel.tune(frozen, *loaders(), loss=F.cross_entropy, **QUICK)


# Optimizers


def test_the_optimizer_of_a_script_keeps_its_groups():
    net = mlp()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[3].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    result = bilevel.tune(net, [data()], [data(seed=1)], loss=F.cross_entropy, optimizer=optimizer, **QUICK)
    made = result.solver.optimizers["weights"]
    names = {id(value): name for name, value in result.solver.response.inner.params().items()}
    found = [([names[id(p)] for p in group["params"]], group["lr"], group["momentum"]) for group in made.param_groups]
    assert found == [(["0.weight", "0.bias"], 0.5, 0.9), (["3.weight", "3.bias"], 0.1, 0.9)]
    assert made is not optimizer


@pytest.mark.parametrize("way", ["instance", "factory"])
def test_an_optimizer_that_decays_is_warned_of(way):
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters()) if way == "instance" else torch.optim.AdamW
    call = partial(bilevel.tune, net, [data()], [data(seed=1)], loss=F.cross_entropy, optimizer=optimizer, **QUICK)
    with pytest.warns(UserWarning, match=r"AdamW decays the weights by 0.01 beside the weight decay that is tuned"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(weight_decay=False)


def test_an_optimizer_that_leaves_out_weights_is_refused():
    net = mlp()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"leaves out '3.weight', '3.bias'"):
        bilevel.tune(net, [data()], [data(seed=1)], loss=F.cross_entropy, optimizer=optimizer, **QUICK)


def test_random_numbers_and_flags_are_left_alone():
    """The loader is asked for one batch more, without a trace."""
    net = mlp().eval()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train, valid = loaders()
    bilevel.tune(net, train, valid, loss=F.cross_entropy, **QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    assert not net.training


def test_the_problem_is_what_one_would_write_by_hand():
    """The same numbers as a problem without this layer."""
    torch.manual_seed(0)
    net = mlp()
    hyper = bilevel.dropout_rates(net, data()[0]) | {
        "weight_decay": bilevel.positive(1e-4),
        "label_smoothing": bilevel.interval(0.0, 0.9, init=0.05),
    }

    def train_loss(model, hyper, batch):
        x, y = batch
        loss = bilevel.functional.cross_entropy(model(x), y, label_smoothing=hyper["label_smoothing"])
        weights = [model.params["0.weight"], model.params["3.weight"]]
        return loss + hyper["weight_decay"] * bilevel.l2(weights)

    problem = bilevel.Problem(
        net,
        inner_loss=train_loss,
        outer_loss=lambda model, hyper, batch: F.cross_entropy(model(batch[0]), batch[1]),
        hyper=hyper,
    )
    method = bilevel.DeltaSTN(response_every=None)
    by_hand = bilevel.solve(problem, [data()], [data(seed=1)], method=method, **QUICK)
    tuned = bilevel.tune(
        net, [data()], [data(seed=1)], loss=F.cross_entropy, weight_decay="one", label_smoothing=True, **QUICK
    )
    for name, value in by_hand.hyper.items():
        torch.testing.assert_close(tuned.hyper[name], value, rtol=1e-4, atol=1e-6)
    for name, value in by_hand.params.items():
        torch.testing.assert_close(tuned.params[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [F.nll_loss, nn.NLLLoss()])
def test_a_network_that_returns_log_probabilities_is_as_good_as_one_with_logits(loss):
    """As in the first example of many: log_softmax in the network, F.nll_loss outside. Linearised, both are one."""
    found = []
    for last in ([], [nn.LogSoftmax(1)]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3), *last).double()
        x, y = torch.randn(16, 4, dtype=torch.float64), torch.arange(16) % 3
        result = bilevel.tune(
            net, [(x[:8], y[:8])], [(x[8:], y[8:])], loss=loss if last else F.cross_entropy, label_smoothing=True,
            steps=4, progress=False,
        )  # fmt: skip
        assert result.solver.response.per_example
        found.append(result.solver.vector.detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)


@pytest.mark.parametrize("loss", [F.binary_cross_entropy, nn.BCELoss()])
def test_probabilities_cannot_be_linearised(loss):
    net = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    batch = torch.randn(8, 4), torch.arange(8).remainder(2).float()[:, None]
    with pytest.raises(ValueError, match="BCEWithLogitsLoss"):
        bilevel.tune(net, [batch], [batch[:]], loss=loss, steps=1, progress=False)
    bilevel.tune(
        net, [batch], [(batch[0][:4], batch[1][:4])], loss=loss, method="centered_stn", steps=1, progress=False
    )
