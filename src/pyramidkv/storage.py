"""Where a layer's kept keys and values lie: rows with room to grow, of one tensor each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from .compression import GROWTH_ROWS

_Method = TypeVar("_Method", bound=Callable[..., Any])


def for_later_passes(method: _Method) -> _Method:
    """Make the tensors that a method stores usable in later passes, of whatever grad mode.

    Tensors made under `torch.inference_mode` could not be written to outside of it.
    """

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


class RowStorage:
    """Keys and values `[batch, kv_heads, capacity, head_dim]`, of which `rows` are in use.

    Batch rows that hold fewer tokens than others have unused slots in front of their own; what is
    unused is zero, since a NaN left in memory times a masked weight of 0 would still be NaN.

    Attributes:
        rows: rows in use, the same for the whole batch.
        occupied: bool `[batch, capacity]`, or None when no slot in use is unused.
    """

    def __init__(self, keys: Tensor, values: Tensor, rows: int, capacity: int):
        """Allocate room for keys and values like these, `[batch, kv_heads, any, head_dim]`."""
        self._tensors = _empty_rows(keys, capacity), _empty_rows(values, capacity)
        self.rows = rows
        self.occupied: Tensor | None = None

    @classmethod
    def holding(cls, keys: Tensor, values: Tensor) -> RowStorage:
        """Return a storage that holds exactly these tensors, themselves."""
        storage = cls.__new__(cls)
        storage._tensors = keys, values
        storage.rows, storage.occupied = keys.shape[2], None
        return storage

    @property
    def keys(self) -> Tensor:
        """The keys in use, `[batch, kv_heads, rows, head_dim]`."""
        return self._tensors[0][:, :, : self.rows]

    @property
    def values(self) -> Tensor:
        """The values in use, `[batch, kv_heads, rows, head_dim]`."""
        return self._tensors[1][:, :, : self.rows]

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self._tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held, room to grow included."""
        marks = 0 if self.occupied is None else self.occupied.nbytes
        return marks + sum(tensor.nbytes for tensor in self._tensors)

    def put(self, at: slice, rows: int, keys: Tensor, values: Tensor) -> None:
        """Write what some rows of the batch keep so that it ends at row `rows`."""
        columns = slice(rows - keys.shape[2], rows)
        self._tensors[0][at, :, columns] = keys
        self._tensors[1][at, :, columns] = values

    def settle(self, counts: Sequence[int]) -> None:
        """Say how many rows each row of the batch uses, all of them at the end of those in use."""
        self.rows = max(counts)
        self.occupied = None
        if min(counts) < self.rows:
            keys = self._tensors[0]
            self.occupied = right_aligned(counts, self.rows, keys.shape[2], keys.device)
            for tensor in self._tensors:
                tensor.masked_fill_(~self.occupied[:, None, :, None], 0)

    def shrink(self, room: int) -> None:
        """Let go of room that will not be needed, if only `room` rows come before the next time."""
        capacity = self.rows + room + GROWTH_ROWS
        if self._tensors[0].shape[2] > capacity + GROWTH_ROWS:
            self._resize(capacity)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add new rows behind those in use."""
        count = keys.shape[2]
        end = self.rows + count
        if end > self._tensors[0].shape[2]:
            self._resize(end + GROWTH_ROWS)
        for tensor, new in zip(self._tensors, (keys, values), strict=True):
            tensor[:, :, self.rows : end] = new.detach()
        self.rows = end
        if self.occupied is not None:
            self.occupied[:, end - count : end] = True

    def mark_padding(self, count: int, real: Sequence[int]) -> None:
        """Say how many of each batch row's last `count` rows are real: those at their end."""
        keys = self._tensors[0]
        if self.occupied is None:
            size = (self.batch, keys.shape[2])
            self.occupied = torch.ones(size, dtype=torch.bool, device=keys.device)
        marks = right_aligned(real, count, count, keys.device)
        self.occupied[:, self.rows - count : self.rows] = marks

    def visible(self) -> Tensor | None:
        """Return which rows in use are real, bool `[batch, rows]`; None if all are."""
        return None if self.occupied is None else self.occupied[:, : self.rows]

    def align(self) -> Tensor | None:
        """Move each batch row's real rows to the end of those in use, in their order.

        Returns:
            int64 `[batch, rows now in use]`, where each came from; None if nothing had to move.
        """
        visible = self.visible()
        if visible is None:
            return None
        counts = self.counts()
        order = visible.int().argsort(dim=-1, stable=True)[:, self.rows - max(counts) :]
        for tensor in self._tensors:
            used = tensor[:, :, : self.rows]
            index = order[:, None, :, None].expand(-1, used.shape[1], -1, used.shape[3])
            tensor[:, :, : order.shape[1]] = used.gather(2, index)
        self.settle(counts)
        return order

    def remove(self, count: int) -> None:
        """Forget the last `count` rows."""
        self.rows -= count

    def counts(self) -> list[int]:
        """Return the real rows of each row of the batch."""
        visible = self.visible()
        if visible is None:
            return [self.rows] * self.batch
        return [int(count) for count in visible.sum(-1)]

    def take_rows(self, take: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows of the batch by what `take` makes of them."""
        self._tensors = take(self._tensors[0]), take(self._tensors[1])
        if self.occupied is not None:
            self.occupied = take(self.occupied)

    def copy(self) -> RowStorage:
        """Return an independent copy of what is in use, with room to grow."""
        result = RowStorage(*self._tensors, self.rows, self.rows + GROWTH_ROWS)
        for new, old in zip(result._tensors, self._tensors, strict=True):
            new[:, :, : self.rows] = old[:, :, : self.rows]
        if self.occupied is not None:
            result.occupied = functional.pad(
                self.occupied[:, : self.rows], (0, GROWTH_ROWS), value=True
            )
        return result

    @for_later_passes
    def _resize(self, capacity: int) -> None:
        resized = []
        for old in self._tensors:
            new = _empty_rows(old, capacity)
            new[:, :, : self.rows] = old[:, :, : self.rows]
            resized.append(new)
        self._tensors = resized[0], resized[1]
        if self.occupied is not None:
            room = capacity - self.rows
            self.occupied = functional.pad(self.occupied[:, : self.rows], (0, room), value=True)


def right_aligned(counts: Sequence[int], end: int, size: int, device: torch.device) -> Tensor:
    """Return bool `[batch, size]`, False in the slots before each row's last `counts` of `end`."""
    unused = end - torch.tensor(counts, device=device)
    return torch.arange(size, device=device) >= unused[:, None]


def _empty_rows(like: Tensor, capacity: int) -> Tensor:
    shape = (like.shape[0], like.shape[1], capacity, like.shape[3])
    return torch.empty(shape, dtype=like.dtype, device=like.device)
