"""What can be set about a method, and which allocation that amounts to. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .budgets import (
    Allocation,
    Entropy,
    Explicit,
    OfficialPyramid,
    Power,
    Pyramid,
    Uniform,
)
from .errors import PyramidKVError
from .schedule_profile import ScheduleProfile

if TYPE_CHECKING:
    from torch import Tensor

    from .head_selection import HeadSelection
    from .selection import Pooling

AllocationName = Literal[
    "uniform", "pyramid", "power", "entropy", "list", "official", "global", "heads"
]
ALLOCATIONS: tuple[AllocationName, ...] = ("uniform", "pyramid", "power", "entropy", "list")

OPTIONS_OF_ALLOCATIONS: dict[str, tuple[str, ...]] = {
    "beta": ("pyramid", "official"),
    "gamma": ("power",),
    "c_max": ("power",),
    "c_min": ("power",),
    "profile": ("entropy",),
    "share_temperature": ("entropy",),
    "share_floor": ("entropy",),
}
"""Allocations that each of these options means something to, the first one above all."""

SHARED_OPTIONS = frozenset({"window_size", "sink_tokens"})
ALLOCATION_OPTIONS = frozenset({"allocation", "layer_budgets", *OPTIONS_OF_ALLOCATIONS})

SELECTION_OPTIONS = SHARED_OPTIONS | ALLOCATION_OPTIONS | {"pooling", "kernel_size"}
"""Names of the options that mean something whatever the score is."""

HEAD_ALLOCATIONS: tuple[AllocationName, ...] = ("global", "heads")
"""Allocations to heads, so that what a layer keeps is known after the prompt only: all heads of all
layers compete, or each has a budget of its own."""


class MethodError(PyramidKVError, ValueError):
    """A method or option that does not exist or does not fit; the message says what does."""


@dataclass(frozen=True)
class Options:
    """Everything that can be set about a method. Each method has its own defaults.

    Attributes:
        window_size: last prompt tokens, always kept; their queries vote. 0 protects none.
        sink_tokens: first prompt tokens, always kept.
        pooling, kernel_size: smoothing of the scores, `max` or `avg` over an odd width.
        group_reduce: how query heads that share a KV head are combined, `mean` or `max`.
        window_reduce: how the window's queries are combined, `mean` or `max`.
        value_norm: weight scores by the norm of the value vectors.
        allocation: `uniform`, `pyramid`, `power`, `entropy` or `list`; of methods whose heads
            keep different numbers of tokens also `global` or `heads`.
        beta: steepness of the pyramid, from 1 (uniform).
        gamma, c_max, c_min: the power law's exponent and ends, in tokens.
        profile: of the allocation `entropy`: what was measured of the model; without one, the
            entropies are those of the prompt itself.
        share_temperature, share_floor: of the allocation `entropy`, see `budgets.Entropy`.
        layer_budgets: the schedule of the allocation `list`, lowest layer first.
        head_floor: what a KV head cannot lose to those it competes with, as a fraction of an
            equal share of the tokens beyond sinks and window; None: all heads keep equally many.
        head_budgets: the budgets of the allocation `heads`: for each layer, lowest first, one for
            each KV head.
    """

    window_size: int = 32
    sink_tokens: int = 4
    pooling: Literal["max", "avg"] = "max"
    kernel_size: int = 31
    group_reduce: Literal["mean", "max"] = "max"
    window_reduce: Literal["mean", "max"] = "mean"
    value_norm: bool = False
    allocation: AllocationName = "uniform"
    beta: float = 20
    gamma: float = 1.0
    c_max: int | None = None
    c_min: int | None = None
    profile: ScheduleProfile | None = None
    share_temperature: float = 1.0
    share_floor: float = 0.1
    layer_budgets: tuple[int, ...] | None = None
    head_floor: float | None = None
    head_budgets: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("window_size", "sink_tokens", "kernel_size", "c_max", "c_min"):
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name.startswith("c_")):
                raise MethodError(f"{name} is {value!r}; it is a whole number")
        for name in ("beta", "gamma", "share_temperature", "share_floor"):
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise MethodError(f"{name} is {value!r}; it is a number")
        if self.head_floor is not None and (
            type(self.head_floor) not in (int, float) or not 0 <= self.head_floor <= 1
        ):
            raise MethodError(f"head_floor is {self.head_floor!r}; it is a number from 0 to 1")
        if type(self.value_norm) is not bool:
            raise MethodError(f"value_norm is {self.value_norm!r}; it is True or False")
        if not isinstance(self.profile, ScheduleProfile | None):
            raise MethodError(
                f"profile is {self.profile!r}; it is a schedule profile, as ScheduleProfile.read "
                "gives it"
            )
        for name in ("window_size", "sink_tokens"):
            value = getattr(self, name)
            if value < 0:
                raise MethodError(f"{name} is {value}; it must be 0 or more")
        for name, allowed in (
            ("pooling", ("max", "avg")),
            ("group_reduce", ("mean", "max")),
            ("window_reduce", ("mean", "max")),
            ("allocation", (*ALLOCATIONS, "official", *HEAD_ALLOCATIONS)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise MethodError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        if not 1 <= self.kernel_size < 2**31 or self.kernel_size % 2 == 0:
            raise MethodError(
                f"kernel_size is {self.kernel_size}; it must be an odd number of at least 1 and "
                "below 2^31"
            )
        if (self.allocation == "list") != (self.layer_budgets is not None):
            raise MethodError(
                "allocation 'list' and layer_budgets go together; "
                f"given: allocation {self.allocation!r}, layer_budgets {self.layer_budgets}"
            )
        if (self.allocation == "heads") != (self.head_budgets is not None):
            raise MethodError(
                "allocation 'heads' and head_budgets go together; "
                f"given: allocation {self.allocation!r}, head_budgets {self.head_budgets}"
            )
        if self.head_budgets is not None:
            self._check_head_budgets(self.head_budgets)

    def _check_head_budgets(self, budgets: tuple[tuple[int, ...], ...]) -> None:
        if not budgets or not budgets[0] or len({len(layer) for layer in budgets}) > 1:
            raise MethodError(
                "head_budgets is a list of token counts for each layer, one for each KV head, all "
                f"of one length; given: {[list(layer) for layer in budgets]}"
            )
        least = max(1, self.protected)
        for index, layer in enumerate(budgets):
            if min(layer) < least:
                raise MethodError(
                    f"a head of layer {index} is to keep {min(layer)} tokens, but sinks and window "
                    f"take {self.protected}; give every head at least {least}"
                )

    @property
    def protected(self) -> int:
        """Tokens that every layer keeps: sinks and window."""
        return self.window_size + self.sink_tokens

    @property
    def measured(self) -> bool:
        """Whether the schedule follows from the prompt itself, so that nothing else gives it."""
        return self.allocation == "entropy" and self.profile is None

    @property
    def by_head(self) -> bool:
        """Whether the KV heads of a layer keep different numbers of tokens."""
        return self.head_floor is not None or self.head_budgets is not None

    @property
    def follows_prompt(self) -> bool:
        """Whether what each layer keeps is known after the prompt only."""
        return self.measured or self.allocation in HEAD_ALLOCATIONS

    def make_shares(self, effective_tokens: tuple[float, ...]) -> Entropy:
        """Return the allocation `entropy` for what was measured, lowest layer first."""
        return Entropy(effective_tokens, self.share_temperature, self.share_floor)

    def make_allocation(self) -> Allocation:
        """Return the allocation these options describe.

        Raises:
            MethodError: it is measured on the prompt, or no allocation to layers.
        """
        match self.allocation:
            case "global" | "heads":
                raise MethodError(
                    f"the allocation {self.allocation!r} is one to heads, not to layers, so how "
                    "much each layer keeps is known after the prompt only"
                )
            case "uniform":
                return Uniform()
            case "pyramid":
                return Pyramid(self.beta)
            case "power":
                return Power(self.gamma, self.c_max, self.c_min)
            case "official":
                return OfficialPyramid(self.beta)
            case "entropy":
                if self.profile is None:
                    raise MethodError(
                        "the allocation 'entropy' without a schedule profile is measured on the "
                        "prompt itself, so its budgets are known after the prompt only; give a "
                        "profile (--schedule FILE) to know them before"
                    )
                return self.make_shares(self.profile.effective_tokens)
            case "list":
                assert self.layer_budgets is not None
                return Explicit(self.layer_budgets)

    def make_pooling(self) -> Pooling:
        """Return the pooling these options describe."""
        from .selection import Pooling

        return Pooling(self.pooling, self.kernel_size)

    def select(self, scores: Tensor, count: int) -> Tensor:
        """Return which `count` tokens stay by these options, see `selection.select`."""
        from .selection import select

        return select(scores, count, self.sink_tokens, self.window_size, self.make_pooling())

    def select_heads(self, scores: Tensor, layer: int, budget: int) -> HeadSelection:
        """Return which tokens of all heads of a layer stay; not with the allocation `global`.

        Args:
            scores: float32 `[batch, kv_heads, tokens]`.
            layer: its number among those that are compressed.
            budget: of the layer, tokens per head; not used if each head has its own.
        """
        from .head_selection import select_adaptive, select_by_table

        rest = self.sink_tokens, self.window_size, self.make_pooling()
        if self.head_budgets is not None:
            return select_by_table(scores, self.head_budgets[layer], *rest)
        assert self.head_floor is not None
        return select_adaptive(scores, budget * scores.shape[1], *rest, self.head_floor)

    def order(self, scores: Tensor) -> Tensor:
        """Return all tokens by these options, best first, see `selection.order`."""
        from .selection import order

        return order(scores, self.sink_tokens, self.window_size, self.make_pooling())
