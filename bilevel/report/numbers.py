"""Axes and their ticks, and numbers, times and sizes in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_RATIO = 3.0
"""The smallest ratio of the ends of a logarithmic axis, so that a constant does not look like a change."""


@dataclass(frozen=True)
class Axis:
    """The range of an axis.

    Attributes:
        low: Its lower end.
        high: Its upper end.
        log: Whether it is logarithmic; both ends are positive then.
    """

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, from 0 at the lower end to 1 at the upper one.

        Args:
            value: Any; what lies outside is placed outside.

        Returns:
            The place.

        Example:
            >>> Axis(0.01, 1.0, log=True).place(0.1)
            0.5
        """
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 5) -> list[float]:
        """Round numbers within the range, not many more than ``most``.

        Args:
            most: About how many.

        Returns:
            The numbers, ascending.

        Example:
            >>> Axis(0.0, 1.1).ticks(), Axis(0.003, 30.0, log=True).ticks()
            ([0.0, 0.25, 0.5, 0.75, 1.0], [0.01, 0.1, 1.0, 10.0])
        """
        return log_ticks(self.low, self.high, most) if self.log else linear_ticks(self.low, self.high, most)


def axis_of(low: float, high: float, *, log: bool) -> Axis:
    """An axis with a margin around values.

    Args:
        low: The smallest value.
        high: The largest one.
        log: Whether it is logarithmic.

    Returns:
        The axis; a constant lies in its middle.

    Example:
        >>> axis_of(1.0, 1.0, log=False)
        Axis(low=0.5, high=1.5, log=False)
    """
    if log:
        bottom, top = (math.log(min(max(end, 1e-290), 1e290)) for end in (low, high))
        middle, half = (bottom + top) / 2, max(0.53 * (top - bottom), math.log(LEAST_RATIO) / 2)
        return Axis(math.exp(middle - half), math.exp(middle + half), True)
    low, high = max(low, -1e300), min(high, 1e300)
    margin = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
    return Axis(low - margin, high + margin)


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / most
    if not (math.isfinite(raw) and raw > 0):
        return []
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= 0.99 * raw), 10.0 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, or a few numbers between them where there is only one or two decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3)):
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        found = [value for value in found if low <= value <= high]
        if len(found) <= most + 1:
            return found
    every = max(1, math.ceil((last - first) / most))
    return [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high and power % every == 0]


def number(value: float, digits: int = 4) -> str:
    """A number for a reader.

    Args:
        value: Any.
        digits: How many matter.

    Returns:
        Such as ``0.0123``, ``3e−5`` or ``12,500``.

    Example:
        >>> [number(value) for value in (0.01234, 3e-5, 12500.0, float("nan"), float("-inf"), 0.0)]
        ['0.01234', '3e−5', '12,500', 'NaN', '−∞', '0']
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 10 ** max(digits, 6):
        if abs(value) >= 10**digits:
            return f"{value:,.0f}".replace("-", "−")
        return f"{value:.{digits}g}".replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".").replace("-", "−")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def apart(values: Sequence[float], shown: Callable[[float, int], str]) -> list[str]:
    """Numbers with as many digits as it takes to tell them apart.

    Args:
        values: Any.
        shown: A number with so many digits, in words.

    Returns:
        The words.

    Example:
        >>> apart([3521e5, 3524e5], size), apart([1e9, 2e9], size)
        (['352.1 MB', '352.4 MB'], ['1 GB', '2 GB'])
    """
    for digits in range(3, 10):
        words = [shown(value, digits) for value in values]
        if len(set(words)) == len(set(values)):
            break
    return words


def duration(seconds: float, digits: int = 3) -> str:
    """A time for a reader.

    Args:
        seconds: Any.
        digits: How many matter below a minute.

    Returns:
        With two units at most.

    Example:
        >>> [duration(value) for value in (0.0123, 3.21, 75, 7500, 200_000)]
        ['12.3 ms', '3.21 s', '1 min 15 s', '2 h 5 min', '2 d 7 h']
    """
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 1:
        return "0 s" if seconds <= 0 else f"{number(1000 * seconds, digits)} ms"
    if seconds < 60:
        return f"{number(seconds, digits)} s"
    for large, small, size, part in (("min", "s", 60, 1), ("h", "min", 3600, 60), ("d", "h", 86400, 3600)):
        whole = int(seconds // size)
        if whole < {"min": 60, "h": 24}.get(large, math.inf):
            rest = int((seconds - whole * size) // part)
            return f"{whole} {large}" + (f" {rest} {small}" if rest else "")
    return number(seconds)


def size(count: float, digits: int = 3) -> str:
    """A number of bytes for a reader.

    Args:
        count: Of bytes.
        digits: How many matter.

    Returns:
        Such as ``1.5 GB``.

    Example:
        >>> size(512), size(1_500_000_000)
        ('512 B', '1.5 GB')
    """
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if abs(count) >= 1000**power:
            return f"{number(count / 1000**power, digits)} {unit}"
    return f"{number(count, 3)} B"
