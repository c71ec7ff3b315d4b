"""Checks: the weights that a response returns."""

from __future__ import annotations

from bilevel.testing.assertions import expect, expect_close
from bilevel.testing.case import Case, Network
from bilevel.testing.probes import flat
from bilevel.testing.registry import check


@check
def _value_starts_at_the_users_weights(case: Case) -> None:
    problem = case.network()
    for name, value in case.solver(problem).params.items():
        expect_close(value, problem.params[name].detach(), 1e-12)


@check
def _value_has_the_names_and_shapes_of_the_weights(case: Case) -> None:
    problem = case.network()
    value = case.solver(problem).params
    expected = {name: w.shape for name, w in problem.params.items()}
    expect({name: w.shape for name, w in value.items()} == expected, "names or shapes differ")


@check
def _value_is_a_copy(case: Case) -> None:
    solver = case.trained()
    solver.params["w"].zero_()
    expect(bool(solver.params["w"].any()), "writing to solver.params changed the solver")


@check
def _value_agrees_with_forward(case: Case) -> None:
    solver = case.trained()
    expect_close(flat(solver.response(solver.vector.detach()).params).detach(), flat(solver.params), 1e-12)


@check
def _value_keeps_the_device(case: Case) -> None:
    expect(case.trained().params["w"].device.type == case.device.type, "weights moved to another device")


@check
def _model_predicts_with_its_params(case: Case) -> None:
    net = Network()
    solver = case.trained_network(net=net)
    net.eval()
    model = solver.response(solver.vector.detach())
    net.load_state_dict(solver.module_state_dict)
    expect_close(model(case.batch()[0]).detach(), net(case.batch()[0]).detach(), 1e-12)
