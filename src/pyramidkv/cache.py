"""The compressed cache: what transformers sees in place of a `DynamicCache`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from . import attention
from .compression import Compression, make_compression
from .errors import CacheStateError
from .layer import CompressedLayer
from .measured_layer import MeasuredLayer
from .methods import METHODS, Method
from .model_shape import layers_to_compress
from .plan import INTERRUPTED, CachePlan, Observer
from .ragged import RaggedStorage
from .ragged_layer import RaggedLayer
from .rotary import key_frequencies
from .static_cache import StaticCompressedCache, StaticCompressedLayer
from .storage import RowStorage
from .support import check_model

_STATE_STAYS = (
    "a linear-attention or convolution layer holds one state of all tokens seen, which cannot be "
    "turned back"
)

_SAVED_AS = {"positions": torch.int32, "counts": torch.int32, "sums": torch.float32}
"""Types of tensors in files, by name, of those that have not the model's."""


class CompressedCache(Cache):
    """A cache whose full-attention layers keep only the tokens a method selects.

    Pass it to `generate(past_key_values=cache)` or to the model itself. The first forward pass is
    the prompt; it is compressed layer by layer. A prompt may come in pieces if it was announced
    with `expect_prompt`. Everything after it is kept, so a layer holds its budget plus the tokens
    that came later; with a decode budget, they are evicted too. For inference only: no gradients
    flow through it.

    While the cache exists, the model's attention implementation is one that wraps the model's own
    and does the same as before for everything but compressed caches.

    Args:
        model: the model it is for.
        method: a method's name or a `Method`.
        budget: tokens kept per layer and KV head, averaged over layers, sinks and window included.
        compression_ratio: fraction of the prompt to remove; instead of a budget.
        decode_budget: bound on the tokens kept, generated ones included; by default there is none.
        decode_interval: tokens after which the cache is brought back to the decode budget (32).
        on_layer: called with (layers done, layers) as the prompt passes through, summed over its
            pieces.
        observe: called with each layer's states of the prompt (see `plan.Observer`).
        options: the method's options (see `methods.Options`).

    Raises:
        UnsupportedModelError, MethodError, BudgetError, AttentionError: before any work.
    """

    _plan: CachePlan
    _config: PreTrainedConfig
    _dtype: torch.dtype
    _held: weakref.ref[PreTrainedModel] | None  # the model, if this cache keeps it switched

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = "pyramidkv",
        budget: int | None = None,
        compression_ratio: float | None = None,
        *,
        decode_budget: int | None = None,
        decode_interval: int | None = None,
        on_layer: Callable[[int, int], None] | None = None,
        observe: Observer | None = None,
        **options: Any,
    ):
        compression = make_compression(
            method,
            budget,
            compression_ratio,
            decode_budget=decode_budget,
            decode_interval=decode_interval,
            **options,
        )
        self._build(model, compression, on_layer)
        self._plan.observe = observe
        self._hold(model)

    @classmethod
    def for_observing(
        cls,
        model: PreTrainedModel,
        observe: Observer,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> CompressedCache:
        """Return a cache for a pass that is only looked at: it keeps one token per layer."""
        method = METHODS["streamingllm"].with_options(sink_tokens=1)
        return cls(model, method, 1, on_layer=on_layer, observe=observe)

    @classmethod
    def for_switched_model(
        cls,
        model: PreTrainedModel,
        compression: Compression,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> CompressedCache:
        """Return a cache for a model that someone else keeps switched to our attention."""
        cache = cls.__new__(cls)
        cache._build(model, compression, on_layer)
        return cache

    @classmethod
    def convert(
        cls,
        cache: DynamicCache,
        model: PreTrainedModel,
        compression: Compression,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> CompressedCache:
        """Turn an empty `DynamicCache` itself into a compressed cache.

        Whoever made it may go on using it without looking at what the model returns.
        """
        cache.__class__ = cls  # type: ignore[assignment]
        converted: CompressedCache = cache  # type: ignore[assignment]
        converted._build(model, compression, on_layer)
        return converted

    def _hold(self, model: PreTrainedModel) -> None:
        """Keep the model switched to our attention as long as this cache exists."""
        attention.acquire(model)
        weakref.finalize(self, attention.release, model)
        self._held = weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """Return an independent copy, such as for several questions on one prompt."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        memo[id(self._plan)] = self._plan.copy()
        for name, value in vars(self).items():
            shared = name in ("_config", "_held")
            setattr(result, name, value if shared else copy.deepcopy(value, memo))
        model = self._held() if self._held is not None else None
        if model is not None:
            result._hold(model)
        return result

    def _build(
        self,
        model: PreTrainedModel,
        compression: Compression,
        on_layer: Callable[[int, int], None] | None,
    ) -> None:
        check_model(model)
        full = layers_to_compress(model.config, compression)
        self._config, self._dtype = model.config, model.dtype
        self._held = None
        only_full = len(full) == model.config.num_hidden_layers
        self._plan = CachePlan(compression, len(full), on_layer, only_full)
        if compression.method.renumber:
            self._plan.frequencies = key_frequencies(model)
        layers: list[Any] = list(DynamicCache(config=model.config).layers)
        measured: list[MeasuredLayer] = []
        for index, layer_index in enumerate(full):
            if compression.measured:
                layers[layer_index] = MeasuredLayer(index, self._plan, list(measured))
                measured.append(layers[layer_index])
            elif compression.method.options.by_head:
                layers[layer_index] = RaggedLayer(index, self._plan)
            else:
                layers[layer_index] = CompressedLayer(index, self._plan)
        super().__init__(layers=layers)
        self._in_turn = [i for i, linear in enumerate(self.is_linear) if not linear]
        self._next = 0  # of them, to take tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values; called by the model."""
        tokens, plan = key_states.shape[2], self._plan
        self._admit(tokens, layer_idx)
        layer: Any = self.layers[layer_idx]
        if not isinstance(layer, CompressedLayer) and (
            plan.question and layer.get_seq_length() + tokens == plan.announced
        ):
            layer.activate_past_recording()  # the question is to be taken back
        taken = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._next = (self._next + 1) % len(self._in_turn)
        if type(layer) is DynamicSlidingWindowLayer and not layer.record_past and tokens > 1:
            _let_go_of_the_rest(layer)
        return taken

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Take a layer's new inputs, if it holds a state; called by the model."""
        self._admit(conv_states.shape[-1], layer_idx)
        with torch.inference_mode(False), torch.no_grad():  # usable in passes of whatever grad mode
            return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Take a layer's new state; called by the model."""
        with torch.inference_mode(False), torch.no_grad():
            return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def _admit(self, tokens: int, layer_idx: int) -> None:
        """Refuse tokens before a layer of another kind takes them."""
        first = self._next == 0 or layer_idx == 0  # reading a configuration takes its time
        if first and not self._config._attn_implementation.startswith(attention.PREFIX):
            raise CacheStateError(
                "this compressed cache is used outside of the `compress` block it was made in, or "
                "the model's attention implementation was changed meanwhile; stay inside the "
                "block, or make the cache with pyramidkv.CompressedCache(model, ...)"
            )
        if layer_idx == 0 and not isinstance(self.layers[0], CompressedLayer):
            self._plan.check(tokens)
        if layer_idx in self._in_turn and layer_idx != self._in_turn[self._next]:
            raise CacheStateError(INTERRUPTED)

    def expect_prompt(self, attention_mask: Tensor, question_tokens: int = 0) -> None:
        """Announce the whole prompt before its first piece, so that it may come in several.

        After each piece every layer is brought back to what it is to keep of the whole prompt. The
        number kept in the end does not depend on the pieces; which tokens are kept may, since
        early choices are made by early queries. One piece as long as the prompt is no different
        from a prompt that was not announced.

        Args:
            attention_mask: `[batch, tokens]`, nonzero for real tokens, padded on the left.
            question_tokens: the last tokens of every row; they take part in choosing what is kept
                of the tokens before them, and are then dropped, as if they had never been seen.
                They must come whole in the last piece, and `end_prompt` must be called after it.

        Raises:
            CacheStateError: the cache has a prompt, or a layer could not drop the question.
            PromptError, BudgetError: the prompt does not fit.
        """
        if question_tokens and any(self.is_linear):
            raise CacheStateError(f"cannot drop a question: {_STATE_STAYS}")
        self._plan.expect(attention_mask, question_tokens)

    @property
    def compression(self) -> Compression:
        """The method and how much it keeps."""
        return self._plan.compression

    @property
    def compressed_layers(self) -> list[CompressedLayer]:
        """The layers that share the budget, lowest first."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def prompt_lengths(self) -> list[int]:
        """Prompt tokens of each batch row, without padding; empty before the prompt."""
        return list(self._plan.lengths)

    @property
    def schedules(self) -> list[list[float]]:
        """Prompt tokens kept, per batch row and full-attention layer; empty before the prompt.

        Per KV head on average, which is no whole number if heads of different layers compete or
        have budgets of their own.
        """
        return [list(schedule) for schedule in self._plan.schedules]

    @property
    def tokens_seen(self) -> int:
        """Tokens processed so far, padding included: the next position."""
        return self.get_seq_length()

    def kept_lengths(self) -> list[Sequence[float]]:
        """Return the tokens stored now, per full-attention layer and batch row."""
        return [layer.kept_lengths() for layer in self.compressed_layers]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values stored, read off the tensors; every layer that has them."""
        return sum(stored_bytes(layer) for layer in self.layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors held: `kv_bytes`, room to grow, the kept positions, and states."""
        return sum(_held_bytes(layer) for layer in self.layers)

    def end_prompt(self) -> None:
        """Say that the prompt is complete, so that the tokens that follow come after it."""
        if not self._plan.complete:
            raise CacheStateError("the prompt has not been processed yet, or not all of it")
        layers: list[Any] = self.layers
        for layer in layers:
            if type(layer) is not DynamicSlidingWindowLayer or not layer.is_initialized:
                continue
            if layer.record_past:
                layer.crop(-self._plan.question)
                layer.record_past = False
            _let_go_of_the_rest(layer)
        self._plan.end_prompt()

    def tensors(self) -> dict[str, Tensor]:
        """Return all that is held of a prompt of one row, by name, for `from_tensors`.

        Raises:
            CacheStateError: there is no prompt, or tokens follow it, or several rows; or a layer
                is of a kind that cannot be saved.
        """
        plan = self._plan
        if not plan.complete or len(plan.lengths) != 1 or plan.seen != plan.lengths:
            raise CacheStateError("only a cache of one prompt, with nothing after it, can be saved")
        layers: list[Any] = self.layers
        result: dict[str, Tensor] = {}
        for index, layer in enumerate(layers):
            held: dict[str, Any]
            if isinstance(layer, CompressedLayer):
                held = layer.tensors()
            elif type(layer) is DynamicSlidingWindowLayer:
                held = {"keys": layer.keys, "values": layer.values}
            else:
                raise CacheStateError(
                    f"layer {index} of this model is a {type(layer).__name__}, which cannot be "
                    "saved"
                )
            result.update({f"layers.{index}.{name}": tensor for name, tensor in held.items()})
        return result

    @classmethod
    def from_tensors(
        cls,
        model: PreTrainedModel,
        compression: Compression,
        tensors: dict[str, Tensor],
        length: int,
        schedule: list[float],
    ) -> CompressedCache:
        """Return a cache that holds what `tensors` gave out; keys and values are not copied.

        Args:
            model, compression: those it was made with.
            tensors: each on the device of its layer.
            length: the prompt's tokens.
            schedule: tokens each full-attention layer kept.

        Raises:
            KeyError: a tensor is missing.
            ValueError: names, shapes or types do not fit the model.
        """
        cache = cls.for_switched_model(model, compression)
        cache._restore(tensors, length, schedule)
        cache._hold(model)
        return cache

    def _restore(self, tensors: dict[str, Tensor], length: int, schedule: list[float]) -> None:
        config = self._config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        compressed = self.compressed_layers
        kinds = (int, float) if self.compression.method.options.by_head else (int,)
        whole = all(type(kept) in kinds and 0 < kept <= length for kept in schedule)
        if len(schedule) != len(compressed) or not whole:
            raise ValueError(f"its schedule does not fit {len(compressed)} layers")
        remaining = dict(tensors)
        layers: list[Any] = self.layers
        for index, layer in enumerate(layers):
            if isinstance(layer, CompressedLayer):
                kept = schedule[layer.index]
                shapes = layer.expected_shapes(
                    kept, length, heads, config.num_attention_heads, size
                )
            elif type(layer) is DynamicSlidingWindowLayer:
                states = (1, heads, min(length, layer.sliding_window - 1), size)
                shapes = {"keys": states, "values": states}
            else:
                raise ValueError(f"layer {index} holds a state, which cannot be saved")
            held = {}
            for name, shape in shapes.items():
                tensor = held[name] = remaining.pop(f"layers.{index}.{name}")
                if tensor.shape != shape or tensor.dtype != _SAVED_AS.get(name, self._dtype):
                    raise ValueError(f"the {name} of layer {index} have another shape or type")
            if isinstance(layer, CompressedLayer):
                layer.restore(held, length)
            else:
                layer.lazy_initialization(held["keys"], held["values"])
                layer.keys, layer.values = held["keys"], held["values"]
                layer.cumulative_length = length
        if remaining:
            raise ValueError(f"it has a tensor of unknown purpose: {min(remaining)}")
        self._plan.restore(length, schedule)

    def adopt(
        self,
        schedules: Sequence[Sequence[float]],
        parts: Sequence[tuple[RowStorage, Tensor] | RaggedStorage],
    ) -> None:
        """Hold, as the rows of a batch, different parts of the one prompt that was processed.

        Args:
            schedules: tokens that each row keeps, per full-attention layer.
            parts: of each full-attention layer, all rows' tokens: see `CompressedLayer.adopt`; or
                of heads that keep different numbers of them.
        """
        self.reorder_cache(torch.zeros(len(schedules), dtype=torch.long))
        self._plan.adopt(schedules)
        indices = [i for i, layer in enumerate(self.layers) if isinstance(layer, CompressedLayer)]
        for index, part in zip(indices, parts, strict=True):
            layer: Any = self.layers[index]
            if isinstance(part, RaggedStorage):
                self.layers[index] = RaggedLayer.holding(layer.index, self._plan, part)
            else:
                layer.adopt(*part)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, if they came after the prompt."""
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.check_crop(tokens_to_remove)
            elif isinstance(layer, DynamicSlidingWindowLayer) and (
                layer.get_seq_length() >= layer.sliding_window and not layer.record_past
            ):
                raise CacheStateError(
                    "cannot remove tokens: a sliding-window layer has already dropped those that "
                    "would come back into its window"
                )
            elif isinstance(layer, LinearAttentionCacheLayerMixin):
                raise CacheStateError(f"cannot remove tokens: {_STATE_STAYS}")
        before = self.compressed_layers[0].kept_lengths()
        super().crop(tokens_to_remove)
        after = self.compressed_layers[0].kept_lengths()
        self._plan.remove([round(a - b) for a, b in zip(before, after, strict=True)])

    def to_static(self, max_new_tokens: int) -> StaticCompressedCache:
        """Return a copy of what is held, with room for so many tokens, for compiled decode steps.

        Raises:
            CacheStateError: there is no whole prompt, or a layer cannot be of static shape.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise CacheStateError(
                f"max_new_tokens is {max_new_tokens!r}; it is a whole number of at least 1"
            )
        if not self._plan.complete or self._plan.current is not None:
            raise CacheStateError("the prompt has not been processed yet, or not all of it")
        if self.compression.decode_budget is not None:
            raise CacheStateError(
                "a static cache evicts nothing, so it cannot keep to a decode budget; make the "
                "cache without one"
            )
        model = self._held() if self._held is not None else None
        if model is None:
            raise CacheStateError(
                "this cache belongs to a `compress` block; make it with "
                "pyramidkv.CompressedCache(model, ...)"
            )
        layers: list[Any] = self.layers
        made = []
        for index, layer in enumerate(layers):
            storage = layer.storage if isinstance(layer, CompressedLayer) else None
            if storage is None:
                what = "is of another kind"
                if isinstance(layer, RaggedLayer):
                    what = "has heads of different lengths"
                raise CacheStateError(f"layer {index} {what}, which cannot be of static shape")
            made.append(StaticCompressedLayer(storage, layer.get_seq_length(), max_new_tokens))
        return StaticCompressedCache(model, made)

    def reset(self) -> None:
        """Empty the cache, ready for another prompt."""
        fresh = DynamicCache(config=self._config).layers
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                layer.reset()
            else:  # older releases only zero a sliding layer
                self.layers[index] = fresh[index]
        self._next = 0
        self._plan.reset()

    # By `reorder_cache`, since layers that hold a state know no other way

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.arange(self._batch, device=indices.device)[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._plan.take_rows(beam_idx.tolist())

    @property
    def _batch(self) -> int:
        return len(self._plan.lengths)


def _let_go_of_the_rest(layer: Any) -> None:
    """Free what a sliding-window layer has dropped: it keeps a view of all it was given."""
    with torch.inference_mode(False), torch.no_grad():
        for name in ("keys", "values"):
            held = getattr(layer, name)
            if held.untyped_storage().nbytes() > held.nbytes:
                setattr(layer, name, held.clone())


def stored_bytes(layer: Any) -> int:
    """Return the bytes of the keys and values of a cache's layer, of whatever kind."""
    if isinstance(layer, CompressedLayer):
        return layer.stored_bytes
    tensors = getattr(layer, "keys", None), getattr(layer, "values", None)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _held_bytes(layer: Any) -> int:
    if isinstance(layer, CompressedLayer):
        return layer.allocated_bytes
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states = *layer.conv_states.values(), *layer.recurrent_states.values()
        return sum(state.nbytes for state in states if state is not None)
    return stored_bytes(layer)
