"""``bilevel.solve``: the loop over a :class:`bilevel.Solver`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tqdm.auto import tqdm

from bilevel.arguments import check_integer, check_loader, length
from bilevel.checkpoint import load, save
from bilevel.history import LEADING
from bilevel.hyper import Space
from bilevel.loop.advice import warn_after, warn_before
from bilevel.loop.defaults import plan
from bilevel.loop.feed import Feed
from bilevel.loop.run import Run
from bilevel.loop.solution import Round, Solution
from bilevel.problem import Problem
from bilevel.response import Method, get_method
from bilevel.solver import DivergenceError, OptimizerFactory, SchedulerFactory, Solver


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
    warmup: int | None = None,
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
        outer_optimizer: See there. By default Adam with betas (0.9, 0.99) and a learning rate of 20 over the number of
            rounds, between 0.003 and 0.2: λ can then travel as far in a short run as in a long one. Where the number of
            rounds is not known, 0.02. A run that goes on keeps the one it was started with.
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

    Warns:
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
    """
    check_loader("train", train)
    check_loader("valid", valid)
    _check_run(
        callbacks,
        progress,
        time_budget,
        counts={"outer_steps": (outer_steps, 1), "accumulate": (accumulate, 1)},
        optional={"steps": steps, "epochs": epochs, "evaluate_every": evaluate_every, "patience": patience},
    )
    for name, value in (("warmup", warmup), ("inner_steps", inner_steps)):
        if value is not None:
            check_integer(name, value, 0)
    if epochs is not None and train is None:
        raise ValueError("epochs counts passes over train, which is None: give steps instead.")
    method = get_method(method)
    if inner_steps is None:
        inner_steps = 0 if method.unrolled_steps else 5
    batches, per_round = length(train), accumulate * (inner_steps + outer_steps * method.unrolled_steps)
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
        seed=seed,
    )
    if solver.response.unrolled_steps != method.unrolled_steps:
        raise ValueError(
            f"{method}: its unrolled_steps are {method.unrolled_steps}, those of its response "
            f"{solver.response.unrolled_steps}; override the property of the method, too."
        )
    check_integer("inner_steps", inner_steps, 0 if method.unrolled_steps else 1)
    _check_unrolled(solver, inner_steps=inner_steps, accumulate=accumulate, warmup=warmup or 0)
    own = [column for name, h in problem.space.hyper.items() for column in Space.columns({name: h.init})]
    names = [*LEADING, *own, *(f"{prefix}.{column}" for prefix in ("scale", "signal") for column in own)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"hyper: {twice[0]!r} would be two columns of the history; choose another name.")
    file = None if checkpoint is None else Path(checkpoint)
    state = load(file) if file is not None and file.exists() else None
    if warmup is None:  # a run that goes on keeps its own, also if it is made longer
        fresh = 0 if solver.response.restarts else planned.warmup
        warmup = fresh if state is None else state["settings"]["warmup"]
    if evaluate_every is None:
        often = planned.evaluate_every(batches, per_round)
        evaluate_every = often if state is None else state["settings"]["evaluate_every"]
    run = Run(
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
    if state is not None:
        run.load_state_dict(state)
    ends = partial(_why_to_end, run, planned.limit, epochs, patience, time_budget)
    run.stopped = ends() if run.rounds else None
    before = run.rounds
    if before == 0:
        warn_before(solver, planned.rounds, warmup=warmup, outer_steps=outer_steps, by_epochs=epochs is not None)
    try:
        with _progress_bar(planned.rounds, progress) as bar:
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
    solution = run.solution()
    if run.stopped != "interrupted" and run.rounds > before:
        warn_after(solver, run.signal)
    return solution


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


def _check_unrolled(solver: Solver, *, inner_steps: int, accumulate: int, warmup: int) -> None:
    """Refuse what does not go with a method that makes inner steps itself."""
    response = solver.response
    if response.unrolled_steps and accumulate > 1:
        raise ValueError(
            f"accumulate must be 1 with {solver.method}, whose outer steps make inner steps on one batch each; got "
            f"{accumulate}. Give larger batches, or use an implicit method or a self-tuning network."
        )
    for name, value in (("inner_steps", inner_steps), ("warmup", warmup)):
        if response.restarts and value > 0:
            raise ValueError(
                f"{name} must be 0 with {solver.method}, which returns to the start in every round and forgets what "
                f"was trained before; got {value}."
            )


def _progress_bar(total: int | None, progress: bool | None) -> tqdm[NoReturn]:
    show = not os.environ.get("CI") if progress is None else progress
    return tqdm(total=total, disable=not show, unit="round", dynamic_ncols=True)


def _postfix(event: Round) -> str:
    hidden = {"round", "seconds", "hypergradient_norm"}
    shown = {
        n: v for n, v in event.row.items() if n not in hidden and not n.startswith(("scale.", "signal.", "method."))
    }
    return ", ".join(f"{name} {value:.4g}" for name, value in list(shown.items())[:8])
