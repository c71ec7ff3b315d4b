"""Every rule against weights that are multiplied out for each example, and ``torch.func.jvp`` of those."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import bilevel
from bilevel import structure
from bilevel.problem.weight_norm import _ExactWeightNorm
from bilevel.responding import CannotRespond, Rows
from bilevel.structure import Gate, Rowwise, respond

H = 3
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


class Times(nn.Module):
    """A position embedding, a scale for each feature, and one for all."""

    def __init__(self, steps, size):
        super().__init__()
        self.position, self.scale = nn.Parameter(torch.randn(1, steps, size)), nn.Parameter(torch.randn(size))
        self.one, self.inner = nn.Parameter(torch.tensor(0.7)), nn.Linear(size, size)

    def forward(self, x):
        x = self.inner(torch.tanh(x + self.position)) * self.scale
        return torch.tanh(self.scale + x) * self.one


class DropConnect(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, size + 1)
        self.register_buffer("mask", (torch.rand(size + 1, size) > 0.5).double())

    def forward(self, x):
        return F.linear(torch.tanh(x), 2.0 * (self.layer.weight * self.mask) / 3, self.layer.bias)


class Tied(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(7, size, padding_idx=0), nn.Linear(size, 7)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(torch.tanh(self.embedding(tokens)))


class Matrix(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(size, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return torch.matmul(torch.tanh(x @ self.a), self.b)


class Attention(nn.Module):
    def __init__(self, size, *, batch_first, separate, bias, causal, padded):
        super().__init__()
        extra = {"kdim": size + 1, "vdim": size + 2} if separate else {}
        self.attention = nn.MultiheadAttention(size, 2, batch_first=batch_first, bias=bias, **extra)
        self.inner = nn.Linear(size, size)
        self.separate, self.batch_first, self.causal, self.padded = separate, batch_first, causal, padded

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        x = x if self.batch_first else x.transpose(0, 1)
        key, value = (F.pad(x, (0, 1)), F.pad(x, (0, 2))) if self.separate else (x, x)
        steps = x.shape[1 if self.batch_first else 0]
        mask = torch.ones(steps, steps, dtype=torch.bool).triu(1) if self.causal else None
        padding = None
        if self.padded and steps > 1:  # a step of some examples, by their own values
            first = x[:, :1, 0] if self.batch_first else x[:1, :, 0].T
            padding = F.pad(first > 0, (steps - 1, 0))
        y, shares = self.attention(x, key, value, attn_mask=mask, key_padding_mask=padding)
        y = y if self.batch_first else y.transpose(0, 1)
        return torch.cat([y, shares], -1)


class PlainAttention(nn.Module):
    """The function itself, which takes masks of truth values; the module makes numbers of them."""

    def __init__(self, size):
        super().__init__()
        self.joint, self.out = nn.Parameter(torch.randn(3 * size, size)), nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        count, steps, size = x.shape
        mask = torch.ones(2 * count, steps, steps, dtype=torch.bool).triu(1)
        padding = F.pad(x[:, :1, 0] > 0, (steps - 1, 0)) & (torch.arange(steps) > 0)
        x, options = x.transpose(0, 1), {"attn_mask": mask, "key_padding_mask": padding}
        settings = (None, None, None, False, 0.0)
        y, _ = F.multi_head_attention_forward(x, x, x, size, 2, self.joint, *settings, self.out, None, **options)
        return y.transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self, kind, size, **options):
        super().__init__()
        self.net = kind(size, 3, batch_first=True, **options)

    def forward(self, x):
        return self.net(x)[0]


@st.composite
def networks(draw, kind):
    """A network of one kind, and a batch; the number of time steps may equal that of the examples."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    count, steps = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    size = draw(st.sampled_from([2, 4]))
    sequence = torch.randn(count, steps, size)
    if kind == "linear":
        net = nn.Sequential(nn.Linear(size, 3, bias=draw(st.booleans())), nn.Tanh(), nn.Linear(3, 4))
        return net, sequence if draw(st.booleans()) else sequence[:, 0]
    if kind.startswith(("conv", "transposed")):
        dims, groups = int(kind[-1]), draw(st.sampled_from([1, 2]))
        make = getattr(nn, ("Conv" if kind.startswith("conv") else "ConvTranspose") + f"{dims}d")
        options = {"stride": draw(st.integers(1, 2)), "padding": draw(st.integers(0, 1)), "groups": groups}
        options |= {"dilation": draw(st.integers(1, 2)), "bias": draw(st.booleans())}
        net = nn.Sequential(make(4, 6, 2, **options), nn.Tanh(), make(6, 2, 1))
        return net, torch.randn(count, 4, *[draw(st.integers(4, 5)) for _ in range(dims)])
    if kind == "single_output":
        return nn.Sequential(
            nn.Linear(size, 1, bias=False), nn.Tanh(), nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)
        ), sequence
    if kind == "single_channel":
        layers = (nn.Conv2d(2, 1, 2), nn.Tanh(), nn.ConvTranspose2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 1, 1))
        return nn.Sequential(*layers), torch.randn(count, 2, 4, 4)
    if kind == "single_vector":
        return nn.Sequential(nn.Embedding(1, size), nn.Tanh(), nn.Linear(size, 1)), torch.zeros(count, steps).long()
    if kind == "layer_norm":
        return nn.Sequential(nn.Linear(size, 4), nn.LayerNorm(4, bias=draw(st.booleans())), nn.Tanh()), sequence
    if kind == "layer_norm_of_images":
        return nn.Sequential(nn.Conv2d(2, 3, 1), nn.LayerNorm((3, 2, 4)), nn.Tanh()), torch.randn(count, 2, 2, 4)
    if kind == "rms_norm":
        return nn.Sequential(nn.Linear(size, 4), nn.RMSNorm(4), nn.Tanh()), sequence
    if kind in ("group_norm", "instance_norm"):
        norm = nn.GroupNorm(2, 4) if kind == "group_norm" else nn.InstanceNorm2d(4, affine=True)
        return nn.Sequential(nn.Conv2d(2, 4, 2), norm, nn.Tanh()), torch.randn(count, 2, 4, 4)
    if kind == "elementwise":
        return Times(steps, size), sequence
    if kind == "drop_connect":
        return DropConnect(size), sequence
    if kind == "tied_embedding":
        return Tied(size), torch.randint(7, (count, steps))
    if kind == "matrix":
        return Matrix(size), sequence
    if kind == "attention":
        options = {name: draw(st.booleans()) for name in ("batch_first", "separate", "bias", "causal", "padded")}
        return Attention(size, **options), sequence
    if kind == "plain_attention":
        return PlainAttention(size), sequence
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(size, 2, 3, dropout=0.0, batch_first=True, norm_first=draw(st.booleans()))
        return layer, sequence
    make = {"lstm": bilevel.nn.LSTM, "gru": bilevel.nn.GRU}[kind]
    return Recurrent(make, size, bidirectional=draw(st.booleans())), sequence


KINDS = [
    *("linear", "conv1", "conv2", "conv3", "transposed1", "transposed2", "transposed3", "layer_norm"),
    *("layer_norm_of_images", "rms_norm", "group_norm", "instance_norm", "elementwise", "drop_connect"),
    *(
        "single_output",
        "single_channel",
        "single_vector",
        "tied_embedding",
        "matrix",
        "attention",
        "plain_attention",
        "encoder",
        "lstm",
        "gru",
    ),
]


STRUCTURES = [Rowwise, Gate]


def setup(net, count, structure=Rowwise):
    """Weights, a random response, and a perturbation for each example."""
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in net.named_parameters()}
    theta = structure({name: weight.detach() for name, weight in weights.items()}, H)
    for part in theta.parameters():  # with U at its start of zero there is nothing to see
        nn.init.normal_(part, std=0.5)
    return weights, theta, torch.randn(count, H)


def one_by_one(net, weights, theta, noise, x, *, linearized):
    """Each example with a weight of its own."""

    def predict(params, i):
        return functional_call(net, params, (x[i : i + 1],))

    outputs = []
    for i, shift in enumerate(noise):
        change = theta(shift, weights)
        if linearized:
            with sdpa_kernel(SDPBackend.MATH):
                value, tangent = jvp(lambda params, i=i: predict(params, i), (weights,), (change,))
            outputs.append(value + tangent)
        else:
            outputs.append(predict({name: weights[name] + change[name] for name in weights}, i))
    return torch.cat(outputs)


def compare(fast, slow, weights, theta, *, linearized):
    """Outputs, and the gradients of all that is trained by them."""
    torch.testing.assert_close(fast, slow, **TOLERANCE)
    trained = [*theta.parameters()] + ([] if linearized else [*weights.values()])
    direction = torch.linspace(-1, 1, fast.numel()).reshape(fast.shape)
    gradients = [torch.autograd.grad((y * direction).sum(), trained, allow_unused=True) for y in (fast, slow)]
    for ours, theirs, parameter in zip(*gradients, trained, strict=True):
        zero = torch.zeros_like(parameter)
        torch.testing.assert_close(zero if ours is None else ours, zero if theirs is None else theirs, **TOLERANCE)


def run(net, weights, theta, noise, x, *, linearized):
    """As the methods do: Δ-STN with frozen weights."""
    used = {name: weight.detach() for name, weight in weights.items()} if linearized else weights

    def predict(params, *args):
        return functional_call(net, params, args)

    return respond(predict, used, theta.rows(noise, used), linearized=linearized)(x)


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(data=st.data())
def test_a_rule_is_a_weight_for_each_example(kind, linearized, structure, data):
    net, x = data.draw(networks(kind))
    weights, theta, noise = setup(net, len(x), structure)
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    slow = one_by_one(net, frozen, theta, noise, x, linearized=linearized)
    compare(fast, slow, weights, theta, linearized=linearized)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(data=st.data())
def test_factors_of_zero_leave_values_and_add_the_slope_of_the_response(kind, data):
    """The control variate of the gate, against the derivative of one example at a time along its change."""
    net, x = data.draw(networks(kind))
    weights, theta, noise = setup(net, len(x), Gate)
    leaves = list(weights.values())

    def predict(params, *args):
        return functional_call(net, params, args)

    rows = theta.rows(noise, weights)
    rows = {name: Rows(part.factor.detach() - part.factor, part.template) for name, part in rows.items()}
    fast = respond(predict, weights, rows, linearized=False)(x)
    plain = predict(weights, x)
    torch.testing.assert_close(fast, plain, **TOLERANCE)
    direction = torch.linspace(-1, 1, fast.numel()).reshape(fast.shape)
    frozen = {name: weight.detach() for name, weight in weights.items()}
    slope = one_by_one(net, frozen, theta, noise, x, linearized=True) - plain.detach()
    trained = [*theta.parameters()]
    ours = torch.autograd.grad((fast * direction).sum(), [*trained, *leaves], allow_unused=True)
    theirs = [
        *torch.autograd.grad(-(slope * direction).sum(), trained, allow_unused=True),
        *torch.autograd.grad((plain * direction).sum(), leaves, allow_unused=True),
    ]
    for mine, other, leaf in zip(ours, theirs, [*trained, *leaves], strict=True):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if mine is None else mine, zero if other is None else other, **TOLERANCE)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("images", [False, True])
@settings(max_examples=8)
@given(
    count=st.integers(3, 5),
    inputs=st.integers(1, 5),
    units=st.integers(1, 5),
    length=st.integers(1, 5),
    eps=st.sampled_from([1e-5, 0.1]),
)
def test_batch_norm_normalises_over_the_whole_batch(
    images, training, linearized, structure, count, inputs, units, length, eps
):
    """The reference multiplies out all weights and normalises what all examples became."""
    torch.manual_seed(count)
    if images:
        layers, pair, axes = (nn.Conv1d(inputs, units, 1), nn.Conv1d(units, 2, 1)), "bil,boi->bol", (0, 2)
    else:
        layers, pair, axes = (nn.Linear(inputs, units), nn.Linear(units, 2)), "bi,boi->bo", (0,)
    norm = nn.BatchNorm1d(units, eps)
    norm.running_mean.normal_()
    net = nn.Sequential(layers[0], norm, nn.Tanh(), layers[1]).train(training)
    weights, theta, noise = setup(net, count, structure)
    x = torch.randn(count, inputs, *([length] if images else []))
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    stacked = {name: torch.stack([theta(shift, frozen)[name] for shift in noise]) for name in weights}

    def shaped(value):
        """Units in dimension 1."""
        return value[..., None] if images else value

    def reference(change):
        w = {name: weight + change[name] for name, weight in frozen.items()}
        first, last = (w[f"{place}.weight"].reshape(count, *frozen[f"{place}.weight"].shape[:2]) for place in (0, 3))
        y = torch.einsum(pair, x, first) + shaped(w["0.bias"])
        mean = y.mean(axes, keepdim=True) if training else shaped(norm.running_mean[None])
        variance = y.var(axes, unbiased=False, keepdim=True) if training else shaped(norm.running_var[None])
        y = (y - mean) / (variance + eps).sqrt() * shaped(w["1.weight"]) + shaped(w["1.bias"])
        return torch.einsum(pair, y.tanh(), last) + shaped(w["3.bias"])

    if linearized:
        zero = {name: torch.zeros_like(change) for name, change in stacked.items()}
        slow = sum(jvp(reference, (zero,), (stacked,)))
    else:
        slow = reference(stacked)
    fast = run(copy.deepcopy(net), weights, theta, noise, x, linearized=linearized)
    compare(fast, slow, weights, theta, linearized=linearized)


def test_attention_whose_joint_projection_does_not_respond():
    torch.manual_seed(0)
    net, x = PlainAttention(4), torch.randn(3, 2, 4)
    weights, theta, noise = setup(net, 3)
    nn.init.zeros_(theta.templates[theta.names.index("joint")])
    rows = {name: rows for name, rows in theta.rows(noise, weights).items() if name != "joint"}
    predict = respond(lambda params, x: functional_call(net, params, (x,)), weights, rows, linearized=False)
    torch.testing.assert_close(predict(x), one_by_one(net, weights, theta, noise, x, linearized=False), **TOLERANCE)


class Lost(nn.Module):
    """Uses its weight in a way that has no rule."""

    def __init__(self, use):
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.randn(4, 4)), use

    def forward(self, x):
        return self.use(x, self.weight)


USES = [
    lambda x, w: F.linear(x, F.normalize(w)),
    lambda x, w: F.linear(x, w / w.norm(dim=1, keepdim=True)),
    lambda x, w: F.linear(x, torch._weight_norm(w, torch.ones(4, 1))),
    lambda x, w: F.linear(x, w[torch.arange(4)]),
    lambda x, w: x[:, :1] * w.flatten(),
    lambda x, w: F.linear(x, w.repeat(2, 1)),
    lambda x, w: F.linear(x, w.reshape(2, 2, 4).transpose(1, 2).reshape(2, 8).view(4, 4)),
    lambda x, w: F.conv1d(x[..., None], w.T[..., None]),
    lambda x, w: F.conv1d(x[..., None], w.T[:, :2, None], groups=2),
    lambda x, w: F.linear(x, F.normalize(w[:1])) + torch._weight_norm(w[:1], torch.ones(1, 1)).exp(),
    lambda x, w: F.embedding(torch.ones_like(x, dtype=torch.int), w.T),
    lambda x, w: x.clone().add_(w[0]),
    lambda x, w: torch.add(x, w[0], alpha=2),
    lambda x, w: torch.addmm(w[0], x, w, beta=2),
    lambda x, w: x + (w[:1] + w[1:2]),
    lambda x, w: F.linear(x, w.exp()),
    lambda x, w: torch.einsum("bi,oi->bo", x, w),
    lambda x, w: F.bilinear(x, x, w[None]),
    lambda x, w: x + w.sum(),
    lambda x, w: x / w[0],
    lambda x, w: x.clone().mul_(w[0]).sub_(w[1]).div_(w[2]),
    lambda x, w: torch.where(x > 0, x, w[0]),
    lambda x, w: torch.where(x > 0, w[0], w[1] * x),
    lambda x, w: x * w.sigmoid()[0] + w[1].tanh() ** 2,
    lambda x, w: torch.maximum(x, w[0]) / w[1].exp(),
    lambda x, w: F.linear(x, w.softmax(0)),
    lambda x, w: F.linear(x, w @ w.T),
    lambda x, w: F.linear(x, torch.cat([w, w.T])),
    lambda x, w: F.linear(x, F.dropout(w, 0.0, True)),
    lambda x, w: F.prelu(x, w[0]),
    lambda x, w: x @ F.normalize(w, dim=0),
    lambda x, w: F.linear(x, F.normalize(w, p=1)),
    lambda x, w: F.linear(x, torch.stack([w[0], w[1] * w[2]])),
    lambda x, w: F.linear(x, w - w.mean(1, keepdim=True)) + w.norm(),
    lambda x, w: torch.einsum("bi,io,bo->bo", x, w, x.tanh()),
    lambda x, w: torch.einsum("bi,bj,oij->bo", x, x.tanh(), w[None] * w[:, None]),
    lambda x, w: torch.einsum("...i,...i->...i", x, w[0]),
    lambda x, w: x + torch.linalg.matrix_exp(w / 9)[0],
    lambda x, w: F.linear(x, w) - (w[0] - x),
    lambda x, w: x.clone().masked_fill(x > 0, 0.0) * w[2].abs().sqrt(),
    lambda x, w: torch.addmm(w[0], x, w),
    lambda x, w: F.linear(x, w * torch.linspace(0, 1, 4) + torch.eye(4)),
]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("use", USES, ids=range(len(USES)))
def test_a_small_weight_responds_in_any_operation(use, linearized, structure):
    count = 3 + (USES.index(use) + linearized) % 2  # four: as many as rows
    torch.manual_seed(count)
    net, x = Lost(use), torch.randn(count, 4)
    weights, theta, noise = setup(net, count, structure)
    noise = noise / 3
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    with _ExactWeightNorm():  # without which PyTorch has no forward mode
        slow = one_by_one(net, frozen, theta, noise, x, linearized=linearized)
    compare(fast, slow, weights, theta, linearized=linearized)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda x, w: F.linear(x, w.to(torch.int).double()), ["to", "int32"]),
        (lambda x, w: torch.cat([x, w[:1].expand_as(x)]), ["cat", "dimension of the examples"]),
        (lambda x, w: torch.cat([x[:4], w], 1), ["cat", "(4, 4)"]),
        (lambda x, w: 1 / w, ["returns it as it is"]),
        (lambda x, w: F.linear(x.T, w), ["linear", "(4, 6)", "6 examples"]),
        (lambda x, w: F.linear(x.reshape(3, 2, 4), w), ["linear", "(3, 2, 4)"]),
        (lambda x, w: torch.func.vmap(lambda row: w @ row)(x), ["vmap"]),
        (lambda x, w: (x, w), ["returns it as it is"]),
        (lambda x, w: x[:4] * w, ["mul", "(4, 4)"]),
        (lambda x, w: F.linear(w, torch.ones(2, 4, dtype=w.dtype)), ["returns it as it is"]),
        (lambda x, w: w.mul_(2) + x, ["mul_", "in place"]),
        (lambda x, w: x * F.dropout(w, 0.5, True, True).sum(), ["dropout", "in place"]),
        (lambda x, w: F.linear(x, (w > 0).double()), ["gt"]),
    ],
)
@pytest.mark.parametrize("linearized", [False, True])
def test_a_response_that_would_be_lost_is_refused(use, words, linearized):
    net = Lost(use)
    weights, theta, noise = setup(net, 6)
    with pytest.raises((NotImplementedError, ValueError)) as raised:
        run(net, weights, theta, noise, torch.randn(6, 4), linearized=linearized)
    for word in [*words, "perturb='batch'", "'weight'"]:
        assert word in str(raised.value)


def test_a_users_operation_can_be_taught(monkeypatch):
    monkeypatch.setattr(
        sys.modules["bilevel.structure.respond"], "SMALL", 0
    )  # all weights are too large to be multiplied out

    def double(x, weight):
        if torch.overrides.has_torch_function((x, weight)):
            return torch.overrides.handle_torch_function(double, (x, weight), x, weight)
        return 2 * F.linear(x, weight)

    net = Lost(double)
    weights, theta, noise = setup(net, 5)
    x = torch.randn(5, 4)
    with pytest.raises(NotImplementedError, match="double"):
        run(net, weights, theta, noise, x, linearized=True)

    @structure.rule(double)
    def doubled(mode, function, x, weight):
        return 2 * structure.linear.linear(mode, F.linear, x, weight)

    fast = run(net, weights, theta, noise, x, linearized=True)
    frozen = {name: weight.detach() for name, weight in weights.items()}
    slow = one_by_one(Lost(lambda x, w: 2 * F.linear(x, w)), frozen, theta, noise, x, linearized=True)
    compare(fast, slow, weights, theta, linearized=True)


def test_parameter_counts_are_those_of_the_paper():
    """With the weights themselves: m' (2m + h), m' (2 + h), and 2p + 2hC for a convolution."""

    def count(layer):
        params = dict(layer.named_parameters())
        own = sum(weight.numel() for weight in params.values())
        return own + sum(parameter.numel() for parameter in Rowwise(params, H).parameters())

    assert count(nn.Linear(5, 7, bias=False)) == 7 * (2 * 5 + H)
    assert count(nn.Linear(5, 7)) - count(nn.Linear(5, 7, bias=False)) == 7 * (2 + H)
    convolution = nn.Conv2d(3, 8, 5)
    assert count(convolution) == 2 * sum(weight.numel() for weight in convolution.parameters()) + 2 * H * 8


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: F.linear(w, x),
        lambda x, w: x + w,
        lambda x, w: x + w.T,
        lambda x, w: torch.cat([x, w], 1),
    ],
)
def test_a_weight_in_the_place_of_an_activation_is_refused_even_if_it_has_as_many_rows_as_examples(use):
    net = Lost(use)
    weights, theta, noise = setup(net, 4)
    with pytest.raises(CannotRespond, match=r"'weight' is used by (linear|add|cat)"):
        run(net, weights, theta, noise, torch.randn(4, 4), linearized=False)
