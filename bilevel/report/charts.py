"""Charts in HTML: the lines are an SVG that stretches to any width, the numbers beside it are text and do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape

import numpy as np

from bilevel.report.colors import Colors
from bilevel.report.numbers import Axis, apart, axis_of, number
from bilevel.report.thinning import Array, thin, thin_band

SIDE = 10_000
"""Width and height of a drawing in its own units."""
DOTS = 40
"""So many points of a line at most are marked by dots."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: For the legend; without one it is not in it.
        x: Ascending.
        y: As many.
        color: Such as ``#0072B2``.
        width: In pixels.
        faint: Whether it is background to others.
        steps: Whether a value holds until the next.
        dots: Whether points are marked, if they are few.
        dashed: Whether it is broken, to tell it from another of the same colour.
    """

    label: str
    x: Array
    y: Array
    color: str
    width: float = 1.6
    faint: bool = False
    steps: bool = False
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Band:
    """The area between two lines."""

    x: Array
    low: Array
    high: Array
    color: str


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: What it shows.
        lines: Of it.
        bands: Below the lines.
        log: Whether the vertical axis is logarithmic; None for what suits the values.
        low: The lower end of the vertical axis, if that is fixed.
        high: The upper end.
        best: The rounds to mark, each with a colour.
        warmup: The rounds up to here are shaded.
        noise: The values between -this and this are shaded.
        shown: How a value is written.
        x_label: What the horizontal axis counts.
        x_range: Its ends; those of the lines by default.
        last: Whether the legend has the last value of every line.
        wide: Whether it takes a whole row.
    """

    title: str
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    log: bool | None = None
    low: float = math.nan
    high: float = math.nan
    best: Sequence[tuple[float, str]] = ()
    warmup: float = 0.0
    noise: float = 0.0
    shown: Callable[..., str] = field(default=number)
    x_label: str = "round"
    x_range: tuple[float, float] | None = None
    last: bool = True
    wide: bool = False

    def html(self, colors: Colors, buckets: int) -> str:
        """Draw it.

        Args:
            colors: Those of the page; new ones are added.
            buckets: How many steps of the horizontal axis can be told apart.

        Returns:
            A ``figure``.
        """
        ends = self.x_range or self._ends()
        across = Axis(float(ends[0]), float(ends[1] if ends[1] > ends[0] else ends[0] + 1))
        up = self._vertical()
        pieces = [self._shades(across, up), self._grid(across, up)]
        pieces += [_band(band, across, up, colors, buckets) for band in self.bands]
        pieces += [
            f'<path class="best {colors(hue)}" d="{_upright(_x(at, across))}"/>'
            for at, hue in self.best
            if across.low <= at <= across.high
        ]
        pieces += [_line(line, across, up, colors, buckets) for line in self.lines]
        data = f'data-x="{across.low!r} {across.high!r}" data-y="{up.low!r} {up.high!r}" data-log="{int(up.log)}"'
        return (
            f'<figure class="chart{" wide" if self.wide else ""}">'
            f'<figcaption><span class="title">{escape(self.title)}</span>{self._legend(colors)}</figcaption>'
            f'<div class="plot" {data} data-label="{escape(self.x_label)}">'
            f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(self.title)}: {escape(self._described())}">{"".join(pieces)}</svg>'
            f"{self._ticks(across, up)}</div></figure>"
        )

    def _ends(self) -> tuple[float, float]:
        rounds = [line.x for line in self.lines] + [band.x for band in self.bands]
        values = [float(end) for x in rounds if len(x) for end in (x[0], x[-1]) if math.isfinite(end)]
        return (min(values), max(values)) if values else (0.0, 1.0)

    def _vertical(self) -> Axis:
        """The axis that all values fit on; not all are positive where it is not logarithmic."""
        values = [line.y for line in self.lines] + [end for band in self.bands for end in (band.low, band.high)]
        finite = [one[np.isfinite(one)] for one in values]
        joined = np.concatenate(finite) if finite else np.empty(0)
        if not len(joined):
            return Axis(0.0, 1.0)
        low, high = float(joined.min()), float(joined.max())
        if self.log is not False and low > 0 and (self.log or high > 5 * low):
            return axis_of(low, high, log=True)
        free = axis_of(low, high, log=False)
        if low >= 0:
            free = Axis(max(free.low, -0.02 * free.high), free.high)
        # Values outside of a range that is fixed are shown all the same.
        lower = free.low if math.isnan(self.low) else min(self.low, low)
        upper = free.high if math.isnan(self.high) else max(self.high, high)
        margin = 0.02 * (upper - lower)
        return Axis(lower - margin * (not math.isnan(self.low)), upper + margin * (not math.isnan(self.high)))

    def _shades(self, across: Axis, up: Axis) -> str:
        text = ""
        if self.noise:
            top, bottom = (_y(value, up) for value in (self.noise, -self.noise))
            text += f'<rect class="noise" x="0" y="{top}" width="{SIDE}" height="{max(bottom - top, 0)}"/>'
        if self.warmup > across.low:
            width = _x(min(self.warmup, across.high), across)
            text += f'<rect class="warmup" x="0" y="0" width="{width}" height="{SIDE}"/>'
        return text

    def _grid(self, across: Axis, up: Axis) -> str:
        d = "".join(f"M0 {_y(tick, up)}H{SIDE}" for tick in up.ticks())
        zero = f'<path class="zero" d="M0 {_y(0, up)}H{SIDE}"/>' if self.noise else ""
        return f'<path class="grid" d="{d}"/>{zero}'

    def _ticks(self, across: Axis, up: Axis) -> str:
        """Numbers beside the drawing; the SVG has them in words for those who do not see it."""
        ticks = up.ticks()
        words = apart(ticks, lambda tick, digits: _tick(tick, partial(self.shown, digits=digits)))
        text = "".join(
            f'<span class="y" style="top:{100 * (1 - up.place(tick)):.1f}%">{escape(word)}</span>'
            for tick, word in zip(ticks, words, strict=True)
        )
        whole = [tick for tick in across.ticks(6) if tick == round(tick) or across.high - across.low < 3]
        for tick in whole:
            place = 100 * across.place(tick)
            if place < 84:
                text += f'<span class="x" style="left:{place:.1f}%">{escape(_tick(tick, number))}</span>'
        return f'<div class="ticks" aria-hidden="true">{text}<span class="x end">{escape(self.x_label)}</span></div>'

    def _legend(self, colors: Colors) -> str:
        named = [line for line in self.lines if line.label]
        if not named:
            return ""
        items = []
        for line in named:
            value = f" <b>{escape(self.shown(float(line.y[-1])))}</b>" if self.last and len(line.y) else ""
            dashed = " dashed" if line.dashed else ""
            items.append(f'<li><i class="{colors(line.color)}{dashed}"></i>{escape(line.label)}{value}</li>')
        return f'<ul class="legend">{"".join(items)}</ul>'

    def _described(self) -> str:
        """In words, for those who do not see it."""
        parts = []
        for line in [line for line in self.lines if line.label][:8]:
            finite = line.y[np.isfinite(line.y)]
            if len(finite):
                first, last, low, high = (
                    self.shown(float(value)) for value in (finite[0], finite[-1], finite.min(), finite.max())
                )
                parts.append(f"{line.label} from {first} to {last}, between {low} and {high}")
        return "; ".join(parts) or "no values yet"


def _x(value: float, axis: Axis) -> int:
    return round(SIDE * axis.place(value))


def _y(value: float, axis: Axis) -> int:
    return round(SIDE * min(max(1 - axis.place(value), -1.0), 2.0))


def _upright(x: int) -> str:
    return f"M{x} 0V{SIDE}"


def _places(values: Array, axis: Axis) -> list[int]:
    """As ``axis.place``, of many values."""
    if axis.log:
        shares = (np.log(np.maximum(values, 1e-300)) - math.log(axis.low)) / (math.log(axis.high) - math.log(axis.low))
    else:
        shares = (values - axis.low) / (axis.high - axis.low)
    return [int(value) for value in np.rint(SIDE * np.clip(shares, -1.0, 2.0))]


def _line(line: Line, across: Axis, up: Axis, colors: Colors, buckets: int) -> str:
    kept = thin(line.x, line.y, buckets)
    hue = colors(line.color)
    xs, ys = _places(line.x[kept], across), [SIDE - place for place in _places(line.y[kept], up)]
    # A line is broken where a value is not finite; counted in all rows, since thinning leaves rows out.
    broken = np.concatenate([[0], np.cumsum(~np.isfinite(line.y))])[kept] if len(kept) else np.empty(0)
    d, before = [], None
    for x, y, gap in zip(xs, ys, broken, strict=True):
        if before is None or gap != before:
            d.append(f"M{x} {y}")
        else:
            d.append(f"H{x}V{y}" if line.steps else f"L{x} {y}")
        before = gap
    name = f"line {hue}" + (" faint" if line.faint else "") + (" dashed" if line.dashed else "")
    label = f' data-label="{escape(line.label)}"' if line.label else ""
    text = f'<path class="{name}" style="stroke-width:{line.width:g}"{label} d="{"".join(d)}"/>' if d else ""
    if d and (line.dots or len(kept) == 1) and len(kept) <= DOTS:
        dots = "".join(f"M{x} {y}h0" for x, y in zip(xs, ys, strict=True))
        text += f'<path class="dots {hue}" d="{dots}"/>'
    lost = line.x[~np.isfinite(line.y)]
    if len(lost):
        places = sorted(set(_places(lost, Axis(across.low, across.high))))[:buckets]
        marks = "".join(f"M{place} {SIDE // 50}h0" for place in places)
        text += f'<path class="lost" d="{marks}"><title>not finite</title></path>'
    return text


def _band(band: Band, across: Axis, up: Axis, colors: Colors, buckets: int) -> str:
    x, low, high = thin_band(band.x, band.low, band.high, buckets)
    xs = _places(x, across)
    bottom, top = ([SIDE - place for place in _places(ends, up)] for ends in (low, high))
    edge = [*zip(xs, top, strict=True), *zip(reversed(xs), reversed(bottom), strict=True)]
    d = "L".join(f"{x} {y}" for x, y in edge)
    return f'<path class="band {colors(band.color)}" d="M{d}Z"/>' if edge else ""


def _tick(value: float, shown: Callable[[float], str]) -> str:
    return "0" if abs(value) < 1e-300 else shown(float(f"{value:.10g}"))
