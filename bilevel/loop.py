"""``bilevel.solve``: the loop over a :class:`bilevel.Solver`, and what it returns."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from tqdm.auto import tqdm

from bilevel.arguments import check_integer, check_loader, length
from bilevel.checkpoint import load, save
from bilevel.history import LEADING, History, plot
from bilevel.hyper import Space
from bilevel.problem import Problem
from bilevel.response import Method
from bilevel.rng import Stream
from bilevel.solver import DivergenceError, OptimizerFactory, OuterStep, SchedulerFactory, Solver

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Best:
    """Where the full validation loss was lowest.

    Attributes:
        round: The round after which it was measured.
        validation_loss: The outer loss over all of ``valid``.
        inner_loss: The mean inner loss of that round.
        hyper: Hyperparameters in natural units.
        params: Weights by name.
        state_dict: Weights and buffers under the names of the user's module.
    """

    round: int
    validation_loss: float
    inner_loss: float
    hyper: dict[str, Tensor]
    params: dict[str, Tensor] = field(repr=False)
    state_dict: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Solution:
    """The result of :func:`solve`.

    Attributes:
        hyper: The final hyperparameters in natural units.
        params: The weights at the final hyperparameters, by name.
        state_dict: The same with buffers, tied and frozen parameters: loads strictly into the user's module.
        best: The same at the best full validation pass; None if the run ended before the first one.
        history: Losses, hyperparameters, hypergradient norm, scale and time, one row per outer step.
        stopped: Why the run ended: ``"steps"``, ``"epochs"``, ``"patience"``, ``"time"``, ``"callback"``,
            ``"interrupted"`` or ``"diverged"``.
        solver: The solver, to go on or to look closer.
    """

    hyper: dict[str, Tensor]
    params: dict[str, Tensor] = field(repr=False)
    state_dict: dict[str, Any] = field(repr=False)
    best: Best | None
    history: History = field(repr=False)
    stopped: str
    solver: Solver = field(repr=False)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw losses and hyperparameter schedules in natural units.

        Args:
            path: Save the figure there, if given.

        Returns:
            A matplotlib figure.

        Raises:
            ValueError: If the history is empty.
        """
        if not self.history:
            raise ValueError("there is nothing to plot: the run ended before its first round.")
        columns = {name: list(Space.columns({name: value})) for name, value in self.hyper.items()}
        return plot(self.history, columns, path)


@dataclass(frozen=True)
class Round:
    """What a callback sees after every round.

    Attributes:
        solver: The solver.
        index: Counted from 1.
        history: What happened until now, also before a run that goes on was stopped. It grows with the run; change
            nothing in it.
        row: Its newest row.
        outer: The last outer step; None in the warm-up.
        validation_loss: Of the full validation pass, if there was one.
        inner_aux: What the inner loss last returned beside its value.
    """

    solver: Solver
    index: int
    history: History
    row: dict[str, float]
    outer: OuterStep | None
    validation_loss: float | None
    inner_aux: Any


def solve(
    problem: Problem,
    train: Iterable[Any] | None = None,
    valid: Iterable[Any] | None = None,
    *,
    method: str | Method = "delta_stn",
    inner_optimizer: OptimizerFactory | None = None,
    outer_optimizer: OptimizerFactory | None = None,
    response_optimizer: OptimizerFactory | None = None,
    inner_scheduler: SchedulerFactory | None = None,
    outer_scheduler: SchedulerFactory | None = None,
    inner_clip: float | None = None,
    outer_clip: float | None = None,
    compile: bool = False,
    inner_steps: int | None = None,
    outer_steps: int = 1,
    accumulate: int = 1,
    warmup: int = 0,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    time_budget: float | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Sequence[Callable[[Round], bool | None]] = (),
    progress: bool | None = None,
    seed: int = 0,
) -> Solution:
    r"""Solve a bilevel problem: train the weights and tune the hyperparameters in one run.

    A round is ``inner_steps`` inner updates, then ``outer_steps`` outer updates (``alg:dstn-training``).

    Args:
        problem: What to solve.
        train: Batches for the inner loss, any re-iterable; None if it needs none.
        valid: Batches for the outer loss, likewise.
        method: A name in ``bilevel.METHODS`` or an instance such as ``bilevel.DeltaSTN(entropy=1e-3)``.
        inner_optimizer: As in :class:`Solver`, and so are the other optimizers, schedulers and clips.
        outer_optimizer: See there.
        response_optimizer: See there.
        inner_scheduler: Advances once per epoch if ``epochs`` is given, otherwise once per round; a
            ``ReduceLROnPlateau`` advances with every full validation pass instead.
        outer_scheduler: Likewise.
        inner_clip: See there.
        outer_clip: See there.
        compile: See there.
        inner_steps: :math:`T_{\text{train}}`. 5 by default; 0 for methods such as :class:`Unrolled`, whose outer steps
            train the weights themselves.
        outer_steps: :math:`T_{\text{valid}}`.
        accumulate: Batches of ``train`` per inner update, whose gradients are averaged: the update of a large batch in
            the memory of a small one. An outer step still takes one batch of each set. Methods such as
            :class:`Unrolled` cannot have more than 1.
        warmup: Rounds in which the hyperparameters do not move; perturbations stay on, and as many inner steps are made
            as in any other round.
        steps: Number of rounds, 1000 unless ``epochs`` is given.
        epochs: Number of passes over ``train``, instead of ``steps``.
        evaluate_every: Rounds between full validation passes; by default one after every pass over ``train``.
        patience: Stop after that many full validation passes without a new best.
        time_budget: Stop after that many seconds.
        checkpoint: A file that keeps the run, written after every full validation pass and at the end. If it is there
            already, the run goes on from it, as if it had never stopped, as long as the loaders draw random numbers
            only when a pass begins, as a ``DataLoader`` does. What callbacks gather is not kept.
        callbacks: Called with a :class:`Round` after every round; one that returns True ends the run.
        progress: Show a progress bar; by default unless the environment variable ``CI`` is set.
        seed: Of the solver's own random streams; the global random state is not touched.

    Returns:
        The solution. After an interrupt from the keyboard, the solution so far.

    Raises:
        DivergenceError: If a loss or gradient is not finite; its ``solution`` is the last good one.
        ValueError: If the arguments do not go together.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        ...     hyper={"target": bilevel.real(0.0)},
        ... )
        >>> solution = bilevel.solve(
        ...     problem, steps=300, progress=False,
        ...     inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        ...     outer_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        ... )
        >>> round(float(solution.hyper["target"]), 3)
        3.0
    """
    check_loader("train", train)
    check_loader("valid", valid)
    _check_run(
        callbacks,
        progress,
        time_budget,
        counts={"outer_steps": (outer_steps, 1), "accumulate": (accumulate, 1), "warmup": (warmup, 0)},
        optional={"steps": steps, "epochs": epochs, "evaluate_every": evaluate_every, "patience": patience},
    )
    if epochs is not None and train is None:
        raise ValueError("epochs counts passes over train, which is None: give steps instead.")
    solver = Solver(
        problem,
        method=method,
        inner_optimizer=inner_optimizer,
        outer_optimizer=outer_optimizer,
        response_optimizer=response_optimizer,
        inner_scheduler=inner_scheduler,
        outer_scheduler=outer_scheduler,
        inner_clip=inner_clip,
        outer_clip=outer_clip,
        compile=compile,
        seed=seed,
    )
    inner_steps = _inner_steps(solver, inner_steps, accumulate, warmup)
    names = [*LEADING, *(column for name, h in problem.space.hyper.items() for column in Space.columns({name: h.init}))]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"hyper: {twice[0]!r} would be two columns of the history; choose another name.")
    limit = 1000 if steps is None and epochs is None else steps
    run = _Run(
        solver=solver,
        train=Feed("train", train, solver.streams["data"]),
        valid=Feed("valid", valid, solver.streams["data"]),
        valid_loader=valid,
        inner_steps=inner_steps,
        outer_steps=outer_steps,
        accumulate=accumulate,
        warmup=warmup,
        evaluate_every=evaluate_every,
        schedule_by_epoch=epochs is not None,
    )
    file = None if checkpoint is None else Path(checkpoint)
    if file is not None and file.exists():
        run.load_state_dict(load(file))
    ends = partial(_why_to_end, run, limit, epochs, patience, time_budget)
    run.stopped = ends() if run.rounds else None
    try:
        with _progress_bar(_expected_rounds(train, run.batches_per_round, limit, epochs), progress) as bar:
            bar.update(run.rounds)
            while run.stopped is None:
                event = run.round()
                bar.update()
                bar.set_postfix_str(_postfix(event), refresh=False)
                run.stopped = "callback" if _call(callbacks, event) else ends()
                if file is not None and (run.stopped is not None or event.validation_loss is not None):
                    save(file, run.state_dict())
            run.finish()
    except KeyboardInterrupt:
        run.stopped = "interrupted"
        with suppress(DivergenceError):  # returns to the last good state if a bad step has not been noticed yet
            solver.check()
    except DivergenceError as error:
        run.stopped = "diverged"
        error.solution = run.solution()
        raise
    return run.solution()


class Feed:
    """The batches of a re-iterable, over and over, drawn inside a random stream.

    Attributes:
        passes: How many times all batches have been given out.
    """

    def __init__(self, name: str, loader: Iterable[Any] | None, stream: Stream) -> None:
        """Feed from ``loader``; None feeds None."""
        self.name = name
        self.loader: Iterable[Any] = [None] if loader is None else loader
        self.stream = stream
        self.passes = 0
        self._length = length(self.loader)
        self._given = 0
        self._iterator: Any = None
        self._start = stream.state_dict()

    def __next__(self) -> Any:
        """The next batch.

        Returns:
            Whatever the loader yields.

        Raises:
            ValueError: If a pass yields no batch.
        """
        with self.stream():
            if self._iterator is None:
                self._start = self.stream.state_dict()
                self._iterator = iter(self.loader)
            for batch in self._iterator:
                self._given += 1
                if self._given == self._length:
                    # The pass is over, unless the length was wrong.
                    more = next(self._iterator, self)
                    if more is self:
                        self._end_pass()
                    else:
                        self._iterator = chain([more], self._iterator)
                return batch
            if self._given == 0:
                raise ValueError(f"{self.name} yielded no batch in pass {self.passes + 1}: give at least one batch.")
            self._end_pass()
        return next(self)

    def state_dict(self) -> dict[str, Any]:
        """Where it is.

        Returns:
            Plain types and tensors.
        """
        return {"passes": self.passes, "given": self._given, "start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where another feed of the same loader was; leaves the stream somewhere else.

        Raises:
            ValueError: If the loader gives fewer batches.
        """
        self.passes = state["passes"]
        self.stream.load_state_dict(state["start"])
        for index in range(state["given"]):
            next(self)
            if self.passes != state["passes"]:
                raise ValueError(
                    f"checkpoint: the run stopped after batch {state['given']} of {self.name}, which has only "
                    f"{index + 1} now; give the loader of that run."
                )

    def _end_pass(self) -> None:
        self.passes += 1
        self._given = 0
        self._iterator = None


@dataclass(kw_only=True)
class _Run:
    """The state of one call of :func:`solve`."""

    solver: Solver
    train: Feed
    valid: Feed
    valid_loader: Iterable[Any] | None
    inner_steps: int
    outer_steps: int
    accumulate: int
    warmup: int
    evaluate_every: int | None
    schedule_by_epoch: bool
    history: History = field(default_factory=History)
    best: Best | None = None
    stale: int = 0
    stopped: str | None = None
    rounds: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def steps_per_round(self) -> int:
        """Inner steps in a round, those that outer steps make included."""
        return self.inner_steps + self.outer_steps * self.solver.response.unrolled_steps

    @property
    def batches_per_round(self) -> int:
        """Batches of the training set in a round."""
        return self.steps_per_round * self.accumulate

    @property
    def seconds(self) -> float:
        """Time since the run started."""
        return time.perf_counter() - self.started

    def round(self) -> Round:
        """Run one round and record it."""
        index, passes = self.rounds + 1, self.train.passes
        warm = index <= self.warmup
        losses, batch, outer = [], None, None
        for _ in range(self.steps_per_round if warm else self.inner_steps):
            *others, batch = (next(self.train) for _ in range(self.accumulate))
            losses.append(self.solver.inner_step(*others, batch))
        if warm:
            self.solver.check()
            self.history.append(self._row(index, losses, None))
        unrolled = self.solver.response.unrolled_steps
        for _ in range(0 if warm else self.outer_steps):
            batches = [next(self.train) for _ in range(unrolled)] if unrolled else batch
            outer = self.solver.outer_step(batches, next(self.valid))
            losses += outer.inner_losses
            self.history.append(self._row(index, losses, outer))
        new_passes = self.train.passes - passes
        for _ in range(new_passes if self.schedule_by_epoch else 1):
            self.solver.schedule()
        if new_passes if self.evaluate_every is None else index % self.evaluate_every == 0:
            self._evaluate(index)
        self.rounds = index
        row = self.history.rows[-1]
        return Round(
            solver=self.solver,
            index=index,
            history=self.history,
            row=row,
            outer=outer,
            validation_loss=row.get("validation_loss"),
            inner_aux=self.solver.inner_aux,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a later call needs to go on.

        Returns:
            Plain types and tensors.
        """
        return {
            "solver": self.solver.state_dict(),
            "settings": self._settings(),
            "feeds": {feed.name: feed.state_dict() for feed in (self.train, self.valid)},
            "rows": self.history.rows,
            "best": None if self.best is None else vars(self.best),
            "stale": self.stale,
            "rounds": self.rounds,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: If it belongs to another kind of run.
        """
        for name, value in self._settings().items():
            before = state["settings"][name]
            if before != value:
                raise ValueError(
                    f"checkpoint: the run was started with {name}={before!r}, this call has {value!r}; give the same, "
                    "or another file."
                )
        for feed in (self.train, self.valid):
            feed.load_state_dict(state["feeds"][feed.name])
        self.solver.load_state_dict(state["solver"])  # and with it the streams that the feeds moved
        self.history.rows = [dict(row) for row in state["rows"]]
        self.best = None if state["best"] is None else Best(**self.solver.to_device(state["best"]))
        self.stale, self.rounds = state["stale"], state["rounds"]
        self.started = time.perf_counter() - state["seconds"]

    def _settings(self) -> dict[str, Any]:
        return {
            "inner_steps": self.inner_steps,
            "outer_steps": self.outer_steps,
            "accumulate": self.accumulate,
            "warmup": self.warmup,
            "evaluate_every": self.evaluate_every,
        }

    def finish(self) -> None:
        """Measure the validation loss of the last round, if it has not been."""
        if "validation_loss" not in self.history.rows[-1]:
            self._evaluate(self.rounds)

    def solution(self) -> Solution:
        """What the user gets."""
        return Solution(
            hyper=dict(self.solver.hyper),
            params=self.solver.params,
            state_dict=self.solver.module_state_dict,
            best=self.best,
            history=self.history,
            stopped=self.stopped or "",
            solver=self.solver,
        )

    def _evaluate(self, index: int) -> None:
        loss = self.solver.evaluate(self.valid_loader)
        row = self.history.rows[-1]
        row["validation_loss"] = loss
        self.solver.schedule(loss)
        self.stale += 1
        if self.best is None or loss < self.best.validation_loss:
            self.stale = 0
            params = self.solver.params
            self.best = Best(
                round=index,
                validation_loss=loss,
                inner_loss=row["inner_loss"],
                hyper=dict(self.solver.hyper),
                params=params,
                state_dict=self.solver.problem.state_dict(params, self.solver.response.inner.buffer_values()),
            )

    def _row(self, index: int, losses: list[Tensor], outer: OuterStep | None) -> dict[str, float]:
        """A row of the history, read from the device in one go."""
        space = self.solver.problem.space
        columns = {"inner_loss": torch.stack(losses).mean()}
        if outer is not None:
            columns |= {"outer_loss": outer.loss, "hypergradient_norm": outer.hypergradient.norm()}
            columns |= {f"method.{name}": value for name, value in outer.report.items()}
        columns |= space.columns(self.solver.hyper)
        if self.solver.response.scale is not None:
            scale = space.split(self.solver.response.scale().detach())
            columns |= {f"scale.{name}": value for name, value in space.columns(scale).items()}
        values = torch.stack([value.to(self.solver.vector) for value in columns.values()]).tolist()
        return {"round": index, "seconds": self.seconds, **dict(zip(columns, values, strict=True))}


def _check_run(
    callbacks: Any, progress: Any, time_budget: Any, counts: dict[str, tuple[Any, int]], optional: dict[str, Any]
) -> None:
    for name, (value, minimum) in counts.items():
        check_integer(name, value, minimum)
    for name, value in optional.items():
        if value is not None:
            check_integer(name, value, 1)
    if optional["steps"] is not None and optional["epochs"] is not None:
        raise ValueError(f"give steps or epochs, not both; got steps={optional['steps']}, epochs={optional['epochs']}.")
    if time_budget is not None:
        if isinstance(time_budget, bool) or not isinstance(time_budget, int | float):
            raise TypeError(f"time_budget must be a number of seconds or None, got {time_budget!r}.")
        if not time_budget > 0:
            raise ValueError(f"time_budget must be a positive number of seconds, got {time_budget}.")
    if progress not in (None, True, False):
        raise TypeError(f"progress must be True, False or None, got {progress!r}.")
    if not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
        raise TypeError(f"callbacks must be a list of functions of a bilevel.Round, got {callbacks!r}.")


def _why_to_end(
    run: _Run, steps: int | None, epochs: int | None, patience: int | None, time_budget: float | None
) -> str | None:
    if steps is not None and run.rounds >= steps:
        return "steps"
    if epochs is not None and run.train.passes >= epochs:
        return "epochs"
    if patience is not None and run.stale >= patience:
        return "patience"
    return "time" if time_budget is not None and run.seconds >= time_budget else None


def _call(callbacks: Sequence[Callable[[Round], bool | None]], event: Round) -> bool:
    answers = [callback(event) for callback in callbacks]
    for answer in answers:
        if answer not in (None, True, False):
            raise TypeError(f"a callback must return None, False, or True to stop the run; got {answer!r}.")
    return True in answers


def _inner_steps(solver: Solver, inner_steps: int | None, accumulate: int, warmup: int) -> int:
    """The number of inner steps, if it goes with the method."""
    response = solver.response
    if response.unrolled_steps and accumulate > 1:
        raise ValueError(
            f"accumulate must be 1 with {solver.method}, whose outer steps make inner steps on one batch each; got "
            f"{accumulate}. Give larger batches, or use an implicit method or a self-tuning network."
        )
    if inner_steps is None:
        inner_steps = 0 if response.unrolled_steps else 5
    check_integer("inner_steps", inner_steps, 0 if response.unrolled_steps else 1)
    for name, value in (("inner_steps", inner_steps), ("warmup", warmup)):
        if response.restarts and value > 0:
            raise ValueError(
                f"{name} must be 0 with {solver.method}, which returns to the start in every round and forgets what "
                f"was trained before; got {value}."
            )
    return inner_steps


def _expected_rounds(train: Iterable[Any] | None, per_round: int, steps: int | None, epochs: int | None) -> int | None:
    batches = length(train)
    return steps if epochs is None or batches is None else math.ceil(epochs * batches / per_round)


def _progress_bar(total: int | None, progress: bool | None) -> tqdm[NoReturn]:
    show = not os.environ.get("CI") if progress is None else progress
    return tqdm(total=total, disable=not show, unit="round", dynamic_ncols=True)


def _postfix(event: Round) -> str:
    hidden = {"round", "seconds", "hypergradient_norm"}
    shown = {n: v for n, v in event.row.items() if n not in hidden and not n.startswith(("scale.", "method."))}
    return ", ".join(f"{name} {value:.4g}" for name, value in list(shown.items())[:8])
