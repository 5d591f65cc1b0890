"""Budgets by the entropy of the prompt itself: what is kept, and that memory stays bounded."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from reference import Reference
from test_equality import engine_logits
from tiny import CONFIGS, prompt_ids, tiny_model

import pyramidkv
from pyramidkv.budgets import BudgetError, Entropy
from pyramidkv.compression import make_compression
from pyramidkv.entropy import MeasurementError
from pyramidkv.layer import CompressedLayer
from pyramidkv.measured_layer import MeasuredLayer
from pyramidkv.method_options import MethodError
from pyramidkv.storage import RowStorage

SMALL = {"window_size": 6, "kernel_size": 5}
# as uneven as can be, so that much has to be let go of again
SHARP = {"allocation": "entropy", "share_floor": 0.0, "share_temperature": 0.02}


def assert_same_as_the_list(model, method, lengths, **options) -> pyramidkv.CompressedCache:
    """Compare a batch with dense references that are given the schedule which was measured."""
    ids, mask = prompt_ids(*lengths)
    steps = [prompt_ids(*[1] * len(lengths), seed=100 + i)[0] for i in range(6)]
    compression = make_compression(method, 20, **{**SHARP, **options})
    logits, cache = engine_logits(model, compression, ids, mask, steps)
    fixed = {n: v for n, v in options.items() if not n.startswith("share")}
    for row, length in enumerate(lengths):
        schedule = cache.schedules[row]
        assert sum(schedule) == len(schedule) * min(20, length)
        assert [kept[row] for kept in cache.kept_lengths()] == [n + 6 for n in schedule]
        own = ids[row : row + 1, -length:]
        reference = Reference(model, make_compression(method, layer_budgets=schedule, **fixed))
        expected = reference.decode(own, torch.ones_like(own), [s[row : row + 1] for s in steps])
        for got, want in zip(logits, expected, strict=True):
            torch.testing.assert_close(got[row : row + 1], want, atol=1e-4, rtol=1e-4)
    return cache


@pytest.mark.parametrize("lengths", [(60,), (60, 14, 43)], ids=["batch1", "padded3"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_equal_those_of_the_measured_schedule(architecture, lengths):
    cache = assert_same_as_the_list(
        tiny_model(architecture, "eager"), "pyramidkv", lengths, **SMALL
    )
    assert len(set(cache.schedules[0])) > 1  # or nothing was measured


@pytest.mark.parametrize("method", ["h2o", "snapkv-paper"])
def test_other_methods_that_vote_can_be_measured_too(method):
    assert_same_as_the_list(tiny_model("qwen3", "sdpa"), method, (60, 43), window_size=6)


def naive_effective_tokens(model, ids, window):
    """2^H of the last queries, from the attention weights that transformers itself returns."""
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    result = []
    for weights in attentions:
        last = weights[0, :, -window:].double()
        entropy = -(last * (last + 1e-12).log2()).sum(-1).mean(-1)
        result.append(float(entropy.exp2().mean()))
    return result


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_the_schedule_follows_from_the_prompts_own_entropies(floor):
    model = tiny_model("llama", "eager", num_hidden_layers=8)
    ids, _ = prompt_ids(300)
    effective = naive_effective_tokens(model, ids, 6)
    cache = pyramidkv.CompressedCache(
        model, "snapkv", 40, allocation="entropy", share_floor=floor, **SMALL
    )
    with torch.no_grad():
        model(ids, past_key_values=cache)
    expected = Entropy(tuple(effective), 1.0, floor).schedule(8, 40, 300, 10)
    assert cache.schedules == [expected]
    assert sum(expected) == 320


def test_what_is_held_meanwhile_stays_near_the_total(monkeypatch):
    """Of rows allocated, at any moment one is made: the total, a new layer's own, little else."""
    model = tiny_model("llama", "sdpa", num_hidden_layers=8)
    ids, _ = prompt_ids(300)
    alive: weakref.WeakSet[RowStorage] = weakref.WeakSet()
    most: list[int] = []
    make = RowStorage.__init__

    def counted(self, keys, values, rows, capacity):
        make(self, keys, values, rows, capacity)
        alive.add(self)
        most.append(sum(storage._tensors[0].shape[2] for storage in alive))

    monkeypatch.setattr(RowStorage, "__init__", counted)
    cache = pyramidkv.CompressedCache(model, "snapkv", 20, **SHARP, **SMALL)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert sum(cache.schedules[0]) == 160
    assert most[0] == 161 + 64  # the first layer has the whole total until the second comes
    rows = 1.125 * (160 + 8) + 8 * 64  # what is held, and room to grow once the prompt is done
    largest = max(cache.schedules[0]) + 64
    assert max(most) <= rows + largest
    assert all(layer._ranks is None for layer in cache.compressed_layers)
    allocated = sum(layer._storage.nbytes for layer in cache.compressed_layers)
    assert allocated == cache.kv_bytes * (160 + 8 * 64) // 160  # room for 64 tokens, nothing else


def test_earlier_layers_let_go_before_a_layer_takes_its_share(monkeypatch):
    model = tiny_model("llama", "sdpa", num_hidden_layers=8)
    order = []
    shrink, evict = MeasuredLayer.shrink, CompressedLayer._evict

    def shrinking(self, for_good):
        order.append("shrink")
        shrink(self, for_good)

    def evicting(self, *args):
        order.append("evict")
        evict(self, *args)

    monkeypatch.setattr(MeasuredLayer, "shrink", shrinking)
    monkeypatch.setattr(CompressedLayer, "_evict", evicting)
    cache = pyramidkv.CompressedCache(model, "snapkv", 20, **SHARP, **SMALL)
    with torch.no_grad():
        model(prompt_ids(300)[0], past_key_values=cache)
    expected = [step for layer in range(8) for step in [*["shrink"] * layer, "evict"]]
    assert order == expected


def test_attention_that_is_no_number_is_told():
    model = tiny_model("llama", "sdpa")
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight[0, 0] = float("nan")
        cache = pyramidkv.CompressedCache(model, "snapkv", 20, **SHARP, **SMALL)
        with pytest.raises(MeasurementError, match="no number"):
            model(prompt_ids(60)[0], past_key_values=cache)


def test_a_second_prompt_is_measured_anew():
    model = tiny_model("llama", "sdpa")
    compression = make_compression("snapkv", 20, **SHARP, **SMALL)
    first, second = prompt_ids(60, seed=1)[0], prompt_ids(90, seed=2)[0]
    cache = pyramidkv.CompressedCache(model, compression.method, 20)
    fresh = pyramidkv.CompressedCache(model, compression.method, 20)
    with torch.no_grad():
        model(first, past_key_values=cache)
        cache.reset()
        again = model(second, past_key_values=cache).logits
        alone = model(second, past_key_values=fresh).logits
    assert torch.equal(again, alone)
    assert cache.schedules == fresh.schedules


def test_a_copy_goes_on_by_itself():
    model = tiny_model("llama", "sdpa")
    cache = pyramidkv.CompressedCache(model, "snapkv", 20, **SHARP, **SMALL)
    with torch.no_grad():
        model(prompt_ids(60)[0], past_key_values=cache)
        cache.end_prompt()
        other = copy.deepcopy(cache)
        step = prompt_ids(1, seed=9)[0]
        expected = model(step, past_key_values=cache).logits
        assert torch.equal(model(step, past_key_values=other).logits, expected)
    other.reset()
    assert cache.kept_lengths() != []


@pytest.mark.parametrize("question", [None, "w9 w8 w7"])
def test_a_context_is_measured_and_saved(tmp_path, model_folder, question):
    from conftest import words

    from pyramidkv import loading

    model, tokenizer = (
        loading.load_model(str(model_folder)),
        loading.load_tokenizer(str(model_folder)),
    )
    context = pyramidkv.compress_context(
        model, tokenizer, words(120), "snapkv", 30, question=question, **SHARP, **SMALL
    )
    answer = context.ask("w5 w6", max_new_tokens=5)
    assert sum(context.cache.schedules[0]) == 120
    context.save(tmp_path / "c.safetensors")
    again = pyramidkv.CompressedContext.load(tmp_path / "c.safetensors", model, tokenizer)
    assert again.ask("w5 w6", max_new_tokens=5).token_ids == answer.token_ids
    assert again.cache.schedules == context.cache.schedules


@pytest.mark.parametrize("budget", [60, 118, 130], ids=["some whole", "nearly", "all whole"])
def test_a_context_of_which_layers_keep_everything_is_saved(tmp_path, model_folder, budget):
    from conftest import words

    from pyramidkv import loading

    folder = str(model_folder)
    model, tokenizer = loading.load_model(folder), loading.load_tokenizer(folder)
    context = pyramidkv.compress_context(
        model, tokenizer, words(120), "snapkv", budget, **SHARP, **SMALL
    )
    schedule = context.cache.schedules[0]
    assert max(schedule) == 120
    for layer, kept in zip(context.cache.compressed_layers, schedule, strict=True):
        assert ("positions" in layer.tensors()) == (kept < 120)
    answer = context.ask("w5 w6", max_new_tokens=5)
    context.save(tmp_path / "c.safetensors")
    again = pyramidkv.CompressedContext.load(tmp_path / "c.safetensors", model, tokenizer)
    assert again.ask("w5 w6", max_new_tokens=5).token_ids == answer.token_ids


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "streamingllm"}, "does not support budgets by the entropy of the prompt"),
        ({"method": "streamingllm-renumbered"}, "does not support budgets by the entropy"),
        ({"method": "pyramidkv-official"}, "no option 'allocation'"),
        ({"method": "h2o", "window_size": 0}, "window size is 0"),
        ({"decode_budget": 64}, "do not support a decode budget; give a schedule profile"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, words):
    with pytest.raises(MethodError, match=words):
        make_compression(**{"budget": 64, "allocation": "entropy", **arguments})


def test_a_prompt_in_pieces_is_refused():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60)
    cache = pyramidkv.CompressedCache(model, "snapkv", 20, **SHARP, **SMALL)
    cache.expect_prompt(mask)
    with (
        torch.no_grad(),
        pytest.raises(MethodError, match="a prompt in several pieces; give a schedule profile"),
    ):
        model(ids[:, :30], past_key_values=cache)


def test_the_schedule_is_not_told_before_the_prompt():
    compression = make_compression("snapkv", 64, allocation="entropy")
    with pytest.raises(MethodError, match="known after the prompt only"):
        compression.schedule(4, 1000)


def test_a_budget_below_sinks_and_window_is_refused_here_too():
    with pytest.raises(BudgetError, match="smallest possible budget is 36"):
        make_compression("snapkv", 20, allocation="entropy")
    with pytest.raises(BudgetError, match="leaves 10 of 100 prompt tokens"):
        make_compression("snapkv", compression_ratio=0.9, allocation="entropy").cascade(4, 100)
