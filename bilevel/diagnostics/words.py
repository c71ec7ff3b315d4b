"""What a diagnosis says: a verdict on the hypergradient, advice, and cautions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bilevel.diagnostics.diagnosis import Diagnosis
from bilevel.diagnostics.reference import ACCURATE, MATRICES
from bilevel.response import Implicit, Method
from bilevel.response.hypernetwork import Hypernetwork


def verdict(found: Diagnosis, method: Method, size: int, direct: bool) -> str:
    """Say how good the hypergradient is, and what to try."""
    cosine, ratio, error = found.cosine, found.norm_ratio, found.relative_error
    subject = "The response part of the hypergradient" if direct else "The hypergradient"
    if size == 0:
        return "There is nothing to compare."
    if math.isnan(ratio):
        if error == 0:
            return f"{subject} is zero, for the method and for the reference: here the outer loss does not feel it."
        return f"{subject} is zero for the reference, but not for the method."
    if ratio == 0:
        return f"{subject} is zero, where that of the reference is not: no response has been learned. {_advice(method)}"
    if error <= ACCURATE:
        return f"{subject} agrees with the reference to a relative error of {error:.1e}."
    length = _length(ratio)
    if cosine >= 0.95:
        way = "has the right sign" if size == 1 else f"points the right way (cosine {cosine:.3f})"
        if not length:
            return f"{subject} {way} and has the right length to {100 * abs(ratio - 1):.1f} %."
        steps = "too small" if ratio < 1 else "too large"
        return (
            f"{subject} {way} but is {length}: fine for adaptive outer optimizers such as Adam and RMSprop; plain SGD "
            f"takes steps that much {steps}."
        )
    if cosine < 0:
        way = "has the wrong sign" if size == 1 else f"points the wrong way (cosine {cosine:.3f})"
        said = f"{subject} {way}: a small step along it raises the outer loss."
    else:
        roughly = "roughly" if cosine >= 0.7 else "only vaguely"
        said = f"{subject} points {roughly} the right way (cosine {cosine:.3f}){f' and is {length}' * bool(length)}."
    if direct and found.total.cosine >= 0.95:
        said += f" Its direct part outweighs that: the whole hypergradient has cosine {found.total.cosine:.3f}."
    if isinstance(method, Implicit) and MATRICES[method.curvature] not in found.reference:
        said += (
            f" The method uses the {MATRICES[method.curvature]}, unlike the reference: "
            f"curvature={method.curvature!r} judges its linear solver alone."
        )
    return f"{said} {_advice(method)}"


def _length(ratio: float) -> str:
    """Say how far a length is off; empty if it is right within ten percent."""
    if abs(ratio - 1) <= 0.1:
        return ""
    if ratio < 1:
        return f"{100 * (1 - ratio):.0f} % too short" if ratio >= 0.01 else f"{1 / ratio:.2g} times too short"
    return f"{100 * (ratio - 1):.0f} % too long" if ratio < 2 else f"{ratio:.2g} times too long"


def _advice(method: Method) -> str:
    """What to try when the hypergradient of a method is bad."""
    if isinstance(method, Hypernetwork):
        return (
            "Train the response longer before the outer steps (warmup, inner_steps), with an adaptive "
            "response_optimizer or a higher learning rate; if that does not help, lower scale."
        )
    if isinstance(method, Implicit):
        return "Let the linear solver of the method come closer: more steps or a higher rank, less damping, or CG."
    return "Make more inner steps before each outer step."


def cautions(found: Diagnosis, troubles: Sequence[str], solved: float) -> list[str]:
    """Say what limits the comparison: inner problem, curvature, reference, excluded hyperparameters."""
    said = []
    if found.inner_distance > solved:
        share = f"{100 * found.inner_distance:.0f} %" if found.inner_distance < 10 else "many times"
        said.append(
            f"The inner problem is not solved on this batch: a Newton step would move the weights by {share} of their "
            "norm, and the reference holds only at a solution. Make more inner steps, or give a larger train batch."
        )
    if found.smallest_curvature < -1e-6 * max(found.largest_curvature, -found.smallest_curvature):
        convex = "" if "Gauss" in found.reference else "; curvature='gauss_newton' compares with a convex model instead"
        said.append(
            f"The inner Hessian has negative curvature {found.smallest_curvature:.2g} (the largest is "
            f"{found.largest_curvature:.2g}): the weights are not at a minimum{convex}."
        )
    if troubles:
        # Only the first sentence of an error is a cause. The others advise users who chose the solver themselves.
        causes = "; ".join(trouble.partition(". ")[0].rstrip(".") for trouble in troubles)
        said.append(f"The reference is {found.reference}, since this did not do: {causes}.")
    if found.excluded:
        said.append(
            f"Not compared: {', '.join(found.excluded)}. The gradient of the inner loss has no derivative there (as "
            "with dropout masks and integers), so the reference cannot see them."
        )
    return said
