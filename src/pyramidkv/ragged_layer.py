"""A layer whose KV heads keep different numbers of tokens of the prompt, stored without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .contest import mean_tokens
from .decode_attention import attend_ragged
from .errors import CacheStateError
from .head_selection import HeadSelection
from .layer import CompressedLayer, last_tokens
from .plan import CachePlan
from .ragged import RaggedStorage
from .storage import RowStorage, for_later_passes


class RaggedLayer(CompressedLayer):
    """One full-attention layer of a cache whose KV heads keep different numbers of tokens.

    They compete for the layer's share of the budget, which is a number of tokens per head on
    average, as everywhere; or with the heads of all other layers; or each has its own budget. Later
    passes are attended to here, not by the model's implementation, which knows no heads of
    different lengths.
    """

    def __init__(self, index: int, plan: CachePlan):
        self._ragged: RaggedStorage | None = None
        super().__init__(index, plan)

    @classmethod
    def holding(cls, index: int, plan: CachePlan, storage: RaggedStorage) -> RaggedLayer:
        """Return a layer that holds this of a prompt whose rows the plan has seen."""
        layer = cls(index, plan)
        layer._ragged, layer._tokens_seen, layer.is_initialized = storage, plan.columns_seen, True
        return layer

    def _clear(self) -> None:
        super()._clear()
        self._ragged = None

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new states and return them: all that is held is attended to by `attend`."""
        assert self._ragged is not None
        self._ragged.append(keys, values)
        return keys, values

    @property
    def _held(self) -> RowStorage | RaggedStorage | None:
        return self._ragged

    def attends(self, base: str, queries: Tensor) -> bool:
        return self._ragged is not None

    def attend(self, queries: Tensor, scale: float, softcap: float | None) -> Tensor:
        assert self._ragged is not None
        return attend_ragged(queries, self._ragged, scale, softcap)

    def _evict(
        self, voters: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Keep of each batch row what the plan says, of each head what its tokens win."""
        plan, votes = self._plan, self._votes
        now = plan.current
        assert now is not None
        assert plan.score is not None
        options = plan.compression.method.options
        counts, targets = plan.candidates(self.index), plan.targets(self.index)
        dropped = plan.question if now.completes else 0
        selections: list[HeadSelection] = []
        waiting: list[Tensor] = []  # scores of each row, if all layers are to be compared
        for at in self._parts(keys.shape[2]):
            count, target = counts[at.start], targets[at.start]
            own_voters = last_tokens(voters[at], now.voters[at.start])
            own = last_tokens(keys[at], count), last_tokens(values[at], count)
            scores = votes.scores(at, own_voters, *own, scale, softcap)
            keepable = scores[..., : count - dropped]
            if options.allocation == "global":
                waiting += keepable.split(1)
            else:
                selections.append(options.select_heads(keepable, self.index, target))
        if waiting:
            self._ragged = plan.compete(keys, values, waiting, counts)
            return
        self._ragged = RaggedStorage.gather(keys, values, selections, counts)
        if options.head_budgets is not None:
            plan.note(self._ragged)

    def _removable(self) -> int:
        return 0 if self._ragged is None else self._ragged.tail.rows

    @for_later_passes
    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedLayer:
        """Return an independent copy; its plan is the copy that `memo` has of this one's."""
        result = super().__deepcopy__(memo)
        assert isinstance(result, RaggedLayer)
        result._ragged = None if self._ragged is None else self._ragged.copy()
        return result

    # What the cache asks of a layer

    @property
    def ragged(self) -> RaggedStorage | None:
        """What is held, as it lies; None before the prompt."""
        return self._ragged

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the stored keys, `[batch, kv_heads, rows, head_dim]`; None before the prompt.

        Rows that shorter heads do not have are zero, in front.
        """
        return None if self._ragged is None else self._ragged.dense()[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the stored values, as for `keys`."""
        return None if self._ragged is None else self._ragged.dense()[1]

    @property
    def stored_bytes(self) -> int:
        if self._ragged is None:
            return 0
        held = self._ragged
        states = held.keys, held.values, held.tail.keys, held.tail.values
        return sum(tensor.nbytes for tensor in states)

    def states_like(self) -> tuple[Tensor, Tensor]:
        if self._ragged is None:
            raise CacheStateError("the cache is empty: no prompt has been processed")
        return self._ragged.tail.keys, self._ragged.tail.values

    def kept_lengths(self) -> Sequence[float]:
        """Return the tokens stored for each batch row, per head on average."""
        if self._ragged is None:
            return []
        later = self._ragged.tail.counts()
        totals = self._ragged.totals
        heads = self._ragged.kv_heads
        return [mean_tokens(n, heads) + m for n, m in zip(totals, later, strict=True)]

    def head_lengths(self) -> list[list[int]]:
        """Return the tokens stored by batch row and KV head, padding not counted."""
        return [] if self._ragged is None else self._ragged.counts().tolist()

    def kept_positions(self, row: int = 0) -> Tensor:
        """Return where the kept tokens stood, int64 `[kv_heads, rows]`, padding not counted.

        Tokens after the prompt are included. Shorter heads have -1 in front.
        """
        if self._ragged is None:
            raise CacheStateError("the cache is empty: no prompt has been processed")
        plan, held = self._plan, self._ragged
        first = held.padded(held.positions.long() + 1)[row] - 1
        later = torch.arange(plan.positions_before(row), plan.seen[row], device=first.device)
        return torch.cat([first, later.expand(len(first), -1)], dim=-1)

    def tensors(self) -> dict[str, Tensor]:
        assert self._ragged is not None
        held = self._ragged
        counts = held.prompt_counts().int()
        return {
            "keys": held.keys,
            "values": held.values,
            "positions": held.positions,
            "counts": counts,
        }

    def expected_shapes(
        self, kept: float, tokens_seen: int, kv_heads: int, heads: int, head_dim: int
    ) -> dict[str, tuple[int, ...]]:
        states = (round(kept * kv_heads), head_dim)
        return {
            "keys": states,
            "values": states,
            "positions": states[:1],
            "counts": (1, kv_heads),
        }

    def restore(self, held: dict[str, Tensor], tokens_seen: int) -> None:
        keys, values, positions = held["keys"], held["values"], held["positions"]
        counts = held["counts"].long()
        whole = bool((counts >= 0).all()) and int(counts.sum()) == len(positions)
        ascending = whole and all(
            bool((own.diff() > 0).all()) for own in positions.split(counts[0].tolist())
        )
        within = bool((positions >= 0).all()) and bool((positions < tokens_seen).all())
        if not (whole and ascending and within):
            raise ValueError(f"layer {self.index} has positions that do not ascend in the prompt")
        shape = (1, counts.shape[1], 0, keys.shape[1])
        tail = RowStorage(keys.new_empty(shape), values.new_empty(shape), 0, 0)
        self._ragged = RaggedStorage(keys, values, positions, counts, [len(positions)], tail)
        self._tokens_seen, self.is_initialized = tokens_seen, True
