"""All that a solver needs to continue bit for bit, as tensors and plain types."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bilevel.checkpoint import check_form
from bilevel.checkpoint.layout import Count, Free
from bilevel.interrupts import Waiting
from bilevel.parallel import divided, is_sharded, whole
from bilevel.precision import own_precision
from bilevel.solver import together
from bilevel.solver.forms import check_optimizer, of_buffers, of_scheduler

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver


def save(solver: Solver) -> dict[str, Any]:
    """Copy the state of a solver.

    Returns:
        A dict that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.
    """
    return copy.deepcopy(live(solver))


def live(solver: Solver) -> dict[str, Any]:
    """The state of a solver, to be written before the next step.

    Returns:
        As :func:`save`, but with the live tensors. Where each process keeps a part only, all of them have to call it,
        and each puts the whole state together on the host.
    """
    with solver.gathered():
        return _live(solver)


def _live(solver: Solver) -> dict[str, Any]:
    response = dict(solver.response.state_dict())
    if solver.shards is not None:
        response = {name: whole(value).cpu().clone() for name, value in response.items()}
    return {
        "method": repr(solver.method),
        "hyper": {name: [h.low, h.high, h.discrete] for name, h in solver.problem.space.hyper.items()},
        "vector": solver.vector.detach(),
        "response": response,
        **solver.optimization.state_dict(),
        "streams": streams(solver),
        "inner_steps": solver.inner_steps,
        "outer_steps": solver.outer_steps,
    }


def params(solver: Solver) -> dict[str, Tensor]:
    """A copy of the weights at the current hyperparameters, whole also where each process keeps a part.

    Returns:
        By name.
    """
    with solver.gathered(), torch.no_grad(), own_precision(solver.problem.device):
        return {name: value.clone() for name, value in solver.response(solver.vector.detach()).params.items()}


def streams(solver: Solver) -> dict[str, Any]:
    """The states of the random streams.

    Returns:
        By name.
    """
    return {name: stream.state_dict() for name, stream in solver.streams.items()}


def check(solver: Solver, state: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Refuse what this solver could not have saved.

    Args:
        solver: That is to go on.
        state: Anything.
        own: What the solver saves now.

    Returns:
        The state, with the streams of this process.

    Raises:
        ValueError: At the first difference.
    """
    missing = sorted(own.keys() - state.keys()) if isinstance(state, dict) else sorted(own)
    if missing:
        raise ValueError(f"state is not a Solver.state_dict(): it lacks {', '.join(missing)}.")
    for key in ("method", "hyper"):
        try:
            check_form(key, state[key], own[key])
        except ValueError as error:
            raise ValueError(f"state was saved with {key} {state[key]}, this solver has {own[key]}.") from error
    found: dict[str, Any] = together.of_this_process(state, own, solver.group)
    form: dict[str, Any] = dict.fromkeys(own, Free())
    form |= {"vector": own["vector"], "streams": dict.fromkeys(own["streams"], Free())}
    form |= {"inner_steps": Count(), "outer_steps": Count()}
    form["response"] = of_buffers(own["response"])
    form["schedulers"] = {name: of_scheduler(scheduler) for name, scheduler in solver.schedulers.items()}
    form["optimizers"] = dict.fromkeys(solver.optimizers, Free())
    check_form("state", found, form)
    for name, optimizer in solver.optimizers.items():
        place = f"state['optimizers'][{name!r}]"
        check_optimizer(place, found["optimizers"][name], optimizer, found["schedulers"].get(name))
    return found


def load(solver: Solver, state: dict[str, Any]) -> None:
    """Put a state into a solver that it fits."""
    state = copy.deepcopy(state)
    for name, stream in solver.streams.items():
        stream.load_state_dict(state["streams"][name])
    with torch.no_grad():
        solver.vector.copy_(state["vector"])
    with solver.gathered():
        _put(solver, state["response"])
    solver.optimization.load_state_dict(state)
    solver.inner_steps, solver.outer_steps = state["inner_steps"], state["outer_steps"]


def restore(solver: Solver, state: dict[str, Any]) -> None:
    """What :meth:`Solver.load_state_dict` documents.

    Raises:
        ValueError: If the state does not fit; the solver is then unchanged.
    """
    own = save(solver)
    state = check(solver, state, own)
    with Waiting():
        try:
            load(solver, state)
        except Exception as error:
            load(solver, own)
            raise ValueError(f"state does not fit this solver: {error}") from error
        with solver.gathered():
            bad = solver.guard.site()
        if bad is not None:
            load(solver, own)
            raise ValueError(f"state is not finite: {bad} is NaN or infinite; load an earlier one.")
        solver.guard.forget()


def restart(solver: Solver) -> None:
    """What :meth:`Solver.restart` documents."""
    with solver.gathered():
        _restart(solver)
    solver.optimization.restart_inner()
    solver.guard.forget()  # a bad step would lead back to before the restart


def _restart(solver: Solver) -> None:
    with solver.streams["loss"]():
        fresh = solver.method.bind(solver.problem).state_dict()
    kept = {name: value for name, value in solver.response.state_dict().items() if name.startswith("scale.")}
    _put(solver, fresh | kept)
    start = solver.problem.start(solver.vector.detach())
    with torch.no_grad():
        for weight, value in zip(solver.response.inner.weights, start.values(), strict=True):
            weight.copy_(whole(value))
    if solver.group is not None:
        solver.group.broadcast(together.state(solver))
    if solver.shards is not None:
        solver.shards.keep()


def _put(solver: Solver, state: dict[str, Any]) -> None:
    """Load the state of a response, of which each process keeps its part, if it keeps no more."""
    own = solver.response.state_dict()
    parts = {name: value for name, value in own.items() if is_sharded(value) and name in state}
    parts = {name: divided(state[name].to(value.device), value) for name, value in parts.items()}
    solver.response.load_state_dict(state | parts)
    if solver.shards is not None:
        solver.shards.keep()
