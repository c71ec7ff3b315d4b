"""One run: a task, a method, a folder with everything that happened."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import bilevel
from applications.fixed import Fixed
from applications.task import FIXED, SELF_TUNING, STOPPED, Experiment, Settings, Task

LARGEST_JSON = 16 * 2**20
"""Of settings, summary and environment, in bytes."""
PARTS: dict[str, type] = {
    **dict.fromkeys(("stopped", "task", "method", "data"), str),
    **{"seed": int, "epochs": float, "seconds": float},
    **dict.fromkeys(("init", "settings", "valid", "test"), dict),
}
"""Of a summary, and what they are."""


def run(
    task: Task,
    method: str,
    settings: Settings,
    *,
    out: Path,
    data: Path | None,
    seed: int = 0,
    device: torch.device | None = None,
    init: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    callbacks: Iterable[Callable[[bilevel.Round], bool | None]] = (),
    progress: bool | None = None,
    plots: bool = True,
) -> dict[str, Any]:
    """Train with one method, or go on with a run that was stopped, and leave a folder.

    ``settings.json``, ``environment.json``, ``history.csv``, ``summary.json``, ``schedules.png``, ``best.pt`` (weights
    at the best validation loss), ``checkpoint.pt`` (to go on from). A run that is over already is not made again.

    Args:
        task: What to train.
        method: One of ``task.methods``, but not a search.
        settings: The numbers.
        out: The folder.
        data: Folder of the datasets; None takes small generated data.
        seed: Of the weights, the split and all random numbers of the run.
        device: Where to train; the CPU by default.
        init: Initial values of hyperparameters, by name.
        seconds: Stop after that many.
        callbacks: As in :func:`bilevel.solve`.
        progress: Likewise.
        plots: Draw the schedules, which needs matplotlib.

    Returns:
        The summary.

    Raises:
        DivergenceError: If the training diverged; the folder holds what it had until then.
        KeyboardInterrupt: If it was stopped before the first validation pass; later, it ends as usual.
    """
    device = torch.device("cpu") if device is None else device
    described = describe(task, method, settings, data=data, seed=seed, init=init or {})
    callbacks = list(callbacks)
    over = finished(out, described, ["best.pt", "history.csv", *(["schedules.png"] if plots else [])])
    # A callback of the caller may have ended the run, and that of another call may want to go on.
    if over and not callbacks:
        return over
    claim(out, described)
    experiment = task.build(settings, data=data, folder=out, seed=seed, device=device, init=init or {})
    epochs = settings.inner_steps / len(experiment.train)
    prolong(out, described, epochs)
    resumed, clock, used = (out / "checkpoint.pt").exists(), time.perf_counter(), time.process_time()
    try:
        solution = train(
            experiment,
            method,
            settings,
            seed=seed,
            seconds=seconds,
            checkpoint=out / "checkpoint.pt",
            callbacks=[Log(out, device), *callbacks],
            progress=progress,
        )
    except bilevel.DivergenceError as error:
        if error.solution is not None and error.solution.best is not None:
            with suppress(ImportError):  # the divergence is the news, not that matplotlib is missing
                leave(out, described, experiment, error.solution, epochs, plots=plots)
            at = error.solution.best.round * epochs
            print(f"warning: the run diverged; {out} holds what it had, best.pt is of epoch {at:.2f}.", flush=True)
        raise
    if solution.stopped in STOPPED and solution.best is None:
        raise KeyboardInterrupt
    # Of a run that was continued, only a part is known.
    share = None if resumed else (time.process_time() - used) / (time.perf_counter() - clock)
    return leave(out, described, experiment, solution, epochs, plots=plots, share=share)


def leave(
    out: Path,
    described: Mapping[str, Any],
    experiment: Experiment,
    solution: bilevel.Solution,
    epochs_per_round: float,
    *,
    plots: bool,
    share: float | None = None,
) -> dict[str, Any]:
    """Write what a run came to; ``share`` is that of the processor's time in the time of the clock, if it is known.

    Returns:
        The summary.
    """
    if solution.history:
        solution.history.to_csv(out / "history.csv")
    summary = {**described, **summarize(experiment, solution, epochs_per_round)}
    if share is not None:
        summary["processor_share"] = round(share, 3)
    assert solution.best is not None
    torch.save(solution.best.state_dict, out / "best.pt")
    write(out / "summary.json", summary)
    if plots:  # last, since matplotlib may be missing
        solution.plot(out / "schedules.png")
    return summary


class Log:
    """A callback that writes ``environment.json`` in the first round, and ``history.csv`` with every validation pass.

    So a run that does not come to its end has a history.
    """

    def __init__(self, out: Path, device: torch.device) -> None:
        """Write into ``out``."""
        self.out, self.device = out, device
        self.columns: list[str] = []
        self.written = 0
        self.begun = False

    def __call__(self, event: bilevel.Round) -> None:
        """Note a round."""
        if not self.begun:
            note_environment(self.out / "environment.json", self.device)
            self.begun = True
        if event.validation_loss is None:
            return
        new = event.history.rows[self.written :]
        if all(name in self.columns for row in new for name in row):
            with (self.out / "history.csv").open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns, restval="", lineterminator="\n").writerows(new)
        else:
            event.history.to_csv(self.out / "history.csv")
            self.columns = event.history.columns
        self.written = len(event.history)


def train(
    experiment: Experiment,
    method: str,
    settings: Settings,
    *,
    seed: int,
    seconds: float | None = None,
    checkpoint: Path | None = None,
    callbacks: Iterable[Callable[[bilevel.Round], bool | None]] = (),
    progress: bool | None = None,
) -> bilevel.Solution:
    """Run one method with the settings of a task; the arguments are those of :func:`run`."""
    return bilevel.solve(
        experiment.problem,
        experiment.train,
        experiment.valid,
        method=method_of(method, settings),
        inner_steps=settings.inner_steps if method in (*SELF_TUNING, *FIXED) else None,
        outer_steps=settings.outer_steps,
        warmup=warmup_rounds(method, settings, len(experiment.train)),
        epochs=settings.epochs,
        time_budget=seconds,
        checkpoint=checkpoint,
        progress=progress,
        seed=seed,
        **{**experiment.solve, "callbacks": [*experiment.solve.get("callbacks", ()), *callbacks]},
    )


def method_of(name: str, settings: Settings) -> bilevel.Method:
    """The method of that name with the settings of the task."""
    if name in FIXED:
        return Fixed(settings.scale if name == "fixed_noise" else 0.0)
    method = bilevel.METHODS[name]
    if isinstance(method, bilevel.STN | bilevel.CenteredSTN | bilevel.DeltaSTN):
        return dataclasses.replace(method, scale=settings.scale, entropy=settings.entropy)
    return method


def warmup_rounds(method: str, settings: Settings, batches: int) -> int | None:
    """Rounds in which the hyperparameters stay: all there can be, for a method that does not tune; None: as usual."""
    if method in FIXED:
        return sys.maxsize
    if settings.warmup is None:
        return None
    return math.ceil(settings.warmup * batches / settings.inner_steps) if method in SELF_TUNING else 0


def summarize(experiment: Experiment, solution: bilevel.Solution, epochs_per_round: float) -> dict[str, Any]:
    """What the tables show: measures of the best weights on both sets, hyperparameters, time."""
    best = solution.best
    if best is None:
        raise ValueError("the run ended before its first validation pass: give it more time.")
    experiment.net.load_state_dict(best.state_dict)
    return {
        "stopped": solution.stopped,
        "epochs": round(solution.history["round"][-1] * epochs_per_round, 2),
        "seconds": round(float(solution.history["seconds"][-1]), 1),
        "best_epoch": round(best.round * epochs_per_round, 2),
        "valid": measure(experiment, best.hyper, experiment.valid),
        "test": measure(experiment, best.hyper, experiment.test),
        "best_hyper": {name: value.tolist() for name, value in best.hyper.items()},
        "hyper": {name: value.tolist() for name, value in solution.hyper.items()},
    }


@torch.no_grad()
def measure(experiment: Experiment, hyper: Mapping[str, torch.Tensor], batches: Iterable[Any]) -> dict[str, float]:
    """The outer loss and what it returns beside, averaged over a set, in eval mode.

    Returns:
        ``loss`` and the other measures by name.
    """
    net = experiment.net.eval()
    model = bilevel.Model(dict(net.named_parameters()), net)
    total: dict[str, float] = {}
    count = 0
    with torch.random.fork_rng([]):  # batches that are shuffled come in the same order, and sums round the same way
        torch.default_generator.manual_seed(0)
        for batch in batches:
            loss, measures = experiment.outer_loss(model, hyper, batch)
            size = experiment.problem.examples(batch) or 1
            count += size
            for name, value in {"loss": loss, **measures}.items():
                total[name] = total.get(name, 0.0) + size * float(value.double().mean())
    means = {name: value / count for name, value in total.items()}
    return {**means, **experiment.derive(means)}


def describe(
    task: Task, method: str, settings: Settings, *, data: Path | None, seed: int, init: Mapping[str, Any]
) -> dict[str, Any]:
    """What makes a run the run it is."""
    return {
        "task": task.name,
        "method": method,
        "seed": seed,
        "data": "generated" if data is None else "real",
        "init": dict(init),
        "settings": dataclasses.asdict(settings),
    }


def finished(out: Path, described: Mapping[str, Any], files: Iterable[str]) -> dict[str, Any] | None:
    """The summary of a run that is over and has all its files, if it is the one that is described."""
    try:
        summary = read_summary(out / "summary.json")
    except (OSError, ValueError):
        return None
    same = all(summary.get(key) == value for key, value in json.loads(json.dumps(described)).items())
    over = summary.get("stopped") in ("epochs", "callback") and all((out / name).exists() for name in files)
    return summary if same and over else None


def claim(out: Path, described: dict[str, Any]) -> None:
    """Take a folder for a run, unless it holds another one; one with other epochs is the same.

    Raises:
        ValueError: If it does.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "settings.json"
    plain = json.loads(json.dumps(described))
    # Another process of the same search may be writing: a file that is there before the settings are read is not its.
    names = {entry.name for entry in out.iterdir() if entry.suffix != ".part"}
    before = read_json(path) if path.exists() else {}
    differs = [key for key in plain if _without_epochs(before.get(key)) != _without_epochs(plain[key])]
    if not names <= {"settings.json", "split.json"} and not before:
        raise ValueError(f"--out {out} is not empty, but holds no settings.json of a run. Choose another folder.")
    if names <= {"settings.json", "split.json"}:
        if before and differs:  # a run ended with an error before it began; the split of the same run may be in use
            (out / "split.json").unlink(missing_ok=True)
        write(path, plain)
    elif differs:
        raise ValueError(
            f"--out {out} holds another run: {differs[0]} was {before.get(differs[0])}, now it is "
            f"{plain[differs[0]]}. Choose another folder, or remove it."
        )


def prolong(out: Path, described: dict[str, Any], epochs_per_round: float) -> None:
    """Note how many epochs a run shall make in all.

    Raises:
        ValueError: If it has made more.
    """
    path, history = out / "settings.json", out / "history.csv"
    asked, settings = described["settings"]["epochs"], read_json(path).get("settings")
    before = settings.get("epochs") if isinstance(settings, dict) else None
    if not isinstance(before, int | float):
        raise ValueError(f"{path} has no number of epochs: it is damaged or of another version. Choose another --out.")
    made = 0
    if history.exists() and (out / "checkpoint.pt").exists():
        with history.open(newline="", encoding="utf-8") as file:
            rounds = [row["round"] for row in csv.DictReader(file)]
        made = int(float(rounds[-1]) * epochs_per_round) if rounds else 0
    if asked < min(before, made):
        raise ValueError(
            f"--epochs {asked}: the run in {out} has made {made} already. Ask for at least as many, or choose another "
            "folder."
        )
    write(path, described)


def choose_device(name: str) -> torch.device:
    """The device of that name; ``auto`` takes an accelerator if there is one.

    Returns:
        A device that works.

    Raises:
        ValueError: If it does not.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if found is None else found
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:  # as torch happens to fail
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used: {reason}. Try --device cpu, or leave it out.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Returns:
        The object.

    Raises:
        ValueError: If it holds anything else, or is larger than such a file can be.
    """
    remedy = "Remove it, or choose another --out."
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file. {remedy}")
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{path} is damaged: it has {path.stat().st_size} bytes. {remedy}")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}). {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object. {remedy}")
    return content


def read_summary(path: Path) -> dict[str, Any]:
    """What a run came to.

    Args:
        path: Of ``summary.json``.

    Returns:
        The summary.

    Raises:
        ValueError: If a part is missing or of another kind.
    """
    try:
        summary = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged ({error})") from None
    for name, kind in PARTS.items():
        if name not in summary:
            raise ValueError(f"{name!r} is missing in {path.name}")
        value = summary[name]
        fits = _is_number(value) if kind is float else type(value) is kind
        if name in ("valid", "test"):
            fits = fits and "loss" in value and all(map(_is_number, value.values()))
        if not fits:
            raise ValueError(f"{path.name} is damaged: {name!r} is {f'{value!r}'[:60]}")
    if not _is_number(summary.get("processor_share", 1.0)):
        raise ValueError(f"{path.name} is damaged: its 'processor_share' is no number")
    return summary


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 53)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON in one piece."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # processes of one search share a folder
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def environment(device: torch.device) -> dict[str, Any]:
    """Where and when a run was made."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m applications {shlex.join(without_storage(sys.argv[1:]))}",
        "bilevel": bilevel.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": accelerator or device.type,
        "threads": torch.get_num_threads(),
    }


def without_storage(arguments: Sequence[str]) -> list[str]:
    """Leave out what ``--storage`` names, in any spelling that the parser takes: it may hold a password."""
    kept: list[str] = []
    hide = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        storage = len(flag) > len("--s") and "--storage".startswith(flag)
        if storage:
            kept += ["--storage", "..."]
        elif not hide:
            kept.append(argument)
        hide = storage and not equals
    return kept


def note_environment(path: Path, device: torch.device) -> None:
    """Write where and when a run began; one that goes on keeps that, and adds to the list ``continued``."""
    now = environment(device)
    if path.exists():
        try:
            first = read_json(path)
            before = first.get("continued", [])
            write(path, {**first, "continued": [*(before if isinstance(before, list) else []), now]})
            return
        except ValueError as error:  # it is for the reader only, and must not keep a run from going on
            print(f"warning: {error} It is written anew.", flush=True)
    write(path, now)


def _without_epochs(value: Any) -> Any:
    return {key: entry for key, entry in value.items() if key != "epochs"} if isinstance(value, dict) else value
