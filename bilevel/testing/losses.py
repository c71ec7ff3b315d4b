"""Checks: what the user's losses may take and return."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from bilevel.functional import l2
from bilevel.hyper import positive, real
from bilevel.problem import Model
from bilevel.testing.assertions import expect, expect_close
from bilevel.testing.case import Batch, Case, Network
from bilevel.testing.probes import flat, run
from bilevel.testing.registry import check


@check
def _nested_outputs_work(case: Case) -> None:
    class Nested(Network):
        @override
        def forward(self, x: Tensor) -> Any:
            logits = super().forward(x)
            return {"logits": (logits, [logits.argmax(1)]), "name": "nested"}

    def nested(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0])["logits"][0], batch[1]) + hyper["decay"].sum(-1) * l2(model.params)

    def plain(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + hyper["decay"].sum(-1) * l2(model.params)

    steps = [
        run(case.solver(case.network(net=net, inner_loss=loss, outer_loss=loss), outer_clip=1.0), case.batch())[-1]
        for net, loss in ((Nested(), nested), (Network(), plain))
    ]
    expect_close(steps[0].hypergradient, steps[1].hypergradient, 1e-12)


@check
def _losses_per_example_are_averaged(case: Case) -> None:
    def loss(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + (
            hyper["decay"] * l2(model.params)[..., None]
        ).sum(-1)

    def plain(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return loss(model, hyper, batch).mean()

    solvers = [case.solver(case.network(inner_loss=f, outer_loss=f), outer_clip=1.0) for f in (loss, plain)]
    for solver in solvers:
        run(solver, case.batch())
    expect_close(flat(solvers[0].params), flat(solvers[1].params), 1e-12)


@check
def _aux_is_passed_on(case: Case) -> None:
    def loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, str]:
        return (model.params["w"] - hyper["x"].sum()).square().sum(), "seen"

    solver = case.solver(case.quadratic(inner_loss=loss, outer_loss=loss))
    step = run(solver, None)[-1]
    expect((solver.inner_aux, step.aux) == ("seen", "seen"), "aux was lost")


@check
def _single_precision_is_kept(case: Case) -> None:
    solver = case.solver(case.network(dtype=torch.float32))
    step = run(solver, case.batch(torch.float32))[-1]
    kinds = {value.dtype for value in [*solver.params.values(), solver.vector, step.hypergradient, step.loss]}
    expect(kinds == {torch.float32}, f"dtypes after a run: {kinds}")


@check
def _hyperparameters_of_any_shape_work(case: Case) -> None:
    def loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
        return (model.params["w"] - hyper["x"].sum(0)).square().sum() + hyper["y"] * model.params["w"].square().sum()

    hyper = {"x": real(torch.zeros(2, 3)), "y": positive(1.0)}
    slow = partial(torch.optim.SGD, lr=1e-3)
    problem = case.quadratic(inner_loss=loss, outer_loss=loss, hyper=hyper)
    solver = case.solver(problem, inner_optimizer=slow, outer_optimizer=slow)
    run(solver, None)
    expect(solver.hyper["x"].shape == (2, 3) and solver.hyper["y"].shape == (), "a hyperparameter lost its shape")
