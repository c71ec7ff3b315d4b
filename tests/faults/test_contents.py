"""Every part of what a run saved, replaced, removed or exchanged, with a right checksum."""

import copy
import random
import re
import warnings
from itertools import islice

import numpy as np
import pytest
from contents import call, kinds, may_be_accepted, mutants, places, replaced, words
from examples import assert_same, drive, make_solver
from faulty import LONG, count, tally

import bilevel
from bilevel.checkpoint import load, save

KINDS = kinds()
SHORT = ("delta_stn", "optimizer 2", "optimizer 5", "counting", "stateful")
FOREIGN_WORDS = re.compile(
    r"Traceback|object has no attribute|not subscriptable|unsupported operand|ambiguous|index out"
)
pytestmark = pytest.mark.filterwarnings("ignore::bilevel.CheckpointWarning", "ignore::UserWarning")


def sampled(state, number, seed):
    """Some of the states with one other part, each with its place, what was done, and whether it must be refused."""
    generator = random.Random(seed)
    every = [(place, case) for place, value in places(state) for case in mutants(value)]
    for place, (label, value, foreign) in generator.sample(every, min(number, len(every))):
        yield place, label, value, foreign


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
    for place, label, value, foreign in sampled(good, count(12, 150), name):
        for override in (False, True):
            for left in tmp_path.iterdir():
                left.unlink()
            log.write_bytes(history)
            where = (words(place), label, override)
            state = replaced(good, place, value)
            if not isinstance(state, dict):
                continue
            save(file, state)
            drawn = copy.deepcopy(np.random.get_state(legacy=False)), random.getstate()
            try:
                call(kind, file, steps=5, resume="override" if override else True)
            except bilevel.CheckpointError as error:
                judge(error, where)
                assert_same((np.random.get_state(legacy=False), random.getstate()), drawn)
                refused += 1
                continue
            except bilevel.DivergenceError:  # numbers that are possible, and lead nowhere
                pass
            assert not foreign or may_be_accepted(place, label, good, override=override), where
            accepted += 1
    assert refused > accepted
    tally("checkpoints of runs with one other part and a right checksum, refused by CheckpointError", refused)
    tally("checkpoints of runs with one other part and a right checksum, states that a run may have", accepted)
