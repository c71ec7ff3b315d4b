"""
Several processes
=================

You will be able to run a script that you have on several GPUs, CPUs or machines, and
know what to expect.

``torchrun`` starts the same script several times. :func:`bilevel.solve` sees that,
shares the data among the processes, and adds up what they find.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import bilevel

EPOCHS = 100

# %%
# A script
# --------
#
# Nothing in it is about processes, but for its last lines: only one of them writes the
# file. ``batch_size`` is per process, so that two processes take half of it.

script = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import bilevel

epochs, batch_size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
x = torch.randn(480, 20)
y = (x[:, :5].sum(1) + torch.randn(480) > 0).long()
train = DataLoader(TensorDataset(x[:240], y[:240]), batch_size, shuffle=True)
valid = DataLoader(TensorDataset(x[240:], y[240:]), batch_size, shuffle=True)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
solution = bilevel.tune(
    net, train, valid, loss=F.cross_entropy, epochs=epochs, inner_steps=2, progress=False,
    label_smoothing=True, method="implicit_neumann",
)
group = solution.solver.group
if group is None or group.main:
    solution.history.to_csv(file)
"""

# %%
# One process and two
# -------------------
#
# In a terminal: ``python train.py 100 240 one.csv`` and ``torchrun --nproc-per-node=2
# train.py 100 120 two.csv``. Here both run at the same time.

folder = Path(tempfile.mkdtemp())
(folder / "train.py").write_text(script)
torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
commands = {
    "one": [sys.executable, "train.py", str(EPOCHS), "240", "one.csv"],
    "two": [sys.executable, *torchrun, "train.py", str(EPOCHS), "120", "two.csv"],
}
running = [
    subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    for command in commands.values()
]
for process in running:
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(said)
runs = {
    name: np.genfromtxt(folder / f"{name}.csv", delimiter=",", names=True, deletechars="")
    for name in commands
}

# %%
# The same run
# ------------
#
# A batch holds all examples here, and ``implicit_neumann`` draws no random numbers, so the
# two runs agree but for rounding. With smaller batches, dropout or perturbations they
# differ like two seeds.

names = [
    name for name in runs["one"].dtype.names if name.startswith(("weight_decay", "label"))
]
largest = max(np.abs(np.log(runs["one"][name] / runs["two"][name])).max() for name in names)
print(f"largest difference of a hyperparameter: {np.expm1(largest):.2%}")

with bilevel.plotting.style():
    figure, (axis,) = bilevel.plotting.panels(1, size=(5.4, 3.4))
    for name, color in zip(names, bilevel.plotting.colors(names).values(), strict=True):
        axis.plot(
            runs["one"]["round"],
            runs["one"][name],
            color=color,
            linewidth=4,
            alpha=0.35,
            label=name,
        )
        axis.plot(runs["two"]["round"], runs["two"][name], ":", color="black")
    axis.plot([], [], ":", color="black", label="with two processes")
    axis.set(title="hyperparameters")
    bilevel.plotting.log_axis(axis)
    axis.legend()
    bilevel.plotting.label_rounds([axis])
figure.savefig("processes.png")
