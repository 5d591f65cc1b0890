"""Samples of an exact length: how a draft of any size is fitted to a number of tokens. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from math import floor
from typing import Any, Protocol

from ..errors import PyramidKVError
from .sample import Sample

Measure = Callable[[str, str, str], int]
"""The tokens of a prompt, from its context, question and answer prefix: of all that the model is
given, chat template included."""

PLAIN_FILLER = ("and", "so", "on")
DOT_FILLER = (".",)

_PROBE = 16  # units added to learn how long one is
_CUTS = 3  # units taken back in search of a size that filler makes exact
_TRIES = 5  # amounts of one filler tried

ENDLESS = 10**9
"""Units of a sketch that can be of any size."""


class TaskError(PyramidKVError, ValueError):
    """Samples cannot be made as asked; the message says what can."""


@dataclass(frozen=True)
class Draft:
    """What a sample asks, before it is known to fit; fields as in `Sample`."""

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def tokens(self, measure: Measure) -> int:
        """Return the tokens of its prompt."""
        return measure(self.context, self.question, self.answer_prefix)


class Sketch(Protocol):
    """One sample that can be drawn at any size. Its question does not depend on the size."""

    @property
    def least(self) -> int:
        """The smallest number of units."""

    @property
    def most(self) -> int:
        """The largest number of units."""

    @property
    def fillers(self) -> Sequence[Sequence[str]]:
        """Kinds of words that say nothing here, for tokens no whole unit fills; tried in turn."""

    def draft(self, units: int, filler: str) -> Draft:
        """Return the sample with this many units (words, lines, entries) and filler."""


@dataclass(frozen=True)
class Fitted:
    """A draft and the tokens of its prompt, as measured."""

    draft: Draft
    tokens: int


def generator(seed: int, *parts: object) -> random.Random:
    """Return the random numbers of one sample: the same for the same parts, in every process."""
    return random.Random(":".join(str(part) for part in (seed, *parts)))


def fit(sketch: Sketch, measure: Measure, room: int, exact: bool = True) -> Fitted | None:
    """Draw a sample as large as fits into `room` tokens.

    Whole units first, then, if `exact`, filler up to the very number. Tokenizers merge and split
    as they like: where a few tries do not hit it, the result is a few tokens shorter, never longer.
    None: even the smallest draft is too long.
    """
    units, tokens = _most_units(sketch, measure, room)
    if tokens > room:
        return None
    best = Fitted(sketch.draft(units, ""), tokens)
    if not exact:
        return best
    sizes = range(units, max(sketch.least, units - _CUTS) - 1, -1)
    for filler, size in product(sketch.fillers, sizes):
        if best.tokens == room:
            break
        best = _fuller(best, sketch, measure, room, size, filler)
    return best


def _most_units(sketch: Sketch, measure: Measure, room: int) -> tuple[int, int]:
    """Return the most units that fit, and their tokens; of a size too long, the least units.

    Sizes grow nearly evenly with the units, so straight lines between two measured sizes find the
    last one that fits in a few steps; halving is the way out where they do not.
    """

    def size(units: int) -> int:
        return sketch.draft(units, "").tokens(measure)

    low, low_size = sketch.least, size(sketch.least)
    if low_size > room:
        return low, low_size
    high = min(low + _PROBE, sketch.most)
    while (high_size := size(high)) <= room:
        if high == sketch.most:
            return high, high_size
        if high_size <= low_size:
            raise TaskError(
                f"the tokenizer counts {high_size:,} tokens however long the text is; "
                "give a measure of the whole prompt"
            )
        grown = int((room - high_size) * (high - low) / (high_size - low_size) * 1.02) + 2
        low, low_size, high = high, high_size, min(high + grown, sketch.most)
    straight = True
    while high - low > 1:
        share = (room + 0.5 - low_size) / (high_size - low_size) if straight else 0.5
        middle = min(max(low + round((high - low) * share), low + 1), high - 1)
        width, middle_size = high - low, size(middle)
        if middle_size <= room:
            low, low_size = middle, middle_size
        else:
            high, high_size = middle, middle_size
        straight = not straight or (high - low) * 4 < width
    return low, low_size


def _fuller(
    best: Fitted, sketch: Sketch, measure: Measure, room: int, units: int, filler: Sequence[str]
) -> Fitted:
    """Return the fullest of `best` and a few drafts with so many units and one kind of filler."""
    amount, bare, tried = 0, 0, set[int]()
    for _ in range(_TRIES):
        draft = sketch.draft(units, " ".join(islice(cycle(filler), amount)))
        tokens = draft.tokens(measure)
        if best.tokens < tokens <= room:
            best = Fitted(draft, tokens)
        if not amount:
            bare = tokens
        each = max((tokens - bare) / amount, 1) if amount else 1
        tried.add(amount)
        amount = max(0, amount + floor((room - tokens) / each))
        if amount in tried:
            break
    return best


@dataclass(frozen=True)
class Request:
    """A sample to be made.

    Attributes:
        task, index, max_new_tokens: as in `Sample`.
        length: the most tokens of prompt and answer together.
        sketch: from a length to the sample; most do not depend on it.
        facts: what is known before it is made.
        metric: as in `Sample`.
    """

    task: str
    index: int
    length: int
    max_new_tokens: int
    sketch: Callable[[int], Sketch]
    facts: dict[str, Any] = field(default_factory=dict)
    metric: str = "match_all"

    def needed(self, measure: Measure, length: int) -> int:
        """Return the tokens that its smallest draft takes, generated ones included."""
        sketch = self.sketch(length)
        return sketch.draft(sketch.least, "").tokens(measure) + self.max_new_tokens


def make(requests: Sequence[Request], measure: Measure, exact: bool) -> list[Sample]:
    """Make samples whose prompts leave room for the answer within their length.

    The facts of each say the `length` asked for and the `tokens` its prompt really has.

    Raises:
        TaskError: a length is too short.
    """
    return [_make(request, requests, measure, exact) for request in requests]


def _make(request: Request, others: Sequence[Request], measure: Measure, exact: bool) -> Sample:
    room = request.length - request.max_new_tokens
    fitted = fit(request.sketch(request.length), measure, room, exact)
    if fitted is None:
        least = _least_length(others, measure, request.length)
        raise TaskError(
            f"{request.length:,} tokens are too few for {request.task}: with this tokenizer and "
            f"seed it takes at least {least:,}, {request.max_new_tokens} of them for the answer"
        )
    draft = fitted.draft
    sizes = {"length": request.length, "tokens": fitted.tokens}
    return Sample(
        task=request.task,
        index=request.index,
        context=draft.context,
        question=draft.question,
        answers=draft.answers,
        metric=request.metric,
        max_new_tokens=request.max_new_tokens,
        answer_prefix=draft.answer_prefix,
        facts={**sizes, **request.facts, **draft.facts},
    )


def _least_length(requests: Sequence[Request], measure: Measure, length: int) -> int:
    """Return the least length above one too short that works for all of these samples."""
    for _ in range(8):  # what a task needs may itself grow at some length, as with `cwe`
        needed = max(request.needed(measure, length) for request in requests)
        if needed <= length:
            break
        length = needed
    return length


def check_count(value: object, what: str) -> None:
    """Raise `TaskError` unless this is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise TaskError(f"{what} is {value!r}; it must be a whole number of at least 1")


def check_seed(seed: object) -> None:
    """Raise `TaskError` unless this is a whole number."""
    if type(seed) is not int:
        raise TaskError(f"the seed is {seed!r}; it must be a whole number")
