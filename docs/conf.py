"""Configuration of the Sphinx pages: ``sphinx-build --fail-on-warning -b html docs docs/_build/html``."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import bilevel

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "bilevel"
author = "The bilevel authors"
copyright = author
version = release = bilevel.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest", "sphinx.ext.viewcode"]
extensions += ["sphinx_gallery.gen_gallery", "backlinks", "mathml", "paper", "tables"]
exclude_patterns = ["_build", "results"]
nitpicky = True
# Types of other projects: linking to their pages would need the network.
nitpick_ignore = [
    ("py:class", "bilevel.structure.respond.R"),  # a type variable
    ("py:class", "bilevel.parallel.shards.Network"),
    ("py:class", "bilevel.parallel.shards.Shards"),  # inside
    *(("py:exc", name) for name in ("NoExamples", "NoRule")),  # of bilevel.responding
    *(("py:class", name) for name in ("Term", "bilevel.layouts.layout.Layout", "bilevel.structure.slopes.Held")),
]
nitpick_ignore_regex = [("py:.*", r"(abc|collections|contextlib|pathlib|numpy|torch|Tensor|Path|Figure|Axes)(\..*)?")]

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"bilevel {version}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_extra_path = ["llms.txt"]
html_copy_source = False
html_show_sphinx = False

# The scripts in tutorials/ become the pages in gallery/. -D plot_gallery=0 does not run them.
sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "gallery",
    "within_subsection_order": "gallery.Order",
    "image_scrapers": ("gallery.scraper",),
    "reset_modules": ("gallery.prepare",),
    "reset_modules_order": "both",
    "capture_repr": (),
    "thumbnail_size": (640, 480),
    "last_notebook_cell": "figure",
    "min_reported_time": 3600,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "abort_on_example_error": True,
}


def public_names() -> set[str]:
    """What the API page must document.

    Returns:
        The full name of everything in ``bilevel.__all__``, and of what only ``bilevel.functional`` has.
    """
    top = {f"bilevel.{name}" for name in bilevel.__all__}
    functions = {f"bilevel.functional.{name}" for name in bilevel.functional.__all__ if name not in bilevel.__all__}
    return top | functions


WITHOUT_EXAMPLE = {"bilevel.structure.Respond"}
"""Shown by the example of what makes it."""


def has_example(name: str) -> bool:
    """Whether the docstring of a class or function shows how it is used.

    Returns:
        Also True for what has no docstring of its own, such as data.
    """
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute, None)
    return not (inspect.isclass(found) or inspect.isfunction(found)) or ">>>" in (inspect.getdoc(found) or "")


def check_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn, and so fail the build, if an API page lacks a public name, or the name an example."""
    from sphinx.util import logging

    objects = env.domains.python_domain.objects
    documented = {name for name, entry in objects.items() if entry.docname.startswith("api/") and not entry.aliased}
    kinds = {"class", "function", "exception"}
    for name in sorted(public_names() - documented):
        logging.getLogger(__name__).warning(
            "the public name %s is missing from the API pages", name, location="api/index"
        )
    for name in sorted(documented - WITHOUT_EXAMPLE):
        if objects[name].objtype in kinds and not has_example(name):
            logging.getLogger(__name__).warning(
                "%s has no example in its docstring", name, location=objects[name].docname
            )


def setup(app: Sphinx) -> None:
    """Check the API pages once all pages are read."""
    app.connect("env-check-consistency", check_public_names)
