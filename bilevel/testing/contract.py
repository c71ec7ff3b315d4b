"""The contract: every check, and :func:`check_method`, which runs them on one method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from bilevel.response import Method, get_method
from bilevel.testing import derivatives, losses, network, refusals, settings, state, steps, value
from bilevel.testing.case import Case
from bilevel.testing.registry import Check, checks_of

_FILES = (settings, value, derivatives, steps, state, network, losses, refusals)
CHECKS: Mapping[str, Check] = MappingProxyType({
    name: check for file in _FILES for name, check in checks_of(file).items()
})
"""Every check by name, in the order in which they run."""


@dataclass(frozen=True)
class Report:
    """What :func:`check_method` found.

    Attributes:
        method: The method that was checked.
        passed: Names of the checks that hold.
        failed: The others, with what went wrong.

    Example:
        >>> import bilevel
        >>> print(Report(bilevel.STN(), ["value"], {"jacobian": "AssertionError: 2 is not 3"}))
        STN(...): 1 of 2 checks passed
          jacobian: AssertionError: 2 is not 3
    """

    method: Method
    passed: list[str]
    failed: dict[str, str]

    def __str__(self) -> str:
        """List the failed checks, or say that there are none."""
        total = len(self.passed) + len(self.failed)
        lines = [f"{self.method}: {len(self.passed)} of {total} checks passed"]
        return "\n".join(lines + [f"  {name}: {message}" for name, message in self.failed.items()])


def check_method(method: str | Method, *, device: str | torch.device = "cpu") -> Report:
    """Run the contract that every method must keep, on small problems.

    Args:
        method: A name in ``bilevel.METHODS``, or your own instance.
        device: Where to run.

    Returns:
        The report, if all checks passed.

    Raises:
        AssertionError: With the report, if one failed.

    Example:
        >>> report = check_method("delta_stn")
        >>> len(report.passed) >= 40, report.failed
        (True, {})
    """
    case = Case(get_method(method), torch.device(device))
    passed, failed = [], {}
    for name, function in CHECKS.items():
        try:
            function(case)
        except Exception as error:  # a check may fail in any way; the report says how
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            passed.append(name)
    report = Report(case.method, passed, failed)
    if failed:
        raise AssertionError(str(report))
    return report
