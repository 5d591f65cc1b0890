"""A ragged cache's flat part as tiles of equally many rows, for attention in a few calls.

Heads of unequal lengths take a call each, unless they are cut into pieces of one length. Whole
tiles are read where they lie. What is left before and behind them in each segment is copied into
windows as long as a tile: at most two for each segment, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .storage import for_later_passes

LEAST_TILE, LARGEST_TILE = 64, 256
TILES_OF_SEGMENT = 8
"""Tiles of a segment to aim for, so that little of it is copied."""


@dataclass(frozen=True)
class RaggedTiles:
    """Where the tiles and the windows lie, and whose they are.

    A segment is what one KV head of one batch row holds.

    Attributes:
        rows: of each tile and of each window.
        sizes: how many segments, tiles and windows there are. The tiles lie one after the other
            from the first row on.
        owners: int64 `[sum of sizes]`, the segment of each segment, tile and window, in this order.
        starts: int64 `[windows]`, the first row of each.
        shared: float32 `[tiles, 1, 1]`, minus infinity where a tile lies in several segments, so
            that it counts for nothing (the windows have its rows), else zero.
        hidden: float32 `[windows, 1, 1, rows]`, minus infinity for rows that a window does not
            stand for, else zero.
    """

    rows: int
    sizes: tuple[int, int, int]
    owners: Tensor
    starts: Tensor
    shared: Tensor
    hidden: Tensor

    @classmethod
    @for_later_passes
    def over(cls, bounds: Sequence[int], device: torch.device) -> RaggedTiles:
        """Cut segments into tiles.

        Args:
            bounds: where each segment begins, ascending, and the end; there is at least one row.
            device: of the tensors.
        """
        kept, segments = bounds[-1], len(bounds) - 1
        wanted = kept // (TILES_OF_SEGMENT * segments)
        power = (1 << wanted.bit_length()) // 2  # the largest of two that is not above it
        rows = min(LARGEST_TILE, max(LEAST_TILE, power), kept)
        count = kept // rows
        owners, whole = [0] * count, torch.zeros(count, dtype=torch.bool)
        windows: list[tuple[int, int, int]] = []
        for segment, (start, stop) in enumerate(pairwise(bounds)):
            first, last = -(-start // rows), stop // rows
            if first < last:
                owners[first:last] = [segment] * (last - first)
                whole[first:last] = True
            windows += [(segment, *rest) for rest in _rest(start, stop, first, last, rows)]
        owners = [*range(segments), *owners, *(segment for segment, _, _ in windows)]
        begin, end = torch.tensor([window[1:] for window in windows]).view(-1, 2).long().mT
        starts = begin.clamp_max(kept - rows)
        places = starts[:, None] + torch.arange(rows)
        shown = (places >= begin[:, None]) & (places < end[:, None])
        return cls(
            rows,
            (segments, count, len(windows)),
            torch.tensor(owners).to(device),
            starts.to(device),
            _minus_infinity_unless(whole)[:, None, None].to(device),
            _minus_infinity_unless(shown)[:, None, None].to(device),
        )

    def tiles_of(self, flat: Tensor) -> Tensor:
        """Return `[kept, head_dim]` as its tiles, `[tiles, 1, rows, head_dim]`, without copying."""
        count = self.sizes[1]
        return flat[: count * self.rows].view(count, 1, self.rows, -1)

    def windows_of(self, flat: Tensor) -> Tensor:
        """Return a copy of the windows on `[kept, head_dim]`: `[windows, 1, rows, head_dim]`."""
        kept, width = flat.shape
        places = flat.as_strided((kept - self.rows + 1, 1, self.rows, width), (width, 0, width, 1))
        return places.index_select(0, self.starts)


def _minus_infinity_unless(shown: Tensor) -> Tensor:
    return torch.zeros(shown.shape).masked_fill_(~shown, float("-inf"))


def _rest(start: int, end: int, first: int, last: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield what of a segment lies outside its whole tiles, at most `rows` rows at once."""
    if first < last:
        parts = (start, first * rows), (last * rows, end)
    else:  # it crosses one tile's end at most, so it is shorter than two tiles
        parts = (start, min(end, start + rows)), (start + rows, end)
    yield from ((a, b) for a, b in parts if a < b)
