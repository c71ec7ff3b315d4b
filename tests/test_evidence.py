"""The tables of evidence in docs/results are those that the commands on the pages make of the runs beside them."""

import importlib.util
import subprocess
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


def test_the_table_of_the_papers_experiments_shows_the_runs(monkeypatch):
    pytest.importorskip("matplotlib")
    from applications.compare import compare

    monkeypatch.chdir(ROOT)
    shown = (RESULTS / "applications.md").read_text(encoding="utf-8")
    assert shown == compare([Path("docs/results/runs")]) + "\n"


def test_the_command_of_the_papers_experiments_makes_what_is_missing(monkeypatch, tmp_path):
    paper = script("paper", monkeypatch)
    calls = []

    def run(command, **options):
        calls.append(command)
        out = ROOT / command[command.index("--out") + 1]
        out.mkdir(parents=True)
        (out / "best.pt").write_bytes(b"weights")
        (out / "summary.json").write_text("{}")
        (out / "environment.json").write_text(f'{{"command": "--data {tmp_path / "data"}"}}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(paper.subprocess, "run", run)
    words = [
        "paper.py",
        "--data",
        tmp_path / "data",
        "--only",
        "mnist-stn",
        "--kept",
        tmp_path / "kept",
        "--work",
        tmp_path,
    ]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    paper.main()
    assert len(calls) == 3
    first = tmp_path / "kept" / "runs" / "mnist-stn-0"
    assert sorted(path.name for path in first.iterdir()) == ["environment.json", "summary.json"]
    assert "--data DIR" in (first / "environment.json").read_text()
    paper.main()
    assert len(calls) == 3


def test_the_commands_of_the_papers_experiments_are_understood(monkeypatch):
    pytest.importorskip("optuna")
    from applications import __main__ as application

    names, asked = [], []
    for step in ("run_task", "make_study"):
        monkeypatch.setattr(application, step, asked.append)
    for name, arguments in script("paper", monkeypatch).commands():
        names.append(name)
        application.main([*arguments.split(), "--data", "DIR"])
    assert len(asked) == len(names) == len(set(names))
