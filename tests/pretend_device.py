"""An accelerator that is not there: ``torch.device("pretend")``, whose kernels are Python and compute on the CPU.

Its tensors are plain ``torch.Tensor`` objects with the dispatch key of a foreign backend, so that autograd, double
backward, forward mode, ``functional_call``, optimizers and the threads of the backward pass are PyTorch's own. Every
operation that reaches the backend runs on CPU tensors over the same memory, after a look at what it was given. A tensor
or a generator of the host among tensors of the device raises, as on CUDA. What would stall a CUDA stream is counted.

What stays untested: kernels that exist for CUDA only (cuDNN, fused optimizers, flash attention), asynchronous errors,
streams, memory, and rounding that differs from that of the CPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
aten = torch.ops.aten

TAKE_INDICES_OF_THE_HOST = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
READ_BY_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""How PyTorch marks operations whose values or shapes the host has to know: item, equal, nonzero, unique and others."""
WAIT_INSIDE = {aten._linalg_eigh, aten._linalg_svd, aten.linalg_eig, aten.linalg_lstsq}
"""Their CUDA kernels read an error code."""

_waits: list[str] = []


class DeviceMixError(RuntimeError):
    """A tensor or generator of the host met tensors of the device."""


@contextmanager
def pretend() -> Iterator[torch.device]:
    """The device, which works inside the block only, where PyTorch is patched for it."""
    install()
    clone, cpu = torch.UntypedStorage.clone, torch.UntypedStorage.cpu

    def ours(function: Callable[[Any], Any], make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda storage: make(storage) if storage.device.type == NAME else function(storage)

    with (
        mock.patch.object(torch.UntypedStorage, "clone", ours(clone, lambda storage: _storage(clone(storage.host)))),
        mock.patch.object(torch.UntypedStorage, "cpu", ours(cpu, lambda storage: clone(storage.host))),
        mock.patch.object(torch, "Generator", _Generator),
    ):
        _module.usable = True
        try:
            yield torch.device(NAME, 0)
        finally:
            _module.usable = False


@contextmanager
def waits() -> Iterator[list[str]]:
    """Collect where the host waits for the device inside the block: the operation, and the line that asked for it."""
    _waits.clear()
    found: list[str] = []
    yield found
    found.extend(_waits)


class _Module:
    """What PyTorch asks of a device, and its stream of random numbers."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(0).get_state()
        self.usable = False

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False  # to ``torch.accelerator``: no other test may take this device for one

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return self.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        self.state = state.clone()


class _Generator(torch.Generator):
    """PyTorch does not let Python make generators of a foreign device; one of the CPU holds their state as well."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return torch._C.Generator(CPU if torch.device(device).type == NAME else device)


_module = _Module()


@cache
def install() -> list[torch.library.Library]:
    """Register the device: once, for good, and before the first backward pass, which starts a thread per device."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module)
    fallback, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    for name, kernel in {
        "empty.memory_format": partial(_make, torch.empty),
        "empty_strided": partial(_make, torch.empty_strided),
        "_efficientzerotensor": partial(_make, torch.zeros),
        "_copy_from": _copy_from,
        "set_.source_Storage_storage_offset": _set,
        "convolution_overrideable": partial(_run, aten.convolution.default),
        "convolution_backward_overrideable": _convolution_backward,
    }.items():
        kernels.impl(name, kernel, "PrivateUse1")
    return [fallback, kernels]


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operation that has no other."""
    with torch._C.DisableTorchFunction():
        pairs: list[tuple[Tensor, Tensor]] = []
        host_args = _map(partial(_enter, op, pairs), _with_tensors(op, args))
        host_kwargs = {name: _map(partial(_enter, op, pairs), value) for name, value in kwargs.items()}
        if READ_BY_THE_HOST.intersection(op.tags) or op.overloadpacket in WAIT_INSIDE:
            _wait(op)
        if torch.Tag.nondeterministic_seeded in op.tags:
            with torch.random.fork_rng([]):
                torch.set_rng_state(_module.state)
                result = op(*host_args, **host_kwargs)
                _module.state = torch.get_rng_state()
        else:
            result = op(*host_args, **host_kwargs)
        storages = {}
        for tensor, host in pairs:
            if (tensor.shape, tensor.stride()) != (host.shape, host.stride()):  # out=... may be resized
                _set_like(tensor, _storage(host.untyped_storage()), host)
            storages[host.untyped_storage()._cdata] = tensor.untyped_storage()
        return _map(partial(_leave, pairs, storages), result)


def _enter(op: Any, pairs: list[tuple[Tensor, Tensor]], value: Any) -> Any:
    """What the CPU gets instead of an argument."""
    if isinstance(value, torch.device):
        return CPU
    if isinstance(value, torch._C.Generator):
        raise DeviceMixError(f"{op}: expected a generator of {NAME}, got one of {value.device}.")
    if not isinstance(value, Tensor):
        return value
    if value.device.type == NAME:
        pairs.append((value, _host(value)))
        return pairs[-1][1]
    number = value.ndim == 0 and torch.Tag.pointwise in op.tags
    if not number and op.overloadpacket not in TAKE_INDICES_OF_THE_HOST:
        got = f"one of shape {tuple(value.shape)} on {value.device}"
        raise DeviceMixError(f"{op}: expected all tensors on device {NAME}, got {got}.")
    if not number or op.overloadpacket is aten.where:  # which are copied to the device
        _wait(op)
    return value


def _leave(pairs: list[tuple[Tensor, Tensor]], storages: dict[int, torch.UntypedStorage], value: Any) -> Any:
    """A result of the CPU as one of the device: an argument itself, a view of one, or something new."""
    if not isinstance(value, Tensor):
        return value
    same = [tensor for tensor, host in pairs if host is value]
    return same[0] if same else _device(value, storages)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(_map(function, part) for part in value) if type(value) in (list, tuple) else function(value)


def _with_tensors(op: Any, args: Any) -> list[Any]:
    """The arguments, with tensors again where PyTorch had made tensors of numbers, which arrive as numbers."""
    kind = next((value.dtype for value in args if isinstance(value, Tensor) and value.is_floating_point()), None)
    return [
        torch.tensor(value, dtype=kind, device=CPU)
        if isinstance(value, int | float) and isinstance(argument.type, torch.TensorType)
        else value
        for value, argument in zip(args, op._schema.arguments, strict=False)
    ]


def _make(factory: Callable[..., Tensor], *sizes: Any, device: Any = None, **options: Any) -> Tensor:
    if not _module.usable:
        raise RuntimeError(f"the device {NAME} is for tests that ask for it.")
    with torch._C.DisableTorchFunction():
        given = {name: value for name, value in options.items() if value is not None}
        return _device(factory(*sizes, **given, device=CPU), {})


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *settings: Any, output_mask: Any = ()) -> Any:
    *rest, mask = [*settings, output_mask] if output_mask else settings
    bias = [weight.shape[1] * rest[-1] if rest[3] else len(weight)]
    return _run(aten.convolution_backward.default, gradient, x, weight, bias, *rest, mask)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    with torch._C.DisableTorchFunction():
        if target.device.type != NAME or (source.device.type != NAME and not non_blocking):
            _wait("copy from the device" if target.device.type != NAME else "copy to the device")
        source, host = (_host(x) if x.device.type == NAME else x for x in (source, target))
        host.copy_(source)
        return target


def _set(tensor: Tensor, storage: torch.UntypedStorage, offset: int, size: Any, stride: Any = ()) -> Tensor:
    with torch._C.DisableTorchFunction():
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # whose kernel does not look at the device
        aten.set_.source_Storage_storage_offset.redispatch(keys, tensor, storage, offset, size, stride)
        return tensor


def _set_like(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> None:
    _set(tensor, storage, like.storage_offset(), like.shape, like.stride())


def _host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of one of the device."""
    empty = torch.empty(0, dtype=tensor.dtype, device=CPU)
    return empty.set_(tensor.untyped_storage().host, tensor.storage_offset(), tensor.shape, tensor.stride())


def _device(host: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """A tensor of the device over the memory of one of the CPU."""
    tensor = torch._C._acc.create_empty_tensor([0], host.dtype)
    _set_like(tensor, storages.get(host.untyped_storage()._cdata) or _storage(host.untyped_storage()), host)
    return tensor


def _storage(host: torch.UntypedStorage) -> torch.UntypedStorage:
    device = torch.device(NAME, 0)
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), device, host.nbytes())
    storage.host = host  # keeps the memory alive
    return storage


def _wait(op: Any) -> None:
    inside = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(ROOT)]
    ours = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in inside if frame.filename != __file__]
    _waits.append(f"{op} at {ours[-1] if ours else 'a backward pass'}")
