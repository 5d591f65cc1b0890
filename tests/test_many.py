"""One prompt, many compressions: each row is what that compression gives alone."""

from __future__ import annotations

import pytest
import torch
from test_schedule_profile import profile
from tiny import CONFIGS, prompt_ids, tiny_model

import pyramidkv
from pyramidkv.compression import make_compression
from pyramidkv.errors import PromptError
from pyramidkv.many import compress_many
from pyramidkv.method_options import MethodError
from pyramidkv.model_shape import shape_fingerprint
from pyramidkv.scores import WindowAttention
from pyramidkv.storage import GROWTH_ROWS

WINDOW = {"window_size": 6, "kernel_size": 5}
EVICTING = [
    make_compression("pyramidkv", 24, **WINDOW),
    make_compression("snapkv", 24, **WINDOW),
    make_compression("snapkv", 40, **WINDOW),
    make_compression("snapkv", 24, group_reduce="mean", value_norm=True, **WINDOW),
    make_compression("h2o", 24, window_size=6),
    make_compression("streamingllm", 24),
    make_compression("pyramidkv-official", 24),
    make_compression("snapkv", compression_ratio=0.5, **WINDOW),
]
FULL = make_compression("full")
STEPS = 6


def go_on(model, cache, rows, steps):
    """Feed the same tokens to every row; return the logits `[steps, rows, vocabulary]`."""
    logits = []
    for step in steps:
        with torch.no_grad():
            out = model(step.expand(rows, -1), past_key_values=cache, use_cache=True)
        logits.append(out.logits[:, -1])
    return torch.stack(logits)


def alone(model, ids, compression, steps):
    cache = pyramidkv.CompressedCache(model, compression.method, **compression.amounts)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    cache.end_prompt()
    return go_on(model, cache, 1, steps)[:, 0], cache


@pytest.mark.parametrize("question", [1, 5], ids=["tokens", "a question first"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_row_goes_on_as_its_compression_alone(architecture, question):
    model = tiny_model(architecture, "eager")
    ids, _ = prompt_ids(80)
    steps = [prompt_ids(n, seed=50 + i)[0] for i, n in enumerate([question, *[1] * STEPS])]
    evicting = list(EVICTING)
    if architecture not in ("gemma3_text",):  # whose rotary frequencies differ by layer
        evicting.append(make_compression("streamingllm-renumbered", 24))
    branched = compress_many(model, ids, [evicting, [FULL]])
    caches = branched.caches
    with torch.no_grad():
        torch.testing.assert_close(branched.logits, model(ids).logits[0, -1])
    assert [cache.tokens_seen for cache in caches] == [80, 80]
    for group, cache in zip((evicting, [FULL]), caches, strict=True):
        together = go_on(model, cache, len(group), steps)
        for row, compression in enumerate(group):
            expected, single = alone(model, ids, compression, steps)
            torch.testing.assert_close(together[:, row], expected, atol=2e-4, rtol=1e-4)
            assert cache.schedules[row] == single.schedules[0]
            kept = [lengths[row] for lengths in cache.kept_lengths()]
            assert kept == [lengths[0] for lengths in single.kept_lengths()]
            for mine, theirs in zip(cache.compressed_layers, single.compressed_layers, strict=True):
                assert torch.equal(mine.kept_positions(row), theirs.kept_positions(0))


def test_what_is_generated_is_what_each_generates_alone():
    model = tiny_model("qwen3", "sdpa")
    ids, _ = prompt_ids(80)
    (cache,) = compress_many(model, ids, [EVICTING]).caches
    rows = len(EVICTING)
    first = prompt_ids(3, seed=4)[0]
    whole = torch.cat([ids, first], dim=1).expand(rows, -1)
    settings = {"max_new_tokens": 12, "do_sample": False}
    together = model.generate(
        whole, attention_mask=torch.ones_like(whole), past_key_values=cache, **settings
    )
    for row, compression in enumerate(EVICTING):
        single = pyramidkv.CompressedCache(model, compression.method, **compression.amounts)
        with torch.no_grad():
            model(ids, past_key_values=single, use_cache=True)
        single.end_prompt()
        one = model.generate(
            whole[:1], attention_mask=torch.ones_like(whole[:1]), past_key_values=single, **settings
        )
        assert together[row].tolist() == one[0].tolist()


def test_the_prompt_is_processed_once_and_equal_scores_are_made_once(monkeypatch):
    model = tiny_model("llama", "sdpa")
    ids, _ = prompt_ids(80)
    passes, scored = [], []
    score = WindowAttention.__call__
    model.model.register_forward_hook(lambda *a: passes.append(1))
    monkeypatch.setattr(
        WindowAttention, "__call__", lambda *a, **k: scored.append(1) or score(*a, **k)
    )
    same = [
        make_compression(name, b, **WINDOW) for name in ("snapkv", "pyramidkv") for b in (24, 40)
    ]
    compress_many(model, ids, [same, [FULL]])
    assert len(passes) == 1
    assert len(scored) == 4  # once per layer


def test_bytes_are_those_of_the_longest_row_of_each_layer_and_nothing_else():
    model = tiny_model("llama", "sdpa")
    ids, _ = prompt_ids(80)
    (cache,) = compress_many(model, ids, [EVICTING]).caches
    token = 2 * 2 * 8 * 4  # keys and values, KV heads, head dimension, float32
    longest = [max(schedule[layer] for schedule in cache.schedules) for layer in range(4)]
    assert cache.kv_bytes == len(EVICTING) * sum(longest) * token
    for layer, rows in zip(cache.compressed_layers, longest, strict=True):
        assert layer._storage.keys.untyped_storage().nbytes() == (
            len(EVICTING) * (rows + GROWTH_ROWS) * token // 2
        )
    assert model.config._attn_implementation.endswith("sdpa")


def test_a_schedule_profile_can_be_one_of_many():
    model = tiny_model("llama", "sdpa")
    own = profile(shape=shape_fingerprint(model.config.to_dict()))
    compression = make_compression("snapkv", 46, profile=own, share_floor=0.0)
    (cache,) = compress_many(model, prompt_ids(200)[0], [[compression]]).caches
    assert [kept[0] for kept in cache.kept_lengths()] == [56, 46, 41, 41]


def test_what_cannot_be_one_of_many_is_refused():
    model = tiny_model("llama", "sdpa")
    ids, _ = prompt_ids(80)
    for options, words in (
        ({"decode_budget": 30, "window_size": 6}, "snapkv with a decode budget"),
        ({"budget": 40, "allocation": "entropy"}, "snapkv with budgets measured on the prompt"),
    ):
        with pytest.raises(MethodError, match=words):
            compress_many(model, ids, [[make_compression("snapkv", **options)]])
    for wrong in (ids[0], ids[:, :0], ids.expand(2, -1)):
        with pytest.raises(PromptError, match="one row"):
            compress_many(model, wrong, [EVICTING])
    assert model.config._attn_implementation == "sdpa"


def test_nothing_is_left_of_the_prompts_full_states():
    model = tiny_model("llama", "sdpa")
    caches = compress_many(model, prompt_ids(80)[0], [EVICTING, [FULL]]).caches
    assert len({id(cache._plan) for cache in caches}) == 2
    caches[0].reset()
    assert caches[1].kept_lengths() == [[80]] * 4
