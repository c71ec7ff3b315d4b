"""Files from which a run goes on: written whole or not at all, and read only if they are what was written."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAGIC = b"bilevel checkpoint 2\n"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors and plain types, with a checksum, in one piece.

    An interrupt leaves the former file.
    """
    content = io.BytesIO()
    torch.save(state, content)
    digest = hashlib.sha256(content.getbuffer()).hexdigest().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(MAGIC + digest + b"\n")
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Read what :func:`save` wrote, to the CPU.

    Returns:
        The state.

    Raises:
        ValueError: If the file is something else, or damaged.
    """
    content = path.read_bytes()
    digest, newline, rest = content[len(MAGIC) :].partition(b"\n")
    if content.startswith(b"bilevel checkpoint ") and not content.startswith(MAGIC):
        raise ValueError(f"checkpoint: {path} was written by another version of bilevel; remove it to start anew.")
    if not content.startswith(MAGIC) or not newline:
        raise ValueError(f"checkpoint: {path} was not written by bilevel; choose another name, or remove it.")
    found = hashlib.sha256(rest).hexdigest()
    if found != digest.decode(errors="replace"):
        raise ValueError(
            f"checkpoint: {path} is damaged, its SHA-256 is {found} instead of {digest.decode(errors='replace')}; "
            "remove it to start anew."
        )
    # PyTorch itself does not notice a flipped bit.
    state: dict[str, Any] = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)
    return state


def check_layout(path: str, saved: Any, own: Any) -> None:
    """Compare nested keys, shapes and dtypes; what an optimizer gathers (its ``state``) may differ.

    Raises:
        ValueError: At the first difference.
    """
    if isinstance(own, Tensor):
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (own.shape, own.dtype):
            raise ValueError(f"{path} is {_describe(saved)}, this solver has {_describe(own)}.")
    elif isinstance(own, dict):
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            raise ValueError(f"{path} has {_describe(saved)}, this solver has {_describe(own)}.")
        for key, value in own.items():
            if key != "state":
                check_layout(f"{path}[{key!r}]", saved[key], value)
    elif isinstance(own, list) and path.endswith("['param_groups']"):
        if not isinstance(saved, list) or len(saved) != len(own):
            raise ValueError(f"{path} has {_describe(saved)}, this solver has {_describe(own)}.")
        for index, (one, other) in enumerate(zip(saved, own, strict=True)):
            check_layout(f"{path}[{index}]", one, other)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"entries {', '.join(sorted(map(str, value)))}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
