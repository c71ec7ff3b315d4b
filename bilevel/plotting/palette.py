"""A colour for every method."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# By family: the dashes tell families apart where colours of two families are close to a colour-blind eye.
FAMILIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "self-tuning": (
        "-",
        {"stn": "#009E73", "centered_stn": "#0072B2", "delta_stn": "#D55E00", "delta_stn_paper": "#6E2400"},
    ),
    "implicit": (
        "--",
        {
            "implicit_exact": "#5E1147",
            "implicit_cg": "#D77FB4",
            "implicit_neumann": "#B0309A",
            "implicit_nystrom": "#3B2C9B",
            "implicit_identity": "#EFC3D6",
        },
    ),
    "unrolled": ("-.", {"unrolled": "#E69F00", "unrolled_truncated": "#F2DC5D", "unrolled_forward": "#6B5200"}),
    "baselines": (
        ":",
        {
            "fixed": "#555555",
            "fixed_noise": "#B0B0B0",
            "random_search": "#56B4E9",
            "tpe": "#7A1F1F",
            "grid_search": "#111111",
            "gp": "#B5D99C",
            "cmaes": "#2A7F86",
        },
    ),
}
COLORS = {name: value for _, members in FAMILIES.values() for name, value in members.items()}
DASHES = {name: dashes for dashes, members in FAMILIES.values() for name in members}
OTHERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#666666")
"""What has no colour of its own: the palette of Okabe and Ito, with wine and grey."""


def color(method: str) -> str:
    """The colour of a method, the same in every figure.

    Args:
        method: A name in ``bilevel.METHODS``, ``"fixed"``, ``"random search"``, ``"tpe"``, or any other: that gets one
            of eight colours, always the same.

    Returns:
        Such as ``#D55E00``.

    Example:
        >>> color("delta_stn"), color("random search") == color("random_search")
        ('#D55E00', True)
    """
    return COLORS.get(_plain(method)) or OTHERS[_place(method)]


def colors(methods: Iterable[str]) -> dict[str, str]:
    """The colours of what one figure shows: those of :func:`color`, but different for up to eight unknown names.

    Args:
        methods: Their names.

    Returns:
        The colours by name.

    Example:
        >>> len(set(colors(["maml", "imaml", "joint", "delta_stn"]).values()))
        4
    """
    names = list(dict.fromkeys(methods))
    found = {name: COLORS[_plain(name)] for name in names if _plain(name) in COLORS}
    for name in names:
        if name not in found:
            turned = OTHERS[_place(name) :] + OTHERS[: _place(name)]
            found[name] = next((one for one in turned if one not in found.values()), turned[0])
    return {name: found[name] for name in names}


def line(method: str) -> dict[str, Any]:
    """The colour and dashes of the line of a method.

    Self-tuning networks are solid, implicit methods dashed, unrolled ones dash-dotted, baselines dotted.

    Args:
        method: As in :func:`color`.

    Returns:
        Keywords of ``axis.plot``.

    Example:
        >>> line("fixed")
        {'color': '#555555', 'linestyle': ':'}
    """
    return {"color": color(method), "linestyle": DASHES.get(_plain(method), "-")}


def shades(base: str, count: int) -> list[str]:
    """Variants of a colour, from dark to light.

    Args:
        base: The colour.
        count: How many.

    Returns:
        The colours; the base itself if there is only one.

    Example:
        >>> shades("#0072B2", 3)
        ['#00446b', '#0072b2', '#8cc0dc']
    """
    if count == 1:
        return [base]
    rgb = np.array([int(base[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    ends = np.array([0.6 * rgb, rgb, rgb + 0.55 * (1 - rgb)])
    places = np.linspace(0, 2, count)
    mixed = np.stack([np.interp(places, [0, 1, 2], ends[:, channel]) for channel in range(3)], 1)
    return ["#" + "".join(f"{round(255 * value):02x}" for value in one) for one in mixed]


def spectrum(count: int) -> list[str]:
    """Colours of values that have an order, from light to dark.

    Args:
        count: How many.

    Returns:
        The colours.

    Example:
        >>> spectrum(2)
        ['#efb255', '#3b1f5b']
    """
    stops = np.array([[0xEF, 0xB2, 0x55], [0xD5, 0x6B, 0x4E], [0x93, 0x3A, 0x6C], [0x3B, 0x1F, 0x5B]])
    places = np.linspace(0, 3, count)
    mixed = np.stack([np.interp(places, range(4), stops[:, channel]) for channel in range(3)], 1)
    return ["#" + "".join(f"{round(value):02x}" for value in one) for one in mixed]


def _plain(method: str) -> str:
    return method.lower().replace(" ", "_").replace("-", "_")


def _place(method: str) -> int:
    return zlib.crc32(_plain(method).encode()) % len(OTHERS)
