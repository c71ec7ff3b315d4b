"""Networks whose response would be lost, or mixed up, and losses that a method cannot use: right, or refused."""

import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import hessian

import bilevel
from bilevel import CenteredSTN, DeltaSTN, Exact, Implicit, Problem, Solver, positive, real

B = 6
THREE = ["stn", "centered_stn", "delta_stn"]


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def inner(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)


def outer(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def problem(net, inner_loss=inner, outer_loss=outer):
    return Problem(net, inner_loss=inner_loss, outer_loss=outer_loss, hyper={"decay": positive(0.05)})


def numbers():
    return torch.randn(B, 5), torch.randn(B, 1)


def each(method):
    """With a perturbation of its own for each example, come what may."""
    return dataclasses.replace(bilevel.METHODS[method], perturb="example")


def step(net, method, batch, **losses):
    solver = Solver(problem(net, **losses), method=method)
    solver.inner_step(batch)
    return solver.outer_step([batch] * solver.response.unrolled_steps or batch, batch)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, slope):
        x, w = ctx.saved_tensors
        return slope @ w, slope.T @ x


class Hidden(nn.Module):
    """Its first layer is a user's own function."""

    def __init__(self):
        super().__init__()
        self.w, self.last = nn.Parameter(torch.randn(4, 5)), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.tanh(Product.apply(x, self.w)))


class TiedAndHidden(nn.Module):
    """The weight is seen at one of its two places."""

    def __init__(self):
        super().__init__()
        self.w, self.last = nn.Parameter(torch.randn(5, 5)), nn.Linear(5, 1)

    def forward(self, x):
        return self.last(torch.tanh(Product.apply(torch.tanh(F.linear(x, self.w)), self.w)))


def scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("method", THREE)
@pytest.mark.parametrize(("net", "name"), [(scripted, "0.weight"), (Hidden, "w"), (TiedAndHidden, "w")])
def test_weights_that_no_rule_sees_are_refused(net, name, method):
    with pytest.raises(ValueError, match=rf"uses the weight '{name}' where the library cannot see it.*perturb='batch'"):
        step(net(), each(method), numbers())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("net", [scripted, Hidden])
def test_the_remedies_for_hidden_weights_work(net):
    step(net(), CenteredSTN(perturb="batch"), numbers())
    name = "0.*" if net is scripted else "w"
    step(net(), DeltaSTN(structure={name: "none"}), numbers())


class Hooked(nn.Module):
    """Keeps the features of its first layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(5, 4), nn.Linear(4, 1), {}
        self.first.register_forward_hook(lambda module, args, output: self.kept.__setitem__("features", output))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def test_features_from_a_hook_are_refused_where_predictions_are_linearised():
    net = Hooked()

    def loss(model, hyper, batch):
        return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * net.kept["features"].square().mean(1)

    for method in (DeltaSTN(), DeltaSTN(perturb="batch")):
        with pytest.raises(
            ValueError, match=r"depends on the weight 'first.weight' in another way.*forward hook.*centered"
        ):
            step(net, method, numbers(), inner_loss=loss)
    with pytest.raises(ValueError, match=r"forward hooks.*curvature='hessian'"):
        step(net, "implicit_cg", numbers(), inner_loss=loss)
    for method in ("stn", "centered_stn", "implicit_exact", "unrolled"):
        step(net, method, numbers(), inner_loss=loss)


class Shuffled(nn.Module):
    """Layers with something between them that does not know about examples."""

    def __init__(self, mix):
        super().__init__()
        self.one, self.two, self.mix = nn.Linear(5, 4), nn.Linear(4, 1), mix

    def forward(self, x):
        return self.two(self.mix(torch.tanh(self.one(x))))


PERMUTATIONS = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "half": lambda x: x.roll(len(x) // 2, 0),
    "pairs": lambda x: x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
    "riffle": lambda x: x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1),
    "others": lambda x: (x.sum(0) - x) / len(x),
    "softmax": lambda x: x.softmax(0),
}


@pytest.mark.parametrize("method", THREE)
@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("kind", PERMUTATIONS)
def test_networks_that_mix_examples_are_refused(kind, count, method):
    batch = torch.randn(count, 5), torch.randn(count, 1)
    with pytest.raises(
        ValueError, match=r"(mixes the examples at the weight 'one|'two.*does not count).*perturb='batch'"
    ):
        step(Shuffled(PERMUTATIONS[kind]), each(method), batch)


@pytest.mark.parametrize("method", THREE)
def test_as_many_time_steps_as_examples(method):
    """Time first inside of the network: the shape does not tell where the examples are, their way does."""
    net = nn.Sequential(Transposed(), nn.Flatten(), nn.Linear(4 * B, 1))
    step(net, each(method), (torch.randn(B, B, 5), torch.randn(B, 1)))


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x.transpose(0, 1))).transpose(0, 1)


class Prototypes(nn.Module):
    """Compares with as many prototypes as there are examples, which pass through a layer of the network."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prototypes", torch.randn(B, 5))
        self.layer, self.last = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last((self.layer(x)[:, None] - self.layer(self.prototypes)[None]).square().mean(1))


@pytest.mark.parametrize("method", THREE)
def test_prototypes_as_many_as_examples_are_refused(method):
    with pytest.raises(ValueError, match=r"mixes the examples at the weight 'layer"):
        step(Prototypes(), each(method), numbers())


class Normal(nn.Module):
    """A batch norm of the user's own."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0) + 1e-3).sqrt()


@pytest.mark.parametrize("method", THREE)
@pytest.mark.parametrize(
    "norm", [lambda: nn.BatchNorm1d(4), Normal, lambda: nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_batch_norm_is_let_through(norm, method):
    step(nn.Sequential(nn.Linear(5, 4), norm(), nn.Tanh(), nn.Linear(4, 1)), method, numbers())


class LogProbabilities(nn.Module):
    """PyTorch's own MNIST example ends like this."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x):
        return F.log_softmax(self.net(x), dim=1)


class OwnLoss(LogProbabilities):
    """Returns its loss beside its logits, as Hugging Face models do."""

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def labels():
    return torch.randn(B, 5), torch.arange(B) % 3


def nll(model, hyper, batch):
    return F.nll_loss(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)


def own(model, hyper, batch):
    return model(*batch)["loss"] + hyper["decay"] * bilevel.l2(model.params)


def own_and_more(model, hyper, batch):
    output = model(*batch)
    return output["loss"] + output["logits"].square().mean() + hyper["decay"] * bilevel.l2(model.params)


LINEARISED = ["delta_stn", DeltaSTN(perturb="batch"), "implicit_cg", "implicit_neumann", "implicit_nystrom"]


@pytest.mark.parametrize("method", LINEARISED, ids=str)
@pytest.mark.parametrize(
    ("net", "loss", "words"),
    [
        (LogProbabilities, nll, "log-probabilities: return logits"),
        (OwnLoss, own, "network's own loss, or a part of it"),
        (OwnLoss, own_and_more, "network's own loss, or a part of it"),
        (lambda: nn.Linear(5, 1), None, "L1 and hinge"),
    ],
)
def test_outputs_without_curvature_are_refused_where_predictions_are_linearised(net, loss, words, method):
    remedy = r"curvature='hessian'" if isinstance(method, str) and "implicit" in method else "centered_stn"
    batch = numbers() if loss is None else labels()
    if loss is None:

        def loss(model, hyper, batch):  # a hinge loss: for it, second derivatives are of no use anywhere
            return F.relu(1 - model(batch[0]) * batch[1].sign()).mean() + hyper["decay"] * bilevel.l2(model.params)

        remedy = r"linear.* in pieces|centered_stn"
    with pytest.raises(ValueError, match=rf"(?s){words}.*({remedy})|linear in pieces"):
        step(net(), method, batch, inner_loss=loss, outer_loss=loss)


@pytest.mark.parametrize("method", ["stn", "centered_stn", "implicit_exact", "unrolled"])
@pytest.mark.parametrize(("net", "loss"), [(LogProbabilities, nll), (OwnLoss, own)])
def test_they_are_right_elsewhere(net, loss, method):
    """The same numbers as with logits and the cross-entropy of the loss."""
    twin = net()

    def plain(model, hyper, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    batch = labels()
    ours = step(twin, method, batch, inner_loss=loss, outer_loss=loss)
    theirs = step(twin.net, method, batch, inner_loss=plain, outer_loss=plain)
    torch.testing.assert_close(ours.hypergradient, theirs.hypergradient, rtol=1e-8, atol=1e-10)


def l1(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l1(model.params)


def by_hand(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * sum(w.abs().sum() for w in model.params.values())


def group_lasso(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1]) + hyper["decay"] * model.params["0.weight"].norm(dim=1).sum()


def elastic(model, hyper, batch):
    return l1(model, hyper, batch) + bilevel.l2(model.params)


def absolute(model, hyper, batch):
    return F.l1_loss(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)


def small():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


IMPLICIT = [name for name in bilevel.METHODS if name.startswith("implicit")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", IMPLICIT)
@pytest.mark.parametrize("loss", [l1, by_hand, group_lasso, elastic, absolute])
def test_kinks_are_refused_where_second_derivatives_are_taken(loss, method, dtype):
    batch = tuple(part.to(dtype) for part in numbers())
    with pytest.raises(ValueError, match=r"kink|in pieces"):
        step(small().to(dtype), method, batch, inner_loss=loss)


@pytest.mark.parametrize("loss", [inner, partial(inner)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_smooth_losses_are_not(loss, dtype):
    def smooth(model, hyper, batch):
        orthogonal = (model.params["0.weight"] @ model.params["0.weight"].T - torch.eye(4).to(dtype)).square().sum()
        data = F.smooth_l1_loss(model(batch[0]), batch[1], beta=3.0)
        return data + hyper["decay"] * (bilevel.l2(model.params) + 1e-3 * orthogonal)

    batch = tuple(part.to(dtype) for part in numbers())
    for function in (loss, smooth):
        step(small().to(dtype), Implicit(Exact(damping=1.0)), batch, inner_loss=function)


def test_a_mapping_without_a_network_is_checked_too():
    def lasso(model, hyper, batch):
        return (batch @ model.params["w"] - 1).square().mean() + hyper["decay"] * model.params["w"].abs().sum()

    def ridge(model, hyper, batch):
        return (batch @ model.params["w"] - 1).square().mean() + hyper["decay"] * bilevel.l2(model.params)

    for dtype in (torch.float64, torch.float32):
        made = [
            Problem({"w": torch.ones(3, dtype=dtype)}, inner_loss=f, outer_loss=f, hyper={"decay": positive(0.1)})
            for f in (ridge, lasso)
        ]
        x = torch.randn(8, 3, dtype=dtype)
        Solver(made[0], method="implicit_exact").inner_step(x)
        with pytest.raises(ValueError, match=r"kink in model.params\['w'\] where entries are zero"):
            Solver(made[1], method="implicit_exact").inner_step(x)
        Solver(made[1], method="unrolled").inner_step(x)
        Solver(made[1], method="delta_stn").inner_step(x)


@pytest.mark.usefixtures("unchecked")
def test_the_hypergradient_of_a_lasso_is_refused_for_a_reason():
    """w* = sign(t) max(|t| − λ, 0): a weight that the penalty holds at zero does not respond, whatever H says."""
    target, penalty = torch.tensor([2.0, 0.1]), 0.5

    def lasso(model, hyper, batch):
        return (model.params["w"] - target).square().sum() / 2 + hyper["penalty"] * model.params["w"].abs().sum()

    def distance(model, hyper, batch):
        return (model.params["w"] - 1).square().sum() / 2

    reached = {"w": torch.tensor([1.5, 1e-9])}  # as close to the kink as training comes
    made = Problem(reached, inner_loss=lasso, outer_loss=distance, hyper={"penalty": real(penalty)})
    found = float(Solver(made, method="implicit_exact").outer_step().hypergradient)
    right = (1.5 - 1) * -1.0
    assert found == pytest.approx(right + (0 - 1) * -1.0, abs=1e-6)  # the second weight should not count


def _weight_normed(make):
    net = nn.Sequential(make(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 1))
    return net, [value.detach().clone() for value in net.parameters()]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("make", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_weight_norm_has_exact_second_derivatives(make):
    """PyTorch 2.13 computes them wrongly; the reference writes the network out and takes its Hessian."""
    net, start = _weight_normed(make)
    names = [name for name, _ in net.named_parameters()]
    x, y = numbers()

    def loss(flat, decay):
        parts = dict(zip(names, torch.split(flat, [p.numel() for p in start]), strict=True))
        parts = {name: part.view(p.shape) for (name, part), p in zip(parts.items(), start, strict=True)}
        g, v = (
            next(parts[n] for n in names if n.startswith("0.") and n.endswith(ends))
            for ends in (("original0", "weight_g"), ("original1", "weight_v"))
        )
        w = g * v / v.square().sum(1, keepdim=True).sqrt()
        hidden = torch.tanh(x @ w.T + parts["0.bias"])
        data = (hidden @ parts["2.weight"].T + parts["2.bias"] - y).square().mean()
        return data, data + decay * sum((part * part).sum() for part in parts.values())

    flat = torch.cat([p.flatten() for p in start])
    rate = torch.tensor(0.05)
    h = hessian(lambda w: loss(w, rate)[1], flat)
    cross = 2 * rate * flat  # ∂²L/∂w∂log λ
    leaf = flat.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf, rate)[0], leaf)
    expected = -cross @ torch.linalg.solve(h, slope)
    solver = Solver(problem(net), method=Implicit(Exact()))
    found = solver.outer_step((x, y), (x, y)).hypergradient
    torch.testing.assert_close(found, expected[None], rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_weight_norm_unrolled(mode):
    """Against finite differences of a run of plain steps."""
    net, _ = _weight_normed(nn.utils.parametrizations.weight_norm)
    batch = numbers()
    optimizer = partial(torch.optim.SGD, lr=0.1)

    def after(shift):
        made = Problem(
            net, inner_loss=inner, outer_loss=outer, hyper={"decay": positive(math.exp(math.log(0.05) + shift))}
        )
        solver = Solver(made, method="implicit_identity", inner_optimizer=optimizer)
        for _ in range(3):
            solver.inner_step(batch)
        return solver.evaluate([batch])

    solver = Solver(problem(net), method=bilevel.Unrolled(steps=3, mode=mode), inner_optimizer=optimizer)
    found = float(solver.outer_step([batch] * 3, batch).hypergradient)
    assert found == pytest.approx((after(1e-4) - after(-1e-4)) / 2e-4, rel=1e-6)


def test_each_kind_is_looked_at_once_and_nothing_is_drawn():
    """Passes over the network per step: many at the first batch of a kind, the usual ones later."""
    passes = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x):
            passes.append(len(x))
            return self.layer(x + 0 * torch.randn_like(x))

    solver = Solver(problem(Net()), method="delta_stn")
    counts = []
    for size in (B, B, 4, B, 4):
        passes.clear()
        solver.inner_step((torch.randn(size, 5), torch.randn(size, 1)))
        counts.append(len(passes))
    assert [counts[step] for step in (1, 3, 4)] == [
        1 + solver.response.learns(step, solver.optimizers["response"]) for step in (1, 3, 4)
    ]
    assert counts[0] > 10
    assert counts[2] > 10


def test_checks_end_where_every_batch_has_another_shape():
    checked = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            checked.append(x.shape)
            return self.layer(x[..., None]).mean(1)

    solver = Solver(problem(Net()), method="centered_stn")
    for length in range(2, 42):
        solver.inner_step((torch.randn(B, length), torch.randn(B, 1)))
    passes = [checked.count((B, length)) for length in range(2, 42)]
    assert passes[-1] == 2  # the two of the step
    assert passes[4] > passes[-1]  # as long as the batch
