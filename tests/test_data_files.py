"""Files of RULER's generator, old and new, of every kind; and users' own files."""

from __future__ import annotations

import pytest
from shared_data import json_lines, shared_data

from pyramidkv.evaluation.data_files import load_own, load_ruler
from pyramidkv.evaluation.jsonl import DataError
from pyramidkv.evaluation.metrics import score_sample

LIST = "Below is a numbered list of words. Memorize the ones that appear most often.\n"
COMMON = "\nQuestion: What are the 10 most common words in the above list?"
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
CHAIN = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above."
    " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are"
    " assigned the value {value}, they are: "
)
DOCUMENTS = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)

KINDS = {  # kind: context, question, answer prefix, answers, most new tokens, metric
    "niah_single_1": (
        "A special magic number is hidden within the following text.\nGrass is green.\nOne of the "
        "special magic numbers for old-hat is: 1234567.\nSky is blue.",
        "\nWhat is the special magic number for old-hat mentioned in the provided text?",
        " The special magic number for old-hat mentioned in the provided text is",
        ["1234567"],
        128,
        "match_all",
    ),
    "niah_multiquery": (
        "Some special magic numbers are hidden within the following text.\nText.",
        "\nWhat are all the special magic numbers for old-hat, new-hat, and red-hat mentioned in "
        "the provided text?",
        " The special magic numbers for old-hat, new-hat, and red-hat mentioned in the provided "
        "text are",
        ["1", "2", "3"],
        128,
        "match_all",
    ),
    "vt": (
        "Memorize and track.\n\nVAR X = 11111" + CHAIN.format(value=11111) + "A B C D E\n\n"
        "Memorize and track.\n\nVAR Y = 22222",
        *CHAIN.format(value=22222).partition(" Answer:")[:1],
        "".join(CHAIN.format(value=22222).partition(" Answer:")[1:]),
        ["Y", "Z"],
        30,
        "match_all",
    ),
    "cwe": (
        f"{LIST}1. a 2. b{COMMON}{COMMON_PREFIX} 1. a\n{LIST}1. c 2. d",
        COMMON,
        COMMON_PREFIX,
        ["c", "d"],
        120,
        "match_all",
    ),
    "fwe": (
        "Read the following coded text. Find the three words. abc ... abc",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        ["abc"],
        50,
        "match_all",
    ),
    "qa_1": (
        f"{DOCUMENTS}\n\nThe following are given documents.\n\nDocument 1:\nText",
        f"\n\n{DOCUMENTS}\n\nQuestion: Who wrote 'Answer: none'?",
        " Answer:",
        ["She", "Her"],
        32,
        "match_part",
    ),
}


@pytest.mark.parametrize("new", [False, True], ids=["prefix in input", "prefix in its field"])
@pytest.mark.parametrize("task", KINDS)
def test_every_kind_of_ruler(task, new, tmp_path):
    context, question, prefix, answers, most, metric = KINDS[task]
    line = {"index": 7, "input": context + question, "outputs": answers, "length": 4000}
    line |= {"answer_prefix": prefix} if new else {"input": context + question + prefix}
    (tmp_path / task).mkdir()
    (sample,) = load_ruler(json_lines(tmp_path / task / "validation.jsonl", line))
    assert (sample.task, sample.index) == (task, 0)
    assert sample.context == context
    assert sample.question == question
    assert sample.answer_prefix == prefix
    assert sample.answers == tuple(answers)
    assert (sample.max_new_tokens, sample.metric) == (most, metric)
    assert sample.chat
    assert sample.facts["official_length"] == 4000
    assert score_sample(sample, " ".join(answers)) == 1.0


def test_without_line_breaks(tmp_path):
    """As RULER's generator writes with --remove_newline_tab."""
    for task, (context, question, prefix, answers, *_) in KINDS.items():
        text = " ".join(f"{context}{question}{prefix}".split())
        path = json_lines(
            tmp_path / f"{task}.jsonl", {"input": text, "outputs": answers, "length": 9}
        )
        (sample,) = load_ruler(path)
        assert sample.context + sample.question + sample.answer_prefix == text
        assert sample.context == " ".join(context.split())
        assert sample.answer_prefix == f" {prefix.strip()}"


def test_a_single_needle_has_a_depth(tmp_path):
    context, question, prefix, answers, *_ = KINDS["niah_single_1"]
    line = {"input": context + question + prefix, "outputs": answers, "length": 9}
    (sample,) = load_ruler(json_lines(tmp_path / "x.jsonl", line))
    assert sample.facts == {
        "official_length": 9,
        "depth": round(100 * context.index("1234567") / len(context)),
    }
    assert sample.task == "x"
    many = {"input": context + question + prefix, "outputs": ["1234567", "blue"], "length": 9}
    (sample,) = load_ruler(json_lines(tmp_path / "x.jsonl", many))
    assert sample.facts == {"official_length": 9}


def test_a_real_file_of_ruler():
    path = shared_data("ruler/niah_multikey_3_4096.jsonl")
    samples = load_ruler(path)
    assert len(samples) == 500
    for sample in samples:
        assert sample.task == "niah_multikey_3"
        assert sample.question.startswith("\nWhat is the special magic uuid for ")
        assert sample.question.endswith(" mentioned in the provided text?")
        assert sample.answer_prefix.endswith(" mentioned in the provided text is")
        key = sample.question.split()[7]
        assert f"for {key} is: {sample.answers[0]}." in sample.context
        assert sample.answer_prefix.split()[5] == key
        assert score_sample(sample, f" {sample.answers[0].upper()}.") == 1.0
        assert score_sample(sample, key) == 0.0
    depths = [sample.facts["depth"] for sample in samples]
    assert min(depths) < 10
    assert max(depths) > 90
    assert len(load_ruler(path, 5)) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "No question"}, "ends with none of RULER's questions.*template 'base'"),
        ({"input": KINDS["cwe"][0] + COMMON + "<|eot_id|>" + COMMON_PREFIX}, "template 'base'"),
        ({"answer_prefix": "x"}, "has its answer prefix twice"),
        ({"outputs": []}, "has in 'outputs' an empty list"),
        ({"outputs": "c"}, "has in 'outputs' a text; a list of texts is needed"),
        ({"length": "9"}, "has in 'length' a text; a whole number"),
    ],
)
def test_lines_of_ruler_that_cannot_be_used_are_refused(change, message, tmp_path):
    context, question, prefix, answers, *_ = KINDS["cwe"]
    line = {"input": context + question + prefix, "outputs": answers, "length": 9}
    path = json_lines(tmp_path / "cwe.jsonl", line, line | change)
    with pytest.raises(DataError, match=f"line 2 of '.*cwe.jsonl' .*{message}"):
        load_ruler(path)
    assert len(load_ruler(path, 1)) == 1


OWN = {"question": "Who?", "context": "She did.", "answers": "She"}


def test_own_questions(tmp_path):
    more = {"answers": ["a", "b"], "metric": "match_all", "max_new_tokens": 9}
    chosen = {"metric": "classification", "classes": ["She", "He"]}
    first, second, third = load_own(
        json_lines(tmp_path / "mine.jsonl", OWN, OWN | more, OWN | chosen)
    )
    assert first.task == second.task == "mine"
    assert [first.index, second.index, third.index] == [0, 1, 2]
    assert first.context + first.question == "She did.\n\nWho?"
    assert (first.answers, first.metric, first.max_new_tokens) == (("She",), "qa_f1", 128)
    assert (second.answers, second.metric, second.max_new_tokens) == (("a", "b"), "match_all", 9)
    assert third.classes == ("She", "He")
    assert [score_sample(one, "She") for one in (first, second, third)] == [1.0, 0.0, 1.0]
    assert (first.chat, first.stop_at_newline, first.facts) == (True, False, {})


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "q", "context": "c", "answers": "a"}', encoding="utf-8-sig")
    assert len(load_own(path)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 9}, "has the unknown field 'max_tokens'; allowed are: 'question', 'con"),
        ({"context": " \n"}, "has an empty 'context'"),
        ({"question": ""}, "has an empty 'question'"),
        ({"answers": []}, "has in 'answers' an empty list"),
        ({"answers": None}, "has in 'answers' null; a list of texts is needed"),
        ({"metric": "bleu"}, "cannot be scored: unknown metric 'bleu'; choose one of: qa_f1, "),
        ({"metric": "retrieval"}, "cannot be scored: the answer 'She' names no paragraph"),
        ({"metric": "classification"}, "cannot be scored: this metric needs the classes"),
        ({"max_new_tokens": 0}, "has in 'max_new_tokens' 0; a whole number of at least 1"),
        ({"max_new_tokens": 1.5}, "has in 'max_new_tokens' 1.5; a whole number"),
        ({"classes": "She"}, "has in 'classes' a text; a list of texts is needed"),
    ],
)
def test_own_lines_that_cannot_be_used_are_refused(change, message, tmp_path):
    path = json_lines(tmp_path / "mine.jsonl", OWN, OWN | change)
    with pytest.raises(DataError, match=f"line 2 of '.*mine.jsonl' {message}") as error:
        load_own(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", OWN)
def test_own_lines_need_their_fields(name, tmp_path):
    line = {key: value for key, value in OWN.items() if key != name}
    with pytest.raises(DataError, match=f"line 1 .* has no field '{name}'"):
        load_own(json_lines(tmp_path / "mine.jsonl", line))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot read '.*mine.jsonl': No such file"):
        load_own(tmp_path / "mine.jsonl")
