"""
Class weights for rare classes
==============================

You will be able to learn a weight for each class where the training set is imbalanced.

There are 90 zeros to learn from, and from digit to digit fewer, down to 5 nines. What
counts is the loss on a set in which all digits are alike. The usual remedy is a weight
for each class, one over its count. Ours are learned.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel

EPOCHS = 200
SEEDS = 3

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
counts = [round(90 * 0.72**digit) for digit in range(10)]


def start(seed):
    """A network, and the rows of a split."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    train, valid, test = torch.randperm(len(y)).split([900, 400, 497])
    rare = [train[y[train] == digit][:count] for digit, count in enumerate(counts)]
    return net, torch.cat(rare), valid, test


def loader(rows, batch_size):
    return DataLoader(TensorDataset(x[rows], y[rows]), batch_size, shuffle=True)


# %%
# The problem
# -----------
#
# ``bilevel.functional.cross_entropy`` takes the weights as hyperparameters. Its value
# is a loss for each example.


def train_loss(model, hyper, batch):
    x, y = batch
    return bilevel.functional.cross_entropy(model(x), y, weight=hyper["weights"])


def valid_loss(model, hyper, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def learn(seed):
    net, train, valid, test = start(seed)
    problem = bilevel.Problem(
        net,
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={"weights": bilevel.positive(torch.ones(10))},
    )
    solution = bilevel.solve(problem, loader(train, 50), loader(valid, 100), epochs=EPOCHS)
    net.load_state_dict(solution.best.state_dict)
    return *measure(net, test), solution.best.hyper["weights"]


def measure(net, rows):
    """The loss, and the share of each digit that is found."""
    with torch.no_grad():
        logits = net(x[rows])
    right = logits.argmax(1) == y[rows]
    recall = torch.stack([right[y[rows] == digit].float().mean() for digit in range(10)])
    return float(F.cross_entropy(logits, y[rows])), recall


# %%
# Was it worth it?
# ----------------
#
# Plain training with given weights, for as many epochs; it keeps the weights of the
# network with the lowest validation loss. Every seed is another split.


def plain(seed, weights):
    net, train, valid, test = start(seed)
    best = (float("inf"),)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for inputs, target in loader(train, 50):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), target, weight=weights).backward()
            optimizer.step()
        if (now := measure(net, valid)[0]) < best[0]:
            best = (now, *measure(net, test))
    return best[1:]


inverse = 1 / torch.tensor(counts, dtype=torch.float32)
found = {"no weights": [], "one over the count": [], "learned": []}
learned = []
for seed in range(SEEDS):
    found["no weights"].append(plain(seed, None))
    found["one over the count"].append(plain(seed, inverse))
    loss, recall, weights = learn(seed)
    found["learned"].append((loss, recall))
    learned.append(weights)
for name, runs in found.items():
    losses = "  ".join(f"{loss:.3f}" for loss, _ in runs)
    rare = sum(float(recall[-3:].mean()) for _, recall in runs) / SEEDS
    print(f"{name:<20} test losses {losses}, recall of the three rarest {rare:.0%}")

# %%
# Three splits are few, and there are 400 images to tune on, more than to train on.
#
# The learned weights of each seed, beside one over the count (all with mean one in
# logarithms), and the mean recall of each digit. Rare digits get large weights. For the
# others the seeds do not agree, because it matters little.

with bilevel.plotting.style():
    figure, (top, bottom) = bilevel.plotting.panels(2, most=1, size=(5.4, 2.6))
    for label, weights in {"one over the count": inverse, "learned": learned[0]}.items():
        look = "o-" if label == "learned" else "k:"
        top.plot(
            range(10), (weights / weights.log().mean().exp()).numpy(), look, label=label
        )
    for weights in learned[1:]:
        top.plot(
            range(10), (weights / weights.log().mean().exp()).numpy(), "o-", color="#8cc0dc"
        )
    bilevel.plotting.log_axis(top)
    top.set(title="class weight", xticks=range(10))
    top.legend()
    for place, (name, runs) in enumerate(found.items()):
        bottom.bar(
            [digit + 0.27 * (place - 1) for digit in range(10)],
            torch.stack([recall for _, recall in runs]).mean(0).numpy(),
            width=0.25,
            label=name,
        )
    bottom.set(
        title="test recall",
        xlabel="digit (90 training images of 0, 5 of 9)",
        xticks=range(10),
        ylim=(0, 1.35),
    )
    bottom.set_yticks([0, 0.5, 1])
    bottom.legend(ncols=3, loc="upper center")
figure.savefig("class_weights.png")
