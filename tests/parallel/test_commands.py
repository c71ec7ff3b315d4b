"""What torchrun starts, and the benchmarks of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import missing

import bilevel

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
ROOT = Path(bilevel.__file__).parents[1]


def command(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_torchrun_goes_on_after_a_death() -> None:
    assert "1 of 1 jobs with 1 deaths" in command("benchmarks/elastic.py", "--jobs", "1", "--deaths", "1")


@pytest.mark.slow
def test_torchrun_goes_on_after_many_deaths() -> None:
    command("benchmarks/elastic.py", "--jobs", "20", "--deaths", "3")


@pytest.mark.slow
def test_traffic_is_at_the_floor() -> None:
    for line in command("benchmarks/scaling.py").splitlines():
        words = line.split()
        if len(words) == 8 and words[1] in ("2", "4"):
            assert 1 <= float(words[4]) < 1.01, line
            assert 0.999 < float(words[7]) < 1.01, line
