"""Formulas of tangents, against the forward mode of PyTorch, in value, tangent and the derivative of the tangent."""

import pytest
import torch
import torch.nn.functional as F
from problems import randn
from torch import nn
from torch.autograd import forward_ad

from bilevel.autodiff import forward_level

X, TANGENT, OTHER, ROW, CHANNEL = randn(0, (3, 4, 6), (3, 4, 6), (3, 4, 6), (6,), (4,))
OTHER = OTHER + 3
CASES = {
    "x * mask": lambda x: x * (OTHER > 3),
    "x * y": lambda x: x * OTHER,
    "y * x, broadcast": lambda x: OTHER.unsqueeze(0) * x[:1],
    "2 * x": lambda x: 2 * x,
    "x * x": lambda x: x * x,
    "x / y": lambda x: x / OTHER,
    "x / 2": lambda x: x / 2,
    "2 / x": lambda x: 2 / (x + 5),
    "y / x": lambda x: OTHER / (x + 5),
    "x + row": lambda x: x + ROW,
    "row + x, broadcast": lambda x: OTHER + x[:1],
    "x + 1": lambda x: x + 1,
    "1 + x": lambda x: 1 + x,
    "x - y": lambda x: x - OTHER,
    "y - x": lambda x: OTHER - x,
    "1 - x": lambda x: 1 - x,
    "rsub": lambda x: torch.rsub(x, 2.0),
    "add with alpha": lambda x: torch.add(x, OTHER, alpha=0.5),
    "in place": lambda x: x.clone().mul_(2.0),
    "integers": lambda x: x * torch.arange(6),
    "softmax": lambda x: x.softmax(-1),
    "softmax of torch": lambda x: torch.softmax(x, dim=1),
    "softmax of functional": lambda x: F.softmax(x, dim=0),
    "softmax by name": lambda x: F.softmax(input=x, dim=0),
    "softmax in single precision": lambda x: F.softmax(x, dim=1, dtype=torch.float32).double(),
    "masked softmax": lambda x: x.masked_fill(OTHER > 4, -torch.inf).softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (6,), ROW, ROW + 1),
    "layer norm of two": lambda x: F.layer_norm(x, (4, 6), OTHER[0], None),
    "group norm": lambda x: F.group_norm(x, 2, CHANNEL, CHANNEL + 1),
    "plain group norm": lambda x: nn.GroupNorm(2, 4, affine=False)(x),
    "plain layer norm": lambda x: F.layer_norm(x, (4, 6)),
    "batch norm": lambda x: F.batch_norm(x, None, None, CHANNEL, CHANNEL + 1, True),
    "plain batch norm": lambda x: nn.BatchNorm1d(4, affine=False).double()(x),
    "batch norm of columns": lambda x: F.batch_norm(x[:, :, 0], None, None, CHANNEL, None, training=True, eps=0.1),
    "batch norm of images": lambda x: F.batch_norm(x.unflatten(2, (2, 3)).mT, None, None, None, CHANNEL, True),
    "batch norm as in eval mode": lambda x: F.batch_norm(x, CHANNEL, CHANNEL.abs(), CHANNEL, CHANNEL + 1, False),
}


def taken(function, *, quick):
    """Value, tangent, and the gradient of a function of the tangent in the direction."""
    direction = TANGENT.clone().requires_grad_()
    with forward_level() if quick else forward_ad.dual_level():
        pair = forward_ad.unpack_dual(function(forward_ad.make_dual(X, direction)))
        weights = torch.linspace(1, 2, pair.tangent.numel()).view_as(pair.tangent)
        (slope,) = torch.autograd.grad((pair.tangent * weights).sum(), direction)
    return pair.primal, pair.tangent, slope


@pytest.mark.parametrize("name", CASES)
def test_the_formulas_are_those_of_pytorch(name):
    tolerance = 1e-6 if "single" in name else 1e-12
    for found, expected in zip(taken(CASES[name], quick=True), taken(CASES[name], quick=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_batch_of_vmap_passes():
    with forward_level():
        dual = forward_ad.make_dual(X, TANGENT)
        tangent = forward_ad.unpack_dual(torch.vmap(lambda row: (2 * row).softmax(-1))(dual)).tangent
    torch.testing.assert_close(tangent, taken(lambda x: (2 * x).softmax(-1), quick=False)[1], rtol=0, atol=1e-12)
