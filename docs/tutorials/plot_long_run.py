"""
Resume and watch a long run
===========================

You will be able to stop a run at any time, go on from its checkpoint, and see how it
does from another window.

One argument, ``checkpoint=``, keeps a run in a file. Calling the same script again goes
on from there, to the last bit.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel

EPOCHS = 60

torch.manual_seed(0)
x = torch.randn(600, 20)
y = (x[:, :5].sum(1) + 0.8 * torch.randn(600) > 0).long()
train_loader = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=50, shuffle=True)
valid_loader = DataLoader(TensorDataset(x[300:], y[300:]), batch_size=100, shuffle=True)


def train(**options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    return bilevel.tune(
        net,
        train_loader,
        valid_loader,
        loss=F.cross_entropy,
        epochs=EPOCHS,
        inner_steps=2,
        **options,
    )


# %%
# A run that is stopped
# ---------------------
#
# A callback that returns True ends a run. Ctrl-C, SIGTERM and a machine that is
# switched off do the same less politely.

file = Path(tempfile.mkdtemp()) / "run.pt"
first = train(checkpoint=file, callbacks=[lambda event: event.index >= 1.5 * EPOCHS])
print(f"{first.stopped} after {len(first.history)} rounds")
for path in sorted(file.parent.iterdir()):
    print(path.name)

# %%
# The same call, again
# --------------------

second = train(checkpoint=file)
print(f"{second.stopped} after {len(second.history)} rounds")

# %%
# Is it the run that nobody had stopped?

whole = train()
same = all(
    torch.equal(whole.state_dict[name], value) for name, value in second.state_dict.items()
)
print(f"weights are the same to the last bit: {same}")
difference = max(
    abs(float(whole.hyper[name] - value)) for name, value in second.hyper.items()
)
print(f"largest difference of a hyperparameter: {difference}")

# %%
# Watch it
# --------
#
# Beside the checkpoint there is a log, ``run.pt.jsonl``, which grows by a line in every
# round. This makes a page of it, and again every five seconds while the run goes on:
#
# .. code-block:: console
#
#    $ python -m bilevel report run.pt.jsonl --watch 5
#
# The same page of a run that has ended comes from ``second.report("run.html")``, and a
# figure from ``second.plot()``. Here is ours, with the place where it was stopped.

page = second.report(file.with_name("run.html"))
print(f"{page.name}: {page.stat().st_size / 1000:.0f} kB, one file")

history = second.history
with bilevel.plotting.style():
    figure, (top, bottom) = bilevel.plotting.panels(2, most=1, size=(5.4, 2.7))
    stopped = len(first.history)
    measured = history["validation_loss"] > 0
    for axis in (top, bottom):
        axis.axvline(stopped, color="0.3", linestyle=":", label="stopped, and went on")
    top.plot(history["round"], history["inner_loss"], color="0.7", label="training loss")
    color = bilevel.plotting.color("delta_stn")
    top.plot(
        history["round"][measured],
        history["validation_loss"][measured],
        color=color,
        label="validation loss",
    )
    top.set(title="losses", ylim=(0, 1))
    for name in second.hyper:
        bottom.plot(history["round"], history[name], label=name)
    bottom.set(title="hyperparameters")
    bilevel.plotting.log_axis(bottom)
    top.legend()
    bottom.legend()
    bilevel.plotting.label_rounds([top, bottom])
figure.savefig("long_run.png")
