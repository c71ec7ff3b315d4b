r"""Second derivatives of the inner loss: where a loss has kinks, they do not tell how a minimum moves.

An L1 penalty pulls weights to zero and holds them there. Its second derivative is zero everywhere but at the kink, so
that the implicit function theorem, applied to it, gives a response that the minimum does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bilevel.checks.kinds import repeatable
from bilevel.checks.outputs import Outputs
from bilevel.problem import Problem, Variables

NEAR, NEARER = 1e-3, 1e-5
ENTRIES = 8
"""So many entries of each weight are tried at once, and no larger share than one in so many."""


def check_smooth(problem: Problem, inner: Variables, hyper: Tensor, batch: Any, *, method: str) -> None:
    """Refuse losses with kinks at which minima lie.

    They are looked for where the loss is linear in pieces in the predictions, and where single entries, or all entries,
    of the weights that it reads are zero, or are where they start.

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
        if "pieces" in outputs.kinds():
            raise ValueError(
                f"inner_loss is linear in pieces in what the network returns, as L1 and hinge losses are. {method} "
                "takes second derivatives, which do not see the kinks between the pieces. Use a smooth loss, as "
                "F.smooth_l1_loss, or method='stn' or 'centered_stn'."
            )
        for name, where in _kinks(outputs, whole=problem.module is not None):
            raise ValueError(
                f"inner_loss has a kink in model.params[{name!r}] where {where}, as an L1 penalty has. The minimum "
                f"may lie there, and {method} takes second derivatives, which do not see it: the hypergradient would "
                "be wrong. Use bilevel.l2, or method='delta_stn', 'centered_stn', 'stn' or 'unrolled'."
            )


def _kinks(outputs: Outputs, *, whole: bool) -> Iterator[tuple[str, str]]:
    """The weights in which the loss has a kink, and where."""
    weights = {name: w.detach() for name, w in outputs.weights.items()}
    read = [name for name, slope in zip(weights, outputs.slopes([*outputs.read.values()]), strict=True) if slope.any()]
    sizes = {name: weights[name].numel() for name in read}
    counts = {name: max(1, min(ENTRIES, n // ENTRIES)) for name, n in sizes.items()}
    chosen = {name: torch.arange(k) * (sizes[name] - 1) // max(k - 1, 1) for name, k in counts.items()}

    def entries(name: str, center: float, distance: float) -> Tensor:
        """The weight with some entries at a distance from zero, or from where they are."""
        moved = weights[name].clone(memory_format=torch.contiguous_format)
        flat, index = moved.view(-1), chosen[name].to(moved.device)
        flat[index] = center * flat[index] + distance
        return moved

    def everything(name: str, center: float, distance: float) -> Tensor:
        """The weight with all entries near zero."""
        w = weights[name]
        signs = torch.linspace(1, w.numel() + 1, w.numel(), device=w.device).cos().sign().to(w).view(w.shape)
        return distance * signs

    tests: list[tuple[Callable[[str, float, float], Tensor], float, str]] = [
        (entries, 0.0, "entries are zero"),
        (entries, 1.0, "entries are what they are at the start"),
    ]
    # Without a network, the weights make the predictions too, and far from where they are these have other kinks.
    if whole:
        tests.append((everything, 0.0, "all entries are zero"))
    for place, center, words in tests:
        sides = [[{name: place(name, center, s * d) for name in read} for s in (1, -1)] for d in (NEAR, NEARER)]
        try:
            found = [_jumps(outputs, weights, above, below) for above, below in sides]
        except Exception:  # a loss that is not defined there
            continue
        for name in read:
            (near, _, _), (nearer, size, outward) = (jump[name] for jump in found)
            # The jump of a smooth function is in proportion to the distance; what is left at distance zero is a kink.
            left = float((NEAR * nearer - NEARER * near).norm()) / (NEAR - NEARER)
            bounded = float(nearer.norm()) < 3 * float(near.norm())
            pulls = outward > 0 or place is entries
            if (
                bounded
                and pulls
                and left > 0.01 * float(near.norm())
                and left > 100 * torch.finfo(near.dtype).eps * size
            ):
                yield name, words


def _jumps(
    outputs: Outputs, weights: dict[str, Tensor], above: dict[str, Tensor], below: dict[str, Tensor]
) -> dict[str, tuple[Tensor, float, float]]:
    """How the slopes change from one side to the other; their size; whether they point away from the middle."""
    values = [seen.detach() for seen in outputs.seen]
    up, down = (outputs.slopes_at(values, weights | side)[1] for side in (above, below))
    return {
        name: (
            torch.where(above[name] == below[name], 0.0, up[name] - down[name]),
            float(up[name].norm()),
            float((up[name] * (above[name] - below[name])).sum()),
        )
        for name in above
    }
