"""Eviction while decoding: the cache stays at its budget, by each method's own rule."""

from __future__ import annotations

import pytest
import torch
from reference import Reference
from test_pieces import feed, make_cache, steps_of
from tiny import prompt_ids, tiny_model

import pyramidkv
from pyramidkv.budgets import BudgetError
from pyramidkv.compression import make_compression
from pyramidkv.errors import CacheStateError
from pyramidkv.method_options import MethodError
from pyramidkv.methods import METHODS

ABLE = [name for name, method in METHODS.items() if method.can("decode budget")]


def decoding(name, budget=20, decode_budget=24, interval=5, **options):
    if name in ("pyramidkv", "snapkv"):
        options = {"kernel_size": 5, **options}
    if name in ("pyramidkv", "snapkv", "h2o"):
        options = {"window_size": 6, **options}
    return make_compression(
        name, budget, decode_budget=decode_budget, decode_interval=interval, **options
    )


def assert_same(model, compression, lengths, steps, sizes=None, question=0):
    ids, mask = prompt_ids(*lengths)
    sizes = sizes or (ids.shape[1],)
    expected = Reference(model, compression).decode(ids, mask, steps, sizes, question)
    cache = make_cache(model, compression)
    cache.expect_prompt(mask, question)
    actual = [feed(model, cache, ids, mask, sizes)]
    cache.end_prompt()
    mask = mask[:, : mask.shape[1] - question]
    actual += steps_of(model, cache, mask, steps)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    return cache


def single_steps(rows, count):
    return [prompt_ids(*[1] * rows, seed=70 + i)[0] for i in range(count)]


@pytest.mark.parametrize("lengths", [(60,), (60, 9, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize("name", ABLE)
def test_every_method_that_can_equals_a_dense_reference(name, lengths):
    model = tiny_model("qwen3", "sdpa")
    assert_same(model, decoding(name), lengths, single_steps(len(lengths), 32))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h2o", {"group_reduce": "max", "interval": 1}),
        ("h2o", {"interval": 90}),  # sums are taken in between
        ("snapkv", {"window_reduce": "max", "value_norm": True, "interval": 3}),
        ("pyramidkv", {"budget": 40, "decode_budget": 20}),  # less than the prompt was given
        ("pyramidkv", {"budget": 14, "decode_budget": 40}),
        ("streamingllm", {"window_size": 4, "interval": 1}),
    ],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_options_and_intervals(name, options, attention):
    model = tiny_model("llama", attention)
    count = 100 if options.get("interval") == 90 else 24
    assert_same(model, decoding(name, **options), (60, 30), single_steps(2, count))


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("name", ["pyramidkv", "h2o", "streamingllm"])
def test_other_kinds_of_layers_beside_decode_budgets_and_pieces(name, architecture):
    model = tiny_model(architecture, "sdpa")
    steps = [prompt_ids(7, 7, 7, seed=1)[0], *single_steps(3, 9)]
    assert_same(model, decoding(name), (60, 9, 43), steps, (20, 20, 20))


@pytest.mark.parametrize("name", ["pyramidkv", "h2o", "streamingllm"])
def test_padded_turns_and_pieces_together(name):
    """Left padding in later turns leaves holes between stored rows."""
    model = tiny_model("llama", "sdpa")
    turns = [prompt_ids(7, 3, 5, seed=1), *single_steps(3, 4), prompt_ids(2, 8, 8, seed=2)]
    steps = [*turns, *single_steps(3, 9)]
    assert_same(model, decoding(name), (60, 9, 43), steps, (20, 20, 20))


@pytest.mark.parametrize("sizes", [(60,), (25, 25, 10), (52, 8)])
@pytest.mark.parametrize("lengths", [(60,), (60, 11, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "streamingllm"])
def test_a_question_that_was_dropped_votes_no_more(name, lengths, sizes):
    model = tiny_model("llama", "sdpa")
    compression = decoding(name, 20, 24, 1)
    assert_same(model, compression, lengths, single_steps(len(lengths), 16), sizes, question=8)


def test_what_the_prompt_needed_is_freed_once_the_decode_budget_is_smaller():
    model = tiny_model("llama", "sdpa")
    settings = {"window_size": 6, "decode_budget": 40, "decode_interval": 4}
    for lengths in ((900,), (900, 500)):
        ids, mask = prompt_ids(*lengths)
        cache = pyramidkv.CompressedCache(model, "snapkv", 800, **settings)
        feed(model, cache, ids, mask, (900,))
        before = cache.allocated_bytes
        steps = single_steps(len(lengths), 9)  # evicts after 1, 5 and 9
        steps_of(model, cache, mask, steps)
        assert cache.allocated_bytes < before / 4
        assert cache.kept_lengths() == [[40] * len(lengths)] * 4
        steps_of(model, cache, torch.cat([mask, torch.ones((len(lengths), 9))], 1).long(), steps)


@pytest.mark.parametrize("name", ABLE)
def test_the_cache_never_outgrows_its_budget_and_the_newest_tokens_survive(name):
    model = tiny_model("llama", "sdpa")
    budget, interval = 40, 8
    cache = pyramidkv.CompressedCache(model, name, decode_budget=budget, decode_interval=interval)
    ids, mask = prompt_ids(30)
    feed(model, cache, ids, mask, (30,))
    options = cache.compression.method.options
    seen, sizes, places = 30, set(), set()
    for index in range(300):
        with torch.no_grad():
            model(torch.tensor([[5 + index % 90]]), past_key_values=cache)
        seen += 1
        kept = [n[0] for n in cache.kept_lengths()]
        assert sum(kept) <= 4 * (budget + interval - 1)
        for layer in cache.compressed_layers:
            newest = min(max(options.window_size, 1), seen)
            for head in layer.kept_positions().tolist():
                assert head == sorted(set(head))
                assert head[-newest:] == list(range(seen - newest, seen))
                assert head[: options.sink_tokens] == list(range(options.sink_tokens))
        if index >= 100:
            sizes.add(cache.allocated_bytes)
            places.add(tuple(layer.keys.data_ptr() for layer in cache.compressed_layers))
        if (index + 1) % interval == 0 and seen >= budget:
            assert sum(kept) <= 4 * budget
    assert sum(kept) > 4 * budget  # 300 is no multiple of the interval
    assert len(places) == 1, "storage moved although nothing has to grow"
    assert cache.tokens_seen == 330


def test_at_each_interval_the_total_is_exactly_the_budget():
    model = tiny_model("llama", "sdpa")
    for name in ABLE:
        cache = pyramidkv.CompressedCache(model, name, 40, decode_budget=44, decode_interval=4)
        ids, mask = prompt_ids(60)
        feed(model, cache, ids, mask, (60,))
        for _ in range(160):
            with torch.no_grad():
                model(torch.tensor([[9]]), past_key_values=cache)
        schedule = cache.compression.decode_schedule(4, 220)
        assert sum(schedule) == 4 * 44
        assert [n[0] for n in cache.kept_lengths()] == schedule


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ABLE)))
def test_methods_that_cannot_refuse_and_name_those_that_can(name):
    with pytest.raises(MethodError, match="a decode budget; streamingllm, h2o, snapkv, pyramidkv"):
        make_compression(name, decode_budget=100)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(BudgetError, match="smallest possible budget is 36"):
        make_compression("pyramidkv", 100, decode_budget=35)
    with pytest.raises(MethodError, match="whole number"):
        make_compression("pyramidkv", 100, decode_budget=64, decode_interval=0)
    with pytest.raises(MethodError, match="without a decode budget"):
        make_compression("pyramidkv", 100, decode_interval=4)
    with pytest.raises(MethodError, match="list of layer budgets"):
        make_compression("snapkv", layer_budgets=[50, 50], decode_budget=64)
    assert make_compression("snapkv", decode_budget=64).budget == 64


def test_tokens_cannot_be_taken_back():
    model = tiny_model("llama", "sdpa")
    cache = make_cache(model, decoding("pyramidkv"))
    ids, mask = prompt_ids(60)
    feed(model, cache, ids, mask, (60,))
    steps_of(model, cache, mask, single_steps(1, 2))
    with pytest.raises(CacheStateError, match="decode budget"):
        cache.crop(-1)


@pytest.mark.parametrize("name", ["pyramidkv", "h2o"])
def test_beams_follow_their_own_tokens(name):
    """Reordering moves remembered queries and sums with the rows they belong to."""
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60, 30)
    both = make_cache(model, decoding(name))
    feed(model, both, ids, mask, (60,))
    steps = single_steps(2, 3)
    steps_of(model, both, mask, steps)
    mask = torch.cat([mask, torch.ones((2, 3), dtype=torch.long)], dim=1)
    swapped = torch.tensor([1, 0])
    both.reorder_cache(swapped)
    later = single_steps(2, 12)
    got = steps_of(model, both, mask[swapped], later)
    straight = make_cache(model, decoding(name))
    feed(model, straight, ids, mask[:, :60], (60,))
    steps_of(model, straight, mask[:, :60], steps)
    want = steps_of(model, straight, mask, [step[swapped] for step in later])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[swapped], b, atol=1e-5, rtol=1e-5)


def test_generate_decodes_within_a_budget():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60, 25)
    with pyramidkv.compress(model, "snapkv", decode_budget=40, decode_interval=4):
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=80,
            do_sample=False,
            return_dict_in_generate=True,
        )
    cache = getattr(out, "cache", None) or out.past_key_values
    assert max(max(kept) for kept in cache.kept_lengths()) <= 43
    assert cache.tokens_seen == 139
