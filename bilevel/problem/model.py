"""The model that a loss sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bilevel.hyper import Named


class Model:
    """What a loss sees: ``model(...)`` predicts, ``model.params`` reads the weights.

    A method may predict with other weights than those in ``params``. So the same loss runs under every method.

    Attributes:
        params: Trainable weights by name, for penalties. They are tensors, except where each example has weights of
            its own: then only :func:`l2` and :func:`l1` can read them.

    Example:
        >>> import torch
        >>> model = Model({"w": torch.tensor([3.0, 4.0])}, lambda x: 2 * x)
        >>> model(torch.tensor(1.0)), model.params["w"].square().sum()
        (tensor(2.), tensor(25.))
    """

    def __init__(self, params: Mapping[str, Any], predict: Callable[..., Any] | None) -> None:
        """Pair weights with a prediction function; a problem without a network has none."""
        self.params = Named("parameter", params.items())
        self._predict = predict

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network with these weights.

        Returns:
            What the user's ``forward`` returns.

        Raises:
            TypeError: If the problem has no network.
        """
        if self._predict is None:
            raise TypeError("model(...) needs a network, but inner is a mapping of tensors: use model.params['name'].")
        return self._predict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Say what there is instead.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(
            f"a loss sees a bilevel.Model, which has no {name!r}: use model(...) to predict and model.params['name'] "
            "to read a weight."
        )
