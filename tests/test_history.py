"""The record of a run: columns, files, frames and figures."""

import csv
import math
import time

import numpy as np
import pandas as pd
import pytest
import torch
from examples import make_problem, solve

import bilevel
from bilevel import History


@pytest.fixture(scope="module")
def solution():
    """A run with warm-up, several kinds of hyperparameters, a learned scale and some validation passes."""
    hyper = {
        "decay": bilevel.positive(0.01),
        "rates": bilevel.interval(0, 1, [0.25, 0.5]),
        "holes": bilevel.integer(0, 4, 2),
        "many": bilevel.real(torch.zeros(4, 5)),
    }
    return solve(make_problem(hyper=hyper), method=bilevel.DeltaSTN(entropy=1e-3), steps=6, warmup=2, evaluate_every=3)


def test_columns_come_losses_first_then_hyperparameters_and_scales(solution):
    hyper = ["decay", "rates[0]", "rates[1]", "holes", "many.mean", "many.min", "many.max"]
    assert solution.history.columns == [
        "round",
        "seconds",
        "inner_loss",
        "outer_loss",
        "validation_loss",
        "hypergradient_norm",
        *hyper,
        *[f"scale.{name}" for name in hyper],
        *[f"signal.{name}" for name in hyper],
    ]


def test_there_is_one_row_per_outer_step_and_per_round_of_the_warm_up():
    history = solve(steps=4, warmup=1, outer_steps=3).history
    assert history["round"].tolist() == [1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_seconds_are_those_since_the_start(monkeypatch):
    """A day passes after each round; no machine takes an hour for the rounds themselves."""
    real, days = time.perf_counter, [0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + days[0] * 86400)

    def pass_the_day(event):
        days[0] = event.index

    history = solve(steps=4, callbacks=[pass_the_day]).history
    np.testing.assert_allclose(history["seconds"], np.arange(4) * 86400, rtol=0, atol=3600)


def test_missing_entries_are_nan(solution):
    history = solution.history
    assert len(history) == 6
    assert np.isnan(history["outer_loss"]).tolist() == [True] * 2 + [False] * 4
    assert np.isnan(history["validation_loss"]).tolist() == [True, True, False] * 2
    assert np.isfinite(history["inner_loss"]).all()


def test_the_last_row_holds_the_final_hyperparameters_in_natural_units(solution):
    last = solution.history.rows[-1]
    assert last["decay"] == solution.hyper["decay"].item()
    assert [last["rates[0]"], last["rates[1]"]] == solution.hyper["rates"].tolist()
    assert last["holes"] == solution.hyper["holes"].item()
    assert last["many.max"] == solution.hyper["many"].max().item()
    assert solution.history["scale.decay"][-1] == solution.solver.response.scale()[0].item()


def test_csv_brings_every_number_back(solution, tmp_path):
    solution.history.to_csv(tmp_path / "history.csv")
    with (tmp_path / "history.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for column in solution.history.columns:
        read = [float(row[column]) if row[column] else math.nan for row in rows]
        np.testing.assert_array_equal(read, solution.history[column])


def test_pandas_has_the_same_columns_and_numbers(solution, tmp_path):
    frame = solution.history.to_pandas()
    assert list(frame) == solution.history.columns
    np.testing.assert_array_equal(frame["outer_loss"], solution.history["outer_loss"])
    solution.history.to_csv(tmp_path / "history.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "history.csv"), frame, check_dtype=False)


def test_rows_are_copies():
    row = {"round": 1.0}
    history = History()
    history.append(row)
    row["round"] = 2.0
    assert history["round"].tolist() == [1.0]


def test_the_signal_is_that_of_every_entry_from_the_first_outer_step_on(solution):
    assert np.isnan(solution.history["signal.rates[1]"]).tolist() == [True] * 2 + [False] * 4
    assert abs(solution.history["signal.decay"][2]) == pytest.approx(1)  # one hypergradient has its own size


def test_plot_has_panels_for_losses_every_hyperparameter_and_the_signal(solution, tmp_path):
    figure = solution.plot(tmp_path / "schedules.png")
    axes = {axis.get_title(loc="left"): axis for axis in figure.axes}
    assert list(axes) == ["loss", "decay", "rates", "holes", "many", "signal to noise of the hypergradient"]
    decay = axes["decay"].lines[0]
    np.testing.assert_array_equal(decay.get_xdata(), solution.history["round"])
    np.testing.assert_array_equal(decay.get_ydata(), solution.history["decay"])
    validation = axes["loss"].lines[2]
    assert validation.get_label() == "validation loss"
    assert validation.get_xdata().tolist() == [3, 6]
    picture = (tmp_path / "schedules.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000
