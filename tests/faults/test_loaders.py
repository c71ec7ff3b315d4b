"""A run that goes on in the middle of a pass sees the same batches, whatever they are drawn with; or it says so."""

import random
import warnings

import numpy as np
import pytest
import torch
from examples import assert_same, batches
from faulty import result, run
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

import bilevel

X, Y = (torch.cat(parts) for parts in zip(*batches(seed=0), strict=True))


class Noisy(Dataset):
    """Draws in every example."""

    def __init__(self, draw, *owned):
        self.draw, self.owned = draw, list(owned)

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + 0.1 * self.draw(*self.owned), Y[index]


def of_all(*generators):
    own = [generator.standard_normal() for generator in generators]
    return sum(own) + torch.randn(3) + random.gauss(0, 1) + float(np.random.standard_normal())


class Shuffling(IterableDataset):
    """Shuffles with a buffer that it fills on the way."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        buffer = []
        for index in range(len(X)):
            buffer.append(index)
            if len(buffer) > 6:
                place = buffer.pop(self.draw(len(buffer)))
                yield X[place], Y[place]
        yield from ((X[place], Y[place]) for place in buffer)


class Counting(IterableDataset):
    """Another order in every pass, by a number that counts them."""

    epoch = 0

    def __iter__(self):
        order = np.random.default_rng((7, self.epoch)).permutation(len(X))
        self.epoch += 1
        return ((X[place], Y[place]) for place in order)


class ByEpoch(Sampler):
    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return len(X)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(len(X), generator=generator).tolist())


class Jitter:
    """A transform with slots."""

    __slots__ = ("generator",)

    def __init__(self):
        self.generator = random.Random(3)

    def __call__(self):
        return self.generator.random()


def collating(generator):
    def collate(examples):
        x, y = zip(*examples, strict=True)
        return torch.stack(x) + generator.random(), torch.stack(y)

    return collate


class Stateful:
    """As torchdata's StatefulDataLoader: one position, which can be kept."""

    def __init__(self):
        self.position, self.loaded, self.reads = 0, False, 0

    def __iter__(self):
        self.position, self.loaded = self.position if self.loaded else 0, False
        while self.position < 4:
            self.position, self.reads = self.position + 1, self.reads + 1
            at = 5 * (self.position - 1)
            yield X[at : at + 5], Y[at : at + 5]
        self.position = 0

    def __len__(self):
        return 4

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position, self.loaded = state["position"], True


class Mine(DataLoader):
    pass


def seeded():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "a generator": lambda: DataLoader(TensorDataset(X, Y), 5, shuffle=True, generator=seeded()),
    "torch, numpy and random": lambda: DataLoader(Noisy(of_all), 5, shuffle=True),
    "generators in a list": lambda: DataLoader(Noisy(of_all, np.random.default_rng(1)), 5, shuffle=True),
    "workers": lambda: DataLoader(Noisy(of_all), 5, shuffle=True, num_workers=2),
    "persistent workers": lambda: Mine(Noisy(of_all), 5, shuffle=True, num_workers=2, persistent_workers=True),
    "weights": lambda: DataLoader(TensorDataset(X, Y), 5, sampler=WeightedRandomSampler(torch.ones(20), 20)),
    "an iterable": lambda: DataLoader(Shuffling(lambda size: 0), 5),
    "an iterable with a worker": lambda: DataLoader(Shuffling(random.randrange), 5, num_workers=1),
    "a number that counts passes": lambda: DataLoader(Counting(), 5),
    "a sampler that counts passes": lambda: DataLoader(TensorDataset(X, Y), 5, sampler=ByEpoch()),
    "a generator in slots": lambda: DataLoader(Noisy(Jitter()), 5, shuffle=True),
    "a generator in a closure": lambda: DataLoader(
        TensorDataset(X, Y), 5, collate_fn=collating(np.random.default_rng(1))
    ),
    "a list": lambda: batches(seed=0),
    "stateful": Stateful,
}


def go(monkeypatch, make, *args, **changes):
    np.random.seed(1)
    random.seed(1)
    train = make()
    plain = isinstance(train, DataLoader) and train.num_workers == 0 and not isinstance(train.dataset, Shuffling)
    valid = make() if plain else batches(seed=1)
    monkeypatch.setattr("faulty.loader", lambda seed: (train, valid)[seed])
    solution = run("implicit_identity", *args, inner_steps=3, **changes)
    return solution, train


@pytest.mark.parametrize("name", LOADERS)
def test_the_rest_of_a_pass_is_the_same(tmp_path, monkeypatch, name):
    whole, _ = go(monkeypatch, LOADERS[name])
    file = tmp_path / "run.pt"
    go(monkeypatch, LOADERS[name], file, callbacks=[lambda event: event.index == 5])
    rest, train = go(monkeypatch, LOADERS[name], file)
    assert_same(result(rest), result(whole))
    if name == "stateful":
        assert train.reads == 3 * 7  # none twice


def test_a_loader_whose_pass_cannot_be_repeated_is_named(tmp_path, monkeypatch):
    def make():
        return DataLoader(Shuffling(random.randrange), 5)

    file = tmp_path / "run.pt"
    go(monkeypatch, make, file, callbacks=[lambda event: event.index == 5])
    with pytest.warns(bilevel.CheckpointWarning, match="train draws from the random numbers of torch, numpy or random"):
        go(monkeypatch, make, file)


def test_a_loader_that_cannot_say_where_it_is_costs_no_result(tmp_path, monkeypatch):
    class Broken(Stateful):
        def state_dict(self):
            if self.reads > 5:
                raise RuntimeError("mine")
            return super().state_dict()

    whole, _ = go(monkeypatch, Stateful)
    with pytest.warns(bilevel.CheckpointWarning, match=r"cannot be written \(mine\)"):
        solution, _ = go(monkeypatch, Broken, tmp_path / "run.pt")
    assert_same(result(solution), result(whole))


def test_random_states_of_the_main_process_go_on(tmp_path):
    """They are the user's: a call that resumes returns to those of the run."""
    drawn = []

    def draw(event):
        drawn.append((random.random(), float(np.random.random())))
        return event.index == 3 and len(drawn) == 3

    np.random.seed(0)
    random.seed(0)
    run("implicit_identity", tmp_path / "run.pt", steps=6, callbacks=[draw])
    with warnings.catch_warnings():
        run("implicit_identity", tmp_path / "run.pt", steps=6, callbacks=[draw])
    np.random.seed(0)
    random.seed(0)
    assert drawn == [(random.random(), float(np.random.random())) for _ in range(6)]
