"""Data of the experiments: readers of the official files, splits, and generated data for those who have no files.

Every reader takes the folder that ``--data`` names. It knows these places in it; of each file the first that is there
counts, and files that end in ``.gz`` may be unpacked, or plain ones packed:

- ``mnist``: ``mnist/train-images-idx3-ubyte.gz``, ..., or in ``MNIST/raw/``.
- ``fashion_mnist``: ``fashion_mnist/train-images-idx3-ubyte.gz``, ..., or in ``FashionMNIST/raw/``.
- ``cifar10``: the folder ``cifar-10-batches-bin``, the folder ``cifar-10-batches-py``, or the archive of either
  (``cifar-10-binary.tar.gz``, ``cifar-10-python.tar.gz``), in ``cifar10/`` or beside it.
- ``ptb``: ``ptb/ptb.train.txt``, ...
- ``wikitext2``: ``wikitext2/wiki.train.tokens``, ..., or ``train.txt``, ..., or in ``wikitext-2/``.
- ``uci``: ``uci/boston.npz``, ... with arrays ``X`` and ``y``.

The other files can be downloaded:

    python -m applications download mnist --data DIR
"""

from applications.data.sets import Images, Text, images, text, uci
from applications.data.splits import split
from applications.data.synthetic import synthetic_images, synthetic_text

__all__ = ["Images", "Text", "images", "split", "synthetic_images", "synthetic_text", "text", "uci"]
