"""RULER's question answering: what answers a question stands in documents among others. No torch.

Questions and documents are those of SQuAD 2.0 (arXiv 1806.03822) and HotpotQA (arXiv 1809.09600),
read from the files their authors publish. Wording and choice of documents are RULER's: all of a
question's own documents are there, then others of the same article, then any.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .filling import DOT_FILLER, PLAIN_FILLER, Draft, Measure, TaskError, generator
from .haystacks import first_words

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
        depths: where each of its own documents is put among those there already, from 0 to 1.
        others: the other documents, those used first in front.
        order: seed of the order in which they stand.
    """

    questions: QuestionSet
    asked: Question
    depths: tuple[float, ...]
    others: tuple[int, ...]
    order: str
    fillers: Sequence[Sequence[str]] = (PLAIN_FILLER, DOT_FILLER)
    least: int = 0

    @cached_property
    def most(self) -> int:
        """Words of all other documents."""
        return sum(self.questions.words[index] for index in self.others)

    def draft(self, units: int, filler: str) -> Draft:
        """Return the sample with so many words of other documents, the last one cut to fit."""
        others = ((self.questions.documents[n], self.questions.words[n]) for n in self.others)
        texts = list(first_words(others, units))
        filler = f" {filler}" if filler else ""
        if texts:
            texts[-1] += filler
        random.Random(self.order).shuffle(texts)
        placed: list[tuple[int | None, str]] = [(None, text) for text in texts]
        for own, depth in zip(self.asked.own, self.depths, strict=True):
            place = min(int(depth * (len(placed) + 1)), len(placed))
            placed.insert(place, (own, self.questions.documents[own]))
        context = f"{_ASKED}\n\nThe following are given documents."
        begins = {}
        for number, (document, text) in enumerate(placed, start=1):
            context += f"\n\nDocument {number}:\n"
            begins[document] = len(context)
            context += text
        return Draft(
            context=context if texts else context + filler,
            question=f"\n\n{_ASKED}\n\nQuestion: {self.asked.text}",
            answer_prefix=" Answer:",
            answers=self.asked.answers,
            facts={"documents": len(placed), "positions": [begins[own] for own in self.asked.own]},
        )


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
        depths = tuple(rng.random() for _ in asked.own)
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
    room = length - MAX_NEW_TOKENS
    if sketch.most >= room:  # a word has a token at least, and measuring a whole file takes long
        return
    tokens = sketch.draft(sketch.most, "").tokens(measure)
    if tokens < room:
        raise TaskError(
            f"with all documents of {sketch.questions.name!r} a prompt and its answer have "
            f"{tokens + MAX_NEW_TOKENS:,} tokens, and {length:,} are asked for; give a smaller "
            "length or a larger file"
        )
