"""Render formulas to MathML when the pages are built, so that they read without a network and without JavaScript."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

NAMESPACE = "http://www.w3.org/1998/Math/MathML"
logger = logging.getLogger(__name__)

# What the converter accepts and renders wrongly: arguments without braces, and a text below a brace.
MISREAD = re.compile(r"\\[a-z]*frac\s*[^{\sa-z]|\\underbrace.*_")
ACCENTS = set("\u02c9\u00af\u02d9~\u02c6^\u2192")  # bar, dot, tilde, hat, arrow
ENTITY = re.compile(r"&(?!(?:lt|gt|amp);)\w+;")  # which HTML knows, and XML does not


def render(node: nodes.math | nodes.math_block) -> str:
    """Convert one formula; a failure is a warning, which fails the build.

    Returns:
        A ``math`` element.
    """
    block = isinstance(node, nodes.math_block)
    if MISREAD.search(node.astext()):
        logger.warning("the converter would misread the formula %r: use braces", node.astext(), location=node)
    try:
        return indices_beside(tex2mathml(node.astext(), as_block=block))
    except (MathError, TypeError, ValueError, SyntaxError) as error:
        logger.warning("cannot convert the formula %r to MathML: %s", node.astext(), error, location=node)
        return f"<code>{html.escape(node.astext())}</code>"


def indices_beside(text: str) -> str:
    """Move the index of a letter with an accent, which the converter puts below the letter, to its side.

    Returns:
        The formula.
    """
    ElementTree.register_namespace("", NAMESPACE)
    root = ElementTree.fromstring(ENTITY.sub(lambda found: html.unescape(found[0]), text))
    for both in root.iter(f"{{{NAMESPACE}}}munderover"):
        letter, index, accent = both
        if accent.text in ACCENTS:
            both.tag = f"{{{NAMESPACE}}}msub"
            both[:] = [ElementTree.Element(f"{{{NAMESPACE}}}mover", accent="true"), index]
            both[0][:] = [letter, accent]
    return ElementTree.tostring(root, encoding="unicode")


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in running text.

    Raises:
        nodes.SkipNode: Always, as the content is already written.
    """
    translator.body.append(translator.starttag(node, "span", "", CLASS="math notranslate"))
    translator.body.append(f"{render(node)}</span>")
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula, with its number if it has a label.

    Raises:
        nodes.SkipNode: Always, as the content is already written.
    """
    translator.body.append(translator.starttag(node, "div", CLASS="math notranslate"))
    translator.body.append(render(node))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({get_node_equation_number(translator, node)})')
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer.

    Returns:
        What Sphinx wants to know about an extension.
    """
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
