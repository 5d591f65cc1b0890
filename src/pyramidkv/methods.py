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

from .method_options import (
    ALLOCATION_OPTIONS,
    OPTIONS_OF_ALLOCATIONS,
    SELECTION_OPTIONS,
    SHARED_OPTIONS,
    MethodError,
    Options,
)

if TYPE_CHECKING:
    from .scores import Score

Capability = Literal["prefill chunks", "decode budget", "measured budgets", "serving"]
"""What not every method can do: take a prompt in pieces; evict while decoding; share the budget by
entropies that are measured on the prompt itself; be served with vLLM, where the number kept must
follow from the prompt's length and the scores from its last queries."""

DECODE_INTERVAL = 32
"""Tokens between two evictions while decoding, if nothing else is asked for."""


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


_WINDOW_OPTIONS = SELECTION_OPTIONS | {"group_reduce", "window_reduce", "value_norm"}


_HEAD_OPTIONS = _WINDOW_OPTIONS | {"head_floor", "head_budgets"}

_IN_WORDS: dict[Capability, str] = {
    "prefill chunks": "a prompt in several pieces",
    "decode budget": "a decode budget",
    "measured budgets": "budgets by the entropy of the prompt itself",
    "serving": "serving with vLLM",
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

    def can(self, capability: Capability) -> bool:
        """Say whether it supports something.

        What evicts nothing can take a prompt in pieces. What renumbers can do nothing of all this:
        turning the same keys again and again would add up errors.
        """
        if self.renumber or capability not in self.supports:
            return False
        return self.evicts or capability == "prefill chunks"

    def require(self, capability: Capability) -> None:
        """Refuse what this method cannot do.

        Raises:
            MethodError: it names the methods that can.
        """
        if not self.can(capability):
            able = ", ".join(m.name for m in METHODS.values() if m.can(capability))
            raise MethodError(f"{self.name} does not support {_IN_WORDS[capability]}; {able} do")
        if self.options.measured and capability != "measured budgets":
            raise MethodError(
                "budgets by the entropy of the prompt itself do not support "
                f"{_IN_WORDS[capability]}; give a schedule profile (--schedule FILE) instead"
            )

    def takes(self, option: str, allocation: str) -> bool:
        """Say whether an option means something to this method with that allocation."""
        allocations = OPTIONS_OF_ALLOCATIONS.get(option, (allocation,))
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
        if changes.get("head_budgets") is not None:
            changes["head_budgets"] = _table_of(changes["head_budgets"])
            changes.setdefault("allocation", "heads")
            if "head_floor" in changes:
                raise MethodError(
                    "head_floor means nothing where every head has a budget of its own; give "
                    "either head_floor or head_budgets"
                )
        if changes.get("profile") is not None:
            changes.setdefault("allocation", "entropy")
        allocation = changes.get("allocation", self.options.allocation)
        for name, allocations in OPTIONS_OF_ALLOCATIONS.items():
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
            elif not options.follows_prompt:
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
            MethodError: the budgets follow from the prompt itself.
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
            SHARED_OPTIONS | ALLOCATION_OPTIONS,
            supports=frozenset({"prefill chunks", "decode budget", "serving"}),  # no query votes
        ),
        Method(
            "streamingllm-renumbered",
            "as streamingllm, with the kept tokens numbered anew, as the paper does",
            "arXiv 2309.17453, section 3.2",
            _recency,
            Options(window_size=0, kernel_size=1),
            SHARED_OPTIONS | ALLOCATION_OPTIONS,
            renumber=True,
        ),
        Method(
            "h2o",
            "keeps the tokens with most attention from all prompt tokens, sinks and window",
            "arXiv 2306.14048, section 4",
            _accumulated_attention,
            Options(kernel_size=1, group_reduce="mean"),
            SELECTION_OPTIONS | {"group_reduce"},
            supports=frozenset(get_args(Capability)) - {"serving"},  # all prompt tokens vote
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
            "adakv",
            "as snapkv, with the heads of a layer competing for its tokens",
            "arXiv 2407.11550, section 3",
            _window_attention,
            Options(head_floor=0.2),
            _HEAD_OPTIONS,
            supports=frozenset(),
        ),
        Method(
            "pyramidkv-ada",
            "as pyramidkv, with the heads of a layer competing for its tokens",
            "arXiv 2407.11550, section 3",
            _window_attention,
            Options(allocation="pyramid", head_floor=0.2),
            _HEAD_OPTIONS,
            supports=frozenset(),
        ),
        Method(
            "global",
            "as snapkv, with all heads of all layers competing for one total",
            "arXiv 2407.11550, section 3, over all layers",
            _window_attention,
            Options(allocation="global", head_floor=0.2),
            _HEAD_OPTIONS - ALLOCATION_OPTIONS - {"head_budgets"},
            supports=frozenset(),
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
            _WINDOW_OPTIONS - ALLOCATION_OPTIONS | {"beta"},
            supports=frozenset({"prefill chunks"}),  # the authors' code never evicts later
        ),
    )
}


def _table_of(given: Any) -> tuple[tuple[int, ...], ...]:
    try:
        table = tuple(tuple(layer) for layer in given)
    except TypeError:
        table = ()
    if not table or not all(type(count) is int for layer in table for count in layer):
        raise MethodError(
            f"head_budgets is {given!r}; it is a list of whole numbers for each layer, one for "
            "each KV head"
        )
    return table


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
