"""One line per method: a digest of everything a short run computes.

    python benchmarks/golden.py > before.txt
    # ... move code around ...
    python benchmarks/golden.py | diff before.txt -

A change that should not change any number leaves every line as it was. Lines differ between machines and versions of
PyTorch, so that they are compared on one machine and kept nowhere.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import bilevel

SMOOTH = {"decay": bilevel.positive([1e-3, 1e-2]), "noise": bilevel.positive(0.1)}
ROUGH = SMOOTH | {"dropout": bilevel.interval(0.0, 0.9, init=0.2), "holes": bilevel.integer(0, 4, init=1)}


class Network(nn.Module):
    """Convolution, batch norm and dropout whose rate is an argument."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(36, 3)

    def forward(self, x: Tensor, rate: Tensor | float) -> Tensor:
        """Predict logits."""
        hidden = torch.tanh(self.norm(self.conv(x))).flatten(1)
        logits: Tensor = self.out(bilevel.functional.dropout(hidden, rate, training=self.training))
        return logits


def inner_loss(model: Any, hyper: Any, batch: Any) -> Tensor:
    """Cross-entropy with noise, dropout and two penalties."""
    x, y = batch
    x = bilevel.functional.gaussian_noise(x, hyper["noise"])
    logits = model(x, hyper["dropout"] if "dropout" in hyper else 0.1)
    penalty = hyper["decay"][..., 0] * bilevel.l2(model.params) + hyper["decay"][..., 1] * bilevel.l2([
        model.params["out.weight"]
    ])
    if "holes" in hyper:
        penalty = penalty + 1e-3 * hyper["holes"] * bilevel.l2(model.params)
    return F.cross_entropy(logits, y, reduction="none") + penalty


def outer_loss(model: Any, hyper: Any, batch: Any) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(model(batch[0], 0.0), batch[1])


def digest(*parts: Any) -> str:
    """Of all tensors and numbers in order."""
    total = hashlib.sha256()
    for leaf in pytree.tree_leaves(parts):
        total.update(leaf.detach().cpu().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
    return total.hexdigest()[:24]


def run(method: str | bilevel.Method, *, smooth: bool, **options: Any) -> str:
    """A run of six rounds on batches of eight images."""
    torch.manual_seed(1)
    batches = [(torch.randn(8, 1, 5, 5), torch.randint(3, (8,))) for _ in range(4)]
    problem = bilevel.Problem(
        Network(), inner_loss=inner_loss, outer_loss=outer_loss, hyper=SMOOTH if smooth else ROUGH
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = bilevel.solve(problem, batches, batches[:2], method=method, steps=6, progress=False, **options)
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in solution.history.rows]
    return digest(solution.hyper, solution.params, solution.state_dict, rows, solution.solver.state_dict())


def main() -> None:
    """Print the lines."""
    torch.set_num_threads(1)
    for name, method in bilevel.METHODS.items():
        learned = isinstance(method, bilevel.STN | bilevel.CenteredSTN | bilevel.DeltaSTN)
        print(f"{name:<20}{run(name, smooth=not learned)}", flush=True)
    extra: dict[str, tuple[bilevel.Method, dict[str, Any]]] = {
        "stn, learned scale": (bilevel.STN(entropy=1e-3), {}),
        "delta, learned scale": (bilevel.DeltaSTN(entropy=1e-3), {"inner_clip": 1.0, "outer_clip": 0.1}),
        "delta, batch": (bilevel.DeltaSTN(perturb="batch"), {"warmup": 2, "accumulate": 2}),
    }
    for name, (settings, options) in extra.items():
        print(f"{name:<20}{run(settings, smooth=False, **options)}", flush=True)


if __name__ == "__main__":
    main()
