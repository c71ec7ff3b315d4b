"""A stage that compiles itself when it is first called."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from bilevel.compilation.graph import Backend, Compiled, Later, Stage, kind, trace
from bilevel.compilation.products import choose_products, compiled_products
from bilevel.precision import autocast_outside
from bilevel.rng import Stream

_LOG = logging.getLogger("bilevel")
MAX_KINDS = 8
"""How many kinds of inputs are compiled; further ones run as they are."""
LEAVES = (Tensor, torch.nn.Parameter, bool, int, float, str)


def inductor(graph: fx.GraphModule, inputs: list[Tensor], *, host: bool = True) -> Callable[..., Any]:
    """Compile with TorchInductor; the random numbers stay those of the graph.

    Args:
        graph: Without mutations.
        inputs: Examples.
        host: Call the kernels from Python; otherwise from C++, which pays for graphs of many small ones.

    Returns:
        A function of the same inputs.
    """
    import torch._inductor.config  # takes seconds

    choose_products(graph)
    with torch._inductor.config.patch(fallback_random=True, cpp_wrapper=not host), compiled_products():
        compiled: Any = torch._inductor.compile(graph, [*inputs])
    # Without the guard against being traced itself, which nothing here does.
    function: Callable[..., Any] = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    return function


def inductor_in_cpp(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """The same, called from C++ on a CPU; if that fails, from Python.

    Returns:
        A function of the same inputs.
    """
    if all(tensor.device.type == "cpu" for tensor in inputs):
        try:
            return inductor(copy.deepcopy(graph), inputs, host=False)
        except Exception as error:
            _LOG.info("no C++ wrapper: %s", error)
    return inductor(graph, inputs)


@final
class Staged:
    """A stage that is traced and compiled at its first call, and again for every other kind of inputs.

    Called like the stage itself. Inputs are of the same kind if they agree in nesting, shapes, strides, dtypes and
    devices, and in everything that is not a tensor. Whatever else the stage reads is treated as in ``torch.jit.trace``:
    tensors are read at every call (changed in place, not replaced), Python values are frozen at the first.

    The first results of every kind are compared with those of the stage itself. If they differ, or if the stage cannot
    be traced or compiled, a warning says so, and the stage runs as it is from then on.

    Attributes:
        working: Whether nothing has failed so far.
        reason: Why it failed.
        seconds: What tracing and compiling has taken so far.

    Example:
        >>> def line(slope):
        ...     return slope.exp(), [Later(lambda x: [slope.exp() * x[0]], [slope])]
        >>> staged = Staged(line, "a line", backend=lambda graph, inputs: graph)
        >>> value, (rest,) = staged(torch.zeros(()))
        >>> value, rest([torch.tensor(2.0)])
        (tensor(1.), [tensor(2.)])
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        *,
        backend: Backend | None = None,
        after: Staged | None = None,
        limit: int | None = None,
    ) -> None:
        """Compile a stage, which warnings call ``name``; with ``inductor`` by default.

        If ``after`` has failed, this one is not tried, and there is no second warning. A graph of more than ``limit``
        operations counts as failed; with a limit, results of whole iterations are expected, whose rounding errors grow.
        """
        self.stage = stage
        self.name = name
        self.backend = backend
        self.after = after
        self.compiled: dict[Any, Compiled] = {}
        self.working = True
        self.reason = ""
        self.seconds = 0.0
        self._limit = limit
        self._full = False

    def __call__(self, *inputs: Any) -> tuple[Any, list[Later]]:
        """Run the stage.

        Args:
            inputs: Nested tensors and plain values.

        Returns:
            What the stage returns.
        """
        found = self.attempt(*inputs)
        if found is not None:
            return found
        result = self.stage(*inputs)  # if it fails as well, its own message is the better one
        if not self.working and self.reason:
            reason, self.reason = self.reason, ""
            _warn(
                f"could not compile {self.name}, which run uncompiled from here on ({reason}). "
                "Needed are a C++ compiler, batches of tensors and plain values, and losses without .item() or "
                "decisions on the values of tensors. Change that, or leave out compile=True."
            )
        elif self.working and not self._full and len(self.compiled) >= MAX_KINDS:
            self._full = True
            _warn(
                f"compiled {self.name} for {MAX_KINDS} kinds of inputs; further ones run uncompiled. Give batches of "
                "one shape (drop_last=True), and numbers that change as tensors."
            )
        return result

    def attempt(self, *inputs: Any) -> tuple[Any, list[Later]] | None:
        """The same, if it can be compiled; without a warning.

        Args:
            inputs: As in a call.

        Returns:
            What the stage returns, or None.
        """
        if not self.working or (self.after is not None and not self.after.working):
            return None
        leaves: list[Any] = []
        nesting = _flatten(inputs, leaves)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            which = (nesting, *map(kind, leaves), autocast_outside({tensor.device.type for tensor in tensors}))
            compiled = self.compiled.get(which)
            if compiled is None and len(self.compiled) < MAX_KINDS:
                compiled = self.compiled[which] = self._compile(inputs, tensors)
        except Exception as error:
            self.working = False
            self.compiled.clear()
            self.reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            return None
        return None if compiled is None else compiled(tensors)

    def _compile(self, inputs: tuple[Any, ...], tensors: list[Tensor]) -> Compiled:
        device = tensors[0].device if tensors else torch.device("cpu")
        started = time.perf_counter()

        def again() -> Any:  # every pass draws the random numbers that the caller draws next
            return Stream.current(device)()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with again():
                outputs, rest = self.stage(*inputs)
                vectors = [[_probe(tensor, later.typical) for tensor in later.like] for later in rest]
                expected = (outputs, [later(vector) for later, vector in zip(rest, vectors, strict=True)])
            with again():
                traced = trace(self.stage, inputs, tensors, vectors)
            if self._limit is not None and len(traced.module.graph.nodes) > self._limit:
                raise TooLarge(f"the graph has {len(traced.module.graph.nodes)} operations")
            with again():
                compiled = Compiled(traced, tensors, vectors, self.backend or inductor)
            with again():
                outputs, rest = compiled(tensors)
                found = (outputs, [later(vector) for later, vector in zip(rest, vectors, strict=True)])
            same = _close(found, expected)
            if not same and self._limit is not None:
                same = self._is_rounding(found, expected, inputs, vectors, again)
        self.seconds += time.perf_counter() - started
        _LOG.info("compiled %s in %.1f s", self.name, time.perf_counter() - started)
        if not same:
            raise ValueError(
                "its results differ from the uncompiled ones, as they do if they depend on Python values that change, "
                "or on random numbers of another library"
            )
        return compiled

    def _is_rounding(self, found: Any, expected: Any, inputs: Any, vectors: Any, again: Callable[[], Any]) -> bool:
        """Whether results differ by no more than what rounding errors grow to, as in an ill-conditioned iteration."""

        def nudge(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            signs = _probe(leaf, False).sign()
            return leaf.detach() * (1 + 2 * torch.finfo(leaf.dtype).eps * signs)

        with again():
            outputs, rest = self.stage(*pytree.tree_map_only(Tensor, nudge, inputs))
            nudged = (outputs, [later(vector) for later, vector in zip(rest, vectors, strict=True)])
        pairs = [
            (float((a - b).norm()), float((c - b).norm()), float(b.norm()))
            for a, b, c in zip(*map(pytree.tree_leaves, (found, expected, nudged)), strict=True)
            if isinstance(b, Tensor) and b.is_floating_point() and not torch.equal(a, b)
        ]
        return all(error <= min(10 * change, 0.1 * size) for error, change, size in pairs)


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """Append the leaves of nested values, in the order of pytree, which takes several times as long.

    Returns:
        What tells one nesting from another.
    """
    kind = type(value)
    if kind in LEAVES:
        leaves.append(value)
        return None
    if kind is list or kind is tuple:
        return kind, *[_flatten(part, leaves) for part in value]
    if kind is dict:
        return kind, *value, *[_flatten(part, leaves) for part in value.values()]
    found, nesting = pytree.tree_flatten(value)
    leaves += found
    return nesting


class TooLarge(Exception):
    """A graph that would take too long to compile."""


def _probe(like: Tensor, typical: bool) -> Tensor:
    """Numbers to try a later part on."""
    if typical:
        return like.clone()
    return torch.arange(like.numel(), dtype=like.dtype, device=like.device).cos().view(like.shape)


def _close(found: Any, expected: Any) -> bool:
    pairs = [
        (a, b)
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
        if isinstance(b, Tensor)
    ]
    real = [(a, b) for a, b in pairs if b.is_floating_point()]
    if not all(torch.equal(a.isfinite(), b.isfinite()) for a, b in real):
        return False
    if not all(torch.equal(a, b) for a, b in pairs if not b.is_floating_point()):
        return False
    compared = [
        (float((a - b).nan_to_num().norm()), float(b.nan_to_num().norm()), torch.finfo(b.dtype).eps) for a, b in real
    ]
    total = sum(size for _, size, _ in compared)
    # A tensor that is zero but for rounding is measured against all tensors together.
    return all(error <= eps**0.5 * max(size, 1e-3 * total) for error, size, eps in compared)


def _warn(message: str) -> None:
    warnings.warn(f"compile=True: {message}", UserWarning, stacklevel=3)
