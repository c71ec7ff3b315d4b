"""Errors that newcomers meet: each says what to write instead."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bilevel
from bilevel import functional
from bilevel.solver import Parameters

BATCH = (torch.ones(5, 3), torch.tensor([0, 1, 2, 3, 0]))
METHODS = ["delta_stn", "centered_stn", "stn", "implicit_cg"]


class Net(nn.Module):
    """With a dropout layer, and one in forward if it is given a rate."""

    def __init__(self):
        super().__init__()
        self.hidden, self.drop, self.out = nn.Linear(3, 6), nn.Dropout(0.1), nn.Linear(6, 4)

    def forward(self, x, rate=None):
        x = self.drop(F.relu(self.hidden(x)))
        return self.out(x if rate is None else F.dropout(x, rate))


def plain(model, hyper, batch):
    x, y = batch
    return functional.cross_entropy(model(x), y) + hyper["s"] * functional.l2(model.params)


def state(net=None, inner_loss=plain, outer_loss=plain):
    """A small problem."""
    return bilevel.Problem(
        Net() if net is None else net,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        hyper={"s": bilevel.interval(0.0, 1.0, init=0.1)},
    )


def notes(error):
    """What a user reads below the message of torch."""
    return "\n".join(getattr(error.value, "__notes__", []))


# Hyperparameters where torch wants numbers


def smoothing(model, hyper, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=hyper["s"])


def smoothing_of_a_module(model, hyper, batch):
    return nn.CrossEntropyLoss(label_smoothing=hyper["s"])(model(batch[0]), batch[1])


def class_weights(model, hyper, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=hyper["s"][..., None] * torch.ones(4))


def class_weights_of_pixels(model, hyper, batch):
    logits, y = model(batch[0])[:, :, None].expand(-1, -1, 2), batch[1][:, None].expand(-1, 2)
    return F.cross_entropy(logits, y, weight=hyper["s"][..., None] * torch.ones(4))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", [smoothing, smoothing_of_a_module, class_weights, class_weights_of_pixels])
def test_cross_entropy_of_torch_with_a_hyperparameter_names_ours(loss, method):
    with pytest.raises((TypeError, RuntimeError)) as error:
        bilevel.Solver(state(inner_loss=loss), method=method).inner_step(BATCH)
    assert "use bilevel.functional.cross_entropy(logits, y, label_smoothing=hyper[...]" in notes(error)


def in_forward(model, hyper, batch):
    return F.cross_entropy(model(batch[0], hyper["s"]), batch[1])


def of_channels(model, hyper, batch):
    return F.cross_entropy(F.dropout2d(model(batch[0])[:, :, None, None], hyper["s"])[:, :, 0, 0], batch[1])


def in_a_new_module(model, hyper, batch):
    return F.cross_entropy(nn.Dropout(hyper["s"])(model(batch[0])), batch[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", [in_forward, of_channels, in_a_new_module])
def test_dropout_of_torch_with_a_hyperparameter_names_ours(loss, method):
    with pytest.raises((TypeError, RuntimeError)) as error:
        bilevel.Solver(state(inner_loss=loss), method=method).inner_step(BATCH)
    assert "use bilevel.functional.dropout(x, hyper[...], training=self.training)" in notes(error)


@pytest.mark.parametrize("method", METHODS)
def test_a_hyperparameter_as_p_of_a_dropout_layer_names_ours(method):
    net = Net()

    def loss(model, hyper, batch):
        net.drop.p = hyper["s"]
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises((TypeError, RuntimeError)) as error:
        bilevel.Solver(state(net, inner_loss=loss), method=method).inner_step(BATCH)
    assert "use bilevel.functional.dropout(x, hyper[...], training=self.training)" in notes(error)


def test_a_branch_of_the_user_gets_no_advice_about_dropout():
    """The same message of torch, from another place."""

    def loss(model, hyper, batch):
        return plain(model, hyper, batch) if hyper["s"] > 0 else model(batch[0]).mean()

    with pytest.raises(RuntimeError, match="Boolean value") as error:
        bilevel.Solver(state(inner_loss=loss)).inner_step(BATCH)
    assert "one perturbation per example" in notes(error)
    assert "dropout" not in notes(error)


# Loaders that are missing


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("given", "missing"), [({}, "train"), ({"valid": [BATCH]}, "train"), ({"train": [BATCH]}, "valid")]
)
def test_a_missing_loader_is_named(method, given, missing):
    with pytest.raises(TypeError, match="cannot unpack non-iterable NoneType") as error:
        bilevel.solve(state(), method=method, steps=1, progress=False, **given)
    assert f"The batch is None because {missing} is None: pass the loader" in notes(error)
    assert f"bilevel.solve(problem, {missing}=loader" in notes(error)


@pytest.mark.parametrize("use", [lambda batch: batch[0], lambda batch: batch.x, lambda batch: batch])
def test_a_missing_loader_is_named_however_the_batch_is_read(use):
    problem = state(inner_loss=lambda model, hyper, batch: model(use(batch)).mean())
    with pytest.raises((TypeError, AttributeError)) as error:
        bilevel.solve(problem, steps=1, progress=False)
    assert "because train is None" in notes(error)


def test_an_error_with_a_batch_says_nothing_about_loaders():
    with pytest.raises(TypeError) as error:
        bilevel.Solver(state(inner_loss=lambda model, hyper, batch: None + model(batch[0]).mean())).inner_step(BATCH)
    assert "because train is None" not in notes(error)


# Wrapped modules and several processes


def test_a_compiled_module_is_refused():
    with pytest.raises(ValueError, match=r"inner was compiled by torch.compile.* net\._orig_mod\..* compile=True"):
        state(torch.compile(Net(), backend="eager"))
    with pytest.raises(ValueError, match=r"inner\.1 was compiled"):
        state(nn.Sequential(nn.Linear(3, 3), torch.compile(Net(), backend="eager")))
    state(torch.compile(Net(), backend="eager")._orig_mod)


def test_a_data_parallel_module_is_refused():
    with pytest.raises(
        ValueError, match=r"inner is a DataParallel, .*pass the module inside, net\.module\. .*torchrun"
    ):
        state(nn.DataParallel(Net()))
    state(nn.DataParallel(Net()).module)


@pytest.fixture
def process_group():
    """A group of this process only."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def test_a_distributed_module_is_refused(process_group):
    net = nn.parallel.DistributedDataParallel(Net())
    with pytest.raises(ValueError, match=r"inner is a DistributedDataParallel, .*net\.module\. .*torchrun"):
        state(net)


def test_a_declared_process_without_the_others(monkeypatch):
    problem = state()
    for size in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert bilevel.Solver(problem).group is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4, but RANK, .* torchrun, .*distributed=False"):
        bilevel.Solver(problem)
    assert bilevel.Solver(problem, distributed=False).group is None


def test_a_process_group_of_one_process(process_group, monkeypatch):
    problem = state()
    assert bilevel.Solver(problem).group is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 2, but the process group has one.*distributed=False"):
        bilevel.Solver(problem)


# Optimizers that choose parameters by name


def by_name(params):
    """Weight decay for all but biases, as in many training scripts."""
    biases = [param for name, param in params.named_parameters() if name.endswith("bias")]
    others = [param for name, param in params.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0, "lr": 0.1}, {"params": others, "lr": 0.01}])


NAMED = ["stn", bilevel.DeltaSTN(structure="dense"), bilevel.DeltaSTN(structure="rowwise")]


@pytest.mark.parametrize("method", [*METHODS, *NAMED[1:], "unrolled_truncated"], ids=str)
def test_factories_may_choose_parameters_by_name(method):
    """Weights under the names of the module; what a response has for a weight alone under the name of that weight."""
    net = Net()
    seen = []

    def factory(params):
        seen.append(list(params.named_parameters()))
        assert list(params) == [param for _, param in seen[-1]]
        return by_name(params)

    solver = bilevel.Solver(state(net), method=method, inner_optimizer=factory)
    weights = dict(seen[0])
    assert list(weights) == [name for name, _ in net.named_parameters()]
    for name, value in net.named_parameters():
        assert torch.equal(weights[name], value)
    assert [len(group["params"]) for group in solver.optimizers["weights"].param_groups] == [2, 2]
    if len(seen) > 1:
        shapes = {name: value.shape for name, value in net.named_parameters()}
        own = {name: param for name, param in seen[1] if name in shapes}
        assert list(own) == (list(shapes) if method in NAMED else [])
        assert all(param.shape[-len(shapes[name]) :] == shapes[name] for name, param in own.items())
        assert {name for name, _ in seen[1]} - own.keys() <= {"theta.rowwise.factor", "theta.gate.factor"}
        groups = [len(group["params"]) for group in solver.optimizers["response"].param_groups]
        assert groups == ([2, len(seen[1]) - 2] if method in NAMED else [0, 1])
    batches = [BATCH] * solver.response.unrolled_steps or BATCH
    if not solver.response.unrolled_steps:
        assert solver.inner_step(BATCH).isfinite()
    assert solver.outer_step(batches, BATCH).hypergradient.isfinite().all()


def test_hyperparameters_and_scale_have_names():
    seen = []

    def factory(params):
        seen.extend(name for name, _ in params.named_parameters())
        return torch.optim.SGD(params, lr=0.1)

    bilevel.Solver(state(), method=bilevel.DeltaSTN(entropy=1e-3), outer_optimizer=factory)
    assert seen == ["hyper", "scale.raw"]


@pytest.mark.parametrize("method", ["delta_stn", "unrolled_truncated"])
def test_an_optimizer_of_named_parameters_makes_the_same_steps(method):
    """``torch.optim`` takes pairs of names and parameters too."""

    def losses(factory):
        torch.manual_seed(0)
        solver = bilevel.Solver(state(), method=method, inner_optimizer=factory)
        batches = [BATCH] * solver.response.unrolled_steps or BATCH
        return torch.stack([solver.outer_step(batches, BATCH).loss for _ in range(2)])

    named = losses(lambda params: torch.optim.Adam(params.named_parameters(), lr=0.1))
    assert torch.equal(named, losses(lambda params: torch.optim.Adam(params, lr=0.1)))


def test_parameters_can_be_copied():
    params = Parameters([("a", nn.Parameter(torch.ones(2)))])
    ((name, value),) = copy.deepcopy(params).named_parameters()
    assert name == "a" and torch.equal(value, params[0]) and value is not params[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda net: lambda params: torch.optim.SGD(net.parameters(), lr=0.1),
        lambda net: lambda params: torch.optim.SGD(net.named_parameters(), lr=0.1),
        lambda net: lambda params: torch.optim.SGD([{"params": [net.out.bias]}, {"params": params}], lr=0.1),
    ],
    ids=["parameters", "named_parameters", "one of them"],
)
def test_a_factory_of_the_parameters_of_the_module_is_told_what_to_write(make):
    net = Net()
    message = r"trains copies, so net\.parameters\(\) .*choose by name, use params\.named_parameters\(\)"
    with pytest.raises(ValueError, match=message):
        bilevel.Solver(state(net), inner_optimizer=make(net))


def test_a_factory_that_leaves_out_parameters_is_told_which():
    def factory(params):
        return torch.optim.SGD([p for name, p in params.named_parameters() if not name.endswith("bias")], lr=0.1)

    with pytest.raises(
        ValueError, match=r"leaves out 'hidden\.bias', 'out\.bias': put every .*requires_grad_\(False\)"
    ):
        bilevel.Solver(state(), inner_optimizer=factory)


def test_an_error_inside_a_factory_says_how_it_is_called():
    with pytest.raises(TypeError, match="positional argument") as error:
        bilevel.Solver(state(), inner_optimizer=lambda: None)
    assert "inner_optimizer, which is called with a list of parameters" in notes(error)
    assert "params.named_parameters()" in notes(error)
