"""The optimizer that a script has already."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bilevel.arguments import Parameters, make_optimizer
from bilevel.solver import OptimizerFactory


def factory_of(net: nn.Module, optimizer: Any) -> OptimizerFactory:
    """Make a factory of an optimizer that belongs to the network; the solver trains copies of its weights.

    Args:
        net: Whose parameters it has.
        optimizer: An instance, or a factory already.

    Returns:
        A factory. It makes groups with the same settings, by name of the parameter; what has no name there is put
        into the first group.

    Raises:
        TypeError: If it is neither.
        ValueError: If the optimizer belongs to other parameters.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> made = factory_of(net, torch.optim.SGD(net.parameters(), lr=0.5))(Parameters(net.named_parameters()))
        >>> made.param_groups[0]["lr"]
        0.5
    """
    if not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise TypeError(
            "tune: optimizer must be an optimizer, torch.optim.Adam(net.parameters(), lr=1e-3), or a function that "
            f"makes one, lambda params: torch.optim.Adam(params, lr=1e-3); got {type(optimizer).__name__}: "
            f"{optimizer!r}."
        )
    if not isinstance(optimizer, Optimizer):
        made: OptimizerFactory = optimizer
        return made
    names = {id(param): name for name, param in net.named_parameters()}
    owners: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    "tune: optimizer has a parameter that is not one of the network's: make it from net.parameters()."
                )
            owners[names[id(param)]] = index
    missing = [name for name, param in net.named_parameters() if param.requires_grad and name not in owners]
    if missing:
        raise ValueError(
            f"tune: optimizer leaves out {', '.join(map(repr, missing[:5]))}: give it all trainable parameters, or "
            "call requires_grad_(False) on those to keep as they are."
        )
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    kind: Callable[..., Optimizer] = type(optimizer)

    def make(params: Any) -> Optimizer:
        members: list[list[nn.Parameter]] = [[] for _ in settings]
        for name, param in params.named_parameters():
            members[owners.get(name, 0)].append(param)
        groups = [{**own, "params": chosen} for own, chosen in zip(settings, members, strict=True) if chosen]
        return kind([{key: value for key, value in group.items() if key != "initial_lr"} for group in groups])

    return make


def warn_if_it_decays(net: nn.Module, factory: OptimizerFactory | None) -> None:
    """Warn of an optimizer that decays weights, beside the decay that is tuned."""
    if factory is None:
        return
    trainable = Parameters((name, nn.Parameter(p.detach())) for name, p in net.named_parameters() if p.requires_grad)
    optimizer = make_optimizer("inner_optimizer", factory, trainable)
    found = max((float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups), default=0.0)
    if found:
        kind = type(optimizer).__name__
        warnings.warn(
            f"tune: the optimizer {kind} decays the weights by {found:g} beside the weight decay that is tuned, which "
            f"then comes on top. Pass weight_decay=0 to {kind}, or weight_decay=False to tune.",
            stacklevel=3,
        )
