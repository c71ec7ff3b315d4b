"""The solver's own copy of the inner variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from bilevel.parallel import Group, Shards, whole
from bilevel.problem.model import Model
from bilevel.problem.problem import Problem


class Variables(nn.Module):
    """The solver's own copy of the inner variables and buffers, so that the user's module keeps its values.

    Attributes:
        group: The processes that train them together, or None.
        shards: If each process keeps a part of the weights only, these parts; the weights are then whole only inside
            its ``gathered``.
        changed: With several processes, the buffers that the network has changed so far.
    """

    group: Group | None = None
    shards: Shards | None = None
    changed: frozenset[str] = frozenset()
    _moving: tuple[str, ...] | None = None

    def __init__(self, problem: Problem) -> None:
        """Copy the start of the problem."""
        super().__init__()
        self.problem = problem
        start = problem.start(problem.initial_hyper())
        self.weights = nn.ParameterList([nn.Parameter(whole(p.detach()).clone()) for p in start.values()])
        self.buffer_names = list(problem.buffers)
        for index, buffer in enumerate(problem.buffers.values()):
            self.register_buffer(str(index), buffer.detach().clone())

    def params(self) -> dict[str, Tensor]:
        """The weights by name.

        Returns:
            Leaves of the autograd graph.
        """
        # Not by the iterator of ParameterList, which takes as long as a small layer.
        return dict(zip(self.problem.params, self.weights._parameters.values(), strict=True))  # type: ignore[arg-type]

    def buffer_values(self) -> dict[str, Tensor]:
        """The buffers by name.

        Returns:
            The live tensors, not copies.
        """
        # Not by get_buffer, which takes as long as a small operation.
        return {name: cast(Tensor, self._buffers[str(index)]) for index, name in enumerate(self.buffer_names)}

    def model(
        self, params: Mapping[str, Tensor], *, buffers: dict[str, Tensor] | None = None, update_buffers: bool = False
    ) -> Model:
        """A model with the given weights.

        Args:
            params: Weights by name.
            buffers: By name; those of this object by default.
            update_buffers: Keep what the network does to the buffers.

        Returns:
            The model that a loss sees.
        """
        predict = self.predictor(buffers=buffers, update_buffers=update_buffers)
        return Model(params, None if predict is None else partial(predict, params))

    def predictor(
        self, *, buffers: dict[str, Tensor] | None = None, update_buffers: bool = False
    ) -> Callable[..., Any] | None:
        """The network as a function of its weights, ``predict(params, *args, **kwargs)``.

        Args:
            buffers: By name; those of this object by default.
            update_buffers: Keep what the network does to the buffers; it always works on copies of them.

        Returns:
            The function, or None for a problem without a network.
        """
        if self.problem.module is None:
            return None

        def predict(params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            if not self.buffer_names:
                return self.problem.call(dict(params), args, kwargs)
            with DisableTorchFunction():  # copies are no operations of the network, and modes take time
                live = self.buffer_values() if buffers is None else buffers
                tensors = {**params, **{name: buffer.clone() for name, buffer in live.items()}}
            copies = None if self.group is None else {name: tensors[name] for name in live}
            output = self.problem.call(tensors, args, kwargs)
            if update_buffers and copies is not None:
                self._look_for_changes(live, copies, tensors)
            if update_buffers:
                with DisableTorchFunction(), torch.no_grad():
                    for name, buffer in live.items():
                        if tensors[name].shape != buffer.shape:
                            raise ValueError(
                                f"the network changed the shape of its buffer {name!r} from {tuple(buffer.shape)} to "
                                f"{tuple(tensors[name].shape)}, which cannot be tracked: keep its shape."
                            )
                        buffer.copy_(tensors[name])
            return output

        return predict

    def _look_for_changes(
        self, before: Mapping[str, Tensor], copies: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> None:
        """Note which buffers a pass has changed."""
        for name in before.keys() - self.changed:
            if after[name] is not copies[name] or copies[name]._version > 0:
                self.changed |= {name}
            elif self._moving is None and not torch.equal(before[name], after[name]):
                self.changed |= {name}  # BatchNorm does not say that it writes into its statistics

    def moving(self, group: Group) -> tuple[str, ...]:
        """The buffers that steps change, such as BatchNorm statistics, which the processes average after each step.

        The processes agree on them at the first step.

        Returns:
            Names of floating-point buffers.

        Raises:
            RuntimeError: If the network changes another one later.
        """
        if self._moving is None:
            names = set[str]().union(*group.gather(self.changed))
            self._moving = tuple(n for n, b in self.buffer_values().items() if n in names and b.is_floating_point())
            self.changed = frozenset(names)
        late = [n for n, b in self.buffer_values().items() if n in self.changed and b.is_floating_point()]
        if len(late) > len(self._moving):
            (name, *_) = sorted(set(late) - set(self._moving))
            raise RuntimeError(
                f"the network changed its buffer {name!r} for the first time after the first step. With several "
                "processes, a buffer that changes must do so from the first step on; or pass distributed=False."
            )
        return self._moving
