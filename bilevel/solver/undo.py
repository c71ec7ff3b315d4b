"""Where a step is undone: what it changes is copied before, and put back if it fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, final

import torch

from bilevel.problem import Variables
from bilevel.solver.optimization import Optimization


@contextmanager
def buffers_kept(inner: Variables, *, always: bool = False) -> Generator[None]:
    """Restore the buffers of the network if the block raises.

    Args:
        inner: Whose buffers a pass may change, as those of BatchNorm.
        always: Restore them in any case.
    """
    before = [(buffer, buffer.clone()) for buffer in inner.buffers()]
    done = False
    try:
        yield
        done = True
    finally:
        if always or not done:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)


@contextmanager
def update_undone_on_error(optimization: Optimization, names: Iterable[str]) -> Generator[None]:
    """Restore groups of parameters and their optimizers if the block raises.

    Args:
        optimization: What updates them.
        names: Of the groups.
    """
    before = {
        name: (
            [param.detach().clone() for param in optimization.params[name]],
            copy.deepcopy(optimization.optimizers[name].state_dict()),
        )
        for name in names
    }
    try:
        yield
    except BaseException:
        for name, (values, state) in before.items():
            with torch.no_grad():
                for param, value in zip(optimization.params[name], values, strict=True):
                    param.copy_(value)
            optimization.optimizers[name].load_state_dict(state)
        raise


@final
class LastGood:
    """The state before the first inner step that has not been judged yet; kept where steps are judged later."""

    def __init__(self, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        """Save and load with these functions."""
        self._save, self._load = save, load
        self._state: dict[str, Any] | None = None

    def keep(self) -> None:
        """Keep the present state, unless an earlier one is kept."""
        if self._state is None:
            self._state = self._save()

    def forget(self) -> None:
        """All steps so far were good."""
        self._state = None

    def restore(self) -> bool:
        """Return to the state that was kept.

        Returns:
            Whether there was one.
        """
        if self._state is None:
            return False
        self._load(self._state)
        self._state = None
        return True
