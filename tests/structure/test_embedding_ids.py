"""Indices into a table: those that belong to examples, and those that are the same for all, whatever their values."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_rules import compare, double_precision, one_by_one, run, setup  # noqa: F401 (a fixture)
from torch import nn
from torch.func import functional_call, jvp

import bilevel

D, WORDS = 4, 9


class Category(nn.Module):
    """One index per example: a table, and a layer."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(WORDS, D), nn.Linear(D, 2)

    def forward(self, ids):
        return self.out(torch.tanh(self.table(ids)))


class Found(Category):
    """The index comes from a comparison of numbers."""

    def forward(self, x):
        return super().forward(torch.bucketize(x, torch.linspace(-1, 1, WORDS - 2)))


class Words(nn.Module):
    """Words and positions, each from a table; ``positions`` makes the indices of the latter."""

    def __init__(self, positions):
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(WORDS, D), nn.Embedding(WORDS, D), nn.Linear(D, 2)
        self.register_buffer("numbers", torch.arange(WORDS))
        self.positions = positions

    def forward(self, ids):
        return self.out(torch.tanh(self.words(ids) + self.places(self.positions(self, ids)).to(torch.float64)))


class Relative(nn.Module):
    """Attention with a learned bias for each distance, in buckets that grow as those of T5."""

    def __init__(self):
        super().__init__()
        self.words, self.bias, self.out = nn.Embedding(WORDS, D), nn.Embedding(4, 2), nn.Linear(D, 2)

    def forward(self, ids):
        x = self.words(ids)
        place = torch.arange(ids.shape[1])
        distance = (place[None] - place[:, None]).abs()
        far = (1 + torch.log(distance.float() + 1) / math.log(3)).to(torch.long).clamp(max=3)
        return self.attend(x, self.bias(torch.where(distance < 2, distance, far)).permute(2, 0, 1)[None])

    def attend(self, x, bias):
        heads = x.unflatten(-1, (2, D // 2)).transpose(1, 2)
        shares = (heads @ heads.transpose(-2, -1) + bias).softmax(-1)
        return self.out((shares @ heads).transpose(1, 2).flatten(2))


class MaskedRelative(Relative):
    """The same, with scores that are masked in the bias, for each example or for all."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, ids):
        place = torch.arange(ids.shape[1])
        bias = self.bias((place[None] - place[:, None]).abs().clamp(max=3)).permute(2, 0, 1)[None]
        return self.attend(self.words(ids), self.mask(bias, ids))


class Biased(MaskedRelative):
    """The same, through PyTorch's own attention."""

    def attend(self, x, bias):
        heads = x.unflatten(-1, (2, D // 2)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(heads, heads, heads, bias).transpose(1, 2).flatten(2))


BIASES = {
    "with a dimension for examples": lambda bias, ids: bias,
    "without": lambda bias, ids: bias[0],
    "the same for all heads": lambda bias, ids: bias[0, 0],
    "masked": lambda bias, ids: torch.where((ids > 3)[:, None, None], bias, -1.0),
}
MASKS = {
    "of examples": lambda bias, ids: torch.where((ids > 3)[:, None, None], bias, -1.0),
    "of examples, a method": lambda bias, ids: bias.where((ids > 3)[:, None, None], torch.tensor(-1.0)),
    "of examples, the other way": lambda bias, ids: torch.where((ids > 3)[:, None, None], -1.0, bias),
    "of examples, filled": lambda bias, ids: bias.masked_fill((ids > 3)[:, None, None], -1.0),
    "of examples, without its own dimension": lambda bias, ids: bias[0].masked_fill((ids > 3)[:, None, None], -1.0),
    "of examples, by numbers": lambda bias, ids: torch.where(
        (ids > 3)[torch.arange(len(ids))[:, None, None, None], torch.arange(ids.shape[1])], bias, -1.0
    ),
    "of all": lambda bias, ids: bias.masked_fill(torch.ones(bias.shape[-2:]).triu(1).bool(), -1.0),
}


POSITIONS = {
    "a range": lambda net, ids: torch.arange(ids.shape[1]),
    "a row": lambda net, ids: torch.arange(ids.shape[1])[None],
    "a buffer": lambda net, ids: net.numbers[: ids.shape[1]],
    "expanded": lambda net, ids: torch.arange(ids.shape[1]).expand(ids.shape),
    "expanded and shifted": lambda net, ids: torch.arange(ids.shape[1]).expand(ids.shape) + 1,
    "repeated": lambda net, ids: torch.arange(ids.shape[1]).repeat(len(ids), 1),
    "zeros": lambda net, ids: torch.zeros(ids.shape, dtype=torch.long),
    "zeros like the words": lambda net, ids: torch.zeros_like(ids),
    "counted words": lambda net, ids: (ids > 2).cumsum(1),
    "shifted words": lambda net, ids: torch.zeros(ids.shape, dtype=torch.long).index_copy(
        1, torch.tensor([0]), ids[:, :1]
    ),
}


def check(net, x, *, linearized):
    weights, theta, noise = setup(net, len(x))
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    slow = one_by_one(net, frozen, theta, noise, x, linearized=linearized)
    compare(fast, slow, weights, theta, linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("ids", [[3, 4, 5], [0, 1, 2, 3], [6], [5, 4, 3], [2, 2], [7, 1, 4]], ids=str)
def test_one_index_per_example_may_have_any_values(ids, linearized):
    """Consecutive ones, which could be positions; and a last batch of one."""
    torch.manual_seed(0)
    check(Category(), torch.tensor(ids), linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_an_index_that_is_computed_from_the_input_belongs_to_its_example(count, linearized):
    torch.manual_seed(0)
    check(Found(), torch.linspace(-1, 1, count), linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count, steps", [(1, 1), (1, 3), (3, 1), (3, 3), (4, 2), (2, 5)])
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_of_sequences_of_any_length(kind, count, steps, linearized):
    """As many steps as examples included."""
    torch.manual_seed(10 * count + steps)
    check(Words(POSITIONS[kind]), torch.randint(WORDS, (count, steps)), linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count, steps", [(1, 1), (1, 4), (4, 4), (3, 5), (5, 3)])
def test_relative_positions_of_sequences_of_any_length(count, steps, linearized):
    torch.manual_seed(10 * count + steps)
    check(Relative(), torch.randint(WORDS, (count, steps)), linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count, steps", [(1, 3), (3, 3), (2, 4)])
@pytest.mark.parametrize("kind", MASKS)
def test_a_bias_that_is_masked(kind, count, steps, linearized):
    torch.manual_seed(10 * count + steps)
    check(MaskedRelative(MASKS[kind]), torch.randint(WORDS, (count, steps)), linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count, steps", [(1, 3), (3, 3), (2, 4)])
@pytest.mark.parametrize("kind", BIASES)
def test_a_bias_of_attention(kind, count, steps, linearized):
    torch.manual_seed(10 * count + steps)
    check(Biased(BIASES[kind]), torch.randint(WORDS, (count, steps)), linearized=linearized)


@pytest.mark.parametrize("linearized", [False, True])
def test_indices_that_differ_by_row_but_come_from_nowhere(linearized):
    """Row i of them is added to example i, and responds as that does."""
    torch.manual_seed(0)
    net = Words(lambda net, ids: (net.numbers[: len(ids), None] + net.numbers[: ids.shape[1]]) % WORDS)
    x = torch.randint(WORDS, (4, 3))
    weights, theta, noise = setup(net, len(x))
    fast = run(net, weights, theta, noise, x, linearized=linearized)
    frozen = {name: weight.detach() for name, weight in weights.items()} if linearized else weights
    rows = []
    for i, shift in enumerate(noise):
        if linearized:
            rows.append(
                sum(jvp(lambda params: functional_call(net, params, (x,)), (frozen,), (theta(shift, frozen),)))[i]
            )
        else:
            rows.append(
                functional_call(net, {name: frozen[name] + theta(shift, frozen)[name] for name in frozen}, (x,))[i]
            )
    compare(fast, torch.stack(rows), weights, theta, linearized=linearized)


class Beside(nn.Module):
    """Positions expanded to one copy for each example, put beside the words rather than added."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(WORDS, D), nn.Embedding(WORDS, D), nn.Linear(2 * D, 2)

    def forward(self, ids):
        places = self.places(torch.arange(ids.shape[1]).expand(ids.shape))
        return self.out(torch.cat([self.words(ids), places], -1))


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("count, steps", [(1, 3), (3, 3), (4, 2)])
def test_expanded_positions_are_one_copy_for_each_example(count, steps, linearized):
    torch.manual_seed(0)
    check(Beside(), torch.randint(WORDS, (count, steps)), linearized=linearized)


class Trimmed(nn.Module):
    """Words, positions, attention that does not look at padding, and the mean over words."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D, padding_idx=0), nn.Embedding(WORDS, D)
        self.layer, self.out = nn.TransformerEncoderLayer(D, 2, 6, dropout=0.0, batch_first=True), nn.Linear(D, 2)

    def forward(self, ids):
        padding = ids == 0
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = self.layer(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)
        return self.out(x.sum(1) / (~padding).sum(1, keepdim=True))


def trimmed(lengths):
    """Sequences of these lengths, padded to the longest."""
    ids = torch.randint(1, WORDS, (len(lengths), max(lengths)))
    return ids * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


LENGTHS = [[1, 2, 2], [3, 1, 2], [5, 4, 2], [1, 1, 1], [4], [1]]


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_sequences_that_are_trimmed_to_the_longest(lengths, linearized):
    """Each example as if it were alone; also where the longest has as many steps as there are examples."""
    torch.manual_seed(0)
    check(Trimmed(), trimmed(lengths), linearized=linearized)


@pytest.mark.parametrize("method", bilevel.METHODS)
def test_every_method_runs_on_batches_of_other_lengths(method):
    torch.manual_seed(0)
    net, data = Trimmed(), [trimmed(lengths) for lengths in LENGTHS]

    def loss(model, hyper, ids):
        fit = F.cross_entropy(model(ids), ids[:, 0] % 2, reduction="none")
        return fit + hyper["decay"] * bilevel.l2(model.params)

    problem = bilevel.Problem(net, inner_loss=loss, outer_loss=loss, hyper={"decay": bilevel.positive(0.1)})
    settings = bilevel.METHODS[method]
    if isinstance(settings, bilevel.Implicit):
        settings = replace(settings, curvature="gauss_newton")  # the Hessian is not positive definite at the start
    elif isinstance(settings, bilevel.Unrolled):
        settings = replace(settings, steps=3, truncate=None if settings.truncate is None else 2)
    steps = 0 if isinstance(settings, bilevel.Unrolled) else 1
    run = bilevel.solve(problem, data, data[::-1], method=settings, epochs=1, inner_steps=steps, progress=False)
    assert run.solver.evaluate(data) > 0
