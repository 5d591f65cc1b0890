"""Reading the files of SQuAD and HotpotQA, as their authors publish them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..records import parse_json
from .documents import Question, QuestionSet
from .jsonl import DataError

_KINDS = {str: "a text", list: "a list", bool: "true or false"}


class _Malformed(Exception):
    """A file is not what it should be; the message goes on from its place."""


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
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {shown}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{shown} {error}") from None
    places: dict[str, int] = {}
    try:
        found = tuple(questions_of(value, lambda text: places.setdefault(text, len(places))))
    except _Malformed as error:
        raise DataError(
            f"{shown} is no file of {name} as its authors publish it: {error}"
        ) from None
    if not found:
        raise DataError(f"{shown} has no question with an answer; give another file of {name}")
    return QuestionSet(task, path.name, tuple(places), found)


def _squad(value: Any, place: _Places) -> Iterator[Question]:
    for number, article in enumerate(_field(value, "data", list, "it"), start=1):
        where = f"article {number}"
        paragraphs = _field(article, "paragraphs", list, where)
        places = [place(_text(each, "context", where)) for each in paragraphs]
        for own, paragraph in zip(places, paragraphs, strict=True):
            near = tuple(sorted({*places} - {own}))
            for asked in _field(paragraph, "qas", list, where):
                question = _text(asked, "question", where)
                where_asked = f"{where}, question {question!r},"
                if "is_impossible" in asked and _field(asked, "is_impossible", bool, where_asked):
                    continue
                given = _field(asked, "answers", list, where_asked)
                answers = dict.fromkeys(_text(answer, "text", where_asked) for answer in given)
                if answers:
                    yield Question(question, tuple(answers), (own,), near)


def _hotpotqa(value: Any, place: _Places) -> Iterator[Question]:
    if not isinstance(value, list):
        raise _Malformed("it is no list of questions")
    for number, asked in enumerate(value, start=1):
        where = f"question {number}"
        documents = [_document(each, where) for each in _field(asked, "context", list, where)]
        if not documents:
            raise _Malformed(f"{where} has no documents")
        own = tuple(dict.fromkeys(place(document) for document in documents))
        answer = _text(asked, "answer", where)
        yield Question(_text(asked, "question", where), (answer,), own)


def _document(value: Any, where: str) -> str:
    match value:
        case [str(title), [*sentences]] if all(isinstance(each, str) for each in sentences):
            return _valid(f"{title}\n{''.join(sentences)}", where)
    raise _Malformed(f"{where} has a document that is no pair of a title and a list of sentences")


def _field(value: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(value, dict) or type(value.get(name)) is not kind:
        raise _Malformed(f"{where} has no {name!r} that is {_KINDS[kind]}")
    return value[name]


def _text(value: Any, name: str, where: str) -> str:
    return _valid(_field(value, name, str, where), where)


def _valid(text: str, where: str) -> str:
    if not text.strip():
        raise _Malformed(f"{where} has an empty text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Malformed(f"{where} has half a surrogate pair in a text") from None
    return text
