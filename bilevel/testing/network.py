"""Checks: modes, BatchNorm statistics, frozen and tied parameters of the user's network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bilevel.testing.assertions import expect, same
from bilevel.testing.case import Case, Network
from bilevel.testing.probes import run
from bilevel.testing.registry import check


@check
def _modes_are_train_inside_and_eval_outside(case: Case) -> None:
    net = Network()
    solver = case.solver(case.network(net=net))
    solver.inner_step(case.batch())  # the first one may look at the network in eval mode, too
    net.modes.clear()
    solver.inner_step(case.batch())
    expect(all(net.modes), "an inner pass ran in eval mode")
    net.modes.clear()
    solver.evaluate([case.batch()])
    expect(not any(net.modes), "an evaluation ran in train mode")


@check
def _modes_are_restored(case: Case) -> None:
    net = Network()
    net.norm.eval()
    run(case.solver(case.network(net=net)), case.batch())
    expect(net.training and net.first.training and not net.norm.training, "mode flags of the user's module changed")


@check
def _statistics_are_updated_once_per_inner_step(case: Case) -> None:
    solver = case.trained_network(4)
    count = int(solver.module_state_dict["norm.num_batches_tracked"])
    expect(count == 4, f"BatchNorm saw {count} batches in 4 inner steps")


@check
def _statistics_ignore_evaluation(case: Case) -> None:
    solver = case.trained_network(net=Network(), outer_mode="train")
    before = solver.module_state_dict
    solver.evaluate([case.batch()])
    expect(same(before, solver.module_state_dict), "an evaluation changed the BatchNorm statistics")


@check
def _frozen_parameters_stay(case: Case) -> None:
    net = Network().to(case.device, torch.float64)
    net.first.weight.requires_grad_(False)
    solver = case.solver(case.network(net=net))
    run(solver, case.batch())
    expect("first.weight" not in solver.params, "a frozen parameter is trained")
    expect(torch.equal(solver.module_state_dict["first.weight"], net.first.weight), "a frozen parameter changed")


@check
def _tied_parameters_stay_tied(case: Case) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    net[2].weight = net[0].weight
    solver = case.solver(case.network(net=net))
    run(solver, case.batch())
    state = solver.module_state_dict
    expect(torch.equal(state["0.weight"], state["2.weight"]) and "2.weight" not in solver.params, "the tie is broken")
    net.load_state_dict(state)


@check
def _state_loads_into_the_users_module(case: Case) -> None:
    net = Network().to(case.device, torch.float64)
    solver = case.solver(case.network(net=net))
    run(solver, case.batch())
    net.load_state_dict(solver.module_state_dict, strict=True)
    net.eval()
    loss = F.cross_entropy(net(case.batch()[0]), case.batch()[1]).detach()
    expect(abs(float(loss) - solver.evaluate([case.batch()])) < 1e-9, "the loaded module predicts something else")
