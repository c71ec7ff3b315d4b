"""Event logs of runs that look like real ones, made without training."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from bilevel.events import Log

ENVIRONMENT = {"python": "3.11", "torch": "2.13", "bilevel": "0.1", "platform": "Linux", "device": "cpu", "threads": 1}


def write_log(
    path: Path,
    *,
    rounds: int = 200,
    names: tuple[str, ...] = ("decay", "rate"),
    entries: int = 3,
    method: str = "delta_stn",
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    end: str | None = "steps",
    resume: int | None = None,
    warnings: tuple[str, ...] = (),
    every: int = 10,
) -> Path:
    """Write a log: the first name is positive, the second a vector in [0, 1] and the others are real."""
    draw = random.Random(seed)
    log = Log(path)
    hyper = {name: {"low": -math.inf, "high": math.inf, "shape": [], "discrete": False} for name in names}
    hyper[names[0]] |= {"low": 0.0}
    if len(names) > 1:
        hyper[names[1]] |= {"low": 0.0, "high": 1.0, "shape": [entries]}
    start = {"version": 1, "time": "2026-01-02T03:04:05+00:00", "method": method, "environment": ENVIRONMENT}
    log.write("start", start | {"settings": {"seed": seed, "inner_steps": 5, **(settings or {})}, "hyper": hyper})
    state = {name: draw.uniform(-1, 1) for name in names}
    seconds, index, resumed = 0.0, 0, resume is None
    while index < rounds:
        index += 1
        share = index / rounds
        seconds += 0.05 * draw.uniform(0.8, 1.3)
        row: dict[str, float] = {"round": index, "seconds": seconds}
        row["inner_loss"] = 2.2 * math.exp(-4 * share) + 0.1 + 0.05 * draw.random()
        values = {names[0]: 1e-3 * math.exp(4 * share + 0.05 * state[names[0]])}
        if len(names) > 1:
            values |= {
                f"{names[1]}[{entry}]": 0.1
                + 0.6 * (1 - math.exp(-3 * share)) * (entry + 1) / entries
                + 0.01 * draw.random()
                for entry in range(entries)
            }
        values |= {name: 2 * share * math.sin(3 * share + place) for place, name in enumerate(names[2:])}
        warm = index <= rounds // 10
        if not warm:
            row["outer_loss"] = 1.9 * math.exp(-3 * share) + 0.3 + 0.3 * share**3 + 0.08 * draw.random()
            row["hypergradient_norm"] = 0.1 * math.exp(draw.gauss(-2 * share, 0.5))
            row["method.response_norm"] = 1 + share + 0.1 * draw.random()
        row |= values
        for column in values:
            row[f"scale.{column}"] = 0.3 + 0.5 * math.exp(-share)
            if not warm:
                row[f"signal.{column}"] = 3 * math.exp(-2 * share) + draw.gauss(0, 1)
        if index % every == 0:
            row["validation_loss"] = 1.9 * math.exp(-3 * share) + 0.3 + 0.25 * share**3 + 0.01 * draw.random()
        log.write("round", row | {"memory": int(4.1e8 + 2e7 * draw.random())})
        if index % (4 * every) == 0:
            log.write("checkpoint", {"round": index, "seconds": 0.01 * (1 + draw.random()), "bytes": 1_234_567})
        if warnings and index == rounds // 2:
            for message in warnings:
                log.write("warning", {"message": message})
        if not resumed and index == resume:
            resumed = True
            index = resume // (4 * every) * 4 * every
            log.write("resume", {"round": index, "time": "2026-01-02T04:00:00+00:00"})
    if end is not None:
        log.write("end", {"stopped": end, "round": index})
    log.flush()
    log.close()
    return path
