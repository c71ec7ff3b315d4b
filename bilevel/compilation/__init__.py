"""Compile a computation in two stages: what is known early, once, and what waits for a late input, many times."""

from bilevel.compilation.graph import Backend, Later, Stage
from bilevel.compilation.module import OfModule, WholeStep, gains
from bilevel.compilation.staged import MAX_KINDS, Staged, TooLarge, inductor

__all__ = ["MAX_KINDS", "Backend", "Later", "OfModule", "Stage", "Staged", "TooLarge", "WholeStep", "gains", "inductor"]
