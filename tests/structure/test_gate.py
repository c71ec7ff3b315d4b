"""The gate: rows grow, vectors are shifted."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, assert_equal, randn

from bilevel.structure import Gate


@given(seed=SEEDS, h=st.integers(1, 4))
def test_rows_of_the_live_weight_grow_and_vectors_are_shifted(seed, h):
    """Entry by entry; for another weight than the one it was made for, too."""
    names = ("matrix", "kernel", "vector", "scalar", "single row", "single channel")
    shapes = ((3, 2), (2, 3, 2, 2), (4,), (), (1, 5), (1, 2, 3))
    made, weights = (dict(zip(names, randn(s, *shapes), strict=True)) for s in (seed, seed + 1))
    gate = Gate(made, h)
    assert [parameter.numel() for parameter in gate.parameters()] == [h * (3 + 2 + 4 + 1 + 5 + 2)]
    (shift,) = randn(seed + 2, (h,))
    assert not any(change.any() for change in gate(shift, weights).values())
    gate.factor.data = randn(seed + 3, gate.factor.shape)[0]
    changes = gate(shift, weights)
    for name, factor in zip(names, gate.factors, strict=True):
        grow = factor.detach() @ shift
        if name.startswith("single"):  # by columns
            expected = torch.stack([grow[col] * weights[name][:, col] for col in range(len(grow))], 1)
        elif weights[name].ndim > 1:
            expected = torch.stack([grow[row] * part for row, part in enumerate(weights[name])])
        else:
            expected = grow.reshape(weights[name].shape)
        assert_equal(changes[name].detach(), expected, 1e-12)


def test_a_vector_of_zeros_responds():
    weights = {"bias": torch.zeros(3)}
    gate = Gate(weights, 1)
    gate.factor.data.fill_(0.5)
    assert torch.equal(gate(torch.ones(1), weights)["bias"].detach(), torch.full((3,), 0.5))
