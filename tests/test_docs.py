"""The pages in docs/: their code runs, they name what exists, and they load nothing from elsewhere."""

import contextlib
import doctest
import io
import json
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from sphinx.search.en import SearchEnglish

import bilevel

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.rst"))
    if page.relative_to(DOCS).parts[0] not in {"_build", "gallery", "results", "tutorials"}
]
BLOCK = re.compile(r"^\.\. (testcode|testoutput)::\n((?:   :\w+:.*\n)*)\n((?:(?:   .*)?\n)+)", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def name_of(page):
    """Its name in a link, such as guides/tune."""
    return page.relative_to(DOCS).with_suffix("").as_posix()


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_runs(page, monkeypatch):
    monkeypatch.setenv("CI", "1")  # no progress bars
    run_page(page.read_text(encoding="utf-8"), str(page))


def test_the_runner_notices_a_wrong_output():
    with pytest.raises(AssertionError, match="expected"):
        run_page(".. testcode::\n\n   print(1)\n\n.. testoutput::\n\n   2\n", "page")
    with pytest.raises(AssertionError, match="not shown"):
        run_page(".. testcode::\n\n   print(1)\n\nText.\n", "page")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_python_that_is_not_run(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r">>>|code(-block)?:: *(python|py)|^(?! *\.\. ).*::$", text, re.MULTILINE)
    assert all(len(line) <= 93 for block in BLOCK.finditer(text) for line in block[3].splitlines())  # else it scrolls
    assert len(BLOCK.findall(text)) == len(re.findall(r"testcode|testoutput", text))


def test_the_tests_that_the_maths_page_names_exist():
    named = set(re.findall(r"``(test_\w+)``", (DOCS / "reference" / "maths.rst").read_text(encoding="utf-8")))
    theory = (DOCS.parent / "tests" / "test_theory.py").read_text(encoding="utf-8")
    assert named
    assert named <= set(re.findall(r"^def (test_\w+)\(", theory, re.MULTILINE))


OPENINGS = re.compile(
    r"\A.+\n=+\n\n(After this page you|You will (find|know) here|With this library you|You have )", re.MULTILINE
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_opens_with_what_the_reader_will_be_able_to_do(page):
    assert OPENINGS.match(page.read_text(encoding="utf-8")), "begin with 'After this page you ...'"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name in {"guides", "lab"}], ids=name_of)
def test_every_page_is_in_the_contents(page):
    assert re.search(rf"^   {name_of(page)}$", (DOCS / "index.rst").read_text(encoding="utf-8"), re.MULTILINE)


def build(source, target):
    """Run Sphinx with warnings as errors; return whether it passed, and what it said."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-b", "html"]
    command += ["-D", "plot_gallery=0"]  # tests/test_gallery.py runs the scripts
    done = subprocess.run([*command, str(source), str(target)], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


class Page(HTMLParser):
    """Collects what a browser would fetch to show a page, where its links lead, and the places that it has."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.places, self.formulas = [], [], set(), 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.formulas += tag == "math"
        names = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
        for name, value in attrs:
            if value and name == names.get(tag):
                self.loads.append(value)
            if value and name == "href" and tag == "a":
                self.links.append(value)
            if name in {"id", "name"}:
                self.places.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages, built without the gallery's figures."""
    target = tmp_path_factory.mktemp("site")
    passed, said = build(DOCS, target)
    assert passed, said
    return target


@pytest.fixture(scope="module")
def html(site):
    """Every page of the site, by its path."""
    return {page.relative_to(site): Page(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}


def test_the_pages_load_nothing_from_the_network(site, html):
    for path, page in html.items():
        outside = [url for url in page.loads if re.match(r"(https?:)?//", url)]
        assert not outside, f"{path} loads {outside}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name
    assert sum(page.formulas for page in html.values()) > 100


def test_links_inside_of_the_site_lead_somewhere(site, html):
    places = {(site / path).resolve(): page.places for path, page in html.items()}
    dead, followed = [], 0
    for path, page in html.items():
        for link in page.links:
            if re.match(r"(https?:)?//|mailto:", link):
                continue
            file, _, place = link.partition("#")
            target = (site / path).resolve() if not file else (site / path.parent / unquote(file)).resolve()
            followed += 1
            found = target.exists() and (not place or target not in places or unquote(place) in places[target])
            if not found:
                dead.append(f"{path} -> {link}")
    assert not dead, "\n".join(dead)
    assert followed > 1000


WORDS = """label smoothing, augmentation, class weights, imbalanced, noisy labels, resume, checkpoint, tensorboard,
wandb, lightning, hugging face, transformers, LSTM, multi-GPU, distributed, torchrun, AMP, compile, memory,
learning rate, warm-up, early stopping, schedule, Optuna"""


def words_of(phrase):
    """What the search box makes of a phrase: lower case, stemmed, without words that are left out of the index."""
    language = SearchEnglish({})
    words = [word.lower() for word in re.findall(r"\w+", phrase)]
    return [language.stem(word) for word in words if word not in language.stopwords]


def pages_of(index, entry):
    """The pages of a stem in one of the tables of the index; a number stands for a list of one."""
    found = index[entry[0]].get(entry[1], [])
    return {found} if isinstance(found, int) else set(found)


@pytest.mark.parametrize("phrase", [phrase.strip() for phrase in WORDS.split(",")])
def test_searching_finds_a_page_outside_of_the_lab_notes(site, phrase):
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    shared = set(range(len(index["docnames"])))
    for stem in words_of(phrase):
        shared &= pages_of(index, ("terms", stem)) | pages_of(index, ("titleterms", stem))
    names = [index["docnames"][number] for number in sorted(shared)]
    assert [name for name in names if name.startswith(("guides/", "gallery/", "start"))], names


def test_the_page_for_language_models_names_every_page_that_is_there(site):
    named = set(re.findall(r"\]\(([\w/]+)\.html\)", (site / "llms.txt").read_text(encoding="utf-8")))
    pages = {name_of(page) for page in PAGES if page.parent.name in {"guides", "lab", "reference"}}
    assert named == pages | {"start", "gallery/index", "api/index", "internals/index"}


def test_every_public_name_has_a_page(html):
    names = set().union(*(page.places for path, page in html.items() if path.parts[0] == "api"))
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
    (source / "api").mkdir()
    (source / "api" / "index.rst").write_text(api, encoding="utf-8")
    text = "A\n=\n\n:math:`\\frobnicate`, :math:`\\tfrac12`\n\n.. toctree::\n\n   api/index\n"
    (source / "index.rst").write_text(text, encoding="utf-8")
    passed, said = build(source, tmp_path / "html")
    assert not passed
    assert "the public name bilevel.real is missing from the API pages" in said
    assert "the public name bilevel.positive is missing from the API pages" not in said
    assert 'Unknown LaTeX command "\\frobnicate"' in said
    assert "misread" in said
