"""Small tuning tasks of many kinds, by which ``defaults.py`` chooses the library's defaults.

A task is a function of a seed, which draws the split, the label noise and the weights. Those in ``BUILT_IN`` need no
files; those in ``REAL`` read the folders given as ``roots``. A run with Δ-STN takes 8 to 25 seconds on one core, the
largest 40.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel
from applications import data as datasets
from applications import sklearn_datasets
from bilevel.functional import cross_entropy, dropout, embedding_dropout, gaussian_noise, mse_loss, per_example

Roots = tuple[Path, ...]
Parts = Sequence[tuple[Tensor, Tensor]]
Factory = Callable[[Any], torch.optim.Optimizer]


class Batches:
    """Batches of tensors, shuffled anew in every pass by the global random state; faster than a ``DataLoader``.

    Example:
        >>> [len(x) for x, in Batches((torch.arange(5),), 2)]
        [2, 2, 1]
    """

    def __init__(self, tensors: tuple[Tensor, ...], size: int, *, whole: bool = False) -> None:
        """Cut ``tensors`` into batches of ``size``; ``whole`` leaves out a last one that is smaller."""
        self.tensors, self.size, self.whole = tensors, min(size, len(tensors[0])), whole

    def __len__(self) -> int:
        """Count the batches.

        Returns:
            Their number.
        """
        count = len(self.tensors[0])
        return count // self.size if self.whole else -(-count // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Pass over the examples once.

        Yields:
            A batch of each tensor.
        """
        rows = torch.randperm(len(self.tensors[0]))
        for part in rows.split(self.size)[: len(self)]:
            yield tuple(tensor[part] for tensor in self.tensors)

    def larger(self, factor: int) -> Batches:
        """The same examples in batches that are larger by a factor."""
        return Batches(self.tensors, self.size * factor, whole=self.whole)


@dataclass(frozen=True)
class Task:
    """A problem with its data and its budget.

    Attributes:
        name: Of the task.
        problem: Weights, losses, and hyperparameters where they start.
        train: Batches for the inner loss.
        valid: Batches for the outer loss.
        test: Batches that no method sees.
        updates: How many updates of the weights a run makes.
        inner_optimizer: Makes the optimizer of the weights; None leaves it to the library.
        hand: Better hyperparameters than those of the start, picked by hand on seed 0.
        ranges: Between which values a random search draws each hyperparameter; in logarithms where it is positive.
    """

    name: str
    problem: bilevel.Problem
    train: Batches
    valid: Batches
    test: Batches
    updates: int
    inner_optimizer: Factory | None
    hand: Mapping[str, Any]
    ranges: Mapping[str, tuple[float, float]]


class MLP(nn.Module):
    """Linear maps with ReLU between them, and a dropout before each of the last ones, as many as there are rates."""

    def __init__(self, *sizes: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, x: Tensor, rates: Tensor | None = None) -> Tensor:
        """Predict, with one dropout rate per layer, and perhaps for each example."""
        count = 0 if rates is None else rates.shape[-1]
        x = x.flatten(1)
        for index, layer in enumerate(self.layers):
            x = F.relu(x) if index else x
            place = index - len(self.layers) + count
            if rates is not None and place >= 0:
                x = dropout(x, rates[..., place], training=self.training)
            x = layer(x)
        return x


class CNN(nn.Module):
    """Two convolutions with batch norm and a linear layer; dropout of channels, then of features."""

    def __init__(self, inputs: int, channels: tuple[int, int], side: int, classes: int = 10) -> None:
        """Draw the weights; ``side`` is that of the images."""
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, channels[0], 3, padding=1), nn.Conv2d(*channels, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels[0]), nn.BatchNorm2d(channels[1])
        self.out = nn.Linear(channels[1] * (side // 4) ** 2, classes)

    def forward(self, x: Tensor, rates: Tensor) -> Tensor:
        """Predict logits, with two dropout rates."""
        x = F.max_pool2d(F.relu(self.norm1(self.first(x))), 2)
        x = dropout(x, rates[..., 0], shared_dims=(2, 3), training=self.training)
        x = F.max_pool2d(F.relu(self.norm2(self.second(x))), 2).flatten(1)
        y: Tensor = self.out(dropout(x, rates[..., 1], training=self.training))
        return y


class Bag(nn.Module):
    """Embeddings of words, averaged with attention, and a hidden layer; drops words, then hidden units."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.embedding, self.score = nn.Embedding(words, width), nn.Linear(width, 1)
        self.hidden, self.out = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor, rates: Tensor) -> Tensor:
        """Predict logits, with two dropout rates."""
        x, size = self.embedding(tokens), self.embedding.num_embeddings
        x = embedding_dropout(tokens, x, rates[..., 0], size=size, training=self.training)
        x = (x * self.score(torch.tanh(x)).softmax(1)).sum(1)
        y: Tensor = self.out(dropout(F.relu(self.hidden(x)), rates[..., 1], training=self.training))
        return y


class Reader(nn.Module):
    """An LSTM that predicts the next word of a sequence; dropout of its inputs and outputs."""

    def __init__(self, words: int, width: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.embedding, self.out = nn.Embedding(words, width), nn.Linear(width, words)
        self.lstm = bilevel.nn.LSTM(width, width, batch_first=True)

    def forward(self, tokens: Tensor, rates: Tensor) -> Tensor:
        """Predict logits ``(B, words, T)``, with two dropout rates."""
        x = dropout(self.embedding(tokens), rates[..., 0], shared_dims=1, training=self.training)
        x, _ = self.lstm(x)
        y: Tensor = self.out(dropout(x, rates[..., 1], shared_dims=1, training=self.training))
        return y.movedim(-1, 1)


def problem(net: nn.Module, hyper: Mapping[str, bilevel.Hyper], *, regression: bool = False) -> bilevel.Problem:
    """The problem whose regularizers have these names.

    Args:
        net: The network, called as ``net(x)``, or as ``net(x, rates)`` with ``dropout``.
        hyper: Of ``decay`` (one, or one for each weight that is a matrix), ``dropout`` (rates), ``noise`` (of the
            inputs), ``contrast`` (a random factor of each image), ``smoothing`` (of labels) and ``weights`` (of
            classes).
        regression: Squared error instead of cross entropy.

    Returns:
        The problem.
    """
    matrices = [name for name, value in net.named_parameters() if value.ndim > 1]

    def predict(model: bilevel.Model, values: Mapping[str, Tensor], x: Tensor) -> Any:
        return model(x, values["dropout"]) if "dropout" in hyper else model(x)

    def inner(model: bilevel.Model, values: Mapping[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if "contrast" in hyper:
            factor = 2 * torch.rand(len(x), *[1] * (x.ndim - 1)) - 1
            x = x * (1 + per_example(values["contrast"], x) * factor)
        if "noise" in hyper:
            x = gaussian_noise(x, values["noise"])
        prediction = predict(model, values, x)
        if regression:
            loss = mse_loss(prediction.squeeze(-1), y)
        else:
            smoothing = values["smoothing"] if "smoothing" in hyper else 0.0
            weight = values["weights"] if "weights" in hyper else None
            loss = cross_entropy(prediction, y, label_smoothing=smoothing, weight=weight)
        if "decay" not in hyper:
            return loss
        decay = values["decay"]
        if hyper["decay"].init.ndim == 0:
            return loss + decay * bilevel.l2([model.params[name] for name in matrices])
        for index, name in enumerate(matrices):
            loss = loss + decay[..., index] * bilevel.l2([model.params[name]])
        return loss

    def outer(model: bilevel.Model, values: Mapping[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        prediction = predict(model, values, x)
        return mse_loss(prediction.squeeze(-1), y) if regression else cross_entropy(prediction, y)

    return bilevel.Problem(net, inner_loss=inner, outer_loss=outer, hyper=hyper)


def rates(*init: float) -> bilevel.Hyper:
    """Dropout rates."""
    return bilevel.interval(0.0, 0.95, init=list(init))


def smoothing(init: float) -> bilevel.Hyper:
    """Label smoothing."""
    return bilevel.interval(0.0, 0.9, init=init)


def adam(lr: float) -> Factory:
    """Makes Adam with this learning rate."""
    return partial(torch.optim.Adam, lr=lr)


def sgd(lr: float) -> Factory:
    """Makes SGD with momentum."""
    return partial(torch.optim.SGD, lr=lr, momentum=0.9)


def task(
    name: str,
    parts: Parts,
    problem: bilevel.Problem,
    *,
    updates: int,
    hand: Mapping[str, Any],
    ranges: Mapping[str, tuple[float, float]],
    optimizer: Factory | None = None,
    batch: int = 100,
    valid_batch: int | None = None,
) -> Task:
    """Put a task together from its training, validation and test examples.

    Returns:
        The task; batches for validation are as large as those for training unless told otherwise.
    """
    train, valid, test = parts
    return Task(
        name,
        problem,
        Batches(train, batch, whole=True),
        Batches(valid, valid_batch or batch),
        Batches(test, 500),
        updates,
        optimizer,
        hand,
        ranges,
    )


def split(x: Tensor, y: Tensor, sizes: Sequence[int], seed: int, *, noisy: float = 0.0) -> Parts:
    """Draw disjoint parts, in the first of which a share of the labels is replaced at random.

    Args:
        x: Inputs.
        y: Labels.
        sizes: Of the parts.
        seed: Of the draw.
        noisy: Share of training labels that are drawn anew.

    Returns:
        Inputs and labels of each part.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(y), generator=generator)[: sum(sizes)].split(list(sizes))
    y = y.clone()
    wrong = rows[0][torch.rand(sizes[0], generator=generator) < noisy]
    if noisy:
        y[wrong] = torch.randint(int(y.max()) + 1, wrong.shape, generator=generator)
    return [(x[part], y[part]) for part in rows]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """The 1797 digits of scikit-learn, with pixels from 0 to 1."""
    x, y = sklearn_datasets().load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


@cache
def pictures(name: str, roots: Roots) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of a real set, standardised, in single precision: those for training, and those for the test.

    Args:
        name: Of the set.
        roots: Data folders; the first that has the set counts.

    Returns:
        Images and labels of both.

    Raises:
        FileNotFoundError: If no folder has it.
    """
    for index, root in enumerate(roots):
        try:
            found = datasets.images(name, root)
            break
        except FileNotFoundError:
            if index == len(roots) - 1:
                raise
    # Half the side: networks of this size do as well, in a quarter of the time.
    halved = [
        F.avg_pool2d(x.float() / 255, 2) if name != "mnist" else x.float() / 255 for x in (found.train_x, found.test_x)
    ]
    mean, std = halved[0].mean((0, 2, 3), keepdim=True), halved[0].std((0, 2, 3), keepdim=True)
    return (halved[0] - mean) / std, found.train_y, (halved[1] - mean) / std, found.test_y


def images(name: str, roots: Roots, sizes: tuple[int, int], seed: int, *, noisy: float = 0.0) -> Parts:
    """Parts of a real set of images; the test images are the official ones."""
    x, y, test_x, test_y = pictures(name, roots)
    return [*split(x, y, sizes, seed, noisy=noisy), (test_x, test_y)]


def standardized(parts: Parts) -> Parts:
    """Inputs and targets with mean zero and deviation one on the training part."""
    (x, y), *_ = parts
    return [((a - x.mean(0)) / x.std(0), (b - y.mean()) / y.std()) for a, b in parts]


def digits_weak(seed: int, roots: Roots = ()) -> Task:
    """An MLP on 300 digits, a fifth of the labels random; dropout and decay of each layer start too weak."""
    hyper = {"dropout": rates(0.05, 0.05, 0.05), "decay": bilevel.positive([1e-4] * 3)}
    return task(
        "digits_weak",
        split(*digits(), (300, 500, 997), seed, noisy=0.2),
        problem(MLP(64, 128, 128, 10), hyper),
        updates=1600,
        hand={"dropout": [0.15, 0.2, 0.6], "decay": [3e-5, 3e-5, 3e-5]},
        ranges={"dropout": (0.0, 0.8), "decay": (1e-6, 1e-1)},
    )


def digits_strong(seed: int, roots: Roots = ()) -> Task:
    """An MLP on 800 clean digits; dropout of 0.8 and a large decay start far too strong."""
    hyper = {"dropout": rates(0.8, 0.8), "decay": bilevel.positive(3e-2)}
    return task(
        "digits_strong",
        split(*digits(), (800, 400, 597), seed),
        problem(MLP(64, 128, 10), hyper),
        updates=1800,
        optimizer=adam(2e-3),
        hand={"dropout": [0.1, 0.3], "decay": 3e-5},
        ranges={"dropout": (0.0, 0.9), "decay": (1e-6, 1e-1)},
    )


def digits_right(seed: int, roots: Roots = ()) -> Task:
    """An MLP on 500 digits, a tenth of the labels random; starts about right."""
    hyper = {"dropout": rates(0.05, 0.25), "decay": bilevel.positive(1e-4)}
    return task(
        "digits_right",
        split(*digits(), (500, 400, 897), seed, noisy=0.1),
        problem(MLP(64, 128, 10), hyper),
        updates=2400,
        hand={"dropout": [0.05, 0.25], "decay": 1e-4},
        ranges={"dropout": (0.0, 0.9), "decay": (1e-6, 1e-1)},
    )


def digits_cnn(seed: int, roots: Roots = ()) -> Task:
    """A CNN with batch norm on 300 digits, a tenth of the labels random; noise and dropout start too weak."""
    hyper = {"dropout": rates(0.05, 0.05), "noise": bilevel.positive(0.02), "smoothing": smoothing(0.01)}
    x, y = digits()
    return task(
        "digits_cnn",
        split(x.reshape(-1, 1, 8, 8), y, (300, 500, 997), seed, noisy=0.1),
        problem(CNN(1, (16, 32), 8), hyper),
        updates=1000,
        hand={"dropout": [0.1, 0.5], "noise": 0.05, "smoothing": 0.003},
        ranges={"dropout": (0.0, 0.9), "noise": (1e-3, 1.0), "smoothing": (0.0, 0.3)},
    )


def digits_rare(seed: int, roots: Roots = ()) -> Task:
    """Class weights: from one class to the next there are fewer training digits; validation and test have all alike."""
    x, y = digits()
    train, valid, test = split(x, y, (900, 400, 497), seed)
    kept = torch.cat([(train[1] == label).nonzero()[: round(90 * 0.72**label), 0] for label in range(10)])
    hyper = {"weights": bilevel.positive([1.0] * 10), "decay": bilevel.positive(1e-5)}
    counts = torch.bincount(train[1][kept], minlength=10)
    return task(
        "digits_rare",
        [(train[0][kept], train[1][kept]), valid, test],
        problem(MLP(64, 64, 10), hyper),
        updates=3000,
        batch=50,
        valid_batch=100,
        hand={"weights": (counts.sum() / 10 / counts).sqrt().tolist(), "decay": 1e-3},
        ranges={"weights": (0.2, 5.0), "decay": (1e-6, 1e-1)},
    )


def cancer(seed: int, roots: Roots = ()) -> Task:
    """Breast cancer: an MLP on 300 rows, 30 % of the labels random, full batches; starts too weak."""
    x, y = sklearn_datasets().load_breast_cancer(return_X_y=True)
    parts = split(torch.tensor(x, dtype=torch.float32), torch.tensor(y), (300, 130, 139), seed, noisy=0.3)
    mean, std = parts[0][0].mean(0), parts[0][0].std(0)
    hyper = {"noise": bilevel.positive(0.01), "decay": bilevel.positive(1e-5), "smoothing": smoothing(0.01)}
    return task(
        "cancer",
        [((a - mean) / std, b) for a, b in parts],
        problem(MLP(30, 64, 2), hyper),
        updates=3500,
        batch=300,
        valid_batch=130,
        optimizer=sgd(0.05),
        hand={"noise": 0.6, "decay": 3e-4, "smoothing": 0.005},
        ranges={"noise": (1e-2, 2.0), "decay": (1e-6, 1e-1), "smoothing": (0.0, 0.3)},
    )


def diabetes(seed: int, roots: Roots = ()) -> Task:
    """Regression: an MLP on 300 diabetes patients, with products of inputs; noise, dropout and decay start too weak."""
    x, y = (torch.tensor(part, dtype=torch.float32) for part in sklearn_datasets().load_diabetes(return_X_y=True))
    first, second = torch.triu_indices(10, 10)
    parts = split(torch.cat([x, 400 * x[:, first] * x[:, second]], 1), y, (300, 71, 71), seed)
    hyper = {"noise": bilevel.positive(0.02), "dropout": rates(0.05), "decay": bilevel.positive([1e-4, 1e-4])}
    return task(
        "diabetes",
        standardized(parts),
        problem(MLP(65, 64, 1), hyper, regression=True),
        updates=3000,
        batch=50,
        valid_batch=71,
        optimizer=adam(3e-3),
        hand={"noise": 0.3, "dropout": [0.4], "decay": [3e-2, 1e-3]},
        ranges={"noise": (1e-2, 2.0), "dropout": (0.0, 0.8), "decay": (1e-5, 1e-1)},
    )


def friedman(seed: int, roots: Roots = ()) -> Task:
    """Regression on 2000 generated rows, 15 of 20 inputs without use; a decay for each layer starts too strong."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.rand(4000, 20, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + 2 * torch.randn(4000, generator=generator)
    hyper = {"noise": bilevel.positive(0.5), "decay": bilevel.positive([3e-2, 3e-2, 3e-2])}
    return task(
        "friedman",
        standardized(split(x, y, (2000, 1000, 1000), seed)),
        problem(MLP(20, 64, 64, 1), hyper, regression=True),
        updates=2500,
        hand={"noise": 0.05, "decay": [1e-3, 1e-3, 1e-3]},
        ranges={"noise": (1e-2, 1.0), "decay": (1e-6, 1e-1)},
    )


def topics(seed: int, roots: Roots = ()) -> Task:
    """Text: attention over embeddings sorts 1000 generated texts into 8 topics; dropout starts too weak."""
    generator = torch.Generator().manual_seed(2000 + seed)
    words = 0.6 * torch.randn(8, 400, generator=generator).mul(1.5) + torch.randn(400, generator=generator)
    y = torch.randint(8, (3000,), generator=generator)
    x = torch.multinomial(words.softmax(1)[y], 20, replacement=True, generator=generator)
    hyper = {"dropout": rates(0.03, 0.03), "decay": bilevel.positive(1e-6), "smoothing": smoothing(0.01)}
    return task(
        "topics",
        split(x, y, (1000, 1000, 1000), seed, noisy=0.05),
        problem(Bag(400, 32, 8), hyper),
        updates=1000,
        optimizer=adam(3e-3),
        hand={"dropout": [0.3, 0.3], "decay": 1e-5, "smoothing": 0.005},
        ranges={"dropout": (0.0, 0.8), "decay": (1e-7, 1e-2), "smoothing": (0.0, 0.3)},
    )


def windows(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pieces of a text, and the token after each of theirs."""
    count = (len(tokens) - 1) // length
    return tokens[: count * length].reshape(-1, length), tokens[1 : count * length + 1].reshape(-1, length)


def chain(seed: int, roots: Roots = ()) -> Task:
    """An LSTM on 4000 words of a generated text; dropout starts too strong, decay too weak."""
    text = datasets.synthetic_text(seed, words=60, train=4000, valid=4000, test=8000)
    hyper = {"dropout": rates(0.7, 0.7), "decay": bilevel.positive(1e-6)}
    return task(
        "chain",
        [windows(part, 10) for part in (text.train, text.valid, text.test)],
        problem(Reader(60, 32), hyper),
        updates=700,
        batch=40,
        optimizer=adam(1e-2),
        hand={"dropout": [0.1, 0.2], "decay": 3e-4},
        ranges={"dropout": (0.0, 0.8), "decay": (1e-7, 1e-2)},
    )


def mnist_large(seed: int, roots: Roots) -> Task:
    """MNIST: an MLP 784-64-10 on 50,000 images; noise and dropout start too strong."""
    hyper = {"dropout": rates(0.5, 0.7), "noise": bilevel.positive(1.0), "decay": bilevel.positive(1e-3)}
    return task(
        "mnist_large",
        images("mnist", roots, (50_000, 10_000), seed),
        problem(MLP(784, 64, 10), hyper),
        updates=2500,
        batch=128,
        hand={"dropout": [0.05, 0.1], "noise": 0.1, "decay": 1e-5},
        ranges={"dropout": (0.0, 0.8), "noise": (1e-2, 1.0), "decay": (1e-7, 1e-2)},
    )


def fashion_cnn(seed: int, roots: Roots) -> Task:
    """FashionMNIST at 14 × 14: a CNN with batch norm on 1000 images; noise and dropout start too weak."""
    hyper = {"dropout": rates(0.05, 0.05), "noise": bilevel.positive(0.03), "smoothing": smoothing(0.02)}
    return task(
        "fashion_cnn",
        images("fashion_mnist", roots, (1000, 1000), seed),
        problem(CNN(1, (12, 24), 14), hyper),
        updates=600,
        optimizer=adam(3e-3),
        hand={"dropout": [0.05, 0.5], "noise": 0.03, "smoothing": 0.005},
        ranges={"dropout": (0.0, 0.8), "noise": (1e-2, 1.0), "smoothing": (0.0, 0.3)},
    )


def cifar_cnn(seed: int, roots: Roots) -> Task:
    """CIFAR-10 at 16 × 16: a CNN with batch norm on 5000 images, SGD; random contrast and noise start too strong."""
    hyper = {
        "dropout": rates(0.5, 0.5),
        "contrast": bilevel.interval(0.0, 1.0, init=0.9),
        "noise": bilevel.positive(1.0),
        "decay": bilevel.positive(1e-4),
    }
    return task(
        "cifar_cnn",
        images("cifar10", roots, (5000, 1000), seed),
        problem(CNN(3, (12, 24), 16), hyper),
        updates=600,
        optimizer=sgd(0.05),
        hand={"dropout": [0.05, 0.2], "contrast": 0.2, "noise": 0.1, "decay": 1e-4},
        ranges={"dropout": (0.0, 0.8), "contrast": (0.0, 1.0), "noise": (1e-2, 1.0), "decay": (1e-6, 1e-2)},
    )


@cache
def characters(roots: Roots) -> tuple[list[Tensor], int]:
    """Penn Treebank as characters: its three parts, and how many characters there are."""
    text = next(datasets.text("ptb", root) for root in roots if (root / "ptb").is_dir())
    spelled = [
        " ".join(text.vocabulary[word] for word in part[:30_000].tolist())
        for part in (text.train, text.valid, text.test)
    ]
    index = {letter: number for number, letter in enumerate(sorted(set("".join(spelled))))}
    return [torch.tensor([index[letter] for letter in part]) for part in spelled], len(index)


def ptb_letters(seed: int, roots: Roots) -> Task:
    """Penn Treebank: an LSTM on 16,000 characters, in pieces of 20; dropout and decay start too weak."""
    parts, letters = characters(roots)
    generator = torch.Generator().manual_seed(seed)
    pieces = [windows(part, 20) for part in parts]
    rows = [
        torch.randperm(len(x), generator=generator)[:count]
        for (x, _), count in zip(pieces, (800, 800, 2000), strict=True)
    ]
    hyper = {"dropout": rates(0.02, 0.02), "decay": bilevel.positive(1e-7)}
    return task(
        "ptb_letters",
        [(x[part], y[part]) for (x, y), part in zip(pieces, rows, strict=True)],
        problem(Reader(letters, 48), hyper),
        updates=600,
        batch=40,
        optimizer=adam(1e-2),
        hand={"dropout": [0.25, 0.2], "decay": 2e-6},
        ranges={"dropout": (0.0, 0.8), "decay": (1e-8, 1e-2)},
    )


@cache
def proteins(roots: Roots) -> tuple[Tensor, Tensor]:
    """The 45,730 proteins of UCI."""
    x, y = next(datasets.uci("protein", root) for root in roots if (root / "uci").is_dir())
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def protein(seed: int, roots: Roots) -> Task:
    """Regression on 20,000 proteins; an MLP whose dropout and noise start too strong."""
    hyper = {"dropout": rates(0.5, 0.5), "noise": bilevel.positive(0.5), "decay": bilevel.positive(1e-3)}
    return task(
        "protein",
        standardized(split(*proteins(roots), (20_000, 5000, 10_000), seed)),
        problem(MLP(9, 96, 96, 1), hyper, regression=True),
        updates=2000,
        batch=200,
        optimizer=adam(3e-3),
        hand={"dropout": [0.02, 0.02], "noise": 0.02, "decay": 1e-6},
        ranges={"dropout": (0.0, 0.8), "noise": (1e-3, 1.0), "decay": (1e-7, 1e-2)},
    )


Maker = Callable[[int, Roots], Task]
BUILT_IN: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        digits_weak,
        digits_strong,
        digits_right,
        digits_cnn,
        digits_rare,
        cancer,
        diabetes,
        friedman,
        topics,
        chain,
    )
}
REAL: dict[str, Maker] = {
    maker.__name__: maker for maker in (mnist_large, fashion_cnn, cifar_cnn, ptb_letters, protein)
}


def make(name: str, seed: int, roots: Roots = ()) -> Task:
    """Make a task; its weights depend on the seed only.

    Args:
        name: In ``BUILT_IN`` or ``REAL``.
        seed: Of the split, the label noise and the weights.
        roots: Data folders, for real data.

    Returns:
        The task.
    """
    torch.manual_seed(seed)
    return (BUILT_IN | REAL)[name](seed, roots)
