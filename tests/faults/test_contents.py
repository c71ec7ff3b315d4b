"""Every part of what a run saved, replaced, removed or exchanged, with a right checksum."""

import random
import re
from functools import partial

import numpy as np
import pytest
import torch
from contents import call, kinds, may_be_accepted, mutants, places, replaced, words
from examples import assert_same, drive, make_solver
from faulty import count, run, tally
from torch import optim

import bilevel
from bilevel.checkpoint import load, save

KINDS = kinds()
SHORT = ("delta_stn", "optimizer 2", "optimizer 5", "counting", "stateful")
FOREIGN_WORDS = re.compile(r"Traceback|object has no attribute|object is not|unsupported operand|ambiguous|index out")
pytestmark = pytest.mark.filterwarnings("ignore::bilevel.CheckpointWarning", "ignore::UserWarning")


def sampled(state, number, seed):
    """Some of the states with one other part, each with its place, what was done, and whether it must be refused."""
    generator = random.Random(seed)
    every = [(place, case) for place, value in places(state) for case in mutants(value)]
    for place, (label, value, foreign) in generator.sample(every, min(number, len(every))):
        yield place, label, value, foreign


def global_numbers():
    legacy = np.random.get_state()
    return [*legacy[1].tolist(), *legacy[2:]], random.getstate()


def judge(error, where):
    text = str(error)
    assert text.startswith("checkpoint: ") and "\n" not in text and len(text) < 1200, where
    assert not FOREIGN_WORDS.search(text), (where, text)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_other_contents_of_a_run_end_in_one_error(tmp_path, name):
    """Or in a run that could really be in that state."""
    kind, file, log = KINDS[name], tmp_path / "run.pt", tmp_path / "run.pt.jsonl"
    call(kind, file, steps=4)
    good, history = load(file), log.read_bytes()
    refused = accepted = 0
    for place, label, value, foreign in sampled(good, count(10, 40), name):
        for override in (False, True):
            for left in tmp_path.iterdir():
                left.unlink()
            log.write_bytes(history)
            where = (words(place), label, override)
            state = replaced(good, place, value)
            if not isinstance(state, dict) or place[:3] == ("feeds", "train", "loader"):  # which only the loader knows
                continue
            save(file, state)
            drawn = global_numbers()
            try:
                call(kind, file, steps=5, resume="override" if override else True)
            except bilevel.CheckpointError as error:
                judge(error, where)
                assert global_numbers() == drawn, where
                refused += 1
                continue
            except bilevel.DivergenceError:  # numbers that are possible, and lead nowhere
                pass
            assert not foreign or may_be_accepted(place, label, good, override=override), where
            accepted += 1
    assert refused > accepted
    tally("checkpoints of runs with one other part and a right checksum, refused by CheckpointError", refused)
    tally("checkpoints of runs with one other part and a right checksum, states that a run may have", accepted)


@pytest.mark.parametrize("optimizer", [optim.Adam, partial(optim.SGD, momentum=0.5, lr=2**-7), optim.Adagrad])
def test_other_contents_of_a_solver_leave_it_as_it_was(tmp_path, optimizer):
    file = tmp_path / "solver.pt"
    make = partial(
        make_solver, inner_optimizer=optimizer, outer_scheduler=partial(optim.lr_scheduler.StepLR, step_size=2)
    )
    drive(make(), 3).save(file)
    good, solver = load(file), make()
    drive(solver, 1)
    before = solver.state_dict()
    refused = accepted = 0
    for place, label, value, foreign in sampled(good, count(60, 400), 0):
        for override in (False, True):
            where = (words(place), label, override)
            if not place:
                continue
            save(file, replaced(good, place, value))
            try:
                solver.load(file, override=override)
            except bilevel.CheckpointError as error:
                judge(error, where)
                assert_same(solver.state_dict(), before)
                refused += 1
                continue
            assert not foreign or may_be_accepted(place, label, good, override=override), where
            accepted += 1
            solver.load_state_dict(before)
    assert refused > accepted
    tally("files of Solver.save with one other part and a right checksum, refused, the solver as it was", refused)
    tally("files of Solver.save with one other part and a right checksum, states that a solver may have", accepted)


PLACES = [
    (("fingerprint", "network"), {}, "network has other settings"),
    (("fingerprint", "inner_loss"), {}, "inner_loss is another function"),
    (("fingerprint",), {}, "was of another run|is of another run"),
    (("fingerprint",), None, "fingerprint is None, not a dict"),
    (("best", "params", "0.weight"), torch.full((4, 3), torch.nan), r"best.*0.weight.* is NaN or infinite"),
    (("best", "params", "0.weight"), torch.zeros(3), r"best.*0.weight.* is torch.float32 \(3,\)"),
    (("best",), None, "best.* is None, but its log has validation losses"),
    (("best", "round"), 99, "a best round 99"),
    (("best", "validation_loss"), 1e-9, "has a validation loss of 1e-09, its log"),
    (("rounds",), 3, "rounds.* is 3, but its log ends with round 4"),
    (("stale",), 99, "stale 99"),
    (("signal", "squares"), torch.full((1,), -1.0), "squares.* has numbers from -1 to -1"),
    (("feeds", "train", "first"), None, "has no first batch"),
    (("feeds", "train", "given"), 10**9, "has drawn 10000000"),
    (("feeds", "train", "numbers", "moving"), "text", "moving.* is 'text', not a list"),
    (("global", 0, "state", "pos"), 10**6, "pos.* is 1000000, not a whole number from 0 to 624"),
    (("bad_steps", "dropped"), -1, "dropped.* is -1"),
    (("log", "bytes"), -1, "log"),
    (("ranks",), 5, "ranks.* is 5, not a list"),
    (("solver", "optimizers", "weights", "param_groups", 0, "foreach"), "yes", "foreach.* is 'yes', not None"),
    (("solver", "optimizers", "weights", "param_groups", 0, "lr"), -1.0, "lr.* is -1.0: Invalid learning rate"),
    (("solver", "optimizers", "weights", "param_groups", 0, "params"), [1, 0, 2, 3], "params"),
    (("solver", "optimizers", "hyper", "param_groups", 0, "betas"), (0.9, 2.0), "betas.* Invalid beta"),
    (("solver", "optimizers", "hyper", "state", 0, "exp_avg_sq"), torch.full((1,), -1.0), "exp_avg_sq"),
    (("solver", "optimizers", "hyper", "state", 0, "step"), torch.tensor(-3.0), "step.* not a number of steps"),
    (("solver", "response", "inner.buffers.running_var"), None, "running_var|response"),
]


def test_parts_that_were_once_accepted_are_refused_by_name(tmp_path):
    file, log = tmp_path / "run.pt", tmp_path / "run.pt.jsonl"
    run("delta_stn", file, steps=4)
    good, history = load(file), log.read_bytes()
    for place, value, message in PLACES:
        (tmp_path / "run.pt.1").unlink(missing_ok=True)
        log.write_bytes(history)
        *parents, last = place
        parent = good
        for key in parents:
            parent = parent[key]
        save(file, good | {last: value} if not parents else replaced(good, tuple(parents), put(parent, last, value)))
        with pytest.raises(bilevel.CheckpointError, match=message) as caught:
            run("delta_stn", file, steps=5)
        judge(caught.value, place)


def test_a_refusal_leaves_the_random_numbers_of_the_program(tmp_path):
    kind, file = KINDS["counting"], tmp_path / "run.pt"
    call(kind, file, steps=4)
    good = load(file)
    (tmp_path / "run.pt.1").unlink()
    save(file, replaced(good, ("feeds", "train", "first"), "another"))
    np.random.random(5)
    random.random()
    drawn = global_numbers()
    with pytest.raises(bilevel.CheckpointError, match=r"the first batch of pass .* is another one"):
        call(kind, file, steps=5)
    assert global_numbers() == drawn


def test_squares_of_hypergradients_that_overflow_do_not_keep_a_run_from_going_on(tmp_path):
    file = tmp_path / "run.pt"
    run("delta_stn", file, steps=4)
    save(file, replaced(load(file), ("signal", "squares"), torch.full((1,), torch.inf)))
    assert len(run("delta_stn", file, steps=5).history) == 5


def put(parent, key, value):
    if isinstance(parent, dict):
        return parent | {key: value}
    return [value if index == key else part for index, part in enumerate(parent)]
