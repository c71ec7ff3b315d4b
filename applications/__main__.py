"""The command line: ``python -m applications --help``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import bilevel
from applications import images, language, linear
from applications.run import choose_device, run
from applications.task import SEARCHES, STOPPED, Task, preset_for

TASKS: dict[str, Task] = {task.name: task for task in (*images.TASKS, *language.TASKS)}

DESCRIPTION = """\
The experiments of the paper: train a network and tune its regularization in one run.

  python -m applications mnist --method delta_stn --data DIR --preset quick --out runs/mnist
  python -m applications mnist --method random_search --trials 20 --data DIR --preset quick --out runs/mnist-rs
  python -m applications compare runs/*
  python -m applications study initial --data DIR --preset quick --out studies/initial
"""


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    options = parser().parse_args(arguments)
    try:
        options.command(options)
    except (OSError, ImportError, ValueError, bilevel.DivergenceError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        if options.command is linear.main:
            sys.exit(f"interrupted; {options.out} holds the splits that were done.")
        sys.exit("interrupted; the same command goes on.")


def parser() -> argparse.ArgumentParser:
    """All commands: one for each task, and those that work on what the tasks left."""
    top = argparse.ArgumentParser(
        prog="python -m applications", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True, metavar="TASK or command")
    for task in TASKS.values():
        add_task(commands, task)
    add_linear(commands)
    add_compare(commands)
    add_study(commands)
    add_download(commands)
    return top


def add_task(commands: Any, task: Task) -> None:
    """The options of a task: what every run has, then one for each of its settings."""
    this = commands.add_parser(
        task.name,
        help=task.summary,
        description=task.summary,
        epilog="A setting that is not given is that of the preset; presets: "
        + "; ".join(f"{name}: {_shown(preset)}" for name, preset in task.presets.items()),
    )
    this.set_defaults(command=run_task, task=task)
    this.add_argument("--method", choices=task.methods, default="delta_stn", help="what tunes (default: %(default)s)")
    this.add_argument("--preset", choices=list(task.presets), default="quick", help="(default: %(default)s)")
    this.add_argument("--data", type=Path, help="folder of the datasets (default: small generated data)")
    this.add_argument("--device", default="auto", help="cpu, cuda, mps, ... (default: the best there is)")
    this.add_argument("--seed", type=int, default=0, help="of weights, split and noise (default: %(default)s)")
    this.add_argument("--out", type=Path, help="folder of the run; one that exists is continued (default: runs/NAME)")
    this.add_argument("--seconds", type=float, help="stop after that many")
    this.add_argument("--init", nargs="+", default=[], metavar="NAME=VALUE", help="initial hyperparameters")
    this.add_argument("--quiet", action="store_true", help="no progress bar")
    group = this.add_argument_group(
        "searches", f"--method {', '.join(SEARCHES)}: every trial trains for --epochs at other hyperparameters"
    )
    group.add_argument("--trials", type=int, metavar="N", help="how many (default: 20, or until --seconds are over)")
    group.add_argument(
        "--pruner", choices=["median", "hyperband", "none"], help="stops bad trials (default: median; gp, cmaes: none)"
    )
    group.add_argument(
        "--storage",
        metavar="URL",
        help="database of Optuna, such as postgresql://...; all processes that name it work on one search "
        "(default: a file in --out, for processes on one machine)",
    )
    group = this.add_argument_group("settings")
    for field in dataclasses.fields(next(iter(task.presets.values()))):
        flag = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            group.add_argument(flag, action="store_true", default=None, help=field.metadata["help"])
        else:
            group.add_argument(flag, type=_reader(str(field.type)), metavar="N", help=field.metadata["help"])


def add_linear(commands: Any) -> None:
    """The command for linear models."""
    this = commands.add_parser(
        "linear",
        help="linear models against their exact optimum",
        description=linear.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    this.set_defaults(command=linear.main)
    linear.add_options(this)


def add_compare(commands: Any) -> None:
    """The command that puts runs side by side."""
    this = commands.add_parser(
        "compare",
        help="put runs side by side, and the paper's numbers",
        description="Read the folders that runs left, and print the best validation loss and the test loss of the same "
        "weights, averaged over seeds, in the layout of the paper's table, with the paper's numbers below. Runs of a "
        "task whose settings differ have rows of their own. Runs that are not finished are named and left out.",
    )
    this.set_defaults(command=compare_runs)
    this.add_argument("path", nargs="+", type=Path, help="folder of a run, or a folder that holds some at any depth")
    this.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the tables there too, with .html and .csv files and a figure beside",
    )
    this.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="draw the best loss so far over epochs there, and over time if all runs had a core of their own (default: "
        "beside --out, or comparison.png in "
        "the folder of the runs)",
    )


def compare_runs(options: argparse.Namespace) -> None:
    """Print the tables and draw the figure."""
    from applications.compare import compare

    print(compare(options.path, out=options.out, figure=options.figure), flush=True)
    if options.figure is None and options.out is None:
        folders = [path.parent if path.is_file() else path for path in options.path]
        try:
            figure = Path(os.path.commonpath([folder.resolve() for folder in folders])) / "comparison.png"
            compare(options.path, figure=figure)
            print(f"\nsee {figure}")
        except (ImportError, OSError, ValueError) as error:  # nobody asked for it, so that it is no failure
            print(f"\nno figure: {error}")


def add_study(commands: Any) -> None:
    """The commands that make many runs and a figure of them."""
    from applications.studies import STUDIES

    this = commands.add_parser(
        "study",
        help="make many runs that differ in one thing, and a figure of them",
        description="Make many runs of a task that differ in one thing; then a table (table.md, results.csv) and a "
        "figure (figure.png). Runs that are in --out already are not made again: to go on with a study that was "
        "stopped, give the same command.",
    )
    studies = this.add_subparsers(required=True, metavar="STUDY")
    for study in STUDIES.values():
        one = studies.add_parser(study.name, help=study.summary, description=study.description)
        one.set_defaults(command=make_study, study=study)
        one.add_argument("--task", choices=study.tasks, default=study.tasks[0], help="(default: %(default)s)")
        one.add_argument("--values", nargs="+", default=[], help=f"what to try (default: {' '.join(study.values)})")
        one.add_argument(
            "--methods", nargs="+", default=[], help=f"what to compare (default: {' '.join(study.methods)})"
        )
        one.add_argument("--seeds", nargs="+", type=int, default=[0], help="a run for each (default: 0)")
        one.add_argument("--epochs", type=int, help="of every run (default: those of the preset)")
        one.add_argument("--limit", type=int, help="training examples of every run (default: those of the preset)")
        one.add_argument("--preset", default="quick", help="settings of the task (default: %(default)s)")
        one.add_argument("--data", type=Path, help="folder of the datasets (default: small generated data)")
        one.add_argument("--device", default="auto", help="cpu, cuda, mps, ... (default: the best there is)")
        one.add_argument("--out", type=Path, help=f"folder of the study (default: studies/{study.name}-TASK)")
        one.add_argument("--quiet", action="store_true", help="no progress")


def make_study(options: argparse.Namespace) -> None:
    """Make a study and print its table.

    Raises:
        ValueError: If the task has no such preset.
    """
    from applications.studies import run_study

    task = TASKS[options.task]
    if options.preset not in task.presets:
        raise ValueError(f"--preset must be one of {', '.join(task.presets)} for {task.name}, got {options.preset}.")
    given = {"epochs": options.epochs, "limit": options.limit}
    given = {name: value for name, value in given.items() if value is not None}
    settings = dataclasses.replace(task.presets[options.preset], **given)
    out = options.out or Path("studies") / f"{options.study.name}-{task.name}"
    if options.data is None:
        print("no --data: this is a study on small generated data.", flush=True)
    text = run_study(
        options.study,
        task,
        settings,
        out=out,
        data=options.data,
        values=options.values,
        methods=options.methods,
        seeds=options.seeds,
        device=choose_device(options.device),
        progress=False if options.quiet else None,
    )
    print(f"{text}\n\nsee {out}")


def add_download(commands: Any) -> None:
    """The command that gets data."""
    from applications.data.download import download

    this = commands.add_parser("download", help="get a dataset from its official place")
    this.set_defaults(command=lambda options: [download(name, options.data) for name in options.name])
    this.add_argument("name", nargs="+", help="mnist, fashion_mnist, cifar10, ptb, wikitext2")
    this.add_argument("--data", type=Path, required=True, help="folder of the datasets")


def run_task(options: argparse.Namespace) -> None:
    """Run a task with a method."""
    task: Task = options.task
    preset, settings = preset_for(task, options.preset, options.method)
    if preset != options.preset:
        print(f"--preset {preset}: --method {options.method} has settings of its own.", flush=True)
    names = [field.name for field in dataclasses.fields(settings)]
    given = {name: vars(options)[name] for name in names if vars(options)[name] is not None}
    none = {name: None for name, value in given.items() if value == "none"}
    settings = dataclasses.replace(settings, **(given | none))
    out = options.out or Path("runs") / f"{task.name}-{options.method}-{options.seed}"
    if options.data is None:
        print("no --data: this is a run on small generated data.", flush=True)
    arguments: dict[str, Any] = {
        "out": out,
        "data": options.data,
        "seed": options.seed,
        "device": choose_device(options.device),
        "seconds": options.seconds,
        "progress": False if options.quiet else None,
    }
    searching = {name: vars(options)[name] for name in ("trials", "pruner", "storage")}
    searching = {name: value for name, value in searching.items() if value is not None}
    init = dict(read_init(text) for text in options.init)
    if options.method in SEARCHES:
        if init:
            raise ValueError(f"--init: {options.method} chooses all values itself; leave it out.")
        from applications.search import search

        summary = search(task, options.method, settings, **arguments, **searching)
    elif searching:
        raise ValueError(f"--{next(iter(searching))} is for searches, --method {options.method} is none.")
    else:
        summary = run(task, options.method, settings, **arguments, init=init)
    if summary["stopped"] in STOPPED:
        raise KeyboardInterrupt
    for part in ("valid", "test"):
        print(f"{part:5} " + "  ".join(f"{name} {value:.4f}" for name, value in summary[part].items()))
    print(f"{summary['epochs']} epochs in {summary['seconds']:.0f} s; see {out}")


def read_init(text: str) -> tuple[str, float | list[float]]:
    """Read ``name=0.1`` or ``name=0.1,0.2``.

    Returns:
        The name and the value.

    Raises:
        ValueError: If it is neither.
    """
    name, _, values = text.partition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"--init takes NAME=NUMBER or NAME=NUMBER,NUMBER,..., got {text!r}.") from None
    return name, numbers[0] if len(numbers) == 1 else numbers


def _reader(kind: str) -> Any:
    number = int if kind.startswith("int") else float
    if "None" not in kind:
        return number
    return lambda text: text if text == "none" else number(text)


def _shown(preset: Any) -> str:
    return ", ".join(f"{field.name} {getattr(preset, field.name)}" for field in dataclasses.fields(preset))


if __name__ == "__main__":
    main()
