r"""What the three self-tuning networks share: an affine response :math:`w_0 + \Theta\,\delta` and a perturbation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from bilevel.autodiff import linearize
from bilevel.batches import describe
from bilevel.checks import check_linearized, check_outputs, check_rows
from bilevel.hyper import Scale
from bilevel.problem import Model, Problem
from bilevel.responding import CannotRespond, PerturbationWarning, Responding
from bilevel.response.base import BestResponse, Method
from bilevel.structure import Held, Theta, choose, distinct, make, respond


@dataclass(frozen=True, kw_only=True)
class Hypernetwork(Method):
    r"""Settings of every self-tuning network.

    Attributes:
        scale: Standard deviation :math:`\sigma` of the perturbation, in the unconstrained space.
        entropy: None keeps :math:`\sigma` fixed; a number :math:`\tau` learns it at the outer step, with
            :math:`-\tau\,\mathbb{H}[p(\epsilon|\sigma)]` added to the outer loss.
        perturb_outer: Evaluate the outer loss at :math:`\lambda + \epsilon`, as in ``eq:stn-val-obj``. None does so
            only when :math:`\sigma` is learned.
        structure: How a weight responds. ``"gate"``: each row grows or shrinks, by a linear function of
            :math:`\lambda`, which costs least. ``"rowwise"``, as in the paper: each row moves along a direction that is
            learned as well. ``"dense"``: the full Jacobian. ``"none"``: not at all. A mapping chooses by pattern of the
            name, as in ``{"head.*": "dense", "*.bias": "none"}``. None, and what a mapping does not name, is ``"gate"``
            for a network, ``"rowwise"`` with :class:`bilevel.STN`; None is ``"dense"`` for a mapping of tensors.
        perturb: ``"example"`` draws a perturbation for each example of a batch. Hyperparameters then reach the inner
            loss with shape ``(B, *shape)`` where the response learns, and the weights must respond by rows or not at
            all; with 50 hyperparameters or more, two to four examples may have the same perturbation. ``"batch"`` draws
            one for all, and works for any network and loss. None is ``"example"`` where the weights allow
            it and there is a batch; where the network cannot respond so, it is ``"batch"`` from the first batch on
            that shows it, with a warning that says why.
        max_gigabytes: Refuse a response that takes more memory.
    """

    scale: float = 1.0
    entropy: float | None = None
    perturb_outer: bool | None = None
    structure: str | Mapping[str, str] | None = None
    perturb: str | None = None
    max_gigabytes: float = 4.0
    by_rows: ClassVar[str] = "gate"

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: If one is out of range.
        """
        name = type(self).__name__
        if not _is_number(self.scale) or not 0 < self.scale < math.inf:
            raise ValueError(f"{name}: scale must be a positive number (a standard deviation), got {self.scale!r}.")
        if self.entropy is not None and (not _is_number(self.entropy) or not 0 <= self.entropy < math.inf):
            raise ValueError(
                f"{name}: entropy must be None (fixed scale) or a number of at least 0, got {self.entropy!r}."
            )
        if self.perturb_outer not in (None, True, False):
            raise ValueError(f"{name}: perturb_outer must be True, False or None, got {self.perturb_outer!r}.")
        if self.entropy is not None and self.perturb_outer is False:
            raise ValueError(f"{name}: perturb_outer=False leaves a learned scale without a loss; use entropy=None.")
        if self.perturb not in (None, "example", "batch"):
            raise ValueError(f"{name}: perturb must be 'example', 'batch' or None, got {self.perturb!r}.")
        if not _is_number(self.max_gigabytes) or not self.max_gigabytes > 0:
            raise ValueError(f"{name}: max_gigabytes must be positive, got {self.max_gigabytes!r}.")


class HypernetworkResponse(BestResponse):
    r"""An affine response: :math:`w_0` or :math:`\phi_0` in ``inner``, :math:`\Theta` or :math:`\Phi` in ``theta``."""

    pure = True
    linearizes = False
    scale: Scale

    def __init__(self, problem: Problem, settings: Hypernetwork) -> None:
        """Start with no response to the hyperparameters."""
        super().__init__(problem)
        hyper = problem.initial_hyper()
        default = "dense" if problem.module is None else settings.by_rows
        structure = default if settings.structure is None else settings.structure
        kinds = choose(structure, list(problem.params), settings.by_rows)
        self.theta = make(self.inner.params(), kinds, hyper.numel(), max_gigabytes=settings.max_gigabytes)
        self.per_example = _per_example(problem, kinds, settings.perturb)
        self._must_count = settings.perturb == "example"
        self._may_share = settings.perturb is None
        learned = settings.entropy is not None
        self.scale = Scale(
            hyper.numel(),
            settings.scale,
            entropy=settings.entropy,
            perturb_outer=learned if settings.perturb_outer is None else settings.perturb_outer,
            like=hyper,
            shared=problem.space.shared(),
        )

    @override
    def check(self, hyper: Tensor, batch: Any) -> None:
        """Refuse what perturbations of their own for all examples, or linearised predictions, would get wrong."""
        self._check_rows("inner_loss", hyper, batch)
        if self.linearizes:
            check_outputs(self.problem, self.inner, hyper, batch, method="delta_stn", remedy="method='centered_stn'")

    @override
    def check_outer(self, hyper: Tensor, batch: Any) -> None:
        """The same for the outer loss, where it is perturbed."""
        if self.scale.perturb_outer:
            self._check_rows("outer_loss", hyper, batch)

    def _check_rows(self, loss: str, hyper: Tensor, batch: Any) -> None:
        count = self._examples(batch)
        if count is None or not isinstance(self.theta, Theta):
            return
        try:
            check_rows(self.problem, self.inner, loss, self.theta.names, hyper, batch, count)
            if self.linearizes and self._may_share and loss == "inner_loss":
                check_linearized(
                    self.problem, lambda: self.affine(hyper.expand(count, -1), linearized=True), hyper, batch
                )
        except CannotRespond as error:
            if not self._may_share:
                raise
            self.share(str(error))

    def share(self, reason: str) -> None:
        """Let all examples of a batch share one perturbation from now on, and say so.

        Args:
            reason: Why they cannot have one each.
        """
        self.per_example = False
        warnings.warn(
            "all examples of a batch share one perturbation (perturb='batch'), because this network cannot give each "
            f"its own: {reason} With one for all, hyper[...] has its own shape in the losses, and the response is "
            "learned from more noise. Pass perturb='batch' to the method if that is meant; perturb='example' makes "
            "this an error.",
            PerturbationWarning,
            stacklevel=2,
        )

    def perturbation(self, batch: Any, copies: int = 1) -> Tensor:
        r"""Draw :math:`\epsilon \sim p(\epsilon | \sigma)`; the inner level does not train :math:`\sigma`.

        Args:
            batch: Whose examples are counted.
            copies: How many examples share one; the first ones are repeated in this order.

        Returns:
            A tensor of shape ``(h,)``, or ``(B, h)`` with one for each example.
        """
        return self._sample(batch, copies).detach()

    @override
    def outer_perturbation(self, batch: Any) -> Tensor | None:
        r"""Draw :math:`\epsilon` differentiably in :math:`\sigma`; None if the outer loss is not perturbed."""
        return self._sample(batch) if self.scale.perturb_outer else None

    def _sample(self, batch: Any, copies: int = 1) -> Tensor:
        group, examples = self.inner.group, self._examples(batch)
        different = None if examples is None else distinct(examples, copies)
        if group is None:
            drawn = self.scale.sample(different)
        else:
            drawn = self.scale.sample(different, group.normal(self.scale().detach()))
        return drawn if copies == 1 else drawn.repeat(copies, 1)[:examples]

    def change(self, shift: Tensor) -> dict[str, Tensor]:
        r"""The change of the weights, :math:`\Theta\,\delta`.

        Args:
            shift: :math:`\delta`, shape ``(h,)``.

        Returns:
            One tensor for every weight that responds.
        """
        changes: dict[str, Tensor] = self.theta(shift, self.inner.params())
        return changes

    def affine(
        self,
        shift: Tensor,
        *,
        freeze_weights: bool = False,
        linearized: bool = False,
        control: bool = False,
        update_buffers: bool = False,
        held: Held | None = None,
    ) -> Model:
        r"""The model with weights :math:`w_0 + \Theta\,\delta`.

        Args:
            shift: :math:`\delta`, shape ``(h,)`` or ``(B, h)``.
            freeze_weights: Detach :math:`w_0`, so that only :math:`\Theta` learns from the result.
            linearized: Replace predictions by their first-order expansion in :math:`\delta`.
            control: Leave all values at :math:`w_0`, and let only minus the slope of the response be added:
                :math:`w_0 + \operatorname{stop}(\Theta\,\delta) - \Theta\,\delta`.
            update_buffers: Keep what the network does to its buffers.
            held: Where what is passed back to the response waits for the pass with ``control``.

        Returns:
            The model that a loss sees.
        """
        weights = {name: w.detach() if freeze_weights else w for name, w in self.inner.params().items()}
        shift = -shift if control else shift
        predict = self.inner.predictor(update_buffers=update_buffers)
        if shift.ndim == 1:
            along = {name: w.detach() for name, w in weights.items()} if control else weights
            change: dict[str, Tensor] = self.theta(shift, along)
            if control:
                change = {name: value - value.detach() for name, value in change.items()}
            moved = {name: w + change[name] if name in change else w for name, w in weights.items()}
            if predict is None or not linearized:
                return self.inner.model(moved, update_buffers=update_buffers)
            return Model(moved, linearize(predict, weights, change))
        rows = self.theta.rows(shift, weights, slope_only=control, held=held) if isinstance(self.theta, Theta) else {}
        params = {name: Responding(name, w, rows[name]) if name in rows else w for name, w in weights.items()}
        return Model(params, respond(predict, weights, rows, linearized=linearized, slope_only=control))

    def _examples(self, batch: Any) -> int | None:
        if not self.per_example:
            return None
        count = self.problem.examples(batch)
        if count is None and (self._must_count or batch is not None):
            raise ValueError(
                "a perturbation for each example needs the number of examples, but the batch has no tensor or array "
                f"with a dimension ({describe(batch)}): set Problem(examples=...), or pass perturb='batch' to the "
                "method."
            )
        return count


def _per_example(problem: Problem, kinds: Mapping[str, str], perturb: str | None) -> bool:
    dense = [name for name, kind in kinds.items() if kind == "dense"]
    if perturb is None:
        return problem.module is not None and not dense
    if perturb == "batch":
        return False
    if problem.module is None:
        raise ValueError("perturb='example' needs a network, but inner is a mapping of tensors: use perturb='batch'.")
    if dense:
        raise ValueError(
            f"perturb='example' needs responses by rows, but {dense[0]!r} has structure 'dense', which would take a "
            "weight for every example: use structure='gate' or 'rowwise', or perturb='batch'."
        )
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
