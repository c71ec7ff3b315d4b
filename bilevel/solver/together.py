"""A solver that is one of several processes: a common start, streams of its own, and a look at the others."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bilevel.checkpoint import CheckpointWarning, check_form
from bilevel.checkpoint.layout import Each, Free
from bilevel.parallel import Group, Shards, is_sharded
from bilevel.parallel.group import checksum
from bilevel.problem import Problem
from bilevel.response.base import Doubt
from bilevel.rng import Stream

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver

STREAMS = ("data", "loss", "evaluation")


def streams(seed: int, device: torch.device, group: Group | None) -> dict[str, Stream]:
    """The random streams of a process, and the one of the order of the data, which all processes have alike.

    Process 0 has those of a run alone.

    Args:
        seed: Of the solver.
        device: Of the weights.
        group: The processes, if there are several.

    Returns:
        By name.
    """
    rank = 0 if group is None else group.rank
    seeds = np.random.SeedSequence([seed, rank] if rank else seed).generate_state(3, np.uint64)
    found = {name: Stream(int(value), device) for name, value in zip(STREAMS, seeds, strict=True)}
    if group is not None:
        found["order"] = order(seed, device)
    return found


def order(seed: int, device: torch.device, *steps: int) -> Stream:
    """A stream for the order of data, the same in all processes.

    Args:
        seed: Of the solver.
        device: Of the weights.
        steps: How many were made, if that is to make a difference.

    Returns:
        A new stream.
    """
    (number,) = np.random.SeedSequence([seed, 2**32 - 1, *steps]).generate_state(1, np.uint64)
    return Stream(int(number), device)


def start(solver: Solver, group: Group, seed: int) -> None:
    """Begin with the weights, response and hyperparameters of process 0.

    Raises:
        ValueError: If what is not copied differs.
    """  # noqa: DOC502
    problem = solver.problem
    kinds = {name: f"{h.low:g} to {h.high:g}, shape {tuple(h.init.shape)}" for name, h in problem.space.hyper.items()}
    group.agree({
        "method": repr(solver.method),
        "seed": seed,
        "hyper": kinds,
        "the dtype of the weights": str(problem.dtype),
        "weights": {name: tuple(value.shape) for name, value in problem.params.items()},
        "buffers": {name: tuple(value.shape) for name, value in problem.buffers.items()},
    })
    group.seed(seed)
    _check_constants(problem, group, restarts=solver.response.restarts)
    group.broadcast(state(solver))


def state(solver: Solver) -> list[Tensor]:
    """All tensors that are the same in every process.

    Returns:
        Live ones: hyperparameters, then the parameters and buffers of the response.
    """
    buffers = [buffer for buffer in solver.response.buffers() if not is_sharded(buffer)]
    return [solver.vector, *solver.response.parameters(), *buffers]


def divide(solver: Solver) -> Shards | None:
    """If each process holds a part of the weights only, let it keep a part of all that is trained.

    Args:
        solver: With whole parameters, the same in all processes.

    Returns:
        The parts, if there are any.

    Raises:
        ValueError: If the method needs whole weights.
    """
    problem, response = solver.problem, solver.response
    if not problem.sharded:
        return None
    if solver.group is None:
        raise ValueError("inner: weights that are divided among processes need distributed=True.")
    if response.unrolled_steps:
        raise ValueError(
            "method: unrolled methods keep whole copies of the weights of every step, which is what weights that are "
            "divided among processes are to avoid: use 'delta_stn' or 'implicit_cg', or give whole weights."
        )
    scale = [] if response.scale is None else list(response.scale.parameters())
    first = list(response.inner.weights)
    taken = {id(param) for param in first + scale}
    rest = [param for param in response.parameters() if id(param) not in taken]
    response.divide(next(iter(problem.params.values())))
    return Shards([*first, *rest], [*problem.params.values()])


def compare(solver: Solver, group: Group) -> None:
    """See whether all processes have the same hyperparameters, weights and order of data.

    The answer is read from the device together with the numbers of the finite-checks.
    """
    trained = [solver.vector, *solver.response.parameters()]
    if solver.shards is not None:  # the parts differ
        trained = [solver.vector, *([] if solver.response.scale is None else solver.response.scale.parameters())]
    order = torch.full((), group.order, dtype=torch.int64, device=group.device)
    if solver.response.doubts is not None:
        solver.response.doubts.append(Doubt(group.differences(checksum(trained), order), _settle))


def of_this_process(saved: dict[str, Any], own: dict[str, Any], group: Group | None) -> dict[str, Any]:
    """A state that one or several processes have saved, with the streams of this process.

    Args:
        saved: Of :meth:`bilevel.Solver.state_dict`.
        own: That of this process now, from which it has what there was not.
        group: The processes of now.

    Returns:
        A state as this process would have saved it alone.

    Raises:
        ValueError: If it is none.
    """
    if "ranks" not in saved:
        check_form("state['streams']", saved["streams"], Each(Free()))
        if saved["streams"].keys() == own["streams"].keys():
            return saved
    ranks = saved.get("ranks", [saved["streams"]])
    check_form("state['ranks']", ranks, Each(Each(Free()), list))
    if not ranks:
        raise ValueError("state['ranks'] is empty.")
    size, rank = (1, 0) if group is None else (group.size, group.rank)
    streams = ranks[rank] if rank < len(ranks) else {}
    if len(ranks) != size:
        if rank == 0:
            warn_of_change(len(ranks), size)
        streams = {name: streams.get(name, state) for name, state in own["streams"].items()}
    return {name: value for name, value in saved.items() if name != "ranks"} | {"streams": streams}


def warn_of_change(before: int, now: int) -> None:
    """Say that a run goes on with another number of processes."""
    warnings.warn(
        f"checkpoint: the run was made by {before} process{'es' * (before > 1)} and goes on with {now}: batches of all "
        "processes together have another size, and random numbers and the order of the data are others from here on.",
        CheckpointWarning,
        stacklevel=4,
    )


def _check_constants(problem: Problem, group: Group, *, restarts: bool) -> None:
    """Refuse tensors that are read from the module of each process, if they differ."""
    named = [] if problem.module is None else problem.module.named_parameters()
    constants: dict[str, Tensor] = {name: value for name, value in named if not value.requires_grad}
    if restarts:
        constants |= problem.params
    names = [name for name, value in constants.items() if value.numel()]
    if not names:
        return
    sums = [checksum([constants[name]]).to(group.device) for name in names]
    different = [name for name, flag in zip(names, group.differences(*sums).tolist(), strict=True) if flag]
    if different:
        raise ValueError(
            f"inner: {different[0]!r} has other values in other processes, and is not trained from a common start: "
            "build the network after torch.manual_seed(...), with one seed in all processes, or load the same file."
        )


def _settle(flags: list[float]) -> None:
    state, data = flags
    if data:
        raise RuntimeError(
            "the processes read their data in different orders, so that some examples are used twice and others never: "
            "a sampler or an iterable draws random numbers that differ between processes. Let it draw from torch, or "
            "seed numpy and random alike in every process; a loader that gives each process batches of its own is "
            "passed as bilevel.parallel.Split(loader)."
        )
    if state:
        raise RuntimeError(
            "the hyperparameters or weights differ between processes, although all began with the same and added up "
            "their gradients: look for an optimizer, scheduler or callback that does something else in each process, "
            "such as random numbers."
        )
