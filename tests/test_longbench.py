"""LongBench's tasks: exact prompts, official settings, and files that cannot be used."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import json_lines, shared_data

from pyramidkv.evaluation import metrics
from pyramidkv.evaluation.jsonl import DataError
from pyramidkv.evaluation.longbench import TASKS, load_longbench, open_archive
from pyramidkv.evaluation.metrics import METRICS, MetricError, score_sample

LINE = {
    "input": "Who?",
    "context": "Long {input} text",
    "answers": ["She", "Her"],
    "length": 3,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "7f",
}


def write(folder, task, *lines):
    json_lines(folder / f"{task}.jsonl", *lines)
    return folder


def test_prompts_are_the_official_ones():
    """The digest is of the official `dataset2prompt.json`, sorted and without layout."""
    prompts = json.dumps({name: task.prompt for name, task in TASKS.items()}, sort_keys=True)
    assert (
        hashlib.sha256(prompts.encode()).hexdigest()
        == "bb89f011861ff65f8534f366632b99cc9d5681ae983c50f2537230faae16613f"
    )


def test_lengths_metrics_and_forms_are_the_official_ones():
    lengths = {name: task.max_new_tokens for name, task in TASKS.items()}
    assert len(lengths) == 21
    assert {name for name, most in lengths.items() if most == 512} == {
        *("gov_report", "qmsum", "multi_news", "vcsum")
    }
    assert {name for name, most in lengths.items() if most == 128} == {
        *("narrativeqa", "qasper", "dureader", "samsum")
    }
    assert {name for name, most in lengths.items() if most == 64} == {
        *("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p")
    }
    assert sum(most == 32 for most in lengths.values()) == 7
    first_lines = {"trec", "triviaqa", "samsum", "lsht"}
    assert {name for name, task in TASKS.items() if task.stop_at_newline} == first_lines
    plain = {name for name, task in TASKS.items() if not task.chat}
    assert plain == first_lines | {"lcc", "repobench-p"}
    scored = {name: task.metric for name, task in TASKS.items()}
    assert set(scored.values()) == set(METRICS) - {"match_all", "match_part"}
    assert {n for n, m in scored.items() if m == "qa_f1"} == {
        *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"),
        "triviaqa",
    }
    assert {n for n, m in scored.items() if m == "rouge_l"} == {
        *("gov_report", "qmsum", "multi_news", "samsum")
    }
    assert {n for n, m in scored.items() if m == "rouge_l_zh"} == {"dureader", "vcsum"}
    assert {n for n, m in scored.items() if m == "classification"} == {"trec", "lsht"}
    assert {n for n, m in scored.items() if m == "code_similarity"} == {"lcc", "repobench-p"}
    assert scored["multifieldqa_zh"] == "qa_f1_zh"
    assert scored["passage_count"] == "count"
    assert scored["passage_retrieval_en"] == "retrieval"
    assert scored["passage_retrieval_zh"] == "retrieval_zh"


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=15)
@given(context=st.text(), question=st.text())
def test_both_parts_joined_are_the_prompt(name, context, question):
    first, second = TASKS[name].split(context, question)
    assert first + second == TASKS[name].prompt.format(context=context, input=question)
    assert first.endswith(context)


def test_a_line_becomes_a_sample(tmp_path):
    (sample,) = load_longbench(write(tmp_path, "hotpotqa", LINE), "hotpotqa")
    assert sample.context.endswith("The following are given passages.\nLong {input} text")
    assert sample.question.startswith("\n\nAnswer the question based on the given passages.")
    assert sample.question.endswith("\n\nQuestion: Who?\nAnswer:")
    assert (sample.task, sample.index, sample.answers) == ("hotpotqa", 0, ("She", "Her"))
    assert (sample.metric, sample.max_new_tokens, sample.chat) == ("qa_f1", 32, True)
    assert (sample.classes, sample.answer_prefix, sample.stop_at_newline) == ((), "", False)
    assert sample.facts == {"official_length": 3, "id": "7f"}
    assert score_sample(sample, "her") == 1.0


def test_classes_come_from_the_data(tmp_path):
    line = LINE | {"dataset": "trec", "answers": ["Date"], "all_classes": ["Date", "Food"]}
    (sample,) = load_longbench(write(tmp_path, "trec", line), "trec")
    assert sample.classes == ("Date", "Food")
    assert not sample.chat
    assert score_sample(sample, "\nDate\nFood") == 1.0
    assert score_sample(sample, "Date or Food") == 0.5


@pytest.mark.parametrize("task", ["multi_news", "multifieldqa_zh", "passage_retrieval_zh"])
def test_every_line_of_real_files_loads_and_its_answer_scores_in_full(task):
    """ROUGE-L of a text with itself is 2 / (2 + 1e-8)."""
    folder = shared_data("longbench")
    samples = load_longbench(folder, task)
    assert len(samples) == 200
    assert [sample.index for sample in samples] == list(range(200))
    full = 0.999999995 if task == "multi_news" else 1.0
    assert {score_sample(sample, sample.answers[0]) for sample in samples[:40]} == {full}
    with (folder / f"{task}.jsonl").open(encoding="utf-8") as file:
        for line, sample in zip(file, samples, strict=True):
            raw = json.loads(line)
            prompt = TASKS[task].prompt.format(**raw)
            assert sample.context + sample.question == prompt
            assert sample.answers == tuple(raw["answers"])
    assert load_longbench(folder, task, 3) == samples[:3]


def test_only_as_many_lines_are_read_as_are_wanted(tmp_path):
    folder = write(tmp_path, "hotpotqa", LINE, LINE, "no JSON")
    assert [sample.index for sample in load_longbench(folder, "hotpotqa", 2)] == [0, 1]
    with pytest.raises(DataError, match="line 3 of"):
        load_longbench(folder, "hotpotqa", 3)


def without(name):
    return {key: value for key, value in LINE.items() if key != name}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 2 of '.*hotpotqa.jsonl' is empty; delete it"),
        ("{", r"line 2 of '.*hotpotqa.jsonl' is not JSON in UTF-8 \("),
        ("[" * 100_000, "line 2 .* is not JSON"),
        ("[1]", "line 2 .* holds a list; a JSON object is needed"),
        (without("input"), "line 2 .* has no field 'input'; its fields are: 'context', 'answers'"),
        (without("answers"), "has no field 'answers'"),
        (without("all_classes"), "has no field 'all_classes'"),
        (without("length"), "has no field 'length'"),
        (without("_id"), "has no field '_id'"),
        (LINE | {"context": 7}, "has in 'context' a number where a text is needed"),
        (LINE | {"context": None}, "has in 'context' null where a text is needed"),
        (LINE | {"context": "\ud800"}, "no valid text: half a surrogate pair"),
        (LINE | {"answers": "She"}, "has in 'answers' a text; a list of texts is needed"),
        (LINE | {"answers": []}, "has in 'answers' an empty list"),
        (LINE | {"answers": ["She", 1]}, "has in 'answers' a number where a text is needed"),
        (LINE | {"length": True}, "has in 'length' true or false; a whole number of at least 1"),
        (LINE | {"length": 0}, "has in 'length' 0; a whole number of at least 1"),
        (LINE | {"dataset": "trec"}, "is a sample of 'trec', not of 'hotpotqa'"),
    ],
)
def test_lines_that_cannot_be_used_are_refused(line, message, tmp_path):
    line = line if isinstance(line, str) else json.dumps(line)
    folder = write(tmp_path, "hotpotqa", LINE, line)
    with pytest.raises(DataError, match=message) as error:
        load_longbench(folder, "hotpotqa")
    assert "\n" not in str(error.value)
    assert load_longbench(folder, "hotpotqa", 1)


def test_lines_that_cannot_be_scored_are_refused(tmp_path):
    line = LINE | {"dataset": "passage_retrieval_en"}
    with pytest.raises(DataError, match="line 1 .* cannot be scored: the answer 'She' names no"):
        load_longbench(write(tmp_path, "passage_retrieval_en", line), "passage_retrieval_en")
    with pytest.raises(DataError, match="cannot be scored: this metric needs the classes"):
        load_longbench(write(tmp_path, "trec", LINE | {"dataset": "trec"}), "trec")


def test_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(DataError, match="no task 'trek'; choose one of: narrativeqa, qasper"):
        load_longbench(tmp_path, "trek")
    with pytest.raises(DataError, match="there is no folder '.*nowhere'"):
        load_longbench(tmp_path / "nowhere", "trec")
    with pytest.raises(DataError, match="has no 'trec.jsonl'; it has none of LongBench's files"):
        load_longbench(tmp_path, "trec")
    write(write(tmp_path, "hotpotqa", LINE), "2wikimqa")
    with pytest.raises(DataError, match="no 'trec.jsonl'; it has the tasks: hotpotqa, 2wikimqa$"):
        load_longbench(tmp_path, "trec")
    with pytest.raises(DataError, match="'.*2wikimqa.jsonl' is empty"):
        load_longbench(tmp_path, "2wikimqa")
    (tmp_path / "lcc.jsonl").mkdir()
    with pytest.raises(DataError, match="is no plain file"):
        load_longbench(tmp_path, "lcc")
    (tmp_path / "qasper.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match="line 1 .* is not JSON in UTF-8"):
        load_longbench(tmp_path, "qasper")
    with pytest.raises(DataError, match="the number of samples is 0; it must be at least 1"):
        load_longbench(tmp_path, "hotpotqa", 0)


def test_a_missing_package_is_named_before_the_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    metrics._segmenter.cache_clear()
    with pytest.raises(MetricError, match="needs jieba"):
        load_longbench(write(tmp_path, "dureader"), "dureader")


def on_hub(monkeypatch, found):
    """Stand in for the hub, whose archive is the file `found`, or fails to come with it."""

    def download(name, file, repo_type):
        assert (name, file, repo_type) == ("zai-org/LongBench", "data.zip", "dataset")
        if isinstance(found, Exception):
            raise found
        return str(found)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def archive(path, *tasks):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for task in tasks:
            file.writestr(f"data/{task}.jsonl", json.dumps(LINE | {"dataset": task}) + "\n")
    return path


def test_the_archive_on_the_hub_is_read_as_a_folder_of_its_files(tmp_path, monkeypatch):
    on_hub(monkeypatch, archive(tmp_path / "data.zip", "hotpotqa", "2wikimqa"))
    folder = write(tmp_path, "hotpotqa", LINE)
    assert load_longbench(open_archive(), "hotpotqa") == load_longbench(folder, "hotpotqa")
    with pytest.raises(DataError, match="no 'trec.jsonl'; it has the tasks: hotpotqa, 2wikimqa$"):
        load_longbench(open_archive(), "trec")


def test_an_archive_that_cannot_be_had_or_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "data.zip"
    on_hub(monkeypatch, LocalEntryNotFoundError("offline"))
    with pytest.raises(DataError, match="cannot be reached; give the folder that holds LongBench"):
        open_archive()
    on_hub(monkeypatch, path)
    path.write_bytes(b"PK and no more")
    with pytest.raises(DataError, match="cannot read '.*data.zip': .*; download it again"):
        open_archive()
    data = bytearray(archive(path, "hotpotqa").read_bytes())
    start = data.index(b"hotpotqa.jsonl") + len(b"hotpotqa.jsonl")
    data[start : start + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(DataError, match="cannot read '.*data.zip/data/hotpotqa.jsonl'"):
        load_longbench(open_archive(), "hotpotqa")
