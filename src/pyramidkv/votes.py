"""What scoring remembers of earlier passes: the last queries, or what they have added up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .scores import AccumulatingScore, Score


class Votes:
    """Scores one layer's rows from the queries of the pass under way and of earlier ones.

    Everything is aligned to the right: row i of the batch uses the last slots only.
    """

    def __init__(self, score: Score | None):
        self._score = score
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._queries: Tensor | None = None  # [batch, query_heads, W, head_dim]
        self._sums: Tensor | None = None  # [batch, kv_heads, query heads per KV head, rows]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(held.nbytes for held in (self._queries, self._sums) if held is not None)

    @property
    def summing(self) -> bool:
        """Whether there are accumulated scores to add to."""
        return self._sums is not None

    def join(self, queries: Tensor, new: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Put the queries of this pass behind those of earlier ones.

        Args:
            queries: `[batch, query_heads, tokens, head_dim]`.
            new: how many of them are real, in each row: the last ones.
            counts: how many queries each row is to have in the end.

        Returns:
            `[batch, query_heads, max(counts), head_dim]`
        """
        longest = max(counts)
        tokens = queries.shape[2]
        if min(new) == tokens:  # earlier ones are right-aligned too, so their ends fit
            if self._queries is not None and longest > tokens:
                queries = torch.cat([self._queries, queries], dim=2)
            return queries[:, :, queries.shape[2] - longest :]
        result = queries.new_zeros((*queries.shape[:2], longest, queries.shape[3]))
        for row, (real, count) in enumerate(zip(new, counts, strict=True)):
            own = queries[row, :, tokens - real :]
            if self._queries is not None:
                own = torch.cat([self._queries[row], own], dim=1)
            result[row, :, longest - count :] = own[:, own.shape[1] - count :]
        return result

    def remember(self, queries: Tensor | None) -> None:
        """Hold these queries, as `join` returned them, for the next pass; None: hold none."""
        self._queries = None if queries is None or queries.shape[2] == 0 else queries.clone()

    def add(
        self,
        at: slice,
        voters: Tensor,
        keys: Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Add the votes of some rows' queries to accumulated scores; see `prepare_sums`."""
        assert isinstance(self._score, AccumulatingScore)
        assert self._sums is not None
        mine = self._sums[at][..., self._sums.shape[-1] - keys.shape[2] :]
        mine.copy_(self._score.accumulate(voters, keys, None, scale, softcap, mine))

    def prepare_sums(self, queries: Tensor, keys: Tensor) -> None:
        """Make room for the sums of all rows in use: new ones start at nothing."""
        rows = keys.shape[2]
        if self._sums is None:
            group = queries.shape[1] // keys.shape[1]
            shape = (keys.shape[0], keys.shape[1], group, rows)
            self._sums = torch.zeros(shape, dtype=torch.float32, device=keys.device)
        else:
            self._sums = functional.pad(self._sums, (0, rows - self._sums.shape[-1]))

    def scores(
        self,
        at: slice,
        voters: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Score some rows' `[rows, kv_heads, N, head_dim]`: float32 `[rows, kv_heads, N]`."""
        assert self._score is not None
        if self._sums is not None:
            assert isinstance(self._score, AccumulatingScore)
            return self._score.reduce(self._sums[at][..., self._sums.shape[-1] - keys.shape[2] :])
        return self._score(voters, keys, values, None, scale, softcap)

    def align(self, order: Tensor | None, rows: int) -> None:
        """Follow the rows in use, so far `rows`, to where they were moved: see `RowStorage`."""
        if self._sums is not None and order is not None:
            sums = functional.pad(self._sums, (0, rows - self._sums.shape[-1]))
            index = order[:, None, None].expand(-1, *sums.shape[1:3], -1)
            self._sums = sums.gather(-1, index)

    def keep(self, chosen: Sequence[Tensor], rows: int) -> None:
        """Keep the sums of what stays: `[rows, kv_heads, kept]` for each part of the batch."""
        if self._sums is None:
            return
        parts = []
        start = 0
        for indices in chosen:
            part = self._sums[start : start + indices.shape[0]]
            start += indices.shape[0]
            index = indices[:, :, None].expand(-1, -1, part.shape[2], -1)
            parts.append(functional.pad(part.gather(-1, index), (rows - indices.shape[-1], 0)))
        self._sums = torch.cat(parts)

    def forget_sums(self) -> None:
        """Let go of accumulated scores."""
        self._sums = None

    def take_rows(self, take: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows of the batch by what `take` makes of them."""
        self._queries = None if self._queries is None else take(self._queries)
        self._sums = None if self._sums is None else take(self._sums)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is held, by name, to be given to `restore`."""
        held = {"queries": self._queries, "sums": self._sums}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def restore(self, held: dict[str, Tensor]) -> None:
        """Hold these tensors, themselves."""
        self._queries, self._sums = held.get("queries"), held.get("sums")

    def copy(self) -> Votes:
        """Return an independent copy."""
        result = Votes(self._score)
        result._queries = None if self._queries is None else self._queries.clone()
        result._sums = None if self._sums is None else self._sums.clone()
        return result
