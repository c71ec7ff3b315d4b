"""
Few-shot learning: learn where to start
=======================================

You will be able to state a problem in which the *initial weights* are the
hyperparameters, as in MAML.

A task is a sine curve of which a network sees ten points. It starts at weights that all
tasks share, takes five steps of gradient descent on its ten points, and is judged on
the rest of the curve. Which initial weights are best?
"""

import math

import torch
from torch import nn

import bilevel

ROUNDS = 300
TASKS, SHOTS, STEPS = 25, 10, 5

generator = torch.Generator().manual_seed(0)


def draw(tasks, queries=SHOTS):
    """Points to adapt to, and others of the same curves."""
    amplitude, phase, x = (
        torch.rand(tasks, n, 1, generator=generator) for n in (1, 1, SHOTS + queries)
    )
    x = 10 * x - 5
    y = (0.1 + 4.9 * amplitude) * torch.sin(x - math.pi * phase)
    return (x[:, :SHOTS], y[:, :SHOTS]), (x[:, SHOTS:], y[:, SHOTS:])


# %%
# One network for each task, side by side
# ---------------------------------------
#
# All tasks of a round are adapted at once: the weights have a first dimension for the
# task. ``initial=`` says where they start, as a function of the hyperparameters.

sizes = [(1, 40), (40, 40), (40, 1)]
torch.manual_seed(0)
start = {f"weight{layer}": torch.randn(n, m) / n**0.5 for layer, (n, m) in enumerate(sizes)}
start |= {f"bias{layer}": 0.5 * torch.randn(1, m) for layer, (n, m) in enumerate(sizes)}


class Networks(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        for name, value in start.items():
            self.register_parameter(
                name, nn.Parameter(value.expand(tasks, *value.shape).clone())
            )

    def forward(self, x):
        for layer in range(3):
            x = torch.baddbmm(
                getattr(self, f"bias{layer}"), x, getattr(self, f"weight{layer}")
            )
            x = x.relu() if layer < 2 else x
        return x


def adaptation_loss(model, hyper, batch):
    x, y = batch
    return (
        (model(x) - y).square().mean((1, 2)).sum()
    )  # a sum: the weights of a task are its own


def query_loss(model, hyper, batch):
    x, y = batch
    return (model(x) - y).square().mean()


problem = bilevel.Problem(
    Networks(TASKS),
    inner_loss=adaptation_loss,
    outer_loss=query_loss,
    hyper={name: bilevel.real(value) for name, value in start.items()},
    initial=lambda hyper: {
        name: value.expand(TASKS, *value.shape) for name, value in hyper.items()
    },
)

# %%
# Every round starts again
# ------------------------
#
# ``Unrolled(restart=True)`` begins each round at the initial weights, makes the five
# steps and differentiates through them. This loop is our own, because every round has
# new tasks.

solver = bilevel.Solver(
    problem,
    method=bilevel.Unrolled(steps=STEPS, restart=True),
    inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    outer_optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
)
losses = []
for _ in range(ROUNDS):
    shown, rest = draw(TASKS)
    losses.append(float(solver.outer_step([shown] * STEPS, rest).loss))

# %%
# New tasks
# ---------
#
# In plain PyTorch: adapt to 200 tasks that nobody has seen, from the learned weights
# and from those we had.


def adapt(weights, shown, x, steps):
    net = Networks(len(x))
    net.load_state_dict({
        name: value.expand(len(x), *value.shape) for name, value in weights.items()
    })
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        adaptation_loss(net, None, shown).backward()
        optimizer.step()
    return net(x).detach()


shown, (x, y) = draw(200, 100)
for name, weights in {"random start": start, "learned start": solver.hyper}.items():
    errors = [
        float((adapt(weights, shown, x, steps) - y).square().mean()) for steps in (0, 1, 5)
    ]
    print(
        f"{name}: error after 0, 1, 5 steps: " + ", ".join(f"{one:.2f}" for one in errors)
    )

# %%
# One start was learned, from one seed; 200 tasks judge it. Here are two of them. The
# learned start is no good curve by itself; it is a short way from all of them.

x = torch.linspace(-5, 5, 100)[None, :, None].expand(200, 100, 1)
with bilevel.plotting.style():
    figure, axes = bilevel.plotting.panels(3, most=1, size=(5.4, 2.4))
    axes[0].plot(range(1, ROUNDS + 1), losses, color=bilevel.plotting.color("unrolled"))
    axes[0].set(title="error after five steps, tasks of the round")
    bilevel.plotting.log_axis(axes[0])
    bilevel.plotting.label_rounds(axes[:1])
    for axis, task in zip(axes[1:], (0, 3), strict=True):
        for steps, color in zip((0, 1, 5), bilevel.plotting.spectrum(3), strict=True):
            curve = adapt(solver.hyper, shown, x, steps)[task, :, 0]
            axis.plot(x[task, :, 0], curve, color=color, label=f"{steps} steps")
        axis.plot(
            shown[0][task, :, 0],
            shown[1][task, :, 0],
            "ko",
            markersize=5,
            label="shown",
        )
        axis.set(title="a new task", xlabel="x")
    axes[1].legend(ncols=2)
figure.savefig("few_shot.png")
