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
from pyramidkv.budgets import BudgetError
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


TABLE = ((40, 12), (11, 33), (60, 10), (25, 26))  # of a tiny model; no layer's mean is whole twice


@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize(("architecture", "attention"), PAIRS)
@pytest.mark.parametrize("method", ["pyramidkv-ada", "global"])
def test_logits_equal_a_masked_dense_reference(method, architecture, attention, lengths):
    model = tiny_model(architecture, attention)
    assert_same(model, small(method), lengths, [1] * 6)


@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize("options", [{}, {"value_norm": True, "pooling": "avg"}], ids=str)
def test_heads_with_budgets_of_their_own_equal_the_reference(options, lengths):
    compression = make_compression("adakv", head_budgets=TABLE, **SMALL, **options)
    assert_same(tiny_model("llama", "sdpa"), compression, lengths, [1] * 6)


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


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7, 1.0])
def test_the_total_of_all_layers_is_exact_and_no_head_is_below_its_floor(floor):
    model = tiny_model("llama", "sdpa")
    cache = processed(model, "global", 24, (60, 25, 43, 20), head_floor=floor)
    for row, length in enumerate(cache.prompt_lengths):
        heads = [layer.head_lengths()[row] for layer in cache.compressed_layers]
        budget = min(24, length)
        assert sum(map(sum, heads)) == LAYERS * KV_HEADS * budget
        assert min(map(min, heads)) >= min(10 + int(floor * (24 - 10)), length)
        means = [sum(own) / KV_HEADS for own in heads]
        assert cache.schedules[row] == means == [own[row] for own in cache.kept_lengths()]
        assert (len({sum(own) for own in heads}) > 1) == (floor < 1 and length > budget)
        for layer, own in zip(cache.compressed_layers, heads, strict=True):
            kept = layer.kept_positions(row)
            assert (kept >= 0).sum(-1).tolist() == own
            for positions in kept:
                held = positions[positions >= 0].tolist()
                assert held == sorted(set(held))
                assert set(range(4)) | set(range(length)[-6:]) <= set(held)


def test_layers_that_compete_never_hold_much_more_than_the_total():
    model = tiny_model("llama", "sdpa")
    width = 2 * KV_HEADS * HEAD_DIM * 4
    held = []

    def note(done, _):
        held.append(cache.kv_bytes / width)

    cache = pyramidkv.CompressedCache(model, "global", 40, on_layer=note, **SMALL)
    ids, mask = prompt_ids(300)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    assert len(held) == LAYERS
    assert max(held) <= 1.125 * LAYERS * 40
    assert held[-1] == LAYERS * 40


def test_a_budget_of_the_whole_prompt_keeps_it():
    for compressed in (
        processed(tiny_model("llama", "sdpa"), "global", 60),
        processed(tiny_model("llama", "sdpa"), "adakv", None, head_budgets=[[60, 70]] * LAYERS),
    ):
        assert compressed.kept_lengths() == [[60]] * LAYERS
        assert all(type(kept) is int for kept in compressed.schedules[0])


def test_every_head_keeps_what_the_table_says_or_the_prompt():
    cache = processed(tiny_model("llama", "sdpa"), "adakv", None, (60, 25), head_budgets=TABLE)
    for row, length in enumerate((60, 25)):
        wanted = [[min(count, length) for count in layer] for layer in TABLE]
        assert [layer.head_lengths()[row] for layer in cache.compressed_layers] == wanted
        assert cache.schedules[row] == [sum(own) / 2 for own in wanted]


@pytest.mark.parametrize("method", ["adakv", "global"])
def test_the_bytes_are_those_of_equal_heads(method):
    model = tiny_model("llama", "sdpa")
    for lengths in ((60,), (60, 60)):
        ours, equal = (processed(model, name, 24, lengths) for name in (method, "snapkv"))
        wanted = len(lengths) * LAYERS * 24 * KV_HEADS * HEAD_DIM * 2 * 4
        assert ours.kv_bytes == equal.kv_bytes == wanted
        held = {
            states.untyped_storage().data_ptr(): states.untyped_storage().nbytes()
            for layer in ours.compressed_layers
            for states in (layer.ragged.keys, layer.ragged.values)
        }
        assert sum(held.values()) == wanted  # nothing else is behind them


@pytest.mark.parametrize("method", ["adakv", "global"])
def test_with_a_floor_of_one_it_is_snapkv_in_everything(method):
    model = tiny_model("qwen3", "sdpa")
    ids, mask = prompt_ids(60, 25, 43)
    for settings in (
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 2.0},
    ):
        answers = []
        for name, options in (("snapkv", {}), (method, {"head_floor": 1})):
            cache = pyramidkv.CompressedCache(model, name, 20, **SMALL, **options)
            torch.manual_seed(0)
            answers.append(
                model.generate(
                    ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **settings
                ).tolist()
            )
        assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("method", "options"),
    [("adakv", {}), ("global", {}), ("adakv", {"budget": None, "head_budgets": TABLE})],
)
def test_rows_copies_and_cropping(method, options):
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

    cache = processed(model, method, **{"lengths": (60, 25, 43), **options})
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
@pytest.mark.parametrize(
    "chosen",
    [
        {"method": "adakv", "budget": 24},
        {"method": "global", "compression_ratio": 0.7},
        {"method": "adakv", "head_budgets": TABLE},
    ],
    ids=str,
)
def test_contexts_answer_as_a_whole_prompt_and_can_be_saved(tmp_path, chosen, dtype):
    model, tokenizer = tiny_model("llama", "sdpa").to(dtype), tiny_tokenizer(True)
    make = {**chosen, **SMALL}
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
    assert loaded.cache.compression == context.cache.compression
    assert loaded.cache.schedules == context.cache.schedules
    for mine, theirs in zip(
        loaded.cache.compressed_layers, context.cache.compressed_layers, strict=True
    ):
        assert mine.head_lengths() == theirs.head_lengths()
        assert torch.equal(mine.kept_positions(), theirs.kept_positions())
        assert torch.equal(mine.keys, theirs.keys)
    assert loaded.kv_bytes == before
    assert loaded.ask("w7", max_new_tokens=8).token_ids == answers[1]


@pytest.mark.parametrize("method", ["adakv", "global"])
def test_a_query_aware_context_drops_its_question(method):
    model, tokenizer = tiny_model("llama", "sdpa"), tiny_tokenizer(True)
    make = {"method": method, "budget": 24, **SMALL}
    context = pyramidkv.compress_context(model, tokenizer, words(90), question="w11 w3", **make)
    assert context.ask("w11 w3", max_new_tokens=4).token_ids
    for layer, share in zip(
        context.cache.compressed_layers, context.cache.schedules[0], strict=True
    ):
        assert sum(layer.head_lengths()[0]) == share * KV_HEADS
        assert int(layer.kept_positions().max()) < context.cache.tokens_seen
    assert sum(context.cache.schedules[0]) == LAYERS * 24


@pytest.mark.parametrize(
    "group",
    [
        [
            make_compression("adakv", 24, **WINDOW),
            make_compression("pyramidkv-ada", 40, **WINDOW),
            make_compression("adakv", 24, head_floor=0, value_norm=True, **WINDOW),
            make_compression("adakv", 200, **WINDOW),
            make_compression("adakv", head_budgets=TABLE, **WINDOW),
        ],
        [
            make_compression("global", 24, **WINDOW),
            make_compression("global", 40, head_floor=0, **WINDOW),
            make_compression("global", None, 0.6, value_norm=True, **WINDOW),
            make_compression("global", 200, **WINDOW),
        ],
    ],
    ids=["layer", "model"],
)
def test_one_of_many_is_as_alone(group):
    model = tiny_model("qwen3", "sdpa")
    ids, _ = prompt_ids(80)
    steps = [prompt_ids(n, seed=50 + i)[0] for i, n in enumerate([5, 1, 1, 1])]
    cache, full = compress_many(model, ids, [group, [FULL]]).caches
    assert full.kept_lengths() == [[80]] * LAYERS
    together = go_on(model, cache, len(group), steps)
    for row, compression in enumerate(group):
        expected, single = alone(model, ids, compression, steps)
        torch.testing.assert_close(together[:, row], expected, atol=2e-4, rtol=1e-4)
        assert cache.schedules[row] == single.schedules[0]
        for mine, theirs in zip(cache.compressed_layers, single.compressed_layers, strict=True):
            assert mine.head_lengths()[row] == theirs.head_lengths()[0]
    for other in ("snapkv", "adakv" if group[0].method.name == "global" else "global"):
        with pytest.raises(MethodError, match="give them as groups of their own"):
            compress_many(model, ids, [[group[0], make_compression(other, 24, **WINDOW)]])


@pytest.mark.parametrize("agnostic", [False, True])
def test_evaluation_answers_as_each_alone(agnostic):
    model, tokenizer = tiny_model("qwen3", "sdpa"), tiny_tokenizer(False)
    names = "snapkv", "adakv", "pyramidkv-ada", "global"
    arms = [make_compression(name, 24, **WINDOW) for name in names]
    arms.insert(1, FULL)
    prompt = Prompt(prompt_ids(80)[0][0].tolist(), 70, 0)
    together = answer_sample(model, tokenizer, prompt, arms, 6, agnostic=agnostic)
    for arm, answer in zip(arms, together, strict=True):
        (single,) = answer_sample(model, tokenizer, prompt, [arm], 6, agnostic=agnostic)
        assert answer == single
    assert len({together[i].kept_bytes for i in (0, 2, 4)}) == 1
    assert sum(together[4].kept) == LAYERS * 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_budget": 30}, "adakv does not support a decode budget"),
        ({"allocation": "entropy"}, "adakv does not support budgets by the entropy"),
        ({"head_floor": 1.5}, "head_floor is 1.5; it is a number from 0 to 1"),
        ({"head_floor": True}, "head_floor is True; it is a number from 0 to 1"),
        ({"head_budgets": TABLE}, "adakv has a list of head budgets, so it takes neither"),
        ({"budget": None, "head_budgets": 5}, "head_budgets is 5; it is a list of whole numbers"),
        ({"budget": None, "head_budgets": [[24, 24.5]]}, "it is a list of whole numbers for each"),
        ({"budget": None, "head_budgets": [[24, 24], [24]]}, "all of one length; given"),
        ({"budget": None, "head_budgets": [[24, 24], [9, 24]]}, "a head of layer 1 is to keep 9"),
        ({"budget": None, "head_budgets": TABLE, "head_floor": 0.1}, "give either head_floor or"),
        ({"budget": None, "head_budgets": TABLE, "allocation": "pyramid"}, "go together"),
        ({"allocation": "heads"}, "'heads' and head_budgets go together"),
        (
            {"budget": None, "head_budgets": TABLE[:3]},
            "are for 3 layers of 2 KV heads, but the model has 4 full-attention layers of 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    chosen = {"budget": 24, **SMALL, **options}
    with pytest.raises((MethodError, BudgetError), match=message):
        pyramidkv.CompressedCache(tiny_model(), "adakv", **chosen)
    with pytest.raises(MethodError, match="snapkv has no option 'head_floor'"):
        make_compression("snapkv", 24, head_floor=0.5)


@pytest.mark.parametrize("method", ["adakv", "global"])
def test_a_prompt_in_pieces_is_refused(method):
    model = tiny_model()
    cache = pyramidkv.CompressedCache(model, method, 24, **SMALL)
    ids, mask = prompt_ids(60)
    cache.expect_prompt(mask)
    with pytest.raises(MethodError, match=f"{method} does not support a prompt in several pieces"):
        model(ids[:, :30], past_key_values=cache)


def test_budgets_over_all_layers_have_no_schedule_before_the_prompt():
    compression = make_compression("global", 24, **SMALL)
    with pytest.raises(MethodError, match="'global' is one to heads, not to layers"):
        compression.schedule(LAYERS, 60)
    with pytest.raises(MethodError, match="global has no option 'allocation'"):
        make_compression("global", 24, allocation="pyramid")
    with pytest.raises(BudgetError, match="a budget of 9 is too small"):
        make_compression("global", 9, **SMALL)
    with pytest.raises(BudgetError, match="leaves 6 of 60 prompt tokens"):
        processed(tiny_model(), "global", None, compression_ratio=0.9)


def test_an_interrupted_contest_does_not_reach_the_next_prompt(monkeypatch):
    model = tiny_model("llama", "sdpa")
    expected = processed(model, "global")
    cache = pyramidkv.CompressedCache(model, "global", 20, **SMALL)
    ids, mask = prompt_ids(50, seed=9)
    with monkeypatch.context() as patch:
        layer = cache.compressed_layers[2]
        patch.setattr(layer, "_evict", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
    cache.reset()
    ids, mask = prompt_ids(60)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    assert cache.schedules == expected.schedules
    for mine, theirs in zip(cache.compressed_layers, expected.compressed_layers, strict=True):
        assert torch.equal(mine.kept_positions(), theirs.kept_positions())


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
