"""Generated data of the shapes of the real sets: for tests, and for those who have no files."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from applications.data.sets import IMAGES, Images, Text

# How likely the four words are that may follow a word; 1.21 nats, so that no model gets below a perplexity of 3.35.
FOLLOWERS = (0.5, 0.25, 0.15, 0.1)


def synthetic_images(name: str, seed: int = 0, train: int = 2000, test: int = 500) -> Images:
    """Ten smooth patterns, one for each class, each seen shifted by up to two pixels and through strong noise.

    Args:
        name: Of the set whose shape they have.
        seed: Of the patterns and the noise.
        train: The number of training images.
        test: The number of test images.

    Returns:
        The images; training and test images have the same distribution.

    Raises:
        ValueError: If there is no set of this name, or a number is not positive.
    """
    if name not in IMAGES:
        raise ValueError(f"name must be one of {', '.join(IMAGES)}, got {name!r}.")
    if train < 1 or test < 1:
        raise ValueError(f"train and test must be at least 1, got {train} and {test}.")
    channels, height, width = IMAGES[name]
    generator = torch.Generator().manual_seed(len(IMAGES) * seed + list(IMAGES).index(name))
    coarse = torch.randn(10, channels, 5, 5, generator=generator)
    patterns = F.interpolate(coarse, size=(height + 4, width + 4), mode="bicubic", align_corners=False)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (count,), generator=generator)
        x = torch.empty(count, channels, height, width, dtype=torch.uint8)
        for row, (top, left) in enumerate(torch.randint(5, (count, 2), generator=generator).tolist()):
            clean = patterns[y[row], :, top : top + height, left : left + width]
            noise = torch.randn(clean.shape, generator=generator)
            x[row] = (128 + 30 * clean + 50 * noise).round().clamp(0, 255).to(torch.uint8)
        return x, y

    return Images(*draw(train), *draw(test))


def synthetic_text(
    seed: int = 0, *, words: int = 200, train: int = 20_000, valid: int = 2_000, test: int = 2_000
) -> Text:
    """A Markov chain of words: after each, four others may come.

    Args:
        seed: Of the chain and the text.
        words: The size of the vocabulary, with ``<eos>``.
        train: The number of tokens of the training part.
        valid: The number of tokens of the validation part.
        test: The number of tokens of the test part.

    Returns:
        The text. The parts follow each other; words are numbered by how they were made, not by appearance.

    Raises:
        ValueError: If there are too few words or tokens.
    """
    if words < len(FOLLOWERS):
        raise ValueError(f"words must be at least {len(FOLLOWERS)}, got {words}.")
    if min(train, valid, test) < 1:
        raise ValueError(f"train, valid and test must be at least 1, got {train}, {valid} and {test}.")
    generator = torch.Generator().manual_seed(seed)
    count = train + valid + test
    # The likeliest followers form one cycle through all words, so that every word is reached.
    cycle = torch.randperm(words, generator=generator)
    followers = torch.empty(words, len(FOLLOWERS), dtype=torch.int64)
    for place, word in enumerate(cycle.tolist()):
        others = 2 + torch.randperm(words - 1, generator=generator)[: len(FOLLOWERS) - 1]
        followers[word] = cycle[(place + torch.cat([torch.ones(1, dtype=torch.int64), others])) % words]
    choices = torch.multinomial(torch.tensor(FOLLOWERS), count, replacement=True, generator=generator).tolist()
    table, word, tokens = followers.tolist(), 0, []
    for choice in choices:
        word = table[word][choice]
        tokens.append(word)
    first, second, third = torch.tensor(tokens).split([train, valid, test])
    return Text(first, second, third, ("<eos>", *(f"w{number}" for number in range(1, words))))
