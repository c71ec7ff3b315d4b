r"""Second derivatives of the inner loss: where a loss has kinks, they do not tell how a minimum moves.

An L1 penalty pulls weights to zero and holds them there. Its second derivative is zero everywhere but at the kink, so
that the implicit function theorem, applied to it, gives a response that the minimum does not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel.autodiff import map_tensors
from bilevel.checks.kinds import isolated, repeatable
from bilevel.checks.outputs import Outputs
from bilevel.problem import Model, Problem, Variables

NEAR, NEARER = 1e-3, 1e-5
"""Distances from zero. Across zero, the slope of a smooth penalty changes by a hundredth as much at the second one."""


def check_smooth(problem: Problem, inner: Variables, hyper: Tensor, batch: Any, *, method: str) -> None:
    """Refuse losses with kinks at which minima lie: in the weights that it reads at zero, and in the predictions.

    Args:
        problem: The problem.
        inner: Weights and buffers.
        hyper: Unconstrained, shape ``(h,)``.
        batch: For the inner loss.
        method: Who takes second derivatives.

    Raises:
        ValueError: If the loss has such kinks.
    """
    with repeatable(hyper.device):
        outputs = Outputs(problem, inner, hyper, batch)
        if outputs.differentiated:
            return  # the loss cannot be evaluated without the network
        slopes = outputs.slopes(outputs.seen)
        straight = [bool(slope.any()) and not bends for slope, bends in zip(slopes, outputs.bends(slopes), strict=True)]
        values = [seen.detach() for seen in outputs.seen]
        weights = {name: w.detach() for name, w in outputs.weights.items()}

    def evaluate(shift: float, params: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The slopes of the loss at other predictions and weights."""
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        moved = [value + shift * (value.std(correction=0) + 1) * _waves(value) for value in values]
        moved = [value.requires_grad_() for value in moved]
        rest = iter(moved)
        predict = inner.predictor()

        def replace(output: Tensor) -> Tensor:
            return next(rest).clone() if output.requires_grad else output

        def call(*args: Any, **kwargs: Any) -> Any:
            assert predict is not None
            return map_tensors(replace, predict(outputs.weights, *args, **kwargs))

        with repeatable(hyper.device):
            model = Model(leaves, None if predict is None else call)
            loss = problem.inner_loss(model, hyper, isolated(batch)).value
            inputs = [*moved, *leaves.values()]
            found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        return [*found[: len(moved)]], dict(zip(leaves, found[len(moved) :], strict=True))

    if any(straight):
        far = evaluate(10.0, weights)[0]
        for old, new, flat in zip(slopes, far, straight, strict=True):
            if flat and not torch.allclose(old, new, rtol=1e-3, atol=0):
                raise ValueError(
                    f"inner_loss is linear in pieces in what the network returns, as L1 and hinge losses are. {method} "
                    "takes second derivatives, which do not see the kinks between the pieces. Use a smooth loss, as "
                    "F.smooth_l1_loss, or method='stn' or 'centered_stn'."
                )
    if not any(bool(part.any()) for part in outputs.slopes(list(outputs.read.values()))):
        return
    jumps, size = [], dict[str, float]()
    for distance in (NEAR, NEARER):
        signs = {name: distance * _waves(w).sign() for name, w in weights.items()}
        above, below = evaluate(0.0, signs)[1], evaluate(0.0, {name: -value for name, value in signs.items()})[1]
        jumps.append({name: (above[name] - below[name]).norm() for name in weights})
        size = {name: float(above[name].norm()) for name in weights}
    for name in weights:
        near, nearer = (float(jump[name]) for jump in jumps)
        if 0.3 * near < nearer < 3 * near and nearer > 100 * torch.finfo(hyper.dtype).eps * size[name]:
            raise ValueError(
                f"inner_loss has a kink where entries of model.params[{name!r}] are zero, as an L1 penalty has. The "
                f"minimum lies there, and {method} takes second derivatives, which do not see it: the hypergradient "
                "would be wrong. Use bilevel.l2, or method='delta_stn', 'centered_stn', 'stn' or 'unrolled'."
            )


def _waves(like: Tensor) -> Tensor:
    """Numbers of both signs, always the same."""
    return torch.linspace(1, like.numel() + 1, like.numel(), device=like.device).to(like).cos().view(like.shape)
