r"""Perturbations of their own for all examples: what they need to be right.

Example i has the perturbation :math:`\epsilon_i`. The expected gradient of :math:`\Theta` is that of one perturbation
for the whole batch if two things hold:

1. The loss is a sum in which every term has one perturbation,
   :math:`\mathcal{L}(\epsilon_1, \ldots, \epsilon_B) = \sum_i \ell_i(\epsilon_i)`.
2. With the same perturbation in every row, it is the loss with the weights multiplied out,
   :math:`\mathcal{L}(\epsilon, \dots, \epsilon) = \mathcal{L}_T(\lambda + \epsilon, w_0 + \Theta \epsilon)`.

For all :math:`\epsilon_i` have one distribution, so that
:math:`\sum_i \mathbb{E}\,\nabla \ell_i(\epsilon_i) = \mathbb{E}\,\nabla \sum_i \ell_i(\epsilon)`.

The first fails where a hyperparameter, with one value per example, meets something else than its own example: the mean
of a loss, another axis of the same length, another row. The second fails where a weight is used out of sight. Both are
tried with a random :math:`\Theta` on a batch. Batch norm breaks the first, and is let through, as in the paper: the
statistics over the examples are held fixed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from bilevel.checks.alike import check_shapes, check_sight
from bilevel.checks.kinds import isolated, repeatable
from bilevel.checks.separable import check_separable
from bilevel.checks.subject import RandomResponse, Subject, Unevaluable
from bilevel.precision import HALF
from bilevel.problem import Model, Problem, Variables
from bilevel.responding import CannotRespond

SCALE = 1.0
"""Of the perturbations, whatever that of the method is: what they would spoil must be larger than rounding."""


def check_rows(
    problem: Problem,
    inner: Variables,
    loss: str,
    names: Sequence[str],
    hyper: Tensor,
    batch: Any,
    count: int,
) -> None:
    """Refuse a loss that is not made for perturbations of their own, and a network that hides a weight.

    Args:
        problem: The problem.
        inner: Weights and buffers.
        loss: ``"inner_loss"`` or ``"outer_loss"``.
        names: Of the weights that respond.
        hyper: Unconstrained, shape ``(h,)``.
        batch: For the loss.
        count: Its number of examples.
    """
    # In half precision only if the loss cannot be evaluated in any other.
    for wide in (True, False) if problem.dtype in HALF else (True,):
        with suppress(Unevaluable), repeatable(hyper.device):
            theta = RandomResponse(inner.params(), names, hyper, wide=wide)
            _check(Subject(problem, inner, loss, theta, hyper, batch, count, wide=wide))
            return


def check_linearized(problem: Problem, make: Callable[[], Model], hyper: Tensor, batch: Any) -> None:
    """Refuse a network that can respond for each example, but not in forward mode.

    Args:
        problem: The problem.
        make: The linearised model.
        hyper: Unconstrained, shape ``(h,)``.
        batch: For the inner loss.

    Raises:
        CannotRespond: If it cannot. All other errors are left to the step itself.
    """
    with repeatable(hyper.device):
        try:
            count = problem.examples(batch)
            rows = hyper if count is None else hyper.expand(count, -1)
            problem.inner_loss(make(), rows, isolated(batch))
        except CannotRespond:
            raise
        except Exception:
            return


def takes_own_shape(problem: Problem, inner: Variables, hyper: Tensor, batch: Any) -> bool:
    """Whether the inner loss can be evaluated with hyperparameters of their own shape, without a row for each example.

    Args:
        problem: The problem.
        inner: Weights and buffers.
        hyper: Unconstrained, shape ``(h,)``.
        batch: For the inner loss.

    Returns:
        The answer.
    """
    with repeatable(hyper.device), torch.no_grad():
        try:
            problem.inner_loss(inner.model(inner.params()), hyper, isolated(batch))
        except Exception:
            return False
    return True


def _check(subject: Subject) -> None:
    hyper, count = subject.hyper, subject.count
    shift = SCALE * torch.randn(len(hyper), dtype=hyper.dtype).to(hyper)
    check_sight(subject, shift)
    if count > 1:
        check_separable(subject, SCALE)
    check_shapes(subject, shift)
