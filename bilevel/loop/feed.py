"""Where a batch is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from bilevel.arguments import length
from bilevel.checkpoint import CheckpointError, check_form
from bilevel.checkpoint.layout import Count, Each, Flag, Free, Maybe, Plain, Text
from bilevel.loop.sources import (
    FUNCTIONS,
    SEED,
    form_of_global,
    form_of_state,
    generators,
    get_global,
    keeps_what_it_draws,
    numbers,
    options,
    restore,
    set_global,
    set_numbers,
    state_of,
)
from bilevel.parallel import Shared
from bilevel.rng import Stream
from bilevel.solver import DivergenceError
from bilevel.solver.code import digest, sample

PAUSES = (0.0, 1.0, 5.0, None)
"""Seconds before workers are started once more."""


class Feed:
    """The batches of a re-iterable, over and over, drawn inside a random stream.

    Attributes:
        passes: How many times all batches have been given out.
        doubt: Why the rest of the present pass may be another one than it would have been, if it may.
        ends: Whether the run is about to end by a signal, which the workers of a loader may have got, too.
        lost: Whether it had to give up for that reason.
    """

    ends: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, name: str, loader: Iterable[Any] | None, stream: Stream, *, kept: bool = False) -> None:
        """Feed from ``loader``; None feeds None.

        Args:
            name: Of the argument.
            loader: Batches, or the share of this process in them.
            stream: To draw from.
            kept: Remember what :meth:`state_dict` needs.
        """
        self.name = name
        self.loader: Iterable[Any] = [None] if loader is None else loader
        self.stream = stream
        self.passes = 0
        self._kept = kept
        self._source = loader.loader if isinstance(loader, Shared) else self.loader
        self._stateful = kept and name == "train" and _is_stateful(self.loader)
        self._length = length(self.loader)
        self._first_numbers, self._moving = self._numbers(), set[str]()
        self._given = 0
        self._iterator: Any = None
        self._start: dict[str, Any] = self._now()
        self._first: str | None = None
        self._batches = ""
        self._options = options(self._source) if kept else {}
        self._draws = self._random = False
        self.doubt: str | None = None
        self.lost = False

    def __next__(self) -> Any:
        """The next batch.

        Returns:
            Whatever the loader yields.
        """
        given, batches = self._given, self._batches
        try:
            return self._draw()
        except Exception as error:
            if not self._lost_workers(error):
                raise
            self.lost = not self._kept
            if self.lost:
                raise

        def again() -> Any:
            self._start_again(given, batches)
            return self._draw()

        return self.insist(again)

    def insist(self, action: Callable[[], Any]) -> Any:
        """Do what needs workers, again if they got the signal that ends the run, as may the server that forks them.

        Args:
            action: Starts workers of its own.

        Returns:
            What it returns.
        """
        for pause in PAUSES:
            try:
                return action()
            except Exception as error:
                if not self._lost_workers(error):
                    raise
                self.lost = pause is None
                if pause is None:
                    raise
                time.sleep(pause)

    def _lost_workers(self, error: Exception) -> bool:
        """Whether an error may come from workers that got the signal that ends the run."""
        return self.ends() and getattr(self._source, "num_workers", 0) > 0 and not isinstance(error, DivergenceError)

    def _draw(self) -> Any:
        with self.stream():
            if self._iterator is None:
                self._start, self._batches, self._random = self._now(), "", False
                self._iterator = iter(Fresh(self.loader))
            watched = self._kept and self._given > 0 and not self._random
            before = [torch.get_rng_state(), *get_global()] if watched else []
            for batch in self._iterator:
                self._given += 1
                self._random = self._random or (
                    watched and digest(before) != digest([torch.get_rng_state(), *get_global()])
                )
                self._draws = self._draws or (self._random and keeps_what_it_draws(self._source))
                if self._kept and self._given == 1:
                    self._first = digest(batch)
                if self._kept:
                    self._batches = digest([self._batches, sample(batch)])
                if self._given == self._length:
                    # The pass is over, unless the length was wrong.
                    more = next(self._iterator, self)
                    if more is self:
                        self._end_pass()
                    else:
                        self._iterator = chain([more], self._iterator)
                return batch
            if self._given == 0:
                raise ValueError(f"{self.name} yielded no batch in pass {self.passes + 1}: give at least one batch.")
            self._end_pass()
        return next(self)

    def state_dict(self) -> dict[str, Any]:
        """Where it is.

        Returns:
            Plain types and tensors.
        """
        state: dict[str, Any] = {"passes": self.passes, "given": self._given, "start": self._start}
        state |= {"first": self._first, "options": self._options, "draws": self._draws}
        state |= {"batches": self._batches, "random": self._random}
        state["generators"] = [state_of(generator) for generator in generators(self._source)]
        now = dict.fromkeys(self._first_numbers) | self._numbers()  # None: it is no number any more
        state["numbers"] = {"first": self._first_numbers, "now": now, "moving": self._moved()}
        if self._stateful:
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def check(self, path: str, state: Any, *, changed: bool = False) -> None:
        """Refuse what no feed could have saved.

        Args:
            path: Where it is, for the message.
            state: Anything.
            changed: Whether the data may be other ones.

        Raises:
            ValueError: At the first difference.
        """
        numbers = Each(Maybe(Count(None, None)))
        form: dict[str, Any] = {"passes": Count(), "given": Count(), "first": Maybe(Text()), "batches": Text()}
        form |= {"draws": Flag(), "random": Flag(), "options": Each(Plain()), "generators": Each(Free(), list)}
        form |= {"numbers": {"first": numbers, "now": numbers, "moving": Each(Text(), list)}}
        own_stream = self.stream.state_dict()
        start = {name: Free() for name in self._now()} | {"generators": Each(Free(), list), "numbers": numbers}
        form |= {
            "start": start | {"global": form_of_global()} | {"stream": Each(Free(), list) if changed else own_stream}
        }
        has = "loader" in state if changed and isinstance(state, dict) else self._stateful
        check_form(path, state, form | ({"loader": Free()} if has else {}))
        if state["first"] is None and (state["passes"] or state["given"]):
            raise ValueError(f"{path} has made {state['passes']} passes, but has no first batch.")
        first, now, moving = (state["numbers"][name] for name in ("first", "now", "moving"))
        if not first.keys() <= now.keys() or not {name for name in first if first[name] != now[name]} <= {*moving}:
            raise ValueError(f"{path}['numbers'] does not say what became of all numbers.")
        own = [form_of_state(generator) for generator in generators(self._source)]
        for place, saved in (("generators", state), ("start", state["start"])):
            if not changed and len(saved["generators"]) == len(own):
                check_form(f"{path}[{place!r}]", saved["generators"], own)

    def load_state_dict(self, state: dict[str, Any], *, changed: bool = False) -> str | None:
        """Go to where another feed of the same loader was; leaves the random streams somewhere else.

        Args:
            state: Of :meth:`state_dict`.
            changed: Whether the data may be other ones: then a new pass begins.

        Returns:
            What is wrong with the loader, if it gives other batches; None if nothing is.

        Raises:
            CheckpointError: If a loader does not take the state that it is said to have had.
        """
        self.passes, self._first, self._draws = state["passes"], state["first"], state["draws"]
        other = self._other_generators(state)
        problem = self._other_options(state["options"]) or self._other_numbers(state["numbers"]) or other
        self._moving = set(state["numbers"]["moving"])
        if problem is not None and not changed:
            return problem
        reseeded = problem is not None and state["options"].get(SEED) != self._options.get(SEED)
        problem = None
        if reseeded or other is not None:
            self.begin_pass(state["passes"])
            self._set_numbers(state["numbers"]["now"])
            return None
        if self._stateful and "loader" in state:
            try:
                self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            except Exception as error:
                raise CheckpointError(
                    f"checkpoint: the state of {self.name} does not fit its loader ({type(error).__name__}: {error})."
                ) from error
            self._given, self._start = state["given"], state["start"]
            if self._given:
                with self.stream():
                    self._iterator = iter(self.loader)
        elif state["first"] is not None:
            problem = self._read_again(state)
        if problem is not None and changed:
            self._given, self._iterator, self.passes = 0, None, state["passes"]
        for generator, saved in zip(generators(self._source), state["generators"], strict=False):
            restore(generator, saved)
        self._set_numbers(state["numbers"]["now"])
        if self._draws and self._given and not self._stateful:
            self.doubt = (
                f"{self.name} draws from the random numbers of torch, numpy or random in the middle of a pass, which "
                "cannot be repeated: the rest of this pass may be another one than without the stop. Give it a "
                "generator of its own, or state_dict and load_state_dict."
            )
        return problem

    def begin_pass(self, passes: int) -> None:
        """Begin a new pass.

        Args:
            passes: How many were made before.
        """
        self.passes, self._given, self._iterator = passes, 0, None

    def _other_options(self, before: dict[str, Any]) -> str | None:
        """What changed about the loader."""
        for name in {**before, **self._options}:
            old, new = before.get(name, "nothing"), self._options.get(name, "nothing")
            if old != new:
                values = "is another function" if name in FUNCTIONS else f"was {old}, this call has {new}"
                values = "is another one" if name == "content" else values
                return f"{self.name}: {name} {values}"
        return None

    def _other_numbers(self, before: dict[str, Any]) -> str | None:
        """What changed about the attributes of data set and sampler."""
        for name, old in before["first"].items():
            new = self._first_numbers.get(name, old)
            if old != new and name not in before["moving"]:
                return f"{self.name}: {name} was {old}, this call has {new}"
        for name in self._first_numbers.keys() - before["first"].keys():
            return f"{self.name}: {name} was nothing, this call has {self._first_numbers[name]}"
        return None

    def _other_generators(self, before: dict[str, Any]) -> str | None:
        """What changed about the random generators."""
        own = [form_of_state(generator) for generator in generators(self._source)]
        for saved in (before["start"]["generators"], before["generators"]):
            if len(saved) != len(own):
                return f"{self.name}: number of random generators was {len(saved)}, this call has {len(own)}"
            try:
                check_form("generators", saved, own)
            except ValueError:
                return f"{self.name}: a random generator is of another kind"
        return None

    def _numbers(self) -> dict[str, int]:
        return numbers(self._source) if self._kept and not self._stateful else {}

    def _moved(self) -> list[str]:
        """The names of those numbers that are others than they were at first."""
        now = self._numbers()
        return sorted(self._moving | {name for name, first in self._first_numbers.items() if now.get(name) != first})

    def _set_numbers(self, values: dict[str, int | None]) -> None:
        moved = self._moved()
        set_numbers(self._source, {n: value for n, value in values.items() if n in moved and value is not None})

    def _start_again(self, given: int, batches: str) -> None:
        """Begin the present pass anew, with other workers, and go to where it was."""
        before = self._now()  # a loader whose workers are gone has drawn nothing since
        self._go_to(self._start)
        self._given, self._iterator = 0, None
        for _ in range(given):
            self._draw()
        if given:
            self._go_to(before)
            self._batches = batches

    def _go_to(self, states: dict[str, Any]) -> None:
        """Set all random numbers that a pass depends on to what :meth:`_now` found."""
        self.stream.load_state_dict(states["stream"])
        if isinstance(self.loader, Shared):
            self.loader.order.load_state_dict(states["order"])
        set_global(states["global"])
        for generator, saved in zip(generators(self._source), states["generators"], strict=True):
            restore(generator, saved)
        self._set_numbers(states["numbers"])

    def _read_again(self, state: dict[str, Any]) -> str | None:
        """Draw the batches of the pass that was under way; of one that was over, the first one."""
        self._go_to(state["start"])
        for index in range(max(1, state["given"])):
            next(self)
            if index == 0 and self._first != state["first"]:
                return f"{self.name}: the first batch of pass {state['passes'] + 1} is another one"
            if self.passes != state["passes"] and index + 1 < state["given"]:
                return f"{self.name}: the run stopped after batch {state['given']}, and it has only {index + 1} now"
        if state["given"] and not state["random"] and self._batches != state["batches"]:
            return f"{self.name}: a batch after the first one of pass {state['passes'] + 1} is another one"
        if self.passes != state["passes"] and state["given"]:
            return f"{self.name}: the run stopped after batch {state['given']}, which is the last one now"
        if not state["given"]:
            self._given, self._iterator, self.passes = 0, None, state["passes"]
        return None

    def _now(self) -> dict[str, Any]:
        if not self._kept:
            return {}
        own = [state_of(generator) for generator in generators(self._source)]
        order = {"order": self.loader.order.state_dict()} if isinstance(self.loader, Shared) else {}
        found = {"stream": self.stream.state_dict(), "global": get_global(), "generators": own, **order}
        return found | {"numbers": self._numbers()}

    def _end_pass(self) -> None:
        self.passes += 1
        self._given = 0
        self._iterator = None


@final
class Fresh:
    """A loader whose workers start anew in every pass.

    Those of ``persistent_workers=True`` go on drawing random numbers where they were, which no later process can
    repeat; and two passes at the same time, as a validation pass in the middle of one, would share them.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Wrap the loader."""
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """A pass.

        Returns:
            An iterator.
        """
        loader: Any = self._loader
        if type(loader).__iter__ is DataLoader.__iter__ and loader.persistent_workers and loader.num_workers > 0:
            fresh: Iterator[Any] = loader._get_iterator()
            return fresh
        return iter(loader)


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
