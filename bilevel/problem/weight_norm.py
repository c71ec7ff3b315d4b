"""Weight norm, whose second derivative PyTorch 2.13 computes wrongly on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from typing_extensions import override


def exact_weight_norm(module: nn.Module | None) -> AbstractContextManager[Any]:
    """Inside, weight norm is made of operations whose derivatives of all orders are right.

    Returns:
        A context for evaluations of the module. It does nothing if the module has no weight norm.
    """
    parts = [] if module is None else list(module.modules())
    hooks = [hook for part in parts for hook in part._forward_pre_hooks.values()]
    used = any(isinstance(part, _WeightNorm) for part in parts) or any(isinstance(hook, WeightNorm) for hook in hooks)
    return _ExactWeightNorm() if used else nullcontext()


@final
class _ExactWeightNorm(TorchFunctionMode):
    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if dim == -1:  # one length for all; norm_except_dim has no forward mode then
        return v * (g / v.square().sum().sqrt())
    return v * (g / torch.norm_except_dim(v, 2, dim))
