"""``Solver.save`` and ``Solver.load``: the state of a solver in a file, with what the solver is made of."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilevel.checkpoint import CheckpointError, CheckpointWarning, Store, check_form, newest
from bilevel.checkpoint.layout import Free
from bilevel.solver.fingerprint import FIXED, differences, taken_over

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver


def save(solver: Solver, path: Path) -> None:
    """What :meth:`bilevel.Solver.save` documents.

    Args:
        solver: To keep.
        path: Of the file.

    Raises:
        CheckpointError: If it cannot be written.
    """  # noqa: DOC502
    state = {"solver": solver.state_dict(), "fingerprint": solver.fingerprint}
    if solver.group is None:
        _write(state, path)
    else:
        solver.group.from_main(partial(_write, state, path))


def _write(state: dict[str, Any], path: Path) -> None:
    store = Store(path)
    try:
        store.anew()
        store.save(state)
        store.wait()
    except OSError as error:
        raise CheckpointError(f"checkpoint: {path} cannot be written ({error.strerror or error}).") from error
    finally:
        store.close()


def load(solver: Solver, path: Path, *, override: bool) -> None:
    """What :meth:`bilevel.Solver.load` documents.

    Args:
        solver: To go on with.
        path: Of the file.
        override: Take over what changed.

    Raises:
        CheckpointError: If the file cannot be used.
    """
    content, problem, _ = newest(path) if solver.group is None else solver.group.from_main(partial(newest, path))
    if content is None:
        raise CheckpointError(f"checkpoint: {path} does not exist.")
    if problem is not None:
        warnings.warn(problem, CheckpointWarning, stacklevel=3)
    try:
        check_form("its content", content, {"solver": Free(), "fingerprint": Free()})
        state, before = content["solver"], content["fingerprint"]
        found = partial(differences, before, solver.fingerprint)
        changed = found() if solver.group is None else solver.group.from_main(found)
        if changed and override and not any(name in FIXED for name in changed):
            state = taken_over(solver, state, before, changed)
        elif changed:
            raise CheckpointError(refusal(path, changed, "override=True"))
        solver.load_state_dict(state)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(f"checkpoint: {path} does not fit this solver: {error}") from error


def refusal(path: Any, changed: dict[str, str], override: str) -> str:
    """What to say if something changed.

    Args:
        path: Of the file.
        changed: From :func:`bilevel.solver.fingerprint.differences`.
        override: How to go on in spite of it.

    Returns:
        A sentence for what cannot be taken over, or for all that could be.
    """
    fixed = {name: words for name, words in changed.items() if name in FIXED}
    remedy = "give the same, or another file"
    if not fixed:
        remedy += f", or {override} to go on with what this call has"
    return f"checkpoint: {path} is of another run: {'; '.join((fixed or changed).values())}. Remedy: {remedy}."
