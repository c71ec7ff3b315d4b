r"""Weights of which each process keeps a part, as ``DTensor``: they are whole only while a step computes with them.

Before a pass the parts are gathered, and afterwards the gradients of all processes are added up where the parts are
kept. Between two passes there are only parts: of the weights, of what is learned about their response, of what the
optimizers remember, and of the vectors of linear solvers. What is judged (norms, products, finiteness) is judged by
numbers that are the same in all processes; ``bool`` of a ``DTensor`` would look at the part of one.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Whether this process holds a part of the tensor only.

    Returns:
        The answer.

    Example:
        >>> is_sharded(torch.zeros(3))
        False
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # if it was not imported, there is no such tensor
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from all processes; one that is whole is returned as it is.

    Returns:
        A tensor without a graph, if it was sharded.
    """
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """The part of this process, sharing its memory; of a whole tensor, all of it."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def divided(tensor: Tensor, like: Any) -> Tensor:
    """Keep the part of this process of a tensor that all processes have, without a word to the others.

    Args:
        tensor: Whole, the same in all processes.
        like: A sharded one, divided in the same way.

    Returns:
        A sharded tensor.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.detach(), like.device_mesh, like.placements, src_data_rank=None)


class Division(NamedTuple):
    """How a tensor is divided, without its values.

    Attributes:
        mesh: The processes.
        placements: What is where.
        shape: Of all of it.
        stride: Of all of it.
    """

    mesh: Any
    placements: Any
    shape: Any
    stride: Any

    @classmethod
    def of(cls, tensor: Any) -> Division:
        """That of a sharded tensor."""
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def rebuilt(self, own: Tensor) -> Tensor:
        """A sharded tensor from the part of this process.

        Args:
            own: From :func:`local`, or a copy of it.

        Returns:
            A sharded tensor.
        """
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            own, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def added(tensor: Tensor, like: Any) -> Tensor:
    """Add up what the processes have found, where the parts are kept: a reduce-scatter.

    Args:
        tensor: Whole, of this process.
        like: Divided as the sum shall be.

    Returns:
        A sharded tensor.
    """
    from torch.distributed.tensor import DTensor, Partial

    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()
    summed: Tensor = DTensor.from_local(wide, like.device_mesh, [Partial()], run_check=False).redistribute(
        placements=like.placements
    )
    return summed.to(tensor.dtype)


def flat_like(vector: Tensor, like: Any) -> Tensor:
    """The part of this process of a flat vector that all processes have.

    Args:
        vector: Shape ``(m,)``.
        like: A sharded tensor of the same processes.

    Returns:
        A vector divided into as many parts as there are processes.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(vector.detach(), like.device_mesh, [Shard(0)], src_data_rank=None)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The product of two flat vectors.

    Returns:
        A scalar, the same in all processes.

    Example:
        >>> dot(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor(11.)
    """
    if not is_sharded(a):
        return a @ b
    return _each(a, local(a) @ local(b)).sum()


def length(v: Tensor) -> Tensor:
    """The norm of a vector, where overflow is no concern.

    Returns:
        A scalar, the same in all processes.
    """
    own: Tensor = torch.linalg.vector_norm(local(v))
    return torch.linalg.vector_norm(_each(v, own)) if is_sharded(v) else own


def each(v: Tensor, number: Tensor) -> Tensor:
    """What every process has found for its part of a vector.

    Args:
        v: A vector.
        number: A scalar, of the part of this process.

    Returns:
        One number per process; one only for a vector that is whole.
    """
    return _each(v, number) if is_sharded(v) else number[None]


def all_finite(v: Tensor) -> bool:
    """Whether all entries are finite, in all processes; waits for the device.

    Returns:
        The answer, the same in all processes.
    """
    own = local(v).isfinite().all()
    return bool(_each(v, own.to(torch.float32)).min() > 0 if is_sharded(v) else own)


def _each(v: Any, number: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(number[None], v.device_mesh, [Shard(0)], run_check=False).full_tensor()


def shard(net: nn.Module) -> nn.Module:
    """Let each process keep a part of the trained parameters of a network, as ``DTensor``; in place.

    Each is divided along its longest dimension.

    All processes call it, with the same network. For one that no process can hold, make it on the meta device, call
    this, then ``net.to_empty(device=...)`` and give it its values.

    Args:
        net: With whole parameters. Frozen ones and buffers stay whole.

    Returns:
        The same network. It can be given to :class:`bilevel.Problem`, but not be called any more.

    Raises:
        RuntimeError: If there is one process only.

    Example:
        >>> net = bilevel.parallel.shard(nn.Linear(1000, 1000))  # doctest: +SKIP
        >>> problem = bilevel.Problem(net, inner_loss=..., outer_loss=..., hyper=...)  # doctest: +SKIP
    """
    from torch.distributed.device_mesh import init_device_mesh

    from bilevel.parallel.joining import join

    first = next(param for param in net.parameters() if param.requires_grad)
    device = first.device if first.device.type != "meta" else torch.device("cpu")
    group = join(device)
    if group is None:
        raise RuntimeError("bilevel.parallel.shard: there is one process only: start several with torchrun.")
    mesh = init_device_mesh(device.type, (group.size,))
    known: dict[int, nn.Parameter] = {}  # a tied parameter stays tied
    for module in net.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param.requires_grad and not is_sharded(param):
                known.setdefault(id(param), nn.Parameter(_divided(param, mesh)))
                setattr(module, name, known[id(param)])
    return net


def _divided(tensor: Tensor, mesh: Any) -> Tensor:
    """Along its longest dimension; a scalar is kept by all."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    place = Shard(max(range(tensor.ndim), key=lambda dim: tensor.shape[dim])) if tensor.ndim else Replicate()
    return distribute_tensor(tensor.detach(), mesh, [place], src_data_rank=None).requires_grad_()


@final
class Shards:
    """Parameters that are whole inside ``gathered``, and of which each process keeps a part.

    Attributes:
        parts: A sharded parameter for each of them, which an optimizer updates.

    Example:
        >>> with solver.gathered():  # doctest: +SKIP
        ...     print(solver.params)  # whole weights, in all processes
    """

    def __init__(self, params: Sequence[nn.Parameter], like: Sequence[Any]) -> None:
        """Take the parts of whole parameters, the same in all processes, and forget the rest.

        Args:
            params: Whole.
            like: One for each, which says how it is divided; if there are fewer, the others are divided along their
                longest dimension.
        """
        mesh = like[0].device_mesh
        self._params = list(params)
        self.parts = [nn.Parameter(divided(param, one)) for param, one in zip(params, like, strict=False)]
        self.parts += [nn.Parameter(_divided(param, mesh)) for param in self._params[len(self.parts) :]]
        self._of = {id(param): own for param, own in zip(self._params, self.parts, strict=True)}
        self._depth = 0
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        """There is one only."""
        return self

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """What an optimizer updates.

        Returns:
            The sharded parameter; the parameter itself if it is always whole.
        """
        return self._of.get(id(param), param)

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Have the whole parameters inside the block, as they were when it began. All processes have to enter it."""
        self._depth += 1
        try:
            if self._depth == 1:
                for param, own in zip(self._params, self.parts, strict=True):
                    param.data = whole(own)
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._forget()

    def keep(self) -> None:
        """Inside :meth:`gathered`, take over what the whole parameters have become, the same in all processes."""
        with torch.no_grad():
            for param, own in zip(self._params, self.parts, strict=True):
                local(own).copy_(local(divided(param, own)))

    def _forget(self) -> None:
        for param in self._params:
            # One number in place of the weights: whoever reads them outside notices.
            param.data = torch.full((), torch.nan, dtype=param.dtype, device=param.device).expand(param.shape)
