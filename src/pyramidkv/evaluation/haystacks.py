"""Haystacks: the text that needles are hidden in, as an endless sequence of sentences. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import accumulate, count, islice
from pathlib import Path

from ..errors import PyramidKVError

BUILT_IN = ("noise", "constitution")
"""Haystacks that need no files."""

NOISE = (
    "The lake is still.",
    "The road is long.",
    "The snow is white.",
    "Off they went.",
    "And so it goes on.",
)
"""Sentences that say nothing, as in RULER's noise; repeated, one line each time."""

_SENTENCE_END = re.compile(
    r"""(?<=[.!?;])(?<!\b[A-Z]\.)(?<!\b(?:Mr|Dr|Ms|St|No|vs)\.)  # no initial or title
    (["'\u201d\u2019)\]]*)\s+(?=["'\u201c\u2018(\[]?[A-Z0-9])""",
    re.VERBOSE,
)


class HaystackError(PyramidKVError, ValueError):
    """There is no such haystack, or nothing in it; the message says what to give."""


@dataclass(frozen=True)
class Haystack:
    """An endless text: its sentences, over and over.

    Attributes:
        name: for reports.
        pieces: sentences (of noise: lines of several), whitespace normalized; none is empty.
        separator: what stands between two pieces.

    Raises:
        HaystackError: there are no pieces, or one is empty.
    """

    name: str
    pieces: tuple[str, ...] = field(repr=False)
    separator: str = " "

    def __post_init__(self) -> None:
        if not self.pieces or not all(piece.strip() for piece in self.pieces):
            raise HaystackError(
                f"the haystack {self.name!r} has no pieces or empty ones; give pieces of text"
            )

    def __contains__(self, text: str) -> bool:
        """Whether a text occurs in it, whatever the case."""
        return text.lower() in self._lower

    def piece(self, index: int) -> str:
        """Return a piece of the endless sequence; those behind the last begin anew."""
        return self.pieces[index % len(self.pieces)]

    def beginning(self, words: int, start: int = 0) -> list[str]:
        """Return the pieces from `start` on that hold this many words, the last one cut to fit.

        A piece that is cut ends in an ellipsis, so that each ends as a sentence does.
        """
        every = ((self.piece(n), self._sizes[n % len(self.pieces)]) for n in count(start))
        return list(first_words(every, words))

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(len(piece.split()) for piece in self.pieces)

    @cached_property
    def _lower(self) -> str:
        return self.separator.join(self.pieces).lower()


def noise() -> Haystack:
    """Return a haystack that repeats the same few neutral sentences, as RULER's noise does."""
    return Haystack("noise", (" ".join(NOISE),), separator="\n")


def constitution() -> Haystack:
    """Return the Constitution of the United States, which is shipped (public domain)."""
    text = resources.files("pyramidkv").joinpath("data", "constitution.txt").read_text("utf-8")
    return Haystack("constitution", tuple(sentences(text)))


def folder(path: str | Path) -> Haystack:
    """Return the .txt files of a folder, in the order of their names.

    Raises:
        HaystackError: no such folder, no text in it, or a file that is not UTF-8.
    """
    place = Path(path)
    if not place.is_dir():
        raise HaystackError(
            f"there is no folder {str(path)!r}; a haystack is {', '.join(BUILT_IN)} or a folder "
            "of .txt files"
        )
    files = sorted(file for file in place.glob("*.txt") if file.is_file())
    pieces = [piece for file in files for piece in sentences(_read(file))]
    if not pieces:
        raise HaystackError(
            f"the folder {str(path)!r} holds no text; put .txt files into it, in UTF-8"
        )
    return Haystack(place.resolve().name, tuple(pieces))


def find_haystack(name: str | Path) -> Haystack:
    """Return a haystack: `noise`, `constitution`, or a folder of .txt files.

    Raises:
        HaystackError: there is no such haystack, or nothing in it.
    """
    if name == "noise":
        return noise()
    if name == "constitution":
        return constitution()
    return folder(name)


def chosen_haystack(haystack: Haystack | None) -> Haystack:
    """Return what was handed in; by default the Constitution.

    Raises:
        HaystackError: it is no haystack.
    """
    if haystack is None:
        return constitution()
    if not isinstance(haystack, Haystack):
        raise HaystackError(
            f"the haystack is a {type(haystack).__name__}; give one made by find_haystack"
        )
    return haystack


def sentences(text: str) -> Iterator[str]:
    """Split a text into sentences, line breaks and runs of spaces made single spaces."""
    text = " ".join(text.split())
    begin = 0
    for match in _SENTENCE_END.finditer(text):
        yield text[begin : match.end(1)]
        begin = match.end()
    if begin < len(text):
        yield text[begin:]


def first_words(pieces: Iterable[tuple[str, int]], words: int) -> Iterator[str]:
    """Yield the first of texts that hold so many words, the last one cut to fit.

    Args:
        pieces: texts and how many words each has.
        words: as many are taken, or all that there are.
    """
    for piece, size in pieces:
        if words <= 0:
            break
        yield piece if size <= words else _cut(piece, words)
        words -= size


def _cut(text: str, words: int) -> str:
    """Return the first words of a longer text, its line breaks kept, and an ellipsis."""
    last = next(islice(re.finditer(r"\S+", text), words - 1, None))
    return text[: last.end()].rstrip(".,;:") + "..."


def plant(
    pieces: list[str], separator: str, needles: list[tuple[float, str]]
) -> tuple[str, list[int]]:
    """Put needles between the pieces of a haystack.

    Each stands at the end of a sentence: the one nearest to its depth, in percent of the
    haystack's characters. Needles that fall on the same place follow one another as given.

    Returns:
        the text, and for each needle the character at which it begins.
    """
    ends = [0, *accumulate(len(piece) + len(separator) for piece in pieces)]
    slots = [_nearest(ends, ends[-1] * depth / 100) for depth, _ in needles]
    order = sorted(range(len(needles)), key=lambda index: slots[index])  # stable
    parts: list[str] = []
    begins = [0] * len(needles)
    length, done = 0, 0
    for index in order:
        for part in pieces[done : slots[index]]:
            parts.append(part)
            length += len(part) + len(separator)
        done = slots[index]
        begins[index] = length
        parts.append(needles[index][1])
        length += len(needles[index][1]) + len(separator)
    return separator.join(parts + pieces[done:]), begins


def _nearest(ends: list[int], wanted: float) -> int:
    return min(range(len(ends)), key=lambda index: abs(ends[index] - wanted))


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise HaystackError(
            f"the file {str(file)!r} is not UTF-8 (byte {error.start}); convert it or take it out"
        ) from None
    except OSError as error:
        raise HaystackError(
            f"the file {str(file)!r} cannot be read ({error.strerror}); allow it or take it out"
        ) from None
