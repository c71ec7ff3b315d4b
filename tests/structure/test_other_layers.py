"""Layers that hide their parts: recurrent networks, bags of embeddings, weight norm; and scales, gates, prelu."""

import pytest
import torch
import torch.nn.functional as F
from test_rules import STRUCTURES, compare, double_precision, one_by_one, run, setup  # noqa: F401 (a fixture)
from torch import nn
from torch.nn.utils import parametrizations

from bilevel.autodiff import _Forward
from bilevel.plain import PLAIN
from bilevel.problem.weight_norm import _ExactWeightNorm


class Recurrent(nn.Module):
    def __init__(self, kind, *, batch_first=True, **options):
        super().__init__()
        self.net, self.batch_first = getattr(nn, kind)(4, 3, batch_first=batch_first, **options), batch_first

    def forward(self, x):
        y, state = self.net(x if self.batch_first else x.transpose(0, 1))
        y = y if self.batch_first else y.transpose(0, 1)
        last = state[0] if isinstance(state, tuple) else state
        return torch.cat([y.flatten(1), last.transpose(0, 1).flatten(1)], 1)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTMCell(4, 3), nn.GRUCell(3, 3)
        self.c, self.d = nn.RNNCell(3, 3, nonlinearity="relu"), nn.RNNCell(3, 2)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.a(step, state)
        return self.d(self.c(self.b(*state)))


class Scales(nn.Module):
    """CLIP's temperature, gates, layer scales, prelu; in place; one of three."""

    def __init__(self):
        super().__init__()
        self.inner, self.logit, self.gate = (
            nn.Linear(4, 4),
            nn.Parameter(torch.tensor(0.3)),
            nn.Parameter(torch.randn(4)),
        )
        self.prelu, self.one, self.rows = nn.PReLU(2), nn.PReLU(), nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        y = self.one(self.prelu(self.inner(x))) * self.logit.exp()
        y = torch.where(y > 0, y * self.gate.sigmoid() + F.softplus(self.gate) / self.logit, self.gate.tanh())
        y = y + self.rows.softmax(0).sum(0)
        y += self.gate
        y *= self.rows[1].abs()
        return torch.einsum("...i,oi->...o", y, F.normalize(self.rows, dim=-1))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.form, self.inner = nn.Bilinear(4, 4, 3), nn.Linear(4, 4)

    def forward(self, x):
        return self.form(x, self.inner(x).tanh())


class Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(7, 4, **options), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.bag(x).tanh())


def normed(function, **options):
    return nn.Sequential(function(nn.Linear(4, 4), **options), nn.Tanh(), nn.Linear(4, 3))


def old_style():
    with pytest.warns(FutureWarning, match="weight_norm"):
        return normed(nn.utils.weight_norm)


RECURRENT = {
    **{kind: lambda kind=kind: Recurrent(kind, num_layers=2, bidirectional=True) for kind in ("LSTM", "GRU", "RNN")},
    "time first": lambda: Recurrent("LSTM", batch_first=False, num_layers=2),
    "projection": lambda: Recurrent("LSTM", proj_size=2, num_layers=2, bidirectional=True),
    "no bias": lambda: Recurrent("GRU", bias=False, batch_first=False),
    "relu": lambda: Recurrent("RNN", nonlinearity="relu"),
    "cells": Cells,
}
OTHERS = {
    "scales": Scales,
    "bilinear": Bilinear,
    "bag": lambda: Bag(mode="sum"),
    "padded bag": lambda: Bag(padding_idx=0),
    "largest of a bag": lambda: Bag(mode="max", padding_idx=0),
    "weight norm": lambda: normed(parametrizations.weight_norm),
    "weight norm, one length": lambda: normed(parametrizations.weight_norm, dim=None),
    "weight norm, columns": lambda: normed(parametrizations.weight_norm, dim=1),
    "weight norm, old": old_style,
    "orthogonal": lambda: normed(parametrizations.orthogonal),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("kind", [*RECURRENT, *OTHERS])
def test_a_layer_is_one_for_each_example(kind, linearized, structure):
    for count in (3, 2):  # two: as many as times
        torch.manual_seed(count)
        net = (RECURRENT | OTHERS)[kind]()
        x = torch.randint(7, (count, 2)) if "bag" in kind else torch.randn(count, 2, 4)
        weights, theta, noise = setup(net, count, structure)
        fast = run(net, weights, theta, noise, x, linearized=linearized)
        frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
        with _ExactWeightNorm(), _Forward():  # without which PyTorch has no forward mode
            slow = one_by_one(net, frozen, theta, noise, x, linearized=linearized)
        compare(fast, slow, weights, theta, linearized=linearized)


@pytest.mark.parametrize("kind", [*RECURRENT, "packed", "bag", "padded bag", "largest of a bag"])
def test_plain_operations_are_what_pytorch_computes(kind):
    """Values and gradients, with all options; also of packed sequences."""
    torch.manual_seed(0)
    net = (RECURRENT | OTHERS)["LSTM" if kind == "packed" else kind]()
    x = torch.randint(7, (5, 3)) if "bag" in kind else torch.randn(5, 3, 4)
    if kind == "packed":
        lengths = torch.tensor([1, 3, 2, 3, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)

        def call():
            y, (h, c) = net.net(packed)
            return torch.cat([y.data.flatten(), h.flatten(), c.flatten()])

    else:

        def call():
            return net(x)

    theirs = call()
    with _Forward():
        ours = call()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(y.square().sum(), [*net.parameters()]) for y in (ours, theirs)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    assert set(PLAIN) >= {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, F.embedding_bag}


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 1, 1]), batch_first=True)
        return self.net(packed)[1][0][0]


class Offsets(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4)

    def forward(self, x):
        return self.bag(x.flatten(), torch.arange(0, 6, 2))


@pytest.mark.parametrize(
    ("net", "words"), [(Packed, "packed sequence.*pass a padded one"), (Offsets, "offsets.*pad them")]
)
def test_what_stays_refused_names_the_remedy(net, words):
    net = net()
    weights, theta, noise = setup(net, 3)
    x = torch.randint(7, (3, 2)) if isinstance(net, Offsets) else torch.randn(3, 2, 4)
    with pytest.raises(ValueError, match=f"{words}.*perturb='batch'"):
        run(net, weights, theta, noise, x, linearized=False)


def test_a_large_weight_is_not_multiplied_out():
    net = nn.Sequential(nn.Linear(300, 300))
    net.forward = lambda x: F.linear(x, net[0].weight.softmax(0))
    weights, theta, noise = setup(net, 2)
    with pytest.raises(NotImplementedError, match=r"softmax.*90,000 numbers: more than 65,536 are not multiplied out"):
        run(net, weights, theta, noise, torch.randn(2, 300), linearized=False)
