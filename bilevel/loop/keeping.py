"""What a run leaves on the disk: its log, and its checkpoints."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any, final

from bilevel.checkpoint import CheckpointError, CheckpointWarning, Store
from bilevel.checkpoint.encoding import encode
from bilevel.checkpoint.lock import Lock
from bilevel.events import Log, memory, now, prefix
from bilevel.loop.run import Run
from bilevel.solver import DivergenceError


@final
class Keeper:
    """Writes the log and the checkpoints of a run. A write that fails is a warning, and is tried again later."""

    def __init__(
        self, checkpoint: Path | None, log: Path | None, *, keep: int, every: float | None, follows: bool = False
    ) -> None:
        """Take the files.

        Args:
            checkpoint: Where to keep the run, if anywhere.
            log: Where to write the log; beside the checkpoint by default.
            keep: How many checkpoints to keep.
            every: Seconds between two checkpoints at most, beside those of validation passes.
            follows: Whether another process writes, to which this one hands its part.

        Raises:
            CheckpointError: If a file cannot be used.
        """
        self.store = None if checkpoint is None else Store(checkpoint, keep)
        self._lock: Lock | None = None
        self._every = every
        self._follows = follows
        self._saved_at = time.perf_counter()
        self._saved_round = -1
        self._due = False
        self._rows = 0
        self._early: list[str] | None = []  # warnings before the first line
        self._from: int | None = None  # how long the log was at the checkpoint that the run goes on from
        self.log: Log | None = None
        place = checkpoint.with_name(f"{checkpoint.name}.jsonl") if checkpoint is not None and log is None else log
        self._place = place
        try:
            if place is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(place)
                self.log = Log(place)
        except (OSError, ValueError) as error:
            self.close()
            why = f"log: {place} cannot be written ({error.strerror})." if isinstance(error, OSError) else str(error)
            raise CheckpointError(why) from error

    def load(self, *, resume: bool) -> dict[str, Any] | None:
        """The state to go on from.

        Args:
            resume: Whether to go on at all.

        Returns:
            None if there is none.
        """
        if (self._lock is not None and not self._lock.effective) or (self.store and not self.store.locked):
            self.warn(
                f"checkpoint: the file system of {self._place} knows no locks; see to it that no second run uses it."
            )
        if self.store is None:
            return None
        if not resume:
            self.store.anew()
            return None
        state, problem = self.store.load()
        if problem is not None:
            self.warn(problem)
        return state

    def history(self, state: dict[str, Any], *, lenient: bool) -> list[dict[str, float]]:
        """The rows that belong to a state.

        Args:
            state: Of a checkpoint.
            lenient: Go on without them if the log is lost.

        Returns:
            The rows.

        Raises:
            CheckpointError: If the log is not what it was.
        """
        assert self._place is not None
        try:
            self._from = state["log"]["bytes"]
            return prefix(self._place, state["log"]).rows
        except ValueError as error:
            if not lenient:
                raise CheckpointError(f"checkpoint: {error}") from error
            self.warn(f"{error} The history starts anew.")
            self._from = None
            return []

    def begin(self, run: Run, content: dict[str, Any], *, resumed: bool) -> None:
        """Write the first line, and see whether the state of the run can be kept at all.

        Args:
            run: The run.
            content: Of the first line.
            resumed: Whether it goes on from a checkpoint.
        """
        self._rows, self._saved_round = len(run.history), run.rounds if resumed else -1
        if self._follows:
            run.state_dict()
        if self.store is not None:
            encode(run.state_dict())
        if self.log is not None:
            if not resumed or self.log.size == 0:
                self.log.write("start", content)
            if resumed:
                self.log.write("resume", {"round": run.rounds, "bytes": self._from, "time": now()})
            for message in self._early or []:
                self.log.write("warning", {"message": message})
            self._early = None
            self._flush()

    def after_round(self, run: Run, *, save: bool) -> None:
        """Write the new rows, and a checkpoint if asked to.

        Args:
            run: Between two rounds.
            save: Write a checkpoint, too.
        """
        if self.log is not None:
            used = memory(run.solver.problem.device)
            for row in run.history.rows[self._rows :]:
                self.log.write("round", row | {"memory": used})
            self._rows = len(run.history)
            self._flush()
        if save and (self.store is not None or self._follows):
            self._due = False
            self.save(run)

    def wants(self, save: bool, *, ends: bool) -> bool:
        """Whether it is time for a checkpoint.

        While the last one is still on its way to the disk, a new one waits for the end of a later round, and training
        does not wait at all.

        Args:
            save: Whether this round is one to keep.
            ends: Whether it is the last one.

        Returns:
            The answer of the process that writes; False in others.
        """
        if self.store is None:
            return False
        over = self._every is not None and time.perf_counter() - self._saved_at >= self._every
        self._due = self._due or save or over
        return self._due and (ends or not self.store.busy)

    def save(self, run: Run) -> None:
        """Write a checkpoint, unless there is one of this round."""
        if self._follows and self._saved_round != run.rounds:
            run.state_dict()
            self._saved_round = run.rounds
        if self.store is None or self.log is None or self._saved_round == run.rounds:
            return
        self._saved_at = time.perf_counter()
        try:
            self.log.flush()
            state = run.state_dict() | {"log": self.log.position()}
            seconds, size = self.store.save(state, self.log.sync, last=run.stopped is not None)
        except DivergenceError:
            raise
        except Exception as error:  # also what the state_dict of a loader raises: nothing is worth the run
            self._failed(error)
            return
        self._saved_round = run.rounds
        self.log.write("checkpoint", {"round": run.rounds, "seconds": seconds, "bytes": size})
        self._flush()

    def wait(self, run: Run | None = None) -> None:
        """Wait for the disk; a checkpoint that failed is tried once more.

        Args:
            run: Between two rounds, if it is to be tried again.
        """
        for again in (True, False):
            try:
                if self.store is not None:
                    self.store.wait()
                return
            except Exception as error:
                self._failed(error)
                if run is not None and again and run.solver.shards is None:  # else it takes all processes
                    self.save(run)

    def end(self, content: dict[str, Any]) -> None:
        """Write the last line."""
        if self.log is not None:
            self.log.write("end", content)
            self._flush()

    def close(self) -> None:
        """Give the files back."""
        if self.store is not None:
            try:
                self.store.close()
            except Exception as error:
                self._failed(error)
        if self.log is not None:
            self.log.close()
        if self._lock is not None:
            self._lock.release()

    def _flush(self) -> None:
        if self.log is not None:
            try:
                if self.log.restore():
                    self.warn(f"log: {self._place} was removed or replaced by somebody else, and has been put back.")
                self.log.flush()
            except OSError as error:
                warnings.warn(
                    f"log: {self._place} cannot be written ({error.strerror or error}); the run goes on, and it is "
                    "tried again after the next round.",
                    CheckpointWarning,
                    stacklevel=4,
                )

    def _failed(self, error: Exception) -> None:
        self._saved_round = -1
        assert self.store is not None
        why = (error.strerror or str(error)) if isinstance(error, OSError) else f"{error}" or type(error).__name__
        self.warn(f"checkpoint: {self.store.path} cannot be written ({why}); the run goes on, and it is tried again.")

    def warn(self, message: str) -> None:
        """Warn, in the log as well.

        Args:
            message: What went wrong.
        """
        if self._early is not None:
            self._early.append(message)
        elif self.log is not None:
            self.log.write("warning", {"message": message})
        warnings.warn(message, CheckpointWarning, stacklevel=4)
