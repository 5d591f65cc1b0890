"""Methods whose heads compete for a layer's tokens: exact, really smaller, and like the others."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import tiny_tokenizer, words
from reference import Reference
from test_equality import PAIRS, assert_same, engine_logits, small
from test_many import FULL, WINDOW, alone, go_on
from tiny import positions_of, prompt_ids, tiny_model

import pyramidkv
from pyramidkv.compression import make_compression
from pyramidkv.errors import CacheStateError
from pyramidkv.evaluation.answers import Prompt, answer_sample
from pyramidkv.many import compress_many
from pyramidkv.method_options import MethodError

SMALL = {"window_size": 6, "kernel_size": 5}
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 8


def processed(model, method="adakv", budget=20, lengths=(60,), **options):
    cache = pyramidkv.CompressedCache(model, method, budget, **{**SMALL, **options})
    ids, mask = prompt_ids(*lengths)
    with torch.no_grad():
        model(
            ids,
            attention_mask=mask,
            position_ids=positions_of(mask),
            past_key_values=cache,
            use_cache=True,
        )
    return cache


@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize(("architecture", "attention"), PAIRS)
def test_logits_equal_a_masked_dense_reference(architecture, attention, lengths):
    model = tiny_model(architecture, attention)
    assert_same(model, small("pyramidkv-ada"), lengths, [1] * 6)


@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
def test_later_turns_of_several_tokens_padded_too(lengths):
    model = tiny_model("qwen3", "sdpa")
    assert_same(model, small("adakv"), lengths, (1, 1, 17, 1, 5, 1))
    rows, compression = len(lengths), small("adakv")
    ids, mask = prompt_ids(*lengths)
    turn = prompt_ids(*[9 - 3 * row for row in range(rows)], seed=7)
    steps = [(ids_, mask_) for ids_, mask_ in (turn, prompt_ids(*[1] * rows, seed=8))]
    expected = Reference(model, compression).decode(ids, mask, steps)
    cache = processed(model, lengths=lengths)
    cache.end_prompt()
    for (new, new_mask), want in zip(steps, expected[1:], strict=True):
        mask = torch.cat([mask, new_mask], dim=1)
        with torch.no_grad():
            out = model(
                new,
                attention_mask=mask,
                position_ids=positions_of(mask)[:, -new.shape[1] :],
                past_key_values=cache,
            )
        torch.testing.assert_close(out.logits[:, -1], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("method", ["adakv", "pyramidkv-ada"])
def test_a_layers_total_is_exact_and_no_head_is_below_its_floor(method, floor):
    cache = processed(tiny_model("llama", "sdpa"), method, 24, (60, 25, 43), head_floor=floor)
    unequal = 0
    for layer, rows in zip(
        cache.compressed_layers, zip(*cache.schedules, strict=True), strict=True
    ):
        for row, share in enumerate(rows):
            heads = layer.head_lengths()[row]
            assert sum(heads) == share * KV_HEADS
            if share < cache.prompt_lengths[row]:
                assert min(heads) >= 10 + int(floor * (share - 10))
            unequal += len(set(heads)) > 1
            kept = layer.kept_positions(row)
            assert (kept >= 0).sum(-1).tolist() == heads
            for own, count in zip(kept.tolist(), heads, strict=True):
                held = own[len(own) - count :]
                assert held == sorted(set(held))
                assert set(range(4)) | set(range(cache.prompt_lengths[row])[-6:]) <= set(held)
    assert (unequal > 0) == (floor < 1)


def test_the_bytes_are_those_of_equal_heads():
    model = tiny_model("llama", "sdpa")
    for lengths in ((60,), (60, 60)):
        ours, equal = (processed(model, name, 24, lengths) for name in ("adakv", "snapkv"))
        wanted = len(lengths) * LAYERS * 24 * KV_HEADS * HEAD_DIM * 2 * 4
        assert ours.kv_bytes == equal.kv_bytes == wanted
        held = {
            states.untyped_storage().data_ptr(): states.untyped_storage().nbytes()
            for layer in ours.compressed_layers
            for states in (layer.ragged.keys, layer.ragged.values)
        }
        assert sum(held.values()) == wanted  # nothing else is behind them


def test_with_a_floor_of_one_it_is_snapkv_in_everything():
    model = tiny_model("qwen3", "sdpa")
    ids, mask = prompt_ids(60, 25, 43)
    for settings in (
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 2.0},
    ):
        answers = []
        for name, options in (("snapkv", {}), ("adakv", {"head_floor": 1})):
            cache = pyramidkv.CompressedCache(model, name, 20, **SMALL, **options)
            torch.manual_seed(0)
            answers.append(
                model.generate(
                    ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **settings
                ).tolist()
            )
        assert answers[0] == answers[1]


def test_rows_copies_and_cropping():
    model = tiny_model("llama", "sdpa")
    mask = torch.cat([prompt_ids(60, 25, 43)[1], torch.ones(3, 1, dtype=torch.long)], dim=1)

    def logits(cache, rows, token=5):
        own = mask[rows]
        with torch.no_grad():
            return model(
                torch.full((len(rows), 1), token),
                attention_mask=own,
                position_ids=positions_of(own)[:, -1:],
                past_key_values=cache,
            ).logits[:, -1]

    cache = processed(model, lengths=(60, 25, 43))
    kept = cache.kept_lengths()
    copied = copy.deepcopy(cache)
    expected = logits(cache, [0, 1, 2])
    cache.crop(-1)
    assert cache.kept_lengths() == kept
    assert torch.equal(logits(cache, [0, 1, 2]), expected)
    with pytest.raises(CacheStateError, match="only the 1 that came after"):
        cache.crop(-2)
    assert copied.kept_lengths() == kept
    copied.reorder_cache(torch.tensor([2, 0, 0]))
    assert copied.prompt_lengths == [43, 60, 60]
    torch.testing.assert_close(logits(copied, [2, 0, 0]), expected[[2, 0, 0]])
    cache.reset()
    assert cache.kv_bytes == cache.allocated_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contexts_answer_as_a_whole_prompt_and_can_be_saved(tmp_path, dtype):
    model, tokenizer = tiny_model("llama", "sdpa").to(dtype), tiny_tokenizer(True)
    make = {"method": "adakv", "budget": 24, **SMALL}
    context = pyramidkv.compress_context(model, tokenizer, words(90), **make)
    before = context.kv_bytes
    asked = ("w11 w20 w3", "w7", "w11 w20 w3")
    answers = [context.ask(question, max_new_tokens=8).token_ids for question in asked]
    assert answers[0] == answers[2]
    both = context.ask_batch(list(asked[:2]), max_new_tokens=8)
    if dtype == torch.float32:
        assert [answer.token_ids for answer in both] == answers[:2]
    assert context.kv_bytes == before
    path = tmp_path / "context.safetensors"
    context.save(path)
    loaded = pyramidkv.CompressedContext.load(path, model, tokenizer)
    assert loaded.record == json.loads(json.dumps(context.record))
    for mine, theirs in zip(
        loaded.cache.compressed_layers, context.cache.compressed_layers, strict=True
    ):
        assert mine.head_lengths() == theirs.head_lengths()
        assert torch.equal(mine.kept_positions(), theirs.kept_positions())
        assert torch.equal(mine.keys, theirs.keys)
    assert loaded.kv_bytes == before
    assert loaded.ask("w7", max_new_tokens=8).token_ids == answers[1]


def test_a_query_aware_context_drops_its_question():
    model, tokenizer = tiny_model("llama", "sdpa"), tiny_tokenizer(True)
    make = {"method": "adakv", "budget": 24, **SMALL}
    context = pyramidkv.compress_context(model, tokenizer, words(90), question="w11 w3", **make)
    assert context.ask("w11 w3", max_new_tokens=4).token_ids
    for layer, share in zip(
        context.cache.compressed_layers, context.cache.schedules[0], strict=True
    ):
        assert sum(layer.head_lengths()[0]) == share * KV_HEADS
        assert int(layer.kept_positions().max()) < context.cache.tokens_seen


def test_one_of_many_is_as_alone():
    model = tiny_model("qwen3", "sdpa")
    ids, _ = prompt_ids(80)
    steps = [prompt_ids(n, seed=50 + i)[0] for i, n in enumerate([5, 1, 1, 1])]
    group = [
        make_compression("adakv", 24, **WINDOW),
        make_compression("pyramidkv-ada", 40, **WINDOW),
        make_compression("adakv", 24, head_floor=0, value_norm=True, **WINDOW),
        make_compression("adakv", 200, **WINDOW),
    ]
    cache, full = compress_many(model, ids, [group, [FULL]]).caches
    assert full.kept_lengths() == [[80]] * LAYERS
    together = go_on(model, cache, len(group), steps)
    for row, compression in enumerate(group):
        expected, single = alone(model, ids, compression, steps)
        torch.testing.assert_close(together[:, row], expected, atol=2e-4, rtol=1e-4)
        assert cache.schedules[row] == single.schedules[0]
        for mine, theirs in zip(cache.compressed_layers, single.compressed_layers, strict=True):
            assert mine.head_lengths()[row] == theirs.head_lengths()[0]
    with pytest.raises(MethodError, match="give them as groups of their own"):
        compress_many(model, ids, [[group[0], make_compression("snapkv", 24, **WINDOW)]])


@pytest.mark.parametrize("agnostic", [False, True])
def test_evaluation_answers_as_each_alone(agnostic):
    model, tokenizer = tiny_model("qwen3", "sdpa"), tiny_tokenizer(False)
    arms = [make_compression(name, 24, **WINDOW) for name in ("snapkv", "adakv", "pyramidkv-ada")]
    arms.insert(1, FULL)
    prompt = Prompt(prompt_ids(80)[0][0].tolist(), 70, 0)
    together = answer_sample(model, tokenizer, prompt, arms, 6, agnostic=agnostic)
    for arm, answer in zip(arms, together, strict=True):
        (single,) = answer_sample(model, tokenizer, prompt, [arm], 6, agnostic=agnostic)
        assert answer == single
    assert together[0].kept_bytes == together[2].kept_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_budget": 30}, "adakv does not support a decode budget"),
        ({"allocation": "entropy"}, "adakv does not support budgets by the entropy"),
        ({"head_floor": 1.5}, "head_floor is 1.5; it is a number from 0 to 1"),
        ({"head_floor": True}, "head_floor is True; it is a number from 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(MethodError, match=message):
        pyramidkv.CompressedCache(tiny_model(), "adakv", 24, **SMALL, **options)
    with pytest.raises(MethodError, match="snapkv has no option 'head_floor'"):
        make_compression("snapkv", 24, head_floor=0.5)


def test_a_prompt_in_pieces_is_refused():
    model = tiny_model()
    cache = pyramidkv.CompressedCache(model, "adakv", 24, **SMALL)
    ids, mask = prompt_ids(60)
    cache.expect_prompt(mask)
    with pytest.raises(MethodError, match="adakv does not support a prompt in several pieces"):
        model(ids[:, :30], past_key_values=cache)


def test_forged_counts_are_refused(tmp_path):
    model, tokenizer = tiny_model("llama", "sdpa"), tiny_tokenizer(True)
    context = pyramidkv.compress_context(
        model, tokenizer, words(90), method="adakv", budget=24, **SMALL
    )
    held = context.cache.tensors()
    schedule, length = context.cache.schedules[0], context.cache.prompt_lengths[0]
    counts = held["layers.1.counts"]
    for wrong in (counts + 1, counts.flip(-1), torch.tensor([[-1, 49]], dtype=torch.int32)):
        if torch.equal(wrong, counts):
            continue
        with pytest.raises(ValueError, match="layer 1 has positions that do not ascend"):
            pyramidkv.CompressedCache.from_tensors(
                model,
                context.cache.compression,
                {**held, "layers.1.counts": wrong},
                length,
                schedule,
            )


def test_half_precision_stays_near_float32():
    compression = small("adakv")
    ids, mask = prompt_ids(60, 25)
    steps = [prompt_ids(1, 1, seed=i)[0] for i in range(4)]
    exact, _ = engine_logits(tiny_model("llama", "sdpa"), compression, ids, mask, steps)
    half, _ = engine_logits(
        tiny_model("llama", "sdpa").to(torch.bfloat16), compression, ids, mask, steps
    )
    for a, b in zip(half, exact, strict=True):
        assert torch.linalg.vector_norm(a - b) < 0.1 * torch.linalg.vector_norm(b)
