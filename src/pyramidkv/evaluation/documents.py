"""RULER's question answering: what answers a question stands in documents among others. No torch.

Questions and documents are those of SQuAD 2.0 (arXiv 1806.03822) and HotpotQA (arXiv 1809.09600),
read from the files their authors publish. Wording and choice of documents are RULER's: all of a
question's own documents are there, then others of the same article, then any.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import first_line
from .filling import DOT_FILLER, PLAIN_FILLER, Draft, Measure, TaskError, generator
from .jsonl import DataError

MAX_NEW_TOKENS = 32
"""RULER's limit of an answer."""

_ASKED = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


@dataclass(frozen=True)
class Question:
    """A question that documents answer.

    Attributes:
        text: as it is asked.
        answers: each counts as right.
        own: the documents that belong to it, by their places in the set.
        near: others of the same article, which are the first to be put around them.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """The questions and documents of a file.

    Attributes:
        task: which of RULER's tasks is made of it, `qa_1` or `qa_2`.
        name: the file's, for messages.
        documents: all different.
    """

    task: str
    name: str
    documents: tuple[str, ...] = field(repr=False)
    questions: tuple[Question, ...] = field(repr=False)

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The words of each document."""
        return tuple(len(document.split()) for document in self.documents)


@dataclass(frozen=True)
class DocumentSketch:
    """A question and its documents, among as many words of others as wanted.

    Attributes:
        questions: the set.
        asked: the question.
        depths: where each of its own documents stands, in percent of those placed before it.
        others: the other documents, those used first in front.
        order: seed of the order in which they stand.
    """

    questions: QuestionSet
    asked: Question
    depths: tuple[float, ...]
    others: tuple[int, ...]
    order: str
    fillers: Sequence[Sequence[str]] = (PLAIN_FILLER, DOT_FILLER)
    least: int = 1

    @property
    def most(self) -> int:
        """Words of all other documents."""
        return sum(self.questions.words[index] for index in self.others)

    def draft(self, units: int, filler: str) -> Draft:
        """Return the sample with so many words of other documents, the last one cut to fit."""
        texts = list(self._beginning(units))
        if filler:
            texts[-1] += f" {filler}"
        random.Random(self.order).shuffle(texts)
        own = [self.questions.documents[index] for index in self.asked.own]
        for text, depth in zip(own, self.depths, strict=True):
            texts.insert(round(depth / 100 * len(texts)), text)
        head = f"{_ASKED}\n\nThe following are given documents."
        begins, context = {}, head
        for number, text in enumerate(texts, start=1):
            context += f"\n\nDocument {number}:\n"
            begins[text] = len(context)
            context += text
        return Draft(
            context=context,
            question=f"\n\n{_ASKED}\n\nQuestion: {self.asked.text}",
            answer_prefix=" Answer:",
            answers=self.asked.answers,
            facts={"documents": len(texts), "positions": [begins[text] for text in own]},
        )

    def _beginning(self, words: int) -> Iterator[str]:
        for index in self.others:
            if words <= 0:
                break
            text, size = self.questions.documents[index], self.questions.words[index]
            yield text if size <= words else _cut(text, words)
            words -= size


def document_sketches(
    questions: QuestionSet, measure: Measure, count: int, seed: int
) -> Callable[[int, int], DocumentSketch]:
    """Return how the first samples of a set are drawn, by index and length.

    Which question a sample asks depends on the seed and its index alone.

    Raises:
        TaskError: the set has fewer questions; when a sample is drawn, also that its documents do
            not fill the length.
    """
    every = len(questions.questions)
    if every < count:
        raise TaskError(
            f"{questions.name!r} has {every:,} questions with an answer, and {count:,} samples are "
            "asked for; give fewer samples or a larger file"
        )
    order = generator(seed, questions.task).sample(range(every), every)

    def draw(index: int, length: int) -> DocumentSketch:
        asked = questions.questions[order[index]]
        rng = generator(seed, questions.task, index)
        depths = tuple(rng.uniform(0, 100) for _ in asked.own)
        near = rng.sample(asked.near, len(asked.near))
        taken = {*asked.own, *near}
        rest = [place for place in range(len(questions.documents)) if place not in taken]
        rng.shuffle(rest)
        own_order = f"{seed}:{questions.task}:{index}:order"
        sketch = DocumentSketch(questions, asked, depths, (*near, *rest), own_order)
        _check_fills(sketch, measure, length)
        return sketch

    return draw


def _check_fills(sketch: DocumentSketch, measure: Measure, length: int) -> None:
    room, most = length - MAX_NEW_TOKENS, sketch.most
    if most >= room:  # a word has a token at least, and measuring a whole file takes long
        return
    tokens = sketch.draft(most, "").tokens(measure) if most else 0
    if tokens < room:
        raise TaskError(
            f"the documents of {sketch.questions.name!r} fill {tokens:,} tokens, and {room:,} are "
            "asked for; give a smaller length or a larger file"
        )


def _cut(text: str, words: int) -> str:
    """Return the first words of a text, its line breaks kept, and an ellipsis."""
    ends = (word.end() for word in re.finditer(r"\S+", text))
    end = next(end for number, end in enumerate(ends, start=1) if number == words)
    return text[:end].rstrip(".,;:") + "..."


def read_squad(path: Path) -> QuestionSet:
    """Return the questions of a SQuAD file, version 2.0 or 1.1, that have an answer, for `qa_1`.

    Raises:
        DataError: it cannot be read, is another kind of file, or has no such question.
    """
    return _read(path, "qa_1", "SQuAD", _squad)


def read_hotpotqa(path: Path) -> QuestionSet:
    """Return the questions of a HotpotQA file for `qa_2`.

    Raises:
        DataError: it cannot be read, is another kind of file, or has no question.
    """
    return _read(path, "qa_2", "HotpotQA", _hotpotqa)


_Places = Callable[[str], int]
"""The place of a document in the set, which has it from then on."""


def _read(
    path: Path, task: str, name: str, questions_of: Callable[[Any, _Places], Iterator[Question]]
) -> QuestionSet:
    shown = repr(str(path))
    places: dict[str, int] = {}
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
        found = tuple(questions_of(value, lambda text: places.setdefault(text, len(places))))
    except OSError as error:
        raise DataError(f"cannot read {shown}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown} is not JSON in UTF-8 ({first_line(error)})") from None
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{shown} is no file of {name} as its authors publish it") from None
    if not found:
        raise DataError(f"{shown} has no question with an answer; give another file of {name}")
    return QuestionSet(task, path.name, tuple(places), found)


def _squad(value: Any, place: _Places) -> Iterator[Question]:
    for article in value["data"]:
        paragraphs = article["paragraphs"]
        places = [place(_text(paragraph["context"])) for paragraph in paragraphs]
        for own, paragraph in zip(places, paragraphs, strict=True):
            near = tuple(sorted({*places} - {own}))
            for asked in paragraph["qas"]:
                answers = dict.fromkeys(_text(answer["text"]) for answer in asked["answers"])
                if answers and not asked.get("is_impossible", False):
                    yield Question(_text(asked["question"]), tuple(answers), (own,), near)


def _hotpotqa(value: Any, place: _Places) -> Iterator[Question]:
    for asked in value:
        documents = [f"{_text(title)}\n{''.join(parts)}" for title, parts in asked["context"]]
        own = tuple(dict.fromkeys(place(document) for document in documents))
        yield Question(_text(asked["question"]), (_text(asked["answer"]),), own)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError("a text is needed")
    return value
