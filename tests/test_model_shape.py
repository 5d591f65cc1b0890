"""Shapes read from configurations alone equal those of what transformers makes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import _SHAPE, CONFIGS, HYBRIDS, RAW_LLAMA, prompt_ids, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pyramidkv
from pyramidkv.errors import PyramidKVError
from pyramidkv.model_defaults import CLASS_DEFAULTS, KNOWN_MODEL_TYPES, WRAPPERS
from pyramidkv.model_shape import ConfigError, LayerShape, shape_fingerprint, shape_of
from pyramidkv.model_source import find_model, preset_names
from pyramidkv.support import SUPPORTED_MODEL_TYPES, UnsupportedModelError, full_attention_layers

LLAMA = RAW_LLAMA
QWEN = {**LLAMA, "head_dim": 8, "num_key_value_heads": 2}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**MIXTURE, "shared_expert_intermediate_size": 32}

RAW = {
    "gemma2": {**QWEN, "model_type": "gemma2", "sliding_window": 16},
    "gemma3": {**QWEN, "model_type": "gemma3_text", "num_hidden_layers": 13, "sliding_window": 9},
    "gemma3 pattern": {**QWEN, "model_type": "gemma3_text", "sliding_window_pattern": 3},
    "qwen2 window": {**QWEN, "model_type": "qwen2", "use_sliding_window": True,
                     "max_window_layers": 1, "sliding_window": 32},
    "qwen2 off": {**QWEN, "model_type": "qwen2", "max_window_layers": 1, "sliding_window": 32},
    "qwen3 window": {**QWEN, "model_type": "qwen3", "use_sliding_window": True,
                     "max_window_layers": 3},
    "qwen2_moe window": {**QWEN, **SHARED, "model_type": "qwen2_moe", "use_sliding_window": True,
                         "max_window_layers": 2},
    "qwen3_moe": {**QWEN, **MIXTURE, "model_type": "qwen3_moe"},
    "qwen3_next": {**QWEN, **SHARED, "model_type": "qwen3_next", "num_hidden_layers": 9},
    "qwen3_5": {**QWEN, "model_type": "qwen3_5_text", "full_attention_interval": 2},
    "lfm2": {**QWEN, "model_type": "lfm2", "full_attn_idxs": [1, 3]},
    "lfm2 all": {**QWEN, "model_type": "lfm2"},
    "lfm2 old names": {**LLAMA, "model_type": "lfm2", "intermediate_size": 7, "block_ff_dim": 200,
                       "tie_embedding": False, "full_attn_idxs": [2], "num_key_value_heads": 2},
    "mistral": {**QWEN, "model_type": "mistral", "sliding_window": None},
    "mixtral": {**QWEN, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {**LLAMA, "model_type": "phi3", "num_key_value_heads": 4},
    "llama derived": LLAMA,
    "llama null": {**LLAMA, "num_key_value_heads": None, "head_dim": None},
    "gemma": {**LLAMA, "model_type": "gemma", "num_key_value_heads": 1},
}  # fmt: skip
"""As they come from config.json files of several ages: layer kinds are left to be derived."""

KIND_OF_CACHE = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "state",
}


def assert_equal_to_transformers(raw: dict, config) -> None:
    """Compare a raw configuration's shape with transformers' configuration and empty cache."""
    shape = shape_of(raw, "raw")
    assert shape == shape_of(config.to_dict(), "raw")
    assert shape_fingerprint(raw) == shape_fingerprint(config.to_dict())
    assert shape_fingerprint(shape) == shape_fingerprint(raw)
    assert list(shape.compressible) == full_attention_layers(config)
    cache = DynamicCache(config=config)
    assert [layer.kind for layer in shape.layers] == [
        KIND_OF_CACHE[type(layer).__name__] for layer in cache.layers
    ]
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    assert [layer.window for layer in shape.layers] == [w and w - 1 for w in windows]
    assert shape.hidden_size == config.hidden_size
    assert shape.context_length == config.max_position_embeddings
    assert shape.tied_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize("case", RAW)
def test_raw_configurations_are_completed_as_transformers_does(case):
    assert_equal_to_transformers(RAW[case], AutoConfig.for_model(**RAW[case]))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_tiny_models_have_the_same_shape_raw_and_loaded(architecture):
    config = CONFIGS[architecture](**_SHAPE)
    assert_equal_to_transformers(json.loads(config.to_json_string()), config)


def test_raw_derived_kinds_are_not_all_alike():
    kinds = {case: {layer.kind for layer in shape_of(RAW[case], "x").layers} for case in RAW}
    assert kinds["qwen2 window"] == kinds["gemma3 pattern"] == {"full", "sliding"}
    assert kinds["qwen2 off"] == kinds["lfm2 all"] == {"full"}
    assert kinds["qwen3_5"] == kinds["lfm2"] == {"full", "state"}


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_same_shape_raw_and_loaded(name):
    source = find_model(name)
    config = AutoConfig.for_model(**source.config)
    if source.config["model_type"].startswith("deepseek"):
        assert source.shape == shape_of(config.to_dict(), name)
        assert shape_fingerprint(source.config) == shape_fingerprint(config.to_dict())
        assert source.shape.compressible == ()
        assert {layer.kind for layer in source.shape.layers} == {"latent"}
    else:
        assert_equal_to_transformers(source.config, config)


def test_fingerprints_tell_presets_apart_and_are_plain():
    assert shape_fingerprint(find_model("llama-3-8b").config) == {
        "model_type": "llama",
        "layers": 32,
        "hidden_size": 4096,
        "query_heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    }
    texts = {json.dumps(shape_fingerprint(find_model(name).config)) for name in preset_names()}
    assert len(texts) == len(preset_names()) - 2  # Llama 3.1 has the shapes of Llama 3


@pytest.mark.parametrize("model_type", [t for t in CLASS_DEFAULTS if t != "kimi_k2"])
def test_defaults_are_those_of_the_configuration_class(model_type):
    fields = {f.name: f.default for f in dataclasses.fields(CONFIG_MAPPING[model_type])}
    derived = {"sliding_window_pattern", "full_attention_interval"}  # arguments, not fields
    for field, default in CLASS_DEFAULTS[model_type].items():
        if field not in derived:
            assert fields.get(field) == default, field


def test_every_supported_architecture_is_known():
    assert {*SUPPORTED_MODEL_TYPES, *WRAPPERS} < set(KNOWN_MODEL_TYPES)
    assert set(CLASS_DEFAULTS) == set(KNOWN_MODEL_TYPES) - set(WRAPPERS)


def held_bytes(layer: LayerShape, tokens: int, value_bytes: int) -> int:
    """Return what one layer holds, uncompressed."""
    kept = layer.kept_tokens(tokens) * layer.values_per_token
    return kept * value_bytes + layer.state_bytes(value_bytes)


def held(name: str, tokens: int) -> int:
    """Return the bytes of a preset's full 16-bit cache."""
    return sum(held_bytes(layer, tokens, 2) for layer in find_model(name).shape.layers)


def test_cache_sizes_computed_by_hand():
    assert held("llama-3-70b", 65_536) == 2 * 2 * 80 * 8 * 128 * 65_536 == 21_474_836_480
    assert held("llama-3-8b", 8_192) == 2**30
    assert held("gemma-2b", 1) == 2 * 2 * 18 * 1 * 256 == 18_432
    assert held("deepseek-v3", 1) == 61 * 576 * 2 == 70_272
    assert held("deepseek-v2-lite", 1) == 27 * 576 * 2
    full, sliding = 5, 29
    assert held("gemma-3-4b", 32_768) == 2 * 2 * 4 * 256 * (full * 32_768 + sliding * 1_023)
    assert held("gemma-3-4b", 1_000) == 2 * 2 * 4 * 256 * (full + sliding) * 1_000


def test_sliding_layers_hold_what_transformers_holds():
    model = tiny_model("gemma3_text")
    cache = pyramidkv.CompressedCache(model, "full")
    ids, _ = prompt_ids(50)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    shape = shape_of(model.config.to_dict(), "tiny")
    expected = [held_bytes(layer, 50, 4) for layer in shape.layers]
    assert sum(expected) == cache.kv_bytes
    assert shape.layers[0] == LayerShape("sliding", 2 * 2 * 8, window=15)
    assert expected[0] == 15 * 32 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_state_layers_hold_what_transformers_holds(architecture, dtype):
    linear = {} if architecture.startswith("lfm2") else {"linear_value_head_dim": 12}
    config = CONFIGS[architecture](**_SHAPE)
    config.update(linear)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    cache = pyramidkv.CompressedCache(model, "full")
    ids, _ = prompt_ids(20)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    layers = shape_of(config.to_dict(), architecture).layers
    for layer, stored in zip(layers, cache.layers, strict=True):
        if layer.kind == "state":
            states = *stored.conv_states.values(), *stored.recurrent_states.values()
            nbytes = sum(state.nbytes for state in states if state is not None)
            assert held_bytes(layer, 21, dtype.itemsize) == nbytes > 0
    held = sum(held_bytes(layer, 21, dtype.itemsize) for layer in layers if layer.kind == "full")
    assert held == cache.kv_bytes


@given(tokens=st.integers(1, 10**6), width=st.sampled_from([1, 2, 4]))
def test_what_is_held_grows_to_the_window_and_states_do_not_grow(tokens, width):
    assert held_bytes(LayerShape("full", 6), tokens, width) == 6 * tokens * width
    sliding = LayerShape("sliding", 6, window=100)
    assert held_bytes(sliding, tokens, width) == 6 * min(tokens, 100) * width
    state = LayerShape("state", 0, state_values=5, float32_values=7)
    assert held_bytes(state, tokens, width) == 5 * width + 28


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_of_a_model_of_text_and_images_the_text_model_counts(wrapper):
    text = {"num_hidden_layers": 8, "sliding_window": None if wrapper == "mistral3" else 512}
    config = AutoConfig.for_model(wrapper, text_config=text, dtype="bfloat16")
    loaded = config.get_text_config()
    raw = {"model_type": wrapper, "text_config": text, "torch_dtype": "bfloat16"}
    shape = shape_of(raw, "pictures")
    assert shape_fingerprint(raw) == shape_fingerprint(loaded.to_dict())
    assert shape_fingerprint(raw) == shape_fingerprint(config.to_dict())
    assert list(shape.compressible) == full_attention_layers(loaded)
    assert (shape.model_type, shape.within, shape.dtype) == (WRAPPERS[wrapper], wrapper, "bfloat16")
    assert shape.notes == (f"pictures is a {wrapper} model; the figures are of its text model",)
    assert len(shape.layers) == 8
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_kimi_is_shaped_as_deepseek_v3():
    kimi = shape_of({**find_model("deepseek-v3").config, "model_type": "kimi_k2"}, "kimi")
    deepseek = find_model("deepseek-v3").shape
    assert kimi.layers == deepseek.layers
    assert kimi.parameters == deepseek.parameters
    assert (kimi.head_dim, kimi.kv_values_per_token) == (192, 61 * 576)


def test_types_come_under_either_name():
    assert shape_of({**LLAMA, "dtype": "float16"}, "x").dtype == "float16"
    assert shape_of({**LLAMA, "torch_dtype": "bfloat16"}, "x").dtype == "bfloat16"
    assert shape_of(LLAMA, "x").dtype is None
    assert shape_of(LLAMA, "x").notes == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "is a list; it must be a mapping"),
        (None, "is a NoneType; it must be a mapping"),
        ({}, "has no model_type"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "llama"}, "lacks vocab_size, hidden_size, num_hidden_layers, "
         "num_attention_heads, intermediate_size, which"),
        ({**LLAMA, "vocab_size": None}, "lacks vocab_size, which every llama model has"),
        ({**QWEN, "model_type": "mixtral"}, "lacks num_local_experts, num_experts_per_tok, which"),
        ({**QWEN, **MIXTURE, "model_type": "lfm2_moe"}, "lacks layer_types"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size is '64'; it must be a whole number from 1"),
        ({**LLAMA, "hidden_size": 64.0}, "hidden_size is 64.0; it must be a whole number"),
        ({**LLAMA, "hidden_size": True}, "hidden_size is True; it must be a whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number"),
        ({**LLAMA, "num_hidden_layers": 10**4 + 1}, "whole number from 1 to 10,000"),
        ({**LLAMA, "vocab_size": -5}, "vocab_size is -5"),
        ({**LLAMA, "hidden_size": 10**7 + 1}, "whole number from 1 to 10,000,000"),
        ({**LLAMA, "hidden_size": 10**90}, r"hidden_size is 1000.*0\.\.\.; it must be"),
        ({**LLAMA, "max_position_embeddings": None}, "max_position_embeddings is None"),
        ({**QWEN, "model_type": "qwen3", "head_dim": None}, "head_dim is None"),
        ({**LLAMA, "model_type": "qwen2"}, "lacks num_key_value_heads, which every"),
        ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({**LLAMA, "num_key_value_heads": 3}, "8 attention heads cannot be shared evenly by 3"),
        ({**LLAMA, "num_attention_heads": 128, "num_key_value_heads": 1}, "too narrow for 128"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types names 1 layers, but .* is 4"),
        ({**LLAMA, "layer_types": "full_attention"}, "must be a list of names"),
        ({**LLAMA, "layer_types": [1] * 4}, "must be a list of names"),
        ({**LLAMA, "dtype": 16}, "dtype is 16; it must be a type's name"),
        ({**QWEN, "model_type": "gemma2", "sliding_window": None}, "sliding_window is None, but"),
        ({**QWEN, "model_type": "gemma2", "sliding_window": 1}, "it must be at least 2"),
        ({**QWEN, **MIXTURE, "model_type": "qwen3_moe", "num_experts": 1}, "only 1 experts"),
        ({**QWEN, "model_type": "lfm2", "full_attn_idxs": "1"}, "must be a list of layer numbers"),
        ({**QWEN, "model_type": "lfm2", "block_ffn_dim_multiplier": -1}, "a number above 0"),
        ({"model_type": "gemma3"}, "is of a gemma3 model but has no text_config"),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 0}}, "hidden_size is 0"),
    ],
)  # fmt: skip
def test_what_no_model_can_have_is_refused_in_a_sentence(config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        shape_of(config, "mine")
    assert "'mine'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' of 'mine' is not known; known are: .*llama.*qwen3"),
        ({"model_type": ["llama"]}, "is not known"),
        ({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}, "'ministral3'"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3"}}, "'gemma3' of"),
        ({**LLAMA, "layer_types": ["mamba"] * 4}, "layers of kind mamba"),
        (
            {**LLAMA, "model_type": "phi3", "max_position_embeddings": 131_072},
            "context is extended",
        ),
        ({**QWEN, "model_type": "gemma", "use_bidirectional_attention": True}, "both directions"),
    ],
)
def test_what_cannot_be_compressed_is_refused_by_the_one_rule(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        shape_of(config, "mine")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-3, 30), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(
    name=st.sampled_from(preset_names()),
    junk=st.dictionaries(
        st.sampled_from(sorted({"model_type", *CLASS_DEFAULTS["lfm2"], *CLASS_DEFAULTS["qwen2"]})),
        JUNK,
        min_size=1,
        max_size=3,
    ),
)
def test_whatever_a_field_holds_there_is_a_shape_or_an_error_of_ours(name, junk):
    with contextlib.suppress(PyramidKVError):
        shape = shape_of({**find_model(name).config, **junk}, name)
        assert len(shape.layers) >= 1
        assert shape.parameters > 0


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN, "model_type": "mistral", "sliding_window": 99},
        {**LLAMA, "model_type": "phi3", "sliding_window": 2047},
    ],
)
def test_a_model_whose_layers_all_slide_has_a_shape_without_layers_to_compress(config):
    shape = shape_of(config, "mine")
    assert shape.compressible == ()
    assert {layer.kind for layer in shape.layers} == {"sliding"}
    assert shape.layers[0].window == config["sliding_window"] - 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, ("awq", 4)),
        ({"quant_method": "fp8"}, ("fp8", 8)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", 4)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ("bitsandbytes", 8)),
        ({"quant_method": "quanto", "bits": "int4"}, ("quanto", None)),
        ({}, None),
        (None, None),
    ],
)
def test_quantised_weights_are_told(value, words):
    assert shape_of({**LLAMA, "quantization_config": value}, "mine").quantization == words
    inside = {"model_type": "gemma3", "text_config": {}, "quantization_config": value}
    assert shape_of(inside, "mine").quantization == words


def test_a_quantization_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="quantization_config is 4; it must be an object"):
        shape_of({**LLAMA, "quantization_config": 4}, "mine")
