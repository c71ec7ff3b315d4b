"""Language modelling (``exp:language``): an LSTM on Penn Treebank or WikiText-2, seven hyperparameters tuned.

The set-up is that of MacKay et al. (2019), which the paper adopts; so are two training steps between outer steps, which
the paper does not state. Where their code and the paper differ, this follows the paper:

- The learning rate drops to a quarter when the validation loss has not been below its best for ``patience`` epochs in a
  row, and counting starts anew. Their code compares with the best of all but the last five epochs.
- Activation regularization is part of the training loss only.
- The embedding responds like all weights, also where it is the decoder.
- Embedding dropout has a rate, and drops words, for each stream; theirs is the same for all.

The response of an STN is multiplied by λ itself, of squared norm 80 at the start, where the other methods take a
perturbation. With the learning rate of 30 its loss explodes; the presets ``paper_stn`` and ``quick_stn`` have 0.3 for
the response, and an STN takes them by itself.

A run that goes on from a checkpoint starts with an empty memory of the text; it is full again within a batch or two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel
from applications import data as datasets
from applications.language_model import PADDING, RATES, LanguageModel, Memory, Reading, Streams
from applications.task import Experiment, Settings, Task, initial, option, outer_optimizer, starting

SHARED = ("drop_connect", "ar", "tar")
RANGES = dict.fromkeys(RATES, (0.0, 0.95)) | dict.fromkeys(("ar", "tar"), (0.0, 4.0))
SEARCHED = dict.fromkeys(RATES, (0.0, 0.75)) | dict.fromkeys(("ar", "tar"), (0.0, 4.0))
START = 0.05
DECAY = 0.25
Batch = tuple[Tensor, Tensor, Memory]


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(Settings):
    """Settings of the language tasks."""

    epochs: int = option(1000, "passes over the training text, at most: see --stop-below", least=1)
    batch_size: int = option(40, "streams of text that are read side by side", least=1)
    length: int = option(70, "tokens of a stream in a batch, through which gradients go back", least=1)
    width: int = option(650, "units of a layer, and dimensions of a word", least=1)
    layers: int = option(2, "of LSTM", least=1)
    warmup: int | None = option(10, "epochs in which no hyperparameter moves; none: as in bilevel.solve", least=0)
    inner_steps: int = option(2, "training steps between outer steps (T_train)", least=1)
    learning_rate: float = option(30.0, "of the weights and of their response, at the start", above=0)
    response_learning_rate: float | None = option(
        None, "another one for the response; none takes that of the weights", above=0
    )
    patience: int = option(
        5, "epochs in a row without a better validation loss that quarter the learning rate", least=1
    )
    stop_below: float = option(0.0003, "learning rate below which the run ends")
    clip: float = option(0.25, "largest gradient norm, of the weights and of their response each", above=0)
    test_streams: int = option(1, "streams in which the test text is read; one is exact, several are fast", least=1)
    limit: int | None = option(None, "use only so many tokens of the training text; none uses all", least=1)

    def __post_init__(self) -> None:
        """Raise a ValueError for a number that is out of bounds."""
        super().__post_init__()
        if self.limit is not None and self.limit < self.batch_size:
            raise ValueError(
                f"--limit must be at least --batch-size, a token for each stream; got {self.limit} and "
                f"{self.batch_size}."
            )


@final
class LanguageTask(Task):
    """Predict the next word while dropout and activation regularization are tuned."""

    def __init__(self, name: str, title: str, presets: Mapping[str, LanguageSettings]) -> None:
        """Describe a task by its data set."""
        self.name, self.datasets, self.presets = name, (name,), presets
        self.summary = f"LSTM on {title}, {len(RANGES)} hyperparameters"

    def build(
        self,
        settings: Any,
        *,
        data: Path | None,
        folder: Path | None,
        seed: int,
        device: torch.device,
        init: Mapping[str, Any],
    ) -> Experiment:
        """See :meth:`applications.task.Task.build`."""
        hyper = self._hyper(init)
        text = datasets.synthetic_text() if data is None else datasets.text(self.name, data)
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            net = LanguageModel(words=len(text.vocabulary), width=settings.width, layers=settings.layers).to(device)
        problem = bilevel.Problem(net, inner_loss=training_loss, outer_loss=validation_loss, hyper=hyper)
        end, response_rate = text.vocabulary.index("<eos>"), settings.response_learning_rate

        def read(tokens: Tensor, streams: int) -> Streams:
            return Streams(tokens.to(device), streams=streams, length=settings.length, end=end)

        return Experiment(
            problem=problem,
            net=net,
            outer_loss=validation_loss,
            train=read(text.train[: settings.limit], settings.batch_size),
            valid=read(text.valid, settings.batch_size),
            test=read(text.test, settings.test_streams),
            solve={
                "inner_optimizer": partial(torch.optim.SGD, lr=settings.learning_rate),
                "response_optimizer": None if response_rate is None else partial(torch.optim.SGD, lr=response_rate),
                "outer_optimizer": outer_optimizer(torch.optim.Adam, settings),
                # PyTorch's patience is the number of epochs that may pass without consequence.
                "inner_scheduler": partial(
                    torch.optim.lr_scheduler.ReduceLROnPlateau,
                    factor=DECAY,
                    patience=settings.patience - 1,
                    threshold=0.0,
                ),
                "inner_clip": settings.clip,
                "callbacks": [partial(is_slow, settings.stop_below)],
            },
            search=SEARCHED,
            derive=perplexity,
        )

    def _hyper(self, init: Mapping[str, Any]) -> dict[str, bilevel.Hyper]:
        unknown = [name for name in init if name not in RANGES]
        if unknown:
            raise ValueError(f"--init {unknown[0]}: {self.name} has no such hyperparameter, but {', '.join(RANGES)}.")
        return {
            name: starting(name, bilevel.interval, low, high, init=initial(init, name, START), shared=name in SHARED)
            for name, (low, high) in RANGES.items()
        }


def training_loss(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Cross-entropy with activation regularization (AR), and its temporal kind (TAR), of the last layer.

    Returns:
        The mean over the tokens of the batch.
    """
    _, y, _ = batch
    reading = _read(model, hyper, batch)
    loss = F.cross_entropy(reading.logits.flatten(0, 1), y.flatten(), ignore_index=PADDING)
    slowness = _mean_square(reading.output.diff(dim=1))
    return loss + hyper["ar"] * _mean_square(reading.dropped) + hyper["tar"] * slowness


def validation_loss(
    model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy, summed over the tokens of the batch and divided by how many a batch of the pass has on average.

    So the mean over the batches of a pass is the mean over its tokens, though the last batch is shorter.

    Returns:
        The loss, and no further measures.
    """
    _, y, memory = batch
    logits = _read(model, hyper, batch).logits.flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), ignore_index=PADDING, reduction="sum") / memory.tokens, {}


def perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """The perplexity for each word, from the mean loss."""
    return {"perplexity": math.exp(means["loss"])}


def is_slow(limit: float, done: bilevel.Round) -> bool:
    """Whether the learning rate of the weights is below a limit."""
    rate: float = done.solver.optimizers["weights"].param_groups[0]["lr"]
    return rate < limit


def _read(model: bilevel.Model, hyper: Mapping[str, Tensor], batch: Batch) -> Reading:
    """Read a batch from where the one before ended."""
    x, _, memory = batch
    reading: Reading = model(x, memory.start(), {name: hyper[name] for name in RATES})
    memory.leave(reading.state)
    return reading


def _mean_square(x: Tensor) -> Tensor:
    """Zero for no numbers: a batch of one time step has no differences."""
    return x.square().sum() / max(x.numel(), 1)


_PAPER = LanguageSettings()
_QUICK = dataclasses.replace(_PAPER, epochs=3, length=35, width=100, warmup=1, limit=50_000, test_streams=10)
_PRESETS = {
    "paper": _PAPER,
    "quick": _QUICK,
    "paper_stn": dataclasses.replace(_PAPER, response_learning_rate=0.3),
    "quick_stn": dataclasses.replace(_QUICK, response_learning_rate=0.3),
}

TASKS = (LanguageTask("ptb", "Penn Treebank", _PRESETS), LanguageTask("wikitext2", "WikiText-2", _PRESETS))
