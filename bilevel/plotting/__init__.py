"""One style for all figures: a colour for every method, panels, and the marks that recur.

Needs matplotlib, which is imported when something is drawn. Figures belong to no window: save them, or show them in a
notebook.
"""

from bilevel.plotting.layout import figure, label_rounds, log_axis, mark_best, panels, shade_warmup, style
from bilevel.plotting.palette import color, colors, line, shades, spectrum
from bilevel.plotting.run import schedules

__all__ = [
    "color",
    "colors",
    "figure",
    "label_rounds",
    "line",
    "log_axis",
    "mark_best",
    "panels",
    "schedules",
    "shade_warmup",
    "shades",
    "spectrum",
    "style",
]
