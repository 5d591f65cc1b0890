"""One layer of a compressed cache: it holds the kept tokens, and really only them.

`tokens seen` is the next position; `rows` is what the layer stores. They differ once a prompt has
been compressed, and neither is ever derived from the other.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import CacheLayerMixin

from .attention import LAYER_TAG
from .compression import GROWTH_ROWS
from .decode_attention import attend, has_kernel
from .errors import CacheStateError
from .plan import CachePlan
from .ragged import RaggedStorage
from .rotary import move_keys
from .storage import RowStorage, for_later_passes, right_aligned
from .votes import Votes

FEW_QUERIES = 8
"""New tokens of a row, at most, that are taken for decoding: their queries share what is read."""


class CompressedLayer(CacheLayerMixin):
    """One full-attention layer's keys and values, of the kept tokens only.

    A pass goes through in three steps: `update` hands the keys to attend to to the attention
    function, which asks `visible` which of them are real and calls `finish` when the attention is
    computed. `finish` evicts what the method evicts: after each piece of the prompt, and while
    decoding if there is a decode budget.
    """

    is_sliding = False
    is_croppable = False  # not exactly: evicted prompt tokens cannot come back

    def __init__(self, index: int, plan: CachePlan):
        self.index = index  # among the full-attention layers, lowest first
        self._plan = plan
        self._votes = Votes(plan.score)
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self._storage: RowStorage | None = None
        self._tokens_seen = 0
        # Where the rows stood that the last eviction left, int32 [batch, kv_heads, rows], aligned
        # to the right; None while nothing has been evicted.
        self._positions: Tensor | None = None
        self._votes.clear()

    # What transformers asks of a layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new states and return those to attend to, `[batch, kv_heads, rows, head_dim]`."""
        now = self._plan.begin(self.index, key_states.shape[2])
        self.is_initialized = True
        keys, values = key_states, value_states
        if not now.in_prompt:
            keys, values = self._append(keys, values)
        elif self._storage is not None:
            keys, values = self._join(keys, values)
        self._tokens_seen += now.tokens
        setattr(keys, LAYER_TAG, self)
        return keys, values

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store states that follow the prompt and return what `update` is to hand out."""
        assert self._storage is not None
        self._storage.append(keys, values)
        return self._storage.keys, self._storage.values

    @property
    def _held(self) -> RowStorage | RaggedStorage | None:
        """Where the states lie, for what is the same wherever they do; None before the prompt."""
        return self._storage

    @for_later_passes
    def _join(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put a piece of the prompt behind what is held of it, and let go of that."""
        assert self._storage is not None
        stored = [self._storage.keys, self._storage.values]
        self._storage = None  # nothing is held twice
        keys = torch.cat([stored.pop(0), keys.detach()], dim=2)
        values = torch.cat([stored.pop(0), values.detach()], dim=2)
        return keys, values

    @for_later_passes
    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedLayer:
        """Return an independent copy; its plan is the copy that `memo` has of this one's."""
        result = copy.copy(self)
        memo[id(self)] = result
        result._plan = memo.get(id(self._plan)) or self._plan.copy()
        result._storage = None if self._storage is None else self._storage.copy()
        result._positions = None if self._positions is None else self._positions.clone()
        result._votes = self._votes.copy()
        return result

    def get_seq_length(self) -> int:
        """Return the tokens seen, which is the next position; not the stored rows."""
        return self._tokens_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Ask for a mask over the new tokens only: which stored rows are real is known here."""
        return query_length, self._tokens_seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; only tokens that came after the prompt."""
        count = self.check_crop(tokens_to_remove)
        if count:
            assert self._held is not None
            self._held.remove(count)
            self._tokens_seen -= count

    def check_crop(self, tokens_to_remove: int) -> int:
        """Return how many tokens `crop` would remove, or raise."""
        if tokens_to_remove > 0:
            raise CacheStateError(
                f"crop takes the number of tokens to remove as a negative number, not "
                f"{tokens_to_remove}"
            )
        plan = self._plan
        if tokens_to_remove and plan.compression.decode_budget is not None:
            raise CacheStateError(
                "tokens cannot be removed from a cache with a decode budget: what they evicted "
                "cannot come back"
            )
        removable = self._removable()
        if -tokens_to_remove > removable:
            raise CacheStateError(
                f"cannot remove the last {-tokens_to_remove} tokens: only the {removable} that "
                "came after the compressed prompt can be removed"
            )
        return -tokens_to_remove

    def _removable(self) -> int:
        """Return how many rows came after the prompt."""
        if self._storage is None:
            return 0
        return self._storage.rows - max(kept[self.index] for kept in self._plan.kept)

    @for_later_passes
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows of the batch, in this order, some perhaps several times."""

        def take(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, beam_idx.to(tensor.device))

        if self._held is not None:
            self._held.take_rows(take)
            self._votes.take_rows(take)
        if self._positions is not None:
            self._positions = take(self._positions)

    def offload(self) -> None:
        raise CacheStateError("a compressed cache stays on its device; offloading is not supported")

    prefetch = offload

    # What the attention function asks of a layer

    @property
    def at_start(self) -> bool:
        """Whether the pass under way is the first, so that it attends to its own tokens only."""
        return self._plan.columns_seen == 0

    def attends(self, base: str, queries: Tensor) -> bool:
        """Say whether this layer attends by itself, so that the implementation `base` is not asked.

        On CPUs PyTorch's own function reads the keys once for each query head, or repeats them.
        """
        if self._storage is None or base != "sdpa" or queries.shape[2] > FEW_QUERIES:
            return False
        now = self._plan.current
        assert now is not None
        return not now.in_prompt and has_kernel(queries, self._storage.keys, self._storage.values)

    def attend(self, queries: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Return the attention of new queries over all that is held.

        Args:
            queries: `[batch, query_heads, tokens, head_dim]`, rotated, of this pass.
            scale, softcap: of the model's attention logits.

        Returns:
            `[batch, query_heads, tokens, head_dim]`
        """
        storage = self._storage
        assert storage is not None
        states = storage.keys, storage.values
        return attend(queries, *states, scale, softcap, storage.visible())

    def visible(
        self, keys: Tensor, mask: Tensor | None, read: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Return which of the keys that `update` handed out are real.

        Args:
            keys: `[batch, kv_heads, rows, head_dim]`.
            mask: the wrapped implementation's mask over the new tokens, or None.
            read: gives bool `[batch, tokens]` from the mask.

        Returns:
            bool `[batch, rows]`, or None when every row is real.
        """
        plan = self._plan
        now = plan.current
        assert now is not None
        tokens = now.tokens
        plan.read(keys.shape[0], lambda: None if mask is None else read(mask)[:, -tokens:])
        if now.in_prompt:
            counts, rows = plan.candidates(self.index), keys.shape[2]
            return None if min(counts) == rows else right_aligned(counts, rows, rows, keys.device)
        if min(now.new) < tokens:
            self._mark_padding(tokens, now.new)
        return None if self._storage is None else self._storage.visible()

    @for_later_passes
    def _mark_padding(self, tokens: int, new: Sequence[int]) -> None:
        assert self._held is not None
        self._held.mark_padding(tokens, new)

    def finish(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Evict what the method evicts after this pass, and let go of it.

        Args:
            queries: `[batch, query_heads, tokens, head_dim]`, rotated, of this pass.
            keys, values: `[batch, kv_heads, rows, head_dim]`, as `update` handed them out.
            scale, softcap: of the model's attention logits.
        """
        plan = self._plan
        now = plan.current
        assert now is not None
        if now.in_prompt or now.votes or plan.remembers:
            self._vote_and_evict(queries, keys, values, scale, softcap)
        plan.end(self.index)

    @for_later_passes
    def _vote_and_evict(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Do what `finish` does, if there is anything to do."""
        plan, votes = self._plan, self._votes
        now = plan.current
        assert now is not None
        if now.in_prompt and plan.observe is not None:
            plan.observe(self.index, queries, keys, values, scale, softcap)
        if now.votes and not now.in_prompt and plan.holes:
            assert self._storage is not None
            votes.align(self._storage.align(), keys.shape[2])
            keys, values = self._storage.keys, self._storage.values
        voters = queries
        if plan.score is not None and (now.votes or plan.remembers):
            voters = votes.join(queries, now.new, now.voters)
        summing = plan.accumulates and (plan.remembers or votes.summing)
        if summing and now.votes:
            votes.prepare_sums(queries, keys)
            self._sum_up(voters, keys, scale, softcap)
        if now.evicts:
            self._evict(voters, keys, values, scale, softcap)
        spent = plan.accumulates and now.votes  # these queries are in the sums
        if plan.remembers and now.completes and plan.question and not spent:
            voters = self._context_voters(queries)
        votes.remember(voters if plan.remembers and not spent else None)
        if not plan.remembers:
            votes.forget_sums()
        if now.in_prompt:
            plan.freed.add(keys.device, keys.nbytes + values.nbytes)
            if now.completes:
                self._tokens_seen -= plan.question

    def _context_voters(self, queries: Tensor) -> Tensor:
        """Return the last queries before the question, which is not to vote any more."""
        plan = self._plan
        assert plan.current is not None
        assert plan.score is not None
        question = plan.question
        own = queries[:, :, : queries.shape[2] - question]
        new = [count - question for count in plan.current.new]
        return self._votes.join(own, new, [plan.score.query_count(n) for n in plan.lengths])

    def _parts(self, rows: int) -> list[slice]:
        """Return the parts of the batch to work on at once: all of it if its rows are alike."""
        plan = self._plan
        assert plan.current is not None
        counts, targets = plan.candidates(self.index), plan.targets(self.index)
        facts = set(zip(counts, targets, plan.seen, plan.since, strict=True))
        if min(counts) == rows and len(facts) == 1:
            return [slice(0, len(counts))]
        return [slice(row, row + 1) for row in range(len(counts))]

    def _sum_up(self, voters: Tensor, keys: Tensor, scale: float, softcap: float | None) -> None:
        now = self._plan.current
        assert now is not None
        counts = self._plan.candidates(self.index)
        for row, (rows, count) in enumerate(zip(counts, now.voters, strict=True)):
            if count == 0:  # a row whose prompt has not begun yet
                continue
            at = slice(row, row + 1)
            own_keys = keys[at, :, keys.shape[2] - rows :]
            self._votes.add(at, last_tokens(voters[at], count), own_keys, scale, softcap)

    def _evict(
        self, voters: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Keep of each batch row what the plan says, in new storage after a piece of the prompt."""
        plan, votes = self._plan, self._votes
        now = plan.current
        assert now is not None
        counts, targets = plan.candidates(self.index), plan.targets(self.index)
        dropped = plan.question if now.completes else 0
        keeps_all = all(t + dropped == c for t, c in zip(targets, counts, strict=True))
        available, rows = keys.shape[2], max(targets)
        storage = self._storage
        if storage is None:
            room = GROWTH_ROWS if now.completes else 0
            storage = RowStorage(keys, values, rows, rows + room)
        chosen: list[Tensor] = []
        positions: list[Tensor] = []
        for at in self._parts(available):
            count, target = counts[at.start], targets[at.start]
            first = available - count
            own_keys, own_values = keys[at, :, first:], values[at, :, first:]
            own_voters = last_tokens(voters[at], now.voters[at.start]) if plan.score else voters
            score = functools.partial(
                votes.scores, at, own_voters, own_keys, own_values, scale, softcap
            )
            indices = self._choose(own_keys, count - dropped, target, score)
            if now.in_prompt and target + dropped == count:  # no copy between the two storages
                kept_keys, kept_values = own_keys[:, :, :target], own_values[:, :, :target]
            else:
                kept_keys, kept_values = (
                    take_tokens(own_keys, indices),
                    take_tokens(own_values, indices),
                )
            if plan.frequencies is not None:
                end = count - dropped
                last = torch.arange(end - target, end, device=keys.device)
                kept_keys = move_keys(kept_keys, last - indices, plan.frequencies)
            storage.put(at, rows, kept_keys, kept_values)
            if votes.summing:
                chosen.append(indices + first)
            if not keeps_all or self._positions is not None:
                mine = self._candidate_positions(at, own_keys, count).gather(-1, indices)
                positions.append(functional.pad(mine, (rows - target, 0)))
        storage.settle(targets)
        if not now.in_prompt:
            storage.shrink(plan.compression.decode_interval)
        self._storage = storage
        self._positions = torch.cat(positions) if positions else None
        votes.keep(chosen, rows)

    def _choose(
        self, keys: Tensor, keepable: int, target: int, score: Callable[[], Tensor]
    ) -> Tensor:
        """Return the rows that stay of some rows of the batch, ascending.

        Args:
            keys: `[rows, kv_heads, count, head_dim]`.
            keepable: how many of the count may stay, from the first on.
            target: how many stay.
            score: gives `[rows, kv_heads, count]`.

        Returns:
            int64 `[rows, kv_heads, target]`
        """
        if target == keepable:
            return torch.arange(target, device=keys.device).expand(*keys.shape[:2], -1)
        return self._plan.compression.method.options.select(score()[..., :keepable], target)

    def _candidate_positions(self, at: slice, keys: Tensor, count: int) -> Tensor:
        """Return where some rows' candidates `keys` stand, int32 `[rows, kv_heads, count]`."""
        plan, row = self._plan, at.start
        old = plan.kept[row][self.index]
        start = plan.positions_before(row)
        size, device = (*keys.shape[:2], -1), keys.device
        later = torch.arange(start, start + count - old, dtype=torch.int32, device=device)
        if self._positions is None:
            earlier = torch.arange(old, dtype=torch.int32, device=device).expand(size)
        else:
            earlier = self._positions[at, :, self._positions.shape[-1] - old :]
        return torch.cat([earlier, later.expand(size)], dim=-1)

    # What the cache asks of a layer

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The stored keys, `[batch, kv_heads, rows, head_dim]`; None before the prompt."""
        return None if self._storage is None else self._storage.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The stored values, `[batch, kv_heads, rows, head_dim]`; None before the prompt."""
        return None if self._storage is None else self._storage.values

    @property
    def storage(self) -> RowStorage | None:
        """Where keys and values lie, if all heads keep equally many; None before the prompt."""
        return self._storage

    def tensors(self) -> dict[str, Tensor]:
        """Return what this layer holds of a prompt, by name, to be given to `restore`."""
        assert self._storage is not None
        held = {"keys": self._storage.keys, "values": self._storage.values, **self._votes.tensors()}
        return held if self._positions is None else {**held, "positions": self._positions}

    def expected_shapes(
        self, kept: float, tokens_seen: int, kv_heads: int, heads: int, head_dim: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what `tensors` gives out after a prompt of one row, by name."""
        kept = int(kept)
        states = (1, kv_heads, kept, head_dim)
        shapes: dict[str, tuple[int, ...]] = {"keys": states, "values": states}
        if kept < tokens_seen:
            shapes["positions"] = states[:3]
        plan = self._plan
        if plan.score is not None and plan.compression.decode_budget is not None:
            voters = plan.score.query_count(tokens_seen)
            if plan.accumulates:
                shapes["sums"] = (1, kv_heads, heads // kv_heads, kept)
            elif voters:
                shapes["queries"] = (1, heads, voters, head_dim)
        return shapes

    def restore(self, held: dict[str, Tensor], tokens_seen: int) -> None:
        """Hold these tensors, themselves, as after a prompt of one row and this many tokens.

        Args:
            held: of the shapes that `expected_shapes` says.

        Raises:
            ValueError: positions are none.
        """
        positions = held.get("positions")
        if positions is not None and not (
            bool((positions.diff(dim=-1) > 0).all())
            and int(positions.min()) >= 0
            and int(positions.max()) < tokens_seen
        ):
            raise ValueError(f"layer {self.index} has positions that do not ascend in the prompt")
        self._storage = RowStorage.holding(held["keys"], held["values"])
        self._positions, self._tokens_seen, self.is_initialized = positions, tokens_seen, True
        self._votes.restore(held)

    def adopt(self, storage: RowStorage, positions: Tensor) -> None:
        """Hold these rows of the prompt in place of those it has.

        Args:
            storage: of all rows of the batch.
            positions: where they stood, int32 `[batch, kv_heads, rows]`, aligned to the right.
        """
        self._storage, self._positions = storage, positions

    @property
    def stored_bytes(self) -> int:
        """Bytes of the keys and values held, room to grow not included."""
        return (
            0 if self._storage is None else self._storage.keys.nbytes + self._storage.values.nbytes
        )

    def states_like(self) -> tuple[Tensor, Tensor]:
        """Return keys and values `[batch, kv_heads, any, head_dim]` of the shape and type held.

        Raises:
            CacheStateError: there are none yet.
        """
        if self._storage is None:
            raise CacheStateError("the cache is empty: no prompt has been processed")
        return self._storage.keys, self._storage.values

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, of all KV heads of one row of the batch."""
        return sum(
            states.shape[1] * states.shape[3] * states.element_size()
            for states in self.states_like()
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the tensors held: room to grow, positions and remembered queries included."""
        held = self._votes.nbytes
        if self._held is not None:
            held += self._held.nbytes
        return held if self._positions is None else held + self._positions.nbytes

    def kept_lengths(self) -> Sequence[float]:
        """Return the tokens stored for each batch row."""
        return [] if self._storage is None else self._storage.counts()

    def kept_positions(self, row: int = 0) -> Tensor:
        """Return where the kept tokens stood, int64 `[kv_heads, kept]`, padding not counted.

        Tokens after the prompt are included.
        """
        if self._storage is None:
            raise CacheStateError("the cache is empty: no prompt has been processed")
        plan = self._plan
        kept = plan.kept[row][self.index]
        kv_heads, device = self._storage.keys.shape[1], self._storage.keys.device
        if self._positions is None:
            first = torch.arange(kept, device=device).expand(kv_heads, kept)
        else:
            first = self._positions[row, :, self._positions.shape[-1] - kept :].long()
        later = torch.arange(plan.positions_before(row), plan.seen[row], device=device)
        return torch.cat([first, later.expand(kv_heads, -1)], dim=-1)


def last_tokens(states: Tensor, count: int) -> Tensor:
    """Return the last `count` tokens of `[batch, heads, tokens, head_dim]`."""
    return states[:, :, states.shape[2] - count :]


def take_tokens(states: Tensor, indices: Tensor) -> Tensor:
    """Gather `[batch, kv_heads, tokens, head_dim]` at indices `[batch, kv_heads, kept]`."""
    return states.gather(2, indices[..., None].expand(-1, -1, -1, states.shape[3]))
