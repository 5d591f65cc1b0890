"""Samples from files: what RULER's generator writes, and a user's own questions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jsonl import Line, read_lines
from .metrics import MetricError, find_metric
from .sample import Sample

DEFAULT_METRIC = "qa_f1"
DEFAULT_MAX_NEW_TOKENS = 128

_OWN_FIELDS = ("question", "context", "answers", "metric", "max_new_tokens", "classes")
_RULER_TASK = re.compile(
    r"(niah_single_[123]|niah_multikey_[123]|niah_multivalue|niah_multiquery|vt|cwe|fwe|qa_[12])"
    r"(?![a-z0-9])"
)


@dataclass(frozen=True)
class _Kind:
    """A kind of RULER's tasks: what its generator and its `scripts/eval` fix.

    Attributes:
        name: the generator's.
        form: of a whole input, in three groups: up to the context's end; the question; the answer
            prefix, if it is there.
        max_new_tokens: where an answer ends at the latest.
        metric: a name in `metrics.METRICS`.
    """

    name: str
    form: re.Pattern[str]
    max_new_tokens: int
    metric: str = "match_all"


def _form(question: str, prefix: str) -> re.Pattern[str]:
    """The last such question counts: examples before it have some, too.

    Line breaks may have become spaces, as with the generator's `--remove_newline_tab`.
    """
    return re.compile(rf"(.*\S)(\s+{question})(\s*{prefix}\s*|\s*)", re.DOTALL)


_KINDS = (
    _Kind(
        "niah",
        _form(
            r"What (?:is|are all) the special magic \w+ for [^\n]+? "
            r"mentioned in the provided text\?",
            r"The special magic \w+ for [^\n]+ mentioned in the provided text (?:is|are)",
        ),
        max_new_tokens=128,
    ),
    _Kind(
        "variable_tracking",
        _form(
            r"Question: Find all variables that are assigned the value \S+ in the text above\.",
            r"Answer: According to the chain\(s\) of variable assignment in the text above, "
            r"\d+ variables are assigned the value \S+, they are:",
        ),
        max_new_tokens=30,
    ),
    _Kind(
        "common_words_extraction",
        _form(
            r"Question: What are the 10 most common words in the above list\?",
            r"Answer: The top 10 words that appear most often in the list are:",
        ),
        max_new_tokens=120,
    ),
    _Kind(
        "freq_words_extraction",
        _form(
            r"Question: Do not provide any explanation\. Please ignore the dots '\.{4}'\. "
            r"What are the three most frequently appeared words in the above coded text\?",
            r"Answer: According to the coded text above, "
            r"the three most frequently appeared words are:",
        ),
        max_new_tokens=50,
    ),
    _Kind(
        "qa",
        _form(
            r"Answer the question based on the given documents\. Only give me the answer and do "
            r"not output any other words\.\s+Question: [^\n]+?",
            r"Answer:",
        ),
        max_new_tokens=32,
        metric="match_part",
    ),
)


def load_ruler(path: Path, limit: int | None = None) -> list[Sample]:
    """Return the samples of a file that RULER's generator wrote, all or the first ones.

    The last question tells the kind of task, and with it metric and length. `context`, `question`
    and `answer_prefix` joined are exactly the generator's prompt. Older generators leave the answer
    prefix at the end of `input`, newer ones have a field for it; both give the same sample.

    The task's name is that of the file or its folder if one begins with an official name, else the
    file's. Facts: `official_length`, its count of tokens, the answer's included; for a single
    needle `depth`, the percentage of the context's characters that stand before it. The file's own
    `index` is not used: newer generators put something else there.

    Args:
        path: the file, written with the model template `base`: chat templates are put in later.
        limit: how many samples at most.

    Raises:
        DataError: the file or a line cannot be used.
    """
    task = _ruler_task(path)
    return [_ruler_sample(task, line) for line in read_lines(path, limit)]


def load_own(path: Path, limit: int | None = None) -> list[Sample]:
    """Return the samples of a user's file, all or the first ones; the task is the file's name.

    Fields of a line: `question`, `context`, `answers` (a text or a list of them), and if wanted
    `metric` (`qa_f1`), `max_new_tokens` (128), `classes` (for the metric `classification`). A blank
    line stands between context and question.

    Raises:
        DataError: the file or a line cannot be used, or a metric needs a package that is missing.
    """
    return [_own_sample(path.stem, line) for line in read_lines(path, limit)]


def _ruler_task(path: Path) -> str:
    for name in (path.stem, path.resolve().parent.name):
        if found := _RULER_TASK.match(name):
            return found.group()
    return path.stem


def _ruler_sample(task: str, line: Line) -> Sample:
    text, answers = line.text("input"), line.texts("outputs")
    kind, (context, question, prefix) = _recognise(line, text)
    given = line.text("answer_prefix", "")
    if not prefix.strip():
        question, prefix = question + prefix, given
    elif given:
        raise line.error("has its answer prefix twice, in 'input' and in 'answer_prefix'")
    facts: dict[str, Any] = {"official_length": line.count("length")}
    if kind.name == "niah" and len(answers) == 1 and answers[0] in context:
        facts["depth"] = round(100 * context.index(answers[0]) / len(context))
    return Sample(
        task=task,
        index=line.number - 1,
        context=context,
        question=question,
        answers=answers,
        metric=kind.metric,
        max_new_tokens=kind.max_new_tokens,
        answer_prefix=prefix,
        facts=facts,
    )


def _recognise(line: Line, text: str) -> tuple[_Kind, tuple[str, ...]]:
    for kind in _KINDS:
        if found := kind.form.fullmatch(text):
            return kind, found.groups()
    raise line.error(
        "has an 'input' that ends with none of RULER's questions; write the file with RULER's "
        "generator and its model template 'base'"
    )


def _own_sample(task: str, line: Line) -> Sample:
    unknown = [repr(name) for name in line.fields if name not in _OWN_FIELDS]
    if unknown:
        allowed = ", ".join(map(repr, _OWN_FIELDS))
        raise line.error(f"has the unknown field {unknown[0]}; allowed are: {allowed}")
    context, question = (line.text(name) for name in ("context", "question"))
    for name, text in (("context", context), ("question", question)):
        if not text.strip():
            raise line.error(f"has an empty {name!r}; give some text")
    single = isinstance(line.fields.get("answers"), str)
    answers = (line.text("answers"),) if single else line.texts("answers")
    metric, classes = line.text("metric", DEFAULT_METRIC), line.texts("classes", ())
    try:
        find_metric(metric).check(answers, classes)
    except MetricError as error:
        raise line.error(f"cannot be scored: {error}") from None
    return Sample(
        task=task,
        index=line.number - 1,
        context=context,
        question=f"\n\n{question}",
        answers=answers,
        metric=metric,
        max_new_tokens=line.count("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        classes=classes,
    )
