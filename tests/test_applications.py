"""The applications: tiny runs of the examples, and the facts that they are there to show."""

import importlib
from functools import partial
from itertools import islice

import pytest
import torch

import bilevel
from applications import cleaning, fewshot
from applications import data as datasets
from applications.data.sets import Images


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    return cleaning.load(None, seed=0, train=150, valid=100, noise=0.4)


def test_the_corrupted_examples_are_those_with_another_label(digits):
    clean = cleaning.load(None, seed=0, train=150, valid=100, noise=0.0)
    assert torch.equal(clean.train[0], digits.train[0])
    assert torch.equal(clean.train[1] != digits.train[1], digits.corrupted)
    assert 45 <= digits.corrupted.sum() <= 75
    assert not clean.corrupted.any()


@pytest.mark.parametrize("method", ["implicit_cg", "unrolled", "unrolled_truncated"])
def test_learned_weights_separate_wrong_from_right_labels(digits, method):
    """And the network that is trained with them beats the one that trusts every label."""
    run = cleaning.clean(method, digits, rounds=8, seed=0)
    accuracy, loss, auc, f1, _ = run.metrics
    plain = cleaning.train("noisy", digits.train, digits, rounds=8, seed=0).metrics
    assert auc > 0.8
    assert f1 > 0.75
    assert run.trust[digits.corrupted].mean() + 0.2 < run.trust[~digits.corrupted].mean()
    assert accuracy > plain[0] + 0.1
    assert loss < plain[1]


def test_baselines_are_ordered(digits):
    accuracy = {
        name: cleaning.train(name, batch, digits, rounds=8, seed=0).metrics[0]
        for name, batch in cleaning.baselines(digits).items()
    }
    assert accuracy["noisy"] < accuracy["noisy+valid"] < accuracy["valid"] < accuracy["oracle"]


def test_detection():
    trust, corrupted = torch.tensor([0.1, 0.2, 0.2, 0.9]), torch.tensor([True, True, False, False])
    assert cleaning.detection(trust, trust < 0.15, corrupted) == pytest.approx((3.5 / 4, 2 / 3))


def test_mnist_can_be_cleaned(tmp_path, monkeypatch):
    images, labels = torch.arange(40 * 28 * 28).reshape(40, 1, 28, 28).to(torch.uint8), torch.arange(40) % 10
    mnist = Images(images, labels, images[:5], labels[:5])
    monkeypatch.setattr(datasets, "images", lambda name, root: {("mnist", tmp_path): mnist}[name, root])
    data = cleaning.load(tmp_path, seed=0, train=20, valid=10, noise=0.0)
    assert data.train[0].shape == (20, 784)
    assert len(data.valid[1]) == len(data.test[1]) == 10
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(data.train[0], images[rows[:20]].flatten(1).float() / 255)
    assert torch.equal(data.train[1], rows[:20] % 10)


def test_a_dense_response_to_every_example_of_mnist_is_refused():
    """h × m numbers; and so are as many tangents."""
    problem = bilevel.Problem(
        torch.nn.Linear(784, 300),
        inner_loss=cleaning.train_loss,
        outer_loss=cleaning.valid_loss,
        hyper={"weight": bilevel.interval(0.0, 1.0, init=torch.full((60_000,), 0.5))},
    )
    for method in (bilevel.DeltaSTN(structure="dense"), "unrolled_forward"):
        with pytest.raises(MemoryError, match="to 60,000 hyperparameters"):
            bilevel.Solver(problem, method=method)
    for method in cleaning.METHODS:
        bilevel.Solver(problem, method=method)


def test_cleaning_prints_a_table_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--methods", "unrolled_truncated", "--rounds", "2", "--train", "60", "--seeds", "2", "--quiet"]
    cleaning.main([*arguments, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for name in ("noisy", "valid", "noisy+valid", "oracle", "unrolled_truncated"):
        assert f"\n{name} " in printed
    assert "n = 2" in printed
    assert (tmp_path / "cleaning.txt").read_text(encoding="utf-8").strip() in printed
    assert (tmp_path / "cleaning.png").stat().st_size > 10_000


def test_a_method_that_fails_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")

    def fail(method, *args, **kwargs):
        raise MemoryError("too large")

    monkeypatch.setattr(cleaning, "clean", fail)
    cleaning.main(["--methods", "delta_stn", "--rounds", "1", "--train", "30", "--seeds", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "delta_stn failed: too large" in printed
    assert "\noracle " in printed


def predict(weights, x):
    """Written out for one task, as the textbook has it."""
    for layer in range(3):
        x = x @ weights[f"weight{layer}"] + weights[f"bias{layer}"]
        x = x.relu() if layer < 2 else x
    return x


def descend(weights, x, y, *, steps):
    """Gradient descent on one task with learning rate 0.01, differentiably."""
    for _ in range(steps):
        slopes = torch.autograd.grad((predict(weights, x) - y).square().mean(), [*weights.values()], create_graph=True)
        weights = {name: value - 0.01 * slope for (name, value), slope in zip(weights.items(), slopes, strict=True)}
    return weights


def test_every_task_takes_its_own_steps():
    """The adaptation of a batch of tasks is that of each task alone, with the stated learning rate."""
    start = {name: value.requires_grad_() for name, value in fewshot.draw_start(0).items()}
    support, query = next(fewshot.sines(3, 4, seed=0))
    together = fewshot.adapt(fewshot.draw_start(0), support, query[0], 2)
    for steps, predictions in enumerate(together):
        for task, (x, y, points) in enumerate(zip(*support, query[0], strict=True)):
            alone = predict(descend(start, x, y, steps=steps), points)
            torch.testing.assert_close(predictions[task], alone.detach())


def test_the_hypergradient_is_that_of_maml():
    start = {name: value.requires_grad_() for name, value in fewshot.draw_start(0).items()}
    support, query = next(fewshot.sines(3, 4, seed=0))
    losses = [
        (predict(descend(start, *shown, steps=fewshot.STEPS), x) - y).square().mean()
        for *shown, x, y in zip(*support, *query, strict=True)
    ]
    expected = torch.autograd.grad(torch.stack(losses).mean(), [*start.values()])
    problem = fewshot.problem(fewshot.draw_start(0), 3)
    solver = bilevel.Solver(problem, method=fewshot.METHODS["maml"], inner_optimizer=fewshot.INNER)
    found = solver.outer_step([support] * fewshot.STEPS, query).hypergradient
    torch.testing.assert_close(found, torch.cat([part.flatten() for part in expected]), rtol=1e-4, atol=1e-6)


def learned(name, rounds):
    return next(islice(fewshot.meta_learn(name, seed=0), rounds - 1, None))


@pytest.mark.parametrize("name", ["maml", "imaml"])
def test_a_learned_initialisation_adapts_better(name, monkeypatch):
    """Than a random one, and its lead grows while it adapts."""
    monkeypatch.setattr(fewshot, "OUTER", partial(torch.optim.Adam, lr=0.01))
    starts = {"random": fewshot.draw_start(0), "learned": learned(name, 20)}
    support, query = next(fewshot.sines(100, 50, seed=10**6))
    error = {}
    for kind, start in starts.items():
        predictions = fewshot.adapt(start, support, query[0], 5)
        error[kind] = [float(fewshot.errors(prediction, query[1]).mean()) for prediction in predictions]
    assert error["learned"][5] < 0.8 * error["random"][5]
    assert error["random"][5] - error["learned"][5] > 1.2 * (error["random"][0] - error["learned"][0])


def test_checkpoints_change_nothing():
    plain, checkpointed = (learned(name, 3) for name in ("maml", "maml_checkpoint"))
    for name, value in plain.items():
        assert torch.equal(value, checkpointed[name])


def test_training_stops_when_validation_tasks_get_harder():
    """The round that adapted best is kept: here the first that was judged, since the output then moves away."""
    start = fewshot.draw_start(0)
    starts = (start | {"bias2": start["bias2"] + 0.1 * index} for index in range(1000))
    kept, best = fewshot.keep_best(starts, 1000, seed=0, progress=False)
    assert best == 20
    assert torch.equal(kept["bias2"], start["bias2"] + 0.1 * 19)
    assert torch.equal(next(starts)["bias2"], start["bias2"] + 0.1 * (20 + fewshot.PATIENCE)), "stopped early"


def test_methods_that_cannot_see_the_initialisation_are_refused():
    """Truncated steps forget it, and without the pull the end of the adaptation does not depend on it."""
    assert "training depends on it through initial only" in fewshot.refusal(0)
    solver = bilevel.Solver(fewshot.problem(fewshot.draw_start(0), 2), method="implicit_cg")
    with pytest.raises(ValueError, match=r"implicit differentiation cannot tune hyper\['weight0'\]"):
        solver.inner_step(next(fewshot.sines(2, 1, 0))[0])


def test_fewshot_prints_a_table_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    fewshot.main(["--rounds", "2", "--tasks", "20", "--quiet", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for name in ("random", "joint", *fewshot.METHODS, "unrolled_truncated:"):
        assert f"\n{name} " in printed
    assert (tmp_path / "fewshot.txt").read_text(encoding="utf-8").strip() in printed
    assert (tmp_path / "fewshot.png").stat().st_size > 10_000


@pytest.mark.parametrize("application", [cleaning, fewshot], ids=["cleaning", "fewshot"])
def test_help_is_for_newcomers(application, capsys):
    with pytest.raises(SystemExit, match="0"):
        application.main(["--help"])
    printed = capsys.readouterr().out
    assert "--quick" in printed
    assert f"python -m {application.__name__}" in printed


@pytest.mark.parametrize("name", ["cleaning", "digits", "fewshot"])
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"applications.{name}").main()
    assert stop.value.code == 0 and "options:" in capsys.readouterr().out
