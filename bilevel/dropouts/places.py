"""Where a network drops: layers, attention, and calls of functions, each with a name."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from bilevel.dropouts.calls import CALLS, Call
from bilevel.dropouts.rules import rule_of
from bilevel.layouts import following
from bilevel.rng import Stream


class Place(NamedTuple):
    """Where a network drops.

    Attributes:
        module: The name of the module that does it; ``""`` is the network itself.
        call: None for a layer. Otherwise the how manieth call of a function it is in the forward of that module.
    """

    module: str
    call: int | None


class Found(NamedTuple):
    """A place, and the rate that the network has there.

    Attributes:
        name: Of the layer; or of the module, with ``dropout`` (``dropout_1``, ...) for its calls of functions.
        place: Where it is.
        rate: The present one.
    """

    name: str
    place: Place
    rate: float


Visit = Callable[[Place, Call], Any]
"""Returns the result of the call; ``NotImplemented`` leaves it as it is."""


class Visits(TorchFunctionMode):
    """While active, every dropout of a network is visited, wherever it happens.

    Attributes:
        surprised: Whether something dropped outside of the modules that were followed, if those were not all.
    """

    def __init__(self, names: dict[int, str], visit: Visit, enter: Callable[[nn.Module], None] | None = None) -> None:
        """Visit the dropouts of modules with these names, by id; ``enter`` sees each module that is called."""
        super().__init__()
        self._names, self._visit, self._see = names, visit, enter
        self._stack: list[tuple[nn.Module, list[int]]] = []
        self._unseen = self.surprised = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Visit a call that drops; everything else passes."""
        kwargs = kwargs or {}
        result = self.visit(func, args, kwargs) if func in CALLS else NotImplemented
        return func(*args, **kwargs) if result is NotImplemented else result

    def visit(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Visit a call, wherever it was seen.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: And those by name.

        Returns:
            Its result; ``NotImplemented`` leaves it as it is.
        """
        read = CALLS.get(func)
        if read is None or not (self._stack or self._unseen):
            return NotImplemented
        call = read(*args, **kwargs)
        if not call.active:
            return NotImplemented
        if not self._stack:
            self.surprised |= call.rate > 0
            return NotImplemented
        return self._visit(self._place(), call)

    def _place(self) -> Place:
        module, calls = self._stack[-1]
        calls[0] += 1
        return Place(self._names[id(module)], None if is_layer(module) else calls[0] - 1)

    @contextmanager
    def running(self, layers: Sequence[nn.Module] | None = None) -> Generator[None]:
        """Follow which module runs, inside the block.

        Args:
            layers: The only modules to follow, which takes less time; all of them by default.
        """
        leave = self._follow_all() if layers is None else self._follow(layers)
        self._unseen = layers is not None
        layouts = following.get()  # whoever follows the examples sees all operations already
        host = layouts is not None and layouts.visits is None
        try:
            if host:
                assert layouts is not None
                layouts.visits = self.visit
                yield
            else:
                with self:
                    yield
        finally:
            if host and layouts is not None:
                layouts.visits = None
            leave()
            self._stack.clear()

    def _drop(self, layer: nn.Dropout, own: Callable[..., Any], input: Tensor) -> Any:
        """The forward of the layer, without the function that it calls."""
        if not layer.training:
            return own(input)
        call = CALLS[F.dropout](input, layer.p, True, layer.inplace)
        result = self._visit(Place(self._names[id(layer)], None), call)
        return own(input) if result is NotImplemented else result

    def _follow_all(self) -> Callable[[], None]:
        def enter(module: nn.Module, args: Any) -> None:
            if id(module) in self._names:
                self._stack.append((module, [0]))
                if self._see is not None:
                    self._see(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in self._names:
                self._stack.pop()

        # Hooks of all modules, because those of the network are the user's.
        handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _follow(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        before = [vars(layer).get("forward") for layer in layers]

        def forward(layer: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._stack.append((layer, [0]))
            try:
                return own(*args, **kwargs)
            finally:
                self._stack.pop()

        for layer in layers:
            if type(layer) is nn.Dropout and 0 <= layer.p <= 1:
                vars(layer)["forward"] = partial(self._drop, layer, layer.forward)
            else:
                vars(layer)["forward"] = partial(forward, layer, layer.forward)

        def remove() -> None:
            for layer, own in zip(layers, before, strict=True):
                if own is None:
                    del vars(layer)["forward"]
                else:
                    vars(layer)["forward"] = own

        return remove


def is_layer(module: nn.Module) -> bool:
    """Whether a module has one rate for all that it drops."""
    return isinstance(module, _DropoutNd | nn.MultiheadAttention | nn.RNNBase) or rule_of(module) is not None


def module_names(net: nn.Module) -> dict[int, str]:
    """The name of every module of a network, by id; the first one if it has several."""
    return {id(module): name for name, module in net.named_modules()}


def layers(net: nn.Module) -> list[Found]:
    """The layers of a network that drop, in order; without a call of the network.

    Args:
        net: Any network.

    Returns:
        Dropout layers, also those with a rate of zero; attention and recurrent networks with another rate; layers with
        a rule.
    """
    found = []
    for name, module in net.named_modules():
        rate = _rate_of(module)
        if rate is not None and (rate > 0 or not isinstance(module, nn.MultiheadAttention | nn.RNNBase)):
            found.append(Found(name, Place(name, None), rate))
    return found


def _rate_of(module: nn.Module) -> float | None:
    rule = rule_of(module)
    if rule is not None:
        return float(getattr(module, rule.rate) or 0.0)
    if isinstance(module, _DropoutNd):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention):
        plain = module.bias_k is None and module.bias_v is None and not module.add_zero_attn
        return float(module.dropout) if plain else None
    if isinstance(module, nn.RNNBase):
        return float(module.dropout) if module.num_layers > 1 else None
    return None


def find(net: nn.Module, call: Callable[[Callable[..., Any]], Any] | None = None) -> list[Found]:
    """All places where a network drops.

    Args:
        net: Any network.
        call: Calls its argument as the network is called. The network runs once, in train mode, and is left as it was:
            its flags, its buffers and all random numbers. Without a call, only layers are found.

    Returns:
        The places that were reached, in that order; or all layers.

    Example:
        >>> [place.name for place in find(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))]
        ['1']
    """
    if call is None:
        return layers(net)
    reached: dict[Place, float] = {}
    names = module_names(net)

    def visit(place: Place, found: Call) -> Any:
        if found.rate > 0 or found.explicit:
            reached.setdefault(place, float(found.rate))
        return NotImplemented

    def enter(module: nn.Module) -> None:
        if rule_of(module) is not None:
            reached.setdefault(Place(names[id(module)], None), _rate_of(module) or 0.0)

    def run(*args: Any, **kwargs: Any) -> Any:
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with Visits(names, visit, enter).running():
            return functional_call(net, buffers, args, kwargs)

    device = next((value.device for value in net.parameters()), torch.device("cpu"))
    with _undone(net, device), torch.no_grad():
        call(run)
    attention = {name for name, module in net.named_modules() if isinstance(module, nn.MultiheadAttention)}
    tunable = {found.place for found in layers(net)}
    # The call of a function inside a layer belongs to the layer; attention that cannot be tuned is left out.
    places = [place for place in reached if place.call is not None or place in tunable]
    taken = {place.module for place in places if place.call is None} | attention
    return [Found(_name(place, taken), place, reached[place]) for place in places]


def _name(place: Place, taken: set[str]) -> str:
    if place.call is None:
        return place.module
    start = f"{place.module}." if place.module else ""
    own = "dropout" if place.call == 0 else f"dropout_{place.call}"
    name = start + own
    while name in taken:
        name += "_call"
    return name


@contextmanager
def _undone(net: nn.Module, device: torch.device) -> Generator[None]:
    """Train mode inside; flags and random numbers are afterwards as they were before."""
    flags = [(module, module.training) for module in net.modules()]
    numbers, others = np.random.get_state(), random.getstate()
    try:
        net.train()
        with Stream.current(device)():
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(others)
        for module, flag in flags:
            module.training = flag
