"""Batches of other libraries: any mapping, dataclasses, named tuples, numpy arrays."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from examples import batches, inner_loss, make_problem, network, outer_loss, shortened, solve
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

import bilevel
from bilevel.batches import count_examples, describe, leaves, to_device
from bilevel.checks import Kinds


@dataclass
class Pair:
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


class Encoding(UserDict):
    """As tokenizers return it: a mapping that is no dict, moves itself, and gives its entries as attributes."""

    def to(self, device):
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


Named = namedtuple("Named", ["x", "y"])
KINDS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "named tuple": Named,
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered dict": lambda x, y: OrderedDict(x=x, y=y),
    "user dict": lambda x, y: UserDict(x=x, y=y),
    "read-only mapping": lambda x, y: MappingProxyType({"x": x, "y": y}),
    "encoding": lambda x, y: Encoding(x=x, y=y),
    "dataclass": Pair,
    "frozen dataclass": Frozen,
    "nested": lambda x, y: (UserDict(x=x), [Pair(None, y)]),
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "mapping of numpy": lambda x, y: UserDict(x=x.numpy(), y=y.numpy()),
    "a number first": lambda x, y: (torch.tensor(1.0), "text", 3, x, y),
}


def unpack(batch):
    """The two tensors, found by type."""
    x, y = (torch.as_tensor(part) for part in leaves(batch) if isinstance(part, Tensor | np.ndarray) and part.ndim)
    return x, y


def problem_of_batches(**options):
    """The usual problem, whose losses unpack their batch; the inner one has one value per example."""

    def per_example(model, hyper, batch):
        x, y = unpack(batch)
        return (model(x) - y).square().mean(1) + hyper["decay"] * bilevel.l2(model.params)

    return make_problem(
        network(),
        inner_loss=per_example,
        outer_loss=lambda model, hyper, batch: outer_loss(model, hyper, unpack(batch)),
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_of_a_batch_are_counted(kind):
    (x, y), *_ = batches(size=5)
    batch = KINDS[kind](x, y)
    assert count_examples(batch) == 5
    assert "(5, 3)" in describe(batch) and "(5, 1)" in describe(batch)
    for one, other in zip(unpack(batch), (x, y), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("batch", [None, 3, "text", [], {}, torch.tensor(1.0), np.float32(2), ["a", "b"], UserDict()])
def test_a_batch_without_a_dimension_has_no_count(batch):
    assert count_examples(batch) is None


def test_a_packed_sequence_is_not_counted():
    """Its data begin with the first steps of all sequences. Its lengths stay on the CPU when it is moved."""
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    assert count_examples(packed) is None
    moved = to_device([packed], torch.device("meta"))[0]
    assert moved.data.device.type == "meta" and moved.batch_sizes.device.type == "cpu"


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_moved_and_keeps_its_kind(kind):
    (x, y), *_ = batches(size=5)
    batch = KINDS[kind](x, y)
    before = KINDS[kind](x, y)
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert {leaf.device.type for leaf in leaves(moved) if isinstance(leaf, Tensor)} <= {"meta"}
    if kind != "encoding":  # which moves itself in place
        assert all(torch.equal(one, other) for one, other in zip(unpack(batch), (x, y), strict=True))
    stays = to_device(before, torch.device("cpu"))
    assert type(stays) is type(before)
    assert all(torch.equal(one, other) for one, other in zip(unpack(stays), (x, y), strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tuple"])
@pytest.mark.parametrize("method", ["stn", "centered_stn", "delta_stn", "implicit_identity", "unrolled"])
def test_a_run_does_not_depend_on_the_kind_of_batch(method, kind):
    """The same perturbations, losses and hyperparameters, to the last bit, as with tuples."""
    method = shortened(bilevel.METHODS[method])
    ends = []
    for make in (KINDS["tuple"], KINDS[kind]):
        train, valid = ([make(*batch) for batch in batches(2, seed=seed)] for seed in (0, 1))
        inner_steps = None if isinstance(method, bilevel.Unrolled) else 2
        run = solve(problem_of_batches(), train, valid, method=method, steps=2, inner_steps=inner_steps)
        ends.append(run.history.rows[-1] | {"seconds": 0})
    assert ends[0] == ends[1]


@pytest.mark.parametrize("method", ["stn", "centered_stn", "delta_stn"])
@pytest.mark.parametrize("batch", [3, "text", torch.tensor(1.0), [[1, 2], [3, 4]], Pair("a", "b")], ids=str)
def test_examples_that_cannot_be_counted_are_an_error(method, batch):
    """Not silently one perturbation for the whole batch; both remedies of the message work."""
    x, y = batches(1)[0]
    losses = {
        "inner_loss": lambda model, hyper, batch: inner_loss(model, hyper, (x, y)),
        "outer_loss": lambda model, hyper, batch: outer_loss(model, hyper, (x, y)),
    }
    with pytest.raises(ValueError, match=r"number of examples.*Problem\(examples=...\).*perturb='batch'"):
        solve(make_problem(**losses), [batch], [batch], method=method, steps=1)
    solve(make_problem(**losses, examples=lambda batch: 5), [batch], [batch], method=method, steps=1)
    settings = type(bilevel.METHODS[method])(perturb="batch")
    solve(make_problem(**losses), [batch], [batch], method=settings, steps=1)
    solve(make_problem(**losses), None, None, method=method, steps=1)  # without batches there is nothing to count


def test_an_error_in_a_loss_describes_the_batch():
    def fail(model, hyper, batch):
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        solve(make_problem(inner_loss=fail), [UserDict(x=torch.zeros(2, 3), y=np.zeros(2))], steps=1)
    assert "batch: torch.float32 (2, 3) on cpu, numpy float64 (2,)" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_another_shape_are_of_another_kind(kind):
    """And so are checked anew."""
    kinds, ((x, y), *_) = Kinds(), batches(size=5)
    kinds.add(KINDS[kind](x, y), 5)
    assert not kinds.new(KINDS[kind](x, y), 5)
    assert kinds.new(KINDS[kind](x[:3], y[:3]), 3)
