"""How Hypothesis draws: the same examples everywhere in a test run, and other ones in each round of ``make fuzz``."""

from __future__ import annotations

import gc
import shlex
import signal
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers
from torch._subclasses import fake_tensor

# Nothing here looks at the clock or at what an earlier run has stored, so a slow machine comes to the same verdict.
settings.register_profile(
    "test",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fuzz", settings.get_profile("test"), derandomize=False, print_blob=True)

# Hypothesis also draws the numbers that it reads in the imported modules of this project. Which ones are imported
# depends on the tests that are selected, and which ones count as ours on the path of the clone: neither `make test` nor
# a seed of `make fuzz` would repeat itself.
providers._get_local_constants = providers.Constants

# Tests run in parallel processes; one thread each is fastest for their small tensors.
torch.set_num_threads(1)
# A trace keeps the Python stack for each of its operations, for messages of torch's own. Under pytest, whose stacks are
# deep, that takes half of the time of all tests of compilation.
fake_tensor.traceback = SimpleNamespace(extract_stack=list, format_list=list)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz",
        type=int,
        metavar="FACTOR",
        help="Run the property tests only, with random examples and FACTOR times as many; `make fuzz` does.",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("fuzz" if config.getoption("--fuzz") else "test")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell lets those in the background ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"repeat this round: {_command(config, config.args)}" if config.getoption("--fuzz") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    factor = config.getoption("--fuzz")
    if not factor:
        return
    properties = [item for item in items if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)]
    config.hook.pytest_deselected(items=[item for item in items if item not in properties])
    items[:] = properties
    # A test's own @settings(max_examples=...) outranks the profile, so each test's number is multiplied, once.
    for test in {getattr(item.obj, "__func__", item.obj) for item in properties}:
        own = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = settings(own, max_examples=factor * own.max_examples)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at it again and again."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--fuzz") and terminalreporter.stats.get("failed"):
        terminalreporter.section("how to repeat")
        terminalreporter.line(f"This round: {_command(config, config.args)}")
        terminalreporter.line(
            "One example alone: put the line @reproduce_failure(...) that is printed above over its test."
        )
        for report in terminalreporter.stats["failed"]:
            terminalreporter.line(f"One test alone: {_command(config, [report.nodeid])}")


def _command(config: pytest.Config, tests: list[str]) -> str:
    seed, factor = config.getoption("--hypothesis-seed"), config.getoption("--fuzz")
    return f'make fuzz SEED={seed} FACTOR={factor} TESTS="{shlex.join(tests)}"'


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checks of new kinds of batches, for tests that count how often a loss is called."""
    monkeypatch.setattr("bilevel.checks.Kinds.new", lambda kinds, batch, count: False)
