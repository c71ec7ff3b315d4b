"""Linear models: exact optima against plain numerical ones, and a short run of every problem with every method."""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bilevel
from applications import linear, linear_model, optima, trajectories
from applications.__main__ import main
from applications.optima import ClosedForm, Split

SEEDS = st.integers(0, 10**6)
CASES = [("ridge", False), ("ridge", True), ("input_dropout", False), ("linear_network", False)]


def make_split(seed, count=24, features=3, noise=1.0):
    """Not standardised, so that the features differ in scale."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(count, features)) * np.exp(random.normal(size=features))
    targets = inputs @ random.normal(size=features) + noise * random.normal(size=count)
    return Split(
        "made", seed, (inputs[: count // 2], targets[: count // 2]), (inputs[count // 2 :], targets[count // 2 :])
    )


def rate_of(hyper):
    return 0.95 / (1 + np.exp(-hyper))


def masked_loss(split, weights, rate):
    """The mean over all masks of the training loss, by enumeration."""
    inputs, targets = split.train
    total = 0.0
    for row, target in zip(inputs, targets, strict=True):
        for kept in product([0, 1], repeat=len(row)):
            probability = np.prod([1 - rate if bit else rate for bit in kept])
            total += probability * 0.5 * ((row * kept / (1 - rate)) @ weights - target) ** 2
    return total / len(inputs)


def training_loss(split, problem, undivided, hyper):
    """As the paper writes it."""
    inputs, targets = split.train
    count = len(inputs)
    if problem == "input_dropout":
        return lambda weights: masked_loss(split, weights, rate_of(hyper))
    penalty = np.exp(hyper) / (2 if undivided else 2 * count)
    return lambda weights: ((inputs @ weights - targets) ** 2).sum() / (2 * count) + penalty * weights @ weights


def minimise(loss, size):
    """The minimiser of a quadratic from its values alone: differences are exact but for rounding."""
    zero, unit = loss(np.zeros(size)), np.eye(size)
    plus = np.array([loss(e) for e in unit])
    minus = np.array([loss(-e) for e in unit])
    gradient = (plus - minus) / 2
    hessian = np.array([[loss(a + b) - loss(a) - loss(b) + zero for b in unit] for a in unit])
    return np.linalg.solve(hessian, -gradient)


@pytest.mark.parametrize(("problem", "undivided"), CASES)
@given(seed=SEEDS, hyper=st.floats(-3.0, 3.0))
def test_the_exact_solution_minimises_the_training_loss(problem, undivided, seed, hyper):
    """For dropout, its mean over all masks."""
    split = make_split(seed, count=10)
    found = ClosedForm(split, problem, undivided=undivided).weights(hyper)
    expected = minimise(training_loss(split, problem, undivided, hyper), 3)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("problem", "undivided"), CASES)
@given(seed=SEEDS)
def test_no_hyperparameter_is_better_than_the_optimum(problem, undivided, seed):
    """And the derivative of the validation loss, by differences of fourth order, is zero there."""
    split = make_split(seed)
    exact = ClosedForm(split, problem, undivided=undivided)
    best = exact.optimum()

    def loss(hyper):
        weights = minimise(training_loss(split, "ridge", undivided, hyper), 3)
        return 0.5 * np.mean((split.valid[0] @ weights - split.valid[1]) ** 2)

    if problem == "input_dropout":
        loss = exact.loss
    else:
        assert exact.loss(best) == pytest.approx(loss(best), rel=1e-9)
    low, high = exact.bounds
    assert loss(best) <= min(loss(hyper) for hyper in np.linspace(low, high, 57)) * (1 + 1e-12)
    if low + 0.1 < best < high - 0.1:
        near, far = (loss(best + step) - loss(best - step) for step in (0.01, 0.02))
        assert abs(8 * near - far) / (12 * 0.01) < 1e-6 * loss(best)


def test_the_optimum_is_precise():
    """Of one feature, the solution of the normal equation of the validation set; its penalty is then known."""
    x, t = np.array([[1.0], [2.0], [3.0]]), np.array([1.0, 2.5, 3.0])
    split = Split("one", 0, (x, t), (x[:2], np.array([0.5, 1.0])))
    penalty = (x[:, 0] @ t) / 0.5 - x[:, 0] @ x[:, 0]
    assert ClosedForm(split, "ridge").optimum() == pytest.approx(np.log(penalty), abs=1e-12)
    assert ClosedForm(split, "ridge", undivided=True).optimum() == pytest.approx(np.log(penalty / 3), abs=1e-12)
    odds = penalty / (x[:, 0] @ x[:, 0])
    rate = odds / (1 + odds)
    assert rate_of(ClosedForm(split, "input_dropout").optimum()) == pytest.approx(rate, abs=1e-12)


@given(seed=SEEDS, scale=st.floats(0.3, 1.2))
def test_the_limit_is_where_the_hypergradient_of_delta_stn_vanishes(seed, scale):
    """With the moments of a Gaussian in closed form."""
    split = make_split(seed)
    exact = ClosedForm(split, "ridge")
    limit = exact.limit(2.0, scale)
    if not exact.bounds[0] + 0.1 < limit < exact.bounds[1] - 0.1:
        return

    def hypergradient(hyper):
        gram = split.train[0].T @ split.train[0]
        weights = np.linalg.solve(gram + np.exp(hyper) * np.eye(3), split.train[0].T @ split.train[1])
        penalty = np.exp(hyper + scale**2 / 2)
        slope = -np.linalg.solve(gram + penalty * (1 + scale**2) * np.eye(3), penalty * weights)
        return (split.valid[0] @ weights - split.valid[1]) @ (split.valid[0] @ slope)

    assert hypergradient(limit - 1e-6) * hypergradient(limit + 1e-6) <= 0
    direction = np.sign(hypergradient(2.0))
    between = np.linspace(2.0, limit, 20)[:-1]
    assert all(np.sign(hypergradient(hyper)) == direction for hyper in between), "the first zero on the way"


def test_a_small_perturbation_has_the_optimum_as_its_limit():
    exact = ClosedForm(make_split(0), "ridge")
    assert exact.limit(exact.optimum() + 0.5, 1e-4) == pytest.approx(exact.optimum(), abs=1e-6)


@pytest.fixture(scope="module")
def diabetes():
    pytest.importorskip("sklearn")
    return optima.load("diabetes", 0, None)


def test_a_split_is_standardised_by_its_training_part(diabetes):
    assert len(diabetes.train[1]) == 354
    assert len(diabetes.valid[1]) == 88
    assert diabetes.small
    for part in diabetes.train:
        np.testing.assert_allclose(part.mean(0), 0, atol=1e-12)
        np.testing.assert_allclose(part.std(0), 1, atol=1e-12)
    assert abs(diabetes.valid[1].mean()) > 1e-3


def test_uci_files_are_read_without_their_constant_columns(tmp_path):
    (tmp_path / "uci").mkdir()
    inputs = np.random.default_rng(0).normal(size=(20, 3))
    inputs[:, 1] = 0.1
    np.savez(tmp_path / "uci" / "mine.npz", X=inputs, y=inputs[:, 0])
    assert optima.load("mine", 0, tmp_path).train[0].shape == (16, 2)


def evaluate(split, problem, weights, hyper, undivided=False):
    """The inner loss of the application on the whole training set, for a network whose layers multiply to weights."""
    stated = linear_model.make_problem(split, problem, undivided=undivided, seed=0)
    product_of_hidden = torch.eye(len(weights), dtype=torch.float64)
    params = dict(stated.params)
    for name, value in params.items():
        if name != "output.weight":
            product_of_hidden = value @ product_of_hidden
    params["output.weight"] = torch.from_numpy(weights)[None] @ torch.linalg.inv(product_of_hidden)
    model = bilevel.Model(params, lambda x: torch.func.functional_call(stated.module, params, (x,)))
    batch = tuple(torch.from_numpy(part) for part in split.train)
    return stated.inner_loss(model, torch.tensor([hyper], dtype=torch.float64), batch).value.item()


@pytest.mark.parametrize(("problem", "undivided"), [("ridge", False), ("ridge", True), ("linear_network", False)])
def test_the_inner_loss_is_that_of_the_closed_form(problem, undivided):
    """The network of six layers, too, is penalised by the norm of the product of its layers."""
    split, weights = make_split(0), np.array([0.3, -1.0, 2.0])
    found = evaluate(split, problem, weights, 0.7, undivided)
    assert found == pytest.approx(training_loss(split, "ridge", undivided, 0.7)(weights), rel=1e-10)


def test_the_dropout_loss_is_that_of_some_masks():
    """One of the values that the enumeration averages."""
    split, weights, rate = make_split(0), np.array([0.3, -1.0, 2.0]), rate_of(0.7)
    one = Split("one", 0, (split.train[0][:1], split.train[1][:1]), split.valid)
    row, target = one.train[0][0], one.train[1][0]
    values = [0.5 * ((row * kept / (1 - rate)) @ weights - target) ** 2 for kept in product([0, 1], repeat=3)]
    found = {round(evaluate(one, "input_dropout", weights, 0.7), 9) for _ in range(60)}
    assert found <= {round(value, 9) for value in values}
    assert len(found) > 4


@pytest.mark.parametrize("problem", optima.PROBLEMS)
def test_the_start_is_that_of_the_paper(diabetes, problem):
    large = replace(diabetes, valid=(np.zeros((1000, 10)), np.zeros(1000)))
    for split, penalty in ((diabetes, 1.0), (large, 50.0)):
        (hyper,) = linear_model.hyperparameter(split, problem, undivided=False).values()
        assert float(hyper.init) == pytest.approx(0.2 if problem == "input_dropout" else penalty)


def test_the_linear_network_has_five_hidden_layers(diabetes):
    params = linear_model.make_problem(diabetes, "linear_network", undivided=False, seed=0).params
    assert [tuple(value.shape) for value in params.values()] == 5 * [(10, 10)] + [(1, 10)]
    assert linear_model.make_problem(diabetes, "ridge", undivided=False, seed=0).params.keys() == {"output.weight"}
    others = linear_model.make_problem(diabetes, "linear_network", undivided=False, seed=1).params
    assert not torch.equal(params["hidden.0.weight"], others["hidden.0.weight"])


def test_learning_rates_are_those_of_the_weights_and_of_their_response(diabetes, monkeypatch):
    calls = []
    monkeypatch.setattr(bilevel, "solve", lambda *args, **kwargs: calls.append(kwargs) or 1 / 0)
    for rates in (None, [0.3, 0.7]):
        with pytest.raises(ZeroDivisionError):
            linear.tune(diabetes, "ridge", "stn", undivided=False, rounds=20, seed=3, learning_rates=rates)
    weight = [torch.zeros(1, requires_grad=True)]
    found = [[kwargs[f"{name}_optimizer"](weight).defaults["lr"] for name in ("inner", "response")] for kwargs in calls]
    assert found == [[0.05, 0.02], [0.3, 0.7]]


@pytest.mark.parametrize(("method", "small", "large"), [("stn", 10, 100), ("implicit_cg", 354, 354)])
def test_batches_are_those_of_the_paper(diabetes, monkeypatch, method, small, large):
    """Except for the implicit method, which sees the whole training set."""
    calls = []
    monkeypatch.setattr(bilevel, "solve", lambda *args, **kwargs: calls.append((args, kwargs)) or 1 / 0)
    for split in (diabetes, replace(diabetes, valid=(np.zeros((1000, 10)), np.zeros(1000)))):
        with pytest.raises(ZeroDivisionError):
            linear.tune(split, "ridge", method, undivided=False, rounds=20, seed=3)
    assert [args[1].size for args, _ in calls] == [small, large]
    for (_, train, valid), kwargs in calls:
        assert train.shuffle
        assert len(valid) == 1
        assert kwargs["inner_steps"] == 10
        assert kwargs["seed"] == 3


@pytest.mark.parametrize("method", ["delta_stn", "implicit_cg", "unrolled"])
def test_an_undivided_penalty_is_only_another_unit_of_the_hyperparameter(diabetes, method):
    """λ is shifted by log n, and so is every trajectory of a method that knows differences of λ only."""
    divided, undivided = (
        linear.tune(diabetes, "ridge", method, undivided=flag, rounds=14, seed=0).values for flag in (False, True)
    )
    np.testing.assert_allclose(divided, undivided * len(diabetes.train[0]), rtol=1e-6)
    assert np.ptp(divided) > 0.05


def test_the_stn_depends_on_that_unit(diabetes):
    """A large |λ| also asks for small steps of its response: with those of the others its weights explode."""
    rates = (0.05, 0.0005)
    divided, undivided = (
        linear.tune(diabetes, "ridge", "stn", undivided=flag, rounds=14, seed=0, learning_rates=rates).values
        for flag in (False, True)
    )
    assert abs(undivided[-1] * len(diabetes.train[0]) / divided[-1] - 1) > 1e-3
    assert linear.tune(diabetes, "ridge", "stn", undivided=True, rounds=14, seed=0).diverged


def test_centered_and_delta_are_one_method_on_linear_regression(diabetes):
    centered, delta = (
        linear.tune(diabetes, "ridge", method, undivided=False, rounds=14, seed=0).values
        for method in ("centered_stn", "delta_stn_paper")
    )
    np.testing.assert_allclose(centered, delta, rtol=1e-9)


def test_the_linearisation_matters_where_layers_are_multiplied(diabetes):
    centered, delta = (
        linear.tune(diabetes, "linear_network", method, undivided=False, rounds=12, seed=0).values
        for method in ("centered_stn", "delta_stn_paper")
    )
    assert abs(centered[-1] / delta[-1] - 1) > 1e-6


@pytest.mark.parametrize("problem", ["ridge", "linear_network"])
def test_implicit_differentiation_goes_to_the_optimum(problem):
    pytest.importorskip("sklearn")
    split = optima.load("diabetes", 3, None)
    optimum = ClosedForm(split, problem).optimum()
    run = linear.tune(split, problem, "implicit_cg", undivided=False, rounds=50, seed=0, start=optimum + 1.5)
    assert np.log(run.values[-1]) == pytest.approx(optimum, abs=0.25)


@pytest.mark.parametrize(
    ("problem", "method"),
    [
        (problem, method)
        for problem, method in product(optima.PROBLEMS, linear.METHODS)
        if not (problem == "input_dropout" and method in linear.DIFFERENTIATING)
    ],
)
def test_every_method_runs(diabetes, problem, method):
    run = linear.tune(diabetes, problem, method, undivided=False, rounds=12, seed=0)
    start = 0.2 if problem == "input_dropout" else 1.0
    warm = 1 if method == "delta_stn" else 10  # a tenth of the rounds by default, 100 inner steps in the paper
    assert run.values[:warm] == pytest.approx(start)
    assert not np.isclose(run.values[warm:], start).any()
    assert not run.diverged


@pytest.mark.parametrize("method", linear.DIFFERENTIATING)
def test_a_mask_has_no_derivative(diabetes, method):
    with pytest.raises(ValueError, match="rate"):
        linear.tune(diabetes, "input_dropout", method, undivided=False, rounds=11, seed=0)


def test_a_divergence_is_reported_and_not_hidden(diabetes, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(linear.LEARNING_RATES, "ridge", (1e3, 1e3))
    main(["linear", "--methods", "stn", "--seeds", "2", "--rounds", "300", "--out", str(tmp_path)])
    assert "2 of 2" in capsys.readouterr().out
    assert "nan" in (tmp_path / "linear_ridge.csv").read_text(encoding="utf-8")


def test_ctrl_c_ends_the_command(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(bilevel, "solve", lambda *args, **kwargs: SimpleNamespace(history=None, stopped="interrupted"))
    with pytest.raises(SystemExit, match=r"interrupted; .* holds the splits that were done"):
        main(["linear", "--out", str(tmp_path)])


@pytest.mark.parametrize("lost", [True, False])
def test_weights_that_grow_without_bounds_have_diverged(diabetes, monkeypatch, lost):
    """Though they are finite: from the round in which the loss is ten times that of the prediction 0."""
    worst = 10 * 0.5 * np.mean(diabetes.valid[1] ** 2)
    nan, history = np.nan, bilevel.History()
    for index, loss in enumerate((nan, 0.5 * worst, 1.1 * worst, 1e100)):
        row = {"penalty": 1.0 + index, "outer_loss": loss}
        history.append(row | ({"validation_loss": 1e100 if lost else 0.9 * worst} if index == 3 else {}))
    monkeypatch.setattr(bilevel, "solve", lambda *args, **kwargs: SimpleNamespace(history=history, stopped="steps"))
    run = linear.tune(diabetes, "ridge", "stn", undivided=False, rounds=4, seed=0)
    assert run.diverged == lost
    np.testing.assert_array_equal(run.values, [1.0, 2.0, nan, nan] if lost else [1.0, 2.0, 3.0, 4.0])


def test_a_divergence_in_the_last_round_counts(diabetes, monkeypatch):
    """The weights may be lost when every value of the hyperparameter is there."""

    def solve(*args, **kwargs):
        error = bilevel.DivergenceError("at the end")
        error.solution = SimpleNamespace(history={"penalty": [1.0, 2.0]}, stopped="diverged")
        raise error

    monkeypatch.setattr(bilevel, "solve", solve)
    assert linear.tune(diabetes, "ridge", "stn", undivided=False, rounds=2, seed=0).diverged


def test_the_command_writes_a_table_values_and_a_figure(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    drawn = []
    monkeypatch.setattr(linear, "draw", lambda panels, path: (drawn.append(panels), trajectories.draw(panels, path)))
    main(["linear", "--problem", "input_dropout", "--rounds", "12", "--seeds", "2", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    table = (tmp_path / "linear_input_dropout.txt").read_text(encoding="utf-8")
    assert table.strip() in printed
    assert "Left out: implicit_cg, unrolled." in table
    assert all(f"\n  {method} " in table for method in ("stn", "centered_stn", "delta_stn"))
    assert (tmp_path / "linear_input_dropout.png").stat().st_size > 10_000
    lines = (tmp_path / "linear_input_dropout.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "set,split,method,round,optimum,seed 0,seed 1"
    assert len(lines) == 1 + 4 * 12
    first, last = (line.split(",") for line in (lines[1], lines[12]))
    assert first[:4] == ["diabetes", "1", "stn", "1"], "split 0 has no optimum inside"
    assert first[5:] == ["0.2", "0.2"]
    assert last[3] == "12"
    assert len({"0.2", *last[5:]}) == 3, "seeds differ"
    stem = tmp_path / "linear_input_dropout"
    settings, environment, summary = (
        json.loads(Path(f"{stem}_{name}.json").read_text(encoding="utf-8"))
        for name in ("settings", "environment", "summary")
    )
    assert (settings["problem"], settings["rounds"], settings["sets"]) == ("input_dropout", 12, ["diabetes"])
    assert environment["torch"] == torch.__version__
    assert summary["settings"] == settings
    (found,) = summary["splits"]
    assert f"optimal rate {found['optimum']:.4g} " in table
    for method, numbers in found["methods"].items():
        (line,) = (line.split() for line in table.splitlines() if line.startswith(f"  {method} "))
        assert line[1:3] == [f"{numbers['rate']:.4g}", f"{numbers['distance']:.2f}"]
        assert f"{numbers['excess_loss']:.2%}" in line
        assert (numbers["diverged"], numbers["runs"]) == (0, 2)
    main(["linear", "--out", str(tmp_path), "--figure", str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").stat().st_size > 10_000
    ((made,), (read,)) = drawn
    assert (read.optimum, read.limit, read.hyper) == (made.optimum, made.limit, made.hyper)
    assert sorted((run.method, run.seed) for run in read.runs) == sorted((run.method, run.seed) for run in made.runs)
    for run in made.runs:
        (same,) = (other for other in read.runs if (other.method, other.seed) == (run.method, run.seed))
        np.testing.assert_allclose(same.values, run.values, rtol=1e-4)
        assert list(same.rounds) == [*range(1, 13)]
    with pytest.raises(SystemExit, match="found nothing"):
        main(["linear", "--out", str(tmp_path / "empty"), "--figure", str(tmp_path / "again.png")])


def test_decoupling_runs_the_centered_stn_with_both_objectives(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    main(["linear", "--decouple", "--above", "2", "--rounds", "12", "--seeds", "1", "--out", str(tmp_path)])
    table = (tmp_path / "linear_ridge_decouple.txt").read_text(encoding="utf-8")
    assert all(f"\n  {method} " in table for method in ("stn", "reparam_stn", "centered_stn"))
    _, first, *_ = (tmp_path / "linear_ridge_decouple.csv").read_text(encoding="utf-8").splitlines()
    optimum, start = map(float, first.split(",")[4:])
    assert start / optimum == pytest.approx(np.exp(2.0), rel=1e-3)
    assert linear.METHODS["reparam_stn"] == replace(linear.METHODS["centered_stn"], objective="stn", control=None)


@pytest.mark.parametrize(("problem", "undivided"), CASES)
def test_runs_may_start_above_the_optimum(diabetes, problem, undivided):
    (hyper,) = linear_model.hyperparameter(diabetes, problem, undivided=undivided, start=-1.5).values()
    assert float(hyper.unconstrained(hyper.init.double())) == pytest.approx(-1.5, abs=1e-6)


def test_the_table_measures_in_the_unconstrained_space():
    """Two runs at a factor e above and below the optimum are one away from it, each."""
    split = make_split(3)
    exact = ClosedForm(split, "ridge")
    best = exact.optimum()
    runs = [
        trajectories.Run("stn", seed, np.exp(best + np.array([3.0, sign]))) for seed, sign in enumerate((1.0, -1.0))
    ]
    runs.append(trajectories.Run("unrolled", 0, np.array([np.exp(best - 2.0), np.nan])))
    space = bilevel.positive(1.0)
    text = trajectories.table(trajectories.Panel(split, exact, "penalty", space, best, 1.0, runs)).splitlines()
    assert text[2].split()[:6] == ["stn", f"{np.exp(best):.4g}", "1.00", "±", "0.00", "3.00"]
    excess = (exact.loss(best + 1) + exact.loss(best - 1)) / (2 * exact.loss(best)) - 1
    closed = 1 - excess * exact.loss(best) / (exact.loss(0.0) - exact.loss(best))
    assert text[2].split()[6:] == [f"{excess:.2%}", f"{closed:.1%}", "0", "of", "2"]
    assert text[3].split() == ["unrolled", "-", "-", "2.00", "-", "-", "1", "of", "1"]


def test_the_score_counts_runs_that_closed_most_of_the_excess():
    split = make_split(3)
    exact = ClosedForm(split, "ridge")
    best = exact.optimum()
    space = bilevel.positive(float(np.exp(best + 3.0)))

    def panel(*ends):
        runs = [trajectories.Run("stn", seed, np.exp(np.array([best + 3.0, end]))) for seed, end in enumerate(ends)]
        return trajectories.Panel(split, exact, "penalty", space, best, 1.0, runs)

    panels = [panel(best, best + 3.0), panel(best + 0.01, np.nan), panel(best + 2.9)]
    assert trajectories.summary(panels[0])["methods"]["stn"]["closed"] == pytest.approx([1.0, 0.0], abs=1e-6)
    assert trajectories.score(panels) == "stn: 2 of 5 runs closed at least 90% of the excess loss, 1 diverged."


def test_splits_are_run_in_turn_and_kept(tmp_path, capsys):
    """Those without an optimum inside are named; a file that holds another split is used."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    seeds = range(12)
    optima_inside = {
        seed: (exact := ClosedForm(optima.load("diabetes", seed, None), "ridge")).is_inside(exact.optimum())
        for seed in seeds
    }
    good = [seed for seed in seeds if optima_inside[seed]][:2]
    bad = [seed for seed in seeds if not optima_inside[seed]][:1]
    assert len(good) == 2
    assert len(bad) == 1
    command = ["linear", "--method", "implicit_cg", "--seeds", "1", "--rounds", "12", "--above", "3"]
    command += ["--learning-rates", "0.05", "1"]
    command += ["--out", str(tmp_path), "--splits", *map(str, good + bad)]
    main(command)
    table = (tmp_path / "linear_ridge.txt").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert all(line in printed for line in table.splitlines())
    assert table.startswith("ridge: 12 rounds, 1 seeds, learning rates 0.05 and 1.0, from λ* + 3\n")
    assert f"Splits without an optimum inside: diabetes {bad[0]}." in table
    assert [f"diabetes, split {seed}: " in table for seed in good + bad] == [True, True, False]
    assert "implicit_cg: 0 of 2 runs closed at least 90% of the excess loss, 0 diverged." in table
    first = tmp_path / f"split_diabetes_{good[0]}.json"
    saved = json.loads(first.read_text(encoding="utf-8"))
    assert saved["seed"] == good[0]
    other = json.loads((tmp_path / f"split_diabetes_{good[1]}.json").read_text(encoding="utf-8"))
    first.write_text(json.dumps(saved | {"valid": other["valid"]}), encoding="utf-8")
    main(command)
    again = capsys.readouterr().out
    values = [line for line in again.splitlines() if "; optimal" in line]
    assert len({line.split(": ", 1)[1] for line in values}) == 1, "both are the same split now"


def test_no_split_with_an_optimum_inside_is_an_error(tmp_path):
    pytest.importorskip("sklearn")
    exact = {seed: ClosedForm(optima.load("diabetes", seed, None), "ridge") for seed in range(12)}
    bad = next(seed for seed, form in exact.items() if not form.is_inside(form.optimum()))
    with pytest.raises(SystemExit, match=f"the optimum is at the edge for diabetes {bad}"):
        main(["linear", "--splits", str(bad), "--out", str(tmp_path)])


def test_a_command_that_was_stopped_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    command = ["linear", "--methods", "delta_stn", "unrolled", "--seeds", "2", "--rounds", "12", "--quiet"]
    main([*command, "--out", str(tmp_path / "whole")])
    made = []

    def stopped(split, problem, method, *, seed, **options):
        made.append((method, seed))
        if len(made) in (4, 6):
            raise KeyboardInterrupt
        return tune(split, problem, method, seed=seed, **options)

    tune = linear.tune
    monkeypatch.setattr(linear, "tune", stopped)
    with pytest.raises(SystemExit, match="interrupted"):
        main([*command, "--out", str(tmp_path / "parts")])
    kept = tmp_path / "parts" / "linear_ridge_runs.jsonl"
    kept.write_text(kept.read_text(encoding="utf-8")[:-9], encoding="utf-8")  # killed while it was writing
    with pytest.raises(SystemExit, match="interrupted"):
        main([*command, "--rounds", "6", "--out", str(tmp_path / "parts")])
    assert len(made) == 6, "a run of another length is another run"
    main([*command, "--out", str(tmp_path / "parts")])
    assert made[6:] == [("unrolled", 0), ("unrolled", 1)]
    assert not kept.exists()
    whole, parts = ((tmp_path / name / "linear_ridge.csv").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_workers_change_no_result(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    command = ["linear", "--methods", "delta_stn", "unrolled", "--seeds", "2", "--rounds", "12", "--quiet"]
    main([*command, "--out", str(tmp_path / "1")])
    pools = []

    def pool(workers, **options):
        pools.append(workers)
        return ProcessPoolExecutor(workers, **options)

    monkeypatch.setattr(linear, "ProcessPoolExecutor", pool)
    main([*command, "--workers", "2", "--out", str(tmp_path / "2")])
    one, two = ((tmp_path / workers / "linear_ridge.csv").read_text(encoding="utf-8") for workers in ("1", "2"))
    assert one == two
    assert pools == [2]


def test_the_device_and_the_threads_are_those_of_the_runs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    devices, threads = [], torch.get_num_threads()

    def tune(*args, device, **kwargs):
        devices.append((device, torch.get_num_threads()))
        return real(*args, device="cpu", **kwargs)

    real = linear.tune
    monkeypatch.setattr(linear, "tune", tune)
    monkeypatch.setattr(linear, "choose_device", lambda name: {"auto": torch.device("meta")}[name])
    torch.set_num_threads(2)
    try:
        main(["linear", "--method", "stn", "--seeds", "1", "--rounds", "2", "--device", "auto", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert devices == [("meta", 1)]
    environment = json.loads((tmp_path / "linear_ridge_environment.json").read_text(encoding="utf-8"))
    assert (environment["device"], environment["threads"]) == ("meta", 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("problem", ["ridge", "linear_network"])
def test_a_gpu_gives_the_same_numbers(diabetes, problem):
    cpu, gpu = (
        linear.tune(diabetes, problem, "implicit_cg", undivided=False, rounds=12, seed=0, device=device).values
        for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(cpu, gpu, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "--seeds must be at least 1, got 0"),
        ({"rounds": -1}, "--rounds must be at least 1, got -1"),
        ({"learning_rates": [0.1, 0.0]}, "--learning-rates must be positive numbers, got 0.0"),
        ({"workers": 0}, "--workers must be at least 1, got 0"),
        ({"device": "abacus"}, "--device abacus cannot be used"),
        ({"above": 0.0}, "--above must be a distance from the optimum other than 0, got 0.0"),
        ({"above": float("inf")}, "--above must be a distance.*got inf"),
        ({"undivided": True, "problem": "input_dropout"}, "--undivided is for a penalty"),
        ({"decouple": True, "methods": ["stn"]}, "leave out --methods"),
        ({"methods": ["unrolled"], "problem": "input_dropout"}, "none can tune a dropout rate"),
        ({"sets": ["diabetes", "boston"]}, "--sets boston needs --data DIR"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes, message, monkeypatch):
    """Before anything runs."""
    monkeypatch.setattr(linear, "tune", lambda *args, **kwargs: pytest.fail("ran"))
    parser = argparse.ArgumentParser()
    linear.add_options(parser)
    options = argparse.Namespace(**(vars(parser.parse_args([])) | changes))
    with pytest.raises(ValueError, match=message):
        linear.main(options)
