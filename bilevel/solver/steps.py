"""How the two steps are made, and undone if they fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bilevel.parallel import plain
from bilevel.precision import own_precision
from bilevel.solver import together
from bilevel.solver.optimization import Gradients

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver


@dataclass(frozen=True)
class OuterStep:
    """What one outer step computed, before it moved the hyperparameters.

    Attributes:
        loss: The outer loss.
        hypergradient: Its total derivative, shape ``(h,)``, over the unconstrained vector.
        direct: The part of it that does not pass through the weights.
        report: What the method says about it, such as the residual of its linear system.
        aux: What the outer loss returned beside its value.
        inner_losses: Those of the inner steps that the method made itself; empty if it made none.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        ...     hyper={"target": bilevel.real(0.0)},
        ... )
        >>> step = bilevel.Solver(problem, method="implicit_exact").outer_step()
        >>> step.loss, step.hypergradient, step.direct
        (tensor(9.), tensor([-6.]), tensor([0.]))
    """

    loss: Tensor
    hypergradient: Tensor
    direct: Tensor
    report: dict[str, Tensor]
    aux: Any
    inner_losses: Tensor


def inner(solver: Solver, batches: tuple[Any, ...]) -> Tensor:
    """What :meth:`Solver.inner_step` documents; what fails is undone.

    Args:
        solver: Whose step it is.
        batches: One or more.

    Returns:
        The inner loss.
    """
    guard, state = solver.guard, solver.guard.step
    before = [buffer.clone() for buffer in state.buffers()]
    stream = solver.streams["loss"].states
    changed = False
    try:
        with solver.streams["loss"](), own_precision(solver.problem.device):
            moved = [solver.to_device(batch) for batch in batches]
            for batch in moved:
                solver.first_look.inner(solver.vector.detach(), plain(batch))
            if solver.group is not None:
                solver.group.at("inner", solver.inner_steps)
            learns = solver.response.learns(solver.inner_steps, solver.optimizers.get("response"))
            loss, values, gradients = solver._differentiation.of_inner_losses(
                solver.vector.detach(), moved, learns=learns
            )
            norms = solver.optimization.set_gradients(gradients)
            view = state.look() if guard.judges_state() else None
            number = guard.finite.number([] if view is None else view.tensors)
            guard.finite.inner(solver.inner_steps, values, norms, number)
        if view is not None:
            guard.keep(view._replace(rest=(stream, *view.rest[1:])), before, number)
        changed = True
        solver.optimization.step(gradients)
        guard.updated()
        solver.inner_steps += 1
        solver.inner_aux = loss.aux
        guard.good("inner")
    except BaseException:
        solver.optimization.drop_gradients()
        if changed:
            (state if guard.finite.at_once else guard.round).restore()
        else:
            with torch.no_grad():
                for buffer, value in zip(state.buffers(), before, strict=True):
                    buffer.copy_(value)
        raise
    return loss.value


def outer(solver: Solver, train_batch: Any, valid_batch: Any) -> OuterStep:
    """What :meth:`Solver.outer_step` documents; what fails is undone.

    Args:
        solver: Whose step it is.
        train_batch: For the response.
        valid_batch: For the outer loss.

    Returns:
        What was computed.
    """
    guard, hyper = solver.guard, solver.vector.detach()
    train_batch, valid_batch = _train_batches(solver, train_batch), solver.to_device(valid_batch)
    if solver.response.unrolled_steps:
        different = {id(batch): batch for batch in train_batch}  # often one for all steps
        moved = {place: solver.to_device(batch) for place, batch in different.items()}
        train_batch, train_batches = [moved[id(batch)] for batch in train_batch], [*moved.values()]
    else:
        train_batch = solver.to_device(train_batch)
        train_batches = [train_batch]
    changed = False
    try:
        with solver.streams["loss"](), solver.guard.finite.reading_once(), own_precision(solver.problem.device):
            if solver.response.unrolled_steps and solver.inner_steps == 0:
                solver._differentiation.rehearse(hyper, train_batch[0])
            if not solver.response.pure:  # otherwise it does not read the training batch
                for batch in train_batches:
                    solver.first_look.inner(hyper, plain(batch))
            solver.first_look.outer(hyper, plain(valid_batch))
            steps = (solver.inner_steps, solver.outer_steps)
            loss, slopes = solver._differentiation.of_outer_loss(hyper, (train_batch, valid_batch), steps)
            solver.first_look.reads()
            direct, through_weights, *for_scale = slopes
            hypergradient = direct + through_weights
            gradients: Gradients = {"hyper": [hypergradient.clone()]}
            if for_scale:
                gradients["scale"] = [*for_scale]
            view = guard.outer.look()
            guard.outer.keep(view)
            good = guard.vouches_for(view)
            if guard.carries and guard.keeps_rounds() and good:
                flag = None if solver.guard.finite.at_once else solver.guard.finite.number(view.tensors).isfinite()
                guard.round.keep(view, flag=flag)
                guard.kept_round()
            changed = True
            norms = solver.optimization.set_gradients(gradients)
            solver.optimization.step(gradients)
            solver.response.commit()
            # The step is made before it is judged, so that all flags are read from the device at once.
            now = solver.vector.detach()
            natural = [value.flatten() for value in solver.problem.space.values(now).values()]
            values = torch.cat(natural) if len(natural) > 1 else natural[0]
            state = solver.guard.finite.number(guard.step.tensors())
            if solver.group is not None:
                together.compare(solver, solver.group)
            solver.guard.finite.outer(solver.outer_steps, loss.value, norms, values, state, solver.inner_steps)
        solver.outer_steps += 1
        made = solver.response.steps
        if made is not None:
            solver.inner_steps += len(made.losses)
            solver.inner_aux = made.aux
        guard.good("outer")
    except BaseException:
        solver.optimization.drop_gradients()
        if changed:
            guard.outer.restore()
        raise
    if guard.carries and solver.guard.finite.at_once and good:  # what was copied is newer
        guard.step, guard.outer = guard.outer, guard.step
    return OuterStep(
        loss.value,
        hypergradient,
        direct,
        dict(solver.response.report),
        loss.aux,
        loss.value.new_zeros(0) if made is None else made.losses,
    )


def _train_batches(solver: Solver, train_batch: Any) -> Any:
    """What the response takes: the batch, or a list of as many as it makes steps."""
    count = solver.response.unrolled_steps
    if count == 0:
        return train_batch
    if train_batch is None:
        return [None] * count
    if not isinstance(train_batch, list) or len(train_batch) != count:
        got = f"{len(train_batch)}" if isinstance(train_batch, list) else f"a {type(train_batch).__name__}"
        raise ValueError(
            f"train_batch must be a list of {count} batches, one for each step of {solver.method}, got {got}; to use "
            f"one batch for all of them, write [batch] * {count}."
        )
    return train_batch
