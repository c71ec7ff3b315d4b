r"""
The noise of the response, and how to cancel it
===============================================

You will be able to choose between plain sampling, antithetic pairs and the control
variate, and say what they cost.

The response :math:`\Theta` is learned from perturbed losses. For one perturbation
:math:`\epsilon` its gradient is

.. math:: \nabla_\Theta = \mathbf{J}^\top g\, \epsilon^\top
   + (\mathbf{G} \Theta + \mathbf{B})\, \epsilon \epsilon^\top + \ldots

The first term has mean zero: it is noise, of order :math:`\sigma`. The second is the
signal, of order :math:`\sigma^2`. So the smaller the perturbation, the more the noise
wins, unless somebody takes it away.
"""

import math

import torch
from torch import nn

import bilevel

STEPS = 400

# %%
# A problem with a known answer
# -----------------------------
#
# A linear network with weight decay. Its best weights and its response are systems of
# linear equations.

torch.manual_seed(0)
x = torch.randn(200, 10)
y = x.sum(1, keepdim=True) + torch.randn(200, 1)
decay = 0.3
matrix = x.T @ x / 200 + decay * torch.eye(10)
best = torch.linalg.solve(matrix, x.T @ y / 200)
exact = -torch.linalg.solve(
    matrix, decay * best
)  # how the weights answer when log decay grows


def valid_loss(model, hyper, batch):
    x, y = batch
    return (model(x) - y)[:, 0] ** 2


def train_loss(model, hyper, batch):
    return valid_loss(model, hyper, batch) + hyper["decay"] * bilevel.l2(model.params)


# %%
# Learn nothing but the response
# ------------------------------
#
# The weights start at their best and stay there, with a learning rate of zero. Batches
# have 20 examples.

net = nn.Linear(10, 1, bias=False)
net.weight.data = best.T.clone()
problem = bilevel.Problem(
    net,
    inner_loss=train_loss,
    outer_loss=valid_loss,
    hyper={"decay": bilevel.positive(decay)},
)


def learn(**settings):
    """The relative error of the learned response, after every tenth step."""
    solver = bilevel.Solver(
        problem,
        method=bilevel.DeltaSTN(**settings),
        inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        response_optimizer=lambda params: torch.optim.Adam(params, lr=5e-3),
    )
    errors = []
    for step in range(STEPS):
        rows = torch.randint(200, (20,))
        solver.inner_step((x[rows], y[rows]))
        if step % 10 == 0:
            learned = solver.response.jacobian(solver.vector)
            errors.append(float((learned - exact).norm() / exact.norm()))
    return errors


ways = {
    "plain": {"control": False},
    "pairs ±ε": {"antithetic": True},
    "control variate (default)": {},
}
found = {
    scale: {name: learn(scale=scale, **way) for name, way in ways.items()}
    for scale in (0.1, 1.0)
}
for scale, errors in found.items():
    for name, error in errors.items():
        last = error[-10:]
        print(f"σ = {scale}, {name}: error {math.fsum(last) / len(last):.0%}")

# %%
# With a small perturbation plain sampling does not see the response at all; the two
# others hardly mind. Pairs take a second perturbed pass. The control variate needs
# none: the pass that trains the weights has :math:`\mathbf{J}^\top g` already. So it is
# the default.

with bilevel.plotting.style():
    figure, axes = bilevel.plotting.panels(
        2, most=1, size=(5.4, 2.7), sharex=True, sharey=True
    )
    for axis, (scale, errors) in zip(axes, found.items(), strict=True):
        for (name, error), dashes in zip(errors.items(), (":", "--", "-"), strict=True):
            axis.plot(range(0, STEPS, 10), error, dashes, label=name)
        axis.set(title=f"error of the response, σ = {scale}", ylim=(0, 1.6))
    axes[0].legend()
    bilevel.plotting.label_rounds(axes, "inner steps")
figure.savefig("noise.png")
