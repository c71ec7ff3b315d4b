"""The two steps of every method: :meth:`Solver.inner_step` and :meth:`Solver.outer_step`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import _pytree as pytree

from bilevel.arguments import check_clip, check_flag, check_integer, check_loader, make_optimizer, make_scheduler
from bilevel.checkpoint import check_layout
from bilevel.compilation import OfModule, gains
from bilevel.hyper import Named
from bilevel.linear_solvers import LinearSolverError
from bilevel.problem import Loss, Model, Problem
from bilevel.response import BestResponse, Method, get_method
from bilevel.rng import Stream

if TYPE_CHECKING:
    from bilevel.loop import Solution

HALF = (torch.float16, torch.bfloat16)
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
Part = TypeVar("Part", Tensor, Tensor | None)


class DivergenceError(RuntimeError):
    """A loss or gradient became NaN or infinite; the solver is back in its last good state.

    Attributes:
        solution: The solution so far, if the error left :func:`bilevel.solve`.
    """

    solution: Solution | None = None


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
                never gets its ``weight_decay``. Adam with learning rate 1e-3 by default.
            outer_optimizer: The same for the hyperparameters and the scale; RMSprop with learning rate 1e-2 by default.
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
        self.problem = problem
        self.method = get_method(method)
        check_integer("seed", seed, 0)
        check_flag("compile", compile)
        self._clip = {
            "inner": check_clip("inner_clip", inner_clip),
            "outer": check_clip("outer_clip", outer_clip),
        }
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
        for_weights = partial(torch.optim.Adam, lr=1e-3) if inner_optimizer is None else inner_optimizer
        for_response = for_weights if response_optimizer is None else response_optimizer
        for_hyper = partial(torch.optim.RMSprop, lr=1e-2) if outer_optimizer is None else outer_optimizer
        self.optimizers: dict[str, Optimizer] = {}
        self.schedulers: dict[str, LRScheduler] = {}
        self._params = self._group_parameters()
        for name, params in self._params.items():
            level, argument, factory = {
                "weights": ("inner", "inner_optimizer", for_weights),
                "response": ("inner", "response_optimizer", for_response),
                "hyper": ("outer", "outer_optimizer", for_hyper),
                "scale": ("outer", "outer_optimizer", for_hyper),
            }[name]
            self.optimizers[name] = make_optimizer(argument, factory, params)
            scheduler = inner_scheduler if level == "inner" else outer_scheduler
            if scheduler is not None:
                self.schedulers[name] = make_scheduler(f"{level}_scheduler", scheduler, self.optimizers[name])
        self.response.compiles = compile
        self.response.connect(self.optimizers["weights"], self._clip["inner"])
        if "response" in self.optimizers and response_optimizer is None:
            for group in self.optimizers["response"].param_groups:
                group.update({"weight_decay": 0} if "weight_decay" in group else {})
        self._inner: OfModule | None = None
        self._outer: OfModule | None = None
        if compile and self.response.pure and gains(problem.module, problem.device):
            trained = self._params["weights"] + self._params.get("response", [])
            tuned = self._params.get("scale", [])
            self._inner = OfModule(self.response, trained, "inner steps", self._terms)
            self._outer = OfModule(self.response, tuned, "outer steps", self._slopes, after=self._inner.staged)
        self.inner_steps = 0
        self.outer_steps = 0
        self.inner_aux: Any = None
        # On a CPU a finite-check costs nothing and precedes the update. Elsewhere it would stall the device: there the
        # first bad step is noted on the device, read at the outer step, and undone by returning to the last good state.
        self._check_at_once = problem.device.type == "cpu"
        if self._check_at_once:
            # glibc keeps freed memory up to twice the largest block freed so far, of at most 32 MB; what is beyond it
            # gives back to the system, and a step spends its time on page faults. So one large block is freed here.
            torch.empty(31 << 20, dtype=torch.uint8, device="cpu")
        self._bad = self.vector.new_full((4,), math.nan)
        self._good: dict[str, Any] | None = None
        inner = [name for name in ("weights", "response") if name in self.optimizers]
        self._fresh = {name: copy.deepcopy(self.optimizers[name].state_dict()["state"]) for name in inner}
        self._users = [param for param in problem.params.values() if param.requires_grad]

    @property
    def hyper(self) -> Named:
        """The current hyperparameters in natural units."""
        return self.problem.space.values(self.vector.detach().clone())

    @property
    def params(self) -> dict[str, Tensor]:
        """A copy of the weights at the current hyperparameters."""
        with torch.no_grad():
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
        if not self._check_at_once and self._good is None:
            self._good = self.state_dict()
        buffers = self._copy_buffers()
        try:
            with self.streams["loss"]():
                loss, values, gradients = self._average_gradients(moved)
                norms = self._set_gradients(gradients, "inner")
                self._check_inner(values, norms)
        except BaseException:
            self._restore_buffers(buffers)
            raise
        self._apply(gradients)
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
        with self.streams["loss"]():
            loss, (direct, through_weights, *for_scale) = self._hypergradient(train_batch, valid_batch)
            hypergradient = direct + through_weights
            gradients: dict[str, list[Tensor | None]] = {"hyper": [hypergradient.clone()]}
            if for_scale:
                gradients["scale"] = [*for_scale]
            before = self._outer_state(gradients)
            try:
                norms = self._set_gradients(gradients, "outer")
                self._apply(gradients)
                # The step is made before it is judged, so that all flags are read from the device at once.
                moved = torch.cat([value.flatten() for value in self.hyper.values()])
                step = norms.new_full((), self.outer_steps)
                record = torch.stack([step, norms.sum(), loss.value.to(norms), (moved * 0).sum()])
                self._raise_if_bad(torch.stack([self._inner_record(), record]))
                self.response.commit()
            except BaseException:
                self._undo(before)
                raise
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
        with self.streams["loss"]():
            fresh = self.method.bind(self.problem).state_dict()
        kept = {name: value for name, value in self.response.state_dict().items() if name.startswith("scale.")}
        self.response.load_state_dict(fresh | kept)
        start = self.problem.start(self.vector.detach())
        with torch.no_grad():
            for weight, value in zip(self.response.inner.weights, start.values(), strict=True):
                weight.copy_(value)
        for name, state in copy.deepcopy(self._fresh).items():
            groups = self.optimizers[name].state_dict()["param_groups"]
            self.optimizers[name].load_state_dict({"state": state, "param_groups": groups})

    def evaluate(self, loader: Iterable[Any] | None = None) -> float:
        """The outer loss over a whole set, at the current weights and unperturbed hyperparameters.

        Changes nothing, and does not consume the random numbers of the run.

        Args:
            loader: Batches, weighted by their number of examples; None evaluates the loss once without a batch.

        Returns:
            The mean loss.

        Raises:
            DivergenceError: If it is not finite.
            ValueError: If there is no batch.
        """
        check_loader("loader", loader)
        model = self.response.inner.model(self.params)
        losses, sizes = [], []
        with self.streams["evaluation"]():
            for batch in [None] if loader is None else loader:
                moved = self.to_device(batch)
                sizes.append(self.problem.examples(moved))
                losses.append(self.problem.outer_loss(model, self.vector.detach(), moved).value.detach())
        if not losses:
            raise ValueError("loader is empty: a validation pass needs at least one batch.")
        if None in sizes and len(sizes) > 1:
            raise ValueError(
                "loader has several batches, and one of them has no tensor whose dimension 0 could count its examples, "
                "so that their losses cannot be weighted: set Problem(examples=...)."
            )
        weights = torch.tensor([size or 1 for size in sizes], dtype=torch.float64)
        mean = float(torch.stack(losses).cpu().double() @ weights / weights.sum())
        if not math.isfinite(mean):
            raise DivergenceError(
                f"the outer loss over the whole set is {mean} after {self.inner_steps} inner steps: lower the learning "
                "rates, or look for overflow in outer_loss."
            )
        return mean

    def check(self) -> None:
        """Raise if an inner step since the last outer step was not finite.

        Every inner step does so by itself on a CPU, every outer step elsewhere, where it waits for the device.
        """
        if not self._check_at_once:
            record = self._inner_record()
            self._raise_if_bad(torch.stack([record, torch.zeros_like(record)]))

    def schedule(self, validation_loss: float | None = None) -> None:
        """Advance the learning-rate schedulers.

        Args:
            validation_loss: If given, advances those of kind ``ReduceLROnPlateau``, otherwise all others. Those of the
                outer level wait for the first outer step.
        """
        waiting = {"hyper", "scale"} if self.outer_steps == 0 else set()
        for scheduler in (entry for name, entry in self.schedulers.items() if name not in waiting):
            if isinstance(scheduler, ReduceLROnPlateau):
                if validation_loss is not None:
                    scheduler.step(validation_loss)
            elif validation_loss is None:
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit: tensors and plain types only.

        Returns:
            A dict that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.
        """
        return copy.deepcopy({
            "method": repr(self.method),
            "hyper": {name: [h.low, h.high, h.discrete] for name, h in self.problem.space.hyper.items()},
            "vector": self.vector.detach(),
            "response": dict(self.response.state_dict()),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "schedulers": {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()},
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "inner_steps": self.inner_steps,
            "outer_steps": self.outer_steps,
        })

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` of a solver with the same problem, method and optimizers.

        Raises:
            ValueError: If the state does not belong to such a solver; this solver is then unchanged.
        """
        own = self.state_dict()
        missing = sorted(own.keys() - state.keys()) if isinstance(state, dict) else sorted(own)
        if missing:
            raise ValueError(f"state is not a Solver.state_dict(): it lacks {', '.join(missing)}.")
        for key in ("method", "hyper"):
            if state[key] != own[key]:
                raise ValueError(f"state was saved with {key} {state[key]}, this solver has {own[key]}.")
        try:
            for key in ("vector", "response", "schedulers", "optimizers", "streams"):
                check_layout(f"state[{key!r}]", state[key], own[key])
            for key in ("inner_steps", "outer_steps"):
                check_integer(f"state[{key!r}]", state[key], 0)
            self._load(state)
        except Exception as error:
            self._load(own)
            raise ValueError(f"state does not fit this solver: {error}") from error

    def _load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        with torch.no_grad():
            self.vector.copy_(state["vector"])
        self.response.load_state_dict(state["response"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(state["schedulers"][name])
        self.inner_steps, self.outer_steps = state["inner_steps"], state["outer_steps"]
        self._bad = torch.full_like(self._bad, math.nan)
        self._good = None

    def _group_parameters(self) -> dict[str, list[nn.Parameter]]:
        groups = {"weights": list(self.response.inner.weights)}
        scale = [] if self.response.scale is None else list(self.response.scale.parameters())
        taken = {id(param) for param in groups["weights"] + scale}
        groups["response"] = [param for param in self.response.parameters() if id(param) not in taken]
        groups["hyper"] = [self.vector]
        groups["scale"] = scale
        return {name: params for name, params in groups.items() if params}

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the device of the weights: its tensors, and what has a ``to`` of its own.

        Args:
            batch: Any nesting.

        Returns:
            The same with everything moved.
        """
        device = self.problem.device

        def move(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                # A copy to the CPU that does not block would be read before it has arrived.
                return leaf.to(device, non_blocking=device.type != "cpu")
            # Batches of other libraries, such as tokenizers, know how to move themselves.
            return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

        return pytree.tree_map(move, batch)

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

    def _copy_buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [(buffer, buffer.clone()) for buffer in self.response.inner.buffers()]

    @torch.no_grad()
    def _restore_buffers(self, buffers: list[tuple[Tensor, Tensor]]) -> None:
        for buffer, before in buffers:
            buffer.copy_(before)

    def _rehearse(self, batch: Any) -> None:
        """Run all checks of an inner step before the first one, for a response that makes its steps itself."""
        buffers = self._copy_buffers()
        try:
            with Stream.current(self.problem.device)():
                self._inner_gradients(batch)
        finally:
            self._restore_buffers(buffers)

    def _average_gradients(self, batches: list[Any]) -> tuple[Loss, list[Tensor], dict[str, list[Tensor | None]]]:
        """What :meth:`_inner_gradients` returns, averaged over batches, with the aux of the last one."""
        if len(batches) == 1:
            return self._inner_gradients(batches[0])
        sizes = [self.problem.examples(batch) for batch in batches]
        counts = [1 if None in sizes else size or 0 for size in sizes]
        total = sum(counts) or math.nan  # no example at all: reported as a loss that is not finite
        values: list[Tensor] = []
        gradients: dict[str, list[Tensor | None]] = {}
        for batch, count in zip(batches, counts, strict=True):
            loss, new_values, new = self._inner_gradients(batch)
            share = count / total
            values = _add_share(values, new_values, share)
            gradients = {name: _add_share(gradients.get(name, []), found, share) for name, found in new.items()}
        return Loss(values[0], loss.aux), values, gradients

    def _inner_gradients(self, batch: Any) -> tuple[Loss, list[Tensor], dict[str, list[Tensor | None]]]:
        """The loss to report, all terms, and the gradients of their sum by group of parameters."""
        weights, rest = self._params["weights"], self._params.get("response", [])
        hyper = self.vector.detach()
        if self._inner is None:
            loss, values, total = self._terms([*weights, *rest], hyper, batch)
        else:
            loss, values, total = self._inner(hyper, batch)
        groups = {"weights": total[: len(weights)], "response": total[len(weights) :]}
        return loss, values, {name: gradients for name, gradients in groups.items() if gradients}

    def _terms(
        self, params: Sequence[Tensor], hyper: Tensor, batch: Any
    ) -> tuple[Loss, list[Tensor], list[Tensor | None]]:
        """The same, given the weights, what else the response learns, and λ; the gradients in one list."""
        total: list[Tensor | None] = [None] * len(params)
        first: Loss | None = None
        values = []
        for term in self.response.inner_loss(hyper, batch):
            if not isinstance(term, Loss):
                raise TypeError(
                    f"{type(self.response).__name__}.inner_loss must yield bilevel.Loss, as problem.inner_loss "
                    f"returns it; got {type(term).__name__}."
                )
            first = Loss(term.value.detach(), _detached(term.aux)) if first is None else first
            values.append(term.value.detach())
            new = self._differentiate("inner_loss", term.value, params)
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, new, strict=True)]
        if first is None or all(gradient is None for gradient in total[: len(self._params["weights"])]):
            raise ValueError(
                "inner_loss does not depend on the weights: compute it from model(...) and model.params, not from your "
                "own module, and without detach() or no_grad()."
            )
        return first, values, total

    def _hypergradient(self, train_batch: Any, valid_batch: Any) -> tuple[Loss, list[Tensor]]:
        """The outer loss, and its gradient in λ, directly and through the weights, and in the raw scale."""
        if self.response.unrolled_steps and self.inner_steps == 0:
            self._rehearse(train_batch[0])
        hyper = self.vector.detach()
        if self._outer is None:
            return self._slopes(self._params.get("scale", []), hyper, train_batch, valid_batch)
        loss, slopes = self._outer(hyper, None, valid_batch)
        return loss, slopes

    def _slopes(
        self, scale: Sequence[Tensor], hyper: Tensor, train_batch: Any, valid_batch: Any
    ) -> tuple[Loss, list[Tensor]]:
        """The same, given the raw scale, if it is learned, and λ."""
        # Two copies of λ keep the parts apart, so that one backward pass gives both.
        direct, through_weights = (hyper.clone().requires_grad_() for _ in range(2))
        drawn = self.response.outer_perturbation(valid_batch)
        noise = torch.zeros_like(direct) if drawn is None else drawn
        model = self.response(through_weights + noise, train_batch, hyper)
        if not isinstance(model, Model):
            raise TypeError(
                f"{type(self.response).__name__}.forward must return a bilevel.Model, got {type(model).__name__}."
            )
        self._check_made()
        loss = self.problem.outer_loss(model, direct + noise, valid_batch)
        objective = loss.value
        if self.response.scale is not None and scale:
            objective = objective + self.response.scale.penalty()
        inputs = [direct, through_weights, *scale]
        try:
            found = self._differentiate("outer_loss", objective, inputs)
        except LinearSolverError:
            # A loss that is not finite is the cause then, and the better message.
            value = loss.value.detach().to(self.vector)
            record = torch.stack([value.new_full((), self.outer_steps), value, value, torch.zeros_like(value)])
            self._raise_if_bad(torch.stack([self._inner_record(), record]))
            raise
        if not loss.value.requires_grad or (found[0] is None and found[1] is None):
            raise ValueError(
                "outer_loss depends neither on the weights nor on a hyperparameter: compute it from model(...), "
                "model.params or hyper, not from your own module, and without detach() or no_grad()."
            )
        pairs = zip(inputs, found, strict=True)
        gradients = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]
        return Loss(loss.value.detach(), _detached(loss.aux)), gradients

    def _differentiate(self, name: str, value: Tensor, inputs: Sequence[Any]) -> list[Tensor | None]:
        """The gradient of a loss.

        Returns:
            One entry per input, None where the loss does not depend on it.

        Raises:
            ValueError: If it depends on the user's own tensors, which are not the ones that are trained.
        """
        if not value.requires_grad:
            return [None] * len(inputs)
        with self.problem.differentiating():
            gradients: list[Tensor | None] = [*torch.autograd.grad(value, [*inputs, *self._users], allow_unused=True)]
        if any(gradient is not None for gradient in gradients[len(inputs) :]):
            raise ValueError(
                f"{name} depends on your own module, whose weights the solver does not train: compute it from "
                "model(...) and model.params, and detach() what is meant as a constant."
            )
        return gradients[: len(inputs)]

    def _outer_state(self, names: Iterable[str]) -> dict[str, Any]:
        """What an outer step changes, to undo it."""
        return {
            name: (
                [param.detach().clone() for param in self._params[name]],
                copy.deepcopy(self.optimizers[name].state_dict()),
            )
            for name in names
        }

    def _undo(self, before: dict[str, Any]) -> None:
        for name, (values, state) in before.items():
            with torch.no_grad():
                for param, value in zip(self._params[name], values, strict=True):
                    param.copy_(value)
            self.optimizers[name].load_state_dict(state)

    def _set_gradients(self, gradients: dict[str, list[Tensor | None]], level: str) -> Tensor:
        """Hand gradients to the parameters, clipped.

        Each parameter gets a tensor of its own, since optimizers may change it in place: autograd may return one tensor
        for two parameters, or an expanded one.

        Returns:
            The norm of each group before clipping.
        """
        limit = self._clip[level]
        norms = []
        for name, values in gradients.items():
            present = [gradient for gradient in values if gradient is not None]
            if any(gradient.dtype in HALF for gradient in present):  # whose squares overflow early
                present = [gradient.float() for gradient in present]
            norm = torch.nn.utils.get_total_norm(present).to(self.vector)
            shrink = None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
            seen: set[int] = set()
            for param, gradient in zip(self._params[name], values, strict=True):
                if gradient is None:
                    param.grad = None
                elif shrink is not None:
                    param.grad = gradient * shrink.to(gradient.dtype)
                else:
                    own = gradient.data_ptr() not in seen and 0 not in gradient.stride()
                    param.grad = gradient if own else gradient.clone()
                    seen.add(gradient.data_ptr())
            norms.append(norm)
        return torch.stack(norms)

    def _apply(self, names: Iterable[str]) -> None:
        for name in names:
            self.optimizers[name].step()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for params in self._params.values():
            for param in params:
                param.grad = None

    def _check_inner(self, values: list[Tensor], norms: Tensor) -> None:
        terms = torch.stack([value.to(norms) for value in values])
        self._note(torch.stack([terms.new_full((), self.inner_steps), norms.sum(), terms[0], terms[1:].sum()]))

    def _check_made(self) -> None:
        """The same for the inner steps that the response made."""
        made = self.response.steps
        if made is not None:
            norms, losses = made.norms.to(self.vector), made.losses.to(self.vector)
            first = (~(norms + losses).isfinite()).to(torch.int).argmax()  # the first, if there is one
            self._note(torch.stack([first + self.inner_steps, norms[first], losses[first], norms.new_zeros(())]))

    def _note(self, record: Tensor) -> None:
        """Raise at once or later if an inner step is not finite."""
        if self._check_at_once:
            self._raise_if_bad(torch.stack([record, torch.zeros_like(record)]))
        else:
            first = self._bad[0].isnan() & ~record.isfinite().all()
            self._bad = torch.where(first, record, self._bad)

    def _inner_record(self) -> Tensor:
        """The first bad inner step since the last check, on the device; zeros if there was none."""
        return torch.where(self._bad[0].isnan(), 0.0, self._bad)

    def _raise_if_bad(self, records: Tensor) -> None:
        """Undo inner steps and raise if a record of an inner or of an outer step is not finite.

        Args:
            records: Two rows of step, gradient norm, loss, and the other terms (inner) or whether λ is finite (outer).

        Raises:
            DivergenceError: If one was.
        """
        (inner_step, inner_norm, inner_loss, others), (outer_step, outer_norm, outer_loss, moved) = records.tolist()
        if not math.isfinite(inner_norm + inner_loss + others):
            self._drop_gradients()
            self._bad = torch.full_like(self._bad, math.nan)
            undone = "That step has been undone."
            if self.inner_steps <= int(inner_step) < self.inner_steps + self.response.unrolled_steps:
                undone = "That step and the others of its outer step have been undone."
            if self._good is not None:
                self._load(self._good)
                undone = "It and all later steps have been undone."
            perturbed = f", at perturbed hyperparameters {others:g}" if others else ""
            smaller = "" if self.response.scale is None else "use a smaller scale of the perturbation, "
            raise DivergenceError(
                f"the inner loss is {inner_loss:g}{perturbed} and its gradient norm {inner_norm:g} at inner step "
                f"{int(inner_step)}, counted from 0. {undone} Lower the inner learning rate, clip gradients "
                f"(inner_clip=1.0), {smaller}or look for log, sqrt or division at zero."
            )
        self._good = None
        if math.isfinite(outer_norm + outer_loss + moved):
            return
        where = f"at outer step {int(outer_step)}, counted from 0. That step has been undone."
        if math.isfinite(outer_norm + outer_loss):
            raise DivergenceError(
                f"a hyperparameter left the range of floating-point numbers {where} Lower the outer learning rate or "
                "clip hypergradients (outer_clip=1.0); an interval keeps a hyperparameter within bounds."
            )
        adaptive = ""
        if self.response.unrolled_steps:
            adaptive = " The steps of Adam and its like are steep where a gradient is zero: raise eps, or use SGD."
        raise DivergenceError(
            f"the outer loss is {outer_loss:g} and the norm of the hypergradient {outer_norm:g} {where} Lower the "
            "learning rates, clip hypergradients (outer_clip=1.0), or look for log, sqrt or division at zero."
            + adaptive
        )


def _add_share(total: list[Part], new: list[Part], share: float) -> list[Part]:
    """Add a part of some tensors to a sum of such parts, empty at first; None stands for zero."""
    parts = [tensor if tensor is None else share * tensor for tensor in new]
    if not total:
        return parts
    return [b if a is None else a if b is None else a + b for a, b in zip(total, parts, strict=True)]


def _detached(aux: Any) -> Any:
    """Without its graph, which would keep the memory of the step."""
    return pytree.tree_map_only(Tensor, Tensor.detach, aux)
