"""Tables that are made when the pages are built: from the methods themselves and from the files in docs/results."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from torch import nn

import bilevel

if TYPE_CHECKING:
    from sphinx.application import Sphinx

Batch = tuple[torch.Tensor, torch.Tensor]
Strength = Callable[[bilevel.Model, Any, torch.Tensor], torch.Tensor]


def list_table(header: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> list[str]:
    """Write a table as reStructuredText.

    Returns:
        Its lines.
    """
    lines = [".. list-table::", "   :header-rows: 1", f"   :class: {kind or 'plain'}", ""]
    for row in [header, *rows]:
        lines += [f"   {'*' if i == 0 else ' '} - {cell}".rstrip() for i, cell in enumerate(row)]
    return lines


# What each method can tune


def penalty(model: bilevel.Model, hyper: Any, x: torch.Tensor) -> torch.Tensor:
    """Weight decay, as an example of what has a derivative in the training loss.

    Returns:
        Predictions, and what is added to their loss.
    """
    return bilevel.functional.mse_loss(model(x), x) + hyper["value"] * bilevel.l2(model.params)


def mask(model: bilevel.Model, hyper: Any, x: torch.Tensor) -> torch.Tensor:
    """Dropout with a tuned rate.

    Returns:
        The loss of the predictions.
    """
    return bilevel.functional.mse_loss(model(bilevel.functional.dropout(x, hyper["value"])), x)


def count(model: bilevel.Model, hyper: Any, x: torch.Tensor) -> torch.Tensor:
    """An integer, which is rounded.

    Returns:
        A loss that depends on it.
    """
    return bilevel.functional.mse_loss(model(x), x) * (1 + hyper["value"])


TUNABLE: dict[str, tuple[Strength, Callable[[], bilevel.Hyper]]] = {
    "penalties, label smoothing, weights of classes or examples": (penalty, lambda: bilevel.positive(0.1)),
    "dropout rates, augmentation": (mask, lambda: bilevel.interval(0.0, 0.9, init=0.3)),
    "integers": (count, lambda: bilevel.integer(0, 4, init=2)),
}
DECOUPLED = "decoupled weight decay (AdamW)"


def tunes(method: bilevel.Method, loss: Strength | None, hyper: Callable[[], bilevel.Hyper] | None) -> bool:
    """Make an outer step on a small problem; without a loss, the hyperparameter is a decoupled weight decay.

    Returns:
        Whether the method takes it.
    """
    torch.manual_seed(0)
    net, batch = nn.Sequential(nn.Linear(2, 2)), torch.randn(4, 2)

    def valid_loss(model: bilevel.Model, hyper: Any, x: torch.Tensor) -> torch.Tensor:
        return bilevel.functional.mse_loss(model(x), x)

    if hyper is None or loss is None:
        decay = bilevel.regularizers.WeightDecay(net, "one", decoupled=True, init=0.1)
        problem = bilevel.Problem(net, inner_loss=valid_loss, outer_loss=valid_loss, hyper=decay.hyper)
    else:
        problem = bilevel.Problem(net, inner_loss=loss, outer_loss=valid_loss, hyper={"value": hyper()})
    try:
        solver = bilevel.Solver(problem, method=method, inner_optimizer=lambda w: torch.optim.Adam(w, lr=0.01))
        steps = solver.response.unrolled_steps
        if not steps:
            solver.inner_step(batch)
        solver.outer_step([batch] * steps if steps else batch, batch)
    except ValueError:
        return False
    return True


def can_tune() -> list[str]:
    """Try every method on every kind of hyperparameter.

    Returns:
        A table: methods that take the same share a row.
    """
    rows: dict[tuple[bool, ...], list[str]] = {}
    for name, method in bilevel.METHODS.items():
        found = tuple(tunes(method, *case) for case in TUNABLE.values())
        rows.setdefault((*found, tunes(method, None, None)), []).append(f"``{name}``")
    table = [[", ".join(names), *("yes" if good else "no" for good in found)] for found, names in rows.items()]
    return list_table(["method", *TUNABLE, DECOUPLED], table)


# What each method costs


def measured(folder: Path) -> dict[str, tuple[str, str]]:
    """Read the time and the memory of training with each method, over plain training.

    Returns:
        Both by name of the method, from ``overhead.txt`` and ``hypergradients.txt``.

    Raises:
        ValueError: If one of the files reads otherwise than expected.
    """
    overhead = (folder / "overhead.txt").read_text(encoding="utf-8")
    found = {}
    for name, time, memory in re.findall(r"^MLP +(\w+) +([\d.]+) +([\d.]+) +[\d.]+$", overhead, re.MULTILINE):
        found[name] = (time, memory)
    section = (folder / "hypergradients.txt").read_text(encoding="utf-8").partition("784-256-10 MLP")[2]
    names = {
        "implicit_cg": ("bilevel CG, Gauss-Newton", 5),
        "implicit_neumann": ("bilevel Neumann", 5),
        "implicit_nystrom": ("bilevel Nystrom", 5),
        "unrolled": ("bilevel unrolled", 20),
        "unrolled_forward": ("bilevel unrolled, forward", 20),
    }
    for name, (row, steps) in names.items():
        line = re.search(rf"^{row} +([\d.]+) +[\d.]+ MB +([\d.]+) x", section, re.MULTILINE)
        if line is None:
            raise ValueError(f"docs/results/hypergradients.txt has no row {row!r} for the MLP.")
        each = float(line[1]) / steps + (0 if name.startswith("unrolled") else 1)
        found[name] = (f"{each:.1f}", line[2])
    if not {"stn", "centered_stn", "delta_stn"} <= set(found):
        raise ValueError("docs/results/overhead.txt has no rows for the self-tuning networks on the MLP.")
    return found


def costs(folder: Path) -> list[str]:
    """Tabulate what training costs with each method.

    Returns:
        A table.
    """
    rows = [[f"``{name}``", *cells] for name, cells in measured(folder).items() if name in bilevel.METHODS]
    return list_table(["method", "time", "memory"], rows)


def methods() -> list[str]:
    """Tabulate the settings of each name.

    Returns:
        A table.
    """
    rows = []
    for name, method in bilevel.METHODS.items():
        assert dataclasses.is_dataclass(method)
        values = {field.name: (getattr(method, field.name), field.default) for field in dataclasses.fields(method)}
        changed = [f"{key}={value!r}" for key, (value, default) in values.items() if value != default]
        rows.append([
            f"``{name}``",
            f":class:`bilevel.{type(method).__name__}`",
            ", ".join(f"``{c}``" for c in changed),
        ])
    return list_table(["name", "class", "settings that differ from those of the class"], rows)


# Tables of Markdown


def cells(line: str) -> list[str]:
    """Split a row of a Markdown table.

    Returns:
        Its cells.
    """
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def by_task(text: str) -> list[str]:
    """Turn tables with a column for each method into one small table for each row, with a line for each method.

    A row that begins with "paper" becomes a second column of the table above it. So a table of many methods fits on a
    phone.

    Returns:
        Text and tables.
    """
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if not block.startswith("|"):
            lines += [*block.replace("**", "").splitlines(), ""]
            continue
        header, _, *rows = [cells(line) for line in block.splitlines()]
        groups: list[list[list[str]]] = []
        for row in rows:
            if row[0].startswith("paper") and groups:
                groups[-1].append(row)
            else:
                groups.append([row])
        for group in groups:
            columns = zip(header[1:], *(row[1:] for row in group), strict=True)
            filled = [list(column) for column in columns if any(column[1:])]
            lines += list_table([group[0][0], "here", "paper"][: len(group) + 1], filled)
            lines += [""]
    return lines


def as_it_is(text: str) -> list[str]:
    """Keep tables as they are, in small letters on a phone: for a few short columns.

    Returns:
        Text and tables.
    """
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if block.startswith("|"):
            header, _, *rows = [cells(line) for line in block.splitlines()]
            lines += list_table(header, rows, "dense")
        else:
            lines += block.splitlines()
        lines += [""]
    return lines


class Table(SphinxDirective):
    """Insert what one of the functions above returns: ``.. made-table:: can-tune``."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"file": directives.path, "whole": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Make the table.

        Returns:
            The nodes it is parsed to.
        """
        folder = Path(self.env.srcdir) / "results"
        kind = self.arguments[0]
        if kind == "can-tune":
            lines = can_tune()
        elif kind == "methods":
            lines = methods()
        elif kind == "costs":
            lines = costs(folder)
            for name in ("overhead.txt", "hypergradients.txt"):
                self.env.note_dependency(str(folder / name))
        elif kind == "markdown":
            file = folder / self.options["file"]
            self.env.note_dependency(str(file))
            lines = (as_it_is if "whole" in self.options else by_task)(file.read_text(encoding="utf-8"))
        else:
            raise self.error(f"made-table knows can-tune, methods, costs and markdown, not {kind!r}.")
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source=f"made-table {kind}"), self.content_offset, container)
        return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive.

    Returns:
        What Sphinx wants to know about an extension.
    """
    app.add_directive("made-table", Table)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
