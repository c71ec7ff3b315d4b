"""The dense response: every weight has its own slope in every hyperparameter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import SEEDS, assert_equal, randn

from bilevel.structure import Dense
from bilevel.structure.dense import check_memory


@given(seed=SEEDS, h=st.integers(1, 4))
def test_a_dense_response_is_a_matrix(seed, h):
    """One slope of a parameter's shape per hyperparameter, for matrices, vectors and scalars."""
    params = dict(zip("abc", randn(seed, (2, 3), (4,), ()), strict=True))
    dense = Dense(params, h, max_gigabytes=1.0)
    (shift,) = randn(seed + 1, (h,))
    assert all(not change.any() for change in dense(shift, params).values())
    for slope, values in zip(dense.slopes, randn(seed + 2, *[slope.shape for slope in dense.slopes]), strict=True):
        slope.data.copy_(values)
    for (name, change), slope in zip(dense(shift, params).items(), dense.slopes, strict=True):
        assert change.shape == params[name].shape
        assert_equal(change.detach(), sum(shift[i] * slope[i].detach() for i in range(h)), 1e-12)


def test_a_response_that_does_not_fit_is_refused_before_it_is_allocated():
    """No machine has 8 PB: only a check that comes first can raise this error, with the number and the remedy."""
    virtual = {"w": torch.zeros(1).expand(10**15)}
    with pytest.raises(MemoryError, match=r"1,000,000,000,000,000 weights to 2 hyper.* 8000000.0 GB.*limit is 4 GB"):
        Dense(virtual, 2, max_gigabytes=4.0)
    with pytest.raises(MemoryError, match=r"Tune fewer hyperparameters, freeze weights.*or raise max_gigabytes"):
        Dense(virtual, 2, max_gigabytes=4.0)


def test_the_limit_counts_bytes_of_the_dtype():
    """A limit of exactly what is needed is enough; anything less is not."""
    params = {"w": torch.zeros(1000, dtype=torch.float64), "b": torch.zeros(10, dtype=torch.float64)}
    needed = 1010 * 8 * 3 / 1e9
    check_memory(params, 3, needed)
    with pytest.raises(MemoryError, match="1,010 weights to 3 hyperparameters"):
        check_memory(params, 3, needed * 0.999)
