"""The language tasks: how a text is read, what the losses are, which masks are shared, and that every method runs."""

import dataclasses
import gc
import math
import weakref
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bilevel
from applications import language
from applications.data import synthetic_text
from applications.language import RANGES, TASKS, training_loss, validation_loss
from applications.language_model import PADDING, RATES, LanguageModel, Reading, Streams
from applications.run import measure, run
from applications.task import FIXED, SELF_TUNING

PTB = TASKS[0]
SMALL = dataclasses.replace(
    PTB.presets["quick"], batch_size=20, length=25, width=8, limit=4000, learning_rate=1.0, epochs=3, warmup=1
)
OFF = dict.fromkeys(RATES, 0.0)
PLACES = dict(zip(RATES, ("input", "hidden", "output", "input", "weights"), strict=True))


def build(settings=SMALL, **init):
    return PTB.build(settings, data=None, folder=None, seed=0, device=torch.device("cpu"), init=init)


def network(*, seed=0, words=7, width=4):
    torch.manual_seed(seed)
    net = LanguageModel(words=words, width=width, layers=2).double()
    for weight in net.parameters():
        nn.init.normal_(weight, std=0.5)
    return net


def problem(net, **changes):
    hyper = {
        name: bilevel.interval(*bounds, init=changes.get(name, 0.05), shared=name in language.SHARED)
        for name, bounds in RANGES.items()
    }
    return bilevel.Problem(net, inner_loss=training_loss, outer_loss=validation_loss, hyper=hyper)


def random_tokens(count, words=7, seed=0):
    return torch.randint(words, (count,), generator=torch.Generator().manual_seed(seed))


@given(count=st.integers(1, 60), streams=st.integers(1, 6), length=st.integers(1, 9))
def test_every_token_is_a_target_once_and_follows_its_input(count, streams, length):
    tokens = random_tokens(count, words=100)
    if count < streams:
        with pytest.raises(ValueError, match=f"{count} tokens cannot be read in {streams} streams"):
            Streams(tokens, streams=streams, length=length, end=5)
        return
    text = Streams(tokens, streams=streams, length=length, end=5)
    batches = list(text)
    assert len(batches) == len(text)
    assert all(x.shape == y.shape == (streams, length) for x, y, _ in batches[:-1])
    assert 1 <= batches[-1][0].shape[1] <= length
    x, y = (torch.cat([batch[part] for batch in batches], 1).flatten() for part in (0, 1))
    assert y[:count].tolist() == tokens.tolist()
    assert (y[count:] == PADDING).all()
    assert x[:count].tolist() == [5, *tokens[:-1].tolist()]
    assert 0 <= len(x) - count < streams
    counts = [int((y != PADDING).sum()) for _, y, _ in batches]
    assert all(memory.tokens == pytest.approx(sum(counts) / len(counts)) for _, _, memory in batches)


def loss_token_by_token(net, tokens, end):
    """The sum of the log-losses in one pass over a text, a step at a time, by PyTorch's own cells."""
    cells = [nn.LSTMCell(4, 4).double() for _ in net.layers]
    for cell, layer in zip(cells, net.layers, strict=True):
        cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in layer.state_dict().items()})
    states = [None] * len(cells)
    total, before = 0.0, end
    for token in tokens.tolist():
        x = net.encoder.weight[[before]]
        for index, cell in enumerate(cells):
            states[index] = cell(x, states[index])
            x = states[index][0]
        total -= float((x @ net.encoder.weight.T + net.decoder.bias).log_softmax(1)[0, token])
        before = token
    return total


@pytest.mark.parametrize(("count", "streams", "length"), [(53, 1, 7), (53, 1, 53), (54, 4, 5), (9, 4, 2), (23, 5, 1)])
@torch.no_grad()
def test_evaluation_is_the_mean_log_loss_of_one_pass_over_each_stream(count, streams, length):
    net, tokens = network(), random_tokens(count)
    steps = math.ceil(count / streams)
    ends = [3, *tokens[steps - 1 :: steps].tolist()]
    total = sum(loss_token_by_token(net, part, end) for part, end in zip(tokens.split(steps), ends, strict=False))
    text = Streams(tokens, streams=streams, length=length, end=3)
    stated = problem(net)
    found = bilevel.Solver(stated, method="centered_stn").evaluate(text)
    assert found == pytest.approx(total / count, rel=1e-11)
    experiment = dataclasses.replace(build(), problem=stated, net=net)
    hyper = {name: torch.tensor(0.5) for name in RANGES}
    assert measure(experiment, hyper, text) == pytest.approx(
        {"loss": total / count, "perplexity": math.exp(total / count)}, rel=1e-11
    )


class Spy:
    """A loss that notes the states from which it starts, and those in which it ends."""

    def __init__(self, loss):
        self.loss, self.calls = loss, []

    def __call__(self, model, hyper, batch):
        _, _, memory = batch
        start, leave, states = memory.start(), memory.leave, []

        class Noted:
            tokens = memory.tokens

            def start(self):
                return memory.start()

            def leave(self, state):
                states.append(state)
                leave(state)

        result = self.loss(model, hyper, (*batch[:2], Noted()))
        self.calls.append((id(memory), start, states[0]))
        return result


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("method", "passes"), [("stn", 1), ("centered_stn", 2), ("delta_stn", 2)])
def test_a_batch_starts_where_the_last_evaluation_of_the_batch_before_ended(method, passes):
    net, text = network(), Streams(random_tokens(60), streams=3, length=6, end=0)
    inner, outer = Spy(training_loss), Spy(validation_loss)
    stated = bilevel.Problem(net, inner_loss=inner, outer_loss=outer, hyper=problem(net).space.hyper)
    solver = bilevel.Solver(stated, method=method, inner_optimizer=partial(torch.optim.SGD, lr=0.1))
    for train, valid in islice(zip(text, text, strict=True), 3):
        solver.inner_step(train)
        solver.outer_step(train, valid)
        solver.evaluate(text)
    assert len(inner.calls) == 3 * passes
    before = None
    for index in range(3):
        *others, last = inner.calls[passes * index : passes * (index + 1)]
        for _, start, _ in (*others, last):
            assert (start is None) if index == 0 else all(map(torch.equal, start, before))
            assert start is None or not any(part.requires_grad for part in start)
        for _, _, end in others:
            assert not torch.equal(end[0], last[2][0])
        before = last[2]
    steps = [outer.calls[index * (1 + len(text))] for index in range(3)]
    passes = [outer.calls[1 + index * (1 + len(text)) :][: len(text)] for index in range(3)]
    for chain in (steps, *passes):
        assert chain[0][1] is None
        for (_, _, end), (_, start, _) in pairwise(chain):
            assert all(map(torch.equal, start, end))


def test_the_state_of_the_weights_is_unperturbed():
    """That of a plain pass with the same weights, though the second evaluation is far away."""
    net, text = network(), Streams(random_tokens(60), streams=3, length=6, end=0)
    stated = problem(net, **dict.fromkeys(RATES, 1e-9))
    solver = bilevel.Solver(stated, method=bilevel.CenteredSTN(scale=1e-3))
    for part in solver.response.theta.gate.parameters():
        nn.init.normal_(part, std=30.0)
    batch, following = islice(text, 2)
    solver.inner_step(batch)
    expected = net(batch[0], None, OFF).state
    for found, part in zip(following[2].start(), expected, strict=True):
        torch.testing.assert_close(found, part, rtol=1e-6, atol=1e-6)


def test_memories_of_past_batches_are_freed():
    net, refs = network(), []
    for x, y, memory in Streams(random_tokens(60), streams=3, length=4, end=0):
        validation_loss(bilevel.Model({}, net.eval()), OFF, (x, y, memory))
        refs.append(weakref.ref(memory))
    del x, y, memory
    gc.collect()
    assert not any(ref() for ref in refs)
    kept = []
    for batch in islice(Streams(random_tokens(60), streams=3, length=4, end=0), 4):
        validation_loss(bilevel.Model({}, net), OFF, batch)
        kept.append(weakref.ref(batch[2]))
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True, False, False]


@given(seed=st.integers(0, 99), steps=st.integers(1, 4), ar=st.floats(0, 4), tar=st.floats(0, 4))
def test_losses_are_those_of_a_loop_over_the_tokens(seed, steps, ar, tar):
    generator = torch.Generator().manual_seed(seed)
    logits, output, dropped = (torch.randn(3, steps, size, generator=generator).double() for size in (5, 2, 2))
    y = torch.randint(5, (3, steps), generator=generator)
    y[2, -1] = PADDING
    state = (torch.zeros(3, 2, 2), torch.zeros(3, 2, 2))
    model = bilevel.Model({}, lambda x, start, rates: Reading(logits, output, dropped, state))
    hyper = {name: torch.tensor(0.5) for name in RATES} | {"ar": torch.tensor(ar), "tar": torch.tensor(tar)}
    _, _, memory = next(iter(Streams(random_tokens(40), streams=3, length=steps, end=0)))
    entropy, ar_sum, tar_sum = 0.0, 0.0, 0.0
    for b in range(3):
        for t in range(steps):
            if y[b, t] != PADDING:
                row = logits[b, t].numpy()
                entropy += np.log(np.exp(row).sum()) - row[y[b, t]]
            for k in range(2):
                ar_sum += float(dropped[b, t, k]) ** 2
                tar_sum += float(output[b, t, k] - output[b, t - 1, k]) ** 2 if t else 0.0
    slow = entropy / (3 * steps - 1) + hyper["ar"] * ar_sum / (6 * steps)
    slow += hyper["tar"] * tar_sum / (6 * (steps - 1)) if steps > 1 else 0.0
    found = training_loss(model, hyper, (y, y, memory))
    torch.testing.assert_close(found, torch.as_tensor(slow).double(), rtol=1e-6, atol=1e-6)
    loss, others = validation_loss(model, hyper, (y, y, memory))
    assert float(loss) == pytest.approx(entropy / memory.tokens, rel=1e-9)
    assert others == {}


def look(net, tokens, rates):
    """Input and output of every layer, the recurrent weight it ran with, and what the network returned."""
    seen = []
    hooks = [
        layer.register_forward_hook(
            lambda layer, args, output: seen.append((args[0], output[0], layer.weight_hh_l0.detach()))
        )
        for layer in net.layers
    ]
    torch.manual_seed(0)
    reading = net(tokens, None, OFF | rates)
    for hook in hooks:
        hook.remove()
    return seen, reading


@pytest.mark.parametrize(
    ("name", "per_stream"), [*((name, False) for name in RATES), *((name, True) for name in RATES[:-1])]
)
def test_masks_are_shared_over_time_or_over_words_or_over_streams(name, per_stream):
    """Each rate acts in its place alone; a stream with rate zero keeps all."""
    net, tokens = network(width=30), random_tokens(4 * 40).reshape(4, 40)
    rates = torch.tensor([0.0, 0.25, 0.5, 0.5]) if per_stream else torch.tensor(0.5)
    (first, second), reading = look(net, tokens, {name: rates})
    kept = {
        "input": first[0] / net.encoder(tokens),
        "hidden": second[0] / first[1],
        "output": reading.dropped / reading.output,
        "weights": torch.stack([
            seen[2] / own.weight_hh_l0 for seen, own in zip((first, second), net.layers, strict=True)
        ]),
    }
    torch.testing.assert_close(reading.logits, net.decoder(reading.dropped))
    mask = kept.pop(PLACES[name])
    for elsewhere in kept.values():
        torch.testing.assert_close(elsewhere, torch.ones_like(elsewhere))
    if name == "drop_connect":
        assert not torch.equal(mask[0] == 0, mask[1] == 0)
        torch.testing.assert_close(mask[mask != 0], torch.full_like(mask[mask != 0], 2.0))
        assert 0.4 < (mask == 0).double().mean() < 0.6
        return
    for stream, rate in enumerate(rates.expand(4).tolist()):
        values = mask[stream]  # (T, width)
        kept_values = values[values != 0]
        torch.testing.assert_close(kept_values, torch.full_like(kept_values, 1 / (1 - rate)))
        if name == "embedding_dropout":
            for word in range(7):
                rows = values[tokens[stream] == word]
                assert (rows == 0).all() or (rows != 0).all()
        else:
            assert ((values == 0) == (values[:1] == 0)).all()
        assert (values == 0).any() == (rate > 0)
    assert not torch.equal(mask[2] == 0, mask[3] == 0)


def test_nothing_is_dropped_in_eval_mode():
    net, tokens = network().eval(), random_tokens(12).reshape(3, 4)
    one, other = (net(tokens, None, dict.fromkeys(RATES, rate)) for rate in (0.0, 0.9))
    torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=0)


@pytest.mark.parametrize("linearized", [False, True])
@torch.no_grad()
def test_each_stream_responds_to_its_own_perturbation(linearized):
    """As a network whose weights are changed for that stream alone; the tied embedding responds in both its places."""
    net = network().eval()
    response = bilevel.DeltaSTN().bind(problem(net))
    for part in response.theta.gate.parameters():
        nn.init.normal_(part, std=0.5)
    assert "encoder.weight" in response.change(torch.ones(7, dtype=torch.float64))
    tokens, noise = random_tokens(15).reshape(3, 5), torch.randn(3, 7).double()
    state = (torch.randn(3, 2, 4).double(), torch.randn(3, 2, 4).double())
    together = response.affine(noise, linearized=linearized)(tokens, state, OFF)
    for i in range(3):
        part = tuple(value[i : i + 1] for value in state)
        alone = response.affine(noise[i], linearized=linearized)(tokens[i : i + 1], part, OFF)
        for found, expected in zip((*together[:3], *together[3]), (*alone[:3], *alone[3]), strict=True):
            torch.testing.assert_close(found[i : i + 1], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", [*SELF_TUNING, *FIXED])
def test_every_method_trains(method, tmp_path):
    summary = run(PTB, method, SMALL, out=tmp_path, data=None, progress=False, plots=False)
    assert summary["stopped"] == "epochs"
    assert summary["valid"]["loss"] < math.log(200)  # the loss of a guess
    assert summary["test"]["perplexity"] == pytest.approx(math.exp(summary["test"]["loss"]))
    moved = [name for name, value in summary["hyper"].items() if value != pytest.approx(0.05, rel=1e-5)]
    assert moved == ([] if method in FIXED else list(RANGES))


@pytest.mark.parametrize("method", [*SELF_TUNING, *FIXED])
def test_an_epoch_of_wikitext2(method, tmp_path):
    settings = dataclasses.replace(SMALL, epochs=1, warmup=0, limit=1000)
    summary = run(TASKS[1], method, settings, out=tmp_path, data=None, progress=False, plots=False)
    assert (summary["task"], summary["epochs"]) == ("wikitext2", 1)
    assert 1 < summary["test"]["perplexity"] < 1000


def test_a_run_that_ended_by_its_learning_rate_is_over(tmp_path):
    settings = dataclasses.replace(SMALL, epochs=9, limit=200, stop_below=2.0)
    first, again = (run(PTB, "fixed", settings, out=tmp_path, data=None, progress=False, plots=False) for _ in "ab")
    assert first["stopped"] == "callback"
    assert again == first


@pytest.mark.filterwarnings("ignore:.*leaves no round:bilevel.TuningWarning")
def test_a_run_goes_on(tmp_path):
    for epochs in (1, 2):
        settings = dataclasses.replace(SMALL, epochs=epochs)
        summary = run(PTB, "delta_stn", settings, out=tmp_path, data=None, progress=False, plots=False)
        assert summary["epochs"] == epochs


@pytest.mark.filterwarnings("ignore:the hyperparameters cannot move far:bilevel.TuningWarning")
@pytest.mark.parametrize("method", ["delta_stn", "fixed"])
def test_the_learning_rate_drops_after_epochs_without_improvement_until_the_run_ends(method, tmp_path, monkeypatch):
    """Patience 2: the second epoch in a row that is not below the best quarters the rate, and counting starts anew."""
    losses = [5.0, 4.0, 4.0, 3.9999, 4.1, 4.1, 4.1, 4.0, 3.0, 3.5, 3.0, 2.0]
    rates = [1.0, 1.0, 1.0, 1.0, 1.0, 1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 16, 1 / 64]
    script, seen = iter(losses), []
    monkeypatch.setattr(bilevel.Solver, "evaluate", lambda self, loader: next(script))

    def note(done):
        if done.validation_loss is not None:
            seen.append({name: done.solver.optimizers[name].param_groups[0]["lr"] for name in inner})

    inner = ("weights", "response") if method == "delta_stn" else ("weights",)
    settings = dataclasses.replace(SMALL, learning_rate=1.0, patience=2, epochs=100, limit=200, stop_below=0.0157)
    summary = run(PTB, method, settings, out=tmp_path, data=None, callbacks=[note], progress=False, plots=False)
    assert seen == [dict.fromkeys(inner, rate) for rate in rates]
    assert summary["stopped"] == "callback"


@pytest.mark.parametrize(("given_rate", "rate"), [(None, 1.0), (0.3, 0.3)])
def test_the_response_may_have_a_learning_rate_of_its_own(given_rate, rate):
    experiment = build(dataclasses.replace(SMALL, response_learning_rate=given_rate))
    arguments = {name: value for name, value in experiment.solve.items() if name != "callbacks"}
    solver = bilevel.Solver(experiment.problem, method="stn", **arguments)
    rates = {name: solver.optimizers[name].param_groups[0]["lr"] for name in ("weights", "response")}
    assert rates == {"weights": 1.0, "response": rate}


def test_it_is_the_set_up_of_the_paper():
    paper = PTB.presets["paper"]
    assert paper == TASKS[1].presets["paper"]
    numbers = [paper.width, paper.layers, paper.batch_size, paper.length, paper.learning_rate, paper.clip]
    assert numbers == [650, 2, 40, 70, 30.0, 0.25]
    assert [paper.patience, paper.stop_below, paper.warmup, paper.outer_learning_rate] == [5, 0.0003, 10, 0.01]
    assert (paper.scale, paper.entropy) == (1.0, None)
    experiment = build(ar=0.5)
    hyper = experiment.problem.space.hyper
    assert {name: (h.low, h.high) for name, h in hyper.items()} == {
        **{name: (0.0, 0.95) for name in RATES},
        "ar": (0.0, 4.0),
        "tar": (0.0, 4.0),
    }
    assert {name: float(h.init) for name, h in hyper.items()} == dict.fromkeys(RANGES, 0.05) | {"ar": 0.5}
    assert [name for name, h in hyper.items() if h.shared] == ["drop_connect", "ar", "tar"]
    assert experiment.search == {name: (0.0, 0.75 if name in RATES else 4.0) for name in RANGES}
    assert isinstance(experiment.solve["outer_optimizer"]([nn.Parameter(torch.ones(1))]), torch.optim.Adam)
    assert experiment.net.decoder.weight is experiment.net.encoder.weight
    assert experiment.solve["inner_clip"] == SMALL.clip


def test_a_limit_takes_the_beginning_of_the_training_text_and_all_of_the_others():
    experiment, text = build(), synthetic_text()
    for streams, tokens in ((experiment.train, text.train[:4000]), (experiment.test, text.test)):
        y = torch.cat([y for _, y, _ in streams], 1).flatten()
        assert torch.equal(y, tokens)
    assert experiment.valid.count == len(text.valid)
    assert [len(streams.x) for streams in (experiment.train, experiment.valid, experiment.test)] == [20, 20, 10]
    assert experiment.valid.x[0, 0] == text.vocabulary.index("<eos>")


def test_the_seed_decides_the_weights_and_nothing_else_changes():
    before = torch.get_rng_state()
    one, same, other = (
        PTB.build(SMALL, data=None, folder=None, seed=seed, device=torch.device("cpu"), init={}) for seed in (1, 1, 2)
    )
    assert torch.equal(one.net.encoder.weight, same.net.encoder.weight)
    assert not torch.equal(one.net.encoder.weight, other.net.encoder.weight)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patience": 0}, r"--patience must be at least 1, got 0"),
        ({"test_streams": 0}, r"--test-streams must be at least 1, got 0"),
        ({"limit": 19}, r"--limit must be at least --batch-size.*got 19 and 20"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(dataclasses.replace(SMALL, **changes))


def test_an_unknown_hyperparameter_is_refused():
    with pytest.raises(ValueError, match=r"--init decay: ptb has no such hyperparameter, but input_dropout, "):
        build(decay=0.1)
