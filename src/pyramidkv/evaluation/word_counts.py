"""RULER's counting tasks: common words of a list, frequent words of a coded text. No torch."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, pi

from .filling import DOT_FILLER, ENDLESS, PLAIN_FILLER, Draft
from .words import ADJECTIVES, NOUNS

COMMON = 10
"""Words asked for by `cwe`."""

SHORT = 4096
"""Below this length `cwe` is smaller, as in RULER."""

_ZETA_2 = pi**2 / 6
_STRICT_FROM = 32  # x // 16 > x // 25 from here on: the fourth rank is above the fifth


@dataclass(frozen=True)
class Repeats:
    """How often words occur in a list and in its example."""

    common: int
    uncommon: int
    example_words: int
    example_common: int
    example_uncommon: int


def repeats(length: int) -> Repeats:
    """Return RULER's figures for samples of a length."""
    if length < SHORT:
        return Repeats(6, 1, example_words=20, example_common=3, example_uncommon=1)
    return Repeats(30, 3, example_words=40, example_common=10, example_uncommon=3)


def single_words(rng: random.Random) -> list[str]:
    """Return all words of our lists, shuffled."""
    return rng.sample(NOUNS + ADJECTIVES, len(NOUNS) + len(ADJECTIVES))


def word_pairs(rng: random.Random, count: int) -> list[str]:
    """Return different adjective-noun pairs; at most half of those that there are."""
    most = len(ADJECTIVES) * len(NOUNS) // 2
    return _different(lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", min(count, most))


def coded_words(rng: random.Random, count: int) -> list[str]:
    """Return different words of six random letters."""
    return _different(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)), count)


@dataclass(frozen=True)
class CommonWords:
    """A numbered list in which some words occur more often, after a small solved example.

    Attributes:
        words: the example's, then the common ones, then the others; all different.
        repeats: how often each occurs.
        order: seed of the lists' order.
    """

    words: Sequence[str]
    repeats: Repeats
    order: str
    fillers: Sequence[Sequence[str]] = (DOT_FILLER, PLAIN_FILLER)

    @property
    def least(self) -> int:
        """As many uncommon words as common ones, once each at least."""
        return COMMON * self.repeats.uncommon

    @property
    def most(self) -> int:
        """Entries for which the words suffice."""
        others = len(self.words) - self.repeats.example_words - COMMON
        return others * self.repeats.uncommon

    def draft(self, units: int, filler: str) -> Draft:
        """Return the sample with so many entries of uncommon words."""
        head = (
            "Below is a numbered list of words. In these words, some appear more often than "
            "others. Memorize the ones that appear most often.\n"
        )
        question = "\nQuestion: What are the 10 most common words in the above list?"
        prefix = " Answer: The top 10 words that appear most often in the list are:"
        few = self.repeats
        shown, rest = self.words[: few.example_words], self.words[few.example_words :]
        example = [*shown[:COMMON]] * few.example_common
        example += [*shown[COMMON:]] * few.example_uncommon
        solved = _numbered(shown[:COMMON])
        common = tuple(rest[:COMMON])
        entries = [*common] * few.common
        entries += [rest[COMMON + entry // few.uncommon] for entry in range(units)]
        body = _numbered(self._shuffled(entries)) + (f" {filler}" if filler else "")
        return Draft(
            context=f"{head}{_numbered(self._shuffled(example))}{question}{prefix} {solved}\n"
            f"{head}{body}",
            question=question,
            answer_prefix=prefix,
            answers=common,
        )

    def _shuffled(self, entries: list[str]) -> list[str]:
        return random.Random(self.order).sample(entries, len(entries))


@dataclass(frozen=True)
class FrequentWords:
    """A text of coded words whose frequencies fall with the square of their rank (Zipf).

    The first rank is dots, to be ignored; the next three are asked for.

    Attributes:
        words: coded words in the order of their ranks, the dots not among them.
        order: seed of the text's order.
    """

    words: Sequence[str]
    order: str
    fillers: Sequence[Sequence[str]] = (("...",), DOT_FILLER, PLAIN_FILLER)
    least: int = ceil(_STRICT_FROM * _ZETA_2)
    most: int = ENDLESS

    def draft(self, units: int, filler: str) -> Draft:
        """Return the sample with about so many coded words in all."""
        ranks = enumerate(("...", *self.words), start=1)
        text = [word for rank, word in ranks for _ in range(int(units / _ZETA_2 / rank**2))]
        text = random.Random(self.order).sample(text, len(text))
        return Draft(
            context="Read the following coded text and track the frequency of each coded word. "
            "Find the three most frequently appeared coded words. "
            + " ".join([*text, *([filler] if filler else [])]),
            question="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            answer_prefix=" Answer: According to the coded text above, the three most frequently "
            "appeared words are:",
            answers=tuple(self.words[:3]),
        )


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _different(draw: Callable[[], str], count: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words[draw()] = None
    return list(words)
