"""Black-box searches: every trial trains from scratch at fixed hyperparameters that Optuna suggests.

All that a search knows is in Optuna's storage: to go on, or to help from another process or machine, run the same
command again with the same ``--storage``. The files in the folder are written from it when a process ends.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bilevel
from applications.run import claim, describe, measure, note_environment, train, write
from applications.suggest import (
    PRUNERS,
    Axis,
    Reseeded,
    distributions,
    grid_points,
    natural,
    pruner_of,
    sampler,
    seed_of,
)
from applications.tables import write_csv
from applications.task import STOPPED, Experiment, Settings, Task
from applications.trials import Trial, draw, history, read, summary_of, worked

try:
    import optuna
    from optuna.distributions import IntDistribution
    from optuna.exceptions import StorageInternalError
    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError
except ImportError as error:
    raise ImportError("searches need Optuna: pip install 'bilevel[applications]'.") from error

DEFAULT_TRIALS = 20
HEARTBEAT = 20
"""Seconds between signs of life of a trial; after three without one it is taken up by another process."""
RETRIES = 5
"""How often a trial is taken up again."""
COUNTED = (TrialState.COMPLETE, TrialState.PRUNED)
NEEDS = {"cmaes": "cmaes", "gp": "scipy"}


def search(
    task: Task,
    method: str,
    settings: Settings,
    *,
    out: Path,
    data: Path | None,
    seed: int = 0,
    device: torch.device | None = None,
    trials: int | None = None,
    seconds: float | None = None,
    storage: str | None = None,
    pruner: str | None = None,
    progress: bool | None = None,
    plots: bool = True,
) -> dict[str, Any]:
    """Search, or go on with a search, and leave a folder like that of :func:`applications.run.run`.

    ``history.csv`` has a row for every validation pass of every trial, with the epochs and the seconds of all trials
    so far; ``trials.csv`` one for each trial; ``best.pt`` holds the weights of the best pass of all, and so does
    ``best-N.pt``, which names the trial: processes that end together agree by it.

    Args:
        task: What to train.
        method: One of ``applications.task.SEARCHES``.
        settings: The numbers of one trial.
        out: The folder.
        data: Folder of the datasets; None takes small generated data.
        seed: Of the weights and of the split, the same in every trial, and of the suggestions.
        device: Where to train; the CPU by default.
        trials: Stop when the study has so many; 20 unless ``seconds`` is given. A grid has at most so many points.
        seconds: Stop when so much time has passed with trials running; the last one counts as far as it came.
        storage: Database of the study as Optuna writes it; a file in ``out`` by default.
        pruner: What stops bad trials early, one of ``PRUNERS``; the median by default, and none for ``gp`` and
            ``cmaes``, which learn from finished trials only.
        progress: Print a line for each trial, unless False.
        plots: Draw the losses, which needs matplotlib.

    Returns:
        The summary.

    Raises:
        KeyboardInterrupt: If the user stopped it before the first validation pass; later, it ends as usual.
    """
    pruner = pruner or ("none" if method in ("gp", "cmaes") else "median")
    check_options(method, trials, seconds, pruner)
    device = torch.device("cpu") if device is None else device
    grid = method == "grid_search"
    if trials is None and (seconds is None or grid):
        trials = DEFAULT_TRIALS

    def build(folder: Path | None, init: Mapping[str, Any]) -> Experiment:
        return task.build(settings, data=data, folder=folder, seed=seed, device=device, init=init)

    build_in_folder = partial(build, out)
    space = distributions(build(None, {}))
    points = grid_points(space, trials or DEFAULT_TRIALS) if grid else {}
    trials = math.prod(map(len, points.values())) if grid else trials
    described = describe(task, method, settings, data=data, seed=seed, init={})
    # Trials of another length, or of another grid, do not belong into the same study.
    described |= {"trial_epochs": settings.epochs} | ({"trials": trials} if grid else {})
    claim(out, described)
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = open_study(
        storage or f"sqlite:///{(out / 'study.db').resolve().as_posix()}",
        study_name=f"{task.name}-{method}-{seed}-{digest[:8]}",
        sampler=Reseeded(lambda number: sampler(method, seed_of(method, seed, number), points)),
        pruner=pruner_of(pruner, settings.epochs),
    )
    before, started = worked([trial.interval for trial in read(study)]), time.perf_counter()

    def left() -> float:
        return math.inf if seconds is None else seconds - before - (time.perf_counter() - started)

    def full() -> bool:
        return trials is not None and len(study.get_trials(deepcopy=False, states=COUNTED)) >= trials

    def after(study: optuna.Study, trial: FrozenTrial) -> None:
        if progress is not False:
            value = "no value" if trial.value is None else f"{trial.value:.4f}"
            print(f"trial {trial.number}: {value} ({trial.state.name.lower()})", flush=True)
        if full() or left() <= 0:
            study.stop()

    def objective(trial: optuna.Trial) -> float:
        try:
            return run_trial(trial, build_in_folder, settings, space, seed=seed, left=left, out=out)
        except KeyboardInterrupt:
            # It comes first when the search goes on, or a grid would lose the point.
            attributes = study.get_trials(deepcopy=False)[trial.number].system_attrs
            again = {**attributes, "fixed_params": trial.params}
            study.add_trial(optuna.trial.create_trial(state=TrialState.WAITING, system_attrs=again))
            raise

    stopped = None
    if not full() and left() > 0:
        note_environment(out / "environment.json", device)
        try:
            study.optimize(objective, callbacks=[after])
        except KeyboardInterrupt:
            stopped = "interrupted"
    stopped = stopped or ("time" if left() <= 0 and not full() else "trials")
    if stopped == "interrupted" and not any(trial.passes for trial in read(study)):
        raise KeyboardInterrupt
    while True:
        known = read(study)
        summary = described | finish(known, build_in_folder, out=out) | {"stopped": stopped}
        write(out / "summary.json", summary)
        if len(read(study)) == len(known):  # or another process has ended a trial, and may have written first
            break
    if plots:  # last, since matplotlib may be missing
        draw(history(known), out / "search.png")
    return summary


def open_study(storage: str, **options: Any) -> optuna.Study:
    """Create a study, or join it.

    Returns:
        The study.

    Raises:
        ValueError: If the database cannot be opened.
    """
    pauses = [0.3, 1.0, 3.0]
    while True:
        try:
            return optuna.create_study(
                storage=with_heartbeat(storage), direction="minimize", load_if_exists=True, **options
            )
        except (SQLAlchemyError, StorageInternalError) as error:
            # Two processes that create the tables of a new database at once are in each other's way, but once only.
            if not pauses or isinstance(error, ArgumentError):
                # Neither the address nor the message of the driver is shown: they may hold a password.
                raise ValueError(
                    f"--storage cannot be opened ({type(error).__name__}): check address, server and rights."
                ) from None
            time.sleep(pauses.pop(0))


def with_heartbeat(storage: str) -> Any:
    """A database that notices when a process has ended without a word: another one takes its trial up again.

    Optuna offers that for relational databases only; the trial of a process that was killed stays RUNNING in others.

    Args:
        storage: As Optuna writes it.

    Returns:
        The storage, or the address as it is where there is no heartbeat.
    """
    if storage.startswith(("redis://", "journal://")):
        return storage
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        retry = vars(optuna.storages).get("RetryHeartbeatStaleTrialCallback")  # its name from version 4.9 on
        retry = retry or optuna.storages.RetryFailedTrialCallback
        return optuna.storages.RDBStorage(
            storage,
            heartbeat_interval=HEARTBEAT,
            grace_period=3 * HEARTBEAT,
            failed_trial_callback=retry(max_retry=RETRIES),
        )


def run_trial(
    trial: optuna.Trial,
    build: Callable[[Mapping[str, Any]], Experiment],
    settings: Settings,
    space: Mapping[str, Axis],
    *,
    seed: int,
    left: Callable[[], float],
    out: Path,
) -> float:
    """Train at the suggested values; tell Optuna every validation loss; keep the weights if they are the best.

    Returns:
        The lowest validation loss.

    Raises:
        TrialPruned: If the pruner stopped it, or the training diverged before a validation pass.
        KeyboardInterrupt: If the user stopped it; what it has counts.
    """
    for name, axis in space.items():
        if isinstance(axis, IntDistribution):
            trial.suggest_int(name, axis.low, axis.high)
        else:
            trial.suggest_float(name, axis.low, axis.high)
    experiment = build(natural(trial.params))
    # Reading the data costs no other method anything.
    date, clock, used = time.time(), time.perf_counter(), time.process_time()

    def record(passes: list[tuple[float, float, float]]) -> None:
        seconds, processor = time.perf_counter() - clock, time.process_time() - used
        trial.set_user_attr("record", {"date": date, "seconds": seconds, "processor": processor, "passes": passes})

    answers: list[bool] = []

    def report(event: bilevel.Round) -> bool | None:
        if event.validation_loss is None:
            return None
        trial.report(event.validation_loss, len(answers) + 1)
        answers.append(trial.should_prune())
        return answers[-1]

    try:
        solution = train(
            experiment,
            "fixed",
            settings,
            seed=seed,
            seconds=None if left() == math.inf else max(left(), 1e-3),
            callbacks=[report],
            progress=False,
        )
    except bilevel.DivergenceError as error:
        if error.solution is None or error.solution.best is None:
            record([])
            raise optuna.TrialPruned from error
        solution = error.solution
    epochs = settings.inner_steps / len(experiment.train)
    # The history starts its clock when the first round begins.
    offset = time.perf_counter() - clock - solution.history.rows[-1]["seconds"] if solution.history else 0.0
    passes = [
        (row["round"] * epochs, offset + row["seconds"], row["validation_loss"])
        for row in solution.history.rows
        if "validation_loss" in row
    ]
    lowest = min((loss for other in read(trial.study) for _, _, loss in other.passes), default=math.inf)
    if solution.best is not None and solution.best.validation_loss < lowest:
        _replace(out / f"best-{trial.number}.pt", partial(torch.save, solution.best.state_dict))
    # Whoever reads the record finds the weights.
    record(passes)
    if solution.stopped in STOPPED:
        raise KeyboardInterrupt
    if solution.best is None or True in answers:
        raise optuna.TrialPruned
    return solution.best.validation_loss


def finish(trials: Sequence[Trial], build: Callable[[Mapping[str, Any]], Experiment], *, out: Path) -> dict[str, Any]:
    """Write the tables, and measure the best weights.

    Returns:
        The part of the summary that says how it went.

    Raises:
        ValueError: If no trial came as far as a validation pass, or the weights of the best one are not in the folder.
    """
    rows = history(trials)
    if not rows:
        diverged = sum(trial.state == "pruned" for trial in trials)
        raise ValueError(
            f"all {diverged} trials diverged before their first validation pass: lower --learning-rate."
            if diverged
            else "the search ended before its first validation pass: give it more time (--seconds)."
        )
    best = min(rows, key=lambda row: row["validation_loss"])
    write_csv(out / "history.csv", rows)
    write_csv(out / "trials.csv", [summary_of(trial) for trial in trials])
    values = natural(next(trial.params for trial in trials if trial.number == best["trial"]))
    experiment = build(values)
    weight = next(experiment.net.parameters())
    hyper = experiment.problem.space.values(experiment.problem.space.init(weight.dtype, weight.device))
    path, own = out / "best.pt", out / f"best-{best['trial']}.pt"
    if own.exists():
        _replace(path, partial(shutil.copyfile, own))
    if path.exists():
        experiment.net.load_state_dict(torch.load(path, map_location=weight.device, weights_only=True))
    valid = measure(experiment, hyper, experiment.valid)
    # The best trial may have run on another machine.
    if not path.exists() or not math.isclose(valid["loss"], best["validation_loss"], rel_tol=1e-3, abs_tol=1e-5):
        raise ValueError(
            f"{path} does not hold the weights of trial {best['trial']}, the best one with a validation loss of "
            f"{best['validation_loss']:.6g}. If another machine ran it, copy {own.name} from there, and run this again."
        )
    for trial in trials:
        if trial.number != best["trial"]:
            (out / f"best-{trial.number}.pt").unlink(missing_ok=True)
    lasted = sum(end - start for start, end in (trial.interval for trial in trials))
    share = sum(trial.processor for trial in trials) / lasted if lasted else math.nan
    return {
        "epochs": round(rows[-1]["epoch"], 2),
        "seconds": round(worked([trial.interval for trial in trials]), 1),
        "best_epoch": round(best["epoch"], 2),
        "valid": valid,
        "test": measure(experiment, hyper, experiment.test),
        "best_hyper": {name: value.tolist() for name, value in hyper.items()},
        "hyper": {name: value.tolist() for name, value in hyper.items()},
        "trial": best["trial"],
        "trials": sum(trial.state != "fail" or bool(trial.passes) for trial in trials),
        **({"processor_share": round(share, 3)} if math.isfinite(share) else {}),
    }


def _replace(path: Path, save: Callable[[Path], object]) -> None:
    """Write a file in one piece."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    save(part)
    part.replace(path)


def check_options(method: str, trials: int | None, seconds: float | None, pruner: str) -> None:
    """Refuse what cannot work, before anything is written.

    Raises:
        ImportError: If the method needs a package that is not installed.
        ValueError: If a number or a name is wrong.
    """
    if trials is not None and trials < 1:
        raise ValueError(f"--trials must be at least 1, got {trials}.")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"--seconds must be positive, got {seconds}.")
    if pruner not in PRUNERS:
        raise ValueError(f"--pruner must be one of {', '.join(PRUNERS)}, got {pruner!r}.")
    if method in NEEDS:
        try:
            importlib.import_module(NEEDS[method])
        except ImportError as error:
            raise ImportError(
                f"--method {method} needs {NEEDS[method]}: pip install 'bilevel[applications]'."
            ) from error
