"""The serving plugin's parts that need no vLLM: counts, chunks, and moves inside blocks."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyramidkv.budgets import BudgetError
from pyramidkv.method_options import MethodError
from pyramidkv.vllm.checks import check_config, check_hook, check_scheduler
from pyramidkv.vllm.chunks import end_chunk
from pyramidkv.vllm.compaction import Rows, TransposedKeys, pair_slots
from pyramidkv.vllm.settings import (
    SCHEDULER,
    WORKERS,
    ServingError,
    capacity_lines,
    read_settings,
)

SETTINGS = [
    {"budget": 64},
    {"budget": 128, "groups": 3},
    {"method": "snapkv", "budget": 96},
    {"method": "streamingllm", "budget": 40},
    {"budget": 100, "allocation": "power", "gamma": 2.0, "groups": 6},
    {"method": "snapkv", "layer_budgets": [200, 80, 40]},
    {"budget": 64, "min_prompt": 300},
]


@pytest.mark.parametrize("given_", SETTINGS, ids=str)
@given(prompt=st.integers(1, 5000), block_size=st.sampled_from([16, 32, 128]))
def test_what_a_group_keeps_is_its_budget_and_less_than_a_block_more(given_, prompt, block_size):
    settings = read_settings(given_, 12)
    kept = settings.kept(prompt, block_size)
    assert len(kept) == settings.groups
    if prompt < settings.min_prompt:
        assert kept == [prompt] * settings.groups
        return
    budgets = settings.compression.schedule(settings.groups, prompt)
    for group, (have, budget) in enumerate(zip(kept, budgets, strict=True)):
        assert budget <= have <= min(prompt, budget + block_size - 1)
        blocks = settings.skipped_blocks(group, prompt, block_size)
        assert have == prompt - blocks * block_size
    if given_.get("budget"):
        assert sum(budgets) == settings.groups * min(prompt, given_["budget"])


@pytest.mark.parametrize("given_", SETTINGS, ids=str)
@given(prompt=st.integers(1, 3000), block_size=st.sampled_from([16, 32]))
def test_a_hit_never_reaches_blocks_that_are_written_to(given_, prompt, block_size):
    """Whatever the prompt's true length is: only its full blocks are known when it is looked up."""
    settings = read_settings(given_, 12)
    hashed = prompt // block_size * block_size
    for group in range(settings.groups):
        most = settings.largest_hit(group, hashed, block_size)
        skipped = settings.skipped_blocks(group, prompt, block_size)
        if most is None:
            assert skipped == 0
        else:
            assert most <= skipped * block_size
            assert most <= prompt - settings.window


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        (30, 5),
        (32, 4),
        (24, 4),
        (28, 4),
        (36, 4),
        (80, 4),
        (22, None),
        (62, None),
        (35, 5),
        (42, 6),
    ],
)
def test_the_default_is_the_fewest_groups_from_4_to_8_that_divide_the_layers(layers, groups):
    if groups is None:
        with pytest.raises(
            ServingError, match=rf"divides the model's {layers} layers; give groups"
        ):
            read_settings({"budget": 64}, layers)
    else:
        assert read_settings({"budget": 64}, layers).groups == groups
    assert read_settings({"method": "snapkv", "budget": 64}, layers).groups == 1
    assert read_settings({"budget": 64, "groups": 1}, layers).groups == 1


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        ({}, MethodError, "give pyramidkv either a budget"),
        ({"budget": 10}, BudgetError, "the smallest possible budget is 36"),
        ({"budget": 64, "groups": 5}, ServingError, "groups is 5; it must divide the model's 12"),
        ({"budget": 64, "groups": 0}, ServingError, "groups is 0; it must divide"),
        ({"budget": 64, "min_prompt": -1}, ServingError, "min_prompt is -1; give a whole number"),
        ({"compression_ratio": 0.5}, ServingError, "only budgets in tokens can be served"),
        ({"budget": 64, "allocation": "entropy"}, ServingError, "another allocation than entropy"),
        ({"budget": 64, "decode_budget": 99}, ServingError, "a decode budget cannot be served"),
        ({"method": "full"}, ServingError, "full evicts nothing; start vLLM without pyramidkv"),
        ({"method": "h2o", "budget": 64}, MethodError, "h2o does not support serving with vLLM"),
        (
            {"method": "streamingllm-renumbered", "budget": 64},
            MethodError,
            "streamingllm-renumbered does not support serving with vLLM",
        ),
        ({"method": "pyramidkv-official", "budget": 64}, MethodError, "does not support serving"),
        ({"method": "snapkv", "layer_budgets": [99] * 5}, ServingError, "groups is 5; it must"),
        ({"budget": 64, "bugdet": 3}, MethodError, "pyramidkv has no option 'bugdet'"),
    ],
)
def test_what_cannot_be_served_is_refused(given_, error, message):
    with pytest.raises(error, match=message):
        read_settings(given_, 12)


@given(
    computed=st.integers(0, 200),
    new=st.integers(1, 300),
    prompt=st.integers(1, 200),
    window=st.integers(0, 64),
)
def test_steps_end_before_the_window_or_with_the_prompt(computed, new, prompt, window):
    count = end_chunk(computed, new, prompt, window)
    assert 0 <= count <= new
    end = computed + count
    if computed >= prompt:
        assert count == new
    else:
        assert end == prompt or end <= max(computed, prompt - window)
        assert end == prompt or count == min(new, max(0, prompt - window - computed))


@given(data=st.data())
def test_a_prompt_is_always_completed_if_a_window_fits_into_a_step(data):
    window = data.draw(st.integers(0, 40))
    prompt = data.draw(st.integers(1, 400))
    most = data.draw(st.integers(max(1, window), 100))
    computed, steps = 0, []
    while computed < prompt:
        new = min(most, prompt + 7 - computed)  # a preempted request has more than its prompt
        count = end_chunk(computed, new, prompt, window)
        assert count > 0
        computed += count
        steps.append(count)
    assert computed == prompt
    assert steps[-1] >= min(window, prompt)


def make_cache(layout, blocks, heads, size, head_dim):
    """An empty cache of a layout, and how to write a token of a head into it."""
    if layout == "rows":
        keys, values = torch.randn((2, blocks, size, heads, head_dim))
        return Rows(keys, values)
    memory = torch.randn((blocks, heads, 2 * size, head_dim))
    return TransposedKeys(*memory.chunk(2, dim=2))


def fill(cache, layout, table, keys, values):
    """Write a sequence `[heads, tokens, head_dim]` as vLLM does, one token after the other."""
    size = cache.block_size
    for position in range(keys.shape[1]):
        block, slot = int(table[position // size]), position % size
        for head in range(keys.shape[0]):
            if layout == "rows":
                cache.keys[block, slot, head] = keys[head, position]
                cache.values[block, slot, head] = values[head, position]
            else:
                own = cache.keys[block, head].reshape(-1)  # a view: one block of one head
                for place in range(keys.shape[2]):
                    own[place * size + slot] = keys[head, position, place]
                cache.values[block, head, slot] = values[head, position]


@pytest.mark.parametrize("layout", ["vec", "rows"])
@given(data=st.data())
def test_the_last_blocks_hold_exactly_what_is_kept(layout, data):
    heads, size, head_dim = data.draw(st.integers(1, 3)), 4, 2
    tokens = data.draw(st.integers(5, 40))
    skipped = data.draw(st.integers(1, (tokens - 1) // size))
    freed = skipped * size
    seed = data.draw(st.integers(0, 1000))
    torch.manual_seed(seed)
    keys, values = torch.randn((2, heads, tokens, head_dim))
    table = torch.randperm(20)[: -(-tokens // size)]
    cache = make_cache(layout, 20, heads, size, head_dim)
    fill(cache, layout, table, keys, values)
    others = [block for block in range(20) if block not in table.tolist()]
    before = [cache.keys[others].clone(), cache.values[others].clone()]
    stored = cache.gather_keys(table, tokens), cache.gather_values(table, tokens)
    assert torch.equal(stored[0][0], keys)
    assert torch.equal(stored[1][0], values)
    kept = torch.stack(
        [torch.randperm(tokens)[: tokens - freed].sort().values for _ in range(heads)]
    )
    cache.move(*_moves(kept, table, tokens, freed))
    rest = table[skipped:], tokens - freed
    left = cache.gather_keys(*rest), cache.gather_values(*rest)
    for head in range(heads):
        for got, all_ in zip(left, (keys, values), strict=True):
            wanted = all_[head, kept[head]]
            assert sorted(got[0, head].tolist()) == sorted(wanted.tolist())
        pairs = torch.cat([left[0][0, head], left[1][0, head]], dim=-1)
        wanted = torch.cat([keys[head, kept[head]], values[head, kept[head]]], dim=-1)
        assert sorted(pairs.tolist()) == sorted(wanted.tolist())  # a key keeps its value
    assert torch.equal(cache.keys[others], before[0])
    assert torch.equal(cache.values[others], before[1])


def _moves(kept, table, tokens, freed):
    heads, source, target = pair_slots(kept, tokens, freed)
    assert len(heads) == len(source) == len(target)
    assert bool((source < freed).all())
    assert bool((target >= freed).all())
    return heads, table, source, target


def configuration(**changes):
    """As much of vLLM's configuration as is looked at."""
    sections = {
        "parallel_config": {
            "worker_cls": WORKERS["cpu"],
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "pipeline_parallel_size": 1,
        },
        "scheduler_config": {
            "scheduler_cls": SCHEDULER,
            "disable_hybrid_kv_cache_manager": False,
            "async_scheduling": False,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 128,
            "long_prefill_token_threshold": 0,
        },
        "cache_config": {"cache_dtype": "auto", "kv_offloading_size": None},
        "model_config": {"use_mla": False},
    }
    whole = {"speculative_config": None, "kv_transfer_config": None, "use_v2_model_runner": False}
    for name, value in changes.items():
        section = next((key for key, known in sections.items() if name in known), None)
        (whole if section is None else sections[section])[name] = value
    return SimpleNamespace(**whole, **{k: SimpleNamespace(**v) for k, v in sections.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"worker_cls": "auto"}, "worker and scheduler of pyramidkv need each other; give both"),
        ({"scheduler_cls": None}, f"--scheduler-cls {SCHEDULER}, or start with pyramidkv serve"),
        ({"decode_context_parallel_size": 2}, "cannot serve with context parallelism"),
        ({"prefill_context_parallel_size": 2}, "cannot serve with context parallelism"),
        ({"pipeline_parallel_size": 2}, "cannot serve with pipeline parallelism"),
        ({"kv_transfer_config": {}}, "cannot serve with a KV connector or KV offloading"),
        ({"kv_offloading_size": 4.0}, "cannot serve with a KV connector or KV offloading"),
        ({"cache_dtype": "fp8_e4m3"}, r"cannot serve with a quantised KV cache \(fp8_e4m3\)"),
        ({"use_mla": True}, "cannot serve with multi-head latent attention"),
        ({"disable_hybrid_kv_cache_manager": True}, "a disabled hybrid KV cache manager"),
        ({"use_v2_model_runner": True}, "Model Runner V2"),
        ({"async_scheduling": True}, "asynchronous scheduling"),
        (
            {"speculative_config": SimpleNamespace(method="eagle")},
            "cannot serve with guesses by 'e",
        ),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_served_are_refused(changes, message):
    settings = read_settings({"budget": 64}, 12)
    check_config(configuration(), settings)
    with pytest.raises(ServingError, match=message) as refused:
        check_config(configuration(**changes), settings)
    assert "\n" not in str(refused.value)


def test_a_window_must_fit_into_a_step():
    settings = read_settings({"budget": 64}, 12)
    check_scheduler(configuration(max_num_batched_tokens=159), settings)
    with pytest.raises(ServingError, match="is 158, but a window of 32 tokens beside 127 other"):
        check_scheduler(configuration(max_num_batched_tokens=158), settings)
    guessing = SimpleNamespace(method="ngram", num_speculative_tokens=3)
    with pytest.raises(ServingError, match="takes up to 540; raise it, or lower max_num_seqs"):
        check_scheduler(
            configuration(max_num_batched_tokens=539, speculative_config=guessing), settings
        )
    with pytest.raises(ServingError, match="long_prefill_token_threshold is 31, below the window"):
        check_scheduler(configuration(long_prefill_token_threshold=31), settings)


def test_another_vllm_is_refused_with_its_release(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.1"))

    class Owner:
        def hook(self, request, tokens, more=None): ...

    check_hook(Owner, "hook", "request", "tokens")
    for name, parameters in (("hook", ("request", "count")), ("gone", ())):
        with pytest.raises(ServingError, match=f"vLLM 0.99.1 is not supported: Owner.{name} is"):
            check_hook(Owner, name, *parameters)


def test_what_a_pool_holds_is_told_in_lines():
    settings = read_settings({"budget": 128, "groups": 4}, 12)
    first, *lines = capacity_lines(settings, 32, 1000, 4096)
    assert first == "pyramidkv: pyramidkv 128 in 4 groups of layers, 1,000 blocks of 32 tokens"
    assert len(lines) == 2
    for line, length in zip(lines, (2048, 4096), strict=True):
        full = 4 * length // 32
        left = sum(settings.kept(length, 32)) // 32
        assert line == (
            f"pyramidkv: a prompt of {length:,} tokens: {full:,} blocks while it is processed, "
            f"{left:,} afterwards; {1000 / full:.1f} full ones fit, {1000 / left:.1f} compressed"
        )


def test_layers_with_a_window_count_as_what_they_hold():
    settings = read_settings({"budget": 128, "groups": 4}, 8)
    alone, beside = (
        capacity_lines(settings, 32, 1000, 4096, windows)[-1] for windows in ((), (512, 8192))
    )
    full, left = 4 * 128, sum(settings.kept(4096, 32)) // 32
    for line, more in ((alone, 0), (beside, 17 + 128)):  # the window in blocks, and one more
        assert f"{full + more:,} blocks while it is processed, {left + more:,} after" in line


def test_these_parts_need_neither_vllm_nor_torch_for_counts():
    code = (
        "import sys, pyramidkv.vllm.settings, pyramidkv.vllm.chunks, pyramidkv.vllm.checks; "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
