"""One contest for the tokens of a prompt among all heads of all layers, while layers come in turn.

Which of a layer's tokens stay is known only once all layers have come. Until then the layers so far
hold what leads among them, never more than the total they are to keep in the end (and a little,
since each shrinking is a copy); tokens leave in the order of their rank, so that those which stay
are the same as if all layers had been compared at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .budgets import whole
from .head_selection import GlobalSelection, in_order, select_first
from .method_options import Options
from .ragged import RaggedStorage

SLACK = 1.125
"""How much more than its share a layer may hold for a while: each shrinking is a copy."""


@dataclass
class _Entry:
    """A layer that has come.

    Attributes:
        storage: what it holds of each batch row.
        ranks: int32 `[kept]`, the place of each token in its head's order; 0 is the last to leave.
    """

    storage: RaggedStorage
    ranks: Tensor


class Contest:
    """What the layers of some prompts hold, one prompt per batch row, each with its own total."""

    def __init__(
        self,
        options: Sequence[Options],
        layers: int,
        kv_heads: int,
        tokens: Sequence[int],
        budgets: Sequence[int],
    ):
        """Begin without a layer.

        Args:
            options: of each row.
            layers, kv_heads: that take part.
            tokens: of each row's prompt, those that may stay.
            budgets: of each row, tokens per layer and head on average.
        """
        self._options = options
        self._layers = layers
        self._selections = [
            GlobalSelection(
                layers,
                kv_heads,
                count,
                layers * kv_heads * min(budget, count),
                own.sink_tokens,
                own.window_size,
                own.make_pooling(),
                own.head_floor or 0.0,
            )
            for own, count, budget in zip(options, tokens, budgets, strict=True)
        ]
        self._entries: list[_Entry] = []

    def take(
        self, keys: Tensor, values: Tensor, scores: Sequence[Tensor], lengths: Sequence[int]
    ) -> RaggedStorage:
        """Return what the next layer holds for now; it shrinks by itself as others come.

        The device is waited for once.

        Args:
            keys, values, lengths: see `RaggedStorage.gather`.
            scores: float32 `[1, kv_heads, tokens]` of each row.
        """
        for selection, own in zip(self._selections, scores, strict=True):
            selection.add(own.to(self._home(own.device)))  # layers may be on several devices
        counts = torch.stack([selection.counts() for selection in self._selections], dim=1)
        totals = counts.sum(-1).tolist()  # [layers so far, rows]
        at_end = len(totals) == self._layers
        for entry, own, wanted in zip(self._entries, counts[:-1], totals[:-1], strict=True):
            if at_end or sum(entry.storage.totals) > SLACK * sum(wanted):
                _shrink(entry, own.to(entry.ranks.device), wanted)
        chosen, ranks, of_layer = [], [], counts[-1].to(keys.device)
        for options, own, count, total in zip(
            self._options, scores, of_layer, totals[-1], strict=True
        ):
            places = in_order(options.order(own))
            staying = select_first(places, count[None], total)
            chosen.append(staying)
            ranks.append(places[0, staying.heads[0], staying.indices[0]].int())
        storage = RaggedStorage.gather(keys, values, chosen, lengths)
        self._entries.append(_Entry(storage, torch.cat(ranks)))
        return storage

    def _home(self, device: torch.device) -> torch.device:
        """Return where layers are compared: on the first one's device."""
        return self._entries[0].ranks.device if self._entries else device

    @property
    def complete(self) -> bool:
        """Whether all layers have come."""
        return len(self._entries) == self._layers

    def means(self) -> list[list[float]]:
        """Return the tokens per head that each row's layers hold, whole numbers where they are."""
        by_layer = [entry.storage for entry in self._entries]
        return [
            [mean_tokens(storage.totals[row], storage.kv_heads) for storage in by_layer]
            for row in range(len(self._options))
        ]


def _shrink(entry: _Entry, counts: Tensor, totals: list[int]) -> None:
    """Let a layer keep the first `counts` `[rows, kv_heads]` of each head's order."""
    ends, held = entry.storage.offsets[1:].contiguous(), len(entry.ranks)
    every = torch.arange(held, dtype=ends.dtype, device=ends.device)
    heads = torch.searchsorted(ends, every, right=True)
    marks = entry.ranks < counts.flatten()[heads]
    entry.ranks = entry.ranks.index_select(0, entry.storage.keep(marks, totals))


def mean_tokens(total: int, heads: int) -> float:
    """Return tokens per head, as a whole number where it is one."""
    return whole(total / heads)
