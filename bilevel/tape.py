"""Random numbers that a graph draws once and uses several times."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

aten = torch.ops.aten
BY_SHAPE = {
    *(aten.rand.default, aten.randn.default, aten.rand_like.default, aten.randn_like.default, aten.randperm.default),
    *(aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype),
    *(aten.bernoulli.p, aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default),
    *(aten.random_.default, aten.random_.to, getattr(aten.random_, "from")),
}
"""Draws that depend on shapes and plain numbers, not on the values of tensors."""


@final
class Tape:
    """Records what is drawn in a first block, while a graph is traced, and hands it out again in later ones.

    A traced graph has no random state that could be set back. So its later blocks use the tensors that the first one
    drew. A draw that depends on the values of a tensor cannot be used again so, and raises.

    Example:
        >>> tape = Tape()
        >>> with tape.play():
        ...     first = torch.rand(2)
        >>> with tape.play():
        ...     second = torch.rand(2)
        >>> bool((first == second).all())
        True
    """

    def __init__(self) -> None:
        """Start empty."""
        self.drawn: list[tuple[Any, Tensor]] = []
        self.recorded = False

    @contextmanager
    def play(self) -> Generator[None]:
        """Record in the first block, repeat in all others."""
        with _Repeat(self.drawn) if self.recorded else _Record(self.drawn):
            yield
        self.recorded = True


class _Record(TorchDispatchMode):
    """Notes the result of every draw."""

    def __init__(self, drawn: list[tuple[Any, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = drawn

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _draws(func, args, kwargs):
            if func is aten.native_dropout.default:
                self.drawn.append((_kind(func, args, kwargs), result[1].clone()))
            elif func in BY_SHAPE:
                self.drawn.append((_kind(func, args, kwargs), result.clone()))
            else:
                raise NotImplementedError(
                    f"{func} draws random numbers that a compiled step cannot repeat; with control=False and "
                    "antithetic=False the method need not repeat them"
                )
        return result


class _Repeat(TorchDispatchMode):
    """Answers every draw with what was noted."""

    def __init__(self, drawn: list[tuple[Any, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = iter(drawn)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _draws(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        kind, result = next(self.left, (None, None))
        if result is None or kind != _kind(func, args, kwargs):
            raise NotImplementedError(f"{func} draws other random numbers when the loss is evaluated again")
        if func is aten.native_dropout.default:
            return args[0] * result / (1 - args[1]), result
        return args[0].copy_(result) if func._schema.is_mutable else result.clone()


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers; fused attention does so only where it has a dropout rate."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    return bool(given.get("dropout_p", 0.0)) or not any(name == "dropout_p" for name in names)


def _kind(func: Any, args: Any, kwargs: Any) -> Any:
    """What decides a draw, beside the random state."""
    leaves = pytree.tree_leaves((args, kwargs))
    return func, [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
