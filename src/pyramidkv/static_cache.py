"""A compressed prompt with room for a fixed number of tokens, whose decode step can be compiled.

Shapes and addresses never change and no Python number does, so that `torch.compile` makes one graph
of a step and replays it, as a CUDA graph where there are any. Like transformers' `StaticCache`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from . import attention
from .attention import LAYER_TAG
from .decode_attention import group_queries
from .errors import CacheStateError
from .storage import RowStorage, for_later_passes


class StaticCompressedLayer(CacheLayerMixin):
    """One layer's kept tokens, and room behind them."""

    keys: Tensor
    values: Tensor
    is_sliding = False
    is_compileable = True
    is_croppable = False
    at_start = False

    @for_later_passes
    def __init__(self, storage: RowStorage, tokens_seen: int, room: int):
        """Copy what a layer holds.

        Args:
            storage: where it lies.
            tokens_seen: the next position.
            room: tokens that may follow.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        batch, kv_heads, rows, head_dim = storage.keys.shape
        shape = (batch, kv_heads, rows + room, head_dim)
        self.keys, self.values = storage.keys.new_zeros(shape), storage.values.new_zeros(shape)
        self.keys[:, :, :rows], self.values[:, :, :rows] = storage.keys, storage.values
        device = self.keys.device
        self._visible = torch.zeros((batch, rows + room), dtype=torch.bool, device=device)
        visible = storage.visible()
        self._visible[:, :rows] = True if visible is None else visible
        self._end = torch.tensor(rows, device=device)
        self._tokens_seen = torch.tensor(tokens_seen, device=device)
        for tensor in (self.keys, self.values, self._visible, self._end, self._tokens_seen):
            torch._dynamo.mark_static_address(tensor)  # or steps could not be CUDA graphs
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: everything is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new states behind those that are there; all rows are returned, the room too."""
        count = key_states.shape[2]
        places = torch.arange(count, device=self.keys.device) + self._end
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        self._visible.index_fill_(1, places, True)
        self._end.add_(count)
        self._tokens_seen.add_(count)
        keys = self.keys.view(self.keys.shape)  # the tag must not make a circle
        setattr(keys, LAYER_TAG, self)
        return keys, self.values

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Return the next position, on the device."""
        return self._tokens_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise CacheStateError(
            "a static cache has the one prompt it was made with; make another of another prompt"
        )

    @for_later_passes
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row of the batch what another holds, in place."""
        rows = beam_idx.to(self.keys.device)
        for tensor in (self.keys, self.values, self._visible):
            tensor.copy_(tensor.index_select(0, rows))

    def offload(self) -> None:
        raise CacheStateError("a static cache stays on its device; offloading is not supported")

    prefetch = offload

    # What the attention function asks of a layer

    def attends(self, base: str, queries: Tensor) -> bool:
        return True

    def visible(self, *_: Any) -> None:
        """Say nothing: `attend` knows which rows are real."""

    def finish(self, *_: Any) -> None:
        """Do nothing: all tokens that follow are kept."""

    def attend(self, queries: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Return the attention of the last tokens' queries, see `CompressedLayer.attend`."""
        heads, count = queries.shape[1:3]
        kv_heads, rows = self.keys.shape[1:3]
        mask = self._visible[:, None, None]
        if count > 1:
            device = self.keys.device
            places = torch.arange(count, device=device) + (self._end - count)
            causal = torch.arange(rows, device=device) <= places[:, None]
            mask = (mask & causal).repeat(1, 1, heads // kv_heads, 1)
        grouped = group_queries(queries, kv_heads)
        if softcap is None:
            output = functional.scaled_dot_product_attention(
                grouped, self.keys, self.values, attn_mask=mask, scale=scale
            )
        else:
            logits = (grouped.float() * scale) @ self.keys.float().mT
            logits = softcap * torch.tanh(logits / softcap)
            weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
            output = (weights @ self.values.float()).to(queries.dtype)
        return output.reshape(*queries.shape[:3], -1)


class StaticCompressedCache(Cache):
    """What `CompressedCache.to_static` gives: a compressed prompt for compiled decode steps.

    Pass it to the model, or to a compiled one, with one token per row, or several. Rows that were
    padded on the left need `position_ids`; no mask is needed, since what is padding is known here.
    More tokens than there is room for are an error of the device's.
    """

    def __init__(self, model: PreTrainedModel, layers: list[StaticCompressedLayer]):
        super().__init__(layers=list(layers))
        self._config = model.config
        attention.acquire(model)
        weakref.finalize(self, attention.release, model)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values; called by the model."""
        if not self._config._attn_implementation.startswith(attention.PREFIX):
            raise CacheStateError(
                "the model's attention implementation was changed since this static cache was "
                "made, so it would attend to empty rows; change it before the prompt"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held, room included."""
        layers: list[Any] = self.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
