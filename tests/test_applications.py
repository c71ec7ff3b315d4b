"""The applications: tiny runs of the examples, and the facts that they are there to show."""

import importlib
import math
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise

import pytest
import torch

import bilevel
from applications import cleaning, digits_report, fewshot
from applications import data as datasets
from applications import digits as demo
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


def made(name, tests):
    """Runs of the demo with these test losses, one per seed."""
    history = bilevel.History()
    return [digits_report.Run(name, seed, test - 0.1, test, 0.9, 10, history, 2.0) for seed, test in enumerate(tests)]


def test_differences_are_paired():
    """A split that is hard for all adds nothing to the standard error."""
    runs = made("fixed", [1.0, 5.0, 3.0]) + made("delta_stn", [0.8, 4.7, 2.6])
    gain, error = digits_report.paired(runs, "delta_stn", "fixed")
    assert gain == pytest.approx(0.3)
    assert error == pytest.approx(0.1 / math.sqrt(3))
    assert digits_report.paired(runs, "fixed", "delta_stn") == pytest.approx((-gain, error))


def test_the_table_shows_who_is_better_by_sign():
    runs = made("fixed", [1.0, 5.0]) + made("random search", [1.1, 5.1]) + made("delta_stn", [0.8, 4.7])
    costs = {"fixed": 1.0, "random search": 2.5, "delta_stn": 2.26}
    lines = digits_report.table(runs, costs, "random search").splitlines()
    assert lines[2].split() == ["fixed", "2.900", "3.000", "90.0%", "1.0", "2.0", "s", "−0.100", "±", "0.000"]
    assert lines[3].endswith("2.5    2.0 s   +0.100 ± 0.000")
    assert lines[4].endswith("2.3    2.0 s   −0.250 ± 0.050   −0.350 ± 0.050")
    assert lines[5] == "Means over 2 seeds; differences within a seed."
    assert "±" not in digits_report.table([run for run in runs if run.seed == 0], costs, "random search")[100:]


def test_the_verdict_says_who_wins_and_who_loses():
    ours, rest = made("delta_stn", [0.8, 0.7, 0.8]), made("fixed", [1.0, 1.0, 1.0])
    others = ["fixed", "random search"]
    worse, better, same = (
        made("random search", tests) for tests in ([1.2, 1.3, 1.2], [0.5, 0.4, 0.5], [0.7, 0.8, 0.9])
    )
    say = partial(digits_report.verdict, method="delta_stn", others=others)
    assert say([*rest, *worse, *ours]) == (
        "Verdict, test loss: delta_stn beats fixed by 0.233 ± 0.033 and random search by 0.467 ± 0.067."
    )
    assert say([*rest, *better, *ours]) == (
        "Verdict, test loss: delta_stn beats fixed by 0.233 ± 0.033; it loses to random search by 0.300 ± 0.000. "
        "The lowest mean is that of random search."
    )
    assert "cannot be told apart from random search (better by 0.033 ± 0.067)." in say([*rest, *same, *ours])
    assert say([*made("fixed", [0.5]), *better[:1], *made("delta_stn", [0.8])]) == (
        "Verdict, test loss: delta_stn loses to fixed by 0.300 and random search by 0.300. "
        "The lowest mean is that of fixed."
    )


def test_lists_have_commas():
    assert [digits_report.listed("abc"[:count]) for count in (1, 2, 3)] == ["a", "a and b", "a, b and c"]


def test_methods_of_the_demo_share_split_and_start(monkeypatch):
    pytest.importorskip("sklearn")
    seen = []

    def record(*arguments, seed, **options):
        net, data = [value for value in arguments if not isinstance(value, str)][:2]
        seen.append([*net.state_dict().values(), *data["train"].tensors, *data["valid"].tensors, *data["test"].tensors])

    for name in ("tune", "train", "search"):
        monkeypatch.setattr(demo, name, record)
    for seed in (0, 1):
        for method in demo.METHODS:
            demo.run(method, seed, 1, "cpu")
    first, second = seen[: len(demo.METHODS)], seen[len(demo.METHODS) :]
    for one in first:
        assert all(map(torch.equal, one, first[0]))
    for one in second:
        assert all(map(torch.equal, one, second[0]))
    assert not any(map(torch.equal, first[0], second[0]))


def test_digits_are_rare_in_training_only():
    datasets = pytest.importorskip("sklearn.datasets")
    data = demo.load(torch.device("cpu"), 0)
    images = {name: {tuple((16 * x).tolist()) for x in part.tensors[0]} for name, part in data.items()}
    assert data["train"].tensors[1].bincount().tolist() == demo.COUNTS == [90, 65, 47, 34, 24, 17, 13, 9, 6, 5]
    assert [len(data[name]) for name in ("valid", "test")] == [400, 497]
    for name in ("valid", "test"):
        assert data[name].tensors[1].bincount().min() > 0.05 * len(data[name])
        assert not images[name] & images["train"]
    truth = {tuple(image): label for image, label in zip(*datasets.load_digits(return_X_y=True), strict=True)}
    assert all(truth[tuple((16 * x).tolist())] == int(y) for part in data.values() for x, y in part)


def test_the_training_loss_of_the_demo_weighs_classes_and_the_validation_loss_does_not():
    net = demo.start(torch.device("cpu"), 0)
    model = bilevel.Model(dict(net.named_parameters()), net)
    batch = torch.rand(6, 64), torch.arange(6)
    hyper = {"weights": torch.arange(10.0), "decay": torch.tensor(0.1)}
    each = torch.nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none")
    penalty = 0.1 * sum(layer.weight.square().sum() for layer in net.layers)
    torch.testing.assert_close(demo.train_loss(model, hyper, batch), each * torch.arange(6.0) + penalty)
    torch.testing.assert_close(demo.valid_loss(model, hyper, batch), each.mean())


def test_random_search_starts_at_the_start_and_keeps_the_best_trial(monkeypatch):
    pytest.importorskip("sklearn")
    losses = [0.7, 0.5, 0.6, 0.9, 0.8, 0.55, 0.4] + [1.0] * 4
    drawn = []

    def train(net, data, hyper, *, name, rounds, seed):
        drawn.append(torch.cat([hyper["weights"], hyper["decay"][None]]))
        return replace(made(name, [0.0])[0], valid=losses[len(drawn) - 1], test=float(len(drawn)), best=rounds)

    monkeypatch.setattr(demo, "train", train)
    short, long = demo.search(demo.MLP(), {}, rounds=20, seed=0)
    assert (short.name, short.valid, short.test, short.seconds) == ("random search", 0.5, 2.0, 12.0)
    assert (long.name, long.valid, long.test, long.seconds) == ("long random search", 0.4, 7.0, 22.0)
    assert short.best == 10, "half the length"
    torch.testing.assert_close(drawn[0], torch.tensor([1.0] * 10 + [1e-5]))
    others = torch.stack(drawn[1:])
    assert others.unique().numel() == others.numel()
    weights, decays = others.split([10, 1], 1)
    assert 0.2 <= weights.min() < 0.3 and 4 < weights.max() <= 5
    assert 1e-6 <= decays.min() < decays.max() <= 1e-1


def test_random_search_gets_the_compute_of_delta_stn():
    pytest.importorskip("sklearn")
    costs = demo.costs()
    assert [*costs] == [*demo.METHODS]
    assert 0.8 * costs["random search"] < costs["delta_stn"] <= costs["random search"]


def test_labels_of_lines_do_not_overlap():
    ends = [(1.0, "a", "", False), (0.0, "b", "", False), (1.05, "c", "", True)]
    places = digits_report.spread(ends, 0.2)
    assert [high - low for low, high in pairwise(places)] == pytest.approx([1.0, 0.2])
    assert sum(places) == pytest.approx(2.05), "as far up as down"


def test_the_demo_prints_a_table_and_draws(tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    demo.main(["--rounds", "2", "--seeds", "2", "--workers", "1", "--quiet", "--device", "cpu", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for name in demo.METHODS:
        assert f"\n{name} " in printed
    assert "\nVerdict, test loss: delta_stn " in printed
    assert (tmp_path / "digits.txt").read_text(encoding="utf-8").strip() in printed
    assert (tmp_path / "digits.png").stat().st_size > 10_000


def test_processes_do_not_change_the_results_of_the_demo():
    pytest.importorskip("sklearn")
    alone, shared = (demo.run_all([0], 1, device="cpu", workers=workers, quiet=True) for workers in (1, 2))
    assert [run.name for run in alone] == [*demo.METHODS]
    for one, other in zip(alone, shared, strict=True):
        assert replace(one, history=None, seconds=0) == replace(other, history=None, seconds=0)


@pytest.mark.parametrize("option", ["--rounds", "--seeds", "--workers"])
def test_the_demo_refuses_zero(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main([option, "0"])
    assert f"{option} must be at least 1, got 0." in capsys.readouterr().err


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
