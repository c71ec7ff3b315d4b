"""What a user may get wrong: every message names the argument, what it got, and what to do."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from examples import (
    assert_same,
    at_call,
    batches,
    drive,
    inner_loss,
    make_problem,
    make_solver,
    network,
    outer_loss,
    solve,
)
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bilevel
from bilevel import STN, CenteredSTN, DeltaSTN, History, Solver, Unrolled, integer, interval, positive, real

X, Y = batches()[0]
W = {"w": torch.zeros(3)}


def bad(name, trigger, error, message):
    return pytest.param(trigger, error, message, id=name)


def starting(weights):
    return make_problem(W, initial=lambda hyper: weights)


def other_optimizer(params):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def some_scheduler():
    return StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 1)


class Silent(IterableDataset):
    def __iter__(self):
        return iter(())


@dataclass(frozen=True)
class Nothing(bilevel.Method):
    def bind(self, problem):
        return None


HYPER = [
    bad("empty", lambda: make_problem(hyper={}), ValueError, r"hyper is empty: declare at least one.*positive"),
    bad("list", lambda: make_problem(hyper=["decay"]), TypeError, r"hyper must map names .* got list"),
    bad("None", lambda: make_problem(hyper=None), TypeError, r"hyper must map names .* got NoneType"),
    bad("number", lambda: make_problem(hyper={"decay": 0.1}), TypeError, r"hyper\['decay'\].*positive.*float: 0\.1"),
    bad("function", lambda: make_problem(hyper={"a": positive}), TypeError, r"hyper\['a'\] must be made by.*function"),
    bad("name", lambda: make_problem(hyper={1: real(0.0)}), TypeError, r"hyper: names must be strings, got 1"),
    bad(
        "name of a column",
        lambda: solve(make_problem(hyper={"outer_loss": real(0.0)})),
        ValueError,
        r"hyper: 'outer_loss' would be two columns of the history.*another name",
    ),
    bad(
        "two names of one column",
        lambda: solve(make_problem(hyper={"x": real([0.0, 1.0]), "x[0]": real(0.0)})),
        ValueError,
        r"hyper: 'x\[0\]' would be two columns of the history.*another name",
    ),
    bad("penalty of nothing", lambda: bilevel.l2({}), ValueError, r"penalty needs at least one tensor.*model.params"),
    bad(
        "real nan", lambda: real(math.nan), ValueError, r"real: init must be a finite number in \(-inf, inf\), got nan"
    ),
    bad("real inf", lambda: real([0.0, math.inf]), ValueError, r"real: init .*finite.* got \[0\.0, inf\]"),
    bad("real str", lambda: real("1.0"), TypeError, r"real: init must be a number or an array.* got '1\.0'"),
    bad("real None", lambda: real(None), TypeError, r"real: init must be a number or an array.* got None"),
    bad("real ragged", lambda: real([[1.0], [1.0, 2.0]]), TypeError, r"real: init must be a number or an array"),
    bad("real bool", lambda: real(True), TypeError, r"real: init must be a real number in \(-inf, inf\), got True"),
    bad("real bools", lambda: real(torch.tensor([True])), TypeError, r"real: init must be a real number.*\[True\]"),
    bad("real complex", lambda: real(1j), TypeError, r"real: init must be a real number in \(-inf, inf\), got 1j"),
    bad("real empty", lambda: real([]), ValueError, r"real: init is an empty array of shape \(0,\)"),
    bad("positive zero", lambda: positive(0.0), ValueError, r"positive: .*\(0, inf\), the ends excluded, got 0\.0"),
    bad(
        "positive negative", lambda: positive([1.0, -2.0]), ValueError, r"positive: .*\(0, inf\).* got \[1\.0, -2\.0\]"
    ),
    bad("positive nan", lambda: positive(math.nan), ValueError, r"positive: init .*\(0, inf\).* got nan"),
    bad("positive inf", lambda: positive(math.inf), ValueError, r"positive: init .*finite.*\(0, inf\).* got inf"),
    bad(
        "positive too small for float32",
        lambda: make_problem(hyper={"decay": positive(1e-60)}),
        ValueError,
        r"hyper\['decay'\]: init 1e-60 is too close to the end of \(0, inf\) for torch.float32; move it inside",
    ),
    bad(
        "real too large for float32",
        lambda: make_problem(hyper={"decay": real(1e60)}),
        ValueError,
        r"hyper\['decay'\]: init 1e\+60 .*torch.float32",
    ),
    bad(
        "interval lower edge", lambda: interval(0, 1, 0), ValueError, r"interval: .*\(0, 1\), the ends excluded, got 0"
    ),
    bad(
        "interval upper edge", lambda: interval(0, 1, 1), ValueError, r"interval: .*\(0, 1\), the ends excluded, got 1"
    ),
    bad("interval outside", lambda: interval(0, 1, 1.5), ValueError, r"interval: init .*\(0, 1\).* got 1\.5"),
    bad("interval nan", lambda: interval(0, 1, math.nan), ValueError, r"interval: init .*\(0, 1\).* got nan"),
    bad(
        "interval reversed", lambda: interval(2, 1, 1.5), ValueError, r"interval: needs finite lo < hi, got lo=2.* hi=1"
    ),
    bad("interval of one point", lambda: interval(1, 1, 1), ValueError, r"interval: needs finite lo < hi, got lo=1"),
    bad("interval infinite", lambda: interval(0, math.inf, 1), ValueError, r"interval: needs finite lo < hi.* hi=inf"),
    bad("interval str", lambda: interval("0", 1, 0.5), TypeError, r"interval: lo must be a number, got str: '0'"),
    bad("interval bool", lambda: interval(0, True, 0.5), TypeError, r"interval: hi must be a number, got bool: True"),
    bad(
        "integer fraction",
        lambda: integer(0, 4, 1.5),
        ValueError,
        r"integer: init must be a whole number in \[0, 4\].*1\.5",
    ),
    bad("integer outside", lambda: integer(0, 4, 5), ValueError, r"integer: init .*\[0, 4\], got 5\.0"),
    bad("integer nan", lambda: integer(0, 4, math.nan), ValueError, r"integer: init .*\[0, 4\], got nan"),
    bad(
        "integer bounds",
        lambda: integer(0.5, 4, 1),
        ValueError,
        r"integer: lo and hi .*whole.* 0\.5 and 4.*use interval",
    ),
    bad("integer infinite", lambda: integer(0, math.inf, 1), ValueError, r"integer: needs finite lo < hi.* hi=inf"),
]

PROBLEM = [
    bad("inner list", lambda: make_problem([W["w"]]), TypeError, r"inner must be an nn.Module or a mapping.* got list"),
    bad(
        "inner class", lambda: make_problem(nn.Linear), TypeError, r"inner must be an nn.Module or a mapping.* got type"
    ),
    bad(
        "inner tensor", lambda: make_problem(W["w"]), TypeError, r"inner must be an nn.Module or a mapping.* got Tensor"
    ),
    bad("inner empty", lambda: make_problem({}), ValueError, r"inner is an empty mapping: give at least one tensor"),
    bad(
        "inner names", lambda: make_problem({0: W["w"]}), TypeError, r"inner must map strings to tensors, got 0: Tensor"
    ),
    bad(
        "inner values",
        lambda: make_problem({"w": [0.0]}),
        TypeError,
        r"inner must map strings to tensors, got 'w': list",
    ),
    bad(
        "integer weights",
        lambda: make_problem({"w": torch.zeros(3, dtype=torch.int64)}),
        TypeError,
        r"'w'.*int64.*float",
    ),
    bad("complex weights", lambda: make_problem({"w": torch.zeros(3) * 1j}), TypeError, r"inner: 'w' .*complex64"),
    bad(
        "empty weights",
        lambda: make_problem({"w": torch.zeros(0, 3)}),
        ValueError,
        r"inner: 'w' is empty, shape \(0, 3\)",
    ),
    bad(
        "nan weights",
        lambda: make_problem({"w": torch.tensor(math.nan)}),
        ValueError,
        r"inner: 'w' has NaN or infinite values .*anew",
    ),
    bad("meta weights", lambda: make_problem(nn.Linear(3, 1, device="meta")), ValueError, r"'weight' .*meta.*to_empty"),
    bad("same tensor twice", lambda: make_problem({**W, "v": W["w"]}), ValueError, r"inner: 'w' and 'v' .*one name"),
    bad(
        "mixed dtypes",
        lambda: make_problem({**W, "v": torch.zeros(1).double()}),
        ValueError,
        r"inner: all weights must share one dtype, but 'w' has torch.float32 and 'v' has torch.float64; use .to",
    ),
    bad(
        "mixed devices",
        lambda: make_problem({**W, "v": torch.zeros(1, device="meta")}),
        ValueError,
        r"inner: all weights must share one device, but 'w' has cpu and 'v' has meta; use .to",
    ),
    bad("frozen module", lambda: make_problem(network().requires_grad_(False)), ValueError, r"inner.*requires_grad"),
    bad("module without weights", lambda: make_problem(nn.ReLU()), ValueError, r"inner has no trainable parameter"),
    bad("lazy module", lambda: make_problem(nn.LazyLinear(1)), ValueError, r"inner: parameter 'weight' .*call .* once"),
    bad("inner_loss", lambda: make_problem(inner_loss="mse"), TypeError, r"inner_loss must be a function.* got str"),
    bad(
        "outer_loss", lambda: make_problem(outer_loss=None), TypeError, r"outer_loss must be a function.* got NoneType"
    ),
    bad("initial", lambda: make_problem(initial=W), TypeError, r"initial must be a function .*weights.*, got dict"),
    bad("initial None", lambda: starting(None), TypeError, r"initial must return a mapping .*tensors, got NoneType"),
    bad("initial tensor", lambda: starting(W["w"]), TypeError, r"initial must return a mapping .*tensors, got Tensor"),
    bad("initial float", lambda: starting({"w": 0.0}), TypeError, r"initial must return tensors, got float for 'w'"),
    bad("initial name", lambda: starting({"ww": W["w"]}), ValueError, r"initial returned 'ww', .* did you mean 'w'\?"),
    bad(
        "initial shape",
        lambda: starting({"w": torch.zeros(3, 1)}),
        ValueError,
        r"initial returned 'w' with shape \(3, 1\), the weight has \(3,\)",
    ),
    bad("initial nan", lambda: starting({"w": W["w"] / 0}), ValueError, r"initial: 'w' has NaN or infinite values"),
    bad("initial integers", lambda: starting({"w": W["w"].int()}), TypeError, r"initial: 'w' .*floating.*int32"),
    bad("examples", lambda: make_problem(examples=5), TypeError, r"examples must be a function batch -> int, got int"),
    bad(
        "outer_mode", lambda: make_problem(outer_mode="test"), ValueError, r"outer_mode .*'eval' or 'train', got 'test'"
    ),
    bad(
        "outer_mode list", lambda: make_problem(outer_mode=[]), ValueError, r"outer_mode .*'eval' or 'train', got \[\]"
    ),
]

METHOD = [
    bad(
        "typo",
        lambda: solve(method="dleta_stn"),
        ValueError,
        r"unknown method 'dleta_stn': did you mean 'delta_stn'\?.*stn",
    ),
    bad("no such method", lambda: solve(method="???"), ValueError, r"unknown method '\?\?\?': Known: .*delta_stn"),
    bad("class", lambda: solve(method=STN), TypeError, r"method must be an instance, got the class STN: write STN\(\)"),
    bad("None", lambda: solve(method=None), TypeError, r"method must be a name or a method such as .* got NoneType"),
    bad(
        "binds nothing",
        lambda: solve(method=Nothing()),
        TypeError,
        r"Nothing.bind must return .*BestResponse, got NoneType",
    ),
    bad("scale zero", lambda: STN(scale=0), ValueError, r"STN: scale must be a positive number.* got 0"),
    bad(
        "scale nan",
        lambda: DeltaSTN(scale=math.nan),
        ValueError,
        r"DeltaSTN: scale must be a positive number.* got nan",
    ),
    bad("scale str", lambda: CenteredSTN(scale="1"), ValueError, r"CenteredSTN: scale must be a positive.* got '1'"),
    bad("entropy", lambda: STN(entropy=-1e-3), ValueError, r"STN: entropy must be None .*at least 0, got -0\.001"),
    bad("entropy bool", lambda: STN(entropy=True), ValueError, r"STN: entropy must be None .*at least 0, got True"),
    bad(
        "perturb_outer",
        lambda: STN(perturb_outer="no"),
        ValueError,
        r"STN: perturb_outer .*True, False or None, got 'no'",
    ),
    bad("perturb_outer list", lambda: STN(perturb_outer=[]), ValueError, r"STN: perturb_outer .*True.*None, got \[\]"),
    bad(
        "learned scale",
        lambda: STN(entropy=1, perturb_outer=False),
        ValueError,
        r"perturb_outer=False .*use entropy=None",
    ),
    bad("max_gigabytes", lambda: STN(max_gigabytes=0), ValueError, r"STN: max_gigabytes must be positive, got 0"),
    bad("unrolled steps", lambda: Unrolled(steps=0), ValueError, r"Unrolled: steps must be .*at least 1, got 0"),
    bad("unrolled steps float", lambda: Unrolled(steps=2.0), ValueError, r"Unrolled: steps must be .*1, got 2\.0"),
    bad("unrolled steps bool", lambda: Unrolled(steps=True), ValueError, r"Unrolled: steps must be .*1, got True"),
    bad("unrolled steps None", lambda: Unrolled(steps=None), ValueError, r"Unrolled: steps must be .*1, got None"),
    bad(
        "truncate zero", lambda: Unrolled(truncate=0), ValueError, r"Unrolled: truncate .*1 to steps=20, or None, got 0"
    ),
    bad("truncate too long", lambda: Unrolled(steps=4, truncate=5), ValueError, r"truncate .*1 to steps=4, .* got 5"),
    bad("truncate bool", lambda: Unrolled(truncate=True), ValueError, r"Unrolled: truncate must be .* got True"),
    bad("mode", lambda: Unrolled(mode="backward"), ValueError, r"mode must be 'reverse' or 'forward', got 'backward'"),
    bad("mode list", lambda: Unrolled(mode=[]), ValueError, r"mode must be 'reverse' or 'forward', got \[\]"),
    bad("checkpoint", lambda: Unrolled(checkpoint=5), ValueError, r"checkpoint must be True or False, got 5"),
    bad("restart", lambda: Unrolled(restart="yes"), ValueError, r"restart must be True or False, got 'yes'"),
    bad(
        "checkpoint forward",
        lambda: Unrolled(checkpoint=True, mode="forward"),
        ValueError,
        r"checkpoint=True is for mode='reverse'; .*one step",
    ),
    bad(
        "forward mode too large",
        lambda: solve(
            make_problem({"w": torch.zeros(10**6)}, hyper={"decay": real(torch.zeros(2000))}), method="unrolled_forward"
        ),
        MemoryError,
        r"1,000,000 weights to 2,000 hyperparameters takes 8\.0 GB.*mode='reverse'",
    ),
    bad(
        "no derivative of the optimizer",
        lambda: solve(method="unrolled", inner_optimizer=torch.optim.Rprop),
        TypeError,
        r"inner_optimizer made a Rprop, .*it can: SGD, Adam, AdamW, RMSprop, Adagrad",
    ),
    bad(
        "one batch for many steps",
        lambda: make_solver(method="unrolled").outer_step((X, Y), (X, Y)),
        ValueError,
        r"train_batch must be a list of 20 batches.*got a tuple; .*\[batch\] \* 20",
    ),
    bad(
        "too few batches",
        lambda: make_solver(method="unrolled").outer_step([(X, Y)] * 19, (X, Y)),
        ValueError,
        r"train_batch must be a list of 20 batches.*got 19; .*\[batch\] \* 20",
    ),
    bad("objective", lambda: CenteredSTN(objective="x"), ValueError, r"objective must be 'centered' or 'stn', got 'x'"),
    bad(
        "dense response too large",
        lambda: solve(make_problem({"w": torch.zeros(10**6)}, hyper={"decay": real(torch.zeros(2000))})),
        MemoryError,
        r"1,000,000 weights to 2,000 hyperparameters takes 8\.0 GB.*limit is 4 GB.*max_gigabytes",
    ),
]

SOLVER = [
    bad("problem", lambda: Solver(network()), TypeError, r"problem must be a bilevel.Problem, got Sequential"),
    bad("seed negative", lambda: solve(seed=-1), ValueError, r"seed must be at least 0, got -1"),
    bad("seed float", lambda: solve(seed=0.0), TypeError, r"seed must be an integer, got float: 0\.0"),
    bad("seed None", lambda: solve(seed=None), TypeError, r"seed must be an integer, got NoneType: None"),
    bad("clip zero", lambda: solve(inner_clip=0), ValueError, r"inner_clip must be positive and finite, got 0; None"),
    bad("clip nan", lambda: solve(outer_clip=math.nan), ValueError, r"outer_clip must be positive and finite, got nan"),
    bad("clip str", lambda: solve(inner_clip="1"), TypeError, r"inner_clip must be a number or None, got str: '1'"),
    bad("clip bool", lambda: solve(outer_clip=True), TypeError, r"outer_clip must be a number or None, got bool: True"),
    bad(
        "optimizer instance",
        lambda: solve(inner_optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)),
        TypeError,
        r"inner_optimizer must be a factory, got an instance of SGD; write .*lambda params: torch.optim.SGD\(params",
    ),
    bad(
        "optimizer name",
        lambda: solve(outer_optimizer="adam"),
        TypeError,
        r"outer_optimizer .*function params.* got str",
    ),
    bad("optimizer zero", lambda: solve(inner_optimizer=0), TypeError, r"inner_optimizer .*function params.* got int"),
    bad(
        "factory of None",
        lambda: solve(inner_optimizer=lambda p: None),
        TypeError,
        r"inner_optimizer must return.* NoneType",
    ),
    bad(
        "factory of another",
        lambda: solve(response_optimizer=other_optimizer),
        ValueError,
        r"response_optimizer made an optimizer of other parameters.*pass its argument on",
    ),
    bad(
        "LBFGS",
        lambda: solve(inner_optimizer=torch.optim.LBFGS),
        TypeError,
        r"inner_optimizer .*LBFGS.*closure; use SGD",
    ),
    bad(
        "scheduler instance",
        lambda: solve(inner_scheduler=some_scheduler()),
        TypeError,
        r"inner_scheduler must be a factory, got a StepLR instance; write .*lambda optimizer: .*StepLR\(optimizer",
    ),
    bad(
        "scheduler str",
        lambda: solve(outer_scheduler="step"),
        TypeError,
        r"outer_scheduler must be a function.* got str",
    ),
    bad(
        "scheduler of None",
        lambda: solve(outer_scheduler=lambda o: None),
        TypeError,
        r"outer_scheduler must return.* None",
    ),
    bad(
        "scheduler of another",
        lambda: solve(outer_scheduler=lambda o: some_scheduler()),
        ValueError,
        r"outer_scheduler made a scheduler of another optimizer.*pass its argument on",
    ),
]

RUN = [
    bad("steps zero", lambda: solve(steps=0), ValueError, r"steps must be at least 1, got 0"),
    bad("steps negative", lambda: solve(steps=-5), ValueError, r"steps must be at least 1, got -5"),
    bad("steps float", lambda: solve(steps=1e3), TypeError, r"steps must be an integer, got float: 1000\.0"),
    bad("steps bool", lambda: solve(steps=True), TypeError, r"steps must be an integer, got bool: True"),
    bad("epochs zero", lambda: solve(epochs=0), ValueError, r"epochs must be at least 1, got 0"),
    bad(
        "steps and epochs",
        lambda: solve(steps=3, epochs=2),
        ValueError,
        r"steps or epochs, not both.*steps=3, epochs=2",
    ),
    bad(
        "epochs without train", lambda: solve(train=None, epochs=2), ValueError, r"epochs .*train, which is None.*steps"
    ),
    bad("inner_steps", lambda: solve(inner_steps=0), ValueError, r"inner_steps must be at least 1, got 0"),
    bad(
        "inner_steps unrolled",
        lambda: solve(inner_steps=-1, method="unrolled"),
        ValueError,
        r"inner_steps must be at least 0, got -1",
    ),
    bad("inner_steps float", lambda: solve(inner_steps=2.0), TypeError, r"inner_steps must be an integer, got float"),
    bad(
        "inner_steps forgotten",
        lambda: solve(inner_steps=1, method=Unrolled(restart=True)),
        ValueError,
        r"inner_steps must be 0 with Unrolled\(.*restart=True\), .*; got 1",
    ),
    bad(
        "warmup forgotten",
        lambda: solve(inner_steps=None, warmup=2, method=Unrolled(restart=True)),
        ValueError,
        r"warmup must be 0 with Unrolled\(.*restart=True\), .*; got 2",
    ),
    bad("outer_steps", lambda: solve(outer_steps=0), ValueError, r"outer_steps must be at least 1, got 0"),
    bad(
        "outer_steps None", lambda: solve(outer_steps=None), TypeError, r"outer_steps must be an integer, got NoneType"
    ),
    bad("warmup", lambda: solve(warmup=-1), ValueError, r"warmup must be at least 0, got -1"),
    bad("warmup float", lambda: solve(warmup=0.5), TypeError, r"warmup must be an integer, got float: 0\.5"),
    bad("evaluate_every", lambda: solve(evaluate_every=0), ValueError, r"evaluate_every must be at least 1, got 0"),
    bad("patience", lambda: solve(patience=0), ValueError, r"patience must be at least 1, got 0"),
    bad(
        "time_budget",
        lambda: solve(time_budget=0),
        ValueError,
        r"time_budget must be a positive number of seconds, got 0",
    ),
    bad(
        "time_budget nan", lambda: solve(time_budget=math.nan), ValueError, r"time_budget must be a positive.* got nan"
    ),
    bad("time_budget str", lambda: solve(time_budget="1h"), TypeError, r"time_budget .*number of seconds.* got '1h'"),
    bad(
        "callbacks function",
        lambda: solve(callbacks=print),
        TypeError,
        r"callbacks must be a list of functions.* print",
    ),
    bad("callbacks entries", lambda: solve(callbacks=["log"]), TypeError, r"callbacks must be a list .* got \['log'\]"),
    bad("progress", lambda: solve(progress="yes"), TypeError, r"progress must be True, False or None, got 'yes'"),
    bad("progress list", lambda: solve(progress=[]), TypeError, r"progress must be True, False or None, got \[\]"),
]

LOADERS = [
    bad(f"{which} {name}", partial(solve, **{which: loader}), error, message.replace("LOADER", which))
    for which, (name, loader, error, message) in product(
        ("train", "valid"),
        [
            ("tensor", X, TypeError, r"LOADER must be an iterable of batches .* got Tensor; wrap .*\[batch\]"),
            ("array", X.numpy(), TypeError, r"LOADER must be an iterable of batches .* got ndarray"),
            ("string", "mnist", TypeError, r"LOADER must be an iterable of batches .* got str"),
            ("number", 5, TypeError, r"LOADER must be an iterable of batches .* got int"),
            ("dict", {"x": X}, TypeError, r"LOADER must be an iterable of batches .* got dict"),
            (
                "generator",
                (batch for batch in [X]),
                TypeError,
                r"LOADER is a generator, exhausted after one pass: give a",
            ),
            ("iterator", iter([X]), TypeError, r"LOADER is a list_iterator, exhausted after one pass: give a list"),
            ("tuple", (X, Y), TypeError, r"LOADER is a tuple of tensors, .*one batch: write LOADER=\[\(x, y\)\]"),
            ("dataset", TensorDataset(X, Y), TypeError, r"LOADER must yield batches, but a TensorDataset.*DataLoader"),
            ("empty list", [], ValueError, r"LOADER is empty: a list of length 0; give at least one batch"),
            (
                "empty DataLoader",
                DataLoader(TensorDataset(X), batch_size=99, drop_last=True),
                ValueError,
                r"LOADER is empty: a DataLoader of length 0",
            ),
        ],
    )
] + [
    bad(
        "silent train", lambda: solve(train=DataLoader(Silent())), ValueError, r"train yielded no batch in pass 1: give"
    )
]


def counted(model, hyper, batch):
    """The usual inner loss, which counts its calls."""
    counted.calls += 1
    return inner_loss(model, hyper, batch)


@pytest.mark.parametrize(("trigger", "error", "message"), [*HYPER, *PROBLEM, *METHOD, *SOLVER, *RUN, *LOADERS])
def test_raised_before_work_starts(trigger, error, message, monkeypatch):
    counted.calls = 0
    monkeypatch.setattr("examples.inner_loss", counted)
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        trigger()
    assert counted.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


OWN = network()

LOSSES = [
    ("None", lambda model, hyper, batch: None, TypeError, r"must return a Tensor, or a pair .*; got NoneType"),
    ("float", lambda model, hyper, batch: 0.5, TypeError, r"must return a Tensor, or a pair .*; got float"),
    ("list", lambda model, hyper, batch: [model(X)], TypeError, r"must return a Tensor, or a pair .*; got list"),
    ("triple", lambda model, hyper, batch: (model(X).mean(), 1, 2), TypeError, r"must return a Tensor.*; got tuple"),
    ("integer", lambda model, hyper, batch: torch.tensor(1), TypeError, r"must return a real .*got dtype torch.int64"),
    ("complex", lambda model, hyper, batch: model(X).mean() * 1j, TypeError, r"must return a real .*torch.complex64"),
    (
        "wrong length",
        lambda model, hyper, batch: model(X)[:2, 0],
        ValueError,
        r"must return a loss of shape \(\) or \(5,\), one value per example, got \(2,\)\. Take the mean.*examples",
    ),
    ("matrix", lambda model, hyper, batch: model(X), ValueError, r"must return a loss of shape .* got \(5, 1\)"),
    (
        "hyper typo",
        lambda model, hyper, batch: hyper["decya"],
        KeyError,
        r"no hyperparameter 'decya': did you mean 'decay'\?",
    ),
    (
        "parameter typo",
        lambda model, hyper, batch: model.params["0.wieght"].sum(),
        KeyError,
        r"no parameter '0.wieght': did you mean '0.weight'\?",
    ),
    (
        "module attribute",
        lambda model, hyper, batch: sum(p.sum() for p in model.parameters()),
        AttributeError,
        r"bilevel.Model, which has no 'parameters': use model\(...\) to predict and model.params",
    ),
    (
        "signature",
        lambda model, batch: model(X).mean(),
        TypeError,
        r"3 were given.*while evaluating NAME\(model, hyper, batch",
    ),
    ("own module", lambda model, hyper, batch: OWN(X).mean(), ValueError, r"depends on your own module.*model\(...\)"),
    (
        "own module beside a penalty",
        lambda model, hyper, batch: OWN(X).mean() + hyper["decay"] * bilevel.l2(model.params),
        ValueError,
        r"depends on your own module.*model.params",
    ),
    (
        "detached",
        lambda model, hyper, batch: model(X).mean().detach(),
        ValueError,
        r"depends? (neither )?on the weights.*model\(...\).*without detach\(\)",
    ),
    (
        "constant",
        lambda model, hyper, batch: torch.zeros(()),
        ValueError,
        r"depends? (neither )?on the weights.*model\(...\)",
    ),
    (
        "shape of the batch",
        lambda model, hyper, batch: model(batch.T).mean(),
        RuntimeError,
        r"shapes cannot be multiplied.*while evaluating NAME",
    ),
]


@pytest.mark.parametrize("name", ["inner_loss", "outer_loss"])
@pytest.mark.parametrize(("loss", "error", "message"), [pytest.param(*row[1:], id=row[0]) for row in LOSSES])
def test_bad_losses_leave_the_solver_as_it_was(name, loss, error, message):
    solver = make_solver(make_problem(OWN, **{name: loss}), method=DeltaSTN(entropy=1e-3, perturb="batch"))
    before = solver.state_dict()
    with pytest.raises(error, match="(?s)" + message.replace("NAME", name)) as caught:
        solver.inner_step(X) if name == "inner_loss" else solver.outer_step(X, X)
    assert name in str(caught.value) + str(getattr(caught.value, "__notes__", ""))
    assert_same(solver.state_dict(), before)


def test_a_batch_of_another_dtype_is_told_from_the_weights():
    doubles = [(x.double(), y.double()) for x, y in batches()]
    for level, changes in (("inner", {"train": doubles}), ("outer", {"valid": doubles})):
        note = rf"while evaluating {level}_loss.*weights: torch.float32 on cpu; batch: torch.float64 \(5, 3\) on cpu"
        with pytest.raises(RuntimeError, match=rf"(?s)dtype.*{note}"):
            solve(**changes)


def test_a_problem_without_a_network_cannot_predict():
    solver = make_solver(make_problem(W, inner_loss=lambda model, hyper, batch: model(batch).mean()))
    with pytest.raises(TypeError, match=r"needs a network, but inner is a mapping of tensors: use model.params"):
        solver.inner_step(X)


def nan_gradient(loss):
    """Finite, but with the gradient of a square root at zero."""
    return lambda model, hyper, batch: loss(model, hyper, batch) + (0 * model.params["0.bias"]).sum().abs().sqrt()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("method", ["centered_stn", "delta_stn", "stn"])
@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
@pytest.mark.parametrize("step", [0, 3])
def test_an_inner_loss_that_is_not_finite_is_named_and_undone(method, value, shown, step):
    module = network(nn.BatchNorm1d(4), nn.Dropout(0.5))
    usual = make_solver(make_problem(module), method=method, inner_optimizer=torch.optim.Adam)
    learns = partial(usual.response.learns, optimizer=usual.optimizers["response"])
    calls = sum(1 + (method != "stn" and learns(earlier)) for earlier in range(step + 1))
    bad_loss = at_call(calls - 1, lambda loss: loss + value, inner_loss)  # the last term
    solver = make_solver(make_problem(module, inner_loss=bad_loss), method=method, inner_optimizer=torch.optim.Adam)
    for batch in batches()[:step]:
        solver.inner_step(batch)
    before = solver.state_dict()
    message = rf"the inner loss is {shown}.* at inner step {step}, counted from 0.*inner_clip"
    with pytest.raises(bilevel.DivergenceError, match=message):
        solver.inner_step((X, Y))
    assert_same(solver.state_dict(), before)
    assert all(param.grad is None for param in solver.response.parameters())
    solver.inner_step((X, Y))  # the loss is finite again, and the run goes on


@pytest.mark.usefixtures("unchecked")
def test_a_loss_that_is_bad_at_perturbed_hyperparameters_only_says_so():
    solver = make_solver(make_problem(inner_loss=at_call(0, lambda loss: loss * math.nan, inner_loss)))
    with pytest.raises(bilevel.DivergenceError, match=r"inner loss is \S+, at perturbed hyperparameters nan"):
        solver.inner_step((X, Y))


def test_a_gradient_that_is_not_finite_is_told_from_the_loss():
    inner = make_solver(make_problem(inner_loss=nan_gradient(inner_loss)), method=DeltaSTN(perturb="batch"))
    with pytest.raises(bilevel.DivergenceError, match=r"the inner loss is \d\S*,.* gradient norm nan at inner step 0"):
        inner.inner_step((X, Y))
    outer = make_solver(make_problem(outer_loss=nan_gradient(outer_loss)))
    before = drive(outer, 0).state_dict()
    with pytest.raises(
        bilevel.DivergenceError, match=r"the outer loss is \d\S* and the norm of the hypergradient nan at outer step 0"
    ):
        outer.outer_step((X, Y), (X, Y))
    assert_same(outer.state_dict(), before)


def test_an_outer_loss_that_is_not_finite_is_named_and_undone():
    solver = make_solver(make_problem(outer_loss=at_call(2, lambda loss: loss * math.nan, outer_loss)))
    before = drive(solver, 2).state_dict()
    with pytest.raises(
        bilevel.DivergenceError, match=r"the outer loss is nan .* at outer step 2, counted from 0.*outer_clip"
    ):
        solver.outer_step((X, Y), (X, Y))
    assert_same(solver.state_dict(), before)


@pytest.mark.usefixtures("unchecked")
def test_a_diverging_run_keeps_best_and_history():
    loss = at_call(2 * 5 + 1, lambda loss: loss * math.nan, inner_loss)  # the last term of the sixth step
    with pytest.raises(bilevel.DivergenceError, match=r"inner loss is nan.* at inner step 5") as caught:
        solve(make_problem(inner_loss=loss), steps=9, evaluate_every=1)
    solution, undisturbed = caught.value.solution, solve(steps=2, evaluate_every=1)
    assert solution.stopped == "diverged"
    assert solution.history["validation_loss"].tolist() == undisturbed.history["validation_loss"].tolist()
    assert_same(vars(solution.best), vars(undisturbed.best))
    assert all(value.isfinite().all() for value in solution.params.values())


def test_a_full_validation_pass_that_is_not_finite_keeps_the_rows_before_it():
    valid = batches(seed=1)
    valid[3] = (X, Y * math.nan)
    with pytest.raises(
        bilevel.DivergenceError, match=r"over the whole set is nan after 2 inner steps: lower"
    ) as caught:
        solve(valid=valid, steps=9, evaluate_every=1)
    assert caught.value.solution.history["round"].tolist() == [1]
    assert caught.value.solution.best is None


def test_a_loader_that_yields_nothing_to_evaluate():
    with pytest.raises(ValueError, match=r"loader is empty: .*at least one batch"):
        make_solver().evaluate(DataLoader(Silent()))


def other(**changes):
    """The state of a solver that differs."""
    problem = make_problem(**changes.pop("problem", {}))
    return drive(make_solver(problem, **changes), 1).state_dict()


def changed(key, value):
    """A fitting state with one entry replaced."""
    return other() | {key: value}


def with_a_parameter_too_many():
    """A state that fits in all that can be compared beforehand, and fails halfway through loading."""
    state = other()
    state["optimizers"]["hyper"]["param_groups"][0]["params"] = [0, 1]
    return state


STATES = [
    ("None", lambda: None, r"not a Solver.state_dict\(\): it lacks hyper, inner_steps"),
    ("the module's", lambda: network().state_dict(), r"not a Solver.state_dict\(\): it lacks hyper"),
    ("another method", lambda: other(method="stn"), r"saved with method STN\(.*, this solver has DeltaSTN\("),
    (
        "another setting",
        lambda: other(method=DeltaSTN(scale=2)),
        r"method DeltaSTN\(scale=2.*solver has DeltaSTN\(scale=1",
    ),
    (
        "another hyper",
        lambda: other(problem={"hyper": {"decay": positive(1.0), "rate": real(0.0)}}),
        r"saved with hyper .*'rate'.*, this solver has \{'decay'",
    ),
    (
        "another range",
        lambda: other(problem={"hyper": {"decay": interval(0, 1, 0.5)}}),
        r"hyper \{'decay': \[0.0, 1.0, False\]\}, this solver has \{'decay': \[0.0, inf",
    ),
    (
        "other shapes",
        lambda: other(problem={"inner": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))}),
        r"state\['response'\]\['inner.weights.0'\] is torch.float32 \(5, 3\), not torch.float32 \(4, 3\)",
    ),
    (
        "another network",
        lambda: other(problem={"inner": network(nn.Linear(4, 4))}),
        r"state\['response'\] has 'inner.weights.4', which does not belong there",
    ),
    (
        "another optimizer",
        lambda: other(inner_optimizer=torch.optim.Adam),
        r"state\['optimizers'\]\['weights'\]\['param_groups'\]\[0\] lacks 'momentum' and has 'betas'",
    ),
    (
        "schedulers",
        lambda: other(inner_scheduler=partial(StepLR, step_size=1)),
        r"\['schedulers'\] has 'weights', which does not belong there",
    ),
    (
        "vector",
        lambda: changed("vector", [0.0]),
        r"state\['vector'\] is a list of 1, not torch.float32 \(1,\)",
    ),
    ("response", lambda: changed("response", None), r"state\['response'\] is None, not a dict"),
    (
        "a parameter too many",
        with_a_parameter_too_many,
        r"\['params'\] is a list of 2, not a list of 1",
    ),
    ("counts", lambda: changed("inner_steps", "2"), r"state\['inner_steps'\] is '2', not a whole number from 0 on"),
    (
        "random state",
        lambda: changed("streams", {name: [torch.zeros(3)] for name in ("data", "loss", "evaluation")}),
        r"random state does not fit this solver, which draws on cpu",
    ),
    (
        "random state of two devices",
        lambda: changed("streams", {name: [torch.get_rng_state()] * 2 for name in ("data", "loss", "evaluation")}),
        r"random state does not fit .*kind of device it was started on",
    ),
]


@pytest.mark.parametrize(("state", "message"), [pytest.param(*row[1:], id=row[0]) for row in STATES])
def test_states_of_another_solver_are_refused(state, message):
    solver = drive(make_solver(), 2)
    before = solver.state_dict()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        solver.load_state_dict(state())
    assert_same(solver.state_dict(), before)


def test_an_unknown_column_of_the_history():
    history = History()
    with pytest.raises(KeyError, match=r"no column 'outer_los': Known: none"):
        history["outer_los"]
    history.append({"round": 1, "outer_loss": 0.5})
    with pytest.raises(KeyError, match=r"no column 'outer_los': did you mean 'outer_loss'\?.*round"):
        history["outer_los"]


def test_plotting_needs_rows_and_matplotlib(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match=r"nothing to plot: the run ended before its first round"):
        solve(make_problem(inner_loss=interrupt)).plot()
    for module in ("matplotlib", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"plot needs matplotlib: pip install 'bilevel\[plot\]'"):
        solve(steps=1).plot()


def test_frames_need_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas needs pandas: pip install pandas"):
        History().to_pandas()
