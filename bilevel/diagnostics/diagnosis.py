"""What a diagnosis holds, and how two vectors are compared."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from bilevel.linear_solvers.base import norm


class Comparison(NamedTuple):
    r"""A vector a of the method, compared with b of the reference.

    Attributes:
        cosine: Cosine of the angle between a and b; NaN if one of them is zero.
        norm_ratio: :math:`\|a\| / \|b\|`.
        relative_error: :math:`\|a - b\| / \|b\|`.

    Example:
        >>> Comparison(cosine=1.0, norm_ratio=0.5, relative_error=0.5).norm_ratio  # the right direction, half as long
        0.5
    """

    cosine: float
    norm_ratio: float
    relative_error: float


UNKNOWN = Comparison(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Diagnosis:
    r"""What :func:`diagnose` found. It prints as a table with an explanation.

    A number that could not be computed is NaN, and ``meaning`` says why.

    Attributes:
        method: The method.
        reference: The linear solver and the matrix that it was compared with.
        cosine: Between the response parts :math:`(\partial r / \partial \lambda)^\top \partial_w \mathcal{L}_V` of the
            hypergradient; NaN if one of them is zero.
        norm_ratio: Norm of the method's response part over that of the reference.
        relative_error: Norm of their difference over that of the reference.
        total: The same comparison of the whole hypergradient, its direct part included.
        jacobian: The same comparison of :math:`(\partial r / \partial \lambda)\, v`, the change of the weights along
            the hypergradient v of the reference.
        columns: The same comparison of :math:`\partial r / \partial \lambda_i` for each hyperparameter. Empty if there
            are more than ``max_columns``.
        largest_curvature: The largest eigenvalue of the inner Hessian. An estimate is never too large.
        smallest_curvature: The smallest eigenvalue. An estimate is never too small.
        inner_gradient: :math:`\|\nabla_w \mathcal{L}_T\| / \|w\|`.
        inner_distance: :math:`\|\mathbf{H}^{-1} \nabla_w \mathcal{L}_T\| / \|w\|`, the Newton step to the inner
            solution, relative to the weights.
        residual: Relative residual of the reference's linear system, recomputed from the solution.
        excluded: Hyperparameters that are left out of everything above. The gradient of the inner loss has no
            derivative in them, so the reference cannot see them.
        meaning: What it means and what to try.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.zeros(())},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]) ** 2,
        ...     outer_loss=lambda model, hyper, batch: (model.params["w"] - 3) ** 2,
        ...     hyper={"target": bilevel.real(0.0)},
        ... )
        >>> found = bilevel.diagnose(bilevel.Solver(problem, method="implicit_exact"))
        >>> round(found.cosine, 6), round(found.norm_ratio, 6)
        (1.0, 1.0)
    """

    method: str
    reference: str
    cosine: float
    norm_ratio: float
    relative_error: float
    total: Comparison
    jacobian: Comparison
    columns: dict[str, Comparison]
    largest_curvature: float
    smallest_curvature: float
    inner_gradient: float
    inner_distance: float
    residual: float
    excluded: tuple[str, ...]
    meaning: str

    def as_dict(self) -> dict[str, Any]:
        """Everything in one flat dict of numbers and strings.

        Returns:
            Keys like ``"cosine"``, ``"jacobian.cosine"`` and ``"columns.decay.cosine"``; ``excluded`` is a list.
        """
        entries: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Comparison):
                entries |= {f"{name}.{key}": number for key, number in value._asdict().items()}
            elif name == "columns":
                for column, row in self.columns.items():
                    entries |= {f"columns.{column}.{key}": number for key, number in row._asdict().items()}
            else:
                entries[name] = list(value) if name == "excluded" else value
        return entries

    def __str__(self) -> str:
        """Make a table of the comparisons, then the rest, then the meaning."""
        rows = {
            "response gradient": Comparison(self.cosine, self.norm_ratio, self.relative_error),
            "hypergradient": self.total,
            "weights along it": self.jacobian,
            **{f"weights along {name}": row for name, row in self.columns.items()},
        }
        width = max(map(len, rows)) + 2
        lines = [f"{self.method} against {self.reference}", " " * width + "  cosine  norm ratio  relative error"]
        lines += [
            f"{name:<{width}}{row.cosine:>8.3f}{row.norm_ratio:>12.3g}{row.relative_error:>16.2g}"
            for name, row in rows.items()
        ]
        lines += [
            f"curvature from {self.smallest_curvature:.3g} to {self.largest_curvature:.3g}, "
            f"residual of the reference {self.residual:.1e}",
            f"inner gradient {self.inner_gradient:.2g} and Newton step {self.inner_distance:.2g}, "
            "relative to the weights",
        ]
        return "\n".join([*lines, *textwrap.wrap(self.meaning, 96, break_on_hyphens=False)])


def compare(ours: Tensor, exact: Tensor) -> Comparison:
    """Compare two vectors in double precision; unknown if they are empty."""
    a, b = ours.detach().cpu().double(), exact.detach().cpu().double()
    if len(a) == 0:
        return UNKNOWN
    size, reference = float(norm(a)), float(norm(b))
    cosine = math.nan if size == 0 or reference == 0 else float((a / size) @ (b / reference))
    # Rounding may leave [-1, 1]. We do not clip with max and min: they would turn NaN into a number.
    cosine = cosine if abs(cosine) <= 1 or math.isnan(cosine) else math.copysign(1.0, cosine)
    return Comparison(cosine, size / reference if reference else math.nan, quotient(float(norm(a - b)), reference))


def quotient(size: float, reference: float) -> float:
    """A quotient of norms in which 0 / 0 is 0."""
    return 0.0 if size == 0 else size / reference if reference else math.inf if size > 0 else math.nan
