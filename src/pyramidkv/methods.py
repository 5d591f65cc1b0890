"""Compression methods by name: each is a score, an allocation and a selection.

To add a method, write its score (or take one of `scores.py`), and add one `Method` to `METHODS`;
from outside of this package, with `register_method`. Nothing here knows about a model or an engine.
This module does not import torch: listing methods and printing schedules stay fast.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

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
    from .scores import Score
    from .selection import Pooling

AllocationName = Literal["uniform", "pyramid", "power", "entropy", "list", "official"]
ALLOCATIONS: tuple[AllocationName, ...] = ("uniform", "pyramid", "power", "entropy", "list")

Capability = Literal["prefill chunks", "decode budget", "measured budgets"]
"""What not every method can do: take a prompt in pieces; evict while decoding; share the budget by
entropies that are measured on the prompt itself."""

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
        allocation: `uniform`, `pyramid`, `power`, `entropy` or `list`.
        beta: steepness of the pyramid, from 1 (uniform).
        gamma, c_max, c_min: the power law's exponent and ends, in tokens.
        profile: of the allocation `entropy`: what was measured of the model; without one, the
            entropies are those of the prompt itself.
        share_temperature, share_floor: of the allocation `entropy`, see `budgets.Entropy`.
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
    profile: ScheduleProfile | None = None
    share_temperature: float = 1.0
    share_floor: float = 0.1
    layer_budgets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("window_size", "sink_tokens", "kernel_size", "c_max", "c_min"):
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name.startswith("c_")):
                raise MethodError(f"{name} is {value!r}; it is a whole number")
        for name in ("beta", "gamma", "share_temperature", "share_floor"):
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise MethodError(f"{name} is {value!r}; it is a number")
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

    @property
    def measured(self) -> bool:
        """Whether the schedule follows from the prompt itself, so that nothing else gives it."""
        return self.allocation == "entropy" and self.profile is None

    def make_shares(self, effective_tokens: tuple[float, ...]) -> Entropy:
        """Return the allocation `entropy` for what was measured, lowest layer first."""
        return Entropy(effective_tokens, self.share_temperature, self.share_floor)

    def make_allocation(self) -> Allocation:
        """Return the allocation these options describe.

        Raises:
            MethodError: it is measured on the prompt.
        """
        match self.allocation:
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
_OPTIONS_OF_ALLOCATIONS: dict[str, tuple[str, ...]] = {
    "beta": ("pyramid", "official"),
    "gamma": ("power",),
    "c_max": ("power",),
    "c_min": ("power",),
    "profile": ("entropy",),
    "share_temperature": ("entropy",),
    "share_floor": ("entropy",),
}
_ALLOCATION_OPTIONS = frozenset({"allocation", "layer_budgets", *_OPTIONS_OF_ALLOCATIONS})
SELECTION_OPTIONS = _SHARED_OPTIONS | _ALLOCATION_OPTIONS | {"pooling", "kernel_size"}
"""Names of the options that mean something whatever the score is."""

_WINDOW_OPTIONS = SELECTION_OPTIONS | {"group_reduce", "window_reduce", "value_norm"}


_IN_WORDS: dict[Capability, str] = {
    "prefill chunks": "a prompt in several pieces",
    "decode budget": "a decode budget",
    "measured budgets": "budgets by the entropy of the prompt itself",
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
        settable: names of the options that mean something for this method; by default all, as for
            a score of the window's attention.
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
    supports: frozenset[Capability] = frozenset(get_args(Capability))

    @property
    def evicts(self) -> bool:
        """Whether the method removes tokens at all."""
        return self.make_score is not None

    def build_score(self) -> Score | None:
        """Return the score; None if every token is kept.

        What is not of this package is checked while it is used: see `checked_score`.

        Raises:
            ScoreError: it cannot be made.
        """
        if self.make_score is None:
            return None
        from .checked_score import build_score

        return build_score(self.name, self.make_score, self.options)

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
        if self.options.measured and capability != "measured budgets":
            raise MethodError(
                "budgets by the entropy of the prompt itself do not support "
                f"{_IN_WORDS[capability]}; give a schedule profile (--schedule FILE) instead"
            )

    def takes(self, option: str, allocation: str) -> bool:
        """Say whether an option means something to this method with that allocation."""
        allocations = _OPTIONS_OF_ALLOCATIONS.get(option, (allocation,))
        return option in self.settable and allocation in allocations

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
            budgets = changes["layer_budgets"]
            if not isinstance(budgets, Iterable):
                raise MethodError(f"layer_budgets is {budgets!r}; it is a list of whole numbers")
            budgets = tuple(budgets)
            if not all(isinstance(budget, int) for budget in budgets):
                raise MethodError(f"layer_budgets is {budgets}; it is a list of whole numbers")
            changes.setdefault("allocation", "list")
            changes["layer_budgets"] = budgets
        if changes.get("profile") is not None:
            changes.setdefault("allocation", "entropy")
        allocation = changes.get("allocation", self.options.allocation)
        for name, allocations in _OPTIONS_OF_ALLOCATIONS.items():
            if name in changes and allocation not in allocations:
                what = "a schedule profile" if name == "profile" else name
                raise MethodError(
                    f"{what} means nothing to {allocation!r} budgets; it is an option of "
                    f"{allocations[0]!r}"
                )
        options = dataclasses.replace(self.options, **changes)
        if self.needs_window and options.window_size < 1:
            raise MethodError(
                f"window_size is {options.window_size}; {self.name} takes its scores from the "
                "window's queries, so it needs at least 1"
            )
        try:
            if options.measured:
                options.make_shares((1.0,))
            else:
                options.make_allocation()
        except ValueError as error:
            raise MethodError(str(error)) from None
        result = dataclasses.replace(self, options=options)
        if options.measured:
            result._check_measurable()
        return result

    def _check_measurable(self) -> None:
        self.require("measured budgets")
        if self.options.window_size < 1:
            raise MethodError(
                "the entropy of the prompt itself is that of the window's queries, but the window "
                "size is 0; set a window size or give a schedule profile (--schedule FILE)"
            )

    def schedule(self, layers: int, budget: int, prompt_length: int) -> list[int]:
        """Return the tokens each layer keeps of a prompt, lowest layer first.

        Raises:
            BudgetError: the budget is below what sinks and window take.
            MethodError: the budgets are measured on the prompt.
        """
        if not self.evicts:
            return [prompt_length] * layers
        allocation = self.options.make_allocation()
        return allocation.schedule(layers, budget, prompt_length, self.options.protected)


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
            supports=frozenset({"prefill chunks", "decode budget"}),  # no query votes
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
            SELECTION_OPTIONS | {"group_reduce"},
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
        raise MethodError(
            f"unknown method {name!r}; the methods are: {', '.join(METHODS)}, and those of a file "
            "given with --plugin"
        )
    return METHODS[name].with_options(**options)


_NAME = re.compile(r"[a-z0-9]+([-_.][a-z0-9]+)*")


def register_method(method: Method) -> Method:
    """Add a method to the registry, so that it can be named as those of this package; return it.

    The same method may be registered again.

    Raises:
        MethodError: it is no `Method`, has a name that is taken or that the command line could not
            read, or names options or capabilities that do not exist.
    """
    if not isinstance(method, Method):
        raise MethodError(f"{method!r} is no method; give a pyramidkv.Method")
    name = method.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MethodError(
            f"a method cannot have the name {name!r}; take lower-case letters and digits, with "
            "single '-', '_' or '.' between them, such as my-method"
        )
    if METHODS.get(name, method) != method:
        raise MethodError(f"the name {name!r} is taken by another method; choose another name")
    if not (method.make_score is None or callable(method.make_score)):
        raise MethodError(
            f"make_score of {name} is {method.make_score!r}; give a function that takes the "
            "options and returns the score"
        )
    if not isinstance(method.options, Options):
        raise MethodError(f"options of {name} are {method.options!r}; give pyramidkv.Options")
    _check_names(name, "settable", method.settable, [f.name for f in dataclasses.fields(Options)])
    _check_names(name, "supports", method.supports, get_args(Capability))
    METHODS[name] = method
    return method


def _check_names(method: str, what: str, given: Any, allowed: Sequence[str]) -> None:
    if not isinstance(given, frozenset) or not given <= set(allowed):
        raise MethodError(
            f"{what} of {method} is {given!r}; give a frozenset of names among {', '.join(allowed)}"
        )
