"""RULER's question answering: documents of a question, whole, among others."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import check_reads_as_official, count_words, measure_with

from pyramidkv.evaluation.filling import TaskError
from pyramidkv.evaluation.jsonl import DataError
from pyramidkv.evaluation.metrics import score_sample
from pyramidkv.evaluation.question_files import read_hotpotqa, read_squad
from pyramidkv.evaluation.ruler import QUESTION_TASKS, make_samples

ASKED = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


def paragraph(article: int, number: int) -> str:
    return f"Article {article}, part {number}:\n" + " ".join(
        f"w{article}x{number}x{word}" for word in range(40 + number)
    )


def asked(article: int, number: int, **more):
    answer = f"w{article}x{number}x7"
    answers = [{"text": answer}, {"text": f"{answer} w{article}x{number}x8"}, {"text": answer}]
    return {"question": f"What is {article}-{number}?", "answers": answers} | more


SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": f"T{article}",
            "paragraphs": [
                {
                    "context": paragraph(article, number),
                    "qas": [
                        asked(article, number, is_impossible=False),
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
                for number in range(5)
            ],
        }
        for article in range(8)
    ],
}
HOTPOTQA = [
    {
        "question": f"Which {number}?",
        "answer": f"s{number}x1",
        "supporting_facts": [[f"T{number}", 0]],
        "context": [
            [f"T{(number + step) % 30}", [f" s{(number + step) % 30}x{i}" * 5 for i in range(4)]]
            for step in range(10)
        ],
    }
    for number in range(30)
]


FIRST = paragraph(0, 0)


def squad(context=FIRST, **changes):
    """A file of one paragraph with one question, of which something is changed."""
    return {"data": [{"paragraphs": [{"context": context, "qas": [asked(0, 0, **changes)]}]}]}


def hotpotqa(**changes):
    return [HOTPOTQA[0] | changes]


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    squad = read_squad(write(folder, "squad.json", SQUAD))
    return {"qa_1": squad, "qa_2": read_hotpotqa(write(folder, "hotpotqa.json", HOTPOTQA))}


def documents(sample) -> list[str]:
    """The documents of a prompt, which must be numbered from 1 on."""
    head = f"{ASKED}\n\nThe following are given documents.\n\nDocument 1:\n"
    assert sample.context.startswith(head)
    parts = re.split(r"\n\nDocument (\d+):\n", "\n\n" + sample.context[len(head) - 13 :])
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_what_the_files_say(sets):
    squad, hotpotqa = sets["qa_1"], sets["qa_2"]
    assert (len(squad.documents), len(squad.questions)) == (40, 40)
    first = squad.questions[0]
    assert first.text == "What is 0-0?"
    assert first.answers == ("w0x0x7", "w0x0x7 w0x0x8")  # each once
    assert (first.own, first.near) == ((0,), (1, 2, 3, 4))
    assert squad.words[0] == len(squad.documents[0].split()) == 44
    assert (len(hotpotqa.documents), len(hotpotqa.questions)) == (30, 30)
    assert hotpotqa.documents[0] == "T0\n" + "".join(f" s0x{i}" * 5 for i in range(4))
    assert hotpotqa.questions[25].own == (25, 26, 27, 28, 29, 0, 1, 2, 3, 4)


@pytest.mark.parametrize("task", QUESTION_TASKS)
@settings(max_examples=25)
@given(seed=st.integers(), length=st.integers(400, 700))
def test_own_documents_are_whole_and_the_others_fill_exactly(sets, task, seed, length):
    questions = sets[task]
    for sample in make_samples(task, count_words, length, 3, seed, questions=questions):
        (question,) = [q for q in questions.questions if sample.question.endswith(f" {q.text}")]
        assert sample.question == f"\n\n{ASKED}\n\nQuestion: {question.text}"
        assert sample.answers == question.answers
        assert (sample.metric, sample.max_new_tokens) == ("match_part", 32)
        assert sample.answer_prefix == " Answer:"
        assert sample.facts["tokens"] == length - 32
        assert sample.facts["tokens"] == count_words(
            sample.context, sample.question, sample.answer_prefix
        )
        found = documents(sample)
        assert sample.facts["documents"] == len(found)
        for place, begin in zip(question.own, sample.facts["positions"], strict=True):
            assert found.count(questions.documents[place]) == 1
            assert sample.context.startswith(questions.documents[place], begin)
        assert len(set(found)) == len(found)
        cut = [text for text in found if text not in questions.documents]
        assert len(cut) <= 1
        for text in cut:
            whole = re.sub(r"(\.\.\.)?( (and|so|on|\.))*$", "", text)
            assert any(document.startswith(whole) for document in questions.documents)


def test_others_of_the_article_come_first(sets):
    """41 to 45 words a paragraph: five fit, and with more room those of other articles."""
    for sample in make_samples("qa_1", count_words, 290, 8, 3, questions=sets["qa_1"]):
        articles = {text.split(",")[0] for text in documents(sample)}
        assert len(articles) == 1
    for sample in make_samples("qa_1", count_words, 700, 8, 3, questions=sets["qa_1"]):
        found = documents(sample)
        article = re.search(r"What is (\d)", sample.question)[1]
        own = [text for text in found if text.startswith(f"Article {article},")]
        assert len(own) == 5 < len(found)


def test_own_documents_stand_at_every_place_equally_often(sets):
    """One among six: 600 samples, so about 100 to a place, give or take 10."""
    places = Counter()
    for seed in range(30):
        for sample in make_samples("qa_1", count_words, 330, 20, seed, questions=sets["qa_1"]):
            before = sample.context[: sample.facts["positions"][0]]
            places[before.count("Document "), sample.facts["documents"]] += 1
    assert {total for _, total in places} == {6}
    assert all(65 < places[place, 6] < 135 for place in range(1, 7))
    first = Counter()
    for seed in range(12):
        for sample in make_samples("qa_2", count_words, 450, 30, seed, questions=sets["qa_2"]):
            begins = sample.facts["positions"]
            first[begins.index(min(begins))] += 1
    assert all(17 < first[own] < 60 for own in range(10))  # 36 on average


@pytest.mark.parametrize("task", QUESTION_TASKS)
def test_a_sample_depends_on_the_seed_and_its_index_alone(sets, task):
    few = make_samples(task, count_words, 500, 3, 5, questions=sets[task])
    many = make_samples(task, count_words, 500, 20, 5, questions=sets[task])
    assert many[:3] == few
    assert len({sample.question for sample in many}) == 20
    longer = make_samples(task, count_words, 700, 3, 5, questions=sets[task])
    assert [s.question for s in longer] == [s.question for s in few]
    assert make_samples(task, count_words, 500, 3, 6, questions=sets[task]) != few


@pytest.mark.parametrize("task", QUESTION_TASKS)
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_have_exactly_the_length_under_a_tokenizer(sets, task, chat):
    measure = measure_with(tiny_tokenizer(chat))
    for sample in make_samples(task, measure, 600, 3, questions=sets[task]):
        prompt = measure(sample.context, sample.question, sample.answer_prefix)
        assert prompt == sample.facts["tokens"] == 568


@pytest.mark.parametrize("task", QUESTION_TASKS)
def test_prompts_read_as_those_of_the_official_generator(sets, task, tmp_path):
    (sample,) = make_samples(task, count_words, 600, 1, questions=sets[task])
    check_reads_as_official(sample, tmp_path)
    assert score_sample(sample, f"It is {sample.answers[-1]}.") == 1.0
    assert score_sample(sample, "no idea") == 0.0


def test_what_cannot_be_made_is_refused_in_one_sentence(sets):
    def made(task, length=500, count=1, questions=None):
        return make_samples(task, count_words, length, count, questions=questions)

    with pytest.raises(
        TaskError, match="qa_1 takes .* a file of SQuAD, .* and none are given; give"
    ):
        made("qa_1")
    with pytest.raises(TaskError, match="qa_2 takes .* HotpotQA, .* and 'squad.json' has others;"):
        made("qa_2", questions=sets["qa_1"])
    with pytest.raises(
        TaskError, match="'squad.json' has 40 questions with an answer, and 41 samp"
    ):
        made("qa_1", count=41, questions=sets["qa_1"])
    with pytest.raises(TaskError, match="qa_2 takes .*, and 'dev.json' is none that was read;"):
        made("qa_2", questions="dev.json")
    with pytest.raises(TaskError, match="vt asks no questions of a file; leave them out"):
        made("vt", length=900, questions=sets["qa_1"])
    with pytest.raises(
        TaskError, match=r"with all documents of 'squad.json' .* have ([\d,]+) tokens, a"
    ):
        made("qa_1", length=10_000, questions=sets["qa_1"])
    with pytest.raises(TaskError, match="100 tokens are too few for qa_2: .* at least ") as caught:
        made("qa_2", length=100, questions=sets["qa_2"])
    least = int(re.search(r"at least ([\d,]+)", str(caught.value))[1].replace(",", ""))
    assert made("qa_2", length=least, questions=sets["qa_2"])


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (read_squad, "{", "is not JSON in UTF-8"),
        (read_squad, HOTPOTQA, "is no file of SQuAD as .*: it has no 'data' that is a list"),
        (read_hotpotqa, SQUAD, "is no file of HotpotQA as .*: it is no list of questions"),
        (read_squad, {"data": []}, "has no question with an answer"),
        (read_hotpotqa, [], "has no question with an answer"),
        (read_squad, squad(context=7), ".*: article 1 has no 'context' that is a text"),
        (read_squad, squad(context=" "), ".*: article 1 has an empty text"),
        (read_squad, squad(context="a \ud800"), ".*: article 1 has half a surrogate pair"),
        (read_squad, squad(is_impossible="false"), ".*'What is 0-0.', has no 'is_impossible' that"),
        (read_squad, squad(answers={"text": ["b"]}), ".* has no 'answers' that is a list"),
        (read_squad, squad(answers=[]), "has no question with an answer"),
        (read_hotpotqa, hotpotqa(answer=" "), ".*: question 1 has an empty text"),
        (read_hotpotqa, hotpotqa(context=[]), ".*: question 1 has no documents"),
        (read_hotpotqa, hotpotqa(context={"title": []}), ".* has no 'context' that is a list"),
        (read_hotpotqa, hotpotqa(context=["ab", "cd"]), ".* document that is no pair of a title"),
        (read_hotpotqa, hotpotqa(context=[["T", ["a"], 7]]), ".* document that is no pair of a "),
    ],
)
def test_other_files_are_refused(read, value, message, tmp_path):
    with pytest.raises(DataError, match=f"'.*mine.json' {message}"):
        read(write(tmp_path, "mine.json", value))


def test_files_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read '.*none.json': No such file"):
        read_squad(tmp_path / "none.json")


def test_questions_without_the_mark_of_the_second_version(tmp_path):
    """SQuAD 1.1 has no unanswerable questions and does not say so."""
    assert len(read_squad(write(tmp_path, "old.json", squad())).questions) == 1
    impossible = squad(is_impossible=True, answers=None)  # whose answers are not looked at
    impossible["data"] += squad()["data"]
    assert len(read_squad(write(tmp_path, "new.json", impossible)).questions) == 1


@pytest.mark.parametrize("spare", [0, 1, 7])
def test_a_question_that_owns_all_documents(tmp_path, spare):
    """It fits where prompt and answer do; there is no other document to be filled with."""
    questions = read_squad(write(tmp_path, "one.json", squad()))

    def made(length):
        return make_samples("qa_1", count_words, length, 1, questions=questions)

    with pytest.raises(TaskError, match="1 tokens are too few for qa_1: .* at least ") as caught:
        made(1)
    least = int(re.search(r"at least (\d+),", str(caught.value))[1])
    (sample,) = made(least)
    assert (sample.facts["documents"], sample.facts["tokens"]) == (1, least - 32)
    if spare:
        with pytest.raises(TaskError, match=f"have {least} tokens, and {least + spare} are asked"):
            made(least + spare)
