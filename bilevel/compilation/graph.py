r"""Trace a computation of two stages, and cut its graph between them.

A Hessian product is such a computation. The forward and the backward pass are known before the vector is, and a solver
asks for products with many. ``torch.compile`` cannot differentiate twice, but eager code that does can be traced into
one flat graph of tensor operations. That graph is cut by dependence on the late input. Random numbers do not depend on
it: they are drawn once, early.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size)
"""What may stand beside tensors: values that cannot change."""


@final
@dataclass(frozen=True)
class Later:
    """The part of a computation that waits for more tensors.

    Attributes:
        function: Maps tensors to tensors; None stands for zero on either side.
        like: Tensors of the kind that it takes.
        typical: Whether it can be tried on those very tensors only, and not on any of their kind.
        repeated: Called around a loop, for a function of tensors that are all there; what a call always has to see to
            is done once. None calls the function itself.
    """

    function: Callable[[Sequence[Tensor | None]], list[Tensor | None]]
    like: Sequence[Tensor]
    typical: bool = False
    repeated: Callable[[], AbstractContextManager[Callable[[Sequence[Tensor]], Any]]] | None = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the rest.

        Returns:
            One entry per output.
        """
        return self.function(tensors)


Stage = Callable[..., tuple[Any, list[Later]]]
"""Maps nested tensors and plain values to such outputs, and to what remains to be computed later."""
Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""Makes a fast function of a graph, given example inputs."""


def kind(leaf: Any) -> Any:
    """What two leaves must have in common to share a graph.

    Returns:
        Something that can be compared and hashed.

    Raises:
        TypeError: If it is neither a plain tensor nor a plain value.
    """
    if type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided:
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if not isinstance(leaf, PLAIN):
        raise TypeError(f"found a {type(leaf).__name__} among tensors and plain values")
    return type(leaf), repr(leaf)


@dataclass(frozen=True)
class Trace:
    """A whole computation as one graph without mutations.

    Attributes:
        module: The graph, and the tensors that it holds. Its inputs are those of the stage, then the late ones.
        outputs: Nested nodes and plain values: those of the stage, then a list for each later part.
    """

    module: fx.GraphModule
    outputs: tuple[Any, list[list[fx.Node | None]]]


def trace(stage: Stage, inputs: Any, tensors: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]]) -> Trace:
    """Trace a stage together with its later parts.

    Args:
        stage: The computation.
        inputs: Of the stage.
        tensors: Among the inputs, in order.
        vectors: Inputs of each later part.

    Returns:
        The trace.

    Raises:
        ValueError: If it changes tensors in place that it did not make itself.
    """
    results: Any = None

    def joint(*values: Tensor) -> list[Tensor]:
        nonlocal results
        given = iter(values)
        outputs, rest = stage(*pytree.tree_map_only(Tensor, lambda _: next(given), inputs))
        results = outputs, [later([next(given) for _ in v]) for later, v in zip(rest, vectors, strict=True)]
        return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]

    flat = [*tensors, *(part for vector in vectors for part in vector)]
    module = make_fx(joint)(*flat)
    # A second pass removes mutations, because the first cannot do so while it takes derivatives.
    module = make_fx(torch.func.functionalize(module, remove="mutations"))(*flat)
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise ValueError(f"{node.target} changes a tensor in place that was made elsewhere")
    for leaf in pytree.tree_leaves(results):
        if not isinstance(leaf, Tensor):
            kind(leaf)  # refuses what may hold tensors of the trace
    nodes = iter(cast(Iterable[Any], module.graph.output_node().args[0]))
    return Trace(module, pytree.tree_map_only(Tensor, lambda _: next(nodes), results))


class _Late(NamedTuple):
    """One later part: what it takes from the early graph, its own inputs, and what it returns."""

    crossing: list[fx.Node]
    vector: Sequence[Tensor]
    outputs: list[fx.Node | None]
    run: Callable[..., Any]


@final
class Compiled:
    """The early graph of a trace, and one late graph for each of its later parts."""

    def __init__(
        self, trace: Trace, tensors: list[Tensor], vectors: Sequence[Sequence[Tensor]], backend: Backend
    ) -> None:
        """Cut the graph and compile the parts."""
        nodes = list(trace.module.graph.nodes)
        given = [node for node in nodes if node.op == "placeholder"]
        # Tensors that the stage reads beside its inputs become inputs, since a compiler may freeze their values.
        held = [node for node in nodes if node.op == "get_attr"]
        self.held: list[Tensor] = [getattr(trace.module, node.target) for node in held]
        self.known = [*given[: len(tensors)], *held]
        outputs, later_outputs = trace.outputs
        self.leaves, self.nesting = pytree.tree_flatten(outputs)
        rest = iter(given[len(tensors) :])
        cuts = []
        for vector, outputs in zip(vectors, later_outputs, strict=True):
            own = [next(rest) for _ in vector]
            body, border = _cut_late(nodes, outputs, self.known, own)
            cuts.append((body, border, own))
        wanted = [*_nodes(self.leaves), *(node for _, border, _ in cuts for node in border)]
        self.made = [node for node in dict.fromkeys(wanted) if node not in self.known]
        body, _ = _needed(nodes, self.made, set(self.known))
        values = [*tensors, *self.held]
        self.early = _compile_part(trace.module, self.known, body, self.made, values, backend)
        found = self._run_early(tensors)
        self.late: list[_Late] = []
        for (body, border, own), vector, outputs in zip(cuts, vectors, later_outputs, strict=True):
            values = [*(found[node] for node in border), *vector]
            run = _compile_part(trace.module, [*border, *own], body, _nodes(outputs), values, backend)
            self.late.append(_Late(border, vector, outputs, run))

    def __call__(self, tensors: list[Tensor]) -> tuple[Any, list[Later]]:
        """Run the early part.

        Args:
            tensors: Among the inputs of the stage, in order.

        Returns:
            What the stage would return.
        """
        found = self._run_early(tensors)
        rest = []
        for late in self.late:
            crossing = [found[node] for node in late.crossing]
            loop = partial(_repeated, late, crossing)
            rest.append(Later(partial(_run_late, late, crossing), late.vector, repeated=loop))
        # A compiler may return the input itself for 1 * input. A copy keeps the caller from changing the input.
        given = {_memory(found[node]) for node in self.known}
        leaves = [found[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in self.leaves]
        leaves = [leaf.clone() if isinstance(leaf, Tensor) and _memory(leaf) in given else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, self.nesting), rest

    def _run_early(self, tensors: list[Tensor]) -> dict[fx.Node, Tensor]:
        values = [*tensors, *(tensor.detach() for tensor in self.held)]
        with _settled(values):
            made = self.early(*values)
        return dict(zip([*self.known, *self.made], [*values, *made], strict=True))


def _run_late(late: _Late, crossing: list[Tensor], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(tensors, late.vector, strict=True)
    values = [*crossing, *(torch.zeros_like(like) if tensor is None else tensor.detach() for tensor, like in pairs)]
    with _settled(values):
        found = iter(late.run(*values))
    return [None if node is None else next(found) for node in late.outputs]


@contextmanager
def _repeated(late: _Late, crossing: list[Tensor]) -> Generator[Callable[[Sequence[Tensor]], Any]]:
    with _settled([*crossing, *late.vector]):
        yield lambda tensors: late.run(*crossing, *tensors)


def _cut_late(
    nodes: list[fx.Node], outputs: Any, known: list[fx.Node], own: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of a late graph, and those that it takes from the early one."""
    late = set(own)
    for node in nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    early = {node for node in nodes if node not in late and not _is_view(node)}
    body, border = _needed(nodes, outputs, early | set(known) | set(own))
    return body, [node for node in border if node not in own]


def _needed(nodes: list[fx.Node], outputs: Any, given: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that the outputs need, and the given nodes that those start from; both in order."""
    body: set[fx.Node] = set()
    border: set[fx.Node] = set()
    stack = _nodes(outputs)
    while stack:
        node = stack.pop()
        if node in given:
            border.add(node)
        elif node not in body:
            body.add(node)
            stack += node.all_input_nodes
    return [node for node in nodes if node in body], [node for node in nodes if node in border]


def _compile_part(
    module: fx.GraphModule,
    inputs: list[fx.Node],
    body: list[fx.Node],
    outputs: list[fx.Node],
    values: list[Tensor],
    backend: Backend,
) -> Callable[..., Any]:
    if not outputs:
        return lambda *_: ()
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    with _settled(values):
        return backend(fx.GraphModule(module, graph), values)


@contextmanager
def _settled(tensors: list[Tensor]) -> Generator[None]:
    """Turn autograd and autocast off: derivatives and casts are in the graph already."""
    with torch.no_grad(), ExitStack() as stack:
        for where in {tensor.device.type for tensor in tensors}:
            if torch.is_autocast_enabled(where):
                stack.enter_context(torch.autocast(where, enabled=False))
        yield


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    return node.target._schema.returns[0].alias_info is not None


def _nodes(nested: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, fx.Node)]
