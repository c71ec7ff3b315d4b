"""The processes that solve a problem together, and all that they say to each other."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

Value = TypeVar("Value")
LEVELS = {"inner": 0, "outer": 1}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LOST = (
    "This process lost the others: one of them ended, or left the common steps with an error, which its own output "
    "shows. Under `torchrun --max-restarts` a run with checkpoint= goes on from its last checkpoint."
)


@final
class Group:
    """The processes of a run, of which this one is number ``rank``.

    Attributes:
        rank: From 0 to ``size - 1``; process 0 writes and prints.
        size: How many there are.
        device: Of the tensors that are added up.
        index: Of the batch within a step, for the numbers that all processes draw alike.
        order: A checksum of the order in which batches were given out, the same in all processes.

    Example:
        >>> group = solver.group  # doctest: +SKIP
        >>> if group is None or group.main:  # doctest: +SKIP
        ...     print("once, in process 0")
    """

    def __init__(self, device: torch.device, control: Any, data: Any) -> None:
        """Use two groups of torch: one for numbers of the host, and one for tensors of the device."""
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self._control, self._data = control, data
        self._flags: dict[tuple[bool, ...], Tensor] = {}
        self._seed = 0
        self._place = (0, 0)
        self.index = 0
        self.order = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """There is one only."""
        return self

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    # Tensors of the device

    def add(self, tensors: Sequence[Tensor], share: Tensor | None = None) -> list[Tensor]:
        """The sums over all processes, by one all-reduce.

        Args:
            tensors: Of equal shapes in every process.
            share: This process counts as nothing if it is zero, whatever its tensors hold.

        Returns:
            New tensors.
        """
        flat = torch.cat([tensor.detach().reshape(-1).to(_wide(tensors)) for tensor in tensors])
        if share is not None:
            flat = torch.where(share == 0, 0.0, flat)
        self._all_reduce(flat)
        return _split(flat, tensors)

    def share(self, count: int | None) -> Tensor:
        """The part of the examples of all processes that this one has.

        Args:
            count: Its examples; None counts as one.

        Returns:
            A scalar, without waiting for the device.
        """
        own = torch.full((), 1.0 if count is None else float(count), dtype=torch.float64, device=self.device)
        total = own.clone()
        self._all_reduce(total)
        return own / total

    def mean(
        self, tensors: Sequence[Tensor | None], like: Sequence[Tensor], weight: float
    ) -> tuple[list[Tensor | None], Tensor]:
        """The averages over all processes, by one all-reduce.

        Args:
            tensors: None stands for zero.
            like: With their shapes.
            weight: Of this process. One of weight zero may hold anything.

        Returns:
            New tensors, None where all processes have None; and the share of this process.
        """
        parts, flags = self.filled(tensors, like)
        *means, seen, share = self.weighted([*parts, flags], weight)
        return self.emptied(tensors, means, seen), share

    def filled(self, tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Zeros in the place of None, and which ones are not None.

        Returns:
            Tensors that every process has.
        """
        pattern = tuple(tensor is not None for tensor in tensors)
        if pattern not in self._flags:
            self._flags[pattern] = torch.tensor(pattern, dtype=torch.float32, device=self.device)
        pairs = zip(tensors, like, strict=True)
        return [torch.zeros_like(one) if tensor is None else tensor for tensor, one in pairs], self._flags[pattern]

    @staticmethod
    def emptied(own: Sequence[Tensor | None], means: Sequence[Tensor], seen: Tensor) -> list[Tensor | None]:
        """None where all processes have None. Only a process that has one itself reads from the device.

        Returns:
            The averages.
        """
        if None not in own:
            return [*means]
        triples = zip(own, means, seen.tolist(), strict=True)
        return [None if tensor is None and not found else mean for tensor, mean, found in triples]

    def weighted(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        """As :meth:`mean`, of tensors that every process has.

        Returns:
            The averages, and the share of this process.
        """
        wide = _wide(tensors)
        one = torch.ones(1, dtype=wide, device=self.device)
        flat = torch.cat([*(tensor.detach().reshape(-1).to(wide) for tensor in tensors), one])
        flat = flat.mul_(weight) if weight else flat.zero_()
        self._all_reduce(flat)
        total = flat[-1].clone()
        flat.div_(total)
        return [*_split(flat[:-1], tensors), weight / total]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors the values that they have in process 0, in place."""
        with torch.no_grad():
            for tensor in tensors:
                value = tensor.detach().contiguous()
                with self._noted():
                    dist.broadcast(value, 0, group=self._data)
                tensor.copy_(value)

    def differences(self, *numbers: Tensor) -> Tensor:
        """Which integers are not the same in all processes, without waiting for the device.

        Returns:
            A vector of ones and zeros.
        """
        own = torch.stack(numbers) & (2**62 - 1)
        both = torch.cat([own, -own])
        with self._noted():
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._data)
        highest, lowest = both.chunk(2)
        return (highest != -lowest).double()

    # Common random numbers

    def seed(self, seed: int) -> None:
        """Draw :meth:`normal` from this seed."""
        self._seed = seed

    def at(self, level: str, step: int) -> None:
        """Say which step is made, so that all processes draw the same numbers for it."""
        self._place, self.index = (LEVELS[level], step), 0

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers that are the same in all processes, and in each evaluation of one step.

        Returns:
            A tensor like ``like``.
        """
        number = int(
            np.random.SeedSequence([self._seed, *self._place, self.index]).generate_state(1, np.uint64)[0] >> 1
        )
        generator = torch.Generator("cpu").manual_seed(number)
        drawn = torch.randn(like.shape, dtype=like.dtype, generator=generator, device="cpu")
        return drawn.to(like.device, non_blocking=True)

    # Words between the hosts

    def from_main(self, function: Callable[[], Value]) -> Value:
        """What a function returns in process 0, or its error, in all of them.

        Returns:
            The same everywhere.
        """
        box: list[Any] = [None]
        if self.main:
            try:
                box = [(function(), None)]
            except Exception as error:
                box = [(None, error)]
                with self._noted():
                    dist.broadcast_object_list([(None, _portable(error))], 0, group=self._control)
                raise
        with self._noted():
            dist.broadcast_object_list(box, 0, group=self._control)
        found: Value
        found, failure = box[0]
        if failure is not None:
            raise failure
        return found

    def gather(self, value: Any) -> list[Any]:
        """What every process has to say.

        Returns:
            One entry per process, in all of them.
        """
        found: list[Any] = [None] * self.size
        with self._noted():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def highest(self, *numbers: int) -> list[int]:
        """The largest number of all processes, for each of these.

        Returns:
            The same everywhere.
        """
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        with self._noted():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        return [int(number) for number in found]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum over all processes, for each of these.

        Returns:
            The same everywhere.
        """
        found = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with self._noted():
            dist.all_reduce(found, group=self._control)
        return found.tolist()

    def agree(self, what: dict[str, Any]) -> None:
        """Refuse to start if the processes were given different arguments.

        Args:
            what: Plain values, by name.

        Raises:
            ValueError: If one differs.
        """
        first, *others = self.gather(what)
        for rank, other in enumerate(others, start=1):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise ValueError(
                        f"{name} is {first.get(name)} in process 0 and {other.get(name)} in process {rank}: every "
                        "process must call with the same arguments. For a run of each on its own, pass "
                        "distributed=False."
                    )

    def leave(self) -> None:
        """End the connection, so that the others do not wait for this process; after an error."""
        from bilevel.parallel.joining import forget

        forget(self)
        for group in {id(group): group for group in (self._control, self._data)}.values():
            try:
                dist.destroy_process_group(group)
            except (RuntimeError, ValueError, AssertionError):
                continue

    def _all_reduce(self, flat: Tensor) -> None:
        with self._noted():
            dist.all_reduce(flat, group=self._data)

    @contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            error.add_note(LOST)
            raise


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """A number of the bits of tensors, on their device.

    Returns:
        An integer.

    Example:
        >>> one = torch.tensor([1.0, 2.0])
        >>> bool(checksum([one]) == checksum([one.clone()])), bool(checksum([one]) == checksum([2 * one]))
        (True, False)
    """
    views = [(torch.view_as_real(t) if t.is_complex() else t).detach() for t in tensors if t.numel()]
    sums = [view.view(INTEGERS[view.element_size()]).sum(dtype=torch.int64) for view in views]
    return torch.stack([(index + 1) * value for index, value in enumerate(sums)]).sum()


def _wide(tensors: Sequence[Tensor]) -> torch.dtype:
    """At least single precision, in which counts and sums are exact enough."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)]


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same and can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__} in process 0: {error}")
    return error
