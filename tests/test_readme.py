"""The README: its code runs, its numbers are those of docs/results, and nothing in it is a placeholder."""

import re
from pathlib import Path

from try_wheel import run_readme

import bilevel
from bilevel.testing import CHECKS

README = Path(__file__).parents[1] / "README.md"
RESULTS = README.parent / "docs" / "results"
TEXT = README.read_text(encoding="utf-8")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_its_code_runs(monkeypatch):
    monkeypatch.setenv("CI", "1")  # no progress bars
    names = run_readme(README)
    assert {"dropout.2", "weight_decay.0", "weight_decay.3", "label_smoothing"} == set(names["result"].hyper)
    assert {"dropout", "decay"} == set(names["solution"].hyper)


def test_the_readme_names_what_there_is():
    assert not re.findall(r"\b[A-Z]+_[A-Z]+\b(?<!DATA)", TEXT), "a placeholder was left"
    assert f"contract of {len(CHECKS)} checks" in TEXT
    for name in bilevel.METHODS:
        assert f'"{name}"' in TEXT
    for path in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (README.parent / path).exists(), path


def test_every_make_target_is_there():
    targets = set(re.findall(r"^([a-z]+):", (README.parent / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)", TEXT))
    assert named
    assert named <= targets


def test_the_table_of_the_demo_is_that_of_the_demo():
    """Method, test loss, accuracy and FLOPs; the comparison in the text as well."""
    printed = (RESULTS / "digits.txt").read_text(encoding="utf-8")
    measured = {}
    for line in printed.splitlines():
        found = re.match(r"(.+?) +[\d.]+ +([\d.]+) +([\d.]+%) +([\d.]+) +[\d.]+ s", line)
        if found:
            measured[found[1].replace("fixed", "fixed values")] = list(found.groups()[1:])
    section = TEXT.partition("eleven hyperparameters")[2].partition("`make demo`")[0]
    shown = {cells(line)[0].strip("`"): cells(line)[1:] for line in section.splitlines()[2:] if line.startswith("|")}
    assert shown
    assert all(measured[name] == numbers for name, numbers in shown.items())
    verdict = re.search(r"random search by ([\d.]+ ± [\d.]+)", printed)[1]
    assert f"`delta_stn` is ahead of random search by {verdict}" in " ".join(TEXT.split())


def test_the_costs_are_those_that_were_measured():
    printed = (RESULTS / "overhead.txt").read_text(encoding="utf-8")
    for network in ("MLP", "SimpleCNN"):
        time, memory = re.search(rf"^{network} +delta_stn +([\d.]+) +([\d.]+)", printed, re.MULTILINE).groups()
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| {network}"))
        assert cells(row)[1:] == [time, memory]


def test_the_longer_runs_are_those_that_were_made():
    """How many percent the validation losses of other methods are above that of Δ-STN on MNIST, rounded."""
    table = (RESULTS / "applications.md").read_text(encoding="utf-8").partition("on the same seed")[2].splitlines()
    names = cells(next(line for line in table if line.startswith("| task")))
    values = cells(next(line for line in table if line.startswith("| mnist, 10,000 examples")))
    shown = dict(zip(names, values, strict=True))
    flat = " ".join(TEXT.split())
    for name, text in (
        ("RS", "random search with the compute of three runs"),
        ("STN", "`stn`"),
        ("fixed", "fixed values"),
    ):
        assert shown[name].endswith("n=3")
        mean, error = (round(float(number)) for number in re.match(r"\+([\d.]+) ± ([\d.]+)", shown[name]).groups())
        assert f"{text} {mean} % ± {error}" in flat, (name, mean, error)


def test_the_evidence_is_that_of_the_page():
    """How many percent the other methods are behind, rounded."""
    table = (RESULTS / "evidence.md").read_text(encoding="utf-8").splitlines()
    names = cells(next(line for line in table if line.startswith("| task")))[1:]
    values = cells(next(line for line in table if line.startswith("| loss over")))[1:]
    shown = dict(zip(names, values, strict=True))
    flat = " ".join(TEXT.split())
    for name, text in (
        ("random search", "above that of `delta_stn`"),
        ("fixed values", "the paper"),
        ("Δ-STN, paper", "`stn`"),
    ):
        mean, error = (round(float(number)) for number in re.findall(r"[\d.]+", shown[name]))
        assert re.search(rf"{mean} % ± {error}[,;]? ?{re.escape(text)}", flat), (name, mean, error)


def test_the_table_of_linear_models_is_that_of_the_runs():
    """How many runs closed the gap in each problem, and how many diverged."""
    line = re.compile(r"^(\w+): (\d+ of \d+) runs closed at least 90% of the excess loss, (\d+) diverged", re.MULTILINE)
    found = []
    for problem in ("ridge/linear_ridge", "splits/linear_ridge", "network/linear_linear_network",
                    "input_dropout/linear_input_dropout"):  # fmt: skip
        text = (RESULTS / "linear" / f"{problem}.txt").read_text(encoding="utf-8")
        found.append({method: numbers for method, *numbers in line.findall(text)})
    section = TEXT.partition("<!-- linear: begin -->")[2].partition("<!-- linear: end -->")[0]
    shown = [cells(row) for row in section.splitlines() if row.startswith("| `")]
    assert shown == [
        [
            f"`{method}`",
            *(runs.get(method, ["none"])[0] for runs in found),
            str(sum(int(runs[method][1]) for runs in found if method in runs)),
        ]
        for method in found[0]
    ]
