"""The paper's experiments with the library as it is now, one after the other, on one core.

    python benchmarks/paper.py --data DIR                    # everything; some ten core-hours
    python benchmarks/paper.py --data DIR --only mnist ptb   # the runs whose names begin like that
    python benchmarks/paper.py --list
    python benchmarks/paper.py --tables                      # every table and figure, from the files: make results

Every run is a command of ``python -m applications``, which is printed. Its folder is ``runs/paper/NAME``; what is
worth keeping of it (settings, environment, summary, trials, the history of validation passes) is copied to
``docs/results/NAME`` when it has ended. A run that is there already is not made again, and one that was stopped goes
on: give the same command.

What was cut to fit: MNIST has 10,000 training images, on which fixed hyperparameters overfit from epoch 15 on. A search
trains for as many epochs as three plain runs, which is more than a run of Δ-STN costs.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ("settings.json", "environment.json", "history.csv", "summary.json", "trials.csv", "table.md", "results.csv")
MNIST = "mnist --preset width400 --limit 10000"
FASHION = "fashion --preset paper --limit 20000 --epochs 20"
ALEXNET = "alexnet --preset quick --limit 5000 --epochs 100"
PTB = "ptb --preset quick --width 200 --limit 200000 --epochs 15"
SIX = "--epochs 50 --trials 6 --pruner none"
TEN = "--epochs 30 --trials 10 --pruner none"


def commands() -> Iterator[tuple[str, str]]:
    """Name and arguments of every run, the most important first."""
    tuned = ("delta_stn", "stn", "delta_stn_paper", "centered_stn")
    for seed in range(3):
        for method in ("fixed", *tuned):
            yield f"runs/mnist-{method}-{seed}", f"{MNIST} --method {method} --seed {seed}"
        yield f"runs/mnist-random_search-{seed}", f"{MNIST} --method random_search {SIX} --seed {seed}"
        yield f"runs/mnist-tpe-{seed}", f"{MNIST} --method tpe {TEN} --seed {seed}"
    for seed in range(3):
        search = f"{MNIST} --method random_search --trials 3 --pruner none --seed {seed}"
        yield f"longer/mnist-random_search-{seed}", search
    small = "--task mnist --preset width400 --limit 10000 --epochs 40 --methods delta_stn stn delta_stn_paper"
    yield "studies/scale", f"study scale {small} --values 0.1 0.5 1 2"
    yield "studies/initial", f"study initial {small} --values 0.05 0.4 0.8"
    for seed in range(2):
        for method in ("fixed", "delta_stn", "stn", "delta_stn_paper"):
            yield f"runs/fashion-{method}-{seed}", f"{FASHION} --method {method} --seed {seed}"
        search = f"{FASHION} --method random_search --trials 3 --pruner none --seed {seed}"
        yield f"runs/fashion-random_search-{seed}", search
    for method in ("fixed", "delta_stn", "stn"):
        yield f"runs/alexnet-{method}-0", f"{ALEXNET} --method {method}"
    yield "runs/alexnet-random_search-0", f"{ALEXNET} --method random_search --trials 3 --pruner none"
    for method in ("fixed", "delta_stn", "stn"):
        yield f"runs/ptb-{method}-0", f"{PTB} --method {method}"


def make(name: str, arguments: str, *, data: Path, kept: Path, work: Path) -> None:
    """Run one command, or go on with it, and keep what it left."""
    out = work / name
    shown = f"python -m applications {arguments} --data DIR --out {out} --device cpu --quiet"
    print(shown, flush=True)
    command = [sys.executable, *shlex.split(shown.replace("DIR", shlex.quote(str(data))))[1:]]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    found = [path for path in (ROOT / out).rglob("*") if path.name in KEPT]
    if not found:
        sys.exit(f"{name} left nothing: it ended with code {done.returncode}.")
    for path in found:
        target = kept / name / path.relative_to(ROOT / out)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8").replace(str(data), "DIR")
        target.write_text(passes(text) if path.name == "history.csv" else text, encoding="utf-8")


def passes(history: str) -> str:
    """The rows of a history that have a validation pass."""
    rows = list(csv.DictReader(io.StringIO(history)))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for row in rows if row.get("validation_loss"))
    return out.getvalue()


def tables(kept: Path, data: Path | None) -> None:
    """Make tables and figures of the runs that are kept; those of linear models need the data, for the optimum."""
    figures, kept = "docs/_static", kept.relative_to(ROOT) if kept.is_relative_to(ROOT) else kept
    lines = [
        f"-m applications compare {kept}/runs --out {kept}/applications.md --figure {figures}/applications.png",
        f"benchmarks/evidence.py {kept}/factors.jsonl --out {kept}/evidence.md --figure {figures}/evidence.png",
        f"benchmarks/published.py --report {kept}/published.jsonl",
    ]
    for name, arguments in commands():
        if name.startswith("studies/") and over(ROOT / kept / name):
            lines.append(f"-m applications {arguments} --data DIR --out {kept / name} --device cpu --quiet")
    if data is not None:
        lines += [
            f"-m applications linear --out {kept}/linear/{name} --data {data} --figure {figures}/linear_{name}.png"
            for name in ("ridge", "splits", "undivided", "decouple", "input_dropout", "network")
        ]
    for line in lines:
        print(f"python {line}", flush=True)
        done = subprocess.run(
            [sys.executable, *shlex.split(line)], cwd=ROOT, check=True, capture_output=True, text=True
        )
        print(done.stdout, flush=True)
        if "published.py" in line:
            (ROOT / kept / "published.txt").write_text(done.stdout.removesuffix("\n"), encoding="utf-8")


def over(folder: Path) -> bool:
    """Whether a run, or a study of several, has come to its end."""
    return (folder / "summary.json").exists() or (folder / "table.md").exists()


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the datasets")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--kept", type=Path, default=ROOT / "docs/results", help="where results are kept")
    parser.add_argument("--work", type=Path, default=Path("runs/paper"), help="where runs are made")
    parser.add_argument("--tables", action="store_true", help="run nothing; make tables and figures of what is kept")
    parser.add_argument("--list", action="store_true", help="print the commands that are missing, and end")
    options = parser.parse_args()
    missing = [
        (name, arguments)
        for name, arguments in commands()
        if name.partition("/")[2].startswith(tuple(options.only)) and not over(options.kept / name)
    ]
    if options.list:
        print("\n".join(f"{name}: python -m applications {arguments}" for name, arguments in missing))
        return
    if options.tables:
        tables(options.kept, None if options.data is None else options.data.resolve())
        return
    if options.data is None:
        parser.error("--data is needed: the folder of the datasets.")
    for name, arguments in missing:
        make(name, arguments, data=options.data.resolve(), kept=options.kept, work=options.work)


if __name__ == "__main__":
    main()
