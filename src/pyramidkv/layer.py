"""One layer of a compressed cache: storage that holds the kept tokens, and really only them.

`tokens seen` is the next position; `rows` is what the layer stores. They differ once a prompt has
been compressed, and neither is ever derived from the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import CacheLayerMixin

from .attention import LAYER_TAG
from .errors import CacheStateError
from .plan import PromptPlan
from .rotary import move_keys
from .selection import select

GROWTH_ROWS = 64
"""Rows of room a layer's storage has after the prompt, and gains each time it is full."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _for_later_passes(method: _Method) -> _Method:
    """Make the tensors that a method stores usable in later passes, of whatever grad mode.

    Tensors made under `torch.inference_mode` could not be written to outside of it.
    """

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


class CompressedLayer(CacheLayerMixin):
    """One full-attention layer's keys and values, of the kept tokens only.

    A prompt passes through in two steps: `update` hands its full keys to the attention function,
    which calls `finish_prompt` when the prompt's attention is computed. Later tokens are appended
    and kept. Storage is `[batch, kv_heads, capacity, head_dim]`; rows whose prompt keeps fewer
    tokens than the longest have unused slots at the front.
    """

    is_sliding = False
    is_croppable = False  # not exactly: evicted prompt tokens cannot come back

    def __init__(self, index: int, plan: PromptPlan):
        self.index = index  # among the full-attention layers, lowest first
        self._plan = plan
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self._storage: tuple[Tensor, Tensor] | None = None
        self._rows = 0
        self._prompt_rows = 0
        self._tokens_seen = 0
        self._occupied: Tensor | None = None  # bool [batch, capacity]; None: no slot is unused
        self._positions: Tensor | None = None  # int32 [batch, kv_heads, prompt rows]

    # What transformers asks of a layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new states and return those to attend to, `[batch, kv_heads, rows, head_dim]`."""
        count = key_states.shape[2]
        if not self.in_prompt:
            self._plan.go_on(count)
        self._plan.begin(self.index)
        if self.in_prompt:
            self.is_initialized = True
            keys, values = key_states, value_states
        else:
            keys, values = self._append(key_states, value_states)
        self._tokens_seen += count
        setattr(keys, LAYER_TAG, self)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the tokens seen, which is the next position; not the stored rows."""
        return self._tokens_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._tokens_seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; only tokens that came after the prompt."""
        count = self.check_crop(tokens_to_remove)
        self._rows -= count
        self._tokens_seen -= count

    def check_crop(self, tokens_to_remove: int) -> int:
        """Return how many tokens `crop` would remove, or raise."""
        if tokens_to_remove > 0:
            raise CacheStateError(
                f"crop takes the number of tokens to remove as a negative number, not "
                f"{tokens_to_remove}"
            )
        removable = self._rows - self._prompt_rows
        if -tokens_to_remove > removable:
            raise CacheStateError(
                f"cannot remove the last {-tokens_to_remove} tokens: only the {removable} that "
                "came after the compressed prompt can be removed"
            )
        return -tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._take_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._take_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        raise CacheStateError("a compressed cache stays on its device; offloading is not supported")

    prefetch = offload

    # What the attention function asks of a layer

    @property
    def in_prompt(self) -> bool:
        """Whether the layer still waits for its prompt, or for the prompt's attention."""
        return self._storage is None

    @_for_later_passes
    def finish_prompt(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Keep what the method keeps of the prompt and let go of the rest.

        Args:
            queries: `[batch, query_heads, tokens, head_dim]`, rotated.
            keys, values: `[batch, kv_heads, tokens, head_dim]`, all of the prompt's.
            valid: bool `[batch, tokens]`, False for padding; None when nothing is padded.
            scale, softcap: of the model's attention logits.
        """
        plan = self._plan
        batch, kv_heads, tokens, head_dim = keys.shape
        if valid is not None:
            valid = None if bool(valid.all()) else valid.expand(batch, -1)
        plan.prepare(batch, tokens, valid)
        kept = [schedule[self.index] for schedule in plan.schedules]
        rows = max(kept)
        shape = (batch, kv_heads, rows + GROWTH_ROWS, head_dim)
        storage = _empty(shape, keys), _empty((*shape[:3], values.shape[3]), values)

        if min(kept) == tokens:
            storage[0][:, :, :rows] = keys
            storage[1][:, :, :rows] = values
        else:
            positions = torch.zeros((batch, kv_heads, rows), dtype=torch.int32, device=keys.device)
            evicts = any(k < n for k, n in zip(kept, plan.lengths, strict=True))
            scores = self._score(queries, keys, values, valid, scale, softcap) if evicts else None
            for row in [slice(None)] if valid is None else [slice(b, b + 1) for b in range(batch)]:
                first = row.start or 0
                padding = tokens - plan.lengths[first]
                if scores is None:
                    every = torch.arange(padding, tokens, device=keys.device)
                    indices = every.expand(*keys[row].shape[:2], -1)
                else:
                    indices = padding + self._select(scores[row, :, padding:], kept[first])
                columns = slice(rows - kept[first], rows)
                kept_keys, kept_values = _take(keys[row], indices), _take(values[row], indices)
                if plan.frequencies is not None:
                    last = torch.arange(tokens - kept[first], tokens, device=keys.device)
                    kept_keys = move_keys(kept_keys, last - indices, plan.frequencies)
                storage[0][row, :, columns] = kept_keys
                storage[1][row, :, columns] = kept_values
                positions[row, :, columns] = indices.int()
            self._positions = positions
        if min(kept) < rows:
            unused = rows - torch.tensor(kept, device=keys.device)
            self._occupied = torch.arange(shape[2], device=keys.device) >= unused[:, None]
            for tensor in storage:  # masked, but a NaN left in memory times 0 would still be NaN
                tensor.masked_fill_(~self._occupied[:, None, :, None], 0)
        self._storage = storage
        self._rows = self._prompt_rows = rows
        plan.layers_done += 1
        plan.freed.add(keys.device, keys.nbytes + values.nbytes)
        if plan.on_layer is not None:
            plan.on_layer(self.index + 1, plan.layer_count)

    def _score(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        score = self._plan.score
        assert score is not None
        count = score.query_count(keys.shape[2])
        voters = queries[:, :, queries.shape[2] - count :]
        return score(voters, keys, values, valid, scale, softcap)

    def _select(self, scores: Tensor, budget: int) -> Tensor:
        options = self._plan.compression.method.options
        assert self._plan.pooling is not None
        return select(scores, budget, options.sink_tokens, options.window_size, self._plan.pooling)

    def finish_step(
        self,
        count: int,
        mask: Tensor | None,
        read: Callable[[Tensor | None], Tensor | None],
    ) -> Tensor | None:
        """Note which of the last `count` tokens are padding and return which rows are real.

        Args:
            count: tokens of this forward pass.
            mask: the wrapped implementation's mask over all tokens seen, or None.
            read: gives bool `[batch, tokens seen]` from the mask.

        Returns:
            bool `[batch, stored rows]`, or None when every row is real.
        """
        self._plan.layers_done += 1
        if mask is not None:
            real = self._plan.padding(mask, count, read)
            if real is not None:
                self._require_occupied()[:, self._rows - count : self._rows] = real
        return None if self._occupied is None else self._occupied[:, : self._rows]

    # Storage

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        assert self._storage is not None
        count = key_states.shape[2]
        end = self._rows + count
        if end > self._storage[0].shape[2]:
            self._grow(end + GROWTH_ROWS)
        keys, values = self._storage
        keys[:, :, self._rows : end] = key_states.detach()
        values[:, :, self._rows : end] = value_states.detach()
        self._rows = end
        if self._occupied is not None:
            self._occupied[:, end - count : end] = True
        return keys[:, :, :end], values[:, :, :end]

    @_for_later_passes
    def _grow(self, capacity: int) -> None:
        assert self._storage is not None
        grown = []
        for old in self._storage:
            new = _empty((*old.shape[:2], capacity, old.shape[3]), old)
            new[:, :, : self._rows] = old[:, :, : self._rows]
            grown.append(new)
        self._storage = grown[0], grown[1]
        if self._occupied is not None:
            room = capacity - self._occupied.shape[1]
            self._occupied = functional.pad(self._occupied, (0, room), value=True)

    @_for_later_passes
    def _require_occupied(self) -> Tensor:
        if self._occupied is None:
            assert self._storage is not None
            keys = self._storage[0]
            size = (keys.shape[0], keys.shape[2])
            self._occupied = torch.ones(size, dtype=torch.bool, device=keys.device)
        return self._occupied

    @_for_later_passes
    def _take_rows(self, take: Callable[[Tensor], Tensor]) -> None:
        if self._storage is None:
            return
        self._storage = take(self._storage[0]), take(self._storage[1])
        if self._occupied is not None:
            self._occupied = take(self._occupied)
        if self._positions is not None:
            self._positions = take(self._positions)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The stored keys, `[batch, kv_heads, rows, head_dim]`; None before the prompt."""
        return None if self._storage is None else self._storage[0][:, :, : self._rows]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The stored values, `[batch, kv_heads, rows, head_dim]`; None before the prompt."""
        return None if self._storage is None else self._storage[1][:, :, : self._rows]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the tensors held, room to grow included."""
        if self._storage is None:
            return 0
        held = [*self._storage, self._positions, self._occupied]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def kept_lengths(self) -> list[int]:
        """Return the tokens stored for each batch row."""
        if self._storage is None:
            return []
        if self._occupied is None:
            return [self._rows] * self._storage[0].shape[0]
        return [int(count) for count in self._occupied[:, : self._rows].sum(-1)]

    def kept_positions(self, row: int = 0) -> Tensor:
        """Return where the kept tokens stood, int64 `[kv_heads, kept]`, padding not counted.

        Tokens after the prompt are included.
        """
        if self._storage is None:
            raise CacheStateError("the cache is empty: no prompt has been processed")
        prompt = self._plan.lengths[row]
        kv_heads = self._storage[0].shape[1]
        kept = self._plan.schedules[row][self.index]
        device = self._storage[0].device
        if self._positions is None:
            first = torch.arange(kept, device=device).expand(kv_heads, kept)
        else:
            padding = self._prompt_tokens() - prompt
            first = self._positions[row, :, self._prompt_rows - kept :].long() - padding
        later = self._rows - self._prompt_rows
        last = torch.arange(prompt, prompt + later, device=device).expand(kv_heads, later)
        return torch.cat([first, last], dim=-1)

    def _prompt_tokens(self) -> int:
        return self._tokens_seen - (self._rows - self._prompt_rows)


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _take(states: Tensor, indices: Tensor) -> Tensor:
    """Gather `[batch, kv_heads, tokens, head_dim]` at indices `[batch, kv_heads, kept]`."""
    return states.gather(2, indices[..., None].expand(-1, -1, -1, states.shape[3]))
