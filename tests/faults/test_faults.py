"""Whatever happens to a run or to its files: nothing is lost, and nothing wrong is accepted."""

import errno
import json
import multiprocessing
import os
import pickle
import random
import shutil
import zipfile
from functools import partial

import pytest
import torch
from examples import assert_same
from faulty import INTERRUPT, KILL, TERMINATE, count, in_child, moments, result, run, tally

import bilevel
from bilevel import events
from bilevel.checkpoint import Store, load, save
from bilevel.checkpoint import file as files

METHODS = sorted(bilevel.METHODS)
HAS_FORKSERVER = "forkserver" in multiprocessing.get_all_start_methods()
pytestmark = pytest.mark.skipif(not HAS_FORKSERVER, reason="processes are forked here")


@pytest.fixture(scope="module")
def whole():
    """The results of runs that nothing happened to, and how long a run takes."""
    found = {}

    def of(method):
        if method not in found:
            solution = run(method)
            found[method] = (result(solution), solution.history["seconds"][-1])
        return found[method]

    return of


KINDS = [(KILL, 2, 200), (TERMINATE, 1, 200), pytest.param(INTERRUPT, 1, 100, marks=pytest.mark.slow)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "number", "many"), KINDS)
def test_ended_at_any_moment_a_run_goes_on_to_the_last_bit(tmp_path, whole, method, kind, number, many):
    expected, seconds = whole(method)
    number, between, writing = count(number, -(-many // len(METHODS))), 0, 0
    for index, after in enumerate(moments(METHODS.index(method), number, seconds)):
        file, log = tmp_path / f"{index}.pt", tmp_path / f"{index}.pt.jsonl"
        # Some of them before the run begins, the others from its first line on.
        ready = None if index % 8 == 7 else log
        status = in_child(partial(run, method, file, evaluate_every=2), send=kind, after=after, ready=ready)
        assert status in ((0, -KILL) if kind == KILL else (0, -kind, 1))  # 1: before the run has set its handlers
        between += 0 < (len(events.read(log).rows) if log.exists() else 0) < 12
        writing += any(tmp_path.glob(f"{index}.pt.*.part"))
        assert_same(result(run(method, file)), expected)
    tally(f"{kind.name} at random moments of runs of all methods, resumed bit for bit", number)
    tally(f"{kind.name}, of these between the first and the last round", between)
    if kind == KILL:
        tally(f"{kind.name}, of these in the middle of writing a checkpoint", writing)


def test_a_signal_during_the_rounds_returns_the_solution(tmp_path, whole):
    for index, kind in enumerate((TERMINATE, INTERRUPT)):
        file = tmp_path / f"{index}.pt"
        stop = lambda event, kind=kind: os.kill(os.getpid(), kind) if event.index == 5 else None  # noqa: E731
        solution = run("delta_stn", file, callbacks=[stop])
        assert solution.stopped == ("terminated", "interrupted")[index] and len(solution.history) == 5
        assert load(file)["rounds"] == 5
        assert_same(result(run("delta_stn", file)), whole("delta_stn")[0])


@pytest.fixture
def two(tmp_path):
    """Two generations, and the store that reads them."""
    store = Store(tmp_path / "run.pt")
    for number in range(2):
        store.save({"number": number, "weights": torch.arange(300.0), "text": "two"})
    store.wait()
    yield store
    store.close()


def test_a_flipped_bit_or_a_cut_is_noticed_and_the_one_before_is_used(two):
    content = two.path.read_bytes()
    assert two.load()[0]["number"] == 1
    generator = random.Random(0)
    flips, cuts = count(100, 1000), count(30, 200)
    for index in range(flips + cuts):
        damaged = bytearray(content)
        if index < flips:
            damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        else:
            del damaged[generator.randrange(len(content)) :]
        two.path.write_bytes(damaged)
        state, warning = two.load()
        assert state["number"] == 0 and "run.pt" in warning and "run.pt.1" in warning
    tally("flipped bits, noticed, with the generation before in use", flips)
    tally("truncations, noticed, with the generation before in use", cuts)


def test_large_files_are_used_in_turns(tmp_path, monkeypatch):
    """The one that is written over is never one that is kept, nor one that somebody has linked to."""
    monkeypatch.setattr("bilevel.checkpoint.store.LARGE", 0)
    store = Store(tmp_path / "run.pt")
    backup = tmp_path / "backup"
    for number in range(9):
        size = 3000 if number % 2 else 300
        store.save({"number": number, "weights": torch.full((size,), float(number))}, last=number == 8)
        store.wait()
        for age in range(min(number + 1, 2)):
            assert load(store.generation(age))["number"] == number - age
        if number == 4:
            os.link(store.generation(1), backup)
    assert load(backup)["number"] == 3
    assert len(list(tmp_path.glob("*.part"))) == 1
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {"run.pt", "run.pt.1", "backup"}


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path, whole):
    file = tmp_path / "run.pt"
    run("delta_stn", file, steps=8)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(bilevel.CheckpointWarning, match=r"run\.pt is damaged.*goes on from .*run\.pt\.1"):
        assert_same(result(run("delta_stn", file)), whole("delta_stn")[0])
    assert (tmp_path / "run.pt.damaged").exists()


class Code:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def hostile(folder):
    """Contents that were made to harm; each is a pair of a name and a function that writes it."""
    good = folder / "good"
    save(good, {"weights": torch.zeros(3)})
    content = good.read_bytes()

    def header(text, data=b""):
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        body = files.MAGIC + f"{len(text):016x}".encode() + text
        body += bytes(-len(body) % 64) + data
        return body + files.hashlib.sha256(body).digest()

    def tensors(*table, state=None):
        return header({"state": state or {"dict": []}, "tensors": list(table)})

    huge = 1 << 61
    cases = [pickle.dumps(Code(), protocol) for protocol in range(6)]
    cases += [files.MAGIC + pickle.dumps(Code()), content + pickle.dumps(Code())]
    cases += [b"", b"\0", b"hello", b"\x80", content[:20], content[:30], content * 2, content[::-1], bytes(1000)]
    cases += [files.MAGIC + length + b"{}" for length in (b"f" * 16, b"-" + b"0" * 15, b"g" * 16, b"0" * 16, b" " * 16)]
    cases += [header(b"[" * 10**5), header(b'{"a":' * 10**5), header(b'{"state":' + b'{"list":[' * 10**5)]
    cases += [header(value) for value in (None, 1, [], {}, "x", {"state": 1}, {"tensors": 1, "state": 1})]
    cases += [header(b"9" * 10**5), header(b"\xff\xfe"), header(b"NaN"), header({"state": 1, "tensors": [], "more": 1})]
    cases += [tensors(["float32", [huge, 4]]), tensors(["float32", [-1]]), tensors(["float32", [1.5]])]
    cases += [tensors(["object", [1]]), tensors(["float32", [0] * 1000]), tensors(["float32", [huge, 0, huge, huge]])]
    cases += [tensors(["float32"]), tensors("float32"), tensors([["float32"], [1]]), tensors(["float32", "1"])]
    cases += [
        tensors(state=state)
        for state in (
            {"tensor": 0},
            {"tensor": -1},
            {"os.system": "x"},
            {"dict": [[{"list": []}, 1]]},
            {"dict": [1]},
            {"dict": 3},
            {"bytes": "zz"},
            {"float": "1e9"},
            {"list": [], "tuple": []},
            {"counter": [["a", "b", "c"]]},
            "text",
        )
    ]
    return cases


def test_hostile_files_end_in_one_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = hostile(tmp_path)
    path = tmp_path / "run.pt"
    for index, content in enumerate(cases):
        path.write_bytes(content)
        with pytest.raises(bilevel.CheckpointError) as caught:
            load(path)
        assert str(caught.value).count("\n") == 0 and "run.pt" in str(caught.value), index
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", bytes(10**7))
    links = [
        lambda: None,
        lambda: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda: (path.unlink(), os.mkfifo(path)),
    ]
    for make in links:
        make()
        with pytest.raises(bilevel.CheckpointError):
            load(path)
    assert not (tmp_path / "executed").exists()
    assert len(cases) + len(links) >= 50
    tally("hostile checkpoint files, refused by CheckpointError, none executed", len(cases) + len(links))


def test_foreign_fields_end_in_one_error(tmp_path):
    """Every part of a state replaced by something else, with a good checksum."""
    file = tmp_path / "run.pt"
    run("delta_stn", file, steps=4)
    good = load(file)
    for value in (None, 5, "text", [], {}, torch.zeros(2)):
        for key in good:
            if key == "seconds" and isinstance(value, int):  # a whole number of them
                continue
            save(file, good | {key: value})
            (tmp_path / "run.pt.1").unlink(missing_ok=True)
            with pytest.raises(bilevel.CheckpointError):
                run("delta_stn", file)
    for key in good:
        save(file, {name: value for name, value in good.items() if name != key})
        with pytest.raises(bilevel.CheckpointError):
            run("delta_stn", file)


def replaced(state, place, value):
    """A state with another value somewhere inside."""
    if not place:
        return value
    if isinstance(state, list):
        return [replaced(part, place[1:], value) if index == place[0] else part for index, part in enumerate(state)]
    return {key: replaced(part, place[1:], value) if key == place[0] else part for key, part in state.items()}


PLACES = [
    ("solver", "optimizers", "weights", "param_groups", 0, "lr"),
    ("solver", "optimizers", "response", "state", 0),
    ("solver", "optimizers", "weights", "state", 1, "momentum_buffer"),
    ("solver", "optimizers", "hyper", "state", 0, "exp_avg"),
    ("signal", "steps"),
    ("signal", "peak"),
    ("best", "validation_loss"),
    ("best", "round"),
    ("best", "hyper", "decay"),
    ("best", "params", "0.weight"),
]


def test_foreign_values_deep_inside_end_in_one_error(tmp_path):
    file = tmp_path / "run.pt"
    run("delta_stn", file, steps=4)
    good = load(file)
    for place in PLACES:
        for value in ("text", {}, [], torch.zeros(7), None):
            save(file, replaced(good, place, value))
            (tmp_path / "run.pt.1").unlink(missing_ok=True)
            if (place[-1], value) in (("momentum_buffer", None), (0, {})):  # as before the first step
                continue
            with pytest.raises(bilevel.CheckpointError, match=f"{place[-2]}|{place[-1]}"):
                run("delta_stn", file, steps=5)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, whole):
    """One write in three fails; the run goes on, and the last checkpoint can be written."""
    generator, broken, put = random.Random(0), [True], files._put

    def fails(file, content):
        if broken[0] and generator.random() < 0.3:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(file, content)

    monkeypatch.setattr(files, "_put", fails)
    for index in range(count(2, 20)):
        file, broken[0] = tmp_path / f"{index}.pt", True
        heal = lambda event: broken.__setitem__(0, event.index < 9)  # noqa: E731
        with pytest.warns(bilevel.CheckpointWarning, match="No space left on device.*tried again"):
            solution = run("delta_stn", file, callbacks=[heal])
        assert_same(result(solution), whole("delta_stn")[0])
        assert load(file)["rounds"] == 12
        assert not list(tmp_path.glob("*.part"))
        tally("runs on a disk that was full now and then, no result lost", 1)


@pytest.mark.filterwarnings("ignore:.*cannot be written.*tried again:bilevel.CheckpointWarning")
def test_a_folder_that_is_deleted_loses_no_result(tmp_path, whole):
    folder = tmp_path / "folder"
    delete = lambda event: shutil.rmtree(folder) if event.index == 5 else None  # noqa: E731
    with pytest.warns(bilevel.CheckpointWarning, match="was removed .* put back"):
        solution = run("delta_stn", folder / "run.pt", callbacks=[delete])
    assert_same(result(solution), whole("delta_stn")[0])
    assert load(folder / "run.pt")["rounds"] == 12


def test_places_that_cannot_be_written_are_noticed_before_the_first_round(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    places = (tmp_path / "file" / "run.pt", tmp_path / "folder", "/proc/nothing/run.pt", tmp_path / ("x" * 300))
    for place in places:
        with pytest.raises(bilevel.CheckpointError, match=r"cannot be written|is a folder"):
            run("delta_stn", place, callbacks=[pytest.fail])
    (tmp_path / "log").write_text("mine")
    with pytest.raises(bilevel.CheckpointError, match="not an event log"):
        run("delta_stn", log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == "mine"


def refused(file):
    with pytest.raises(bilevel.CheckpointError, match=r"in use by another run \(process \d+\)"):
        run("delta_stn", file)


def test_a_second_run_on_the_same_file_is_refused(tmp_path):
    file = tmp_path / "run.pt"

    def second(event):
        with pytest.raises(bilevel.CheckpointError, match="in use by another run of this process"):
            run("delta_stn", file)
        if event.index == 3:
            assert in_child(partial(refused, file)) == 0

    run("delta_stn", file, steps=4, callbacks=[second])
    assert len(run("delta_stn", file, steps=6).history) == 6
    assert not (tmp_path / "run.pt.lock").exists()


def test_a_planted_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    for name in ("run.pt.part", "run.pt.1", "run.pt.damaged"):
        (tmp_path / name).symlink_to(target)
    for resume in (True, False):
        with pytest.raises(bilevel.CheckpointError, match=r"run.pt.1 was not written by bilevel"):
            run("delta_stn", tmp_path / "run.pt", resume=resume)
    (tmp_path / "run.pt.1").unlink()
    run("delta_stn", tmp_path / "run.pt", resume=False)
    assert target.read_text() == "mine"
    (tmp_path / "other.pt.lock").symlink_to(target)
    with pytest.raises(bilevel.CheckpointError, match="cannot be written"):
        run("delta_stn", tmp_path / "other.pt")


def test_errors_carry_the_solution_and_leave_a_checkpoint(tmp_path, whole):
    file = tmp_path / "run.pt"

    def fail(event):
        if event.index == 7:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        run("delta_stn", file, callbacks=[fail])
    assert len(caught.value.solution.history) == 7 and str(file) in caught.value.__notes__[-1]
    assert load(file)["rounds"] == 7 and events.read(f"{file}.jsonl").end["stopped"] == "failed"
    assert_same(result(run("delta_stn", file)), whole("delta_stn")[0])


def test_a_log_that_is_not_what_it_was_is_refused(tmp_path):
    file, log = tmp_path / "run.pt", tmp_path / "run.pt.jsonl"
    run("delta_stn", file, steps=6)
    content = log.read_bytes()
    for damaged, words in (
        (content[:200], "shorter"),
        (content.replace(b"0", b"1", 1), "not what it was"),
        (b"", "shorter"),
    ):
        log.write_bytes(damaged)
        with pytest.raises(bilevel.CheckpointError, match=words):
            run("delta_stn", file)
    with pytest.warns(bilevel.CheckpointWarning, match="history starts anew"):
        assert len(run("delta_stn", file, steps=8, resume="override").history) == 2
    assert len(run("delta_stn", file, steps=9).history) == 3


def test_the_log_is_the_history(tmp_path):
    file = tmp_path / "run.pt"
    run("delta_stn", file, steps=5)
    with (tmp_path / "run.pt.jsonl").open("ab") as log:
        log.write(b'{"event": "round", "round": 6, "inner')  # cut off by a crash
    solution = run("delta_stn", file, steps=9)
    record = events.read(tmp_path / "run.pt.jsonl")
    shown = [{k: v for k, v in row.items() if k != "validation_loss"} for row in solution.history.rows[-1:]]
    assert record.rows[:-1] == solution.history.rows[:-1] and record.rows[-1:] == shown
    assert len(record.memory) == 9 and record.end["stopped"] == "steps"
    assert record.skipped == 0  # the line that was cut off is void: the run went on from before it


def test_the_cost_of_a_checkpoint_does_not_grow(tmp_path):
    file = tmp_path / "run.pt"
    run("delta_stn", file, steps=4)
    small = file.stat().st_size
    run("delta_stn", file, steps=60)
    assert abs(file.stat().st_size - small) < 200
