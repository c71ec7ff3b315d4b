r"""
Write your own method
=====================

You will be able to add a method in twenty lines, have it checked, and use it like the
others.

Our method is *one step*, known as T1-T2 (Luketina et al., 2016): pretend that the
weights answer to :math:`\lambda` with just one step of gradient descent,

.. math::
   r(\lambda) = w - \eta\, \nabla_w \mathcal{L}_T(\lambda, w), \qquad
   \frac{\partial r}{\partial \lambda} =
   -\eta\, \frac{\partial^2 \mathcal{L}_T}{\partial w\, \partial \lambda}.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.autograd import forward_ad

import bilevel

ROUNDS = 150

# %%
# The settings
# ------------
#
# A frozen dataclass that checks its values. ``bind`` makes a response from them.


@dataclass(frozen=True, kw_only=True)
class OneStep(bilevel.Method):
    """The weights answer with one step of gradient descent."""

    rate: float = 0.1

    def __post_init__(self):
        if not self.rate > 0:
            raise ValueError(f"OneStep: rate must be positive, got {self.rate}.")

    def bind(self, problem):
        return OneStepResponse(problem, self.rate)


# %%
# The response
# ------------
#
# It says what its weights minimise. Its ``forward`` returns a model whose *value* is
# the weights and whose *derivative* is the answer. A gradient minus itself is zero, and
# has a derivative. Nobody asks for one where the weights are only read.


class OneStepResponse(bilevel.BestResponse):
    def __init__(self, problem, rate):
        super().__init__(problem)
        self.rate = rate

    def inner_loss(self, hyper, batch):
        model = self.inner.model(self.inner.params(), update_buffers=True)
        yield self.problem.inner_loss(model, hyper, batch)

    def forward(self, hyper, train_batch=None, center=None):
        weights = {name: weight.detach() for name, weight in self.inner.params().items()}
        if hyper.requires_grad or forward_ad.unpack_dual(hyper).tangent is not None:
            with torch.enable_grad():
                leaves = [weight.clone().requires_grad_() for weight in weights.values()]
                model = self.inner.model(dict(zip(weights, leaves, strict=True)))
                loss = self.problem.inner_loss(model, hyper, train_batch).value
                slopes = torch.autograd.grad(
                    loss, leaves, create_graph=True, materialize_grads=True
                )
            for name, slope in zip(weights, slopes, strict=True):
                weights[name] = weights[name] - self.rate * (slope - slope.detach())
        return self.inner.model(weights)


# %%
# Have it checked
# ---------------
#
# One contract for all methods: values, derivatives against finite differences,
# precision, random numbers, checkpoints, and an untouched module.

report = bilevel.check_method(OneStep())
print(report)

# %%
# Use it
# ------
#
# Ridge regression, where the best penalty is known, beside a method that solves the
# linear system.

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


def run(method):
    problem = bilevel.Problem(
        {"w": torch.zeros(20)},
        inner_loss=train_loss,
        outer_loss=valid_loss,
        hyper={"penalty": bilevel.positive(0.05)},
    )
    solution = bilevel.solve(
        problem,
        [train],
        [valid],
        method=method,
        steps=ROUNDS,
        inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        outer_optimizer=lambda params: torch.optim.SGD(params, lr=0.2),
    )
    return solution.history["penalty"]


paths = {"OneStep": run(OneStep()), "implicit_cg": run("implicit_cg")}
grid = np.linspace(-4, 2, 121)
losses = [exact(place) for place in grid]
best = grid[np.argmin(losses)]
print(f"best λ {best:.1f}, validation loss {min(losses):.2f}")
for name, path in paths.items():
    end = float(np.log(path[-1]))
    print(f"{name}: λ {end:.1f}, validation loss {exact(end):.2f}")

# %%
# One step sees only a part of the answer, so its hypergradient is too short. It points
# the right way here, and gets there late.

with bilevel.plotting.style():
    figure, (top, bottom) = bilevel.plotting.panels(2, most=1, size=(5.4, 2.6))
    top.axhline(best, color="black", linestyle=":", label="optimum")
    bottom.plot(grid, losses, color="black", label="exact")
    for name, color in bilevel.plotting.colors(paths).items():
        places = np.log(paths[name])
        top.plot(places, color=color, label=name)
        bottom.plot(
            places[::15],
            [exact(place) for place in places[::15]],
            "o",
            color=color,
            label=name,
            markersize=5,
        )
    top.set(title="λ")
    bottom.set(
        title="validation loss of the best weights; a dot for every 15 rounds",
        xlabel="λ",
    )
    top.legend()
    bilevel.plotting.label_rounds([top])
figure.savefig("own_method.png")
