"""Regularizers whose strengths are hyperparameters: small objects, for :func:`bilevel.tune` or a loss of your own.

Each names its hyperparameters (``regularizer.hyper``) and acts in one of three places: on the batch, on the loss of the
predictions, or by a penalty on the weights. :func:`regularized_loss` puts any number of them together. All of them take
hyperparameters with one value for the batch or one per example, and mix no example's strength with another's loss.

========================  ====================  ======================  ==================
regularizer               hyperparameters       acts on                 tuned by
========================  ====================  ======================  ==================
:class:`WeightDecay`      ``weight_decay...``   the weights (penalty)   every method
:class:`LabelSmoothing`   ``label_smoothing``   the loss                every method
:class:`Mixup`            ``mixup``             inputs and loss         every method
:class:`InputNoise`       ``input_noise``       inputs                  every method
:class:`CutMix`           ``cutmix``            inputs and loss         self-tuning ones
``bilevel.augment``       ``augment...``        inputs                  self-tuning ones
========================  ====================  ======================  ==================

``WeightDecay(decoupled=True)``, the decay of AdamW, is no penalty but part of the update, so that only ``Unrolled`` can
tune it.

Self-tuning methods are ``stn``, ``centered_stn`` and ``delta_stn``, which learn from perturbed losses. The others need
a derivative of the loss, and refuse what has none.

Dropout is not here: :func:`bilevel.dropout_rates` takes that which the network has.
"""

from bilevel.regularizers.base import Mixture, Regularizer, regularized_loss
from bilevel.regularizers.decay import WeightDecay
from bilevel.regularizers.labels import LabelSmoothing
from bilevel.regularizers.mixing import CutMix, Mixup
from bilevel.regularizers.noise import InputNoise

__all__ = [
    "CutMix",
    "InputNoise",
    "LabelSmoothing",
    "Mixture",
    "Mixup",
    "Regularizer",
    "WeightDecay",
    "regularized_loss",
]
