"""Stochastic layers that no function of PyTorch makes: drop path, and the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from bilevel.functional import dropout


class Rule(NamedTuple):
    """How a kind of layer drops.

    Attributes:
        rate: The attribute of the layer that holds its rate.
        forward: In place of its own, ``forward(layer, rate, *args, **kwargs)``.
    """

    rate: str
    forward: Callable[..., Any]


RULES: dict[type[nn.Module] | str, Rule] = {}


def dropout_rule(kind: type[nn.Module] | str, *, rate: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    r"""Teach the library how a stochastic layer of your own drops, so that :func:`dropout_rates` finds it.

    While the network trains, your function runs in place of the layer's ``forward``. It gets the layer, the rate and
    the arguments. The rate is a scalar or has one value per example, shape ``(B,)``;
    :func:`bilevel.functional.dropout` takes both. Subclasses follow the rule of their class. Layers of a class that is
    called ``DropPath`` and has an attribute ``drop_prob``, as in timm and transformers, have a rule already.

    Args:
        kind: The class of the layer, or its name.
        rate: The attribute of the layer that holds its present rate.

    Returns:
        A decorator for the function.

    Raises:
        TypeError: If ``kind`` is neither a class of modules nor a name.

    Example:
        >>> import torch, bilevel
        >>> class SameFeatures(nn.Module):  # drops a feature at all times of a sequence (B, T, features)
        ...     def __init__(self, p):
        ...         super().__init__()
        ...         self.p = p
        ...     def forward(self, x):
        ...         mask = torch.bernoulli(torch.full_like(x[:, :1], 1 - self.p)) if self.training else 1.0
        ...         return x * mask / (1 - self.p)
        >>> @bilevel.dropout_rule(SameFeatures, rate="p")
        ... def same_features(layer, rate, x):
        ...     return bilevel.functional.dropout(x, rate, shared_dims=1)
        >>> list(bilevel.dropout_rates(nn.Sequential(nn.Linear(2, 2), SameFeatures(0.3))))
        ['dropout.1']
    """
    if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"dropout_rule: kind must be a class of modules or its name, got {kind!r}.")

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        RULES[kind] = Rule(rate, forward)
        return forward

    return register


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a layer, by its class, its name, and those of its base classes.

    Returns:
        None if it has none.
    """
    for kind in type(module).__mro__:
        found = RULES.get(kind) or RULES.get(kind.__name__)
        if found is not None:
            return found if found.rate in dir(module) else None
    return None


@dropout_rule("DropPath", rate="drop_prob")
def _drop_path(layer: Any, rate: Tensor, x: Tensor) -> Tensor:
    """Drop whole examples; timm's may leave out the factor 1 / (1 - rate)."""
    result = dropout(x, rate, shared_dims=range(1, x.ndim))
    if getattr(layer, "scale_by_keep", True):
        return result
    keep = 1 - rate.detach().to(x.dtype)
    return result * keep.reshape(-1, *[1] * (x.ndim - 1)) if keep.ndim else result * keep
