"""
Reweight noisy examples
=======================

You will be able to learn which training examples to trust, with one hyperparameter for
each of them.

Of 700 training images, 40 % have a wrong label; of 100 others we are sure. Every
training example gets a weight between 0 and 1, and the weights are tuned so that the
network does well on the 100.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import bilevel

ROUNDS = 40
SEEDS = 3

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def start(seed):
    """The rows of a split, the labels that were given, and which of them are wrong."""
    torch.manual_seed(seed)
    train, valid, test = torch.randperm(len(y)).split([700, 100, 997])
    wrong = torch.rand(len(train)) < 0.4
    given = (y[train] + wrong * torch.randint(1, 10, (len(train),))) % 10
    return train, valid, test, given, wrong


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


# %%
# The problem
# -----------
#
# A batch has the numbers of its examples, which pick their weights. ``shared=True``
# says that a weight belongs to the whole problem. A self-tuning network would have to
# learn 700 responses at once; implicit differentiation does not care how many there
# are.


def train_loss(model, hyper, batch):
    x, y, index = batch
    losses = F.cross_entropy(model(x), y, reduction="none")
    return (hyper["weight"][index] * losses).mean() + 1e-3 * bilevel.l2(model.params)


def valid_loss(model, hyper, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def reweight(train, valid, given):
    weight = bilevel.interval(0.0, 1.0, init=torch.full((len(train),), 0.5), shared=True)
    problem = bilevel.Problem(
        network(),
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={"weight": weight},
    )
    return bilevel.solve(
        problem,
        [(x[train], given, torch.arange(len(train)))],
        [(x[valid], y[valid])],
        method="implicit_nystrom",
        inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
        outer_optimizer=lambda params: torch.optim.Adam(params, lr=0.3),
        inner_steps=20,
        steps=ROUNDS,
    )


# %%
# What it found
# -------------
#
# Beside plain training on all images, and on the 100 that we are sure of. Every seed is
# another split with other mistakes.


def accuracy(net, rows):
    with torch.no_grad():
        return float((net(x[rows]).argmax(1) == y[rows]).float().mean())


def plain(x, y):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    for _ in range(20 * ROUNDS):
        optimizer.zero_grad()
        (F.cross_entropy(net(x), y) + 1e-3 * bilevel.l2(net.parameters())).backward()
        optimizer.step()
    return net


for seed in reversed(range(SEEDS)):  # the figure shows the last, which is seed 0
    train, valid, test, given, wrong = start(seed)
    solution = reweight(train, valid, given)
    learned = solution.hyper["weight"]
    net = network()
    net.load_state_dict(solution.state_dict)
    rates = {
        "all": accuracy(plain(x[train], given), test),
        "the sure ones": accuracy(plain(x[valid], y[valid]), test),
        "all, reweighted": accuracy(net, test),
    }
    low = learned < 0.5
    shown = ", ".join(f"{name} {rate:.1%}" for name, rate in rates.items())
    print(f"seed {seed}: test accuracy with {shown}")
    print(f"  below a half: {low[wrong].float().mean():.0%} of the wrong labels,", end=" ")
    print(f"{low[~wrong].float().mean():.0%} of the right ones")

# %%
# Reweighting gains little over training on the sure images alone, if there are 100 of
# them. What it adds is the list of suspects.
#
# The twelve examples that it trusts least, with the label that they came with.

with bilevel.plotting.style():
    figure, (top, bottom) = bilevel.plotting.panels(2, most=1, size=(5.4, 2.7))
    top.hist(
        [learned[~wrong].numpy(), learned[wrong].numpy()],
        bins=20,
        range=(0, 1),
        label=["right", "wrong"],
    )
    top.set(title="learned weight", ylabel="training examples")
    top.legend(title="label", loc="upper center")
    least = learned.argsort()[:12]
    grid = F.pad(x[train][least].reshape(12, 8, 8), (1, 1, 1, 1), value=0.5).reshape(
        2, 6, 10, 10
    )
    bottom.imshow(
        grid.permute(0, 2, 1, 3).reshape(20, 60).numpy(), cmap="gray_r", extent=(0, 6, 0, 2)
    )
    for place, index in enumerate(least):
        color = "#D55E00" if wrong[index] else "#0072B2"
        bottom.text(
            place % 6 + 0.08,
            1.92 - place // 6,
            int(given[index]),
            color=color,
            fontsize=13,
            weight="bold",
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    bottom.set_title("the least trusted, and their labels (orange: wrong)")
    bottom.set_axis_off()
figure.savefig("noisy_labels.png")
