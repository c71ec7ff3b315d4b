"""Loggers write what the history has; each test of a library needs it installed."""

import csv
import sys

import pytest
import torch

import bilevel
from bilevel import loggers


def solve(*callbacks, steps=4):
    problem = bilevel.Problem(
        {"w": torch.zeros(2)},
        inner_loss=lambda model, hyper, batch: ((model.params["w"] - hyper["target"]) ** 2).sum(),
        outer_loss=lambda model, hyper, batch: ((model.params["w"] - 3) ** 2).sum(),
        hyper={"target": bilevel.real([0.0, 1.0])},
    )
    options = {"evaluate_every": 2, "warmup": 1, "progress": False}
    return bilevel.solve(problem, steps=steps, callbacks=callbacks, **options)


def test_a_csv_file_is_the_history(tmp_path):
    history = solve(loggers.CSV(tmp_path / "run.csv")).history
    with (tmp_path / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert set(rows[0]) == set(history.columns)
    for row, expected in zip(rows, history.rows, strict=True):
        assert {name: float(value) for name, value in row.items() if value} == pytest.approx(expected)
    assert rows[0]["outer_loss"] == ""


def test_rows_can_be_left_out_but_not_those_with_a_validation_loss(tmp_path):
    solve(loggers.CSV(tmp_path / "run.csv", every=3))
    with (tmp_path / "run.csv").open() as file:
        assert [float(row["round"]) for row in csv.DictReader(file)] == [2, 3, 4]
    with pytest.raises(ValueError, match="every must be at least 1"):
        loggers.CSV(tmp_path / "run.csv", every=0)


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (lambda path: loggers.TensorBoard(path), "tensorboard"),
        (lambda path: loggers.WandB(), "wandb"),
        (lambda path: loggers.MLflow(), "mlflow"),
    ],
)
def test_a_missing_library_is_named(make, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"needs {module}: pip install {module}"):
        make(tmp_path)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = loggers.TensorBoard(tmp_path)
    history = solve(logger).history
    logger.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert {"hyper/target[0]", "hyper/target[1]", "validation_loss", "signal.target[0]"} <= set(found.Tags()["scalars"])
    values = [(event.step, event.value) for event in found.Scalars("hyper/target[0]")]
    assert values == [(i + 1, pytest.approx(value)) for i, value in enumerate(history["target[0]"])]


@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = loggers.WandB(mode="offline", dir=str(tmp_path))
    history = solve(logger).history
    assert logger._run.summary["target[0]"] == pytest.approx(history["target[0]"][-1])
    logger.close()
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    logger = loggers.MLflow()
    run = mlflow.active_run().info.run_id
    history = solve(logger).history
    logger.close()
    assert mlflow.active_run() is None
    metrics = mlflow.tracking.MlflowClient().get_metric_history(run, "target.0.")
    assert [metric.value for metric in metrics] == pytest.approx(list(history["target[0]"]))
