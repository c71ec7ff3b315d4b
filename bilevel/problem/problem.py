"""The bilevel problem as the user states it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from bilevel.batches import count_examples, describe
from bilevel.dropouts import Dropouts
from bilevel.hyper import Hyper, Named, Space, suggest
from bilevel.parallel import is_sharded
from bilevel.precision import users_precision
from bilevel.problem.advice import advice
from bilevel.problem.decays import Decays
from bilevel.problem.inner import check_kind, ties, trainable
from bilevel.problem.loss import Loss, LossFunction, reduce
from bilevel.problem.model import Model
from bilevel.problem.repeats import Repeats
from bilevel.problem.swapped import call_with
from bilevel.problem.weight_norm import exact_weight_norm


class Problem:
    r"""A bilevel problem: inner variables, two losses, hyperparameters.

    Both losses are called as ``loss(model, hyper, batch)`` with a :class:`Model`, the natural values of the
    hyperparameters by name, and a batch. They return a scalar, or one value per example, of which the mean is taken.
    They may also return a pair: the loss, and anything that callbacks should see.

    The inner loss is evaluated in train mode, the outer loss in ``outer_mode``; the module's own flags are restored.
    The module itself is never changed: the solver trains copies of its weights and buffers.

    Attributes:
        module: The network, or None.
        space: The hyperparameters as one unconstrained vector.
        params: The trainable tensors of ``inner`` by name. Frozen ones are left out; a tied one has one name here.
        decays: The decoupled weight decay among the hyperparameters, if there is some.

    Example:
        >>> from bilevel import real
        >>> problem = Problem(
        ...     {"w": torch.zeros(2)},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]).square().sum(),
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 1).square().sum(),
        ...     hyper={"target": real([0.0, 0.0])},
        ... )
        >>> problem
        Problem(2 weights, hyper: target)
    """

    def __init__(
        self,
        inner: nn.Module | Mapping[str, Tensor],
        *,
        inner_loss: LossFunction,
        outer_loss: LossFunction,
        hyper: Mapping[str, Hyper],
        initial: Callable[[Named], Mapping[str, Tensor]] | None = None,
        examples: Callable[[Any], int] | None = None,
        outer_mode: str = "eval",
    ) -> None:
        """State the problem.

        Args:
            inner: A module, whose parameters with ``requires_grad`` are trained. Or a mapping from names to tensors,
                which are all trained.
            inner_loss: What the inner variables minimise.
            outer_loss: What the hyperparameters minimise.
            hyper: Made by :func:`real`, :func:`positive`, :func:`interval` and :func:`integer`.
            initial: A function from the hyperparameters to the weights to start from, by name. Weights that it leaves
                out start as given in ``inner``. ``Unrolled(restart=True)`` differentiates it; the other methods only
                use its value.
            examples: A function that counts the examples in a batch. By default, dimension 0 of the first tensor or
                array that has a dimension.
            outer_mode: ``"eval"`` or ``"train"``, the mode of the module in the outer loss.

        Raises:
            TypeError: If a loss, ``initial`` or ``examples`` cannot be called.
            ValueError: If ``outer_mode`` is unknown.
        """
        for name, function in (("inner_loss", inner_loss), ("outer_loss", outer_loss)):
            if not callable(function):
                raise TypeError(
                    f"{name} must be a function (model, hyper, batch) -> Tensor, got {type(function).__name__}."
                )
        if initial is not None and not callable(initial):
            raise TypeError(f"initial must be a function hyper -> weights by name, got {type(initial).__name__}.")
        if examples is not None and not callable(examples):
            raise TypeError(f"examples must be a function batch -> int, got {type(examples).__name__}.")
        if outer_mode not in ("eval", "train"):
            raise ValueError(f"outer_mode must be 'eval' or 'train', got {outer_mode!r}.")
        self.module = inner if isinstance(inner, nn.Module) else None
        self.params = trainable(inner)
        self._modules = [] if self.module is None else list(self.module.modules())
        self._repeats = Repeats(self.module, self.params.values())
        self._read: dict[str, set[str]] = {"initial": set()}
        self._weight_norm = exact_weight_norm(self.module)
        self._ties = {} if self.module is None else ties(self.module)
        self.space = Space(hyper)
        self._dropouts = Dropouts(self.module, self.space.hyper)
        self.decays = Decays(self.params, self.space)
        self._read["update"] = set(self.decays.names)
        self.examples = examples or count_examples
        self.user_losses = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        self.outer_mode = outer_mode
        self._train_mode = {"inner_loss": True, "outer_loss": outer_mode == "train"}
        check_kind("inner", self.params)
        if initial is not None and self.sharded:
            raise ValueError("initial: weights that are divided among processes start as they are given; leave it out.")
        self._initial = self.user_initial = initial
        with torch.no_grad():
            check_kind("initial", self.start(self.initial_hyper()))  # raises before any work if a value does not fit

    @override
    def __repr__(self) -> str:
        """Show the number of weights and the names of the hyperparameters."""
        weights = sum(value.numel() for value in self.params.values())
        return f"Problem({weights:,} weights, hyper: {', '.join(self.space.hyper)})"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(iter(self.params.values())).dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(iter(self.params.values())).device

    @property
    def sharded(self) -> bool:
        """Whether each process holds a part of the weights only, as ``DTensor``."""
        return is_sharded(next(iter(self.params.values())))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the module by name, such as BatchNorm statistics."""
        return {} if self.module is None else dict(self.module.named_buffers())

    @property
    def unread(self) -> list[str]:
        """The hyperparameters that neither a loss nor ``initial`` has read; none before both losses were evaluated."""
        return self.unread_by(*self.user_losses)

    def unread_by(self, *losses: str) -> list[str]:
        """The hyperparameters that neither these losses nor ``initial`` have read.

        Args:
            losses: ``"inner_loss"`` or ``"outer_loss"``.

        Returns:
            Their names; none if one of the losses has not been evaluated.
        """
        if not all(loss in self._read for loss in losses):
            return []
        read = set[str]().union(*self._read.values())
        return [name for name in self.space.hyper if name not in read]

    def initial_hyper(self) -> Tensor:
        """The initial unconstrained vector, in at least single precision on the device of the weights.

        Returns:
            A tensor of shape ``(h,)``.
        """
        return self.space.init(torch.promote_types(self.dtype, torch.float32), self.device)

    def start(self, hyper: Tensor | Named) -> dict[str, Tensor]:
        """The weights from which training starts.

        Args:
            hyper: Unconstrained; or natural values, by name.

        Returns:
            By name, differentiable in ``hyper`` where ``initial`` is.

        Raises:
            TypeError: If ``initial`` returns no mapping of tensors.
            ValueError: If a tensor does not fit the weight of that name.
        """
        weights = {name: value.detach() for name, value in self.params.items()}
        if self._initial is None:
            return weights
        values = hyper if isinstance(hyper, Named) else self.space.values(hyper)
        given = self._initial(values)
        self._read["initial"] |= values.read
        if not isinstance(given, Mapping):
            raise TypeError(f"initial must return a mapping from names to tensors, got {type(given).__name__}.")
        for name, value in given.items():
            if name not in weights:
                raise ValueError(
                    f"initial returned {name!r}, which is not a trainable weight: {suggest(name, weights)}"
                )
            if not isinstance(value, Tensor):
                raise TypeError(f"initial must return tensors, got {type(value).__name__} for {name!r}.")
            if value.shape != weights[name].shape:
                raise ValueError(
                    f"initial returned {name!r} with shape {tuple(value.shape)}, the weight has "
                    f"{tuple(weights[name].shape)}."
                )
            # The hyperparameters of a network in half precision are in single precision.
            weights[name] = value.to(weights[name]) if value.is_floating_point() else value
        return weights

    def inner_loss(self, model: Model, hyper: Tensor | Named, batch: Any) -> Loss:
        """Evaluate the user's inner loss in train mode.

        Args:
            model: Predictions and weights.
            hyper: Unconstrained; or natural values, by name.
            batch: Handed to the loss.

        Returns:
            The loss, reduced to a scalar.
        """
        return self.evaluate("inner_loss", model, hyper, batch)

    def outer_loss(self, model: Model, hyper: Tensor, batch: Any) -> Loss:
        """Evaluate the user's outer loss in ``outer_mode``.

        Args:
            model: Predictions and weights.
            hyper: Unconstrained.
            batch: Handed to the loss.

        Returns:
            The loss, reduced to a scalar.
        """
        return self.evaluate("outer_loss", model, hyper, batch)

    def call(self, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the network with other weights and buffers than its own.

        Args:
            tensors: By name. Where the network assigns a new tensor to a buffer, it is put in here.
            args: Of the network.
            kwargs: Of the network.

        Returns:
            What the user's ``forward`` returns.

        Raises:
            TypeError: If there is no network.
        """
        if self.module is None:
            raise TypeError("the problem has no network to call.")
        tensors |= {twin: tensors[name] for twin, name in self._ties.items() if name in tensors}
        self._repeats.running += 1
        try:
            with self._dropouts.running():
                return call_with(self.module, tensors, args, kwargs)
        finally:
            self._repeats.running -= 1

    def evaluating(self) -> AbstractContextManager[None]:
        """Put the network into eval mode inside the block.

        Returns:
            A context manager.
        """
        return self._mode(training=False)

    def differentiating(self) -> AbstractContextManager[None]:
        """Refuse passes of the network inside the block that do not come from :meth:`call`.

        Returns:
            A context manager.
        """
        return self._repeats.refused()

    def state_dict(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Any]:
        """Write weights and buffers in the form of the module's own ``state_dict``, with tied and frozen ones.

        Returns:
            A dict that loads strictly into the user's module. Without a module, the weights by name.
        """
        if self.module is None:
            return dict(params)
        names = {id(value): name for name, value in self.module.named_parameters()}
        names |= {id(value): name for name, value in self.module.named_buffers()}
        ours = {**params, **buffers}
        state = self.module.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, Tensor):
                new = ours.get(names.get(id(value), ""), value).detach()
                state[key] = new.clone()
        return state

    def evaluate(
        self, name: str, model: Model, hyper: Tensor | Named, batch: Any, *, training: bool | None = None
    ) -> Loss:
        """Evaluate one of the user's losses.

        Args:
            name: ``"inner_loss"`` or ``"outer_loss"``.
            model: Predictions and weights.
            hyper: Unconstrained; or natural values, by name.
            batch: Handed to the loss.
            training: The mode of the module; that of this loss by default.

        Returns:
            The loss, reduced to a scalar.
        """
        values = hyper if isinstance(hyper, Named) else self.space.values(hyper)
        mode = self._mode(self._train_mode[name] if training is None else training, allow=True)
        with mode, users_precision(), self._weight_norm, self._dropouts.at(values):
            try:
                result = self.user_losses[name](model, values, batch)
            except Exception as error:
                error.add_note(
                    f"Raised while evaluating {name}(model, hyper, batch); weights: {self.dtype} on {self.device}; "
                    f"batch: {describe(batch)}."
                )
                if isinstance(hyper, Tensor) and hyper.ndim == 2:
                    error.add_note(
                        f"There is one perturbation per example: every hyper[...] has shape ({len(hyper)}, ...) here. "
                        "Use the helpers of bilevel.functional and index from the right (hyper[...][..., i]), or pass "
                        "perturb='batch' to the method."
                    )
                for note in advice(error, name, batch):
                    error.add_note(note)
                raise
        self._read.setdefault(name, set()).update(values.read)
        return reduce(name, result, self.examples, batch)

    @contextmanager
    def _mode(self, training: bool, *, allow: bool = False) -> Generator[None]:
        """Put the network into a mode; perhaps allow all passes of it."""
        flags = [(module, module.training) for module in self._modules]
        hidden = allow and self._repeats.hide(False)
        try:
            if self.module is not None and any(flag != training for _, flag in flags):
                self.module.train(training)
            yield
        finally:
            if hidden:
                self._repeats.hide(True)
            for module, flag in flags:
                if module.training != flag:  # setting an attribute of a module takes time
                    module.training = flag
