"""Dropout that a network has already: intercepted, it is the network written with explicit rates."""

import copy
import math

import pytest
import torch
from problems import sgd
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks

import bilevel
from bilevel import Problem, Solver, plain
from bilevel.dropouts import find
from bilevel.functional import alpha_dropout, cross_entropy, dropout
from bilevel.hyper import Named

B, CLASSES = 6, 3


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if not self.drop_prob or not self.training:
            return x
        keep = torch.bernoulli(torch.full((len(x), *[1] * (x.ndim - 1)), 1 - self.drop_prob, dtype=x.dtype))
        return x * keep / (1 - self.drop_prob)


class Net(nn.Module):
    """With rates given, the network as one would write it with explicit ones."""

    shape = (8,)
    exact = True

    def __init__(self, p=0.4):
        super().__init__()
        self.build(p)
        self.double()

    def forward(self, x, rates=None):
        def drop(name, y, *args, **kwargs):
            if rates is None:
                return getattr(self, name)(y, *args, **kwargs)
            return self.explicit(name, rates[f"dropout.{name}"], y, *args, **kwargs)

        return self.run(x, drop)

    def explicit(self, name, rate, y, **kwargs):
        return dropout(y, rate, training=self.training, **kwargs)


class Mlp(Net):
    def build(self, p):
        self.a, self.b, self.c = nn.Linear(8, 9), nn.Linear(9, 9), nn.Linear(9, CLASSES)
        self.first, self.second = nn.Dropout(p), nn.Dropout(p / 2, inplace=True)

    def run(self, x, drop):
        x = drop("first", self.a(x).tanh())
        x = drop("second", self.b(x)).relu()
        return self.c(drop("first", x))  # one layer, called twice


class Functional(Net):
    """Calls of functions are named after their module, in order."""

    def build(self, p):
        self.a, self.b, self.p = nn.Linear(8, 9), nn.Linear(9, CLASSES), p

    def dropout(self, x):
        return F.dropout(x, self.p, self.training)

    def dropout_1(self, x):
        return torch.dropout(x, self.p, self.training)

    def run(self, x, drop):
        return self.b(drop("dropout_1", self.a(drop("dropout", x)).tanh()))


class Convolutions(Net):
    shape = (3, 4, 4)

    def build(self, p):
        self.conv, self.last = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5, CLASSES)
        self.drop1, self.drop2, self.drop3 = nn.Dropout1d(p), nn.Dropout2d(p), nn.Dropout3d(p)

    def run(self, x, drop):
        x = drop("drop2", self.conv(x).tanh())
        x = drop("drop1", x.flatten(2)).unflatten(2, (4, 4))
        return self.last(drop("drop3", x.unsqueeze(2)).flatten(2).mean(2))

    def explicit(self, name, rate, y):
        return dropout(y, rate, shared_dims=range(2, y.ndim), training=self.training)


class Alpha(Net):
    shape = (5, 4)

    def build(self, p):
        self.a, self.b = nn.Linear(4, 9), nn.Linear(9, CLASSES)
        self.alpha, self.features = nn.AlphaDropout(p), nn.FeatureAlphaDropout(p)

    def run(self, x, drop):
        x = drop("alpha", F.selu(self.a(x)))
        return self.b(drop("features", x).mean(1))

    def explicit(self, name, rate, y):
        return alpha_dropout(y, rate, shared_dims=2 if name == "features" else (), training=self.training)


class Paths(Net):
    def build(self, p):
        self.a, self.b, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.path, self.other = DropPath(p), DropPath(p / 2)

    def run(self, x, drop):
        x = x + drop("path", self.a(x).tanh())
        return self.last(x + drop("other", self.b(x).tanh()))

    def explicit(self, name, rate, y):
        return dropout(y, rate, shared_dims=1, training=self.training)


class TimeFirst(Net):
    """Examples in dimension 1, and flattened with time."""

    shape = (5, 4)

    def build(self, p):
        self.a, self.b = nn.Linear(4, 7), nn.Linear(7, CLASSES)
        self.first, self.flat = nn.Dropout(p), nn.Dropout(p)

    def run(self, x, drop):
        x = drop("first", self.a(x).transpose(0, 1)).transpose(0, 1)
        return self.b(drop("flat", x.flatten(0, 1)).unflatten(0, (-1, 5)).mean(1))

    def explicit(self, name, rate, y):
        if name == "first" and self.training:
            rate = rate.detach() if rate.ndim == 0 else rate.detach()[None, :, None]
            return y * ((torch.rand(y.shape, dtype=y.dtype) >= rate) / (1 - rate))
        rate = rate if rate.ndim == 0 or not self.training else rate.repeat_interleave(5)
        return dropout(y, rate, training=self.training)


class Scaled(Net):
    """The function inside: with a mask, causal, and with fewer keys than queries."""

    shape = (5, 4)
    exact = False

    def build(self, p):
        self.qkv, self.b, self.p = nn.Linear(4, 12), nn.Linear(4, CLASSES), p
        self.register_buffer("mask", torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.7)
        self.mask |= torch.eye(5, dtype=torch.bool)

    def parts(self, x):
        return [part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def dropout(self, x):
        p = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(*self.parts(x), dropout_p=p, is_causal=True)

    def dropout_1(self, x):
        return F.scaled_dot_product_attention(*self.parts(x), self.mask, self.p if self.training else 0.0)

    def dropout_2(self, x):
        q, k, v = self.parts(x)
        p = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], dropout_p=p, scale=0.3, enable_gqa=True)

    def run(self, x, drop):
        for name in ("dropout", "dropout_1", "dropout_2"):
            x = x + drop(name, x).transpose(1, 2).flatten(2)
        return self.b(x.mean(1))

    def explicit(self, name, rate, x):
        q, k, v = self.parts(x)
        if name == "dropout_2":
            k, v = k[:, [0, 0]], v[:, [0, 0]]
        scores = q @ k.transpose(-2, -1) * (0.3 if name == "dropout_2" else 1 / math.sqrt(2))
        masks = {"dropout": torch.ones(5, 5, dtype=torch.bool).tril(), "dropout_1": self.mask}
        if name in masks:
            scores = scores.masked_fill(~masks[name], -torch.inf)
        shares = scores.softmax(-1)
        return dropout(shares, rate, training=self.training) @ v


class Attention(Net):
    """nn.MultiheadAttention in an encoder layer, which has three dropouts more; explicit by hand."""

    shape = (5, 4)
    exact = False
    batch_first = True

    def build(self, p):
        self.body = nn.TransformerEncoderLayer(4, 2, 7, dropout=p, batch_first=self.batch_first)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x, rates=None):
        padding = torch.zeros(len(x), 5, dtype=torch.bool)
        padding[:, -1] = True
        if rates is None:
            flipped = x if self.batch_first else x.transpose(0, 1)
            y = self.body(flipped, src_key_padding_mask=padding)
            return self.last((y if self.batch_first else y.transpose(0, 1)).mean(1))
        body, attention = self.body, self.body.self_attn

        def drop(name, y):
            rate = rates[f"dropout.body.{name}"]
            return dropout(y, rate, training=self.training)

        q, k, v = (
            part.unflatten(-1, (2, 2)).transpose(1, 2)
            for part in F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        )
        scores = (q @ k.transpose(-2, -1) / math.sqrt(2)).masked_fill(padding[:, None, None], -torch.inf)
        mixed = (drop("self_attn", scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = body.norm1(x + drop("dropout1", attention.out_proj(mixed)))
        x = body.norm2(x + drop("dropout2", body.linear2(drop("dropout", body.linear1(x).relu()))))
        return self.last(x.mean(1))


class TimeFirstAttention(Attention):
    batch_first = False


class Lstm(Net):
    """The dropout between layers, one rate for all; explicit with the library's own."""

    shape = (5, 4)
    exact = False
    batch_first = True

    def build(self, p):
        self.lstm = nn.LSTM(4, 3, 3, batch_first=self.batch_first, dropout=p, bidirectional=True)
        self.drop, self.last = nn.Dropout(p), nn.Linear(6, CLASSES)

    def forward(self, x, rates=None):
        x = x if self.batch_first else x.transpose(0, 1)
        if rates is None:
            return self.last(self.drop(self.lstm(x)[0].select(1 if self.batch_first else 0, -1)))

        def drop(y):
            rate = rates["dropout.lstm"].detach()
            if rate.ndim:
                rate = rate[:, None, None] if self.batch_first else rate[None, :, None]
            keep = torch.rand(y.shape, dtype=y.dtype) >= rate
            return y * (keep / (1 - rate)) if self.training else y

        zeros = torch.zeros(6, len(x) if self.batch_first else x.shape[1], 3, dtype=x.dtype)
        names = self.lstm._flat_weights_names
        weights = [[*(getattr(self.lstm, name) for name in names[4 * at : 4 * at + 4]), None] for at in range(6)]
        options = {"layers": 3, "bidirectional": True, "batch_first": self.batch_first}
        y = plain.run(plain.lstm_cell, x, (zeros, zeros), weights, drop=drop, **options)[0]
        return self.last(
            dropout(y.select(1 if self.batch_first else 0, -1), rates["dropout.drop"], training=self.training)
        )


class TimeFirstLstm(Lstm):
    shape = (B, 4)  # as many times as examples
    batch_first = False


NETS = [
    Lstm,
    TimeFirstLstm,
    Mlp,
    Functional,
    Convolutions,
    Alpha,
    Paths,
    TimeFirst,
    Scaled,
    Attention,
    TimeFirstAttention,
]
nets = pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)


def data(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, *kind.shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (B,), generator=generator)


def rates_for(net, x, **kwargs):
    return bilevel.dropout_rates(net, x, **kwargs)


def intercepted(net, hyper=None):
    """A problem whose losses know nothing of rates."""
    hyper = {"decay": bilevel.positive(1e-2)} | (hyper or rates_for(net, data(type(net))[0]))

    def inner(model, hyper, batch):
        return cross_entropy(model(batch[0]), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    return Problem(net, inner_loss=inner, outer_loss=lambda m, h, b: cross_entropy(m(b[0]), b[1]), hyper=hyper)


def written(net):
    """The same problem with explicit rates."""
    hyper = {"decay": bilevel.positive(1e-2)}
    for name, rate in rates_for(net, data(type(net))[0]).items():
        hyper[name] = bilevel.interval(0.0, 0.95, init=rate.init)

    def inner(model, hyper, batch):
        return cross_entropy(model(batch[0], hyper), batch[1]) + hyper["decay"] * bilevel.l2(model.params)

    return Problem(net, inner_loss=inner, outer_loss=lambda m, h, b: cross_entropy(m(b[0], h), b[1]), hyper=hyper)


def values(problem, make):
    """Natural values of all hyperparameters."""
    hyper = problem.space.hyper
    return Named("hyperparameter", [(n, torch.tensor(0.01).double() if n == "decay" else make(n)) for n in hyper])


def outputs(problem, natural, training=True, seed=1):
    """What the network returns in a loss."""
    seen = []
    x, y = data(type(problem.module))
    loss = problem.user_losses["inner_loss"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = bilevel.problem.Variables(problem).model(problem.params)

        class Seen:
            params = model.params

            def __call__(self, *args):
                seen.append(model(*args))
                return seen[-1]

        problem.user_losses["inner_loss"] = lambda m, h, b: loss(Seen(), h, b)
        problem.evaluate("inner_loss", model, natural, (x, y), training=training)
        after = torch.rand(2)
    problem.user_losses["inner_loss"] = loss
    return seen[0].detach(), after


@pytest.mark.parametrize("shape", [(), (B,)], ids=["one rate", "one per example"])
@nets
def test_interception_is_the_network_with_explicit_rates(kind, shape):
    """Bit for bit, with the same random numbers, and as many of them; attention to rounding."""
    torch.manual_seed(0)
    net = kind()
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.rand(shape, generator=generator).double() for name in rates_for(net, data(kind)[0])}
    assert len(made) >= 2
    found, drawn = outputs(intercepted(net), values(intercepted(net), made.get))
    expected, also = outputs(written(net), values(written(net), made.get))
    if kind is TimeFirstAttention:  # draws in another order of dimensions
        return
    assert torch.equal(drawn, also)
    if kind.exact:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (B,)], ids=["one rate", "one per example"])
@nets
def test_at_rates_of_zero_it_is_the_plain_network(kind, shape):
    torch.manual_seed(0)
    net = kind()
    plain = copy.deepcopy(net)
    for module in plain.modules():
        for name in ("p", "dropout", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    problem = intercepted(net)
    found, _ = outputs(problem, values(problem, lambda name: torch.zeros(shape).double()))
    expected = plain.train()(data(kind)[0])
    assert torch.equal(found, expected) if kind.exact else torch.allclose(found, expected, rtol=0, atol=1e-12)
    evaluated, drawn = outputs(problem, values(problem, lambda name: torch.full(shape, 0.9).double()), training=False)
    assert torch.allclose(evaluated, expected, rtol=0, atol=1e-12)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(2))  # nothing was drawn in eval mode


@pytest.mark.parametrize("method", ["stn", "centered_stn", "delta_stn"])
@nets
def test_steps_are_those_of_the_network_with_explicit_rates(kind, method):
    """Losses and hypergradients of several steps, with responses per example, checks and the control variate."""
    runs = []
    if kind is TimeFirstAttention:
        pytest.skip("draws in another order of dimensions")
    for make in (intercepted, written):
        torch.manual_seed(0)
        solver = Solver(
            make(kind()),
            method=method,
            inner_optimizer=sgd(0.1),
            outer_optimizer=sgd(0.1),
            response_optimizer=sgd(0.1),
        )
        numbers = [solver.inner_step(data(kind, seed)) for seed in range(3)]
        numbers += [solver.outer_step(None, data(kind, 7)).hypergradient]
        runs.append(torch.cat([number.reshape(-1) for number in numbers]))
    assert bool((runs[0][3:] != 0).all())
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-10)


def snapshot(net):
    """All that a module has, by identity where it is mutable."""
    parts = {}
    for name, module in net.named_modules():
        for key, value in vars(module).items():
            parts[name, key] = dict(value) if isinstance(value, dict) else value
    tensors = {key: value.clone() for key, value in net.state_dict().items()}
    everywhere = [len(vars(hooks)[key]) for key in ("_global_forward_pre_hooks", "_global_forward_hooks")]
    return parts, tensors, everywhere


def assert_untouched(net, before):
    parts, tensors, everywhere = snapshot(net)
    assert parts == before[0]
    assert list(parts) == list(before[0])
    assert tensors.keys() == before[1].keys()
    assert all(torch.equal(tensors[key], value) for key, value in before[1].items())
    assert everywhere == before[2]


class Noisy(Mlp):
    """With buffers that train mode changes, a flag of its own, and a forward that may fail."""

    def build(self, p):
        super().build(p)
        self.norm, self.path, self.broken = nn.BatchNorm1d(9), DropPath(p), []

    def run(self, x, drop):
        if self.broken:
            raise RuntimeError("broken on purpose")
        return self.c(self.path(drop("first", self.norm(self.a(x)))))


def test_nothing_of_the_module_changes():
    net = Noisy()
    net.norm.eval()
    before, state = snapshot(net), torch.get_rng_state()
    solver = Solver(intercepted(net), inner_optimizer=sgd(0.1))
    solver.inner_step(data(Noisy))
    solver.outer_step(data(Noisy), data(Noisy))
    solver.evaluate([data(Noisy)])
    assert_untouched(net, before)
    net.broken.append(True)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        solver.inner_step(data(Noisy))
    with pytest.raises(RuntimeError, match="broken on purpose"):
        bilevel.dropout_rates(net, data(Noisy)[0])
    net.broken.clear()
    assert_untouched(net, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_scan_finds_calls_and_leaves_out_what_is_never_called():
    net = Noisy()
    assert [(place.name, place.rate) for place in find(net)] == [("first", 0.4), ("second", 0.2), ("path", 0.4)]
    assert list(rates_for(net, data(Noisy)[0])) == ["dropout.first", "dropout.path"]
    functional = nn.Sequential(Functional(0.3), nn.Sequential(Functional.__new__(Functional)))[:1]
    hyper = bilevel.dropout_rates(functional, {"input": data(Functional)[0]})
    assert list(hyper) == ["dropout.0.dropout", "dropout.0.dropout_1"]
    assert [float(rate.init) for rate in hyper.values()] == [0.3, 0.3]


def test_groups_and_shared_layers():
    """One layer under two names has one rate; a group starts at the mean of its rates, and zero starts at 0.05."""
    drop = nn.Dropout(0.2)
    net = nn.Sequential(nn.Linear(8, 8), drop, nn.Linear(8, 8), drop, nn.Dropout(0.0), nn.Linear(8, CLASSES)).double()
    each = bilevel.dropout_rates(net)
    assert {name: float(rate.init) for name, rate in each.items()} == {"dropout.1": 0.2, "dropout.4": 0.05}
    assert float(bilevel.dropout_rates(net, groups="one")["dropout"].init) == pytest.approx(0.125)
    some = bilevel.dropout_rates(net, groups={"early": ["1", "2"]}, prefix="rate", zero=0.1)
    assert list(some) == ["rate.early"]
    problem = intercepted(net, some)
    problem.module.shape = Mlp.shape
    with torch.random.fork_rng():
        torch.manual_seed(1)
        x = data(Mlp)[0]
        model = bilevel.problem.Variables(problem).model(problem.params)
        rate = torch.tensor(0.5).double()
        natural = values(problem, lambda name: rate)
        seen = []
        problem.user_losses["inner_loss"] = lambda m, h, b: seen.append(m(x)) or seen[0].sum()
        problem.evaluate("inner_loss", model, natural, None)
        torch.manual_seed(1)
        y = dropout(net[2](dropout(net[0](x), rate)), rate)
    assert torch.equal(seen[0], net[5](y))  # the last one keeps its rate of zero


def test_what_is_wrong_is_said():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.97))
    with pytest.raises(ValueError, match=r"'1' has a rate of 0.97, which is not below high=0.95"):
        bilevel.dropout_rates(net)
    with pytest.raises(ValueError, match="pass a sample"):
        bilevel.dropout_rates(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"bilevel\.dropout_rule"):
        bilevel.dropout_rates(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="nothing is left for the group 'b'"):
        bilevel.dropout_rates(Mlp(), groups={"a": "*", "b": "second"})
    with pytest.raises(ValueError, match="groups must be"):
        bilevel.dropout_rates(Mlp(), groups="each")
    with pytest.raises(TypeError, match=r"nn\.Module"):
        bilevel.dropout_rates([Mlp()])
    with pytest.raises(ValueError, match="0 < zero"):
        bilevel.dropout_rates(Mlp(), zero=0.0)
    rates = bilevel.dropout_rates(Mlp())
    with pytest.raises(ValueError, match="'first', which inner does not have"):
        intercepted(nn.Sequential(nn.Linear(2, 2)), rates)
    twice = rates | bilevel.dropout_rates(Mlp(), prefix="again")
    with pytest.raises(ValueError, match="both the dropout rate of 'first'"):
        intercepted(Mlp(), twice)
    with pytest.raises(TypeError, match="a class of modules"):
        bilevel.dropout_rule(3, rate="p")


def test_calls_that_were_not_looked_for_are_named():
    class Both(Functional):
        def build(self, p):
            super().build(p)
            self.layer = nn.Dropout(p)

        def run(self, x, drop):
            return super().run(self.layer(x), drop)

    problem = intercepted(Both(), bilevel.dropout_rates(Both()))
    with pytest.warns(UserWarning, match=r"a rate of 0.4 that is not tuned.*pass a sample"):
        problem.inner_loss(
            bilevel.problem.Variables(problem).model(problem.params), problem.initial_hyper(), data(Both)
        )


def test_a_call_that_a_network_makes_later_on_is_noticed_as_well():
    """Once a pass has shown that only layers drop, the other modules are not followed until something drops there."""

    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop, self.also = nn.Linear(8, CLASSES), nn.Dropout(0.3), False

        def forward(self, x):
            y = self.layer(self.drop(x))
            return nn.functional.dropout(y, 0.4) if self.also else y

    net = Later().double()
    problem = intercepted(net, bilevel.dropout_rates(net))
    model = bilevel.problem.Variables(problem).model(problem.params)
    batch = torch.ones(4, 8).double(), torch.zeros(4).long()
    for _ in range(3):
        problem.inner_loss(model, problem.initial_hyper(), batch)
    assert "forward" not in vars(net.drop)
    net.also = True
    problem.inner_loss(model, problem.initial_hyper(), batch)
    with pytest.warns(UserWarning, match=r"a rate of 0.4 that is not tuned"):
        problem.inner_loss(model, problem.initial_hyper(), batch)


def test_a_rate_of_what_has_no_examples_must_be_shared():
    class Positions(Net):
        def build(self, p):
            self.table, self.drop = nn.Parameter(torch.ones(3, 8)), nn.Dropout(p)
            self.last = nn.Linear(8, CLASSES)

        def run(self, x, drop):
            return self.last(x * drop("drop", torch.arange(24.0).double().view(3, 8)).mean(0) + self.table.mean(0))

    method = bilevel.CenteredSTN(structure={"table": "none"}, perturb="example")
    with pytest.raises(ValueError, match="shared=True"):
        Solver(intercepted(Positions()), method=method).inner_step(data(Positions))
    hyper = bilevel.dropout_rates(Positions(), shared=True)
    solver = Solver(intercepted(Positions(), hyper), method=bilevel.CenteredSTN(structure={"table": "none"}))
    solver.inner_step(data(Positions))


@pytest.mark.parametrize("method", ["implicit_cg", "unrolled"])
def test_methods_that_differentiate_the_loss_refuse_a_mask(method):
    solver = Solver(intercepted(Mlp()), method=method, inner_optimizer=sgd(0.1))
    batch = [data(Mlp)] * 20 if method == "unrolled" else data(Mlp)
    with pytest.raises(ValueError, match="has no derivative in it"):
        solver.outer_step(batch, data(Mlp))


@pytest.mark.parametrize("method", [pytest.param("centered_stn", marks=pytest.mark.slow), "delta_stn"])
def test_compiled_steps_drop_as_well(method, monkeypatch):
    """The same numbers as without compilation; here the graph is traced and then run as it is."""
    monkeypatch.setattr(torch, "compile", lambda graph, *args, **kwargs: graph)
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        solver = Solver(intercepted(Mlp()), method=method, inner_optimizer=sgd(0.1), compile=compile)
        found.append([solver.inner_step(data(Mlp, seed)) for seed in range(2)])
    torch.testing.assert_close(*found)
