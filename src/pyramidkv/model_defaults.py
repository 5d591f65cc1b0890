"""What transformers' configuration classes take for fields that are left out (5.16 to 5.24)."""

from __future__ import annotations

from typing import Any

from .support import SUPPORTED_MODEL_TYPES

LATENT_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""Models with multi-head latent attention: known to the planner, not compressible."""

WRAPPERS = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Models of text and images, and what their text model is if their `text_config` does not say."""

KNOWN_MODEL_TYPES = tuple(sorted((*SUPPORTED_MODEL_TYPES, *LATENT_MODEL_TYPES, *WRAPPERS)))
"""Every `model_type` whose shape is known."""

_ATTENTION = {
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "layer_types": None,
}
_WINDOW_SWITCH = {"use_sliding_window": False, "sliding_window": 4096}
_TOP_WINDOWS = {**_WINDOW_SWITCH, "max_window_layers": 28}
_SPARSE_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_BIASED = {"attention_bias": False}
_GEMMA = {**_BIASED, "tie_word_embeddings": True, "use_bidirectional_attention": None}
_CONVOLUTION = {"tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3}
_LATENT = {
    **_BIASED,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _sizes(
    vocabulary: int, width: int, inner: int | None, layers: int, heads: int, context: int
) -> dict[str, Any]:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
    }
    return sizes if inner is None else {**sizes, "intermediate_size": inner}


_DEEPSEEK_V3 = {
    **_sizes(129280, 7168, 18432, 61, 128, 4096),
    **_ATTENTION,
    **_LATENT,
    "num_key_value_heads": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}

CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **_sizes(32000, 4096, 11008, 32, 32, 2048),
        **_ATTENTION,
        **_BIASED,
        "mlp_bias": False,
    },
    "mistral": {
        **_sizes(32000, 4096, 14336, 32, 32, 131072),
        **_ATTENTION,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral": {
        **_sizes(32000, 4096, 14336, 32, 32, 131072),
        **_ATTENTION,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "phi3": {
        **_sizes(32064, 3072, 8192, 32, 32, 4096),
        **_ATTENTION,
        "original_max_position_embeddings": 4096,
    },
    "gemma": {
        **_sizes(256000, 3072, 24576, 28, 16, 8192),
        **_ATTENTION,
        **_GEMMA,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {
        **_sizes(256000, 2304, 9216, 26, 8, 8192),
        **_ATTENTION,
        **_GEMMA,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        **_sizes(262208, 2304, 9216, 26, 8, 131072),
        **_ATTENTION,
        **_GEMMA,
        "use_bidirectional_attention": False,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "qwen2": {
        **_sizes(151936, 4096, 22016, 32, 32, 32768),
        **_ATTENTION,
        **_TOP_WINDOWS,
        "num_key_value_heads": 32,
    },
    "qwen2_moe": {
        **_sizes(151936, 2048, 5632, 24, 16, 32768),
        **_ATTENTION,
        **_TOP_WINDOWS,
        **_SPARSE_LAYERS,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "qwen3": {
        **_sizes(151936, 4096, 22016, 32, 32, 32768),
        **_ATTENTION,
        **_BIASED,
        **_TOP_WINDOWS,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "qwen3_moe": {
        **_sizes(151936, 2048, 6144, 24, 32, 32768),
        **_ATTENTION,
        **_BIASED,
        **_WINDOW_SWITCH,
        **_SPARSE_LAYERS,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "qwen3_next": {
        **_sizes(151936, 2048, 5632, 48, 16, 32768),
        **_ATTENTION,
        **_BIASED,
        **_LINEAR,
        **_SPARSE_LAYERS,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "qwen3_5_text": {
        **_sizes(248320, 4096, 12288, 32, 16, 32768),
        **_ATTENTION,
        **_BIASED,
        **_LINEAR,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "qwen3_5_moe_text": {
        **_sizes(248320, 2048, None, 40, 16, 32768),
        **_ATTENTION,
        **_BIASED,
        **_LINEAR,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "lfm2": {
        **_sizes(65536, 2560, 12288, 32, 32, 128000),
        **_ATTENTION,
        **_CONVOLUTION,
        "num_key_value_heads": 8,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": None,
    },
    "lfm2_moe": {
        **_sizes(65536, 2048, 7168, 32, 32, 128000),
        **_ATTENTION,
        **_CONVOLUTION,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "deepseek_v2": {
        **_sizes(102400, 4096, 11008, 32, 32, 2048),
        **_ATTENTION,
        **_LATENT,
        "mlp_bias": False,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
}
"""The fields that decide a model's shape, and what the class takes if they are left out."""
