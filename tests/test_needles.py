"""Needles in a haystack: where they stand, what they are, and that the text alone answers."""

from __future__ import annotations

import random
import re

import pytest
from conftest import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import count_words, measure_with

from pyramidkv.evaluation.filling import TaskError
from pyramidkv.evaluation.haystacks import Haystack, HaystackError, find_haystack
from pyramidkv.evaluation.needles import FORMS, KINDS, draw_new, needle_samples

SENTENCE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
SHAPES = {
    "digits": r"[1-9]\d{6}",
    "words": r"[a-z]+-[a-z]+",
    "code16": r"[0-9a-f]{16}",
    "code32": r"[0-9a-f]{32}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


def solve(sample):
    """All values of the keys that the question names, from the text alone."""
    asked = re.search(r"for (.*) mentioned in", sample.question)[1]
    keys = asked.replace(", and ", ", ").split(", ")
    return [value for _, key, value in SENTENCE.findall(sample.context) if key in keys]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(seed=st.integers(), depth=st.floats(0, 100), length=st.integers(260, 700))
def test_the_text_alone_gives_the_answers(kind, form, seed, depth, length):
    (sample,) = needle_samples(count_words, [length], [depth], [kind], form, seed=seed)
    assert sorted(solve(sample)) == sorted(sample.answers)
    assert len(set(sample.answers)) == {"multi-value": 4, "multi-query": 4}.get(form, 1)
    found = SENTENCE.findall(sample.context)
    assert len(found) == (1 if form == "single" else 4)
    assert {plural for plural, _, _ in found} == {KINDS[kind].plural}
    assert len({value for _, _, value in found}) == len(found)  # no distractor is an answer
    assert len({key for _, key, _ in found}) == (4 if form in ("multi-key", "multi-query") else 1)
    for answer, position in zip(sample.answers, sample.facts["positions"], strict=True):
        assert re.fullmatch(SHAPES[kind], answer)
        assert SENTENCE.match(sample.context, position)[3] == answer
        assert sample.context.count(answer) == 1
        assert answer not in sample.question + sample.answer_prefix


@pytest.mark.parametrize("haystack", ["noise", "constitution"])
@settings(max_examples=30)
@given(depth=st.floats(0, 100), seed=st.integers(0, 1000))
def test_the_needle_stands_at_its_depth(haystack, depth, seed):
    text = find_haystack(haystack)
    longest = max(len(piece) for piece in text.pieces) + 1
    (sample,) = needle_samples(count_words, [1500], [depth], seed=seed, haystack=text)
    text = sample.context.split("afterwards.\n", 1)[1]
    needle = SENTENCE.search(text)
    before, behind = needle.start(), len(text) - needle.end()
    assert abs(before - depth / 100 * (before + behind)) <= longest / 2 + 2
    assert before == 0 or text[: needle.start()].rstrip()[-1] in '.!?;"'
    if depth in (0, 100):
        assert (before, behind)[depth == 100] == 0


@settings(max_examples=25)
@given(seed=st.integers(), length=st.integers(260, 2500), chat=st.booleans())
def test_prompts_have_exactly_the_length(seed, length, chat):
    measure = measure_with(tiny_tokenizer(chat))
    for sample in needle_samples(measure, [length], [0, 33, 100], seed=seed, max_new_tokens=60):
        prompt = measure(sample.context, sample.question, sample.answer_prefix)
        assert prompt == sample.facts["tokens"] == length - 60


def test_the_grid_is_in_order_and_says_what_each_sample_is():
    grid = needle_samples(
        count_words, [300, 400], [0, 50.5, 100], ["digits", "code16"], samples=2, seed=5
    )
    assert [sample.index for sample in grid] == list(range(24))
    facts = [sample.facts for sample in grid]
    assert [fact["kind"] for fact in facts] == ["digits"] * 12 + ["code16"] * 12
    assert [fact["length"] for fact in facts] == ([300] * 6 + [400] * 6) * 2
    assert [fact["depth"] for fact in facts] == [0, 0, 50.5, 50.5, 100, 100] * 4
    assert [fact["repetition"] for fact in facts] == [0, 1] * 12
    assert [fact["tokens"] for fact in facts] == ([172] * 6 + [272] * 6) * 2
    assert all(fact["depths"] == [fact["depth"]] for fact in facts)
    assert {sample.task for sample in grid} == {"needle_single"}
    assert {(sample.metric, sample.max_new_tokens) for sample in grid} == {("match_all", 128)}
    assert len({sample.answers for sample in grid}) == 12  # lengths share their needles


def test_a_sample_does_not_depend_on_the_others():
    grid = needle_samples(count_words, [300, 400], [10, 90], ["digits", "words"], samples=3, seed=1)
    alone = needle_samples(count_words, [400], [90], ["words"], samples=2, seed=1)
    same = [s for s in grid if (s.facts["length"], s.facts["depth"]) == (400, 90)][3:5]
    assert [(s.context, s.question, s.answers) for s in same] == [
        (s.context, s.question, s.answers) for s in alone
    ]
    other = needle_samples(count_words, [400], [90], ["words"], samples=2, seed=2)
    assert not {s.answers for s in other} & {s.answers for s in alone}


def test_the_question_is_in_the_plural_for_several():
    one, four = (
        needle_samples(count_words, [300], [50], form=form)[0] for form in ("single", "multi-query")
    )
    assert one.context.startswith("A special magic number is hidden")
    assert one.question.startswith("\nWhat is the special magic number for ")
    assert one.answer_prefix.endswith(" mentioned in the provided text is")
    assert four.context.startswith("Some special magic numbers are hidden")
    assert four.question.startswith("\nWhat are all the special magic numbers for ")
    assert four.answer_prefix.endswith(" mentioned in the provided text are")
    assert re.search(r"for \S+, \S+, \S+, and \S+ mentioned", four.question)


def test_nothing_is_drawn_that_is_taken_or_in_the_haystack():
    class Scripted(random.Random):
        numbers = iter([1000000, 2000000, 3000000])

        def randint(self, low, high):
            return next(self.numbers)

    taken = {"2000000"}
    haystack = Haystack("x", ("There are 1000000 of them.",))
    assert draw_new(Scripted(), "digits", taken, haystack) == "3000000"
    assert taken == {"2000000", "3000000"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depths": [101]}, "a depth is 101; it must be a percentage between 0 and 100"),
        ({"depths": [-0.5]}, "a depth is -0.5"),
        ({"depths": [float("nan")]}, "a depth is nan"),
        ({"depths": []}, "depths is []; give a list"),
        ({"lengths": [0]}, "a length is 0; it must be a whole number of at least 1"),
        ({"lengths": 300}, "lengths is 300; give a list"),
        ({"kinds": "digits"}, "kinds is 'digits'; give a list"),
        ({"kinds": ["letters"]}, "no kind of needle 'letters'; kinds are: digits, words, code16"),
        ({"form": "double"}, "no form 'double'; forms are: single, multi-key"),
        ({"samples": 0}, "the number of samples is 0"),
        ({"seed": 1.5}, "the seed is 1.5"),
        ({"form": "multi-key", "needles": 1}, "give at least 2 needles"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_sentence(change, message):
    with pytest.raises(TaskError, match=re.escape(message)):
        needle_samples(count_words, **{"lengths": [300], "depths": [50], **change})


def test_a_haystack_that_is_none_is_refused():
    with pytest.raises(HaystackError, match="the haystack is a str; give one made by find_hay"):
        needle_samples(count_words, [300], [50], haystack="noise")


@pytest.mark.parametrize("form", FORMS)
def test_a_length_too_short_names_the_least_that_works(form):
    def make(length):
        return needle_samples(count_words, [400, length], [50], ["uuids"], form, samples=5)

    with pytest.raises(TaskError, match=f"140 tokens are too few for needle_{form}: ") as caught:
        make(140)
    least = int(re.search(r"at least ([\d,]+)", str(caught.value))[1].replace(",", ""))
    assert len(make(least)) == 10
    with pytest.raises(TaskError, match=f"at least {least}, 128 of them for the answer"):
        make(least - 1)
