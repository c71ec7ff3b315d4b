"""What a network may do to a weight before it uses it, against weights that are multiplied out for each example."""

import pytest
import torch
import torch.nn.functional as F
from test_rules import Lost, compare, double_precision, one_by_one, run, setup  # noqa: F401 (a fixture)

USES = {
    "linear, T": lambda x, w: F.linear(x, w.T),
    "@ T": lambda x, w: torch.tanh(x @ w.T) @ w,
    "@ t": lambda x, w: torch.tanh(torch.mm(x, w.t())) @ w.mT,
    "@ transpose": lambda x, w: x @ w.transpose(0, 1)[:, :3],
    "sequence @ T": lambda x, w: torch.stack([x, 2 * x], 1) @ w.permute(1, 0),
    "T of T": lambda x, w: F.linear(x, w.T.T),
    "some rows": lambda x, w: F.linear(torch.tanh(F.linear(x, w[:3])), w[1:, :3]),
    "some columns": lambda x, w: F.linear(x[:, 1:], w[:, 1:]),
    "some columns of T": lambda x, w: F.linear(x[:, 1:3], w.T[:, 1:3]),
    "every other row": lambda x, w: F.linear(x, w[::2]),
    "heads and back": lambda x, w: F.linear(x, w.view(2, 2, 4).flatten(0, 1)),
    "heads swapped": lambda x, w: F.linear(x, w.view(2, 2, 4)[1]),
    "chunks": lambda x, w: F.linear(x, w.chunk(2)[1]) * F.linear(x, w.split([3, 1])[0])[:, 1:],
    "unbind": lambda x, w: sum(x * row for row in w),
    "None": lambda x, w: F.linear(x, w[None].squeeze(0)),
    "1x1 convolution": lambda x, w: F.conv2d(x[..., None, None], w[..., None, None]).flatten(1),
    "convolution": lambda x, w: F.conv1d(x[:, None], w.unsqueeze(1)[..., :2], bias=w[1]).flatten(1),
    "convolution as a matrix": lambda x, w: F.linear(x, w.view(4, 2, 2).flatten(1)),
    "transposed convolution": lambda x, w: F.conv_transpose1d(x[..., None], w[:, None, :2], groups=2).flatten(1),
    "channel scale": lambda x, w: (x[..., None] * w[0].view(1, -1, 1) + w[1][:, None]).flatten(1),
    "column as a scale": lambda x, w: x * w[:, 1],
    "1 + scale": lambda x, w: x * (1 + w[0]),
    "1 - scale": lambda x, w: (x + w[0]) * (1 - w[1]),
    "x - w": lambda x, w: torch.tanh(torch.tanh(x - w[0]) - w[1:2]),
    "w - x": lambda x, w: torch.sub(w[2], torch.tanh(w[0].sub(torch.tanh(x * w[1])))),
    "negative": lambda x, w: F.linear(torch.tanh(x @ w), -w),
    "cast": lambda x, w: F.linear(torch.tanh(x @ w), w.to(x).type_as(x).to(torch.float64).double()),
    "copy": lambda x, w: F.linear(torch.tanh(x @ w), w.clone().T.contiguous().to(x.dtype)),
    "activation as a weight's type": lambda x, w: x.type_as(w) @ w,
    "addmm": lambda x, w: torch.addmm(w[1], torch.tanh(x @ w), w.T),
    "addmm, free bias": lambda x, w: torch.addmm(torch.ones(4), x, w),
    "addmm, free matrix": lambda x, w: torch.addmm(w[0], x, torch.ones(4, 4)),
    "positions": lambda x, w: (x[:, None] + w).flatten(1),
    "embedded positions": lambda x, w: (x[:, None] + F.embedding(torch.arange(4), w)).flatten(1),
    "embedded position ids": lambda x, w: (x[:, None] * F.embedding(torch.tensor([[2, 1]]), w, padding_idx=1)).flatten(
        1
    ),
    "norm of rows": lambda x, w: F.layer_norm(torch.tanh(x @ w), (4,), w[0], w[:, 1]),
    "norm of a token": lambda x, w: x * F.layer_norm(w[1:2].expand_as(x), (4,), w[0], w[2]),
    "activation of a weight's shape": lambda x, w: x[:, :1].expand_as(w[: len(x)]) @ w,
    "token, expand": lambda x, w: torch.tanh(torch.cat([w[:1].expand(len(x), -1), x], 1))[:, 2:6] @ w,
    "token, expand_as": lambda x, w: torch.cat((x, w[2].expand_as(x)), dim=-1),
    "token, repeat": lambda x, w: torch.cat([x, w[:1].repeat(len(x), 1), w[None, 3].tile((len(x), 1))], 1),
    "token, sequence": lambda x, w: torch.cat([w[1].view(1, 1, 4).expand(len(x), -1, -1), x[:, None]], 1) @ w,
    "token, added": lambda x, w: torch.tanh(x + w[1].expand(len(x), -1)) * w[:1].expand_as(x),
    "query": lambda x, w: F.linear(torch.tanh(F.linear(w[:1].expand(len(x), 4), torch.ones(4, 4)) + x), w),
    "query, both": lambda x, w: F.linear(w[None].expand(len(x), -1, -1), w) * x[:, None],
    "not the batch, though as long": lambda x, w: x[:, None].expand(-1, 4, -1) + w[:1].expand(4, 4),
}


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4])  # four: as many examples as rows
@pytest.mark.parametrize("use", USES)
def test_a_moved_weight_is_a_weight_for_each_example(use, count, linearized):
    torch.manual_seed(0)
    net, x = Lost(USES[use]), torch.randn(count, 4)
    weights, theta, noise = setup(net, count)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    slow = one_by_one(net, frozen, theta, noise, x, linearized=linearized)
    compare(fast, slow, weights, theta, linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
def test_a_response_goes_along_with_a_cast(linearized):
    """To the type of the activation; the master weight and its response keep theirs."""
    torch.manual_seed(0)
    net = Lost(lambda x, w: F.linear(torch.tanh(F.linear(x, w.to(x.dtype))), w.float(), w[0].type_as(x)))
    weights, theta, noise = setup(net, 5)
    x = torch.randn(5, 4, dtype=torch.float32)
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    assert fast.dtype == torch.float32
    exact = Lost(lambda x, w: F.linear(torch.tanh(F.linear(x, w)), w, w[0]))
    slow = run(exact, weights, theta, noise, x.double(), linearized=linearized)
    torch.testing.assert_close(fast.double(), slow, rtol=1e-5, atol=1e-5)
    assert not torch.equal(fast.double(), slow)
