"""Applications of bilevel: they use its public names only."""

import importlib
from types import ModuleType


def sklearn_datasets() -> ModuleType:
    """The data that comes with scikit-learn.

    Returns:
        The module ``sklearn.datasets``.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ImportError("the built-in data needs scikit-learn: pip install 'bilevel[applications]'.") from error
