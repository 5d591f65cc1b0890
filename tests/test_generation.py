"""`generate`: text, tokens and a record that says what was really held."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_tokenizer, words
from tiny import tiny_model

import pyramidkv
from pyramidkv.errors import CacheStateError, PromptError
from pyramidkv.generation import measure_cache
from pyramidkv.prompts import common_prefix, encode_prompt
from pyramidkv.records import format_bytes, write_json

SETTINGS = {"budget": 20, "window_size": 6, "kernel_size": 5, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", "sdpa")


def test_the_record_holds_what_a_result_is_judged_by(model):
    tokenizer = tiny_tokenizer(chat=True)
    pieces: list[str] = []
    layers: list[tuple[int, int]] = []
    result = pyramidkv.generate(
        model,
        tokenizer,
        words(58),
        on_text=pieces.append,
        on_layer=lambda *done: layers.append(done),
        **SETTINGS,
    )
    record = json.loads(json.dumps(result.record))
    assert record["prompt_tokens"] == 60  # <user> and <assistant> are part of it
    assert record["generated_tokens"] == len(result.token_ids) == 8
    assert record["text"] == result.text == tokenizer.decode(result.token_ids)
    assert "".join(pieces).split() == result.text.split()
    assert layers == [(i, 4) for i in (1, 2, 3, 4)]
    assert record["kept_lengths"] == record["schedule"]
    assert record["schedule_total"] == sum(record["schedule"]) == 80
    assert record["full_total"] == 240
    row_bytes = 2 * 2 * 8 * 4
    assert record["kv_bytes"] == 80 * row_bytes
    assert record["kv_bytes_full"] == 240 * row_bytes
    assert record["kv_bytes_at_end"] == (80 + 4 * 7) * row_bytes  # the last token is not stored
    assert record["allocated_bytes"] > record["kv_bytes"]
    assert record["peak_memory_bytes"] > 10**7
    assert 0 < record["time_per_output_token_s"] < record["time_to_first_token_s"] + 60
    assert record["compression"]["method"] == "pyramidkv"
    assert record["compression"]["window_size"] == 6
    assert record["model"]["kv_heads"] == 2
    assert record["model"]["attn_implementation"] == "sdpa"
    assert set(record["versions"]) == {"python", "pyramidkv", "torch", "transformers"}
    assert record["machine"]["torch_threads"] == torch.get_num_threads()


def test_sliding_layers_count_in_the_bytes_but_not_in_the_schedule():
    model = tiny_model("gemma3_text", "sdpa")
    record = pyramidkv.generate(model, tiny_tokenizer(False), words(60), **SETTINGS).record
    assert record["model"]["layers"] == 4
    assert record["model"]["full_attention_layers"] == 2
    assert len(record["schedule"]) == 2
    row_bytes = 2 * 2 * 8 * 4
    sliding = 2 * 15 * row_bytes  # two layers with a window of 16
    assert record["kv_bytes"] == 40 * row_bytes + sliding
    assert record["kv_bytes_full"] == 120 * row_bytes + sliding


def test_generation_stops_at_the_models_and_the_tokenizers_stop_tokens(model):
    tokenizer = tiny_tokenizer(False)
    free = pyramidkv.generate(model, tokenizer, words(60), **SETTINGS)
    third = free.token_ids[2]
    stop_at = free.token_ids.index(third) + 1
    model.generation_config.eos_token_id = [third]
    try:
        stopped = pyramidkv.generate(model, tokenizer, words(60), **SETTINGS)
    finally:
        model.generation_config.eos_token_id = None
    assert stopped.token_ids == free.token_ids[:stop_at]


def test_greedy_is_repeatable_and_sampling_follows_the_seed(model):
    tokenizer = tiny_tokenizer(False)

    def run(seed, **changes):
        torch.manual_seed(seed)
        return pyramidkv.generate(model, tokenizer, words(60), **{**SETTINGS, **changes}).token_ids

    assert run(1) == run(2)
    assert run(1, temperature=5.0) == run(1, temperature=5.0)
    assert run(1, temperature=5.0) != run(2, temperature=5.0)


def test_the_model_is_left_as_it_was(model):
    pyramidkv.generate(model, tiny_tokenizer(False), words(60), **SETTINGS)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": " \n "}, "prompt is empty"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "0 or a positive"),
        ({"chat": True}, "no chat template"),
        ({"prompt": words(1020)}, "1,020 tokens and 8 are to be generated, .* 1,024 tokens"),
    ],
)
def test_bad_prompts_and_settings_are_refused(model, changes, message):
    arguments = {"prompt": words(60), **SETTINGS, **changes}
    with pytest.raises(PromptError, match=message):
        pyramidkv.generate(model, tiny_tokenizer(False), **arguments)


def test_the_chat_template_is_used_if_there_is_one():
    with_template, without = tiny_tokenizer(True), tiny_tokenizer(False)
    plain = encode_prompt(without, words(5))
    assert plain.shape == (1, 5)
    assert encode_prompt(with_template, words(5)).shape == (1, 7)
    assert torch.equal(encode_prompt(with_template, words(5), chat=False), plain)


def test_a_cache_that_the_model_did_not_use_is_noticed(model):
    with pytest.raises(CacheStateError, match="did not use the compressed cache"):
        measure_cache(pyramidkv.CompressedCache(model, "snapkv", 64))


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


def test_bytes_are_named_in_decimal_units():
    assert format_bytes(999) == "999 B"
    assert format_bytes(1500) == "1.5 kB"
    assert format_bytes(21_474_836_480) == "21.5 GB"


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
