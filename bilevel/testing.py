"""One contract for every method: ``bilevel.check_method`` runs it on yours.

A check is a function of a :class:`Case` that raises ``AssertionError``; its name says what holds. All use float64 and
problems small enough for closed forms, unless the check is about something else.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.functional import l2
from bilevel.hyper import positive, real
from bilevel.loop import solve
from bilevel.problem import Model, Problem
from bilevel.response import BestResponse, Method, get_method
from bilevel.response.hypernetwork import Hypernetwork
from bilevel.solver import DivergenceError, OuterStep, Solver

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Report:
    """What :func:`check_method` found.

    Attributes:
        method: The method that was checked.
        passed: Names of the checks that hold.
        failed: The others, with what went wrong.
    """

    method: Method
    passed: list[str]
    failed: dict[str, str]

    def __str__(self) -> str:
        """List the failed checks, or say that there are none."""
        total = len(self.passed) + len(self.failed)
        lines = [f"{self.method}: {len(self.passed)} of {total} checks passed"]
        return "\n".join(lines + [f"  {name}: {message}" for name, message in self.failed.items()])


@dataclass(frozen=True)
class Case:
    """A method and the device on which to check it."""

    method: Method
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def quadratic(self, **changes: Any) -> Problem:
        r"""Inside :math:`w^\top A w / 2 + w^\top B \lambda`, outside :math:`|w - c|^2 / 2 + |\lambda|^2`.

        Returns:
            A problem without a network, with three weights and two hyperparameters.
        """
        a, b, c = (part.to(self.device) for part in quadratic_parts())

        def inner_loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
            w = model.params["w"]
            return 0.5 * w @ a @ w + w @ b @ hyper["x"]

        def outer_loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
            return 0.5 * (model.params["w"] - c).square().sum() + hyper["x"].square().sum()

        settings: dict[str, Any] = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        settings["hyper"] = {"x": real([0.5, -1.0])}
        settings["inner"] = {"w": torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64, device=self.device)}
        return Problem(**(settings | changes))

    def network(self, *, dtype: torch.dtype = torch.float64, net: nn.Module | None = None, **changes: Any) -> Problem:
        """Classification with BatchNorm and dropout of a fixed rate; tunes two weight decays.

        Returns:
            A problem with a network of 43 weights.
        """

        def inner_loss(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1]) + (hyper["decay"] * l2(model.params)[..., None]).sum(-1)

        def outer_loss(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        net = Network() if net is None else net
        settings: dict[str, Any] = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        settings["hyper"] = {"decay": positive([0.01, 0.1])}
        return Problem(net.to(self.device, dtype), **(settings | changes))

    def batch(self, dtype: torch.dtype = torch.float64) -> Batch:
        """Twelve examples with three features and two classes."""
        x = torch.linspace(-2, 2, 36, device=self.device, dtype=dtype).reshape(12, 3).sin()
        return x, (x.sum(1) > 0).long()

    def method_for(self, problem: Problem) -> Method:
        """The method; without a network there are no examples to perturb, and it perturbs the batch."""
        if problem.module is None and isinstance(self.method, Hypernetwork):
            return dataclasses.replace(self.method, perturb="batch")
        return self.method

    def solver(self, problem: Problem, **changes: Any) -> Solver:
        """A solver with plain gradient descent on both levels."""
        settings: dict[str, Any] = {"inner_optimizer": _sgd, "outer_optimizer": _sgd}
        settings["method"] = self.method_for(problem)
        return Solver(problem, **(settings | changes))

    def trained(self, steps: int = 20, **changes: Any) -> Solver:
        """A solver of :meth:`quadratic` after some inner steps, so that its derivative is not trivial."""
        solver = self.solver(self.quadratic(**changes))
        for _ in range(steps):
            solver.inner_step()
        return solver

    def trained_network(self, steps: int = 3, **changes: Any) -> Solver:
        """A solver of :meth:`network` after some inner steps."""
        solver = self.solver(self.network(**changes))
        for _ in range(steps):
            solver.inner_step(self.batch())
        return solver


class Network(nn.Module):
    """A network whose passes leave traces: BatchNorm statistics, dropout, the mode of every call."""

    def __init__(self) -> None:
        """Draw the weights from a generator of its own."""
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        """Predict logits."""
        self.modes.append(self.training)
        hidden: Tensor = F.dropout(torch.tanh(self.norm(self.first(x))), 0.2, self.training)
        logits: Tensor = self.last(hidden)
        return logits


Check = Callable[[Case], None]
_CHECKS: dict[str, Check] = {}
CHECKS: Mapping[str, Check] = MappingProxyType(_CHECKS)
"""Every check by name."""


def check_method(method: str | Method, *, device: str | torch.device = "cpu") -> Report:
    """Run the contract that every method must keep, on small problems.

    Args:
        method: A name in ``bilevel.METHODS``, or your own instance.
        device: Where to run.

    Returns:
        The report, if all checks passed.

    Raises:
        AssertionError: With the report, if one failed.

    Example:
        >>> report = check_method("delta_stn")
        >>> len(report.passed) >= 40, report.failed
        (True, {})
    """
    case = Case(get_method(method), torch.device(device))
    passed, failed = [], {}
    for name, function in CHECKS.items():
        try:
            function(case)
        except Exception as error:  # a check may fail in any way; the report says how
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            passed.append(name)
    report = Report(case.method, passed, failed)
    if failed:
        raise AssertionError(str(report))
    return report


def quadratic_parts() -> tuple[Tensor, Tensor, Tensor]:
    """The matrices A, B and the target c of :meth:`Case.quadratic`."""
    a = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.2], [0.0, 0.2, 1.5]], dtype=torch.float64)
    b = torch.tensor([[1.0, 0.2], [-0.5, 1.0], [0.3, -0.7]], dtype=torch.float64)
    return a, b, torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _check(function: Check) -> Check:
    _CHECKS[function.__name__.removeprefix("_")] = function
    return function


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _same(first: Any, second: Any) -> bool:
    """Bit-for-bit equality of nested dicts, lists and tensors."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def _flat(params: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in params.values()])


def _directions(solver: Solver) -> tuple[Tensor, Tensor]:
    """Two fixed directions in the space of the hyperparameters."""
    size = solver.vector.numel()
    u = torch.linspace(1, 2, size).to(solver.vector)
    return u, u.flip(0).cos()


def _codirections(solver: Solver) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two fixed directions in the space of the weights."""
    u = {name: torch.linspace(-1, 2, w.numel()).to(w).reshape(w.shape) for name, w in solver.params.items()}
    return u, {name: value.sin() for name, value in u.items()}


def _train(solver: Solver, batch: Any = None) -> Any:
    """What an outer step takes to train on: a batch, or one for each step that the method makes."""
    count = solver.response.unrolled_steps
    return [batch] * count if count else batch


def _jvp(solver: Solver, tangent: Tensor) -> dict[str, Tensor]:
    return solver.response.jvp(solver.vector, tangent, _train(solver))


def _vjp(solver: Solver, cotangent: Mapping[str, Tensor]) -> Tensor:
    return solver.response.vjp(solver.vector, cotangent, _train(solver))


def _jacobian(solver: Solver) -> Tensor:
    return solver.response.jacobian(solver.vector, _train(solver))


def _outer_noise(solver: Solver) -> Tensor:
    """The perturbation that the next outer step will draw; the solver is left as it was."""
    scale = solver.response.scale
    if scale is None or not scale.perturb_outer:
        return torch.zeros_like(solver.vector)
    state = solver.state_dict()
    with torch.no_grad(), solver.streams["loss"]():
        noise = scale.sample()
    solver.load_state_dict(state)
    return noise


def _run(solver: Solver, batch: Any, rounds: int = 3) -> list[OuterStep]:
    steps = []
    for _ in range(rounds):
        for _ in range(2):
            solver.inner_step(batch)
        steps.append(solver.outer_step(_train(solver, batch), batch))
    return steps


@_check
def _settings_are_immutable(case: Case) -> None:
    settings: Any = copy.deepcopy(case.method)
    names = [entry.name for entry in dataclasses.fields(settings)] if dataclasses.is_dataclass(settings) else []
    for name in [*names, "anything"]:
        try:
            setattr(settings, name, None)
        except AttributeError:
            continue
        raise AssertionError("settings could be changed: use @dataclass(frozen=True)")


@_check
def _settings_equal_their_copies(case: Case) -> None:
    _expect(copy.deepcopy(case.method) == case.method, "a copy does not compare equal")


@_check
def _settings_print_their_values(case: Case) -> None:
    _expect(" at 0x" not in repr(case.method), f"repr is an address: {case.method!r}")
    _expect(type(case.method).__name__ in repr(case.method), f"repr lacks the name: {case.method!r}")


@_check
def _settings_survive_a_run(case: Case) -> None:
    before = repr(case.method)
    _run(case.solver(case.quadratic()), None)
    _expect(repr(case.method) == before, "a run changed the settings")


@_check
def _binding_gives_a_best_response(case: Case) -> None:
    problem = case.quadratic()
    _expect(isinstance(case.method_for(problem).bind(problem), BestResponse), "bind must return a BestResponse")


@_check
def _two_bindings_share_nothing(case: Case) -> None:
    problem = case.network()
    first, second = case.method.bind(problem), case.method.bind(problem)
    shared = {p.data_ptr() for p in first.parameters()} & {p.data_ptr() for p in second.parameters()}
    _expect(not shared, "two responses share parameters")


@_check
def _value_starts_at_the_users_weights(case: Case) -> None:
    problem = case.network()
    for name, value in case.solver(problem).params.items():
        _close(value, problem.params[name].detach(), 1e-12)


@_check
def _value_has_the_names_and_shapes_of_the_weights(case: Case) -> None:
    problem = case.network()
    value = case.solver(problem).params
    expected = {name: w.shape for name, w in problem.params.items()}
    _expect({name: w.shape for name, w in value.items()} == expected, "names or shapes differ")


@_check
def _value_is_a_copy(case: Case) -> None:
    solver = case.trained()
    solver.params["w"].zero_()
    _expect(bool(solver.params["w"].any()), "writing to solver.params changed the solver")


@_check
def _value_agrees_with_forward(case: Case) -> None:
    solver = case.trained()
    _close(_flat(solver.response(solver.vector.detach()).params).detach(), _flat(solver.params), 1e-12)


@_check
def _value_keeps_the_device(case: Case) -> None:
    _expect(case.trained().params["w"].device.type == case.device.type, "weights moved to another device")


@_check
def _model_predicts_with_its_params(case: Case) -> None:
    net = Network()
    solver = case.trained_network(net=net)
    net.eval()
    model = solver.response(solver.vector.detach())
    net.load_state_dict(solver.module_state_dict)
    _close(model(case.batch()[0]).detach(), net(case.batch()[0]).detach(), 1e-12)


@_check
def _jvp_has_the_names_and_shapes_of_the_weights(case: Case) -> None:
    solver = case.trained_network()
    tangent = solver.response.jvp(solver.vector, _directions(solver)[0], _train(solver, case.batch()))
    _expect({n: t.shape for n, t in tangent.items()} == {n: w.shape for n, w in solver.params.items()}, "shapes differ")


# Methods that solve a linear system approximately are linear only up to its tolerance.
SOLVED = 1e-5


@_check
def _jvp_is_linear(case: Case) -> None:
    solver = case.trained()
    u, v = _directions(solver)
    parts = [_flat(_jvp(solver, direction)) for direction in (u, v, 2 * u - 3 * v)]
    _close(parts[2], 2 * parts[0] - 3 * parts[1], SOLVED)


@_check
def _vjp_is_linear(case: Case) -> None:
    solver = case.trained()
    u, v = _codirections(solver)
    mixed = {name: 2 * u[name] - 3 * v[name] for name in u}
    parts = [_vjp(solver, direction) for direction in (u, v, mixed)]
    _close(parts[2], 2 * parts[0] - 3 * parts[1], SOLVED)


@_check
def _vjp_has_the_shape_of_the_hyperparameters(case: Case) -> None:
    solver = case.trained_network()
    _expect(
        solver.response.vjp(solver.vector, solver.params, _train(solver, case.batch())).shape == solver.vector.shape,
        "shape differs",
    )


@_check
def _jvp_and_vjp_are_adjoint(case: Case) -> None:
    solver = case.trained()
    v, u = _directions(solver)[0], _codirections(solver)[0]
    forward = _flat(_jvp(solver, v)) @ _flat(u)
    _close(forward, _vjp(solver, u) @ v, SOLVED)


@_check
def _jacobian_columns_are_jvps(case: Case) -> None:
    solver = case.trained()
    v = _directions(solver)[0]
    _close(
        _jacobian(solver) @ v,
        _flat(_jvp(solver, v)),
        SOLVED,
    )


@_check
def _jacobian_rows_are_vjps(case: Case) -> None:
    solver = case.trained()
    u = _codirections(solver)[0]
    _close(
        _jacobian(solver).T @ _flat(u),
        _vjp(solver, u),
        SOLVED,
    )


@_check
def _jacobian_has_a_row_per_weight(case: Case) -> None:
    solver = case.trained()
    _expect(
        _jacobian(solver).shape == (3, 2),
        "the shape must be (weights, hyperparameters)",
    )


@_check
def _jacobian_is_finite_and_not_zero(case: Case) -> None:
    solver = case.trained()
    jacobian = _jacobian(solver)
    _expect(bool(jacobian.isfinite().all()) and bool(jacobian.any()), "the response has no derivative")


@_check
def _jacobian_points_the_right_way(case: Case) -> None:
    a, b, _ = (part.to(case.device) for part in quadratic_parts())
    solver = case.trained(1000)
    exact, ours = -torch.linalg.solve(a, b).flatten(), _jacobian(solver).flatten()
    cosine = F.cosine_similarity(exact, ours, dim=0)
    _expect(float(cosine) > 0.5, f"cosine {float(cosine):.2f} with the implicit function theorem on a quadratic")


@_check
def _derivatives_leave_the_state_alone(case: Case) -> None:
    solver = case.trained()
    before = solver.state_dict()
    _jacobian(solver)
    _vjp(solver, solver.params)
    _expect(_same(before, solver.state_dict()), "jvp or vjp changed the solver")


@_check
def _autograd_through_forward_is_the_vjp(case: Case) -> None:
    solver = case.trained()
    leaf = solver.vector.detach().clone().requires_grad_()
    u = _codirections(solver)[0]
    (gradient,) = torch.autograd.grad(_flat(solver.response(leaf, _train(solver)).params) @ _flat(u), leaf)
    _close(gradient, _vjp(solver, u))


@_check
def _hypergradient_is_direct_plus_response(case: Case) -> None:
    solver = case.trained()
    c = quadratic_parts()[2].to(case.device)
    noise, center = _outer_noise(solver), solver.vector.detach().clone()
    with torch.no_grad():
        w = solver.response(center + noise, _train(solver), center).params["w"]
    response = solver.response.vjp(center, {"w": w - c}, _train(solver))
    step = solver.outer_step()
    _close(step.hypergradient, step.direct + response)


@_check
def _direct_gradient_has_its_closed_form(case: Case) -> None:
    solver = case.trained()
    expected = 2 * (solver.vector.detach() + _outer_noise(solver))
    _close(solver.outer_step().direct, expected)


@_check
def _direct_gradient_is_zero_without_dependence(case: Case) -> None:
    solver = case.trained_network()
    _expect(
        not solver.outer_step(_train(solver, case.batch()), case.batch()).direct.any(),
        "the outer loss does not depend on λ directly",
    )


@_check
def _hypergradient_is_flat_and_keeps_dtype(case: Case) -> None:
    solver = case.trained()
    step = solver.outer_step()
    _expect(step.hypergradient.shape == solver.vector.shape, "shape differs from the vector of hyperparameters")
    _expect(step.hypergradient.dtype == torch.float64, "dtype changed")


@_check
def _outer_step_follows_its_optimizer(case: Case) -> None:
    solver = case.trained()
    before = solver.vector.detach().clone()
    step = solver.outer_step()
    _close(solver.vector.detach(), before - 0.1 * step.hypergradient)


@_check
def _outer_step_clips_to_its_limit(case: Case) -> None:
    solver = case.solver(case.quadratic(), outer_clip=1e-3)
    solver.inner_step()
    before = solver.vector.detach().clone()
    solver.outer_step()
    _expect(
        float((solver.vector.detach() - before).norm()) <= 0.1 * 1e-3 * 1.001, "the step is longer than clipping allows"
    )


@_check
def _outer_step_counts(case: Case) -> None:
    solver = case.trained(2)
    solver.outer_step()
    _expect(
        (solver.inner_steps, solver.outer_steps) == (2 + solver.response.unrolled_steps, 1), "steps are not counted"
    )


@_check
def _inner_step_returns_the_loss(case: Case) -> None:
    loss = case.solver(case.quadratic()).inner_step()
    _expect(loss.ndim == 0 and not loss.requires_grad and bool(loss.isfinite()), "the loss must be a detached scalar")


@_check
def _inner_steps_reduce_the_inner_loss(case: Case) -> None:
    solver = case.trained(0)
    problem = solver.problem
    before = problem.inner_loss(solver.response.inner.model(solver.params), solver.vector.detach(), None).value
    for _ in range(200):
        solver.inner_step()
    after = problem.inner_loss(solver.response.inner.model(solver.params), solver.vector.detach(), None).value
    _expect(float(after) < float(before), f"the inner loss went from {float(before):g} to {float(after):g}")


@_check
def _inner_step_leaves_the_hyperparameters(case: Case) -> None:
    solver = case.solver(case.quadratic())
    before = solver.vector.detach().clone()
    solver.inner_step()
    _expect(torch.equal(before, solver.vector), "an inner step moved the hyperparameters")


@_check
def _inner_step_trains_every_weight(case: Case) -> None:
    solver = case.trained_network(0)
    before = solver.params
    for _ in range(2):
        solver.inner_step(case.batch())
    _expect(not any(torch.equal(before[name], value) for name, value in solver.params.items()), "a weight did not move")


@_check
def _no_gradient_is_left_behind(case: Case) -> None:
    solver = case.trained(1)
    solver.outer_step()
    left = [p for p in [*solver.response.parameters(), solver.vector] if p.grad is not None]
    _expect(not left, "parameters keep their .grad after a step")


@_check
def _solve_lowers_the_outer_loss(case: Case) -> None:
    start = case.solver(case.quadratic())
    method = case.method_for(start.problem)
    settings: dict[str, Any] = {"method": method, "inner_optimizer": _sgd, "progress": False}
    for _ in range(300):
        start.inner_step()
    solution = solve(case.quadratic(), steps=300, warmup=20, **settings)
    _expect(solution.solver.evaluate() < start.evaluate(), "tuning did not lower the outer loss")


@_check
def _same_seed_gives_the_same_run(case: Case) -> None:
    first, second = (case.solver(case.network(), seed=3) for _ in range(2))
    for solver in (first, second):
        _run(solver, case.batch())
    _expect(_same(first.state_dict(), second.state_dict()), "two runs with one seed differ")


@_check
def _another_seed_gives_another_run(case: Case) -> None:
    first, second = (case.solver(case.network(), seed=seed) for seed in (3, 4))
    for solver in (first, second):
        _run(solver, case.batch())
    _expect(not torch.equal(_flat(first.params), _flat(second.params)), "the seed has no effect on dropout")


@_check
def _state_dict_continues_bit_for_bit(case: Case) -> None:
    first, second = (
        case.solver(case.network(), inner_optimizer=torch.optim.Adam, outer_clip=1.0, seed=s) for s in (1, 2)
    )
    _run(first, case.batch())
    second.load_state_dict(first.state_dict())
    for solver in (first, second):
        _run(solver, case.batch())
    _expect(_same(first.state_dict(), second.state_dict()), "the continued run differs")


@_check
def _state_dict_survives_a_safe_file(case: Case) -> None:
    solver, file = case.trained(), io.BytesIO()
    torch.save(solver.state_dict(), file)
    file.seek(0)
    _expect(_same(torch.load(file, weights_only=True), solver.state_dict()), "the state changed in the file")


@_check
def _state_dict_is_a_copy(case: Case) -> None:
    solver = case.trained()
    state = solver.state_dict()
    kept = copy.deepcopy(state)
    _run(solver, None)
    _expect(_same(state, kept), "a state_dict taken earlier changed with the run")


@_check
def _global_random_state_is_untouched(case: Case) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(20201117)
        before = torch.get_rng_state()
        _run(case.solver(case.network()), case.batch())
        solve(case.quadratic(), method=case.method_for(case.quadratic()), steps=2, progress=False)
        _expect(torch.equal(before, torch.get_rng_state()), "the user's random state changed")


@_check
def _users_module_is_untouched(case: Case) -> None:
    net = Network()
    before = copy.deepcopy(net.to(case.device, torch.float64).state_dict())
    _run(case.solver(case.network(net=net)), case.batch())
    _expect(_same(before, net.state_dict()), "parameters or buffers of the user's module changed")
    _expect(all(p.grad is None for p in net.parameters()), "gradients were left in the user's module")


@_check
def _users_tensors_are_untouched(case: Case) -> None:
    inner = {"w": torch.ones(3, dtype=torch.float64, device=case.device)}
    _run(case.solver(case.quadratic(inner=inner)), None)
    _expect(bool((inner["w"] == 1).all()) and not inner["w"].requires_grad, "the user's tensor changed")


@_check
def _users_batch_is_untouched(case: Case) -> None:
    batch = case.batch()
    before = tuple(part.clone() for part in batch)
    _run(case.solver(case.network()), batch)
    _expect(_same(before, batch), "the batch changed")


@_check
def _modes_are_train_inside_and_eval_outside(case: Case) -> None:
    net = Network()
    solver = case.solver(case.network(net=net))
    solver.inner_step(case.batch())  # the first one may look at the network in eval mode, too
    net.modes.clear()
    solver.inner_step(case.batch())
    _expect(all(net.modes), "an inner pass ran in eval mode")
    net.modes.clear()
    solver.evaluate([case.batch()])
    _expect(not any(net.modes), "an evaluation ran in train mode")


@_check
def _modes_are_restored(case: Case) -> None:
    net = Network()
    net.norm.eval()
    _run(case.solver(case.network(net=net)), case.batch())
    _expect(net.training and net.first.training and not net.norm.training, "mode flags of the user's module changed")


@_check
def _statistics_are_updated_once_per_inner_step(case: Case) -> None:
    solver = case.trained_network(4)
    count = int(solver.module_state_dict["norm.num_batches_tracked"])
    _expect(count == 4, f"BatchNorm saw {count} batches in 4 inner steps")


@_check
def _statistics_ignore_evaluation(case: Case) -> None:
    solver = case.trained_network(net=Network(), outer_mode="train")
    before = solver.module_state_dict
    solver.evaluate([case.batch()])
    _expect(_same(before, solver.module_state_dict), "an evaluation changed the BatchNorm statistics")


@_check
def _frozen_parameters_stay(case: Case) -> None:
    net = Network().to(case.device, torch.float64)
    net.first.weight.requires_grad_(False)
    solver = case.solver(case.network(net=net))
    _run(solver, case.batch())
    _expect("first.weight" not in solver.params, "a frozen parameter is trained")
    _expect(torch.equal(solver.module_state_dict["first.weight"], net.first.weight), "a frozen parameter changed")


@_check
def _tied_parameters_stay_tied(case: Case) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    net[2].weight = net[0].weight
    solver = case.solver(case.network(net=net))
    _run(solver, case.batch())
    state = solver.module_state_dict
    _expect(torch.equal(state["0.weight"], state["2.weight"]) and "2.weight" not in solver.params, "the tie is broken")
    net.load_state_dict(state)


@_check
def _state_loads_into_the_users_module(case: Case) -> None:
    net = Network().to(case.device, torch.float64)
    solver = case.solver(case.network(net=net))
    _run(solver, case.batch())
    net.load_state_dict(solver.module_state_dict, strict=True)
    net.eval()
    loss = F.cross_entropy(net(case.batch()[0]), case.batch()[1]).detach()
    _expect(abs(float(loss) - solver.evaluate([case.batch()])) < 1e-9, "the loaded module predicts something else")


@_check
def _nested_outputs_work(case: Case) -> None:
    class Nested(Network):
        def forward(self, x: Tensor) -> Any:
            logits = super().forward(x)
            return {"logits": (logits, [logits.argmax(1)]), "name": "nested"}

    def nested(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0])["logits"][0], batch[1]) + hyper["decay"].sum(-1) * l2(model.params)

    def plain(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + hyper["decay"].sum(-1) * l2(model.params)

    steps = [
        _run(case.solver(case.network(net=net, inner_loss=loss, outer_loss=loss), outer_clip=1.0), case.batch())[-1]
        for net, loss in ((Nested(), nested), (Network(), plain))
    ]
    _close(steps[0].hypergradient, steps[1].hypergradient, 1e-12)


@_check
def _losses_per_example_are_averaged(case: Case) -> None:
    def loss(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + (
            hyper["decay"] * l2(model.params)[..., None]
        ).sum(-1)

    def plain(model: Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return loss(model, hyper, batch).mean()

    solvers = [case.solver(case.network(inner_loss=f, outer_loss=f), outer_clip=1.0) for f in (loss, plain)]
    for solver in solvers:
        _run(solver, case.batch())
    _close(_flat(solvers[0].params), _flat(solvers[1].params), 1e-12)


@_check
def _aux_is_passed_on(case: Case) -> None:
    def loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, str]:
        return (model.params["w"] - hyper["x"].sum()).square().sum(), "seen"

    solver = case.solver(case.quadratic(inner_loss=loss, outer_loss=loss))
    step = _run(solver, None)[-1]
    _expect((solver.inner_aux, step.aux) == ("seen", "seen"), "aux was lost")


@_check
def _single_precision_is_kept(case: Case) -> None:
    solver = case.solver(case.network(dtype=torch.float32))
    step = _run(solver, case.batch(torch.float32))[-1]
    kinds = {value.dtype for value in [*solver.params.values(), solver.vector, step.hypergradient, step.loss]}
    _expect(kinds == {torch.float32}, f"dtypes after a run: {kinds}")


@_check
def _hyperparameters_of_any_shape_work(case: Case) -> None:
    def loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
        return (model.params["w"] - hyper["x"].sum(0)).square().sum() + hyper["y"] * model.params["w"].square().sum()

    hyper = {"x": real(torch.zeros(2, 3)), "y": positive(1.0)}
    slow = partial(torch.optim.SGD, lr=1e-3)
    problem = case.quadratic(inner_loss=loss, outer_loss=loss, hyper=hyper)
    solver = case.solver(problem, inner_optimizer=slow, outer_optimizer=slow)
    _run(solver, None)
    _expect(solver.hyper["x"].shape == (2, 3) and solver.hyper["y"].shape == (), "a hyperparameter lost its shape")


def _expect_divergence(case: Case, broken: str, words: list[str]) -> None:
    """A loss that becomes NaN with a batch raises, and leaves the state of the last good step."""

    def scaled(problem: Problem, name: str) -> Any:
        loss = problem.user_losses[name]
        return lambda model, hyper, batch: loss(model, hyper, batch) * batch

    plain = case.quadratic()
    solver = case.solver(case.quadratic(**{name: scaled(plain, name) for name in ("inner_loss", "outer_loss")}))
    good = torch.ones((), dtype=torch.float64, device=case.device)
    bad = {name: good * float("nan") if name == broken else good for name in ("inner_loss", "outer_loss")}
    for _ in range(2):
        solver.inner_step(good)
        solver.outer_step(_train(solver, good), good)
    before = solver.state_dict()
    try:
        if broken == "inner_loss":
            solver.inner_step(bad["inner_loss"])
        solver.outer_step(_train(solver, good), bad["outer_loss"])
    except DivergenceError as error:
        _expect(all(word in str(error) for word in words), f"the message lacks one of {words}: {error}")
    else:
        raise AssertionError("a NaN loss was passed on")
    _expect(_same(before, solver.state_dict()), "the failed step changed the solver")


@_check
def _nan_in_the_inner_loss_is_reported(case: Case) -> None:
    _expect_divergence(case, "inner_loss", ["inner loss", "nan", "inner step"])


@_check
def _nan_in_the_outer_loss_is_reported(case: Case) -> None:
    _expect_divergence(case, "outer_loss", ["outer loss", "nan", "outer step"])


def _expect_refusal(case: Case, broken: str) -> None:
    def loss(model: Model, hyper: Mapping[str, Tensor], batch: Any) -> Tensor:
        return torch.ones((), dtype=torch.float64, device=case.device)

    solver = case.solver(case.quadratic(**{broken: loss}))
    try:
        solver.inner_step()
        solver.outer_step()
    except ValueError as error:
        _expect(broken in str(error), f"the message does not name {broken}: {error}")
    else:
        raise AssertionError(f"an {broken} that depends on nothing was accepted")


@_check
def _inner_loss_without_weights_is_refused(case: Case) -> None:
    _expect_refusal(case, "inner_loss")


@_check
def _outer_loss_without_variables_is_refused(case: Case) -> None:
    _expect_refusal(case, "outer_loss")
