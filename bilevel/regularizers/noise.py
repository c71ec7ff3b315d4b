"""Noise on the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor
from typing_extensions import override

from bilevel.functional import gaussian_noise
from bilevel.hyper import Hyper, positive
from bilevel.regularizers.base import Mixture, Regularizer


@final
@dataclass(frozen=True)
class InputNoise(Regularizer):
    r"""Normal noise on the inputs, :math:`\tilde x_i = x_i + \sigma_i z_i` with :math:`z_i \sim \mathcal{N}(0, I)`.

    The loss has a derivative in :math:`\sigma`, with the noise drawn independently of it; so every method can tune it.

    Attributes:
        init: Where :math:`\sigma` starts; inputs are best standardised.

    Example:
        >>> import torch
        >>> noise = InputNoise()
        >>> x = noise.on_batch(Mixture.of(torch.zeros(2, 1000), None), {"input_noise": torch.tensor([0.0, 3.0])}).x
        >>> bool((x[0] == 0).all()), 2.5 < float(x[1].std()) < 3.5
        (True, True)
    """

    init: float = 0.05

    @property
    @override
    def hyper(self) -> dict[str, Hyper]:
        """``input_noise``, positive."""
        return {"input_noise": positive(self.init)}

    @override
    def on_batch(self, mixture: Mixture, hyper: Mapping[str, Tensor]) -> Mixture:
        """Add the noise."""
        return mixture.with_tensor(gaussian_noise(mixture.tensor, hyper["input_noise"]))
