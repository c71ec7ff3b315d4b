"""The tables of evidence in docs/results are those that the commands on the pages make of the runs beside them."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def script(name, monkeypatch):
    """A file of benchmarks/, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_evidence_shows_the_runs(monkeypatch):
    pytest.importorskip("sklearn")
    evidence = script("evidence", monkeypatch)
    losses = evidence.read(RESULTS / "factors.jsonl")
    assert len(losses) == 14
    assert (RESULTS / "evidence.md").read_text(encoding="utf-8") == evidence.table(losses) + "\n"


def test_the_search_takes_the_trial_with_the_best_validation_loss(monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    evidence = script("evidence", monkeypatch)
    runs = {"fixed": (0.3, 0.5), "random_2": (0.2, 0.9), "default": (0.1, 0.4), "stn": (0.1, 0.4), "paper": (0.1, 0.4)}
    lines = [
        f'{{"config": "{name}", "task": "cancer", "seed": 0, "valid": {valid}, "test": {test}}}'
        for name, (valid, test) in runs.items()
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    losses = evidence.read(tmp_path / "runs.jsonl")
    assert losses["cancer"]["random_search"] == {0: 0.9}
    assert losses["cancer"]["fixed"] == {0: 0.5}


def test_the_comparison_with_published_code_shows_the_runs(monkeypatch):
    pytest.importorskip("sklearn")
    published = script("published", monkeypatch)
    shown = (RESULTS / "published.txt").read_text(encoding="utf-8")
    assert shown == published.report(published.read(RESULTS / "published.jsonl"))
