"""Tensors by name, and errors that say which name was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values


def suggest(name: object, known: Iterable[str]) -> str:
    """Say which of the known names was probably meant, and list them all.

    Returns:
        A phrase for the end of an error message.

    Example:
        >>> suggest("decya", ["decay", "dropout"])
        "did you mean 'decay'? Known: decay, dropout."
    """
    names = sorted(known)
    plain = str(name).lower().replace("-", "_").replace(" ", "_")
    close = difflib.get_close_matches(plain, names, n=1) or difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names) or 'none'}."


class Named(dict[str, Tensor]):
    """A dict of tensors whose ``KeyError`` names what was asked for, and what there is.

    Attributes:
        kind: What an error message calls them.
        read: The names of those that were asked for.
    """

    def __init__(self, kind: str, items: Iterable[tuple[str, Tensor]]) -> None:
        """Store the items."""
        super().__init__(items)
        self.kind = kind
        self.read: set[str] = set()

    @override
    def __getitem__(self, name: str) -> Tensor:
        """Read one of them."""
        self.read.add(name)
        return super().__getitem__(name)

    @override
    def __iter__(self) -> Iterator[str]:
        """Go through the names; whoever does reads all of them. It also leads ``dict(named)`` to the other methods."""
        self.read.update(super().keys())
        return super().__iter__()

    @override
    def get(self, name: str, default: Any = None) -> Any:
        """Read one of them, if it is there."""
        return self[name] if name in self else default

    @override
    def values(self) -> dict_values[str, Tensor]:
        """Read all of them."""
        self.read.update(super().keys())
        return super().values()

    @override
    def items(self) -> dict_items[str, Tensor]:
        """Read all of them."""
        self.read.update(super().keys())
        return super().items()

    def __getattr__(self, name: str) -> Tensor:
        """Say how to read a value.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"a {self.__dict__.get('kind', 'tensor')} is read as [{name!r}], not as an attribute.")

    def __missing__(self, name: object) -> Tensor:
        """Raise the helpful error.

        Raises:
            KeyError: Always.
        """
        raise KeyError(f"no {self.kind} {name!r}: {suggest(name, self)}")


pytree.register_pytree_node(
    Named,
    lambda named: (list(named.values()), (named.kind, tuple(named))),
    lambda values, context: Named(context[0], zip(context[1], values, strict=True)),
)
