"""Rates in place of those of a network, while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from bilevel.dropouts.calls import Call
from bilevel.dropouts.places import Place, Visits, module_names
from bilevel.dropouts.rates import DropoutRate
from bilevel.dropouts.rules import Rule, rule_of
from bilevel.hyper import Hyper, Named, suggest


@final
class Dropouts:
    """The dropout rates among the hyperparameters of a problem."""

    def __init__(self, module: nn.Module | None, hyper: Mapping[str, Hyper]) -> None:
        """Find out where the rates belong.

        Raises:
            ValueError: If they were made for another network, or two are for one place.
        """
        self._hyper: dict[Place, str] = {}
        self._values: Named | None = None
        self._warns = False
        rates = {name: entry for name, entry in hyper.items() if isinstance(entry, DropoutRate)}
        parts = {} if module is None else dict(module.named_modules())
        for name, rate in rates.items():
            for place in rate.places:
                if place.module not in parts:
                    raise ValueError(
                        f"hyper[{name!r}] is the dropout rate of {place.module!r}, which inner does not have: call "
                        f"bilevel.dropout_rates with the network of this problem. {suggest(place.module, parts)}"
                    )
                if place in self._hyper:
                    raise ValueError(
                        f"hyper[{self._hyper[place]!r}] and hyper[{name!r}] are both the dropout rate of "
                        f"{place.module!r}: leave one out."
                    )
                self._hyper[place] = name
            self._warns |= not rate.scanned
        self._names = module_names(module) if module is not None and rates else {}
        self._ruled: list[tuple[nn.Module, Rule, str]] = []
        for place, name in self._hyper.items():
            rule = rule_of(parts[place.module]) if place.call is None else None
            if rule is not None:
                self._ruled.append((parts[place.module], rule, name))

    @contextmanager
    def at(self, values: Named) -> Generator[None]:
        """Take the rates from these hyperparameters inside the block."""
        before, self._values = self._values, values
        try:
            yield
        finally:
            self._values = before

    def running(self) -> AbstractContextManager[Any]:
        """To be entered around a call of the network.

        Returns:
            A context in which its dropout has the rates of :meth:`at`; without rates, one that does nothing.
        """
        if not self._hyper or self._values is None:
            return nullcontext()
        return self._intercepting()

    @contextmanager
    def _intercepting(self) -> Generator[None]:
        with ExitStack() as stack:
            for module, rule, name in self._ruled:
                stack.enter_context(_replaced(module, partial(self._follow, module, rule, name, module.forward)))
            stack.enter_context(Visits(self._names, self._visit).running())
            yield

    def _visit(self, place: Place, call: Call) -> Any:
        assert self._values is not None
        if place in self._hyper:
            return call.run(self._values[self._hyper[place]])
        if self._warns and place.call is not None and call.rate > 0:
            self._warns = False
            warnings.warn(
                f"the forward of {place.module or 'the network'!r} calls dropout as a function, with a rate of "
                f"{call.rate:g} that is not tuned: pass a sample to bilevel.dropout_rates, to find such calls.",
                stacklevel=2,
            )
        return NotImplemented

    def _follow(self, module: nn.Module, rule: Rule, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer with a rule."""
        if not module.training:
            return forward(*args, **kwargs)
        assert self._values is not None
        rate = self._values[name]
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim), None)
        if rate.ndim and x is not None and len(x) != len(rate) and len(x) % len(rate) == 0:
            rate = rate.repeat_interleave(len(x) // len(rate))  # examples are flattened with something else
        return rule.forward(module, rate, *args, **kwargs)


@contextmanager
def _replaced(module: nn.Module, forward: Any) -> Generator[None]:
    """Another forward inside the block, as ``torch.func.functional_call`` gives a module other weights."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
