"""Loggers: callbacks that write the history of a run to where you look at other runs.

``bilevel.solve(..., callbacks=[bilevel.loggers.TensorBoard("runs/first")])``. Each imports its library when it is made,
writes the newest row of the history after every round, and leaves files or a server behind; ``close()`` ends it.
"""

from __future__ import annotations

import csv
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from bilevel.arguments import check_integer
from bilevel.loop import Round

__all__ = ["CSV", "Logger", "MLflow", "TensorBoard", "WandB"]


class Logger(ABC):
    """A callback that writes rows.

    Attributes:
        every: Rounds between two rows; those with a full validation pass are always written.

    Example:
        >>> class Printed(Logger):
        ...     def write(self, event, step, row):
        ...         print(step, sorted(row))
        >>> Printed(every=10).every
        10
    """

    def __init__(self, every: int = 1) -> None:
        """Write every so many rounds."""
        check_integer("every", every, 1)
        self.every = every

    def __call__(self, event: Round) -> None:
        """Write the newest row.

        Args:
            event: What happened.
        """
        if event.index % self.every == 0 or event.validation_loss is not None:
            row = {name: float(value) for name, value in event.row.items() if math.isfinite(value)}
            self.write(event, event.index, row)

    @abstractmethod
    def write(self, event: Round, step: int, row: Mapping[str, float]) -> None:
        """Write a row.

        Args:
            event: What happened.
            step: The round.
            row: Finite numbers by name.
        """

    def close(self) -> None:
        """Write out what is left."""
        return None


@final
class CSV(Logger):
    """A CSV file that grows with the run; columns that come later are added to the file.

    Example:
        >>> import tempfile, torch, bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        ...     hyper={"target": bilevel.real(0.0)},
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.csv"
        ...     solution = bilevel.solve(problem, steps=3, warmup=1, progress=False, callbacks=[CSV(path)])
        ...     header, *rows = path.read_text().splitlines()
        >>> header.split(",")[:4], len(rows)
        (['round', 'seconds', 'inner_loss', 'target'], 3)
    """

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        """Write to this file, from its beginning.

        Args:
            path: The file.
            every: As in :class:`Logger`.
        """
        super().__init__(every)
        self._path = Path(path)
        self._columns: list[str] = []
        self._rows: list[dict[str, float]] = []

    @override
    def write(self, event: Round, step: int, row: Mapping[str, float]) -> None:
        """Append, or write the file anew if there is a new column."""
        self._rows.append(dict(row))
        new = [name for name in row if name not in self._columns]
        self._columns += new
        with self._path.open("w" if new else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(self._rows if new else self._rows[-1:])


@final
class TensorBoard(Logger):
    """A TensorBoard log; hyperparameters are under ``hyper/``.

    Example:
        >>> logger = TensorBoard("runs/first")  # doctest: +SKIP
        >>> bilevel.solve(problem, train, valid, callbacks=[logger])  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        """Write to this folder.

        Args:
            folder: For ``tensorboard --logdir``.
            every: As in :class:`Logger`.
        """
        super().__init__(every)
        _need("TensorBoard", "tensorboard", "tensorboard")
        self._writer = _need("TensorBoard", "torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    @override
    def write(self, event: Round, step: int, row: Mapping[str, float]) -> None:
        """One scalar per column."""
        own = event.solver.problem.space.hyper
        for name, value in row.items():
            if name != "round":
                place = "hyper/" if re.split(r"[\[]", name)[0].removesuffix(".mean") in own else ""
                self._writer.add_scalar(place + name, value, step)
        if event.validation_loss is not None:
            self._writer.flush()

    @override
    def close(self) -> None:
        """Close the file."""
        self._writer.close()


@final
class WandB(Logger):
    """A run of Weights & Biases.

    Example:
        >>> logger = WandB(project="tuning")  # doctest: +SKIP
        >>> bilevel.solve(problem, train, valid, callbacks=[logger])  # doctest: +SKIP
    """

    def __init__(self, run: Any = None, *, every: int = 1, **settings: Any) -> None:
        """Write to a run that is there, or start one.

        Args:
            run: What ``wandb.init`` returned; None calls it.
            every: As in :class:`Logger`.
            settings: Of ``wandb.init``.
        """
        super().__init__(every)
        library = _need("WandB", "wandb", "wandb")
        self._own = run is None
        self._run = library.init(**settings) if run is None else run

    @override
    def write(self, event: Round, step: int, row: Mapping[str, float]) -> None:
        """One call of ``log``."""
        self._run.log(dict(row), step=step, commit=True)

    @override
    def close(self) -> None:
        """Finish the run, if it was started here."""
        if self._own:
            self._run.finish()


@final
class MLflow(Logger):
    """A run of MLflow: the active one, or a new one.

    Example:
        >>> logger = MLflow()  # doctest: +SKIP
        >>> bilevel.solve(problem, train, valid, callbacks=[logger])  # doctest: +SKIP
    """

    def __init__(self, *, every: int = 1, **settings: Any) -> None:
        """Start a run, unless one is active.

        Args:
            every: As in :class:`Logger`.
            settings: Of ``mlflow.start_run``.
        """
        super().__init__(every)
        self._library = _need("MLflow", "mlflow", "mlflow")
        self._own = self._library.active_run() is None
        if self._own:
            self._library.start_run(**settings)

    @override
    def write(self, event: Round, step: int, row: Mapping[str, float]) -> None:
        """One call of ``log_metrics``; brackets in names become dots, which MLflow allows."""
        self._library.log_metrics({re.sub(r"[^\w\-./ ]", ".", name): value for name, value in row.items()}, step=step)

    @override
    def close(self) -> None:
        """End the run, if it was started here."""
        if self._own:
            self._library.end_run()


def _need(logger: str, module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"bilevel.loggers.{logger} needs {package}: pip install {package}.") from error
