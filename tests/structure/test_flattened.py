"""Networks that flatten examples and time before a layer, as GPT-2 does."""

import pytest
import torch
import torch.nn.functional as F
from test_rules import compare, double_precision, one_by_one, run, setup  # noqa: F401 (a fixture)
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


@pytest.mark.parametrize("change", [lambda x: x.transpose(0, 1).reshape(-1, 4), lambda x: x.flatten(0, 1).flip(0)])
def test_rows_in_another_order_are_refused(change):
    torch.manual_seed(0)
    net = Flattening("linear", "view")
    net.flatten = change
    weights, theta, noise = setup(net, 3)
    with pytest.raises(ValueError, match="does not count the 3 examples"):
        run(net, weights, theta, noise, torch.randn(3, 2, 4), linearized=False)
