r"""Hyperparameters: natural values outside, one unconstrained vector :math:`\lambda` inside.

A hyperparameter lives unconstrained; :math:`s(\lambda)` is its natural value (appendix ``app:restricted``).
Perturbations :math:`\epsilon \sim \mathcal{N}(0, \sigma^2)` are added to :math:`\lambda`, never to :math:`s(\lambda)`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    ExpTransform,
    SigmoidTransform,
    SoftplusTransform,
    Transform,
)
from torch.utils import _pytree as pytree

LISTED_ENTRIES = 16


def suggest(name: object, known: Iterable[str]) -> str:
    """Say which of the known names was probably meant, and list them all.

    Returns:
        A phrase for the end of an error message.

    Example:
        >>> suggest("decya", ["decay", "dropout"])
        "did you mean 'decay'? Known: decay, dropout."
    """
    names = sorted(known)
    plain = str(name).lower().replace("-", "_").replace(" ", "_")
    close = difflib.get_close_matches(plain, names, n=1) or difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names) or 'none'}."


class Named(dict[str, Tensor]):
    """A dict of tensors whose ``KeyError`` names what was asked for, and what there is."""

    def __init__(self, kind: str, items: Iterable[tuple[str, Tensor]]) -> None:
        """Store the items; ``kind`` is what an error message calls them."""
        super().__init__(items)
        self.kind = kind

    def __getattr__(self, name: str) -> Tensor:
        """Say how to read a value.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"a {self.__dict__.get('kind', 'tensor')} is read as [{name!r}], not as an attribute.")

    def __missing__(self, name: object) -> Tensor:
        """Raise the helpful error.

        Raises:
            KeyError: Always.
        """
        raise KeyError(f"no {self.kind} {name!r}: {suggest(name, self)}")


pytree.register_pytree_node(
    Named,
    lambda named: (list(named.values()), (named.kind, tuple(named))),
    lambda values, context: Named(context[0], zip(context[1], values, strict=True)),
)


@dataclass(frozen=True, eq=False)
class Hyper:
    """One hyperparameter: its initial natural value and the bijection to the real line.

    Built by :func:`real`, :func:`positive`, :func:`interval` and :func:`integer`.

    Attributes:
        init: Initial natural value, float64.
        transform: From the real line to the natural domain.
        low: Lower end of the domain.
        high: Upper end of the domain.
        discrete: Whether natural values are rounded, without a gradient.
        shared: Whether all examples of a batch share one perturbation, even where others have one for each.
    """

    init: Tensor
    transform: Transform
    low: float
    high: float
    discrete: bool = False
    shared: bool = False

    def natural(self, unconstrained: Tensor) -> Tensor:
        """Map unconstrained values to natural ones, elementwise.

        Returns:
            ``s(unconstrained)``; for integers rounded and detached, so that only the response carries a gradient.
        """
        value: Tensor = self.transform(unconstrained)
        # Where the sigmoid saturates, lo - 1/2 may round to lo - 1, hence the clamp; adding 0.0 turns -0.0 into 0.0.
        return (value.round().clamp(self.low, self.high) + 0.0).detach() if self.discrete else value

    def unconstrained(self, natural: Tensor) -> Tensor:
        """Map natural values to unconstrained ones, elementwise.

        Returns:
            The inverse of :meth:`natural`.
        """
        value: Tensor = self.transform.inv(natural)
        return value


def real(init: Any, *, shared: bool = False) -> Hyper:
    r"""A hyperparameter on the whole real line, :math:`s(\lambda) = \lambda`.

    Args:
        init: A finite number, or an array of them.
        shared: Keep one perturbation for the whole batch, and this value its own shape, even where others have one for
            each example.

    Returns:
        The hyperparameter.

    Example:
        >>> real([0.5, -2.0]).init
        tensor([ 0.5000, -2.0000], dtype=torch.float64)
    """
    value = _checked_init("real", init, -math.inf, math.inf)
    return Hyper(value, AffineTransform(0.0, 1.0), -math.inf, math.inf, shared=shared)


def positive(init: Any, *, shared: bool = False) -> Hyper:
    r"""A positive hyperparameter, :math:`s(\lambda) = e^\lambda`.

    Args:
        init: A number greater than zero, or an array of them.
        shared: As in :func:`real`.

    Returns:
        The hyperparameter.

    Example:
        >>> positive(1e-3).unconstrained(torch.tensor(1.0))
        tensor(0.)
    """
    value = _checked_init("positive", init, 0.0, math.inf)
    return Hyper(value, ExpTransform(), 0.0, math.inf, shared=shared)


def interval(lo: float, hi: float, init: Any, *, shared: bool = False) -> Hyper:
    r"""A hyperparameter inside an open interval, :math:`s(\lambda) = lo + (hi - lo)\,\mathrm{sigmoid}(\lambda)`.

    Args:
        lo: Lower end.
        hi: Upper end.
        init: A number strictly between them, or an array of such numbers.
        shared: As in :func:`real`.

    Returns:
        The hyperparameter.

    Example:
        >>> interval(1.0, 2.0, init=1.5).natural(torch.tensor([-100.0, 0.0, 100.0]))
        tensor([1.0000, 1.5000, 2.0000])
    """
    lo, hi = _checked_bounds("interval", lo, hi)
    value = _checked_init("interval", init, lo, hi)
    return Hyper(value, _stretched_sigmoid(lo, hi), lo, hi, shared=shared)


def integer(lo: float, hi: float, init: Any, *, shared: bool = False) -> Hyper:
    r"""A whole number from ``lo`` to ``hi``, both included.

    A stretched sigmoid on :math:`(lo - \tfrac{1}{2}, hi + \tfrac{1}{2})`, rounded. Rounding has no gradient: only
    methods whose
    response is learned from perturbed losses (``stn``, ``centered_stn``, ``delta_stn``) can tune it.

    Args:
        lo: Smallest value.
        hi: Largest value.
        init: A whole number of that range, or an array of them.
        shared: As in :func:`real`.

    Returns:
        The hyperparameter; its natural values are whole numbers in a floating-point tensor.

    Raises:
        ValueError: If a bound or ``init`` is not a whole number.

    Example:
        >>> integer(0, 4, init=1).natural(torch.tensor([-9.0, 0.0, 9.0]))
        tensor([0., 2., 4.])
    """
    lo, hi = _checked_bounds("integer", lo, hi)
    if lo != int(lo) or hi != int(hi):
        raise ValueError(f"integer: lo and hi must be whole numbers, got {lo} and {hi}; use interval for a real range.")
    value = _checked_init("integer", init, lo, hi, closed=True)
    if bool((value != value.round()).any()):
        raise ValueError(f"integer: init must be a whole number in [{lo:g}, {hi:g}], got {_show(value)}.")
    return Hyper(value, _stretched_sigmoid(lo - 0.5, hi + 0.5), lo, hi, discrete=True, shared=shared)


class Space:
    r"""All hyperparameters of a problem as one unconstrained vector :math:`\lambda \in \mathbb{R}^h` with names.

    Example:
        >>> space = Space({"decay": positive(1.0), "rates": interval(0, 1, init=[0.5, 0.5])})
        >>> space.size
        3
        >>> space.values(torch.zeros(3))["rates"]
        tensor([0.5000, 0.5000])
    """

    def __init__(self, hyper: Mapping[str, Hyper]) -> None:
        """Lay out the hyperparameters in the order of the mapping.

        Raises:
            TypeError: If ``hyper`` is not a mapping from names to hyperparameters.
            ValueError: If it is empty.
        """
        if not isinstance(hyper, Mapping):
            raise TypeError(f"hyper must map names to hyperparameters, got {type(hyper).__name__}.")
        if not hyper:
            raise ValueError("hyper is empty: declare at least one, for example {'decay': bilevel.positive(1e-3)}.")
        for name, entry in hyper.items():
            if not isinstance(name, str):
                raise TypeError(f"hyper: names must be strings, got {name!r}.")
            if not isinstance(entry, Hyper):
                raise TypeError(
                    f"hyper[{name!r}] must be made by bilevel.real, positive, interval or integer, "
                    f"got {type(entry).__name__}: {entry!r}."
                )
        self.hyper = dict(hyper)
        self.size = sum(entry.init.numel() for entry in hyper.values())

    def init(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The initial vector.

        Returns:
            A tensor of shape ``(h,)``.

        Raises:
            ValueError: If an initial value leaves its domain when it is rounded to ``dtype``.
        """
        vector = self.vector({name: entry.init for name, entry in self.hyper.items()}).to(device, dtype)
        for name, value in self.values(vector).items():
            entry = self.hyper[name]
            inside = value.isfinite() if entry.discrete else (entry.low < value) & (value < entry.high)
            if not bool(inside.all()):
                raise ValueError(
                    f"hyper[{name!r}]: init {_show(entry.init)} is too close to the end of ({entry.low:g}, "
                    f"{entry.high:g}) for {dtype}; move it inside, or use weights of higher precision."
                )
        return vector

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector, by name.

        Args:
            vector: Shape ``(*batch, h)``.

        Returns:
            For each hyperparameter a tensor of shape ``(*batch, *its own shape)``.
        """
        parts = torch.split(vector, [entry.init.numel() for entry in self.hyper.values()], dim=-1)
        return {
            name: part.reshape(vector.shape[:-1] + entry.init.shape)
            for (name, entry), part in zip(self.hyper.items(), parts, strict=True)
        }

    def values(self, vector: Tensor) -> Named:
        """The natural values of a vector, by name.

        Args:
            vector: Unconstrained, shape ``(*batch, h)``.

        Returns:
            For each hyperparameter a tensor of shape ``(*batch, *its own shape)``; one that is shared keeps its own.
        """
        parts = self.split(vector)
        if vector.ndim > 1:
            parts = {name: part[0] if self.hyper[name].shared else part for name, part in parts.items()}
        return self.natural(parts)

    def shared(self) -> Tensor:
        """Which entries of the vector all examples of a batch share.

        Returns:
            A boolean tensor of shape ``(h,)``.
        """
        return torch.cat([torch.full((entry.init.numel(),), entry.shared) for entry in self.hyper.values()])

    def natural(self, parts: Mapping[str, Tensor]) -> Named:
        """The natural values of unconstrained ones, by name.

        Returns:
            For each hyperparameter a tensor of the same shape.
        """
        return Named("hyperparameter", [(name, self.hyper[name].natural(part)) for name, part in parts.items()])

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of :meth:`values`, without batch dimensions.

        Returns:
            The unconstrained vector, shape ``(h,)``.
        """
        return torch.cat([entry.unconstrained(values[name]).reshape(-1) for name, entry in self.hyper.items()])

    @staticmethod
    def columns(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars that describe values by name: every entry, or mean, min and max of one with many entries.

        Returns:
            A mapping from column names to zero-dimensional tensors.
        """
        columns: dict[str, Tensor] = {}
        for name, value in values.items():
            if value.numel() > LISTED_ENTRIES:
                columns |= {f"{name}.mean": value.mean(), f"{name}.min": value.min(), f"{name}.max": value.max()}
            elif value.ndim == 0:
                columns[name] = value
            else:
                columns |= {f"{name}{list(index)}": value[index] for index in np.ndindex(*value.shape)}
        return columns


class Scale(nn.Module):
    r"""The standard deviations :math:`\sigma \in \mathbb{R}^h_+` of the perturbation :math:`p(\epsilon | \sigma)`.

    Fixed, or learned with the entropy term of ``eq:stn-val-obj`` and kept positive by a softplus.

    Example:
        >>> scale = Scale(2, 1.0, entropy=None, perturb_outer=False, like=torch.zeros(()))
        >>> scale()
        tensor([1., 1.])
        >>> round(float(scale.entropy()), 4)  # 2 * log(2 pi e) / 2
        2.8379
    """

    sigma: Tensor
    shared: Tensor

    def __init__(
        self,
        size: int,
        init: float,
        *,
        entropy: float | None,
        perturb_outer: bool,
        like: Tensor,
        shared: Tensor | None = None,
    ) -> None:
        """Start every entry at ``init``, with the dtype and device of ``like``."""
        super().__init__()
        none = torch.zeros(size, dtype=torch.bool)
        self.register_buffer("shared", (none if shared is None else shared).to(like.device), persistent=False)
        self.entropy_weight = entropy
        self.perturb_outer = perturb_outer
        start = torch.full((size,), init, dtype=like.dtype, device=like.device)
        if entropy is None:
            self.register_buffer("sigma", start)
        else:
            self.raw = nn.Parameter(SoftplusTransform().inv(start))

    def forward(self) -> Tensor:
        """The standard deviations.

        Returns:
            A positive tensor of shape ``(h,)``.
        """
        if self.entropy_weight is None:
            return self.sigma
        sigma: Tensor = SoftplusTransform()(self.raw)
        return sigma.clamp_min(torch.finfo(sigma.dtype).tiny)

    def sample(self, examples: int | None = None) -> Tensor:
        r"""Draw :math:`\epsilon = \sigma \odot z` with standard normal z, differentiable in :math:`\sigma`.

        Args:
            examples: Draw as many, the shared entries of which are the same; None draws one.

        Returns:
            A tensor of shape ``(h,)`` or ``(examples, h)``.
        """
        sigma: Tensor = self()
        if examples is None:
            return sigma * torch.randn_like(sigma)
        noise = torch.randn(examples, len(sigma), dtype=sigma.dtype, device=sigma.device)
        return sigma * torch.where(self.shared, noise[:1], noise)

    def penalty(self) -> Tensor:
        r"""What a learned scale adds to the outer loss, :math:`-\tau\,\mathbb{H}[p(\epsilon | \sigma)]`.

        Returns:
            A scalar; zero if the scale is fixed.
        """
        return self().new_zeros(()) if self.entropy_weight is None else -self.entropy_weight * self.entropy()

    def entropy(self) -> Tensor:
        r"""The entropy :math:`\mathbb{H}[p(\epsilon | \sigma)] = \sum_i \log \sigma_i + \tfrac{h}{2} \log 2 \pi e`.

        Returns:
            A scalar.
        """
        sigma = self()
        total: Tensor = Normal(torch.zeros_like(sigma), sigma, validate_args=False).entropy().sum()
        return total


def _stretched_sigmoid(lo: float, hi: float) -> ComposeTransform:
    return ComposeTransform([SigmoidTransform(), AffineTransform(lo, hi - lo)])


def _show(value: Tensor) -> str:
    return str(value.tolist() if value.numel() <= LISTED_ENTRIES else f"a tensor of shape {tuple(value.shape)}")


def _checked_bounds(kind: str, lo: Any, hi: Any) -> tuple[float, float]:
    for name, bound in (("lo", lo), ("hi", hi)):
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise TypeError(f"{kind}: {name} must be a number, got {type(bound).__name__}: {bound!r}.")
    if not (math.isfinite(lo) and math.isfinite(hi) and lo < hi):
        raise ValueError(f"{kind}: needs finite lo < hi, got lo={lo} and hi={hi}.")
    return float(lo), float(hi)


def _checked_init(kind: str, init: Any, low: float, high: float, *, closed: bool = False) -> Tensor:
    allowed = f"[{low:g}, {high:g}]" if closed else f"({low:g}, {high:g})"
    try:
        given = torch.as_tensor(init)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{kind}: init must be a number or an array of numbers, got {init!r}.") from None
    if given.dtype == torch.bool or given.is_complex():
        raise TypeError(f"{kind}: init must be a real number in {allowed}, got {init!r}.")
    # From init once more: PyTorch puts Python numbers into single precision unless told otherwise.
    value = torch.as_tensor(init, dtype=torch.float64, device="cpu").detach().clone()
    if value.numel() == 0:
        raise ValueError(f"{kind}: init is an empty array of shape {tuple(value.shape)}.")
    inside = (low <= value) & (value <= high) if closed else (low < value) & (value < high)
    if not bool((inside & value.isfinite()).all()):
        edge = "" if closed or low == -math.inf else ", the ends excluded"
        raise ValueError(f"{kind}: init must be a finite number in {allowed}{edge}, got {_show(value)}.")
    return value
