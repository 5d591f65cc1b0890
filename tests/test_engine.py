"""Through `generate()`: both ways in, batches, sampling, beams, turns; the model left alone."""

from __future__ import annotations

import pytest
import torch
from reference import Reference
from test_equality import engine_logits
from tiny import HYBRIDS, positions_of, prompt_ids, tiny_model
from transformers import AttentionInterface, DynamicCache, StaticCache

import pyramidkv
from pyramidkv import attention
from pyramidkv.attention import AttentionError
from pyramidkv.compression import make_compression
from pyramidkv.errors import CacheStateError

OPTIONS = {"budget": 20, "window_size": 6, "kernel_size": 5}
COMPRESSION = make_compression("pyramidkv", **OPTIONS)
NEW = 12


def greedy_by_hand(model, compression, ids, mask, count=NEW):
    """Greedy tokens from the slow reference, re-run from the start for every token."""
    steps: list[torch.Tensor] = []
    for _ in range(count):
        logits = Reference(model, compression).decode(ids, mask, steps)[-1]
        steps.append(logits.argmax(-1, keepdim=True))
    return torch.cat(steps, dim=1)


def new_tokens(model, ids, mask=None, count=NEW, **kwargs):
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    out = model.generate(ids, attention_mask=mask, **{**settings, **kwargs})
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", *HYBRIDS])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
def test_generate_gives_the_references_tokens_by_both_ways_in(
    architecture, implementation, lengths
):
    model = tiny_model(architecture, implementation)
    ids, mask = prompt_ids(*lengths)
    expected = greedy_by_hand(model, COMPRESSION, ids, mask)
    with pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        assert torch.equal(new_tokens(model, ids, mask), expected)
    cache = pyramidkv.CompressedCache(model, "pyramidkv", **OPTIONS)
    assert torch.equal(new_tokens(model, ids, mask, past_key_values=cache), expected)
    layers = len(cache.compressed_layers)
    assert cache.schedules == [COMPRESSION.schedule(layers, length) for length in lengths]


def test_each_row_of_a_padded_batch_gives_what_it_gives_alone():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60, 25, 43, 7)
    with pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        together = new_tokens(model, ids, mask)
        for row, length in enumerate((60, 25, 43, 7)):
            alone = new_tokens(model, ids[row : row + 1, -length:])
            assert torch.equal(alone[0], together[row])


def test_every_call_of_generate_is_compressed_and_independent():
    """Only the first sample being compressed, or counters living on, are this field's classics."""
    model = tiny_model("llama", "sdpa")
    prompts = [prompt_ids(length, seed=length)[0] for length in (200, 30, 90)]
    with pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        outs = [
            model.generate(p, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
            for p in [*prompts, *reversed(prompts)]
        ]
    for out, prompt in zip(outs, [*prompts, *reversed(prompts)], strict=True):
        assert out.past_key_values.schedules == [COMPRESSION.schedule(4, prompt.shape[1])]
    for first, again in zip(outs[:3], reversed(outs[3:]), strict=True):
        assert torch.equal(first.sequences, again.sequences)


def test_sampling_draws_from_the_references_distribution():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60)
    with pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        torch.manual_seed(3)
        out = model.generate(
            ids,
            max_new_tokens=5,
            do_sample=True,
            top_k=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    steps = list(out.sequences[:, 60:-1].split(1, dim=1))
    expected = Reference(model, COMPRESSION).decode(ids, mask, steps)
    for got, want in zip(out.logits, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    with pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        torch.manual_seed(3)
        again = model.generate(ids, max_new_tokens=5, do_sample=True, top_k=None)
    assert torch.equal(again, out.sequences)


@pytest.mark.parametrize("architecture", ["llama", *HYBRIDS])
@pytest.mark.parametrize("lengths", [(60,), (60, 25)], ids=["batch1", "padded2"])
def test_beam_search_scores_are_those_of_the_chosen_sequence(architecture, lengths):
    """Beams share a prompt and swap rows of the cache at every step."""
    model = tiny_model(architecture, "sdpa")
    ids, mask = prompt_ids(*lengths)
    with pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=6,
            num_beams=3,
            do_sample=False,
            length_penalty=1.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    chosen = out.sequences[:, ids.shape[1] :]
    logits = Reference(model, COMPRESSION).decode(ids, mask, list(chosen[:, :-1].split(1, dim=1)))
    total = sum(
        step.log_softmax(-1).gather(1, chosen[:, i : i + 1]) for i, step in enumerate(logits)
    )
    torch.testing.assert_close(total[:, 0] / chosen.shape[1], out.sequences_scores)


@pytest.mark.parametrize("architecture", ["llama", *HYBRIDS])
@pytest.mark.parametrize("history", ["new ids only", "full history"])
def test_a_second_turn_continues_at_the_right_positions(architecture, history):
    model = tiny_model(architecture, "sdpa")
    ids, mask = prompt_ids(60)
    question, _ = prompt_ids(9, seed=7)
    cache = pyramidkv.CompressedCache(model, "pyramidkv", **OPTIONS)
    first = new_tokens(model, ids, past_key_values=cache, count=4)
    # generate leaves its last token unprocessed, so a second turn begins with it
    turn = torch.cat([first[:, -1:], question], dim=1)
    everything = torch.cat([ids, first, question], dim=1)
    given = turn if history == "new ids only" else everything
    whole_mask = torch.ones_like(everything)
    out = model.generate(
        given,
        attention_mask=whole_mask,
        past_key_values=cache,
        max_new_tokens=4,
        do_sample=False,
    )
    steps = [*first[:, :-1].split(1, dim=1), turn]
    for _ in range(4):
        logits = Reference(model, COMPRESSION).decode(ids, mask, steps)[-1]
        steps.append(logits.argmax(-1, keepdim=True))
    expected = torch.cat(steps[-4:], dim=1)
    assert torch.equal(out[:, given.shape[1] :], expected)
    assert cache.tokens_seen == everything.shape[1] + 3


def test_a_hand_written_loop_inside_compress_needs_no_cache_argument():
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60)
    steps = [prompt_ids(1, seed=i)[0] for i in range(3)]
    expected, _ = engine_logits(model, COMPRESSION, ids, mask, steps)
    with torch.no_grad(), pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        for runner in (model, model.model):
            out = runner(ids)
            cache = out.past_key_values
            assert isinstance(cache, pyramidkv.CompressedCache)
            logits = []
            for new in steps:
                out = runner(new, past_key_values=cache)
                logits.append(out[0][:, -1])
            if runner is model:
                for got, want in zip(logits, expected[1:], strict=True):
                    torch.testing.assert_close(got, want)


def test_an_empty_dynamic_cache_becomes_a_compressed_one_inside_compress():
    """Loops that fill a cache in place never look at the one the model returns."""
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(60)
    steps = [prompt_ids(1, seed=i)[0] for i in range(3)]
    expected, _ = engine_logits(model, COMPRESSION, ids, mask, steps)
    with torch.no_grad(), pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            for new, want in zip([ids, *steps], expected, strict=True):
                got = model(new, past_key_values=cache).logits[:, -1]
                torch.testing.assert_close(got, want)
            assert isinstance(cache, pyramidkv.CompressedCache)
            assert cache.schedules == [COMPRESSION.schedule(4, 60)]


def test_a_cache_does_not_outlive_its_compress_block():
    for implementation in ("eager", "sdpa"):
        model = tiny_model("llama", implementation)
        with torch.no_grad(), pyramidkv.compress(model, "pyramidkv", **OPTIONS):
            cache = model(prompt_ids(60)[0]).past_key_values
        with pytest.raises(CacheStateError, match="outside of the `compress` block"):
            model(torch.tensor([[5]]), past_key_values=cache)


def test_compress_blocks_do_not_nest():
    model = tiny_model("llama", "sdpa")
    with pyramidkv.compress(model, "snapkv", 64):
        with (
            pytest.raises(CacheStateError, match="inside a `compress` block already"),
            pyramidkv.compress(model, "streamingllm", 10),
        ):
            pass
        assert model.config._attn_implementation == "pyramidkv_sdpa"
    with pyramidkv.compress(model, "streamingllm", 10):
        pass
    assert model.config._attn_implementation == "sdpa"


def state_of(model):
    modules = [
        (
            name,
            list(module._forward_pre_hooks),
            list(module._forward_hooks),
            {attribute: id(value) for attribute, value in vars(module).items()},
            type(module).forward,
        )
        for name, module in model.named_modules()
    ]
    return model.config._attn_implementation, modules, model.config.to_dict()


class Interruption(Exception):
    pass


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_model_is_exactly_as_before_after_an_exception(implementation):
    model = tiny_model("llama", implementation)
    ids, _ = prompt_ids(60)
    before, logits = state_of(model), model(ids).logits

    def interrupt(done, total):
        raise Interruption

    with (
        pytest.raises(Interruption),
        pyramidkv.compress(model, "pyramidkv", on_layer=interrupt, **OPTIONS),
    ):
        model.generate(ids, max_new_tokens=3)
    assert state_of(model) == before
    assert torch.equal(model(ids).logits, logits)
    with pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        assert state_of(model) != before
    assert state_of(model) == before


def test_caches_leave_the_model_as_it_was_when_the_last_one_goes():
    model = tiny_model("llama", "sdpa")
    before = state_of(model)
    first = pyramidkv.CompressedCache(model, "snapkv", 64)
    second = pyramidkv.CompressedCache(model, "snapkv", 64)
    assert model.config._attn_implementation == "pyramidkv_sdpa"
    del first
    assert model.config._attn_implementation == "pyramidkv_sdpa"
    del second
    assert state_of(model) == before


def test_compress_and_a_cache_can_overlap():
    model = tiny_model("llama", "sdpa")
    with pyramidkv.compress(model, "snapkv", 64):
        cache = pyramidkv.CompressedCache(model, "snapkv", 64)
    assert model.config._attn_implementation == "pyramidkv_sdpa"
    ids, _ = prompt_ids(100)
    new_tokens(model, ids, past_key_values=cache)
    del cache
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "lfm2"])
def test_a_switched_model_does_the_same_as_before_with_other_caches(architecture, implementation):
    model = tiny_model(architecture, implementation)
    ids, mask = prompt_ids(60, 25)
    plain = new_tokens(model, ids, mask)
    cache = pyramidkv.CompressedCache(model, "snapkv", 64)
    assert torch.equal(new_tokens(model, ids, mask), plain)
    with torch.no_grad():
        switched = model(ids, attention_mask=mask, use_cache=False).logits
    del cache
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, switched)


def test_what_cannot_be_compressed_is_refused_inside_compress():
    model = tiny_model("llama", "sdpa")
    ids, _ = prompt_ids(60)
    filled = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=filled)
    static = StaticCache(config=model.config, max_cache_len=100)
    with torch.no_grad(), pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        with pytest.raises(CacheStateError, match="use_cache is False"):
            model(ids, use_cache=False)
        with pytest.raises(CacheStateError, match="DynamicCache that holds 60 tokens"):
            model(ids, past_key_values=filled)
        with pytest.raises(CacheStateError, match="StaticCache"):
            model(ids, past_key_values=static)
        with pytest.raises(CacheStateError, match="StaticCache"):
            model.generate(ids, max_new_tokens=3, cache_implementation="static")
        with pytest.raises(CacheStateError, match="prefill_chunk_size"):
            model.generate(ids, max_new_tokens=3, prefill_chunk_size=16)
        with pytest.raises(CacheStateError, match="without offloading"):
            model(ids, past_key_values=offloading_cache(model))


def offloading_cache(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # its constructor needs a GPU
    return cache


@pytest.mark.parametrize("architecture", ["llama", *HYBRIDS])
def test_assisted_decoding_is_refused(architecture):
    """It would have to take back tokens of the compressed prompt."""
    model = tiny_model(architecture, "sdpa")
    ids = prompt_ids(20)[0].repeat(1, 3)
    settings = {"max_new_tokens": 20, "prompt_lookup_num_tokens": 4, "do_sample": False}
    refusal = pytest.raises(
        (CacheStateError, ValueError, RuntimeError), match="crop|remove|stateful"
    )
    with refusal, pyramidkv.compress(model, "pyramidkv", **OPTIONS):
        model.generate(ids, **settings)
    with refusal:
        cache = pyramidkv.CompressedCache(model, "pyramidkv", **OPTIONS)
        model.generate(ids, past_key_values=cache, **settings)


def test_an_attention_implementation_that_cannot_be_wrapped_is_refused():
    model = tiny_model("llama", "sdpa")
    AttentionInterface.register("somebody_elses", lambda *args, **kwargs: None)
    model.set_attn_implementation("somebody_elses")
    with (
        pytest.raises(AttentionError, match="'somebody_elses' is not supported"),
        pyramidkv.compress(model, "pyramidkv", **OPTIONS),
    ):
        pass
    assert model.config._attn_implementation == "somebody_elses"


def test_progress_is_reported_layer_by_layer():
    model = tiny_model("gemma3_text", "sdpa")
    seen = []
    ids, _ = prompt_ids(60)
    with pyramidkv.compress(
        model, "pyramidkv", on_layer=lambda done, total: seen.append((done, total)), **OPTIONS
    ):
        model.generate(ids, max_new_tokens=3)
    assert seen == [(1, 2), (2, 2)]


def fake_flash_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """What flash attention does with its arguments: 2-D padding mask, causal from the end."""
    assert module.config._attn_implementation == "flash_attention_2"
    assert attention_mask is None or attention_mask.ndim == 2
    heads, count = query.shape[1:3]
    group = heads // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    stored = key.shape[2]
    visible = torch.ones(count, stored, dtype=torch.bool).tril(stored - count)[None, None]
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, -stored:].bool()
    weights = logits.masked_fill(~visible, -1e30).softmax(-1)
    output = weights @ value.repeat_interleave(group, 1)
    return output.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("lengths", [(60,), (60, 25, 43)], ids=["batch1", "padded3"])
def test_flash_attention_is_given_what_it_expects(monkeypatch, lengths):
    """The package itself needs a GPU; this stands in for its interface."""
    model = tiny_model("llama", "eager")
    ids, mask = prompt_ids(*lengths)
    turns = [prompt_ids(*[n] * len(lengths), seed=n)[0] for n in (1, 1, 7, 1)]
    expected = Reference(model, COMPRESSION).decode(ids, mask, turns)
    monkeypatch.setitem(
        attention.ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", fake_flash_attention
    )
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: set_name(model, name))
    set_name(model, "flash_attention_2")
    actual, cache = engine_logits(model, COMPRESSION, ids, mask, turns)
    assert model.config._attn_implementation == "pyramidkv_fa2"
    for row in range(len(lengths)):
        for got, want in zip(actual, expected, strict=True):
            torch.testing.assert_close(got[row], want[row], atol=1e-4, rtol=1e-4)
    del cache
    assert model.config._attn_implementation == "flash_attention_2"


def set_name(model, name):
    model.config._attn_implementation_internal = name


def test_positions_of_a_padded_batch_follow_each_rows_own_length():
    _, mask = prompt_ids(5, 3)
    assert positions_of(mask).tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]
