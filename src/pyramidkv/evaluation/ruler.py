"""RULER's synthetic long-context tasks, generated offline. No torch.

Tasks, parameters, limits and wording of questions follow RULER (arXiv 2404.06654,
github.com/NVIDIA/RULER, Apache-2.0), as its `synthetic.yaml` has them: they define the benchmark,
and results can be compared with others'. The code, noise, word lists and texts are our own, so
single samples are not those of RULER's generator. Three more differences: a text begins at a random
sentence instead of always its first; a prompt is filled to the very token; in `cwe`, words are
adjective-noun pairs where single words of our list do not suffice. `cwe` and `vt` hold one solved
example, as RULER's generator writes it. `qa_1` and `qa_2` are made of files that users have: see
`documents`.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from .documents import MAX_NEW_TOKENS as MAX_ANSWER_TOKENS
from .documents import QuestionSet, document_sketches
from .filling import (
    DOT_FILLER,
    ENDLESS,
    PLAIN_FILLER,
    Draft,
    Measure,
    Request,
    Sketch,
    TaskError,
    check_count,
    check_seed,
    generator,
    make,
)
from .haystacks import Haystack, chosen_haystack, noise, plant
from .needles import (
    LINE_FILLERS,
    MAX_NEW_TOKENS,
    Distractors,
    Needle,
    NeedleSketch,
    Pieces,
    draw_new,
)
from .sample import Sample
from .word_counts import (
    CommonWords,
    FrequentWords,
    coded_words,
    repeats,
    single_words,
    word_pairs,
)

HOPS = 4
"""Assignments in a chain of `vt` after the first."""

EXAMPLE_TOKENS = 500
"""The most tokens of the solved example in front of `vt`."""

_DEPTHS = tuple(round(100 * step / 39) for step in range(40))


@dataclass(frozen=True)
class Hidden:
    """A needle task.

    Attributes:
        haystack: `text` (the one handed in), `noise`, or `needles`.
        keys, values, queries: how many keys are hidden, values of each, and keys asked for.
        key_kind, kind: what keys and values are.
    """

    haystack: str
    key_kind: str = "words"
    kind: str = "digits"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def sketch(self, rng: random.Random, text: Haystack) -> NeedleSketch:
        """Draw one sample."""
        taken: set[str] = set()
        around = None if self.haystack == "needles" else text
        keys = [draw_new(rng, self.key_kind, taken, around) for _ in range(self.keys)]
        pairs = [
            (key, draw_new(rng, self.kind, taken, around))
            for key in keys
            for _ in range(self.values)
        ]
        count = len(pairs)
        if self.haystack == "text":
            depths: list[float] = [*rng.sample(_DEPTHS, count)]
        else:
            depths = [rng.uniform(0, 100) for _ in range(count)]
        queried = rng.sample(range(self.keys), self.queries)
        asked = tuple(key * self.values + value for key in queried for value in range(self.values))
        hidden = tuple(Needle(*pair, depth) for pair, depth in zip(pairs, depths, strict=True))
        if self.haystack == "needles":
            own = random.Random(rng.getrandbits(64))
            lines: Pieces = Distractors(own, self.key_kind, self.kind, taken)
            return NeedleSketch(lines, 0, hidden, asked, self.kind, LINE_FILLERS)
        return NeedleSketch(text, rng.randrange(len(text.pieces)), hidden, asked, self.kind)


_HIDDEN = {
    "niah_single_1": Hidden("noise"),
    "niah_single_2": Hidden("text"),
    "niah_single_3": Hidden("text", kind="uuids"),
    "niah_multikey_1": Hidden("text", keys=4),
    "niah_multikey_2": Hidden("needles"),
    "niah_multikey_3": Hidden("needles", key_kind="uuids", kind="uuids"),
    "niah_multivalue": Hidden("text", values=4),
    "niah_multiquery": Hidden("text", keys=4, queries=4),
}

TASKS = {**dict.fromkeys(_HIDDEN, MAX_NEW_TOKENS), "vt": 30, "cwe": 120, "fwe": 50}
"""Tasks by name, and the tokens of their answers."""

QUESTION_TASKS = {"qa_1": "SQuAD", "qa_2": "HotpotQA"}
"""Tasks made of files that are not ours to ship, and whose they are."""


@dataclass(frozen=True)
class VariableTracking:
    """A chain of assignments hidden in noise: which variables have the first one's value?

    Attributes:
        variables: in the order of the chain.
        value: what the first is assigned.
        depths: of each assignment, ascending, in percent of the noise.
        example: a solved one, which stands before it.
    """

    haystack: Haystack
    variables: tuple[str, ...]
    value: str
    depths: tuple[float, ...]
    example: str = ""
    fillers: Sequence[Sequence[str]] = (DOT_FILLER, PLAIN_FILLER)
    least: int = 1
    most: int = ENDLESS

    def draft(self, units: int, filler: str) -> Draft:
        """Return the sample with so many words of noise."""
        sources = [self.value, *(f"VAR {name} " for name in self.variables)]  # spaces are RULER's
        chain = [
            (depth, f"VAR {name} = {source}")
            for depth, name, source in zip(self.depths, self.variables, sources, strict=False)
        ]
        pieces = self.haystack.beginning(units) + ([filler] if filler else [])
        text, begins = plant(pieces, self.haystack.separator, chain)
        head = (
            f"{self.example}Memorize and track the chain(s) of variable assignment hidden in the "
            "following text.\n\n"
        )
        return Draft(
            context=head + text,
            question="\nQuestion: Find all variables that are assigned the value "
            f"{self.value} in the text above.",
            answer_prefix=" Answer: According to the chain(s) of variable assignment in the text "
            f"above, {len(self.variables)} variables are assigned the value {self.value}, "
            "they are: ",
            answers=self.variables,
            facts={
                "depths": [round(depth, 1) for depth in self.depths],
                "positions": [len(head) + begin for begin in begins],
            },
        )


def make_samples(
    task: str,
    measure: Measure,
    length: int,
    count: int,
    seed: int = 0,
    haystack: Haystack | None = None,
    *,
    questions: QuestionSet | None = None,
    exact: bool = True,
) -> list[Sample]:
    """Make samples of one of RULER's tasks.

    Sample i depends on the task, the seed and i alone: asking for more changes none, and its
    keys, values and words are the same at every length (of `cwe`, below and from 4,096 tokens).

    Args:
        task: see `TASKS` and `QUESTION_TASKS`.
        measure: the tokens of a prompt.
        length: tokens of prompt and answer together, as RULER counts.
        count: how many.
        haystack: the text of the tasks that hide needles in essays; by default the Constitution.
            The others have their own.
        questions: of `qa_1` and `qa_2`: see `question_files`. A sample asks one drawn from all.
        exact: fill with a few neutral words up to the very token.

    Returns:
        samples whose facts are `length`, `tokens` (of the prompt, measured), of needle tasks and
        `vt` also `haystack`, and of each answer the depth drawn (`depths`, in percent) and the
        character of the context where it is stated (`positions`); of questions, how many
        `documents` there are and where the question's own begin (`positions`).

    Raises:
        TaskError: there is no such task, a number is out of range, the length too short, or the
            questions are missing, too few, or have too few documents.
    """
    names = [*TASKS, *QUESTION_TASKS]
    if task not in names:
        raise TaskError(f"there is no task {task!r}; tasks are: {', '.join(names)}")
    check_count(length, "the length")
    check_count(count, "the number of samples")
    check_seed(seed)
    text = chosen_haystack(haystack)
    facts: dict[str, object] = {}
    if task in QUESTION_TASKS:
        most, metric = MAX_ANSWER_TOKENS, "match_part"
        sketch: _Maker = document_sketches(_chosen(questions, task), measure, count, seed)
    else:
        most, metric = TASKS[task], "match_all"
        if questions is not None:
            raise TaskError(f"{task} asks no questions of a file; leave them out")
        sketch, facts = _maker(task, measure, seed, text)
    requests = [
        Request(task, index, length, most, _at(sketch, index), facts, metric)
        for index in range(count)
    ]
    return make(requests, measure, exact)


def _chosen(questions: QuestionSet | None, task: str) -> QuestionSet:
    """Return the questions handed in if they are the task's."""
    if questions is None:
        given = "none are given"
    elif not isinstance(questions, QuestionSet):
        given = f"{questions!r} is none that was read"
    elif questions.task != task:
        given = f"{questions.name!r} has others"
    else:
        return questions
    raise TaskError(
        f"{task} takes questions and documents from a file of {QUESTION_TASKS[task]}, which is "
        f"not ours to ship, and {given}; give that file"
    )


_Maker = Callable[[int, int], Sketch]
"""From a sample's index and length to the sample."""


def _at(sketch: _Maker, index: int) -> Callable[[int], Sketch]:
    return lambda length: sketch(index, length)


def _maker(
    task: str, measure: Measure, seed: int, text: Haystack
) -> tuple[_Maker, dict[str, object]]:
    """Return how a task's samples are drawn, and what is known of all of them."""
    if task == "cwe":
        return lambda index, length: _common_words(measure, seed, index, length), {}
    if task == "fwe":
        return lambda index, length: _frequent_words(seed, index, length), {}
    if task == "vt":
        quiet = noise()
        return (
            lambda index, length: _variables(measure, seed, index, quiet),
            {"haystack": quiet.name},
        )
    hidden = _HIDDEN[task]
    chosen = noise() if hidden.haystack == "noise" else text
    name = "needles" if hidden.haystack == "needles" else chosen.name
    return (
        lambda index, length: hidden.sketch(generator(seed, task, index), chosen),
        {"haystack": name},
    )


def _variables(measure: Measure, seed: int, index: int, haystack: Haystack) -> VariableTracking:
    rng = generator(seed, "vt", index)
    asked = _chain(rng, haystack, 5)
    shown = _chain(rng, haystack, 3)
    while shown.value == asked.value or any(
        part in whole for part in shown.variables for whole in asked.variables
    ):
        shown = _chain(rng, haystack, 3)
    return replace(asked, example=_solved(shown, measure))


def _chain(rng: random.Random, haystack: Haystack, letters: int) -> VariableTracking:
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in haystack:
            names[name] = None
    depths = sorted(rng.uniform(0, 100) for _ in names)
    return VariableTracking(haystack, tuple(names), str(rng.randint(10000, 99999)), tuple(depths))


def _solved(sketch: VariableTracking, measure: Measure) -> str:
    """Return the example with as many lines of noise as fit, and the answers behind it."""
    line = len(sketch.haystack.piece(0).split())
    room = EXAMPLE_TOKENS + measure("", "", "")  # of the text itself, without a chat template
    drafts = (sketch.draft(line * count, "") for count in range(1, EXAMPLE_TOKENS))
    fitting = list(takewhile(lambda draft: draft.tokens(measure) <= room, drafts))
    if not fitting:
        return ""
    draft = fitting[-1]
    text = draft.context + draft.question + draft.answer_prefix
    return f"{text} {' '.join(draft.answers)}\n\n"


def _common_words(measure: Measure, seed: int, index: int, length: int) -> CommonWords:
    order = f"{seed}:cwe:{index}:order"
    sketch = CommonWords(single_words(generator(seed, "cwe", index)), repeats(length), order)
    if sketch.draft(sketch.most, "").tokens(measure) + TASKS["cwe"] >= length:
        return sketch
    return CommonWords(word_pairs(generator(seed, "cwe", index), length), repeats(length), order)


def _frequent_words(seed: int, index: int, length: int) -> FrequentWords:
    vocabulary = max(5, (length - TASKS["fwe"]) // 50)  # the dots among them
    words = coded_words(generator(seed, "fwe", index), vocabulary - 1)
    return FrequentWords(words, f"{seed}:fwe:{index}:order")
