"""The kinds of hyperparameters: real, positive, in an interval, whole numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    ExpTransform,
    SigmoidTransform,
    Transform,
)

from bilevel.hyper.show import show


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
        shared: Whether all examples of a batch share one perturbation. Other hyperparameters may have one for each.

    Example:
        >>> rate = interval(0.0, 0.9, init=0.3)
        >>> rate.natural(torch.tensor(0.0)), rate.unconstrained(torch.tensor(0.45))
        (tensor(0.4500), tensor(0.))
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
            ``s(unconstrained)``. Integers are rounded and detached: their only gradient goes through the response.
        """
        value = _applied(self.transform, unconstrained)
        # Where the sigmoid saturates, lo - 1/2 may round to lo - 1, hence the clamp; adding 0.0 turns -0.0 into 0.0.
        return (value.round().clamp(self.low, self.high) + 0.0).detach() if self.discrete else value

    def unconstrained(self, natural: Tensor) -> Tensor:
        """Map natural values to unconstrained ones, elementwise.

        Returns:
            The inverse of :meth:`natural`.
        """
        value: Tensor = self.transform.inv(natural)
        return value


def _applied(transform: Transform, x: Tensor) -> Tensor:
    """What the transforms of :func:`positive` and :func:`interval` do, in less Python than they take."""
    if type(transform) is ExpTransform:
        return x.exp()
    if type(transform) is ComposeTransform:
        for part in transform.parts:
            x = _applied(part, x)
        return x
    if type(transform) is AffineTransform:
        return transform.loc + transform.scale * x
    value: Tensor = transform(x)
    return value


def real(init: Any, *, shared: bool = False) -> Hyper:
    r"""A hyperparameter on the whole real line, :math:`s(\lambda) = \lambda`.

    Args:
        init: A finite number, or an array of them.
        shared: Use one perturbation for the whole batch, even where other hyperparameters have one for each example.
            The value then keeps its own shape, without a dimension of examples.

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
    methods that learn the response from perturbed losses (``stn``, ``centered_stn``, ``delta_stn``) can tune it.

    Args:
        lo: Smallest value.
        hi: Largest value.
        init: A whole number in that range, or an array of them.
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
        raise ValueError(f"integer: init must be a whole number in [{lo:g}, {hi:g}], got {show(value)}.")
    return Hyper(value, _stretched_sigmoid(lo - 0.5, hi + 0.5), lo, hi, discrete=True, shared=shared)


def _stretched_sigmoid(lo: float, hi: float) -> ComposeTransform:
    return ComposeTransform([SigmoidTransform(), AffineTransform(lo, hi - lo)])


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
    # Made from init and not from given: PyTorch puts Python numbers into single precision unless told otherwise.
    value = torch.as_tensor(init, dtype=torch.float64, device="cpu").detach().clone()
    if value.numel() == 0:
        raise ValueError(f"{kind}: init is an empty array of shape {tuple(value.shape)}.")
    inside = (low <= value) & (value <= high) if closed else (low < value) & (value < high)
    if not bool((inside & value.isfinite()).all()):
        edge = "" if closed or low == -math.inf else ", the ends excluded"
        raise ValueError(f"{kind}: init must be a finite number in {allowed}{edge}, got {show(value)}.")
    return value
