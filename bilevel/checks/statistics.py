"""Statistics over the examples of a batch, held fixed: batch norm may couple examples, nothing else may."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

NAMES = ("mean", "var", "std", "var_mean", "std_mean")
STATISTICS = {getattr(owner, name) for owner in (torch, Tensor) for name in NAMES if hasattr(owner, name)}


@final
class FixedStatistics(TorchFunctionMode):
    """Inside, means and variances over the examples are those of the first pass, and constant.

    That makes the examples of a network with batch norm independent of each other, whether the norm is PyTorch's or the
    user's own. A statistic of everything, as the mean of a loss, is none of these.

    Attributes:
        own: Whether there were others than those of PyTorch's batch norm.
        leaked: Whether the network returned a statistic, or what was made of statistics alone.
    """

    def __init__(self, count: int, excluded: Collection[tuple[int, ...]] = ()) -> None:
        """Hold the statistics of ``count`` examples.

        Args:
            count: The number of examples.
            excluded: Shapes of hyperparameters with one row per example, whose mean is no statistic of activations.
        """
        super().__init__()
        self._count, self._excluded = count, excluded
        self._marked: dict[int, Any] = {}
        self.leaked = False
        self.own = False
        self._known: list[Any] = []
        self._place = 0

    def again(self) -> FixedStatistics:
        """Begin a pass.

        Returns:
            This object.
        """
        self._place = 0
        self._marked.clear()
        return self

    def look(self, output: Any) -> None:
        """Note whether a network returns a statistic, or what was made of statistics alone.

        Args:
            output: What it returned.
        """
        self.leaked |= any(id(leaf) in self._marked for leaf in pytree.tree_leaves(output))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace statistics."""
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func in STATISTICS and self._over_examples(*args, **kwargs):
            self.own = True
            return self._mark(self._fixed(lambda: func(*args, **kwargs)))
        result = func(*args, **kwargs)
        if self._marked:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            marked = [id(x) in self._marked for x in tensors]
            if any(marked) and not any(
                self._is_activation(x) for x, bad in zip(tensors, marked, strict=True) if not bad
            ):
                self._mark(result)
        return result

    def _is_activation(self, x: Tensor) -> bool:
        """Whether it depends on the responses and may have one row per example, unlike a weight."""
        return x.requires_grad and x.shape[:1] == (self._count,)

    def _mark(self, result: Any) -> Any:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._marked[id(leaf)] = leaf  # which keeps it alive, and its id its own
        return result

    def _over_examples(self, input: Any, dim: Any = None, *args: Any, axis: Any = None, **kwargs: Any) -> bool:
        dim = axis if dim is None or isinstance(dim, bool) else dim
        if isinstance(input, Tensor) and tuple(input.shape) in self._excluded:
            return False
        if (
            not isinstance(input, Tensor)
            or input.shape[:1] != (self._count,)
            or not isinstance(dim, int | tuple | list)
        ):
            return False
        dims = {place % input.ndim for place in ([dim] if isinstance(dim, int) else dim)}
        return 0 in dims and len(dims) < input.ndim

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float | None = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if training or running_mean is None:
            dims = [dim for dim in range(input.ndim) if dim != 1]
            running_var, running_mean = self._fixed(lambda: torch.var_mean(input, dims, correction=0))
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)

    def _fixed(self, compute: Callable[[], Any]) -> Any:
        if self._place == len(self._known):
            self._known.append(pytree.tree_map_only(Tensor, Tensor.detach, compute()))
        self._place += 1
        return self._known[self._place - 1]
