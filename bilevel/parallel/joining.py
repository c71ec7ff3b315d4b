"""How processes find each other: those that torchrun started, or those of a process group that is there already."""

from __future__ import annotations

import atexit
import os
import socket
from typing import Any

import torch
from torch import distributed as dist

from bilevel.parallel.group import Group

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ALONE = "pass distributed=False for a run of each process on its own"
_groups: dict[str, Group] = {}
"""By kind of device: connections are made once, and used by one run after the other."""


def join(device: torch.device) -> Group | None:
    """Find the other processes of this run.

    Args:
        device: Of the weights.

    Returns:
        None if there is no other.

    Raises:
        RuntimeError: If there are others, but they cannot be reached.
    """
    declared = os.environ.get("WORLD_SIZE", "")
    count = int(declared) if declared.isdecimal() else 1
    if not dist.is_available():
        if count > 1:
            raise RuntimeError(f"WORLD_SIZE is {count}, but this torch has no torch.distributed: {ALONE}.")
        return None
    if not dist.is_initialized():
        if count == 1:
            return None
        _start(device)
    size = dist.get_world_size()
    if size == 1 and count > 1:
        raise RuntimeError(f"WORLD_SIZE is {count}, but the process group has one process: {ALONE}.")
    if size == 1:
        return None
    known = _groups.get(str(device))
    if known is None:
        if not dist.is_gloo_available():
            raise RuntimeError(f"several processes need the gloo backend, which this torch lacks: {ALONE}.")
        control = dist.new_group(backend="gloo")
        backend = dist.get_default_backend_for_device(device)
        data = control if device.type == "cpu" else dist.new_group(backend=backend)
        known = Group(device, control, data)
        _check_devices(known)
        _groups[str(device)] = known
    return known


def device() -> torch.device:
    """The device of this process: its own accelerator, where there is one for each process.

    It becomes the current one, so that ``"cuda"`` means it as well. Write ``net.to(bilevel.parallel.device())``.

    Returns:
        The accelerator with the number ``LOCAL_RANK``, which torchrun sets, or the CPU.

    Example:
        >>> device().type in ("cpu", "cuda", "mps", "xpu")
        True
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    local = os.environ.get("LOCAL_RANK", "")
    if local.isdecimal() and torch.accelerator.device_count() > 1:
        torch.accelerator.set_device_index(int(local))
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def forget(group: Group) -> None:
    """Make new connections next time."""
    for key in [key for key, value in _groups.items() if value is group]:
        del _groups[key]


def _start(device: torch.device) -> None:
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set: start the script with "
            f"torchrun, which sets all of {', '.join(VARIABLES)}; or {ALONE}."
        )
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    # After a restart by torchrun the store still holds what the last attempt wrote into it.
    attempt = PrefixStore(f"bilevel/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)
    atexit.register(_end)


def _end() -> None:
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_devices(group: Group) -> None:
    if group.device.type == "cpu":
        return
    places: dict[Any, int] = {}
    for rank, place in enumerate(group.gather((socket.gethostname(), str(group.device)))):
        if place in places:
            raise RuntimeError(
                f"processes {places[place]} and {rank} have their weights on the same device, {place[1]}: write "
                "net.to(bilevel.parallel.device()) instead, which gives each process its own."
            )
        places[place] = rank
