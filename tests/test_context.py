"""One context, many questions: the same answers in any order, alone, in a batch, after loading."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from conftest import tiny_tokenizer, words
from tiny import VOCABULARY, tiny_model

import pyramidkv
from pyramidkv.compression import make_compression
from pyramidkv.context import stream
from pyramidkv.errors import CacheStateError, ContextFileError, PromptError
from pyramidkv.methods import METHODS
from pyramidkv.prompts import PromptFormat, Turn

SMALL = {"budget": 24, "window_size": 6, "kernel_size": 5}
QUESTIONS = [f"w{11 + 7 * i} w{20 + i} w{3 + i}" + " w9" * i for i in range(10)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", "sdpa", eos_token_id=None)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(True)


@pytest.fixture(scope="module")
def context(model, tokenizer):
    return pyramidkv.compress_context(model, tokenizer, words(90), **SMALL)


def by_hand(model, tokenizer, text, question, count, method="pyramidkv", **settings):
    """Answer a question on a cache of the context, with nothing but the cache's own surface."""
    form = PromptFormat.choose(tokenizer, None)
    ids, length = form.encode(question, text), len(form.encode_context(text))
    cache = pyramidkv.CompressedCache(model, method, **settings)
    with torch.no_grad():
        model(torch.tensor([ids[:length]]), past_key_values=cache)
        cache.end_prompt()
        logits = model(torch.tensor([ids[length:]]), past_key_values=cache).logits
        result = []
        for _ in range(count):
            result.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([[result[-1]]]), past_key_values=cache).logits
    return result


def test_an_answer_is_that_of_a_hand_written_loop(model, tokenizer, context):
    answer = context.ask(QUESTIONS[0], max_new_tokens=12)
    expected = by_hand(model, tokenizer, words(90), QUESTIONS[0], 12, **SMALL)
    assert answer.token_ids == expected
    assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_the_order_of_questions_changes_nothing_and_the_cache_stays_as_it_was(context):
    before = {name: tensor.clone() for name, tensor in context.cache.tensors().items()}
    held = context.kv_bytes, context.cache.allocated_bytes, context.cache.kept_lengths()
    forward = [context.ask(question, max_new_tokens=8).token_ids for question in QUESTIONS]
    assert (context.kv_bytes, context.cache.allocated_bytes, context.cache.kept_lengths()) == held
    backward = [context.ask(q, max_new_tokens=8).token_ids for q in reversed(QUESTIONS)]
    assert forward == backward[::-1]
    assert len({tuple(ids) for ids in forward}) > 1
    for name, tensor in context.cache.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "lfm2"])
def test_a_batch_of_questions_gives_what_each_gives_alone(architecture, tokenizer):
    model = tiny_model(architecture, "eager", eos_token_id=None)
    context = pyramidkv.compress_context(model, tokenizer, words(90), **SMALL)
    alone = [context.ask(question, max_new_tokens=8).token_ids for question in QUESTIONS]
    held = context.kv_bytes
    together = context.ask_batch(QUESTIONS, max_new_tokens=8)
    assert [answer.token_ids for answer in together] == alone
    assert context.kv_bytes == held
    full = architecture == "llama"
    assert together[0].record["batch"] == (10 if full else 1)
    assert context.ask_batch([], max_new_tokens=8) == []


def test_a_row_that_ends_early_is_cut_at_its_end(model, tokenizer, context):
    first = context.ask(QUESTIONS[0], max_new_tokens=8).token_ids
    stop = first[3]
    model.generation_config.eos_token_id = stop
    try:
        together = context.ask_batch(QUESTIONS, max_new_tokens=8)
        alone = [context.ask(question, max_new_tokens=8) for question in QUESTIONS]
    finally:
        model.generation_config.eos_token_id = None
    assert together[0].token_ids == first[: first.index(stop) + 1]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]


def test_streaming_gives_the_same_text(context):
    answer = context.ask(QUESTIONS[1], max_new_tokens=20)
    assert "".join(context.stream(QUESTIONS[1], max_new_tokens=20)) == answer.text
    with pytest.raises(PromptError, match="question is empty"):
        list(context.stream("  "))


def test_closing_a_stream_ends_the_answer_and_errors_come_through():
    produced = []

    def ask(question, on_text, stop):
        while not stop():
            produced.append(f"{question}{len(produced)} ")
            on_text(produced[-1])

    pieces = stream(ask, "a")
    assert [next(pieces), next(pieces)] == ["a0 ", "a1 "]
    pieces.close()
    count = len(produced)
    time.sleep(0.05)
    assert len(produced) == count, "it goes on producing"

    def fail(question, on_text, stop):
        on_text("first ")
        raise PromptError("it went wrong")

    pieces = stream(fail, "a")
    assert next(pieces) == "first "
    with pytest.raises(PromptError, match="it went wrong"):
        next(pieces)


def test_the_tokens_are_those_of_a_normal_conversation(model, tokenizer, context):
    ids = context.encode("w5 w6", [Turn("w7", "w8 w9")], 1)
    messages = [
        {"role": "user", "content": words(90) + "\n\nw7"},
        {"role": "assistant", "content": "w8 w9"},
        {"role": "user", "content": "w5 w6"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[: context.tokens_seen] == context.token_ids


def test_without_a_chat_template_texts_stand_one_after_another(model):
    tokenizer = tiny_tokenizer(False)
    context = pyramidkv.compress_context(model, tokenizer, words(50), **SMALL)
    ids = context.encode("w5 w6", [], 1)
    assert ids == tokenizer(words(50) + "\n\nw5 w6")["input_ids"]
    assert context.record["chat"] is False


def test_a_query_aware_context_keeps_what_its_question_attends_to(model, tokenizer):
    contexts = [
        pyramidkv.compress_context(model, tokenizer, words(90), question=question, **SMALL)
        for question in (None, "w5 " * 8, "w120 " * 8)
    ]
    kept = [c.cache.compressed_layers[-1].kept_positions().tolist() for c in contexts]
    assert kept[0] != kept[1] != kept[2] != kept[0]
    for context in contexts:
        assert context.token_ids == contexts[0].token_ids
        assert context.cache.tokens_seen == len(context.token_ids)
        assert sum(context.record["kept_lengths"]) == 4 * 24
        assert max(max(head) for head in kept[1]) < len(context.token_ids)
        context.ask("w9", max_new_tokens=3)
    assert contexts[1].record["question"] == ("w5 " * 8).strip()


@pytest.mark.parametrize("architecture", ["qwen3_next", "lfm2"])
def test_where_a_layer_holds_a_state_no_question_votes_and_nothing_is_saved(
    architecture, tokenizer, tmp_path
):
    model = tiny_model(architecture, "sdpa", eos_token_id=None)
    with pytest.raises(CacheStateError, match="cannot drop a question: .* holds one state"):
        pyramidkv.compress_context(model, tokenizer, words(90), question="w5", **SMALL)
    context = pyramidkv.compress_context(model, tokenizer, words(90), **SMALL)
    with pytest.raises(ContextFileError, match="hold states, which only live in memory"):
        context.save(tmp_path / "context.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("chunk", [10, 40, 1000])
@pytest.mark.parametrize("question", [None, "w5 w6 w7"])
def test_pieces_keep_the_same_number(model, tokenizer, chunk, question):
    context = pyramidkv.compress_context(
        model, tokenizer, words(90), question=question, prefill_chunk=chunk, **SMALL
    )
    whole = pyramidkv.compress_context(model, tokenizer, words(90), question=question, **SMALL)
    assert context.cache.kept_lengths() == whole.cache.kept_lengths()
    same = context.ask("w9", max_new_tokens=5).token_ids == (
        whole.ask("w9", max_new_tokens=5).token_ids
    )
    assert same or chunk < 90


def test_a_question_longer_than_a_piece_is_refused(model, tokenizer):
    with pytest.raises(PromptError, match="must fit into one piece"):
        pyramidkv.compress_context(
            model, tokenizer, words(90), question="w5 " * 30, prefill_chunk=20, **SMALL
        )


def test_a_chat_sees_its_turns_and_leaves_the_context_alone(model, tokenizer, context):
    held = context.kv_bytes
    chat = context.chat()
    answers = [chat.ask(question, max_new_tokens=6) for question in QUESTIONS[:3]]
    assert chat.turns == [Turn(q, a.text) for q, a in zip(QUESTIONS, answers, strict=False)]
    assert answers[0].token_ids == context.ask(QUESTIONS[0], max_new_tokens=6).token_ids
    assert answers[1].token_ids != context.ask(QUESTIONS[1], max_new_tokens=6).token_ids
    assert context.kv_bytes == held < chat.cache.kv_bytes
    # a fresh cache that gets the whole conversation at once answers the same
    ids = context.encode(QUESTIONS[2], chat.turns[:2], 6)
    fresh = copy.deepcopy(context.cache)
    with torch.no_grad():
        logits = model(torch.tensor([ids[context.tokens_seen :]]), past_key_values=fresh).logits
    assert int(logits[0, -1].argmax()) == answers[2].token_ids[0]
    chat.reset()
    assert chat.ask(QUESTIONS[0], max_new_tokens=6).token_ids == answers[0].token_ids


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "lfm2"])
def test_a_chat_whose_template_rewrites_answers_goes_back_to_where_they_part(architecture):
    tokenizer = tiny_tokenizer(True)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}w9 {% else %}"
        "<user> {{ m['content'] }} {% endif %}{% endfor %}<assistant> "
    )
    model = tiny_model(architecture, "eager", eos_token_id=None)
    context = pyramidkv.compress_context(model, tokenizer, words(60), **SMALL)
    chat = context.chat()
    for index, question in enumerate(QUESTIONS[:4]):
        answer = chat.ask(question, max_new_tokens=6)
        ids = context.encode(question, chat.turns[:index], 6)
        fresh = copy.deepcopy(context.cache)
        with torch.no_grad():
            logits = model(torch.tensor([ids[context.tokens_seen :]]), past_key_values=fresh).logits
        assert int(logits[0, -1].argmax()) == answer.token_ids[0]
        assert chat.cache.tokens_seen == len(ids) + 5


def test_a_failed_answer_leaves_the_chat_as_it_was(context):
    chat = context.chat()
    first = chat.ask(QUESTIONS[0], max_new_tokens=4)

    def fail(text):
        raise RuntimeError("the reader has gone")

    with pytest.raises(RuntimeError, match="reader has gone"):
        chat.ask(QUESTIONS[1], max_new_tokens=4, on_text=fail)
    assert chat.turns == [Turn(QUESTIONS[0], first.text)]
    again = chat.ask(QUESTIONS[1], max_new_tokens=4)
    straight = context.chat()
    straight.ask(QUESTIONS[0], max_new_tokens=4)
    assert again.token_ids == straight.ask(QUESTIONS[1], max_new_tokens=4).token_ids


def test_an_answer_can_be_stopped_and_the_chat_goes_on(context):
    chat = context.chat()
    count = 0

    def stop():
        nonlocal count
        count += 1
        return count >= 3

    answer = chat.ask(QUESTIONS[0], max_new_tokens=50, stop=stop)
    assert len(answer.token_ids) == 3
    assert chat.turns[0].answer == answer.text
    chat.ask(QUESTIONS[1], max_new_tokens=3)


def test_what_is_too_long_or_empty_is_refused_before_any_work(model, tokenizer, context):
    with pytest.raises(PromptError, match="context is empty"):
        pyramidkv.compress_context(model, tokenizer, " \n", **SMALL)
    with pytest.raises(PromptError, match="context is 1,024 tokens"):
        pyramidkv.compress_context(model, tokenizer, words(1100), **SMALL)
    with pytest.raises(PromptError, match="context is 1,024 tokens"):
        context.ask("w5 " * 1000)
    with pytest.raises(PromptError, match="question is empty"):
        context.ask("")
    with pytest.raises(PromptError, match="max_new_tokens"):
        context.ask("w5", max_new_tokens=0)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("way", ["one pass", "chunked", "decode budget", "saved", "batch"])
def test_every_method_in_every_way_works_or_refuses(name, way, model, tokenizer, tmp_path):
    method = METHODS[name]
    window = {} if name == "full" else {"window_size": 6}
    settings = {} if name == "full" else {"budget": 24, **window}
    if way == "chunked":
        settings["prefill_chunk"] = 30
    if way == "decode budget":
        settings |= {"decode_budget": 30, "decode_interval": 4}
    needed = {"chunked": "prefill chunks", "decode budget": "decode budget"}.get(way)
    if needed is not None and not method.can(needed):
        with pytest.raises(pyramidkv.MethodError, match=f"{name} does not support"):
            pyramidkv.compress_context(model, tokenizer, words(90), name, **settings)
        return
    context = pyramidkv.compress_context(model, tokenizer, words(90), name, **settings)
    length = context.tokens_seen
    compression = make_compression(name, settings.get("budget"), **window)
    if compression.follows_prompt:
        assert sum(context.record["kept_lengths"]) == 4 * settings["budget"]
    else:
        assert context.record["kept_lengths"] == compression.schedule(4, length)
    expected = context.ask(QUESTIONS[0], max_new_tokens=20).token_ids
    if way == "one pass":
        hand = by_hand(model, tokenizer, words(90), QUESTIONS[0], 20, name, **settings)
        assert expected == hand
    if way == "saved":
        context.save(tmp_path / "context.safetensors")
        loaded = pyramidkv.CompressedContext.load(
            tmp_path / "context.safetensors", model, tokenizer
        )
        assert loaded.ask(QUESTIONS[0], max_new_tokens=20).token_ids == expected
    if way == "batch":
        batch = context.ask_batch([QUESTIONS[3], QUESTIONS[0]], max_new_tokens=20)
        assert batch[1].token_ids == expected
    if way == "decode budget":
        chat = context.chat()
        chat.ask(QUESTIONS[0], max_new_tokens=60)
        assert all(sum(row) <= 4 * 33 for row in zip(*chat.cache.kept_lengths(), strict=True))
    assert max(expected) < VOCABULARY


def test_a_context_whose_own_cache_was_used_is_refused(model, tokenizer, tmp_path):
    context = pyramidkv.compress_context(model, tokenizer, words(90), **SMALL)
    with torch.no_grad():
        model(torch.tensor([[5]]), past_key_values=context.fork())
        context.ask("w5", max_new_tokens=2)
        model(torch.tensor([[5]]), past_key_values=context.cache)
    for use in (
        lambda: context.ask("w5"),
        lambda: context.ask_batch(["w5"]),
        lambda: context.chat().ask("w5"),
    ):
        with pytest.raises(CacheStateError, match="own cache was used directly"):
            use()


def test_a_chat_answers_one_question_at_a_time(context):
    chat = context.chat()

    def ask_again(text):
        with pytest.raises(CacheStateError, match="is answering already"):
            chat.ask("w7")
        raised.append(True)

    raised = []
    chat.ask("w5", max_new_tokens=3, on_text=ask_again)
    assert raised
    assert len(chat.turns) == 1
    chat.ask("w7", max_new_tokens=3)


WRONG_TYPES = {
    "a model's name": (lambda c, m, t: pyramidkv.compress_context("m", t, "w5", **SMALL), "model"),
    "no tokenizer": (lambda c, m, t: pyramidkv.compress_context(m, None, "w5"), "tokenizer is a"),
    "swapped": (lambda c, m, t: pyramidkv.compress_context(t, m, "w5", **SMALL), "the model is a"),
    "no text": (lambda c, m, t: pyramidkv.compress_context(m, t, None, **SMALL), "is a NoneType"),
    "bytes": (lambda c, m, t: pyramidkv.compress_context(m, t, b"w5", **SMALL), "is a bytes"),
    "a number": (lambda c, m, t: c.ask(5), "question is a int; give a text"),
    "a text for a list": (lambda c, m, t: c.ask_batch("w5 w6"), "takes a list of questions"),
    "a word for a choice": (
        lambda c, m, t: pyramidkv.compress_context(m, t, "w5", chat="no", **SMALL),
        "True, False or None",
    ),
    "half a token": (lambda c, m, t: c.ask("w5", max_new_tokens=2.5), "max_new_tokens is 2.5"),
    "true tokens": (lambda c, m, t: c.ask("w5", max_new_tokens=True), "max_new_tokens is True"),
    "a temperature in words": (lambda c, m, t: c.ask("w5", temperature="0.5"), "is '0.5'"),
    "hardly any temperature": (lambda c, m, t: c.ask("w5", temperature=1e-40), "at least 1e-06"),
    "a chunk in words": (
        lambda c, m, t: pyramidkv.compress_context(m, t, "w5", prefill_chunk="8", **SMALL),
        "prefill_chunk is '8'",
    ),
    "generate": (lambda c, m, t: pyramidkv.generate("m", t, "w5", **SMALL), "the model is a str"),
    "compress": (lambda c, m, t: pyramidkv.compress("m", **SMALL).__enter__(), "model is a str"),
    "a cache": (lambda c, m, t: pyramidkv.CompressedCache("m", **SMALL), "the model is a str"),
    "load": (lambda c, m, t: pyramidkv.CompressedContext.load("x", t, m), "the model is a "),
    "a mask in words": (
        lambda c, m, t: pyramidkv.CompressedCache(m, **SMALL).expect_prompt("mask"),
        "mask is str; it must be a tensor",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_TYPES)
def test_a_value_of_another_type_is_refused_in_one_sentence(mistake, context, model, tokenizer):
    call, message = WRONG_TYPES[mistake]
    with pytest.raises(pyramidkv.PyramidKVError, match=message) as caught:
        call(context, model, tokenizer)
    assert "\n" not in str(caught.value)
