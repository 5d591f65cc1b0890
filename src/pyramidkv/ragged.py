"""Where a layer's states lie whose KV heads keep different numbers of tokens: without gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from .compression import GROWTH_ROWS
from .head_selection import HeadSelection
from .ragged_tiles import RaggedTiles
from .selection import marked_places
from .storage import RowStorage, for_later_passes


class RaggedStorage:
    """The kept tokens of a prompt, flat, and behind them a tail of rows for those that follow.

    The flat part is batch row after batch row, in it head after head, in it token after token. It
    is never written to again: what changes it makes another one, and copies share it. Tokens that
    follow the prompt are the same for all heads, so the tail has rows with room to grow, and
    growing never moves the prompt's part.

    Attributes:
        keys, values: `[kept, head_dim]`, of all rows and heads.
        positions: int32 `[kept]`, where each token stood.
        offsets: int32 `[batch * kv_heads + 1]`, where each head of each row begins, and the end.
        totals: tokens of each batch row, all heads together; their sum is `kept`.
        tail: the tokens that follow.
    """

    _bounds: list[int] | None
    _tiles: RaggedTiles | None

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        counts: Tensor,
        totals: Sequence[int],
        tail: RowStorage,
    ):
        """Hold these tensors, themselves.

        Args:
            keys, values, positions, totals, tail: see the attributes.
            counts: int `[batch, kv_heads]`, the tokens of each head; their sums are `totals`.
        """
        self._hold((keys, values, positions), counts, totals)
        self.tail = tail

    @classmethod
    @for_later_passes
    def gather(
        cls,
        keys: Tensor,
        values: Tensor,
        selections: Sequence[HeadSelection],
        lengths: Sequence[int],
        positions: Tensor | None = None,
        room: int = GROWTH_ROWS,
    ) -> RaggedStorage:
        """Copy what stays out of dense states; the device is not waited for.

        Args:
            keys, values: `[batch, kv_heads, N, head_dim]`.
            selections: what stays, of one or several rows each, in the order of the rows; they
                count from the first of a row's `lengths` columns.
            lengths: how many columns of each row are real: its last ones.
            positions: int32 `[batch, kv_heads, N]`, where the tokens stood; None if each row's
                first real column stood at 0.
            room: rows of the tail.
        """
        parts = [
            part
            for selection in selections
            for part in zip(selection.heads, selection.indices, strict=True)
        ]
        totals = [len(indices) for _, indices in parts]
        kept = sum(totals)
        flat = [states.new_empty((kept, states.shape[3])) for states in (keys, values)]
        where = torch.empty(kept, dtype=torch.int32, device=keys.device)
        start = 0
        for row, ((heads, indices), length) in enumerate(zip(parts, lengths, strict=True)):
            end = start + len(indices)
            columns = indices + (keys.shape[2] - length)
            for target, states in zip(flat, (keys, values), strict=True):
                target[start:end] = states[row, heads, columns]
            where[start:end] = indices if positions is None else positions[row, heads, columns]
            start = end
        counts = torch.cat([selection.counts for selection in selections])
        return cls(flat[0], flat[1], where, counts, totals, RowStorage(keys, values, 0, room))

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return len(self.totals)

    @property
    def kv_heads(self) -> int:
        """KV heads of each row."""
        return (len(self.offsets) - 1) // self.batch

    @property
    def nbytes(self) -> int:
        """Bytes held, positions, offsets and the tail's room to grow included."""
        held = (self.keys, self.values, self.positions, self.offsets)
        return sum(tensor.nbytes for tensor in held) + self.tail.nbytes

    def prompt_counts(self) -> Tensor:
        """Return the tokens of the flat part, int64 `[batch, kv_heads]`."""
        return self.offsets.diff().long().view(self.batch, -1)

    def counts(self) -> Tensor:
        """Return the tokens held, the tail's real ones included, int64 `[batch, kv_heads]`."""
        visible = self.tail.visible()
        if visible is None:
            return self.prompt_counts() + self.tail.rows
        return self.prompt_counts() + visible.sum(-1, keepdim=True)

    def bounds(self) -> list[int]:
        """Return `offsets` on the host, which waits for the device the first time."""
        if self._bounds is None:
            self._bounds = self.offsets.tolist()
        return self._bounds

    def tiles(self) -> RaggedTiles:
        """Return the flat part as tiles; the device is waited for the first time."""
        if self._tiles is None:
            self._tiles = RaggedTiles.over(self.bounds(), self.keys.device)
        return self._tiles

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add new rows `[batch, kv_heads, any, head_dim]` behind the tail."""
        self.tail.append(keys, values)

    def mark_padding(self, count: int, real: Sequence[int]) -> None:
        """Say how many of each batch row's last `count` rows are real: those at their end."""
        self.tail.mark_padding(count, real)

    def remove(self, count: int) -> None:
        """Forget the last `count` rows.

        Raises:
            ValueError: the tail has not as many; the prompt's tokens cannot be removed.
        """
        if count > self.tail.rows:
            raise ValueError(
                f"cannot remove the last {count} rows: only the {self.tail.rows} that follow the "
                "prompt can be removed"
            )
        self.tail.remove(count)

    @for_later_passes
    def keep(self, marks: Tensor, totals: Sequence[int]) -> Tensor:
        """Let go of tokens of the flat part, without waiting for the device.

        Args:
            marks: bool `[kept]`, True for those that stay.
            totals: how many of them each batch row has; the caller answers for it.

        Returns:
            int64, where in the old flat part those lay that stay.
        """
        places = marked_places(marks, sum(totals))
        ends = functional.pad(marks.cumsum(0), (1, 0))
        counts = ends[self.offsets].diff().view(self.batch, -1)
        self._hold([flat.index_select(0, places) for flat in self._flats], counts, totals)
        return places

    def take_rows(self, take: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows of the batch by what `take` makes of them, as in a beam search.

        The device is waited for only if rows differ in their totals.
        """
        counts = take(self.prompt_counts())
        if len(set(self.totals)) == 1:
            total = self.totals[0]
            by_row = [flat.unflatten(0, (self.batch, total)) for flat in self._flats]
            self._hold([take(rows).flatten(0, 1) for rows in by_row], counts, [total] * len(counts))
        else:
            order = take(torch.arange(self.batch, device=counts.device)).tolist()
            parts = [flat.split(self.totals) for flat in self._flats]
            taken = [torch.cat([rows[row] for row in order]) for rows in parts]
            self._hold(taken, counts, [self.totals[row] for row in order])
        self.tail.take_rows(take)

    @property
    def _flats(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.positions

    def _hold(self, flats: Sequence[Tensor], counts: Tensor, totals: Sequence[int]) -> None:
        self.keys, self.values, self.positions = flats
        self.offsets = functional.pad(counts.flatten().cumsum(0), (1, 0)).int()
        self.totals = tuple(totals)
        self._bounds = self._tiles = None

    def copy(self) -> RaggedStorage:
        """Return an independent copy, with room to grow; it shares the prompt's part."""
        counts, tail = self.prompt_counts(), self.tail.copy()
        result = RaggedStorage(*self._flats, counts, self.totals, tail)
        result._bounds, result._tiles = self._bounds, self._tiles
        return result

    def padded(self, flat: Tensor) -> Tensor:
        """Return `[kept, ...]` as `[batch, kv_heads, longest, ...]`, zeros before shorter heads."""
        bounds = self.bounds()
        longest = max(end - start for start, end in pairwise(bounds))
        places = torch.arange(longest, device=flat.device) - longest + self.offsets[1:, None]
        result = flat.new_zeros((len(places), longest, *flat.shape[1:]))
        real = places >= self.offsets[:-1, None]
        result[real] = flat
        return result.view(self.batch, self.kv_heads, *result.shape[1:])

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values `[batch, kv_heads, rows, head_dim]` and which rows are real.

        Every head ends with the tail; what shorter heads have in front is zero and not real. For
        references, and for choosing among all that is held; it waits for the device.

        Returns:
            keys, values, and bool `[batch, kv_heads, rows]`.
        """
        real = self.padded(torch.ones_like(self.positions, dtype=torch.bool))
        visible = self.tail.visible()
        if visible is None:
            visible = real.new_ones((self.batch, self.tail.rows))
        return (
            torch.cat([self.padded(self.keys), self.tail.keys], dim=2),
            torch.cat([self.padded(self.values), self.tail.values], dim=2),
            torch.cat([real, visible[:, None].expand(-1, self.kv_heads, -1)], dim=2),
        )
