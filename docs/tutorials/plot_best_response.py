r"""
The best response, and three ways to approximate it
===================================================

You will be able to say what ``stn``, ``centered_stn`` and ``delta_stn`` learn, and how
they differ.

The *best response* is the curve :math:`r(\lambda)`: the weight that training ends at,
for each hyperparameter :math:`\lambda`. Nobody can afford to train once for each
:math:`\lambda`. The three methods learn a straight line instead, near where
:math:`\lambda` is now.

The smallest example has one weight and one hyperparameter. The network is :math:`f(w) =
w + w^3`, and the hyperparameter is the value that it shall have. So :math:`r` is the
inverse of :math:`f`.
"""

import numpy as np
import torch
from torch import nn

import bilevel

STEPS = 500


class Net(nn.Module):
    """One weight, and a network that is not linear in it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, x):
        w = self.layer(x)
        return w + w**3


def train_loss(model, hyper, batch):
    return (model(batch)[:, 0] - hyper["target"]) ** 2


def valid_loss(model, hyper, batch):
    return (model(batch)[:, 0] - 1) ** 2


# %%
# Learn the three lines
# ---------------------
#
# We keep :math:`\lambda = 0.5` fixed and train only the inner level. Each of the 100
# equal examples of a batch gets a perturbed :math:`\lambda + \epsilon` of its own, with
# a standard deviation of ``scale``. From these, the methods learn how the weight should
# answer.

batch = torch.ones(100, 1)
here = 0.5


def learn(method):
    problem = bilevel.Problem(
        Net(),
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={"target": bilevel.real(here)},
    )
    solver = bilevel.Solver(
        problem,
        method=method,
        inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        seed=1,
    )
    for _ in range(STEPS):
        solver.inner_step(batch)
    return float(solver.params["layer.weight"]), float(
        solver.response.jacobian(solver.vector)
    )


methods = {
    "stn": bilevel.STN(scale=1.0),
    "centered_stn": bilevel.CenteredSTN(scale=1.0),
    "delta_stn": bilevel.DeltaSTN(scale=1.0),
}
lines = {name: learn(method) for name, method in methods.items()}

# %%
# What they should have learned is known here. The curve has the slope :math:`1 /
# f'(w)`.

w = np.linspace(-1.3, 1.5, 300)
curve = w + w**3
weight = np.interp(here, curve, w)
slope = 1 / (1 + 3 * weight**2)
print(f"{'best response':<14} weight {weight:.3f}  slope {slope:.3f}")
for name, (value, learned) in lines.items():
    print(f"{name:<14} weight {value:.3f}  slope {learned:.3f}")

# %%
# * ``stn`` fits one line to the whole neighbourhood. Where the curve bends, even its
#   weight is off.
# * ``centered_stn`` trains the weight on the loss itself, so the line goes through the
#   curve. Its slope is still that of the neighbourhood.
# * ``delta_stn`` also linearises the prediction, and learns the tangent. The
#   hypergradient needs exactly that.
#
# The shaded range is :math:`\lambda \pm \sigma`, from which most perturbations come.

with bilevel.plotting.style():
    figure, axes = bilevel.plotting.figure(1, 1, size=(5.4, 4.0))
    axis = axes[0, 0]
    axis.axvspan(here - 1, here + 1, color="0.93", linewidth=0)
    axis.plot(curve, w, color="black", linewidth=2.5, label="best response")
    reach = np.array([here - 1.5, here + 1.5])
    for name, (value, learned) in lines.items():
        axis.plot(
            reach,
            value + learned * (reach - here),
            color=bilevel.plotting.color(name),
            label=name,
            linewidth=2,
        )
        axis.plot(here, value, "o", color=bilevel.plotting.color(name), markersize=6)
    axis.set(
        xlim=(-1.5, 2.5), ylim=(-1.1, 1.3), xlabel="hyperparameter λ", ylabel="weight w"
    )
    axis.set(title="three lines near λ = 0.5")
    axis.legend(loc="upper left")
figure.savefig("best_response.png")
