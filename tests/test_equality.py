"""The compressed model's logits equal those of a dense model with the evicted tokens masked."""

from __future__ import annotations

import pytest
import torch
from reference import Reference
from tiny import CONFIGS, HYBRIDS, positions_of, prompt_ids, tiny_model

import pyramidkv
from pyramidkv.compression import Compression, make_compression

STEPS = 20
WINDOWED, COMPETING = ("pyramidkv", "snapkv"), ("adakv", "pyramidkv-ada", "global")
# transformers has no sdpa with the softcap of Gemma 2
PAIRS = [
    (architecture, attention)
    for architecture in CONFIGS
    for attention in ("eager", "sdpa")
    if (architecture, attention) != ("gemma2", "sdpa")
]


def engine_logits(model, compression: Compression, ids, mask, steps, cache=None):
    """Run prompt and steps by hand on a compressed cache; return last logits of each pass."""
    if cache is None:
        cache = pyramidkv.CompressedCache(
            model, compression.method, compression.budget, compression.compression_ratio
        )
    logits = []
    for new in [ids, *steps]:
        if cache.tokens_seen:
            mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        with torch.no_grad():
            out = model(
                input_ids=new,
                attention_mask=mask,
                position_ids=positions_of(mask)[:, -new.shape[1] :],
                past_key_values=cache,
                use_cache=True,
            )
        logits.append(out.logits[:, -1])
    return logits, cache


def assert_same(
    model, compression: Compression, lengths, step_sizes=(1,) * STEPS, reference_model=None
) -> None:
    ids, mask = prompt_ids(*lengths)
    steps = [prompt_ids(*[n] * len(lengths), seed=100 + i)[0] for i, n in enumerate(step_sizes)]
    expected = Reference(reference_model or model, compression).decode(ids, mask, steps)
    actual, cache = engine_logits(model, compression, ids, mask, steps)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    if compression.method.evicts:
        added = sum(step_sizes)
        layers = len(cache.compressed_layers)
        for row, length in enumerate(lengths):
            kept = [own[row] for own in cache.kept_lengths()]
            if compression.follows_prompt:
                schedule = cache.schedules[row]
            else:
                schedule = compression.schedule(layers, length)
            assert kept == [n + added for n in schedule]
            if compression.method.name == "global":
                total = layers * min(compression.budget_for(length), length)
                assert sum(schedule) == pytest.approx(total, abs=1e-9)


def small(name: str, budget: int = 20, **options) -> Compression:
    if name == "full":
        return make_compression("full")
    sizes = {"kernel_size": 5} if name in (*WINDOWED, *COMPETING) else {}
    if name in (*WINDOWED, *COMPETING, "h2o"):
        sizes["window_size"] = 6
    return make_compression(name, budget, **{**sizes, **options})


@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize(("architecture", "attention"), PAIRS)
def test_logits_equal_a_masked_dense_reference(architecture, attention, lengths):
    assert_same(tiny_model(architecture, attention), small("pyramidkv"), lengths)


@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("full", {}),
        ("streamingllm", {}),
        ("streamingllm-renumbered", {}),
        ("h2o", {}),
        ("h2o", {"group_reduce": "max", "kernel_size": 3}),
        ("snapkv", {}),
        ("snapkv", {"window_reduce": "max", "value_norm": True}),
        ("snapkv", {"pooling": "avg", "group_reduce": "mean"}),
        ("snapkv-paper", {}),
        ("pyramidkv-paper", {}),
        ("pyramidkv-official", {}),
        ("pyramidkv", {"allocation": "power", "gamma": 2.0}),
        ("adakv", {}),
        ("adakv", {"head_floor": 0.0, "value_norm": True}),
        ("adakv", {"head_floor": 1, "group_reduce": "mean"}),
        ("adakv", {"allocation": "power", "gamma": 2.0}),
        ("pyramidkv-ada", {"head_floor": 0.5, "pooling": "avg"}),
        ("global", {}),
        ("global", {"head_floor": 0.0, "value_norm": True}),
        ("global", {"head_floor": 0.6, "pooling": "avg", "group_reduce": "mean"}),
        ("global", {"head_floor": 1}),
    ],
)
def test_every_method_equals_the_reference(method, options, lengths):
    assert_same(tiny_model("qwen3", "sdpa"), small(method, 24, **options), lengths)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_of_very_unequal_lengths(attention):
    compression = make_compression(
        "snapkv", layer_budgets=[40, 20, 10, 12], window_size=6, kernel_size=5
    )
    assert_same(tiny_model("llama", attention), compression, (60,))
    assert_same(tiny_model("llama", attention), compression, (60, 30, 11))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *HYBRIDS])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
def test_a_second_turn_of_several_tokens_sees_the_kept_ones(architecture, attention, lengths):
    turns = (1, 1, 17, 1, 1, 5, 1)
    assert_same(tiny_model(architecture, attention), small("pyramidkv"), lengths, turns)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_under_the_budget_nothing_changes(architecture):
    model = tiny_model(architecture, "eager")
    ids, mask = prompt_ids(50, 31)
    steps = [prompt_ids(1, 1, seed=i)[0] for i in range(5)]
    compressed, cache = engine_logits(model, make_compression("pyramidkv", 64), ids, mask, steps)
    full = Reference(model, make_compression("full")).decode(ids, mask, steps)
    for got, want in zip(compressed, full, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert all(kept == [55, 36] for kept in cache.kept_lengths())


def test_prompt_logits_are_those_of_the_full_model():
    """Eviction never disturbs the attention of the prompt itself."""
    model = tiny_model("llama", "sdpa")
    ids, _ = prompt_ids(80)
    with torch.no_grad():
        plain = model(ids).logits
        with pyramidkv.compress(model, "streamingllm", budget=8):
            compressed = model(ids).logits
    assert torch.equal(plain, compressed)


@pytest.mark.parametrize("architecture", ["llama", *HYBRIDS])
def test_evicting_more_changes_the_answer(architecture):
    """The reference itself would not notice if nothing were evicted at all."""
    model = tiny_model(architecture, "sdpa")
    ids, mask = prompt_ids(60)
    steps = [prompt_ids(1, seed=5)[0]]
    full, _ = engine_logits(model, make_compression("full"), ids, mask, steps)
    small_logits, _ = engine_logits(model, small("pyramidkv", 12), ids, mask, steps)
    assert torch.equal(full[0], small_logits[0])
    assert (full[1] - small_logits[1]).abs().max() > 1e-2
