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

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
torch.manual_seed(0)
train, valid, test = (
    TensorDataset(x[rows], y[rows])
    for rows in torch.randperm(len(y)).split([300, 300, 1197])
)
train_loader = DataLoader(train, batch_size=50, shuffle=True)
valid_loader = DataLoader(valid, batch_size=100, shuffle=True)


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(128, 10),
    )  # fmt: skip


# %%
# Five lines
# ----------

net = network()
result = bilevel.tune(
    net, train_loader, valid_loader, loss=F.cross_entropy, epochs=EPOCHS,
    dropout=True, weight_decay="layer", label_smoothing=True,
)  # fmt: skip
net.load_state_dict(result.best.state_dict)
for name, value in result.best.hyper.items():
    print(f"{name}: {float(value):.3g}")

# %%
# Was it worth it?
# ----------------
#
# Plain training of the same network, as long, with the dropout that it has. It also
# keeps the weights with the lowest validation loss.


def loss_on(net, data):
    net.eval()
    with torch.no_grad():
        return float(F.cross_entropy(net(data.tensors[0]), data.tensors[1]))


plain = network()
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
course = []
for _ in range(EPOCHS):
    plain.train()
    for inputs, target in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), target).backward()
        optimizer.step()
    course.append((loss_on(plain, valid), loss_on(plain, test)))
print(f"test loss of plain training {min(course)[1]:.3f}, tuned {loss_on(net, test):.3f}")

# %%
# One split and one seed. A network that has the right dropout already gains less.

history = result.history
measured = ~torch.tensor(history["validation_loss"]).isnan().numpy()
with bilevel.plotting.style():
    figure, (left, right) = bilevel.plotting.panels(2, most=1, size=(5.4, 2.7))
    per_epoch = EPOCHS / len(history)
    left.plot(
        range(1, EPOCHS + 1),
        [valid_loss for valid_loss, _ in course],
        "0.3",
        linestyle=":",
        label="plain",
    )
    epochs = history["round"][measured] * per_epoch
    left.plot(
        epochs,
        history["validation_loss"][measured],
        color=bilevel.plotting.color("delta_stn"),
        label="tuned",
    )
    left.set(title="validation loss", ylim=(0, 0.5))
    left.legend()
    for name in ("dropout.2", "dropout.5", "label_smoothing"):
        right.plot(history["round"] * per_epoch, history[name], label=name)
    right.set(title="what was tuned", ylim=(0, 1))
    right.legend(loc="upper left")
    bilevel.plotting.label_rounds([left, right], "epoch")
figure.savefig("mlp.png")
