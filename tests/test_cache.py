"""The cache holds what the schedule says, in bytes, and keeps its state to itself."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from test_equality import engine_logits
from tiny import HYBRIDS, positions_of, prompt_ids, tiny_model

import pyramidkv
from pyramidkv.budgets import BudgetError
from pyramidkv.compression import make_compression
from pyramidkv.errors import CacheStateError, PromptError
from pyramidkv.layer import CompressedLayer
from pyramidkv.storage import GROWTH_ROWS

SMALL = {"window_size": 6, "kernel_size": 5}
KINDS = ["llama", "gemma3_text", "qwen3_next", "lfm2"]  # one of each kind of layer beside attention
KV_HEADS, HEAD_DIM, LAYERS = 2, 8, 4


def small_cache(model, budget=20, **options):
    return pyramidkv.CompressedCache(model, "pyramidkv", budget, **{**SMALL, **options})


def prefill(model, cache, *lengths, seed=0):
    ids, mask = prompt_ids(*lengths, seed=seed)
    with torch.no_grad():
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions_of(mask),
            past_key_values=cache,
        )
    return out.logits[:, -1]


def step(model, cache, *tokens, rows=1):
    ids = torch.tensor([tokens] * rows)
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache).logits[:, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_held_are_those_of_the_schedule_plus_the_room_to_grow(dtype):
    model = tiny_model("llama", "sdpa").to(dtype)
    cache = small_cache(model, budget=50)
    prefill(model, cache, 400)
    schedule = make_compression("pyramidkv", 50, **SMALL).schedule(LAYERS, 400)
    row_bytes = 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
    assert cache.kv_bytes == sum(schedule) * row_bytes
    held = sum(tensor.untyped_storage().nbytes() for tensor in storages(cache))
    assert held == (sum(schedule) + LAYERS * GROWTH_ROWS) * row_bytes
    positions = sum(schedule) * KV_HEADS * 4
    assert cache.allocated_bytes == held + positions


def storages(cache):
    return [tensor for layer in cache.compressed_layers for tensor in (layer.keys, layer.values)]


def test_keys_are_stored_per_kv_head_not_per_query_head():
    model = tiny_model("llama", "eager")
    cache = small_cache(model)
    prefill(model, cache, 60)
    assert model.config.num_attention_heads == 6
    for layer in cache.compressed_layers:
        assert layer.keys.shape[:2] == (1, KV_HEADS)


def test_a_layers_full_keys_are_freed_before_the_next_layer_is_compressed(monkeypatch):
    model = tiny_model("llama", "sdpa")
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    finish = CompressedLayer.finish

    def watch(self, queries, keys, values, *rest):
        alive.append(sum(ref() is not None for ref in seen))
        seen.extend(weakref.ref(tensor) for tensor in (queries, keys, values))
        return finish(self, queries, keys, values, *rest)

    monkeypatch.setattr(CompressedLayer, "finish", watch)
    gc.disable()  # freed by reference count, not whenever the collector comes round
    try:
        prefill(model, small_cache(model), 100)
    finally:
        gc.enable()
    assert alive == [0] * LAYERS


def test_two_prompts_in_a_row_give_what_fresh_caches_give():
    model = tiny_model("llama", "sdpa")
    expected = []
    for seed, length in ((1, 200), (2, 30), (3, 90)):
        cache = small_cache(model)
        logits = prefill(model, cache, length, seed=seed)
        expected.append((logits, step(model, cache, 7), cache.kept_lengths()))
    cache = small_cache(model)
    for (seed, length), (logits, next_logits, kept) in zip(
        ((1, 200), (2, 30), (3, 90)), expected, strict=True
    ):
        cache.reset()
        assert cache.tokens_seen == 0
        assert torch.equal(prefill(model, cache, length, seed=seed), logits)
        assert torch.equal(step(model, cache, 7), next_logits)
        assert cache.kept_lengths() == kept


def test_the_order_of_prompts_changes_nothing():
    model = tiny_model("llama", "sdpa")

    def answer(seed, length):
        cache = small_cache(model)
        prefill(model, cache, length, seed=seed)
        return step(model, cache, 9)

    first = [answer(1, 150), answer(2, 40)]
    second = [answer(2, 40), answer(1, 150)]
    assert torch.equal(first[0], second[1])
    assert torch.equal(first[1], second[0])


def test_the_cache_grows_by_the_tokens_generated_and_in_steps():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60)
    before = [kept[0] for kept in cache.kept_lengths()]
    places = {layer.keys.untyped_storage().data_ptr() for layer in cache.compressed_layers}
    for _ in range(GROWTH_ROWS):
        step(model, cache, 5)
    same = {layer.keys.untyped_storage().data_ptr() for layer in cache.compressed_layers}
    assert same == places, "storage was copied although there was room"
    step(model, cache, 5)
    after = [kept[0] for kept in cache.kept_lengths()]
    assert after == [n + GROWTH_ROWS + 1 for n in before]
    assert cache.tokens_seen == 60 + GROWTH_ROWS + 1


def test_next_position_is_tokens_seen_not_rows_stored():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60)
    assert cache.get_seq_length() == 60
    assert cache.get_mask_sizes(3, 0) == (3, 60)  # a mask over the new tokens only
    with torch.no_grad():
        by_itself = model(torch.tensor([[5]]), past_key_values=cache).logits
        cache.crop(-1)
        told = model(
            torch.tensor([[5]]), position_ids=torch.tensor([[60]]), past_key_values=cache
        ).logits
    assert torch.equal(by_itself, told)


def test_pads_are_never_kept():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model, budget=30)
    prefill(model, cache, 60, 40, 25)
    assert cache.prompt_lengths == [60, 40, 25]
    for row, length in enumerate([60, 40, 25]):
        for layer in cache.compressed_layers:
            positions = layer.kept_positions(row)
            assert positions.shape[1] == cache.schedules[row][layer.index]
            assert positions.min() >= 0
            assert positions.max() == length - 1


@pytest.mark.parametrize("architecture", KINDS)
def test_each_row_of_a_padded_batch_keeps_what_it_keeps_alone(architecture):
    model = tiny_model(architecture, "sdpa")
    together = small_cache(model)
    prefill(model, together, 60, 25, 43)
    ids, _ = prompt_ids(60, 25, 43)
    for row, length in enumerate([60, 25, 43]):
        alone = small_cache(model)
        with torch.no_grad():
            model(ids[row : row + 1, -length:], past_key_values=alone)
        for a, b in zip(alone.compressed_layers, together.compressed_layers, strict=True):
            assert torch.equal(a.kept_positions(), b.kept_positions(row))


def test_kept_positions_are_sinks_window_and_what_lies_between():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60)
    step(model, cache, 5)
    for layer in cache.compressed_layers:
        for head in layer.kept_positions().tolist():
            assert head == sorted(set(head))
            assert set(range(4)) <= set(head)
            assert set(range(54, 61)) <= set(head)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_unused_slots_may_hold_anything(attention):
    """Storage is not initialised; what lies in slots no token uses must not leak."""
    model = tiny_model("llama", attention)
    compression = make_compression("pyramidkv", 24, **SMALL)
    ids, mask = prompt_ids(60, 12, 30)
    steps = [prompt_ids(1, 1, 1, seed=i)[0] for i in range(3)]
    clean, _ = engine_logits(model, compression, ids, mask, steps)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        poisoned, _ = engine_logits(model, compression, ids, mask, steps)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.isfinite(b).all()
        torch.testing.assert_close(a, b)


def test_a_new_cache_is_not_falsy():
    cache = small_cache(tiny_model())
    assert cache
    assert len(cache) == LAYERS
    assert cache.kept_lengths() == [[]] * LAYERS
    assert cache.kv_bytes == cache.allocated_bytes == 0


def test_crop_takes_back_what_came_after_the_prompt():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60, 30)
    kept = cache.kept_lengths()
    expected = step(model, cache, 5, rows=2)
    for token in (6, 7, 8):
        step(model, cache, token, rows=2)
    cache.crop(-4)
    assert cache.tokens_seen == 60
    assert cache.kept_lengths() == kept
    assert torch.equal(step(model, cache, 5, rows=2), expected)


def test_crop_into_the_compressed_prompt_is_refused_and_changes_nothing():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60)
    step(model, cache, 5)
    kept = cache.kept_lengths()
    with pytest.raises(CacheStateError, match="only the 1 that came after"):
        cache.crop(-2)
    with pytest.raises(CacheStateError, match="negative number"):
        cache.crop(10)
    assert cache.kept_lengths() == kept
    assert cache.tokens_seen == 61


@pytest.mark.parametrize("architecture", KINDS)
def test_batch_rows_can_be_chosen_repeated_and_reordered(architecture):
    model = tiny_model(architecture, "sdpa")

    def fresh():
        cache = small_cache(model)
        prefill(model, cache, 60, 25, 43)
        return cache

    mask = torch.cat([prompt_ids(60, 25, 43)[1], torch.ones(3, 1, dtype=torch.long)], dim=1)

    def logits(cache, rows):
        row_mask = mask[rows]
        with torch.no_grad():
            return model(
                input_ids=torch.full((len(rows), 1), 5),
                attention_mask=row_mask,
                position_ids=positions_of(row_mask)[:, -1:],
                past_key_values=cache,
            ).logits[:, -1]

    expected = logits(fresh(), [0, 1, 2])
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = fresh()
        change(cache)
        assert cache.prompt_lengths == [[60, 25, 43][row] for row in rows]
        torch.testing.assert_close(logits(cache, rows), expected[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", KINDS)
def test_a_prompt_in_several_pieces_is_refused_not_compressed_piece_by_piece(architecture):
    model = tiny_model(architecture, "sdpa")
    cache, expected = small_cache(model), small_cache(model)
    prefill(model, cache, 60)
    with pytest.raises(CacheStateError, match="end_prompt"):
        step(model, cache, 5, 6, 7)
    cache.end_prompt()  # which is what the message proposes
    prefill(model, expected, 60)
    expected.end_prompt()
    assert torch.equal(step(model, cache, 5, 6, 7), step(model, expected, 5, 6, 7))
    assert cache.tokens_seen == 63


def test_after_end_prompt_more_tokens_are_added_and_kept():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    with pytest.raises(CacheStateError, match="not been processed"):
        cache.end_prompt()
    prefill(model, cache, 60)
    kept = [n[0] for n in cache.kept_lengths()]
    cache.end_prompt()
    step(model, cache, 5, 6, 7)
    assert [n[0] for n in cache.kept_lengths()] == [n + 3 for n in kept]


@pytest.mark.parametrize("architecture", KINDS)
def test_a_model_switched_to_other_attention_meanwhile_is_noticed(architecture):
    model = tiny_model(architecture, "sdpa")
    cache = small_cache(model)
    switched = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with pytest.raises(CacheStateError, match="attention implementation was changed"):
        prefill(model, cache, 60)
    model.set_attn_implementation(switched)
    assert torch.equal(prefill(model, cache, 60), prefill(model, small_cache(model), 60))


class Interruption(Exception):
    pass


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp"])
@pytest.mark.parametrize("during", ["prompt", "step"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])  # there, the first one slides
def test_an_interrupted_pass_is_noticed_until_the_cache_is_reset(architecture, during, part, place):
    """Layers would be out of step: some have the tokens of the pass, others not."""
    model = tiny_model(architecture, "sdpa")
    cache = small_cache(model)
    if during == "step":
        prefill(model, cache, 60)

    def interrupt(*args):
        raise Interruption

    module = model.model.layers[place].get_submodule(part)
    hook = module.register_forward_pre_hook(interrupt)
    with pytest.raises(Interruption):
        step(model, cache, 5) if during == "step" else prefill(model, cache, 60)
    hook.remove()
    with pytest.raises(CacheStateError, match="was interrupted"):
        step(model, cache, 5)
    cache.reset()
    prefill(model, cache, 60)
    assert cache.tokens_seen == 60


def test_a_prompt_fed_token_by_token_is_a_prompt_of_one_token():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    for token in range(5, 60):
        step(model, cache, token)
    assert cache.prompt_lengths == [1]
    assert cache.kept_lengths() == [[55]] * LAYERS


@pytest.mark.parametrize("architecture", KINDS)
def test_a_copy_is_independent_and_keeps_the_model_switched(architecture):
    model = tiny_model(architecture, "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60)
    first, second = copy.deepcopy(cache), copy.deepcopy(cache)
    expected = step(model, cache, 7)
    kept = first.kept_lengths()
    del cache
    assert torch.equal(step(model, first, 7), expected)
    step(model, first, 8)
    assert second.kept_lengths() == kept
    assert torch.equal(step(model, second, 7), expected)
    del first, second
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("architecture", KINDS)
def test_a_prompt_processed_in_inference_mode_can_be_continued_outside_of_it(architecture):
    model = tiny_model(architecture, "sdpa")
    ids, mask = prompt_ids(60, 25)
    cache, expected = small_cache(model), small_cache(model)
    for each, mode in ((cache, torch.inference_mode()), (expected, torch.no_grad())):
        with mode:
            model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions_of(mask),
                past_key_values=each,
            )
    for token in range(5, 8 + GROWTH_ROWS):
        assert torch.equal(step(model, cache, token, rows=2), step(model, expected, token, rows=2))
    with torch.inference_mode():
        cache.reorder_cache(torch.tensor([1, 0]))
    step(model, cache, 5, rows=2)


@pytest.mark.parametrize("architecture", KINDS)
def test_reset_empties_layers_of_every_kind(architecture):
    model = tiny_model(architecture, "sdpa")
    cache = small_cache(model)
    logits = prefill(model, cache, 60, 25)
    step(model, cache, 5, rows=2)
    cache.reset()
    assert torch.equal(prefill(model, cache, 60, 25), logits)


def test_crop_is_refused_where_a_sliding_window_has_dropped_tokens():
    model = tiny_model("gemma3_text", "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60)
    step(model, cache, 5)
    with pytest.raises(CacheStateError, match="sliding-window layer has already dropped"):
        cache.crop(-1)
    assert cache.tokens_seen == 61


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_crop_is_refused_where_a_layer_holds_a_state(architecture):
    model = tiny_model(architecture, "sdpa")
    cache, expected = small_cache(model), small_cache(model)
    for each in (cache, expected):
        prefill(model, each, 60)
        step(model, each, 5)
    with pytest.raises(CacheStateError, match="one state of all tokens seen"):
        cache.crop(-1)
    assert torch.equal(step(model, cache, 6), step(model, expected, 6))


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_states_are_held_but_are_no_keys_and_values(architecture):
    model = tiny_model(architecture, "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60)
    attention = cache.compressed_layers
    assert [type(layer) for layer in cache.layers[1::2]] == [type(layer) for layer in attention]
    assert cache.kv_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in attention)
    states = cache.allocated_bytes - sum(layer.allocated_bytes for layer in attention)
    recurrent = {} if architecture.startswith("lfm2") else {"recurrent_states": (1, 4, 8, 8)}
    width, kernel = (64, 4) if recurrent else (48, 3)
    for layer in cache.layers[::2]:
        for name, shape in ({"conv_states": (1, width, kernel)} | recurrent).items():
            (state,) = getattr(layer, name).values()
            assert state.shape == shape
            states -= state.nbytes
    assert states == 0


def test_budgets_that_do_not_fit_the_model_are_refused_before_any_work():
    model = tiny_model("llama", "sdpa")
    for budgets, message in (([50, 50], "2 entries"), ([5] * 4, "smallest possible")):
        with pytest.raises(BudgetError, match=message):
            pyramidkv.CompressedCache(model, "snapkv", layer_budgets=budgets)
    assert model.config._attn_implementation == "sdpa"


def test_padding_on_the_right_or_in_the_middle_is_refused():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60, 60)
    for hole in (slice(55, 60), slice(20, 22)):
        bad = mask.clone()
        bad[1, hole] = 0
        with pytest.raises(PromptError, match="pad on the left"), torch.no_grad():
            model(input_ids=ids, attention_mask=bad, past_key_values=small_cache(model))
    mask[1] = 0
    with pytest.raises(PromptError, match="all padding"), torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=small_cache(model))


def test_offloading_is_refused():
    model = tiny_model()
    with pytest.raises(CacheStateError, match="offloading is not supported"):
        small_cache(model).compressed_layers[0].offload()


def test_a_cache_is_freed_with_its_last_reference():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    prefill(model, cache, 60)
    step(model, cache, 5)
    layer = weakref.ref(cache.compressed_layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None, "a reference cycle keeps the memory until the collector runs"
    finally:
        gc.enable()


def test_no_gradients_are_kept_by_the_cache():
    model = tiny_model("llama", "sdpa")
    cache = small_cache(model)
    ids, _ = prompt_ids(60)
    model(ids, past_key_values=cache)  # without no_grad, as a careless loop would
    model(torch.tensor([[5]]), past_key_values=cache)
    for layer in cache.compressed_layers:
        assert not layer.keys.requires_grad
        assert not layer.values.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_half_precision_stays_near_float32(attention, dtype):
    ids, mask = prompt_ids(60, 41)
    steps = [prompt_ids(1, 1, seed=i)[0] for i in range(4)]
    compression = make_compression("streamingllm", 24)
    full, _ = engine_logits(tiny_model("llama", attention), compression, ids, mask, steps)
    half, cache = engine_logits(
        tiny_model("llama", attention).to(dtype), compression, ids, mask, steps
    )
    assert cache.compressed_layers[0].keys.dtype == dtype
    for a, b in zip(full, half, strict=True):
        assert (a - b.float()).norm() / a.norm() < 0.1
