"""Runs on an HTML page, while they go on and afterwards; also ``python -m bilevel report``."""

from bilevel.report.find import read
from bilevel.report.page import page
from bilevel.report.runs import Run, from_history
from bilevel.report.writing import replace, write

__all__ = ["Run", "from_history", "page", "read", "replace", "write"]
