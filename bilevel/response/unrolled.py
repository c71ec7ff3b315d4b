r"""Unrolling: the derivative of some steps of training.

From the weights and optimizer state :math:`s_0` that training has reached, K steps of the user's own optimizer, each on
a batch of its own,

.. math:: s_{t+1} = \Phi\left(s_t, \nabla_w \mathcal{L}_T(\lambda, w_t), \lambda\right),

lead to the weights :math:`w_K(\lambda)`, whose derivative stands for that of the best response. In reverse mode the
cotangent of :math:`w_K` is pulled back step by step; in forward mode one tangent per hyperparameter is pushed along.

References:
    Maclaurin, Duvenaud and Adams (2015), Gradient-based hyperparameter optimization through reversible learning.
    Franceschi, Donini, Frasconi and Pontil (2017), Forward and reverse gradient-based hyperparameter optimization.
    Shaban, Cheng, Hatch and Boots (2019), Truncated back-propagation for bilevel optimization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.optim import Optimizer
from typing_extensions import override

from bilevel.autodiff import vjp
from bilevel.checks import check_continuous, check_dependence, isolated, repeatable
from bilevel.compilation import Staged
from bilevel.optimizers import DifferentiableOptimizer
from bilevel.problem import Loss, Model, Problem
from bilevel.response.base import BestResponse, Method, Steps
from bilevel.response.curvature import Hessian, flatten
from bilevel.response.step import Point, Step, Tangent
from bilevel.response.trajectory import Trajectory
from bilevel.structure.dense import check_memory

FAMILY = "unrolling"
MOST_STEPS = 50
"""As one graph."""


@final
@dataclass(frozen=True)
class Unrolled(Method):
    r"""Differentiate through steps of training.

    An outer step makes ``steps`` inner steps itself, each on a batch of its own, and keeps them: the weights and the
    state of the optimizer go on from there. Inner steps in between are possible but not needed.
    It cannot tune a hyperparameter in which the inner loss has no derivative, such as a dropout rate or an integer.
    It is the only method that can tune decoupled weight decay, ``WeightDecay(net, decoupled=True)``.

    Attributes:
        steps: How many inner steps to differentiate, K.
        truncate: Differentiate only so many of them, the last ones. The weights before count as independent of
            :math:`\lambda` (Shaban et al. 2019). None differentiates all.
        mode: ``"reverse"`` needs the memory of all differentiated steps and works for any number of hyperparameters.
            ``"forward"`` is for few hyperparameters and many steps. It needs the memory of one step and of one copy of
            the weights per hyperparameter, and a Hessian product per step and hyperparameter.
        checkpoint: In reverse mode, keep only every :math:`\sqrt{K}`-th state and repeat the steps between. The
            derivative is the same, bit for bit. It takes memory for :math:`\sqrt{K}` steps, and makes each step twice.
        restart: Start every outer step from the start of the problem, with a fresh optimizer. The start is
            ``Problem(initial=...)`` or else the weights that the problem was given.

    Example:
        >>> Unrolled(steps=20, truncate=5)
        Unrolled(steps=20, truncate=5, mode='reverse', checkpoint=False, restart=False)
    """

    steps: int = 20
    truncate: int | None = None
    mode: str = "reverse"
    checkpoint: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: If one is out of range.
        """
        for name, value, most in (("steps", self.steps, math.inf), ("truncate", self.truncate, self.steps)):
            if value is None and name == "truncate":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= value <= most:
                bound = "of at least 1" if most == math.inf else f"from 1 to steps={most}, or None"
                raise ValueError(f"Unrolled: {name} must be a whole number {bound}, got {value!r}.")
        if self.mode not in ("reverse", "forward"):
            raise ValueError(f"Unrolled: mode must be 'reverse' or 'forward', got {self.mode!r}.")
        for name, flag in (("checkpoint", self.checkpoint), ("restart", self.restart)):
            if not isinstance(flag, bool):
                raise ValueError(f"Unrolled: {name} must be True or False, got {flag!r}.")
        if self.checkpoint and self.mode == "forward":
            raise ValueError(
                "Unrolled: checkpoint=True is for mode='reverse'; mode='forward' keeps the memory of one step only."
            )

    @property
    @override
    def unrolled_steps(self) -> int:
        """All of them."""
        return self.steps

    @override
    def bind(self, problem: Problem) -> UnrolledResponse:
        """Refuse integers and, in forward mode, too many hyperparameters; start at the weights of the problem."""
        check_continuous(problem, FAMILY)
        if self.mode == "forward":
            check_memory(problem.params, problem.space.size, 4.0, remedy="use mode='reverse'")
        return UnrolledResponse(problem, self)


@final
class UnrolledResponse(BestResponse):
    """The weights after some more steps of training, and their derivative."""

    can_compile = True
    moves_weights = True

    def __init__(self, problem: Problem, settings: Unrolled) -> None:
        """Start at the weights of the problem."""
        super().__init__(problem)
        self.settings = settings
        self.unrolled_steps = settings.steps
        self.restarts = settings.restart
        self._optimizer: DifferentiableOptimizer | None = None
        self._step: Step | None = None
        self._compiled: Staged | None = None
        self._end: Point | None = None
        self._decays: list[Tensor | None] = []
        self._reads: Any = None
        plain = settings.mode == "reverse" and not settings.checkpoint and not settings.restart
        self.whole = plain and settings.steps <= MOST_STEPS

    @property
    def _differentiated(self) -> int:
        return self.settings.truncate or self.settings.steps

    @override
    def connect(self, optimizer: Optimizer, clip: float | None) -> None:
        """Unroll the steps of this optimizer, and compile them if ``compiles`` is set."""
        self._optimizer = DifferentiableOptimizer(optimizer, list(self.inner.weights))
        if self.problem.decays:
            self._optimizer.decay_plain_steps(lambda: self._decays)
        self._step = Step(self.inner, self._optimizer, clip)
        if self.compiles:
            stage = self._step.record if self.settings.mode == "reverse" else self._step.push
            self._compiled = Staged(stage, "the steps of unrolling")

    @override
    def check(self, hyper: Tensor, batch: Any) -> None:
        """Refuse what has no second derivatives, and hyperparameters on which the training does not depend."""
        whole = self.settings.restart and self._differentiated == self.settings.steps
        with repeatable(self.problem.device):
            check_dependence(Hessian(self.inner, hyper, isolated(batch)), self.problem, FAMILY, start=whole)

    @override
    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        r"""The inner loss of the weights, :math:`\mathcal{L}_T(\lambda, w)`; a step between decays them as well."""
        self._decays = self.problem.decays(hyper.detach())
        yield self.problem.inner_loss(self.inner.model(self.inner.params(), update_buffers=True), hyper, batch)

    @override
    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> Model:
        """The model after the unrolled steps; without batches, at the current weights."""
        values: Sequence[Tensor]
        if train_batch is None:
            return self.inner.model({name: weight.detach() for name, weight in self.inner.params().items()})
        if not (torch.is_grad_enabled() and hyper.requires_grad):
            trajectory = self._trajectory(self.settings.mode)
            values = self._finish(trajectory, trajectory.run(hyper, self._start(hyper), train_batch))
        elif self.settings.mode == "forward":
            directions = torch.eye(len(hyper), dtype=hyper.dtype, device=hyper.device)
            weights, tangents = self.push(hyper.detach(), train_batch, directions)
            slopes = torch.stack([flatten(tangent) for tangent in tangents])
            values = _Attach.apply(lambda u: slopes @ flatten(u), hyper, *weights)  # type: ignore[no-untyped-call]
        else:
            weights, pull = self.record(hyper.detach(), train_batch)
            values = _Attach.apply(pull, hyper, *weights)  # type: ignore[no-untyped-call]
        buffers = None if self._end is None else self._end.buffers
        return self.inner.model(dict(zip(self.inner.params(), values, strict=True)), buffers=buffers)

    @override
    def jvp(self, hyper: Tensor, tangent: Tensor, train_batch: Any = None) -> dict[str, Tensor]:
        r"""The product :math:`\frac{\partial w_K}{\partial \lambda} v`, in forward mode whatever the setting."""
        if train_batch is None:
            return {name: torch.zeros_like(weight) for name, weight in self.inner.params().items()}
        tangents = self.push(hyper.detach(), train_batch, tangent[None])[1]
        return dict(zip(self.inner.params(), tangents[0], strict=True))

    def push(
        self, hyper: Tensor, batches: Sequence[Any], directions: Tensor
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Unroll in forward mode.

        Args:
            hyper: Shape ``(h,)``.
            batches: One per step.
            directions: Of the hyperparameters, one per row.

        Returns:
            The weights at the end, and their tangents for each direction.
        """
        trajectory, skipped = self._trajectory("forward"), self.settings.steps - self._differentiated
        point = trajectory.run(hyper, self._start(hyper), batches[:skipped])
        tangents: list[Tangent] = [[None] * len(point.variables()) for _ in directions]
        if self.settings.restart and skipped == 0:
            for tangent, direction in zip(tangents, directions, strict=True):
                with torch.no_grad(), forward_ad.dual_level():
                    start = self.problem.start(forward_ad.make_dual(hyper, direction)).values()
                    tangent[: len(start)] = [forward_ad.unpack_dual(weight).tangent for weight in start]
        end, tangents = trajectory.push(hyper, point, batches[skipped:], directions, tangents)
        weights = self._finish(trajectory, end)
        slopes = [
            [torch.zeros_like(weight) if part is None else part for weight, part in zip(weights, tangent, strict=False)]
            for tangent in tangents
        ]
        return weights, slopes

    def record(
        self, hyper: Tensor, batches: Sequence[Any]
    ) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Tensor]]:
        """Unroll in reverse mode.

        Args:
            hyper: Shape ``(h,)``.
            batches: One per step.

        Returns:
            The weights at the end, and the function that maps their cotangents to that of the hyperparameters.
        """
        trajectory, skipped = self._trajectory("reverse"), self.settings.steps - self._differentiated
        leaf = hyper.detach().requires_grad_()
        with torch.enable_grad():
            start = self._start(leaf)
        point = trajectory.run(hyper, start, batches[:skipped])
        segment = math.ceil(math.sqrt(self._differentiated)) if self.settings.checkpoint else None
        end, pull = trajectory.record(hyper, point, batches[skipped:], segment=segment)
        moments = len(end.variables()) - len(end.weights)

        def pull_to_hyper(cotangents: Sequence[Tensor]) -> Tensor:
            group = self.inner.group
            cotangents = cotangents if group is None else group.add(cotangents)
            first, total = pull([*cotangents, *[None] * moments], torch.zeros_like(hyper))
            part = vjp(start.weights, [leaf], first[: len(start.weights)])[0] if skipped == 0 else None
            if part is not None and group is not None:  # the others add the same
                part = part / group.size
            return total if part is None else total + part

        return self._finish(trajectory, end), pull_to_hyper

    @override
    def reads(self) -> Any:
        """What the optimizer remembers, and its settings."""
        assert self._optimizer is not None
        return self._optimizer.state(), self._optimizer.settings()

    @override
    @contextmanager
    def trace(self, reads: Any) -> Generator[None]:
        """The steps read state and settings of the optimizer from here."""
        assert self._step is not None
        self._reads, self._step.settings = reads
        try:
            yield
        finally:
            self._reads = self._step.settings = None

    @override
    def left(self) -> Any:
        """Where the steps lead, and their losses."""
        end, steps = self._end, self.steps
        self._end = self.steps = None
        return end, steps

    @override
    def accept(self, left: Any, hyper: Tensor, train_batch: Any) -> None:
        """Go on from there."""
        self._end, self.steps = left

    @override
    def runs_compiled(self) -> bool:
        """Whether the steps are."""
        return self._compiled is not None and self._compiled.working

    @override
    def commit(self) -> None:
        """Go on from the end of the unrolled steps."""
        if self._end is None or self._optimizer is None:
            return
        with torch.no_grad():
            for weight, value in zip(self.inner.weights, self._end.weights, strict=True):
                weight.copy_(value)
            for name, buffer in self.inner.buffer_values().items():
                buffer.copy_(self._end.buffers[name])
        self._optimizer.load(self._end.state)
        self._end = None

    def _trajectory(self, mode: str) -> Trajectory:
        if self._step is None:
            raise RuntimeError("unrolling needs the optimizer of the weights: use it through a bilevel.Solver.")
        self._step.optimizer.check_hooks()
        alone = mode == self.settings.mode and self._reads is None
        return Trajectory(self._step, self._compiled if alone else None)

    def _start(self, hyper: Tensor) -> Point:
        assert self._optimizer is not None
        if self.settings.restart:
            return Point([*self.problem.start(hyper).values()], self._optimizer.fresh, self.problem.buffers)
        weights = [weight.detach() for weight in self.inner.weights]
        state = self._optimizer.state() if self._reads is None else self._reads
        return Point(weights, state, self.inner.buffer_values())

    def _finish(self, trajectory: Trajectory, end: Point) -> list[Tensor]:
        self._end = end
        self.steps = Steps(torch.stack(trajectory.losses), trajectory.norms(), trajectory.aux)
        return end.weights


class _Attach(torch.autograd.Function):
    """Give weights the derivative that a function of their cotangents computes."""

    @staticmethod
    @override
    def forward(ctx: Any, pull: Any, hyper: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.pull = pull
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @override
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, ctx.pull(cotangents), *[None] * len(cotangents)
