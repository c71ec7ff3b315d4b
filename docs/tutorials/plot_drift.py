r"""
Why the uncentered form drifts
==============================

You will be able to say when ``stn`` runs away, and why ``centered_stn`` and
``delta_stn`` do not.

``stn`` learns :math:`r(\lambda) = \Phi \lambda + \phi_0`: a line through the origin
of the :math:`\lambda` axis. The centered form, :math:`r(\lambda) = w_0 + \Theta
(\lambda - \lambda_0)`, has its origin where :math:`\lambda` is now. On paper both
are the same lines. For an optimizer they are not.
"""

import numpy as np
import torch

import bilevel

ROUNDS = 200

# %%
# Far from zero the problem is ill-conditioned
# --------------------------------------------
#
# A line is fitted to points :math:`\lambda + \epsilon`, with a standard deviation
# :math:`\sigma` of :math:`\epsilon`. How hard that is for gradient descent is the
# condition number of
#
# .. math::
#    \begin{pmatrix} \lambda^2 + \sigma^2 & \lambda \\ \lambda & 1 \end{pmatrix}
#    \text{ (uncentered)}, \qquad
#    \begin{pmatrix} \sigma^2 & 0 \\ 0 & 1 \end{pmatrix} \text{ (centered).}

sigma = 0.5
places = np.linspace(-8, 8, 161)
uncentered = [
    np.linalg.cond([[place**2 + sigma**2, place], [place, 1]]) for place in places
]
centered = np.linalg.cond([[sigma**2, 0], [0, 1]])
print(
    f"condition number at λ = 8: uncentered {uncentered[-1]:,.0f}, centered {centered:.0f}"
)

# %%
# What that does to a run
# -----------------------
#
# Ridge regression, with the penalty :math:`e^\lambda`. For each :math:`\lambda` the
# best weights have a closed form, so the best penalty is known. We start at
# :math:`\lambda = -6`, which is nearly no penalty.

torch.manual_seed(0)
x, noise = torch.randn(80, 20), torch.randn(80)
y = x[:, :5].sum(1) + 2 * noise
train, valid = (x[:40], y[:40]), (x[40:], y[40:])


def valid_loss(model, hyper, batch):
    x, y = batch
    return ((x @ model.params["w"] - y) ** 2).mean()


def train_loss(model, hyper, batch):
    return valid_loss(model, hyper, batch) + hyper["penalty"] * bilevel.l2(model.params)


def exact(log_penalty):
    x, y = train
    w = torch.linalg.solve(
        x.T @ x / len(y) + np.exp(log_penalty) * torch.eye(20), x.T @ y / len(y)
    )
    return float(((valid[0] @ w - valid[1]) ** 2).mean())


grid = np.linspace(-6, 6, 121)
best = grid[np.argmin([exact(place) for place in grid])]


def run(method, learning_rate):
    problem = bilevel.Problem(
        {"w": torch.zeros(20)},
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={"penalty": bilevel.positive(float(np.exp(-6)))},
    )
    try:
        solution = bilevel.solve(
            problem,
            [train],
            [valid],
            method=method,
            steps=ROUNDS,
            inner_optimizer=lambda params: torch.optim.SGD(params, lr=learning_rate),
            outer_optimizer=lambda params: torch.optim.Adam(params, lr=0.05),
            evaluate_every=1,
        )
    except bilevel.DivergenceError as error:
        solution = error.solution  # until then
    return solution


# %%
# The centered form takes the learning rate that plain training takes. The uncentered
# one diverges with it within three rounds, before :math:`\lambda` moves at all. With
# steps that are twenty times smaller it arrives, later.

runs = {
    "stn": run(bilevel.STN(scale=sigma), 0.1),
    "stn, smaller steps": run(bilevel.STN(scale=sigma), 0.005),
    "delta_stn": run(bilevel.DeltaSTN(scale=sigma), 0.1),
}
print(f"best: λ = {best:.1f}, validation loss {exact(best):.2f}")
for name, solution in runs.items():
    history = solution.history
    print(
        f"{name}: {solution.stopped} after {len(history)} rounds, "
        f"λ = {np.log(history['penalty'][-1]):.1f}, "
        f"validation loss {history['validation_loss'][-1]:.3g}"
    )

# %%
# Adam hides some of this, because it rescales every number. The model is linear in its
# weights, so ``centered_stn`` and ``delta_stn`` are the same here.

with bilevel.plotting.style():
    figure, (top, left, right) = bilevel.plotting.panels(3, most=1, size=(5.4, 2.5))
    colors = {"stn": "black", "stn, smaller steps": bilevel.plotting.color("stn")}
    top.plot(places, uncentered, color=bilevel.plotting.color("stn"), label="uncentered")
    top.axhline(centered, color=bilevel.plotting.color("delta_stn"), label="centered")
    bilevel.plotting.log_axis(top)
    top.set(xlabel="λ", title="condition number")
    top.legend()
    for name, solution in runs.items():
        history = solution.history
        color = colors.get(name, bilevel.plotting.color(name))
        place = np.log(history["penalty"])
        if solution.stopped == "diverged":
            left.plot(len(place), place[-1], "X", color=color, label=f"{name}, diverged")
            continue
        left.plot(history["round"], place, color=color, label=name)
        right.plot(history["round"], history["validation_loss"], color=color)
    left.axhline(best, color="black", linestyle=":", label="optimum")
    right.axhline(exact(best), color="black", linestyle=":", label="optimum")
    left.set(title="λ")
    right.set(title="validation loss", ylim=(5, 11))
    left.legend()
    bilevel.plotting.label_rounds([left, right])
figure.savefig("drift.png")
