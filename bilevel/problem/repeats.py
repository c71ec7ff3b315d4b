"""Networks that run again while they are differentiated, as activation checkpointing does.

By then the module has its own weights again, and not those that were differentiated: the gradient would be wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from typing_extensions import override

REMEDY = "remove the checkpointing from the network"


@final
class Repeats:
    """Refuses a network that runs again while it is differentiated.

    Attributes:
        running: How many calls of the network with other weights are under way; these are no repeats.
    """

    def __init__(self, module: nn.Module | None, params: Iterable[Tensor]) -> None:
        """Watch a module and those of its parameters that are trained."""
        self.running = 0
        modules = [] if module is None else list(module.modules())
        self._ids = frozenset(map(id, modules))
        trained = set(map(id, params))
        self._places = [
            (part._parameters, name)
            for part in modules
            for name, value in part._parameters.items()
            if id(value) in trained
        ]
        self._own: list[Any] | None = None  # the parameters of the module while they are hidden

    @contextmanager
    def refused(self) -> Generator[None]:
        """Refuse repeats inside the block.

        A module says so when it is called. A function that reads parameters of the module finds something there that
        cannot be used.

        Raises:
            RuntimeError: If there is one.
        """
        if self._own is not None:  # a block around this one does so already
            yield
            return

        def refuse(module: nn.Module, args: Any) -> None:
            if self.running == 0 and self._own is not None and id(module) in self._ids:
                raise RuntimeError(_message(f"its {type(module).__name__}"))

        handle = register_module_forward_pre_hook(refuse)
        self.hide(True)
        try:
            yield
        except RuntimeError as error:
            if "torch.utils.checkpoint" in str(error) and REMEDY not in str(error):
                error.add_note(f"{_message('parts of itself')} Other settings of it do not help.")
            raise
        finally:
            self.hide(False)
            handle.remove()

    def hide(self, hide: bool) -> bool:
        """Hide the parameters of the module, or put them back, while the user's code runs and not a repeat of it.

        Returns:
            Whether they were hidden.
        """
        before = self._own is not None
        if hide and self._own is None:
            self._own = [parameters[name] for parameters, name in self._places]
            for parameters, name in self._places:
                parameters[name] = _ABSENT
        elif not hide and self._own is not None:
            for (parameters, name), value in zip(self._places, self._own, strict=True):
                parameters[name] = value
            self._own = None
        return before


class _Absent(nn.Parameter):
    """Stands for a parameter whose value is elsewhere."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(_message("a part"))


def _message(part: str) -> str:
    return (
        f"the network ran {part} again during differentiation, as torch.utils.checkpoint does. That would use other "
        f"weights than the ones being trained: {REMEDY}."
    )


_ABSENT: Any = torch.empty(0).as_subclass(_Absent)
