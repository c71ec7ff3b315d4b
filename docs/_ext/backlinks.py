"""Lead the links from the highlighted source back to the right place.

Sphinx takes one name of the module for all objects of a file. Here some objects of a file are public, ``bilevel.CG``,
and others are inside, ``bilevel.linear_solvers.base.Solve``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

LINK = re.compile(r'(<a class="viewcode-back" href="(?:\.\./)*)([\w/]+)(\.html#)([\w.]+)"')


def mend(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Replace each place that its page does not have by the one whose name ends alike."""
    if not pagename.startswith("_modules/"):
        return
    places: dict[str, dict[str, str]] = {}
    for name, entry in app.env.domains.python_domain.objects.items():
        places.setdefault(entry.docname, {})[name] = entry.node_id  # of an alias, that of the name on the page

    def replaced(link: re.Match[str]) -> str:
        start, page, middle, name = link.groups()
        known = places.get(page, {})
        parts = name.split(".")
        ends = ["." + ".".join(parts[first:]) for first in range(1, len(parts))]
        found = [name] if name in known else [other for end in ends for other in known if other.endswith(end)]
        return f'{start}{page}{middle}{known[found[0]] if found else name}"'

    context["body"] = LINK.sub(replaced, context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Look at every page before it is written.

    Returns:
        What Sphinx wants to know about an extension.
    """
    app.connect("html-page-context", mend)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
