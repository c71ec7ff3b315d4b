"""Fewer points for the same picture: what stands out stays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def thin(x: Array, y: Array, buckets: int) -> npt.NDArray[np.int64]:
    """Choose the points of a line that draw the same picture on a screen of so many pixels.

    The range of x is cut into equal buckets; of each the first, the last, the lowest and the highest point stay (M4,
    Jugel et al. 2014), so that no spike vanishes. Points that are not finite are left out.

    Args:
        x: Ascending.
        y: As many.
        buckets: How many.

    Returns:
        Indices in ascending order, at most four for each bucket.

    Example:
        >>> x = np.arange(1000.0)
        >>> y = np.where(x == 500, 9.0, 0.0)
        >>> kept = thin(x, y, 10)
        >>> len(kept) <= 40, 500 in kept
        (True, True)
    """
    there = np.flatnonzero(np.isfinite(y) & np.isfinite(x))
    if len(there) <= 4 * buckets:
        return there
    bucket, heights = buckets_of(x[there], buckets), y[there]
    # Sorted by bucket, and by height within: the ends of every group are its lowest and highest points.
    by_height = np.lexsort((heights, bucket))
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    ends = np.append(starts[1:], len(bucket)) - 1
    kept = np.unique(np.concatenate([starts, ends, by_height[starts], by_height[ends]]))
    return np.asarray(there[kept], np.int64)


def thin_band(x: Array, low: Array, high: Array, buckets: int) -> tuple[Array, Array, Array]:
    """The least low and the greatest high end in each of so many buckets, so that a band covers what it covered.

    Args:
        x: Ascending.
        low: The lower ends.
        high: The upper ends.
        buckets: How many.

    Returns:
        The three for at most twice as many points as there are buckets. Points that are not finite are left out.

    Example:
        >>> x = np.arange(100.0)
        >>> _, low, high = thin_band(x, -x, x, 5)
        >>> float(low.min()), float(high.max()), len(low)
        (-99.0, 99.0, 10)
    """
    there = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
    x, low, high = x[there], low[there], high[there]
    if len(x) <= 2 * buckets:
        return x, low, high
    starts = np.flatnonzero(np.diff(buckets_of(x, buckets), prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    edges = np.stack([x[starts], x[ends]], 1).reshape(-1)
    return edges, np.minimum.reduceat(low, starts).repeat(2), np.maximum.reduceat(high, starts).repeat(2)


def buckets_of(x: Array, buckets: int) -> npt.NDArray[np.int64]:
    """The number of the bucket of every point, from 0; ascending, as x is."""
    span = x[-1] - x[0]
    share = (x - x[0]) / span if span > 0 else np.zeros_like(x)
    return np.minimum((share * buckets).astype(np.int64), buckets - 1)
