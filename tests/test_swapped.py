"""A call with other tensors does what torch.func.functional_call does, and leaves the module as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from bilevel.problem.swapped import call_with


class Counting(nn.Module):
    """Assigns a new tensor to a buffer, changes another in place, and has one layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, fail=False):
        self.calls = self.calls + 1
        if fail:
            raise RuntimeError("fails")
        return self.norm(self.second(self.first(x)))


def tensors_for(net):
    names = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
    made = {id(value): torch.rand_like(value) if value.is_floating_point() else value.clone() for _, value in names}
    return {name: made[id(value)] for name, value in names}


def test_it_is_a_functional_call_and_leaves_the_module_alone():
    net, x = Counting(), torch.randn(4, 2)
    before = {name: (value, value.clone()) for name, value in net.state_dict(keep_vars=True).items()}
    tensors = tensors_for(net)
    given, copies = dict(tensors), copy.deepcopy(tensors)
    expected = functional_call(copy.deepcopy(net), copies, (x,))
    torch.testing.assert_close(call_with(net, tensors, (x,), {}), expected, rtol=0, atol=0)
    assert tensors["calls"] is not given["calls"]  # a new tensor; the statistics were changed in place
    assert all(tensors[name] is value for name, value in given.items() if name != "calls")
    for name in ("calls", "norm.running_mean"):
        torch.testing.assert_close(tensors[name], copies[name], rtol=0, atol=0)
    for name, value in net.state_dict(keep_vars=True).items():
        assert value is before[name][0]
        torch.testing.assert_close(value, before[name][1], rtol=0, atol=0)


def test_the_module_is_as_before_if_the_call_fails():
    net = Counting()
    before = dict(net.named_parameters()) | dict(net.named_buffers())
    with pytest.raises(RuntimeError, match="fails"):
        call_with(net, tensors_for(net), (torch.randn(4, 2),), {"fail": True})
    assert all(value is before[name] for name, value in [*net.named_parameters(), *net.named_buffers()])


def test_a_name_that_stands_for_a_parametrized_weight():
    net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))
    tensors = {"weight": torch.eye(2)}
    torch.testing.assert_close(call_with(net, tensors, (torch.ones(1, 2),), {}), torch.ones(1, 2), rtol=0, atol=0)
