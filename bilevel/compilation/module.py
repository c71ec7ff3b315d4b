"""A computation with a module, compiled as a function of all tensors that the module holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from bilevel.compilation.graph import Backend, Later
from bilevel.compilation.staged import Staged, inductor_in_cpp


@final
class OfModule:
    """A function of some parameters of a module, in which the module takes part; compiled when it is first called.

    Parameters and buffers are inputs of the graph, so that training may change them. What the function does to
    buffers is done to the module afterwards. What cannot be compiled runs as it is, as in :class:`Staged`.

    Attributes:
        staged: The compiled part.

    Example:
        >>> line = nn.Linear(1, 1)
        >>> slope = OfModule(
        ...     line, [line.weight], "a slope",
        ...     lambda params, x: torch.autograd.grad(line(x).sum(), params), backend=lambda graph, inputs: graph,
        ... )
        >>> slope(torch.tensor([[2.0], [3.0]]))
        (tensor([[5.]]),)
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        name: str,
        function: Callable[..., Any],
        *,
        backend: Backend | None = None,
        after: Staged | None = None,
    ) -> None:
        """Compile ``function(params, *inputs)``, which warnings call ``name``; ``after`` as in :class:`Staged`."""
        self._module = _Host(module)
        self._function = function
        self._names = [name for name, _ in self._module.named_parameters()]
        self._buffer_names = [name for name, _ in self._module.named_buffers()]
        places = {id(param): index for index, param in enumerate(self._module.parameters())}
        self._places = [places[id(param)] for param in params]
        self.staged = Staged(self._stage, name, backend=backend, after=after)

    def __call__(self, *inputs: Any) -> Any:
        """Compute the function.

        Args:
            inputs: Nested tensors and plain values.

        Returns:
            What it returns.
        """
        buffers = [*self._module.buffers()]
        (result, changed), _ = self.staged([*self._module.parameters()], buffers, inputs)
        with torch.no_grad():
            for buffer, value in zip(buffers, changed, strict=True):
                buffer.copy_(value)
        return result

    def _stage(
        self, params: list[Tensor], buffers: list[Tensor], inputs: tuple[Any, ...]
    ) -> tuple[tuple[Any, list[Tensor]], list[Later]]:
        leaves = [param.detach() for param in params]
        chosen = [leaves[place].requires_grad_() for place in self._places]
        copies = [buffer.clone() for buffer in buffers]
        named = dict(zip([*self._names, *self._buffer_names], [*leaves, *copies], strict=True))
        result = functional_call(self._module, named, (self._function, chosen, inputs))
        return (result, copies), []


@final
class WholeStep:
    """A function in which a module takes part, as one graph or not at all.

    Attributes:
        staged: The graph.
    """

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any], *, limit: int) -> None:
        """Compile ``function(*inputs)``, which may read the parameters and buffers of the module; unless too large."""
        self._module = _Host(module)
        self._function = function
        self._names = [name for name, _ in self._module.named_parameters()]
        self._buffer_names = [name for name, _ in self._module.named_buffers()]
        # To look for them at every call takes as long as a small layer.
        self._params = [self._held(name) for name in self._names]
        self._buffers = [self._held(name) for name in self._buffer_names]
        self.staged = Staged(self._stage, name, backend=inductor_in_cpp, limit=limit)

    def __call__(self, *inputs: Any) -> Any:
        """Compute the function.

        Args:
            inputs: Nested tensors and plain values.

        Returns:
            A list with what it returns; an empty one if it cannot be one graph.
        """
        params = [held[name] for held, name in self._params]
        found = self.staged.attempt(params, [held[name] for held, name in self._buffers], inputs)
        return [] if found is None else [found[0]]

    def _held(self, name: str) -> tuple[dict[str, Any], str]:
        """Where a module keeps a parameter or buffer."""
        place, _, last = name.rpartition(".")
        owner = self._module.get_submodule(place)
        return (owner._parameters if last in owner._parameters else owner._buffers), last

    def _stage(self, params: list[Tensor], buffers: list[Tensor], inputs: tuple[Any, ...]) -> tuple[Any, list[Later]]:
        tensors = [tensor.detach() for tensor in [*params, *buffers]]
        named = dict(zip([*self._names, *self._buffer_names], tensors, strict=True))

        def call(_: Any, *rest: Any) -> Any:
            return self._function(*rest)

        return functional_call(self._module, named, (call, [], inputs)), []


def gains(module: nn.Module | None, device: torch.device) -> bool:
    """Whether compiled steps of a self-tuning network are faster; if not, a warning says so.

    On a CPU they are not if the network has convolutions (``benchmarks/overhead.py``): those take most of the time, and
    the compiler leaves them as they are.

    Returns:
        Whether to compile.
    """
    convolves = module is not None and any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
    if device.type != "cpu" or not convolves:
        return True
    warnings.warn(
        "compile=True: on a CPU, compiled steps of a network with convolutions are not faster, so they run uncompiled.",
        UserWarning,
        stacklevel=3,
    )
    return False


class _Host(nn.Module):
    """Runs a function while the module has the tensors that :func:`functional_call` is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, function: Callable[..., Any], params: list[Tensor], inputs: tuple[Any, ...]) -> Any:
        return function(params, *inputs)
