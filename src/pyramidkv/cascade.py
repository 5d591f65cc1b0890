"""Schedules from measurements that come layer by layer, while the prompt is being processed.

Which share a layer gets is known only once the layers above it have been measured too. Until then
all layers measured so far divide the whole budget among them: what is held never exceeds the total
by more than a token per layer, and a layer's share only ever shrinks. In the end the schedule is
the one that all measurements make at once. Only where a layer keeps the whole prompt it can differ:
what others would get of its surplus, but have let go of already, goes to those that can use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .budgets import Entropy, apportion


@dataclass
class Cascade:
    """One prompt's schedule in the making.

    Attributes:
        layers: layers that share the budget.
        budget: tokens per layer on average, at least `protected`.
        prompt_length: the prompt's tokens.
        protected: tokens every layer keeps.
        shares: makes the allocation from the effective tokens of some layers.
        held: what each layer measured so far is to keep for now; of the last layer on, for good.
    """

    layers: int
    budget: int
    prompt_length: int
    protected: int
    shares: Callable[[tuple[float, ...]], Entropy]
    held: list[int] = field(default_factory=list)
    _measured: list[float] = field(default_factory=list)

    def add(self, effective_tokens: float) -> None:
        """Take the next layer's measurement and bring `held` up to date."""
        self._measured.append(effective_tokens)
        ceilings = [*self.held, self.prompt_length]
        total = min(self.layers * min(self.budget, self.prompt_length), sum(ceilings))
        weights = self.shares(tuple(self._measured)).weights()
        floor = min(self.protected, self.prompt_length)
        self.held = apportion(weights, total, floor, ceilings)
        if len(self.held) < self.layers:
            # One more each, so that later rounding never asks for a token that is gone.
            self.held = [min(c, n + 1) for n, c in zip(self.held, ceilings, strict=True)]
