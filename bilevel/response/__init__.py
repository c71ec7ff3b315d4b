"""The methods, one file each, and their names."""

from collections.abc import Mapping
from types import MappingProxyType

from bilevel.hyper import suggest
from bilevel.linear_solvers import CG, Exact, Identity, Neumann, Nystrom
from bilevel.response.base import BestResponse, Method
from bilevel.response.centered_stn import CenteredSTN
from bilevel.response.delta_stn import DeltaSTN
from bilevel.response.diagonal import Diagonal
from bilevel.response.implicit import Implicit
from bilevel.response.kfac import KFAC
from bilevel.response.preconditioner import Preconditioner
from bilevel.response.stn import STN
from bilevel.response.unrolled import Unrolled

METHODS: Mapping[str, Method] = MappingProxyType({
    "stn": STN(),
    "centered_stn": CenteredSTN(),
    "delta_stn": DeltaSTN(),
    "delta_stn_paper": DeltaSTN.paper(),
    "implicit_exact": Implicit(Exact()),
    "implicit_cg": Implicit(CG(rtol=0.0), curvature="gauss_newton"),
    "implicit_neumann": Implicit(Neumann(), curvature="gauss_newton"),
    "implicit_nystrom": Implicit(Nystrom(), curvature="gauss_newton"),
    "implicit_identity": Implicit(Identity()),
    "unrolled": Unrolled(steps=20),
    "unrolled_truncated": Unrolled(steps=20, truncate=5),
    "unrolled_forward": Unrolled(steps=20, mode="forward"),
})
"""Every method by name, with its default settings."""


def get_method(method: str | Method) -> Method:
    """Look up a method by name; an instance is returned as it is.

    Returns:
        The settings of the method.

    Raises:
        TypeError: If it is neither a name nor a method.
        ValueError: If there is no method of that name.

    Example:
        >>> get_method("stn") == STN()
        True
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"method must be an instance, got the class {method.__name__}: write {method.__name__}().")
    if not isinstance(method, str):
        raise TypeError(f"method must be a name or a method such as DeltaSTN(), got {type(method).__name__}.")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: {suggest(method, METHODS)}")
    return METHODS[method]


__all__ = [
    "KFAC",
    "METHODS",
    "STN",
    "BestResponse",
    "CenteredSTN",
    "DeltaSTN",
    "Diagonal",
    "Implicit",
    "Method",
    "Preconditioner",
    "Unrolled",
    "get_method",
]
