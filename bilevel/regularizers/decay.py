"""Weight decay: as a penalty, or decoupled from the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from bilevel.functional.penalties import weighted_l2
from bilevel.hyper import Hyper, positive
from bilevel.regularizers.base import Regularizer

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
Groups = str | Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, eq=False)
class DecayRate(Hyper):
    """The strength of weight decay for some weights; made by :class:`WeightDecay`.

    Attributes:
        weights: The names of the weights.
        decoupled: Whether each step of training shrinks the weights, in place of a penalty. A :class:`Problem` finds
            these by itself: no loss has to read them.
    """

    weights: tuple[str, ...] = ()
    decoupled: bool = False


@final
class WeightDecay(Regularizer):
    r"""Weight decay as a penalty, :math:`\Omega(w) = \sum_k \lambda_k \sum_{j \in k} w_j^2`.

    There is no factor one half: :math:`\lambda` does in the loss what ``weight_decay`` of :math:`2\lambda` does in
    ``torch.optim.SGD``, ``Adam`` and the other optimizers that add ``weight_decay * w`` to the gradient. For ``AdamW``
    and its decoupled decay there is no equal value: that is no term of the loss, but of the update.

    With ``decoupled=True`` it is that decay (Loshchilov and Hutter, 2019). There is no penalty; a step of training with
    the learning rate :math:`\eta` shrinks the weights first, and then moves them as the optimizer does,

    .. math:: w_j \leftarrow (1 - \eta \lambda_k)\, w_j, \quad j \in k,

    so that ``Adam`` makes the steps of ``AdamW(weight_decay=λ)``. Only :class:`bilevel.Unrolled`, which differentiates
    the steps of training, can tune it. The other methods differentiate or perturb the loss, and refuse.

    Biases, norms, and other parameters with fewer than two dimensions are left out, as people do.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> list(WeightDecay(net).hyper), list(WeightDecay(net, "one").hyper)
        (['weight_decay.0', 'weight_decay.2'], ['weight_decay'])
        >>> import torch
        >>> decay = WeightDecay(nn.Linear(2, 1), "one")
        >>> decay.penalty({"weight": torch.tensor([[1.0, 2.0]])}, {"weight_decay": torch.tensor(0.1)})
        tensor(0.5000)
    """

    def __init__(
        self,
        net: nn.Module,
        groups: Groups = "layer",
        *,
        init: float | None = None,
        decoupled: bool = False,
        everything: bool = False,
        prefix: str = "weight_decay",
    ) -> None:
        """Choose the weights.

        Args:
            net: The network; frozen parameters are left out.
            groups: ``"layer"``, one strength for the weights of each module; ``"tensor"``, one for each weight;
                ``"one"``, one for all; or a mapping from names to patterns of the names of weights, such as
                ``{"head": "fc.*", "rest": "*"}``, of which the first that fits counts. What fits none is not decayed.
            init: Where they start: 1e-4 by default, and 1e-2 if they are decoupled.
            decoupled: Shrink the weights in each step of training, in place of a penalty; for ``Unrolled`` only.
            everything: Decay biases and norms as well.
            prefix: Of the names of the hyperparameters.

        Raises:
            TypeError: If ``net`` is no module.
            ValueError: If there is nothing to decay, or a pattern fits nothing.
        """
        if not isinstance(net, nn.Module):
            raise TypeError(f"WeightDecay: net must be an nn.Module, got {type(net).__name__}.")
        names = [name for name, weight in net.named_parameters() if weight.requires_grad]
        chosen = names if everything else [name for name in names if _decays(net, name)]
        if not chosen:
            raise ValueError(
                "WeightDecay: the network has no trainable weight with two dimensions or more; pass everything=True "
                "to decay biases and norms."
            )
        self.groups = _grouped(chosen, groups, prefix)
        self.decoupled = decoupled
        self._init = (1e-2 if decoupled else 1e-4) if init is None else init

    @property
    @override
    def hyper(self) -> dict[str, Hyper]:
        """One positive strength for each group."""
        plain = positive(self._init)
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return {
            name: DecayRate(**values, weights=weights, decoupled=self.decoupled)
            for name, weights in self.groups.items()
        }

    @override
    def penalty(self, params: Mapping[str, Tensor], hyper: Mapping[str, Tensor]) -> Tensor | None:
        """The penalty; None if it is decoupled."""
        if self.decoupled:
            return None
        groups = [[params[weight] for weight in weights] for weights in self.groups.values()]
        return weighted_l2([hyper[name] for name in self.groups], groups)


def _decays(net: nn.Module, name: str) -> bool:
    owner = net.get_submodule(name.rpartition(".")[0])
    return net.get_parameter(name).ndim > 1 and not isinstance(owner, NORMS)


def _grouped(names: Sequence[str], groups: Groups, prefix: str) -> dict[str, tuple[str, ...]]:
    if groups == "decoupled":
        raise ValueError("WeightDecay: 'decoupled' names no groups: pass groups='layer', decoupled=True.")
    if groups == "one":
        return {prefix: tuple(names)}
    members: dict[str, list[str]] = {}
    if groups == "tensor":
        members = {name: [name] for name in names}
    elif groups == "layer":
        for name in names:
            members.setdefault(name.rpartition(".")[0] or name, []).append(name)
    elif isinstance(groups, Mapping):
        members = {group: [] for group in groups}
        for name in names:
            for group, patterns in groups.items():
                if any(fnmatchcase(name, p) for p in ([patterns] if isinstance(patterns, str) else patterns)):
                    members[group].append(name)
                    break
        for group, found in members.items():
            if not found:
                raise ValueError(
                    f"WeightDecay: nothing is left for the group {group!r}, {groups[group]!r}; there are "
                    f"{', '.join(names)}."
                )
    else:
        raise ValueError(
            f"WeightDecay: groups must be 'layer', 'tensor', 'one' or a mapping to patterns, got {groups!r}."
        )
    return {f"{prefix}.{group}": tuple(found) for group, found in members.items()}
