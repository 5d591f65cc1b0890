"""Scores against figures of the official code, computed by it, and by hand where that is short."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge import Rouge
from shared_data import shared_data

from pyramidkv.evaluation import metrics
from pyramidkv.evaluation.metrics import METRICS, MetricError, find_metric, score_sample
from pyramidkv.evaluation.sample import Sample

WORDS = st.sampled_from(["a", "b", "c", "the", "The", ".", ". ", "...", "\n", "b.a", " "])
TEXTS = st.lists(WORDS, max_size=24).map(" ".join)


def sample(metric, *answers, **fields):
    return Sample("task", 0, "context", "question", answers, metric, 32, **fields)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        # {cat, sat, on, mat} and {cat, is, on, mat}: 3 of 4 both ways
        ("The cat sat on a mat.", "A cat is on the mat!", 0.75),
        ("cats' paws", "Cats paws", 1.0),
        ("to be or not to be", "to be", 0.5),  # precision 2/6, recall 2/2
        ("anthem", "them", 0.0),
        ("an answer", "the answer", 1.0),
        ("", "", 0.0),
    ],
)
def test_qa_f1(prediction, answer, score):
    assert METRICS["qa_f1"](prediction, [answer]) == score


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("厦门大学。", "在厦门大学", 2 / 3),  # 厦门大学 / 在, 厦门大学
        ("我们研究人工智能", "研究人工智能！", 0.8),  # precision 2/3, recall 1
        ("北京 大学，2023年", "北京大学", 0.0),  # words are cut before spaces are dropped
        ("iOS》", "ios", 1.0),
        ("《iOS》", "ios", 2 / 3),  # the official list of punctuation lacks the opening mark
    ],
)
def test_qa_f1_of_chinese_words(prediction, answer, score):
    assert METRICS["qa_f1_zh"](prediction, [answer]) == pytest.approx(score, abs=1e-15)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        # common to a pair of sentences: {the, cat}, {the}, {mat}, {on} or {mat}: united
        # {the, cat, on, mat} of 5 distinct words said and of 6 wanted: 8/11, less 1e-8
        ("the cat sat. on the mat", "the cat. lay on a mat", 0.7272727223140496),
        # of {a c}, {a d}, {b c}, {b d} one is taken: 2 of 4 words
        ("a b c d", "b a d c", 0.4999999950000001),
        # of "a a" and "a b", both longest, the second is taken: all distinct words of both
        ("a b a", "a a b", 0.999999995),
        ("same words", "same words", 0.999999995),  # 2 / (2 + 1e-8)
        ("a b. c", "c a b", 0.999999995),
        # the blank sentence counts as a word: precision 2/4, recall 2/2
        ("one two. . three", "three. one", 0.6666666622222223),
        ("The", "the", 0.0),  # case counts
        ("...", "three", 0.0),
        ("", "", 0.0),
    ],
)
def test_rouge_l(prediction, answer, score):
    assert METRICS["rouge_l"](prediction, [answer]) == score


@given(TEXTS, TEXTS)
def test_rouge_l_equals_the_package_that_longbench_uses(prediction, answer):
    try:
        official = Rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except ValueError:  # it has no sentence
        official = 0.0
    assert METRICS["rouge_l"](prediction, [answer]) == official


def test_rouge_l_of_sentences_on_which_the_package_gives_up():
    """One word of 1,200 is right, and is all of the answer: F is 2/1201."""
    prediction = " ".join(map(str, range(1200)))
    with pytest.raises(RecursionError):
        Rouge(["rouge-l"]).get_scores([prediction], ["0"])
    assert METRICS["rouge_l"](prediction, ["0"]) == pytest.approx(2 / 1201, abs=1e-7)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("会议讨论了明年的预算。", "会议讨论了预算", 0.7272727226446282),  # 4 words of 7 and of 4
        ("会议.预算", "预算.会议", 0.999999995),
    ],
)
def test_rouge_l_of_chinese_words(prediction, answer, score):
    assert METRICS["rouge_l_zh"](prediction, [answer]) == score


@pytest.mark.parametrize(
    ("prediction", "answer", "classes", "score"),
    [
        ("It is Sport", "Sport", ("Sport", "News"), 1.0),
        ("Sport and News", "Sport", ("Sport", "News"), 0.5),
        ("nothing", "Sport", ("Sport", "News"), 0.0),
        ("News", "Sport", ("Sport", "News"), 0.0),
        # both parts of the right class are dropped, unless one directly follows the other
        ("Sports news", "Sports news", ("Sports", "Sports news", "news"), 1.0),
        ("Sports news", "Sports news", ("Sports", "news", "Sports news"), 0.5),
    ],
)
def test_classification(prediction, answer, classes, score):
    assert METRICS["classification"](prediction, [answer], classes) == score


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "score"),
    [
        ("count", "There are 7 of 12, so 7.", "7", 2 / 3),
        ("count", "none", "7", 0.0),
        ("count", "17", "7", 0.0),
        ("retrieval", "Paragraph 3, or 12", "Paragraph 3", 0.5),
        ("retrieval", "3", "Paragraph 3", 1.0),
        ("retrieval_zh", "段落27", "段落27", 1.0),
        ("retrieval_zh", "段落2", "段落27", 0.0),
    ],
)
def test_shares_of_numbers(metric, prediction, answer, score):
    assert METRICS[metric](prediction, [answer]) == score


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        # the first line without ` # //; 11 of 12 characters: 91.67, rounded
        ("```python\n# a comment\nreturn x + 1\nfoo", "return x + 2", 0.92),
        ("abcd", "bcde", 0.75),
        ("abx", "ab", 0.8),
        ("\n\nab", "ab", 1.0),
        ("\n \nab", "ab", 0.0),  # a line of spaces is a line; nothing of it is right
        ("tide", "diet", 0.25),  # which of them is given first matters to difflib
        ("diet", "tide", 0.5),
        ("// only", "x", 0.0),
        ("", "", 1.0),
    ],
)
def test_code_similarity(prediction, answer, score):
    assert METRICS["code_similarity"](prediction, [answer]) == score


def test_matches_of_ruler():
    answers = ["Alpha", "beta", "gamma", "delta"]
    assert METRICS["match_all"]("it is ALPHA, then betamax", answers) == 0.5
    assert METRICS["match_part"]("it is ALPHA, then betamax", answers) == 1.0
    assert METRICS["match_all"]("nothing", answers) == METRICS["match_part"]("no", answers) == 0.0
    assert METRICS["match_all"]("one\ttwo", ["one\ntwo"]) == 1.0  # as its postprocessing has it


def test_the_best_of_several_answers_counts():
    assert METRICS["qa_f1"]("to be", ["else", "to be", "be"]) == 1.0
    assert METRICS["retrieval"]("3", ["Paragraph 4", "Paragraph 3"]) == 1.0


def test_only_the_first_line_counts_where_the_sample_says_so():
    text = "\n\nright\nwrong"
    assert score_sample(sample("qa_f1", "right", stop_at_newline=True), text) == 1.0
    assert score_sample(sample("qa_f1", "right"), text) == pytest.approx(2 / 3)
    assert score_sample(sample("match_all", "wrong", stop_at_newline=True), text) == 0.0
    assert score_sample(sample("classification", "b", classes=("a", "b")), "b") == 1.0


def test_scores_of_real_texts():
    """The articles' first 1,500 characters as summaries; figures of the official code."""
    with shared_data("longbench/multi_news.jsonl").open(encoding="utf-8") as file:
        lines = [json.loads(next(file)) for _ in range(3)]
    pairs = [(line["context"][:1500], line["answers"]) for line in lines]
    rouge = [0.21830985429775848, 0.23824450911488698, 0.30508474076966396]
    assert [METRICS["rouge_l"](*pair) for pair in pairs] == rouge
    f1 = [0.3227513227513228, 0.3196125907990314, 0.3550000000000001]
    assert [METRICS["qa_f1"](*pair) for pair in pairs] == pytest.approx(f1, abs=1e-15)


def test_scores_of_real_chinese_texts():
    with shared_data("longbench/multifieldqa_zh.jsonl").open(encoding="utf-8") as file:
        line = [json.loads(next(file)) for _ in range(4)][3]
    text, answers = line["context"], line["answers"]
    assert METRICS["qa_f1_zh"](text[:40], answers) == pytest.approx(0.08695652173913043, abs=1e-15)
    assert METRICS["rouge_l_zh"](text[:300], answers) == 0.1363636349632691


@pytest.mark.parametrize(
    ("metric", "answers", "message"),
    [
        ("qa_f1", (), "there is no answer"),
        ("retrieval", ("3",), "'3' names no paragraph; answers are like 'Paragraph 7'"),
        ("retrieval_zh", ("Paragraph 3",), "answers are like '段落7'"),
        ("classification", ("a",), "needs the classes"),
        ("bleu", ("a",), "unknown metric 'bleu'; choose one of: qa_f1, qa_f1_zh, rouge_l"),
    ],
)
def test_what_cannot_be_scored_is_refused(metric, answers, message):
    with pytest.raises(MetricError, match=message):
        score_sample(sample(metric, *answers), "a")


@pytest.mark.parametrize("name", ["qa_f1_zh", "rouge_l_zh"])
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    metrics._segmenter.cache_clear()
    with pytest.raises(MetricError, match=r"needs jieba.*pip install 'pyramidkv\[eval\]'"):
        find_metric(name).check_packages()
    with pytest.raises(MetricError, match="jieba"):
        METRICS[name]("a", ["a"])
    METRICS["rouge_l"].check_packages()


def test_cutting_words_says_nothing():
    code = "from pyramidkv.evaluation.metrics import METRICS; METRICS['qa_f1_zh']('北京', ['北京'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == done.stderr == b""


def test_scoring_and_loading_need_no_torch():
    code = (
        "import sys; from pyramidkv.evaluation import data_files, longbench, metrics; "
        "metrics.METRICS['rouge_l']('a', ['a']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'jieba')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
