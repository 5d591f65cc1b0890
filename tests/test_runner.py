"""Runs: resumed they are what they would have been, shards add up, other settings are refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import tiny_tokenizer, words
from tiny import tiny_model

from pyramidkv.compression import make_compression
from pyramidkv.evaluation import runner
from pyramidkv.evaluation.folders import EvaluationError, Shard, read_lines, read_settings
from pyramidkv.evaluation.runner import name_arms, run
from pyramidkv.evaluation.sample import Sample

WINDOW = {"window_size": 6, "kernel_size": 5}
ARMS = name_arms(
    [
        make_compression("full"),
        make_compression("pyramidkv", 24, **WINDOW),
        make_compression("snapkv", 24, **WINDOW),
    ]
)


def make_samples(count=8):
    return [
        Sample(
            task="copy" if index % 2 else "find",
            index=index // 2,
            context=words(60 + 3 * index),
            question=f"w{9 + index} w5",
            answers=(f"w{20 + index}",),
            metric="match_all",
            max_new_tokens=6,
            facts={"length": 128, "depth": 10 * index},
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", "sdpa")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(chat=False)


def test_a_run_has_every_sample_with_the_answers_of_all_arms(model, tokenizer, tmp_path):
    seen = []
    run(model, tokenizer, make_samples(), ARMS, tmp_path, on_sample=lambda *a: seen.append(a))
    lines = list(read_lines(tmp_path))
    assert [(line["task"], line["index"]) for line in lines] == [
        (sample.task, sample.index) for sample in make_samples()
    ]
    assert seen == [(n, 8) for n in range(9)]
    run(model, tokenizer, make_samples(), ARMS, tmp_path, on_sample=lambda *a: seen.append(a))
    assert seen[9:] == [(8, 8)]
    for line in lines:
        assert list(line["arms"]) == ["full", "pyramidkv 24", "snapkv 24"]
        full, pyramid, snap = line["arms"].values()
        assert full["kept_tokens"] == full["full_tokens"] == 4 * line["prompt_tokens"]
        assert pyramid["kept_tokens"] == snap["kept_tokens"] == 4 * 24
        assert pyramid["kept_bytes"] == 96 * 128
        assert full["footprint"] == 1 > pyramid["footprint"]
    asked = read_settings(tmp_path)["asked"]
    assert asked["arms"]["snapkv 24"]["budget"] == 24
    assert asked["samples"] == 8


def test_going_on_does_nothing_again_and_loses_nothing(model, tokenizer, tmp_path, monkeypatch):
    run(model, tokenizer, make_samples(), ARMS, tmp_path / "whole")
    expected = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    answered = []
    real = runner.answer

    def failing(model, tokenizer, sample, *rest):
        if len(answered) == 3 and not failing.healed:
            failing.healed = True
            raise KeyboardInterrupt
        answered.append((sample.task, sample.index))
        return real(model, tokenizer, sample, *rest)

    failing.healed = False
    monkeypatch.setattr(runner, "answer", failing)
    with pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, make_samples(), ARMS, tmp_path / "cut")
    assert len(list(read_lines(tmp_path / "cut"))) == 3  # readable meanwhile
    run(model, tokenizer, make_samples(), ARMS, tmp_path / "cut")
    assert len(answered) == len(set(answered)) == 8
    assert (tmp_path / "cut" / "samples.jsonl").read_bytes() == expected
    run(model, tokenizer, make_samples(), ARMS, tmp_path / "cut")
    assert len(answered) == 8


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_line_that_was_cut_off_is_answered_again(model, tokenizer, tmp_path, cut):
    run(model, tokenizer, make_samples(4), ARMS, tmp_path)
    path = tmp_path / "samples.jsonl"
    expected = path.read_bytes()
    path.write_bytes(expected[:-cut])
    assert len(list(read_lines(tmp_path))) == 3
    run(model, tokenizer, make_samples(4), ARMS, tmp_path)
    assert path.read_bytes() == expected


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_runner import ARMS, make_samples
from conftest import tiny_tokenizer
from tiny import tiny_model
from pathlib import Path
from pyramidkv.evaluation.runner import run
model, tokenizer = tiny_model("llama", "sdpa"), tiny_tokenizer(chat=False)
run(model, tokenizer, make_samples(40), ARMS, Path({folder!r}))
"""


def test_killed_at_random_moments_it_ends_as_if_it_never_was(model, tokenizer, tmp_path):
    run(model, tokenizer, make_samples(40), ARMS, tmp_path / "whole")
    expected = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    folder = tmp_path / "killed"
    script = SCRIPT.format(tests=os.path.dirname(__file__), folder=str(folder))
    path = folder / "samples.jsonl"
    moments = random.Random(0)

    def size():
        return path.stat().st_size if path.exists() else 0

    for _ in range(5):
        before = size()
        child = subprocess.Popen([sys.executable, "-c", script])
        while size() <= before:  # until it answers samples
            assert child.poll() is None
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.15))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert before < size() < len(expected)
    subprocess.run([sys.executable, "-c", script], check=True)
    assert path.read_bytes() == expected


def test_shards_add_up_to_the_whole(model, tokenizer, tmp_path):
    run(model, tokenizer, make_samples(7), ARMS, tmp_path / "whole")
    for number in (2, 1, 3):
        run(model, tokenizer, make_samples(7), ARMS, tmp_path / "parts", shard=Shard(number, 3))
    assert sorted(os.listdir(tmp_path / "parts")) == [
        *(f"run-{n}-of-3.json" for n in (1, 2, 3)),
        *(f"samples-{n}-of-3.jsonl" for n in (1, 2, 3)),
    ]

    def keyed(folder):
        return {(line["task"], line["index"]): line for line in read_lines(folder)}

    assert keyed(tmp_path / "parts") == keyed(tmp_path / "whole")
    assert len(list(read_lines(tmp_path / "parts"))) == 7
    assert read_settings(tmp_path / "parts")["asked"] == read_settings(tmp_path / "whole")["asked"]


def test_another_run_is_not_mixed_in(model, tokenizer, tmp_path):
    run(model, tokenizer, make_samples(3), ARMS, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    fewer = {name: ARMS[name] for name in ("full", "snapkv 24")}
    for changes, words_ in (
        ({"samples": make_samples(4)}, "content, samples"),
        ({"arms": fewer}, "arms"),
        ({"agnostic": True}, "agnostic"),
        ({"limit": 100}, "limit"),
        ({"settings": {"seed": 1}}, r"settings \(seed\)"),
        ({"agnostic": True, "shard": Shard(1, 2)}, "agnostic"),
    ):
        given = {"samples": make_samples(3), "arms": ARMS, **changes}
        with pytest.raises(EvaluationError, match=f"holds another run: it differs in {words_};"):
            run(model, tokenizer, given.pop("samples"), given.pop("arms"), tmp_path, **given)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_mistakes_are_told_in_a_sentence(tmp_path):
    for number, count in ((0, 2), (3, 2), (1, 0)):
        with pytest.raises(EvaluationError, match="give I/N with I from 1 to N"):
            Shard(number, count)
    with pytest.raises(EvaluationError, match="snapkv 64 is given twice"):
        name_arms([make_compression("snapkv", 64)] * 2)
    with pytest.raises(EvaluationError, match=r"there is no run .* no samples\.jsonl"):
        list(read_lines(tmp_path))
    with pytest.raises(EvaluationError, match=r"there is no run .* no run\.json"):
        read_settings(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(EvaluationError, match="cannot be used: is not JSON"):
        read_settings(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(EvaluationError, match="does not say what was asked for"):
        read_settings(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="cannot make"):
        runner._settle(tmp_path / "file" / "folder", Shard(), {}, {})


def test_lines_are_plain_json(model, tokenizer, tmp_path):
    run(model, tokenizer, make_samples(2), ARMS, tmp_path)
    for raw in (tmp_path / "samples.jsonl").read_text().splitlines():
        assert json.loads(raw)["arms"]["full"]["score"] in (0.0, 1.0)
