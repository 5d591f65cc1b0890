"""What a model's configuration says about memory: its layers' caches and its parameters.

Nothing here imports torch or transformers, so that planning starts at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .model_config import ConfigError, read_config
from .model_defaults import LATENT_MODEL_TYPES
from .support import NothingToCompressError, full_attention_layers, state_layers
from .weights import count_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .compression import Compression

__all__ = ["ConfigError", "LayerShape", "ModelShape", "shape_fingerprint", "shape_of"]

LayerKind = Literal["full", "sliding", "state", "latent"]


@dataclass(frozen=True)
class LayerShape:
    """What one layer's cache holds of one sequence.

    Attributes:
        kind: `full` grows with every token; `sliding` grows up to its window; `state` has a fixed
            size (convolution, linear attention); `latent` grows by one compressed vector per token
            (multi-head latent attention) and cannot be compressed further.
        values_per_token: numbers stored per token; 2 x KV heads x head dimension (keys and
            values), for `latent` the latent and the rotary part of the key, for `state` 0.
        window: tokens a sliding layer keeps at most: one less than the model's `sliding_window`,
            as the newest token is added by the pass that needs it.
        state_values: numbers a state layer holds in the cache's own type.
        float32_values: numbers a state layer holds in float32, whatever the cache's type.
    """

    kind: LayerKind
    values_per_token: int
    window: int | None = None
    state_values: int = 0
    float32_values: int = 0

    def kept_tokens(self, tokens: int) -> int:
        """Return the tokens held, uncompressed, after `tokens` tokens of one sequence."""
        return tokens if self.window is None else min(tokens, self.window)

    def state_bytes(self, value_bytes: int) -> int:
        """Return the bytes of what is held of a sequence whatever its length.

        Args:
            value_bytes: bytes per number in the cache's type, 2 for bfloat16.
        """
        return self.state_values * value_bytes + 4 * self.float32_values


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes.

    Attributes:
        name: what the user calls it.
        model_type: transformers' name of the architecture; of the text model, if there are others.
        layers: lowest first.
        hidden_size, query_heads, kv_heads, head_dim, vocab_size: as in its configuration. With
            latent attention, `head_dim` is that of a query: the rotary part and the rest.
        context_length: `max_position_embeddings`, in tokens.
        dtype: type of the stored weights, such as `bfloat16`; None if the configuration has none.
        parameters: all of them, tied embeddings counted once.
        embedding_parameters: those of the input embedding, within `parameters`.
        tied_embeddings: the output layer has no parameters of its own but the embedding's.
        expert_parameters: those of all routed experts of all layers, within `parameters`.
        experts, experts_per_token: routed experts per layer, and how many a token passes through;
            None for dense models.
        quantization: how the stored weights are quantised, such as `awq`, and to how many bits,
            None if that is not known; or None.
        within: `model_type` of the model of text and images whose text model this is, or None.
    """

    name: str
    model_type: str
    layers: tuple[LayerShape, ...]
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    dtype: str | None
    parameters: int
    embedding_parameters: int
    tied_embeddings: bool
    expert_parameters: int
    experts: int | None
    experts_per_token: int | None
    quantization: tuple[str, int | None] | None = None
    within: str | None = None

    @property
    def compressible(self) -> tuple[int, ...]:
        """The layers that share a budget: those that see the whole prompt."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind == "full")

    @property
    def kv_values_per_token(self) -> int:
        """Numbers stored per token while no window is full, all layers together."""
        return sum(layer.values_per_token for layer in self.layers)

    @property
    def decode_parameters(self) -> int:
        """Parameters read to generate one token of one sequence.

        Of the routed experts those the token passes through; of an input embedding that is not
        the output layer too, one row.
        """
        count = self.parameters
        if not self.tied_embeddings:
            count -= self.embedding_parameters - self.hidden_size
        if self.experts is not None and self.experts_per_token is not None:
            idle = self.experts - self.experts_per_token
            count -= self.expert_parameters // self.experts * idle
        return count

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of these figures must know, in sentences."""
        if self.within is None:
            return ()
        return (f"{self.name} is a {self.within} model; the figures are of its text model",)


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of the model a configuration describes.

    Args:
        config: the mapping in a `config.json`, or a transformers configuration's `to_dict()`.
            Of a model of text and images, the text model counts.
        name: what to call the model, in messages too.

    Raises:
        ConfigError: fields are missing, or have values no model can have.
        UnsupportedModelError: the architecture is not known or not supported.
    """
    values: Any = read_config(config, name)
    states = frozenset(state_layers(values))
    weights = count_weights(values, states)
    sparse = weights.routed > 0
    return ModelShape(
        name=name,
        model_type=values.model_type,
        layers=_layers(values, name, states),
        hidden_size=values.hidden_size,
        query_heads=values.num_attention_heads,
        kv_heads=values.num_key_value_heads,
        head_dim=values.head_dim,
        vocab_size=values.vocab_size,
        context_length=values.max_position_embeddings,
        dtype=values.dtype,
        parameters=weights.total,
        embedding_parameters=weights.embedding,
        tied_embeddings=values.tie_word_embeddings,
        expert_parameters=weights.routed,
        experts=values.experts if sparse else None,
        experts_per_token=values.num_experts_per_tok if sparse else None,
        quantization=values.quantization,
        within=values.within,
    )


def layers_to_compress(config: PreTrainedConfig, compression: Compression) -> list[int]:
    """Return the layers that share a compression's budget, after checking that it fits the model.

    Raises:
        UnsupportedModelError: the model cannot be compressed.
        BudgetError, ProfileError: see `Compression.check`.
    """
    layers = full_attention_layers(config)
    compression.check(len(layers), lambda: shape_fingerprint(config.to_dict()))
    return layers


def shape_fingerprint(config: Mapping[str, Any] | ModelShape) -> dict[str, Any]:
    """Return the facts that tell models of different shape apart, ready for JSON.

    A `config.json` and the configuration transformers makes of it give the same.

    Raises:
        ConfigError, UnsupportedModelError: see `shape_of`.
    """
    shape = config if isinstance(config, ModelShape) else shape_of(config, "the model")
    return {
        "model_type": shape.model_type,
        "layers": len(shape.layers),
        "hidden_size": shape.hidden_size,
        "query_heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
    }


def _layers(values: Any, name: str, states: frozenset[int]) -> tuple[LayerShape, ...]:
    if values.model_type in LATENT_MODEL_TYPES:
        latent = LayerShape("latent", values.kv_lora_rank + values.qk_rope_head_dim)
        return tuple([latent] * values.num_hidden_layers)
    try:
        full = frozenset(full_attention_layers(values))
    except NothingToCompressError:
        full = frozenset()
    per_token = 2 * values.num_key_value_heads * values.head_dim
    others = set(range(values.num_hidden_layers)) - full - states
    kinds: dict[LayerKind, LayerShape] = {"full": LayerShape("full", per_token)}
    if states:
        kinds["state"] = _state_layer(values)
    if others:
        kinds["sliding"] = LayerShape("sliding", per_token, _window(values, name))
    return tuple(
        kinds["full" if i in full else "state" if i in states else "sliding"]
        for i in range(values.num_hidden_layers)
    )


def _state_layer(values: Any) -> LayerShape:
    """Return what transformers' linear-attention cache holds: inputs of the convolution, state.

    The convolution's inputs have the model's type; the recurrent state of linear attention is kept
    in float32 by the kernels that compute it.
    """
    if hasattr(values, "conv_L_cache"):
        return LayerShape("state", 0, state_values=values.hidden_size * values.conv_L_cache)
    heads = values.linear_num_value_heads
    keys = values.linear_num_key_heads * values.linear_key_head_dim
    mixed = 2 * keys + heads * values.linear_value_head_dim
    return LayerShape(
        "state",
        0,
        state_values=mixed * values.linear_conv_kernel_dim,
        float32_values=heads * values.linear_key_head_dim * values.linear_value_head_dim,
    )


def _window(values: Any, name: str) -> int:
    window = values.sliding_window
    if window is None or window < 2:  # transformers slices by window - 1, and 0 would keep all
        raise ConfigError(
            f"in the configuration of {name!r}, sliding_window is {window}, but some layers "
            "slide; it must be at least 2"
        )
    return int(window - 1)
