"""What the checks of the first batch cost, counted in forward and backward passes of plain training.

    python benchmarks/first_look.py

A batch of a kind that was seen before costs nothing but a look at its shapes, whose time is printed as well.
"""

from __future__ import annotations

import timeit
from typing import Any

import torch
import torch.nn.functional as F
from overhead import mlp
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import bilevel
from bilevel.checks import Kinds


def flops(function: Any) -> int:
    """Of matrix products."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def loss(model: Any, hyper: Any, batch: Any) -> Tensor:
    """Cross-entropy with a penalty."""
    return F.cross_entropy(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, batch = mlp(), (torch.randn(128, 1, 28, 28), torch.randint(10, (128,)))
    plain = flops(lambda: F.cross_entropy(net(batch[0]), batch[1]).backward())
    print("method              first inner step   later ones   (passes of plain training)")
    for name in ("stn", "centered_stn", "delta_stn", "implicit_cg", "unrolled"):
        problem = bilevel.Problem(net, inner_loss=loss, outer_loss=loss, hyper={"decay": bilevel.positive(1e-4)})
        solver = bilevel.Solver(problem, method=name)
        first, later = (flops(lambda: solver.inner_step(batch)) / plain for _ in range(2))  # noqa: B023
        print(f"{name:<20}{first:>16.1f}{later:>13.1f}")
    kinds = Kinds()
    kinds.add(batch, 128)
    count = 2000
    seconds = min(timeit.repeat(lambda: kinds.new(batch, 128), number=count, repeat=5)) / count
    print(f"a look at the shapes of a batch: {1e6 * seconds:.0f} microseconds")


if __name__ == "__main__":
    main()
