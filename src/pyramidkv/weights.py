"""How many parameters a model has, counted from its configuration.

The counts equal those of the modules transformers builds (`AutoModelForCausalLM.from_config`):
tied embeddings once, buffers and multi-token-prediction layers not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .model_defaults import LATENT_MODEL_TYPES

_FOUR_NORMS = ("gemma2", "gemma3_text")
_GATED_QUERIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_NORMED_HEADS = ("gemma3_text", "qwen3", "qwen3_moe", *_GATED_QUERIES, "lfm2", "lfm2_moe")


@dataclass(frozen=True)
class Weights:
    """Parameters of a model.

    Attributes:
        total: all of them, each stored once.
        embedding: those of the input embedding, within `total`; if tied, the output's too.
        routed: those of the routed experts of all layers, within `total`; 0 for dense models.
    """

    total: int
    embedding: int
    routed: int


def count_weights(config: Any, states: frozenset[int]) -> Weights:
    """Count the parameters.

    Args:
        config: from `read_config`.
        states: the layers that hold a state of fixed size, not keys and values.
    """
    width = config.hidden_size
    embedding = config.vocab_size * width
    total = embedding * (1 if config.tie_word_embeddings else 2) + width
    norms = width * (4 if config.model_type in _FOUR_NORMS else 2)
    attention, state = _attention(config), _state(config) if states else 0
    dense, routed = _dense(config), _routed(config)
    layers, sparse = config.num_hidden_layers, _sparse_layers(config)
    total += layers * norms + len(states) * state + (layers - len(states)) * attention
    total += (layers - sparse) * dense + sparse * (routed + _beside_routed(config))
    return Weights(total, embedding, sparse * routed)


def _linear(inputs: int, outputs: int, bias: bool = False) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _gated_mlp(width: int, inner: int, bias: bool = False) -> int:
    return 2 * _linear(width, inner, bias) + _linear(inner, width, bias)


def _attention(config: Any) -> int:
    if config.model_type in LATENT_MODEL_TYPES:
        return _latent_attention(config)
    width, head = config.hidden_size, config.head_dim
    queries, shared = config.num_attention_heads * head, config.num_key_value_heads * head
    every = getattr(config, "attention_bias", False)
    incoming = every or config.model_type == "qwen2" or getattr(config, "qkv_bias", False)
    asked = queries * (2 if config.model_type in _GATED_QUERIES else 1)
    count: int = _linear(width, asked, incoming) + 2 * _linear(width, shared, incoming)
    count += _linear(queries, width, every)
    return count + (2 * head if config.model_type in _NORMED_HEADS else 0)


def _latent_attention(config: Any) -> int:
    width: int = config.hidden_size
    heads, bias = config.num_attention_heads, config.attention_bias
    rank, queries = config.kv_lora_rank, heads * config.head_dim
    count: int
    if config.q_lora_rank is None:
        count = _linear(width, queries)
    else:
        low = config.q_lora_rank
        count = _linear(width, low, bias) + low + _linear(low, queries)
    count += _linear(width, rank + config.qk_rope_head_dim, bias) + rank
    count += _linear(rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
    return count + _linear(heads * config.v_head_dim, width, bias)


def _state(config: Any) -> int:
    width: int = config.hidden_size
    if config.model_type in ("lfm2", "lfm2_moe"):
        bias = config.conv_bias
        kernel: int = width * config.conv_L_cache + (width if bias else 0)
        return kernel + _linear(width, 3 * width, bias) + _linear(width, width, bias)
    heads: int = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    mixed = 2 * keys + values
    count: int = _linear(width, mixed + values) + _linear(width, 2 * heads)
    count += mixed * config.linear_conv_kernel_dim + 2 * heads
    count += config.linear_value_head_dim + _linear(values, width)
    return count


def _dense(config: Any) -> int:
    inner = getattr(config, "intermediate_size", 0)
    if config.model_type == "lfm2" and config.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        step = config.block_multiple_of
        inner = step * -(-int(config.block_ffn_dim_multiplier * inner) // step)
    return _gated_mlp(config.hidden_size, inner, getattr(config, "mlp_bias", False))


def _routed(config: Any) -> int:
    inner = getattr(config, "moe_intermediate_size", getattr(config, "intermediate_size", 0))
    return int(config.experts * _gated_mlp(config.hidden_size, inner))


def _beside_routed(config: Any) -> int:
    """Count the router and the experts every token passes through, of one layer."""
    width = config.hidden_size
    count = config.experts * width
    if hasattr(config, "shared_expert_intermediate_size"):
        count += _gated_mlp(width, config.shared_expert_intermediate_size) + width
    elif hasattr(config, "n_shared_experts"):
        inner = config.moe_intermediate_size * config.n_shared_experts
        count += _gated_mlp(width, inner, getattr(config, "mlp_bias", False))
    return int(count)


def _sparse_layers(config: Any) -> int:
    """Return how many layers have routed experts."""
    count = config.num_hidden_layers
    if not config.experts:
        return 0
    if hasattr(config, "decoder_sparse_step"):
        step, dense = config.decoder_sparse_step, frozenset(config.mlp_only_layers or ())
        return sum(i not in dense and (i + 1) % step == 0 for i in range(count))
    first = getattr(config, "first_k_dense_replace", getattr(config, "num_dense_layers", 0))
    return max(0, int(count - first))
