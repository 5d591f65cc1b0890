"""The attention for GPUs inside vLLM, on a CPU: its tokens are those of the transformers engine.

Kernels and CUDA graphs are not what runs here; `gpu_on_cpu` says what does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from test_serving_vllm import (  # skips without vLLM
    BLOCK,
    BUDGET,
    LAYERS,
    expected,
    folder,  # noqa: F401
    prompts,
)

from pyramidkv.vllm.settings import read_settings

RUNNERS = {1: "vllm.v1.worker.cpu_model_runner", 2: "vllm.v1.worker.cpu.model_runner"}


def serve(folder, asked, runner=1, ahead=False, steps=12, given=BUDGET, **options):  # noqa: F811
    """Return what happened when vLLM answered twice, in a process of its own."""
    script = os.path.join(os.path.dirname(__file__), "gpu_on_cpu.py")
    request = {
        "folder": folder,
        "given": given,
        "asked": asked,
        "steps": steps,
        "options": options,
        "ahead": ahead,
        "runner": runner,
    }
    done = subprocess.run(
        [sys.executable, script, json.dumps(request)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["runner"] == RUNNERS[runner]
    assert told["ahead"] is ahead
    assert told["leaked"] == 0
    assert told["addresses"] == read_settings(given, LAYERS).groups  # one table and length each
    return told


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("runner", [1, 2])
def test_tokens_are_those_of_the_transformers_engine(folder, runner, ahead):  # noqa: F811
    """In chunks, with prefixes taken from earlier requests the second time."""
    asked = prompts()
    told = serve(folder, asked, runner, ahead, max_num_batched_tokens=96)
    assert told["answers"] == [expected(folder, asked)] * 2
    settings = read_settings(BUDGET, LAYERS)
    for ids, hit in zip(asked, told["hits"], strict=True):
        most = min(
            settings.skipped_blocks(group, len(ids), BLOCK) for group in range(settings.groups)
        )
        assert hit <= most * BLOCK
    assert max(told["hits"]) > 0


@pytest.mark.parametrize("runner", [1, 2])
def test_preempted_requests_go_on_as_if_they_had_not_been(folder, runner):  # noqa: F811
    asked = prompts(7, [200, 190, 210, 180, 60, 200, 70, 220])
    told = serve(folder, asked, runner, ahead=True, steps=90, num_gpu_blocks_override=88)
    assert told["answers"] == [expected(folder, asked, steps=90)] * 2
    assert any(count > 0 for count in told["preempted"])


def test_a_window_of_one_token_is_computed_with_more(folder):  # noqa: F811
    """Since a step of one token per request may be the replay of a graph."""
    method = {"method": "streamingllm", "budget": 50, "window_size": 1}
    asked = prompts(0, [97, 98, 130, 129])
    told = serve(folder, asked, given=method, max_num_batched_tokens=32, max_num_seqs=4)
    assert told["answers"] == [expected(folder, asked, method)] * 2


def test_guessed_tokens_change_nothing(folder):  # noqa: F811
    asked = [*(ids[:40] * 5 for ids in prompts(3, [40, 40, 40])), *prompts(0, [200])]
    guessing = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    told = serve(folder, asked, steps=60, speculative_config=guessing)
    assert told["answers"] == [expected(folder, asked, steps=60)] * 2
    assert told["accepted"] > 0
