"""``bilevel.tune``: a network, two loaders and a loss make a :class:`bilevel.Problem`, which is solved."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from bilevel.arguments import check_loader
from bilevel.augment import Images
from bilevel.batches import describe, to_device
from bilevel.checks import repeatable
from bilevel.hyper import suggest
from bilevel.loop import Solution, TuningWarning, solve
from bilevel.parallel import is_sharded
from bilevel.problem import Model, Problem
from bilevel.regularizers import CutMix, LabelSmoothing, Mixup, Regularizer, WeightDecay, regularized_loss
from bilevel.response import DeltaSTN, Method, get_method
from bilevel.response.hypernetwork import Hypernetwork
from bilevel.solver import OptimizerFactory
from bilevel.tuning.criteria import Criterion, criterion_of, verified
from bilevel.tuning.optimizer import factory_of, warn_if_it_decays
from bilevel.tuning.own_loss import own_criterion, without_cache
from bilevel.tuning.strengths import SIMPLE, augment_of, collect, dropout_of, regularizer_of, weight_decay_of
from bilevel.tuning.unpack import Unpack, call, checked, unpacker


def tune(
    net: nn.Module,
    train_loader: Iterable[Any],
    valid_loader: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    dropout: bool | str | Mapping[str, str | Sequence[str]] | None = None,
    weight_decay: bool | float | str | Mapping[str, str | Sequence[str]] | WeightDecay = True,
    label_smoothing: bool | float | LabelSmoothing = False,
    mixup: bool | float | Mixup = False,
    cutmix: bool | float | CutMix = False,
    input_noise: bool | float | Regularizer = False,
    augment: Images | Regularizer | None = None,
    regularizers: Sequence[Regularizer] = (),
    optimizer: Optimizer | OptimizerFactory | None = None,
    method: str | Method | None = None,
    unpack: Unpack | None = None,
    **options: Any,
) -> Solution:
    r"""Train a network, and tune its regularization meanwhile, on held-out data.

    A thin layer: it makes a :class:`Problem`, ``result.problem``, and calls :func:`solve`. The network is not changed;
    load the result into it with ``net.load_state_dict(result.best.state_dict)``.

    The weights minimise the loss on ``train_loader`` with all regularizers, in train mode. The strengths minimise the
    plain loss on ``valid_loader``, in eval mode. What is tuned starts at what the network has, or at a small value.

    Args:
        net: Any module; its ``nn.Dropout`` and the like are found and taken over while it runs.
        train_loader: Batches ``(inputs, target)``, ``(input, input, ..., target)``, or mappings with an entry
            ``labels``, ``label``, ``targets``, ``target`` or ``y``, whose other entries are keyword arguments.
        valid_loader: Likewise, of other examples.
        loss: ``(output, target) -> Tensor``: ``F.cross_entropy``, ``nn.MSELoss()``, or a function of yours. Losses of
            PyTorch are split into one value per example. None if the network computes its loss from the entry
            ``labels``, as those of transformers do.
        dropout: Tune the rates of the dropout that the network has: ``"layer"`` (or True), one for each; ``"one"``; a
            mapping from names to patterns, as in :func:`dropout_rates`; False leaves them. None tunes them if there are
            some and the method can.
        weight_decay: Tune a penalty on the weights: ``"layer"`` (or True), ``"tensor"``, ``"one"``, a mapping from
            names to patterns, a number to start from, or a :class:`bilevel.regularizers.WeightDecay`. Biases and norms
            are left out. ``"decoupled"`` tunes the decay of AdamW, one for each layer: with ``method="unrolled"`` only.
        label_smoothing: Tune it: True, or a number to start from. It needs a cross entropy.
        mixup: Likewise, see :class:`bilevel.regularizers.Mixup`.
        cutmix: Likewise, see :class:`bilevel.regularizers.CutMix`.
        input_noise: Likewise, see :class:`bilevel.regularizers.InputNoise`.
        augment: ``bilevel.augment.images(...)``.
        regularizers: More of them, also of your own.
        optimizer: The one that your script has, ``torch.optim.SGD(net.parameters(), lr=0.1)``, or a function that makes
            one, ``lambda params: torch.optim.SGD(params, lr=0.1)``; Adam with learning rate 1e-3 by default.
        method: As in :func:`solve`. Only the self-tuning ones can tune dropout, augmentation and CutMix. None is Δ-STN
            at two thirds of its cost: ``DeltaSTN(response_every=None)``, whose response learns at one of two steps, if
            the optimizer is Adam or one like it. With ``"delta_stn"`` it learns at each, which is safer in short runs.
        unpack: A function from a batch to ``(inputs, target)``, for batches of other kinds. Inputs are one argument, a
            tuple of them, or a dict of keyword arguments.
        options: Of :func:`solve`: ``epochs``, ``patience``, ``inner_scheduler``, ``checkpoint``, ``callbacks``, ...

    Returns:
        The solution: ``result.best``, ``result.hyper``, ``result.problem``, ``result.report("run.html")``,
        ``result.schedule()``.

    Raises:
        TypeError: If an argument has the wrong type, or is not known.
        ValueError: If there is nothing to tune, or the arguments do not go together.

    Warns:
        UserWarning: If the optimizer decays the weights as well.
        TuningWarning: As in :func:`solve`; and if both loaders have the same examples.

    Example:
        >>> import torch, bilevel
        >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        >>> train, valid = ([(torch.randn(8, 4), torch.arange(8) % 3)] for _ in range(2))
        >>> result = bilevel.tune(
        ...     net, train, valid, loss=nn.functional.cross_entropy, label_smoothing=True, epochs=10, progress=False
        ... )
        >>> list(result.hyper)
        ['dropout.2', 'weight_decay.0', 'weight_decay.3', 'label_smoothing']
        >>> net.load_state_dict(result.best.state_dict)
        <All keys matched successfully>
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"tune: net must be an nn.Module, got {type(net).__name__}.")
    _check_options(options)
    if any(is_sharded(param) for param in net.parameters()):
        raise ValueError(
            "tune: the network is divided among processes, and tune calls it to find its dropout: state a "
            "bilevel.Problem and call bilevel.solve."
        )
    for name, loader in (("train_loader", train_loader), ("valid_loader", valid_loader)):
        if loader is None:
            raise TypeError(f"tune: {name} must be an iterable of batches, got None.")
        check_loader(name, loader)
    if _all_of(train_loader) is _all_of(valid_loader):
        what = "is train_loader" if train_loader is valid_loader else "has the data set of train_loader"
        warnings.warn(
            f"tune: valid_loader {what}: regularization that is tuned on the training data is tuned away. Hold "
            "out some examples.",
            TuningWarning,
            stacklevel=2,
        )
    settings = DeltaSTN(response_every=None) if method is None else get_method(method)
    if optimizer is not None:
        if "inner_optimizer" in options:
            raise TypeError("tune: optimizer and inner_optimizer are the same: give one of them.")
        options["inner_optimizer"] = factory_of(net, optimizer)
    unpack = unpacker(net) if unpack is None else checked(unpack)
    device = next((p.device for p in net.parameters()), None)
    if device is None:
        raise ValueError("tune: the network has no parameters to train.")
    if not any(param.requires_grad for param in net.parameters()):
        raise ValueError("tune: all parameters of the network are frozen: call net.requires_grad_(True).")
    with repeatable(device):
        batch = to_device(next(iter(train_loader)), device)
    inputs, target = unpack(batch)
    criterion, predict, sample = _loss_of(net, loss, inputs, target)
    used = [
        *weight_decay_of(net, weight_decay),
        *regularizer_of("label_smoothing", LabelSmoothing, label_smoothing, **_start(criterion)),
        *regularizer_of("mixup", SIMPLE["mixup"], mixup),
        *regularizer_of("cutmix", SIMPLE["cutmix"], cutmix),
        *regularizer_of("input_noise", SIMPLE["input_noise"], input_noise),
        *augment_of(augment, inputs),
        *regularizers,
    ]
    _check_criterion(criterion, used)
    if isinstance(settings, DeltaSTN) and criterion.name in ("BCELoss", "binary_cross_entropy"):
        raise ValueError(
            "tune: delta_stn linearises the predictions, which then leave [0, 1], where binary_cross_entropy is not "
            "defined: return logits, without the sigmoid, and pass nn.BCEWithLogitsLoss(); or method='centered_stn'."
        )
    if any(isinstance(regularizer, WeightDecay) for regularizer in used):
        warn_if_it_decays(net, options.get("inner_optimizer"))
    rates = dropout_of(net, sample, dropout, possible=isinstance(settings, Hypernetwork))
    problem = Problem(
        net,
        inner_loss=_Train(unpack, criterion, predict, used),
        outer_loss=_Valid(unpack, criterion, predict, plain=any(isinstance(r, LabelSmoothing) for r in used)),
        hyper=collect(used, rates),
    )
    return solve(problem, train_loader, valid_loader, method=settings, **options)


Predict = Callable[[Any, Any, Any], Any]
"""Calls a network with inputs, and the target where it needs that."""


class _Train:
    """The inner loss."""

    def __init__(self, unpack: Unpack, criterion: Criterion, predict: Predict, used: Sequence[Regularizer]) -> None:
        self.unpack, self.criterion, self.predict, self.regularizers = unpack, criterion, predict, list(used)

    def __call__(self, model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
        inputs, target = self.unpack(batch)
        return regularized_loss(
            model,
            hyper,
            inputs,
            target,
            criterion=self.criterion,
            regularizers=self.regularizers,
            predict=lambda x: self.predict(model, x, target),
        )


class _Valid:
    """The outer loss: without regularizers, and without label smoothing if that is tuned."""

    def __init__(self, unpack: Unpack, criterion: Criterion, predict: Predict, *, plain: bool) -> None:
        self.unpack, self.criterion, self.predict = unpack, criterion, predict
        self.options = {"label_smoothing": 0.0} if plain else {}

    def __call__(self, model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
        inputs, target = self.unpack(batch)
        return self.criterion(self.predict(model, inputs, target), target, **self.options)


def _loss_of(net: nn.Module, loss: Any, inputs: Any, target: Any) -> tuple[Criterion, Predict, Any]:
    """The loss, how to call the network, and arguments for one call; it is called once or twice here, in eval mode."""
    flags = [(module, module.training) for module in net.modules()]
    try:
        net.eval()
        with repeatable(next(iter(net.parameters())).device), torch.no_grad():
            if loss is not None:
                criterion = criterion_of(loss)
                output = _first_call(net, inputs)
                try:
                    criterion = verified(criterion, loss, output, target)
                except Exception as error:
                    error.add_note(
                        f"tune: raised by the loss on the first batch, for the output {describe(output)} and the "
                        f"target {describe(target)}."
                    )
                    raise
                return criterion, lambda model, x, y: call(model, x), inputs
            named = without_cache(net, inputs) if isinstance(inputs, Mapping) else inputs
            criterion, needs_labels = own_criterion(net, named, target)
    finally:
        for module, flag in flags:
            module.training = flag
    extra = {name: value for name, value in named.items() if name not in inputs}

    def predict(model: Any, x: Any, y: Any) -> Any:
        return model(**x, **extra, labels=y) if needs_labels else model(**x, **extra)

    return criterion, predict, named | {"labels": target} if needs_labels else named


def _all_of(loader: Any) -> object:
    """The data set of a loader that passes over the whole of it; else the loader."""
    usual = type(getattr(loader, "batch_sampler", None)) is BatchSampler
    usual = usual and type(getattr(loader, "sampler", None)) in (SequentialSampler, RandomSampler)
    return loader.dataset if usual else loader


def _first_call(net: nn.Module, inputs: Any) -> Any:
    try:
        return call(net, inputs)
    except Exception as error:
        given = f"the inputs {', '.join(inputs)}: " if isinstance(inputs, Mapping) else ""
        error.add_note(
            f"tune: raised by the network, called with {given}{describe(inputs)} of the first batch. If these are not "
            "its arguments, pass unpack=lambda batch: (inputs, target)."
        )
        raise


def _start(criterion: Criterion) -> dict[str, float]:
    """Label smoothing starts at what the loss has."""
    return {"init": criterion.smoothing} if 0 < criterion.smoothing < LabelSmoothing.high else {}


def _check_criterion(criterion: Criterion, used: Sequence[Regularizer]) -> None:
    for regularizer in used:
        if isinstance(regularizer, LabelSmoothing) and not criterion.smooths:
            raise ValueError(
                f"tune: label_smoothing needs a cross entropy, but the loss is {criterion.name}: pass "
                "loss=F.cross_entropy or nn.CrossEntropyLoss(...), with logits of shape (B, C), (B, C, ...) or "
                "(B, ..., C)."
            )
        if isinstance(regularizer, Mixup | CutMix) and not criterion.splits:
            raise ValueError(
                f"tune: mixup and cutmix need a loss with one value per example, but {criterion.name} is a function of "
                "your own: pass a loss of PyTorch, such as F.cross_entropy, or give your function an argument "
                "reduction='mean' that may be 'none'."
            )


MEANT = {
    **dict.fromkeys(("lr", "learning_rate"), "pass optimizer=torch.optim.Adam(net.parameters(), lr=...)."),
    **dict.fromkeys(("clip", "grad_clip", "max_norm", "clip_grad_norm"), "the norm of the gradient is inner_clip."),
    **dict.fromkeys(("early_stopping", "early_stop"), "patience=10 stops after ten validation passes without a best."),
    **dict.fromkeys(("verbose", "quiet"), "progress=True or False."),
    **dict.fromkeys(("device", "to"), "move the network, net.to(device); batches follow it."),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "loss=F.cross_entropy."),
    **dict.fromkeys(("n_epochs", "num_epochs", "max_epochs"), "epochs=50."),
}
"""What people call things elsewhere."""


def _check_options(options: Mapping[str, Any]) -> None:
    if "scheduler" in options:
        raise TypeError(
            "tune: the scheduler of the learning rate is inner_scheduler, a function of the optimizer: write "
            "inner_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ...)."
        )
    known = set(inspect.signature(solve).parameters) - {"problem", "train", "valid", "method"}
    for name in options:
        if name in MEANT and MEANT[name] not in options:
            raise TypeError(f"tune: there is no argument {name!r}: {MEANT[name]}")
        if name not in known:
            own = set(inspect.signature(tune).parameters) - {"options"}
            raise TypeError(f"tune: there is no argument {name!r}: {suggest(name, known | own)}")
