"""The tutorials: each script runs, shortened, and ends in a figure; no script is missing from the gallery.

A script names how long it trains in capitals at its top, such as ``EPOCHS = 100``, and how often, ``SEEDS``. Here that
is cut. What it would give to torchrun runs in this process; ``tests/parallel`` has runs of several processes.
"""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

import bilevel

pytest.importorskip("sklearn")
Figure = pytest.importorskip("matplotlib.figure").Figure

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = sorted((DOCS / "tutorials").glob("plot_*.py"))
LENGTH = re.compile(r"^(STEPS|ROUNDS|EPOCHS|SEEDS) = (\d+)$", re.MULTILINE)
SHORT = {"STEPS": 40, "ROUNDS": 4, "EPOCHS": 3, "SEEDS": 2}


def shortened(text):
    """The script with fewer steps, rounds or epochs."""
    short = LENGTH.sub(lambda match: f"{match[1]} = {min(int(match[2]), SHORT[match[1]])}", text)
    short = short.replace('"120"', '"240"')  # what is for two processes runs in one, with the examples of both
    return short.replace("bilevel.check_method(", "str(")  # 62 checks, which other tests run


class InProcess:
    """Runs ``[python, ..., script.py, arguments]`` here and now, in place of ``subprocess.Popen``."""

    returncode = 0

    def __init__(self, command, cwd, **options):
        place = next(index for index, word in enumerate(command) if word.endswith(".py"))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(sys, "argv", command[place:])
            runpy.run_path(command[place], run_name="__main__")

    def communicate(self):
        return "", ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem.removeprefix("plot_"))
def test_a_script_runs(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")
    if script.stem == "plot_processes":
        monkeypatch.setattr("subprocess.Popen", InProcess)
    text = script.read_text(encoding="utf-8")
    assert LENGTH.search(text), "name how long it trains in capitals: STEPS, ROUNDS or EPOCHS"
    scope = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bilevel.TuningWarning)  # of so few rounds
        exec(compile(shortened(text), str(script), "exec"), scope)
    assert isinstance(scope["figure"], Figure)
    assert capsys.readouterr().out.strip(), "print a number"
    (file,) = tmp_path.glob("*.png")
    assert file.stem == script.stem.removeprefix("plot_")


def test_the_gallery_has_every_script(monkeypatch):
    pytest.importorskip("sphinx_gallery")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from gallery import ORDER, Order

    assert sorted(f"plot_{name}" for name in ORDER) == [script.stem for script in SCRIPTS]
    assert Order("tutorials")(f"plot_{ORDER[1]}.py") == 1
    del sys.modules["gallery"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem.removeprefix("plot_"))
def test_a_script_opens_with_what_the_reader_will_be_able_to_do(script):
    text = script.read_text(encoding="utf-8")
    assert re.match(r'r?"""\n.+\n=+\n\nYou will be able to ', text)
    assert len(text.splitlines()) <= 190
    used = set(re.findall(r"\bfrom (bilevel\S*) import|\bimport (bilevel\.\S+)", text))
    assert not used, "a tutorial takes everything from bilevel itself"
