"""Products of matrices in a graph that is about to be compiled."""

from __future__ import annotations

import platform
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

LARGE = 2**20
"""Multiplications in a product from which on oneDNN is faster than the call of it is slow."""
ONEDNN = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")
"""Whether its products can be compiled, and have been measured."""
aten = torch.ops.aten


def choose_products(graph: fx.GraphModule) -> None:
    """Compute each product by the library that is fastest for it.

    A product of matrix and vector is left to the BLAS: as a sum, as inductor writes it, it takes ten times as long. A
    large product of matrices in single precision on a CPU goes to oneDNN, which on some processors takes half the time
    of the BLAS, and on others the same.

    Args:
        graph: Changed in place. Its values differ by rounding.
    """
    for node in graph.graph.find_nodes(op="call_function", target=aten.mv.default):
        matrix, vector = node.args
        with graph.graph.inserting_before(node):
            column = graph.graph.call_function(aten.unsqueeze.default, (vector, 1))
            product = graph.graph.call_function(aten.mm.default, (matrix, column))
            node.replace_all_uses_with(graph.graph.call_function(aten.squeeze.dim, (product, 1)))
        graph.graph.erase_node(node)
    if ONEDNN:
        transposes: dict[fx.Node, fx.Node] = {}
        for target, bias in ((aten.mm.default, 0), (aten.addmm.default, 1)):
            for node in graph.graph.find_nodes(op="call_function", target=target):
                first, second = node.args[bias : bias + 2]
                if node.kwargs or len(node.args) != bias + 2 or not _is_large(node, first, second):
                    continue
                shift: Any = node.args[0] if bias else None
                if shift is not None and shift.meta["val"].ndim != 1:
                    continue
                turned = _transposed(graph.graph, second, transposes)
                with graph.graph.inserting_before(node):
                    arguments: tuple[Any, ...] = (first, turned, shift, "none", [], "")
                    product = graph.graph.call_function(torch.ops.mkldnn._linear_pointwise.default, arguments)
                node.replace_all_uses_with(product)
                graph.graph.erase_node(node)
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta.pop("val", None)  # the compiler makes its own, and refuses those of another trace
    graph.graph.lint()
    graph.recompile()


@contextmanager
def compiled_products() -> Generator[None]:
    """Let inductor compile products by oneDNN of what is not constant; its own rule takes only constant weights."""
    if not ONEDNN:
        yield
        return
    from torch._inductor import ir, lowering, mkldnn_ir, mkldnn_lowerings  # takes seconds

    def unary(x: Any, w: Any, b: Any, *settings: Any, layout: Any = None) -> Any:
        return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, w, b, *settings))

    def binary(x: Any, y: Any, w: Any, b: Any, attr: Any, layout: Any = None) -> Any:
        return ir.TensorBox.create(mkldnn_ir.LinearBinary.create(x, y, w, b, attr))

    assert mkldnn_lowerings is not None
    rules: dict[Any, Any] = lowering.lowerings
    product = torch.ops.mkldnn._linear_pointwise
    before = {key: rules[key] for key in (product.default, product.binary)}
    rules.update({product.default: unary, product.binary: binary})
    try:
        yield
    finally:
        rules.update(before)


def _is_large(*nodes: Any) -> bool:
    """Whether a product, and what is multiplied, are for oneDNN."""
    values: list[Any] = [node.meta.get("val") for node in nodes]
    if not all(isinstance(value, Tensor) and value.dtype == torch.float32 for value in values):
        return False
    product, first, _ = values
    return bool(product.device.type == "cpu" and product.numel() * first.shape[1] >= LARGE)


def _transposed(graph: fx.Graph, node: Any, known: dict[fx.Node, fx.Node]) -> Any:
    """The transpose of a matrix, made once for all products that it takes part in."""
    if node.target is aten.t.default:
        return node.args[0]
    while node.target is aten.detach.default:
        node = node.args[0]
    if node not in known:
        *_, last = graph.find_nodes(op="placeholder")
        with graph.inserting_after(last if node.op == "placeholder" else node):
            turned = graph.call_function(aten.t.default, (node,))
        with graph.inserting_after(turned):
            known[node] = graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    return known[node]
