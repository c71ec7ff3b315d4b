"""Weights of which each process keeps a part make the steps of whole ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import missing, rank, size, together
from test_agreement import SHORT, answers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.parallel import is_sharded, shard, whole

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
WHOLE = ("implicit_exact", "implicit_nystrom", "unrolled", "unrolled_truncated", "unrolled_forward", "checkpointed")
"""Methods that need whole vectors, or copies of whole weights, and say so."""
NAMES = [name for name in [*bilevel.METHODS, *SHORT] if name not in WHOLE]


def compare(count: int, names: list[str], kind: str) -> None:
    expected = answers(names, kind, count if kind == "cnn" else 1)
    for found in together(count, answers, names, kind, 1, True):
        for name in names:
            torch.testing.assert_close({name: found[name]}, {name: expected[name]}, rtol=1e-9, atol=1e-11)


def test_every_method_with_parts_of_the_weights() -> None:
    compare(2, NAMES, "mlp")


@pytest.mark.parametrize("kind", ["transformer", "cnn"])
def test_other_networks_with_parts_of_the_weights(kind: str) -> None:
    compare(2, ["delta_stn", "implicit_cg"], kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "transformer", "cnn"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_method_and_network_with_parts_of_the_weights(kind: str, count: int) -> None:
    compare(count, NAMES, kind)
