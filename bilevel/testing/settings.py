"""Checks: a method is a frozen set of settings, and binding it to a problem makes a fresh response."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from bilevel.response import BestResponse
from bilevel.testing.assertions import expect
from bilevel.testing.case import Case
from bilevel.testing.probes import run
from bilevel.testing.registry import check


@check
def _settings_are_immutable(case: Case) -> None:
    settings: Any = copy.deepcopy(case.method)
    names = [entry.name for entry in dataclasses.fields(settings)] if dataclasses.is_dataclass(settings) else []
    for name in [*names, "anything"]:
        try:
            setattr(settings, name, None)
        except AttributeError:
            continue
        raise AssertionError("settings could be changed: use @dataclass(frozen=True)")


@check
def _settings_equal_their_copies(case: Case) -> None:
    expect(copy.deepcopy(case.method) == case.method, "a copy does not compare equal")


@check
def _settings_print_their_values(case: Case) -> None:
    expect(" at 0x" not in repr(case.method), f"repr is an address: {case.method!r}")
    expect(type(case.method).__name__ in repr(case.method), f"repr lacks the name: {case.method!r}")


@check
def _settings_survive_a_run(case: Case) -> None:
    before = repr(case.method)
    run(case.solver(case.quadratic()), None)
    expect(repr(case.method) == before, "a run changed the settings")


@check
def _binding_gives_a_best_response(case: Case) -> None:
    problem = case.quadratic()
    expect(isinstance(case.method_for(problem).bind(problem), BestResponse), "bind must return a BestResponse")


@check
def _two_bindings_share_nothing(case: Case) -> None:
    problem = case.network()
    first, second = case.method.bind(problem), case.method.bind(problem)
    shared = {p.data_ptr() for p in first.parameters()} & {p.data_ptr() for p in second.parameters()}
    expect(not shared, "two responses share parameters")
