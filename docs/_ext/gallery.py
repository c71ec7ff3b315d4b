"""The parts of the gallery that sphinx-gallery lets us choose: order, figures, and how a script is run."""

from __future__ import annotations

import os
import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

ORDER = (
    "mlp",
    "cnn",
    "transformer",
    "class_weights",
    "noisy_labels",
    "few_shot",
    "best_response",
    "drift",
    "noise",
    "diagnose",
    "own_method",
    "long_run",
    "processes",
)
"""The scripts, ``tutorials/plot_NAME.py``, in the order in which they are shown."""


class Order:
    """Sorts file names as ``ORDER`` says."""

    def __init__(self, folder: str) -> None:
        """Take the folder, of which there is one."""

    def __call__(self, name: str) -> int:
        """The place of a script.

        Returns:
            Its index.
        """
        return ORDER.index(Path(name).stem.removeprefix("plot_"))


def scraper(block: Any, variables: dict[str, Any], conf: dict[str, Any]) -> str:
    """Show the figure that a block of code has made; those of ``bilevel.plotting`` belong to no window.

    Returns:
        Lines of RST.
    """
    figure = variables["example_globals"].get("figure")
    if not isinstance(figure, Figure) or getattr(figure, "shown", False):
        return figure_rst([], conf["src_dir"])
    path = next(variables["image_path_iterator"])
    _save(figure, path, dpi=160)
    figure.shown = True  # type: ignore[attr-defined]
    return figure_rst([path], conf["src_dir"], alt_of(figure))


def alt_of(figure: Figure) -> str:
    """What a figure shows, for those who cannot see it.

    Returns:
        The titles of its panels.
    """
    titles = (axis.get_title(loc="left") or axis.get_title() for axis in figure.axes)
    return "; ".join(title for title in titles if title)


def prepare(conf: dict[str, Any], name: str, when: str) -> None:
    """Before each script: one thread, no progress bars, and no figure files beside the scripts.

    Warnings are shown as the reader would see them, but for the place in the files of this machine.
    """
    if when == "after":
        warnings.filters[:] = _filters  # type: ignore[index]
        warnings.formatwarning = _formatwarning
        return
    torch.set_num_threads(1)
    os.environ |= {"CI": "1", "OMP_NUM_THREADS": "1"}
    warnings.simplefilter("always", UserWarning)
    warnings.formatwarning = in_words  # type: ignore[assignment]
    Figure.savefig = quietly  # type: ignore[method-assign]


def in_words(message: Warning | str, category: type[Warning], *place: object) -> str:
    """A warning without the file and the line.

    Returns:
        Lines that are no longer than the page is wide.
    """
    return textwrap.fill(f"{category.__name__}: {message}", 88) + "\n"


_formatwarning = warnings.formatwarning
_filters = list(warnings.filters)
_save = Figure.savefig


def quietly(figure: Figure, path: Any, **options: Any) -> None:
    """Save a figure, unless a script only names a file."""
    if Path(path).is_absolute():
        _save(figure, path, **options)
