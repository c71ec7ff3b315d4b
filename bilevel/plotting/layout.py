"""Empty figures in one style, and the marks that recur in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bilevel.plotting.palette import OTHERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WARMUP = "0.92"
BEST = "0.25"
PARAMETERS = {
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.labelcolor": "0.2",
    "axes.edgecolor": "0.4",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "0.88",
    "grid.linewidth": 0.6,
    "xtick.color": "0.3",
    "ytick.color": "0.3",
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "lines.linewidth": 1.7,
    "lines.markersize": 3.5,
    "lines.solid_capstyle": "round",
    "legend.fontsize": 8.5,
    "legend.title_fontsize": 8.5,
    "legend.frameon": True,
    "legend.framealpha": 0.8,
    "legend.edgecolor": "none",
    "legend.borderpad": 0.3,
    "legend.labelspacing": 0.3,
    "legend.handlelength": 1.8,
    "figure.constrained_layout.w_pad": 0.06,
    "figure.constrained_layout.h_pad": 0.06,
    "savefig.dpi": 150.0,
}


@contextmanager
def style() -> Iterator[None]:
    """Fonts, grid and lines of the package, inside a ``with`` or for a function: ``@bilevel.plotting.style()``.

    Yields:
        Nothing. The settings of matplotlib are as before afterwards.

    Raises:
        ImportError: If matplotlib is not installed.

    Example:
        >>> import matplotlib
        >>> with style():
        ...     matplotlib.rcParams["axes.spines.top"]
        False
    """
    try:
        import matplotlib
        from matplotlib.rcsetup import cycler
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'bilevel[plot]'.") from error
    parameters: Any = {**PARAMETERS, "axes.prop_cycle": cycler(color=OTHERS)}
    with matplotlib.rc_context(parameters):
        yield


def figure(rows: int, columns: int, *, size: tuple[float, float] = (3.4, 2.5), **options: Any) -> tuple[Figure, Any]:
    """An empty figure in this style, which no window shows.

    Args:
        rows: Of panels.
        columns: Of panels.
        size: Width and height of a panel, in inches.
        options: Of ``Figure.subplots``, such as ``sharex=True``.

    Returns:
        The figure and its axes, an array of ``rows`` by ``columns``.

    Example:
        >>> drawn, axes = figure(2, 3)
        >>> axes.shape
        (2, 3)
    """
    with style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        made = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        FigureCanvasAgg(made)
        return made, made.subplots(rows, columns, squeeze=False, **options)


def panels(
    count: int, *, most: int = 4, size: tuple[float, float] = (3.4, 2.5), **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with a number of panels, in rows of about the same length.

    Args:
        count: How many.
        most: In one row.
        size: As in :func:`figure`.
        options: As in :func:`figure`.

    Returns:
        The figure and its axes.

    Example:
        >>> drawn, axes = panels(5)
        >>> [axis.get_subplotspec().get_geometry()[:2] for axis in axes] == [(2, 3)] * 5
        True
    """
    rows = math.ceil(count / most)
    made, axes = figure(rows, math.ceil(count / rows), size=size, **options)
    for axis in axes.flat[count:]:
        axis.remove()
    return made, list(axes.flat[:count])


def log_axis(axis: Axes, *, least: float = 3.0) -> None:
    """Make the vertical axis of positive values logarithmic, with readable numbers also within one decade.

    Args:
        axis: To change; its lines are there already.
        least: The smallest ratio of its ends, so that a constant does not look like a change.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> figure, axis = plt.subplots()
        >>> _ = axis.plot([1, 2, 3], [1e-4, 1e-3, 1e-2])
        >>> log_axis(axis)
        >>> axis.get_yscale()
        'log'
        >>> plt.close(figure)
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high / low < least:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(least), middle * math.sqrt(least)
        axis.set_ylim(low, high)
    decades = math.log10(high / low)
    steps: tuple[float, ...] = (1.0, 2.0, 5.0) if decades < 2 else (1.0,)
    if decades < 0.7:
        steps = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.yaxis.set_major_locator(LogLocator(subs=steps, numticks=8))
    axis.yaxis.set_major_formatter(FuncFormatter(_plain if 1e-3 <= low and high < 1e4 else _scientific))
    axis.yaxis.set_minor_formatter(NullFormatter())


def label_rounds(axes: Sequence[Axes], label: str = "round") -> None:
    """Name the horizontal axis below the lowest panel of each column; its ticks are whole numbers.

    Args:
        axes: Those of one figure.
        label: The name.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> figure, axis = plt.subplots()
        >>> label_rounds([axis])
        >>> axis.get_xlabel()
        'round'
        >>> plt.close(figure)
    """
    from matplotlib.ticker import MaxNLocator

    lowest: dict[int, int] = {}
    places = [axis.get_subplotspec() for axis in axes]
    for place in places:
        if place is not None:
            lowest[place.colspan.start] = max(lowest.get(place.colspan.start, 0), place.rowspan.start)
    for axis, place in zip(axes, places, strict=True):
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if place is None or lowest[place.colspan.start] == place.rowspan.start:
            axis.set_xlabel(label)
            axis.tick_params(labelbottom=True)


def shade_warmup(axis: Axes, rounds: float, *, label: str | None = "warm-up") -> None:
    """Shade the rounds in which the hyperparameters did not move.

    Args:
        axis: To draw on.
        rounds: How many; none are not shaded.
        label: For the legend.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> figure, axis = plt.subplots()
        >>> shade_warmup(axis, 10)
        >>> len(axis.patches)
        1
        >>> plt.close(figure)
    """
    if rounds > 0:
        axis.axvspan(0, rounds, color=WARMUP, linewidth=0, zorder=0, label=label)


def mark_best(axis: Axes, round_: float | None, *, label: str | None = "best round") -> None:
    """Mark the round of the lowest validation loss by a vertical line.

    Args:
        axis: To draw on.
        round_: Which; None is not marked.
        label: For the legend.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> figure, axis = plt.subplots()
        >>> mark_best(axis, 42)
        >>> len(axis.lines)
        1
        >>> plt.close(figure)
    """
    if round_ is not None:
        axis.axvline(round_, color=BEST, linestyle=(0, (1, 1.5)), linewidth=1.1, zorder=1.5, label=label)


def _plain(value: float, _: int | None) -> str:
    return f"{value:g}"


def _scientific(value: float, _: int | None) -> str:
    """Such as 3e-5."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
