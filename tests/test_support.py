"""Which models can be compressed, and how the others are refused."""

from __future__ import annotations

import pytest
from tiny import CONFIGS, HYBRIDS, tiny_model
from transformers import (
    FalconH1Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    T5Config,
    Zamba2Config,
)

import pyramidkv
from pyramidkv.support import (
    SUPPORTED_MODEL_TYPES,
    UnsupportedModelError,
    full_attention_layers,
)


def test_every_supported_architecture_is_tested_against_the_reference():
    assert set(CONFIGS) == set(SUPPORTED_MODEL_TYPES)


def test_full_layers_are_found_and_sliding_ones_left_alone():
    assert full_attention_layers(tiny_model("llama").config) == [0, 1, 2, 3]
    assert full_attention_layers(tiny_model("gemma3_text").config) == [1, 3]
    model = tiny_model("gemma3_text")
    cache = pyramidkv.CompressedCache(model, "snapkv", 64)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["DynamicSlidingWindowLayer", "CompressedLayer"] * 2


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_full_layers_of_hybrids_are_found_and_those_with_a_state_left_alone(architecture):
    model = tiny_model(architecture)
    assert full_attention_layers(model.config) == [1, 3]
    cache = pyramidkv.CompressedCache(model, "snapkv", 64)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["LinearAttentionLayer", "CompressedLayer"] * 2
    model.config.layer_types = [model.config.layer_types[0]] * 4
    with pytest.raises(UnsupportedModelError, match="nothing to compress"):
        full_attention_layers(model.config)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(),
        MambaConfig(),
        T5Config(),
        FalconH1Config(),
        JambaConfig(),
        MiniMaxConfig(),
        Zamba2Config(),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures_are_refused_by_name(config):
    with pytest.raises(UnsupportedModelError, match=f"'{config.model_type}' is not supported"):
        full_attention_layers(config)


def test_models_with_only_sliding_windows_are_refused():
    with pytest.raises(UnsupportedModelError, match="nothing to compress"):
        full_attention_layers(MistralConfig(sliding_window=4096))


def test_phi3_with_an_extended_context_is_refused():
    """transformers drops its cache when the text grows past the original context."""
    model = tiny_model("phi3", "sdpa", original_max_position_embeddings=32)
    with pytest.raises(UnsupportedModelError, match="context is extended from 32 tokens to 1,024"):
        pyramidkv.CompressedCache(model, "snapkv", 64)


def test_layers_of_other_kinds_and_bidirectional_attention_are_refused():
    mixed = Gemma3TextConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    mixed.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        full_attention_layers(mixed)
    both_ways = Gemma3TextConfig(num_hidden_layers=2)
    both_ways.use_bidirectional_attention = True
    with pytest.raises(UnsupportedModelError, match="both directions"):
        full_attention_layers(both_ways)


def test_both_ways_in_refuse_before_touching_the_model():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20))
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError), pyramidkv.compress(model, budget=64):
        pass
    with pytest.raises(UnsupportedModelError):
        pyramidkv.CompressedCache(model, budget=64)
    assert model.config._attn_implementation == before
