"""linearize: right through every common layer, in its value and in its gradient with respect to the tangent."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from problems import assert_equal, double, randn
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bilevel.autodiff import linearize


class Attention(nn.Module):
    """Scaled dot-product attention with projections of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.project(x).chunk(3, dim=-1), is_causal=True)


class SelfAttention(nn.Module):
    """PyTorch's own module."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Cell(nn.Module):
    """A recurrent network from a cell, unrolled by hand."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


def images(*layers: nn.Module) -> nn.Sequential:
    """A convolution before the layers, so that their inputs have tangents."""
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers)


ROWS, SEQUENCE, PICTURES = (5, 4), (3, 5, 4), (3, 2, 6, 6)
NETWORKS = {
    "linear, relu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), ROWS),
    "gelu, silu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2), nn.SiLU()), ROWS),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmax(1), nn.Linear(6, 3), nn.LogSoftmax(1)), ROWS),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)), ROWS),
    "batch norm, in place": (lambda: images(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)), PICTURES),
    "instance norm": (lambda: images(nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Conv2d(4, 2, 3)), PICTURES),
    "group norm": (lambda: images(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3)), PICTURES),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)), ROWS),
    "rms norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 2)), ROWS),
    "strided, grouped, dilated": (
        lambda: images(nn.Conv2d(4, 4, 3, stride=2, groups=2, padding=1), nn.Conv2d(4, 2, 2, dilation=2)),
        PICTURES,
    ),
    "transposed": (lambda: images(nn.Tanh(), nn.ConvTranspose2d(4, 2, 3, stride=2)), PICTURES),
    "max pool": (lambda: images(nn.MaxPool2d(2), nn.Conv2d(4, 2, 2)), PICTURES),
    "average pool": (lambda: images(nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)), PICTURES),
    "attention": (Attention, SEQUENCE),
    "multi-head attention": (lambda: SelfAttention(batch_first=True), SEQUENCE),
    "multi-head attention, time first": (lambda: SelfAttention(batch_first=False), SEQUENCE),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), SEQUENCE),
    "lstm cell": (lambda: Cell(nn.LSTMCell(4, 3)), SEQUENCE),
    "gru cell": (lambda: Cell(nn.GRUCell(4, 3)), SEQUENCE),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2), nn.Tanh()), (5, 3)),
}


class Case:
    """A network in train mode, its weights, two directions and an input."""

    def __init__(self, name: str) -> None:
        make, shape = NETWORKS[name]
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.network = make().double().train()
        self.params = {key: value.detach() for key, value in self.network.named_parameters()}
        self.buffers = dict(self.network.named_buffers())
        (self.x,) = randn(1, shape)
        if name == "embedding":
            self.x = torch.arange(15).reshape(shape) % 7
        self.one, self.other = (
            dict(zip(self.params, randn(seed, *[value.shape for value in self.params.values()]), strict=True))
            for seed in (2, 3)
        )

    def predict(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return functional_call(self.network, {**params, **buffers}, (x,))

    def change(self, direction: dict[str, Tensor]) -> Tensor:
        """J v by central differences."""
        ends = [
            self.predict({name: value + step * direction[name] for name, value in self.params.items()}, self.x)
            for step in (1e-6, -1e-6)
        ]
        return (ends[0] - ends[1]).detach() / 2e-6


@pytest.mark.parametrize("name", NETWORKS)
def test_linearize_is_the_first_order_expansion(name):
    """f(w) + J v, against finite differences; the input w is not changed."""
    case = Case(name)
    with torch.no_grad():
        actual = linearize(case.predict, case.params, case.one)(case.x)
        assert_equal(actual, case.predict(case.params, case.x) + case.change(case.one), 1e-7)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_with_respect_to_the_tangent_are_right(name):
    """The expansion is linear in its tangent, so that ⟨∇, u⟩ = ⟨c, J u⟩ for every u."""
    case = Case(name)
    tangents = {key: value.clone().requires_grad_() for key, value in case.one.items()}
    output = linearize(case.predict, case.params, tangents)(case.x)
    (cotangent,) = randn(4, output.shape)
    # The bias of an attention's keys has no effect, hence no gradient.
    gradients = torch.autograd.grad(output, list(tangents.values()), cotangent, allow_unused=True)
    product = sum((g * case.other[key]).sum() for key, g in zip(tangents, gradients, strict=True) if g is not None)
    assert_equal(product, (cotangent * case.change(case.other)).sum(), 1e-7)


def test_attention_is_linearised_in_single_precision_too():
    """The fused kernels, which PyTorch prefers there, have no forward mode."""
    case = Case("attention")
    expected = linearize(case.predict, case.params, case.one)(case.x)
    case.network.float()
    params, tangents = ({key: value.float() for key, value in part.items()} for part in (case.params, case.one))
    assert_equal(linearize(case.predict, params, tangents)(case.x.float()).double(), expected, 1e-5)


def test_linearize_keeps_what_is_not_a_prediction():
    """Text, numbers and integer tensors pass through nested containers unchanged."""
    weights = {"w": double([1.0, 3.0])}

    def network(params, factor):
        y = factor * params["w"] ** 2
        return {"y": (y, y.argmax()), "text": "same", "count": [1, None]}

    output = linearize(network, weights, {"w": double([0.5, 0.0])})(2.0)
    assert output["y"][0].tolist() == [2.0 + 2.0, 18.0]
    assert output["y"][1].item() == 1
    assert output["text"] == "same"
    assert output["count"] == [1, None]


class Slots:
    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Subclass(dict):
    pass


@pytest.mark.parametrize(
    "pack",
    [
        lambda y: SimpleNamespace(y=y),
        lambda y: SimpleNamespace(ys=[y]),
        Slots,
        lambda y: Subclass(y=y),
        lambda y: UserDict(y=y),
        lambda y: {"deep": [UserDict(y=y)]},
    ],
)
def test_linearize_refuses_an_object_whose_tensors_it_cannot_reach(pack):
    """Its tangents would be lost silently, so that it may be returned, as caches are, but not be used."""
    output = linearize(lambda p: (p["w"], pack(p["w"])), {"w": double(1.0)}, {"w": double(1.0)})()
    assert output[0] == 2.0
    opaque = output[1]["deep"][0] if isinstance(output[1], dict) else output[1]
    for use in (lambda: opaque.y, lambda: opaque["y"], lambda: opaque + 1, lambda: torch.add(opaque, 1), opaque):
        with pytest.raises(TypeError, match=r"uses a \w+ that the network returned.*delta_stn.*centered_stn"):
            use()


def test_linearize_says_what_to_do_about_an_op_without_forward_mode():
    """The error of PyTorch names the operation, and the note says which method does without."""
    grid = torch.zeros(1, 2, 2, 2)
    function = linearize(
        lambda p: nn.functional.grid_sample(p["w"], grid, align_corners=False), *[{"w": torch.ones(1, 1, 2, 2)}] * 2
    )
    with pytest.raises(NotImplementedError, match="grid_sampler") as raised:
        function()
    assert any("method='centered_stn'" in note for note in raised.value.__notes__)


def test_linearize_takes_recurrent_networks_apart():
    """Against finite differences, where the kernel of PyTorch has no forward mode."""
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True).double()
    params = {name: value.detach() for name, value in lstm.named_parameters()}
    x, step = torch.randn(2, 5, 4).double(), {name: torch.randn_like(value) for name, value in params.items()}

    def at(t):
        return functional_call(lstm, {name: params[name] + t * step[name] for name in params}, (x,))[0]

    found = linearize(lambda p: functional_call(lstm, p, (x,))[0], params, step)()
    assert_equal(found, at(0.0) + (at(1e-6) - at(-1e-6)) / 2e-6, 1e-8)
