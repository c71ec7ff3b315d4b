"""The pages in docs/: their code runs, they name what exists, and they load nothing from elsewhere."""

import contextlib
import doctest
import io
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import pytest

import bilevel

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.rst"))
BLOCK = re.compile(r"^\.\. (testcode|testoutput)::\n((?:   :\w+:.*\n)*)\n((?:(?:   .*)?\n)+)", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_page(text, name):
    """Run the ``testcode`` blocks of a page in one namespace and compare what they print with ``testoutput``."""
    namespace, printed = {"__name__": name}, ""
    for block in BLOCK.finditer(text):
        kind, body = block[1], textwrap.dedent(block[3])
        line = text.count("\n", 0, block.start(3))
        if kind == "testcode":
            assert not printed, f"{name}:{line}: the output before this block is not shown: {printed!r}"
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile("\n" * line + body, name, "exec"), namespace)
            printed = output.getvalue()
        else:
            expected = body.strip() + "\n"
            assert doctest.OutputChecker().check_output(expected, printed, FLAGS), (
                f"{name}:{line}: expected\n{expected}\ngot\n{printed}"
            )
            printed = ""
    assert not printed, f"{name}: the output at the end is not shown: {printed!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, monkeypatch):
    monkeypatch.setenv("CI", "1")  # no progress bars
    run_page(page.read_text(encoding="utf-8"), str(page))


def test_the_runner_notices_a_wrong_output():
    with pytest.raises(AssertionError, match="expected"):
        run_page(".. testcode::\n\n   print(1)\n\n.. testoutput::\n\n   2\n", "page")
    with pytest.raises(AssertionError, match="not shown"):
        run_page(".. testcode::\n\n   print(1)\n\nText.\n", "page")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_no_python_that_is_not_run(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r">>>|code(-block)?:: *(python|py)|^(?! *\.\. ).*::$", text, re.MULTILINE)
    assert all(len(line) <= 93 for block in BLOCK.finditer(text) for line in block[3].splitlines())  # else it scrolls
    assert len(BLOCK.findall(text)) == len(re.findall(r"testcode|testoutput", text))


def test_the_tests_that_the_maths_page_names_exist():
    named = set(re.findall(r"``(test_\w+)``", (DOCS / "maths.rst").read_text(encoding="utf-8")))
    theory = (DOCS.parent / "tests" / "test_theory.py").read_text(encoding="utf-8")
    assert named
    assert named <= set(re.findall(r"^def (test_\w+)\(", theory, re.MULTILINE))


def build(source, target):
    """Run Sphinx with warnings as errors; return whether it passed, and what it said."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-b", "html"]
    command += ["-D", "plot_gallery=0"]  # tests/test_gallery.py runs the scripts
    done = subprocess.run([*command, str(source), str(target)], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


class Loads(HTMLParser):
    """Collects what a browser would fetch to show a page."""

    def __init__(self):
        super().__init__()
        self.urls = []
        self.formulas = 0

    def handle_starttag(self, tag, attrs):
        self.formulas += tag == "math"
        names = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
        self.urls += [value for name, value in attrs if value and name == names.get(tag)]


def test_the_pages_build_without_warnings_and_load_nothing_from_the_network(tmp_path):
    passed, said = build(DOCS, tmp_path)
    assert passed, said
    formulas = 0
    for page in tmp_path.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        formulas += loads.formulas
        outside = [url for url in loads.urls if re.match(r"(https?:)?//", url)]
        assert not outside, f"{page.name} loads {outside}"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name
    assert formulas > 100
    names = set(re.findall(r'id="(bilevel\.\w+)"', (tmp_path / "api.html").read_text(encoding="utf-8")))
    public = ("augment", "functional", "loggers", "nn", "parallel", "plotting", "regularizers", "report", "structure")
    modules = {f"bilevel.{name}" for name in public}
    assert {f"bilevel.{name}" for name in bilevel.__all__} - names == modules


def test_the_build_fails_on_a_missing_name_and_on_a_formula_that_cannot_be_converted(tmp_path):
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((DOCS / "conf.py").read_text(encoding="utf-8"), encoding="utf-8")
    for folder in ("_ext", "_static", "tutorials"):
        (source / folder).symlink_to(DOCS / folder)
    api = "API\n===\n\n.. autofunction:: bilevel.positive\n"
    (source / "api.rst").write_text(api, encoding="utf-8")
    text = "A\n=\n\n:math:`\\frobnicate`, :math:`\\tfrac12`\n\n.. toctree::\n\n   api\n"
    (source / "index.rst").write_text(text, encoding="utf-8")
    passed, said = build(source, tmp_path / "html")
    assert not passed
    assert "the public name bilevel.real is missing from the API page" in said
    assert "the public name bilevel.positive is missing from the API page" not in said
    assert 'Unknown LaTeX command "\\frobnicate"' in said
    assert "misread" in said
