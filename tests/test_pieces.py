"""A prompt in pieces: bounded, exact in number, equal to a dense reference that does the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference
from test_equality import small
from tiny import HYBRIDS, positions_of, prompt_ids, tiny_model

import pyramidkv
from pyramidkv.compression import make_compression
from pyramidkv.errors import CacheStateError, PromptError
from pyramidkv.method_options import MethodError
from pyramidkv.methods import METHODS

IN_PIECES = [name for name, method in METHODS.items() if method.can("prefill chunks")]


def feed(model, cache, ids, mask, sizes, watch=None):
    """Give a prompt in pieces and return the last logits."""
    seen = 0
    for size in sizes:
        end = seen + size
        with torch.no_grad():
            out = model(
                input_ids=ids[:, seen:end],
                attention_mask=mask[:, :end],
                position_ids=positions_of(mask[:, :end])[:, seen:],
                past_key_values=cache,
            )
        seen = end
        if watch is not None:
            watch()
    return out.logits[:, -1]


def steps_of(model, cache, mask, steps):
    logits = []
    for step in steps:
        new, new_mask = step if isinstance(step, tuple) else (step, torch.ones_like(step))
        mask = torch.cat([mask, new_mask], dim=1)
        with torch.no_grad():
            out = model(
                input_ids=new,
                attention_mask=mask,
                position_ids=positions_of(mask)[:, -new.shape[1] :],
                past_key_values=cache,
            )
        logits.append(out.logits[:, -1])
    return logits


def make_cache(model, compression):
    return pyramidkv.CompressedCache(model, compression.method, **compression.amounts)


def assert_same_in_pieces(model, compression, lengths, sizes, question=0, steps=None):
    ids, mask = prompt_ids(*lengths)
    rows = len(lengths)
    steps = [prompt_ids(*[1] * rows, seed=50 + i)[0] for i in range(6)] if steps is None else steps
    expected = Reference(model, compression).decode(ids, mask, steps, sizes, question)
    cache = make_cache(model, compression)
    cache.expect_prompt(mask, question)
    actual = [feed(model, cache, ids, mask, sizes)]
    cache.end_prompt()
    assert cache.tokens_seen == ids.shape[1] - question
    schedules = [compression.schedule(len(cache.compressed_layers), n - question) for n in lengths]
    assert cache.schedules == schedules
    assert cache.kept_lengths() == [list(kept) for kept in zip(*schedules, strict=True)]
    if question:
        mask = mask[:, :-question]
    actual += steps_of(model, cache, mask, steps)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    return cache


@pytest.mark.parametrize("lengths", [(60,), (60, 9, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize("sizes", [(20, 20, 20), (7, 1, 50, 2), (59, 1), (3,) * 20])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_pieces_equal_a_dense_reference_that_evicts_after_each(attention, sizes, lengths):
    assert_same_in_pieces(tiny_model("llama", attention), small("pyramidkv"), lengths, sizes)


@pytest.mark.parametrize(
    "architecture", ["gemma2", "gemma3_text", "mixtral", "phi3", "qwen3", *HYBRIDS]
)
def test_every_kind_of_model_takes_pieces(architecture):
    model = tiny_model(architecture, "eager")
    assert_same_in_pieces(model, small("pyramidkv"), (60, 9, 43), (25, 25, 10))


@pytest.mark.parametrize("name", IN_PIECES)
def test_every_method_that_can_takes_pieces(name):
    model = tiny_model("qwen3", "sdpa")
    assert_same_in_pieces(model, small(name, 24), (60, 9, 43), (25, 25, 10))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h2o", {"group_reduce": "max", "kernel_size": 3}),
        ("snapkv", {"window_reduce": "max", "value_norm": True}),
        ("snapkv", {"allocation": "power", "gamma": 2.0}),
        ("pyramidkv", {"window_size": 12}),  # longer than a piece
    ],
)
def test_options_hold_in_pieces(name, options):
    model = tiny_model("llama", "sdpa")
    assert_same_in_pieces(model, small(name, 24, **options), (60, 9, 43), (8,) * 7 + (4,))


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(IN_PIECES)))
def test_methods_that_cannot_refuse_and_name_those_that_can(name):
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60)
    cache = pyramidkv.CompressedCache(model, name, 40)
    cache.expect_prompt(mask)
    with pytest.raises(MethodError, match="several pieces; full, streamingllm, h2o, snapkv"):
        feed(model, cache, ids, mask, (30, 30))


@pytest.mark.parametrize("name", METHODS)
def test_one_piece_is_exactly_the_same_as_a_prompt_that_was_not_announced(name):
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60, 9, 43)
    plain, announced = (make_cache(model, small(name, 24)) for _ in range(2))
    announced.expect_prompt(mask)
    assert torch.equal(
        feed(model, plain, ids, mask, (60,)), feed(model, announced, ids, mask, (60,))
    )
    for a, b in zip(plain.compressed_layers, announced.compressed_layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        for row in range(3):
            assert torch.equal(a.kept_positions(row), b.kept_positions(row))


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from(["pyramidkv", "snapkv", "h2o", "streamingllm"]),
    st.integers(10, 60),
)
def test_no_layer_ever_holds_more_than_its_share_and_the_number_kept_is_that_of_one_pass(
    sizes, name, budget
):
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(sum(sizes))
    cache = make_cache(model, small(name, budget))
    cache.expect_prompt(mask)
    final = cache.schedules[0]
    seen = 0

    def watch():
        nonlocal seen
        seen += sizes[len(held)]
        held.append([n[0] for n in cache.kept_lengths()])
        assert held[-1] == [min(share, seen) for share in final]
        rows = sum(final)
        assert cache.kv_bytes <= rows * 2 * 2 * 8 * 4  # K and V, 2 heads, dimension 8, float32

    held: list[list[int]] = []
    feed(model, cache, ids, mask, sizes, watch)
    assert held[-1] == final
    assert sum(final) == 4 * min(budget, sum(sizes))
    options = cache.compression.method.options
    for layer in cache.compressed_layers:
        for head in layer.kept_positions().tolist():
            assert head == sorted(set(head))
            assert head[: min(options.sink_tokens, len(head))] == list(
                range(min(options.sink_tokens, len(head)))
            )
            window = min(options.window_size, len(head))
            assert head[len(head) - window :] == list(range(sum(sizes) - window, sum(sizes)))


def test_during_a_piece_a_layer_holds_its_share_and_the_piece(monkeypatch):
    from pyramidkv.layer import CompressedLayer

    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(96)
    cache = make_cache(model, small("pyramidkv"))
    cache.expect_prompt(mask)
    final = cache.schedules[0]
    finish = CompressedLayer.finish
    widest = [0] * 4

    def watch(self, queries, keys, values, *rest):
        assert self.keys is None, "the stored rows are held twice"
        widest[self.index] = max(widest[self.index], keys.shape[2])
        return finish(self, queries, keys, values, *rest)

    monkeypatch.setattr(CompressedLayer, "finish", watch)
    feed(model, cache, ids, mask, (16,) * 6)
    assert widest == [share + 16 for share in final]


def test_what_scoring_remembers_is_let_go_with_the_last_piece():
    model = tiny_model("llama", "sdpa")
    for name in ("pyramidkv", "h2o"):
        ids, mask = prompt_ids(60)
        cache = make_cache(model, small(name))
        cache.expect_prompt(mask)
        feed(model, cache, ids[:, :30], mask[:, :30], (30,))
        remembered = cache.allocated_bytes
        with torch.no_grad():
            model(ids[:, 30:], attention_mask=mask, past_key_values=cache)
        plain = make_cache(model, small(name))
        feed(model, plain, ids, mask, (60,))
        assert cache.allocated_bytes == plain.allocated_bytes
        assert remembered > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *HYBRIDS])
def test_what_does_not_fit_the_announced_prompt_is_refused_and_harms_nothing(architecture):
    model = tiny_model(architecture, "sdpa")
    ids, mask = prompt_ids(60, 30)
    cache = make_cache(model, small("pyramidkv"))
    cache.expect_prompt(mask)
    feed(model, cache, ids[:, :40], mask[:, :40], (40,))
    with pytest.raises(CacheStateError, match="21 tokens were given, but only 20"):
        feed(model, cache, ids[:, :21], mask, (21,))
    with pytest.raises(CacheStateError, match="not all of it"):
        cache.end_prompt()
    with pytest.raises(CacheStateError, match="has a prompt already"):
        cache.expect_prompt(mask)
    with torch.no_grad():
        model(
            ids[:, 40:],
            attention_mask=mask,
            position_ids=positions_of(mask)[:, 40:],
            past_key_values=cache,
        )
    whole = make_cache(model, small("pyramidkv"))
    whole.expect_prompt(mask)
    feed(model, whole, ids, mask, (40, 20))
    for a, b in zip(cache.compressed_layers, whole.compressed_layers, strict=True):
        assert torch.equal(a.keys, b.keys)


def test_other_padding_than_announced_is_refused():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60, 30)
    cache = make_cache(model, small("pyramidkv"))
    cache.expect_prompt(mask)
    with pytest.raises(PromptError, match="other padding"):
        feed(model, cache, ids, torch.ones_like(mask), (40, 20))
    cache.reset()
    cache.expect_prompt(mask)
    with pytest.raises(PromptError, match="1 rows"):
        feed(model, cache, ids[:1], mask[:1], (40, 20))
    cache.reset()
    with pytest.raises(PromptError, match="pad on the left"):
        cache.expect_prompt(mask.flip(-1))
    with pytest.raises(PromptError, match="must be"):
        cache.expect_prompt(mask[0])


def test_generate_takes_its_prompt_in_pieces_once_it_is_announced():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60, 25)
    compression = small("pyramidkv")
    by_generate = make_cache(model, compression)
    by_generate.expect_prompt(mask)
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=by_generate,
        max_new_tokens=5,
        do_sample=False,
        prefill_chunk_size=16,
    )
    by_hand = make_cache(model, compression)
    by_hand.expect_prompt(mask)
    logits = feed(model, by_hand, ids, mask, (16, 16, 16, 12))
    assert torch.equal(out[:, 60], logits.argmax(-1))
    for a, b in zip(by_generate.compressed_layers, by_hand.compressed_layers, strict=True):
        assert torch.equal(a.keys[:, :, : b.keys.shape[2]], b.keys)


@pytest.mark.parametrize("length", [(60,), (60, 20, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize("budget", [24, 100])
def test_renumbered_tokens_end_where_the_context_does(budget, length):
    model = tiny_model("llama", "sdpa")
    compression = make_compression("streamingllm-renumbered", budget)
    assert_same_in_pieces(model, compression, length, (60,), question=8)


def test_what_follows_a_question_before_the_prompt_is_ended_is_refused():
    model = tiny_model("gemma3_text", "sdpa")
    ids, mask = prompt_ids(60)
    cache = make_cache(model, small("pyramidkv"))
    cache.expect_prompt(mask, 8)
    feed(model, cache, ids, mask, (60,))
    with pytest.raises(CacheStateError, match=r"call cache.end_prompt\(\)"):
        steps_of(model, cache, mask, [prompt_ids(1)[0]])


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next"])
def test_padding_after_the_prompt_is_refused_where_other_layers_would_count_it(architecture):
    model = tiny_model(architecture, "eager")
    ids, mask = prompt_ids(60, 30)
    cache = make_cache(model, small("pyramidkv"))
    feed(model, cache, ids, mask, (60,))
    cache.end_prompt()
    with pytest.raises(CacheStateError, match="padding after the prompt"):
        steps_of(model, cache, mask, [prompt_ids(7, 3)])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("lengths", [(60,), (60, 20, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize("sizes", [(60,), (25, 25, 10), (52, 8)])
@pytest.mark.parametrize("name", ["pyramidkv", "h2o", "streamingllm"])
def test_a_question_votes_and_is_forgotten(architecture, lengths, sizes, name):
    model = tiny_model(architecture, "eager")
    cache = assert_same_in_pieces(model, small(name), lengths, sizes, question=8)
    assert cache.prompt_lengths == [length - 8 for length in lengths]


def test_the_question_decides_what_is_kept():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(80)
    kept = []
    for seed in (1, 2):
        asked = ids.clone()
        asked[:, -10:] = prompt_ids(10, seed=seed)[0]
        cache = make_cache(model, small("snapkv", 24))
        cache.expect_prompt(mask, 10)
        feed(model, cache, asked, mask, (80,))
        kept.append(cache.compressed_layers[-1].kept_positions())
    assert not torch.equal(*kept)


def test_a_question_in_two_pieces_is_refused():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60)
    cache = make_cache(model, small("pyramidkv"))
    cache.expect_prompt(mask, 10)
    with pytest.raises(CacheStateError, match="must come whole in the prompt's last piece"):
        feed(model, cache, ids, mask, (55, 5))
    with pytest.raises(PromptError, match="question has 60 tokens"):
        make_cache(model, small("pyramidkv")).expect_prompt(mask, 60)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_question_is_refused_where_a_layer_holds_a_state(architecture):
    cache = make_cache(tiny_model(architecture), small("pyramidkv"))
    with pytest.raises(CacheStateError, match="one state of all tokens seen"):
        cache.expect_prompt(prompt_ids(60)[1], 10)


@pytest.mark.parametrize("sizes", [(60,), (30, 30)])
def test_what_follows_an_announced_prompt_cannot_be_its_rest(sizes):
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60)
    cache = make_cache(model, small("pyramidkv"))
    cache.expect_prompt(mask)
    feed(model, cache, ids, mask, sizes)
    steps_of(model, cache, mask, [prompt_ids(5)[0]])
    assert cache.tokens_seen == 65


def test_progress_counts_the_layers_of_all_pieces():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(50)
    seen = []
    cache = pyramidkv.CompressedCache(
        model, "pyramidkv", 40, on_layer=lambda done, total: seen.append((done, total))
    )
    cache.expect_prompt(mask)
    feed(model, cache, ids, mask, (20, 20, 10))
    assert seen == [(i, 12) for i in range(1, 13)]


def test_a_ratio_is_that_of_the_whole_prompt():
    model = tiny_model("llama", "sdpa")
    compression = make_compression("snapkv", None, 0.5, window_size=6, kernel_size=5)
    cache = assert_same_in_pieces(model, compression, (60, 30), (20, 20, 20))
    assert cache.schedules == [[30] * 4, [15] * 4]
