"""Colours of lines that can be told from a light and from a dark background."""

from __future__ import annotations

from collections.abc import Sequence

from bilevel.plotting.palette import COLORS, OTHERS, color

LIGHT, DARK = "#ffffff", "#16181d"
INK = "#111111"
CONTRAST = 3.0
"""The least contrast of a line and its background (WCAG 2.2, 1.4.11)."""


class Colors:
    """Numbers the colours of a page, so that its style sheet can have two of each.

    Example:
        >>> colors = Colors()
        >>> colors("#0072B2"), colors("#D55E00"), colors("#0072B2")
        ('k0', 'k1', 'k0')
    """

    def __init__(self) -> None:
        """Start without colours."""
        self.names: dict[str, str] = {}

    def __call__(self, hexadecimal: str) -> str:
        """The class of a colour."""
        return self.names.setdefault(hexadecimal.lower(), f"k{len(self.names)}")

    def css(self, background: str) -> str:
        """The rules for one background."""
        return "".join(f".{name}{{--c:{readable(value, background)}}}" for value, name in self.names.items())


def of_runs(methods: Sequence[str]) -> list[str]:
    """A colour for every run of a comparison: those of the methods if they differ, otherwise the palette in order.

    Args:
        methods: Of the runs.

    Returns:
        As many colours.

    Example:
        >>> of_runs(["delta_stn", "stn"]), of_runs(["stn", "stn"])
        (['#D55E00', '#009E73'], ['#0072B2', '#D55E00'])
    """
    if len(set(methods)) == len(methods) and all(method in COLORS for method in methods):
        return [color(method) for method in methods]
    return [OTHERS[index % len(OTHERS)] for index in range(len(methods))]


def readable(foreground: str, background: str, least: float = CONTRAST) -> str:
    """The nearest colour, towards black or white, that has enough contrast; a grey is as far from white as from black.

    Args:
        foreground: A colour such as ``#0072B2``.
        background: What it is drawn on.
        least: The contrast it needs.

    Returns:
        The colour.

    Example:
        >>> readable("#111111", "#ffffff"), readable("#111111", "#16181d")
        ('#111111', '#eeeeee')
    """
    end = 255.0 if luminance(background) < 0.18 else 0.0
    rgb = channels(foreground)
    if end and max(rgb) - min(rgb) < 16:
        rgb = [255 - value for value in rgb]
    for step in range(21):
        mixed = "#" + "".join(f"{round(one + (end - one) * step / 20):02x}" for one in rgb)
        if contrast(mixed, background) >= least:
            break
    return mixed


def contrast(one: str, other: str) -> float:
    """The ratio of contrast of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(hexadecimal: str) -> float:
    """The relative luminance of a colour, from 0 to 1."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (one / 255 for one in channels(hexadecimal))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def channels(hexadecimal: str) -> list[int]:
    """Red, green and blue."""
    return [int(hexadecimal[index : index + 2], 16) for index in (1, 3, 5)]
