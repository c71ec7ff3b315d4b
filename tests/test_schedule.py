"""The product of a run: schedules, their file, and their replay without the library."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bilevel
from applications.replay import replay

sgd = partial(torch.optim.SGD, lr=0.1)


def batches(seed, count=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, 5, generator=generator, dtype=torch.float64)
    return [(part, (part[:, 0] > 0).long() + (part[:, 1] > 0.5)) for part in x]


def mlp(rate=0.1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(rate), nn.Linear(8, 3)).double()


def tuned(net=None, **options):
    settings = {"epochs": 6, "inner_steps": 2, "optimizer": sgd, "outer_optimizer": partial(torch.optim.Adam, lr=0.3)}
    call = settings | {"label_smoothing": True, "warmup": 1, "progress": False} | options
    return bilevel.tune(net or mlp(), batches(0), batches(1), loss=F.cross_entropy, **call)


def validation_loss(net):
    net.eval()
    with torch.no_grad():
        return float(torch.stack([F.cross_entropy(net(x), y) for x, y in batches(1)]).mean())


@pytest.mark.parametrize("method", ["delta_stn", "centered_stn", "implicit_identity"])
def test_a_replay_gets_the_same_weights(method, tmp_path):
    """Bit for bit but for rounding, without dropout: the weights were trained with these values, unperturbed."""
    result = tuned(dropout=False, method=method, net=mlp(0.0))
    result.schedule().save(tmp_path / "schedule.json")
    net = mlp(0.0)
    moved = result.schedule().values["weight_decay.0"]
    assert len(set(moved)) > 5
    replay(net, batches(0), tmp_path / "schedule.json", epochs=6)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, result.state_dict[name], rtol=1e-9, atol=1e-9)
    assert validation_loss(net) == pytest.approx(result.solver.evaluate(batches(1)), rel=1e-9)
    fixed = mlp(0.0)
    data = json.loads((tmp_path / "schedule.json").read_text())
    data["values"] = {name: [values[0]] * len(values) for name, values in data["values"].items()}
    (tmp_path / "schedule.json").write_text(json.dumps(data))
    replay(fixed, batches(0), tmp_path / "schedule.json", epochs=6)
    assert validation_loss(fixed) != pytest.approx(validation_loss(net), rel=1e-6)


def test_a_replay_with_dropout_gets_about_the_same_loss(tmp_path):
    result = tuned(dropout=True, epochs=40, inner_steps=5)
    result.schedule().save(tmp_path / "schedule.json")
    net = mlp()
    start = validation_loss(net)
    replay(net, batches(0), tmp_path / "schedule.json", epochs=40)
    end = result.solver.evaluate(batches(1))
    assert abs(validation_loss(net) - end) < 0.15 * (start - end)
    assert net[2].p == pytest.approx(result.schedule().values["dropout.2"][-2])


def test_values_are_those_of_the_rounds():
    result = tuned(dropout=True)
    schedule = result.schedule()
    rounds = len(np.unique(result.history["round"]))
    assert schedule.rounds == rounds
    column = result.history["weight_decay.3"]
    for k in range(rounds):
        expected = 1e-4 if k == 0 else column[k - 1]
        assert schedule.at(k / rounds)["weight_decay.3"] == pytest.approx(expected)
        assert schedule.at((k + 0.99) / rounds)["weight_decay.3"] == pytest.approx(expected)
    assert schedule.final == {name: value.tolist() for name, value in result.hyper.items()}
    assert schedule.weights == {"weight_decay.0": ["0.weight"], "weight_decay.3": ["3.weight"]}
    assert schedule.dropout() == {"2": float(result.hyper["dropout.2"])}


def test_a_file_holds_all_of_it(tmp_path):
    schedule = tuned(dropout=True).schedule()
    schedule.save(tmp_path / "a.json")
    assert bilevel.Schedule.load(tmp_path / "a.json") == schedule
    json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)  # no NaN, which is no JSON


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "version": 1}', "nonsense"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is no schedule of version 1"):
        bilevel.Schedule.load(tmp_path / "a.json")


PARTS = [
    ("values", {}, "it has no values"),
    ("values", [], "it\\['values'\\] is a list of 0, not a dict"),
    ("values", {"rate": [0.1, "0.2", 0.3]}, "of 'rate' are not finite numbers of one shape"),
    ("values", {"rate": [0.1, True, 0.3]}, "of 'rate' are not finite numbers of one shape"),
    ("values", {"rate": [0.1, float("nan"), 0.3]}, "of 'rate' are not finite numbers of one shape"),
    ("values", {"rate": [0.1, 10**400, 0.3]}, "of 'rate' are not finite numbers of one shape"),
    ("values", {"rate": [[0.1], [0.1, 0.2], [0.3]]}, "of 'rate' are not finite numbers of one shape"),
    ("values", {"rate": [[0.1, [0.2]]] * 3}, "of 'rate' are not finite numbers of one shape"),
    ("values", {"rate": [0.1]}, "not 3 values for 'rate'"),
    ("rounds", -1, "'rounds'.* is -1, not a whole number"),
    ("rounds", 2.0, "'rounds'.* is 2.0, not a whole number"),
    ("weights", {"decay": ["0.weight"]}, "no values for 'decay'"),
    ("weights", {"rate": "0.weight"}, "'weights'.*is '0.weight', not a list"),
    ("modules", {"rate": [0]}, "'modules'.* is 0, not text"),
    ("modules", None, "'modules'.* is None, not a dict"),
    ("decoupled", ["decay"], "no values for 'decay'"),
    ("more", 1, "has 'more', which does not belong there"),
]


@pytest.mark.parametrize(("part", "value", "message"), PARTS)
def test_files_made_by_hand_are_refused_by_name(tmp_path, part, value, message):
    bilevel.Schedule({"rate": [0.1, 0.2, 0.3]}).save(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    bilevel.Schedule.load(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({**data, part: value}))
    with pytest.raises(ValueError, match=f"a.json is no schedule of version 1: .*{message}"):
        bilevel.Schedule.load(tmp_path / "a.json")


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"a\.json is no schedule of version 1: nested too deeply"):
        bilevel.Schedule.load(tmp_path / "a.json")


def test_a_file_that_was_cut_is_refused(tmp_path):
    schedule = tuned().schedule()
    schedule.save(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    data["values"]["label_smoothing"].pop()
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="is no schedule"):
        bilevel.Schedule.load(tmp_path / "a.json")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_groups_of_parameters_do_what_the_penalty_does(kind):
    """One step of each optimizer, with 2λ and with the penalty in the loss."""
    schedule = tuned().schedule()
    plain, penalised = mlp(0.0), mlp(0.0)
    x, y = batches(0)[0]
    optimizer = kind(schedule.param_groups(plain, kind), lr=0.1)
    F.cross_entropy(plain(x), y).backward()
    optimizer.step()
    params = dict(penalised.named_parameters())
    loss = F.cross_entropy(penalised(x), y)
    for name, weights in schedule.weights.items():
        loss = loss + schedule.final[name] * sum((params[weight] ** 2).sum() for weight in weights)
    loss.backward()
    kind(penalised.parameters(), lr=0.1).step()
    for one, other in zip(plain.parameters(), penalised.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_bad_arguments():
    schedule = tuned().schedule()
    with pytest.raises(ValueError, match="AdamW has no weight_decay that equals a penalty"):
        schedule.param_groups(mlp(), torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"no weight '0\.weight'"):
        schedule.param_groups(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"from 0 to 1, got 1\.5"):
        schedule.at(1.5)


def test_large_hyperparameters_have_no_schedule():
    problem = bilevel.Problem(
        {"w": torch.zeros(20)},
        inner_loss=lambda model, hyper, batch: ((model.params["w"] - hyper["a"]) ** 2).sum() * hyper["b"],
        outer_loss=lambda model, hyper, batch: ((model.params["w"] - 1) ** 2).sum(),
        hyper={"a": bilevel.real(torch.zeros(20)), "b": bilevel.positive(1.0)},
    )
    solution = bilevel.solve(problem, steps=3, progress=False, warmup=0)
    with pytest.raises(ValueError, match=r"'a' has 20 entries.*choose others by names"):
        solution.schedule()
    assert list(solution.schedule(["b"]).values) == ["b"]
    with pytest.raises(ValueError, match="no hyperparameter 'c'"):
        solution.schedule(["c"])
