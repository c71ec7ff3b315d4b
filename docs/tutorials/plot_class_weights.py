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

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
torch.manual_seed(0)
train, valid, test = torch.randperm(len(y)).split([900, 400, 497])
counts = [round(90 * 0.72**digit) for digit in range(10)]
train = torch.cat([train[y[train] == digit][:count] for digit, count in enumerate(counts)])
train_loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=50, shuffle=True)
valid_loader = DataLoader(TensorDataset(x[valid], y[valid]), batch_size=100, shuffle=True)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


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


net = network()
problem = bilevel.Problem(
    net,
    inner_loss=train_loss,
    outer_loss=valid_loss,
    hyper={"weights": bilevel.positive(torch.ones(10))},
)
solution = bilevel.solve(problem, train_loader, valid_loader, epochs=EPOCHS)
net.load_state_dict(solution.best.state_dict)

# %%
# Was it worth it?
# ----------------


def measure(net, rows):
    with torch.no_grad():
        logits = net(x[rows])
    right = logits.argmax(1) == y[rows]
    recall = torch.stack([right[y[rows] == digit].float().mean() for digit in range(10)])
    return float(F.cross_entropy(logits, y[rows])), recall


def plain(weights):
    """The test loss and recalls of plain training, where the validation loss was lowest."""
    net, best = network(), (float("inf"),)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for inputs, target in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), target, weight=weights).backward()
            optimizer.step()
        if (now := measure(net, valid)[0]) < best[0]:
            best = (now, *measure(net, test))
    return best[1:]


inverse = 1 / torch.tensor(counts, dtype=torch.float32)
found = {
    "no weights": plain(None),
    "one over the count": plain(inverse),
    "learned": measure(net, test),
}
for name, (loss, recall) in found.items():
    rare = float(recall[-3:].mean())
    print(f"{name:<20} test loss {loss:.3f}  recall of the three rarest {rare:.0%}")

# %%
# The weights at the best round, beside one over the count (both with mean one in
# logarithms), and the recall of each digit.

with bilevel.plotting.style():
    figure, (top, bottom) = bilevel.plotting.panels(2, most=1, size=(5.4, 2.6))
    for label, weights in {
        "learned": solution.best.hyper["weights"],
        "one over the count": inverse,
    }.items():
        top.plot(
            range(10),
            (weights / weights.log().mean().exp()).numpy(),
            "o-" if label == "learned" else "k:",
            label=label,
        )
    bilevel.plotting.log_axis(top)
    top.set(title="class weight", xticks=range(10))
    top.legend()
    for place, (name, (_, recall)) in enumerate(found.items()):
        bottom.bar(
            [digit + 0.27 * (place - 1) for digit in range(10)],
            recall.numpy(),
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
