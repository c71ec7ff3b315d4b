"""Recurrent networks step by step against those of PyTorch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, jvp

import bilevel

KINDS = {"LSTM": (bilevel.nn.LSTM, nn.LSTM), "GRU": (bilevel.nn.GRU, nn.GRU)}
TOLERANCE = {"rtol": 0, "atol": 1e-12}


@st.composite
def options(draw, kind):
    """Every option of the constructor but dropout."""
    chosen = {
        "num_layers": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
    }
    return chosen | ({"proj_size": draw(st.integers(0, 2))} if kind == "LSTM" else {})


def pair(kind, chosen, seed=0):
    """Both networks with the same weights, by way of their ``state_dict``, and an input."""
    torch.manual_seed(seed)
    ours, theirs = (make(3, 4, dtype=torch.float64, **chosen) for make in KINDS[kind])
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, torch.randn(2, 5, 3, dtype=torch.float64)


def flat(output):
    """Outputs and states as a list."""
    y, state = output
    return [y, *(state if isinstance(state, tuple) else [state])]


def states(net, kind, x):
    """A start that is not zero."""
    layers, count = net.num_layers * (1 + net.bidirectional), x.shape[0 if net.batch_first else 1]
    hidden = torch.randn(layers, count, getattr(net, "proj_size", 0) or 4, dtype=torch.float64)
    return (hidden, torch.randn(layers, count, 4, dtype=torch.float64)) if kind == "LSTM" else hidden


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), started=st.booleans(), seed=st.integers(0, 999))
def test_outputs_states_and_gradients_are_those_of_pytorch(kind, data, started, seed):
    ours, theirs, x = pair(kind, data.draw(options(kind)), seed)
    x.requires_grad_()
    hx = states(theirs, kind, x) if started else None
    one, other = flat(ours(x, hx)), flat(theirs(x, hx))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    weights = [torch.randn_like(part).flatten() for part in one]
    found = [
        torch.autograd.grad(sum(map(torch.vdot, weights, [p.flatten() for p in parts])), [x, *net.parameters()])
        for net, parts in ((ours, one), (theirs, other))
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_the_same_weights_and_dropout(kind):
    made = []
    for make in KINDS[kind]:
        torch.manual_seed(0)
        made.append(make(3, 4, num_layers=2, dropout=0.5))
    for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(5, 2, 3)
    drawn = [made[0](x)[0] for _ in range(2)]
    assert not torch.equal(*drawn)
    for net in made:
        net.eval()
    torch.testing.assert_close(made[0](x)[0], made[1](x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_works(kind):
    """The directional derivative is that of a central difference."""
    ours, _, x = pair(kind, {"num_layers": 2, "bidirectional": True})
    weights = {name: w.detach() for name, w in ours.named_parameters()}
    tangent = {name: torch.randn_like(w) for name, w in weights.items()}

    def run(params):
        return functional_call(ours, params, (x,))[0]

    _, slope = jvp(run, (weights,), (tangent,))
    ahead, behind = (run({name: w + s * 1e-5 * tangent[name] for name, w in weights.items()}) for s in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.zeros(5, 3), torch.zeros(3), "text", None])
def test_other_inputs_are_refused(kind, bad):
    with pytest.raises(ValueError, match=f"{kind}: input must be a tensor of three dimensions, got"):
        KINDS[kind][0](3, 4)(bad)
