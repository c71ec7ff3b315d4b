"""What to write instead, for errors that a loss raises because torch expects a number where a hyperparameter is."""

from __future__ import annotations

import re
import traceback
from typing import Any

CROSS_ENTROPY = (
    "F.cross_entropy and nn.CrossEntropyLoss take no hyperparameters: use bilevel.functional.cross_entropy(logits, y, "
    "label_smoothing=hyper[...], weight=hyper[...])."
)
DROPOUT = (
    "nn.Dropout and F.dropout take no hyperparameters: use bilevel.functional.dropout(x, hyper[...], "
    "training=self.training) in the forward of your network."
)
REMEDIES = {
    r"argument 'label_smoothing'": CROSS_ENTROPY,
    r"'nll_loss\w*' is not differentiable with respect to argument 'weight'": CROSS_ENTROPY,
    r"weight tensor should be defined either for all": CROSS_ENTROPY,
    r"dropout\w*\(\): argument 'p'": DROPOUT,
}
"""By what the message of torch says."""

LOADERS = {"inner_loss": "train", "outer_loss": "valid"}


def advice(error: Exception, loss: str, batch: Any) -> list[str]:
    """Notes for an error that a loss of the user raised.

    Args:
        error: With its traceback.
        loss: ``"inner_loss"`` or ``"outer_loss"``.
        batch: That the loss was given.

    Returns:
        What to write instead; nothing if the error is none of those that are known.

    Example:
        >>> (note,) = advice(TypeError("cannot unpack non-iterable NoneType object"), "outer_loss", None)
        >>> note.partition(":")[0]
        'The batch is None because valid is None'
    """
    message = str(error)
    notes = [remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, message)]
    if "Boolean value of Tensor" in message and _raised_in_dropout(error):
        notes.append(DROPOUT)
    if batch is None and "NoneType" in message:
        loader = LOADERS[loss]
        notes.append(
            f"The batch is None because {loader} is None: pass the loader, bilevel.solve(problem, {loader}=loader, "
            "...). With a Solver, pass a batch to inner_step and to outer_step."
        )
    return notes


def _raised_in_dropout(error: Exception) -> bool:
    """Whether the last line that ran belongs to a function or file of that name."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "dropout" in frame.f_code.co_name or "dropout" in frame.f_code.co_filename
