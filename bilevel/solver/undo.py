"""Where a step is undone: what it changes is copied before, and put back if it fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from bilevel.parallel import Division, is_sharded, local
from bilevel.problem import Variables

if TYPE_CHECKING:
    from bilevel.solver.solver import Solver

PLAIN = (type(None), bool, int, float, complex, str)


@contextmanager
def buffers_kept(inner: Variables) -> Generator[None]:
    """Restore the buffers of the network after the block.

    Args:
        inner: Whose buffers a pass may change, as those of BatchNorm.
    """
    before = [(buffer, buffer.clone()) for buffer in inner.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class _Place(NamedTuple):
    """Stands for a tensor: its place among those of a view, and how it is divided, if it is sharded."""

    at: int
    division: Division | None = None


class View(NamedTuple):
    """What steps change, as it is now.

    Attributes:
        tensors: Live ones, on the device: first the parameters and buffers, then those of the optimizers.
        memory: What the optimizers and schedulers remember, with places instead of tensors.
        rest: Random streams and counters.
    """

    tensors: list[Tensor]
    memory: dict[str, Any]
    rest: tuple[Any, ...]


@final
class Snapshot:
    """A copy of what steps change, or of a part of it, in memory that is used again."""

    def __init__(self, solver: Solver, names: Sequence[str], *, whole: bool) -> None:
        """Copy the groups ``names``; with ``whole``, also the buffers of the response, which then are all groups."""
        self._solver = solver
        self._names = names
        self._whole = whole
        self._parts = list(solver.response.modules())
        self._copies: list[Tensor] = []
        self._view: View | None = None
        self._doubtful: tuple[View, list[Tensor]] | None = None
        self.flag: Tensor | None = None

    def look(self) -> View:
        """What is to be copied, as it is now.

        Returns:
            Live tensors.
        """
        solver, tensors = self._solver, self.changed()
        device = solver.vector.device

        def take(tensor: Tensor) -> Any:
            if is_sharded(tensor):
                tensors.append(local(tensor))
                return _Place(len(tensors) - 1, Division.of(tensor))
            if tensor.device != device:  # such as the step counters of Adam, which stay on the host
                return tensor.detach().clone()
            tensors.append(tensor.detach())
            return _Place(len(tensors) - 1)

        memory: dict[str, Any] = {}
        for name in self._names:
            optimizer = solver.optimizers[name]
            states = [(key, _map(take, value)) for key, value in optimizer.state.items()]
            groups = [{k: _map(take, v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            scheduler = solver.schedulers.get(name)
            memory[name] = states, groups, None if scheduler is None else scheduler.state_dict()
        rest = (solver.streams["loss"].states, solver.inner_steps, solver.outer_steps, solver.inner_aux)
        return View(tensors, memory, rest)

    def tensors(self) -> list[Tensor]:
        """The tensors of :meth:`look` alone, in less time.

        Returns:
            Live tensors.
        """
        solver, found = self._solver, self.changed()
        for name in self._names:
            optimizer = solver.optimizers[name]
            for value in (*optimizer.state.values(), *optimizer.param_groups):
                _collect(value, solver.vector.device, found)
        return found

    def changed(self) -> list[Tensor]:
        """Parameters and buffers, which are changed in place.

        Returns:
            Live tensors.
        """
        params = [local(param.detach()) for name in self._names for param in self._solver.optimization.params[name]]
        return params + (self.buffers() if self._whole else [])

    def buffers(self) -> list[Tensor]:
        """All buffers of the response.

        Returns:
            Live tensors.
        """
        seen = dict.fromkeys(b for part in self._parts for b in part._buffers.values() if b is not None)
        return [local(buffer.detach()) for buffer in seen]

    def keep(self, view: View, buffers: Sequence[Tensor] | None = None, flag: Tensor | None = None) -> None:
        """Copy a view.

        Args:
            view: From :meth:`look`.
            buffers: Instead of those of the response, which a pass has changed already.
            flag: On the device. If it is false, the copy is to stay as it was, which :meth:`settle` finds out.
        """
        tensors = list(view.tensors)
        if buffers is not None:
            first = len(self.changed()) - len(buffers)
            tensors[first : first + len(buffers)] = buffers
        self._doubtful, self.flag = None, flag
        if flag is None or self._view is None:
            self._view = None  # what is copied below is whole only at the end
            self._copies = _copied(tensors, self._copies)
            self._view = view._replace(tensors=[])
        elif [_kind(tensor) for tensor in tensors] != [_kind(tensor) for tensor in self._copies]:
            copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
            self._doubtful = view._replace(tensors=[]), copies
        else:
            for kept, tensor in zip(self._copies, tensors, strict=True):
                kept.copy_(torch.where(flag, tensor, kept))
            self._doubtful = view._replace(tensors=[]), self._copies

    def settle(self, flag: bool) -> None:
        """Say whether the flag was true."""
        if self._doubtful is not None and flag:
            self._view, self._copies = self._doubtful
        self._doubtful, self.flag = None, None

    def forget(self) -> None:
        """Drop the copy."""
        self._view = self._doubtful = self.flag = None

    def restore(self) -> bool:
        """Put back what was copied.

        Returns:
            Whether there was a copy.
        """
        if self._view is None:
            return False
        solver, (_, memory, rest) = self._solver, self._view
        with torch.no_grad():
            for tensor, kept in zip(self.changed(), self._copies, strict=False):
                tensor.copy_(kept)
        for name, (states, groups, schedule) in memory.items():
            optimizer = solver.optimizers[name]
            optimizer.state.clear()
            optimizer.state.update({key: self._back(value) for key, value in states})
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                params = group["params"]
                group.clear()
                group.update({"params": params, **self._back(kept)})
            if schedule is not None:
                solver.schedulers[name].load_state_dict(copy.deepcopy(schedule))
        solver.streams["loss"].states, solver.inner_steps, solver.outer_steps, solver.inner_aux = rest
        solver.optimization.drop_gradients()
        return True

    def _back(self, value: Any) -> Any:
        """Copies of what was kept, at the places of the tensors."""
        if isinstance(value, _Place):
            own = self._copies[value.at].clone()
            return own if value.division is None else value.division.rebuilt(own)
        if isinstance(value, Tensor):
            return value if isinstance(value, nn.Parameter) else value.clone()
        if type(value) in (list, tuple, dict):
            return _nest(self._back, value)
        return copy.deepcopy(value)


def _map(take: Callable[[Tensor], Any], value: Any) -> Any:
    """Nested values with tensors replaced, and everything else that could change copied."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else take(value)
    if isinstance(value, PLAIN):
        return value
    if type(value) in (list, tuple, dict):
        return _nest(lambda part: _map(take, part), value)
    return copy.deepcopy(value)


def _collect(value: Any, device: torch.device, found: list[Tensor]) -> None:
    """Add the tensors of a nested value, without parameters and without what is elsewhere, such as step counters."""
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, Tensor):
            if is_sharded(part):
                found.append(local(part))
            elif not isinstance(part, nn.Parameter) and part.device == device:
                found.append(part.detach())
        elif type(part) in (list, tuple, dict):
            _collect(part, device, found)


def _nest(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(part) for key, part in value.items()}
    return type(value)(function(part) for part in value)


def _copied(tensors: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """Copies, in the memory of old ones where they fit: a state that grows must not be there twice."""
    if [_kind(tensor) for tensor in tensors] == [_kind(tensor) for tensor in old]:
        torch._foreach_copy_(old, tensors)
        return [*old]
    free: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in old:
        free.setdefault(_kind(tensor), []).append(tensor)
    copies = []
    for tensor in tensors:
        fitting = free.get(_kind(tensor))
        copies.append(fitting.pop().copy_(tensor) if fitting else tensor.clone(memory_format=torch.preserve_format))
    return copies


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
