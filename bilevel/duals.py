r"""Functions of dual numbers that PyTorch's forward mode computes slowly, by the formulas of their tangents.

For ``x * y`` where one factor has no tangent, PyTorch multiplies the other one by a tensor of symbolic zeros, whose
shape it finds out in Python: that takes 0.5 ms for the smallest tensor. The softmax, and norms with a scale, go through
Python as well when their tangent is differentiated. Here a function of :math:`x + \varepsilon \dot x` is computed from
value and tangent,

.. math:: f(x + \varepsilon \dot x) = f(x) + \varepsilon\, \mathbf{J}_f(x)\, \dot x,

and the tangent can be differentiated as often as its formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from typing_extensions import override


def unpack(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What ``forward_ad.unpack_dual`` returns inside of a level, without its look for a graph to be exported.

    Returns:
        Value and tangent. There is never more than one level, whose number is 0.
    """
    value, tangent = _VF._unpack_dual(x, level=0)
    return value, tangent


def split(x: Any) -> tuple[Any, Tensor | None]:
    """Value and tangent; anything else is a value."""
    if not isinstance(x, Tensor) or is_functorch_wrapped_tensor(x):
        return x, None
    return unpack(x)


def join(value: Tensor, tangent: Tensor) -> Tensor:
    """A dual number; the tangent is broadcast to the value."""
    if tangent.dtype != value.dtype:
        tangent = tangent.to(value.dtype)
    dual: Tensor = _VF._make_dual(value, tangent if tangent.shape == value.shape else tangent.expand_as(value), level=0)
    return dual


def _product(function: Any, x: Any, y: Any, **options: Any) -> Any:
    """A product: linear in either factor."""
    (a, da), (b, db) = split(x), split(y)
    if options or (da is None) == (db is None):
        return function(x, y, **options)
    return join(function(a, b), function(a, db) if da is None else function(da, b))


def _quotient(function: Any, x: Any, y: Any, **options: Any) -> Any:
    """Linear in the numerator."""
    (a, da), (b, db) = split(x), split(y)
    if options or da is None or db is not None:
        return function(x, y, **options)
    return join(function(a, b), function(da, b))


def _sum(function: Any, x: Any, y: Any, **options: Any) -> Any:
    (a, da), (b, db) = split(x), split(y)
    tangent = db if da is None else da
    if options or tangent is None or (da is not None and db is not None):
        return function(x, y, **options)
    return join(function(a, b), tangent)


def _difference(function: Any, x: Any, y: Any, **options: Any) -> Any:
    (a, da), (b, db) = split(x), split(y)
    if options or (da is None) == (db is None):
        return function(x, y, **options)
    positive = (da is not None) != (function in REVERSED)
    tangent = db if da is None else da
    assert tangent is not None
    return join(function(a, b), tangent if positive else -tangent)


def _softmax(function: Any, *args: Any, **options: Any) -> Any:
    r"""With :math:`s = \operatorname{softmax}(x)`, the tangent is :math:`s \odot (\dot x - s^\top \dot x)`."""
    name = "input" if "input" in options else "self"
    x = args[0] if args else options.get(name)
    dim = args[1] if len(args) > 1 else options.get("dim")
    value, tangent = split(x)
    if tangent is None or not isinstance(dim, int):
        return function(*args, **options)
    shares = function(value, *args[1:], **options) if args else function(**options | {name: value})
    weighted = shares * tangent.to(shares.dtype)
    return join(shares, weighted - shares * weighted.sum(dim, keepdim=True))


def _layer_norm(
    function: Any, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """The scale and the shift apart from the norm."""
    if split(input)[1] is None:
        return function(input, normalized_shape, weight, bias, eps)
    y = _normal_layer(input, normalized_shape, eps)
    y = y if weight is None else _product(torch.mul, y, weight)
    return y if bias is None else _sum(torch.add, y, bias)


def _normal_layer(input: Tensor, normalized_shape: Any, eps: float) -> Tensor:
    x, tangent = split(input)
    if tangent is None or not _by_kernel(x):
        return F.layer_norm(input, normalized_shape, None, None, eps)
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    y, *moments = torch.native_layer_norm(x, shape, None, None, eps)
    return join(y, _turned(tangent, x, *moments, shape, eps))


def _batch_norm(
    function: Any,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """The same with the statistics of a batch."""
    x, tangent = split(input)
    one = x.ndim < 2 or x.numel() == x.shape[1]  # which F.batch_norm refuses
    mixed = running_mean is not None and running_mean.dtype != x.dtype
    if tangent is None or not training or one or mixed or not _by_kernel(x):
        return function(input, running_mean, running_var, weight, bias, training, momentum, eps)
    result, *moments = torch.native_batch_norm(x, None, None, running_mean, running_var, True, momentum, eps)
    y = join(result, _turned(tangent, x, *moments, None, eps))
    sizes = [-1, *[1] * (x.ndim - 2)]
    y = y if weight is None else _product(torch.mul, y, weight.reshape(sizes))
    return y if bias is None else _sum(torch.add, y, bias.reshape(sizes))


def _by_kernel(x: Tensor) -> bool:
    """Whether a value is a constant of a kind for which the kernels of a norm are known to do what is wanted here."""
    return x.device.type in ("cpu", "cuda") and x.dtype in (torch.float32, torch.float64) and not x.requires_grad


class Turned(torch.autograd.Function):
    r"""The derivative of a norm without scale and shift, applied to a tangent.

    .. math:: \mathbf{J} \dot x = \frac{\dot x - \overline{\dot x} - y\, \overline{y \dot x}}{\sigma}

    It is symmetric, so that the kernel of the backward pass computes it at once; and its own derivative is the same.
    """

    @staticmethod
    @override
    def forward(tangent: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, shape: list[int] | None, eps: float) -> Tensor:
        tangent, mask = tangent.contiguous(), [True, False, False]
        if shape is None:
            stats = (None, None, None, mean, rstd)
            turned: Tensor = torch.ops.aten.native_batch_norm_backward(tangent, x, *stats, True, eps, mask)[0]
            return turned
        turned = torch.ops.aten.native_layer_norm_backward(tangent, x, shape, mean, rstd, None, None, mask)[0]
        return turned

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:4])
        ctx.options = inputs[4:]

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        return _turned(cotangents[0], *ctx.saved_tensors, *ctx.options), None, None, None, None, None


def _turned(*args: Any) -> Tensor:
    turned: Tensor = Turned.apply(*args)  # type: ignore[no-untyped-call]
    return turned


def _group_norm(
    function: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """The layer norm of each group."""
    if split(input)[1] is None or input.ndim < 2 or input.shape[1] % num_groups:
        return function(input, num_groups, weight, bias, eps)
    groups = input.reshape(len(input), num_groups, -1)
    y = _normal_layer(groups, groups.shape[-1:], eps).reshape(input.shape)
    sizes = [-1, *[1] * (input.ndim - 2)]
    y = y if weight is None else _product(torch.mul, y, weight.reshape(sizes))
    return y if bias is None else _sum(torch.add, y, bias.reshape(sizes))


def _table() -> dict[Any, Callable[..., Any]]:
    names = {
        _product: "mul multiply __mul__ __rmul__",
        _quotient: "div divide true_divide __truediv__ __div__",
        _sum: "add __add__ __radd__",
        _difference: "sub subtract __sub__ rsub __rsub__",
    }
    found: dict[Any, Callable[..., Any]] = {}
    for rule, functions in names.items():
        for name in functions.split():
            found |= {getattr(owner, name): rule for owner in (torch, Tensor) if hasattr(owner, name)}
    found |= dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _softmax)
    return found | {F.layer_norm: _layer_norm, F.group_norm: _group_norm, F.batch_norm: _batch_norm}


REVERSED = (torch.rsub, Tensor.__rsub__)
QUICK = _table()
"""By function: called with the function and its arguments."""
