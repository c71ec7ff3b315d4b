"""What the allocator of the host does with the memory of a step."""

from __future__ import annotations

import torch


def keep_freed_memory(device: torch.device) -> None:
    """Let the C library keep what steps free, so that they do not spend their time on page faults.

    Args:
        device: Of the weights; there is nothing to do for one that is not a CPU.
    """
    if device.type == "cpu":
        # glibc keeps freed memory up to twice the largest block freed so far, of at most 32 MB; what is beyond it
        # gives back to the system. So one large block is freed here.
        torch.empty(31 << 20, dtype=torch.uint8, device="cpu")
