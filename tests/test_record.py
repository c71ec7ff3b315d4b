"""The records of the benchmarks: what is written, and how two of them are compared."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def record(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield __import__("record")
    sys.modules.pop("record", None)


def test_a_record_has_numbers_versions_and_machine(record, tmp_path):
    """And can be read again."""
    record.save(tmp_path / "new.json", {"mlp / CG / time": 2.0})
    found = json.loads((tmp_path / "new.json").read_text(encoding="utf-8"))
    assert found["numbers"] == {"mlp / CG / time": 2.0}
    assert {"python", "torch"} <= found["versions"].keys() and {"cores", "threads"} <= found["machine"].keys()


def test_what_is_slower_or_faster_is_marked(record):
    """By more than noise; what only one record has, and errors, are left out."""
    old = {"a / time": 10.0, "b / time": 10.0, "c / time": 10.0, "gone / time": 1.0, "a / error": 1.0}
    new = {"a / time": 10.5, "b / time": 20.0, "c / time": 5.0, "new / time": 1.0, "a / error": 9.0}
    lines = record.compared(old, new)
    assert [line.split("->")[1].split()[1:] for line in lines] == [["1.05"], ["2.00", "slower"], ["0.50", "faster"]]


def test_the_benchmarks_of_a_record_are_there(record):
    """Each takes the options that it is called with; records that are kept have numbers."""
    for name in record.TABLES:
        source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert all(f'"{option}"' in source for option in ["--json", *record.TABLES[name][::2]])
    kept = [path for name in record.TABLES if (path := record.RESULTS / f"{name}.json").exists()]
    assert kept and all(json.loads(path.read_text(encoding="utf-8"))["numbers"] for path in kept)
