"""How a check is registered."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from bilevel.testing.case import Case

Check = Callable[[Case], None]
_CHECKS: dict[str, dict[str, Check]] = {}  # by file, then by name


def check(function: Check) -> Check:
    """Register a check under the name of its function, without the underscore."""
    _CHECKS.setdefault(function.__module__, {})[function.__name__.removeprefix("_")] = function
    return function


def checks_of(file: ModuleType) -> dict[str, Check]:
    """The checks of one file, in the order in which they are written."""
    return _CHECKS[file.__name__]
