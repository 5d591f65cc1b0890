"""Parameter counts equal transformers' own."""

from __future__ import annotations

import pytest
import torch
from tiny import _SHAPE, CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config

from pyramidkv.model_shape import shape_of
from pyramidkv.model_source import find_model, preset_names

_LATENT = {
    **{name: value for name, value in _SHAPE.items() if name != "head_dim"},
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "moe_intermediate_size": 36,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
EVERY = {
    **CONFIGS,
    "deepseek_v2": lambda **k: DeepseekV2Config(**{**_LATENT, **k}),
    "deepseek_v3": lambda **k: DeepseekV3Config(**{**_LATENT, **k}),
}
KNOWN_TOTALS = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
}
"""Parameters as published with the models."""

GEMMA_3_TOTALS = {
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
}
"""As published, of the text model, the vision tower and the projection between them."""

GEMMA_3_VISION_TOWER = 416_866_032
GEMMA_3_VISION_WIDTH = 1152


def built(config) -> int:
    """Count the parameters of the model transformers builds, without memory for them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def variations() -> list[tuple[str, dict]]:
    cases = [(name, {}) for name in EVERY]
    cases += [(name, {"tie_word_embeddings": tied}) for name in EVERY for tied in (True, False)]
    biased = ["llama", "gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe", "qwen3_next"]
    biased += ["qwen3_5_text", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3"]
    cases += [(name, {"attention_bias": True}) for name in biased]
    cases += [("llama", {"mlp_bias": True}), ("deepseek_v2", {"mlp_bias": True})]
    cases += [("qwen2_moe", {"qkv_bias": False})]
    sparse = ["qwen2_moe", "qwen3_moe", "qwen3_next"]
    cases += [(name, {"mlp_only_layers": [0, 2]}) for name in sparse]
    cases += [(name, {"decoder_sparse_step": 3}) for name in sparse]
    cases += [("llama", {"num_key_value_heads": None, "head_dim": None, "hidden_size": 60})]
    cases += [("llama", {"num_key_value_heads": 1, "head_dim": 24})]
    cases += [("deepseek_v2", {"q_lora_rank": None}), ("deepseek_v3", {"q_lora_rank": None})]
    cases += [("deepseek_v3", {"first_k_dense_replace": 9, "n_shared_experts": 0})]
    cases += [(name, {"conv_bias": True, "conv_L_cache": 5}) for name in ("lfm2", "lfm2_moe")]
    cases += [("lfm2", {"block_auto_adjust_ff_dim": False})]
    cases += [("lfm2", {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 7})]
    cases += [("lfm2", {"block_ffn_dim_multiplier": 0.7, "intermediate_size": 1000})]
    return cases


@pytest.mark.parametrize(("architecture", "changes"), variations())
def test_parameters_of_tiny_models(architecture, changes):
    config = EVERY[architecture](**{**(_SHAPE if architecture in CONFIGS else {}), **changes})
    assert shape_of(config.to_dict(), architecture).parameters == built(config)


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_presets(name):
    source = find_model(name)
    assert source.shape.parameters == built(AutoConfig.for_model(**source.config))


def test_every_preset_has_the_parameters_published_with_it():
    assert {*KNOWN_TOTALS, *GEMMA_3_TOTALS} == set(preset_names())
    found = {name: find_model(name).shape.parameters for name in KNOWN_TOTALS}
    assert found == KNOWN_TOTALS
    for name, total in GEMMA_3_TOTALS.items():
        shape = find_model(name).shape
        projection = GEMMA_3_VISION_WIDTH * (shape.hidden_size + 1)
        assert shape.parameters + GEMMA_3_VISION_TOWER + projection == total


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_next", "lfm2_moe"])
def test_routed_experts_are_those_of_the_modules(architecture):
    config = EVERY[architecture](**_SHAPE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    shape = shape_of(config.to_dict(), architecture)
    assert (shape.experts, shape.experts_per_token) == (4, 2)
    assert shape.expert_parameters == routed
    embedding = shape.vocab_size * shape.hidden_size
    assert shape.embedding_parameters == embedding
    unread = 0 if shape.tied_embeddings else embedding - shape.hidden_size
    assert shape.decode_parameters == shape.parameters - routed // 2 - unread


def test_a_step_of_a_mixture_reads_the_chosen_experts_only():
    assert find_model("qwen3-30b-a3b").shape.decode_parameters == pytest.approx(3.0e9, rel=0.02)
    assert find_model("deepseek-v3").shape.decode_parameters == pytest.approx(37e9, rel=0.02)
    dense = find_model("llama-3-8b").shape
    assert (dense.experts, dense.experts_per_token, dense.expert_parameters) == (None, None, 0)
    assert dense.decode_parameters == dense.parameters - (128_256 - 1) * 4096
    tied = find_model("llama-3.2-1b").shape
    assert tied.decode_parameters == tied.parameters
