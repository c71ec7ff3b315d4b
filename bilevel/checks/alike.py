"""Rows that are all alike: the loss must be that of one perturbation for the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from bilevel.checks.subject import REMEDY, Subject, Unevaluable, gradients, read
from bilevel.responding import NoExamples, Rows


def check_sight(subject: Subject, shift: Tensor) -> None:
    """Refuse a weight whose response is lost.

    Args:
        subject: What is checked.
        shift: A perturbation, shape ``(h,)``.

    Raises:
        NoExamples: If there is such a weight.
    """
    if _lost(subject, shift, training=None) is None:
        return
    # Dropout inside a fused operation may draw other numbers than the rule for it does. In eval mode it draws none.
    name = _lost(subject, shift, training=False)
    if name is not None and subject.repeats():
        raise NoExamples(
            f"{subject.loss} uses the weight {name!r} where the library cannot see it, so that its response to a "
            "perturbation of its own for each example is lost. That happens in torch.jit.script, in a "
            "torch.autograd.Function, in compiled extensions, and in operations with a rule that does not fit. Use "
            f"plain PyTorch operations there, let the weight not respond (structure={{{name!r}: 'none'}}), {REMEDY}."
        )


def _lost(subject: Subject, shift: Tensor, *, training: bool | None) -> str | None:
    """The first weight in which the loss has other slopes than with all weights multiplied out, if there is one."""
    weights, hyper = subject.weights(), (subject.hyper + shift).expand(subject.count, -1)
    rows = subject.theta.rows(shift)
    leaves = {name: part.factor.detach().clone().requires_grad_() for name, part in rows.items()}
    templates = {name: part.template.detach() for name, part in rows.items()}
    alike = {name: Rows(leaf.expand(subject.count, -1), templates[name]) for name, leaf in leaves.items()}
    seen = gradients(subject.evaluate(subject.responding(alike), hyper, training=training), [*leaves.values()])
    moved = weights | {name: weights[name] + Rows(leaf, templates[name]).change() for name, leaf in leaves.items()}
    plain = subject.plain(moved, read(weights, alike))
    expected = gradients(subject.evaluate(plain, hyper, training=training), [*leaves.values()])
    errors = torch.stack([(a - b).norm() for a, b in zip(seen, expected, strict=True)]).double()
    sizes = torch.stack([slope.norm() for slope in expected]).double()
    relative = errors / (sizes + 1e-3 * sizes.max()).clamp_min(torch.finfo(torch.float64).tiny)
    wrong = (relative > min(30 * subject.rounding, 0.5)).tolist()
    return next((name for name, bad in zip(leaves, wrong, strict=True) if bad), None)


def check_shapes(subject: Subject, shift: Tensor) -> None:
    """Refuse a loss that means something else by a hyperparameter when it has one row per example.

    Args:
        subject: What is checked.
        shift: A perturbation, shape ``(h,)``.

    Raises:
        ValueError: If it does.
    """
    try:
        wrong = _differing(subject, shift)
    except (Unevaluable, RuntimeError, TypeError):
        return  # a loss that only takes one row per example, or that cannot be differentiated in a hyperparameter
    if wrong is not None and subject.repeats():
        raise ValueError(
            f"{subject.loss} means something else by hyper[{wrong!r}] when it has one row per example, shape "
            f"{subject.shape(wrong)}, than when it has its own shape: it gives another loss, although all rows are "
            f"equal. Index from the right (hyper[{wrong!r}][..., 0]) and reduce along the last axis, as in "
            f"(x * hyper[{wrong!r}]).sum(-1) in place of x @ hyper[{wrong!r}]; or declare it with shared=True, "
            f"{REMEDY}."
        )


def _differing(subject: Subject, shift: Tensor) -> str | None:
    """A hyperparameter in which the loss differs; the first one if only its value does."""
    found, drawn = _values_and_slopes(subject, shift, rows=True), subject.drawn
    expected = _values_and_slopes(subject, shift, rows=False)
    if drawn != subject.drawn:
        return None  # the loss draws numbers in the shape of a hyperparameter, and so other ones
    size = expected.abs()
    wrong = (found - expected).abs() > 10 * subject.rounding * (size + 1e-3 * size.max())
    if not bool(wrong.any()):
        return None
    parts = subject.problem.space.split(wrong[1:])
    return next((name for name, part in parts.items() if bool(part.any())), next(iter(parts)))


def _values_and_slopes(subject: Subject, shift: Tensor, *, rows: bool) -> Tensor:
    """The loss, and its derivative in every hyperparameter, in one vector."""
    weights = subject.weights()
    leaf = (subject.hyper + shift).requires_grad_()
    hyper = leaf.expand(subject.count, -1) if rows else leaf
    params = read(weights, subject.theta.rows(torch.zeros_like(hyper))) if rows else weights
    loss = subject.evaluate(subject.plain(weights, params), hyper)
    return torch.cat([loss.detach().reshape(1).to(leaf), *gradients(loss, [leaf])]).double()
