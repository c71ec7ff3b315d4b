"""Five-line tuning on real data, with the networks that people bring: against the same network as it is.

    python benchmarks/real.py --data DIR --out docs/results/real.txt

Five networks, each on a part of its data that is small enough to overfit: a ResNet18 of 8 channels on CIFAR-10, a
network of ``nn.LSTM`` on Penn Treebank, BERT and GPT-2 of transformers (random weights, one or two layers) on the same
text, and an MLP with ``nn.Dropout`` on scikit-learn's digits. The same network is trained twice from the same weights
with the same optimizer and epochs: as it is, and by ``bilevel.tune``. Both keep the weights with the lowest validation
loss. ``DIR`` is that of the applications (``python -m applications download``). Data that are missing, and transformers
where it is not installed, are left out by name.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bilevel
from applications.data import sets

WORDS, LENGTH = 1000, 16


@dataclass(frozen=True)
class Task:
    """What a script has before its training loop."""

    net: nn.Module
    data: list[Any]
    loss: Callable[..., Tensor] | None
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 12
    lr: float = 1e-3
    batch: int = 32


class Block(nn.Module):
    """The block of a ResNet18."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Two convolutions with batch norm, and a way around them."""
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        around = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.around = nn.Sequential(*around) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        return F.relu(self.around(x) + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def resnet18(width: int = 8) -> nn.Module:
    """Eight blocks, as for CIFAR-10."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(4):
        for index in range(2):
            layers.append(Block(before, width * 2**stage, 2 if stage and not index else 1))
            before = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(before, 10))


class LanguageModel(nn.Module):
    """The next word, by PyTorch's own LSTM."""

    def __init__(self, words: int, width: int = 64) -> None:
        """Two layers."""
        super().__init__()
        self.embed, self.drop = nn.Embedding(words, width), nn.Dropout(0.1)
        self.lstm, self.out = nn.LSTM(width, width, 2, dropout=0.1, batch_first=True), nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        """Words to the scores of the next ones, classes in dimension 1."""
        return self.out(self.drop(self.lstm(self.drop(self.embed(words)))[0])).transpose(1, 2)


class Entries(Dataset[dict[str, Tensor]]):
    """Examples as a tokenizer makes them."""

    def __init__(self, **columns: Tensor) -> None:
        """Keep the columns."""
        self.columns = columns

    def __len__(self) -> int:
        """The number of examples."""
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One of them."""
        return {name: column[index] for name, column in self.columns.items()}


def numbers(folder: Path) -> Tensor:
    """The number of each word of Penn Treebank among the most frequent ones; zero is for rare words."""
    text = sets.text("ptb", folder)
    common = text.train.bincount().argsort(descending=True)[: WORDS - 1]
    number = torch.zeros(len(text.vocabulary), dtype=torch.int64)
    number[common] = torch.arange(1, WORDS)
    return number


def sentences(folder: Path) -> list[Tensor]:
    """600 pieces of LENGTH + 1 words of each part of Penn Treebank, as numbers."""
    text, number = sets.text("ptb", folder), numbers(folder)
    size = LENGTH + 1
    return [number[words[: 600 * size]].view(-1, size) for words in (text.train, text.valid, text.test)]


def digits(folder: Path) -> Task:
    """300 digits to train on."""
    x, y = (torch.tensor(part) for part in datasets.load_digits(return_X_y=True))
    x = (x / 16).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    data = [TensorDataset(x[part], y[part]) for part in (order[:300], order[300:800], order[800:])]
    hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)]
    return Task(nn.Sequential(*hidden, nn.Linear(256, 10)), data, F.cross_entropy, {"label_smoothing": True}, 60)


def cifar10(folder: Path) -> Task:
    """A thousand images to train on."""
    images = sets.images("cifar10", folder)
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    shift, scale = (torch.tensor(part)[:, None, None] for part in (mean, std))
    parts = [(images.train_x[:1000], images.train_y[:1000]), (images.train_x[-1000:], images.train_y[-1000:])]
    parts.append((images.test_x[:2000], images.test_y[:2000]))
    data = [TensorDataset((x / 255 - shift) / scale, y.long()) for x, y in parts]
    augment = bilevel.augment.images(only=["translation", "scale", "cutout", "brightness"], mean=mean, std=std)
    return Task(resnet18(), data, F.cross_entropy, {"label_smoothing": True, "augment": augment}, 12)


def lstm(folder: Path) -> Task:
    """The next word."""
    data = [TensorDataset(pieces[:, :-1], pieces[:, 1:]) for pieces in sentences(folder)]
    return Task(LanguageModel(WORDS), data, F.cross_entropy, {"label_smoothing": True}, 12, 3e-3)


def gpt2(folder: Path) -> Task:
    """The same by GPT-2, which computes its loss itself."""
    import transformers

    data = [Entries(input_ids=pieces, labels=pieces.clone()) for pieces in sentences(folder)]
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH + 1, bos_token_id=0, eos_token_id=0
    )
    return Task(transformers.GPT2LMHeadModel(config), data, None, {}, 10)


def bert(folder: Path) -> Task:
    """Which of six frequent words was hidden in the middle of a piece, by BERT."""
    import transformers

    text, number = sets.text("ptb", folder), numbers(folder)
    names = {word: index for index, word in enumerate(text.vocabulary)}
    classes = torch.tensor([names[word] for word in ("the", "of", "to", "a", "in", "and")])

    def gaps(stream: Tensor, size: int) -> Entries:
        pieces = stream[: len(stream) // LENGTH * LENGTH].view(-1, LENGTH)
        middle = pieces[:, LENGTH // 2]
        pieces = pieces[torch.isin(middle, classes)][:size]
        labels = (pieces[:, LENGTH // 2, None] == classes).long().argmax(1)
        ids = number[pieces]
        ids[:, LENGTH // 2] = WORDS
        return Entries(input_ids=ids, labels=labels)

    data = [gaps(text.train, 1500), gaps(text.valid, 500), gaps(text.test, 600)]
    config = transformers.BertConfig(
        vocab_size=WORDS + 1, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LENGTH, num_labels=len(classes),
    )  # fmt: skip
    return Task(transformers.BertForSequenceClassification(config), data, None, {}, 8)


TASKS: dict[str, Callable[[Path], Task]] = {
    "digits, MLP": digits,
    "CIFAR-10, ResNet18": cifar10,
    "PTB, nn.LSTM": lstm,
    "PTB, GPT-2": gpt2,
    "PTB gaps, BERT": bert,
}


def loss_of(net: nn.Module, batch: Any, task: Task) -> Tensor:
    """As everybody writes it."""
    if isinstance(batch, Mapping):
        loss: Tensor = net(**batch).loss
        return loss
    assert task.loss is not None
    return task.loss(net(batch[0]), batch[1])


def mean_loss(net: nn.Module, data: Dataset[Any], task: Task) -> float:
    """Of all examples, in eval mode."""
    net.eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=200):
            size = len(next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0])
            total, count = total + float(loss_of(net, batch, task)) * size, count + size
    return total / count


def compare(name: str, folder: Path) -> str:
    """Both trainings, as a line of the table."""
    torch.manual_seed(0)
    task = TASKS[name](folder)
    train, valid, test = task.data
    net, start = task.net, copy.deepcopy(task.net.state_dict())
    begun = time.process_time()
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=task.lr)
    best, kept = float("inf"), start
    for _ in range(task.epochs):
        net.train()
        for batch in DataLoader(train, batch_size=task.batch, shuffle=True, drop_last=True):
            loss = loss_of(net, batch, task)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss_now = mean_loss(net, valid, task)
        if loss_now < best:
            best, kept = loss_now, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    plain = best, mean_loss(net, test, task)
    between = time.process_time()

    net.load_state_dict(start)
    net.train()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = bilevel.tune(
            net,
            DataLoader(train, batch_size=task.batch, shuffle=True, drop_last=True),
            DataLoader(valid, batch_size=100, shuffle=True),
            loss=task.loss,
            optimizer=torch.optim.Adam(net.parameters(), lr=task.lr),
            epochs=task.epochs,
            seed=1,
            progress=False,
            **task.options,
        )
    for warning in said:
        if not issubclass(warning.category, bilevel.TuningWarning | bilevel.PerturbationWarning):
            continue
        print(f"  {name}: {warning.category.__name__}: {warning.message}")
    net.load_state_dict(result.best.state_dict)
    tuned = result.best.validation_loss, mean_loss(net, test, task)
    ratio = (time.process_time() - between) / (between - begun)
    numbers = f"{plain[0]:>9.3f}{tuned[0]:>8.3f}{plain[1]:>9.3f}{tuned[1]:>8.3f}{ratio:>8.1f}"
    return f"{name:20}{len(result.hyper):>7}{task.epochs:>8}{numbers}"


def main() -> None:
    """All tasks whose data are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = [
        f"{'':20}{'hyper-':>7}{'':8}{'validation loss':>17}{'test loss':>17}{'CPU':>8}",
        f"{'task':20}{'params':>7}{'epochs':>8}{'plain':>9}{'tuned':>8}{'plain':>9}{'tuned':>8}{'time':>8}",
    ]
    for name in options.tasks:
        try:
            table.append(compare(name, options.data))
        except (FileNotFoundError, ImportError) as missing:
            table.append(f"{name:20}left out: {missing}")
        print(table[-1], flush=True)
    table.append("CPU time: of the whole run of bilevel.tune, validation included, divided by that of the plain one.")
    if options.out is not None:
        options.out.write_text("\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
