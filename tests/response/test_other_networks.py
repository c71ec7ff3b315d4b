"""Networks and losses of other people: autocast, activation checkpointing, gradient penalties, missing derivatives."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from examples import batches, for_outer_step, inner_loss, make_problem, network, outer_loss, shortened, solve
from problems import assert_equal
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bilevel
from bilevel import DeltaSTN, Implicit, Solver
from bilevel.linear_solvers import LinearSolverError
from bilevel.rng import Stream

LEARNED = ["stn", "centered_stn", "delta_stn"]
CPU = torch.device("cpu")


def autocast(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


class Attentive(nn.Module):
    """Attention over the features, through PyTorch's own function."""

    def __init__(self, kind, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(1, 4), nn.Linear(4, 1)
        make = {"attention": nn.MultiheadAttention, "encoder": nn.TransformerEncoderLayer}[kind]
        self.body = make(4, 2, dropout=dropout, batch_first=True)
        self.call = (lambda x: self.body(x)) if kind == "encoder" else (lambda x: self.body(x, x, x)[0])

    def forward(self, x):
        return self.out(self.call(self.into(x[..., None])).mean(1))


def cast(loss):
    """A loss that computes predictions under autocast."""

    def wrapped(model, hyper, batch):
        with autocast():
            return loss(model, hyper, batch)

    return wrapped


def terms(method, net, where):
    """Every term of the inner loss, and its gradients in what the response learns."""
    inside = cast(inner_loss) if where == "inside" else inner_loss
    problem = make_problem(net, inner_loss=inside)
    response = bilevel.METHODS[method].bind(problem)
    with torch.no_grad(), Stream(0, CPU)():
        for part in response.theta.parameters():
            part.copy_(0.3 * torch.randn(part.shape))
    learned = list(response.parameters())
    found = []
    with Stream(1, CPU)(), autocast() if where == "around" else nullcontext():
        for loss in response.inner_loss(problem.initial_hyper(), batches(1)[0]):
            slopes = torch.autograd.grad(loss.value, learned, allow_unused=True)
            found.append((loss.value.detach(), torch.cat([slope.flatten() for slope in slopes if slope is not None])))
    return found


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("kind", ["attention", "encoder"])
@pytest.mark.parametrize("method", LEARNED)
def test_attention_under_autocast_is_close_to_single_precision(method, kind, where):
    """Values and gradients, up to the two or three digits of bfloat16."""
    full, half = (terms(method, Attentive(kind), place) for place in (None, where))
    assert len(full) == len(half)
    for (value, slope), (other, rounded) in zip(full, half, strict=True):
        torch.testing.assert_close(other, value, rtol=0.02, atol=0.01)
        assert other != value  # it was on
        assert F.cosine_similarity(slope, rounded, dim=0) > 0.99
        torch.testing.assert_close(slope.norm(), rounded.norm(), rtol=0.05, atol=0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of PyTorch's own RMSNorm
@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(1, 4), nn.BatchNorm1d(4).eval()], ids=str
)
def test_a_responding_norm_returns_what_autocast_makes_of_it(norm, linearized):
    net = nn.Sequential(nn.Linear(3, 4), norm)
    seen = []

    def loss(model, hyper, batch):
        with autocast():
            seen.append(model(batch[0]))
        return seen[-1].float().square().mean(1) * (1 + hyper["decay"])

    method = DeltaSTN() if linearized else bilevel.CenteredSTN()
    solve(make_problem(net, inner_loss=loss, outer_loss=loss), method=method, steps=1)
    assert {output.dtype for output in seen} == {torch.bfloat16}
    assert len(seen) > 2


@pytest.mark.parametrize("method", bilevel.METHODS)
def test_autocast_around_a_run_is_autocast_in_its_losses(method):
    """The same run, bit for bit: no cast of old weights is used again, and nothing but the losses is rounded."""
    method, ends = shortened(bilevel.METHODS[method]), []
    for around in (True, False):
        losses = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        if not around:
            losses = {name: cast(loss) for name, loss in losses.items()}
        inner_steps = 0 if isinstance(method, bilevel.Unrolled) else 2
        with autocast(around):
            run = solve(make_problem(**losses), method=method, steps=3, inner_steps=inner_steps)
        ends.append([row | {"seconds": 0} for row in run.history.rows])
    assert ends[0] == ends[1]
    assert len({row["inner_loss"] for row in ends[0]}) == 3  # the weights are trained


@pytest.mark.parametrize("where", ["around", "inside", "inside, on half the digits"])
@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_second_derivatives_are_taken_in_full_precision(curvature, where):
    """With the same dropout masks, to the last bit."""

    def loss(model, hyper, batch):
        with autocast(where != "around"):
            x = batch[0].bfloat16() if on and "half" in where else batch[0].bfloat16().float()
            prediction = model(x)
        return F.mse_loss(prediction, batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    found = []
    for on in (False, True):
        problem = make_problem(network(nn.Dropout(0.3)), inner_loss=loss if on else inner_loss)
        response = Implicit(bilevel.Exact(damping=0.1), curvature=curvature).bind(problem)
        x, y = batches(1)[0]
        with Stream(0, CPU)(), autocast(on and where == "around"):
            found.append(response.jvp(problem.initial_hyper(), torch.ones(1), (x.bfloat16().float(), y)))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])


@pytest.mark.parametrize("method", ["implicit_cg", "implicit_nystrom", "implicit_exact"])
@pytest.mark.parametrize("place", ["around", "inside"])
def test_implicit_methods_with_dropout_run_under_autocast(method, place):
    losses = {"inner_loss": inner_loss, "outer_loss": outer_loss}
    if place == "inside":
        losses = {name: cast(loss) for name, loss in losses.items()}
    settings = bilevel.METHODS[method]
    if method == "implicit_exact":
        settings = Implicit(bilevel.Exact(damping=0.1))
    with autocast(place == "around"):
        solve(make_problem(network(nn.Dropout(0.3)), **losses), method=settings, steps=2)


class Casting(nn.Module):
    """A network that computes in half precision on its own account."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, x):
        with autocast():
            return self.two(torch.tanh(self.one(x))).float()


def test_a_failure_in_half_precision_says_so():
    with pytest.raises(LinearSolverError) as caught:
        solve(make_problem(Casting()), method=bilevel.METHODS["implicit_nystrom"], steps=3)
    assert any("half precision" in note and "implicit_identity" in note for note in caught.value.__notes__)


# RReLU draws as many random numbers as it has negative inputs, so that a check takes it for one that mixes examples.
ACTIVATIONS = sorted({*nn.modules.activation.__all__} - {"MultiheadAttention", "Softmax2d", "RReLU"})
SETTINGS = {"Threshold": (0.1, 0.0), "Softmax": (-1,), "Softmin": (-1,), "LogSoftmax": (-1,)}


@pytest.mark.parametrize("perturb", ["example", "batch"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_runs(name, perturb):
    torch.manual_seed(0)
    layer = getattr(nn, name)(*SETTINGS.get(name, ()))
    net = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(2 if name == "GLU" else 4, 1))
    solve(make_problem(net), method=DeltaSTN(perturb=perturb), steps=1, inner_steps=1)


class Flat(torch.autograd.Function):
    """Without forward mode."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, given):
        return given


class Odd(nn.Module):
    def forward(self, x):
        return Flat.apply(x)


@pytest.mark.parametrize("perturb", ["example", "batch"])
def test_without_forward_mode_the_error_says_which_method_works(perturb):
    net = nn.Sequential(nn.Linear(3, 4), Odd(), nn.Linear(4, 1))
    with pytest.raises(RuntimeError) as caught:
        solve(make_problem(net), method=DeltaSTN(perturb=perturb), steps=1, inner_steps=1)
    assert any("centered_stn" in note for note in [str(caught.value), *getattr(caught.value, "__notes__", [])])
    solve(make_problem(net), method=bilevel.CenteredSTN(perturb=perturb), steps=1, inner_steps=1)


class Checkpointed(nn.Module):
    """A part of the network is not kept but computed again: a module, or a function that reads parameters."""

    def __init__(self, part, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 1)
        self.body, self.weight = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Parameter(torch.randn(4, 4))
        self.part, self.reentrant = part, reentrant

    def forward(self, x):
        function = self.body if self.part == "module" else (lambda x: torch.tanh(F.linear(x, self.weight)))
        return self.two(checkpoint(function, torch.tanh(self.one(x)), use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["module", "function"])
@pytest.mark.parametrize("method", [*bilevel.METHODS, "delta_stn, one perturbation"])
def test_activation_checkpointing_is_refused(method, part, reentrant):
    """It would use the weights of the user's module, which are not the ones that are differentiated."""
    settings = DeltaSTN(perturb="batch") if "," in method else shortened(bilevel.METHODS[method])
    net = Checkpointed(part, reentrant)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    solver = Solver(make_problem(net), method=settings)
    batch = batches(1)[0]
    for step in (lambda: solver.inner_step(batch), lambda: solver.outer_step(for_outer_step(solver, batch), batch)):
        with pytest.raises(RuntimeError) as caught:
            step()
        said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
        assert any("remove the checkpointing from the network" in text for text in said)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net(batch[0])  # its parameters are its own again


@pytest.mark.parametrize("method", bilevel.METHODS)
def test_a_loss_may_read_the_users_own_weights_as_constants(method):
    """As a penalty on the distance from the start does; they are hidden from nothing but repeats."""
    net = network()
    start = {name: value.detach().clone() for name, value in net.named_parameters()}

    def pull(model, hyper, batch, constants):
        far = sum((model.params[name] - value).square().sum() for name, value in constants().items())
        return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * far

    settings = shortened(bilevel.METHODS[method])
    if method in (*LEARNED, "delta_stn_paper"):
        settings = dataclasses.replace(settings, perturb="batch")
    ends = []
    own = {name: value.detach() for name, value in net.named_parameters()}
    for constants in (lambda: {name: value.detach() for name, value in net.named_parameters()}, lambda: start):
        problem = make_problem(net, inner_loss=lambda *args, constants=constants: pull(*args, constants))
        steps = 0 if isinstance(settings, bilevel.Unrolled) else 2
        run = solve(problem, method=settings, steps=2, inner_steps=steps)
        ends.append(run.history.rows[-1] | {"seconds": 0})
    assert ends[0] == ends[1]
    assert all(torch.equal(value, start[name]) for name, value in own.items())


def gradient_penalty(model, hyper, batch):
    """The squared norm of the derivative of each prediction in its input."""
    x = batch[0].clone().requires_grad_()
    prediction = model(x)
    (slope,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
    return (prediction - batch[1]).square().mean(1) + hyper["decay"] * slope.square().sum(1)


def in_double(pairs):
    return [(x.double(), y.double()) for x, y in pairs]


@pytest.mark.parametrize(
    "method",
    [
        *(bilevel.METHODS[name] for name in (*LEARNED, "implicit_exact", "implicit_identity")),
        *(shortened(bilevel.METHODS[name]) for name in ("unrolled", "unrolled_truncated", "unrolled_forward")),
        *(DeltaSTN(perturb="batch"), Implicit(bilevel.CG(rtol=1e-12))),
    ],
    ids=str,
)
def test_the_gradient_penalty_of_a_linear_model_is_weight_decay(method):
    """∂(w·x)/∂x = w, so that the two problems are the same under every method."""

    def decay(model, hyper, batch):
        return (model(batch[0]) - batch[1]).square().mean(1) + hyper["decay"] * bilevel.l2(model.params)

    torch.manual_seed(0)
    net = nn.Linear(3, 1, bias=False).double()
    steps = 0 if isinstance(method, bilevel.Unrolled) else 2
    ends = []
    for loss in (gradient_penalty, decay):
        train, valid = (in_double(batches(seed=seed)) for seed in (0, 1))
        run = solve(make_problem(net, inner_loss=loss), train, valid, method=method, steps=3, inner_steps=steps)
        ends.append(run.history.rows[-1])
    for name in ("inner_loss", "outer_loss", "hypergradient_norm", "decay"):
        assert abs(ends[0][name] - ends[1][name]) <= 1e-9 * abs(ends[1][name])


@pytest.mark.parametrize("method", LEARNED)
def test_the_gradient_penalty_of_a_network_is_that_of_each_example(method):
    """Values and gradients in w₀ and Θ, against weights multiplied out for one example at a time."""
    net = network().double()
    problem = make_problem(net, inner_loss=gradient_penalty)
    response, hyper = bilevel.METHODS[method].bind(problem), problem.initial_hyper()
    with Stream(0, CPU)():
        for part in response.theta.parameters():
            part.data.copy_(0.5 * torch.randn(part.shape).double())
    (x, y), *_ = in_double(batches(1))
    with Stream(1, CPU)():
        fast = next(loss.value for loss in response.inner_loss(hyper, (x, y)))
    with Stream(1, CPU)():
        noise = torch.randn(len(x), 1, dtype=torch.float64)
    shifts = hyper + noise if method == "stn" else noise
    weights = response.inner.params()
    if method != "stn":
        weights = {name: w.detach() for name, w in weights.items()}

    def slow(i):
        change = response.theta(shifts[i], weights)

        def predict(point):
            if method == "delta_stn":
                return sum(jvp(lambda w: functional_call(net, w, (point,)), (weights,), (change,)))[0]
            return functional_call(net, {name: weights[name] + change[name] for name in weights}, (point,))[0]

        slope = grad(predict)(x[i])
        return (predict(x[i]) - y[i, 0]).square() + (hyper[0] + noise[i, 0]).exp() * slope.square().sum()

    reference = torch.stack([slow(i) for i in range(len(x))]).mean()
    assert_equal(fast.detach(), reference.detach(), 1e-9)
    learned = list(response.parameters())
    for one, other in zip(
        *(torch.autograd.grad(v, learned, allow_unused=True) for v in (fast, reference)), strict=True
    ):
        if one is None:
            assert other is None or not other.any()
        else:
            assert_equal(one, other, 1e-9)


@pytest.mark.parametrize("method", ["implicit_cg", "implicit_neumann", "implicit_nystrom"])
def test_a_gradient_penalty_needs_the_hessian(method):
    with pytest.raises(ValueError, match=r"gradient penalty.*curvature='hessian'"):
        solve(make_problem(inner_loss=gradient_penalty), method=method, steps=1)


class Between(nn.Module):
    """A layer, a function, a layer."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.function = nn.Linear(3, 4), nn.Linear(4, 1), function

    def forward(self, x):
        return self.two(self.function(self.one(x)))


UNKNOWN = {
    "linalg_solve": lambda x: torch.linalg.solve(torch.eye(4) + x[:, None] * x[..., None], x[..., None])[..., 0],
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0],
}


@pytest.mark.parametrize("perturb", ["example", "batch"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_gradient_penalties_that_pytorch_cannot_linearise_are_refused(name, perturb):
    """With the method that takes them; and the same network without the penalty runs."""
    net = Between(UNKNOWN[name])
    with pytest.raises(NotImplementedError, match=rf"with respect to x, through {name}.*centered_stn.*detach"):
        solve(make_problem(net, inner_loss=gradient_penalty), method=DeltaSTN(perturb=perturb), steps=1)
    solve(make_problem(net, inner_loss=gradient_penalty), method=bilevel.CenteredSTN(perturb=perturb), steps=1)
    solve(make_problem(net), method=DeltaSTN(perturb=perturb), steps=1)


class Force(nn.Module):
    """The derivative of an energy, computed by the network itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0].sum(1, keepdim=True)


def test_a_network_that_differentiates_itself_is_refused_or_right():
    """Δ-STN sees no response inside; with one perturbation it is right, as is the centered STN."""
    with pytest.raises(NotImplementedError, match=r"derivatives itself.*perturb='batch'.*centered_stn"):
        solve(make_problem(Force()), method=DeltaSTN(perturb="example"), steps=1)
    with pytest.warns(bilevel.PerturbationWarning, match="derivatives itself"):
        solve(make_problem(Force()), method=DeltaSTN(), steps=1)
    net = Force().double()
    (x, y), *_ = in_double(batches(1))
    for method in (DeltaSTN(perturb="batch"), bilevel.CenteredSTN()):
        problem = make_problem(net)
        response, hyper = method.bind(problem), problem.initial_hyper()
        with Stream(0, CPU)():
            for part in response.theta.parameters():
                part.data.copy_(0.3 * torch.randn(part.shape).double())
        with Stream(1, CPU)():
            fast = next(loss.value for loss in response.inner_loss(hyper, (x, y)))
        with Stream(1, CPU)():
            rows = 1 if isinstance(method, DeltaSTN) else len(x)
            noise = torch.randn(rows, 1, dtype=torch.float64).expand(len(x), 1)
        weights = {name: w.detach() for name, w in response.inner.params().items()}

        def energy(params, point):
            return functional_call(net.energy, {name[7:]: w for name, w in params.items()}, (point,))[0]

        losses = []
        for point, target, shift in zip(x, y, noise, strict=True):
            change = response.change(shift)
            moved = {name: weights[name] + change[name] for name in weights}

            def force(params, point=point):
                return grad(energy, argnums=1)(params, point).sum()

            linear = isinstance(method, DeltaSTN)
            found = sum(jvp(force, (weights,), (change,))) if linear else force(moved)
            losses.append((found - target[0]).square() + (hyper[0] + shift[0]).exp() * bilevel.l2(moved))
        assert_equal(fast.detach(), torch.stack(losses).mean().detach(), 1e-9)


def test_weights_that_changed_are_cast_anew():
    """Autocast keeps casts of weights until its outermost block ends."""
    problem = make_problem()
    response, hyper, batch = bilevel.METHODS["centered_stn"].bind(problem), problem.initial_hyper(), batches(1)[0]
    model = response.inner.model(response.inner.params())
    values = []
    with autocast():
        for _ in range(2):
            values.append(problem.inner_loss(model, hyper, batch).value.detach())
            with torch.no_grad():
                response.inner.weights[0].mul_(2)
    with autocast():
        response.inner.weights[0].data.div_(2)
        fresh = problem.inner_loss(model, hyper, batch).value.detach()
    assert values[0] != values[1]
    assert values[1] == fresh


@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_second_derivatives_of_a_loss_without_a_network_are_taken_in_full_precision(curvature):
    def loss(model, hyper, batch):
        fit = (batch[0] @ model.params["w"] - batch[1]).square().mean()
        return fit + hyper["decay"] * bilevel.l2(model.params)

    problem = make_problem({"w": torch.ones(3, 1)}, inner_loss=loss)
    response = Implicit(bilevel.Exact(), curvature=curvature).bind(problem)
    found = []
    for on in (False, True):
        with autocast(on):
            found.append(response.jvp(problem.initial_hyper(), torch.ones(1), batches(1)[0])["w"])
    assert torch.equal(*found)


@pytest.mark.parametrize("part", ["module", "function"])
def test_a_curvature_of_its_own_refuses_activation_checkpointing(part):
    """Also where no solver has checked the problem."""
    problem = make_problem(Checkpointed(part, reentrant=False))
    response = Implicit(bilevel.CG()).bind(problem)
    with pytest.raises(RuntimeError, match="remove the checkpointing from the network"):
        response.jvp(problem.initial_hyper(), torch.ones(1), batches(1)[0])
