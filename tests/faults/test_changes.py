"""Every kind of change between two calls: refused by name, or taken over as asked. Makes the table of the docs.

``PYTHONPATH=tests python tests/faults/test_changes.py`` writes the table.
"""

import re
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import batches, network
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import bilevel

TABLE = Path(__file__).parents[2] / "docs" / "results" / "changes.rst"
PENALTY = 1.0


def penalty(params):
    return bilevel.l2(params)


def other_penalty(params):
    return 2 * bilevel.l2(params)


class Loss:
    """A loss with settings of its own."""

    def __init__(self, weight=1.0):
        self.weight, self.name = weight, "not read"

    def of(self, x, y):
        return self.weight * F.mse_loss(x, y)

    def __call__(self, model, hyper, batch):
        return self.of(model(batch[0]), batch[1])

    def method(self, model, hyper, batch):
        return self(model, hyper, batch)


class Settings:
    """Those of a program, as people write them."""

    power = 1

    def __init__(self, weight, unused=0):
        self._weight, self.unused = weight, unused

    @property
    def weight(self):
        return self._weight

    def read(self):
        return self.weight


class Squared(Settings):
    power = 2


def scaled_by(settings):
    return lambda model, hyper, batch: settings.read() * outer_loss(model, hyper, batch) ** settings.power


def module_loss(**options):
    criterion = nn.SmoothL1Loss(**options)
    return lambda model, hyper, batch: criterion(model(batch[0]), batch[1])


def hooked(factor):
    net = Net()
    net.layers[0].register_forward_hook(lambda module, given, out: factor * out)
    return net


def inner_loss(weight=1.0, penalty=penalty):
    def loss(model, hyper, batch):
        total = sum(PENALTY * part for part in [penalty(model.params)])
        return weight * F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * total

    return loss


def outer_loss(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1])


class Net(nn.Module):
    def __init__(self, activation=torch.tanh, frozen=1.0, width=4, power=1):
        super().__init__()
        self.layers, self.activation, self.power = network(), activation, power
        if width != 4:
            self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        self.gain = nn.Parameter(torch.tensor(frozen), requires_grad=False)

    def forward(self, x):
        return self.gain * self.layers(self.activation(x)) ** self.power


class Halved(Net):
    def forward(self, x):
        return super().forward(x) / 2


def data(seed=0, examples=20, shift=0.0, **options):
    x, y = (torch.cat(parts) for parts in zip(*batches(count=examples // 5, seed=seed), strict=True))
    settings = {"batch_size": 5, "shuffle": True}
    return DataLoader(TensorDataset(x + shift, y), **{**settings, **options})


class Own(Dataset):
    """A data set of the user's, with content as an array and settings as numbers."""

    def __init__(self, last=0.0, ahead=0):
        self.x, self.ahead = np.linspace(0, 1, 60, dtype=np.float32).reshape(20, 3), ahead
        self.x[-1] += last

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[min(index + self.ahead, 19), :1]


def seeded(seed):
    return data(0, generator=torch.Generator().manual_seed(seed))


def subset(indices):
    return DataLoader(Subset(data(0).dataset, indices), 5, shuffle=True)


def own(*args):
    return DataLoader(Own(*args), 5, shuffle=True)


def collate(examples):
    x, y = zip(*examples, strict=True)
    return 2 * torch.stack(x), torch.stack(y)


def run(folder, **changes):
    """A short run of which anything can be changed."""
    settings = {
        "net": Net(),
        "inner_loss": inner_loss(),
        "outer_loss": outer_loss,
        "hyper": {"decay": bilevel.positive(0.01)},
        "outer_mode": "eval",
        "train": data(0),
        "valid": data(1, shuffle=False),
        "method": "implicit_identity",
        "inner_optimizer": partial(SGD, lr=2**-7, momentum=0.5),
        "outer_optimizer": partial(Adam, lr=0.1),
        "inner_scheduler": partial(StepLR, step_size=2, gamma=0.5),
        "inner_steps": 1,
        "warmup": 0,
        "evaluate_every": 2,
        "steps": 3,
        "progress": False,
        "checkpoint": folder / "run.pt",
        **changes,
    }
    stated = {name: settings.pop(name) for name in ("inner_loss", "outer_loss", "hyper", "outer_mode")}
    problem = bilevel.Problem(settings.pop("net"), **stated)
    return bilevel.solve(problem, settings.pop("train"), settings.pop("valid"), **settings)


def sequence(factor):
    return lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, factor, 2), LinearLR(optimizer)], milestones=[2]
    )


def lambda_lr(base):
    return partial(LambdaLR, lr_lambda=lambda round: base**round)


def rate_of(name):
    return lambda solution: solution.solver.optimizers[name].param_groups[0]["lr"]


class Globally:
    """Changes a number of this module that a loss reads."""

    def __enter__(self):
        globals()["PENALTY"] = 3.0

    def __exit__(self, *_):
        globals()["PENALTY"] = 1.0


# What is changed: the first call, the second call, and what the second one then has, as far as it can be seen.
CHANGES = {
    "inner learning rate": ({}, {"inner_optimizer": partial(SGD, lr=0.01, momentum=0.5)}, ("weights", 0.005)),
    "momentum": ({}, {"inner_optimizer": partial(SGD, lr=2**-7, momentum=0.9)}),
    "outer learning rate": ({}, {"outer_optimizer": partial(Adam, lr=0.3)}, ("hyper", 0.3)),
    "Adam to AdamW with decay": ({}, {"outer_optimizer": partial(AdamW, lr=0.1, weight_decay=0.1)}),
    "SGD to Adam": ({}, {"inner_optimizer": partial(Adam, lr=0.01)}, ("weights", 0.005)),
    "the default optimizer to another one": ({"outer_optimizer": None}, {}),
    "no schedule to one": ({"inner_scheduler": None}, {}, ("weights", 2**-8)),
    "a number of the schedule": ({}, {"inner_scheduler": partial(StepLR, step_size=2, gamma=0.1)}),
    "a schedule inside another": ({"inner_scheduler": sequence(0.5)}, {"inner_scheduler": sequence(0.25)}),
    "the function of a schedule": ({"inner_scheduler": lambda_lr(0.9)}, {"inner_scheduler": lambda_lr(0.8)}),
    "outer schedule, default optimizer": (
        {"outer_optimizer": None},
        {"outer_optimizer": None, "outer_scheduler": partial(StepLR, step_size=1)},
    ),
    "schedules by rounds to schedules by epochs": ({}, {"steps": None, "epochs": 6}),
    "inner clip": ({}, {"inner_clip": 1.0}),
    "outer clip": ({}, {"outer_clip": 1.0}),
    "seed": ({}, {"seed": 1}),
    "batch size": ({}, {"train": data(0, batch_size=10)}),
    "batch size of the validation set": ({}, {"valid": data(1, batch_size=10, shuffle=False)}),
    "training data": ({}, {"train": data(2)}),
    "training data, a later batch": ({"train": batches()}, {"train": [*batches()[:1], *batches(seed=2)[1:]]}),
    "an array of your own data set": ({"train": own()}, {"train": own(1.0)}),
    "a whole number of your own data set": ({"train": own()}, {"train": own(0.0, 1)}),
    "one more batch of data": (
        {"train": data(0, shuffle=False)},
        {"train": data(0, examples=25, shuffle=False)},
    ),
    "validation data": ({}, {"valid": data(1, shift=1.0, shuffle=False)}),
    "shuffled to not shuffled": ({}, {"train": data(0, shuffle=False)}),
    "number of workers": ({}, {"train": data(0, num_workers=1)}),
    "a loader's generator": ({}, {"train": data(0, generator=torch.Generator())}),
    "the seed of a loader's generator": ({"train": seeded(1)}, {"train": seeded(2)}),
    "an index of a subset": ({"train": subset(range(15))}, {"train": subset([*range(14), 19])}),
    "collate_fn": ({}, {"train": data(0, collate_fn=collate)}),
    "a DataLoader to a list": ({}, {"train": batches(seed=0)}),
    "a number that the inner loss captures": ({}, {"inner_loss": inner_loss(weight=2.0)}),
    "a function that the inner loss calls": ({}, {"inner_loss": inner_loss(penalty=other_penalty)}),
    "a global number that the inner loss reads": ({}, Globally()),
    "an attribute that the outer loss reads": ({"outer_loss": Loss()}, {"outer_loss": Loss(2.0)}),
    "an attribute of a bound method's object": ({"outer_loss": Loss().method}, {"outer_loss": Loss(2.0).method}),
    "an attribute of your own object": (
        {"outer_loss": scaled_by(Settings(1.0))},
        {"outer_loss": scaled_by(Settings(2.0))},
    ),
    "the class of your own object": (
        {"outer_loss": scaled_by(Settings(1.0))},
        {"outer_loss": scaled_by(Squared(1.0))},
    ),
    "a setting of a module that the loss calls": (
        {"outer_loss": module_loss(beta=1.0)},
        {"outer_loss": module_loss(beta=0.5)},
    ),
    "the outer loss": ({}, {"outer_loss": lambda model, hyper, batch: 2 * outer_loss(model, hyper, batch)}),
    "the code of the network": ({}, {"net": Halved()}),
    "a function in the network": ({}, {"net": Net(activation=torch.sin)}),
    "a number in the network": ({}, {"net": Net(power=2)}),
    "a hook of the network": ({"net": hooked(1.0)}, {"net": hooked(2.0)}),
    "frozen weights": ({}, {"net": Net(frozen=2.0)}),
    "outer_mode": ({}, {"outer_mode": "train"}),
    "initial value of a hyperparameter": ({}, {"hyper": {"decay": bilevel.positive(0.1)}}),
    "range of a hyperparameter": ({}, {"hyper": {"decay": bilevel.interval(0, 1, init=0.01)}}),
    "method": ({}, {"method": "implicit_cg"}),
    "a setting of the method": ({}, {"method": bilevel.Implicit(bilevel.Identity(scale=0.5))}),
    "size of the network": ({}, {"net": Net(width=5)}),
    "dtype": ({}, {"net": Net().double(), "train": None, "valid": None}),
    "inner_steps": ({}, {"inner_steps": 2}),
    "outer_steps": ({}, {"outer_steps": 2}),
    "accumulate": ({}, {"accumulate": 2}),
    "warmup": ({}, {"warmup": 1}),
    "evaluate_every": ({}, {"evaluate_every": 3}),
    "steps, patience, time_budget": ({}, {"steps": 5, "patience": 9, "time_budget": 999.0}),
    "callbacks, progress, signals, on_nan": (
        {},
        {"callbacks": [lambda event: None], "progress": None, "signals": False, "on_nan": "skip"},
    ),
    "checkpoint_every, checkpoint_keep": ({}, {"checkpoint_every": 9.0, "checkpoint_keep": 3}),
    "nothing, but all objects made anew": (
        {"inner_scheduler": lambda_lr(0.9), "outer_loss": scaled_by(Settings(1.0)), "train": seeded(1)},
        {"inner_scheduler": lambda_lr(0.9), "outer_loss": scaled_by(Settings(1.0, unused=1)), "train": seeded(1)},
    ),
}


def double(loader):
    return [tuple(part.double() for part in batch) for batch in loader]


def found(name):
    """What happens by default, and with ``resume="override"``."""
    first, second, *expected = CHANGES[name]
    context = second if isinstance(second, Globally) else warnings.catch_warnings()
    second = {} if isinstance(second, Globally) else {**first, **second}
    if name == "dtype":
        second |= {"train": double(data(0)), "valid": double(data(1, shuffle=False))}
    if name == "the default optimizer to another one":
        second["outer_optimizer"] = partial(Adam, lr=0.1)
    if name == "no schedule to one":
        second["inner_scheduler"] = partial(StepLR, step_size=2, gamma=0.5)
    words = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")
        run(Path(folder), **first)
        with context:
            for resume in (True, "override"):
                try:
                    steps = {"steps": 5} if second.get("epochs") is None else {}
                    solution = run(Path(folder), **{**second, **steps}, resume=resume)
                    words.append("goes on" if resume is True else "taken over")
                except bilevel.CheckpointError as error:
                    words.append(re.search(r"is of another run: (.*)\. Remedy", str(error))[1])
                    assert ("override" in str(error)) == (resume is True and words[0] == words[-1]) or resume is True
            if words[1] == "taken over":
                assert len(solution.history) >= 5
                if expected:
                    assert solution.solver.optimizers[expected[0][0]].param_groups[0]["lr"] == expected[0][1]
                run(Path(folder), **{**second, **({"steps": 6} if steps else {})})  # the change is now the run's own
    if words[0] == "goes on":
        return "goes on", ""
    return f"refused: {words[0]}", "refused" if words[0] == words[1] else words[1]


def table(rows):
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 28 52 20", ""]
    lines += ["   * - changed between two calls", "     - by default", "     - with ``resume='override'``"]
    for name, (default, override) in rows.items():
        lines += [f"   * - {name}", f"     - {default}", f"     - {override}".rstrip()]
    return "\n".join(lines) + "\n"


def rows_of(text):
    """The rows of the table in the docs, by name."""
    parts = text.split("   * - ")[2:]
    return {part.partition("\n")[0]: f"   * - {part}".strip() for part in parts}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_by_name_or_taken_over_as_asked(name):
    default, override = found(name)
    allowed = ("steps", "callbacks", "checkpoint", "nothing")
    assert (default == "goes on") == name.startswith(allowed)
    made = rows_of(table({"": ("", ""), name: (default, override)}))[name]
    assert made == rows_of("   * - x" + TABLE.read_text(encoding="utf-8")).get(name), "write the table, see above"


def test_the_table_has_no_other_rows():
    assert (
        rows_of("   * - x" + TABLE.read_text(encoding="utf-8")).keys() - {"changed between two calls"} == CHANGES.keys()
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = {name: found(name) for name in CHANGES}
    TABLE.write_text(table(made), encoding="utf-8")
    sys.stdout.write(TABLE.read_text(encoding="utf-8"))
