"""The rates of the dropout that a network has, as hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from bilevel.batches import to_device
from bilevel.dropouts.places import Found, Place, find
from bilevel.hyper import Hyper, interval

Groups = str | Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, eq=False)
class DropoutRate(Hyper):
    """A dropout rate that a :class:`Problem` puts in place while the network runs; made by :func:`dropout_rates`.

    Attributes:
        places: Where the network drops with this rate.
        scanned: Whether calls of functions were looked for, beside layers.
        left: Where the network drops with its own rate, because no group has it.
    """

    places: tuple[Place, ...] = ()
    scanned: bool = False
    left: tuple[Place, ...] = ()


def dropout_rates(
    net: nn.Module,
    sample: Any = None,
    *,
    groups: Groups = "layer",
    zero: float = 0.05,
    high: float = 0.95,
    shared: bool = False,
    prefix: str = "dropout",
) -> dict[str, Hyper]:
    r"""The rate of every dropout in a network, as hyperparameters of a :class:`Problem` with that network.

    The network is neither changed nor wrapped: while it runs in a loss, its dropout takes the rates from ``hyper``.
    A loss need not read them. Found are ``nn.Dropout``, ``nn.Dropout1d``, ``2d`` and ``3d``, ``nn.AlphaDropout``,
    ``nn.FeatureAlphaDropout``, the dropout of ``nn.MultiheadAttention``, ``DropPath``, and layers with a
    :func:`dropout_rule`. With a ``sample``, also ``F.dropout`` and its relatives, and ``dropout_p`` of
    ``F.scaled_dot_product_attention``, wherever the network calls them; and layers that it never calls are left out.

    A layer that is called twice has one rate. A call of a function is named after the module in whose ``forward`` it
    is: ``encoder.dropout``, then ``encoder.dropout_1``.

    A rate starts at its present value. A dropout layer with a rate of zero starts at ``zero``, because from zero no
    rate can move; attention and recurrent networks with a rate of zero are left alone. The dropout between the layers
    of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` has one rate for each network. They run step by step then, because their
    kernels take no tensor for a rate.

    Args:
        net: The network.
        sample: Arguments of the network for one call: a tensor, a tuple of arguments, or a mapping of keyword
            arguments. The network runs once and is left as it was, and so are all random numbers.
        groups: ``"layer"``, one rate for each; ``"one"``, one for all; or a mapping from names to patterns, such as
            ``{"attention": "*attn*", "rest": "*"}``, of which the first that fits counts. What fits none keeps its
            rate. The rate of a group starts at the mean of its present rates.
        zero: Where a rate starts that is zero now.
        high: All rates stay below.
        shared: All examples of a batch have the same rate, also where others have perturbations of their own.
        prefix: Of the names of the hyperparameters.

    Returns:
        Hyperparameters by name, ``"dropout.NAME"``; ``"dropout"`` for one rate.

    Raises:
        TypeError: If ``net`` is no module.
        ValueError: If there is no dropout, a rate is too high, or a pattern fits nothing.

    Example:
        >>> import torch, bilevel
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        >>> hyper = {"decay": bilevel.positive(1e-3)}
        >>> hyper |= bilevel.dropout_rates(net)
        >>> list(hyper), float(hyper["dropout.2"].init)
        (['decay', 'dropout.2'], 0.2)
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"dropout_rates: net must be an nn.Module, got {type(net).__name__}.")
    if not 0 < zero < high <= 1:
        raise ValueError(f"dropout_rates: needs 0 < zero < high <= 1, got zero={zero} and high={high}.")
    if sample is not None:
        device = next((value.device for value in net.parameters()), None)
        sample = sample if device is None else to_device(sample, device)
    found = find(net, None if sample is None else lambda run: call_with(run, sample))
    if not found:
        where = (
            "only layers were looked for: pass a sample to find F.dropout and attention"
            if sample is None
            else "none ran in train mode; teach the library layers of your own with bilevel.dropout_rule"
        )
        raise ValueError(f"dropout_rates: the network has no dropout ({where}).")
    return rates_of(found, groups, zero=zero, high=high, shared=shared, prefix=prefix, scanned=sample is not None)


def rates_of(
    found: Sequence[Found], groups: Groups, *, zero: float, high: float, shared: bool, prefix: str, scanned: bool
) -> dict[str, Hyper]:
    """Hyperparameters for places that were found; the arguments are those of :func:`dropout_rates`.

    Args:
        found: The places.
        groups: See there.
        zero: See there.
        high: See there.
        shared: See there.
        prefix: See there.
        scanned: Whether a sample was given.

    Returns:
        By name.

    Raises:
        ValueError: If a rate is too high.
    """
    for place in found:
        if place.rate >= high:
            raise ValueError(
                f"dropout_rates: {place.name!r} has a rate of {place.rate}, which is not below high={high}; lower it, "
                "or raise high (at most 1)."
            )
    hyper: dict[str, Hyper] = {}
    grouped = _grouped(found, groups, prefix)
    taken = {member.place for members in grouped.values() for member in members}
    left = tuple(place.place for place in found if place.place not in taken)
    for name, members in grouped.items():
        start = sum(member.rate or zero for member in members) / len(members)
        plain = interval(0.0, high, init=start, shared=shared)
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        places = tuple(member.place for member in members)
        hyper[name] = DropoutRate(**values, places=places, scanned=scanned, left=left)
    return hyper


def _grouped(found: Sequence[Found], groups: Groups, prefix: str) -> dict[str, list[Found]]:
    if groups == "one":
        return {prefix: [*found]}
    if groups == "layer":
        return {f"{prefix}.{place.name}": [place] for place in found}
    if not isinstance(groups, Mapping):
        raise ValueError(f"dropout_rates: groups must be 'layer', 'one' or a mapping to patterns, got {groups!r}.")
    members: dict[str, list[Found]] = {name: [] for name in groups}
    for place in found:
        for name, patterns in groups.items():
            if any(fnmatchcase(place.name, p) for p in ([patterns] if isinstance(patterns, str) else patterns)):
                members[name].append(place)
                break
    for name, chosen in members.items():
        if not chosen:
            raise ValueError(
                f"dropout_rates: nothing is left for the group {name!r}, {groups[name]!r}; there are "
                f"{', '.join(place.name or 'the network itself' for place in found)}."
            )
    return {f"{prefix}.{name}": chosen for name, chosen in members.items()}


def call_with(run: Any, sample: Any) -> Any:
    """Call a network with a tensor, a tuple of arguments or a mapping of keyword arguments.

    Returns:
        What it returns.
    """
    if isinstance(sample, Mapping):
        return run(**sample)
    return run(*sample) if isinstance(sample, tuple | list) else run(sample)
