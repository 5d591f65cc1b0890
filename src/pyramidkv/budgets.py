"""Layer budgets: how many tokens each layer keeps, in exact integers.

A *budget* is the number of tokens kept per layer and KV head, averaged over the layers, with the
attention sinks and the observation window included. A *schedule* is the list of budgets, one per
layer. An *allocation* is the rule that makes a schedule from a budget.

Every allocation but `OfficialPyramid` only says in which proportion the layers share what lies
above the floor; `apportion` turns those shares into integers whose sum is exactly
`layers * min(budget, prompt_length)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor as floor_of
from typing import Protocol

from .errors import PyramidKVError


class BudgetError(PyramidKVError, ValueError):
    """A budget that cannot be met; the message says which budgets can."""


class Allocation(Protocol):
    """The rule that makes a schedule."""

    def schedule(
        self, layers: int, budget: int, prompt_length: int, protected: int = 0
    ) -> list[int]:
        """Return the tokens each layer keeps, lowest layer first.

        Args:
            layers: number of layers that share the budget, at least 1.
            budget: tokens per layer and KV head, averaged over the layers.
            prompt_length: tokens in the prompt; no layer keeps more.
            protected: tokens every layer keeps (attention sinks + window): the floor.

        Raises:
            BudgetError: the budget is below `protected` or below 1.
        """
        ...


def whole(tokens: float) -> float:
    """Return a number of tokens as a whole one if it is that but for rounding."""
    nearest = round(tokens)
    return nearest if abs(tokens - nearest) < 1e-6 else tokens


def apportion(
    weights: Sequence[Fraction], total: int, floor: int, ceiling: int | Sequence[int]
) -> list[int]:
    """Split `total` into integers between `floor` and `ceiling`, in proportion to `weights`.

    Each entry gets `floor` and, of what is left, a part proportional to its weight. What an entry
    cannot hold is shared out among the others in the same proportion. Fractions are settled by
    the largest remainder, the lower layer first, so equal inputs give equal outputs and
    non-increasing weights give a non-increasing result.

    Args:
        weights: non-negative; their scale is of no importance.
        total: between the sums of the bounds.
        floor: least of each entry.
        ceiling: most of each entry, one for all or one for each; at least `floor`.
    """
    count = len(weights)
    ceilings = [ceiling] * count if isinstance(ceiling, int) else list(ceiling)
    if not count * floor <= total <= sum(ceilings):
        raise BudgetError(
            f"{total} tokens cannot be split over {count} layers that hold {floor} to "
            f"{max(ceilings, default=0)} each; the total must lie between {count * floor} and "
            f"{sum(ceilings)}"
        )
    ideal = [Fraction(most) for most in ceilings]
    open_layers = list(range(count))
    left = Fraction(total - count * floor)
    room = [most - floor for most in ceilings]
    while open_layers:
        weight_sum = sum((weights[i] for i in open_layers), Fraction(0))
        if weight_sum == 0:
            shares = {i: left / len(open_layers) for i in open_layers}
        else:
            shares = {i: left * weights[i] / weight_sum for i in open_layers}
        overflowing = [i for i in open_layers if shares[i] > room[i]]
        if not overflowing:
            for i in open_layers:
                ideal[i] = floor + shares[i]
            break
        left -= sum(room[i] for i in overflowing)
        open_layers = [i for i in open_layers if shares[i] <= room[i]]

    result = [floor_of(x) for x in ideal]
    by_remainder = sorted(range(count), key=lambda i: (result[i] - ideal[i], i))
    for i in by_remainder[: total - sum(result)]:
        result[i] += 1
    return result


def _weighted_schedule(
    weights: Sequence[Fraction], budget: int, prompt_length: int, protected: int
) -> list[int]:
    layers = len(weights)
    _check(layers, budget, prompt_length, protected)
    kept = min(budget, prompt_length)
    return apportion(weights, layers * kept, min(protected, prompt_length), prompt_length)


def _check(layers: int, budget: int, prompt_length: int, protected: int) -> None:
    if layers < 1:
        raise BudgetError(f"layers is {layers}; it must be at least 1")
    if prompt_length < 1:
        raise BudgetError(f"the prompt has {prompt_length} tokens; it must have at least 1")
    check_budget(budget, protected)


def check_budget(budget: int, protected: int) -> None:
    """Raise `BudgetError` if the budget is below what sinks and window take, or below 1."""
    smallest = max(protected, 1)
    if budget < smallest:
        raise BudgetError(
            f"a budget of {budget} is too small: sinks and window already take {protected} tokens, "
            f"so the smallest possible budget is {smallest}"
        )


@dataclass(frozen=True)
class Uniform:
    """The same budget in every layer (SnapKV, H2O, StreamingLLM)."""

    def schedule(
        self, layers: int, budget: int, prompt_length: int, protected: int = 0
    ) -> list[int]:
        return _weighted_schedule([Fraction(1)] * layers, budget, prompt_length, protected)


@dataclass(frozen=True)
class Pyramid:
    """PyramidKV's arithmetic sequence (arXiv 2406.02069, section 4.2).

    With m layers and an average of e tokens above the protected ones, the top layer gets
    `e / beta`, the bottom layer `2 e - e / beta`, and the layers between them lie on the line.
    `beta = 1` is uniform; the larger beta, the steeper the pyramid.
    """

    beta: float = 20

    def __post_init__(self) -> None:
        if not self.beta >= 1 or self.beta == float("inf"):
            raise ValueError(
                f"beta is {self.beta}; it must be a finite number of at least 1 (1 is uniform)"
            )

    def schedule(
        self, layers: int, budget: int, prompt_length: int, protected: int = 0
    ) -> list[int]:
        top = 1 / Fraction(self.beta)
        bottom = 2 - top
        step = (bottom - top) / max(layers - 1, 1)
        weights = [bottom - i * step for i in range(layers)]
        return _weighted_schedule(weights, budget, prompt_length, protected)


@dataclass(frozen=True)
class Power:
    """A power law over depth: `C_l = C_min + (C_max - C_min) * (1 - (l-1)/(L-1)) ** gamma`.

    `c_min` and `c_max` are token counts, sinks and window included; they give the shape, and the
    curve is scaled so that the total is exact. By default `c_min` is the floor (sinks + window)
    and `c_max` whatever makes the average equal to the budget. `gamma` 1 is linear, above 1
    concentrates on the lowest layers, below 1 spreads.
    """

    gamma: float = 1.0
    c_max: int | None = None
    c_min: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.gamma < float("inf"):
            raise ValueError(f"gamma is {self.gamma}; it must be a positive finite number")
        if self.c_min is not None and self.c_min < 0:
            raise ValueError(f"c_min is {self.c_min}; it must be 0 or more")
        if self.c_max is not None and self.c_max < max(self.c_min or 0, 1):
            raise ValueError(
                f"c_max is {self.c_max}; it must be at least 1 and at least c_min ({self.c_min})"
            )

    def schedule(
        self, layers: int, budget: int, prompt_length: int, protected: int = 0
    ) -> list[int]:
        check_budget(budget, protected)
        c_min = protected if self.c_min is None else self.c_min
        if c_min < protected:
            raise BudgetError(
                f"c_min is {c_min}, but sinks and window take {protected} tokens in every layer; "
                f"give a c_min of at least {protected}"
            )
        depth = [Fraction(i, max(layers - 1, 1)) for i in range(layers)]
        curve = [Fraction(float(1 - x) ** self.gamma) for x in depth]
        if self.c_max is not None:
            c_max = Fraction(self.c_max)
        else:
            if budget < c_min:
                raise BudgetError(
                    f"a budget of {budget} is below c_min ({c_min}); give a budget of at least "
                    f"{c_min} or a smaller c_min"
                )
            c_max = c_min + (budget - c_min) * layers / sum(curve, Fraction(0))
        if c_max < c_min:
            raise BudgetError(f"c_max is {c_max}, below c_min ({c_min}); give a larger c_max")
        weights = [c_min - protected + (c_max - c_min) * x for x in curve]
        return _weighted_schedule(weights, budget, prompt_length, protected)


@dataclass(frozen=True)
class Entropy:
    """Shares in proportion to how many tokens each layer's attention effectively spreads over.

    The share above the floor of layer l is `floor / L + (1 - floor) * e_l^(1/T) / sum(e^(1/T))`,
    where e is the effective context, 2 to the attention entropy in bits. A measured funnel gives a
    pyramid, equal entropies give uniform budgets, and the order is whatever was measured.

    Attributes:
        effective_tokens: one number above 0 per layer, lowest layer first; their scale is of no
            importance.
        temperature: 1 is proportional; larger is closer to uniform, smaller is sharper.
        floor: share that every layer gets whatever was measured, as a fraction of an equal one.
    """

    effective_tokens: tuple[float, ...]
    temperature: float = 1.0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not self.effective_tokens or not all(
            0 < count < float("inf") for count in self.effective_tokens
        ):
            raise ValueError(
                "effective_tokens is a list of positive finite numbers, one per layer; given: "
                f"{list(self.effective_tokens)}"
            )
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"the temperature of the shares is {self.temperature}; it must be a positive "
                "finite number (1 is proportional)"
            )
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"the floor of the shares is {self.floor}; it is a fraction of an equal share, "
                "from 0 to 1"
            )

    def schedule(
        self, layers: int, budget: int, prompt_length: int, protected: int = 0
    ) -> list[int]:
        if len(self.effective_tokens) != layers:
            raise BudgetError(
                f"entropies of {len(self.effective_tokens)} layers were given, but {layers} layers "
                "share the budget; give one per full-attention layer"
            )
        return _weighted_schedule(self.weights(), budget, prompt_length, protected)

    def weights(self) -> list[Fraction]:
        """Return each layer's share as a multiple of an equal one."""
        largest = max(self.effective_tokens)
        sharpened = [
            Fraction(float(count / largest) ** (1 / self.temperature))
            for count in self.effective_tokens
        ]
        floor = Fraction(self.floor)
        scale = (1 - floor) * len(sharpened) / sum(sharpened, Fraction(0))
        return [floor + scale * share for share in sharpened]


@dataclass(frozen=True)
class Explicit:
    """Budgets given one by one, lowest layer first; they carry their own total.

    A prompt shorter than some entries keeps the sum as near to the list's as it can: what a layer
    cannot use goes to the others, in proportion to their entries.
    """

    budgets: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.budgets or min(self.budgets) < 1:
            raise ValueError(
                "a schedule is a list of token counts of at least 1, one per layer; "
                f"given: {list(self.budgets)}"
            )

    def schedule(
        self, layers: int, budget: int, prompt_length: int, protected: int = 0
    ) -> list[int]:
        """See `Allocation.schedule`; `budget` is not used, the list's own total counts."""
        if len(self.budgets) != layers:
            raise BudgetError(
                f"the schedule has {len(self.budgets)} entries, but the model has {layers} "
                "full-attention layers; give one entry per layer"
            )
        _check(layers, min(self.budgets), prompt_length, protected)
        if max(self.budgets) <= prompt_length:
            return list(self.budgets)
        total = min(sum(self.budgets), layers * prompt_length)
        weights = [Fraction(b - protected) for b in self.budgets]
        return apportion(weights, total, min(protected, prompt_length), prompt_length)


@dataclass(frozen=True)
class OfficialPyramid:
    """The budgets of the PyramidKV authors' code, rounding errors included.

    Only for reproducing published numbers. The per-layer step is floored, so the total exceeds
    `layers * budget` (+4.3% at 32 layers and 128 tokens, +27% at 80 layers), and prompts shorter
    than `2 * (budget - window)` silently get a uniform schedule.
    """

    beta: float = 20

    def __post_init__(self) -> None:
        if not (self.beta >= 1 and float(self.beta).is_integer()):
            raise ValueError(f"beta is {self.beta}; the official code takes whole numbers from 1")

    def schedule(
        self, layers: int, budget: int, prompt_length: int, protected: int = 0
    ) -> list[int]:
        _check(layers, budget, prompt_length, protected)
        if prompt_length < budget:
            return [prompt_length] * layers
        spare = budget - protected
        if prompt_length < 2 * spare or layers == 1:
            return [budget] * layers
        low = spare // int(self.beta)
        high = 2 * spare - low
        if high >= prompt_length - protected:
            high = prompt_length - protected
            low = 2 * spare - high
        step = (high - low) // (layers - 1)
        return [high - i * step + protected for i in range(layers)]


def budget_from_ratio(compression_ratio: float, prompt_length: int) -> int:
    """Return the budget that removes the fraction `compression_ratio` of the prompt.

    Half a token is rounded up; at least one token is kept. The ratio is read as the decimal that
    was written (0.9 is nine tenths), so 0.9 of 1,000 tokens leaves 100 and not 99.

    Raises:
        ValueError: the ratio is outside [0, 1).
    """
    if not 0 <= compression_ratio < 1:
        raise ValueError(
            f"compression_ratio is {compression_ratio}; it is the fraction removed and must be at "
            "least 0 and below 1"
        )
    kept = (1 - Fraction(str(compression_ratio))) * prompt_length
    return max(1, floor_of(kept + Fraction(1, 2)))
