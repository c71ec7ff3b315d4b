"""Where a batch is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from bilevel.arguments import length
from bilevel.rng import Stream


class Feed:
    """The batches of a re-iterable, over and over, drawn inside a random stream.

    Attributes:
        passes: How many times all batches have been given out.
    """

    def __init__(self, name: str, loader: Iterable[Any] | None, stream: Stream) -> None:
        """Feed from ``loader``; None feeds None."""
        self.name = name
        self.loader: Iterable[Any] = [None] if loader is None else loader
        self.stream = stream
        self.passes = 0
        self._length = length(self.loader)
        self._given = 0
        self._iterator: Any = None
        self._start = stream.state_dict()

    def __next__(self) -> Any:
        """The next batch.

        Returns:
            Whatever the loader yields.

        Raises:
            ValueError: If a pass yields no batch.
        """
        with self.stream():
            if self._iterator is None:
                self._start = self.stream.state_dict()
                self._iterator = iter(self.loader)
            for batch in self._iterator:
                self._given += 1
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
        return {"passes": self.passes, "given": self._given, "start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where another feed of the same loader was; leaves the stream somewhere else.

        Raises:
            ValueError: If the loader gives fewer batches.
        """
        self.passes = state["passes"]
        self.stream.load_state_dict(state["start"])
        for index in range(state["given"]):
            next(self)
            if self.passes != state["passes"]:
                raise ValueError(
                    f"checkpoint: the run stopped after batch {state['given']} of {self.name}, which has only "
                    f"{index + 1} now; give the loader of that run."
                )

    def _end_pass(self) -> None:
        self.passes += 1
        self._given = 0
        self._iterator = None
