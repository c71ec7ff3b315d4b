"""The rounds of one call of :func:`bilevel.solve`: what happens in each, what is recorded, and how to go on later."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from bilevel.checkpoint import check_form
from bilevel.checkpoint.layout import Count, Free, Maybe, Number, Within
from bilevel.history import History
from bilevel.interrupts import Waiting
from bilevel.loop.feed import Feed
from bilevel.loop.signal import Signal
from bilevel.loop.solution import Best, Round, Solution
from bilevel.loop.sources import form_of_global, get_global, set_global
from bilevel.parallel import divided, whole
from bilevel.solver import DivergenceError, OuterStep, Solver
from bilevel.solver.forms import of_buffers
from bilevel.solver.state import live, streams


@final
@dataclass(kw_only=True)
class Run:
    """The state of one call of :func:`solve`; ``whole`` says whether it is between two rounds."""

    solver: Solver
    train: Feed
    valid: Feed
    valid_loader: Iterable[Any] | None
    inner_steps: int
    outer_steps: int
    accumulate: int
    warmup: int
    evaluate_every: int | None
    schedule_every: str
    history: History = field(default_factory=History)
    best: Best | None = None
    stale: int = 0
    stopped: str | None = None
    rounds: int = 0
    started: float = field(default_factory=time.perf_counter)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    whole: bool = True
    best_buffers: dict[str, Tensor] = field(default_factory=dict)
    signal: Signal = field(init=False)
    others: tuple[int, list[Any]] | None = None

    def __post_init__(self) -> None:
        """Start to gather the signal of the hypergradients."""
        self.signal = Signal(self.solver.vector.detach())

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
        self.whole = False
        index, passes = self.rounds + 1, self.train.passes
        warm = index <= self.warmup
        losses: list[Tensor] = []
        batch, outer = None, None
        for _ in range(self.steps_per_round if warm else self.inner_steps):
            *others, batch = (next(self.train) for _ in range(self.accumulate))
            self._add(losses, self.solver.inner_step(*others, batch))
            self._advance("inner")
        if self.rounds == 0:
            self.solver.first_look.reads_of(self.solver.vector.detach(), self.valid_loader)
        if warm:
            self.solver.check()
            self.history.append(self._row(index, losses, None))
        unrolled, dropped = self.solver.response.unrolled_steps, self.solver.bad_steps
        for _ in range(0 if warm else self.outer_steps):
            batches = [next(self.train) for _ in range(unrolled)] if unrolled else batch
            outer = self.solver.outer_step(batches, next(self.valid))
            self._advance("outer")
            if self.solver.bad_steps > dropped:
                outer, dropped = None, self.solver.bad_steps
            else:
                losses += outer.inner_losses
                self.signal.add(outer.hypergradient)
            self.history.append(self._row(index, losses, outer))
        new_passes = self.train.passes - passes
        for _ in range({"epoch": new_passes, "round": 1, "step": 0}[self.schedule_every]):
            self.solver.schedule()
        if new_passes if self.evaluate_every is None else index % self.evaluate_every == 0:
            self._evaluate(index)
        self.rounds = index
        self.whole = True
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

    def _advance(self, level: str) -> None:
        """Advance the schedulers of a level after one of its steps, if that is asked for."""
        if self.schedule_every == "step":
            with Waiting():
                self.solver.optimization.schedule(None, levels=(level,))

    def state_dict(self) -> dict[str, Any]:
        """All that a later call needs to go on, beside the history.

        Returns:
            Plain types and live tensors, all finite.

        Raises:
            DivergenceError: As :meth:`bilevel.Solver.check`.
        """  # noqa: DOC502
        self.solver.check()
        best = None if self.best is None else {n: v for n, v in vars(self.best).items() if n != "state_dict"}
        if best is not None and self.solver.shards is not None:
            best["params"] = {name: whole(value).cpu() for name, value in best["params"].items()}
        return {
            **self.of_processes(),
            "solver": live(self.solver),
            "bad_steps": self.solver.guard.state_dict(),
            "fingerprint": self.fingerprint,
            "feeds": self._feeds(),
            "global": get_global(),
            "signal": self.signal.state_dict(),
            "best": None if best is None else best | {"buffers": self.best_buffers},
            "stale": self.stale,
            "rounds": self.rounds,
            "seconds": self.seconds,
        }

    def of_processes(self) -> dict[str, Any]:
        """What each of several processes has for itself: random streams, and where it is in its data.

        All of them have to call it. A second call after the same round is answered without the others.

        Returns:
            By the name ``ranks``, one entry per process; nothing if there is one only.
        """
        group = self.solver.group
        if group is None:
            return {}
        if self.others is None or self.others[0] != self.rounds:
            own = {"streams": streams(self.solver), "feeds": self._feeds(), "global": get_global()}
            self.others = self.rounds, group.gather(own)
        return {"ranks": self.others[1]}

    @property
    def can_save(self) -> bool:
        """Whether the state can be saved now, also if other processes are somewhere else."""
        if self.solver.shards is not None:  # which takes all processes
            return False
        return self.whole and (self.solver.group is None or (self.others is not None and self.others[0] == self.rounds))

    def _feeds(self) -> dict[str, Any]:
        return {feed.name: feed.state_dict() for feed in (self.train, self.valid)}

    def check(self, state: Any, rows: list[dict[str, float]]) -> None:
        """Refuse what this run could not have saved, beside its fingerprint, its feeds and its solver.

        Args:
            state: Of :meth:`state_dict`.
            rows: Of the history; none if it is lost.

        Raises:
            ValueError: At the first difference.
        """
        problem = self.solver.problem
        levels = {level: Count() for level in ("inner", "outer")}
        reached = {level: Count(-1) for level in levels}
        form = dict.fromkeys(("fingerprint", "feeds", "solver"), Free()) | {"rounds": Count(), "seconds": Number(0.0)}
        form |= {"bad_steps": {"dropped": Count(), "in_a_row": levels, "reached": reached}}
        form |= {"global": form_of_global(), "signal": self.signal.form}
        form |= {"stale": Count(), "log": Free()}
        best: dict[str, Any] = {
            "round": Count(1),
            "validation_loss": Number(),
            "inner_loss": Number(nan=True, inf=True),
        }
        own = self.solver.hyper
        best["hyper"] = {name: Within(own[name], h.low, h.high) for name, h in problem.space.hyper.items()}
        best["params"] = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in problem.params.items()}
        best["buffers"] = of_buffers(self.solver.response.inner.buffer_values())
        check_form("state", state, form | {"best": Maybe(best)} | ({"ranks": Free()} if "ranks" in state else {}))
        rounds = state["rounds"]
        if rows and rows[-1].get("round") != rounds:
            raise ValueError(f"state['rounds'] is {rounds}, but its log ends with round {rows[-1].get('round')}.")
        round_of_best = 0 if state["best"] is None else state["best"]["round"]
        if state["stale"] > rounds or round_of_best > rounds:
            raise ValueError(f"state has rounds {rounds}, stale {state['stale']} and a best round {round_of_best}.")
        losses = {row["round"]: row["validation_loss"] for row in rows if "validation_loss" in row}
        if losses and round_of_best == 0:
            raise ValueError("state['best'] is None, but its log has validation losses.")
        if state["best"] is not None and losses.get(round_of_best, loss := state["best"]["validation_loss"]) != loss:
            raise ValueError(f"state['best'] has a validation loss of {loss:g}, its log {losses[round_of_best]:g}.")

    def load_state_dict(self, state: dict[str, Any], rows: list[dict[str, float]]) -> None:
        """Go on from there; the feeds are there already.

        Args:
            state: Of :meth:`state_dict`.
            rows: Of the history.
        """
        self.solver.load_state_dict(state["solver"])  # and with it the streams that the feeds moved
        self.solver.guard.load_state_dict(state["bad_steps"])
        set_global(state["global"])
        self.history.rows = rows
        self.signal.load_state_dict(state["signal"], self.solver.to_device)
        if state["best"] is not None:
            best = self.solver.to_device(state["best"])
            self.best_buffers = best.pop("buffers")
            if self.solver.shards is not None:
                best["params"] = {n: divided(v, self.solver.problem.params[n]) for n, v in best["params"].items()}
            self.best = Best(**best, state_dict=self.solver.problem.state_dict(best["params"], self.best_buffers))
        self.stale, self.rounds = state["stale"], state["rounds"]
        self.started = time.perf_counter() - state["seconds"]

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
            signal=self.solver.problem.space.split(self.signal.largest()),
            stopped=self.stopped or "",
            solver=self.solver,
        )

    def return_to_good(self) -> None:
        """After a divergence: if the outer loss is not finite where the solver is, go back to where it was."""
        try:
            self.solver.evaluate(self.valid_loader)
        except DivergenceError:
            self.solver.rollback()

    def _add(self, losses: list[Tensor], loss: Tensor) -> None:
        """Keep the loss of a step, unless it was left out."""
        if self.solver.on_nan == "raise" or bool(loss.isfinite()):
            losses.append(loss)

    def _evaluate(self, index: int) -> None:
        loss = self.valid.insist(lambda: self.solver.evaluate(self.valid_loader))
        row = self.history.rows[-1]
        row["validation_loss"] = loss
        self.solver.schedule(loss)
        self.stale += index > self.warmup  # before, nothing has been tuned
        if self.best is None or loss < self.best.validation_loss:
            self.stale = 0
            params = self.solver.params
            self.best_buffers = {n: v.clone() for n, v in self.solver.response.inner.buffer_values().items()}
            self.best = Best(
                round=index,
                validation_loss=loss,
                inner_loss=row.get("inner_loss", math.nan),
                hyper=dict(self.solver.hyper),
                params=params,
                state_dict=self.solver.problem.state_dict(params, self.best_buffers),
            )

    def _row(self, index: int, losses: list[Tensor], outer: OuterStep | None) -> dict[str, float]:
        """A row of the history, read from the device in one go."""
        space = self.solver.problem.space
        columns = {"inner_loss": torch.stack(losses).mean()} if losses else {}
        if self.solver.on_nan != "raise":
            columns["bad_steps"] = torch.tensor(float(self.solver.bad_steps))
        if outer is not None:
            columns |= {"outer_loss": outer.loss, "hypergradient_norm": outer.hypergradient.norm()}
            columns |= {f"method.{name}": value for name, value in outer.report.items()}
        columns |= space.columns(self.solver.hyper)
        if self.solver.response.scale is not None:
            scale = space.split(self.solver.response.scale().detach())
            columns |= {f"scale.{name}": value for name, value in space.columns(scale).items()}
        if outer is not None:
            signal = space.split(self.signal.lately())
            columns |= {f"signal.{name}": value for name, value in space.columns(signal).items()}
        values = torch.stack([value.to(self.solver.vector) for value in columns.values()]).tolist()
        return {"round": index, "seconds": self.seconds, **dict(zip(columns, values, strict=True))}
