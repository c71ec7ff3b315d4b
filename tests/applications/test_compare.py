"""Tables and curves from folders that are written here by hand."""

import csv
import json
import math
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from applications import __main__ as cli
from applications.compare import COLUMNS, PAPER, average, compare, curve, load
from applications.tables import markdown, mean_and_deviation, read_csv, shown, write_csv


def write(folder, task="mnist", method="delta_stn", seed=0, valid=0.05, test=0.04, **changes):
    """A run of ten rounds in two epochs."""
    settings = {"epochs": 2, "width": 8, "only_input": False, **changes.pop("settings", {})}
    described = {"task": task, "method": method, "seed": seed, "data": "real", "init": {}, "settings": settings}
    measures = {
        "valid": {"loss": valid, "accuracy": 0.9 + seed / 100},
        "test": {"loss": test, "accuracy": 0.8 + seed / 100},
    }
    summary = {**described, "stopped": "epochs", "epochs": 2.0, "seconds": 20.0 + seed, **measures, **changes}
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(described))
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [f"{r},{2 * r},{valid + 0.1 if r == 5 else valid if r == 10 else ''}" for r in range(1, 11)]
    (folder / "history.csv").write_text("\n".join(["round,seconds,validation_loss", *rows]) + "\n")
    return folder


def cells(report, row):
    """The cells of the first line of a table that begins with ``row``, by column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if line[:1] == "|"]
    return dict(zip(lines[0], next(line for line in lines if line[0] == row), strict=True))


def test_rows_are_tasks_and_columns_are_methods(tmp_path):
    write(tmp_path / "a", valid=0.040, test=0.038)
    write(tmp_path / "b", method="stn", valid=0.05, test=0.036)
    write(tmp_path / "c", task="fashion", method="stn", valid=0.3, test=0.4)
    report = compare([tmp_path])
    mnist = cells(report, "mnist")
    assert mnist["Δ-STN"] == "**0.0400** (0.0380)"  # the best of validation and of test are not the same method
    assert mnist["STN"] == "0.0500 (**0.0360**)"
    assert cells(report, "fashion")["STN"] == "0.3000 (0.4000)"
    assert cells(report, "fashion")["Δ-STN"] == ""
    assert cells(report, "paper, tab:classification")["Δ-STN (paper)"] == "**0.040** (**0.038**)"
    assert cells(report, "paper, tab:classification")["RS"] == "0.043 (0.042)"
    assert [column for column in mnist if column in COLUMNS.values()] == [
        *("RS", "BO (GP)", "STN", "Centered STN", "Δ-STN (paper)", "Δ-STN")
    ]


def test_seeds_are_averaged(tmp_path):
    for seed, valid in enumerate((0.1, 0.2, 0.6)):
        write(tmp_path / str(seed), seed=seed, valid=valid, test=2 * valid)
    report = compare([tmp_path])
    assert cells(report, "mnist")["Δ-STN"] == "0.3000 ± 0.2646 (0.6000 ± 0.5292), n=3"
    accuracies = report[report.index("accuracy") :]
    assert cells(accuracies, "mnist")["Δ-STN"] == "91.00 ± 1.00 (81.00 ± 1.00), n=3"
    assert "warning" not in report
    assert "note" not in report


def test_differences_are_taken_seed_by_seed(tmp_path):
    for seed, (delta, stn) in enumerate(((0.1, 0.11), (0.2, 0.26), (0.4, 0.4))):
        write(tmp_path / f"delta{seed}", seed=seed, valid=delta, test=1.0)
        write(tmp_path / f"stn{seed}", method="stn", seed=seed, valid=stn, test=0.5)
    write(tmp_path / "alone", method="fixed", seed=7)
    write(tmp_path / "fixed", method="fixed", seed=1, valid=0.4, test=3.0)
    table = compare([tmp_path]).split("percent; mean ± standard error")[1]
    # 10, 30 and 0 percent: their mean is 40 / 3, their deviation sqrt(700 / 3), over sqrt(3).
    assert cells(table, "mnist")["STN"] == "+13.3 ± 8.8 (-50.0 ± 0.0), n=3"
    assert cells(table, "mnist")["fixed"] == "+100.0 (+200.0), n=1"  # the seed without a partner does not count


def test_no_differences_without_a_common_seed(tmp_path):
    write(tmp_path / "a", seed=0)
    write(tmp_path / "b", method="stn", seed=1)
    assert "same seed" not in compare([tmp_path])


def test_the_most_accurate_is_bold(tmp_path):
    for method, accuracy in (("stn", 0.7), ("delta_stn", 0.9)):
        measures = {"loss": 0.5, "accuracy": accuracy}
        folder = write(tmp_path / method, "alexnet", method, valid=0.5)
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        (folder / "summary.json").write_text(json.dumps({**summary, "valid": measures, "test": measures}))
    accuracies = compare([tmp_path]).split("accuracy", 1)[1]
    assert cells(accuracies, "alexnet")["Δ-STN"] == "**90.00** (**90.00**)"
    assert cells(accuracies, "alexnet")["STN"] == "70.00 (70.00)"
    assert cells(accuracies, "paper, tab:acc")["STN"] == "83.96 (83.38)"


def test_text_has_perplexities(tmp_path):
    folder = write(tmp_path / "a", "ptb")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    measures = {"loss": math.log(70), "perplexity": 70.0}
    (folder / "summary.json").write_text(json.dumps({**summary, "valid": measures, "test": measures}))
    report = compare([tmp_path])
    assert cells(report, "ptb")["Δ-STN"] == "70.00 (70.00)"
    assert "accuracy" not in report


def test_other_kinds_of_runs_have_rows_of_their_own(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", settings={"only_input": True})
    write(tmp_path / "c", data="generated")
    report = compare([tmp_path])
    assert cells(report, "mnist, generated data")["Δ-STN"]
    assert cells(report, "paper, tab:dropout-rate")["fixed, noise"] == "0.057 (0.059)"
    rows = [line.split("|")[1].strip() for line in report.split("Validation")[0].splitlines() if line[:1] == "|"][2:]
    assert rows == [
        "mnist",
        "paper, tab:classification",
        "mnist, input dropout only",
        "paper, tab:dropout-rate",
        "mnist, generated data",
    ]


FOREIGN = [
    *(("task", 5), ("method", None), ("seed", "0"), ("seed", True), ("data", []), ("init", []), ("settings", "text")),
    *(
        ("epochs", "2"),
        ("epochs", 10**400),
        ("seconds", None),
        ("valid", 0.5),
        ("valid", {}),
        ("test", {"loss": "low"}),
    ),
    *(("test", {"loss": 0.5, "accuracy": None}), ("processor_share", "all")),
]


def test_runs_that_cannot_be_used_are_named(tmp_path):
    write(tmp_path / "good")
    (write(tmp_path / "unfinished") / "summary.json").unlink()
    (write(tmp_path / "damaged") / "summary.json").write_text('{"task": "mn')
    (write(tmp_path / "partial") / "summary.json").write_text('{"task": "mnist"}')
    (write(tmp_path / "listed") / "summary.json").write_text("[]")
    (write(tmp_path / "no_history") / "history.csv").unlink()
    (write(tmp_path / "half_history") / "history.csv").write_text("round,seconds,validation_loss\n1,x,0.5\n")
    write(tmp_path / "interrupted", stopped="interrupted")
    write(tmp_path / "infinite", valid=math.inf)
    for index, (part, value) in enumerate(FOREIGN):
        folder = write(tmp_path / f"foreign{index}")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        (folder / "summary.json").write_text(json.dumps({**summary, part: value}))
    report = compare([tmp_path])
    for index, (part, _) in enumerate(FOREIGN):
        assert f"foreign{index}: summary.json is damaged: " in report and f"{part!r} is" in report
    for name, reason in {
        "unfinished": "it has no summary.json, so the run is not finished",
        "damaged": "summary.json is damaged",
        "partial": "'stopped' is missing in summary.json",
        "listed": "summary.json is damaged",
        "no_history": "history.csv is missing or damaged",
        "half_history": "history.csv is missing or damaged",
        "interrupted": "it was interrupted; the same command goes on with it",
        "infinite": "its losses are not finite",
    }.items():
        assert f"warning: skipped {tmp_path / name}: {reason}" in report
    assert report.count("warning") == 8 + len(FOREIGN)
    assert cells(report, "mnist")["Δ-STN"] == "0.0500 (0.0400)"


def rows_of(report):
    """The first column of the first table."""
    table = report.split("\n\n")[1]
    return [line.split("|")[1].strip() for line in table.splitlines()][2:]


def test_runs_with_other_settings_have_rows_of_their_own(tmp_path):
    write(tmp_path / "a", valid=0.5, settings={"width": 400.0, "epochs": 100})
    write(tmp_path / "b", valid=0.6, settings={"width": 400.0, "epochs": 100}, seed=1)
    write(tmp_path / "c", valid=0.7, settings={"width": 1200.0, "epochs": 300})
    write(tmp_path / "d", valid=0.8, method="stn", settings={"width": 1200.0, "epochs": 300}, init={"dropout": 0.3})
    report = compare([tmp_path], out=tmp_path / "table.md")
    first, second, third = (
        f"mnist, {text}"
        for text in (
            *("width 400, init dropout default, 100 epochs", "width 1200, init dropout default, 300 epochs"),
            "width 1200, init dropout 0.3, 300 epochs",
        )
    )
    assert rows_of(report) == [first, second, third, "paper, tab:classification"]
    assert cells(report, first)["Δ-STN"].endswith("n=2")
    assert cells(report, second)["Δ-STN"] == "0.7000 (0.0400)"
    assert cells(report, third)["STN"] == "0.8000 (0.0400)"
    found = read_csv(tmp_path / "table.csv")
    assert [row["task"] for row in found if row["source"] == "measured"] == [first, second, third]
    assert sum(row["source"] == "tab:classification" for row in found) == len(PAPER["mnist"][1])


def test_what_a_method_does_not_look_at_sets_nothing_apart(tmp_path):
    """A search has epochs of its own; plain training has no entropy, and an STN has another one than Δ-STN."""
    write(tmp_path / "a", settings={"epochs": 100, "entropy": 1e-4})
    write(tmp_path / "b", method="stn", settings={"epochs": 100, "entropy": 1e-3})
    write(tmp_path / "c", method="random_search", settings={"epochs": 30, "entropy": 1.0, "warmup": 9})
    write(tmp_path / "d", method="fixed", settings={"epochs": 100, "entropy": 2.0})
    report = compare([tmp_path])
    assert rows_of(report) == ["mnist", "paper, tab:classification"]
    assert all(cells(report, "mnist")[column] for column in ("RS", "STN", "Δ-STN", "fixed"))
    a, b = tmp_path / "a", tmp_path / "b"
    assert f"note: mnist, between methods: entropy is 0.001 in {b}, 0.0001 in {a}" in report
    assert "warmup" not in report
    assert "epochs is" not in report


def test_a_search_stands_in_every_row_of_its_kind(tmp_path):
    write(tmp_path / "a", settings={"epochs": 100})
    write(tmp_path / "b", settings={"epochs": 300})
    write(tmp_path / "c", method="random_search", settings={"epochs": 30})
    write(tmp_path / "d", method="random_search", settings={"epochs": 30, "width": 9})
    report = compare([tmp_path])
    rows = [f"mnist, {text}" for text in ("width 8, 100 epochs", "width 8, 300 epochs", "width 9")]
    assert rows_of(report) == [*rows, "paper, tab:classification"]
    assert all(cells(report, row)["RS"] for row in rows)
    assert f"note: {tmp_path / 'c'} stands in 2 rows" in report
    # Trials of another length are another search.
    write(tmp_path / "e", method="random_search", seed=1, settings={"epochs": 50})
    assert "mnist, width 8, 30 epochs per trial" in " ".join(
        rows_of(compare([tmp_path / "c", tmp_path / "d", tmp_path / "e"]))
    )


def test_unfair_comparisons_are_named(tmp_path):
    write(tmp_path / "b", seed=1)
    write(tmp_path / "c", seed=1)
    write(tmp_path / "d", method="stn", stopped="diverged")
    report = compare([tmp_path])
    b, c, d = (tmp_path / name for name in "bcd")
    assert f"warning: mnist, delta_stn: seed 1 twice: {b}, {c}" in report
    assert f"note: {d} was stopped (diverged) after 2.0 epochs" in report


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    write(tmp_path / "deep" / "a")
    results, _ = load([tmp_path, tmp_path / "deep", tmp_path / "deep" / "a", tmp_path / "deep" / "a" / "summary.json"])
    assert len(results) == 1


def test_bad_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: give folders of runs"):
        compare([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no finished run in"):
        compare([tmp_path])
    (write(tmp_path / "a") / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"(?s)no finished run in.*warning: skipped"):
        compare([tmp_path])
    with pytest.raises(ValueError, match="name the text file"):
        compare([tmp_path], out=tmp_path / "table.csv")


@pytest.mark.parametrize(("shares", "panels"), [((0.99, 0.95), 2), ((0.99, 0.5), 1), ((0.99, None), 1)])
def test_time_is_drawn_of_runs_with_a_core_of_their_own(tmp_path, monkeypatch, shares, panels):
    pytest.importorskip("matplotlib")
    for seed, share in enumerate(shares):
        write(tmp_path / str(seed), seed=seed, **({} if share is None else {"processor_share": share}))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path: drawn.append(self))
    compare([tmp_path], figure=tmp_path / "figure.png")
    assert len(drawn[0].axes) == panels


def test_the_command_writes_tables_and_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for seed in (0, 1):
        write(tmp_path / "runs" / str(seed), seed=seed, valid=0.1 + 0.2 * seed)
    out, figure = tmp_path / "new" / "table.md", tmp_path / "other" / "curves.png"
    cli.main(["compare", str(tmp_path / "runs"), "--out", str(out), "--figure", str(figure)])
    assert out.read_text(encoding="utf-8") == capsys.readouterr().out
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert not out.with_suffix(".png").exists()
    cli.main(["compare", str(tmp_path / "runs"), "--out", str(out)])
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    html = out.with_suffix(".html").read_text(encoding="utf-8")
    assert "<td>mnist</td>" in html and "<b>0.2000 ± 0.1414</b>" not in html and "0.2000 ± 0.1414" in html
    assert "data:image/png;base64" in html and "**" not in html and "http" not in html
    first, *paper = read_csv(out.with_suffix(".csv"))
    assert (first["method"], first["source"], first["n"]) == ("delta_stn", "measured", "2")
    assert [float(first[name]) for name in ("valid", "valid_std", "test", "seconds")] == pytest.approx([
        0.2,
        0.1 * 2**0.5,
        0.04,
        20.5,
    ])
    assert {row["method"]: float(row["test"]) for row in paper} == {
        method: test for method, (_, test) in PAPER["mnist"][1].items()
    }


def test_curves_are_the_best_so_far_over_epochs_and_time(tmp_path):
    write(tmp_path / "a", valid=0.5)
    ((result,), _) = load([tmp_path])
    (result.folder / "history.csv").write_text("round,seconds,validation_loss\n2,1,0.9\n5,4,\n5,5,0.5\n10,8,0.7\n")
    x, y = curve(result, "epoch")
    np.testing.assert_allclose(x, [0.4, 1.0, 2.0])
    np.testing.assert_allclose(y, [0.9, 0.5, 0.5])
    np.testing.assert_allclose(curve(result, "seconds")[0], [1, 5, 8])
    (result.folder / "history.csv").write_text("trial,epoch,seconds,validation_loss\n0,3,1,0.9\n1,6,2,1.5\n")
    np.testing.assert_allclose(curve(result, "epoch"), [[3, 6], [0.9, 0.9]])


steps = st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), min_size=1, max_size=6, unique_by=lambda pair: pair[0])


@given(st.lists(steps, min_size=1, max_size=4))
def test_the_mean_of_step_functions(functions):
    """Against a look at every whole number."""
    curves = [tuple(np.array(column, dtype=float) for column in zip(*sorted(f), strict=True)) for f in functions]
    x, y = average(curves)
    common = [t for t in range(21) if all(c[0][0] <= t <= c[0][-1] for c in curves)]
    assert set(x) == {t for t in common if any(t in c[0] for c in curves)}
    for t, mean in zip(x, y, strict=True):
        values = [max((a, b) for a, b in f if a <= t)[1] for f in functions]
        assert mean == pytest.approx(sum(values) / len(values))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5))
@example([-0.0])
def test_mean_and_deviation(values):
    mean, deviation = mean_and_deviation(values)
    assert mean == pytest.approx(math.fsum(values) / len(values), abs=1e-9)
    if len(values) == 1:
        assert math.isnan(deviation)
        assert re.fullmatch(r"-?\d+\.\d\d", shown(values, 2))
        assert float(shown(values, 2)) == round(values[0], 2)  # a zero may lose its sign
    else:
        squares = math.fsum((value - mean) ** 2 for value in values)
        assert deviation == pytest.approx((squares / (len(values) - 1)) ** 0.5, abs=1e-6)


def test_tables_of_text(tmp_path):
    assert markdown(["a", "b"], [["1", "long"]]) == "| a | b    |\n|---|------|\n| 1 | long |"
    write_csv(tmp_path / "t.csv", [{"a": 1}, {"b": 2}])
    with (tmp_path / "t.csv").open() as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", ""], ["", "2"]]


def test_the_paper_numbers_are_those_of_the_paper():
    """Its rows have their best values in the last column, as its caption says."""
    for source, pairs in PAPER.values():
        if source == "tab:classification":
            for column in (0, 1):
                assert min(pair[column] for pair in pairs.values()) == pairs["delta_stn_paper"][column]


def test_runs_without_a_loss_or_without_an_accuracy_are_compared(tmp_path):
    write(tmp_path / "a", valid=0.0, test=0.0)
    write(tmp_path / "b", method="fixed", valid=0.1)
    folder = write(tmp_path / "c", seed=1)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    (folder / "summary.json").write_text(json.dumps({**summary, "test": {"loss": 0.5}}))
    assert "warning" not in compare([tmp_path])
