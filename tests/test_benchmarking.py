"""What `bench` measures: every arm, in turns, with the bytes that are really held."""

from __future__ import annotations

import json

import pytest
import torch
from test_cli import Outcome, assert_one_sentence
from tiny import tiny_model

from pyramidkv.benchmarking import BASELINE, BenchError, run_bench
from pyramidkv.budgets import BudgetError
from pyramidkv.compression import make_compression

SMALL = {"window_size": 6, "kernel_size": 5}
ARMS = [
    make_compression("full"),
    make_compression("snapkv", 24, **SMALL),
    make_compression("adakv", 24, **SMALL),
    make_compression("pyramidkv", 48, **SMALL),
]
WIDTH = 4 * 2 * 8 * 2 * 4  # bytes of a token: layers, KV heads, head dimension, keys and values


def test_every_arm_is_measured_and_holds_what_it_should():
    model = tiny_model("llama", "sdpa")
    turns = []
    record = run_bench(
        model, ARMS, [60, 100], [1, 3], steps=4, repeats=2, on_run=lambda *n: turns.append(n)
    )
    names = [BASELINE, "full", "snapkv 24", "adakv 24", "pyramidkv 48"]
    results = record["results"]
    assert [(r["length"], r["batch"], r["arm"]) for r in results] == [
        (length, batch, name) for length in (60, 100) for batch in (1, 3) for name in names
    ]
    assert turns == [(i + 1, 60) for i in range(60)]
    for result in results:
        kept = {"snapkv 24": 24, "adakv 24": 24, "pyramidkv 48": 48}
        tokens = kept.get(result["arm"], result["length"])
        assert result["kv_bytes"] == result["batch"] * tokens * WIDTH
        for name in ("prefill_s", "step_s", "tokens_per_s"):
            spread = result[name]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert (0 < result["compress_share"] < 1) == (result["arm"] != BASELINE)
        assert result["peak_bytes"] > 0
        assert (result["against"] == {"prefill": 1, "step": 1}) == (result["arm"] == BASELINE)
    assert record["model"]["attn_implementation"] == "sdpa" == model.config._attn_implementation
    assert json.loads(json.dumps(record)) == record


def test_the_same_seed_gives_the_same_prompts():
    model, seen = tiny_model("llama", "sdpa"), []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for seed in (0, 0, 1):
        run_bench(model, ARMS[1:2], [60], steps=1, repeats=1, seed=seed)
    prompts = [ids for ids in seen if ids.shape[1] == 60]
    assert len(prompts) == 12
    assert all(torch.equal(ids, prompts[0]) for ids in prompts[:8])
    assert not torch.equal(prompts[8], prompts[0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lengths": []}, BenchError, "lengths is []; give whole numbers"),
        ({"lengths": [60, 0]}, BenchError, "lengths is [60, 0]; give whole numbers"),
        ({"batches": [0]}, BenchError, "batches is [0]; give whole numbers"),
        ({"steps": 0}, BenchError, "steps is [0]; give whole numbers"),
        ({"repeats": 0}, BenchError, "repeats is [0]; give whole numbers"),
        ({"lengths": [10**6]}, BenchError, "1,000,000 tokens and 4 more do not fit"),
        ({"compressions": [ARMS[1]] * 2}, BenchError, "snapkv 24 is given twice"),
        (
            {"compressions": [make_compression("snapkv", None, 0.9, **SMALL)]},
            BudgetError,
            "leaves 6 of 60 prompt tokens",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(changes, error, message):
    given = {"compressions": ARMS, "lengths": [60], "steps": 4, "repeats": 1}
    model = tiny_model("llama", "sdpa")
    model.register_forward_pre_hook(lambda *_: pytest.fail("something was run"))
    with pytest.raises(error) as caught:
        run_bench(model, **{**given, **changes})
    assert message in str(caught.value)


def test_the_command_shows_and_writes_what_it_measured(model_folder, tmp_path, capsys, monkeypatch):
    record, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    outcome = Outcome(
        *(capsys, monkeypatch, "bench", "--model", model_folder, "--lengths", "60,80"),
        *("--methods", "full,snapkv,adakv", "--budgets", "24,40", "--window-size", 6),
        *("--batch", "1,2", "--steps", 2, "--repeats", 1, "--threads", torch.get_num_threads()),
        *("--output", record, "--plot", picture),
    )
    assert outcome.exit_code == 0, outcome.stderr
    written = json.loads(record.read_text())
    arms = [BASELINE, "full", "snapkv 24", "snapkv 40", "adakv 24", "adakv 40"]
    assert [r["arm"] for r in written["results"]] == arms * 4
    for told in ("Prompts of 60 tokens", "Prompts of 80 tokens, 2 at a time", *arms):
        assert told in outcome.stdout
    drawn = picture.read_text()
    for told in ("time per token (ms)", "tokens per second", *arms):
        assert told in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "60,x"], "whole numbers"),
        (["--lengths", "60", "--steps", 0], "steps is [0]"),
        (["--methods", "fast"], "unknown method 'fast'"),
        (["--budgets", "5"], "smallest possible budget is 36"),
        (["--threads", 0], "--threads is 0; give at least 1"),
        (["--lengths", "1000000"], "do not fit the model's context"),
        (["--plot", "a.txt"], "a.txt"),
    ],
)
def test_mistakes_end_in_one_sentence(model_folder, arguments, message, capsys, monkeypatch):
    given = ["bench", "--model", model_folder, "--repeats", 1, *arguments]
    assert_one_sentence(Outcome(capsys, monkeypatch, *given), message)
