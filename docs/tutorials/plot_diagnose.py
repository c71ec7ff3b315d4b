"""
Diagnose a bad hypergradient
============================

You will be able to find out whether a hypergradient is wrong, why, and what to try.

A wrong hypergradient raises no error: the hyperparameters just go elsewhere.
:func:`bilevel.diagnose` compares it with a converged linear solve on the same batches,
and says what it sees.
"""

import torch
import torch.nn.functional as F
from torch import nn

import bilevel

STEPS = 300

torch.manual_seed(0)
x = torch.randn(400, 10)
y = (x[:, :3].sum(1) + torch.randn(400) > 0).long()
train, valid = (x[:200], y[:200]), (x[200:], y[200:])


def valid_loss(model, hyper, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def train_loss(model, hyper, batch):
    x, y = batch
    first, last = (
        bilevel.l2(model.params["0.weight"]),
        bilevel.l2(model.params["2.weight"]),
    )
    loss = F.cross_entropy(model(x), y, reduction="none")
    return loss + hyper["first"] * first + hyper["last"] * last


def train_and_diagnose(**options):
    """Train at fixed hyperparameters; the diagnoses after every 30 steps."""
    torch.manual_seed(1)
    problem = bilevel.Problem(
        nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 2)),
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={"first": bilevel.positive(0.01), "last": bilevel.positive(0.01)},
    )
    solver = bilevel.Solver(
        problem,
        method=bilevel.DeltaSTN(structure="dense", scale=0.3),
        inner_optimizer=lambda params: torch.optim.Adam(params, lr=0.02),
        **options,
    )
    found = []
    for step in range(STEPS):
        solver.inner_step(train)
        if step % 30 == 29:
            found.append(bilevel.diagnose(solver, train, valid, curvature="gauss_newton"))
    return found


# %%
# A bad one
# ---------
#
# Somebody took plain SGD for the response.

bad = train_and_diagnose(response_optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
print(bad[-1])

# %%
# Read the first line: the cosine says whether it points the right way, the norm ratio
# how long it is. Then the text: what it means, and what to try.
#
# The remedy
# ----------
#
# An adaptive optimizer, which is the default: the response gets the one that the
# weights have.

good = train_and_diagnose()
print(good[-1])

# %%
# In a run of your own, ``callbacks=[bilevel.Diagnose(every=10, train=batch,
# valid=batch)]`` does this every ten rounds, and ``plot()`` draws it.

found = {"response by SGD": bad, "response by Adam": good}
with bilevel.plotting.style():
    figure, axes = bilevel.plotting.panels(2, most=1, size=(5.4, 2.6))
    for (name, diagnoses), color in zip(
        found.items(), ("0.4", bilevel.plotting.color("delta_stn")), strict=True
    ):
        steps = [30 * (1 + place) for place in range(len(diagnoses))]
        axes[0].plot(
            steps, [one.cosine for one in diagnoses], "o-", color=color, label=name
        )
        axes[1].plot(
            steps, [one.norm_ratio for one in diagnoses], "o-", color=color, label=name
        )
    for axis in axes:
        axis.axhline(1, color="black", linestyle=":", linewidth=1, label="reference")
    axes[0].set(title="cosine of the hypergradient with the reference", ylim=(-1.1, 1.1))
    axes[1].set(title="its length, relative to the reference", ylim=0)
    axes[0].legend()
    bilevel.plotting.label_rounds(axes, "inner steps")
figure.savefig("diagnose.png")
