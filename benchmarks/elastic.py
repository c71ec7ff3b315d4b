"""Ranks that die: does ``torchrun --max-restarts`` continue a run bit for bit?

    python benchmarks/elastic.py --jobs 20 --deaths 3

Every job is a run of ``bilevel.solve`` in several processes, with dropout, shuffled data and a checkpoint after every
round. In each attempt a process drawn at random kills itself, in the middle of a step drawn at random, until it has
died so many times. torchrun starts all of them again. What the job returns in the end is compared, to the last bit,
with what an undisturbed job returns. The exit code says whether all were equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel

ROUNDS, INNER = 16, 2
ROOT = Path(__file__).parents[1]


def attempt() -> int:
    """How many times this job was started again."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def work(folder: Path, deaths: list[list[int]]) -> None:
    """One process of a job, which may be told to die after some calls of the inner loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    state = {"rank": int(os.environ["RANK"]), "calls": 0}
    x = torch.randn(37, 4)
    y = (x.sum(1) > 0).long()
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))

    def inner(model: Any, hyper: Any, batch: Any) -> Any:
        state["calls"] += 1
        number = attempt()  # not captured: a loss that reads other values is another loss to a checkpoint
        if number < len(deaths) and deaths[number] == [state["rank"], state["calls"]]:
            os.kill(os.getpid(), signal.SIGKILL)
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses + hyper["decay"] * bilevel.l2(model.params)

    problem = bilevel.Problem(
        net,
        inner_loss=inner,
        outer_loss=lambda model, hyper, batch: F.cross_entropy(model(batch[0]), batch[1]),
        hyper={"decay": bilevel.positive(1e-2)},
    )
    solution = bilevel.solve(
        problem,
        DataLoader(TensorDataset(x[:24], y[:24]), 3, shuffle=True),
        DataLoader(TensorDataset(x[24:], y[24:]), 3, shuffle=True),
        steps=ROUNDS,
        inner_steps=INNER,
        warmup=1,
        evaluate_every=1,
        checkpoint=folder / "run",
        progress=False,
    )
    if state["rank"] == 0:
        digest = hashlib.sha256()
        for value in [*solution.hyper.values(), *solution.state_dict.values()]:
            digest.update(value.numpy().tobytes())
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in solution.history.rows]
        digest.update(repr(rows).encode())
        (folder / "digest").write_text(f"{digest.hexdigest()} {attempt()}")


def job(processes: int, deaths: list[list[int]]) -> tuple[str, int, str]:
    """Run a job; what it found, how many times it was started again, and what was printed."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += [f"--max-restarts={len(deaths)}", "--monitor-interval=0.1", __file__, "--worker", name]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CI": "1"}
        run = subprocess.run(
            [*command, json.dumps(deaths)], env=environment, capture_output=True, text=True, check=False
        )
        found = Path(name) / "digest"
        if run.returncode or not found.exists():
            return "", -1, run.stdout + run.stderr
        digest, attempt = found.read_text().split()
        return digest, int(attempt), ""


def main() -> None:
    """Compare jobs in which processes die with one in which none does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20, help="how many")
    parser.add_argument("--deaths", type=int, default=3, help="in each job")
    parser.add_argument("--processes", type=int, default=2, help="of each job")
    parser.add_argument("--seed", type=int, default=0, help="of who dies when")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Path(arguments.worker[0]), json.loads(arguments.worker[1]))
        return
    draw = random.Random(arguments.seed)
    expected, _, output = job(arguments.processes, [])
    if not expected:
        sys.exit(f"the undisturbed job failed:\n{output}")
    equal = 0
    for number in range(arguments.jobs):
        # Of the passes of an attempt, some are checks of the first batch; the rest is less than a third of the run.
        most = max(2, 4 * ROUNDS // max(3, arguments.deaths))
        deaths = [[draw.randrange(arguments.processes), draw.randint(2, most)] for _ in range(arguments.deaths)]
        digest, attempts, output = job(arguments.processes, deaths)
        same = digest == expected and attempts == arguments.deaths
        equal += same
        print(
            f"job {number + 1}: deaths {deaths} (process, pass), {attempts} restarts, equal: {digest == expected}",
            flush=True,
        )
        if not same:
            print(output, flush=True)
    print(f"{equal} of {arguments.jobs} jobs with {arguments.deaths} deaths each ended as the undisturbed one.")
    sys.exit(equal < arguments.jobs)


if __name__ == "__main__":
    main()
