"""How a run goes on from a checkpoint: what must be as it was, and what a call may take over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from bilevel.arguments import check_integer
from bilevel.checkpoint import CheckpointError
from bilevel.loop.fingerprint import FIXED, OPTIMIZERS, differences
from bilevel.loop.keeping import Keeper
from bilevel.loop.run import Run
from bilevel.loop.together import own_part
from bilevel.solver import Solver

Value = TypeVar("Value")
SAME_STATE = ({"Adam", "AdamW"},)
"""Optimizers that remember the same."""

SHAPING = ("amsgrad", "centered", "momentum", "capturable")
"""Settings on which it depends what an optimizer remembers."""


def kept_settings(state: dict[str, Any] | None) -> dict[str, Any]:
    """What a run that goes on keeps, unless it is told otherwise.

    Args:
        state: Of the checkpoint, if there is one; anything may be in it.

    Returns:
        ``warmup`` and ``evaluate_every``, where they are known.
    """
    found = {}
    for name, lowest in (("warmup", 0), ("evaluate_every", 1)):
        try:
            value = (state or {})["fingerprint"][name][""]
        except (LookupError, TypeError):
            continue
        if (type(value) is int and value >= lowest) or (value is None and name == "evaluate_every"):
            found[name] = value
    return found


def go_on(run: Run, state: dict[str, Any], keeper: Keeper, *, override: bool) -> None:
    """Put a run where another one stopped.

    Args:
        run: Fresh.
        state: Of the checkpoint.
        keeper: With the log.
        override: Take over what changed, where that is possible, instead of refusing it.

    Raises:
        CheckpointError: If the checkpoint belongs to another run.
    """  # noqa: DOC501
    try:
        for key in ("rounds", "stale"):
            check_integer(key, state[key], 0)
        if not isinstance(state["seconds"], float) or not state["seconds"] >= 0:
            raise ValueError("its seconds are no time")
        changed = _from_main(run, lambda: differences(state["fingerprint"], run.fingerprint))
        fixed = {name: words for name, words in changed.items() if name in FIXED}
        if changed and (fixed or not override):
            _refuse(keeper, fixed or changed, possible=not fixed)
        passes = {name: entry["passes"] for name, entry in state["feeds"].items()}
        state = own_part(run, state)
        for feed in (run.train, run.valid):
            if state["feeds"] is None:  # another number of processes, with other shares
                feed.begin_pass(passes[feed.name])
                continue
            problem = feed.load_state_dict(state["feeds"][feed.name], changed=override)
            if problem is not None and not override:
                _refuse(keeper, {feed.name: problem}, possible=True)
        if override:
            state = state | {"solver": _taken_over(run.solver, state["solver"], state["fingerprint"], changed)}
        rows = _from_main(run, lambda: keeper.history(state, lenient=override))
        run.load_state_dict(state, rows)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        where = None if keeper.store is None else keeper.store.path
        raise CheckpointError(f"checkpoint: {where} does not fit this run: {error}") from error


def _from_main(run: Run, function: Callable[[], Value]) -> Value:
    """What the first process finds, whose fingerprint was saved and who has the log."""
    group = run.solver.group
    return function() if group is None else group.from_main(function)


def _refuse(keeper: Keeper, changed: dict[str, str], *, possible: bool) -> None:
    where = None if keeper.store is None else keeper.store.path
    remedy = "give the same, or another file"
    if possible:
        remedy += ", or resume='override' to go on with what this call has"
    raise CheckpointError(f"checkpoint: {where} is of another run: {'; '.join(changed.values())}. Remedy: {remedy}.")


def _taken_over(solver: Solver, state: dict[str, Any], before: dict[str, Any], changed: dict[str, str]) -> Any:
    """The state of the checkpoint, with the settings of this call where they changed."""
    own = solver.state_dict()
    state = copy.copy(state)
    state["optimizers"], state["schedulers"] = dict(state["optimizers"]), dict(state["schedulers"])
    if "seed" in changed or "device" in changed:
        state["streams"] = own["streams"]
    for name in own["optimizers"]:
        argument = OPTIMIZERS[name]
        schedule = argument.replace("optimizer", "scheduler")
        if argument in changed:
            fits = _fits(before[argument], type(solver.optimizers[name]).__name__, own["optimizers"][name])
            kept = state["optimizers"][name]["state"] if fits else own["optimizers"][name]["state"]
            state["optimizers"][name] = own["optimizers"][name] | {"state": kept}
        if argument in changed or schedule in changed:
            if name in own["schedulers"]:
                state["schedulers"][name] = own["schedulers"][name]
            else:
                state["schedulers"].pop(name, None)
            if argument not in changed:
                state["optimizers"][name] = own["optimizers"][name] | {"state": state["optimizers"][name]["state"]}
    return state


def _fits(before: dict[str, Any], now: str, own: dict[str, Any]) -> bool:
    old = before.get("class")
    if old != now and not any({old, now} <= family for family in SAME_STATE):
        return False
    group = own["param_groups"][0]
    return now == "SGD" or all(before.get(key, group.get(key)) == group.get(key) for key in SHAPING)
