"""The two steps of every method: :meth:`Solver.inner_step` and :meth:`Solver.outer_step`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bilevel.arguments import check_flag, check_integer
from bilevel.batches import to_device
from bilevel.hyper import Named
from bilevel.interrupts import Waiting
from bilevel.linear_solvers import LinearSolverError, NotFiniteSystemError
from bilevel.parallel import divided, join, share
from bilevel.problem import Problem
from bilevel.response import BestResponse, Method, get_method
from bilevel.solver import files, steps, together
from bilevel.solver import state as states
from bilevel.solver.evaluation import mean_outer_loss
from bilevel.solver.fingerprint import fingerprint
from bilevel.solver.finite import NotFinite
from bilevel.solver.first_look import FirstLook
from bilevel.solver.gradients import Differentiation
from bilevel.solver.guard import Guard
from bilevel.solver.memory import keep_freed_memory
from bilevel.solver.optimization import Optimization, OptimizerFactory, SchedulerFactory
from bilevel.solver.steps import OuterStep


class Solver:
    r"""A problem, a method and their optimizers, for people who keep their own loop.

    Example:
        >>> import bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        ...     hyper={"target": bilevel.real(0.0)},
        ... )
        >>> solver = Solver(problem, inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        >>> solver.inner_step()
        tensor(0.)
        >>> solver.outer_step().loss
        tensor(9.)

    Attributes:
        problem: The problem.
        method: The settings of the method.
        response: The best response, which holds the weights and all that is learned about them.
        vector: The current :math:`\lambda`, unconstrained, shape ``(h,)``.
        optimizers: By name: ``weights``, ``response``, ``hyper`` and ``scale``, as far as there is something to train.
        schedulers: By the same names.
        optimization: The groups of parameters, with their optimizers.
        guard: What happens to a step that is not finite.
        fingerprint: What the solver is made of, to be compared with a file.
        first_look: The checks of new kinds of batches.
        streams: The random streams of the data, of the losses and of evaluations.
        group: The processes that solve the problem together, or None if there is one only.
        shards: The parts that this process keeps of weights and response, or None if it has all of them.
        seed: Of these streams.
        inner_steps: How many inner steps have been made.
        outer_steps: How many outer steps have been made.
        inner_aux: What the inner loss last returned beside its value.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        method: str | Method = "delta_stn",
        inner_optimizer: OptimizerFactory | None = None,
        outer_optimizer: OptimizerFactory | None = None,
        response_optimizer: OptimizerFactory | None = None,
        inner_scheduler: SchedulerFactory | None = None,
        outer_scheduler: SchedulerFactory | None = None,
        inner_clip: float | None = None,
        outer_clip: float | None = None,
        compile: bool = False,
        on_nan: str = "raise",
        max_bad_steps: int = 10,
        seed: int = 0,
        distributed: bool = True,
    ) -> None:
        """Bind the method to the problem and build the optimizers.

        Args:
            problem: What to solve.
            method: A name in ``bilevel.METHODS`` or an instance such as ``bilevel.DeltaSTN(entropy=1e-3)``.
            inner_optimizer: Makes an optimizer from parameters; called for the weights and for the response, which
                never gets its ``weight_decay``. Adam with learning rate 1e-3 by default. The parameters are a list with
                names, :class:`bilevel.solver.Parameters`, from which it may make groups.
            outer_optimizer: The same for the hyperparameters and the scale; Adam by default, with
                learning rate 0.02 and betas (0.9, 0.99).
            response_optimizer: Replaces ``inner_optimizer`` for the response.
            inner_scheduler: Makes a learning-rate scheduler from each inner optimizer.
            outer_scheduler: The same for each outer optimizer.
            inner_clip: Largest gradient norm, for the weights and for the response each.
            outer_clip: Largest gradient norm, for the hyperparameters and for the scale each.
            compile: Trace and compile when first needed, which takes seconds to minutes: for self-tuning networks the
                losses and gradients of inner and outer steps, once for every shape of batch; for implicit and unrolled
                methods the outer step as one graph, or else its products or inner steps. What the losses read beside
                their arguments is frozen then, except for tensors that are changed in place. What cannot be compiled,
                or would not be faster, runs as it is, with a warning.
            on_nan: What to do if a number of a step is NaN or infinite: a loss, a gradient, a weight, a buffer, a
                hyperparameter or what an optimizer remembers. ``"raise"`` undoes the step and raises. ``"skip"``
                leaves the step out, as if its batch had not been there. ``"rollback"`` returns to the first inner step
                since the last outer one. Both go on, with a :class:`NotFiniteWarning`, and on an accelerator both wait
                for the device in every step.
            max_bad_steps: With ``"skip"`` and ``"rollback"``, raise after more bad steps in a row.
            seed: Of the solver's own random streams.
            distributed: Solve together with the processes that torchrun started; see :doc:`/guides/parallel`.

        Raises:
            TypeError: If ``problem`` is not a problem, or the method does not make a response.
            ValueError: If the method cannot be compiled, or the processes have different arguments.
        """
        if not isinstance(problem, Problem):
            raise TypeError(f"problem must be a bilevel.Problem, got {type(problem).__name__}.")
        check_flag("distributed", distributed)
        self.problem, self.seed = problem, seed
        self.method = get_method(method)
        check_integer("seed", seed, 0)
        check_flag("compile", compile)
        self.group = join(problem.device) if distributed else None
        if self.group is not None and compile:
            raise ValueError("compile=True is for one process: leave it out, or pass distributed=False.")
        self.streams = together.streams(seed, problem.device, self.group)
        with self.streams["loss"]():
            self.response = self.method.bind(problem)
        if not isinstance(self.response, BestResponse):
            raise TypeError(
                f"{type(self.method).__name__}.bind must return a bilevel.BestResponse, "
                f"got {type(self.response).__name__}."
            )
        if compile and not (self.response.can_compile or self.response.pure):
            raise ValueError(
                f"compile=True is for methods whose response says that it can_compile or is pure; "
                f"{type(self.response).__name__} does not: leave it out."
            )
        self.vector = nn.Parameter(problem.initial_hyper())
        self.response.inner.group = self.group
        if self.group is not None:
            together.start(self, self.group, seed)
        self.shards = self.response.inner.shards = together.divide(self)
        self.optimization = Optimization(
            self.response,
            self.vector,
            inner=inner_optimizer,
            outer=outer_optimizer,
            response_optimizer=response_optimizer,
            inner_scheduler=inner_scheduler,
            outer_scheduler=outer_scheduler,
            inner_clip=inner_clip,
            outer_clip=outer_clip,
        )
        self.response.compiles = compile
        self.response.connect(self.optimizers["weights"], self.optimization.clip["inner"])
        self.inner_steps = self.outer_steps = 0
        self.inner_aux: Any = None
        self.first_look = FirstLook(self.response)
        self.guard = Guard(self, on_nan, max_bad_steps)
        self._finite = self.guard.finite
        self._differentiation = Differentiation(self.response, self.optimization, self._finite, compile=compile)
        self.fingerprint = fingerprint(self, seed, compile=compile)
        keep_freed_memory(problem.device)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By the names ``weights``, ``response``, ``hyper`` and ``scale``, as far as there is something to train."""
        return self.optimization.optimizers

    @property
    def schedulers(self) -> dict[str, LRScheduler]:
        """By the same names."""
        return self.optimization.schedulers

    @property
    def hyper(self) -> Named:
        """The current hyperparameters in natural units."""
        return self.problem.space.values(self.vector.detach().clone())

    @property
    def params(self) -> dict[str, Tensor]:
        """A copy of the weights at the current hyperparameters; sharded, if those of the problem are."""
        found, like = states.params(self), self.problem.params
        return found if self.shards is None else {name: divided(value, like[name]) for name, value in found.items()}

    def gathered(self) -> AbstractContextManager[None]:
        """Have whole parameters of the response inside the block, where each process keeps a part; all enter it."""
        return nullcontext() if self.shards is None else self.shards.gathered()

    @property
    def module_state_dict(self) -> dict[str, Any]:
        """Weights and buffers under the names of the user's module, into which it loads strictly."""
        return self.problem.state_dict(self.params, self.response.inner.buffer_values())

    def inner_step(self, *batches: Any) -> Tensor:
        """Train the weights, and what the method learns about their response, by one update.

        Args:
            batches: For the inner loss; moved to the device of the weights. Of several, the gradients are averaged,
                weighted by the number of examples, which needs the memory of one batch at a time; a method that
                perturbs draws anew for each. None at all stands for a loss that needs no batch.

        Returns:
            The inner loss before the step, on the device; the average if there are several batches. NaN for a step that
            was left out.
        """
        with Waiting(), self.gathered():
            try:
                return steps.inner(self, batches or (None,))
            except NotFinite as bad:
                self.guard.handle("inner", bad)
                return self.vector.new_full((), math.nan)

    def outer_step(self, train_batch: Any = None, valid_batch: Any = None) -> OuterStep:
        r"""Move the hyperparameters, and the scale if it is learned, along the hypergradient.

        Args:
            train_batch: For methods whose response needs the inner loss. For :class:`Unrolled`, a list of batches, one
                for each inner step that it makes.
            valid_batch: For the outer loss.

        Returns:
            The loss and hypergradient at which the step was made; NaN for a step that was left out.

        Raises:
            LinearSolverError: If the linear system of an implicit method cannot be solved.
        """
        with Waiting(), self.gathered():
            try:
                return steps.outer(self, train_batch, valid_batch)
            except NotFinite as bad:
                self.guard.handle("outer", bad)
            except LinearSolverError as error:
                # A state or a batch that is not finite is the cause then, and the better message.
                if not self.guard.is_finite():
                    what = f"{self.guard.site()} is NaN or infinite at outer step {self.outer_steps}, counted from 0."
                    self.guard.handle("outer", NotFinite(what, str(error), self.outer_steps))
                elif isinstance(error, NotFiniteSystemError) and self.guard.policy != "raise":
                    self.guard.handle("outer", NotFinite(f"at outer step {self.outer_steps}: {error}", "", 0))
                else:
                    raise
            nothing = torch.full_like(self.vector.detach(), math.nan)
            return OuterStep(nothing.sum(), nothing, nothing, {}, None, nothing[:0])

    def restart(self) -> None:
        """Forget all that was trained at the inner level.

        Weights and buffers return to the start of the problem at the current hyperparameters, and their optimizers to a
        state without memory; the response is drawn anew. Learning rates, the hyperparameters and their perturbation
        scale stay.
        """
        self.check()
        with Waiting():
            states.restart(self)

    def share(self, loader: Any) -> Any:
        """The batches of this process, if there are several: of a map-style loader its part of the examples.

        Args:
            loader: Any re-iterable of batches, the same in every process.

        Returns:
            A re-iterable of as many batches as the other processes have, for :meth:`inner_step` and :meth:`outer_step`;
            the loader itself if there is one process.
        """
        return share(loader, self.group, self.streams.get("order", self.streams["data"]))

    def evaluate(self, loader: Iterable[Any] | None = None) -> float:
        """The outer loss over a whole set, at the current weights and unperturbed hyperparameters.

        Changes nothing, and does not consume the random numbers of the run.

        Args:
            loader: Batches, weighted by their number of examples; None evaluates the loss once without a batch. Several
                processes are given the same loader, and each evaluates its part.

        Returns:
            The mean loss.
        """
        if self._finite.at_once:
            self.check()
        return mean_outer_loss(self, loader, leave_out=self.guard.policy != "raise")

    def check(self) -> None:
        """Raise if the state is not finite, or an inner step since the last outer step was not.

        What an update made is judged with the next step; on an accelerator, with the next outer step. Here, and in
        :meth:`evaluate`, :meth:`state_dict` and :meth:`save`, it is judged at once, which waits for the device.

        Raises:
            DivergenceError: If it is not, and ``on_nan`` is ``"raise"``; the solver is then in its last good state.
        """  # noqa: DOC502
        with Waiting(), self.gathered():
            try:
                self._finite.pending(self.inner_steps, self._finite.number(self.guard.step.tensors()))
                self.guard.checked()
            except NotFinite as bad:
                self.guard.handle("inner", bad)

    def rollback(self) -> bool:
        """Return to the last state at which the losses were finite: for a state that is finite, but of no use.

        That is the state before the last inner update; on an accelerator, the one before the first inner step since the
        last outer one. Random numbers of the data go on.

        Returns:
            Whether there is such a state.
        """
        with Waiting():
            return self.guard.rollback()

    @property
    def on_nan(self) -> str:
        """How a step that is not finite is treated, ``"raise"``, ``"skip"`` or ``"rollback"``."""
        return self.guard.policy

    @property
    def bad_steps(self) -> int:
        """How many steps were left out because they were not finite, with ``on_nan`` ``"skip"`` or ``"rollback"``."""
        return self.guard.dropped

    def schedule(self, validation_loss: float | None = None) -> None:
        """Advance the learning-rate schedulers.

        Args:
            validation_loss: If given, advances those of kind ``ReduceLROnPlateau``, otherwise all others. Those of the
                outer level wait for the first outer step.
        """
        with Waiting():
            self.optimization.schedule(validation_loss, levels=("inner", "outer")[: 1 + (self.outer_steps > 0)])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit: tensors and plain types only, all finite.

        If there are several processes, all of them have to call it, and get the state of all.

        Returns:
            A dict that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.

        Raises:
            DivergenceError: As :meth:`check`. Called again, it returns the last good state.
        """  # noqa: DOC502
        self.check()
        ranks = {} if self.group is None else {"ranks": self.group.gather(states.streams(self))}
        return states.save(self) | ranks

    def save(self, path: str | Path) -> None:
        """Write :meth:`state_dict` to a file, whole or not at all, with a checksum; the one before stays, as ``.1``.

        Of several processes, the first one writes.

        Args:
            path: Of the file.

        Raises:
            CheckpointError: If it cannot be written, or is in use.
        """  # noqa: DOC502
        files.save(self, Path(path))

    def load(self, path: str | Path, *, override: bool = False) -> None:
        """Continue from :meth:`save`, bit for bit; if the file is damaged, from the one before, with a warning.

        Args:
            path: Of the file.
            override: Go on with what this solver has where it changed, such as a learning rate, instead of refusing.

        Raises:
            CheckpointError: If the file cannot be used, or belongs to a solver with other settings; this solver is then
                unchanged.
        """  # noqa: DOC502
        files.load(self, Path(path), override=override)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` of a solver with the same problem, method and optimizers.

        Raises:
            ValueError: If the state does not belong to such a solver; this solver is then unchanged.
        """  # noqa: DOC502
        states.restore(self, state)

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the device of the weights: its tensors, and what has a ``to`` of its own.

        Args:
            batch: Any nesting of tuples, lists, mappings and dataclasses.

        Returns:
            The same with everything moved.
        """
        return to_device(batch, self.problem.device)
