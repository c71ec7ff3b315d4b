"""Splits of a data set into training and validation examples: seeded, and saved to be the same everywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor


def split(count: int, valid: float, seed: int, path: Path | None = None) -> tuple[Tensor, Tensor]:
    """Draw the examples for validation.

    With a path, the split is saved there, or read if it is there already: the same seed may give another split with
    another version of torch.

    Args:
        count: The number of examples.
        valid: The share for validation.
        seed: Of the draw; the global random state is left alone.
        path: A JSON file.

    Returns:
        The indices for training and for validation, ascending.

    Raises:
        ValueError: If an argument is out of range, or the file holds another split.
    """
    if not 0 < valid < 1:
        raise ValueError(f"valid must be a share between 0 and 1, got {valid}.")
    held_out = round(count * valid)
    if not 0 < held_out < count:
        raise ValueError(f"{count} examples with valid={valid} leave no example for one of the parts.")
    if path is not None and path.exists():
        rows = read(path, {"count": count, "fraction": valid, "seed": seed}, held_out)
    else:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        rows = sorted(order[:held_out].tolist())
        if path is not None:
            save(path, {"count": count, "fraction": valid, "seed": seed, "valid": rows})
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[rows] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()


def read(path: Path, wanted: dict[str, float], held_out: int) -> list[int]:
    """Read the indices for validation, if the file is for the same split.

    Returns:
        The indices.

    Raises:
        ValueError: If it is not, or damaged.
    """
    try:
        saved = json.loads(path.read_bytes())
        found = {key: saved[key] for key in wanted}
        rows = saved["valid"]
        whole = all(type(row) is int and 0 <= row < wanted["count"] for row in rows)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a saved split ({error!r}); delete it to draw the split again.") from error
    if found != wanted:
        raise ValueError(f"{path} holds the split for {found}, but {wanted} is asked for; name another file.")
    if not whole or len(rows) != held_out or len(set(rows)) != held_out:
        raise ValueError(f"{path} is damaged: it should hold {held_out} different indices; delete it to draw again.")
    return list(rows)


def save(path: Path, content: dict[str, object]) -> None:
    """Write a file under another name first, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(path)
