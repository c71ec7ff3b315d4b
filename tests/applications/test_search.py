"""Searches: what is suggested, what is written, budgets, and that processes can join and go on."""

import dataclasses
import json
import math
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bilevel
from applications import data, images, language
from applications.tables import read_csv
from applications.task import SEARCHES, Batches, Experiment, Settings, Task

optuna = pytest.importorskip("optuna")
sqlalchemy = pytest.importorskip("sqlalchemy")

from applications import search as module  # noqa: E402
from applications.search import search  # noqa: E402
from applications.suggest import distributions, grid_points, natural, seed_of  # noqa: E402
from applications.trials import Trial, history, worked  # noqa: E402

SETTINGS = Settings(epochs=3, batch_size=4, inner_steps=1, learning_rate=0.5)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk():
    def relax(connection, record):
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", relax)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", relax)


class Clock:
    """Stands still until a test moves it."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        return self.now

    perf_counter = process_time = time


@pytest.fixture
def clock(monkeypatch):
    """The clock of searches; trials have a real one, of which only an hour is long enough to be noticed."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Bowl(Task):
    """A weight that is trained towards ``2 x``; validation wants it at 0.6, and prefers two holes.

    After three epochs the loss is known: (w - 0.6)² + (holes - 2)², with w nearly 2 x.
    """

    name = "bowl"
    size = 1

    def build(self, settings, *, data, folder, seed, device, init):
        self.folders = [*getattr(self, "folders", []), folder]
        net = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(net.weight)

        def inner(model, hyper, batch):
            return ((model.params["weight"] - 2 * hyper["x"][..., 0].mean()) ** 2).sum()

        def outer(model, hyper, batch):
            loss = ((model.params["weight"] - 0.6) ** 2).sum() + ((hyper["holes"] - 2) ** 2).mean() + 0 * hyper["kept"]
            return loss, {"weight": model.params["weight"].detach().sum()}

        hyper = {
            "x": bilevel.interval(0.0, 1.0, init=init.get("x", [0.5] * self.size)),
            "holes": bilevel.integer(0, 4, init=init.get("holes", 0)),
            "kept": bilevel.real(7.0),
        }
        batches = Batches([torch.zeros(8, 1)], settings.batch_size, shuffle=False)
        return Experiment(
            problem=bilevel.Problem(net, inner_loss=inner, outer_loss=outer, hyper=hyper),
            net=net,
            outer_loss=outer,
            train=batches,
            valid=batches,
            test=batches,
            solve={"inner_optimizer": lambda params: torch.optim.SGD(params, lr=settings.learning_rate / 2)},
            search={"x": (0.0, 0.8), "holes": (0, 4)},
        )


def find(out, method="random_search", *, task=None, settings=SETTINGS, **options):
    options = {"trials": 6, "progress": False, "plots": False, **options}
    return search(task or Bowl(), method, settings, out=out, data=None, **options)


@pytest.mark.parametrize("method", SEARCHES)
def test_every_search_leaves_the_files_of_a_run(method, tmp_path, monkeypatch, clock):
    if method == "tpe":
        pytest.importorskip("matplotlib")
    if method in module.NEEDS:
        pytest.importorskip(module.NEEDS[method])
    # The models of gp and tpe start after five random trials; a grid of two points on two axes is the finest.
    count = {"gp": 7, "tpe": 7, "grid_search": 4}.get(method, 6)
    trials = 8 if method == "grid_search" else count
    real = module.train

    def train(*args, **kwargs):
        clock.now += 3600
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "train", train)
    summary = find(tmp_path, method, trials=trials, pruner="none", plots=method == "tpe")
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == summary
    rows, trials = read_csv(tmp_path / "history.csv"), read_csv(tmp_path / "trials.csv")
    assert len(trials) == count == summary["trials"]
    assert len(rows) == 3 * count
    assert [float(row["epoch"]) for row in rows] == list(range(1, 3 * count + 1))
    assert summary["epochs"] == 3 * count
    assert summary["stopped"] == "trials"
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    assert [round(last / 3600, 1) for last in seconds[2::3]] == list(range(1, count + 1))
    best = min(rows, key=lambda row: float(row["validation_loss"]))
    assert summary["valid"]["loss"] == pytest.approx(float(best["validation_loss"]))
    assert summary["best_epoch"] == float(best["epoch"])
    assert summary["trial"] == int(best["trial"])
    assert summary["best_hyper"]["x"] == pytest.approx([float(best["x[0]"])])
    assert summary["best_hyper"]["kept"] == 7.0
    weights = torch.load(tmp_path / "best.pt")
    assert weights["weight"].item() == pytest.approx(summary["test"]["weight"])
    assert all(0 < float(row["x[0]"]) <= 0.8 and row["holes"] in "01234" for row in rows)
    names = {path.name for path in tmp_path.iterdir()} - {"search.png"}
    assert names == {
        *("settings.json", "environment.json", "history.csv", "summary.json", "best.pt", "trials.csv", "study.db"),
        f"best-{summary['trial']}.pt",
    }
    assert (tmp_path / "search.png").exists() == (method == "tpe")


def test_a_trial_is_training_at_the_suggested_values(tmp_path):
    """Gradient descent on (w - 2x)² with step 1/4 halves the distance in each of the two steps of an epoch."""
    find(tmp_path, pruner="none")
    for index, row in enumerate(read_csv(tmp_path / "history.csv")):
        target = 2 * float(row["x[0]"])
        weight = target * (1 - 0.5 ** (2 * (index % 3 + 1)))
        expected = (weight - 0.6) ** 2 + (float(row["holes"]) - 2) ** 2
        assert float(row["validation_loss"]) == pytest.approx(expected)


@pytest.mark.parametrize(("method", "how"), [("random_search", "SIGTERM"), ("grid_search", "Ctrl-C")])
def test_a_search_that_was_interrupted_goes_on(method, how, tmp_path, monkeypatch):
    """With the trial that was interrupted; the points are those of an undisturbed search."""
    options = {"method": method, "trials": 6, "seed": 3, "pruner": "none"}
    whole = find(tmp_path / "whole", **options)
    real, made = module.train, []

    def interrupted(experiment, *args, callbacks, **kwargs):
        made.append(experiment)
        if len(made) == 3:
            callbacks = [*callbacks, _press_ctrl_c if how == "Ctrl-C" else _terminate]
        return real(experiment, *args, callbacks=callbacks, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, "train", interrupted)
        first = find(tmp_path / "parts", **options)
    assert (first["stopped"], first["trials"]) == ("interrupted", 3)
    second = find(tmp_path / "parts", **options)
    parts, all_ = (read_csv(tmp_path / name / "trials.csv") for name in ("parts", "whole"))
    assert [row["state"] for row in parts] == ["complete", "complete", "fail", *["complete"] * (len(all_) - 2)]
    assert second["epochs"] == whole["epochs"] + 1
    points = [[(row["x[0]"], row["holes"]) for row in rows] for rows in (parts, all_)]
    assert points[0][2] == points[0][3] == points[1][2]
    assert points[0][:3] == points[1][:3]
    assert len(set(points[0])) == len(points[1])
    if method == "grid_search":
        assert set(points[0]) == set(points[1])


def test_the_trial_of_a_killed_process_is_taken_up_again(tmp_path, monkeypatch):
    """What such a process leaves: a trial that is running, whose last sign of life is long ago."""
    options = {"method": "random_search", "trials": 3, "pruner": "none"}
    opened = []
    real = module.open_study
    monkeypatch.setattr(module, "open_study", lambda *args, **more: opened.append(real(*args, **more)) or opened[-1])

    def killed(trial, *args, **kwargs):
        monkeypatch.setattr(module, "run_trial", run_trial)
        run_trial(trial, *args, **kwargs)
        study = opened[-1]
        left = study.ask()
        space = args[2]
        left.suggest_float("x[0]", space["x[0]"].low, space["x[0]"].high)
        study._storage.record_heartbeat(left._trial_id)
        with study._storage._backend.engine.begin() as connection:
            connection.execute(sqlalchemy.text("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'"))
        raise KeyboardInterrupt

    run_trial = module.run_trial
    monkeypatch.setattr(module, "run_trial", killed)
    find(tmp_path, **options)
    running = [t for t in opened[-1].trials if t.state.name == "RUNNING"]
    assert len(running) == 1
    find(tmp_path, **options)
    trials = opened[-1].trials
    assert trials[running[0].number].state.name == "FAIL" and all(t.state.is_finished() for t in trials)
    again = [t for t in trials if t.system_attrs.get("failed_trial") == running[0].number]
    assert [t.params["x[0]"] for t in again] == [running[0].params["x[0]"]] and again[0].state.name == "COMPLETE"


def _terminate(event):
    if event.validation_loss is not None:
        signal.raise_signal(signal.SIGTERM)


def _press_ctrl_c(event):
    if event.validation_loss is not None:
        raise KeyboardInterrupt


def test_a_finished_search_is_not_repeated(tmp_path):
    first = find(tmp_path)
    task = Bowl()
    rows = read_csv(tmp_path / "history.csv")
    again = find(tmp_path, task=task)
    assert again == first
    assert len(task.folders) == 2  # to know the space, and to measure
    assert find(tmp_path, trials=8)["trials"] == 8
    assert read_csv(tmp_path / "history.csv")[: len(rows)] == rows
    find(tmp_path / "grid", "grid_search", task=task)
    count = len(task.folders)
    find(tmp_path / "grid", "grid_search", task=task)
    assert len(task.folders) == count + 2


def test_processes_share_a_study_through_its_storage(tmp_path):
    """The second one joins with its own folder; it needs the weights of the first, and says so."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    first = find(tmp_path / "a", trials=6, storage=url, pruner="none")
    with pytest.raises(ValueError, match=rf"weights of trial {first['trial']}, .*copy best-{first['trial']}.pt"):
        find(tmp_path / "b", trials=6, storage=url, pruner="none")
    (tmp_path / "b" / "best.pt").write_bytes((tmp_path / "a" / "best.pt").read_bytes())
    joined = find(tmp_path / "b", trials=6, storage=url, pruner="none")
    assert joined["valid"] == first["valid"]
    assert not (tmp_path / "a" / "study.db").exists()
    other = find(tmp_path / "c", trials=2, storage=url, seed=1)
    assert other["trials"] == 2  # other settings are another study


def test_two_processes_that_end_together_keep_the_better_weights(tmp_path, monkeypatch):
    """The worse trial ends last, and did not know of the better one when it saved its weights."""
    from applications.trials import read

    monkeypatch.setattr(module, "read", lambda study: [])
    with pytest.raises(ValueError, match="before its first validation pass"):
        find(tmp_path, pruner="none")
    saved = {path.name for path in tmp_path.glob("best-*.pt")}
    assert len(saved) == 6
    monkeypatch.setattr(module, "read", read)
    summary = find(tmp_path, pruner="none")
    assert summary["valid"]["loss"] == min(float(row["validation_loss"]) for row in read_csv(tmp_path / "trials.csv"))
    assert {path.name for path in tmp_path.glob("best*")} == {"best.pt", f"best-{summary['trial']}.pt"}


def test_a_process_that_is_overtaken_writes_its_summary_again(tmp_path, monkeypatch):
    """While it measures, another process ends a trial."""
    find(tmp_path, trials=2)
    real, calls = module.finish, []

    def overtaken(trials, build, *, out):
        calls.append(len(trials))
        if len(calls) == 1:
            monkeypatch.setattr(module, "finish", real)
            find(tmp_path, trials=5, pruner="none")
            monkeypatch.setattr(module, "finish", overtaken)
        return real(trials, build, out=out)

    monkeypatch.setattr(module, "finish", overtaken)
    summary = find(tmp_path, trials=2)
    assert calls == [2, 5]
    assert summary["trials"] == 5
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == summary


def test_a_figure_that_cannot_be_drawn_costs_no_summary(tmp_path, monkeypatch):
    def fail(*args):
        raise ImportError("no matplotlib")

    monkeypatch.setattr(module, "draw", fail)
    with pytest.raises(ImportError, match="no matplotlib"):
        find(tmp_path, trials=1, plots=True)
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["trials"] == 1


def test_a_search_of_a_real_task(tmp_path):
    (task,) = (task for task in images.TASKS if task.name == "mnist")
    settings = dataclasses.replace(task.presets["quick"], epochs=1, width=8, batch_size=8, limit=16, inner_steps=1)
    summary = find(tmp_path, task=task, settings=settings, trials=2)
    assert (summary["trials"], summary["epochs"]) == (2, 2)
    assert 0 < summary["test"]["loss"] < 10
    assert len(summary["best_hyper"]["dropout"]) == 3


def test_processes_that_create_the_database_at_once_do_not_fail(tmp_path, monkeypatch):
    real, calls = optuna.create_study, []

    def colliding(**options):
        calls.append(options)
        if len(calls) == 1:
            raise sqlalchemy.exc.IntegrityError("INSERT INTO alembic_version", None, ValueError())
        return real(**options)

    monkeypatch.setattr(optuna, "create_study", colliding)
    assert find(tmp_path, trials=1)["trials"] == 1
    assert len(calls) == 2


def test_a_storage_that_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    for url in ("nonsense", f"sqlite:///{tmp_path}/nowhere/study.db"):
        with pytest.raises(ValueError, match="--storage cannot be opened") as caught:
            find(tmp_path / "out", storage=url)
        assert url not in str(caught.value)


def test_trials_suggest_different_points_and_the_seed_decides_which(tmp_path):
    def points(seed, name):
        find(tmp_path / name, seed=seed)
        return [row["x[0]"] for row in read_csv(tmp_path / name / "trials.csv")]

    first, same, other = points(0, "a"), points(0, "b"), points(1, "c")
    assert first == same
    assert len({*first, *other}) == 12


def test_the_median_pruner_stops_bad_trials(tmp_path):
    find(tmp_path, trials=12)
    trials = read_csv(tmp_path / "trials.csv")
    pruned = [row for row in trials if row["state"] == "pruned"]
    assert pruned
    assert all(float(row["epochs"]) < 3 for row in pruned)
    assert all(float(row["epochs"]) == 3 for row in trials if row["state"] == "complete")
    assert {row["state"] for row in trials[:5]} == {"complete"}


def test_hyperband_runs(tmp_path):
    assert find(tmp_path, trials=9, pruner="hyperband")["trials"] == 9


def test_a_budget_of_seconds_stops_the_running_trial_and_starts_no_other(tmp_path, monkeypatch):
    """A clock that moves by one second whenever someone looks."""
    ticks = iter(range(10**9))
    clock = SimpleNamespace(time=lambda: next(ticks), perf_counter=lambda: next(ticks), process_time=lambda: 0.0)
    monkeypatch.setattr(module, "time", clock)
    budgets = []
    real = module.train

    def spy(*args, seconds, **kwargs):
        budgets.append(seconds)
        return real(*args, seconds=None, **kwargs)

    monkeypatch.setattr(module, "train", spy)
    summary = find(tmp_path, trials=None, seconds=40.0)
    assert summary["stopped"] == "time"
    assert 1 < summary["trials"] < 10
    assert budgets == sorted(budgets, reverse=True)
    assert 0 < budgets[-1] < budgets[0] < 40
    again = find(tmp_path, trials=None, seconds=summary["seconds"])  # what is used up stays used up
    assert again["trials"] == summary["trials"]


def test_a_trial_without_time_counts_as_far_as_it_came(tmp_path, monkeypatch, clock):
    real = module.train

    def train(*args, seconds, **kwargs):
        assert seconds == 3600
        clock.now += seconds
        return real(*args, seconds=1e-9, **kwargs)

    monkeypatch.setattr(module, "train", train)
    summary = find(tmp_path, trials=None, seconds=3600.0)
    assert summary["stopped"] == "time"
    assert summary["trials"] == 1
    assert summary["epochs"] < 3


def test_a_trial_that_diverges_is_not_the_end(tmp_path):
    """Steps that are too long: trials with x > 0 overflow sooner or later."""
    settings = dataclasses.replace(SETTINGS, epochs=400, learning_rate=1e3)
    summary = find(tmp_path, settings=settings, trials=3)
    assert summary["trials"] == 3
    assert summary["epochs"] < 300
    assert math.isfinite(summary["valid"]["loss"])


def test_the_time_of_a_trial_that_diverges_at_once_counts(tmp_path, monkeypatch, clock):
    """The first has no validation pass, the others have three."""
    real = module.train

    def train(*args, **kwargs):
        clock.now += 3600
        if clock.now == 3600:
            raise bilevel.DivergenceError("at once")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "train", train)
    summary = find(tmp_path, trials=3)
    first, *others = read_csv(tmp_path / "trials.csv")
    assert (first["state"], first["validation_loss"], float(first["epochs"])) == ("pruned", "", 0.0)
    assert float(first["seconds"]) == 3600
    assert summary["seconds"] == 3 * 3600
    assert len(others) == 2
    assert summary["epochs"] == 6
    assert all(
        int(row["trial"]) > 0 and float(row["seconds"]) > 1.5 * 3600 for row in read_csv(tmp_path / "history.csv")
    )


def test_trials_that_all_diverge_ask_for_smaller_steps(tmp_path, monkeypatch):
    def train(*args, **kwargs):
        raise bilevel.DivergenceError("at once")

    monkeypatch.setattr(module, "train", train)
    with pytest.raises(ValueError, match="all 3 trials diverged before their first validation pass: lower --learning"):
        find(tmp_path, trials=3)


def test_an_interrupt_before_the_first_validation_pass_is_one(tmp_path, monkeypatch):
    def train(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", train)
    with pytest.raises(KeyboardInterrupt):
        find(tmp_path, trials=3)


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("task", [*images.TASKS, *language.TASKS], ids=lambda task: task.name)
def test_one_short_trial_of_every_task_with_every_search(task, method, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "synthetic_images", partial(data.synthetic_images, train=40, test=10))
    if method in module.NEEDS:
        pytest.importorskip(module.NEEDS[method])
    quick = task.presets["quick"]
    width = {"mnist": 8, "ptb": 4, "wikitext2": 4}.get(task.name, 0.02)
    changes = {"epochs": 1, "batch_size": 8, "limit": 100 if task in language.TASKS else 16, "width": width}
    settings = dataclasses.replace(quick, **changes)
    monkeypatch.setattr(module, "grid_points", lambda space, trials: {name: [axis.low] for name, axis in space.items()})
    summary = search(task, method, settings, out=tmp_path, data=None, trials=1, progress=False, plots=False)
    assert (summary["stopped"], summary["trials"], len(summary["best_hyper"])) == ("trials", 1, len(summary["hyper"]))
    assert math.isfinite(summary["test"]["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "--trials must be at least 1, got 0"),
        ({"seconds": 0.0}, "--seconds must be positive, got 0"),
        ({"pruner": "mean"}, "--pruner must be one of median, hyperband, none, got 'mean'"),
        ({"method": "grid_search", "trials": 3}, "2 hyperparameters are 4 trials, but --trials is 3.*random_search"),
    ],
)
def test_bad_options_leave_nothing(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        find(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"--method cmaes needs cmaes: pip install 'bilevel\[applications\]'"):
        find(tmp_path, "cmaes")


def test_another_length_of_trials_is_another_search(tmp_path):
    find(tmp_path, trials=1)
    with pytest.raises(ValueError, match="trial_epochs was 3, now it is 4"):
        find(tmp_path, trials=1, settings=dataclasses.replace(SETTINGS, epochs=4))


def test_vectors_have_one_axis_per_entry_and_open_ends_are_left_out():
    task = Bowl()
    task.size = 12
    experiment = task.build(SETTINGS, data=None, folder=None, seed=0, device=None, init={})
    space = distributions(experiment)
    assert list(space) == [*(f"x[{i}]" for i in range(12)), "holes"]
    assert 0 < space["x[3]"].low < 1e-3
    assert space["x[3]"].high == 0.8
    assert (space["holes"].low, space["holes"].high) == (0, 4)
    shuffled = {name: index for index, name in reversed(list(enumerate(space)))}
    assert natural(shuffled) == {"holes": 12, "x": list(range(12))}


@given(st.lists(st.sampled_from(["x", "holes"]), min_size=1, max_size=4), st.integers(1, 400))
def test_a_grid_is_the_finest_that_fits(kinds, trials):
    axes = {
        "x": optuna.distributions.FloatDistribution(0.1, 0.9),
        "holes": optuna.distributions.IntDistribution(0, 4),
    }
    space = {f"{kind}{index}": axes[kind] for index, kind in enumerate(kinds)}
    if 2 ** len(space) > trials:
        with pytest.raises(ValueError, match="random_search"):
            grid_points(space, trials)
        return
    points = grid_points(space, trials)
    total = math.prod(len(values) for values in points.values())
    assert total <= trials
    finer = math.prod(
        min(5, max(map(len, points.values())) + 1) if kind == "holes" else max(map(len, points.values())) + 1
        for kind in kinds
    )
    assert finer > trials or "x" not in kinds
    for name, values in points.items():
        axis = space[name]
        assert (values[0], values[-1]) == (axis.low, axis.high)
        assert values == sorted(set(values))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=6), st.integers(0, 45))
def test_time_counts_once_however_many_trials_run(spans, until):
    """Against seconds counted one by one."""
    intervals = [(float(start), float(start + length)) for start, length in spans]
    ticked = {second for start, length in spans for second in range(start, start + length) if second < until}
    assert worked(intervals, until) == len(ticked)


def test_the_history_of_parallel_trials_is_in_order_of_time():
    trials = [
        Trial(0, "complete", {"x": 0.1}, (100.0, 110.0), [(1.0, 4.0, 0.9), (2.0, 9.0, 0.5)]),
        Trial(1, "pruned", {"x": 0.2}, (102.0, 108.0), [(1.0, 5.0, 0.7)]),
        Trial(2, "complete", {"x": 0.3}, (200.0, 204.0), [(0.5, 4.0, 0.6)]),
    ]
    rows = [(row["trial"], row["epoch"], row["seconds"], row["validation_loss"], row["x"]) for row in history(trials)]
    assert rows == [(0, 1, 4, 0.9, 0.1), (1, 2, 7, 0.7, 0.2), (0, 3, 9, 0.5, 0.1), (2, 3.5, 14, 0.6, 0.3)]


def test_no_two_methods_begin_with_the_same_points_and_none_repeats_itself():
    seeds = [seed_of(method, seed, number) for method in SEARCHES for seed in range(3) for number in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == seed_of(SEARCHES[0], 0, 0) == 813896794  # the same in every process
