"""Random numbers of a traced step that are used again."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from bilevel.rng import Repeated
from bilevel.tape import Tape

CPU = torch.device("cpu")
DRAWS = {
    "rand": lambda x: torch.rand(3, 2),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(3, 2) * x,
    "randint": lambda x: torch.randint(5, (3, 2)),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of channels": lambda x: F.dropout1d(x[None], 0.5),
}


def twice(draw):
    def both(x):
        again = Repeated(CPU)
        with again():
            one = draw(x)
        with again():
            other = draw(x)
        return one, other

    return both


@pytest.mark.parametrize("name", DRAWS)
def test_a_graph_draws_once_what_is_used_twice(name):
    """Both results agree in every run of the graph, runs differ, and the numbers are those of the plain function."""
    x, both = torch.ones(3, 2), twice(DRAWS[name])
    graph = make_fx(both)(x)
    seen = []
    for seed in range(8):
        torch.manual_seed(seed)
        plain, after = both(x), torch.rand(1)
        torch.manual_seed(seed)
        traced = graph(x)
        assert torch.equal(after, torch.rand(1))
        for one, other in zip((*plain, traced[1]), (*traced, traced[0]), strict=True):
            assert torch.equal(one, other)
        seen.append(traced[0])
    assert any(not torch.equal(one, seen[0]) for one in seen)


def test_what_cannot_be_repeated_is_refused():
    """Draws that depend on the values of a tensor, and a second block that draws something else."""
    with pytest.raises(NotImplementedError, match=r"bernoulli.*cannot repeat"):
        make_fx(twice(torch.bernoulli))(torch.full((3,), 0.5))

    def other(x):
        tape = Tape()
        with tape.play():
            one = torch.rand(2)
        with tape.play():
            return one, torch.rand(3)

    with pytest.raises(NotImplementedError, match="other random numbers"):
        other(torch.ones(1))


def test_attention_without_dropout_draws_nothing():
    q = torch.randn(2, 3, 4, 5)
    one, other = make_fx(twice(lambda x: F.scaled_dot_product_attention(x, x, x)))(q)(q)
    assert torch.equal(one, other)
