"""A run that was stopped goes on as if it never had been."""

import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.checkpoint import load, save


def problem():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()

    def train_loss(model, hyper, batch):
        x, y = batch
        x = bilevel.functional.dropout(x, hyper["dropout"])
        return F.cross_entropy(model(x), y) + hyper["decay"] * bilevel.l2(model.params)

    return bilevel.Problem(
        net,
        inner_loss=train_loss,
        outer_loss=lambda model, hyper, batch: F.cross_entropy(model(batch[0]), batch[1]),
        hyper={"decay": bilevel.positive(1e-2), "dropout": bilevel.interval(0.0, 0.9, init=0.1)},
    )


def loader(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(45, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=10, shuffle=True)


def solve(checkpoint=None, **changes):
    settings = {
        "method": bilevel.DeltaSTN(entropy=1e-2),
        "inner_optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "outer_optimizer": partial(torch.optim.RMSprop, lr=0.05),
        "inner_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7),
        "inner_steps": 3,
        "warmup": 2,
        "steps": 13,
        "evaluate_every": 2,
        "progress": False,
    }
    return bilevel.solve(problem(), loader(1), loader(2), checkpoint=checkpoint, **(settings | changes))


def rows(solution):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in solution.history.rows]


def stop_after(index):
    return [lambda event: event.index == index]


@pytest.mark.parametrize("index", [1, 4, 7, 12])
def test_a_run_goes_on_to_the_last_bit(tmp_path, index):
    whole = solve()
    part = solve(tmp_path / "run.pt", callbacks=stop_after(index))
    assert part.stopped == "callback"
    rest = solve(tmp_path / "run.pt")
    assert rest.stopped == "steps"
    assert rows(rest) == rows(whole)
    torch.testing.assert_close(rest.state_dict, whole.state_dict, rtol=0, atol=0)
    torch.testing.assert_close(dict(rest.hyper), dict(whole.hyper), rtol=0, atol=0)
    assert rest.best.round == whole.best.round
    torch.testing.assert_close(rest.best.state_dict, whole.best.state_dict, rtol=0, atol=0)
    torch.testing.assert_close(rest.signal, whole.signal, rtol=0, atol=0)
    assert all(bool(value > 0) for value in whole.signal.values())


def test_the_time_of_the_first_part_counts(tmp_path, monkeypatch):
    """A day passes after each round; no machine takes an hour for the rounds themselves."""
    real, days = time.perf_counter, [0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + days[0] * 86400)

    def pass_the_day(event):
        days[0] += 1

    solve(tmp_path / "run.pt", callbacks=[pass_the_day, *stop_after(4)])
    days[0] = 0
    seconds = solve(tmp_path / "run.pt", callbacks=[pass_the_day]).history["seconds"]
    np.testing.assert_allclose(seconds, np.arange(len(seconds)) * 86400, rtol=0, atol=3600)


def test_an_interrupt_between_rounds_keeps_the_last_round(tmp_path):
    def interrupt(event):
        if event.index == 7:
            raise KeyboardInterrupt

    stopped = solve(tmp_path / "run.pt", callbacks=[interrupt])
    assert stopped.stopped == "interrupted"
    assert load(tmp_path / "run.pt")["rounds"] == 7
    assert rows(solve(tmp_path / "run.pt")) == rows(solve())


def test_a_finished_run_is_only_read_again_and_can_be_prolonged(tmp_path):
    first = solve(tmp_path / "run.pt", steps=4)
    calls = []
    again = solve(tmp_path / "run.pt", steps=4, callbacks=[calls.append])
    assert calls == [] and again.stopped == "steps" and again.best.round == first.best.round
    assert rows(again) == rows(first)
    assert len(solve(tmp_path / "run.pt", steps=6).history) == 6


def test_epochs_and_patience_count_on(tmp_path):
    whole = solve(steps=None, epochs=6, evaluate_every=None)
    solve(tmp_path / "run.pt", steps=None, epochs=6, evaluate_every=None, callbacks=stop_after(5))
    rest = solve(tmp_path / "run.pt", steps=None, epochs=6, evaluate_every=None)
    assert rest.stopped == "epochs" and len(rest.history) == len(whole.history)
    torch.testing.assert_close(rest.state_dict, whole.state_dict, rtol=0, atol=0)
    frozen = {"outer_optimizer": partial(torch.optim.SGD, lr=0.0), "inner_optimizer": partial(torch.optim.SGD, lr=0.0)}
    # BatchNorm statistics still move, so that the loss may improve: patience of one pass is soon used up.
    whole = solve(patience=1, steps=60, **frozen)
    solve(tmp_path / "patience.pt", patience=1, steps=60, callbacks=stop_after(2), **frozen)
    assert len(solve(tmp_path / "patience.pt", patience=1, steps=60, **frozen).history) == len(whole.history)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner_steps": 2}, "inner_steps was 3, this call has 2"),
        ({"outer_steps": 2}, "outer_steps was 1"),
        ({"accumulate": 2}, "accumulate was 1"),
        ({"warmup": 0}, "warmup was 2"),
        ({"evaluate_every": 5}, "evaluate_every was 2"),
        ({"method": "stn"}, "method"),
        ({"inner_optimizer": torch.optim.Adam}, "inner_optimizer: class was SGD, this call has Adam"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, changes, message):
    solve(tmp_path / "run.pt", steps=3)
    with pytest.raises(ValueError, match=message):
        solve(tmp_path / "run.pt", **changes)


def test_other_data_are_refused_and_taken_over_as_asked(tmp_path, monkeypatch):
    solve(tmp_path / "run.pt", steps=4)  # 12 batches, 2 in the third pass
    monkeypatch.setattr(f"{__name__}.loader", lambda seed, real=loader: DataLoader(real(seed).dataset, batch_size=45))
    with pytest.raises(bilevel.CheckpointError, match="train: batch_size was 10, this call has 45"):
        solve(tmp_path / "run.pt")
    assert len(solve(tmp_path / "run.pt", resume="override").history) == 13


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    save(path, {"weights": torch.arange(1000.0)})
    torch.testing.assert_close(load(path)["weights"], torch.arange(1000.0))
    content = bytearray(path.read_bytes())
    for position in range(len(content) - 3000, len(content), 100):
        damaged = content.copy()
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"run\.pt is damaged.*remove it"):
            load(path)
    for foreign in (b"", b"hello", content[:15], content[:40]):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match=r"not written by bilevel|damaged"):
            load(path)
    assert path.exists()


def test_writing_fails_without_a_loss(tmp_path, monkeypatch):
    path = tmp_path / "new" / "run.pt"
    save(path, {"a": 1})
    monkeypatch.setattr(
        "bilevel.checkpoint.file.os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        save(path, {"a": 2})
    assert load(path) == {"a": 1}


def test_a_file_of_another_version_is_refused_by_name(tmp_path):
    file = tmp_path / "run.pt"
    save(file, {"rounds": 1})
    file.write_bytes(file.read_bytes().replace(b"checkpoint 3", b"checkpoint 1", 1))
    with pytest.raises(ValueError, match="written by another version of bilevel"):
        load(file)
