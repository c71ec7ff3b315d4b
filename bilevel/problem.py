r"""The bilevel problem as the user states it, and the model that its losses see.

.. math:: \min_\lambda \mathcal{L}_V(\lambda, w^*) \quad\text{s.t.}\quad w^* = \arg\min_w \mathcal{L}_T(\lambda, w)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from bilevel.hyper import Hyper, Named, Space, suggest


class Loss(NamedTuple):
    """A scalar loss, and whatever else the user's loss function returned with it."""

    value: Tensor
    aux: Any


class Model:
    """What a loss sees: ``model(...)`` predicts, ``model.params`` reads the weights.

    The split lets a method change the two separately; the same loss runs under every method.

    Attributes:
        params: Trainable weights by name, for penalties. Tensors; where each example has weights of its own, objects
            that only :func:`l2` and :func:`l1` take.
    """

    def __init__(self, params: Mapping[str, Any], predict: Callable[..., Any] | None) -> None:
        """Pair weights with a prediction function; a problem without a network has none."""
        self.params = Named("parameter", params.items())
        self._predict = predict

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network with these weights.

        Returns:
            What the user's ``forward`` returns.

        Raises:
            TypeError: If the problem has no network.
        """
        if self._predict is None:
            raise TypeError("model(...) needs a network, but inner is a mapping of tensors: use model.params['name'].")
        return self._predict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Say what there is instead.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(
            f"a loss sees a bilevel.Model, which has no {name!r}: use model(...) to predict and model.params['name'] "
            "to read a weight."
        )


LossFunction = Callable[[Model, Mapping[str, Tensor], Any], Any]


class Problem:
    r"""A bilevel problem: inner variables, two losses, hyperparameters.

    Both losses are called as ``loss(model, hyper, batch)`` with a :class:`Model`, the natural values of the
    hyperparameters by name, and a batch. They return a scalar or one value per example (the mean is taken), or a pair
    of that and anything that callbacks should see.

    The inner loss is evaluated in train mode, the outer loss in ``outer_mode``; the module's own flags are restored.
    The module itself is never changed: the solver trains copies of its weights and buffers.

    Attributes:
        module: The network, or None.
        space: The hyperparameters as one unconstrained vector.
        params: The trainable tensors of ``inner`` by name: each once, without frozen ones.

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
            inner: A module, of which parameters with ``requires_grad`` are trained; or a mapping from names to tensors,
                all of which are trained.
            inner_loss: What the inner variables minimise.
            outer_loss: What the hyperparameters minimise.
            hyper: Made by :func:`real`, :func:`positive`, :func:`interval` and :func:`integer`.
            initial: Weights to start from as a function of the hyperparameters, some or all by name; the others start
                as given in ``inner``. ``Unrolled(restart=True)`` differentiates it, other methods take its value.
            examples: Number of examples in a batch; dimension 0 of its first tensor by default.
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
        self.params = _trainable(inner)
        self._modules = [] if self.module is None else list(self.module.modules())
        self._module_ids = frozenset(map(id, self._modules))
        self._passes = 0
        self._ties = {} if self.module is None else _ties(self.module)
        self.space = Space(hyper)
        self.examples = examples or _first_dimension
        self.user_losses = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        self._train_mode = {"inner_loss": True, "outer_loss": outer_mode == "train"}
        _check_kind("inner", self.params)
        self._initial = initial
        with torch.no_grad():
            _check_kind("initial", self.start(self.initial_hyper()))  # raises before any work if a value does not fit

    def __repr__(self) -> str:
        """Summarise the problem in a line.

        Returns:
            The number of weights and the names of the hyperparameters.
        """
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
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the module by name, such as BatchNorm statistics."""
        return {} if self.module is None else dict(self.module.named_buffers())

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
        given = self._initial(hyper if isinstance(hyper, Named) else self.space.values(hyper))
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
        return self._evaluate("inner_loss", model, hyper, batch)

    def outer_loss(self, model: Model, hyper: Tensor, batch: Any) -> Loss:
        """Evaluate the user's outer loss in ``outer_mode``.

        Args:
            model: Predictions and weights.
            hyper: Unconstrained.
            batch: Handed to the loss.

        Returns:
            The loss, reduced to a scalar.
        """
        return self._evaluate("outer_loss", model, hyper, batch)

    def call(self, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the network with other weights and buffers than its own.

        Args:
            tensors: By name; holds the new tensor afterwards where the network assigned one to a buffer.
            args: Of the network.
            kwargs: Of the network.

        Returns:
            What the user's ``forward`` returns.

        Raises:
            TypeError: If there is no network.
        """
        if self.module is None:
            raise TypeError("the problem has no network to call.")
        # Known from the start: to find them out takes as long as the swap of the tensors.
        tensors |= {twin: tensors[name] for twin, name in self._ties.items() if name in tensors}
        self._passes += 1
        try:
            return functional_call(self.module, tensors, args, kwargs, tie_weights=False)
        finally:
            self._passes -= 1

    def evaluating(self) -> AbstractContextManager[None]:
        """Put the network into eval mode inside the block.

        Returns:
            A context manager.
        """
        return self._mode(training=False)

    @contextmanager
    def differentiating(self) -> Generator[None]:
        """Refuse calls of the network inside the block that do not come from :meth:`call`.

        Activation checkpointing repeats parts of a pass while it differentiates. The module has its own weights again
        by then, so that the gradient would be wrong.
        """

        def refuse(module: nn.Module, args: Any) -> None:
            if self._passes == 0 and id(module) in self._module_ids:
                raise RuntimeError(
                    f"the network ran its {type(module).__name__} again during differentiation, as "
                    "torch.utils.checkpoint does. That would use other weights than the ones being trained: remove "
                    "the checkpointing from the network."
                )

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()

    def state_dict(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Any]:
        """Put weights and buffers under every name that the module's own ``state_dict`` has, tied and frozen included.

        Returns:
            A dict that loads strictly into the user's module; for a mapping, the weights by name.
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

    def _evaluate(self, name: str, model: Model, hyper: Tensor | Named, batch: Any) -> Loss:
        values = hyper if isinstance(hyper, Named) else self.space.values(hyper)
        with self._mode(self._train_mode[name]):
            try:
                result = self.user_losses[name](model, values, batch)
            except Exception as error:
                error.add_note(f"Raised while evaluating {name}(model, hyper, batch); {self._describe(batch)}")
                if isinstance(hyper, Tensor) and hyper.ndim == 2:
                    error.add_note(
                        f"There is one perturbation per example: every hyper[...] has shape ({len(hyper)}, ...) here. "
                        "Use the helpers of bilevel.functional and index from the right (hyper[...][..., i]), or pass "
                        "perturb='batch' to the method."
                    )
                raise
        value, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must return a Tensor, or a pair (Tensor, aux); got {type(value).__name__}.")
        if not value.is_floating_point():
            raise TypeError(f"{name} must return a real floating-point loss, got dtype {value.dtype}.")
        if value.ndim == 0:
            return Loss(value, aux)
        count = self.examples(batch)
        if value.shape != (count,):
            expected = f"() or ({count},), one value per example" if count is not None else "()"
            raise ValueError(
                f"{name} must return a loss of shape {expected}, got {tuple(value.shape)}. Take the mean, or set "
                "Problem(examples=...) if dimension 0 of the batch's first tensor does not count examples."
            )
        return Loss(value.mean(), aux)

    @contextmanager
    def _mode(self, training: bool) -> Generator[None]:
        flags = [(module, module.training) for module in self._modules]
        try:
            if self.module is not None and any(flag != training for _, flag in flags):
                self.module.train(training)
            yield
        finally:
            for module, flag in flags:
                if module.training != flag:  # setting an attribute of a module takes time
                    module.training = flag

    def _describe(self, batch: Any) -> str:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors) or "no tensors"
        return f"weights: {self.dtype} on {self.device}; batch: {shapes}."


class Variables(nn.Module):
    """The solver's own copy of the inner variables and buffers, so that the user's module keeps its values."""

    def __init__(self, problem: Problem) -> None:
        """Copy the start of the problem."""
        super().__init__()
        self.problem = problem
        start = problem.start(problem.initial_hyper())
        self.weights = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in start.values()])
        self.buffer_names = list(problem.buffers)
        for index, buffer in enumerate(problem.buffers.values()):
            self.register_buffer(str(index), buffer.detach().clone())

    def params(self) -> dict[str, Tensor]:
        """The weights by name.

        Returns:
            Leaves of the autograd graph.
        """
        return dict(zip(self.problem.params, self.weights, strict=True))

    def buffer_values(self) -> dict[str, Tensor]:
        """The buffers by name.

        Returns:
            The live tensors, not copies.
        """
        return {name: self.get_buffer(str(index)) for index, name in enumerate(self.buffer_names)}

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
            live = self.buffer_values() if buffers is None else buffers
            tensors = {**params, **{name: buffer.clone() for name, buffer in live.items()}}
            output = self.problem.call(tensors, args, kwargs)
            if update_buffers:
                with torch.no_grad():
                    for name, buffer in live.items():
                        if tensors[name].shape != buffer.shape:
                            raise ValueError(
                                f"the network changed the shape of its buffer {name!r} from {tuple(buffer.shape)} to "
                                f"{tuple(tensors[name].shape)}, which cannot be tracked: keep its shape."
                            )
                        buffer.copy_(tensors[name])
            return output

        return predict


def _trainable(inner: Any) -> dict[str, Tensor]:
    if isinstance(inner, nn.Module):
        named = dict(inner.named_parameters())
        lazy = [name for name, value in named.items() if isinstance(value, UninitializedParameter)]
        if lazy:
            raise ValueError(f"inner: parameter {lazy[0]!r} is not initialised yet; call the lazy module once first.")
        trainable: dict[str, Tensor] = {name: value for name, value in named.items() if value.requires_grad}
        if not trainable:
            raise ValueError("inner has no trainable parameter: none of them has requires_grad=True.")
        return trainable
    if not isinstance(inner, Mapping):
        raise TypeError(f"inner must be an nn.Module or a mapping from names to tensors, got {type(inner).__name__}.")
    if not inner:
        raise ValueError("inner is an empty mapping: give at least one tensor.")
    for name, value in inner.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"inner must map strings to tensors, got {name!r}: {type(value).__name__}.")
    name, count = Counter(id(value) for value in inner.values()).most_common(1)[0]
    if count > 1:
        twins = [key for key, value in inner.items() if id(value) == name]
        raise ValueError(f"inner: {' and '.join(map(repr, twins))} are the same tensor; give it one name.")
    return dict(inner)


def _ties(module: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers that a module holds several times, with the first one of each."""
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(value), name)) for name, value in everything]
    return {twin: name for twin, name in names if twin != name}


def _check_kind(argument: str, params: Mapping[str, Tensor]) -> None:
    """Check that weights are real, finite and of one dtype and device."""
    (first_name, first), *_ = params.items()
    for name, value in params.items():
        if not value.is_floating_point():
            raise TypeError(f"{argument}: {name!r} must be a floating-point tensor, got {value.dtype}; use .float().")
        if value.numel() == 0:
            raise ValueError(f"{argument}: {name!r} is empty, shape {tuple(value.shape)}; leave it out.")
        for what, here, there in (("device", value.device, first.device), ("dtype", value.dtype, first.dtype)):
            if here != there:
                raise ValueError(
                    f"{argument}: all weights must share one {what}, but {first_name!r} has {there} and {name!r} has "
                    f"{here}; use .to({here!r}) on all of them."
                )
        if value.is_meta:
            raise ValueError(
                f"{argument}: {name!r} is on the meta device, without values; use .to_empty(device=...) first."
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"{argument}: {name!r} has NaN or infinite values before training; initialise it anew.")


def _first_dimension(batch: Any) -> int | None:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            return leaf.shape[0] if leaf.ndim else None
    return None
