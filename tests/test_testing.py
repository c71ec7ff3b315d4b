"""The contract holds for every method, and notices methods that break it."""

from dataclasses import dataclass

import pytest
import torch

import bilevel
from bilevel.problem import Model
from bilevel.response.stn import STNResponse
from bilevel.testing import CHECKS, Case

VARIANTS = {
    **bilevel.METHODS,
    "implicit_minres": bilevel.Implicit(bilevel.MINRES(), curvature="gauss_newton"),
    "stn, learned scale": bilevel.STN(entropy=1e-2),
    "centered_stn, learned scale": bilevel.CenteredSTN(entropy=1e-2),
    "centered_stn, stn objective": bilevel.CenteredSTN(objective="stn"),
    "delta_stn, learned scale": bilevel.DeltaSTN(entropy=1e-2),
    "unrolled, one step": bilevel.Unrolled(steps=1),
    "unrolled, checkpoint": bilevel.Unrolled(steps=3, checkpoint=True),
    "unrolled, truncated forward": bilevel.Unrolled(steps=3, truncate=2, mode="forward"),
    "delta_stn, perturbed outer loss": bilevel.DeltaSTN(perturb_outer=True),
    "stn, dense": bilevel.STN(structure="dense"),
    "centered_stn, dense": bilevel.CenteredSTN(structure="dense"),
    "delta_stn, dense": bilevel.DeltaSTN(structure="dense", entropy=1e-2),
    "delta_stn, rows per batch": bilevel.DeltaSTN(structure="rowwise", perturb="batch"),
}
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", VARIANTS)
def test_contract(method, check, device):
    CHECKS[check](Case(VARIANTS[method], torch.device(device)))


def test_there_are_at_least_forty_checks():
    assert len(CHECKS) >= 40


@pytest.fixture
def only(monkeypatch):
    """Restricts the contract to some checks and a few others; all of them together are the test above."""

    def restrict(*names):
        some = {name: CHECKS[name] for name in CHECKS if name in names or name.startswith("settings_")}
        assert some.keys() >= set(names)
        monkeypatch.setattr("bilevel.testing.contract.CHECKS", some)
        return list(some)

    return restrict


def test_report_counts_what_passed(only):
    names = only("jvp_and_vjp_are_adjoint")
    report = bilevel.check_method("stn")
    assert report.failed == {} and report.passed == names
    assert f"{len(names)} of {len(names)} checks passed" in str(report)


@dataclass(frozen=True)
class Broken(bilevel.Method):
    """An STN whose response class is replaced."""

    response: type

    def bind(self, problem):
        return self.response(problem, bilevel.STN())


class _Response(bilevel.BestResponse):
    """A final class cannot be subclassed, so a broken STN forwards to a real one."""

    def __init__(self, problem, settings):
        super().__init__(problem)
        self.stn = STNResponse(problem, settings)
        self.inner = self.stn.inner
        self.scale = self.stn.scale

    def inner_loss(self, hyper, batch):
        yield from self.stn.inner_loss(hyper, batch)

    def forward(self, hyper, train_batch=None, center=None):
        return self.stn(hyper, train_batch, center)


class WrongSign(_Response):
    def vjp(self, hyper, cotangent, train_batch=None):
        return -super().vjp(hyper, cotangent, train_batch)


class NoDerivative(_Response):
    def forward(self, hyper, train_batch=None, center=None):
        return self.stn(hyper.detach(), train_batch, center)


class UpdatesStatisticsTwice(_Response):
    def inner_loss(self, hyper, batch):
        yield from self.stn.inner_loss(hyper, batch)
        yield from self.stn.inner_loss(hyper, batch)


class TouchesTheUsersModule(_Response):
    def inner_loss(self, hyper, batch):
        yield from self.stn.inner_loss(hyper, batch)
        for value in self.problem.params.values():
            value.data.add_(1)


class SeedsGlobally(_Response):
    def forward(self, hyper, train_batch=None, center=None):
        torch.manual_seed(0)
        return self.stn(hyper, train_batch, center)


class ForgetsPrecision(_Response):
    def forward(self, hyper, train_batch=None, center=None):
        model = self.stn(hyper, train_batch, center)
        return Model({name: value.double() for name, value in model.params.items()}, model)


class PredictsWithOtherWeights(_Response):
    def forward(self, hyper, train_batch=None, center=None):
        model = self.stn(hyper, train_batch, center)
        return Model({name: 2 * value for name, value in model.params.items()}, model)


@pytest.mark.parametrize(
    ("response", "checks"),
    [
        (WrongSign, {"jvp_and_vjp_are_adjoint", "jacobian_rows_are_vjps", "hypergradient_is_direct_plus_response"}),
        (NoDerivative, {"jacobian_is_finite_and_not_zero", "jacobian_points_the_right_way"}),
        (UpdatesStatisticsTwice, {"statistics_are_updated_once_per_inner_step"}),
        (TouchesTheUsersModule, {"users_module_is_untouched", "users_tensors_are_untouched"}),
        (SeedsGlobally, {"global_random_state_is_untouched"}),
        (ForgetsPrecision, {"single_precision_is_kept"}),
        (PredictsWithOtherWeights, {"model_predicts_with_its_params", "value_starts_at_the_users_weights"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_contract_notices_broken_methods(response, checks, only):
    """Each fault is named by the checks that it violates."""
    only(*checks)
    with pytest.raises(AssertionError) as caught:
        bilevel.check_method(Broken(response))
    for check in checks:
        assert f"\n  {check}: " in str(caught.value)


def test_contract_notices_mutable_settings(only):
    class Mutable(bilevel.Method):
        def bind(self, problem):
            return bilevel.STN().bind(problem)

    only()
    with pytest.raises(AssertionError, match=r"settings_are_immutable(.|\n)*settings_equal_their_copies"):
        bilevel.check_method(Mutable())


def test_contract_rejects_unknown_names():
    with pytest.raises(ValueError, match="did you mean 'delta_stn'"):
        bilevel.check_method("delta-stn")
