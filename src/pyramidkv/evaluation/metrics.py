"""How answers are scored: the metrics of LongBench v1 and of RULER, between 0 and 1.

They give what the official code gives: `metrics.py` and `eval.py` of LongBench with the packages it
requires (rouge 1.0.1, jieba 0.42.1, fuzzywuzzy 0.18.0, which without python-Levenshtein compares
with difflib), and `scripts/eval` of RULER. One exception: where the official ROUGE-L exceeds
Python's recursion limit, which takes two sentences of 1,000 words or more together, LongBench
counts 0; here they get their score. RULER's postprocessing of predictions is part of its metrics.
"""

from __future__ import annotations

import difflib
import logging
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import PyramidKVError
from .sample import Sample

_PUNCTUATION = frozenset(string.punctuation)
_CHINESE_PUNCTUATION = _PUNCTUATION | frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBERS = re.compile(r"\d+")
_CONTROL = re.compile(r"[\x00-\x1f]")


class MetricError(PyramidKVError):
    """Something that cannot be scored; the message says what to do."""


@dataclass(frozen=True)
class Metric:
    """A score of a prediction.

    Attributes:
        compare: from the prediction, one answer and all classes to a score.
        combine: from the scores of all answers to one.
        answer_form: what each answer must contain; its group 1 is what is compared.
        chinese: whether texts are cut into Chinese words, which needs the extra `eval`.
        classes: whether it needs the classes.
    """

    compare: Callable[[str, str, Sequence[str]], float]
    combine: Callable[[Sequence[float]], float] = max
    answer_form: re.Pattern[str] | None = None
    chinese: bool = False
    classes: bool = False

    def __call__(
        self, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()
    ) -> float:
        """Return the score of a prediction, from 0 to 1.

        Raises:
            MetricError: it cannot be compared with these answers, or a package is missing.
        """
        self.check(answers, classes)
        return self.combine([self.compare(prediction, answer, classes) for answer in answers])

    def check_packages(self) -> None:
        """Raise `MetricError` if a package is missing that this metric needs."""
        if self.chinese:
            _segmenter()

    def check(self, answers: Sequence[str], classes: Sequence[str] = ()) -> None:
        """Refuse what could not be scored, before anything is generated.

        Raises:
            MetricError: there are no answers, one of them is not of the form that is compared,
                classes are needed and missing, or a package is.
        """
        self.check_packages()
        if not answers:
            raise MetricError("there is no answer to compare with; give at least one")
        if self.classes and not classes:
            raise MetricError("this metric needs the classes that answers are chosen from")
        for answer in answers:
            if self.answer_form is not None and not self.answer_form.search(answer):
                form = self.answer_form.pattern.replace(r"(\d+)", "7")
                raise MetricError(
                    f"the answer {answer[:60]!r} names no paragraph; answers are like {form!r}"
                )


def find_metric(name: str) -> Metric:
    """Return the metric of this name.

    Raises:
        MetricError: there is none.
    """
    if name not in METRICS:
        raise MetricError(f"unknown metric {name!r}; choose one of: {', '.join(METRICS)}")
    return METRICS[name]


def score_sample(sample: Sample, prediction: str) -> float:
    """Return the score of what a model generated for a sample, from 0 to 1.

    Args:
        sample: what was asked.
        prediction: what was generated; without the answer prefix, which was given.

    Raises:
        MetricError: the sample cannot be scored.
    """
    if sample.stop_at_newline:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return find_metric(sample.metric)(prediction, sample.answers, sample.classes)


def _f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    same = (Counter(prediction) & Counter(answer)).total()
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(answer)
    return 2 * precision * recall / (precision + recall)


def _without(text: str, characters: frozenset[str]) -> str:
    return "".join(character for character in text if character not in characters)


def _qa_f1(prediction: str, answer: str, _: Sequence[str]) -> float:
    """F1 of the words, without case, punctuation and articles."""
    return _f1(_english_words(prediction), _english_words(answer))


def _english_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", _without(text.lower(), _PUNCTUATION)).split()


def _qa_f1_zh(prediction: str, answer: str, _: Sequence[str]) -> float:
    """F1 of the Chinese words, without case, punctuation and white space."""
    return _f1(_chinese_words(prediction), _chinese_words(answer))


def _chinese_words(text: str) -> list[str]:
    words = (_without(word.lower(), _CHINESE_PUNCTUATION) for word in _segment(text))
    return [joined for word in words if (joined := "".join(word.split()))]


def _segment(text: str) -> Iterable[str]:
    words: Iterable[str] = _segmenter().cut(text)
    return words


@cache
def _segmenter() -> Any:
    """Return jieba's cutter with its own dictionary, whatever the surrounding program loads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is old code
            import jieba
    except ImportError:
        raise MetricError(
            "scoring Chinese answers needs jieba, which is not installed; "
            "run: pip install 'pyramidkv[eval]'"
        ) from None
    jieba.setLogLevel(logging.WARNING)
    return jieba.Tokenizer()


def _rouge_l(prediction: str, answer: str, _: Sequence[str]) -> float:
    """ROUGE-L of whole summaries, as the package `rouge` counts it.

    Sentences end at full stops. The distinct words of the longest common subsequences of every
    pair of sentences are united; recall and precision are their number over that of the distinct
    words of the answer and of the prediction.
    """
    said, wanted = _sentences(prediction), _sentences(answer)
    if not said or not wanted:
        return 0.0
    common = {word for one in wanted for other in said for word in _common(one, other)}
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in said for word in sentence})
    return 2 * (precision * recall / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; one of white space alone has the empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(first: Sequence[str], second: Sequence[str]) -> set[str]:
    """Return the words of the longest common subsequence that is found from the end.

    Of several, steps in `second` are preferred: the choice decides which words are united.
    """
    if set(first).isdisjoint(second):
        return set()
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for index, other in enumerate(second):
            row.append(above[index] + 1 if word == other else max(above[index + 1], row[index]))
        lengths.append(row)
    found: set[str] = set()
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.add(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _rouge_l_zh(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """ROUGE-L of Chinese words; only the Western full stop ends a sentence."""
    return _rouge_l(" ".join(_segment(prediction)), " ".join(_segment(answer)), classes)


def _classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of classes named, if the right one is among them.

    A class whose name is a part of the right one's does not count; as in the official code, one
    that follows such a class is not looked at.
    """
    named = [name for name in classes if name in prediction]
    index = 0
    while index < len(named):
        if named[index] != answer and named[index] in answer:
            named.remove(named[index])
        index += 1
    return 1 / len(named) if answer in named else 0.0


def _share(prediction: str, wanted: str) -> float:
    numbers = _NUMBERS.findall(prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _count(prediction: str, answer: str, _: Sequence[str]) -> float:
    """The share of the numbers given that are right."""
    return _share(prediction, answer)


def _retrieval(form: re.Pattern[str]) -> Metric:
    """The share of the numbers given that are the right paragraph's."""

    def compare(prediction: str, answer: str, _: Sequence[str]) -> float:
        return _share(prediction, form.findall(answer)[0])

    return Metric(compare, answer_form=form)


def _code_similarity(prediction: str, answer: str, _: Sequence[str]) -> float:
    """Similarity, in whole percent, of the first line that looks like no comment or fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def _contains(prediction: str, answer: str, _: Sequence[str]) -> float:
    """1 if the answer is in the prediction, whatever the case of letters."""
    cleaned = _CONTROL.sub("\n", prediction.strip()).strip()
    return float(answer.lower() in cleaned.lower())


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


METRICS: dict[str, Metric] = {
    "qa_f1": Metric(_qa_f1),
    "qa_f1_zh": Metric(_qa_f1_zh, chinese=True),
    "rouge_l": Metric(_rouge_l),
    "rouge_l_zh": Metric(_rouge_l_zh, chinese=True),
    "classification": Metric(_classification, classes=True),
    "retrieval": _retrieval(re.compile(r"Paragraph (\d+)")),
    "retrieval_zh": _retrieval(re.compile(r"段落(\d+)")),
    "count": Metric(_count),
    "code_similarity": Metric(_code_similarity),
    "match_all": Metric(_contains, combine=_mean),
    "match_part": Metric(_contains),
}
"""Metrics by name. With several answers, those of LongBench and `match_part` take the best score,
`match_all` the mean."""
