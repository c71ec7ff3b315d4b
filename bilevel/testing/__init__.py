"""One contract for every method: ``bilevel.check_method`` runs it on yours.

A check is a function of a :class:`Case` that raises ``AssertionError``; its name says what holds. Each file of checks
has one theme. All use float64 and problems small enough for closed forms, unless the check is about something else.
"""

from bilevel.testing.case import Batch, Case, Network, quadratic_parts
from bilevel.testing.contract import CHECKS, Report, check_method
from bilevel.testing.registry import Check

__all__ = ["CHECKS", "Batch", "Case", "Check", "Network", "Report", "check_method", "quadratic_parts"]
