"""Several processes that solve one problem together; one process never comes here.

Every process holds the same weights, response and hyperparameters, and works on examples of its own. What they find is
added up in flat buckets, weighted by the number of examples, so that W processes with batches of B examples make the
steps of one process with batches of W · B.
"""

from bilevel.parallel.graph import entered, mean_with_graph
from bilevel.parallel.group import Group
from bilevel.parallel.joining import device, join
from bilevel.parallel.loaders import Nothing, Shared, Split, count, plain, share
from bilevel.parallel.shards import (
    Division,
    Shards,
    added,
    all_finite,
    divided,
    dot,
    each,
    flat_like,
    is_sharded,
    length,
    local,
    shard,
    whole,
)

__all__ = [
    "Division",
    "Group",
    "Nothing",
    "Shards",
    "Shared",
    "Split",
    "added",
    "all_finite",
    "count",
    "device",
    "divided",
    "dot",
    "each",
    "entered",
    "flat_like",
    "is_sharded",
    "join",
    "length",
    "local",
    "mean_with_graph",
    "plain",
    "shard",
    "share",
    "whole",
]
