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

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
torch.manual_seed(0)
train, valid, test = torch.randperm(len(y)).split([700, 100, 997])
given = y[train].clone()
wrong = torch.rand(len(given)) < 0.4
given[wrong] = (given[wrong] + torch.randint(1, 10, (int(wrong.sum()),))) % 10

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


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


weight = bilevel.interval(0.0, 1.0, init=torch.full((len(train),), 0.5), shared=True)
problem = bilevel.Problem(
    network(), inner_loss=train_loss, outer_loss=valid_loss, hyper={"weight": weight}
)
solution = bilevel.solve(
    problem,
    [(x[train], given, torch.arange(len(train)))],
    [(x[valid], y[valid])],
    method="implicit_nystrom",
    inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    outer_optimizer=lambda params: torch.optim.Adam(params, lr=0.3),
    inner_steps=20,
    steps=ROUNDS,
)
learned = solution.hyper["weight"]

# %%
# What it found
# -------------


def accuracy(net):
    with torch.no_grad():
        return float((net(x[test]).argmax(1) == y[test]).float().mean())


def plain(x, y):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    for _ in range(20 * ROUNDS):
        optimizer.zero_grad()
        (F.cross_entropy(net(x), y) + 1e-3 * bilevel.l2(net.parameters())).backward()
        optimizer.step()
    return accuracy(net)


net = network()
net.load_state_dict(solution.state_dict)
found = (learned < 0.5) & wrong
print(f"wrong labels with a weight below a half: {found.sum() / wrong.sum():.0%}")
print(
    f"right labels with a weight below a half: {(learned < 0.5)[~wrong].float().mean():.0%}"
)
print(f"test accuracy of training on all: {plain(x[train], given):.1%}")
print(f"on the 100 sure ones only: {plain(x[valid], y[valid]):.1%}")
print(f"on all, reweighted: {accuracy(net):.1%}")

# %%
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
            weight="bold",
            va="top",
        )
    bottom.set_title("the least trusted, and their labels (orange: wrong)")
    bottom.set_axis_off()
figure.savefig("noisy_labels.png")
