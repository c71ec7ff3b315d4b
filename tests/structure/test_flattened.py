"""Networks that flatten examples and time before a layer, as GPT-2 does."""

import pytest
import torch
import torch.nn.functional as F
from test_rules import STRUCTURES, compare, double_precision, one_by_one, run, setup  # noqa: F401 (a fixture)
from torch import nn

LAYERS = {
    "addmm": lambda net, x: torch.addmm(net.bias, x, net.weight),
    "product": lambda net, x: x @ net.weight,
    "linear": lambda net, x: F.linear(x, net.weight, net.bias),
}
FLATTEN = {
    "view": lambda x: x.view(-1, x.shape[-1]),
    "reshape": lambda x: x.reshape(-1, x.shape[-1]),
    "flatten": lambda x: x.flatten(0, 1),
}


class Flattening(nn.Module):
    def __init__(self, layer, flatten):
        super().__init__()
        self.inner, self.weight, self.bias = (
            nn.Linear(4, 4),
            nn.Parameter(torch.randn(4, 4)),
            nn.Parameter(torch.randn(4)),
        )
        self.layer, self.flatten = LAYERS[layer], FLATTEN[flatten]

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        return self.layer(self, self.flatten(x)).view(x.shape)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count, steps", [(1, 3), (3, 1), (3, 3), (2, 4), (4, 2)])
@pytest.mark.parametrize("flatten", FLATTEN)
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_of_a_flattened_activation_belong_to_examples(layer, flatten, count, steps, linearized):
    torch.manual_seed(10 * count + steps)
    net, x = Flattening(layer, flatten), torch.randn(count, steps, 4)
    weights, theta, noise = setup(net, count)
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    compare(
        fast, one_by_one(net, frozen, theta, noise, x, linearized=linearized), weights, theta, linearized=linearized
    )


def test_rows_in_another_order_are_refused():
    torch.manual_seed(0)
    net = Flattening("linear", "view")
    net.flatten = lambda x: x.flatten(0, 1).flip(0)
    weights, theta, noise = setup(net, 3)
    with pytest.raises(ValueError, match="does not count the 3 examples"):
        run(net, weights, theta, noise, torch.randn(3, 2, 4), linearized=False)


TWICE = {
    "chunk": lambda z: z.chunk(2),
    "split": lambda z: z.split([len(z) // 2, len(z) // 2]),
    "slices": lambda z: (z[: len(z) // 2], z[len(z) // 2 :]),
    "view": lambda z: z.view(2, -1, z.shape[-1]).unbind(0),
    "narrow": lambda z: (z.narrow(0, 0, len(z) // 2), z.narrow(0, len(z) // 2, len(z) // 2)),
}


class Siamese(nn.Module):
    """Two inputs through one network, in one batch of twice the length."""

    def __init__(self, apart, together=torch.cat):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.apart, self.together = apart, together

    def forward(self, x):
        a, b = self.apart(self.second(torch.tanh(self.first(self.together([x, 2 * x])))))
        return a * b


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("apart", TWICE)
@pytest.mark.parametrize("together", [torch.cat, lambda parts: parts[0].repeat(2, 1) + 1], ids=["cat", "repeat"])
def test_examples_that_are_there_twice_have_one_perturbation(together, apart, count, linearized):
    torch.manual_seed(count)
    net, x = Siamese(TWICE[apart], together), torch.randn(count, 4)
    weights, theta, noise = setup(net, count)
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    compare(
        fast, one_by_one(net, frozen, theta, noise, x, linearized=linearized), weights, theta, linearized=linearized
    )


@pytest.mark.parametrize(
    "apart", [lambda z: (z[1:4], z[:3]), lambda z: z.split([1, 3, 2])[1:2] * 2], ids=["slice", "split"]
)
def test_a_part_that_does_not_begin_with_the_first_example_is_refused(apart):
    torch.manual_seed(0)
    net = Siamese(apart)
    net.after = nn.Linear(3, 3)
    net.forward = lambda x: net.after(apart(net.second(net.first(torch.cat([x, x]))))[0])
    weights, theta, noise = setup(net, 3)
    with pytest.raises(ValueError, match="does not count the 3 examples"):
        run(net, weights, theta, noise, torch.randn(3, 4), linearized=False)


class Windows(nn.Module):
    """As Swin: windows of images, a table of distances added to the scores, a mask, and back."""

    shifted = True

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(4, 12), nn.Linear(4, 4), nn.LayerNorm(4)
        self.table = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("distances", torch.tensor([[0, 1], [2, 0]]))

    def forward(self, x):
        count, steps, size = x.shape
        y = self.norm(x).view(count, steps // 2, 2, size).reshape(-1, 2, size)  # (B * windows, 2, size)
        q, k, v = self.qkv(y).view(-1, 2, 3, 2, 2).permute(2, 0, 3, 1, 4)
        bias = self.table[self.distances.view(-1)].view(2, 2, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        mask = torch.zeros(steps // 2, 2, 2)
        mask[0, 0, 1] = -1.0
        mask = mask.unsqueeze(1).repeat(count, 1, 1, 1)  # the same for every example
        y = self.out(self.attend(q, k, v, bias + mask if self.shifted else bias).transpose(1, 2).reshape(-1, 2, size))
        return x + y.view(count, steps, size)

    def attend(self, q, k, v, bias):
        return (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v


class FusedWindows(Windows):
    """The same, through PyTorch's own attention."""

    def attend(self, q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, bias)


class PlainWindows(FusedWindows):
    """The same without a mask, as every other layer of Swin."""

    shifted = False


class TimeMajor(nn.Module):
    """Time first, flattened with the examples, positions for each time, an encoder, and a mean over time."""

    def __init__(self):
        super().__init__()
        self.into, self.positions = nn.Linear(4, 4), nn.Parameter(torch.randn(9, 1, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 2)

    def forward(self, x):
        x = x.transpose(0, 1)
        y = self.into(x.reshape(-1, 4)).view(x.shape) + self.positions[: len(x)]
        return self.out(self.encoder(y).mean(0))


class Experts(nn.Module):
    """As Mixtral: tokens are sent to one of three experts, all examples at once."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        flat = x.reshape(-1, 4)
        shares = self.router(flat).softmax(-1)
        chosen = shares.detach().argmax(-1)
        result = torch.zeros_like(flat)
        for expert in range(3):
            (rows,) = torch.where(chosen == expert)
            y = F.linear(flat[rows], self.experts[expert]).tanh() * shares[rows, expert, None]
            result.index_add_(0, rows, self.norm(y))
        return result.view(x.shape)


class Frames(nn.Module):
    """Convolutions of all frames of videos at once, (B * T, channels, length)."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 6, 1), nn.GroupNorm(2, 6)
        self.back, self.out = nn.ConvTranspose1d(6, 3, 1), nn.Linear(3, 2)

    def forward(self, x):
        y = self.back(self.norm(self.conv(x.reshape(-1, 4, 1)))).tanh()
        return self.out(y.squeeze(-1)).view(*x.shape[:2], 2)


class Unpadded(nn.Module):
    """Drops padding before its layer, and puts it back."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        real = x[..., 0] > -0.5
        result = torch.zeros_like(x)
        result[real] = self.layer(x[real])
        return result


class Repeated(nn.Module):
    """As DeBERTa: projected positions are repeated for each example, with heads and examples in one dimension."""

    def __init__(self):
        super().__init__()
        self.positions, self.key, self.query = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        def heads(y):
            return y.view(*y.shape[:2], 2, 2).permute(0, 2, 1, 3).contiguous().view(-1, y.shape[1], 2)

        key = heads(self.key(self.positions.weight[None])).repeat(len(x), 1, 1)
        return torch.bmm(heads(self.query(x)), key.transpose(-1, -2)).view(len(x), 2, x.shape[1], 5)


NETWORKS = [Windows, FusedWindows, PlainWindows, TimeMajor, Experts, Frames, Unpadded, Repeated]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count, steps", [(2, 4), (4, 4), (3, 2)])  # also as many times as examples
@pytest.mark.parametrize("kind", NETWORKS)
def test_examples_are_followed_through_a_network(kind, count, steps, linearized, structure):
    torch.manual_seed(10 * count + steps)
    net, x = kind(), torch.randn(count, steps, 4)
    weights, theta, noise = setup(net, count, structure)
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    slow = one_by_one(net, frozen, theta, noise, x, linearized=linearized)
    if kind is TimeMajor:
        fast, slow = fast.view(slow.shape), slow
    compare(fast, slow, weights, theta, linearized=linearized)


def test_time_first_inputs_are_recognised_by_their_shape():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 3, 4)
    weights, theta, noise = setup(net, 3)
    fast = run(net, weights, theta, noise, x, linearized=False)
    slow = one_by_one(net, weights, theta, noise, x.transpose(0, 1), linearized=False).transpose(0, 1)
    compare(fast, slow, weights, theta, linearized=False)
