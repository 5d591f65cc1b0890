"""Tiny random models, one per supported architecture, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCABULARY = 200
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_CONVOLUTIONS = ["conv", "full_attention"] * 2
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,  # a quarter of it rotates
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda **k: LlamaConfig(**k),
    "mistral": lambda **k: MistralConfig(sliding_window=None, **k),
    "qwen2": lambda **k: Qwen2Config(**{n: v for n, v in k.items() if n != "head_dim"}),
    "qwen3": lambda **k: Qwen3Config(**k),
    "phi3": lambda **k: Phi3Config(**{n: v for n, v in k.items() if n != "head_dim"}),
    "gemma3_text": lambda **k: Gemma3TextConfig(
        sliding_window=16, layer_types=_ALTERNATING, query_pre_attn_scalar=8, **k
    ),
    "gemma": lambda **k: GemmaConfig(**k),
    "gemma2": lambda **k: Gemma2Config(
        sliding_window=16,
        layer_types=_ALTERNATING,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
        **k,
    ),
    "mixtral": lambda **k: MixtralConfig(sliding_window=None, num_local_experts=4, **k),
    "qwen2_moe": lambda **k: Qwen2MoeConfig(
        **_SHARED_EXPERT, **{n: v for n, v in k.items() if n != "head_dim"}
    ),
    "qwen3_moe": lambda **k: Qwen3MoeConfig(**_EXPERTS, **k),
    "qwen3_next": lambda **k: Qwen3NextConfig(**_SHARED_EXPERT, **{**k, **_LINEAR}),
    "qwen3_5_text": lambda **k: Qwen3_5TextConfig(**{**k, **_LINEAR}),
    "qwen3_5_moe_text": lambda **k: Qwen3_5MoeTextConfig(**_SHARED_EXPERT, **{**k, **_LINEAR}),
    "lfm2": lambda **k: Lfm2Config(
        layer_types=_CONVOLUTIONS, **{n: v for n, v in k.items() if n != "head_dim"}
    ),
    "lfm2_moe": lambda **k: Lfm2MoeConfig(
        **_EXPERTS,
        num_dense_layers=1,
        layer_types=_CONVOLUTIONS,
        **{n: v for n, v in k.items() if n != "head_dim"},
    ),
}

RAW_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
"""The least a config.json says."""

HYBRIDS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"]
"""Those with layers that hold a state of fixed size, not keys and values."""


def tiny_model(
    architecture: str = "llama", attention: str = "eager", seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random model whose attention is peaked enough to make scores differ."""
    torch.manual_seed(seed)
    config = CONFIGS[architecture](**{**_SHAPE, **changes})
    config._attn_implementation = attention
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")):
                parameter.mul_(8)
    return model.eval()


def prompt_ids(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of the given lengths, padded on the left, and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros((len(lengths), longest), dtype=torch.long)
    mask = torch.zeros((len(lengths), longest), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return ids, mask


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Position ids of a left-padded batch, as `generate` makes them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
