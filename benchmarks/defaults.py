"""Which defaults are best? Configurations of ``bilevel.solve`` over the tasks of ``tasks.py`` and several seeds.

    python benchmarks/defaults.py --list
    python benchmarks/defaults.py --out results.jsonl --seeds 3 --workers 2 --data DIR
    python benchmarks/defaults.py --report results.jsonl

Each finished run is one line of JSON; a run whose line is there already is skipped, so that a sweep can be stopped at
any time. All configurations make the same number of updates of the weights on a task, and start from the same weights.
Without ``--data`` only the tasks with built-in data run.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tasks as suite
import torch
import variants
from torch import Tensor, nn

import bilevel

INNER_STEPS, EVALUATIONS = 5, 40
REFERENCE = "default"
Config = Mapping[str, Any]


def rmsprop(lr: float) -> suite.Factory:
    """Makes RMSprop with this learning rate."""
    return partial(torch.optim.RMSprop, lr=lr)


def travel(distance: float, beta: float = 0.99) -> Callable[[int], suite.Factory]:
    """Makes Adam from the number of rounds: learning rate times rounds is ``distance``, within [0.003, 0.2]."""
    return lambda rounds: partial(torch.optim.Adam, lr=min(0.2, max(0.003, distance / rounds)), betas=(0.9, beta))


# Keyword arguments of bilevel.solve, except for
#   method       also a function without arguments that makes it, so that the table loads with options yet to come;
#   warmup       a share of the rounds;
#   valid_batch  a factor for the batch of an outer step;
#   travel       an outer optimizer that depends on the number of rounds;
#   schedule     from the share of the rounds that are over to a factor of the outer learning rate;
#   order        weights and response are updated one after the other, on the same batch: whose optimizer is first.
# All but the last five differ from the default in one thing, or in two.
PLAN = {"travel": travel(20), "warmup": 0.1}
DELTA = bilevel.DeltaSTN
CONFIGS: dict[str, Config] = {
    "default": {},
    # The outer learning rate and the warm-up.
    **{f"travel_{distance}": PLAN | {"travel": travel(distance)} for distance in (10, 40)},
    "beta_0.999": PLAN | {"travel": travel(20, 0.999)},
    **{f"warm_{share:g}": PLAN | {"warmup": share} for share in (0.0, 0.2)},
    "ramp": PLAN | {"schedule": lambda share: min(1.0, share / 0.3)},
    "constant": PLAN | {"schedule": lambda share: 1.0},
    "cosine": PLAN | {"schedule": lambda share: 0.5 + 0.5 * math.cos(math.pi * share)},
    "cosine_late": PLAN | {"schedule": lambda share: 0.5 + 0.5 * math.cos(math.pi * max(0.0, 2 * share - 1))},
    # Noise: the outer batch, the scale, averages of Θ, its optimizer, the order of updates, inner steps.
    "valid_x4": {"valid_batch": 4},
    "scale_0.5": {"method": lambda: DELTA(scale=0.5)},
    "entropy": {"method": lambda: DELTA(entropy=1e-3)},
    "averaged": {"method": lambda: variants.Averaged(decay=0.98)},
    "response_1e-2": {"response_optimizer": suite.adam(1e-2)},
    "response_sgd": {"response_optimizer": partial(torch.optim.SGD, lr=1e-2, momentum=0.9)},
    "weights_first": {"order": "inner_optimizer"},
    "response_first": {"order": "response_optimizer"},
    "inner_2": {"inner_steps": 2},
    "inner_10": {"inner_steps": 10},
    # How the response is learned.
    "pairs": {"method": lambda: DELTA(antithetic=True)},
    "plain_gate": {"method": lambda: DELTA(control=False)},
    "rows_pairs": {"method": lambda: DELTA(structure="rowwise")},
    "per_batch": {"method": lambda: DELTA(perturb="batch")},
    **{f"every_{steps}": {"method": lambda steps=steps: DELTA(response_every=steps)} for steps in (2, 3)},
    # Two things at once.
    "valid_x4_pairs": {"valid_batch": 4, "method": lambda: DELTA(antithetic=True)},
    "inner_2_pairs": {"inner_steps": 2, "method": lambda: DELTA(antithetic=True)},
    # Other methods, and the paper's settings.
    "rmsprop_0.01": {"outer_optimizer": rmsprop(0.01), "warmup": 0.0},
    "paper": {
        "method": bilevel.DeltaSTN.paper,
        "outer_optimizer": rmsprop(0.01),
        "warmup": 0.0,
    },
    "stn_gate": {"method": lambda: bilevel.STN(structure="gate")},
    "stn": {"method": "stn"},
    "centered_stn": {"method": "centered_stn"},
}
# Plain training: trials with other hyperparameters, and the length of each. A run of Δ-STN takes 2.4 times the FLOPs of
# one such run, and on these small networks about 4.5 times its time: random_4 is closer to equal time.
PLAIN: dict[str, tuple[int, float]] = {
    "fixed": (1, 1.0),
    "hand": (1, 1.0),
    "random_2": (2, 1.0),
    "random_5": (5, 0.5),
    "random_4": (4, 1.0),
}
NAMES = [*PLAIN, *CONFIGS]


def mean_loss(task: suite.Task, net: nn.Module, batches: suite.Batches) -> float:
    """The outer loss over a whole set, in eval mode.

    Returns:
        The mean; the random state is as before.
    """
    model = bilevel.Model(dict(net.named_parameters()), net)
    hyper = task.problem.space.values(task.problem.initial_hyper())
    net.eval()
    total = 0.0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for batch in batches:
            total += float(task.problem.user_losses["outer_loss"](model, hyper, batch).sum())
    return total / len(batches.tensors[0])


def plain_run(task: suite.Task, hyper: Mapping[str, Tensor], updates: int, seed: int) -> dict[str, Any]:
    """Train with fixed hyperparameters, in plain PyTorch.

    Args:
        task: What to train.
        hyper: Natural values.
        updates: Of the weights.
        seed: Of batches and noise.

    Returns:
        Best validation loss, test loss there, and the history.
    """
    net = copy.deepcopy(task.problem.module)
    assert net is not None
    model = bilevel.Model(dict(net.named_parameters()), net)
    optimizer = (task.inner_optimizer or suite.adam(1e-3))(net.parameters())
    torch.manual_seed(seed)
    batches = chain.from_iterable(repeat(task.train))
    every = max(1, task.updates // INNER_STEPS // EVALUATIONS) * INNER_STEPS
    best, state, history = math.inf, net.state_dict(), []
    for index in range(1, updates + 1):
        net.train()
        optimizer.zero_grad()
        loss = task.problem.user_losses["inner_loss"](model, hyper, next(batches)).mean()
        loss.backward()
        optimizer.step()
        if index % every == 0 or index == updates:
            value = mean_loss(task, net, task.valid)
            history.append([index // INNER_STEPS, round(value, 5)])
            if value < best:
                best, state = value, copy.deepcopy(net.state_dict())
    net.load_state_dict(state)
    test = mean_loss(task, net, task.test)
    return {"valid": best, "test": test, "history": history, "stopped": "steps"}


def drawn(task: suite.Task, seed: int) -> dict[str, Tensor]:
    """Hyperparameters for one trial of a random search, each entry on its own."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, entry in task.problem.space.hyper.items():
        low, high = task.ranges[name]
        share = torch.rand(entry.init.shape, generator=generator)
        logarithmic = entry.low == 0 and entry.high == math.inf
        values[name] = low * (high / low) ** share if logarithmic else low + (high - low) * share
    return values


def run_plain(name: str, task: suite.Task, seed: int) -> dict[str, Any]:
    """The best of the trials of plain training, by its validation loss."""
    trials, length = PLAIN[name]
    runs = []
    for trial in range(trials):
        if name == "fixed":
            hyper = dict(task.problem.space.values(task.problem.initial_hyper()))
        elif name == "hand":
            hyper = {key: torch.tensor(value) for key, value in task.hand.items()}
        else:
            hyper = drawn(task, 1000 * seed + trial)
        runs.append(plain_run(task, hyper, round(task.updates * length), seed) | {"hyper": plain_numbers(hyper)})
    return min(runs, key=lambda run: run["valid"])


def run_config(name: str, task: suite.Task, seed: int) -> dict[str, Any]:
    """Tune in one run; where it diverges, what was best until then counts."""
    options = dict(CONFIGS[name])
    inner_steps = options.setdefault("inner_steps", INNER_STEPS)
    rounds = task.updates // inner_steps
    method = options.get("method")
    if callable(method):
        options["method"] = method()
    if "travel" in options:
        options["outer_optimizer"] = options.pop("travel")(rounds)
    if "schedule" in options:
        factor = options.pop("schedule")
        options["outer_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: factor(min(1.0, (done + 1) / rounds))
        )
    if "warmup" in options:
        options["warmup"] = round(options["warmup"] * rounds)
    valid = task.valid.larger(options.pop("valid_batch", 1))
    train: Any = task.train
    settings = {
        "inner_optimizer": task.inner_optimizer,
        "steps": rounds,
        "evaluate_every": max(1, rounds // EVALUATIONS),
        "progress": False,
        "seed": seed,
    }
    if "order" in options:
        made = task.inner_optimizer or suite.adam(1e-3)
        first = options.pop("order")
        for name in ("inner_optimizer", "response_optimizer"):
            options[name] = variants.in_turn(made, int(name != first))
        options["inner_steps"] = 2 * inner_steps
        train = variants.Twice(task.train)
    try:
        solution = bilevel.solve(task.problem, train, valid, **(settings | options))
    except bilevel.DivergenceError as error:
        assert error.solution is not None
        solution = error.solution
    net = copy.deepcopy(task.problem.module)
    assert net is not None
    if solution.best is not None:
        net.load_state_dict(solution.best.state_dict)
    rows = [row for row in solution.history.rows if "validation_loss" in row]
    return {
        "valid": mean_loss(task, net, task.valid),
        "test": mean_loss(task, net, task.test),
        "history": [[int(row["round"]), round(row["validation_loss"], 5)] for row in rows],
        "stopped": solution.stopped,
        "hyper": plain_numbers(solution.hyper),
    }


def plain_numbers(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Numbers and lists of them, with four digits, for JSON."""

    def rounded(value: Any) -> Any:
        return [rounded(part) for part in value] if isinstance(value, list) else float(f"{value:.4g}")

    return {name: rounded(value.tolist()) for name, value in values.items()}


def digest(*, plain: bool = False) -> str:
    """Of the sources of the tasks, and of the library unless training is plain; a report tells code apart by it."""
    here, library = Path(__file__).resolve().parent, Path(bilevel.__file__).parent
    files = [*(() if plain else sorted(library.rglob("*.py"))), here / "tasks.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def run(config: str, name: str, seed: int, roots: suite.Roots) -> dict[str, Any]:
    """One run, in a process of its own or not.

    Returns:
        What is written to the file; with ``error`` instead of losses where something went wrong.
    """
    torch.set_num_threads(1)
    key = {"config": config, "task": name, "seed": seed}
    try:
        task = suite.make(name, seed, roots)
        started, used = time.perf_counter(), time.process_time()
        result = (run_plain if config in PLAIN else run_config)(config, task, seed)
    except Exception:
        return key | {"error": traceback.format_exc()}
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    return key | {"seconds": round(seconds, 2), "cpu": round(cpu, 2), "code": CODE[config in PLAIN]} | result


CODE = digest(), digest(plain=True)


def sweep(jobs: list[tuple[str, str, int]], out: Path, workers: int, roots: suite.Roots) -> int:
    """Run what is not in the file yet.

    Args:
        jobs: Configuration, task and seed of each run.
        out: The file of results.
        workers: Processes, of one thread each.
        roots: Data folders.

    Returns:
        How many runs failed.
    """
    done = {(row["config"], row["task"], row["seed"]) for row in read(out)} if out.exists() else set()
    left = [job for job in jobs if job not in done]
    print(f"{len(jobs) - len(left)} runs are there, {len(left)} to go.", flush=True)
    failed = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("a", encoding="utf-8") as file,
        ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        for count, future in enumerate(as_completed([pool.submit(run, *job, roots) for job in left]), 1):
            row = future.result()
            title = f"[{count}/{len(left)}] {row['config']} {row['task']} {row['seed']}"
            if "error" in row:
                failed += 1
                print(f"{title}: FAILED\n{row['error']}", flush=True)
                continue
            file.write(json.dumps(row) + "\n")
            file.flush()
            stopped = "" if row["stopped"] == "steps" else f"  {row['stopped']}"
            losses = f"valid {row['valid']:.4f}  test {row['test']:.4f}"
            print(f"{title}: {losses}  {row['seconds']:.1f} s  {row['hyper']}{stopped}", flush=True)
    return failed


def read(path: Path) -> list[dict[str, Any]]:
    """The results in a file; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: skipped a line that is not whole.", file=sys.stderr)
    return rows


EXPLANATION = """\
Excess: (log loss − log best) / (log fixed − log best) on a task and seed, where best is the configuration with the
lowest mean log loss on the task. 0 is as good as the best, 1 as bad as fixed. To be robust, the two logarithms in the
denominator are means over seeds, their difference counts as at least {floor}, an excess above {cap} as {cap}.
ratio is exp(mean log(loss / fixed)); rank is the mean over tasks and seeds, among the configurations with all runs.
± is the standard error of the difference to {reference}, paired: over tasks in the first table, over seeds in the
second.
"""
FLOOR, CAP = 0.05, 2.0
Losses = dict[str, dict[str, dict[int, float]]]


def report(rows: list[dict[str, Any]], score: str) -> str:
    """The tables: configurations over all tasks, by task, and with each task left out.

    Args:
        rows: Results.
        score: ``"valid"`` or ``"test"``.

    Returns:
        Text.

    Raises:
        ValueError: If no task has runs of ``fixed``.
    """
    logs: Losses = {}
    for row in rows:
        logs.setdefault(row["config"], {}).setdefault(row["task"], {})[row["seed"]] = math.log(row[score])
    names = [task for task in suite.BUILT_IN | suite.REAL if task in logs.get("fixed", {})]
    if not names:
        raise ValueError("there are no runs of the configuration fixed, to which losses are compared: run it first.")
    wanted = {task: set(logs["fixed"][task]) for task in names}
    whole = [c for c, of in logs.items() if all(wanted[task] <= set(of.get(task, ())) for task in names)]
    excess = relative(logs, names, wanted, whole)
    codes = sorted({row["code"] for row in rows if row["config"] not in PLAIN})
    lines = [EXPLANATION.format(floor=FLOOR, cap=CAP, reference=REFERENCE)]
    lines.append(f"Losses: {score}. Tasks: {len(names)}; seeds: {min(map(len, wanted.values()))} or more.")
    if len(codes) > 1:
        lines.append(f"CAUTION: these results come from different code: {', '.join(codes)}.")
    short = [f"{config} ({sum(map(len, of.values()))} runs)" for config, of in logs.items() if config not in whole]
    if short:
        lines += textwrap.wrap(f"Left out, for runs are missing: {', '.join(short)}.", 120)
    order = sorted(whole, key=lambda config: mean(mean(excess[config][task].values()) for task in names))
    lines += ["", *overall(rows, logs, excess, names, order), "", *by_task(excess, names, order)]
    candidates = [config for config in order if config not in PLAIN]
    if len(names) > 2 and len(candidates) > 1:
        lines += ["", *left_out(excess, names, candidates)]
    for reference in (REFERENCE, "base"):
        lines += ["", *against(logs, reference)]
    return "\n".join(lines)


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean."""
    return statistics.fmean(list(values))


def error(values: list[float]) -> float:
    """The standard error of a mean; NaN of a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def relative(logs: Losses, names: list[str], wanted: Mapping[str, set[int]], whole: list[str]) -> Losses:
    """The excess of each run, as ``EXPLANATION`` defines it."""
    excess: Losses = {config: {} for config in whole}
    for task in names:
        seeds = sorted(wanted[task])
        best = min(whole, key=lambda config: mean(logs[config][task][seed] for seed in seeds))
        gain = mean(logs["fixed"][task][seed] - logs[best][task][seed] for seed in seeds)
        for config in whole:
            excess[config][task] = {
                seed: min(CAP, (logs[config][task][seed] - logs[best][task][seed]) / max(gain, FLOOR)) for seed in seeds
            }
    return excess


def overall(rows: list[dict[str, Any]], logs: Losses, excess: Losses, names: list[str], order: list[str]) -> list[str]:
    """One line per configuration, best first."""
    ranks: dict[str, list[float]] = {config: [] for config in order}
    for task in names:
        for seed in excess["fixed"][task]:
            losses = {config: logs[config][task][seed] for config in order}
            for config, loss in losses.items():
                below = sum(other < loss for other in losses.values())
                ties = sum(other == loss for other in losses.values())
                ranks[config].append(1 + below + (ties - 1) / 2)
    lines = [
        f"{'configuration':<22}{'excess':>8}{'±':>7}{'worst':>7}{'ratio':>8}{'rank':>7}{'time':>8}{'diverged':>10}"
    ]
    for config in order:
        values = [mean(excess[config][task].values()) for task in names]
        spread = math.nan
        if REFERENCE in order:
            spread = error([
                value - mean(excess[REFERENCE][task].values()) for value, task in zip(values, names, strict=True)
            ])
        ratio = math.exp(mean(mean(logs[config][t][s] - logs["fixed"][t][s] for s in excess[config][t]) for t in names))
        mine = [row for row in rows if row["config"] == config]
        lines.append(
            f"{config:<22}{mean(values):8.3f}{spread:7.3f}{max(values):7.2f}{ratio:8.3f}{mean(ranks[config]):7.1f}"
            f"{mean(row['seconds'] for row in mine):6.1f} s{sum(row['stopped'] == 'diverged' for row in mine):10d}"
        )
    return lines


def against(logs: Losses, reference: str) -> list[str]:
    """How much worse than the reference a configuration is, over all runs that both have."""
    lines = [f"{'mean log(loss / loss of ' + reference + ')':<48}{'±':>4}{'runs':>9}{'worse':>8}"]
    ours = logs.get(reference, {})
    for config, of in logs.items():
        pairs = [of[t][s] - ours[t][s] for t in of for s in of[t] if s in ours.get(t, {})]
        if config != reference and len(pairs) > 2:
            worse = sum(value > 0 for value in pairs)
            lines.append(f"{config:<34}{mean(pairs):+10.3f}{error(pairs):8.3f}{len(pairs):9d}{worse:8d}")
    return lines


def by_task(excess: Losses, names: list[str], order: list[str]) -> list[str]:
    """The excess on each task, and the standard error of its difference to the reference."""
    width = max(12, *(len(name) + 1 for name in names))
    lines = [f"{'excess by task':<22}" + "".join(f"{name:>{width}}" for name in names)]
    for config in order:
        cells = []
        for task in names:
            values = excess[config][task]
            paired = [value - excess[REFERENCE][task][s] for s, value in values.items()] if REFERENCE in excess else []
            cells.append(f"{mean(values.values()):.2f} ±{error(paired):.2f}".rjust(width))
        lines.append(f"{config:<22}" + "".join(cells))
    return lines


def left_out(excess: Losses, names: list[str], candidates: list[str]) -> list[str]:
    """For each task, the configuration that the other tasks choose, and what it scores on this one."""

    def score(config: str, chosen: Iterable[str]) -> float:
        return mean(mean(excess[config][task].values()) for task in chosen)

    choice = min(candidates, key=lambda config: score(config, names))
    lines = [
        f"Leave one task out. Chosen by all tasks: {choice}.",
        f"{'task left out':<16}{'chosen by the others':<24}{'excess':>8}{'of all':>8}{'best':>8}  best configuration",
    ]
    table = []
    for task in names:
        chosen = min(candidates, key=lambda c: score(c, [other for other in names if other != task]))
        best = min(candidates, key=lambda c: score(c, [task]))
        table.append([score(config, [task]) for config in (chosen, choice, best)])
        cells = "".join(f"{value:8.3f}" for value in table[-1])
        lines.append(f"{task:<16}{chosen:<24}{cells}  {best}")
    lines.append(f"{'mean':<40}" + "".join(f"{mean(column):8.3f}" for column in zip(*table, strict=True)))
    return lines


def listing(names: list[str]) -> str:
    """Tasks and configurations, in words."""
    lines = ["tasks (* needs --data)"]
    for name, maker in (suite.BUILT_IN | suite.REAL).items():
        lines.append(f"  {name:<16}{'*' if name in suite.REAL else ' '} {(maker.__doc__ or '').splitlines()[0]}")
    lines += ["configurations", *(f"  {name:<22} {describe(name)}".rstrip() for name in names)]
    return "\n".join(lines)


def describe(name: str) -> str:
    """The settings of a configuration."""
    if name in PLAIN:
        trials, length = PLAIN[name]
        return f"plain training, {trials} × {length:g} of the updates"
    parts = []
    for key, value in CONFIGS[name].items():
        shown = value() if key == "method" and callable(value) else value
        if isinstance(shown, partial):
            shown = f"{shown.func.__name__}({', '.join(f'{k}={v}' for k, v in shown.keywords.items())})"
        elif key == "travel":
            shown = "Adam"
        parts.append(f"{key}={shown}")
    return ", ".join(parts)


def chosen(given: str | None, known: list[str], what: str) -> list[str]:
    """The names in a list with commas; all by default."""
    names = known if given is None else given.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"--{what}: {', '.join(unknown)} is not known; see --list.")
    return names


def main() -> None:
    """Run, list or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print tasks and configurations")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print the tables of these results")
    parser.add_argument("--score", choices=("valid", "test"), default="test", help="the loss of the report")
    parser.add_argument("--out", type=Path, help="file of results, one line of JSON per run")
    parser.add_argument("--configs", help="names, with commas (default: all)")
    parser.add_argument("--tasks", help="names, with commas (default: all for which there is data)")
    parser.add_argument("--seeds", type=int, default=3, help="runs per configuration and task")
    parser.add_argument("--first-seed", type=int, default=0, help="the smallest seed")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="folders of real data")
    options = parser.parse_args()
    names = chosen(options.configs, NAMES, "configs")
    if options.list:
        print(listing(names))
        return
    if options.report:
        rows = [row for path in options.report for row in read(path)]
        rows = rows if options.tasks is None else [row for row in rows if row["task"] in options.tasks.split(",")]
        rows = rows if options.configs is None else [row for row in rows if row["config"] in {"fixed", *names}]
        print(report(rows, options.score))
        return
    if options.out is None:
        parser.error("give --out FILE, --list or --report FILE.")
    roots = tuple(options.data)
    known = [*suite.BUILT_IN, *(suite.REAL if roots else ())]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    # Seeds first: a sweep that is stopped early has all configurations on the same seeds.
    jobs = [(c, task, seed) for seed in seeds for task in chosen(options.tasks, known, "tasks") for c in names]
    if sweep(jobs, options.out, options.workers, roots):
        sys.exit(1)


if __name__ == "__main__":
    main()
