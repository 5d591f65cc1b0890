"""`pyramidkv serve` without vLLM: the command it would run, and what it refuses."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise

import pytest
from test_cli import run


def arguments(done):
    assert done.returncode == 0, done.stderr.decode()
    return shlex.split(done.stdout.decode())


def test_the_command_has_our_classes_our_settings_and_what_is_vllms(model_folder):
    done = run(
        "serve",
        model_folder,
        *("--budget", "64", "--window-size", "16", "--groups", "2", "--dry-run"),
        *("--device", "cpu"),
        *("--port", "8123", "--max-model-len", "512", "--no-enable-prefix-caching"),
    )
    given = arguments(done)
    assert given[:3] == ["python", "-m", "pyramidkv.vllm.server"]
    pairs = dict(pairwise(given))
    assert pairs["--model"] == str(model_folder)
    assert pairs["--worker-cls"] == "pyramidkv.vllm.worker.CompressedCPUWorker"
    assert pairs["--scheduler-cls"] == "pyramidkv.vllm.scheduling.CompressedScheduler"
    assert json.loads(pairs["--additional-config"]) == {
        "pyramidkv": {
            "method": "pyramidkv",
            "budget": 64,
            "groups": 2,
            "min_prompt": 0,
            "window_size": 16,
        }
    }
    assert given[-5:] == ["--port", "8123", "--max-model-len", "512", "--no-enable-prefix-caching"]
    assert "groups of layers, lowest first, keep 106, 22 tokens" in done.stderr.decode()


@pytest.mark.parametrize(
    ("extra", "scheduler"),
    [
        ([], "CompressedAsyncScheduler"),
        (["--async-scheduling"], "CompressedAsyncScheduler"),
        (["--no-async-scheduling"], "CompressedScheduler"),
        (["--no_async_scheduling"], "CompressedScheduler"),
    ],
    ids=str,
)
def test_gpus_have_classes_of_their_own(model_folder, extra, scheduler):
    done = run("serve", model_folder, "--budget", "64", "--device", "cuda", "--dry-run", *extra)
    given = arguments(done)
    pairs = dict(pairwise(given))
    assert pairs["--worker-cls"] == "pyramidkv.vllm.gpu_worker.CompressedGPUWorker"
    assert pairs["--scheduler-cls"] == f"pyramidkv.vllm.scheduling.{scheduler}"
    assert pairs["--attention-backend"] == "CUSTOM"
    assert given[len(given) - len(extra) :] == extra


@pytest.mark.parametrize("form", ["--additional-config={}", "--additional-config {}"])
def test_other_settings_for_vllm_stay(model_folder, form):
    extra = form.format('{"other":1}').split(" ")
    given = arguments(run("serve", model_folder, "--budget", "64", *extra, "--dry-run"))
    config = json.loads(given[given.index("--additional-config") + 1])
    assert config == {
        "other": 1,
        "pyramidkv": {"method": "pyramidkv", "budget": 64, "min_prompt": 0},
    }
    assert sum(part.startswith("--additional") for part in given) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give pyramidkv either a budget"),
        (["--budget", "64", "--groups", "3"], "groups is 3; it must divide the model's 4 layers"),
        (["--budget", "20"], "the smallest possible budget is 36"),
        (["--budget", "64", "--method", "h2o"], "h2o does not support serving with vLLM"),
        (["--budget", "64", "--worker-cls", "x"], "--worker-cls is set by pyramidkv serve"),
        (["--budget", "64", "--scheduler_cls=x"], "--scheduler_cls is set by pyramidkv serve"),
        (["--budget", "64", "--attention-backend=x"], "--attention-backend is set by pyramidkv"),
        (["--budget", "64", "--device", "gpu"], "device is 'gpu'; give one of cpu, cuda"),
        (["--budget", "64", "--additional-config", "[1]"], "must be a JSON object without"),
        (["--budget", "64", "--additional-config={"], "must be a JSON object without"),
    ],
)
def test_mistakes_end_in_one_sentence(model_folder, given, message):
    done = run("serve", model_folder, *given, "--dry-run")
    assert done.returncode == 2, done.stdout.decode()
    lines = done.stderr.decode().strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
