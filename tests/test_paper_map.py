"""The map of the paper, docs/reference/paper.toml: no link is dead, and no label of the paper is missing."""

import ast
import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from applications.__main__ import parser

ROOT = Path(__file__).parents[1]
ENTRIES = tomllib.loads((ROOT / "docs" / "reference" / "paper.toml").read_text(encoding="utf-8"))["entry"]
LABELS = {label for entry in ENTRIES for label in [entry["label"], *entry.get("also", [])]}
COMMANDS = [command.strip() for entry in ENTRIES for command in entry.get("run", "").split(";") if command.strip()]
KINDS = {"equation", "theorem", "algorithm", "figure", "table"}

PAPER = """
eq:bilvel-hyperparameter-obj eq:bilevel-problem eq:valid-loss-decompose eq:lor-objective eq:old-param eq:stn-val-obj
eq:new-param obs:gnhhw eqn:push_expectation obs:condition-kfac eq:decomp eqn:uncentered_dynamics eq:valid-undesirable
eq:new-objective_hw0 eq:new-objective_hw1 thm-quad-min eq:lin-network section:nn alg:dstn-training fig:bilevel-toy
fig:toy-linearization fig:linear-regression-result fig:linear-network fig:mnist-result fig:alexnet fig:alexnet-time
fig:alexnet-dropout fig:alexnet-data-aug tab:classification appendix:notation tab:notation appendix:algo-stn alg:method
alg:stn obs:gnhhw-proof obs:condition-kfac-proof thm-quad-proof best-response-lamma eq:deriv-best-response-jacob
app:just-linear eq:brj1 app:stein eq:second-stein-lem app:indep app:gnm-approx append:conv-nn app:restricted
sec:linear-reg-example eq:linear-reg-incorrect eq:linear-reg-l2-jacob exp-toy eq:linear-reg-obj
fig:comparison_uci_linear_reg fig:comparison_uci_linear_reg2 fig:decouple exp-image-class exp-detail-mnist
fig:mnist-dropout fig:scnn-dropout fig:scnn-cutout fig:mnist-schedule fig:vgg-dropout fig:vgg-data-aug fig:vgg-cutout
fig:vgg fig:resnet tab:acc exp:language fig:lstm-result tab:dropout-rate appendix:additional-results fig:delta-schedule
fig:stn-schedule fig:mnist-schedule-init fig:alexnet-scale fig:alexnet-steps fig:sensiv2 fig:sensiv
"""
"""Its labels, but for those of sections without an equation."""


def test_every_label_of_the_paper_is_mapped():
    assert {label for label in LABELS if not label.startswith("[")} == set(PAPER.split())
    assert {entry["kind"] for entry in ENTRIES} == KINDS


def test_no_label_has_two_entries():
    first = [entry["label"] for entry in ENTRIES]
    assert len(first) == len(set(first))


@pytest.mark.parametrize("name", sorted({name for entry in ENTRIES for name in entry.get("code", [])}))
def test_code_can_be_imported(name):
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return
    pytest.fail(f"there is no {name}")


@pytest.mark.parametrize("path", sorted({test for entry in ENTRIES for test in entry.get("tests", [])}))
def test_tests_exist(path):
    file, _, name = path.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_are_understood(command):
    program, *words = shlex.split(command)
    assert program == "python"
    if words[:2] == ["-m", "applications"]:
        parser().parse_args(words[2:])  # exits where an option does not exist
    else:
        assert (ROOT / words[0]).exists()


def test_equations_have_code_and_theorems_tests():
    for entry in ENTRIES:
        assert entry.get("code") or entry["label"] == "tab:notation", entry["label"]
        assert entry.get("tests") or entry["kind"] not in {"theorem", "algorithm", "equation"}, entry["label"]
        assert entry.get("run") or entry["kind"] != "figure", entry["label"]


def test_labels_in_the_source_are_in_the_map():
    cited = set()
    for folder in ("bilevel", "applications"):
        for file in (ROOT / folder).rglob("*.py"):
            cited |= set(re.findall(r"\b(?:eqn?|alg|fig|tab|obs|append):[\w-]+", file.read_text(encoding="utf-8")))
    assert cited
    assert cited <= LABELS
