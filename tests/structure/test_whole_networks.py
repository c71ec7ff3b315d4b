"""Whole networks of the usual kinds, with a weight for each example; the rules of their operations meet here."""

import pytest
import torch
import torch.nn.functional as F
from test_rules import compare, double_precision, one_by_one, run, setup  # noqa: F401 (a fixture)
from torch import nn

D = 4


class SelfAttention(nn.Module):
    """Written by hand: one projection for queries, keys and values."""

    def __init__(self, *, causal=False):
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(D, 3 * D), nn.Linear(D, D), causal

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class BuiltIn(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Block(nn.Module):
    """Pre-norm attention and an MLP."""

    def __init__(self, attention):
        super().__init__()
        self.one, self.two, self.attention = nn.LayerNorm(D), nn.LayerNorm(D), attention
        self.mlp = nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, D))
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x):
        x = x + self.attention(self.one(x))
        return x + self.scale * self.mlp(self.two(x))


class ViT(nn.Module):
    """Patches, a class token, positions."""

    def __init__(self, attention):
        super().__init__()
        self.patches = nn.Conv2d(2, D, 2, stride=2)
        self.token, self.position = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 5, D))
        self.blocks = nn.Sequential(Block(attention()), Block(attention()))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class Pooled(nn.Module):
    """A learned query looks at the sequence, through PyTorch's attention."""

    def __init__(self, *, batch_first):
        super().__init__()
        self.query, self.batch_first = nn.Parameter(torch.randn(1, 2, D)), batch_first
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)

    def forward(self, x):
        query = self.query.expand(len(x), -1, -1)
        if self.batch_first:
            return self.attention(query, x, x)[0]
        query, x = query.transpose(0, 1), x.transpose(0, 1)
        return self.attention(query, x, x)[0].transpose(0, 1)


class GPT(nn.Module):
    """Tokens and positions from tables, causal attention, a tied head."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, D), nn.Embedding(6, D)
        self.block, self.norm, self.head = Block(SelfAttention(causal=True)), nn.LayerNorm(D), nn.Linear(D, 7)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.norm(self.block(x)))


class ConvNeXt(nn.Module):
    """A depthwise convolution, a norm over channels, an inverted bottleneck with response normalisation, a scale."""

    def __init__(self):
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(2, D, 2, stride=2), nn.Conv2d(D, D, 3, padding=1, groups=D)
        self.norm, self.wide, self.narrow = nn.LayerNorm(D), nn.Linear(D, 8), nn.Linear(8, D)
        self.gain, self.offset = nn.Parameter(torch.randn(1, 1, 1, 8)), nn.Parameter(torch.randn(1, 1, 1, 8))
        self.scale, self.head = nn.Parameter(torch.rand(D)), nn.Linear(D, 3)

    def forward(self, x):
        x = self.stem(x)
        y = F.gelu(self.wide(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
        length = y.norm(dim=(1, 2), keepdim=True)
        y = self.gain * (y * length / length.mean(-1, keepdim=True)) + self.offset + y
        x = x + self.narrow(y).permute(0, 3, 1, 2).mul(self.scale.reshape(1, -1, 1, 1))
        return self.head(x.mean((2, 3)))


class ResNet(nn.Module):
    """A block with a projected shortcut; batch norm with running statistics, or group norm."""

    def __init__(self, norm):
        super().__init__()
        self.one, self.two = nn.Conv2d(2, D, 3, 2, 1, bias=False), nn.Conv2d(D, D, 3, 1, 1, bias=False)
        self.shortcut, self.head = nn.Conv2d(2, D, 1, 2, bias=False), nn.Linear(D, 3)
        self.norms = nn.ModuleList([norm(D) for _ in range(3)])

    def forward(self, x):
        y = self.norms[1](self.two(torch.relu(self.norms[0](self.one(x)))))
        return self.head(torch.relu(y + self.norms[2](self.shortcut(x))).mean((2, 3)))


IMAGES = {
    "vit, built-in attention": lambda: ViT(BuiltIn),
    "vit, attention by hand": lambda: ViT(SelfAttention),
    "convnext": ConvNeXt,
    "resnet, batch norm": lambda: ResNet(nn.BatchNorm2d).eval(),
    "resnet, group norm": lambda: ResNet(lambda size: nn.GroupNorm(2, size)),
}
SEQUENCES = {
    "learned query": lambda: Pooled(batch_first=True),
    "learned query, time first": lambda: Pooled(batch_first=False),
}


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count", [2, 4, 5])  # four: as many as channels and patches; five: as tokens
@pytest.mark.parametrize("kind", [*IMAGES, *SEQUENCES, "gpt"])
def test_a_network_is_one_for_each_example(kind, count, linearized):
    torch.manual_seed(count)
    net = GPT() if kind == "gpt" else (IMAGES | SEQUENCES)[kind]()
    inputs = {"gpt": torch.randint(7, (count, 5))} | dict.fromkeys(SEQUENCES, torch.randn(count, 5, D))
    x = inputs.get(kind, torch.randn(count, 2, 4, 4))
    weights, theta, noise = setup(net, count)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    slow = one_by_one(net, frozen, theta, noise, x, linearized=linearized)
    compare(fast, slow, weights, theta, linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("kind", ["spectral_norm"])
def test_a_parametrized_weight_is_refused(kind, linearized):
    """It changes its buffers in place, from a weight that differs from example to example."""
    net = getattr(nn.utils.parametrizations, kind)(nn.Linear(4, 4))
    weights, theta, noise = setup(net, 3)
    with pytest.raises(NotImplementedError, match=r"'parametrizations.weight.original.*perturb='batch'"):
        run(net, weights, theta, noise, torch.randn(3, 4), linearized=linearized)
