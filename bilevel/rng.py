"""Random streams that a solver owns, so that the user's global random state is never touched."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from bilevel.tape import Tape


class Stream:
    """A stream of torch random numbers on the CPU and on one device.

    Example:
        >>> stream = Stream(0, torch.device("cpu"))
        >>> before = torch.get_rng_state()
        >>> with stream():
        ...     first = torch.rand(2)
        >>> with stream():
        ...     second = torch.rand(2)
        >>> bool((first == second).any()), bool((torch.get_rng_state() == before).all())
        (False, True)
    """

    def __init__(self, seed: int, device: torch.device, states: list[Tensor] | None = None) -> None:
        """Seed the stream, or let it go on from ``states``."""
        self.device = device
        self.devices = [torch.device("cpu")] + ([] if device.type == "cpu" else [device])
        if states is None:
            states = [torch.Generator(where).manual_seed(seed).get_state() for where in self.devices]
        self.states = states

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        """A stream that repeats what is drawn next from the present random state.

        Returns:
            A new stream.
        """
        others = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
        return cls(0, device, [torch.get_rng_state(), *others])

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Draw from this stream inside the block; if the block raises, the stream is where it was before."""
        before = self._now()
        try:
            self._go_on(self.states)
            yield
            self.states = self._now()
        finally:
            self._go_on(before)

    def _now(self) -> list[Tensor]:
        others = [torch.get_device_module(where).get_rng_state(where) for where in self.devices[1:]]
        return [torch.get_rng_state(), *others]

    def _go_on(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for where, state in zip(self.devices[1:], states[1:], strict=True):
            torch.get_device_module(where).set_rng_state(state, where)

    def state_dict(self) -> list[Tensor]:
        """The state of the stream.

        Returns:
            One tensor per device.
        """
        return [state.clone() for state in self.states]

    def load_state_dict(self, states: list[Tensor]) -> None:
        """Continue where :meth:`state_dict` was taken, on as many devices.

        Raises:
            ValueError: If it is no random state, or was taken on another kind of device.
        """
        try:
            fits = isinstance(states, list) and all(isinstance(state, Tensor) for state in states)
            if not fits or [state.shape for state in states] != [own.shape for own in self.states]:
                raise ValueError("no list of tensors of that size")
            pairs = zip(self.devices, states, strict=True)
            self.states = [torch.Generator(where).set_state(state.cpu()).get_state() for where, state in pairs]
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the random state does not fit this solver, which draws on {', '.join(map(str, self.devices))} "
                f"({error}): continue a run on the kind of device it was started on."
            ) from error


class Repeated:
    """Draws the same random numbers in every block, those that the first block draws.

    Example:
        >>> again = Repeated(torch.device("cpu"))
        >>> with again():
        ...     first = torch.rand(2)
        >>> with again():
        ...     second = torch.rand(2)
        >>> bool((first == second).all())
        True
    """

    def __init__(self, device: torch.device) -> None:
        """Repeat what is drawn on the CPU and on this device."""
        self._device = device
        self._start: list[Tensor] | None = None
        self._tape = Tape() if get_proxy_mode() is not None else None

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Draw the numbers; after the first block, those of outside the block are left where they are."""
        if self._tape is not None:
            with self._tape.play():
                yield
        elif self._start is None:
            self._start = Stream.current(self._device).states
            yield
        else:
            with Stream(0, self._device, self._start)():
                yield
