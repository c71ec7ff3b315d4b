"""Several processes that run one function together, each with its rank."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

LIMIT = 600
"""Seconds after which processes that do not end count as hanging."""


def missing() -> str | None:
    """Why there are no processes here, if that is so."""
    if not dist.is_available():
        return "this torch has no torch.distributed"
    return None if dist.is_gloo_available() else "this torch has no gloo"


def together(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returns in each of several processes, which know each other by a file."""
    # Forked by a process that has made no gradients yet: autograd's threads do not survive a fork.
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["bilevel"])
    with tempfile.TemporaryDirectory() as folder:
        jobs = [context.Process(target=_work, args=(rank, size, folder, function, args)) for rank in range(size)]
        with pytest.MonkeyPatch.context() as patch:  # where the server finds what it is to import
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            for job in jobs:
                job.start()
        for job in jobs:
            job.join(LIMIT)
        hanging = [rank for rank, job in enumerate(jobs) if job.is_alive()]
        for job in jobs:
            if job.is_alive():
                job.kill()
                job.join()
        assert not hanging, f"processes {hanging} hang"
        answers = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]
    for rank, (_, error) in enumerate(answers):
        assert error is None, f"process {rank}:\n{error}"
    return [answer for answer, _ in answers]


def _work(rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    answer, error = None, None
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        answer = function(*args)
    except BaseException:
        error = traceback.format_exc()
    torch.save((answer, error), Path(folder) / f"{rank}.pt")
    if error is None:
        dist.destroy_process_group()


def rank() -> int:
    """Of this process; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_initialized() else 1
