"""Configurations of models as plain mappings: checked, and completed as transformers would.

A `config.json` leaves out what its writer took for granted, and what that is has changed over the
years. `read_config` fills in what transformers' own configuration classes (5.16 to 5.24) fill in,
without importing them (see `model_defaults`). A size that decides what a model is (its width,
depth, heads, ...) is never filled in at the top level: there its absence is an error. Inside a
`text_config` transformers leaves out whatever equals the class's default, so there the defaults
stand for all fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from .errors import PyramidKVError
from .model_defaults import CLASS_DEFAULTS, KNOWN_MODEL_TYPES, LATENT_MODEL_TYPES, WRAPPERS
from .support import UnsupportedModelError

LARGEST_SIZE = 10**7
"""No width, head count or vocabulary is believed above this."""

LARGEST_DEPTH = 10**4
"""No number of layers is believed above this."""

LARGEST_CONTEXT = 10**9
"""No context length or window is believed above this, in tokens."""


class ConfigError(PyramidKVError, ValueError):
    """A configuration that is incomplete, contradictory or absurd; the message says where."""


_REQUIRED = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "kv_lora_rank",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_local_experts",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "shared_expert_intermediate_size",
        "v_head_dim",
        "vocab_size",
    }
)
_ALIASES = {
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "lfm2": {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "kimi_k2": {"num_local_experts": "n_routed_experts"},
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MAY_BE_NULL = frozenset(
    {
        "num_key_value_heads",
        "q_lora_rank",
        "sliding_window",
        "use_bidirectional_attention",
    }
)
_MAY_BE_ZERO = frozenset(
    {
        "first_k_dense_replace",
        "max_window_layers",
        "n_shared_experts",
        "num_dense_layers",
        "num_experts",
        "sliding_window",
    }
)
_FLAGS = frozenset(
    {
        "attention_bias",
        "block_auto_adjust_ff_dim",
        "conv_bias",
        "mlp_bias",
        "qkv_bias",
        "tie_word_embeddings",
        "use_bidirectional_attention",
        "use_sliding_window",
    }
)
_LIMITS = {
    "num_hidden_layers": LARGEST_DEPTH,
    "max_position_embeddings": LARGEST_CONTEXT,
    "original_max_position_embeddings": LARGEST_CONTEXT,
    "sliding_window": LARGEST_CONTEXT,
}


def read_config(config: object, name: str) -> SimpleNamespace:
    """Return a model's configuration, checked and completed.

    The result has all fields of `CLASS_DEFAULTS`, under the names used there, and besides:
    `experts` (0 for dense models), `dtype` (None if not given), `quantization` (how the weights are
    quantised and to how many bits, or None) and `within` (the `model_type` of the model of text and
    images whose text model this is, or None). Of such a model, everything is read from its
    `text_config`.

    Args:
        config: the mapping in a `config.json`, or a transformers configuration's `to_dict()`.
        name: what to call the model in messages.

    Raises:
        ConfigError: fields are missing, or have values no model can have.
        UnsupportedModelError: the shape of this `model_type` is not known.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"the configuration of {name!r} is a {type(config).__name__}; it must be a mapping "
            "such as in a config.json"
        )
    model_type = _model_type(config, name)
    if model_type not in WRAPPERS:
        return _complete(config, model_type, name, None, {})
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(
            f"the configuration of {name!r} is of a {model_type} model but has no text_config; "
            "give its whole config.json"
        )
    text = {"model_type": WRAPPERS[model_type], **text}
    inner = _model_type(text, name)
    if inner in WRAPPERS:
        raise _unknown(inner, name)
    return _complete(text, inner, name, model_type, config)


def _model_type(config: Mapping[str, Any], name: str) -> str:
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError(
            f"the configuration of {name!r} has no model_type; give a model's config.json"
        )
    if model_type not in KNOWN_MODEL_TYPES:
        raise _unknown(model_type, name)
    return str(model_type)


def _unknown(model_type: object, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the architecture {model_type!r} of {name!r} is not known; known are: "
        f"{', '.join(KNOWN_MODEL_TYPES)}"
    )


def _complete(
    config: Mapping[str, Any],
    model_type: str,
    name: str,
    within: str | None,
    around: Mapping[str, Any],
) -> SimpleNamespace:
    """Complete a configuration; `around` is the one it lies in, if it does."""
    defaults = CLASS_DEFAULTS[model_type]
    given = {field: config[field] for field in defaults if field in config}
    for alias, field in _ALIASES.get(model_type, {}).items():
        if config.get(alias) is not None:
            given[field] = config[alias]
    if within is None:
        missing = [f for f in defaults if f in _REQUIRED and given.get(f) is None]
        if "num_key_value_heads" not in given and defaults["num_key_value_heads"] is not None:
            missing.append("num_key_value_heads")  # the class's own number fits hardly any model
        if missing:
            raise ConfigError(
                f"the configuration of {name!r} lacks {', '.join(missing)}, which every "
                f"{model_type} model has; give its whole config.json"
            )
    values = {**defaults, **given}
    for field, value in values.items():
        if value is None and (defaults[field] is None or field in _MAY_BE_NULL):
            continue
        _check_field(field, value, name)
    result = SimpleNamespace(model_type=model_type, within=within, **values)
    both = (config, around)
    types = (c.get(field) for c in both for field in ("dtype", "torch_dtype"))
    result.dtype = _dtype(next(filter(None, types), None), name)
    quantized = (c.get("quantization_config") for c in both)
    result.quantization = _quantization(next(filter(None, quantized), None), name)
    result.experts = next((values[f] for f in _EXPERT_COUNTS if f in values), 0)
    _derive(result, name)
    return result


def _check_field(field: str, value: Any, name: str) -> None:
    if field == "layer_types":
        if not _is_list(value, str):
            raise _wrong(field, value, "a list of names, one per layer", name)
    elif field in ("mlp_only_layers", "full_attn_idxs"):
        if not _is_list(value, int):
            raise _wrong(field, value, "a list of layer numbers", name)
    elif field in _FLAGS:
        if type(value) is not bool:
            raise _wrong(field, value, "true or false", name)
    elif field == "block_ffn_dim_multiplier":
        if type(value) not in (int, float) or not 0 < value <= LARGEST_SIZE:
            raise _wrong(field, value, "a number above 0", name)
    else:
        low = 0 if field in _MAY_BE_ZERO else 1
        high = _LIMITS.get(field, LARGEST_SIZE)
        if type(value) is not int or not low <= value <= high:
            raise _wrong(field, value, f"a whole number from {low} to {high:,}", name)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is kind for item in value)


def _wrong(field: str, value: object, allowed: str, name: str) -> ConfigError:
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return ConfigError(
        f"in the configuration of {name!r}, {field} is {shown}; it must be {allowed}"
    )


def _dtype(value: object, name: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong("dtype", value, "a type's name, such as 'bfloat16'", name)
    return value.removeprefix("torch.")


def _quantization(value: object, name: str) -> tuple[str, int | None] | None:
    """Return how weights are quantised, and to how many bits if that is known."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("quantization_config", value, "an object", name)
    method = str(value.get("quant_method", "unknown"))
    bits = value.get("bits")
    if type(bits) is not int or not 1 <= bits <= 16:
        flags = {"load_in_4bit": 4, "load_in_8bit": 8}
        by_flag = (count for flag, count in flags.items() if value.get(flag) is True)
        bits = 8 if method == "fp8" else next(by_flag, None)
    return method, bits


def _derive(values: Any, name: str) -> None:
    """Fill in what depends on other fields, as the configuration classes do."""
    heads = values.num_attention_heads
    if values.num_key_value_heads is None:
        values.num_key_value_heads = heads
    if heads % values.num_key_value_heads:
        raise ConfigError(
            f"in the configuration of {name!r}, {heads} attention heads cannot be shared evenly by "
            f"{values.num_key_value_heads} key-value heads; one must be a multiple of the other"
        )
    if values.model_type in LATENT_MODEL_TYPES:
        values.head_dim = values.qk_nope_head_dim + values.qk_rope_head_dim
    elif values.head_dim is None:
        values.head_dim = values.hidden_size // heads
        if values.head_dim == 0:
            raise ConfigError(
                f"in the configuration of {name!r}, hidden_size is {values.hidden_size}, too "
                f"narrow for {heads} attention heads"
            )
    if values.experts and (values.num_experts_per_tok or 0) > values.experts:
        raise ConfigError(
            f"in the configuration of {name!r}, num_experts_per_tok is "
            f"{values.num_experts_per_tok}, but there are only {values.experts} experts"
        )
    if hasattr(values, "use_sliding_window") and not values.use_sliding_window:
        values.sliding_window = None
    if values.layer_types is None:
        values.layer_types = _layer_types(values)
    kinds, count = values.layer_types, values.num_hidden_layers
    if kinds is None and values.model_type == "lfm2_moe":
        raise ConfigError(
            f"the configuration of {name!r} lacks layer_types, which every lfm2_moe model has; "
            "give its whole config.json"
        )
    if kinds is not None and len(kinds) != count:
        raise ConfigError(
            f"in the configuration of {name!r}, layer_types names {len(kinds)} layers, but "
            f"num_hidden_layers is {count}; they must agree"
        )


def _layer_types(values: Any) -> list[str] | None:
    """Return the layers' kinds where a family has a rule for them; None where it has none."""
    layers = range(values.num_hidden_layers)
    match values.model_type:
        case "gemma2":
            return _kinds(layers, lambda i: i % 2 == 1, "sliding_attention")
        case "gemma3_text":
            pattern = values.sliding_window_pattern
            return _kinds(layers, lambda i: (i + 1) % pattern == 0, "sliding_attention")
        case "qwen2" | "qwen3":
            slides = values.sliding_window is not None
            first = values.max_window_layers
            return _kinds(layers, lambda i: not (slides and i >= first), "sliding_attention")
        case "qwen2_moe":
            slides, first = values.use_sliding_window, values.max_window_layers
            return _kinds(
                layers, lambda i: not (slides and i % 2 == 0 and i < first), "sliding_attention"
            )
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            interval = values.full_attention_interval
            return _kinds(layers, lambda i: (i + 1) % interval == 0, "linear_attention")
        case "lfm2":
            full = values.full_attn_idxs
            chosen = set(layers) if full is None else set(full)
            return _kinds(layers, lambda i: i in chosen, "conv")
    return None


def _kinds(layers: range, is_full: Any, other: str) -> list[str]:
    return ["full_attention" if is_full(i) else other for i in layers]
