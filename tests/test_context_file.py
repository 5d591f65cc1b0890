"""Saved contexts: whole or not at all, mapped, and refused in one sentence when they do not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from conftest import tiny_tokenizer, words
from safetensors.torch import load_file, save_file
from tiny import tiny_model

import pyramidkv
from pyramidkv import context_file
from pyramidkv.context_file import _write_checksum
from pyramidkv.errors import ContextFileError
from pyramidkv.methods import METHODS
from pyramidkv.prompts import Turn

SMALL = {"budget": 24, "window_size": 6, "kernel_size": 5}
QUESTION = "w11 w20 w3"


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", "sdpa")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(True)


@pytest.fixture(scope="module")
def context(model, tokenizer):
    return pyramidkv.compress_context(model, tokenizer, words(90), **SMALL)


@pytest.fixture(scope="module")
def saved(context, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "context.safetensors"
    context.save(path)
    return path


def load(path, model, tokenizer):
    return pyramidkv.CompressedContext.load(path, model, tokenizer)


def assert_refused(path, model, tokenizer, match=None):
    with pytest.raises(ContextFileError, match=match) as caught:
        load(path, model, tokenizer)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 400 + len(str(path))
    return message


def parts(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path, header, body):
    """Write a file with this header and a checksum that is right for it."""
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)
    _blank_checksum(path)
    if context_file._CHECKSUM.search(path.read_bytes()):
        _write_checksum(path)
    return path


def _blank_checksum(path):
    data = path.read_bytes()
    found = context_file._CHECKSUM.search(data)
    if found is None:
        return
    path.write_bytes(data[: found.start(1)] + b"0" * 64 + data[found.end(1) :])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_context_is_the_same_and_answers_the_same(
    architecture, dtype, tokenizer, tmp_path
):
    model = tiny_model(architecture, "eager").to(dtype)
    context = pyramidkv.compress_context(model, tokenizer, words(90), **SMALL)
    path = tmp_path / "context.safetensors"
    context.save(path)
    loaded = load(path, model, tokenizer)
    assert loaded.text == context.text
    assert loaded.token_ids == context.token_ids
    assert loaded.record == json.loads(json.dumps(context.record))
    assert loaded.cache.compression == context.cache.compression
    assert loaded.cache.kept_lengths() == context.cache.kept_lengths()
    assert loaded.kv_bytes == context.kv_bytes
    assert loaded.cache.tokens_seen == context.tokens_seen
    for a, b in zip(loaded.cache.compressed_layers, context.cache.compressed_layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.kept_positions(), b.kept_positions())
    for question in (QUESTION, "w7"):
        expected = context.ask(question, max_new_tokens=8).token_ids
        assert loaded.ask(question, max_new_tokens=8).token_ids == expected
    again = tmp_path / "again.safetensors"
    loaded.save(again)
    assert load(again, model, tokenizer).ask("w7", max_new_tokens=8).token_ids == expected


def test_loading_needs_no_prompt_pass_and_maps_keys_and_values(saved, tokenizer, monkeypatch):
    model = tiny_model("llama", "sdpa")
    monkeypatch.setattr(type(model), "forward", None)
    monkeypatch.setattr(type(model.model), "forward", None)
    loaded = load(saved, model, tokenizer)
    mapped = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in mapped if saved.name in line]
    assert mapped, "the file is not mapped"
    storages = {
        t.untyped_storage().data_ptr()
        for layer in loaded.cache.compressed_layers
        for t in (layer.keys, layer.values)
    }
    ranges = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in mapped]
    for place in storages:
        assert any(low <= place < high for low, high in ranges)


def test_using_a_loaded_cache_itself_does_not_write_to_the_file(saved, model, tokenizer):
    before = saved.read_bytes()
    loaded = load(saved, model, tokenizer)
    with torch.no_grad():
        for _ in range(3):
            model(torch.tensor([[5]]), past_key_values=loaded.cache)
    assert saved.read_bytes() == before


def test_a_decode_budget_goes_on_after_loading(model, tokenizer, tmp_path):
    for name in ("h2o", "pyramidkv", "streamingllm"):
        context = pyramidkv.compress_context(
            model,
            tokenizer,
            words(90),
            name,
            24,
            decode_budget=26,
            decode_interval=3,
            window_size=6,
        )
        context.save(tmp_path / "context.safetensors")
        loaded = load(tmp_path / "context.safetensors", model, tokenizer)
        expected = context.ask(QUESTION, max_new_tokens=30).token_ids
        assert loaded.ask(QUESTION, max_new_tokens=30).token_ids == expected


def test_a_conversation_can_be_saved_with_its_context(context, model, tokenizer, tmp_path):
    chat = context.chat()
    chat.ask(QUESTION, max_new_tokens=5)
    path = tmp_path / "chat.safetensors"
    chat.save(path)
    resumed = load(path, model, tokenizer).chat()
    assert resumed.turns == chat.turns == [Turn(QUESTION, chat.turns[0].answer)]
    expected = chat.ask("w7 w8", max_new_tokens=5).token_ids
    assert resumed.ask("w7 w8", max_new_tokens=5).token_ids == expected


@pytest.mark.parametrize("options", [{"allocation": "power", "gamma": 2.0}, {"beta": 5}])
def test_every_setting_comes_back(options, model, tokenizer, tmp_path):
    context = pyramidkv.compress_context(model, tokenizer, words(90), **SMALL, **options)
    context.save(tmp_path / "c.safetensors")
    loaded = load(tmp_path / "c.safetensors", model, tokenizer)
    assert loaded.cache.compression == context.cache.compression
    listed = pyramidkv.compress_context(
        model, tokenizer, words(90), "snapkv", layer_budgets=[40, 50, 60, 70]
    )
    listed.save(tmp_path / "c.safetensors")
    loaded = load(tmp_path / "c.safetensors", model, tokenizer)
    assert loaded.cache.compression == listed.cache.compression


def test_another_model_type_or_tokenizer_is_refused(saved, model, tokenizer):
    other = tiny_model("llama", "sdpa", seed=1)
    assert_refused(saved, other, tokenizer, "made with another model")
    assert_refused(saved, tiny_model("qwen3", "sdpa"), tokenizer, "made with another model")
    half = tiny_model("llama", "sdpa").to(torch.bfloat16)
    assert_refused(saved, half, tokenizer, "made in float32, but the model is in bfloat16")
    assert_refused(saved, model, tiny_tokenizer(False), "another tokenizer or chat template")
    with torch.no_grad():
        other = tiny_model("llama", "sdpa")
        other.model.layers[2].self_attn.k_proj.weight[0, 0] += 1
    assert_refused(saved, other, tokenizer, "made with another model")


def test_foreign_newer_and_missing_files_are_refused(saved, model, tokenizer, tmp_path):
    path = tmp_path / "other.safetensors"
    assert_refused(path, model, tokenizer, "No such file")
    assert_refused(tmp_path, model, tokenizer, "is no plain file")
    save_file({"weight": torch.zeros(3)}, path)
    assert_refused(path, model, tokenizer, "no saved context of pyramidkv")
    save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})
    assert_refused(path, model, tokenizer, "no saved context of pyramidkv")
    for content in (b"", b"abc", b"\0" * 100, b"hello, this is a text file\n" * 9):
        path.write_bytes(content)
        assert_refused(path, model, tokenizer, "no saved context")
    header, body = parts(saved)
    header["__metadata__"]["format_version"] = "2"
    write(path, header, body)
    assert_refused(path, model, tokenizer, "newer version of pyramidkv: update it")
    header["__metadata__"]["format_version"] = "x"
    write(path, header, body)
    assert_refused(path, model, tokenizer, "no known version")


def test_200_damaged_files_are_each_refused_in_one_sentence(saved, model, tokenizer, tmp_path):
    """Bytes flipped, files cut anywhere; nothing is allocated that a file only claims to hold."""
    data = saved.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    draw = random.Random(0)
    damaged = []
    for index in range(120):
        end = header_end if index % 2 else len(data)
        place, flip = draw.randrange(end), draw.randrange(1, 256)
        damaged.append(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
    damaged += [data[: draw.randrange(len(data))] for _ in range(40)]
    damaged += [data + bytes(draw.randrange(1, 50)) for _ in range(10)]
    for _ in range(30):  # the length of the header, forged
        damaged.append(draw.randrange(2**64).to_bytes(8, "little") + data[8:])
    assert len(damaged) == 200
    path = tmp_path / "damaged.safetensors"
    tracemalloc.start()
    for content in damaged:
        path.write_bytes(content)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        assert_refused(path, model, tokenizer)
        assert tracemalloc.get_traced_memory()[1] - before < 3 * 2**20  # one block read at a time
    tracemalloc.stop()


def forged_headers(saved):
    """Headers that lie, with a checksum that is right: what a damaged disk does not write."""
    header = parts(saved)[0]

    def changed(name, **entry):
        return {**header, name: {**header[name], **entry}}

    described = json.loads(header["__metadata__"]["context"])

    def described_as(**entry):
        text = json.dumps({**described, **entry})
        return {**header, "__metadata__": {**header["__metadata__"], "context": text}}

    keys = "layers.1.keys"
    shape = header[keys]["shape"]
    yield changed(keys, shape=[1, 2, 2**40, 8])
    yield changed(keys, shape=[2**31, 2**31, 2**31])
    yield changed(keys, data_offsets=[0, 2**50])
    yield changed(keys, data_offsets=[50, 10])
    yield changed(keys, dtype="F64")
    yield changed(keys, dtype="I32")
    yield changed(keys, shape=[shape[0], shape[2], shape[1], shape[3]])
    yield changed("layers.1.positions", dtype="F32")
    yield {name: value for name, value in header.items() if name != keys}
    yield {name: value for name, value in header.items() if name != "text"}
    yield {**header, "layers.7.keys": header[keys]}
    yield {**header, "surprise": header["token_ids"]}
    yield described_as(schedule=[2**40] * 4)
    yield described_as(schedule=[1, 2])
    yield described_as(schedule="abcd")
    yield described_as(schedule=[-5, 40, 30, 31])
    yield described_as(compression={"method": "unknown"})
    yield described_as(compression={"method": "snapkv", "budget": 3})
    yield described_as(compression=[])
    yield described_as(model=None)
    yield described_as(record=3)
    yield described_as(chat="false")
    yield described_as(compression={**described["compression"], "window_size": 6.0})
    yield described_as(compression={**described["compression"], "kernel_size": 10**30 + 1})
    power = {**described["compression"], "allocation": "power", "gamma": 10**400}
    yield described_as(compression=power)
    yield described_as(compression={**described["compression"], "decode_budget": 30})
    for name, value in (("context", 5), ("format_version", "²"), ("checksum", 7)):
        metadata = {**header["__metadata__"], name: value}
        yield {**header, "__metadata__": {**metadata, "spare": f'"checksum":"{"0" * 64}"'}}
    yield {**header, "__metadata__": {**header["__metadata__"], "context": "[" * 100_000}}
    yield {**header, "__metadata__": {**header["__metadata__"], "context": "{}"}}


def test_forged_files_are_refused_too(saved, model, tokenizer, tmp_path):
    body = parts(saved)[1]
    for index, header in enumerate(forged_headers(saved)):
        path = write(tmp_path / f"forged{index}.safetensors", header, body)
        message = assert_refused(path, model, tokenizer)
        assert "checksum" not in message or "missing" in message, "refused for another reason"


def test_forged_positions_and_tokens_are_refused(saved, model, tokenizer, tmp_path):
    header, _ = parts(saved)
    metadata = header["__metadata__"]
    for name, change in (
        ("layers.0.positions", lambda t: t.flip(-1)),
        ("layers.0.positions", lambda t: t + 2**20),
        ("layers.0.positions", lambda t: t - 5),
        ("token_ids", lambda t: t + 10**6),
        ("token_ids", lambda t: -t - 1),
        ("token_ids", lambda t: t[:-1]),
        ("text", lambda t: t + 128),
        ("text", lambda t: torch.tensor(10**14)),
        ("text", lambda t: t.float()),
        ("text", lambda t: t[:0]),
        ("text", lambda t: t[:-2]),
        ("turns", lambda t: t[:-1]),
        ("turns", lambda t: torch.frombuffer(bytearray(b'[["only a question"]]'), dtype=t.dtype)),
        ("turns", lambda t: torch.frombuffer(bytearray(b"[[1, 2]]"), dtype=t.dtype)),
        ("layers.0.sums", lambda t: torch.zeros((1, 2, 3, 24))),
        ("layers.0.queries", lambda t: torch.zeros((1, 6, 6, 8))),
    ):
        tensors = load_file(saved)
        tensors[name] = change(tensors.get(name)).contiguous()
        path = tmp_path / "forged.safetensors"
        save_file(tensors, path, {**metadata, "checksum": "0" * 64})
        _write_checksum(path)
        assert_refused(path, model, tokenizer)


def test_a_refused_file_leaves_the_model_as_it_was(saved, tokenizer, tmp_path):
    model = tiny_model("llama", "sdpa")
    body = parts(saved)[1]
    for header in forged_headers(saved):
        assert_refused(write(tmp_path / "forged.safetensors", header, body), model, tokenizer)
    assert model.config._attn_implementation == "sdpa"


def test_a_context_that_cannot_be_written_says_so_and_leaves_nothing(context, tmp_path):
    with pytest.raises(ContextFileError, match="No such file"):
        context.save(tmp_path / "missing" / "c.safetensors")
    with pytest.raises(ContextFileError, match="cannot write"):
        context.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_with_more_than_its_prompt_cannot_be_saved(model, tokenizer, tmp_path):
    context = pyramidkv.compress_context(model, tokenizer, words(90), **SMALL)
    with torch.no_grad():
        model(torch.tensor([[5]]), past_key_values=context.cache)
    with pytest.raises(pyramidkv.CacheStateError, match="nothing after it"):
        context.save(tmp_path / "c.safetensors")


def test_a_method_of_ones_own_is_refused_when_saved_not_when_loaded(model, tokenizer, tmp_path):
    method = dataclasses.replace(METHODS["snapkv"], make_score=METHODS["h2o"].make_score)
    context = pyramidkv.compress_context(model, tokenizer, words(90), method, **SMALL)
    with pytest.raises(ContextFileError, match="not as it is here, in the registry"):
        context.save(tmp_path / "c.safetensors")
    assert list(tmp_path.iterdir()) == []


SAVE_FOREVER = """
import sys, torch
sys.path.insert(0, {tests!r})
from conftest import tiny_tokenizer, words
from tiny import tiny_model
import pyramidkv
model, tokenizer = tiny_model("llama", "sdpa"), tiny_tokenizer(True)
context = pyramidkv.compress_context(model, tokenizer, words(900), "full")
print("ready", flush=True)
while True:
    context.save({path!r})
"""


def test_killed_while_it_saves_the_old_file_is_intact(saved, model, tokenizer, tmp_path):
    path = tmp_path / "context.safetensors"
    path.write_bytes(saved.read_bytes())
    script = SAVE_FOREVER.format(tests=str(Path(__file__).parent), path=str(path))
    unfinished = 0
    draw = random.Random(1)
    for kills in range(20):
        if kills >= 3 and unfinished:
            break
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script],
            stdout=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for leftover in tmp_path.glob(".*"):
            unfinished += 1
            leftover.unlink()
        loaded = load(path, model, tokenizer)  # the old one, or all of a new one
        assert loaded.ask(QUESTION, max_new_tokens=3).token_ids
    assert {file.name for file in tmp_path.iterdir()} == {path.name}
    assert unfinished > 0, "it was never killed while it wrote"
