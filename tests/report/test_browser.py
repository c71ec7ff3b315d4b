"""The page in headless Chromium; skipped where there is no browser."""

import pytest
from example_logs import write_log
from headless import Browser, find

import bilevel

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser():
    browser = Browser(find())
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A run that goes on, one with many hyperparameters and hostile names, and five compared."""
    folder = tmp_path_factory.mktemp("pages")
    going = write_log(folder / "going.jsonl", rounds=150, end=None, resume=90, warnings=("a" * 300,))
    evil = "<script>document.title='broken'</script>"
    names = ("long_" * 12, evil, *(f"h{index}" for index in range(30)))
    many = write_log(folder / "many.jsonl", rounds=60, names=names, entries=12, settings={"x" * 90: "y" * 300})
    five = [write_log(folder / f"run-{index}.jsonl", rounds=60, seed=index) for index in range(5)]
    made = {"going": [going], "many": [many], "compared": five}
    return {name: bilevel.report.write(runs, folder / f"{name}.html") for name, runs in made.items()}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["going", "many", "compared"])
def test_nothing_overflows_and_nothing_complains(browser, pages, name, width, dark):
    browser.open(pages[name], width=width, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("innerWidth") == width
    smallest = browser.evaluate("Math.min(...[...document.querySelectorAll('.plot')].map((p) => p.clientWidth))")
    assert smallest > 200
    assert browser.evaluate("document.title") != "broken"
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (not dark)
    assert browser.messages == []


def test_values_below_the_pointer(browser, pages):
    browser.open(pages["going"], width=1280)
    where = browser.evaluate(
        "(({left, top, width}) => [left + width / 2, top + 50])(plot.getBoundingClientRect())".replace(
            "plot.", "document.querySelector('.plot')."
        )
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    text = browser.evaluate("document.querySelector('.tip').innerText")
    assert "round 7" in text and "inner loss 0." in text and "validation loss" in text


def test_without_scripts_the_charts_are_there(browser, pages):
    browser.open(pages["going"], width=390, scripts=False)
    lines = browser.evaluate("[...document.querySelectorAll('path.line')].filter((p) => p.getBBox().width > 0).length")
    assert lines > 5


def refreshing(folder, seconds):
    log = write_log(folder / "run.jsonl", end=None, names=tuple(f"h{index}" for index in range(20)))
    bilevel.report.replace(folder / "page.html", bilevel.report.page(bilevel.report.read([log]), refresh=seconds))
    return folder / "page.html"


def test_a_page_that_is_loaded_again_stays_where_it_was(browser, tmp_path):
    browser.open(refreshing(tmp_path, 3600.0), width=390)
    browser.evaluate("document.querySelector('details').open = true; scrollTo(0, 700)")
    browser.reload()
    assert browser.evaluate("scrollY") == 700 and browser.evaluate("document.querySelector('details').open")
    assert browser.messages == []


def test_a_page_loads_itself_again(browser, tmp_path):
    browser.open(refreshing(tmp_path, 0.3), width=390)
    browser.wait_for_load()
    browser.wait_for_load()
    assert browser.messages == []
