"""Rates in place of those of a network, while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bilevel.dropouts.calls import Call, layout_of
from bilevel.dropouts.places import Place, Visits, module_names
from bilevel.dropouts.rates import DropoutRate
from bilevel.dropouts.rules import Rule, rule_of
from bilevel.hyper import Hyper, Named, suggest
from bilevel.responding import NoExamples


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
        self._warns = True
        self._scanned = True
        self._left: set[Place] = set()
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
            self._scanned &= rate.scanned
            self._left |= {*rate.left}
        self._names = module_names(module) if module is not None and rates else {}
        # A network that drops in some layers only needs no look at all others, once a pass has shown that.
        layers = [parts[place.module] for place in self._hyper if place.call is None]
        whole = len(layers) == len(self._hyper) and all(isinstance(layer, _DropoutNd) for layer in layers)
        self._layers = layers if whole else None
        self._all_known = self._surprised = False
        self._ruled: list[tuple[nn.Module, Rule, str]] = []
        for place, name in self._hyper.items():
            rule = rule_of(parts[place.module]) if place.call is None else None
            if rule is not None:
                self._ruled.append((parts[place.module], rule, name))

    def at(self, values: Named) -> AbstractContextManager[None]:
        """Take the rates from these hyperparameters inside the block; without rates, this does nothing.

        Returns:
            A context manager.
        """
        return self._at(values) if self._hyper else nullcontext()

    @contextmanager
    def _at(self, values: Named) -> Generator[None]:
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
            visits = Visits(self._names, self._visit)
            stack.enter_context(visits.running(self._layers if self._all_known else None))
            yield
        if not self._all_known:
            self._all_known = self._layers is not None and not self._surprised
        elif visits.surprised:  # which is looked at more closely in the next pass
            self._surprised, self._all_known = True, False

    def _visit(self, place: Place, call: Call) -> Any:
        assert self._values is not None
        if place in self._hyper:
            return call.run(self._values[self._hyper[place]])
        if self._warns and place not in self._left and call.rate > 0:
            self._warns = False
            remedy = "one that the network drops in as in training" if self._scanned else "to find such calls"
            warnings.warn(
                f"{place.module or 'the network'!r} drops with a rate of {call.rate:g} that is not tuned, in a call "
                f"of a function that was not found: pass a sample to bilevel.dropout_rates, {remedy}.",
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
        if rate.ndim and x is not None:
            layout = layout_of(x, len(rate))
            if layout.dim:
                raise NoExamples(
                    f"the layer {name!r} drops from a tensor of shape {tuple(x.shape)}, whose dimension {layout.dim} "
                    "counts the examples: its rule expects them first. Use bilevel.dropout_rates(net, shared=True)."
                )
            if not layout.alone:  # examples are flattened with something else
                rate = rate[layout.ids(len(rate), rate.device)]
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
