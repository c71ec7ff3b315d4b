"""
Diagnose a bad hypergradient
============================

You will be able to find out whether a hypergradient is wrong, why, and what to try.

A wrong hypergradient raises no error: the hyperparameters just go elsewhere.
:func:`bilevel.diagnose` compares it with a converged linear solve on the same batches,
and says what it sees.
"""

import torch

import bilevel

STEPS = 400

# %%
# A small problem
# ---------------
#
# Ridge regression with two penalties: one for five features that matter, one for fifteen
# that do not.

torch.manual_seed(0)
x, noise = torch.randn(120, 20), torch.randn(120)
y = x[:, :5].sum(1) + 2 * noise
train, valid = (x[:60], y[:60]), (x[60:], y[60:])


def valid_loss(model, hyper, batch):
    x, y = batch
    return ((x @ model.params["w"] - y) ** 2).mean()


def train_loss(model, hyper, batch):
    squares = model.params["w"] ** 2
    penalty = hyper["useful"] * squares[:5].sum() + hyper["useless"] * squares[5:].sum()
    return valid_loss(model, hyper, batch) + penalty


def train_and_diagnose(**options):
    """Train at fixed hyperparameters; the diagnoses after every 40 steps."""
    problem = bilevel.Problem(
        {"w": torch.zeros(20)},
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={"useful": bilevel.positive(0.1), "useless": bilevel.positive(0.1)},
    )
    solver = bilevel.Solver(
        problem, inner_optimizer=lambda params: torch.optim.Adam(params, lr=0.02), **options
    )
    found = []
    for step in range(STEPS):
        solver.inner_step(train)
        if step % 40 == 39:
            found.append(bilevel.diagnose(solver, train, valid))
    return found


# %%
# A bad one
# ---------
#
# Somebody gave the response a learning rate of one.

bad = train_and_diagnose(response_optimizer=lambda params: torch.optim.Adam(params, lr=1.0))
print(bad[-1])

# %%
# Read the first line: the cosine says whether it points the right way, the norm ratio
# how long it is. Then the text: what it means, and what to try.
#
# The remedy
# ----------
#
# The default: the response gets the optimizer that the weights have, with 0.02 here.

good = train_and_diagnose()
print(good[-1])

# %%
# In a run of your own, ``callbacks=[bilevel.Diagnose(every=10, train=batch,
# valid=batch)]`` does this every ten rounds, and ``plot()`` draws it.

found = {"learning rate 1": bad, "learning rate 0.02": good}
with bilevel.plotting.style():
    figure, axes = bilevel.plotting.panels(2, most=1, size=(5.4, 2.6))
    for (name, diagnoses), color in zip(
        found.items(), ("0.4", bilevel.plotting.color("delta_stn")), strict=True
    ):
        steps = [40 * (1 + place) for place in range(len(diagnoses))]
        axes[0].plot(
            steps, [one.cosine for one in diagnoses], "o-", color=color, label=name
        )
        axes[1].plot(
            steps, [one.norm_ratio for one in diagnoses], "o-", color=color, label=name
        )
    for axis in axes:
        axis.axhline(1, color="black", linestyle=":", linewidth=1, label="reference")
    axes[0].set(title="cosine of the hypergradient with the reference", ylim=(-1.1, 1.1))
    axes[1].set(title="its length, relative to the reference")
    bilevel.plotting.log_axis(axes[1])
    axes[0].legend()
    bilevel.plotting.label_rounds(axes, "inner steps")
figure.savefig("diagnose.png")
