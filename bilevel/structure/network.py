"""A network whose weights respond, each example in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunction

from bilevel.autodiff import forward_level, primal_plus_tangent
from bilevel.layouts import following
from bilevel.responding import Rows
from bilevel.structure.respond import Respond


def respond(
    predict: Callable[..., Any] | None,
    weights: Mapping[str, Tensor],
    rows: Mapping[str, Rows],
    *,
    linearized: bool,
    slope_only: bool = False,
) -> Callable[..., Any] | None:
    """The network whose weights respond, each example in its own way.

    Args:
        predict: The network, called as ``predict(weights, *args, **kwargs)``; or None.
        weights: By name.
        rows: Their responses; a weight without one stays as it is.
        linearized: Expand predictions to first order in the response.
        slope_only: The factors are zero, and only their slopes count.

    Returns:
        A function of the remaining arguments; None without a network.
    """
    if predict is None or not rows:
        return None if predict is None else partial(predict, weights)
    count = len(next(iter(rows.values())).factor)

    def responding(*args: Any, **kwargs: Any) -> Any:
        with forward_level((args, kwargs)) if linearized else nullcontext():
            with DisableTorchFunction():  # nothing of this is an operation of the network
                mode = Respond(weights, rows, count, (args, kwargs), linearized=linearized, slope_only=slope_only)
            before = following.set(mode.layouts)
            try:
                with mode:
                    output = predict(weights, *args, **kwargs)
            finally:
                following.reset(before)
            mode.check_output(output)
            if linearized:
                output = primal_plus_tangent(output)
        return output

    return responding
