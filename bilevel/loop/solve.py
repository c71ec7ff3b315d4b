"""``bilevel.solve``: the loop over a :class:`bilevel.Solver`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bilevel.arguments import check_flag, check_integer, check_loader, file_name, length
from bilevel.checkpoint import CheckpointWarning
from bilevel.events import RESERVED, VERSION, environment, now
from bilevel.history import LEADING
from bilevel.hyper import Space
from bilevel.loop import together
from bilevel.loop.advice import warn_after, warn_before, warn_of_schedules
from bilevel.loop.checking import check_run, check_schedule, check_unrolled
from bilevel.loop.defaults import plan
from bilevel.loop.ending import Ending
from bilevel.loop.feed import Feed, Fresh
from bilevel.loop.keeping import Keeper
from bilevel.loop.progress import Progress
from bilevel.loop.resuming import fingerprint_of, go_on, kept_settings, news
from bilevel.loop.run import Run
from bilevel.loop.solution import Round, Solution
from bilevel.parallel import join, share
from bilevel.problem import Problem
from bilevel.response import Method, get_method
from bilevel.rng import Stream
from bilevel.solver import DivergenceError, OptimizerFactory, SchedulerFactory, Solver
from bilevel.solver.optimization import described


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
    schedule_every: str | None = None,
    inner_clip: float | None = None,
    outer_clip: float | None = None,
    compile: bool = False,
    on_nan: str = "raise",
    max_bad_steps: int = 10,
    inner_steps: int | None = None,
    outer_steps: int = 1,
    accumulate: int = 1,
    warmup: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    time_budget: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float | None = None,
    checkpoint_keep: int = 2,
    resume: bool | str = True,
    log: str | Path | None = None,
    signals: bool = True,
    callbacks: Sequence[Callable[[Round], bool | None]] = (),
    progress: bool | None = None,
    seed: int = 0,
    distributed: bool = True,
) -> Solution:
    r"""Solve a bilevel problem: train the weights and tune the hyperparameters in one run.

    A round is ``inner_steps`` inner updates, then ``outer_steps`` outer updates (``alg:dstn-training``).

    Args:
        problem: What to solve.
        train: Batches for the inner loss, any re-iterable; None if it needs none.
        valid: Batches for the outer loss, likewise.
        method: A name in ``bilevel.METHODS`` or an instance such as ``bilevel.DeltaSTN(entropy=1e-3)``.
        inner_optimizer: As in :class:`Solver`, and so are the other optimizers, schedulers and clips.
        outer_optimizer: See there. By default Adam with betas (0.9, 0.99) and a learning rate of 20 over the number of
            rounds, between 0.003 and 0.2: λ can then travel as far in a short run as in a long one. Where the number of
            rounds is not known, 0.02. A run that goes on keeps the one it was started with.
        response_optimizer: See there.
        inner_scheduler: A function of the optimizer. It advances as ``schedule_every`` says; a ``ReduceLROnPlateau``
            with every full validation pass instead.
        outer_scheduler: Likewise.
        schedule_every: ``"epoch"``, ``"round"``, or ``"step"``: of the weights, or of the hyperparameters. By default
            epochs if ``epochs`` is given, otherwise rounds.
        inner_clip: See there.
        outer_clip: See there.
        compile: See there.
        on_nan: See there. With ``"skip"`` and ``"rollback"`` the history has a column ``bad_steps``: how many steps
            were left out so far; and validation batches whose loss is not finite are left out of the validation loss.
        max_bad_steps: See there.
        inner_steps: :math:`T_{\text{train}}`. 5 by default; 0 for methods such as :class:`Unrolled`, whose outer steps
            train the weights themselves.
        outer_steps: :math:`T_{\text{valid}}`.
        accumulate: Batches of ``train`` per inner update, whose gradients are averaged: the update of a large batch in
            the memory of a small one. An outer step still takes one batch of each set. Methods such as
            :class:`Unrolled` cannot have more than 1.
        warmup: Rounds in which the hyperparameters do not move; a tenth of all by default, where their number is known.
            Perturbations stay on, and as many inner steps are made as in any other round. ``sys.maxsize`` is training
            without tuning.
        steps: Number of rounds. Unless ``epochs`` is given, 1000, or as many as ten passes over ``train`` need.
        epochs: Number of passes over ``train``, instead of ``steps``.
        evaluate_every: Rounds between full validation passes. By default one follows every pass over ``train``, or,
            where there are many short passes, 200 are spread over the run.
        patience: Stop after that many full validation passes without a new best; those of the warm-up do not count.
        time_budget: Stop after that many seconds.
        checkpoint: A file that keeps the run, written after every full validation pass and at the end. If it is there
            already, the run goes on from it, as if it had never stopped. What callbacks gather is not kept. Beside it
            are the log (``.jsonl``), the checkpoint before (``.1``) and a lock. See :doc:`/guides/runs`.
        checkpoint_every: Write it also when that many seconds have passed since the last time.
        checkpoint_keep: How many checkpoints to keep; a damaged one is replaced by the one before, with a warning.
        resume: True refuses to go on if something changed between the calls, by name; ``"override"`` goes on with what
            this call has, where that is possible; False starts anew. The length of the run, ``patience``,
            ``time_budget``, ``callbacks``, ``progress`` and the arguments of this kind may always change.
        log: A file to which the run appends its events as JSON lines, see :mod:`bilevel.events`; beside the checkpoint
            by default.
        signals: Let SIGTERM, SIGUSR1 and Ctrl-C end the run after the present round, with a checkpoint; a second Ctrl-C
            ends it at once. Only in the main thread.
        callbacks: Called with a :class:`Round` after every round; one that returns True ends the run.
        progress: Show a progress bar; where the standard error is no terminal, a line for every full validation pass
            instead. By default unless the environment variable ``CI`` is set.
        seed: Of the solver's own random streams; the global random state is not touched.
        distributed: Solve together with the other processes, if torchrun started several: each gets its share of the
            examples, and the first one writes and prints. False lets each process make a run of its own. See
            :doc:`/guides/parallel`.

    Returns:
        The solution. After an interrupt from the keyboard, the solution so far.

    Raises:
        DivergenceError: If a loss or gradient is not finite; its ``solution`` is the last good one. Any other error
            that ends the run has a ``solution``, too.
        CheckpointError: If the checkpoint cannot be used.
        ValueError: If the arguments do not go together.

    Warns:
        CheckpointWarning: If a file cannot be written; it is tried again.
        TuningWarning: If the hyperparameters cannot move far in so many rounds, or if they were moved by noise only.

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
    """  # noqa: DOC501, DOC502
    places = {"checkpoint": checkpoint, "log": log}
    files = {name: None if place is None else file_name(name, place) for name, place in places.items()}
    check_loader("train", train)
    check_loader("valid", valid)
    check_run(
        callbacks,
        progress,
        time_budget,
        checkpoint_every,
        resume,
        counts={
            "outer_steps": (outer_steps, 1),
            "accumulate": (accumulate, 1),
            "checkpoint_keep": (checkpoint_keep, 1),
        },
        optional={"steps": steps, "epochs": epochs, "evaluate_every": evaluate_every, "patience": patience},
    )
    for name, value in (("warmup", warmup), ("inner_steps", inner_steps)):
        if value is not None:
            check_integer(name, value, 0)
    if epochs is not None and train is None:
        raise ValueError("epochs counts passes over train, which is None: give steps instead.")
    method = get_method(method)
    schedule_every = check_schedule(schedule_every, epochs, method)
    if inner_steps is None:
        inner_steps = 0 if method.unrolled_steps else 5
    check_flag("distributed", distributed)
    check_integer("seed", seed, 0)
    group = join(problem.device) if distributed and isinstance(problem, Problem) else None
    batches = length(share(train, group, Stream(seed, torch.device("cpu"))))
    per_round = accumulate * (inner_steps + outer_steps * method.unrolled_steps)
    planned = plan(steps, epochs, batches, max(1, per_round))
    solver = Solver(
        problem,
        method=method,
        inner_optimizer=inner_optimizer,
        outer_optimizer=planned.outer_optimizer if outer_optimizer is None else outer_optimizer,
        response_optimizer=response_optimizer,
        inner_scheduler=inner_scheduler,
        outer_scheduler=outer_scheduler,
        inner_clip=inner_clip,
        outer_clip=outer_clip,
        compile=compile,
        on_nan=on_nan,
        max_bad_steps=max_bad_steps,
        seed=seed,
        distributed=distributed,
    )
    if solver.response.unrolled_steps != method.unrolled_steps:
        raise ValueError(
            f"{method}: its unrolled_steps are {method.unrolled_steps}, those of its response "
            f"{solver.response.unrolled_steps}; override the property of the method, too."
        )
    check_integer("inner_steps", inner_steps, 0 if method.unrolled_steps else 1)
    check_unrolled(solver, inner_steps=inner_steps, accumulate=accumulate, warmup=warmup or 0)
    own = [column for name, h in problem.space.hyper.items() for column in Space.columns({name: h.init})]
    names = [
        *LEADING,
        *RESERVED,
        *own,
        *(f"{prefix}.{column}" for prefix in ("scale", "signal") for column in own),
    ]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"hyper: {twice[0]!r} would be two columns of the history; choose another name.")
    make = partial(
        Keeper,
        files["checkpoint"],
        files["log"],
        keep=checkpoint_keep,
        every=checkpoint_every,
    )
    keeper = together.open_keeper(group, make, kept=checkpoint is not None)
    try:
        state = together.load(group, keeper, resume=resume is not False)
        before = kept_settings(state)  # a run that goes on keeps its own, also if it is made longer
        if warmup is None:
            warmup = before.get("warmup", 0 if solver.response.restarts else planned.warmup)
        if evaluate_every is None:
            evaluate_every = before.get("evaluate_every", planned.evaluate_every(batches, per_round))
        kept = checkpoint is not None
        run = Run(
            solver=solver,
            train=Feed("train", solver.share(train), solver.streams["data"], kept=kept),
            valid=Feed("valid", solver.share(valid), solver.streams["data"], kept=kept),
            valid_loader=valid if valid is None or group is not None else Fresh(valid),
            inner_steps=inner_steps,
            outer_steps=outer_steps,
            accumulate=accumulate,
            warmup=warmup,
            evaluate_every=evaluate_every,
            schedule_every=schedule_every,
        )
        settings = {
            "inner_steps": inner_steps,
            "outer_steps": outer_steps,
            "accumulate": accumulate,
            "warmup": warmup,
            "evaluate_every": evaluate_every,
        }
        run.fingerprint = fingerprint_of(run, settings, default_outer=outer_optimizer is None)
        settings |= {"inner_clip": inner_clip, "outer_clip": outer_clip, "compile": compile, "seed": seed}
        if state is not None:
            go_on(run, state, keeper, override=resume == "override")
        ends = partial(_why_to_end, run, planned.limit, epochs, patience, time_budget)
        run.stopped = ends() if run.rounds else None
        first = run.rounds
        if first == 0 and (group is None or group.main):
            warn_before(solver, planned.rounds, warmup=warmup, outer_steps=outer_steps, by_epochs=epochs is not None)
            warn_of_schedules(solver, schedule_every, epochs=epochs, rounds=planned.rounds, steps=inner_steps)
        planned_settings = {"steps": planned.limit, "epochs": epochs, "rounds": planned.rounds}
        keeper.begin(run, _first_line(run, settings | planned_settings), resumed=state is not None)
        with Ending(signals) as ending:
            run.train.ends = run.valid.ends = lambda: ending.reason is not None
            _loop(run, keeper, ending, ends, callbacks, (planned.rounds, progress))
            keeper.close()  # waits for the disk, and so may a signal
            solution = run.solution()
    except BaseException:
        if group is not None:
            group.leave()
        raise
    finally:
        keeper.close()
    last = run.stopped in ("interrupted", "terminated") or not (group is None or group.main)
    if not last and run.rounds > first:
        try:
            warn_after(solver, run.signal)
        except Warning as error:  # which somebody has made an error
            _attach(error, run, keeper)
            raise
    return solution


def _loop(
    run: Run,
    keeper: Keeper,
    ending: Ending,
    ends: Callable[[], str | None],
    callbacks: Sequence[Callable[[Round], bool | None]],
    bar_of: tuple[int | None, bool | None],
) -> None:
    """Make the rounds, and end well whatever happens."""
    measured: dict[str, float] = {}
    group = run.solver.group
    bar_of = bar_of if group is None or group.main else (None, False)
    try:
        with Progress(*bar_of, done=run.rounds) as progress, together.quiet(group):
            if run.rounds:
                progress.say(news(run, keeper))
            while run.stopped is None:
                event = run.round()
                progress.show(event)
                why = "callback" if _call(callbacks, event) else ends() or ending.reason
                wants = keeper.wants(why is not None or event.validation_loss is not None, ends=why is not None)
                run.stopped, save = together.agree(group, why, wants)
                keeper.after_round(run, save=save)
            keeper.wait(run)
            if ending.reason is not None:
                progress.say(news(run, keeper))
            last = run.history.rows[-1] if run.history else {}
            if "validation_loss" not in last and run.stopped not in ("terminated", "interrupted"):
                run.finish()
                measured = {"validation_loss": run.history.rows[-1]["validation_loss"]}
                progress.line(run.rounds, run.history.rows[-1])
    except KeyboardInterrupt as error:
        run.stopped = "interrupted"
        _save_whole(run, keeper, error)
    except BaseException as error:
        if ending.reason is not None and (run.train.lost or run.valid.lost or "DataLoader worker" in str(error)):
            run.stopped = ending.reason  # its workers got the signal, too
        else:
            run.stopped = "diverged" if isinstance(error, DivergenceError) else "failed"
            if run.stopped == "failed":  # after a divergence the last good checkpoint stays
                _save_whole(run, keeper, error)
            _attach(error, run, keeper)
            with suppress(CheckpointWarning):
                keeper.end({"stopped": run.stopped, "round": run.rounds, "error": f"{type(error).__name__}: {error}"})
            raise
    keeper.end({"stopped": run.stopped, "round": run.rounds, **measured})


def _save_whole(run: Run, keeper: Keeper, error: BaseException) -> None:
    """Write the rows and a checkpoint, if the run is between two rounds; what fails then is not the news."""
    try:
        if run.solver.group is None:
            run.solver.check()  # returns to the last good state if a bad step has not been noticed yet
        if run.can_save and run.rounds:
            keeper.after_round(run, save=True)
            keeper.wait(run)
    except Exception as other:
        error.add_note(f"bilevel.solve: the last round could not be kept ({type(other).__name__}: {other}).")


def _attach(error: BaseException, run: Run, keeper: Keeper) -> None:
    """Hand the solution so far to whoever catches the error."""
    with suppress(Exception):
        if run.stopped == "diverged":
            run.return_to_good()
        error.solution = run.solution()  # type: ignore[attr-defined]
        file = "" if keeper.store is None else f" The run goes on from {keeper.store.path} with the same call."
        error.add_note(f"bilevel.solve: the solution so far, of round {run.rounds}, is error.solution.{file}")


def _first_line(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    space, solver = run.solver.problem.space, run.solver
    optimizers = {name: described(optimizer) for name, optimizer in solver.optimizers.items()}
    return {
        "version": VERSION,
        "time": now(),
        "method": repr(solver.method),
        "settings": settings | {f"optimizer of {name}": text for name, text in optimizers.items()},
        "environment": environment(solver.problem.device),
        "hyper": {n: {"low": h.low, "high": h.high, "shape": list(h.init.shape)} for n, h in space.hyper.items()},
    }


def _why_to_end(
    run: Run, steps: int | None, epochs: int | None, patience: int | None, time_budget: float | None
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
