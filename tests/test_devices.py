"""Layers spread over devices: each keeps its cache where it is."""

from __future__ import annotations

import pytest
import torch
from accelerate import dispatch_model
from conftest import tiny_tokenizer, words
from tiny import prompt_ids, tiny_model

import pyramidkv

SMALL = {"window_size": 6, "kernel_size": 5}


@pytest.mark.parametrize("name", ["pyramidkv", "h2o", "streamingllm"])
def test_each_layer_keeps_its_tensors_on_its_own_device(name):
    """Two layers on the CPU, two on `meta`, which computes shapes and devices only."""
    model = tiny_model("llama", "sdpa")
    settings = {"window_size": 6, "decode_budget": 24, "decode_interval": 4}
    cache = pyramidkv.CompressedCache(model, name, 20, **settings)
    cache.expect_prompt(torch.ones((1, 60)))
    devices = ["cpu", "cpu", "meta", "meta"]

    def run(tokens):
        for layer, device in zip(cache.compressed_layers, devices, strict=True):
            queries = torch.randn((1, 6, tokens, 8), device=device)
            states = torch.randn((2, 1, 2, tokens, 8), device=device)
            keys, values = layer.update(*states)
            visible = layer.visible(keys, None, lambda mask: mask)
            assert visible is None
            layer.finish(queries, keys, values, 1.0, None)
            for tensor in layer.tensors().values():
                assert tensor.device.type == device

    for tokens in (40, 20, 1, 1, 1, 1, 1, 1, 1, 1):
        run(tokens)
    schedule = cache.compression.decode_schedule(4, 68)
    assert [kept[0] for kept in cache.kept_lengths()] == schedule


def test_a_model_in_two_stages_answers_as_in_one(tmp_path):
    """The upper half is loaded from the disk as it is needed, by the hooks a device map makes."""
    tokenizer = tiny_tokenizer(True)
    whole = tiny_model("llama", "sdpa")
    expected = pyramidkv.compress_context(whole, tokenizer, words(80), budget=20, **SMALL).ask(
        "w7 w8", max_new_tokens=8
    )
    split = tiny_model("llama", "sdpa")
    stages = {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(4)}
    stages |= {"model.embed_tokens": "cpu", "model.norm": "disk", "lm_head": "disk"}
    stages["model.rotary_emb"] = "cpu"
    dispatch_model(split, stages, main_device="cpu", offload_dir=str(tmp_path / "offload"))
    assert next(split.model.layers[3].parameters()).device.type == "meta"
    context = pyramidkv.compress_context(
        split, tokenizer, words(80), budget=20, prefill_chunk=100, **SMALL
    )
    assert context.ask("w7 w8", max_new_tokens=8).token_ids == expected.token_ids
    assert all(layer.keys.device.type == "cpu" for layer in context.cache.compressed_layers)
    path = tmp_path / "context.safetensors"
    context.save(path)
    loaded = pyramidkv.CompressedContext.load(path, split, tokenizer)
    assert loaded.ask("w7 w8", max_new_tokens=8).token_ids == expected.token_ids
    ids, _ = prompt_ids(60)
    with pyramidkv.compress(split, "snapkv", budget=20, **SMALL):
        assert split.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 64)
