"""Splits of a data set into training and validation examples: seeded, and saved to be the same everywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def split(
    count: int, valid: float, seed: int, path: Path | None = None, *, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the examples for validation.

    With a path, the split is saved there, or read if it is there already: the same seed may give another split with
    another version of torch.

    Args:
        count: The number of examples.
        valid: The share for validation.
        seed: Of the draw; the global random state is left alone.
        path: A JSON file.
        limit: Use only so many of the others for training, drawn at random.

    Returns:
        The indices for training and for validation; ascending, but for those that a limit leaves.

    Raises:
        ValueError: If an argument is out of range, or the file holds another split.
    """
    if not 0 < valid < 1:
        raise ValueError(f"valid must be a share between 0 and 1, got {valid}.")
    held_out = round(count * valid)
    if not 0 < held_out < count:
        raise ValueError(f"{count} examples with valid={valid} leave no example for one of the parts.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or None, got {limit}.")
    wanted = {"count": count, "fraction": valid, "seed": seed, "limit": limit}
    if path is not None and path.exists():
        return read(path, wanted, (count - held_out if limit is None else min(limit, count - held_out), held_out))
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.randperm(count, generator=_seeded(seed))[:held_out]] = True
    train, held = (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
    if limit is not None:
        train = train[torch.randperm(len(train), generator=_seeded(seed))][:limit]
    if path is not None:
        # Without a limit, all that are not for validation are for training.
        save(path, {**wanted, "valid": held.tolist(), "train": None if limit is None else train.tolist()})
    return train, held


def read(path: Path, wanted: dict[str, Any], sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Read the indices, if the file is for the same split, with parts of these sizes.

    Returns:
        Those for training and those for validation.

    Raises:
        ValueError: If it is not, or damaged.
    """
    count = wanted["count"]
    try:
        saved = json.loads(path.read_bytes())
        found = {key: saved[key] for key in wanted}
        valid, train = saved["valid"], saved["train"]
        train = sorted({*range(count)} - {*valid}) if train is None else train
        whole = all(type(row) is int and 0 <= row < count for row in (*train, *valid))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not a saved split ({error!r}); delete it to draw the split again.") from error
    if found != wanted:
        raise ValueError(f"{path} holds the split for {found}, but {wanted} is asked for; choose another --out.")
    if not whole or (len(train), len(valid)) != sizes or len({*train, *valid}) != sum(sizes):
        raise ValueError(
            f"{path} is damaged: it should hold {sizes[0]} indices for training and {sizes[1]} others for validation; "
            "delete it to draw again."
        )
    return torch.tensor(train), torch.tensor(valid)


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a file under another name first, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(path)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
