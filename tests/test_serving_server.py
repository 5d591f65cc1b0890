"""A real server process and a real client: what `pyramidkv serve` starts."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from importlib.util import find_spec

import pytest
from conftest import tiny_tokenizer, words
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

import openai
import servers
from serving_soak import come_to_rest

LONGEST = 4000  # long enough for a client to leave an answer before its end


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):  # noqa: F811
    """A server with the tiny model."""
    tiny_tokenizer(chat=True).save_pretrained(folder)
    options = [
        *("--budget", "64", "--window-size", "16", "--kernel-size", "7", "--dtype", "float32"),
        *("--max-model-len", str(LONGEST), "--block-size", "32", "--max-num-seqs", "8"),
        *("--hf-overrides", json.dumps({"max_position_embeddings": LONGEST})),
        *("--enforce-eager", "--served-model-name", servers.NAME),
    ]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    start = servers.Start(servers.PLUGIN, folder, options, servers.environment(1), log)
    with servers.running(start) as (started,):
        yield started


@pytest.fixture(scope="module")
def client(server):
    """The official client."""
    with openai.OpenAI(
        base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120
    ) as found:
        yield found


def ask(server, path, **body):
    request = urllib.request.Request(
        f"{server.address}{path}",
        json.dumps({"model": servers.NAME, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_answers_are_those_of_the_transformers_engine(server, folder):  # noqa: F811
    wanted = expected(folder, prompts())
    told = tiny_tokenizer(chat=True)
    answer = ask(
        server,
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
    shown = server.log.read_text()
    assert "groups of layers, lowest first, keep" in shown
    assert "pyramidkv: a prompt of 4,000 tokens: 500 blocks while it is processed, " in shown


def test_a_chat_and_a_prompt_that_is_too_long(server):
    messages = [{"role": "user", "content": " ".join(["w7 w9 w12"] * 100)}]
    answer = ask(server, "/v1/chat/completions", messages=messages, max_tokens=5, temperature=0)
    assert answer["usage"]["prompt_tokens"] == 302
    assert answer["usage"]["completion_tokens"] <= 5
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, "/v1/completions", prompt=[5] * (LONGEST + 60), max_tokens=5)
    assert refused.value.code == 400
    assert str(LONGEST) in json.load(refused.value)["error"]["message"]


def complete(client, **asked):
    """Ask for a completion of one of the prompts, whose end the model does not choose."""
    standard = {"model": servers.NAME, "prompt": prompts()[1], "max_tokens": 20, "temperature": 0}
    return client.completions.create(**(standard | asked), extra_body={"ignore_eos": True})


def test_completions_of_the_official_client(client):
    answer = complete(client, logprobs=3)
    (choice,) = answer.choices
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (LENGTHS[1], 20)
    assert choice.finish_reason == "length"
    found = choice.logprobs
    assert len(found.token_logprobs) == len(found.top_logprobs) == 20
    for own, likely in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert len(likely) == 3
        assert own == max(likely.values()) < 0


def test_streamed_text_is_the_unstreamed_one(client):
    parts = [part.choices[0].text for part in complete(client, stream=True) if part.choices]
    assert len(parts) > 5
    assert "".join(parts) == complete(client).choices[0].text


def test_chats_of_the_official_client_streamed_or_not(client):
    asked = {
        "model": servers.NAME,
        "messages": [{"role": "user", "content": words(300)}],
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (302, 20)
    likely = whole.choices[0].logprobs.content
    assert len(likely) == 20
    assert all(token.logprob == token.top_logprobs[0].logprob for token in likely)
    parts = [
        part.choices[0].delta.content or ""
        for part in client.chat.completions.create(**asked, stream=True)
        if part.choices
    ]
    assert len(parts) > 5
    assert "".join(parts) == whole.choices[0].message.content


def test_the_same_seed_gives_the_same_text_and_several_answers_differ(client):
    first, again, other = (
        complete(client, temperature=1, seed=seed).choices[0].text for seed in (5, 5, 6)
    )
    assert first == again != other
    two, once_more = (
        [choice.text for choice in complete(client, temperature=1, seed=5, n=2).choices]
        for _ in range(2)
    )
    assert two == once_more
    assert len(set(two)) == 2


def test_a_prompt_that_is_too_long_is_refused_with_the_length(client):
    with pytest.raises(openai.BadRequestError, match=str(LONGEST)):
        complete(client, prompt=[5] * (LONGEST + 60))
    with pytest.raises(openai.BadRequestError, match=str(LONGEST)):
        client.chat.completions.create(
            model=servers.NAME, messages=[{"role": "user", "content": words(LONGEST)}]
        )


def test_who_leaves_a_stream_leaves_no_blocks(server, client):
    prompt, new = prompts(30, [100])[0], LONGEST - 100
    made = server.metrics()["vllm:generation_tokens_total"]
    with complete(client, prompt=prompt, max_tokens=new, stream=True) as stream:
        for _ in range(3):
            next(stream)
        while server.metrics()["vllm:kv_cache_usage_perc"] == 0:
            next(stream)  # the gauge may lag behind; the answer's end would end the test
    assert asyncio.run(come_to_rest(server)) == []
    assert 3 <= server.metrics()["vllm:generation_tokens_total"] - made < new


def test_the_metrics_page_tells_what_was_kept_and_freed(server):
    before, asked = server.metrics(), prompts(60)
    ask(server, "/v1/completions", prompt=asked, max_tokens=3, temperature=0, ignore_eos=True)
    grown = {
        name.removeprefix("pyramidkv:"): value - before.get(name, 0.0)
        for name, value in server.metrics().items()
        if name.startswith("pyramidkv:")
    }
    settings = read_settings(BUDGET, LAYERS)
    kept = [settings.kept(len(ids), BLOCK) for ids in asked]
    freed = sum(settings.freed_blocks(len(ids), BLOCK) for ids in asked)
    assert grown["prompt_tokens_total"] == sum(map(len, asked))
    assert grown["kept_prompt_tokens_total"] == sum(sum(one) / len(one) for one in kept)
    assert grown["freed_blocks_total"] == freed > 0
    assert 0 < grown["compaction_seconds_total"] < 60
