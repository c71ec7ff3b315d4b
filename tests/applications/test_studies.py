"""Studies: the right runs, made once; their tables and figures."""

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest

import bilevel
from applications import __main__ as cli
from applications import data, images, studies
from applications.studies import STUDIES, Outcome, run_study, table
from applications.tables import read_csv
from applications.task import as_usual

pytest.importorskip("matplotlib")
TASKS = {task.name: task for task in images.TASKS}
TINY = {"epochs": 1, "warmup": 0, "batch_size": 8, "limit": 16, "inner_steps": 1}


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(data, "synthetic_images", partial(data.synthetic_images, train=40, test=10))


@pytest.fixture
def recorded(monkeypatch):
    """Runs that are not made: they leave a summary with a loss that follows from the settings."""
    made = []

    def fake(task, method, settings, *, out, data, seed, device, init, progress):
        made.append((task.name, method, settings, dict(init), seed))
        if settings.scale == 66:
            return {"stopped": "interrupted"}
        if settings.scale > 100:
            raise bilevel.DivergenceError("the inner loss became nan")
        out.mkdir(parents=True, exist_ok=True)
        described = studies.describe(task, method, settings, data=data, seed=seed, init=init)
        loss = {"loss": settings.scale + seed + settings.inner_steps / 100}
        summary = {"stopped": "epochs", "epochs": 2.0, "seconds": 1.0, "valid": loss, "test": loss, "hyper": {}}
        (out / "summary.json").write_text(json.dumps(described | summary))
        (out / "history.csv").write_text("round,dropout[0]\n1,0.1\n4,0.2\n")
        return described | summary

    monkeypatch.setattr(studies, "run", fake)
    return made


def settings(task, method="delta_stn", **changes):
    return dataclasses.replace(as_usual(TASKS[task].presets["quick"], method), **changes)


def make(name, out, task=None, **options):
    task = TASKS[task or STUDIES[name].tasks[0]]
    return run_study(STUDIES[name], task, task.presets["quick"], out=out, data=None, progress=False, **options)


def test_initial_tunes_the_input_dropout_alone_with_a_fixed_scale(recorded, tmp_path):
    make("initial", tmp_path, seeds=[0, 1])
    rates = (0.05, 0.3, 0.6, 0.9)
    wanted = {name: settings("mnist", name, only_input=True, scale=1.0, entropy=None) for name in ("stn", "delta_stn")}
    assert recorded == [
        ("mnist", method, wanted[method], {"dropout": rate}, seed)
        for rate in rates
        for method in ("stn", "delta_stn")
        for seed in (0, 1)
    ]


def test_scale_stays_fixed(recorded, tmp_path):
    make("scale", tmp_path, "alexnet", values=["0.5", "2"], methods=["delta_stn"])
    assert [run[2] for run in recorded] == [settings("alexnet", scale=s, entropy=None) for s in (0.5, 2.0)]
    assert [run[3] for run in recorded] == [{}, {}]


def test_intervals_are_pairs(recorded, tmp_path):
    make("intervals", tmp_path, values=["5x1", "10x2"])
    assert [run[2] for run in recorded] == [
        settings("fashion", inner_steps=5, outer_steps=1),
        settings("fashion", inner_steps=10, outer_steps=2),
    ]
    assert {run[1] for run in recorded} == {"delta_stn"}


@pytest.mark.parametrize("name", STUDIES)
def test_the_defaults_of_every_study_work(name, recorded, tmp_path):
    text = make(name, tmp_path)
    assert len(recorded) == len(STUDIES[name].values) * len(STUDIES[name].methods)
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == text + "\n"
    assert len(read_csv(tmp_path / "results.csv")) == len(recorded)


def test_what_was_made_is_not_made_again(recorded, tmp_path):
    study = partial(make, "scale", tmp_path, methods=["stn", "delta_stn"])
    study(values=["1"])
    assert len(recorded) == 2
    first = study(values=["1", "2"])
    assert len(recorded) == 4
    assert study(values=["1", "2"]) == first
    assert len(recorded) == 4
    (tmp_path / "fashion-stn-2-0" / "summary.json").write_text("{")
    study(values=["1", "2"])
    assert len(recorded) == 5
    path = tmp_path / "fashion-stn-1-0" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"stopped": "time"}))
    study(values=["1", "2"])
    assert len(recorded) == 6
    study(values=["1"], seeds=[1])
    assert len(recorded) == 8


def test_a_run_that_diverges_is_counted_and_the_others_are_made(recorded, tmp_path, capsys):
    text = make("scale", tmp_path, values=["1000", "1"], seeds=[0, 1], methods=["stn", "delta_stn"])
    assert len(recorded) == 8
    assert "2 of 2 diverged" in text
    assert "the inner loss became nan" in capsys.readouterr().out
    assert [row["stopped"] for row in read_csv(tmp_path / "results.csv")] == ["diverged"] * 4 + ["epochs"] * 4


def test_an_interrupt_ends_the_study(recorded, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="interrupted; the same command goes on"):
        cli.main(["study", "scale", "--values", "1", "66", "2", "--methods", "stn", "--out", str(tmp_path), "--quiet"])
    assert [run[2].scale for run in recorded] == [1, 66]


def test_the_table_has_means_over_seeds():
    def outcome(value, seed, loss):
        summary = {"valid": {"loss": loss}, "test": {"loss": 2 * loss}} if loss else {}
        return Outcome(value, "stn", seed, None, summary)

    text = table([outcome("1", 0, 0.1), outcome("1", 1, 0.3), outcome("2", 0, 0.5), outcome("2", 1, None)])
    assert "| 1     | 0.2000 ± 0.1414 (0.4000 ± 0.2828)" in text
    assert "| 2     | 0.5000 (1.0000) 1 of 2 diverged" in text
    assert text.startswith("Best validation (test) loss, 2 seeds.")
    assert math.isnan(outcome("2", 1, None).loss)


@pytest.fixture
def axes(monkeypatch):
    drawn, genuine = [], bilevel.plotting.figure

    def spy(*args, **options):
        figure, axes = genuine(*args, **options)
        drawn.extend(axes.flat)
        return figure, axes

    monkeypatch.setattr(bilevel.plotting, "figure", spy)
    return drawn


def test_the_schedules_of_all_runs_are_drawn(recorded, axes, tmp_path):
    make("initial", tmp_path, values=["0.1", "0.5"], seeds=[0, 1])
    assert [axis.get_title(loc="left") for axis in axes] == ["stn", "delta_stn"]
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == ["0.1", "0.5"]
    for axis in axes:
        colors = [line.get_color() for line in axis.lines]
        assert colors[0] == colors[1] != colors[2] == colors[3]
        assert all(list(line.get_xdata()) == [0.5, 2.0] for line in axis.lines)
        assert all(list(line.get_ydata()) == [0.1, 0.2] for line in axis.lines)


def test_the_losses_are_drawn_over_the_scale(recorded, axes, tmp_path):
    make("scale", tmp_path, values=["2", "1", "1000"], methods=["stn"], seeds=[0, 1])
    points, means = axes[0].lines
    assert points.get_color() == means.get_color() == bilevel.plotting.color("stn")
    assert list(points.get_xdata()) == [2, 2, 1, 1]
    assert list(means.get_xdata()) == [1, 2]
    assert list(means.get_ydata()) == pytest.approx([1.55, 2.55])


def test_the_losses_are_drawn_over_both_intervals(recorded, axes, tmp_path):
    make("intervals", tmp_path, values=["10x1", "5x1", "5x2"], seeds=[0, 1])
    (image,) = axes[0].get_images()
    np.testing.assert_allclose(image.get_array().filled(np.nan), [[1.55, 1.6], [1.55, np.nan]])
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["5", "10"]
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("initial", {"task": "fashion"}, "--task must be one of mnist for study initial, got fashion"),
        ("initial", {"values": ["0.95"]}, "'0.95' is not an input dropout between 0 and 0.95"),
        ("initial", {"values": ["0.5", "x"]}, "--values of study initial: 'x' is not"),
        ("scale", {"values": ["0"]}, "'0' is not a positive number"),
        ("intervals", {"values": ["5"]}, "'5' is not two whole numbers, such as 5x1"),
        ("intervals", {"values": ["0x1"]}, "'0x1' is not two whole numbers"),
        ("scale", {"methods": ["sgd"]}, "fashion has no method 'sgd'"),
        ("scale", {"values": ["1", "1"]}, "--values: something is given twice in 1 1"),
        ("scale", {"seeds": [2, 2]}, "--seeds: something is given twice in 2 2"),
        ("scale", {"methods": ["random_search"]}, "--methods: a search is no method of a study"),
    ],
)
def test_bad_options_start_nothing(name, options, message, recorded, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(name, tmp_path / "out", **options)
    assert not recorded
    assert not (tmp_path / "out").exists()


def test_the_command_with_real_runs(tmp_path, capsys, monkeypatch):
    quick = dataclasses.replace(TASKS["mnist"].presets["quick"], **TINY, width=8)
    monkeypatch.setitem(TASKS["mnist"].presets, "quick", quick)
    words = ["study", "initial", "--values", "0.1", "0.6", "--epochs", "2", "--out", str(tmp_path), "--quiet"]
    cli.main(words)
    printed = capsys.readouterr().out
    assert "small generated data" in printed
    assert f"see {tmp_path}" in printed
    rows = read_csv(tmp_path / "results.csv")
    assert [(row["value"], row["method"]) for row in rows] == [
        (value, method) for value in ("0.1", "0.6") for method in ("stn", "delta_stn")
    ]
    assert all(row["epochs"] == "2.0" for row in rows)
    finals = [json.loads(row["final dropout"])[0] for row in rows]
    assert max(finals[:2]) < 0.35 < min(finals[2:])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    cli.main(words)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")} == before


def test_a_preset_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit, match="error: --preset must be one of paper, quick, width400 for mnist, got slow"):
        cli.main(["study", "initial", "--preset", "slow", "--out", str(tmp_path)])
