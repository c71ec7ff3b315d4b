"""The two steps of every method: :meth:`Solver.inner_step` and :meth:`Solver.outer_step`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bilevel.arguments import check_flag, check_integer, check_one_process
from bilevel.batches import to_device
from bilevel.hyper import Named
from bilevel.precision import own_precision
from bilevel.problem import Problem
from bilevel.response import BestResponse, Method, get_method
from bilevel.rng import Stream
from bilevel.solver import state as states
from bilevel.solver.evaluation import mean_outer_loss
from bilevel.solver.finite import FiniteCheck
from bilevel.solver.first_look import FirstLook
from bilevel.solver.gradients import Differentiation
from bilevel.solver.optimization import Gradients, Optimization, OptimizerFactory, SchedulerFactory
from bilevel.solver.undo import LastGood, buffers_kept, update_undone_on_error


@dataclass(frozen=True)
class OuterStep:
    """What one outer step computed, before it moved the hyperparameters.

    Attributes:
        loss: The outer loss.
        hypergradient: Its total derivative, shape ``(h,)``, over the unconstrained vector.
        direct: The part of it that does not pass through the weights.
        report: What the method says about it, such as the residual of its linear system.
        aux: What the outer loss returned beside its value.
        inner_losses: Those of the inner steps that the method made itself; empty if it made none.
    """

    loss: Tensor
    hypergradient: Tensor
    direct: Tensor
    report: dict[str, Tensor]
    aux: Any
    inner_losses: Tensor


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
        first_look: The checks of new kinds of batches.
        streams: The random streams of the data, of the losses and of evaluations.
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
        seed: int = 0,
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
                methods the inner loss and its derivatives in an outer step. What the losses read beside their
                arguments is frozen then, except for tensors that are changed in place. What cannot be compiled, or
                would not be faster, runs as it is, with a warning.
            seed: Of the solver's own random streams.

        Raises:
            TypeError: If ``problem`` is not a problem, or the method does not make a response.
            ValueError: If the method cannot be compiled.
        """
        if not isinstance(problem, Problem):
            raise TypeError(f"problem must be a bilevel.Problem, got {type(problem).__name__}.")
        check_one_process()
        self.problem = problem
        self.method = get_method(method)
        check_integer("seed", seed, 0)
        check_flag("compile", compile)
        seeds = np.random.SeedSequence(seed).generate_state(3, np.uint64)
        self.streams = {
            name: Stream(int(value), problem.device)
            for name, value in zip(("data", "loss", "evaluation"), seeds, strict=True)
        }
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
        self.inner_steps = 0
        self.outer_steps = 0
        self.inner_aux: Any = None
        self.first_look = FirstLook(self.response)
        self._last_good = LastGood(self.state_dict, self._load)
        self._finite = FiniteCheck(self.response, self.vector.detach(), self._last_good)
        self._differentiation = Differentiation(self.response, self.optimization, self._finite, compile=compile)
        if problem.device.type == "cpu":
            # glibc keeps freed memory up to twice the largest block freed so far, of at most 32 MB; what is beyond it
            # gives back to the system, and a step spends its time on page faults. So one large block is freed here.
            torch.empty(31 << 20, dtype=torch.uint8, device="cpu")

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
        """A copy of the weights at the current hyperparameters."""
        with torch.no_grad(), own_precision(self.problem.device):
            return {name: value.clone() for name, value in self.response(self.vector.detach()).params.items()}

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
            The inner loss before the step, on the device; the average if there are several batches.
        """
        moved = [self.to_device(batch) for batch in batches or (None,)]
        if not self._finite.at_once:
            self._last_good.keep()
        try:
            with buffers_kept(self.response.inner), self.streams["loss"](), own_precision(self.problem.device):
                for batch in moved:
                    self.first_look.inner(self.vector.detach(), batch)
                loss, values, gradients = self._differentiation.of_inner_losses(self.vector.detach(), moved)
                norms = self.optimization.set_gradients(gradients)
                self._finite.inner(self.inner_steps, values, norms)
        except BaseException:
            self.optimization.drop_gradients()
            raise
        self.optimization.step(gradients)
        self.inner_steps += 1
        self.inner_aux = loss.aux
        return loss.value

    def outer_step(self, train_batch: Any = None, valid_batch: Any = None) -> OuterStep:
        r"""Move the hyperparameters, and the scale if it is learned, along the hypergradient.

        Args:
            train_batch: For methods whose response needs the inner loss. For :class:`Unrolled`, a list of batches, one
                for each inner step that it makes.
            valid_batch: For the outer loss.

        Returns:
            The loss and hypergradient at which the step was made.
        """
        train_batch, valid_batch = self.to_device(self._train_batches(train_batch)), self.to_device(valid_batch)
        hyper, steps = self.vector.detach(), (self.inner_steps, self.outer_steps)
        with self.streams["loss"](), self._finite.reading_once(), own_precision(self.problem.device):
            if self.response.unrolled_steps and self.inner_steps == 0:
                self._differentiation.rehearse(hyper, train_batch[0])
            if not self.response.pure:  # otherwise it does not read the training batch
                for batch in train_batch if self.response.unrolled_steps else [train_batch]:
                    self.first_look.inner(hyper, batch)
            self.first_look.outer(hyper, valid_batch)
            loss, slopes = self._differentiation.of_outer_loss(hyper, (train_batch, valid_batch), steps)
            self.first_look.reads()
            direct, through_weights, *for_scale = slopes
            hypergradient = direct + through_weights
            gradients: Gradients = {"hyper": [hypergradient.clone()]}
            if for_scale:
                gradients["scale"] = [*for_scale]
            with update_undone_on_error(self.optimization, gradients):
                norms = self.optimization.set_gradients(gradients)
                self.optimization.step(gradients)
                # The step is made before it is judged, so that all flags are read from the device at once.
                moved = torch.cat([value.flatten() for value in self.hyper.values()])
                self._finite.outer(self.outer_steps, loss.value, norms, moved, self.inner_steps)
                self.response.commit()
        self.outer_steps += 1
        made = self.response.steps
        if made is not None:
            self.inner_steps += len(made.losses)
            self.inner_aux = made.aux
        return OuterStep(
            loss.value,
            hypergradient,
            direct,
            dict(self.response.report),
            loss.aux,
            loss.value.new_zeros(0) if made is None else made.losses,
        )

    def restart(self) -> None:
        """Forget all that was trained at the inner level.

        Weights and buffers return to the start of the problem at the current hyperparameters, and their optimizers to a
        state without memory; the response is drawn anew. Learning rates, the hyperparameters and their perturbation
        scale stay.
        """
        self.check()  # a bad step that has not been noticed yet would lead back to before the restart
        with self.streams["loss"]():
            fresh = self.method.bind(self.problem).state_dict()
        kept = {name: value for name, value in self.response.state_dict().items() if name.startswith("scale.")}
        self.response.load_state_dict(fresh | kept)
        start = self.problem.start(self.vector.detach())
        with torch.no_grad():
            for weight, value in zip(self.response.inner.weights, start.values(), strict=True):
                weight.copy_(value)
        self.optimization.restart_inner()

    def evaluate(self, loader: Iterable[Any] | None = None) -> float:
        """The outer loss over a whole set, at the current weights and unperturbed hyperparameters.

        Changes nothing, and does not consume the random numbers of the run.

        Args:
            loader: Batches, weighted by their number of examples; None evaluates the loss once without a batch.

        Returns:
            The mean loss.
        """
        return mean_outer_loss(self, loader)

    def check(self) -> None:
        """Raise if an inner step since the last outer step was not finite.

        Every inner step does so by itself on a CPU, every outer step elsewhere, where it waits for the device.
        """
        self._finite.pending(self.inner_steps)

    def schedule(self, validation_loss: float | None = None) -> None:
        """Advance the learning-rate schedulers.

        Args:
            validation_loss: If given, advances those of kind ``ReduceLROnPlateau``, otherwise all others. Those of the
                outer level wait for the first outer step.
        """
        self.optimization.schedule(validation_loss, outer=self.outer_steps > 0)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit: tensors and plain types only.

        Returns:
            A dict that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.
        """
        return states.save(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` of a solver with the same problem, method and optimizers.

        Raises:
            ValueError: If the state does not belong to such a solver; this solver is then unchanged.
        """
        own = self.state_dict()
        states.check(state, own)
        try:
            states.check_parts(state, own)
            self._load(state)
        except Exception as error:
            self._load(own)
            raise ValueError(f"state does not fit this solver: {error}") from error

    def _load(self, state: dict[str, Any]) -> None:
        states.load(self, state)
        self._finite.forget()
        self._last_good.forget()

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the device of the weights: its tensors, and what has a ``to`` of its own.

        Args:
            batch: Any nesting of tuples, lists, mappings and dataclasses.

        Returns:
            The same with everything moved.
        """
        return to_device(batch, self.problem.device)

    def _train_batches(self, train_batch: Any) -> Any:
        """What the response takes: the batch, or a list of as many as it makes steps."""
        count = self.response.unrolled_steps
        if count == 0:
            return train_batch
        if train_batch is None:
            return [None] * count
        if not isinstance(train_batch, list) or len(train_batch) != count:
            got = f"{len(train_batch)}" if isinstance(train_batch, list) else f"a {type(train_batch).__name__}"
            raise ValueError(
                f"train_batch must be a list of {count} batches, one for each step of {self.method}, got {got}; to use "
                f"one batch for all of them, write [batch] * {count}."
            )
        return train_batch
