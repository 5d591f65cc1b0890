"""A compressed prompt of static shape: the same logits, one graph for all steps."""

from __future__ import annotations

import gc
import shutil

import pytest
import torch
from test_equality import PAIRS
from tiny import CONFIGS, positions_of, prompt_ids, tiny_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig

import pyramidkv
from pyramidkv.errors import CacheStateError
from pyramidkv.static_cache import StaticCompressedCache

SMALL = {"window_size": 6, "kernel_size": 5}
LENGTHS = (60, 25, 43)


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


def processed(model, lengths=LENGTHS, method="pyramidkv", budget=20, **options):
    """Return a cache with a prompt, the first token after it, the mask and its position."""
    cache = pyramidkv.CompressedCache(model, method, budget, **{**SMALL, **options})
    ids, mask = prompt_ids(*lengths)
    positions = positions_of(mask)
    with torch.no_grad():
        logits = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits
    return cache, logits[:, -1:].argmax(-1), mask, positions[:, -1:] + 1


def assert_same_steps(model, step, lengths=LENGTHS, counts=(1,) * 6, **options):
    """Compare a static copy, run by `step`, with the cache that it was made of."""
    cache, tokens, mask, position = processed(model, lengths, **options)
    static = cache.to_static(sum(counts))
    for index, count in enumerate(counts):
        if count > 1:
            tokens = prompt_ids(*[count] * len(lengths), seed=index)[0]
        positions = position + torch.arange(count)
        mask = torch.cat([mask, mask.new_ones(len(lengths), count)], dim=1)
        with torch.no_grad():
            expected = model(
                tokens, attention_mask=mask, position_ids=positions, past_key_values=cache
            ).logits
            # New tensors each time: their addresses are none of the graph's business.
            actual = step(
                tokens.clone(), position_ids=positions.clone(), past_key_values=static
            ).logits
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        tokens, position = expected[:, -1:].argmax(-1), positions[:, -1:] + 1
    return cache, static


def only_full(architecture: str) -> bool:
    model = tiny_model(architecture, "eager")
    compressed = pyramidkv.CompressedCache(model, "full").compressed_layers
    return len(compressed) == model.config.num_hidden_layers


STATIC = [pair for pair in PAIRS if only_full(pair[0])]


@pytest.mark.parametrize(("architecture", "attention"), STATIC)
def test_steps_give_the_same_logits(architecture, attention):
    model = tiny_model(architecture, attention)
    assert_same_steps(model, model)
    assert_same_steps(model, model, (60,), (1, 5, 1, 3))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_compiled_steps_are_one_graph_that_is_never_made_anew(architecture, attention):
    model = tiny_model(architecture, attention)
    counter = CompileCounterWithBackend("aot_eager")
    assert_same_steps(model, torch.compile(model, backend=counter, fullgraph=True))
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_the_default_compiler_makes_it_code():
    model = tiny_model("llama", "sdpa", num_hidden_layers=2)
    assert_same_steps(model, torch.compile(model, fullgraph=True), counts=(1,) * 3)


def test_every_method_of_equal_heads_can_be_static():
    model = tiny_model("llama", "sdpa")
    for method, options in (
        ("full", {"budget": None, "window_size": None, "kernel_size": None}),
        ("streamingllm-renumbered", {"window_size": 0, "kernel_size": None}),
        ("h2o", {"kernel_size": 1}),
        ("pyramidkv", {"allocation": "entropy"}),
    ):
        given = {name: value for name, value in options.items() if value is not None}
        cache = pyramidkv.CompressedCache(
            model,
            method,
            None if method == "full" else 20,
            **{n: v for n, v in {**SMALL, **given}.items() if options.get(n, 0) is not None},
        )
        ids, _ = prompt_ids(60)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            static = cache.to_static(2)
            for token in (5, 9):
                new = torch.tensor([[token]])
                expected = model(new, past_key_values=cache).logits
                actual = model(new, past_key_values=static).logits
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_generate_goes_on_from_it_and_compiles_its_steps():
    model = tiny_model("llama", "sdpa")
    answers = []
    compiling = CompileConfig(backend="aot_eager", fullgraph=True, mode="default")
    compiling._compile_all_devices = True
    for make in (lambda cache: cache, lambda cache: cache.to_static(8)):
        for options in ({}, {"compile_config": compiling}):
            cache, first, mask, _ = processed(model)
            if options and isinstance(make(cache), pyramidkv.CompressedCache):
                continue
            ids = torch.cat([prompt_ids(*LENGTHS)[0], first], dim=1)
            answers.append(
                model.generate(
                    ids,
                    attention_mask=torch.cat([mask, torch.ones_like(first)], dim=1),
                    past_key_values=make(cache),
                    max_new_tokens=8,
                    do_sample=False,
                    **options,
                ).tolist()
            )
    assert len(answers) == 3
    assert answers[0] == answers[1] == answers[2]


def test_beams_reorder_it_in_place():
    model = tiny_model("llama", "sdpa")
    cache, tokens, mask, position = processed(model)
    static, order = cache.to_static(4), torch.tensor([2, 0, 0])
    where = [layer.keys.data_ptr() for layer in static.layers]
    static.reorder_cache(order)
    cache.reorder_cache(order)
    mask = torch.cat([mask[order], torch.ones_like(tokens)], dim=1)
    with torch.no_grad():
        expected = model(
            tokens, attention_mask=mask, position_ids=position[order], past_key_values=cache
        ).logits
        actual = model(tokens, position_ids=position[order], past_key_values=static).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert where == [layer.keys.data_ptr() for layer in static.layers]


def test_bytes_room_and_independence():
    model = tiny_model("llama", "sdpa")
    cache, tokens, *_ = processed(model, (60,))
    before = [layer.keys.clone() for layer in cache.compressed_layers]
    static = cache.to_static(2)
    assert static.kv_bytes == cache.kv_bytes + 2 * 2 * 4 * 2 * 8 * 4
    with torch.no_grad():
        for _ in range(2):
            model(tokens, past_key_values=static)
        with pytest.raises(IndexError, match="out of bounds"):
            model(tokens, past_key_values=static)
    assert all(
        torch.equal(layer.keys, kept)
        for layer, kept in zip(cache.compressed_layers, before, strict=True)
    )
    with pytest.raises(CacheStateError, match="the one prompt it was made with"):
        static.reset()


def test_the_model_is_as_before_when_both_caches_are_gone():
    model = tiny_model("llama", "sdpa")
    cache, *_ = processed(model)
    static = cache.to_static(2)
    del cache
    gc.collect()
    assert model.config._attn_implementation == "pyramidkv_sdpa"
    assert isinstance(static, StaticCompressedCache)
    del static
    gc.collect()
    assert model.config._attn_implementation == "sdpa"


def test_another_attention_than_ours_is_refused():
    model = tiny_model("llama", "sdpa")
    cache, tokens, *_ = processed(model, (60,))
    static = cache.to_static(2)
    model.set_attn_implementation("eager")
    with pytest.raises(CacheStateError, match="was changed since this static cache was made"):
        model(tokens, past_key_values=static)


def test_what_cannot_be_static_is_refused():
    model = tiny_model("llama", "sdpa")
    with pytest.raises(CacheStateError, match="has not been processed yet"):
        pyramidkv.CompressedCache(model, "snapkv", 20, **SMALL).to_static(4)
    cache, *_ = processed(model)
    for room in (0, True, 1.5):
        with pytest.raises(CacheStateError, match="it is a whole number of at least 1"):
            cache.to_static(room)
    with pytest.raises(CacheStateError, match="layer 0 has heads of different lengths"):
        processed(model, method="adakv")[0].to_static(4)
    with pytest.raises(CacheStateError, match="cannot keep to a decode budget"):
        processed(model, decode_budget=20)[0].to_static(4)
    sliding = tiny_model("gemma3_text", "sdpa")
    with pytest.raises(CacheStateError, match="layer 0 is of another kind"):
        processed(sliding)[0].to_static(4)
    with pyramidkv.compress(model, "snapkv", 20, **SMALL), torch.no_grad():
        inside = model(prompt_ids(60)[0], use_cache=True)
        name = next(n for n in ("cache", "past_key_values") if n in inside)
        with pytest.raises(CacheStateError, match="belongs to a `compress` block"):
            inside[name].to_static(4)


def test_some_architectures_are_static_and_some_are_not():
    static = {architecture for architecture, _ in STATIC}
    assert "llama" in static
    assert "gemma2" not in static
    assert "qwen3_next" not in static
    assert len(static) >= len(CONFIGS) // 2
