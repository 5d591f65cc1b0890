"""On a GPU: the same tokens kept and the same logits as on the CPU, and its memory freed."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import tiny_tokenizer, words
from tiny import CONFIGS, positions_of, prompt_ids, tiny_model
from transformers import DynamicCache

import pyramidkv
from pyramidkv.compression import make_compression
from pyramidkv.many import compress_many

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU here; these tests need one"
)
WINDOW = {"window_size": 6, "kernel_size": 5}
NO_SDPA = ("gemma2", "sdpa")  # transformers has none with a softcap
METHODS = {
    "pyramidkv": WINDOW,
    "snapkv": {**WINDOW, "value_norm": True},
    "h2o": {"window_size": 6},
    "streamingllm": {},
}
KINDS = [(name, how) for name in CONFIGS for how in ("eager", "sdpa") if (name, how) != NO_SDPA]
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def run(model, name, ids, mask, steps, **options):
    """Feed a prompt and then some tokens; return all logits on the CPU and the cache."""
    device = model.device
    cache = pyramidkv.CompressedCache(model, name, 24, **options)
    ids, mask = ids.to(device), mask.to(device)
    logits = []
    with torch.no_grad():
        for tokens in [ids, *steps]:
            tokens = tokens.to(device)
            if tokens is not ids:
                mask = torch.cat([mask, mask.new_ones(tokens.shape)], dim=1)
            positions = positions_of(mask)[:, -tokens.shape[1] :]
            out = model(
                tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(out.logits[:, -1].cpu())
    return torch.stack(logits), cache


@pytest.mark.parametrize(("architecture", "attention"), KINDS)
def test_every_architecture_keeps_and_answers_as_on_the_cpu(architecture, attention):
    ids, mask = prompt_ids(80)
    steps = [prompt_ids(1, seed=50 + i)[0] for i in range(5)]
    expected, on_cpu = run(
        tiny_model(architecture, attention), "pyramidkv", ids, mask, steps, **WINDOW
    )
    model = tiny_model(architecture, attention).to("cuda")
    logits, cache = run(model, "pyramidkv", ids, mask, steps, **WINDOW)
    torch.testing.assert_close(logits, expected, **CLOSE)
    for mine, theirs in zip(cache.compressed_layers, on_cpu.compressed_layers, strict=True):
        assert all(tensor.is_cuda for tensor in mine.tensors().values())
        assert torch.equal(mine.kept_positions(0).cpu(), theirs.kept_positions(0))


@pytest.mark.parametrize("decode_budget", [None, 26])
@pytest.mark.parametrize("name", METHODS)
def test_padded_batches_and_eviction_while_decoding(name, decode_budget):
    ids, mask = prompt_ids(80, 61, 33)
    steps = [prompt_ids(1, 1, 1, seed=50 + i)[0] for i in range(12)]
    options = dict(METHODS[name])
    if decode_budget is not None:
        options |= {"decode_budget": decode_budget, "decode_interval": 4}
    expected, _ = run(tiny_model("llama", "sdpa"), name, ids, mask, steps, **options)
    logits, _ = run(tiny_model("llama", "sdpa").to("cuda"), name, ids, mask, steps, **options)
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_one_prompt_for_many_methods():
    ids, _ = prompt_ids(80)
    arms = [make_compression(name, 24, **options) for name, options in METHODS.items()]
    kept, logits = [], []
    for device in ("cpu", "cuda"):
        model = tiny_model("qwen3", "sdpa").to(device)
        branched = compress_many(model, ids.to(device), [arms, [make_compression("full")]])
        logits.append(branched.logits.cpu())
        kept.append(
            [
                layer.kept_positions(row).cpu()
                for layer in branched.caches[0].compressed_layers
                for row in range(len(arms))
            ]
        )
    torch.testing.assert_close(logits[1], logits[0], **CLOSE)
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_a_context_is_asked_saved_and_loaded(tmp_path):
    tokenizer = tiny_tokenizer(True)
    settings = {"budget": 20, "prefill_chunk": 30, **WINDOW}
    answers = []
    for device in ("cpu", "cuda"):
        model = tiny_model("llama", "sdpa").to(device)
        context = pyramidkv.compress_context(model, tokenizer, words(80), **settings)
        answers.append(context.ask("w7 w8", max_new_tokens=8).token_ids)
    path = tmp_path / "context.safetensors"
    context.save(path)
    loaded = pyramidkv.CompressedContext.load(path, model, tokenizer)
    assert loaded.ask("w7 w8", max_new_tokens=8).token_ids == answers[0] == answers[1]


def test_generation_beside_transformers_own():
    ids, mask = (tensor.to("cuda") for tensor in prompt_ids(80, 50))
    model = tiny_model("llama", "sdpa").to("cuda")
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **settings)
    with pyramidkv.compress(model, "snapkv", budget=80, **WINDOW):
        assert torch.equal(model.generate(ids, **settings), expected)
    with pyramidkv.compress(model, "snapkv", budget=20, **WINDOW):
        assert model.generate(ids, **settings).shape == expected.shape


def test_memory_is_freed_layer_by_layer():
    """16 layers x 16,384 tokens: what is allocated is the cache's bytes, and the peak is low."""
    model = tiny_model(
        "llama", "sdpa", num_hidden_layers=16, head_dim=64, max_position_embeddings=16384
    )
    model = model.to("cuda", torch.bfloat16)
    ids = prompt_ids(16384)[0].to("cuda")
    layer_bytes = 2 * 2 * 16384 * 64 * 2

    def measure(make):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cache = make()
        with torch.inference_mode():
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        held = torch.cuda.memory_allocated() - before
        return held, torch.cuda.max_memory_allocated() - before, cache

    measure(lambda: DynamicCache(config=model.config))
    full, full_peak, _ = measure(lambda: DynamicCache(config=model.config))
    held, peak, cache = measure(lambda: pyramidkv.CompressedCache(model, "pyramidkv", 256))
    assert full >= 16 * layer_bytes
    assert cache.allocated_bytes <= held <= cache.allocated_bytes + 2**18
    assert full_peak - peak > 0.8 * (15 * layer_bytes - cache.allocated_bytes)
