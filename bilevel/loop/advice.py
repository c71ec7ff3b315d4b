"""Warnings about runs that cannot tune, before the first round, or that did not, after the last."""

from __future__ import annotations

import math
import sys
import warnings

import torch
from torch.optim import NAdam, Optimizer
from torch.optim.adagrad import Adagrad
from torch.optim.adam import Adam
from torch.optim.adamax import Adamax
from torch.optim.adamw import AdamW
from torch.optim.rmsprop import RMSprop

from bilevel.hyper import Space
from bilevel.loop.signal import FIRST, Signal
from bilevel.solver import Solver

ENOUGH = 1.0
"""How far λ should be able to move: a factor of e for a positive hyperparameter."""

NOISE = 2.5
"""Below it, the largest sum of hypergradients counts as noise.

Of noise alone, that of one entry stays below it in 95 % of runs with 50 steps, 90 % with 200, 85 % with 1000 and 79 %
with 5000. A mean of 0.2 standard deviations stays below it in 25 % of runs with 200 steps and 1 % with 500.
"""

JUDGED = 50
"""Shorter runs have too few outer steps to say that there is no signal."""

LENGTHS = ("T_max", "total_steps", "total_iters")
"""Attributes of schedulers of PyTorch that say for how long they are made."""

SIMULATED = 300
BOUNDED: tuple[type[Optimizer], ...] = (Adam, AdamW, NAdam, Adamax, RMSprop, Adagrad)
"""Their steps do not depend on the size of the gradient. Those of RAdam do, in its first five steps."""


class TuningWarning(UserWarning):
    """The hyperparameters of a run cannot move far enough, or moved by noise only.

    Before a run: the outer optimizer can move λ by less than 1 in all outer steps together (a factor of e for a
    positive hyperparameter), or the warm-up takes all rounds. After a run of at least 50 outer steps: the
    hypergradients of a hyperparameter add up to no more than noise does, as the ``signal`` of the solution shows.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore", TuningWarning)  # for a run that is meant to be so
    """


def reach(optimizer: Optimizer, steps: int) -> float | None:
    r"""How far an optimizer moves a parameter at most, in so many steps along a gradient that is always the same.

    With learning rate :math:`\eta`, each step of Adam, AdamW and Adamax is :math:`\eta`; the t-th step of RMSprop is
    :math:`\eta / \sqrt{1 - \alpha^t}`, that of Adagrad :math:`\eta / \sqrt{t}`. NAdam, momentum and the other options
    change that a little, so a copy of the optimizer makes the first 300 steps; the last of them stands for the rest,
    which is never less.

    Args:
        optimizer: Of one parameter.
        steps: How many.

    Returns:
        The distance; None if the steps depend on the size of the gradient, or on something else.

    Example:
        >>> reach(torch.optim.Adam([torch.zeros(1)], lr=0.01), 50)
        0.5
        >>> reach(torch.optim.SGD([torch.zeros(1)], lr=0.01), 50) is None
        True
    """
    settings = optimizer.param_groups[0]
    if type(optimizer) not in BOUNDED or settings["weight_decay"] or settings.get("centered", False):
        return None
    parameter = torch.zeros((), dtype=torch.float64, device="cpu")
    copy = type(optimizer)([parameter])  # type: ignore[call-arg]
    kept = {"weight_decay", "betas", "alpha", "momentum", "momentum_decay", "lr_decay", "amsgrad"} & settings.keys()
    copy.param_groups[0].update({name: settings[name] for name in kept} | {"lr": float(settings["lr"]), "eps": 1e-12})
    moved = last = 0.0
    for _ in range(min(steps, SIMULATED)):
        parameter.grad = -torch.ones_like(parameter)
        copy.step()
        last, moved = float(parameter) - moved, float(parameter)
    return round(moved + last * max(0, steps - SIMULATED), 9)


def warn_before(solver: Solver, rounds: int | None, *, warmup: int, outer_steps: int, by_epochs: bool) -> None:
    """Warn if the hyperparameters cannot move far in so many rounds; says nothing where it is not known."""
    optimizer = solver.optimizers["hyper"]
    rate = float(optimizer.param_groups[0]["lr"])
    if rounds is None or warmup == sys.maxsize or "hyper" in solver.schedulers or not rate > 0:
        return
    unit = "epochs" if by_epochs else "steps"
    if warmup >= rounds:
        _warn(
            f"warmup={warmup} leaves no round in which the hyperparameters move: the run has {rounds}. Make a shorter "
            f"warm-up or more rounds ({unit}); for training without tuning give warmup=sys.maxsize."
        )
        return
    steps = (rounds - warmup) * outer_steps
    far = reach(optimizer, steps)
    if steps < FIRST or far is None or far >= ENOUGH:
        return
    name, entry = next(iter(solver.problem.space.hyper.items()))
    column, start = next(iter(Space.columns({name: entry.init}).items()))
    if column.endswith(".mean"):
        column, start = f"an entry of {name}", entry.init.flatten()[0]
    middle = entry.unconstrained(start)
    low, high = (float(entry.natural(middle + move)) for move in (-far, far))
    rounds_more = "larger epochs, or smaller inner_steps" if by_epochs else "larger steps"
    _warn(
        f"the hyperparameters cannot move far in this run: {steps} outer steps of {type(optimizer).__name__} with "
        f"learning rate {rate:g} move λ by at most {far:.2g}, so that {column} stays between {low:.3g} and {high:.3g} "
        f"({float(start):.3g} at the start). Make more rounds ({rounds_more}), or give outer_optimizer a learning rate "
        f"of at least {_rounded_up(rate * ENOUGH / far):g}."
    )


def warn_of_schedules(solver: Solver, every: str, *, epochs: int | None, rounds: int | None, steps: int) -> None:
    """Warn of a scheduler that is made for the steps of the run, and advances by epochs or rounds."""
    advances, in_all = epochs if every == "epoch" else rounds, 0 if rounds is None else rounds * steps
    if advances is None or every == "step":
        return
    for name, scheduler in solver.schedulers.items():
        found = vars(scheduler)
        length = next((found[key] for key in LENGTHS if isinstance(found.get(key), int)), 0)
        if name == "weights" and length >= 2 * advances and in_all <= 2 * length <= 4 * in_all:
            _warn(
                f"inner_scheduler: {type(scheduler).__name__} is made for {length} steps, but advances once per "
                f"{every}, {advances} times in this run. Give it {advances}, or schedule_every='step'."
            )


def warn_after(solver: Solver, signal: Signal) -> None:
    """Warn of hyperparameters that were moved by noise only."""
    steps, space = signal.steps, solver.problem.space
    if steps < JUDGED or torch.equal(solver.vector.detach(), solver.problem.initial_hyper()):
        return
    largest, in_few = space.split(signal.largest()), space.split(signal.in_few_steps())
    noisy = [
        name
        for name, value in largest.items()
        if float(value.max()) < noise_level(value.numel()) and not bool(in_few[name].any())
    ]
    if noisy:
        value = "value says" if len(noisy) == 1 else "values say"
        _warn(
            f"the hypergradient of {', '.join(noisy)} was noise: over {steps} outer steps it adds up to no more than "
            f"random numbers do (solution.signal). So the {value} nothing, unless the start was an optimum. Give "
            "larger validation batches or more rounds, and ask bilevel.diagnose about the method."
        )


def noise_level(entries: int) -> float:
    """Below it, the largest signal among so many entries counts as noise: of many, one is larger by chance.

    A normal tail makes it the square root of ``NOISE ** 2 + 2 log(entries)``.

    Returns:
        The level.

    Example:
        >>> noise_level(1), round(noise_level(100), 2)
        (2.5, 3.93)
    """
    return math.sqrt(NOISE**2 + 2 * math.log(entries))


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(round(value / unit, 6)) * unit


def _warn(message: str) -> None:
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("bilevel."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, TuningWarning, stacklevel=level)  # where solve was called, or what calls it, such as tune
