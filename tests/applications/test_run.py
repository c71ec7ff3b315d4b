"""Runs: every image task with every method that is not a search, fixed hyperparameters, folders, the command line."""

import dataclasses
import json
import urllib.error
import urllib.request
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import bilevel
from applications import __main__ as cli
from applications import data, images
from applications import run as running
from applications.fixed import Fixed
from applications.run import claim, run, train
from applications.tables import read_csv
from applications.task import FIXED, SEARCHES, SELF_TUNING

TASKS = {task.name: task for task in images.TASKS}
WIDTH = {"mnist": 8, "fashion": 1 / 16, "alexnet": 1 / 32, "vgg16": 1 / 16, "resnet18": 1 / 16}
TINY = {"epochs": 1, "warmup": 0, "batch_size": 8, "limit": 16, "inner_steps": 1}


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(data, "synthetic_images", partial(data.synthetic_images, train=40, test=10))


def tiny(task, **changes):
    return dataclasses.replace(TASKS[task].presets["quick"], **{**TINY, "width": WIDTH[task], **changes})


def tiny_run(task, method, out, *, init=None, seed=0, seconds=None, plots=False, callbacks=(), **changes):
    settings = tiny(task, **changes)
    return run(
        TASKS[task],
        method,
        settings,
        out=out,
        data=None,
        seed=seed,
        init=init,
        seconds=seconds,
        callbacks=callbacks,
        progress=False,
        plots=plots,
    )


def build(task, init=None, **changes):
    settings = tiny(task, **changes)
    device = torch.device("cpu")
    return settings, TASKS[task].build(settings, data=None, folder=None, seed=0, device=device, init=init or {})


def command(*words):
    cli.main([str(word) for word in words])


@pytest.mark.parametrize("method", [*SELF_TUNING, *FIXED])
@pytest.mark.parametrize("task", TASKS)
def test_one_epoch_of_every_task_with_every_method(task, method, tmp_path):
    summary = tiny_run(task, method, tmp_path)
    history = (tmp_path / "history.csv").read_text(encoding="utf-8").splitlines()
    assert len(history) == 3
    assert summary["stopped"] == "epochs"
    assert summary["epochs"] == 1
    assert {"loss", "accuracy"} <= set(summary["valid"]) & set(summary["test"])
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == summary
    moved = summary["hyper"]["dropout"] != pytest.approx([0.05] * len(summary["hyper"]["dropout"]), abs=1e-6)
    assert moved == (method in SELF_TUNING)


def test_every_image_task_takes_every_method():
    assert all(set(task.methods) == {*SELF_TUNING, *FIXED, *SEARCHES} for task in TASKS.values())


def test_a_run_leaves_its_files(tmp_path):
    pytest.importorskip("matplotlib")
    summary = tiny_run("mnist", "delta_stn", tmp_path, plots=True)
    names = {"settings.json", "environment.json", "history.csv", "summary.json", "schedules.png", "best.pt"}
    assert {path.name for path in tmp_path.iterdir()} == names | {"checkpoint.pt", "checkpoint.pt.jsonl", "split.json"}
    assert summary["task"] == "mnist"
    assert summary["settings"]["width"] == 8
    assert torch.__version__ == json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))["torch"]


def test_the_summary_measures_the_best_weights(tmp_path):
    """By hand: the network in eval mode on the standardised images, whatever the last weights are."""
    summary = tiny_run("mnist", "fixed", tmp_path, epochs=3, learning_rate=0.5)
    _, experiment = build("mnist")
    experiment.net.load_state_dict(torch.load(tmp_path / "best.pt"))
    (batch,) = experiment.test
    loss, measures = experiment.outer_loss(
        bilevel.Model(dict(experiment.net.named_parameters()), experiment.net.eval()),
        {"dropout": torch.full((3,), 0.05)},
        batch,
    )
    assert summary["test"] == pytest.approx({"loss": loss.item(), "accuracy": measures["accuracy"].item()})


def test_fixed_is_plain_training():
    """The same batches in a loop of ten lines, with the same optimizer, give the same weights."""
    settings, experiment = build("mnist", init={"dropout": 1e-12}, epochs=3)  # nothing is dropped
    torch.manual_seed(0)
    batches = []
    loader = experiment.train
    experiment = dataclasses.replace(experiment, train=[batch for _ in range(3) for batch in loader])
    solution = train(experiment, "fixed", dataclasses.replace(settings, epochs=1), seed=0, progress=False)
    _, other = build("mnist")
    optimizer = torch.optim.SGD(other.net.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    pixels = torch.cat([x for x, _ in loader]).float() / 255
    for x, y in experiment.train:
        batches.append(len(y))
        logits = other.net((x / 255 - pixels.mean()) / pixels.std(correction=0), torch.zeros(3))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, y).backward()
        optimizer.step()
    assert batches == [8] * 6
    for name, value in other.net.named_parameters():
        torch.testing.assert_close(solution.params[name], value.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(solution.hyper["dropout"], torch.full((3,), 1e-12), rtol=1e-3, atol=0)


def seen_by(noise, *, shared=False):
    """The hyperparameters in natural units that the training loss gets, with 4,000 examples."""
    seen = []

    def loss(model, hyper, batch):
        seen.append(hyper["a"])
        return (model.params["w"] ** 2).sum()

    problem = bilevel.Problem(
        {"w": torch.zeros(1)}, inner_loss=loss, outer_loss=loss, hyper={"a": bilevel.real(3.0, shared=shared)}
    )
    solver = bilevel.Solver(problem, method=Fixed(noise), seed=0)
    solver.inner_step(torch.zeros(4000, 1))
    return seen[0]


def test_noise_perturbs_the_unconstrained_hyperparameters():
    draws = seen_by(0.5)
    assert draws.shape == (4000,)
    assert draws.mean().item() == pytest.approx(3.0, abs=0.05)
    assert draws.std().item() == pytest.approx(0.5, abs=0.03)
    assert torch.equal(seen_by(0.0).flatten().unique(), torch.tensor([3.0]))


def test_a_shared_hyperparameter_has_one_perturbation():
    (value,) = seen_by(0.5, shared=True).flatten().unique()
    assert value != 3.0


def test_the_noise_of_fixed_noise_is_the_scale(tmp_path):
    """No scale: the run of fixed. Some: another one. The hyperparameters stay in both."""
    plain = tiny_run("mnist", "fixed", tmp_path / "a")
    silent = tiny_run("mnist", "fixed_noise", tmp_path / "b", scale=0.0)
    noisy = tiny_run("mnist", "fixed_noise", tmp_path / "c", scale=1.0)
    assert plain["valid"] == silent["valid"] != noisy["valid"]
    assert plain["hyper"] == noisy["hyper"]


@pytest.mark.parametrize("method", ["delta_stn", "fixed_noise"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(method, tmp_path):
    whole = tiny_run("mnist", method, tmp_path / "whole", epochs=3)
    torch.rand(7)  # the state of the global generator does not matter
    first = tiny_run("mnist", method, tmp_path / "parts", epochs=1)
    both = tiny_run("mnist", method, tmp_path / "parts", epochs=3)
    assert first["epochs"] == 1
    changing = ("seconds", "processor_share")
    assert "processor_share" in whole and "processor_share" not in both  # of the second part only
    assert {k: v for k, v in both.items() if k not in changing} == {k: v for k, v in whole.items() if k not in changing}
    weights = [torch.load(tmp_path / name / "best.pt") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_that_could_not_begin_does_not_hold_its_folder(tmp_path):
    with pytest.raises(ValueError, match="mnist has no such hyperparameter"):
        tiny_run("mnist", "fixed", tmp_path, init={"dorpout": 0.1})
    tiny_run("mnist", "fixed", tmp_path, init={"dropout": 0.1}, seed=1)
    assert (tmp_path / "summary.json").exists()


def test_a_figure_that_cannot_be_drawn_costs_nothing_else(tmp_path, monkeypatch):
    def fail(*args):
        raise ImportError("no matplotlib")

    monkeypatch.setattr(bilevel.Solution, "plot", fail)
    with pytest.raises(ImportError, match="no matplotlib"):
        tiny_run("mnist", "fixed", tmp_path, plots=True)
    assert (tmp_path / "summary.json").exists() and (tmp_path / "best.pt").exists()


def diverge(event):
    """Lose the weights in the second epoch of two rounds."""
    if event.index == 4:
        raise bilevel.DivergenceError("the inner loss is nan")


def test_a_run_that_diverges_leaves_what_it_had(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(bilevel.DivergenceError, match="nan"):
        tiny_run("mnist", "delta_stn", tmp_path, epochs=3, callbacks=[diverge], plots=True)
    assert "the run diverged" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert (summary["stopped"], summary["epochs"]) == ("diverged", 2)
    rows = read_csv(tmp_path / "history.csv")
    assert len(rows) == 4
    best = min(float(row["validation_loss"]) for row in rows if row["validation_loss"])
    assert summary["valid"]["loss"] == pytest.approx(best)
    assert {"best.pt", "schedules.png"} <= {path.name for path in tmp_path.iterdir()}


def test_the_exit_code_tells_a_divergence(tmp_path, monkeypatch):
    monkeypatch.setattr("applications.run.train", lambda *args, **kwargs: diverge(SimpleNamespace(index=4)))
    with pytest.raises(SystemExit) as caught:
        command("mnist", "--width=8", "--out", tmp_path, "--quiet")
    assert caught.value.code == "error: the inner loss is nan"


@pytest.mark.filterwarnings("ignore:the hyperparameters cannot move far:bilevel.TuningWarning")
@pytest.mark.parametrize("method", ["delta_stn", "fixed"])
def test_an_unfinished_run_has_the_history_of_its_validation_passes(method, tmp_path):
    """Killed in the fourth epoch, and again in the sixth: three rows of warm-up have fewer columns."""

    def killed(at):
        def kill(event):
            if event.index == at:
                raise SystemError

        return kill

    changes = {"epochs": 7, "warmup": 1}
    for at, kept in ((7, 6), (12, 10)):
        with pytest.raises(SystemError):
            tiny_run("mnist", method, tmp_path / "parts", callbacks=[killed(at)], **changes)
        rows = read_csv(tmp_path / "parts" / "history.csv")
        assert [int(row["round"]) for row in rows][:kept] == list(range(1, kept + 1))
    tiny_run("mnist", method, tmp_path / "whole", **changes)
    whole = read_csv(tmp_path / "whole" / "history.csv")
    for row, expected in zip(rows, whole, strict=False):
        assert {**row, "seconds": ""} == {**expected, "seconds": ""}


@pytest.mark.filterwarnings("ignore:the hyperparameters cannot move far:bilevel.TuningWarning")
def test_an_unfinished_run_has_all_outer_steps_in_its_history(tmp_path):
    def kill(event):
        if event.index == 4:
            raise SystemError

    with pytest.raises(SystemError):
        tiny_run("mnist", "stn", tmp_path, callbacks=[kill], epochs=3, outer_steps=2)
    assert [int(row["round"]) for row in read_csv(tmp_path / "history.csv")] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_start_that_fails_in_the_solver_does_not_hold_its_folder(tmp_path):
    with pytest.raises(ValueError, match="time_budget"):
        tiny_run("mnist", "fixed", tmp_path, seconds=-1.0)
    tiny_run("mnist", "delta_stn", tmp_path, seed=1)
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["method"] == "delta_stn"


def test_the_split_of_the_same_run_stays(tmp_path):
    """Another process of a search may be reading it."""
    described = {"task": "mnist", "settings": {"epochs": 1}}
    claim(tmp_path, described)
    (tmp_path / "split.json").touch()
    claim(tmp_path, described)
    assert (tmp_path / "split.json").exists()
    claim(tmp_path, {**described, "task": "fashion"})
    assert not (tmp_path / "split.json").exists()


def test_the_environment_keeps_the_beginning(tmp_path, monkeypatch):
    for index, epochs in enumerate((1, 2, 2, 3)):
        monkeypatch.setattr("sys.argv", ["", "call", str(index)])
        tiny_run("mnist", "fixed", tmp_path, epochs=epochs)
    found = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert found["command"] == "python -m applications call 0"
    # The third call had nothing to do.
    assert [entry["command"][-1] for entry in found["continued"]] == ["1", "3"]


@pytest.mark.parametrize("text", ["[" * 10**5, "[]", '{"date": "\\ud800"}', "9" * 10**4, ""])
def test_a_foreign_environment_is_written_anew(tmp_path, capsys, text):
    (tmp_path / "environment.json").write_text(text)
    running.note_environment(tmp_path / "environment.json", torch.device("cpu"))
    assert "written anew" in capsys.readouterr().out
    assert "torch" in json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))


def test_fewer_epochs_than_were_made_are_refused(tmp_path):
    tiny_run("mnist", "fixed", tmp_path, epochs=3)
    before = (tmp_path / "settings.json").read_bytes()
    with pytest.raises(ValueError, match=r"--epochs 2: the run in .* has made 3 already"):
        tiny_run("mnist", "fixed", tmp_path, epochs=2)
    assert (tmp_path / "settings.json").read_bytes() == before
    for path in tmp_path.glob("checkpoint.pt*"):
        path.unlink()  # then there is nothing to go on from
    assert tiny_run("mnist", "fixed", tmp_path, epochs=2)["epochs"] == 2


def test_epochs_are_counted_in_long_rounds_too(tmp_path):
    """Rounds of two epochs and a half are followed by one validation pass each."""
    assert tiny_run("mnist", "fixed", tmp_path, inner_steps=5, epochs=9)["epochs"] == 10
    with pytest.raises(ValueError, match=r"--epochs 6: the run in .* has made 10 already"):
        tiny_run("mnist", "fixed", tmp_path, inner_steps=5, epochs=6)


def test_a_round_may_be_longer_than_the_run(tmp_path):
    """Five steps are two epochs and a half; the same command is still the same run."""
    first = tiny_run("mnist", "fixed", tmp_path, inner_steps=5)
    (tmp_path / "best.pt").unlink()  # so that it is not just read
    again = tiny_run("mnist", "fixed", tmp_path, inner_steps=5)
    assert again == {key: value for key, value in first.items() if key != "processor_share"}
    assert (tmp_path / "best.pt").exists()


def test_a_run_that_is_over_is_not_made_again(tmp_path, monkeypatch):
    first = tiny_run("mnist", "fixed", tmp_path)
    monkeypatch.setattr("applications.run.train", lambda *args, **kwargs: pytest.fail("trained"))
    assert tiny_run("mnist", "fixed", tmp_path) == first


def test_the_folder_of_another_run_is_refused(tmp_path):
    tiny_run("mnist", "fixed", tmp_path)
    before = (tmp_path / "settings.json").read_bytes()
    with pytest.raises(ValueError, match=r"holds another run: method was fixed, now it is stn.*another folder"):
        tiny_run("mnist", "stn", tmp_path)
    with pytest.raises(ValueError, match="holds another run: seed was 0, now it is 1"):
        tiny_run("mnist", "fixed", tmp_path, seed=1)
    with pytest.raises(ValueError, match="holds another run: settings was"):
        tiny_run("mnist", "fixed", tmp_path, batch_size=4)
    with pytest.raises(ValueError, match="holds another run: init was"):
        tiny_run("mnist", "fixed", tmp_path, init={"dropout": 0.3})
    assert (tmp_path / "settings.json").read_bytes() == before


def test_the_command_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "run"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, "width": 8}.items()]
    command("mnist", "--method", "fixed", "--init", "dropout=0.1,0.2,0.3", "--out", out, "--quiet", *words)
    printed = capsys.readouterr().out
    assert "small generated data" in printed
    assert "valid loss" in printed
    assert f"1.0 epochs in 0 s; see {out}" in printed
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["hyper"]["dropout"] == pytest.approx([0.1, 0.2, 0.3])
    assert summary["settings"]["width"] == 8
    # A preset that has an entropy weight can be told to have none.
    command("mnist", "--entropy", "none", "--only-input", "--out", tmp_path / "b", "--quiet", *words)
    summary = json.loads((tmp_path / "b" / "summary.json").read_text(encoding="utf-8"))
    assert summary["settings"]["entropy"] is None
    assert len(summary["hyper"]["dropout"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--init", "dropout"], "--init takes NAME=NUMBER or NAME=NUMBER,NUMBER,..., got 'dropout'"),
        (["--init", "dropout=a"], "got 'dropout=a'"),
        (["--init", "holes=1"], "--init holes: mnist has no such hyperparameter, but dropout"),
        (
            ["--init", "dropout=0.95"],
            "--init dropout: interval: init must be a finite number in (0, 0.95), the ends excluded",
        ),
        (["--trials", "3"], "--trials is for searches, --method delta_stn is none"),
        (["--method", "tpe", "--init", "dropout=0.1"], "--init: tpe chooses all values itself"),
        (["--data", "nowhere"], "nowhere"),
        (["--init", "dropout=0.1,0.2"], "--init dropout takes one number or 3, got 2: [0.1, 0.2]"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--inner-steps", "0"], "--inner-steps must be at least 1, got 0"),
        (["--momentum", "1"], "--momentum must be below 1, got 1.0"),
        (["--valid-share", "1.5"], "--valid-share must be below 1, got 1.5"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--learning-rate", "-1"], "--learning-rate must be above 0, got -1.0"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0, got nan"),
        (["--device", "banana"], "--device banana cannot be used: "),
        (["--device", "privateuseone"], "Try --device cpu, or leave it out."),
    ],
)
def test_bad_options_end_with_one_line(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        command("mnist", "--out", tmp_path / "run", "--quiet", *words)
    assert message in str(caught.value)
    assert str(caught.value).startswith("error: ")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_accelerator_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit, match=r"error: --device cuda cannot be used: .* Try --device cpu"):
        command("mnist", "--device", "cuda", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_download_without_a_network_ends_with_one_line(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with pytest.raises(SystemExit) as caught:
        command("download", "mnist", "--data", tmp_path)
    assert "no route to host" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("words", "entropy"), [(["--method=stn"], 1e-3), (["--method=delta_stn_paper"], 1e-4)])
@pytest.mark.parametrize("preset", ["paper", "quick"])
def test_an_stn_takes_the_preset_that_it_has(preset, words, entropy, tmp_path, monkeypatch, capsys):
    made = []
    summary = {"stopped": "epochs", "valid": {}, "test": {}, "epochs": 0, "seconds": 0.0}
    monkeypatch.setattr(cli, "run", lambda task, method, settings, **options: made.append(settings) or summary)
    command("vgg16", f"--preset={preset}", "--out", tmp_path, *words)
    command("vgg16", f"--preset={preset}", "--out", tmp_path, "--entropy=0.5", *words)
    assert [settings.entropy for settings in made] == [entropy, 0.5]
    assert (f"--preset {preset}_stn" in capsys.readouterr().out) == ("--method=stn" in words)
    command("ptb", f"--preset={preset}", "--out", tmp_path, *words)
    assert made[-1].response_learning_rate == (0.3 if "--method=stn" in words else None)
    command("mnist", f"--preset={preset}", "--out", tmp_path, *words)  # the paper has no other number here
    assert made[-1] == TASKS["mnist"].presets[preset]


@pytest.mark.parametrize("at", [1, 3])
def test_ctrl_c_tells_how_to_go_on(at, tmp_path, monkeypatch):
    """Before the first validation pass, and after it."""
    real = running.train

    def interrupted(*args, callbacks, **kwargs):
        def press(event):
            if event.index == at:
                raise KeyboardInterrupt

        return real(*args, callbacks=[*callbacks, press], **kwargs)

    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, "width": 8, "epochs": 3}.items()]
    words += ["--method", "fixed", "--out", tmp_path, "--quiet"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="interrupted; the same command goes on"):
        patch.setattr(running, "train", interrupted)
        command("mnist", *words)
    pytest.importorskip("matplotlib")
    command("mnist", *words)
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["epochs"] == 3


def test_a_comparison_draws_a_figure_beside_the_runs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for method in ("fixed", "stn"):
        tiny_run("mnist", method, tmp_path / "runs" / method)
    command("compare", tmp_path / "runs" / "fixed", tmp_path / "runs" / "stn" / "summary.json")
    figure = tmp_path / "runs" / "comparison.png"
    assert figure.stat().st_size > 10_000
    assert f"see {figure}" in capsys.readouterr().out
    figure.unlink()
    command("compare", tmp_path / "runs", "--out", tmp_path / "table.md")
    assert not figure.exists()
    assert (tmp_path / "table.png").exists()


URLS = [
    "postgresql://me:SECRET@host/db",
    "mysql+pymysql://:SECRET@host:99/db?a=b",
    "mysql://me:p@SECRET@host/db",
    "postgresql://host/db?user=me&password=SECRET",
    "postgresql://host/db?passwd=SECRET",
    "postgresql:///db?sslpassword=SECRET",
    "redis://SECRET@host",
    "me:SECRET@host",
    "SECRET",
    "postgresql://me:SE CRET SECRET@host/db",
]
FORMS = [
    lambda url: ["--storage", url],
    lambda url: [f"--storage={url}"],
    lambda url: ["--st", url],
    lambda url: [f"--stor={url}"],
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("url", URLS)
def test_the_storage_is_not_written_down(url, form, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "mnist", "--seed", "1", *form(url), "--out", "a folder"])
    found = running.environment(torch.device("cpu"))["command"]
    assert found == "python -m applications mnist --seed 1 --storage ... --out 'a folder'"


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"is not empty, but holds no settings\.json of a run"):
        tiny_run("mnist", "fixed", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_comparison_that_cannot_be_drawn_is_printed(tmp_path, capsys, monkeypatch):
    tiny_run("mnist", "fixed", tmp_path)

    def draw(table, path):
        raise PermissionError(path)

    monkeypatch.setattr("applications.compare.draw", draw)
    command("compare", tmp_path)
    printed = capsys.readouterr().out
    assert "| mnist" in printed
    assert f"no figure: {tmp_path / 'comparison.png'}" in printed


def test_help_of_every_command(capsys):
    for words in ([], ["mnist"], ["linear"], ["compare"], ["study"], ["study", "initial"]):
        with pytest.raises(SystemExit) as caught:
            command(*words, "--help")
        assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "--storage URL" in printed
    assert "does the schedule depend on where it starts?" in printed


def test_delta_stn_leaves_to_solve_what_it_does_not_take_from_the_paper(tmp_path, monkeypatch):
    """The paper's algorithm has the paper's warm-up, RMSprop and entropy; Δ-STN those of ``solve``."""
    made = []
    monkeypatch.setattr(bilevel, "solve", lambda *arguments, **options: made.append(options) or 1 / 0)
    for method in ("delta_stn", "delta_stn_paper", "stn"):
        with pytest.raises(ZeroDivisionError):
            command("mnist", f"--method={method}", "--out", tmp_path / method, "--quiet")
    with pytest.raises(ZeroDivisionError):
        command("mnist", "--outer-learning-rate=0.3", "--warmup=0", "--out", tmp_path / "own", "--quiet")
    new, paper, stn, own = made
    assert (new["outer_optimizer"], new["warmup"], new["method"].entropy) == (None, None, None)
    assert paper["outer_optimizer"].func is torch.optim.RMSprop
    assert paper["warmup"] == stn["warmup"] > 0
    assert paper["method"] == bilevel.DeltaSTN.paper()
    assert (own["outer_optimizer"].keywords["lr"], own["warmup"]) == (0.3, 0)
