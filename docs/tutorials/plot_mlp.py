"""
Tune an MLP while it trains
===========================

You will be able to hand a network and two loaders to :func:`bilevel.tune`, and see what
it found.

The network has two hidden layers with dropout, and far more weights than its 300
training images can pin down. How much dropout it needs, in which layer, and how much
weight decay and label smoothing besides, we do not want to guess.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel

EPOCHS = 150
SEEDS = 3

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def start(seed):
    """A network and a split."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(128, 10),
    )  # fmt: skip
    parts = torch.randperm(len(y)).split([300, 300, 1197])
    train, valid, test = (TensorDataset(x[rows], y[rows]) for rows in parts)
    return net, train, valid, test


# %%
# Five lines
# ----------


def tuned(seed):
    net, train, valid, test = start(seed)
    train_loader = DataLoader(train, batch_size=50, shuffle=True)
    valid_loader = DataLoader(valid, batch_size=100, shuffle=True)
    result = bilevel.tune(
        net, train_loader, valid_loader, loss=F.cross_entropy, epochs=EPOCHS,
        dropout=True, weight_decay="layer", label_smoothing=True,
    )  # fmt: skip
    net.load_state_dict(result.best.state_dict)
    return result, loss_on(net, test)


def loss_on(net, data):
    net.eval()
    with torch.no_grad():
        return float(F.cross_entropy(net(data.tensors[0]), data.tensors[1]))


result, loss = tuned(seed=0)
for name, value in result.best.hyper.items():
    print(f"{name}: {float(value):.3g}")

# %%
# If there is a warning, it names the values that only noise has moved. Ignore these
# values; they do no harm.
#
# Was it worth it?
# ----------------
#
# Plain training of the same network, for as many epochs, with the dropout that it has.
# It also keeps the weights with the lowest validation loss. Every seed is another split
# and another start.


def plain(seed):
    """Validation and test loss after each epoch."""
    net, train, valid, test = start(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    course = []
    for _ in range(EPOCHS):
        net.train()
        for inputs, target in DataLoader(train, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), target).backward()
            optimizer.step()
        course.append((loss_on(net, valid), loss_on(net, test)))
    return course


course = plain(seed=0)
pairs = [(min(course)[1], loss)]
pairs += [(min(plain(seed))[1], tuned(seed)[1]) for seed in range(1, SEEDS)]
for seed, (before, after) in enumerate(pairs):
    print(f"seed {seed}: test loss of plain training {before:.3f}, tuned {after:.3f}")
gain = torch.tensor([before - after for before, after in pairs])
print(f"gain {gain.mean():.3f}, standard error {gain.std() / SEEDS**0.5:.3f}")

# %%
# Three seeds are few, and an epoch of tuning costs as much as two to three plain ones. A
# network that has the right dropout already gains less. :doc:`/guides/evidence` has a
# fair comparison on fourteen tasks.
#
# The course of the first seed:

history = result.history
measured = history["validation_loss"] > 0
per_epoch = EPOCHS / len(history)
with bilevel.plotting.style():
    figure, (top, bottom) = bilevel.plotting.panels(2, most=1, size=(5.4, 2.7))
    top.plot(
        range(1, EPOCHS + 1),
        [valid_loss for valid_loss, _ in course],
        "0.3",
        linestyle=":",
        label="plain",
    )
    top.plot(
        history["round"][measured] * per_epoch,
        history["validation_loss"][measured],
        color=bilevel.plotting.color("delta_stn"),
        label="tuned",
    )
    top.set(title="validation loss", ylim=(0, 0.5))
    top.legend()
    for name in ("dropout.2", "dropout.5", "label_smoothing"):
        bottom.plot(history["round"] * per_epoch, history[name], label=name)
    bottom.set(title="what was tuned", ylim=(0, 1))
    bottom.legend(loc="upper left")
    bilevel.plotting.label_rounds([top, bottom], "epoch")
figure.savefig("mlp.png")
