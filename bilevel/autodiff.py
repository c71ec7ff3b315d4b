"""Derivatives as pure functions of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Variable, forward_ad
from torch.nn.attention import _backend_names
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from bilevel.duals import QUICK
from bilevel.plain import PLAIN

NUMBERS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, np.ndarray, np.generic)
"""Outputs that carry no derivative."""

WRONG = (
    *(F.layer_norm, F.batch_norm, F.instance_norm, torch.layer_norm, torch.batch_norm, torch.instance_norm),
    *(torch.linalg.solve, torch.linalg.solve_ex),
)
"""Operations whose derivative of forward mode in the input PyTorch 2.13 computes wrongly."""

FAILING = (
    *(F.softmax, torch.softmax, Tensor.softmax, F.softmin, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    *(torch.logsumexp, Tensor.logsumexp, F.cross_entropy, F.multi_head_attention_forward),
    F.scaled_dot_product_attention,
)
"""Operations whose derivative of forward mode in the input PyTorch 2.13 cannot compute."""


def linearize(
    function: Callable[..., Any], params: Mapping[str, Tensor], tangents: Mapping[str, Tensor]
) -> Callable[..., Any]:
    r"""The first-order Taylor expansion of a function in its first argument (``eq:lin-network``).

    .. math:: x \mapsto f(w_0, x) + \mathbf{J}_{yw} \Delta w

    by one pass of forward-mode differentiation. It uses raw dual numbers, because ``torch.func.jvp`` refuses the
    in-place statistics of BatchNorm.

    Args:
        function: Called as ``function(params, *args, **kwargs)``; may return nested tuples, lists, dicts and
            dataclasses.
        params: The point :math:`w_0`.
        tangents: The direction :math:`\Delta w`, by the same names; a parameter without one stays fixed.

    Returns:
        A function of the remaining arguments.

    Example:
        >>> import torch
        >>> square = linearize(lambda p: p["w"] ** 2, {"w": torch.tensor(3.0)}, {"w": torch.tensor(0.5)})
        >>> square()  # 3 ** 2 + 2 * 3 * 0.5, not 3.5 ** 2
        tensor(12.)
    """

    def linearized(*args: Any, **kwargs: Any) -> Any:
        with forward_level((args, kwargs)):
            duals = {
                name: forward_ad.make_dual(value, tangents[name]) if name in tangents else value
                for name, value in params.items()
            }
            return primal_plus_tangent(function(duals, *args, **kwargs))

    return linearized


@contextmanager
def forward_level(inputs: Any = ()) -> Generator[None]:
    """A level of forward-mode differentiation in which a network may be run.

    Args:
        inputs: Of the network. If one requires a gradient, operations are refused whose derivative in it is not known.

    Raises:
        NotImplementedError: If an operation has no forward mode.
        RuntimeError: If PyTorch says so.
    """
    leaves = pytree.tree_leaves(inputs)
    mixed = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    with forward_ad.dual_level(), PlainAttention(), _Forward(), _Mixed() if mixed else nullcontext():
        try:
            yield
        except (NotImplementedError, RuntimeError) as error:
            if "forward AD" in str(error) or "forward mode" in str(error):
                error.add_note(
                    "The network contains an operation without forward-mode differentiation, which delta_stn "
                    "needs. Use method='centered_stn', or replace the operation."
                )
            raise


class PlainAttention:
    """Keeps attention from the fused kernels, which have neither a second derivative nor forward mode.

    What ``sdpa_kernel(SDPBackend.MATH)`` does, in a quarter of the time.
    """

    _SWITCHES: ClassVar = [
        (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"), name == "math")
        for name in _backend_names
    ]

    def __enter__(self) -> None:
        """Begin."""
        self._before = [enabled() for enabled, *_ in self._SWITCHES]
        for _, switch, plain in self._SWITCHES:
            switch(plain)

    def __exit__(self, *error: object) -> None:
        """Let PyTorch choose as before."""
        for (_, switch, _), before in zip(self._SWITCHES, self._before, strict=True):
            switch(before)


class _Forward(TorchFunctionMode):
    """Puts other functions in place of those that have no forward mode, or a slow one."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        quick = QUICK.get(func)
        if quick is not None:
            return quick(func, *args, **(kwargs or {}))
        return PLAIN.get(func, func)(*args, **(kwargs or {}))


class _Mixed(TorchFunctionMode):
    """Refuses operations of which PyTorch 2.13 has forward mode, but not its derivative in the input."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fixed = func is F.batch_norm and not (kwargs or {}).get("training", args[5] if len(args) > 5 else False)
        if func in WRONG + FAILING and not fixed:
            raise NotImplementedError(
                f"the inner loss differentiates model(x) with respect to x, through {func.__name__}: linearised as in "
                "delta_stn, PyTorch computes that wrongly or not at all. Use method='centered_stn'; if no such "
                "derivative is meant, pass x.detach()."
            )
        return func(*args, **(kwargs or {}))


def primal_plus_tangent(output: Any) -> Any:
    """The first-order expansion from the dual numbers that a network returned.

    Args:
        output: Nested tuples, lists, dicts and dataclasses.

    Returns:
        The same nesting of plain tensors.
    """
    return map_tensors(_primal_plus_tangent, output, _plain)


def vjp(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """A vector-Jacobian product of tensors that have a graph.

    Args:
        outputs: None where there is no such output.
        inputs: What to differentiate in.
        cotangents: One per output; None stands for zero.
        retain_graph: Leave the graph in place for another product.
        create_graph: Make the product differentiable.

    Returns:
        One entry per input; None where nothing depends on it.

    Raises:
        RuntimeError: If an operation has no such derivative.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> vjp([x**2, None], [x], [torch.ones(2), None])
        [tensor([2., 4.])]
    """  # noqa: DOC502
    pairs = zip(outputs, cotangents, strict=True)
    live = [(y, u) for y, u in pairs if y is not None and y.requires_grad and u is not None]
    if not live or not inputs:
        return [None] * len(inputs)
    ys, us = zip(*live, strict=True)
    with SecondDerivatives():
        return [
            *torch.autograd.grad(
                ys, inputs, us, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
            )
        ]


def differentiate(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor], *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """What ``torch.autograd.grad`` does, without checks that take as long as a small layer. The graph stays.

    Args:
        outputs: What to differentiate; each has a graph.
        cotangents: One like each output.
        inputs: What to differentiate in.
        create_graph: Make the derivative differentiable.

    Returns:
        One entry per input; None where nothing depends on it.
    """
    found: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        tuple(outputs),
        tuple(cotangents),
        True,
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


class SecondDerivatives:
    """Says, in a block that differentiates twice, what to do about an operation that cannot be."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Add a note to the error of PyTorch."""
        words = ("is not implemented", "twice", "Double backward")
        if isinstance(error, RuntimeError) and any(part in str(error) for part in words):
            error.add_note(
                "inner_loss contains an operation without second derivatives, which implicit and unrolled methods "
                "need. Replace it, or use method='centered_stn' or 'stn'."
            )


def map_tensors(
    function: Callable[[Tensor], Any], output: Any, otherwise: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Apply a function to every tensor of what a network returned.

    Args:
        function: Of a tensor.
        output: Nested tuples, lists, dicts and dataclasses.
        otherwise: Of everything else.

    Returns:
        The same nesting.

    Example:
        >>> map_tensors(lambda x: 2 * x, {"y": (torch.tensor(1.0), "text")})
        {'y': (tensor(2.), 'text')}
    """

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return otherwise(leaf)
        result = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            # Not by setattr: the dataclass may be frozen.
            object.__setattr__(result, field.name, map_tensors(function, getattr(leaf, field.name), otherwise))
        return result

    return function(output) if isinstance(output, Tensor) else pytree.tree_map(visit, output)


class Gate:
    """The identity. Its derivative is zero while it is closed, which cuts a graph in two."""

    def __init__(self) -> None:
        """Start open."""
        self.is_closed = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """Let a tensor through.

        Returns:
            The same numbers.
        """
        passed: Tensor = _Pass.apply(tensor, self)  # type: ignore[no-untyped-call]
        return passed

    @contextmanager
    def closed(self) -> Generator[None]:
        """Close the gate inside the block."""
        self.is_closed = True
        try:
            yield
        finally:
            self.is_closed = False


class _Pass(torch.autograd.Function):
    @staticmethod
    @override
    def forward(tensor: Tensor, gate: Gate) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.gate = inputs[1]  # apart from forward, as torch.func wants it

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, None]:
        return None if ctx.gate.is_closed else cotangents[0], None


def _primal_plus_tangent(leaf: Tensor) -> Tensor:
    primal, tangent = forward_ad.unpack_dual(leaf)
    value: Tensor = primal if tangent is None else primal + tangent
    return value


def _plain(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, NUMBERS):
        return leaf
    return Opaque(leaf)


class Opaque:
    """In place of an object that a network returned, such as a cache of keys and values, and that no loss may use.

    A tangent inside an object that is not unpacked is lost, and with it the gradient of the response.
    """

    def __init__(self, original: Any) -> None:
        """Stand for an object."""
        vars(self)["_kind"] = type(original).__name__

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"inner_loss uses a {vars(self)['_kind']} that the network returned, which delta_stn cannot linearise: "
            "return its tensors (in tuples, lists, dicts or dataclasses) and build it in the loss, or use "
            "method='centered_stn'."
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to be used."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __call__ = __getitem__ = __len__ = __iter__ = __contains__ = __bool__ = __setattr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be used."""
        next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))._refuse()
