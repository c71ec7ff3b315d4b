"""What a release says about itself agrees with itself."""

import re
import tomllib
from pathlib import Path

import bilevel

ROOT = Path(__file__).parents[1]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version():
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    assert bilevel.__version__ == version
    assert re.search(r"^version: (.+)$", text("CITATION.cff"), re.MULTILINE)[1] == version


def test_torch_is_what_the_pages_say():
    wanted = next(
        need for need in tomllib.loads(text("pyproject.toml"))["project"]["dependencies"] if need.startswith("torch")
    )
    low = re.search(r">=([\d.]+)", wanted)[1]
    assert re.search(r"^torch==([\d.]+)$", text("constraints.txt"), re.MULTILINE)[1].startswith(low)
    for page in ("README.md", "docs/start.rst", "docs/reference/promises.rst"):
        assert f"torch {low}" in text(page), page
    assert wanted in text("docs/reference/promises.rst")
    assert f'"torch=={low}.*"' in text(".github/workflows/release.yml")


def test_the_release_workflow_builds_and_tests_before_it_publishes():
    jobs = re.split(r"^  (\w+):\n", text(".github/workflows/release.yml").partition("\njobs:\n")[2], flags=re.MULTILINE)
    jobs = dict(zip(jobs[1::2], jobs[2::2], strict=True))
    assert list(jobs) == ["build", "test", "publish"]
    assert "needs: build" in jobs["test"]
    assert "tests/try_wheel.py README.md" in jobs["test"]
    assert "needs: test" in jobs["publish"]
    assert "id-token: write" in jobs["publish"]
    assert "password" not in jobs["publish"]
