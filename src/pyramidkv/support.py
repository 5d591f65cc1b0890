"""Which models can be compressed, decided from the configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import PyramidKVError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUPPORTED_MODEL_TYPES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "lfm2",
    "lfm2_moe",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)
"""Decoder-only models with full (grouped) attention, each tested against a dense reference."""

_STATE_LAYERS = {
    "lfm2": ("conv",),
    "lfm2_moe": ("conv",),
    "qwen3_5_moe_text": ("linear_attention",),
    "qwen3_5_text": ("linear_attention",),
    "qwen3_next": ("linear_attention",),
}
"""What hybrid models call their layers that hold a state of fixed size, not keys and values."""


TEXT_MODELS_WITHIN = ("qwen3_5", "qwen3_5_moe")
"""Models of text and images of which `AutoModelForCausalLM` loads the text model by itself."""


class UnsupportedModelError(PyramidKVError, ValueError):
    """The model cannot be compressed; the message names it and those that can."""


class NothingToCompressError(UnsupportedModelError):
    """The model is known and has no layer with full attention."""


def check_model(model: object) -> None:
    """Raise `UnsupportedModelError` if this is no loaded model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; give one loaded by transformers"
        )


def state_layers(config: PreTrainedConfig) -> list[int]:
    """Return the indices of the layers that hold a state of fixed size, not keys and values."""
    names = _STATE_LAYERS.get(config.model_type, ())
    kinds = getattr(config, "layer_types", None) or []
    return [index for index, kind in enumerate(kinds) if kind in names]


def full_attention_layers(config: PreTrainedConfig) -> list[int]:
    """Return the indices of the layers that see the whole prompt: those that share the budget.

    Sliding-window layers and those with a state of fixed size are bounded already and left alone.

    Raises:
        UnsupportedModelError: the architecture is not supported.
        NothingToCompressError: it is, but no layer can be compressed.
    """
    model_type = config.model_type
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"the architecture {model_type!r} is not supported; supported are: "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"this {model_type} model attends in both directions; only causal decoders can be "
            "compressed"
        )
    original = getattr(config, "original_max_position_embeddings", None)
    if model_type == "phi3" and original is not None and original < config.max_position_embeddings:
        raise UnsupportedModelError(
            f"this phi3 model's context is extended from {original:,} tokens to "
            f"{config.max_position_embeddings:,}, and transformers drops the cache in between; "
            "phi3 models are supported if their context is not extended"
        )
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None)
        kinds = ["full_attention" if window is None else "sliding_attention"] * count
    known = ["full_attention", "sliding_attention", *_STATE_LAYERS.get(model_type, ())]
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise UnsupportedModelError(
            f"this {model_type} model has layers of kind {', '.join(unknown)}; supported are: "
            f"{', '.join(known)}"
        )
    layers = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    if not layers:
        raise NothingToCompressError(
            f"no layer of this {model_type} model has full attention, so there is nothing to "
            "compress"
        )
    return layers
