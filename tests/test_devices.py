"""Devices other than the CPU: a pretended one always, CUDA where it is there.

Two things go wrong on a GPU that no test on a CPU sees. A tensor made on the host meets tensors of the device, which
raises; and the host reads a value, which makes it wait until the device has finished everything before.
"""

import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import pretend_device
import pytest
import torch
from pretend_device import DeviceMixError
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import bilevel
from bilevel import DeltaSTN, Unrolled, augment, checkpoint
from bilevel.response import get_method
from bilevel.response.hypernetwork import Hypernetwork
from bilevel.testing import CHECKS, Case

if not torch.cuda.is_available():
    pretend_device.install()

METHODS = bilevel.METHODS | {
    "learned scale": DeltaSTN(entropy=1e-3),
    "one perturbation per batch": DeltaSTN(perturb="batch"),
    "checkpoints": Unrolled(steps=4, checkpoint=True, restart=True),
    # Twenty steps on a matrix that is nearly singular would make much of the last digit, in which devices differ.
    "implicit_cg": bilevel.Implicit(bilevel.CG(max_steps=20, rtol=0.0, damping=1.0), curvature="gauss_newton"),
}
WITH_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is better")
INSIDE = {"implicit_nystrom": 2}
"""Waits of PyTorch's own: two calls of ``torch.linalg.eigh``, whose CUDA kernel reads an error code."""
OPAQUE = str | bilevel.solver.OuterStep | None
NOT_IN_PYTHON = {
    "state_dict_survives_a_safe_file": "torch.load onto the device needs an allocator, which must be C++",
    "tied_parameters_stay_tied": "Module.to replaces the parameters of a foreign backend and so unties them itself",
}


@pytest.fixture(params=[pytest.param("pretend", marks=WITHOUT_CUDA), pytest.param("cuda", marks=WITH_CUDA)])
def device(request):
    if request.param == "cuda":
        yield torch.device("cuda")
    else:
        with pretend_device.pretend() as device:
            yield device


@contextmanager
def waits(device):
    """The places where the host waits for the device inside the block."""
    if device.type != "cuda":
        with pretend_device.waits() as found:
            yield found
        return
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.extend(str(entry.message) for entry in caught if "synchronizing" in str(entry.message))


class Network(nn.Module):
    """Convolution, batch norm, dropout."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(36, 3)

    def forward(self, x, rate):
        hidden = torch.tanh(self.norm(self.conv(x))).flatten(1)
        return self.out(bilevel.functional.dropout(hidden, rate, training=self.training))


@dataclass
class Run:
    """A solver on some device, and its batches, which a loader would leave on the host."""

    solver: bilevel.Solver
    batches: list

    def inner_step(self):
        return self.solver.inner_step(self.batches[0])

    def outer_step(self):
        count = self.solver.response.unrolled_steps
        return self.solver.outer_step([self.batches[1]] * count if count else self.batches[1], self.batches[2])


def make_run(name, device, extra=lambda value: value, **options):
    """A classification problem in which every part of the library has something to do."""
    method = METHODS[name]
    learned = isinstance(method, Hypernetwork)
    hyper = {"decay": bilevel.positive([1e-3, 1e-2]), "noise": bilevel.positive(0.1)}
    if learned:
        hyper |= {"rate": bilevel.interval(0.0, 0.9, init=0.2), "holes": bilevel.integer(0, 4, init=1)}

    def inner_loss(model, hyper, batch):
        x = bilevel.functional.gaussian_noise(batch[0], hyper["noise"])
        logits = model(x, hyper["rate"] if learned else 0.1)
        penalty = hyper["decay"][..., 0] * bilevel.l2(model.params) + hyper["decay"][..., 1] * bilevel.l2([
            model.params["out.weight"]
        ])
        if learned:
            penalty = penalty + 1e-3 * hyper["holes"]
        return extra(F.cross_entropy(logits, batch[1], reduction="none") + penalty)

    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(8, 1, 5, 5, dtype=torch.float64, generator=generator),
            torch.randint(3, (8,), generator=generator),
        )
        for _ in range(3)
    ]
    problem = bilevel.Problem(
        Network().double().to(device),
        inner_loss=inner_loss,
        outer_loss=lambda model, hyper, batch: F.cross_entropy(model(batch[0], 0.0), batch[1]),
        hyper=hyper,
    )
    return Run(bilevel.Solver(problem, method=method, **options), batches)


def everything(name, device, folder, **options):
    """What the public methods of a solver return, moved to the host."""
    run = make_run(name, device, **options)
    results = [run.inner_step(), run.outer_step(), run.inner_step()]
    state = run.solver.state_dict()
    checkpoint.save(folder / "state", state)
    results += [run.solver.evaluate(run.batches), run.outer_step(), run.solver.params]
    run.solver.load_state_dict(checkpoint.load(folder / "state"))
    results += [run.outer_step(), run.inner_step(), run.solver.hyper, run.solver.module_state_dict]
    run.solver.restart()
    results += [run.inner_step(), run.solver.state_dict()]
    run.solver.check()
    steps = [step for step in results if isinstance(step, bilevel.solver.OuterStep)]
    parts = [[step.loss, step.hypergradient, step.direct, step.report, step.inner_losses] for step in steps]
    leaves = [torch.as_tensor(leaf) for leaf in pytree.tree_leaves([results, parts]) if not isinstance(leaf, OPAQUE)]
    # Random states are bytes: there are more of them where there are two generators.
    return [leaf.cpu() for leaf in leaves if leaf.dtype != torch.uint8]


def quiet(name, options, device):
    """No wait in an inner step, one in an outer step, once every kind of batch has been seen."""
    run = make_run(name, device, **options)
    run.inner_step()
    run.outer_step()
    with waits(device) as found:
        run.inner_step()
        run.inner_step()
    assert found == []
    with waits(device) as found:
        run.outer_step()
    assert len(found) <= 1 + INSIDE.get(name, 0), found
    return run


@pytest.mark.parametrize("name", METHODS)
def test_a_solver_runs_on_a_device(name, device, tmp_path):
    """Steps, evaluation, states and files; no tensor of the host is mixed in. The numbers are those of the CPU."""
    found, expected = everything(name, device, tmp_path), everything(name, "cpu", tmp_path)
    assert [value.shape for value in found] == [value.shape for value in expected]
    if device.type == "pretend":  # whose random numbers are those of the CPU
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_the_host_waits_once_per_outer_step(name, device):
    """And never in between: the device always has work. An evaluation waits once, and so does a saved state."""
    run = quiet(name, {}, device)
    with waits(device) as found:
        run.solver.evaluate([run.solver.to_device(batch) for batch in run.batches])
    assert len(found) == 1, found
    with waits(device) as found:
        run.solver.state_dict()
    assert len(found) == 1, found


@pytest.mark.parametrize("name", ["delta_stn", "learned scale", "implicit_cg", "checkpoints"])
def test_clipping_and_momentum_wait_for_nothing(name, device):
    options = {"inner_clip": 1.0, "outer_clip": 0.1}
    quiet(name, options | {"inner_optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)}, device)
    quiet(name, options | {"outer_optimizer": lambda params: torch.optim.Adam(params, lr=0.1)}, device)


@pytest.mark.parametrize("strength", ["numbers", "one", "each"])
def test_augmentations(strength, device):
    """On the device, without waiting, with the same result as on the CPU."""
    values = dict(
        zip(augment.changes.NAMES, [0.1, 0.2, 20.0, 10.0, 0.5, 0.3, 0.3, 0.3, 0.2, 0.1, 2.0, 3.0], strict=True)
    )

    def change(where):
        torch.manual_seed(0)
        x = torch.linspace(0, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8).to(where)
        strengths = values
        if strength != "numbers":
            shape = () if strength == "one" else (4,)
            strengths = {name: torch.full(shape, value, device=where) for name, value in values.items()}
        fill = 0.5 if strength == "numbers" else torch.tensor([0.1, 0.5, 0.9]).to(where)
        with waits(device) as found:
            result = augment.apply(x, strengths, fill=fill)
        assert found == []
        return result

    with torch.random.fork_rng():
        changed, expected = change(device), change("cpu")
    assert changed.device.type == device.type
    if device.type == "pretend":
        torch.testing.assert_close(changed.cpu(), expected)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("number", [False, True])
def test_functional(number, each, device):
    """Strengths may be numbers, scalars or one per example; nothing waits, and results are those of the CPU."""
    f = bilevel.functional

    def results(where):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 24).reshape(4, 6).to(where)
        tokens = torch.tensor([[0, 1], [2, 2], [3, 0], [1, 1]]).to(where)
        y, vectors = torch.tensor([0, 1, 2, 3]).to(where), x.reshape(4, 2, 3)
        strength = 0.3 if number else torch.full((4,) if each else (), 0.3, device=where)
        with waits(device) as found:
            values = [
                f.dropout(x, strength),
                f.dropout(x, strength, shared_dims=1),
                f.embedding_dropout(tokens, vectors, strength, size=4),
                f.drop_connect(x, 0.3 if number else strength.flatten()[0]),
                f.gaussian_noise(x, strength),
                f.cross_entropy(x, y, label_smoothing=strength, ignore_index=3),
                f.mse_loss(x, x.square()),
                f.temperature(x, strength),
                x * f.per_example(strength, x),
                f.l1([x]),
                f.l2([x]),
            ]
        assert found == []
        return values

    with torch.random.fork_rng():
        found, expected = results(device), results("cpu")
    assert {value.device.type for value in found} == {device.type}
    if device.type == "pretend":
        torch.testing.assert_close([value.cpu() for value in found], expected)


@pytest.mark.parametrize("method", ["delta_stn", "implicit_cg"])
def test_solve(method, device):
    """The whole loop, with a loader that leaves its batches on the host."""
    run = make_run(method, device)
    solution = bilevel.solve(
        run.solver.problem, run.batches, run.batches[:1], method=method, steps=3, warmup=1, progress=False
    )
    assert all(value.device.type == device.type for value in solution.hyper.values())
    assert len(solution.history.rows) == 3


@WITH_CUDA
@pytest.mark.parametrize("name", bilevel.METHODS)
def test_the_contract_holds_on_cuda(name):
    bilevel.check_method(name, device="cuda")


@pytest.mark.slow
@WITHOUT_CUDA
@pytest.mark.parametrize("check", [name for name in CHECKS if name not in NOT_IN_PYTHON])
@pytest.mark.parametrize("name", bilevel.METHODS)
def test_the_contract_holds_on_a_pretended_device(name, check):
    """What :func:`bilevel.check_method` asks for, as far as a device in Python goes."""
    with pretend_device.pretend() as device:
        CHECKS[check](Case(get_method(name), device))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: int(x.argmax()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[x.argmax()],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: torch.linalg.eigh(x[:, None] * x),
        lambda x: torch.tensor(1.0, device=x.device),
        lambda x: torch.ones(3).to(x),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.autograd.grad(_Reading.apply(x.requires_grad_()).sum(), x),
    ],
)
def test_what_waits_is_counted(read, device):
    """One for each way to wait; the backward pass of a device has a thread of its own."""
    x = torch.arange(3.0, device=device)
    with waits(device) as found:
        read(x)
    assert found
    with waits(device) as found:
        torch.where(x > 0, x, 0.0) + torch.tensor(1.0) * x[0] + x[1:].sum() + torch.full((), 2.0, device=device)
        torch.ones(3).to(device, non_blocking=True)
    assert found == []


class _Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(gradient.sum())


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: x @ torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
        lambda x: torch.where(torch.ones(3) > 0, x, 0.0),
        lambda x: F.linear(torch.ones(2, 3), x[None]),
        lambda x: x.add_(torch.ones(3)),
        lambda x: torch.randn(3, device=x.device, generator=torch.Generator()),
    ],
)
def test_a_tensor_of_the_host_is_refused(mix, device):
    """As CUDA does; numbers of the host are welcome in elementwise operations."""
    x = torch.arange(3.0, device=device)
    with pytest.raises((DeviceMixError, RuntimeError), match=r"device|generator"):
        mix(x)
    assert (x * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("name", METHODS)
def test_a_careless_loss_is_caught(name, device):
    """The tests above would notice a read in a step, and a tensor that is made on the host."""

    def reads(loss):
        return loss * float(loss.detach().mean().isfinite())

    with pytest.raises(AssertionError):
        quiet(name, {"extra": reads}, device)
    with pytest.raises(RuntimeError, match="device"):
        make_run(name, device, lambda loss: loss * torch.ones(len(loss), dtype=torch.float64)).inner_step()
