"""Operations entry by entry, which leave the examples where they are: in few steps of Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunction

from bilevel.duals import QUICK

if TYPE_CHECKING:
    from bilevel.structure.respond import Respond

ONE = "relu relu_ gelu silu tanh sigmoid elu leaky_relu softplus selu relu6 mish hardtanh logsigmoid"
"""Functions of one tensor, by name."""
TWO = "mul multiply __mul__ __rmul__ add __add__ __radd__ sub __sub__"
"""Functions of two tensors."""


def _of(names: str) -> frozenset[Any]:
    return frozenset(
        getattr(owner, name) for name in names.split() for owner in (torch, Tensor, F) if name in dir(owner)
    )


UNARY, BINARY = _of(ONE), _of(TWO)
EITHER = UNARY | BINARY


def entry_by_entry(mode: Respond, function: Any, args: Any, kwargs: Any) -> Any:
    """Apply such an operation to activations, without a look from other modes, which would find nothing to do.

    Args:
        mode: The active mode.
        function: One of ``EITHER``.
        args: Its arguments.
        kwargs: And those by name.

    Returns:
        What it returns; ``NotImplemented`` for anything but an activation, or two of the same shape.
    """
    x = args[0] if args else None
    if type(x) is not Tensor or not x.is_floating_point() or mode.responds(x) or not mode.origins.plain:
        return NotImplemented
    layout = mode.layouts.where(x)
    if function in BINARY:
        if kwargs or len(args) != 2:
            return NotImplemented
        y = args[1]
        if type(y) is not Tensor or y.dtype != x.dtype or y.shape != x.shape or mode.responds(y):
            return NotImplemented
        if mode.layouts.known(y):
            other = mode.layouts.where(y)
            if layout is not None and layout != other:
                return NotImplemented
            layout = other
    elif len(args) + len(kwargs) > 1 and any(isinstance(z, Tensor) for z in (*args[1:], *kwargs.values())):
        return NotImplemented
    if layout is None:
        return NotImplemented
    with DisableTorchFunction():
        quick = QUICK.get(function) if mode.linearized else None
        result = function(*args, **kwargs) if quick is None else quick(function, *args, **kwargs)
    if result is not x:
        mode.layouts.keep(result, layout)
    return result


def visited(mode: Respond, function: Any, args: Any, kwargs: Any) -> Any:
    """Show a call that may drop to whoever looks for these.

    Args:
        mode: The active mode.
        function: Of the call.
        args: Its arguments.
        kwargs: And those by name.

    Returns:
        What was returned in place of the call; ``NotImplemented`` if it is to be made.
    """
    visits = mode.layouts.visits
    if visits is None:
        return NotImplemented
    with mode:  # what is called in its place is part of the network
        return visits(function, args, kwargs)
