"""Functions of PyTorch that drop something, each with a rate that is a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunction

from bilevel.dropouts.attention import attend, multi_head_attention
from bilevel.functional.noise import alpha_drop, drop
from bilevel.layouts import FIRST, Layout, following
from bilevel.plain import CELLS, is_packed, recurrent
from bilevel.responding import NoExamples


class Call(NamedTuple):
    """A call of such a function.

    Attributes:
        rate: That the network gave it.
        active: Whether it drops, as in training.
        explicit: Whether a rate of zero was meant as one, and is not the default of an argument.
        run: The same with another rate: a scalar, or one value per example.
    """

    rate: float
    active: bool
    explicit: bool
    run: Callable[[Tensor], Any]


def spread(rate: Tensor, x: Tensor) -> Tensor:
    """One rate per example, wherever an activation has its examples.

    Where weights respond for each example, the examples are followed through the network. Elsewhere all rates are
    equal, and the shape decides.

    Args:
        rate: A scalar; or shape ``(B,)``.
        x: Has the examples in dimension 0, alone or followed by something else, ``(B * T, ...)``; or in dimension 1.

    Returns:
        The rate, so that it broadcasts to ``x``.

    Example:
        >>> rate = torch.tensor([0.0, 1.0])
        >>> spread(rate, torch.ones(4, 1)).flatten(), spread(rate, torch.ones(3, 2)).shape
        (tensor([0., 0., 1., 1.]), torch.Size([1, 2]))
    """
    if not rate.ndim:
        return rate
    return _placed(rate, layout_of(x, len(rate)), x)


def _placed(rate: Tensor, layout: Layout, x: Tensor) -> Tensor:
    sizes = [1] * x.ndim
    sizes[layout.dim] = -1
    rate = rate if layout.alone else rate[layout.ids(len(rate), rate.device)]
    return rate.reshape(sizes)


def layout_of(x: Tensor, count: int) -> Layout:
    """Where the examples of an activation are that is dropped.

    Args:
        x: The activation.
        count: The number of examples.

    Returns:
        Their place.

    Raises:
        NoExamples: If it has none.
    """
    layouts = following.get()
    layout = None
    if layouts is not None:
        layout = layouts.of(x) if layouts.known(x) else None
    elif x.shape[:1] == (count,):
        layout = FIRST
    elif x.shape[1:2] == (count,):
        layout = Layout(1)
    elif x.ndim and len(x) % count == 0:
        layout = Layout(0, 1, len(x) // count)
    if layout is None:
        raise NoExamples(
            f"dropout of a tensor of shape {tuple(x.shape)}, in which the {count} examples are not to be found: its "
            "rate cannot differ from example to example. Tune one rate for the batch, with "
            "bilevel.dropout_rates(net, shared=True); or pass perturb='batch' to the method."
        )
    return layout


def _plain(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Call:
    return Call(p, training, True, partial(_run, drop, input, (), inplace))


def _alpha(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Call:
    return Call(p, training, True, partial(_run, alpha_drop, input, (), inplace))


def _features(batched: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Call:
    """Whole channels: an input of fewer dimensions than ``batched`` is one example."""
    first = 2 if input.ndim >= batched else 1
    return Call(p, training, True, partial(_run, drop, input, range(first, input.ndim), inplace))


def _alpha_features(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Call:
    return Call(p, training, True, partial(_run, alpha_drop, input, range(2, input.ndim), inplace))


def _run(function: Any, x: Tensor, shared_dims: Sequence[int], inplace: bool, rate: Tensor) -> Tensor:
    with DisableTorchFunction():  # all but the product is no operation of the network, and modes take time
        rate = _checked(x, shared_dims, rate)
    result: Tensor = function(x, rate, shared_dims)
    return x.copy_(result) if inplace else result


def _checked(x: Tensor, shared_dims: Sequence[int], rate: Tensor) -> Tensor:
    if len(shared_dims) == x.ndim - 1 and x.ndim > 1 and rate.ndim and x.shape[:1] != rate.shape:
        raise NoExamples(
            f"dropout of the channels of one example, of shape {tuple(x.shape)}, in a batch of {len(rate)}: its rate "
            "cannot differ from example to example. Use bilevel.dropout_rates(net, shared=True)."
        )
    return spread(rate, x)


def _scaled_dot_product(*args: Any, **kwargs: Any) -> Call:
    rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return Call(rate, rate > 0, False, lambda rate: attend(partial(_drop, rate), *args, **kwargs))


def _multi_head(*args: Any, **kwargs: Any) -> Call:
    rate = args[10] if len(args) > 10 else kwargs["dropout_p"]
    training = args[13] if len(args) > 13 else kwargs.get("training", True)
    return Call(rate, training, False, lambda rate: multi_head_attention(partial(_drop, rate), *args, **kwargs))


def _recurrent(function: Any, *args: Any) -> Call:
    """The dropout between layers; PyTorch has none behind the last."""
    packed = is_packed(args)
    _, layers, rate, train, *rest = args[4 if packed else 3 :]

    def run(new: Tensor) -> Any:
        # All layers have the examples where the input has them: in the dimension that the network counts sequences in.
        x, batch = args[0], Layout(0) if not packed and rest[1] else Layout(1)
        plain = following.get() is None and not packed and x.shape[batch.dim] == new.numel()
        layout = batch if plain or not new.ndim else layout_of(x, len(new))

        def between(y: Tensor) -> Tensor:
            return drop(y, _placed(new, layout, y) if new.ndim else new)

        return recurrent(function, *args, drop=between)

    return Call(rate, train and layers > 1, False, run)


def _drop(rate: Tensor, shares: Tensor) -> Tensor:
    return drop(shares, spread(rate, shares))


CALLS: dict[Any, Callable[..., Call]] = {
    F.dropout: _plain,
    F.alpha_dropout: _alpha,
    F.dropout1d: partial(_features, 3),
    F.dropout2d: partial(_features, 3),  # three dimensions are examples, channels and one more, as PyTorch takes them
    F.dropout3d: partial(_features, 5),
    F.feature_alpha_dropout: _alpha_features,
    torch.dropout: lambda input, p, train: _plain(input, p, train),
    torch.dropout_: lambda input, p, train: _plain(input, p, train, True),
    torch.alpha_dropout: lambda input, p, train: _alpha(input, p, train),
    torch.alpha_dropout_: lambda input, p, train: _alpha(input, p, train, True),
    torch.feature_dropout: lambda input, p, train: _features(2, input, p, train),
    torch.feature_dropout_: lambda input, p, train: _features(2, input, p, train, True),
    torch.feature_alpha_dropout: lambda input, p, train: _alpha_features(input, p, train),
    torch.feature_alpha_dropout_: lambda input, p, train: _alpha_features(input, p, train, True),
    F.scaled_dot_product_attention: _scaled_dot_product,
    F.multi_head_attention_forward: _multi_head,
    **{function: partial(_recurrent, function) for function in CELLS},
}
"""How to read the arguments of each function."""
