"""What several processes agree on while they make the rounds of one run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bilevel.checkpoint import CheckpointWarning, check_form
from bilevel.checkpoint.layout import Each, Free
from bilevel.linear_solvers import ConvergenceWarning
from bilevel.loop.advice import TuningWarning
from bilevel.loop.keeping import Keeper
from bilevel.loop.run import Run
from bilevel.parallel import Group
from bilevel.solver import NotFiniteWarning
from bilevel.solver.together import warn_of_change

REASONS = ("", "steps", "epochs", "patience", "time", "callback", "terminated", "interrupted")
"""Why a run ends; if processes have different reasons, the last of them counts."""


def open_keeper(group: Group | None, make: Callable[..., Keeper], *, kept: bool) -> Keeper:
    """The files of the run, which the first process takes.

    Args:
        group: The processes, if there are several.
        make: Takes the files.
        kept: Whether there are checkpoints.

    Returns:
        The keeper of this process.
    """
    if group is None:
        return make()
    found: list[Keeper] = []
    group.from_main(lambda: found.append(make()))
    return found[0] if found else Keeper(None, None, keep=1, every=None, follows=kept)


def load(group: Group | None, keeper: Keeper, *, resume: bool) -> dict[str, Any] | None:
    """The state to go on from, which the first process reads for all.

    Args:
        group: The processes, if there are several.
        keeper: Of this one.
        resume: Whether to go on at all.

    Returns:
        None if there is none.
    """
    read = partial(keeper.load, resume=resume)
    return read() if group is None else group.from_main(read)


def agree(group: Group | None, why: str | None, save: bool) -> tuple[str | None, bool]:
    """Why the run ends, and whether to write a checkpoint, according to all processes.

    Args:
        group: The processes, if there are several.
        why: The reason that this one has, or None.
        save: Whether it thinks so.

    Returns:
        The same in all of them.
    """
    if group is None:
        return why, save
    reason, writes = group.highest(REASONS.index(why or ""), int(save))
    return REASONS[reason] or None, bool(writes or reason)


def own_part(run: Run, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a run with what this process had for itself.

    If there were more or fewer processes, every feed begins a new pass, with a warning.

    Args:
        run: Fresh.
        state: Of the checkpoint.

    Returns:
        A state as this process would have saved it alone, with ``feeds`` None if they cannot be taken over.

    Raises:
        ValueError: If it is no such state.
    """
    group = run.solver.group
    ranks = state.get("ranks")
    check_form("state['solver']", state["solver"], Each(Free()))
    if "ranks" in state:
        part = {"streams": Each(Free()), "feeds": Each(Free()), "global": Free()}
        check_form("state['ranks']", ranks, Each(part, list))
        if not ranks:
            raise ValueError("state['ranks'] is empty.")
    size, rank = (1, 0) if group is None else (group.size, group.rank)
    before = 1 if ranks is None else len(ranks)
    own = {"streams": state["solver"]["streams"], "feeds": state["feeds"], "global": state["global"]}
    if ranks is not None:
        own = ranks[rank] if rank < before else {**own, "streams": {}}
    streams = own["streams"]
    if before != size:
        if rank == 0:
            warn_of_change(before, size)
        streams = {name: streams.get(name, fresh.state_dict()) for name, fresh in run.solver.streams.items()}
    feeds = own["feeds"] if before == size else None
    return state | {"solver": state["solver"] | {"streams": streams}, "feeds": feeds, "global": own["global"]}


@contextmanager
def quiet(group: Group | None) -> Generator[None]:
    """Leave the warnings of this package to the first process."""
    if group is None or group.main:
        yield
        return
    with warnings.catch_warnings():
        for kind in (NotFiniteWarning, ConvergenceWarning, CheckpointWarning, TuningWarning):
            warnings.simplefilter("ignore", kind)
        yield
