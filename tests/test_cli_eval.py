"""`pyramidkv eval` as users run it: runs, going on, shards, and mistakes in one sentence."""

from __future__ import annotations

import json
import os

import pytest
from conftest import words
from test_cli import run

from pyramidkv.cli import display
from pyramidkv.cli.evaluate import _against_best

NEEDLE = ["--lengths", "700", "--depths", "0,60", "--samples", "2", "--haystack", "noise"]
METHODS = ["--methods", "full,snapkv,pyramidkv", "--budgets", "48"]


def evaluate(benchmark, folder, output, *arguments):
    return run("eval", benchmark, "--model", folder, "--output", output, *METHODS, *arguments)


@pytest.mark.parametrize("arm", [[], ["--agnostic"]], ids=["aware", "agnostic"])
def test_a_run_shows_scores_with_what_was_kept(model_folder, tmp_path, arm):
    done = evaluate("needle", model_folder, tmp_path / "run", *NEEDLE, *arm)
    assert done.returncode == 0, done.stderr.decode()
    shown = done.stdout.decode()
    assert "4 of 4 samples" in shown
    assert ("before the question is known" in shown) == bool(arm)
    told = ("kept per layer", "bytes", "against full", "against the best", "footprint", "48.0")
    for words_ in ("full", "snapkv 48", "pyramidkv 48", *told):
        assert words_ in shown
    lines = [json.loads(x) for x in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert line["prompt_tokens"] == 700 - 128 == line["facts"]["tokens"]
        for name in ("snapkv 48", "pyramidkv 48"):
            assert line["arms"][name]["kept_tokens"] == 4 * 48
        compressed = line["context_tokens"] if arm else line["prompt_tokens"]
        assert line["arms"]["full"]["kept_tokens"] == 4 * compressed


def test_going_on_answers_nothing_twice_and_shards_add_up(model_folder, tmp_path):
    for part in ("1/2", "2/2", "2/2"):
        done = evaluate("needle", model_folder, tmp_path / "run", *NEEDLE, "--shard", part)
        assert done.returncode == 0, done.stderr.decode()
        shown = done.stdout.decode()
        assert f"{2 if part == '1/2' else 4} of 4 samples" in shown
    sizes = [
        len((tmp_path / "run" / f"samples-{n}-of-2.jsonl").read_text().splitlines()) for n in (1, 2)
    ]
    assert sizes == [2, 2]


def test_ruler_and_files_of_ones_own(model_folder, tmp_path):
    done = evaluate(
        *("ruler", model_folder, tmp_path / "ruler", "--tasks", "vt", "--lengths", "900"),
        *("--samples", "2"),
    )
    assert done.returncode == 0, done.stderr.decode()
    assert "vt: 2 samples" in done.stdout.decode() or "all: 2 samples" in done.stdout.decode()
    made = tmp_path / "vt.jsonl"
    end = "\nQuestion: Find all variables that are assigned the value w7 in the text above."
    one = {"input": words(60) + end, "outputs": ["w7"], "length": 100, "answer_prefix": " w8"}
    made.write_text(f"{json.dumps(one)}\n" * 22)
    done = evaluate("ruler", model_folder, tmp_path / "made", "--data", made)
    assert done.returncode == 0, done.stderr.decode()
    assert "22 of 22 samples" in done.stdout.decode()
    settings = json.loads((tmp_path / "made" / "run.json").read_text())["asked"]["settings"]
    assert settings == {"benchmark": "ruler", "data": [str(made)], "samples": None}
    data = tmp_path / "mine.jsonl"
    line = {"question": "w5 w6", "context": words(150), "answers": "w7", "max_new_tokens": 5}
    data.write_text(json.dumps(line) + "\n")
    done = evaluate("own", model_folder, tmp_path / "own", "--data", data)
    assert done.returncode == 0, done.stderr.decode()
    assert "1 of 1 samples" in done.stdout.decode()


def test_questions_of_squad(model_folder, tmp_path):
    asked = [{"question": f"w{n} w5", "answers": [{"text": f"w{n}"}]} for n in range(3)]
    paragraphs = [{"context": words(80 + n), "qas": asked} for n in range(9)]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    done = evaluate(
        *("ruler", model_folder, tmp_path / "run", "--tasks", "qa_1", "--squad", path),
        *("--lengths", "500", "--samples", "2"),
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = [json.loads(text) for text in (tmp_path / "run" / "samples.jsonl").open()]
    assert [line["task"] for line in lines] == ["qa_1", "qa_1"]
    assert {line["metric"] for line in lines} == {"match_part"}
    assert {line["prompt_tokens"] for line in lines} == {468}
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["asked"]["settings"]
    assert settings["squad"] == str(path)
    assert "hotpotqa" not in settings


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        ("needle", ["--lengths", "x"], "--lengths is 'x'; give whole numbers"),
        ("needle", ["--depths", "101"], "must be a percentage between 0 and 100"),
        ("needle", ["--kinds", "rhymes"], "'rhymes'"),
        ("needle", ["--haystack", "nowhere"], "there is no folder 'nowhere'"),
        ("needle", ["--lengths", "20"], "20 tokens are too few for needle_single"),
        ("needle", ["--shard", "3/2"], "give I/N with I from 1 to N"),
        ("needle", ["--shard", "half"], "--shard is 'half'; give I/N"),
        ("needle", ["--methods", ","], "--methods names nothing; give such as snapkv,pyramidkv"),
        ("needle", ["--methods", "snapkw"], "unknown method 'snapkw'"),
        ("needle", ["--methods", "snapkv,snapkv"], "snapkv 48 is given twice"),
        ("needle", ["--budgets", "10"], "the smallest possible budget is 36"),
        ("needle", ["--methods", "snapkv:entropy"], "measured on the prompt cannot be one of many"),
        ("ruler", ["--tasks", "qa_1"], "qa_1 takes its questions from a file; give --squad FILE"),
        ("ruler", ["--tasks", ","], "--tasks names nothing; give such as niah_single_2,vt"),
        ("ruler", ["--data", "a.jsonl", "--samples", "0"], "the number of samples is 0"),
        ("ruler", ["--samples", "0"], "the number of samples is 0"),
        ("ruler", ["--squad", "mine.json"], "--squad is for qa_1, which is not among the --tasks"),
        ("ruler", ["--tasks", "qa_2", "--hotpotqa", "none.json"], "cannot read 'none.json'"),
        ("ruler", ["--data", "a.jsonl", "--tasks", "vt"], "--tasks has no effect here: a file of"),
        ("ruler", ["--data", "a.jsonl", "--seed", "0"], "--seed has no effect here: a file of"),
        ("ruler", ["--tasks", "poems"], "there is no task 'poems'"),
        ("longbench", ["--folder", "nowhere", "--tasks", "trec"], "there is no folder 'nowhere'"),
        ("longbench", ["--tasks", "trec"], "'zai-org/LongBench' from the hub: it is not in the"),
        ("own", ["--data", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_mistakes_end_in_one_sentence(
    model_folder, tmp_path, monkeypatch, benchmark, arguments, message
):
    monkeypatch.chdir(tmp_path)
    given = {"needle": NEEDLE, "ruler": [], "longbench": [], "own": []}[benchmark]
    done = evaluate(benchmark, model_folder, tmp_path / "run", *given, *arguments)
    assert done.returncode == 2, done.stdout.decode()
    lines = done.stderr.decode().strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert "samples.jsonl" not in os.listdir(tmp_path)


def test_a_folder_with_another_run_is_refused(model_folder, tmp_path):
    assert evaluate("needle", model_folder, tmp_path / "run", *NEEDLE).returncode == 0
    other = evaluate("needle", model_folder, tmp_path / "run", *NEEDLE, "--seed", "5")
    assert other.returncode == 2
    assert b"holds another run" in other.stderr


def test_the_best_is_that_of_the_same_budget():
    """Hand-made: a scores 50, b and d 75 with one amount; c is alone with another."""
    scores = {"full": 1.0, "a": 0.5, "b": 0.75, "c": 0.25, "d": 0.75}

    def pair(first, second, interval):
        change = scores[first] - scores[second]
        return {"first": first, "second": second, "difference": change} | {
            "difference_interval": interval
        }

    described = {name: {"score": score} for name, score in scores.items()}
    pairs = [pair("b", "a", [0.0, 0.5]), pair("b", "d", [-0.1, 0.1]), pair("a", "d", [-1, 0])]
    group = {"arms": described, "pairs": pairs}
    shown = [_against_best(group, arm) for arm in scores]
    assert shown == ["-", "-25.0 (-50.0 to +0.0)", "-", "-", "-"]
    turned = {"arms": described, "pairs": [pair("a", "b", [-1, 0])]}
    assert _against_best(turned, "a") == "-25.0 (-100.0 to +0.0)"


def test_without_a_terminal_the_time_left_is_told_once_a_minute(monkeypatch, capsys):
    """10 of 50 were done before; each further one takes 45 s."""
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with display.progress_with_time_left("samples") as report:
        report(10, 50)
        for done in range(11, 15):
            now += 45
            report(done, 50)
    assert capsys.readouterr().err.splitlines() == [
        "12 of 50 samples, 0 h 28 min left",
        "14 of 50 samples, 0 h 27 min left",
    ]
