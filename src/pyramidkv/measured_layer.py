"""A layer whose share of the budget follows from its own attention and that of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .compression import GROWTH_ROWS
from .contest import SLACK
from .entropy import effective_context
from .head_selection import in_order
from .layer import CompressedLayer, last_tokens, take_tokens
from .plan import CachePlan
from .storage import RowStorage


class MeasuredLayer(CompressedLayer):
    """One full-attention layer of a cache whose schedule is measured on the prompt.

    After its attention a layer is measured; the layers before it let go of what is no longer
    theirs, and it keeps what is its share among the layers so far. Tokens leave in the order of
    their rank, so that those which stay are the same as if the share had been known from the start.
    """

    def __init__(self, index: int, plan: CachePlan, earlier: list[MeasuredLayer]):
        super().__init__(index, plan)
        self._earlier = earlier

    def _clear(self) -> None:
        super()._clear()
        self._ranks: Tensor | None = None  # int32 [batch, kv_heads, rows], 0 is the last to leave
        self._chosen: list[Tensor] = []  # ranks of the pass under way, per part of the batch

    def __deepcopy__(self, memo: dict[int, Any]) -> MeasuredLayer:
        """Return an independent copy; its plan is the copy that `memo` has of this one's."""
        result = super().__deepcopy__(memo)
        assert isinstance(result, MeasuredLayer)
        result._earlier = copy.deepcopy(self._earlier, memo)
        return result

    def _evict(
        self, voters: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        plan = self._plan
        window = plan.compression.method.options.window_size
        measured = []
        for row, count in enumerate(plan.candidates(self.index)):
            own = last_tokens(voters[row : row + 1], min(window, count))[0]
            own_keys = last_tokens(keys[row : row + 1], count)[0]
            measured.append(effective_context(own, own_keys, scale, softcap))
        plan.measure(self.index, measured)
        at_end = self.index == plan.layer_count - 1
        for layer in self._earlier:  # first, so that there is room for this one
            layer.shrink(at_end)
        super()._evict(voters, keys, values, scale, softcap)
        rows = max(plan.targets(self.index))
        padded = [functional.pad(part, (rows - part.shape[-1], 0)) for part in self._chosen]
        self._ranks = None if at_end else torch.cat(padded)
        self._chosen = []

    def _choose(
        self, keys: Tensor, keepable: int, target: int, score: Callable[[], Tensor]
    ) -> Tensor:
        best = self._plan.compression.method.options.order(score()[..., :keepable])
        indices = best[..., :target].sort(dim=-1).values
        self._chosen.append(in_order(best).gather(-1, indices).int())
        return indices

    def shrink(self, for_good: bool) -> None:
        """Let go of what is beyond the layer's present share."""
        targets, storage, ranks = self._plan.targets(self.index), self._storage, self._ranks
        assert storage is not None
        assert ranks is not None
        rows = max(targets)
        counts = storage.counts()
        if not for_good and storage.rows <= SLACK * rows:
            return
        smaller = RowStorage(
            storage.keys, storage.values, rows, rows + (GROWTH_ROWS if for_good else 0)
        )
        kept_ranks, positions = [], []
        for row, (count, target) in enumerate(zip(counts, targets, strict=True)):
            at = slice(row, row + 1)
            own_ranks = ranks[at, :, ranks.shape[-1] - count :]
            staying = (own_ranks < target).nonzero()[:, -1].view(*own_ranks.shape[:2], target)
            own = (last_tokens(states[at], count) for states in (storage.keys, storage.values))
            smaller.put(at, rows, *(take_tokens(states, staying) for states in own))
            room = (rows - target, 0)
            kept_ranks.append(functional.pad(own_ranks.gather(-1, staying), room))
            where = staying.int()
            if self._positions is not None:
                own_positions = self._positions[at, :, self._positions.shape[-1] - count :]
                where = own_positions.gather(-1, staying)
            positions.append(functional.pad(where, room))
        smaller.settle(targets)
        self._plan.freed.add(storage.keys.device, storage.nbytes)
        self._storage = smaller
        if targets != counts:
            self._positions = torch.cat(positions)
        self._ranks = None if for_good else torch.cat(kept_ranks)
