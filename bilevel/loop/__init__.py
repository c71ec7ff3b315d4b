"""The loop that most users call, and what it returns."""

from bilevel.loop.advice import TuningWarning
from bilevel.loop.feed import Feed
from bilevel.loop.solution import Best, Round, Solution
from bilevel.loop.solve import solve

__all__ = ["Best", "Feed", "Round", "Solution", "TuningWarning", "solve"]
