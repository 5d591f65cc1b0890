"""Compression methods by name: each is a score, an allocation and a selection.

To add a method, write its score (or take one of `scores.py`), and add one `Method` to `METHODS`.
Nothing here knows about a model or an engine. This module does not import torch: listing methods
and printing schedules stay fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .budgets import (
    Allocation,
    BudgetError,
    Explicit,
    OfficialPyramid,
    Power,
    Pyramid,
    Uniform,
    budget_from_ratio,
    check_budget,
)
from .errors import PyramidKVError

if TYPE_CHECKING:
    from .scores import Score
    from .selection import Pooling

AllocationName = Literal["uniform", "pyramid", "power", "list", "official"]
ALLOCATIONS: tuple[AllocationName, ...] = ("uniform", "pyramid", "power", "list")

Capability = Literal["prefill chunks", "decode budget"]
"""What not every method can do: take a prompt in pieces; evict while decoding."""

DECODE_INTERVAL = 32
"""Tokens between two evictions while decoding, if nothing else is asked for."""


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
        allocation: `uniform`, `pyramid`, `power` or `list`.
        beta: steepness of the pyramid, from 1 (uniform).
        gamma, c_max, c_min: the power law's exponent and ends, in tokens.
        layer_budgets: the schedule of the allocation `list`, lowest layer first.
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
    layer_budgets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("window_size", "sink_tokens", "kernel_size", "c_max", "c_min"):
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name.startswith("c_")):
                raise MethodError(f"{name} is {value!r}; it is a whole number")
        for name in ("beta", "gamma"):
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise MethodError(f"{name} is {value!r}; it is a number")
        if type(self.value_norm) is not bool:
            raise MethodError(f"value_norm is {self.value_norm!r}; it is True or False")
        for name in ("window_size", "sink_tokens"):
            value = getattr(self, name)
            if value < 0:
                raise MethodError(f"{name} is {value}; it must be 0 or more")
        for name, allowed in (
            ("pooling", ("max", "avg")),
            ("group_reduce", ("mean", "max")),
            ("window_reduce", ("mean", "max")),
            ("allocation", (*ALLOCATIONS, "official")),
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

    @property
    def protected(self) -> int:
        """Tokens that every layer keeps: sinks and window."""
        return self.window_size + self.sink_tokens

    def make_allocation(self) -> Allocation:
        """Return the allocation these options describe."""
        match self.allocation:
            case "uniform":
                return Uniform()
            case "pyramid":
                return Pyramid(self.beta)
            case "power":
                return Power(self.gamma, self.c_max, self.c_min)
            case "official":
                return OfficialPyramid(self.beta)
            case "list":
                assert self.layer_budgets is not None
                return Explicit(self.layer_budgets)

    def make_pooling(self) -> Pooling:
        """Return the pooling these options describe."""
        from .selection import Pooling

        return Pooling(self.pooling, self.kernel_size)


def _window_attention(options: Options) -> Score:
    from .scores import WindowAttention

    return WindowAttention(
        options.window_size, options.window_reduce, options.group_reduce, options.value_norm
    )


def _accumulated_attention(options: Options) -> Score:
    from .scores import AccumulatedAttention

    return AccumulatedAttention(options.group_reduce)


def _recency(options: Options) -> Score:
    from .scores import Recency

    return Recency()


_SHARED_OPTIONS = frozenset({"window_size", "sink_tokens"})
_ALLOCATION_OPTIONS = frozenset({"allocation", "beta", "gamma", "c_max", "c_min", "layer_budgets"})
_WINDOW_OPTIONS = (
    _SHARED_OPTIONS
    | _ALLOCATION_OPTIONS
    | {"pooling", "kernel_size", "group_reduce", "window_reduce", "value_norm"}
)


_IN_WORDS: dict[Capability, str] = {
    "prefill chunks": "a prompt in several pieces",
    "decode budget": "a decode budget",
}

_OPTIONS_OF_ALLOCATIONS = {
    "beta": ("pyramid", "official"),
    "gamma": ("power",),
    "c_max": ("power",),
    "c_min": ("power",),
}


@dataclass(frozen=True)
class Method:
    """A compression method.

    Attributes:
        name: the name users type.
        summary: what it keeps, in one line.
        source: paper and section.
        make_score: builds the score from the options; None keeps every token.
        options: the method's settings.
        settable: names of the options that mean something for this method.
        renumber: number the kept tokens anew, without gaps, up to the next position.
        supports: what the method can do beyond compressing a prompt in one piece.
    """

    name: str
    summary: str
    source: str
    make_score: Callable[[Options], Score] | None
    options: Options = field(default_factory=Options)
    settable: frozenset[str] = _WINDOW_OPTIONS
    renumber: bool = False
    supports: frozenset[Capability] = frozenset({"prefill chunks", "decode budget"})

    @property
    def evicts(self) -> bool:
        """Whether the method removes tokens at all."""
        return self.make_score is not None

    @property
    def needs_window(self) -> bool:
        """Whether the score is taken from the window's queries, so that the window cannot be 0."""
        return "window_reduce" in self.settable

    def require(self, capability: Capability) -> None:
        """Refuse what this method cannot do.

        Raises:
            MethodError: it names the methods that can.
        """
        if capability not in self.supports:
            able = ", ".join(m.name for m in METHODS.values() if capability in m.supports)
            raise MethodError(f"{self.name} does not support {_IN_WORDS[capability]}; {able} do")

    def with_options(self, **changes: Any) -> Method:
        """Return this method with some options changed.

        Raises:
            MethodError: an option does not exist, does not apply to this method, or is invalid.
        """
        for name in changes:
            if name not in self.settable:
                allowed = ", ".join(sorted(self.settable)) or "none"
                raise MethodError(f"{self.name} has no option {name!r}; its options are: {allowed}")
        if changes.get("layer_budgets") is not None:
            budgets = tuple(changes["layer_budgets"])
            if not all(isinstance(budget, int) for budget in budgets):
                raise MethodError(f"layer_budgets is {budgets}; it is a list of whole numbers")
            changes.setdefault("allocation", "list")
            changes["layer_budgets"] = budgets
        allocation = changes.get("allocation", self.options.allocation)
        for name, allocations in _OPTIONS_OF_ALLOCATIONS.items():
            if name in changes and allocation not in allocations:
                raise MethodError(
                    f"{name} means nothing to {allocation!r} budgets; it is an option of "
                    f"{allocations[0]!r}"
                )
        options = dataclasses.replace(self.options, **changes)
        if self.needs_window and options.window_size < 1:
            raise MethodError(
                f"window_size is {options.window_size}; {self.name} takes its scores from the "
                "window's queries, so it needs at least 1"
            )
        try:
            options.make_allocation()
        except ValueError as error:
            raise MethodError(str(error)) from None
        return dataclasses.replace(self, options=options)

    def schedule(self, layers: int, budget: int, prompt_length: int) -> list[int]:
        """Return the tokens each layer keeps of a prompt, lowest layer first.

        Raises:
            BudgetError: the budget is below what sinks and window take.
        """
        if not self.evicts:
            return [prompt_length] * layers
        allocation = self.options.make_allocation()
        return allocation.schedule(layers, budget, prompt_length, self.options.protected)


@dataclass(frozen=True)
class Compression:
    """A method together with how much it keeps: a budget or a compression ratio, never both.

    Attributes:
        method: the method.
        budget: tokens per layer and KV head, averaged over layers, sinks and window included.
        compression_ratio: fraction of the prompt removed, in [0, 1).
        decode_budget: bound on the tokens kept per layer on average, generated ones included;
            without one, everything generated is kept.
        decode_interval: tokens after which the cache is brought back to the decode budget.
    """

    method: Method
    budget: int | None = None
    compression_ratio: float | None = None
    decode_budget: int | None = None
    decode_interval: int = DECODE_INTERVAL

    def __post_init__(self) -> None:
        method = self.method
        self._check_decoding()
        if self.budget is not None and type(self.budget) is not int:
            raise MethodError(f"budget is {self.budget!r}; it is a whole number of tokens")
        if not isinstance(self.compression_ratio, int | float | None):
            raise MethodError(f"compression_ratio is {self.compression_ratio!r}; it is a number")
        if not method.evicts or method.options.allocation == "list":
            if self.budget is not None or self.compression_ratio is not None:
                why = "keeps everything" if not method.evicts else "has a list of layer budgets"
                raise MethodError(
                    f"{method.name} {why}, so it takes neither a budget nor a compression ratio"
                )
            return
        if (self.budget is None) == (self.compression_ratio is None):
            given = "neither" if self.budget is None else "both"
            raise MethodError(
                f"give {method.name} either a budget (tokens kept per layer) or a compression "
                f"ratio (fraction removed); {given} given"
            )
        if self.budget is not None:
            check_budget(self.budget, method.options.protected)
            method.schedule(1, self.budget, self.budget)  # refuses what the allocation cannot do
        else:
            assert self.compression_ratio is not None
            try:
                budget_from_ratio(self.compression_ratio, 1)
            except ValueError as error:
                raise MethodError(str(error)) from None

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Compression:
        """Return the compression whose `parameters()` these are.

        Raises:
            MethodError, BudgetError: they are those of none.
        """
        chosen = dict(parameters)
        name = chosen.pop("method", None)
        amounts = {key: chosen.pop(key, None) for key in cls(METHODS["full"]).amounts}
        defaults = get_method(str(name)).options
        for key, value in list(chosen.items()):
            value = tuple(value) if isinstance(value, list) else value
            if hasattr(defaults, key) and value == getattr(defaults, key):
                del chosen[key]
            else:
                chosen[key] = value
        return make_compression(str(name), **amounts, **chosen)

    def _check_decoding(self) -> None:
        if self.decode_budget is None:
            return
        self.method.require("decode budget")
        for name, value in (
            ("decode_budget", self.decode_budget),
            ("decode_interval", self.decode_interval),
        ):
            if type(value) is not int or value < 1:
                raise MethodError(f"{name} is {value!r}; it is a whole number of at least 1 token")
        if self.method.options.allocation == "list":
            raise MethodError(
                f"{self.method.name} has a list of layer budgets, which says nothing about how a "
                "decode budget is shared; choose another allocation"
            )
        try:
            check_budget(self.decode_budget, self.method.options.protected)
            self.method.schedule(1, self.decode_budget, self.decode_budget)
        except BudgetError as error:
            raise BudgetError(f"decode budget: {error}") from None

    def budget_for(self, prompt_length: int) -> int:
        """Return the budget for a prompt of this length, in tokens per layer on average."""
        if self.budget is not None:
            return self.budget
        if self.compression_ratio is not None:
            budget = budget_from_ratio(self.compression_ratio, prompt_length)
            protected = min(self.method.options.protected, prompt_length)
            if budget < protected:
                raise BudgetError(
                    f"a compression ratio of {self.compression_ratio} leaves {budget} of "
                    f"{prompt_length} prompt tokens per layer, but sinks and window take "
                    f"{protected}; give a smaller ratio, a smaller window or a budget"
                )
            return budget
        return prompt_length

    def schedule(self, layers: int, prompt_length: int) -> list[int]:
        """Return the tokens each layer keeps of a prompt, lowest layer first."""
        budget = self.budget_for(prompt_length)
        if self.compression_ratio is not None and self.method.evicts:
            # Only a prompt shorter than sinks + window can bring the budget below them here.
            budget = max(budget, self.method.options.protected)
        return self.method.schedule(layers, budget, prompt_length)

    def decode_schedule(self, layers: int, tokens_seen: int) -> list[int]:
        """Return the tokens each layer keeps while decoding, after this many tokens."""
        assert self.decode_budget is not None
        return self.method.schedule(layers, self.decode_budget, tokens_seen)

    def check(self, layers: int) -> None:
        """Refuse what cannot work with this many layers, before any prompt is there.

        Raises:
            BudgetError: such as a list of budgets for another number of layers.
        """
        if self.method.options.layer_budgets is not None:
            self.schedule(layers, max(self.method.options.layer_budgets))
        elif self.budget is not None:
            self.schedule(layers, self.budget)
        if self.decode_budget is not None:
            self.decode_schedule(layers, self.decode_budget)

    @property
    def amounts(self) -> dict[str, Any]:
        """How much is kept, as the arguments that `make_compression` takes."""
        return {
            "budget": self.budget,
            "compression_ratio": self.compression_ratio,
            "decode_budget": self.decode_budget,
            "decode_interval": None if self.decode_budget is None else self.decode_interval,
        }

    def parameters(self) -> dict[str, Any]:
        """Return everything that was chosen, as plain values for a record."""
        chosen: dict[str, Any] = {"method": self.method.name, **self.amounts}
        for name in sorted(self.method.settable):
            chosen[name] = getattr(self.method.options, name)
        return chosen


_PAPER = Options(window_size=8, sink_tokens=0, pooling="max", kernel_size=7, group_reduce="mean")
_PAPER_PYRAMID = dataclasses.replace(_PAPER, allocation="pyramid")

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "full",
            "keeps every token: the reference",
            "-",
            None,
            Options(window_size=0, sink_tokens=0),
            frozenset(),
            supports=frozenset({"prefill chunks"}),
        ),
        Method(
            "streamingllm",
            "keeps the first tokens and the most recent ones, at their original positions",
            "arXiv 2309.17453, section 3",
            _recency,
            Options(window_size=0, kernel_size=1),
            _SHARED_OPTIONS | _ALLOCATION_OPTIONS,
        ),
        Method(
            "streamingllm-renumbered",
            "as streamingllm, with the kept tokens numbered anew, as the paper does",
            "arXiv 2309.17453, section 3.2",
            _recency,
            Options(window_size=0, kernel_size=1),
            _SHARED_OPTIONS | _ALLOCATION_OPTIONS,
            renumber=True,
            supports=frozenset(),  # turning the same keys again and again would add up errors
        ),
        Method(
            "h2o",
            "keeps the tokens with most attention from all prompt tokens, sinks and window",
            "arXiv 2306.14048, section 4",
            _accumulated_attention,
            Options(kernel_size=1, group_reduce="mean"),
            _SHARED_OPTIONS | _ALLOCATION_OPTIONS | {"group_reduce", "pooling", "kernel_size"},
        ),
        Method(
            "snapkv",
            "keeps the tokens the window attends to, the same number in every layer",
            "arXiv 2404.14469, section 4",
            _window_attention,
        ),
        Method(
            "pyramidkv",
            "as snapkv, with more room in lower layers than in upper ones",
            "arXiv 2406.02069, section 4",
            _window_attention,
            Options(allocation="pyramid"),
        ),
        Method(
            "snapkv-paper",
            "snapkv with the published runs' settings (window 8, pool 7, no sinks)",
            "arXiv 2406.02069, section 5",
            _window_attention,
            _PAPER,
        ),
        Method(
            "pyramidkv-paper",
            "pyramidkv with the published runs' settings and exact budgets",
            "arXiv 2406.02069, section 5",
            _window_attention,
            _PAPER_PYRAMID,
        ),
        Method(
            "pyramidkv-official",
            "the authors' code with its rounding: keeps more than the budget says",
            "the authors' released code",
            _window_attention,
            dataclasses.replace(_PAPER_PYRAMID, allocation="official"),
            _WINDOW_OPTIONS - _ALLOCATION_OPTIONS | {"beta"},
            supports=frozenset({"prefill chunks"}),  # the authors' code never evicts later
        ),
    )
}


def get_method(name: str, **options: Any) -> Method:
    """Return a method by name, with some of its options changed.

    Raises:
        MethodError: no method has this name, or an option does not fit.
    """
    if name not in METHODS:
        raise MethodError(f"unknown method {name!r}; the methods are: {', '.join(METHODS)}")
    return METHODS[name].with_options(**options)


def make_compression(
    method: str | Method = "pyramidkv",
    budget: int | None = None,
    compression_ratio: float | None = None,
    *,
    decode_budget: int | None = None,
    decode_interval: int | None = None,
    **options: Any,
) -> Compression:
    """Return a validated `Compression` from what a user typed.

    With a decode budget and neither a budget nor a ratio, the prompt gets the same budget.

    Raises:
        MethodError: unknown method or option, both or neither of budget and ratio.
        BudgetError: the budget is below sinks + window.
    """
    if isinstance(method, str):
        method = get_method(method, **options)
    elif not isinstance(method, Method):
        raise MethodError(f"method is {method!r}; give a method's name or a Method")
    elif options:
        method = method.with_options(**options)
    if decode_budget is not None and budget is None and compression_ratio is None:
        budget = decode_budget
    if decode_interval is not None and decode_budget is None:
        raise MethodError("a decode interval means nothing without a decode budget; give both")
    interval = DECODE_INTERVAL if decode_interval is None else decode_interval
    return Compression(method, budget, compression_ratio, decode_budget, interval)


def describe_total(schedule: Sequence[int], budget: int, prompt_length: int) -> str:
    """Say in words how a schedule's sum compares with the budget it was made from."""
    total = sum(schedule)
    asked = len(schedule) * min(budget, prompt_length)
    if total == asked:
        return f"{total:,} tokens, exactly {len(schedule)} x {min(budget, prompt_length):,}"
    return (
        f"{total:,} tokens, {total / asked - 1:+.1%} against the {asked:,} that a budget of "
        f"{budget:,} allows"
    )
