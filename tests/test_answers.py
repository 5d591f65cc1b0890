"""Answers of many compressions at once are those of each alone, with the prompt inside or not."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_tokenizer, words
from tiny import tiny_model

import pyramidkv
from pyramidkv.compression import make_compression
from pyramidkv.errors import PromptError
from pyramidkv.evaluation.answers import answer_sample, encode_sample
from pyramidkv.evaluation.sample import Sample

WINDOW = {"window_size": 6, "kernel_size": 5}
ARMS = [
    make_compression("pyramidkv", 24, **WINDOW),
    make_compression("full"),
    make_compression("snapkv", 24, **WINDOW),
    make_compression("h2o", 40, window_size=6),
    make_compression("streamingllm", 24),
    make_compression("snapkv", compression_ratio=0.5, **WINDOW),
]


def sample(length=100, **changes) -> Sample:
    given = {
        "task": "needle",
        "index": 3,
        "context": words(length),
        "question": "\n\nw9 w8 w7 w5",
        "answers": ("w4",),
        "metric": "match_all",
        "max_new_tokens": 9,
    }
    return Sample(**{**given, **changes})


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "chat"])
def tokenizer(request):
    return tiny_tokenizer(chat=request.param)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "qwen3_next"])
def test_query_aware_answers_are_those_of_generate(tokenizer, architecture):
    model = tiny_model(architecture, "eager")
    one = sample()
    prompt = encode_sample(tokenizer, one, None)
    answers = answer_sample(model, tokenizer, prompt, ARMS, 9)
    for answer, compression in zip(answers, ARMS, strict=True):
        alone = pyramidkv.generate(
            model,
            tokenizer,
            one.context + one.question,
            compression.method,
            **compression.amounts,
            max_new_tokens=9,
        )
        assert answer.token_ids == alone.token_ids
        assert answer.text == alone.text
        assert answer.kept == alone.record["schedule"]
        if architecture == "llama":
            assert answer.kept_bytes == alone.record["kv_bytes"]
        assert answer.prompt_tokens == alone.record["prompt_tokens"] == len(prompt.ids)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_query_agnostic_answers_are_those_of_a_context(tokenizer, architecture):
    model = tiny_model(architecture, "eager")
    one = sample()
    prompt = encode_sample(tokenizer, one, None)
    answers = answer_sample(model, tokenizer, prompt, ARMS, 9, agnostic=True)
    for answer, compression in zip(answers, ARMS, strict=True):
        context = pyramidkv.compress_context(
            model, tokenizer, one.context, compression.method, **compression.amounts
        )
        alone = context.ask(one.question.strip(), max_new_tokens=9)
        assert answer.token_ids == alone.token_ids
        assert answer.kept == context.record["kept_lengths"]
        assert answer.prompt_tokens == context.tokens_seen < len(prompt.ids)


def test_the_answers_prefix_is_given_and_not_part_of_the_answer(tokenizer):
    model = tiny_model("llama", "sdpa")
    prompt = encode_sample(tokenizer, sample(answer_prefix="w11 w12"), None)
    ending = tokenizer("w11 w12", add_special_tokens=False).input_ids
    assert prompt.ids[-2:] == ending
    (answer,) = answer_sample(model, tokenizer, prompt, [make_compression("full")], 5)
    ids = torch.tensor([prompt.ids])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    assert answer.token_ids == whole[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("agnostic", [False, True])
def test_an_answer_ends_with_the_token_that_ends_it(tokenizer, agnostic):
    model = tiny_model("llama", "sdpa")
    prompt = encode_sample(tokenizer, sample(), None)
    free = answer_sample(model, tokenizer, prompt, ARMS, 9, agnostic=agnostic)
    for row, place in ((0, 0), (2, 3)):
        model.generation_config.eos_token_id = free[row].token_ids[place]
        stopped = answer_sample(model, tokenizer, prompt, ARMS, 9, agnostic=agnostic)
        for before, after in zip(free, stopped, strict=True):
            stop = model.generation_config.eos_token_id
            end = before.token_ids.index(stop) + 1 if stop in before.token_ids else 9
            assert after.token_ids == before.token_ids[:end]


@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_answers_that_are_done_leave_the_batch(tokenizer, architecture, agnostic):
    model = tiny_model(architecture, "eager")
    prompt = encode_sample(tokenizer, sample(), None)
    arms = [arm for arm in ARMS if arm.method.evicts]
    free = answer_sample(model, tokenizer, prompt, arms, 24, agnostic=agnostic)
    written = [answer.token_ids for answer in free]

    def lengths_with(stop):
        return [ids.index(stop) + 1 if stop in ids else len(ids) for ids in written]

    stop = max({token for ids in written for token in ids}, key=lambda t: len({*lengths_with(t)}))
    lengths = lengths_with(stop)
    assert len(set(lengths)) > 1
    model.generation_config.eos_token_id = stop
    batches = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, given: batches.append(len(given["input_ids"])), with_kwargs=True
    )
    stopped = answer_sample(model, tokenizer, prompt, arms, 24, agnostic=agnostic)
    hook.remove()
    for before, after, length in zip(free, stopped, lengths, strict=True):
        assert after.token_ids == before.token_ids[:length]
        assert (after.kept, after.kept_bytes) == (before.kept, before.kept_bytes)
    assert batches[0] == 1  # the prompt
    rows = batches[1:]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == len(arms) > rows[-1]
    assert len(rows) == max(lengths) - (not agnostic)


def test_the_footprint_is_rows_held_over_the_steps(tokenizer):
    model = tiny_model("llama", "sdpa")
    prompt = encode_sample(tokenizer, sample(), None)
    answers = answer_sample(model, tokenizer, prompt, ARMS, 9)
    tokens = len(prompt.ids)
    for answer in answers:
        steps = range(len(answer.token_ids))
        held = sum(sum(answer.kept) / 4 + step for step in steps)
        assert answer.footprint == pytest.approx(held / sum(tokens + step for step in steps))
    assert answers[1].footprint == 1
    later = answer_sample(model, tokenizer, prompt, ARMS, 9, agnostic=True)[0]
    behind = tokens - later.prompt_tokens
    held = sum(24 + behind + step for step in range(9))
    assert later.footprint == pytest.approx(held / sum(tokens + step for step in range(9)))


def test_a_prompt_that_is_too_long_loses_tokens_from_the_middle_of_its_context(tokenizer):
    one = sample(300)
    whole = encode_sample(tokenizer, one, None)
    cut = encode_sample(tokenizer, one, 120)
    assert len(cut.ids) == 120 - 9
    assert cut.dropped == len(whole.ids) - 111
    assert cut.ids == whole.ids[:55] + whole.ids[-56:]
    behind = len(whole.ids) - whole.context_tokens
    assert len(cut.ids) - cut.context_tokens == behind
    assert encode_sample(tokenizer, one, len(whole.ids) + 9).dropped == 0
    with pytest.raises(PromptError, match="leaves no room for its context in 4"):
        encode_sample(tokenizer, one, 13)


def test_few_shot_tasks_are_not_put_into_a_chat_template():
    tokenizer = tiny_tokenizer(chat=True)
    plain = encode_sample(tokenizer, sample(chat=False), None)
    chat = encode_sample(tokenizer, sample(), None)
    assert plain.ids == tokenizer(f"{words(100)}\n\nw9 w8 w7 w5").input_ids
    assert chat.ids != plain.ids
