"""Whether the examples are where the rules expect them."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from test_rules import Lost, compare, double_precision, run, setup  # noqa: F401 (a fixture)
from torch import nn
from torch.func import functional_call, jvp

from bilevel.structure import Examples, respond


class Shuffled(nn.Module):
    """Layers with something between the first and the second that does not know about examples."""

    def __init__(self, mix):
        super().__init__()
        self.one, self.two, self.mix = nn.Linear(3, 5), nn.Linear(5, 2), mix

    def forward(self, x):
        return self.two(self.mix(torch.tanh(self.one(x))))


PERMUTATIONS = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "half": lambda x: x.roll(len(x) // 2, 0),
    "pairs": lambda x: x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
    "riffle": lambda x: x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1),
    "others": lambda x: (x.sum(0) - x) / len(x),
}


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("kind", PERMUTATIONS)
@pytest.mark.parametrize("count", [4, 8])
def test_examples_in_other_rows_are_noticed(kind, count, linearized):
    """No dimension but the first is as long as the batch."""
    torch.manual_seed(0)
    net = Shuffled(PERMUTATIONS[kind])
    weights, theta, noise = setup(net, count)
    with pytest.raises(ValueError, match=r"'two.weight' is used by linear.*does not count the .* examples"):
        run(net, weights, theta, noise, torch.randn(count, 3), linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
def test_examples_in_another_dimension_of_the_same_length_are_noticed(linearized):
    """Every row changes with every example then, so that none stays as it was."""
    torch.manual_seed(0)
    net = Shuffled(lambda x: x.transpose(0, 1))
    weights, theta, noise = setup(net, 4)
    with pytest.raises(ValueError, match=r"'two.weight' is used by linear.*does not count the .* examples"):
        run(net, weights, theta, noise, torch.randn(4, 4, 3), linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_examples_that_see_each_other_are_no_permutation(count, linearized):
    """As for batch norm: the reference multiplies out all weights and runs the whole batch."""
    torch.manual_seed(0)
    net = Shuffled(lambda x: x - x.mean(0))
    weights, theta, noise = setup(net, count)
    x = torch.randn(count, 3)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    stacked = {name: torch.stack([theta(shift)[name] for shift in noise]) for name in weights}

    def reference(change):
        w = {name: weight + change[name] for name, weight in frozen.items()}
        y = torch.tanh(torch.einsum("bi,boi->bo", x, w["one.weight"]) + w["one.bias"])
        return torch.einsum("bi,boi->bo", y - y.mean(0), w["two.weight"]) + w["two.bias"]

    zero = {name: torch.zeros_like(change) for name, change in stacked.items()}
    slow = sum(jvp(reference, (zero,), (stacked,))) if linearized else reference(stacked)
    compare(run(net, weights, theta, noise, x, linearized=linearized), slow, weights, theta, linearized=linearized)


@pytest.mark.parametrize("shape", [(4, 3), (4, 4, 3)])
def test_noise_inside_the_network_is_the_same_in_every_pass(shape):
    """Also where the passes are compared row by row, and without a trace in the random state."""
    torch.manual_seed(0)
    net = Shuffled(lambda x: x + torch.randn_like(x))
    weights, theta, noise = setup(net, 4)
    x = torch.randn(shape)
    torch.manual_seed(1)
    run(net, weights, theta, noise, x, linearized=False)
    drawn = torch.randn(1)
    torch.manual_seed(1)
    torch.randn(*shape[:-1], 5)
    assert torch.equal(drawn, torch.randn(1))


def test_equal_examples_and_dead_rows_are_no_reason_to_refuse():
    """Some rows do not change with their examples; none changes without."""
    net = Lost(lambda x, w: F.linear(torch.relu(x), w))
    weights, theta, noise = setup(net, 6)
    x = torch.randn(6, 4)
    x[0], x[2] = -1.0, x[1]
    run(net, weights, theta, noise, x, linearized=False)
    run(net, weights, theta, noise, torch.ones(6, 4), linearized=False)


def test_each_kind_of_input_is_looked_at_once():
    """Three passes in eval mode for a kind, and three for a shape in doubt; the input of the caller is left alone."""
    passes = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, **options):
            passes.append(torch.is_grad_enabled())
            return self.layer(x.add_(1))

    net = Net()
    weights, theta, noise = setup(net, 4)
    modes = []
    examples = Examples(lambda: modes.append("eval") or nullcontext())

    def call(*shape):
        def predict(params, *args, **kwargs):
            return functional_call(net, params, args, kwargs)

        passes.clear()
        x = torch.zeros(shape) + torch.arange(4.0).reshape(4, *[1] * (len(shape) - 1))
        before = x.clone()
        respond(predict, weights, theta.rows(noise), examples, linearized=False)(x, option=None)
        assert torch.equal(x, before + 1)
        return len(passes), passes.count(True)

    assert [call(4, 3), call(4, 3)] == [(4, 1), (1, 1)]
    assert [call(4, 2, 3), call(4, 5, 3)] == [(4, 1), (1, 1)]
    assert [call(4, 4, 3), call(4, 4, 3), call(4, 2, 3)] == [(4, 1), (1, 1), (1, 1)]
    assert len(modes) == 9
