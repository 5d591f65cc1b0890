"""Needles in a haystack: facts hidden in a long text, asked for at its end. No torch.

The sentences that hide and ask are those of RULER (arXiv 2404.06654, github.com/NVIDIA/RULER,
Apache-2.0): they define the task, so that results can be compared. Everything else is our own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .filling import (
    DOT_FILLER,
    ENDLESS,
    PLAIN_FILLER,
    Draft,
    Measure,
    Request,
    TaskError,
    check_count,
    check_seed,
    generator,
    make,
)
from .haystacks import NOISE, Haystack, chosen_haystack, plant
from .sample import Sample
from .words import ADJECTIVES, NOUNS

MAX_NEW_TOKENS = 128
"""RULER's limit of an answer to needle tasks."""

FORMS = ("single", "multi-key", "multi-value", "multi-query")
"""One needle; others with other keys as distractors; a key with several values; several keys."""


@dataclass(frozen=True)
class Kind:
    """What keys or values look like.

    Attributes:
        plural: what the sentences call them.
        draw: returns one at random.
    """

    plural: str
    draw: Callable[[random.Random], str]


def _digits(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _pair(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _code(rng: random.Random, length: int) -> str:
    return f"{rng.getrandbits(4 * length):0{length}x}"


def _uuid(rng: random.Random) -> str:
    code = _code(rng, 30)  # version 4, variant 1: two of the 32 characters are not free
    third, fourth = f"4{code[12:15]}", f"{rng.choice('89ab')}{code[15:18]}"
    return f"{code[:8]}-{code[8:12]}-{third}-{fourth}-{code[18:]}"


KINDS = {
    "digits": Kind("numbers", _digits),
    "words": Kind("words", _pair),
    "code16": Kind("codes", lambda rng: _code(rng, 16)),
    "code32": Kind("codes", lambda rng: _code(rng, 32)),
    "uuids": Kind("uuids", _uuid),
}
"""Seven digits; an adjective and a noun; codes of 16 and 32 hexadecimal characters; uuids."""


@dataclass(frozen=True)
class Needle:
    """A hidden fact: `depth` is in percent of the haystack."""

    key: str
    value: str
    depth: float

    def sentence(self, kind: str) -> str:
        """Return the sentence that states it; `kind` is its value's."""
        return f"One of the special magic {KINDS[kind].plural} for {self.key} is: {self.value}."


class Pieces(Protocol):
    """What needles are hidden between."""

    @property
    def separator(self) -> str:
        """What stands between two pieces."""

    def beginning(self, words: int, start: int = 0) -> list[str]:
        """Return the first pieces from `start` on, as large as asked for."""


@dataclass(frozen=True)
class NeedleSketch:
    """A text with needles, of any length.

    Attributes:
        haystack: what they are hidden in.
        start: the haystack's piece to begin with.
        needles: all of them, distractors included.
        asked: the indices of the needles whose values are asked for, in the order of the answers.
        kind: that of the values.
    """

    haystack: Pieces
    start: int
    needles: tuple[Needle, ...]
    asked: tuple[int, ...]
    kind: str
    fillers: Sequence[Sequence[str]] = (DOT_FILLER, PLAIN_FILLER)
    least: int = 1
    most: int = ENDLESS

    def draft(self, units: int, filler: str) -> Draft:
        """Return the sample with so many words (or lines) of haystack."""
        several = len(self.asked) > 1
        plural = KINDS[self.kind].plural
        noun = plural if several else plural.removesuffix("s")
        begin = f"Some special magic {noun} are" if several else f"A special magic {noun} is"
        keys = list(dict.fromkeys(self.needles[index].key for index in self.asked))
        query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
        head = (
            f"{begin} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {noun} afterwards.\n"
        )
        pieces = self.haystack.beginning(units, self.start) + ([filler] if filler else [])
        planted = [(needle.depth, needle.sentence(self.kind)) for needle in self.needles]
        text, begins = plant(pieces, self.haystack.separator, planted)
        asked = [self.needles[index] for index in self.asked]
        ending = f"special magic {noun} for {query} mentioned in the provided text"
        return Draft(
            context=head + text,
            question=f"\nWhat {'are all' if several else 'is'} the {ending}?",
            answer_prefix=f" The {ending} {'are' if several else 'is'}",
            answers=tuple(needle.value for needle in asked),
            facts={
                "depths": [round(needle.depth, 1) for needle in asked],
                "positions": [len(head) + begins[index] for index in self.asked],
            },
        )


@dataclass
class Distractors:
    """A haystack that consists of needles with other keys, one a line; drawn when needed.

    Attributes:
        rng: used for nothing else, so that what was drawn first stays as it is.
        taken: keys and values that may not occur again.
    """

    rng: random.Random
    key_kind: str
    kind: str
    taken: set[str]
    separator: str = "\n"
    _lines: list[str] = field(default_factory=list)

    def beginning(self, words: int, start: int = 0) -> list[str]:
        """Return this many lines; here `words` counts lines."""
        while len(self._lines) < start + words:
            key = draw_new(self.rng, self.key_kind, self.taken)
            value = draw_new(self.rng, self.kind, self.taken)
            self._lines.append(Needle(key, value, 0).sentence(self.kind))
        return self._lines[start : start + words]


LINE_FILLERS = (tuple(" ".join(NOISE).split()), PLAIN_FILLER, DOT_FILLER)
"""For what a whole line of distractors would exceed."""


def draw_new(
    rng: random.Random, kind: str, taken: set[str], haystack: Haystack | None = None
) -> str:
    """Draw a key or value that is neither taken nor part of the haystack, and take it."""
    while True:
        drawn = KINDS[kind].draw(rng)
        if drawn not in taken and (haystack is None or drawn not in haystack):
            taken.add(drawn)
            return drawn


def needle_samples(
    measure: Measure,
    lengths: Sequence[int],
    depths: Sequence[float],
    kinds: Sequence[str] = ("digits",),
    form: str = "single",
    *,
    needles: int = 4,
    samples: int = 1,
    seed: int = 0,
    haystack: Haystack | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    exact: bool = True,
) -> list[Sample]:
    """Make a grid of needle samples: kinds x lengths x depths x repetitions, in this order.

    A sample's keys, values and text depend on the seed, form, kind, depth and repetition alone:
    not on the other samples, and not on the length, so that lengths compare like with like.

    Args:
        measure: the tokens of a prompt.
        lengths: tokens of prompt and answer together.
        depths: where the needle stands, in percent of the haystack's characters, at the end of
            the sentence nearest to it. With several needles: the one asked for (`multi-key`) or
            the first one asked for; the others stand at random.
        kinds: see `KINDS`; keys are always words.
        form: see `FORMS`.
        needles: how many there are in the forms with several.
        samples: repetitions of each cell.
        haystack: by default the Constitution.
        max_new_tokens: kept free for the answer.
        exact: fill with a few neutral words up to the very token.

    Returns:
        samples whose facts are `length`, `tokens` (of the prompt, measured), `depth`, `kind`,
        `form`, `repetition`, `haystack`, and of each answer's needle the depth asked for
        (`depths`) and the character of the context where it begins (`positions`).

    Raises:
        TaskError: something is out of range, or a length too short.
    """
    _check_grid(lengths, depths, kinds, form)
    check_seed(seed)
    for value, what in (
        (needles, "the number of needles"),
        (samples, "the number of samples"),
        (max_new_tokens, "max_new_tokens"),
    ):
        check_count(value, what)
    if form != "single" and needles < 2:
        raise TaskError(f"{form} with one needle is single; give at least 2 needles")
    text = chosen_haystack(haystack)
    cells = [
        (kind, length, depth, repetition)
        for kind in kinds
        for length in lengths
        for depth in depths
        for repetition in range(samples)
    ]
    requests = []
    for index, (kind, length, depth, repetition) in enumerate(cells):
        rng = generator(seed, "needles", form, kind, needles, float(depth), repetition)
        sketch = _sketch(rng, form, kind, depth, needles, text)
        facts = {
            "depth": depth,
            "kind": kind,
            "form": form,
            "repetition": repetition,
            "haystack": text.name,
        }
        requests.append(
            Request(f"needle_{form}", index, length, max_new_tokens, _always(sketch), facts)
        )
    return make(requests, measure, exact)


def _sketch(
    rng: random.Random, form: str, kind: str, depth: float, count: int, haystack: Haystack
) -> NeedleSketch:
    count = 1 if form == "single" else count
    depths = [depth, *(rng.uniform(0, 100) for _ in range(count - 1))]
    taken: set[str] = set()
    keys = [draw_new(rng, "words", taken, haystack) for _ in range(count)]
    if form == "multi-value":
        keys = keys[:1] * count
    values = [draw_new(rng, kind, taken, haystack) for _ in range(count)]
    asked = tuple(range(1 if form in ("single", "multi-key") else count))
    hidden = tuple(map(Needle, keys, values, depths))
    return NeedleSketch(haystack, rng.randrange(len(haystack.pieces)), hidden, asked, kind)


def _always(sketch: NeedleSketch) -> Callable[[int], NeedleSketch]:
    return lambda length: sketch


def _check_grid(
    lengths: Sequence[int], depths: Sequence[float], kinds: Sequence[str], form: str
) -> None:
    for values, what in ((lengths, "lengths"), (depths, "depths"), (kinds, "kinds")):
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise TaskError(f"{what} is {values!r}; give a list of at least one")
    for length in lengths:
        check_count(length, "a length")
    for depth in depths:
        if type(depth) not in (int, float) or not 0 <= depth <= 100:
            raise TaskError(f"a depth is {depth!r}; it must be a percentage between 0 and 100")
    for kind in kinds:
        if kind not in KINDS:
            raise TaskError(f"there is no kind of needle {kind!r}; kinds are: {', '.join(KINDS)}")
    if form not in FORMS:
        raise TaskError(f"there is no form {form!r}; forms are: {', '.join(FORMS)}")
