"""Checks of the arguments of :func:`bilevel.solve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bilevel.arguments import check_integer
from bilevel.response import Method
from bilevel.solver import Solver


def check_run(
    callbacks: Any,
    progress: Any,
    time_budget: Any,
    checkpoint_every: Any,
    resume: Any,
    counts: dict[str, tuple[Any, int]],
    optional: dict[str, Any],
) -> None:
    """Refuse arguments of the loop that are of the wrong kind.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one has the wrong value.
    """
    for name, (value, minimum) in counts.items():
        check_integer(name, value, minimum)
    for name, value in optional.items():
        if value is not None:
            check_integer(name, value, 1)
    if optional["steps"] is not None and optional["epochs"] is not None:
        raise ValueError(f"give steps or epochs, not both; got steps={optional['steps']}, epochs={optional['epochs']}.")
    if time_budget is not None:
        if isinstance(time_budget, bool) or not isinstance(time_budget, int | float):
            raise TypeError(f"time_budget must be a number of seconds or None, got {time_budget!r}.")
        if not time_budget > 0:
            raise ValueError(f"time_budget must be a positive number of seconds, got {time_budget}.")
    if checkpoint_every is not None and not (isinstance(checkpoint_every, int | float) and checkpoint_every > 0):
        raise ValueError(f"checkpoint_every must be a positive number of seconds, got {checkpoint_every!r}.")
    if resume not in (True, False, "override"):
        raise ValueError(f"resume must be True, False or 'override', got {resume!r}.")
    if progress not in (None, True, False):
        raise TypeError(f"progress must be True, False or None, got {progress!r}.")
    if not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
        raise TypeError(f"callbacks must be a list of functions of a bilevel.Round, got {callbacks!r}.")


def check_schedule(every: Any, epochs: int | None, method: Method) -> str:
    """When schedulers advance.

    Returns:
        ``"epoch"``, ``"round"`` or ``"step"``.

    Raises:
        ValueError: If it is something else, or does not go with the rest.
    """
    if every not in (None, "epoch", "round", "step"):
        raise ValueError(f"schedule_every must be 'epoch', 'round' or 'step', got {every!r}.")
    if every == "step" and method.unrolled_steps:
        raise ValueError(
            f"schedule_every must be 'epoch' or 'round' with {method}, whose steps of training are one outer step; got "
            "'step'."
        )
    return every or ("round" if epochs is None else "epoch")


def check_unrolled(solver: Solver, *, inner_steps: int, accumulate: int, warmup: int) -> None:
    """Refuse what does not go with a method that makes inner steps itself.

    Raises:
        ValueError: If there is such an argument.
    """
    response = solver.response
    if response.unrolled_steps and accumulate > 1:
        raise ValueError(
            f"accumulate must be 1 with {solver.method}, whose outer steps make inner steps on one batch each; got "
            f"{accumulate}. Give larger batches, or use an implicit method or a self-tuning network."
        )
    for name, value in (("inner_steps", inner_steps), ("warmup", warmup)):
        if response.restarts and value > 0:
            raise ValueError(
                f"{name} must be 0 with {solver.method}, which returns to the start in every round and forgets what "
                f"was trained before; got {value}."
            )
