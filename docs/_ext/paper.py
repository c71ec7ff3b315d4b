"""The map of the paper: what ``reference/paper.toml`` says, as pages that link to the API, and back."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

Entry = dict[str, Any]


def entries(file: Path) -> list[Entry]:
    """Read the map.

    Returns:
        What it says about each label.
    """
    found: list[Entry] = tomllib.loads(file.read_text(encoding="utf-8"))["entry"]
    return found


def labels(entry: Entry) -> list[str]:
    """The labels of an entry.

    Returns:
        The first is that of the thing itself.
    """
    return [entry["label"], *entry.get("also", [])]


def link(name: str) -> str:
    """A link to the page of a public or inner name.

    Returns:
        A role; names of the applications have no page.
    """
    return f":any:`{name}`" if name.startswith("bilevel.") else f"``{name}``"


def forth(found: list[Entry], kind: str) -> list[str]:
    """From the paper to the code.

    Returns:
        A list of definitions.
    """
    lines: list[str] = []
    for entry in (entry for entry in found if entry["kind"] == kind):
        lines += [", ".join(f"``{label}``" for label in labels(entry)), f"   {entry['what']}", ""]
        for title, cells in (
            ("Code", [link(name) for name in entry.get("code", [])]),
            ("Test", [f"``{test}``" for test in entry.get("tests", [])]),
            ("Run", [f"``{command.strip()}``" for command in entry.get("run", "").split(";") if command.strip()]),
        ):
            lines += [f"   {title}: {cell}\n" for cell in [", ".join(cells)] if cells]
    return "\n".join(lines).splitlines()


def back(found: list[Entry], column: str) -> list[str]:
    """From the code, or from the tests, to the paper.

    Returns:
        A list of definitions: names are too long for a table.
    """
    where: dict[str, list[str]] = defaultdict(list)
    for entry in found:
        for name in entry.get(column, []):
            where[name] += [label for label in labels(entry) if label not in where[name]]
    lines: list[str] = []
    for name in sorted(where):
        shown = link(name) if column == "code" else f"``{name}``"
        lines += [shown, f"   {', '.join(f'``{label}``' for label in where[name])}", ""]
    return lines


class PaperMap(SphinxDirective):
    """``.. paper-map:: equation``, or ``:back: code``."""

    optional_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"back": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Make one of both.

        Returns:
            The nodes it is parsed to.
        """
        file = Path(self.env.srcdir) / "reference" / "paper.toml"
        self.env.note_dependency(str(file))
        found = entries(file)
        lines = back(found, self.options["back"]) if "back" in self.options else forth(found, self.arguments[0])
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source=str(file)), self.content_offset, container)
        return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive.

    Returns:
        What Sphinx wants to know about an extension.
    """
    app.add_directive("paper-map", PaperMap)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
