"""A real server process and a real client: what `pyramidkv serve` starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec

import pytest
from conftest import tiny_tokenizer
from test_serving_vllm import (  # noqa: F401
    BLOCK,
    BUDGET,
    LAYERS,
    LENGTHS,
    expected,
    folder,
    prompts,
)

from pyramidkv.vllm.settings import read_settings

if find_spec("vllm") is None:
    pytest.skip("needs vLLM (make test-vllm)", allow_module_level=True)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):  # noqa: F811
    """The address of a server with the tiny model, and its log."""
    tiny_tokenizer(chat=True).save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    options = [
        *("--budget", "64", "--window-size", "16", "--kernel-size", "7"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "640", "--block-size", "32", "--max-num-seqs", "8"),
        *("--enforce-eager", "--gpu-memory-utilization", "0.1", "--served-model-name", "tiny"),
    ]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # as users run it
    code = "from pyramidkv.cli import main; main()"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", folder, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield address, log
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def ask(address, path, **body):
    request = urllib.request.Request(
        f"{address}{path}",
        json.dumps({"model": "tiny", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_answers_are_those_of_the_transformers_engine(server, folder):  # noqa: F811
    address, log = server
    wanted = expected(folder, prompts())
    told = tiny_tokenizer(chat=True)
    answer = ask(
        address,
        "/v1/completions",
        prompt=prompts(),
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text.split() for text in texts] == [
        told.decode(ids, skip_special_tokens=True).split() for ids in wanted
    ]
    assert answer["usage"]["prompt_tokens"] == sum(LENGTHS)
    shown = log.read_text()
    assert "groups of layers, lowest first, keep" in shown
    assert "pyramidkv: a prompt of 640 tokens: 80 blocks while it is processed, " in shown


def test_a_chat_and_a_prompt_that_is_too_long(server):
    address, _ = server
    messages = [{"role": "user", "content": " ".join(["w7 w9 w12"] * 100)}]
    answer = ask(address, "/v1/chat/completions", messages=messages, max_tokens=5, temperature=0)
    assert answer["usage"]["prompt_tokens"] == 302
    assert answer["usage"]["completion_tokens"] <= 5
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address, "/v1/completions", prompt=[5] * 700, max_tokens=5)
    assert refused.value.code == 400
    assert "640" in json.load(refused.value)["error"]["message"]


def counts(address):
    """The plugin's counters, as vLLM's metrics page has them."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    assert any(line.startswith("vllm:num_requests_running") for line in lines)
    own = (line.split() for line in lines if line.startswith("pyramidkv:"))
    return {name.removeprefix("pyramidkv:"): float(value) for name, value in own}


def test_the_metrics_page_tells_what_was_kept_and_freed(server):
    address, _ = server
    before = counts(address)
    asked = prompts(60)
    ask(address, "/v1/completions", prompt=asked, max_tokens=3, temperature=0, ignore_eos=True)
    grown = {name: value - before.get(name, 0.0) for name, value in counts(address).items()}
    settings = read_settings(BUDGET, LAYERS)
    kept = [settings.kept(len(ids), BLOCK) for ids in asked]
    freed = sum(settings.freed_blocks(len(ids), BLOCK) for ids in asked)
    assert grown["prompt_tokens_total"] == sum(map(len, asked))
    assert grown["kept_prompt_tokens_total"] == sum(sum(one) / len(one) for one in kept)
    assert grown["freed_blocks_total"] == freed > 0
    assert 0 < grown["compaction_seconds_total"] < 60
