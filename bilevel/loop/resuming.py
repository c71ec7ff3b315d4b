"""How a run goes on from a checkpoint: what must be as it was, and what a call may take over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from bilevel.checkpoint import CheckpointError, check_form
from bilevel.checkpoint.layout import Count, Each, Free, Text
from bilevel.loop.feed import Feed
from bilevel.loop.keeping import Keeper
from bilevel.loop.run import Run
from bilevel.loop.sources import get_global, set_global
from bilevel.loop.together import own_part
from bilevel.solver.files import refusal
from bilevel.solver.fingerprint import FIXED, OPTIMIZERS, SCHEDULERS, Fingerprint, differences, taken_over
from bilevel.solver.state import check, live

Value = TypeVar("Value")
SLACK = 1000
"""Rounds of a former call may have been larger than those of this one."""


def fingerprint_of(run: Run, settings: dict[str, Any], *, default_outer: bool) -> Fingerprint:
    """Describe a run, before its first step.

    Args:
        run: Fresh.
        settings: Those of the loop.
        default_outer: Whether the outer optimizer was left to :func:`solve`, which makes it from the number of rounds.

    Returns:
        By argument, and within it by setting: plain types.
    """
    optimizers = run.solver.optimizers
    found = run.solver.fingerprint | {name: {"": value} for name, value in settings.items()}
    if default_outer:
        found |= {OPTIMIZERS[name]: {"": "the default"} for name in ("hyper", "scale") if name in optimizers}
    advances = {"advances": f"every {run.schedule_every}"}
    return found | {SCHEDULERS[name]: found[SCHEDULERS[name]] | advances for name in run.solver.schedulers}


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
    where = None if keeper.store is None else keeper.store.path
    drawn = get_global()
    try:
        lacks = [key for key in ("solver", "fingerprint", "feeds", "global", "log") if key not in state]
        if lacks:
            raise ValueError(f"state lacks {lacks[0]!r}.")
        feeds = {feed.name: feed for feed in (run.train, run.valid)}
        check_form("state['log']", state["log"], {"bytes": Count(), "sha256": Text()})
        check_form("state['feeds']", state["feeds"], dict.fromkeys(feeds, Each(Free())))
        changed = _from_main(run, lambda: differences(state["fingerprint"], run.fingerprint))
        if changed and (not override or any(name in FIXED for name in changed)):
            raise CheckpointError(refusal(where, changed, "resume='override'"))
        passes = {name: entry.get("passes") for name, entry in state["feeds"].items()}
        check_form("passes", passes, dict.fromkeys(feeds, Count()))
        state = own_part(run, state)
        if override:
            state = state | {"solver": taken_over(run.solver, state["solver"], state["fingerprint"], changed)}
        rows = _from_main(run, lambda: keeper.history(state, lenient=override))
        run.check(state, rows)
        check(run.solver, state["solver"], live(run.solver))
        for name in feeds if state["feeds"] is not None else ():
            _check_feed(run, feeds[name], state, changed=override)
        for name, feed in feeds.items():
            if state["feeds"] is None:  # another number of processes, with other shares
                feed.begin_pass(passes[name])
                continue
            problem = feed.load_state_dict(state["feeds"][name], changed=override)
            if problem is not None and not override:
                raise CheckpointError(refusal(where, {name: problem}, "resume='override'"))
            if feed.doubt is not None:
                keeper.warn(feed.doubt)
        run.load_state_dict(state, rows)
    except CheckpointError:
        set_global(drawn)
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        set_global(drawn)
        raise CheckpointError(f"checkpoint: {where} does not fit this run: {error}") from error


def news(run: Run, keeper: Keeper) -> str:
    """What somebody should know who sees a run go on, or end early, or not begin because it is over."""
    file = None if keeper.store is None else keeper.store.path.name
    if run.stopped is None:
        return f"bilevel.solve: goes on from {file}, after round {run.rounds}."
    if run.stopped in ("interrupted", "terminated"):
        remedy = "" if file is None else f" The same call goes on from {file}."
        return f"bilevel.solve: {run.stopped} after round {run.rounds}; the solution so far is returned.{remedy}"
    return (
        f"bilevel.solve: the run in {file} is over ({run.stopped}, {run.rounds} rounds), and its solution is returned "
        "without training. For a new run, give another file."
    )


def _check_feed(run: Run, feed: Feed, state: dict[str, Any], *, changed: bool) -> None:
    """Refuse what is no state of a feed, also one that would have drawn more batches than the rounds had time for."""
    place = f"state['feeds'][{feed.name!r}]"
    feed.check(place, state["feeds"][feed.name], changed=changed)
    drawn = state["feeds"][feed.name]["given"] + state["feeds"][feed.name]["passes"]
    if drawn > SLACK * state["rounds"] * max(run.batches_per_round, run.outer_steps):
        raise ValueError(f"{place} has drawn {drawn} batches in {state['rounds']} rounds.")


def _from_main(run: Run, function: Callable[[], Value]) -> Value:
    """What the first process finds, whose fingerprint was saved and who has the log."""
    group = run.solver.group
    return function() if group is None else group.from_main(function)
